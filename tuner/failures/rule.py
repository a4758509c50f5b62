"""The shape of a rule and what a rule may know; holds no rule of its own.

A rule is a row of a table: patterns, a verdict and plain words. Where text alone cannot decide (the same sentence means
a neighbour or a greedy configuration, depending on two numbers) its `judge` refines the row from the numbers and facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tuner.failures.log import Line, Log
from tuner.records import Verdict

EXACT, KNOWN, FAMILY, WRAPPER = 4, 3, 2, 1
"""Weights: refines another known text · a known text · a family of texts · says only that something else failed."""

Moves = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """What the tuner knows beyond the log. Everything is optional: a log on its own is judged too."""

    idle_free_gib: float | None = None  # free device memory when the study began, nothing of ours running
    launch_free_gib: float | None = None  # free device memory right before this launch
    device_gib: float | None = None  # total device memory
    other_processes: tuple[int, ...] = ()  # processes on our device that are not ours
    stop_requested: bool = False  # the tuner had asked this server to stop
    timed_out: bool = False  # a deadline of the tuner passed
    log_silent: bool = False  # and the log had stopped growing
    no_progress: bool = False  # answers HTTP, produces no tokens
    process_dead: bool = False  # its main process or an engine is gone from the process table
    port_owner: str | None = None  # who listens on our port, where it is not our server
    disk_free_bytes: int | None = None  # smallest of the file systems in use
    retries: int | None = 0  # how often this configuration was tried again; None: a log on its own, nobody retries
    known_good: bool = False  # this very configuration has started before in this study
    searched: frozenset[str] = frozenset()  # knobs that the search chose in this trial; all others are the user's


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule makes of a line."""

    kind: str
    verdict: Verdict
    explanation: str
    remedy: str
    moves: Moves = field(default_factory=dict)
    violation: float = 1.0

    def but(
        self,
        *,
        kind: str | None = None,
        verdict: Verdict | None = None,
        explanation: str | None = None,
        remedy: str | None = None,
        moves: Moves | None = None,
        violation: float | None = None,
    ) -> Judgement:
        """A copy with what is not None replaced; a violation is brought into its range."""
        return replace(
            self,
            kind=self.kind if kind is None else kind,
            verdict=self.verdict if verdict is None else verdict,
            explanation=self.explanation if explanation is None else explanation,
            remedy=self.remedy if remedy is None else remedy,
            moves=self.moves if moves is None else moves,
            violation=self.violation if violation is None else bounded(violation),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One matching line in its surroundings."""

    match: re.Match[str]
    line: Line
    log: Log
    serving: bool  # the server had been ready before this line
    facts: FailureFacts

    def number(self, group: str) -> float | None:
        """A named group as a number; None where it did not take part or is none."""
        return number(self.match.groupdict().get(group))

    def argument(self, name: str) -> float | None:
        """A numeric vLLM argument by Python name, where the log printed it as not default."""
        value = self.log.arguments.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def first_time_transient(self, otherwise: Verdict) -> Verdict:
        """One occurrence proves nothing about a configuration; the second one does."""
        return otherwise if self.facts.retries else Verdict.TRANSIENT


@dataclass(frozen=True, slots=True)
class Rule:
    """One row. Texts may name the groups of the pattern: `{need}`."""

    kind: str
    verdict: Verdict
    patterns: tuple[re.Pattern[str], ...]
    explanation: str
    remedy: str
    moves: Moves = field(default_factory=dict)
    weight: int = KNOWN
    judge: Callable[[Case, Judgement], Judgement] | None = None

    def search(self, text: str) -> re.Match[str] | None:
        for pattern in self.patterns:
            if match := pattern.search(text):
                return match
        return None

    def judgement(self, case: Case) -> Judgement:
        groups = {name: value.strip() if value else "?" for name, value in case.match.groupdict().items()}
        plain = Judgement(
            self.kind, self.verdict, self.explanation.format(**groups), self.remedy.format(**groups), self.moves
        )
        return plain if self.judge is None else self.judge(case, plain)


def rule(
    kind: str,
    verdict: Verdict,
    *patterns: str,
    explanation: str,
    remedy: str,
    moves: Moves | None = None,
    weight: int = KNOWN,
    judge: Callable[[Case, Judgement], Judgement] | None = None,
) -> Rule:
    """A row of the table, its patterns compiled."""
    return Rule(kind, verdict, tuple(map(re.compile, patterns)), explanation, remedy, moves or {}, weight, judge)


def number(text: str | None) -> float | None:
    """`19.77`, `131,072` or `-15.28`; None for anything else."""
    try:
        return None if text is None else float(text.replace(",", "").rstrip("."))
    except ValueError:
        return None


def bounded(violation: float) -> float:
    """A relative size above zero that one absurd number cannot make dominate a search."""
    return min(max(violation, 1e-3), 10.0) if violation == violation else 1.0


def excess(need: float | None, have: float | None) -> float | None:
    """need ÷ have − 1, where both are known."""
    if need is None or have is None:
        return None
    return need / have - 1 if have > 0 else 10.0


def transient_at_first(otherwise: Verdict) -> Callable[[Case, Judgement], Judgement]:
    """A judge for what is worth exactly one more try."""

    def judge(case: Case, judgement: Judgement) -> Judgement:
        return judgement.but(verdict=case.first_time_transient(otherwise))

    return judge


def by_ratio(need: str, have: str) -> Callable[[Case, Judgement], Judgement]:
    """A judge that takes the violation from two groups of the pattern."""

    def judge(case: Case, judgement: Judgement) -> Judgement:
        return judgement.but(violation=excess(case.number(need), case.number(have)))

    return judge
