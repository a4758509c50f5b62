"""`tune bench` without `--url`: one configuration on a server of its own, measured as a trial is; no search."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tuner.cli.asked import asked_of, chosen_gpus
from tuner.cli.options import positive
from tuner.documents import strict_json
from tuner.errors import EnvironmentFault, ExitCode, HarnessError, InputError, Interrupted
from tuner.records import Config, Decision, Outcome, Probe, TrialRecord, TrialState, Verdict

_OURS = ("measurement", "defect")
"""Kinds of failure that say nothing about the machine or the configuration."""


def bench_own(arguments: argparse.Namespace) -> int:
    """Start, measure every class, stop; the record is printed, and kept with `--out`."""
    from tuner.environment import facts, idle_baseline, require_free
    from tuner.ownership import DeviceLocks, Run, devices_of, remove_dead_runs
    from tuner.server import find_vllm
    from tuner.store import ResultsFolder
    from tuner.study import SPEEDS, StopSignals, prepare, trial_context
    from tuner.trial import ProgressEvent, bench

    asked = asked_of(arguments, (), "bench")
    rate_rps = None if arguments.rate is None else positive("--rate", arguments.rate)
    install = find_vllm(arguments.vllm)
    asked = replace(asked, gpus=chosen_gpus(arguments, install))
    definition, inputs = prepare(asked, install)
    settings = SPEEDS[definition.speed].search

    def tell(event: ProgressEvent) -> None:
        rate = "" if event.rate_rps is None else f" at {event.rate_rps:.3g} requests/s"
        print(f"{event.phase} {event.workload}{rate} {event.message}".rstrip(), file=sys.stderr, flush=True)

    with ExitStack() as held:
        root = Path(arguments.out or held.enter_context(tempfile.TemporaryDirectory(prefix="tune-bench-")))
        signals = held.enter_context(StopSignals(lambda message: print(message, file=sys.stderr)))
        folder = ResultsFolder(root)
        for removed in remove_dead_runs([root]):
            if removed.anything:
                print(f"removed what an earlier run had left: {removed}", file=sys.stderr)
        held.enter_context(DeviceLocks(devices_of(definition.gpus), study="bench"))
        registry = held.enter_context(Run("bench", root))
        require_free(definition.gpus)
        environment = facts(install, definition.gpus)
        idle = idle_baseline(definition.gpus)
        context = trial_context(definition, inputs, install, folder, environment, idle, registry, signals, tell)
        replicate = int(time.time()) if arguments.out else 0  # one folder may collect several measurements
        rates = dict.fromkeys(definition.workloads, rate_rps) if rate_rps is not None else None
        record = bench(
            definition.baseline,
            context,
            workloads=definition.workloads,
            seed=definition.seed,
            settings=settings,
            rates=rates,
            replicate=replicate,
        )
        folder.write_trial(record)
        return told(record, {**definition.fixed, **record.config}, as_json=arguments.json)


def told(record: TrialRecord, flags: Config, *, as_json: bool) -> int:
    """Print the record of a server with `flags`.

    HarnessError for what the client spoilt, InputError for flags that cannot work, EnvironmentFault for every
    other failure.
    """
    from tuner.store import dumps

    if as_json:
        print(strict_json(json.loads(dumps(record))))
    elif record.state is TrialState.COMPLETE:
        print("\n".join(table(record)))
    if record.state is TrialState.INTERRUPTED:
        raise Interrupted("stopped as asked")
    if record.failure is not None:
        failure = record.failure
        cause = failure.cause.removesuffix(".")
        if failure.verdict is Verdict.STATIC:
            rule = f"{cause}. {failure.explanation.removesuffix('.')}"
            raise InputError(
                where="command line", field="the server's flags", value=flags, rule=rule, remedy=failure.remedy
            )
        message = f"{failure.kind} ({failure.verdict}): {cause}. {failure.explanation} {failure.remedy}"
        raise HarnessError(message) if failure.kind in _OURS else EnvironmentFault(message)
    spoilt = [name for name, decision in record.decided.items() if decision.outcome is Outcome.INVALID]
    if spoilt:
        reasons = dict.fromkeys(
            reason
            for p in record.probes
            if p.purpose == "bench" and p.workload in spoilt
            for reason in p.validity.reasons
        )
        raise HarnessError(f"the measurement of {', '.join(spoilt)} is not valid: {'; '.join(reasons)}")
    return int(ExitCode.OK)


def table(record: TrialRecord) -> list[str]:
    """SLO capacity by class, or the scores at a fixed rate."""
    from tuner.report.words import probe_notes

    lines: list[str] = []
    if record.capacities:
        width = max(len(name) for name in record.capacities)
        lines.append(f"{'SLO capacity':{width}}  requests/s  bound      probes  measuring")
        for name, capacity in record.capacities.items():
            lines.append(
                f"{name:{width}}  {capacity.rate_rps:10.3g}  {capacity.bound.value:9}  {len(capacity.probes):6}"
                f"  {capacity.measuring_s:.0f} s"
            )
    for probe in (probe for probe in record.probes if probe.purpose == "bench"):
        lines += _scores(probe)
    lines += [f"{name}: {_decided(decision)}" for name, decision in record.decided.items()]
    lines += [f"note: {note}" for note in probe_notes([record])]
    if record.simulated:
        lines.append("SIMULATED: this says nothing about vLLM.")
    return lines


def _decided(decision: Decision) -> str:
    """One line: the verdict of all windows together, and what an unresolved one lacks."""
    line = (
        f"{decision.outcome.value} at {decision.rate_rps:.3g} requests/s (windows: {decision.windows}, requests: "
        f"{decision.requests})"
    )
    if decision.outcome is not Outcome.UNRESOLVED or decision.percentile is None:
        return line
    if decision.needed is None:
        return f"{line}: no number of requests proves P{decision.percentile:g}"
    if decision.requests < decision.needed:
        return f"{line}: P{decision.percentile:g} needs {decision.needed} requests"
    return f"{line}: too close to the limit to tell"


def _scores(probe: Probe) -> list[str]:
    lines = [f"{probe.workload} at {probe.rate_rps:.3g} requests/s, one window: {probe.outcome.value}"]
    if not probe.validity.valid:
        lines += [f"  not valid: {reason}" for reason in probe.validity.reasons]
    for name, metrics in probe.classes.items():
        share = metrics.attainment
        lines.append(
            f"  {name}: attainment {share.value:.4f} (95 %: {share.low:.4f}–{share.high:.4f}, n = {share.n}), goodput "
            f"{metrics.goodput_rps:.3g}/s, {metrics.output_tps:.0f} output tokens/s, {metrics.failed} failed"
        )
        for metric, values in metrics.latency.items():
            lines.append(
                f"    {metric.upper():5} P50 {values.p50.value * 1e3:.1f}  P95 {values.p95.value * 1e3:.1f}  P99 "
                f"{values.p99.value * 1e3:.1f} ms"
            )
    return lines
