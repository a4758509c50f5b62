"""What an export says, whatever its format: the flags, what each was measured to do, and where that was found out.

It writes no file and decides nothing; it refuses configurations whose claim was not verified.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.errors import InputError
from tuner.export.rates import RatePair, Wording, rate_pairs, standing, wording
from tuner.finish import Decision, FlagEffect, changed_flags
from tuner.quality import Closeness, Comparison
from tuner.records import Config, EnvironmentFacts, Estimate, KnobValue, Slo, TrialRecord, TrialState
from tuner.secrecy import HIDDEN, without_secrets
from tuner.serve_args import ServeFlags, merged, to_argv
from tuner.server.command import holds_secret, tunes
from tuner.study.result import StudyFile, StudyResult

DEFAULT_STARTUP_S = 150.0
"""Launch to ready where no start was recorded; a first start with compilation on a GPU takes this long."""

PREFIX = "enable-prefix-caching"
NOT_SHOWN = "not shown to matter; kept because leaving it out was not verified"
GIVEN = "given by the user, the same in every trial"


@dataclass(frozen=True, slots=True)
class ExportedFlag:
    """One flag of the configuration. `words` is its spelling on a command line of the vLLM it was measured with."""

    name: str  # keys of a JSON flag are merged under its name
    value: KnobValue
    words: tuple[str, ...]
    note: str  # its measured effect, or why it is there


@dataclass(frozen=True, slots=True)
class ReturnedFlag:
    """A flag of the baseline that the configuration leaves out, so that vLLM's default holds again."""

    name: str
    baseline: KnobValue
    note: str  # its measured effect

    @property
    def change(self) -> str:
        """`--max-num-seqs 2 → vLLM's default`."""
        value = str(self.baseline).lower() if isinstance(self.baseline, bool) else str(self.baseline)
        return f"--{self.name} {value} → vLLM's default"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A configuration ready to be written down in any format."""

    study: str
    trial: int
    model: str
    flags: tuple[ExportedFlag, ...]
    returned: tuple[ReturnedFlag, ...]
    withheld: tuple[str, ...]  # flags left out because their value is a secret
    verdict: str
    verified: bool
    simulated: bool
    gain: Estimate | None  # of the objective, over the baseline
    objective: str
    wording: Wording  # of the numbers in `classes`
    classes: Mapping[str, RatePair]
    slo: Slo
    environment: EnvironmentFacts
    vllm_path: str
    variables: Mapping[str, str]
    gpus: int
    startup_s: float  # longest start measured
    weights_bytes: float | None
    prefix_words: tuple[str, ...]  # prefix caching as it was in effect; charts that default it otherwise must be told
    digests: Mapping[str, str]
    tuner_version: str
    warnings: tuple[str, ...] = field(default=())
    quality: Comparison | None = None  # of the answers with the baseline's; None where no lossy knob is changed
    fixed: Config = field(default_factory=dict)  # those of the flags that the user gave for every trial
    baseline: Config = field(default_factory=dict)  # what the study started from and compared with
    speed: str = "normal"  # measuring preset of the capacities
    model_folder: str | None = None  # absolute, where the model is a folder; None: a hub name
    runs: tuple[Mapping[str, float], ...] = ()  # capacity by workload of each run that stands for the configuration

    @property
    def source(self) -> str:
        """What vLLM loads the model from, in whatever folder it is started."""
        return self.model_folder or self.model

    @property
    def words(self) -> tuple[str, ...]:
        """Everything after `vllm serve MODEL`."""
        return tuple(word for flag in self.flags for word in flag.words)

    @property
    def config(self) -> Config:
        return {flag.name: flag.value for flag in self.flags}


def deployment(
    study: StudyFile,
    slo: Slo,
    trials: Sequence[TrialRecord],
    flags: ServeFlags,
    *,
    trial: int | None = None,
    vllm_path: str = "vllm",
    variables: Mapping[str, str] | None = None,
    forced: bool = False,
) -> Deployment:
    """The winner of a study (or `trial`), ready to be written; InputError for what is not verified unless `forced`.

    `trials`: every record of the study. `flags`: of the vLLM it was measured with. `vllm_path`: absolute, for formats
    that need one. `variables`: environment of the servers as recorded.
    """
    definition, result = study.definition, study.result
    winner = None if result is None else result.conclusion.winner
    number, chosen, warnings = to_export(study, trials, trial, forced=forced)
    quality = None if result is None else result.quality.get(number)
    verified = result is not None and number == winner
    config = result.config if result is not None and verified else chosen[0].config
    tuned = {name: value for name, value in config.items() if definition.fixed.get(name) != value}
    words = wording(definition.objective, definition.rate_rps)
    notes = _notes(tuned, definition.baseline, result, number, words.short)
    exported, withheld = _flags(definition.fixed, tuned, flags, notes)
    left = [name for name in definition.baseline if name not in config and name not in definition.fixed]
    return Deployment(
        study=definition.name,
        trial=number,
        model=definition.model,
        flags=exported,
        returned=tuple(ReturnedFlag(name, definition.baseline[name], notes[name]) for name in left),
        withheld=withheld,
        verdict="not finished" if result is None else str(result.conclusion.decision),
        verified=verified,
        simulated=any(record.simulated for record in chosen),
        gain=None if result is None else result.conclusion.gains.get(number),
        objective=definition.objective,
        wording=words,
        classes=rate_pairs(study, trials, number),
        slo=slo,
        environment=study.environment,
        vllm_path=vllm_path,
        variables=_variables(variables or {}),
        gpus=len(definition.gpus),
        startup_s=max((record.phases.launch_s for record in chosen), default=0.0) or DEFAULT_STARTUP_S,
        weights_bytes=next((r.startup["weights_gib"] * 2**30 for r in chosen if "weights_gib" in r.startup), None),
        prefix_words=to_argv({PREFIX: _prefix_caching(exported, chosen)}, flags) if PREFIX in flags else (),
        digests={
            "slo": definition.slo_digest,
            "space": definition.space_digest,
            "environment": study.environment.digest,
            **({"model": definition.model_revision} if definition.model_revision else {}),
            **{f"workload {name}": digest for name, digest in definition.workload_digests.items()},
        },
        tuner_version=definition.tuner_version,
        warnings=warnings,
        quality=quality,
        fixed={name: value for name, value in definition.fixed.items() if name not in withheld},
        baseline=definition.baseline,
        speed=definition.speed,
        model_folder=_folder(definition.model),
        runs=tuple(
            {name: capacity.rate_rps for name, capacity in record.capacities.items()}
            for record in standing(study, trials, number)[1]
        ),
    )


def to_export(
    study: StudyFile, trials: Sequence[TrialRecord], trial: int | None, *, forced: bool
) -> tuple[int, list[TrialRecord], tuple[str, ...]]:
    """The trial to export, its records and what speaks against it; InputError for what must not be exported."""
    definition, result = study.definition, study.result
    winner = None if result is None else result.conclusion.winner
    number = winner if trial is None else trial
    chosen = [record for record in trials if record.number == number]
    if number is None or not chosen:
        raise InputError(
            where=definition.name,
            field="trial",
            value=number,
            rule="no such trial was measured" if trial is not None else _no_winner(result),
            remedy=f"Measured are {_numbers(trials)}; name one with --trial N.",
        )
    quality = None if result is None else result.quality.get(number)
    warnings = _objections(number, chosen, result, quality)
    if warnings and not forced:
        raise InputError(
            where=definition.name,
            field="trial",
            value=number,
            rule="; ".join(warnings),
            remedy="Finish and verify the study, or export all the same with --force.",
        )
    return number, chosen, warnings


def _no_winner(result: StudyResult | None) -> str:
    return "the study has no verdict yet, so it has no winner" if result is None else "the study has no winner"


def _objections(
    number: int, chosen: Sequence[TrialRecord], result: StudyResult | None, quality: Comparison | None
) -> tuple[str, ...]:
    found = []
    if quality is not None and quality.verdict is not Closeness.EQUIVALENT:
        found.append(f"its answers are not shown to be the baseline's ({quality.verdict}: {quality.reason})")
    if any(record.simulated for record in chosen):
        found.append("it was measured on the simulator, which says nothing about vLLM")
    if result is None:
        found.append("the study has not reached its verdict, so nothing is verified")
    elif result.conclusion.decision is Decision.NO_FEASIBLE:
        found.append("no configuration kept the SLO")
    elif number != result.conclusion.winner:
        found.append(f"it is not the verified winner, which is trial {result.conclusion.winner}")
    if not any(record.state is TrialState.COMPLETE for record in chosen):
        found.append(f"it never ran to the end ({chosen[-1].state})")
    return tuple(found)


def _flags(
    fixed: Config, tuned: Config, known: ServeFlags, notes: Mapping[str, str]
) -> tuple[tuple[ExportedFlag, ...], tuple[str, ...]]:
    exported, withheld = [], []
    whole = {**fixed, **tuned}
    for name, value in merged(whole).items():
        words = to_argv({name: value}, known)
        if holds_secret(words):
            withheld.append(name)
            continue
        knobs = [knob for knob in whole if knob == name or knob.startswith(f"{name}.")]
        note = "; ".join(dict.fromkeys(notes.get(knob, GIVEN) for knob in knobs))
        exported.append(ExportedFlag(name, value, words, note))
    return tuple(exported), tuple(withheld)


def _notes(tuned: Config, baseline: Config, result: StudyResult | None, number: int, noun: str) -> dict[str, str]:
    """What each flag was measured to do, by name; those of the baseline that are left out included."""
    verified = result is not None and number == result.conclusion.winner
    by_flag = {effect.flag: effect for effect in result.effects} if result is not None and verified else {}
    gain = None if result is None else result.conclusion.gains.get(number)
    changed = changed_flags(tuned, baseline)
    notes = dict.fromkeys(tuned, "as in the baseline that the study started from")
    for name in changed:
        effect = by_flag.get(name)
        if len(changed) == 1 and gain is not None:
            notes[name] = f"{ratio_text(gain)} of the baseline's {noun}; the only difference"
        else:
            notes[name] = (
                "effect of this flag alone was not measured" if effect is None else effect_text(effect, baseline, noun)
            )
    return notes


def effect_text(effect: FlagEffect, baseline: Config, noun: str = "capacity") -> str:
    """What a flag of the verified configuration was measured to do; leaving it out returns it to the baseline."""
    without = "with the baseline's value" if effect.flag in baseline else "without it"
    if effect.effect is None:
        return f"needed: {without} the server does not run or keeps the SLO at no rate"
    told = f"{ratio_text(effect.effect)} of the {noun} {without}"
    return told if effect.matters else f"{told}: {NOT_SHOWN}"


def ratio_text(ratio: Estimate) -> str:
    """`1.42 times (95 %: 1.31 to 1.54, n = 3)`."""
    high = "unbounded" if math.isinf(ratio.high) else f"{ratio.high:.2f}"
    return f"{ratio.value:.2f} times (95 %: {ratio.low:.2f} to {high}, n = {ratio.n})"


def answers_text(comparison: Comparison) -> str:
    """`equivalent, compared with the baseline's on 48 prompts: …`."""
    return f"{comparison.verdict}, compared with the baseline's on {comparison.prompts} prompts: {comparison.reason}"


def _prefix_caching(flags: Sequence[ExportedFlag], records: Sequence[TrialRecord]) -> bool:
    given = next((flag.value for flag in flags if flag.name == PREFIX), None)
    if given is not None:
        return bool(given)
    return all(record.effective.get(PREFIX, True) is True for record in records)


def _folder(model: str) -> str | None:
    """As vLLM decides it: what exists as a folder is one, and anything else is a hub name."""
    if os.path.isabs(model):
        return model
    return str(Path(model).resolve()) if os.path.isdir(model) else None


def _variables(recorded: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in recorded.items()
        if tunes(name) and not name.startswith("VLLM_SIM_") and HIDDEN not in without_secrets(value)
    }


def _numbers(trials: Sequence[TrialRecord]) -> str:
    return ", ".join(str(number) for number in sorted({record.number for record in trials})) or "no trials"
