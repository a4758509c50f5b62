"""From a results folder to a written report; the only part of the room that touches files."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from tuner.documents import strict_json
from tuner.errors import EnvironmentFault
from tuner.records import TrialRecord, TrialState
from tuner.report.build import FINISHING, Material, build, objective
from tuner.report.model import Report
from tuner.report.recompute import Recomputed, recompute
from tuner.report.tables import TABLES, table
from tuner.store import ResultsFolder, dumps, write_atomic
from tuner.study.evaluate import evaluate
from tuner.study.inputs import Inputs, kept
from tuner.study.result import StudyFile, read_study

LASTING = (TrialState.COMPLETE, TrialState.INFEASIBLE)

LEAST_FOR_IMPORTANCE = 10
"""Complete search trials below which a share of variance is mostly chance."""

FORMATS = {"html": "report.html", "md": "report.md", "json": "report.json"}
"""Format to the file that it is written to by default, in the study's folder."""

TABLE_FORMATS = ("csv", "parquet")
"""Formats of the tables for analysis, one file a table."""


def load(folder: ResultsFolder) -> Report:
    """The report of the study in `folder`, finished or not; InputError where there is none."""
    file, inputs = read_study(folder), kept(folder)
    material = Material(file, inputs.slo, in_order(folder.trials()), {}, inputs.space)
    return build(replace(material, importance=_importance(file, inputs, material)))


def in_order(trials: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Trials as they ran."""
    return tuple(sorted(trials, key=lambda record: (record.started_at, record.number, record.replicate)))


def write(report: Report, folder: ResultsFolder, format_name: str, path: Path | None = None) -> tuple[Path, ...]:
    """Write the report in a format of `FORMATS` or `TABLE_FORMATS`; returns where.

    `path`: the file, or for tables the folder; by default in the study's own folder.
    """
    if format_name in TABLE_FORMATS:
        return _write_tables(report, folder, format_name, path or folder.root / "tables")
    target = path or folder.root / FORMATS[format_name]
    write_atomic(target, render(report, folder, format_name, target))
    return (target,)


def render(report: Report, folder: ResultsFolder, format_name: str, target: Path) -> str:
    """The text for a file at `target`, whose links lead to the study's records from there."""
    if format_name == "json":
        return strict_json(json.loads(dumps(report))) + "\n"
    base = Path(os.path.relpath(folder.root.resolve(), target.resolve().parent)).as_posix()
    base = "" if base == "." else f"{quote(base)}/"  # it becomes part of an address
    if format_name == "md":
        from tuner.report.markdown import markdown

        return markdown(report, base=base)
    from tuner.report.html import html

    return html(report, base=base)


def check(folder: ResultsFolder) -> Recomputed:
    """Every stored score against its raw requests."""
    return recompute(folder, folder.trials(), kept(folder).slo)


def _write_tables(report: Report, folder: ResultsFolder, format_name: str, out: Path) -> tuple[Path, ...]:
    trials, written = in_order(folder.trials()), []
    for name in TABLES:
        frame, content = table(name, report, trials, folder), io.BytesIO()
        if format_name == "csv":
            frame.to_csv(content, index=False)
        else:
            try:
                frame.to_parquet(content, index=False)
            except ImportError as error:
                raise EnvironmentFault(
                    "Parquet needs pyarrow: `pip install 'vllm-tune[parquet]'`, or take --format csv."
                ) from error
        written.append(out / f"{name}.{format_name}")
        write_atomic(written[-1], content.getvalue())
    return tuple(written)


def _importance(file: StudyFile, inputs: Inputs, material: Material) -> dict[str, float]:
    """Optuna's, over the search trials as the optimizer was told them; empty where they are too few to say anything."""
    from tuner.optimizer import Optimizer, Told

    logging.getLogger("optuna").setLevel(logging.WARNING)  # set only after Optuna has set its own
    searched = [r for r in material.trials if r.step.kind not in FINISHING and r.round is None and r.state in LASTING]
    if sum(record.state is TrialState.COMPLETE for record in searched) < LEAST_FOR_IMPORTANCE:
        return {}
    history = []
    for record in searched:
        value = objective(material, record)
        constraints = evaluate(record, None, material.weights).constraints
        history.append(Told(record, None if value is None else value.value, constraints))
    optimizer = Optimizer(
        inputs.space,
        name=file.definition.name,
        seed=file.definition.seed,
        baseline=file.definition.baseline,
        history=history,
        devices=max(1, len(file.definition.gpus)),
    )
    return optimizer.importances()
