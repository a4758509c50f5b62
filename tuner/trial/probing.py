"""One probe on one running server: send, watch, score, check, keep; it chooses no rate and judges no failure."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from tuner.capacity import point
from tuner.client import run_load
from tuner.metrics import overall, score_all
from tuner.records import (
    ClassMetrics,
    ClassSlo,
    LoadResult,
    Metric,
    Outcome,
    PlannedRequest,
    Probe,
    TelemetrySummary,
    Validity,
)
from tuner.server import Identity, Server, ServerFailure
from tuner.telemetry import Telemetry, histogram
from tuner.trial.broken import Broken, Stopped
from tuner.trial.context import ProgressEvent, TrialContext, TrialRequest
from tuner.trial.sending import drain_s, load_requests
from tuner.trial.watch import Watch
from tuner.validity import ServerEvidence, judge_validity
from tuner.workload import PROBE_TEXT, Plan, Vocabulary, Workload, plan, resolve_texts, vocabulary_from_tokens

_RAMP_SHARE = 1.5  # an answer under load takes longer than in the warm-up
_SATURATED = 0.9
_CLOSED_ROUNDS = 5  # requests of each slot of a closed loop, at least: its last ones run beside empty slots


@dataclass(frozen=True, slots=True)
class Load:
    """What came back from one run of the load generator, with the server's side of it."""

    result: LoadResult
    whole: TelemetrySummary  # from before the first request to after the last
    zero_s: float  # of the probe's clock, on the telemetry's
    wall_s: float
    telemetry: Telemetry
    notes: tuple[str, ...]
    suspended: bool


