"""`Optimizer`: asks for the next configuration and is told how it went; the only face of the room that knows Optuna."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import optuna

from tuner.optimizer import book, ledger
from tuner.optimizer.book import UNFINISHED, Told
from tuner.optimizer.policy import Advice, Entry, Knowledge, Policy, Settings
from tuner.optimizer.sampler import StepSampler, distributions, point_of
from tuner.optimizer.tracks import Point, Tracks, freeze
from tuner.records import Config, Proposal, Step, StepKind, TrialRecord, TrialState

if TYPE_CHECKING:
    import pandas

    from tuner.space import Space

ATTEMPTS = 3
"""Trials that a configuration gets while something else is at fault, before it is left alone."""
LOOKAHEAD = 20_000
"""Points looked at for one that is new, before the space counts as used up."""


class Optimizer:
    """Ask, measure, tell. Every `ask` that returns a proposal is exactly one trial, in Optuna too.

    `baseline` is the configuration of trial 0 (`{}`: vLLM's defaults), `enqueued` are the user's own, tried next.
    `taken` are numbers that something else than the search has used.
    `history` is what an earlier run of the study told; the Optuna storage is only a copy of it and is rebuilt whenever
    it says anything else. `admissible` refuses what is known to be impossible before a launch; it is never proposed.
    """

    @ledger.storage_errors()
    def __init__(
        self,
        space: Space,
        *,
        name: str,
        seed: int,
        storage: str | None = None,
        baseline: Config | None = None,
        enqueued: Sequence[Config] = (),
        history: Sequence[Told] = (),
        taken: Collection[int] = (),
        devices: int = 1,
        admissible: Callable[[Config], bool] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._space, self._seed, self._devices = space, seed, devices
        self._baseline, self._enqueued = dict(baseline or {}), tuple(dict(config) for config in enqueued)
        self._admissible, self._taken = admissible, frozenset(taken)
        self._settings = settings or Settings()
        self._advice: Advice = {}
        self._others: dict[int, Advice] = {}
        self._proposals: dict[int, Proposal] = {}
        self._told: dict[int, list[Told]] = {}
        self._running: dict[int, optuna.Trial] = {}
        self._tracks: Tracks | None = None
        self._known: Knowledge | None = None
        self._book: dict[int, Entry | None] = {}  # entries that are still true
        for told in sorted(history, key=lambda told: (told.record.number, told.record.replicate)):
            self._note(told)
        # A number without a record was killed before it could write one: a gap, which no sampler sees.
        trials = [
            ledger.frozen(self._told[n][0], self._tracks) if n in self._told else ledger.gap()
            for n in range(self._number())
        ]
        self._study = ledger.open_study(storage, name, space.digest, trials)
        self._sampler: StepSampler | None = None
        self._equip()

    # --- the loop --------------------------------------------------------------------------------------------

    @ledger.storage_errors()
    def ask(self) -> Proposal | None:
        """The next configuration; None when nothing is left that is worth a trial, or until the baseline is told."""
        if not self._proposals:
            step = Step(StepKind.BASELINE, {}, None, "what everything else is compared with")
            return self._propose(self._baseline, step)
        unfinished = self._unfinished()
        if unfinished is not None:
            return self._propose(unfinished.config, unfinished.step)
        if self._tracks is None or self._sampler is None:
            return None
        return self._ask_enqueued(self._tracks) or self._ask_next(self._tracks, self._sampler)

    @ledger.storage_errors()
    def tell(self, record: TrialRecord, objective: float | None, constraints: Mapping[str, float]) -> None:
        """One replicate's outcome. Further replicates of a number sharpen what is known; Optuna keeps the first.

        `objective` is relative to the baseline, positive, larger is better; of a screened trial it is the prediction.
        `constraints` are the relative excess over each limit of the SLO at the least rate measured, <= 0 where kept.
        """
        told = Told(record, objective, dict(constraints))
        self._note(told)
        if len(self._told[record.number]) > 1:
            return
        trial = self._running.pop(record.number, None)
        if trial is not None:
            ledger.tell(self._study, trial, ledger.judge(told))
        else:
            self._study.add_trial(ledger.frozen(told, self._tracks))
            self._equip()

    def advise(self, moves: Advice, others: Mapping[int, Advice] | None = None) -> None:
        """Replace the diagnosis of the incumbent: knob to (`up` | `down` | `on` | `off`, confidence 0..1).

        `others`: those of other trials that were measured, by number; a step that only moved the bottleneck is followed
        by what helps against the new one.
        """
        self._advice = dict(moves)
        self._others = dict(others or {})

    # --- what is known ---------------------------------------------------------------------------------------

    @property
    def noise(self) -> float:
        """Relative spread of one measured objective."""
        knowledge = self._knowledge()
        return self._settings.noise if knowledge is None else knowledge.noise_of_one

    @property
    def incumbent(self) -> int | None:
        """Number of the trial that steps start from; None until something was measured."""
        knowledge = self._knowledge()
        return None if knowledge is None or knowledge.incumbent is None else knowledge.incumbent.number

    @property
    def screen_below(self) -> float:
        """Relative change against the incumbent's own measurement below which a prediction is clearly worse.

        The incumbent is the luckiest of many; what it measured is corrected to what it is expected to be.
        """
        knowledge = self._knowledge()
        best = None if knowledge is None else knowledge.incumbent
        if knowledge is None or best is None or best.value is None:
            return -self._settings.screen
        luck = max(0.0, best.value - knowledge.expected(best))
        return math.expm1(-self._settings.screen - luck)

    def expected(self, number: int) -> float | None:
        """A trial's objective after shrinkage: its own values and what its neighbours say; None if never measured."""
        knowledge = self._knowledge()
        entry = next((entry for entry in self._entries() if entry.number == number), None)
        if knowledge is None or entry is None or not entry.measured:
            return None
        return math.exp(knowledge.expected(entry))

    def told(self, number: int) -> tuple[Told, ...]:
        """Every replicate of a trial, in the order told; the incumbent's hold what screening needs."""
        return tuple(self._told.get(number, ()))

    def value(self, number: int) -> float | None:
        """Geometric mean of a trial's objective over its replicates; None where none was measured or predicted."""
        entry = next((entry for entry in self._entries() if entry.number == number), None)
        return None if entry is None or entry.value is None else math.exp(entry.value)

    def importances(self) -> dict[str, float]:
        """Share of the objective's variance that each knob explains; empty while too little was measured."""
        complete = self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
        if self._tracks is None or len({trial.value for trial in complete}) < 2:
            return {}
        return optuna.importance.get_param_importances(self._study)

    def trials_table(self) -> pandas.DataFrame:
        """Optuna's own table: number, value, state, parameters (indices of the frozen lists), step, reason, config."""
        return self._study.trials_dataframe(attrs=("number", "value", "state", "params", "user_attrs"))

    # --- inside ----------------------------------------------------------------------------------------------

    def _note(self, told: Told) -> None:
        record = told.record
        self._known = None
        self._book.pop(record.number, None)
        self._told.setdefault(record.number, []).append(told)
        self._proposals.setdefault(record.number, Proposal(record.number, record.config, record.step))
        if self._tracks is None and record.state not in UNFINISHED:
            configs = (self._baseline, *self._enqueued)
            self._tracks = freeze(self._space, record.effective, configs, self._devices)
            self._book.clear()

    def _equip(self) -> None:
        if self._tracks is not None and self._sampler is None:
            self._sampler = StepSampler(self._tracks, self._seed)
            self._study.sampler = self._sampler

    def _number(self) -> int:
        return 1 + max([*self._proposals, *self._taken], default=-1)

    def _propose(self, config: Config, step: Step) -> Proposal:
        """A planned configuration as the next trial, in Optuna too once its space is known."""
        proposal = Proposal(self._number(), dict(config), step)
        point = None if self._tracks is None else self._tracks.point(config)
        if self._tracks is not None and self._sampler is not None and point is not None:
            self._sampler.plan(point)
            return self._started(proposal, self._study.ask(distributions(self._tracks)))
        self._proposals[proposal.number] = proposal
        self._known = None
        return proposal

    def _unfinished(self) -> Proposal | None:
        """A configuration whose every trial so far failed through no fault of its own."""
        attempts: dict[str, list[Proposal]] = {}
        for _, proposal in sorted(self._proposals.items()):
            attempts.setdefault(repr(sorted(proposal.config.items())), []).append(proposal)
        for proposals in attempts.values():
            outcomes = [told.record.state for proposal in proposals for told in self._told.get(proposal.number, ())]
            pending = any(proposal.number not in self._told for proposal in proposals)
            if pending or any(state not in UNFINISHED for state in outcomes):
                continue
            # While nothing has run at all, this is the baseline: without it there is no study.
            if self._tracks is None or outcomes.count(TrialState.FAULT) < ATTEMPTS:
                return proposals[-1]
        return None

    def _ask_enqueued(self, tracks: Tracks) -> Proposal | None:
        tried = {entry.point for entry in self._entries()}
        for config in self._enqueued:
            point = tracks.point(config)
            if point is not None and point not in tried:
                changed = tracks.changes(tracks.default, point)
                return self._propose(config, Step(StepKind.USER, changed, None, "asked for by the user"))
        return None

    def _ask_next(self, tracks: Tracks, sampler: StepSampler) -> Proposal | None:
        def admissible(point: Point) -> bool:
            return self._admissible is None or self._admissible(tracks.config(point))

        knowledge = self._knowledge()
        if knowledge is None:
            return None
        policy = Policy(knowledge, self._advice, admissible, self._others)
        if policy.free_due() and (free := self._ask_free(tracks, sampler, policy)) is not None:
            return free
        candidate = policy.next()
        if candidate is None:
            if (free := self._ask_free(tracks, sampler, policy)) is not None:
                return free
            candidate = policy.next(free=False)
        if candidate is None:
            return None
        changed = tracks.changes(policy.origin.point, candidate.point)
        step = Step(candidate.kind, changed, policy.origin.number, candidate.reason)
        return self._propose(tracks.config(candidate.point), step)

    def _ask_free(self, tracks: Tracks, sampler: StepSampler, policy: Policy) -> Proposal | None:
        origin = policy.origin
        points = itertools.islice(tracks.everything(origin.point), LOOKAHEAD)
        fallback = next((point for point in points if policy.allowed(point)), None)
        if fallback is None:
            return None
        sampler.free(policy.allowed, policy.hopes, fallback)
        number = self._number()
        trial = self._study.ask(distributions(tracks))
        point = point_of(tracks, trial.params)
        reason = f"free step of TPE; {policy.outlook(point)}"
        step = Step(StepKind.FREE, tracks.changes(origin.point, point), origin.number, reason)
        return self._started(Proposal(number, tracks.config(point), step), trial)

    def _started(self, proposal: Proposal, trial: optuna.Trial) -> Proposal:
        self._running[proposal.number] = trial
        for key, value in ledger.attributes(proposal.config, proposal.step).items():
            trial.set_user_attr(key, value)
        self._proposals[proposal.number] = proposal
        self._known = None
        return proposal

    def _knowledge(self) -> Knowledge | None:
        """What is known now; thought over again only after something was asked or told."""
        if self._known is None and self._tracks is not None and (entries := self._entries()):
            self._known = Knowledge(self._tracks, entries, self._settings)
        return self._known

    def _entries(self) -> list[Entry]:
        if self._tracks is None:
            return []
        for number, proposal in self._proposals.items():
            if number not in self._book:
                self._book[number] = book.entry(proposal, self._told.get(number, ()), self._tracks)
        return [found for _, found in sorted(self._book.items()) if found is not None]
