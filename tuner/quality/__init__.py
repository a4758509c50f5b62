"""Whether answers stay close to the baseline's: prompts, requests, distances and their verdict; it sends nothing."""

from tuner.quality.answers import Answer, Answers, forcing_body, generation_body, read_forced, read_generation
from tuner.quality.judge import Closeness, Comparison, Tolerance, compare
from tuner.quality.prompts import LEAST, Message, PromptSet, built_in, load_prompts
from tuner.quality.scores import scores

__all__ = [
    "LEAST",
    "Answer",
    "Answers",
    "Closeness",
    "Comparison",
    "Message",
    "PromptSet",
    "Tolerance",
    "built_in",
    "compare",
    "forcing_body",
    "generation_body",
    "load_prompts",
    "read_forced",
    "read_generation",
    "scores",
]
