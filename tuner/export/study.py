"""From a results folder to exported files; a study keeps what exporting needs, so that no vLLM must be at hand."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import EnvironmentFault, InputError
from tuner.export.deployment import Deployment, deployment, to_export
from tuner.export.write import write
from tuner.finish import Decision
from tuner.serve_args import ServeFlags
from tuner.server import find_vllm, telling_environment
from tuner.store import ResultsFolder, dumps, loads, read_text, write_atomic
from tuner.study.inputs import kept
from tuner.study.result import StudyFile, read_study

AT_THE_END = ("vllm", "shell", "json")
"""Formats that every study ends with."""


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The vLLM of a study: its flags, and the environment variables that changed how it ran."""

    flags: ServeFlags
    variables: Mapping[str, str]


def write_best(file: StudyFile, folder: ResultsFolder, flags: ServeFlags) -> tuple[Path, ...]:
    """The verified configuration into the study's own folder; nothing where no configuration keeps the SLO.

    A simulated study is written too, and says so at the top of every file. Called by the process that ran the study,
    whose environment its servers had.
    """
    if file.result is None or file.result.conclusion.decision is Decision.NO_FEASIBLE:
        return ()
    served = ServedBy(flags, telling_environment(os.environ))
    write_atomic(_served_file(folder), dumps(served))
    return write(_deployment(file, folder, served, None, forced=file.result.simulated), AT_THE_END, flags, folder.root)


def export(
    folder: ResultsFolder, formats: Sequence[str], out: Path, *, trial: int | None = None, forced: bool = False
) -> tuple[Path, ...]:
    """Write `formats` (keys of `FORMATS`) of a study's winner, or of `trial`, into `out`; returns the paths.

    InputError for what was not verified, unless `forced`; EnvironmentFault where the study has not kept its vLLM's
    flags (it does so with its verdict) and that vLLM is gone.
    """
    file = read_study(folder)
    path = _served_file(folder)
    if path.is_file():
        served = loads(ServedBy, read_text(path), str(path))
    else:
        # Asking takes seconds and needs the executable: what is refused anyway is refused before.
        to_export(file, folder.trials(), trial, forced=forced)
        served = ServedBy(_flags_of(file, folder), {})
    return write(_deployment(file, folder, served, trial, forced=forced), formats, served.flags, out)


def _flags_of(file: StudyFile, folder: ResultsFolder) -> ServeFlags:
    vllm = file.definition.vllm
    try:
        return find_vllm(vllm).flags
    except InputError as error:
        raise EnvironmentFault(
            f"{folder.root}: the study has not kept the flags of its vLLM, which it does with its verdict, and {vllm} "
            f"is not on this machine. Export where it is, or finish the study: `tune run --resume {folder.root}`."
        ) from error


def _deployment(
    file: StudyFile, folder: ResultsFolder, served: ServedBy, trial: int | None, *, forced: bool
) -> Deployment:
    return deployment(
        file,
        kept(folder).slo,
        folder.trials(),
        served.flags,
        trial=trial,
        vllm_path=file.definition.vllm,
        variables=served.variables,
        forced=forced,
    )


def _served_file(folder: ResultsFolder) -> Path:
    return folder.inputs / "served-by.json"