class Probing:
    """The measuring instrument of one trial. Called, it is a `Prober`; it keeps every probe in `probes`.

    Raises Stopped when the user wants to stop (between probes, or inside one for `abort`), Broken or ServerFailure when
    the server is at its end.
    """

    def __init__(
        self, server: Server, identity: Identity, request: TrialRequest, context: TrialContext, folder: Path
    ) -> None:
        self.probes: list[Probe] = []
        self._server, self._identity, self._request, self._context = server, identity, request, context
        self._folder = folder
        repeated = {name: item.ramp_s for name, item in (request.incumbent or {}).items() if item.ramp_s > 0}
        self._ramps: dict[str, float] = {**repeated, **request.ramps}
        self._settled = set(self._ramps)
        self.classes = {name: self._resolved(workload) for name, workload in context.workloads.items()}
        self.vocabulary = self._vocabulary()

    # --- what is sent ------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int | None:
        return self._identity.max_model_len

    def slos(self, workload: str) -> Mapping[str, ClassSlo]:
        """The limits of every class in a workload."""
        return {name: self._context.slo.classes[name] for name in self.classes[workload].mix or (workload,)}

    def expect(self, workload: str, e2e_s: float) -> None:
        """What the warm-up says an answer takes; sets the ramp until a probe under load says better."""
        if workload not in self._settled:
            self._ramps[workload] = self._bounded(_RAMP_SHARE * e2e_s)

    def ramp_s(self, workload: str) -> float:
        """Unscored seconds before a window: about one end-to-end time."""
        return self._ramps.get(workload, self._request.settings.min_ramp_s)

    def __call__(self, workload: str, rate_rps: float, seed: int, purpose: str, window_s: float) -> Probe:
        """One valid probe, or the last of `max_attempts` invalid ones."""
        workers = 0
        for attempt in range(self._request.settings.max_attempts):
            probe = self._probe(workload, rate_rps, seed, purpose, window_s, workers, attempt)
            if probe.outcome is not Outcome.INVALID:
                break
            if probe.client.workers < len(os.sched_getaffinity(0)):  # more would only delay each other
                workers = 2 * probe.client.workers
        self._settle_ramp(probe)
        return probe

    def burst(
        self, workload: Workload, *, concurrency: int, count: int, seed: int, purpose: str, limit_s: float, least: int
    ) -> tuple[LoadResult, TelemetrySummary]:
        """A closed loop, cut off after `limit_s` once a token has come and `least` requests have finished.

        Kept as a probe, never scored.
        """
        planned = self._plan(workload, 0.0, 0.0, seed, concurrency=concurrency, min_requests=count)
        load = self._send(workload, planned, workers=0, limit_s=limit_s, least=least)
        name = self._store(workload.name, purpose, load.result)
        self.probes.append(
            Probe(
                workload=workload.name,
                rate_rps=0.0,
                seed=seed,
                purpose=purpose,
                ramp_s=0.0,
                window_s=load.result.duration_s,
                wall_s=load.wall_s,
                started_at=load.result.started_at,
                classes={},
                outcome=Outcome.UNRESOLVED,
                margin=0.0,
                validity=Validity(True, (), 0.0, 0.0, 0.0),
                client=load.result.client,
                telemetry=load.whole,
                requests_file=name,
                notes=(*load.notes, *planned.notes, "not scored"),
            )
        )
        return load.result, load.whole

    # --- one probe ---------------------------------------------------------------------------------------------

    def _probe(
        self, workload: str, rate_rps: float, seed: int, purpose: str, window_s: float, workers: int, attempt: int
    ) -> Probe:
        ramp_s = self.ramp_s(workload)
        self._tell("probe", workload, rate_rps, f"{purpose}, {window_s:.0f} s after a ramp of {ramp_s:.1f} s")
        slots = self.classes[workload].arrivals.concurrency or 0
        least = max(1, _CLOSED_ROUNDS * slots)
        planned = self._plan(self.classes[workload], rate_rps, ramp_s + window_s, seed, min_requests=least)
        load = self._send(self.classes[workload], planned, workers=workers)
        window = _window(self.classes[workload], planned, load.result, ramp_s, window_s)
        slos = self.slos(workload)
        classes = score_all(load.result.requests, slos, window=window)
        start_s, end_s = (load.zero_s + edge for edge in window)
        telemetry = load.telemetry.summary((start_s, end_s))
        validity = judge_validity(
            load.result,
            offered_rps=0.0 if planned.concurrency else rate_rps,
            window=window,
            limits=[limit for slo in slos.values() for limit in slo.limits],
            server=_server_evidence(load.whole),
            shared_prefix_share=_shared_share(planned.requests),
        )
        if load.suspended:
            reason = "a process of the server was suspended meanwhile (SIGSTOP)"
            validity = replace(validity, valid=False, reasons=(reason, *validity.reasons))
        outcome, margin = overall(classes)
        if not validity.valid:
            outcome = Outcome.INVALID
            classes = {name: replace(metrics, outcome=outcome) for name, metrics in classes.items()}
        gone, whole = len(planned.rejected), len(planned.rejected) + len(planned.requests)
        rejected = (f"{gone} of {whole} requests left out: {planned.rejected[0]}",) if gone else ()
        probe = Probe(
            workload=workload,
            rate_rps=rate_rps,
            seed=seed,
            purpose=purpose,
            ramp_s=window[0],
            window_s=window[1] - window[0],
            wall_s=load.wall_s,
            started_at=load.result.started_at,
            classes=classes,
            outcome=outcome,
            margin=margin,
            validity=validity,
            client=load.result.client,
            telemetry=telemetry,
            requests_file=self._store(workload, purpose, load.result),
            attempt=attempt,
            notes=(*load.notes, *planned.notes, *rejected),
        )
        self.probes.append(probe)
        self._tell("probe", workload, rate_rps, _said(probe))
        return probe

    def _plan(
        self,
        workload: Workload,
        rate_rps: float,
        duration_s: float,
        seed: int,
        concurrency: int | None = None,
        min_requests: int = 0,
    ) -> Plan:
        return plan(
            workload,
            rate_rps=rate_rps,
            duration_s=duration_s,
            seed=seed,
            vocabulary=self.vocabulary,
            max_model_len=self.max_model_len or 0,
            min_requests=min_requests,
            concurrency=concurrency,
            members=self.classes,
        )

    def _send(
        self, workload: Workload, planned: Plan, *, workers: int, limit_s: float | None = None, least: int = 0
    ) -> Load:
        """Run the load on an empty prefix cache, under watch."""
        self._check_stop()
        began = time.monotonic()
        settings, server = self._request.settings, self._server
        notes = self._forget_prefixes()
        requests = load_requests(
            planned.requests,
            {**self.classes, workload.name: workload},
            model=self._identity.model,
            detokenize=lambda tokens: server.control.detokenize(self._identity.model, tokens),
        )
        slos = [
            self._context.slo.classes[name] for name in {r.class_name for r in requests} & {*self._context.slo.classes}
        ]
        drain = drain_s(slos, max(r.planned_output_tokens for r in requests), settings.drain_s)
        telemetry = Telemetry(f"{server.base_url}/metrics", lambda: _roles(server.pids), self._context.gpus)
        telemetry.start()
        watch = Watch(
            server,
            telemetry,
            stall_s=settings.stall_s,
            abort=self._context.abort,
            limit_s=limit_s,
            least=least,
        )
        watch.start()
        asked = time.monotonic()
        try:
            result = run_load(
                server.base_url,
                requests,
                workers=workers,
                concurrency=planned.concurrency,
                timeout_s=settings.request_timeout_s,
                drain_s=drain,
                stop=watch.halt,
                progress=watch.progress,
            )
        finally:
            watch.finish()
            whole = telemetry.stop()
        answered = sum(request.first_s is not None for request in result.requests)
        watch.check(answered, result.duration_s)
        if watch.halt.is_set():
            notes += (f"cut short after {result.duration_s:.0f} s",)
        zero_s = asked - telemetry.started_at + result.client.start_s
        return Load(result, whole, zero_s, time.monotonic() - began, telemetry, notes, watch.suspended)

    def _forget_prefixes(self) -> tuple[str, ...]:
        """Every probe starts on an empty cache, also of a class that shares prefixes: its ramp fills it again.

        Whether it worked is seen afterwards, in the server's hit counters (`validity`).
        """
        try:
            self._server.control.reset_prefix_cache()
        except ServerFailure as failure:
            if isinstance(failure.__cause__, httpx.TimeoutException):
                raise Broken(f"the engine does not answer: {failure}", no_progress=True) from failure
            if not self._server.alive():
                raise
            return (f"the prefix cache was not reset: {failure}",)
        return ()

    # --- bookkeeping -------------------------------------------------------------------------------------------

    def _settle_ramp(self, probe: Probe) -> None:
        """The first valid probe that was no overload says what an answer takes; later ramps stay as long."""
        seen = point(probe)
        times = [m.latency[Metric.E2E].mean for m in probe.classes.values() if Metric.E2E in m.latency]
        if probe.workload in self._settled or seen is None or not times:
            return
        if seen.y > 0 and (seen.completed is None or seen.completed < _SATURATED):
            return
        self._ramps[probe.workload] = self._bounded(max(times))
        self._settled.add(probe.workload)

    def _bounded(self, ramp_s: float) -> float:
        settings = self._request.settings
        return min(settings.max_ramp_s, max(settings.min_ramp_s, ramp_s))

    def _store(self, workload: str, purpose: str, result: LoadResult) -> str:
        name = f"{len(self.probes):03d}-{workload}-{purpose}"
        return self._context.folder.write_requests(self._folder, name, result.requests)

    def _check_stop(self) -> None:
        if self._context.stop.is_set() or self._context.abort.is_set():
            raise Stopped("stopped between two probes, as asked")

    def _tell(self, phase: str, workload: str, rate_rps: float, message: str) -> None:
        proposal = self._request.proposal
        event = ProgressEvent(
            phase, proposal.number, self._request.replicate, workload, rate_rps, len(self.probes), message
        )
        self._context.progress(event)

    def _resolved(self, workload: Workload) -> Workload:
        """A trace of texts as token ids, counted by the server itself; once a study."""
        trace, known = workload.trace, self._context.learned.traces
        if trace is None or all(row.text is None and row.response is None for row in trace.rows):
            return workload
        if workload.digest not in known:
            control, model = self._server.control, self._identity.model
            known[workload.digest] = resolve_texts(trace, lambda text: control.tokenize(model, text))
        return replace(workload, trace=known[workload.digest])

    def _vocabulary(self) -> Vocabulary:
        if self._context.vocabulary is not None:
            return self._context.vocabulary
        if self._context.learned.vocabulary is None:
            tokens = self._server.control.tokenize(self._identity.model, PROBE_TEXT)
            self._context.learned.vocabulary = vocabulary_from_tokens(tokens)
        return self._context.learned.vocabulary


