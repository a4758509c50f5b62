"""The search space: which knobs are tried with which values, and what of it the installed vLLM can do."""

from tuner.space.load import load_space, shipped_spaces
from tuner.space.model import STAGES, Kind, Knob, Scale, Space, make_space
from tuner.space.restrict import restrict

__all__ = ["STAGES", "Kind", "Knob", "Scale", "Space", "load_space", "make_space", "restrict", "shipped_spaces"]
