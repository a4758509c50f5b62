"""From the word that names a side – a file, a folder, `defaults`, `baseline` – to its flags; it starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.comparison.lock import Lock, lock_of
from tuner.documents import Node, read_yaml
from tuner.errors import InputError
from tuner.finish import Decision
from tuner.records import Config
from tuner.serve_args import ServeFlags, parse_argv
from tuner.store import ResultsFolder
from tuner.study import read_study

DEFAULTS, BASELINE = "defaults", "baseline"
WORDS = (DEFAULTS, BASELINE)
"""Sides that are no file: vLLM's defaults, and what the other side's study started from."""

_MODEL_KEYS = ("model", "model_tag", "model-tag")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a configuration on one vLLM."""

    name: str  # short, for tables
    source: str  # as the user named it
    vllm: str  # absolute path of the executable
    vllm_version: str
    config: Config  # without the flags that all sides share
    variables: Mapping[str, str] = field(default_factory=dict)  # that its export carries


@dataclass(frozen=True, slots=True)
class Source:
    """What a word of the command line leads to. `config` holds every flag, `fixed` those given for every trial."""

    word: str
    config: Config
    model: str | None = None
    fixed: Config = field(default_factory=dict)
    baseline: Config | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    lock: Lock | None = None
    path: Path | None = None  # the configuration file
    study: ResultsFolder | None = None


def open_source(word: str, flags: ServeFlags) -> Source:
    """The flags behind one word, checked against a vLLM; InputError for what is neither file, folder nor word."""
    path = Path(word)
    if word in WORDS and not path.exists():
        return Source(word, {})
    if path.is_dir():
        return _of_study(word, ResultsFolder(path))
    if not path.is_file():
        raise InputError(
            where="command line",
            field="configuration",
            value=word,
            rule="is neither a file, nor a results folder, nor one of `defaults` and `baseline`",
            remedy="Check the path, such as results/NAME/best.yaml or results/NAME.",
        )
    model, config = read_configuration(path, flags)
    lock = lock_of(path)
    study = ResultsFolder(path.parent) if (path.parent / "study.json").is_file() else None
    return Source(
        word,
        config,
        model,
        fixed={} if lock is None else lock.fixed,
        baseline=None if lock is None else {**lock.fixed, **lock.baseline},
        variables={} if lock is None else lock.variables,
        lock=lock,
        path=path,
        study=study,
    )


def read_configuration(path: Path, flags: ServeFlags) -> tuple[str | None, Config]:
    """Model and flags of a file as `vllm serve --config` reads it; InputError for what this vLLM would refuse."""
    words: list[str] = []
    model = None
    for key, node in read_yaml(path).mapping().items():
        if key in _MODEL_KEYS:
            model = node.text()
        else:
            words += _words(key, node, flags)
    return model, parse_argv(words, flags, str(path))


def against(source: Source, other: Source) -> Config:
    """Every flag of `source` when it is compared with `other`, which gives a word its meaning."""
    if source.word == DEFAULTS and source.path is None:
        return other.fixed
    if source.word == BASELINE and source.path is None:
        if other.baseline is None:
            raise InputError(
                where="command line",
                field="configuration",
                value=BASELINE,
                rule="means what the other side's study started from, but the other side tells of none",
                remedy="Name a results folder or an exported file on the other side, or write `defaults`.",
            )
        return other.baseline
    return source.config


def divide(
    wholes: Sequence[Config], given: Config, fixed: Sequence[Config]
) -> tuple[dict[str, bool | int | float | str], list[Config]]:
    """Flags that all sides share because somebody fixed them, and what is left of each side.

    `given`: after `--`, for all sides; InputError where a side says otherwise. `fixed`: those of each side's study.
    """
    for whole in wholes:
        for name, value in given.items():
            if whole.get(name, value) != value:
                raise InputError(
                    where="command line, after `--`",
                    field=f"--{name}",
                    value=value,
                    rule=f"is {whole[name]} in one of the configurations that are compared",
                    remedy="Leave it out after `--`, or take it out of the file.",
                )
    candidates = {name: value for names in fixed for name, value in names.items()}
    shared = {name: value for name, value in candidates.items() if all(w.get(name) == value for w in wholes)}
    common = {**shared, **given}
    return common, [{n: v for n, v in whole.items() if n not in common} for whole in wholes]


def _of_study(word: str, folder: ResultsFolder) -> Source:
    """The winner of a study; InputError where it has none."""
    file = read_study(folder)
    definition, result = file.definition, file.result
    if result is None or result.conclusion.decision is Decision.NO_FEASIBLE:
        raise InputError(
            where=str(folder.root),
            field="study.json",
            value="no verdict" if result is None else str(result.conclusion.decision),
            rule="has no configuration to compare",
            remedy=f"Finish the study (`tune run --resume {folder.root}`), or name a configuration file.",
        )
    return Source(
        word,
        {**definition.fixed, **result.config},
        definition.model,
        fixed=definition.fixed,
        baseline={**definition.fixed, **definition.baseline},
        lock=lock_of(folder.root / "best.yaml"),
        study=folder,
    )


def _words(key: str, node: Node, flags: ServeFlags) -> list[str]:
    """One entry as words: a switch by its spelling, a list as several, anything else as its text."""
    root, dot, inner = key.partition(".")
    name, value = root.replace("_", "-"), node.value
    spelling = f"--{name}{dot}{inner}"
    if isinstance(value, bool):
        flag = flags.get(flags.spellings.get(spelling, name))
        if value:
            return [spelling]
        if flag is None or flag.negation is None:
            node.fail("has no opposite, so `false` means nothing", "Leave it out.")
        return [flag.negation if spelling != flag.negation else f"--{flag.name}"]
    if isinstance(value, list):
        return [spelling, *(str(item) for item in value)] if value else []
    if value is None:
        node.fail("has no value", "Write its value, or leave it out.")
    if isinstance(value, dict):
        node.fail("must be one value or a list", f"Write the JSON as text: {key}: '{{\"key\": value}}'.")
    return [spelling, str(value)]
