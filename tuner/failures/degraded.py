"""What a server that runs says it does instead of what was asked for; it calls nothing a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tuner.failures.log import parse
from tuner.failures.rule import Judgement
from tuner.failures.surroundings import degradations
from tuner.records import KnobValue


def not_honoured(log_text: str, asked: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """One sentence for every knob of `asked` that the start-up log says is not in effect, with the reason it gives.

    What vLLM decides about settings that nobody asked for is no degradation, and neither is one that was asked to be
    off and is.
    """
    found: dict[str, str] = {}
    for judgement, _ in degradations(parse(log_text)):
        for knob in _concerned(judgement, asked):
            found.setdefault(knob, f"{knob}: {judgement.explanation}")
    return tuple(found.values())


def _concerned(judgement: Judgement, asked: Mapping[str, KnobValue]) -> Iterator[str]:
    words = {word.strip("-").replace("_", "-") for word in re.findall(r"[a-z0-9_-]+", judgement.explanation.lower())}
    for knob, value in asked.items():
        direction = judgement.moves.get(knob)
        if direction is not None:
            if not isinstance(value, bool) or value is not (direction == "on"):
                yield knob
        elif judgement.kind == "flag-ignored" and knob in words:
            yield knob
