"""The search: which configuration to measure next; the only room that knows Optuna, and it measures nothing itself."""

from tuner.optimizer.book import Told
from tuner.optimizer.optimizer import Optimizer
from tuner.optimizer.policy import Advice, Settings

__all__ = ["Advice", "Optimizer", "Settings", "Told"]