def _window(
    workload: Workload, planned: Plan, result: LoadResult, ramp_s: float, window_s: float
) -> tuple[float, float]:
    """The scored part.

    A closed loop ends with its last answer, so that the goodput counts every one in the time that all of them took; a
    trace that is shorter than the probe ends with its last request.
    """
    trace = workload.trace if workload.arrivals.process == "trace" else None
    if planned.concurrency:
        end_s = max(request.end_s for request in result.requests)
    elif trace is not None and len(planned.requests) + len(planned.rejected) == len(trace.rows):
        end_s = min(ramp_s + window_s, max(request.scheduled_s for request in result.requests))
    else:
        return ramp_s, ramp_s + window_s
    end_s = max(math.nextafter(end_s, math.inf), 1e-3)  # the last one is scored too
    return (ramp_s, end_s) if end_s > 2 * ramp_s else (0.0, end_s)


def _server_evidence(whole: TelemetrySummary) -> ServerEvidence:
    seen = histogram(whole, "ttft_s")
    return ServerEvidence(
        peak_concurrency=whole.gauges.get("concurrency_max"),
        ttft_median_bucket_s=None if seen is None or not seen.count else seen.bracket(0.5),
        requests=whole.counters.get("ttft_s_count"),
        prefix_queries=whole.counters.get("prefix_queries"),
        prefix_hits=whole.counters.get("prefix_hits"),
    )


def _shared_share(requests: Sequence[PlannedRequest]) -> float:
    """Of the prompt tokens, those that the probe shares on purpose."""
    total = sum(request.input_tokens for request in requests)
    return sum(request.shared_prefix_tokens for request in requests) / total if total else 0.0


def _roles(pids: Sequence[int]) -> dict[str, list[int]]:
    """Server processes by role: the first is the API server, the others call themselves `VLLM::…`."""
    roles: dict[str, list[int]] = {"api": list(pids[:1]), "engine": [], "worker": []}
    for pid in pids[1:]:
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).name()
            if name.startswith("VLLM::"):
                roles["worker" if "Work" in name else "api" if "Api" in name else "engine"].append(pid)
    return {role: found for role, found in roles.items() if found}


def _said(probe: Probe) -> str:
    if probe.outcome is Outcome.INVALID:
        return f"invalid: {probe.validity.reasons[0]}"
    worst: ClassMetrics = max(probe.classes.values(), key=lambda metrics: metrics.margin)
    return f"{worst.requests} requests, {probe.margin:+.0%} of the limit" + (
        f", {worst.failed} failed" * bool(worst.failed)
    )
