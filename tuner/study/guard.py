"""The quality guard of a study: whose answers are compared, and who may not win; the comparing is done by the trial.

The baseline's answers are the reference; a second baseline, on a fresh server, gives their own noise. In the search the
first trial with a new set of lossy values is compared, so that nothing is built on values that change the answers. In
the finish every contender with a lossy change is compared again, and only that decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.errors import InputError
from tuner.quality import Answers, Closeness, Comparison, PromptSet, compare
from tuner.records import Config, KnobValue, Proposal, QualityScores, StepKind, TrialRecord, TrialState
from tuner.space import Space
from tuner.store import ResultsFolder, loads, read_text
from tuner.trial import Examination

BASELINE_REPLICATES = 2
LEAST_EXCESS = 0.01  # an unresolved comparison bars from winning as a degraded one does
WORST_EXCESS = 10.0

Values = tuple[tuple[str, KnobValue | None], ...]
"""Lossy knobs that differ from the baseline; None: a default that vLLM decides at the start."""


class Guard:
    """Over the records of one study, which the caller passes in; it keeps none."""

    def __init__(self, space: Space, baseline: Config, prompts: PromptSet, folder: ResultsFolder) -> None:
        self._lossy = {knob.name: knob.default for knob in space.knobs if knob.lossy}
        self._baseline, self._prompts, self._folder = baseline, prompts, folder
        self._known: dict[tuple[Values, int], Comparison | None] = {}  # a search asks for thousands of configurations

    @property
    def active(self) -> bool:
        """Whether there is a lossy knob to be searched."""
        return bool(self._lossy)

    def values(self, config: Config) -> Values:
        """What a configuration changes that may change the answers; empty where nothing."""
        pairs = ((name, config.get(name, default), default) for name, default in self._lossy.items())
        return tuple((name, value) for name, value, default in pairs if value != self._baseline.get(name, default))

    # --- what a trial is asked -------------------------------------------------------------------------------

    def examination(self, proposal: Proposal, round_: int | None, records: Sequence[TrialRecord]) -> Examination | None:
        """What this replicate is asked about its answers; None: nothing."""
        reference, kind, values = self._reference(records), proposal.step.kind, self.values(proposal.config)
        if kind is StepKind.BASELINE:
            if reference is None:
                return Examination(self._prompts)
            return None if own_noise(records) else self._against(reference)
        if not self.active or not values or reference is None or kind is StepKind.ABLATION:
            return None
        known = self._latest(proposal.config, records) if round_ is not None else self._of_values(values, records)
        return self._against(reference) if known is None or known.refused else None

    def require_reference(self, records: Sequence[TrialRecord]) -> None:
        """InputError when the baseline ran, but its answers could not be had: nothing lossy could ever win."""
        ran = [r for r in records if r.step.kind is StepKind.BASELINE and r.state is TrialState.COMPLETE]
        refused = [r.quality.refused for r in ran if r.quality is not None and r.quality.refused]
        if self._reference(records) is not None or not refused:
            return
        raise InputError(
            where="quality guard",
            field="--allow-lossy",
            value=self._prompts.source,
            rule=f"the baseline's answers, which others have to be compared with, could not be had: {refused[-1]}",
            remedy="Give other prompts (--quality-prompts), or start anew without --allow-lossy.",
        )

    # --- what follows ----------------------------------------------------------------------------------------

    def admissible(self, config: Config, records: Sequence[TrialRecord]) -> bool:
        """Whether the search may try it: no values that were compared and are not the baseline's equal."""
        found = self._searched(config, records)
        return found is None or found.verdict is Closeness.EQUIVALENT

    def constraint(self, config: Config, records: Sequence[TrialRecord]) -> dict[str, float]:
        """For the optimizer: above 0 where the answers are not the same, by the relative excess over the limit."""
        found = self._searched(config, records)
        return {"quality": 0.0 if found is None else excess(found)}

    def comparisons(self, configs: Mapping[int, Config], records: Sequence[TrialRecord]) -> dict[int, Comparison]:
        """The verdicts of the finish on those contenders that change a lossy knob, by number."""
        found: dict[int, Comparison] = {}
        for number, config in configs.items():
            if self.values(config):
                scores = self._latest(config, records)
                found[number] = compare(scores, own_noise(records)) if scores is not None else _NEVER
        return found

    # --- inside ----------------------------------------------------------------------------------------------

    def _reference(self, records: Sequence[TrialRecord]) -> TrialRecord | None:
        return next(
            (r for r in records if r.quality is not None and r.quality.reference and not r.quality.refused), None
        )

    def _against(self, reference: TrialRecord) -> Examination:
        assert reference.quality is not None
        folder = self._folder.trial_folder(reference.number, reference.replicate).resolve()
        path = (folder / reference.quality.answers_file).resolve()
        if not path.is_relative_to(folder):  # what is no answers is quoted in the message
            raise InputError(
                where=str(folder / "trial.json"),
                field="quality.answers_file",
                value=reference.quality.answers_file,
                rule="must lie within the trial's folder",
                remedy="The record was altered; restore it.",
            )
        return Examination(self._prompts, loads(Answers, read_text(path), str(path)))

    def _searched(self, config: Config, records: Sequence[TrialRecord]) -> Comparison | None:
        """The verdict of the search on the lossy values of a configuration; None where they were not compared yet."""
        key = (self.values(config), sum(record.quality is not None for record in records))
        if key not in self._known:
            scores = self._of_values(key[0], records)
            self._known[key] = None if scores is None else compare(scores, own_noise(records))
        return self._known[key]

    def _of_values(self, values: Values, records: Sequence[TrialRecord]) -> QualityScores | None:
        """The first comparison that a trial of the search with these lossy values had."""
        if not values:
            return None
        same = (r for r in records if r.round is None and r.quality is not None and self.values(r.config) == values)
        scores = [r.quality for r in same if r.quality is not None]
        return next((s for s in scores if not s.refused), scores[-1] if scores else None)

    def _latest(self, config: Config, records: Sequence[TrialRecord]) -> QualityScores | None:
        """The latest comparison of this very configuration in the finish."""
        same = [r.quality for r in records if r.round is not None and r.quality is not None and r.config == config]
        return next((s for s in reversed(same) if not s.refused), same[-1] if same else None)


_NEVER = Comparison(Closeness.UNRESOLVED, "its answers were never compared", 0, 0)


def own_noise(records: Sequence[TrialRecord]) -> tuple[QualityScores, ...]:
    """The baseline's answers on further servers against the reference."""
    found = (r.quality for r in records if r.step.kind is StepKind.BASELINE and r.quality is not None)
    return tuple(scores for scores in found if not scores.reference and not scores.refused)


def barred(comparisons: Mapping[int, Comparison]) -> dict[int, str]:
    """Contenders that may not win, each with the reason."""
    return {
        number: f"trial {number} may not win, its answers are {_NAMES[found.verdict]}: {found.reason}"
        for number, found in comparisons.items()
        if found.verdict is not Closeness.EQUIVALENT
    }


_NAMES = {
    Closeness.DEGRADED: "not the baseline's (degraded)",
    Closeness.UNRESOLVED: "not shown to be the baseline's (unresolved)",
}


def excess(comparison: Comparison) -> float:
    """How far over the limit, relative; 0 for an equivalent one."""
    if comparison.verdict is Closeness.EQUIVALENT:
        return 0.0
    pairs = ((comparison.lost, comparison.lost_limit), (comparison.excess, comparison.excess_limit))
    over = [found.value / limit - 1 for found, limit in pairs if found is not None and limit is not None]
    return min(WORST_EXCESS, max([LEAST_EXCESS, *over]))
