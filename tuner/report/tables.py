"""A study as tables: trials, probes and requests, one row each, with documented columns and units; it selects nothing.

Column names carry their unit as everywhere (`_s`, `_rps`, `_tps`); docs/report.md describes every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.records import ClassMetrics, Probe, RequestResult, TrialRecord
from tuner.report.model import Report, TrialRow
from tuner.report.recompute import scored_window
from tuner.report.words import all_probes
from tuner.store import ResultsFolder

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("trials", "probes", "requests")

_LATENCIES = [
    f"{metric}_{part}_s"
    for metric in ("ttft", "tpot", "itl", "e2e")
    for part in ("mean", *(f"{p}{end}" for p in ("p50", "p95", "p99") for end in ("", "_low", "_high")))
]
_COLUMNS = {
    "trials": """
        number replicate round kind change reason from_trial state objective objective_low objective_high predicted
        failure_kind failure_verdict failure_cause started_at duration_s launch_s warm_up_s measure_s stop_s settle_s
        seed machine simulated config command
        """,
    "probes": f"""
        number replicate round workload class_name purpose rate_rps seed attempt ramp_s window_s wall_s started_at
        outcome margin valid invalid_because notes achieved_rps send_lag_p99_s client_cpu_share client_loop_lag_p99_s
        requests_file requests failed success success_low success_high attainment attainment_low attainment_high
        goodput_rps throughput_rps output_tps input_tps {" ".join(_LATENCIES)}
        """,
    "requests": """
        number replicate round requests_file workload purpose rate_rps scored index class_name status scheduled_s
        sent_s first_s last_s end_s send_lag_s ttft_s tpot_s e2e_s input_tokens output_tokens planned_input_tokens
        planned_output_tokens cached_tokens chunks longest_gap_s error
        """,
}
COLUMNS = {name: tuple(words.split()) for name, words in _COLUMNS.items()}
"""What every table has, whatever happened; those with a name in them (`knob.NAME`) come as they are met."""

Row = dict[str, Any]


def table(name: str, report: Report, trials: Sequence[TrialRecord], folder: ResultsFolder) -> pd.DataFrame:
    """One of `TABLES` as a data frame. `requests` reads every raw file that is there, and can be large."""
    import pandas as pd

    if name == "trials":
        rows = trial_rows(report, trials)
    elif name == "probes":
        rows = [row for record in trials for row in probe_rows(record)]
    else:
        rows = [row for record in trials for row in request_rows(record, folder)]
    frame = pd.DataFrame(rows)
    # Also where there is no row, or none with scores: a reader finds every column that is always meant to be there.
    frame = frame.reindex(columns=[*dict.fromkeys((*COLUMNS[name], *frame.columns))])
    for column in frame.columns:
        if column.startswith("knob.") and len({type(value) for value in frame[column].dropna()}) > 1:
            # A knob that takes `auto` as well as numbers: a column of Parquet has one type.
            frame[column] = frame[column].map(str, na_action="ignore")
    return frame


def trial_rows(report: Report, trials: Sequence[TrialRecord]) -> list[Row]:
    """One row a replicate."""
    shown = {(row.ref.number, row.ref.replicate): row for row in report.trials}
    return [_trial(record, shown[record.number, record.replicate]) for record in trials]


def probe_rows(record: TrialRecord) -> list[Row]:
    """One row a probe and class (several for a mix; one without scores for what is not scored)."""
    rows = []
    for probe in all_probes(record):
        scores: list[ClassMetrics | None] = [*probe.classes.values()]
        rows += [_probe(record, probe, metrics) for metrics in scores or [None]]
    return rows


def request_rows(record: TrialRecord, folder: ResultsFolder) -> Iterable[Row]:
    """One row a request, from the raw files that are there."""
    for probe in all_probes(record):
        if (folder.trial_folder(record.number, record.replicate) / probe.requests_file).is_file():
            requests = folder.requests(record, probe.requests_file)
            window = scored_window(probe, requests)
            for request in requests:
                yield _request(record, probe, request, window)


def _trial(record: TrialRecord, shown: TrialRow) -> Row:
    phases = record.phases
    row: Row = {
        "number": record.number,
        "replicate": record.replicate,
        "round": record.round,
        "kind": str(record.step.kind),
        "change": shown.change,
        "reason": record.step.reason,
        "from_trial": record.step.from_trial,
        "state": str(record.state),
        "objective": None if shown.objective is None else shown.objective.value,
        "objective_low": None if shown.objective is None else shown.objective.low,
        "objective_high": None if shown.objective is None else shown.objective.high,
        "predicted": record.predicted,
        "failure_kind": None if record.failure is None else record.failure.kind,
        "failure_verdict": None if record.failure is None else str(record.failure.verdict),
        "failure_cause": None if record.failure is None else record.failure.cause,
        "started_at": record.started_at,
        "duration_s": record.ended_at - record.started_at,
        "launch_s": phases.launch_s,
        "warm_up_s": phases.warm_up_s,
        "measure_s": phases.measure_s,
        "stop_s": phases.stop_s,
        "settle_s": phases.settle_s,
        "seed": record.seed,
        "machine": record.machine,
        "simulated": record.simulated,
        "config": json.dumps(dict(record.config)),
        "command": " ".join(record.command),
    }
    for name, capacity in record.capacities.items():
        row[f"capacity_rps.{name}"] = capacity.rate_rps
        row[f"capacity_log_sd.{name}"] = capacity.log_sd
        row[f"capacity_bound.{name}"] = str(capacity.bound)
    row |= {f"knob.{name}": value for name, value in record.config.items()}
    row |= {f"startup.{name}": value for name, value in record.startup.items()}
    return row


def _probe(record: TrialRecord, probe: Probe, metrics: ClassMetrics | None) -> Row:
    row: Row = {
        "number": record.number,
        "replicate": record.replicate,
        "round": record.round,
        "workload": probe.workload,
        "class_name": None if metrics is None else metrics.class_name,
        "purpose": probe.purpose,
        "rate_rps": probe.rate_rps,
        "seed": probe.seed,
        "attempt": probe.attempt,
        "ramp_s": probe.ramp_s,
        "window_s": probe.window_s,
        "wall_s": probe.wall_s,
        "started_at": probe.started_at,
        "outcome": str(probe.outcome),
        "margin": probe.margin,
        "valid": probe.validity.valid,
        "invalid_because": "; ".join(probe.validity.reasons),
        "notes": "; ".join((*probe.notes, *probe.validity.notes)),
        "achieved_rps": probe.validity.achieved_rps,
        "send_lag_p99_s": probe.validity.send_lag_p99_s,
        "client_cpu_share": probe.client.cpu_share,
        "client_loop_lag_p99_s": probe.client.loop_lag_p99_s,
        "requests_file": probe.requests_file,
    }
    if metrics is not None:
        row |= {
            "requests": metrics.requests,
            "failed": metrics.failed,
            "success": metrics.success.value,
            "success_low": metrics.success.low,
            "success_high": metrics.success.high,
            "attainment": metrics.attainment.value,
            "attainment_low": metrics.attainment.low,
            "attainment_high": metrics.attainment.high,
            "goodput_rps": metrics.goodput_rps,
            "throughput_rps": metrics.throughput_rps,
            "output_tps": metrics.output_tps,
            "input_tps": metrics.input_tps,
        }
        for name, latency in metrics.latency.items():
            row[f"{name}_mean_s"] = latency.mean
            for label, estimate in (("p50", latency.p50), ("p95", latency.p95), ("p99", latency.p99)):
                row[f"{name}_{label}_s"] = estimate.value
                row[f"{name}_{label}_low_s"] = estimate.low
                row[f"{name}_{label}_high_s"] = estimate.high
    if probe.telemetry is not None:
        row |= {f"gauge.{name}": value for name, value in probe.telemetry.gauges.items()}
        row |= {f"counter.{name}": value for name, value in probe.telemetry.counters.items() if "_le_" not in name}
    return row


def _request(record: TrialRecord, probe: Probe, request: RequestResult, window: tuple[float, float]) -> Row:
    return {
        "number": record.number,
        "replicate": record.replicate,
        "round": record.round,
        "requests_file": probe.requests_file,
        "workload": probe.workload,
        "purpose": probe.purpose,
        "rate_rps": probe.rate_rps,
        "scored": window[0] <= request.scheduled_s < window[1] and bool(probe.classes),
        "index": request.index,
        "class_name": request.class_name,
        "status": str(request.status),
        "scheduled_s": request.scheduled_s,
        "sent_s": request.sent_s,
        "first_s": request.first_s,
        "last_s": request.last_s,
        "end_s": request.end_s,
        "send_lag_s": request.send_lag_s,
        "ttft_s": request.ttft_s,
        "tpot_s": request.tpot_s,
        "e2e_s": request.e2e_s,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "planned_input_tokens": request.planned_input_tokens,
        "planned_output_tokens": request.planned_output_tokens,
        "cached_tokens": request.cached_tokens,
        "chunks": request.chunks,
        "longest_gap_s": max(request.gaps_us, default=0) / 1e6,
        "error": request.error,
    }
