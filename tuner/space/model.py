"""What a search space is: knobs, the values worth trying and under which conditions; it reads no file."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum

from tuner.documents import Node, digest
from tuner.records import KnobValue
from tuner.serve_args import version_tuple

STAGES = ("fit", "budget", "sequences", "caching", "scheduling", "execution", "parallel")
"""In the order in which an expert goes through them; `Knob.stage` is the index."""

_REQUIREMENT = re.compile(r"(>=|<=|<|>|==)\s*(\d+\.\d+(?:\.\d+)?)")


class Kind(StrEnum):
    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    CHOICE = "choice"


class Scale(StrEnum):
    """How values lie to each other."""

    LOG2 = "log2"  # doubling
    LINEAR = "linear"  # equal steps
    ORDERED = "ordered"  # listed numbers, neighbours are alike
    LIST = "list"  # names without an order


@dataclass(frozen=True, slots=True)
class Knob:
    """One tunable flag. `name` is the flag without dashes, or `flag.key` inside a JSON flag."""

    name: str
    kind: Kind
    values: tuple[KnobValue, ...]  # in the order of the scale
    scale: Scale
    stage: int
    coupled: tuple[str, ...] = ()  # knobs that may have to move with it
    lossy: bool = False  # may change what the model answers
    default: KnobValue | None = None  # as the help of the installed vLLM says; None: decided at the start
    note: str = ""
    devices: tuple[str, ...] = ("cuda", "cpu")
    min_devices: int = 1
    versions: str = ""  # such as `>=0.28, <0.31`
    explicit: bool = False  # named by the user, so that dropping it silently would be wrong

    @property
    def stage_name(self) -> str:
        return STAGES[self.stage]


@dataclass(frozen=True, slots=True)
class Space:
    """Knobs in the order of their stages."""

    name: str
    knobs: tuple[Knob, ...]
    digest: str


def make_space(name: str, knobs: list[Knob]) -> Space:
    ordered = tuple(sorted(knobs, key=lambda knob: knob.stage))
    return Space(name, ordered, digest([asdict(knob) for knob in ordered]))


def requirement(node: Node) -> str:
    """A version range, checked; raises `InputError`."""
    text = node.text()
    if not all(_REQUIREMENT.fullmatch(part.strip()) for part in text.split(",")):
        node.fail("is not a version range", "Write for example `>=0.28, <0.31`.")
    return text


def version_fits(version: str, versions: str) -> bool:
    own = version_tuple(version)
    for operator, bound in _REQUIREMENT.findall(versions):
        other = version_tuple(bound)
        holds = {">=": own >= other, "<=": own <= other, "<": own < other, ">": own > other, "==": own == other}
        if not holds[operator]:
            return False
    return True
