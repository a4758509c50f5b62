"""One configuration from launch to record: the phases in their order, and what becomes of a failure in any of them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuner.environment import gpus, wait_idle
from tuner.errors import EnvironmentFault, HarnessError, InputError
from tuner.failures import not_honoured
from tuner.records import Failure, KnobValue, PhaseTimes, QualityScores, TrialRecord, TrialState, Verdict
from tuner.serve_args import degraded, effective_from_metrics, merged, to_argv
from tuner.server import Identity, ReadyLimits, Server, ServerFailure, StopReport
from tuner.trial.broken import Broken, Stopped
from tuner.trial.context import ProgressEvent, TrialContext, TrialRequest
from tuner.trial.evidence import GIB, judge_fault, judge_server, log_text, state_of
from tuner.trial.examine import examine
from tuner.trial.impossible import impossible, known_defaults
from tuner.trial.measure import Measured, measure
from tuner.trial.probing import Probing
from tuner.trial.warm import prove_memory, warm_up

_IDLE_WAIT_S, _IDLE_SLICE_S = 60.0, 0.5
_GRACE_S, _ABORT_GRACE_S = 25.0, 3.0
_RETRIED = (Verdict.TRANSIENT, Verdict.UNKNOWN)


def run_trial(request: TrialRequest, context: TrialContext) -> TrialRecord:
    """Run one replicate. Every end is a record: measured, screened out, infeasible, a fault, or interrupted.

    A transient or unknown failure is tried once more on a fresh server; one of the compile cache with an empty cache.
    Nothing of the server is left behind, also when an exception such as KeyboardInterrupt passes through.
    """
    first = _Attempt(request, context, 0)
    record = first.run()
    failure = record.failure
    asked_to_stop = context.stop.is_set() or context.abort.is_set()
    if failure is None or failure.verdict not in _RETRIED or asked_to_stop:
        return record
    context.folder.write_trial(record)  # stays with the first attempt's log when the second takes its place
    first.tell("retry", f"{failure.kind}: {failure.cause}")
    second = _Attempt(request, context, 1, private_cache=failure.kind == "compile-cache")
    return replace(second.run(), started_at=record.started_at)


@dataclass
class _State:
    """What an attempt has found out so far."""

    phase: str = "prepare"
    times: dict[str, float] = field(default_factory=dict)
    server: Server | None = None
    probing: Probing | None = None
    measured: Measured = field(default_factory=Measured)
    effective: dict[str, KnobValue] = field(default_factory=dict)
    startup: dict[str, float] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()
    launch_free_gib: float | None = None
    quality: QualityScores | None = None
    failure: Failure | None = None
    stopped: bool = False


class _Attempt:
    """One server, from prepare to settled."""

    def __init__(self, request: TrialRequest, context: TrialContext, retries: int, private_cache: bool = False) -> None:
        self._request, self._context, self._retries = request, context, retries
        self._private_cache = private_cache
        self._state = _State()
        self._asked = merged({**context.fixed, **request.proposal.config})

    def run(self) -> TrialRecord:
        started_at = time.time()
        state, log_path = self._state, None
        try:
            folder = self._context.folder.new_attempt(self._request.proposal.number, self._request.replicate)
            log_path = folder / "server.log"
            with self._phase("prepare"):
                flags = self._prepare()
            if flags is not None:
                self._serve(folder, log_path, flags)
        except Stopped:
            state.stopped = True
        except (EnvironmentFault, HarnessError, InputError) as error:
            state.failure = judge_fault(error, state.phase, log_path)
        except Exception as error:  # noqa: BLE001
            # The one broad catch of the project: whatever defect this is, it must cost one trial and not the study,
            # and its traceback must be found in the record. (Server failures were judged before, in `_serve`.)
            state.failure = judge_fault(error, state.phase, log_path)
        return self._record(started_at)

    # --- phases ------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[str, ...] | None:
        """The server's flags; None, with the failure noted, when the configuration cannot work."""
        context, state = self._context, self._state
        state.failure = impossible(self._request.proposal.config, context)
        if state.failure is not None:
            return None
        self._wait_idle()
        state.launch_free_gib = min((gpu.free_bytes / GIB for gpu in gpus(context.gpus)), default=None)
        return to_argv(self._asked, context.install.flags)

    def _wait_idle(self) -> None:
        """In slices, between which a wish to stop is seen."""
        deadline = time.monotonic() + _IDLE_WAIT_S
        while left := wait_idle(self._context.idle, timeout_s=_IDLE_SLICE_S):
            self._check_stop()
            if time.monotonic() >= deadline:
                raise EnvironmentFault(f"the GPU is not idle: {'; '.join(left)}. End what holds it, then --resume.")

    def _serve(self, folder: Path, log_path: Path, flags: tuple[str, ...]) -> None:
        """Launch, measure, stop. A failure of the server is judged while it can still be asked; then it is stopped."""
        context = self._context
        served_name = self._asked.get("served-model-name")
        cache = folder / "cache" if self._private_cache else None
        server = Server(
            context.install,
            model=context.model,
            flags=flags,
            log_path=log_path,
            gpus=context.gpus or None,
            cache_root=cache,
            extra_environment={**context.extra_environment, **_cache_variables(cache)},
            served_name=str(served_name) if served_name is not None else None,
            run=context.run,
            baseline=context.idle,
            hurry=context.abort,
        )
        self._state.server = server
        with server:
            try:
                self._use(server, folder)
            except (ServerFailure, Broken) as error:
                if self._context.abort.is_set() or self._context.stop.is_set():
                    raise Stopped("stopped while the server was busy") from error
                self._state.failure = judge_server(
                    error,
                    server,
                    phase=self._state.phase,
                    retries=self._retries,
                    launch_free_gib=self._state.launch_free_gib,
                    request=self._request,
                    context=context,
                )
            finally:
                self._stop(server)
                if cache is not None:
                    shutil.rmtree(cache, ignore_errors=True)

    def _use(self, server: Server, folder: Path) -> None:
        request, context, state = self._request, self._context, self._state
        with self._phase("launch"), _stopping(server, context):
            self.tell("launch", " ".join(f"--{name} {value}" for name, value in request.proposal.config.items()))
            server.launch()
            server.wait_ready(self._limits())
            identity = server.identify()
        self._learn(server, identity)
        with self._phase("warm-up"):
            self.tell("warm-up", f"ready after {state.times['launch']:.0f} s")
            state.probing = Probing(server, identity, request, context, folder)
            speeds = warm_up(state.probing, request)
            self.tell("memory-proof", "the longest requests at sustained concurrency")
            seats = {**known_defaults(context), **self._asked, **state.effective}.get("max-num-seqs")
            preemptions = prove_memory(state.probing, request, seats if isinstance(seats, int) else None)
            state.startup["proof_preemptions"] = preemptions
        with self._phase("measure"):
            measure(state.probing, request, speeds, state.measured)
        if not server.alive():
            raise Broken("the server ended although nobody had asked it to")
        screening = state.measured.screening
        if request.quality is not None and (screening is None or screening.proceed):
            with self._phase("quality"):
                self.tell("quality", f"answers to {len(request.quality.prompts.prompts)} prompts")
                length, abort = identity.max_model_len, context.abort
                state.quality = examine(server.control, identity.model, length, request.quality, folder, abort)

    def _learn(self, server: Server, identity: Identity) -> None:
        state = self._state
        state.effective = {**identity.effective, **effective_from_metrics(server.control.metrics_text())}
        state.startup = dict(identity.startup)
        state.degraded = (
            *degraded(self._asked, state.effective),
            *not_honoured(log_text(server.log_path), self._asked),
        )
        self._context.learned.learn(self._asked, state.effective, state.startup)

    def _stop(self, server: Server) -> None:
        state = self._state
        grace_s = _ABORT_GRACE_S if self._context.abort.is_set() else _GRACE_S
        self.tell("stop", "")
        report: StopReport = server.stop(grace_s=grace_s)
        state.times |= {"stop": report.stop_s, "settle": report.settle_s}
        if report.leftovers:
            self.tell("settle", f"still there: {'; '.join(report.leftovers)}")

    # --- bookkeeping -------------------------------------------------------------------------------------------

    def tell(self, phase: str, message: str) -> None:
        number, replicate = self._request.proposal.number, self._request.replicate
        self._context.progress(ProgressEvent(phase, number, replicate, message=message))

    def _check_stop(self) -> None:
        if self._context.stop.is_set() or self._context.abort.is_set():
            raise Stopped("stopped before the server was measured, as asked")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._check_stop()
        self._state.phase = name
        started = time.monotonic()
        try:
            yield
        finally:
            self._state.times[name] = time.monotonic() - started

    def _limits(self) -> ReadyLimits:
        """Twice as long for the second try: slow is not impossible (A23)."""
        limits = self._context.ready_limits
        factor = 1 + self._retries
        return ReadyLimits(silent_s=factor * limits.silent_s, cap_s=factor * limits.cap_s)

    def _record(self, started_at: float) -> TrialRecord:
        request, context, state = self._request, self._context, self._state
        measured, times = state.measured, state.times
        probes = state.probing.probes if state.probing is not None else []
        in_capacities = {id(probe) for capacity in measured.capacities.values() for probe in capacity.probes}
        screened = measured.screening is not None and not measured.screening.proceed
        return TrialRecord(
            number=request.proposal.number,
            replicate=request.replicate,
            config=request.proposal.config,
            step=request.proposal.step,
            state=self._final_state(screened),
            capacities=measured.capacities,
            probes=tuple(probe for probe in probes if id(probe) not in in_capacities),
            failure=None if state.stopped else state.failure,
            effective=state.effective,
            degraded=state.degraded,
            startup=state.startup,
            phases=PhaseTimes(
                prepare_s=times.get("prepare", 0.0),
                launch_s=times.get("launch", 0.0),
                warm_up_s=times.get("warm-up", 0.0),
                measure_s=times.get("measure", 0.0),
                stop_s=times.get("stop", 0.0),
                settle_s=times.get("settle", 0.0),
                quality_s=times.get("quality", 0.0),
            ),
            environment=context.environment.digest,
            command=state.server.command if state.server is not None else (),
            started_at=started_at,
            ended_at=time.time(),
            seed=request.seed,
            simulated=context.install.simulated,
            round=request.round,
            machine=context.environment.machine,
            screened_against=request.incumbent_number if measured.screening is not None else None,
            predicted=measured.screening.objective if measured.screening is not None else None,
            decided=measured.decided,
            quality=state.quality,
        )

    def _final_state(self, screened: bool) -> TrialState:
        if self._state.stopped:
            return TrialState.INTERRUPTED
        if self._state.failure is not None:
            return state_of(self._state.failure, self._retries, self._request)
        return TrialState.SCREENED if screened else TrialState.COMPLETE


def _cache_variables(private: Path | None) -> dict[str, str]:
    """Every cache of compiled code, not only vLLM's own, when the shared ones are suspected."""
    if private is None:
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(private / "torchinductor"), "TRITON_CACHE_DIR": str(private / "triton")}


@contextmanager
def _stopping(server: Server, context: TrialContext) -> Iterator[None]:
    """While a server starts there is nothing to finish: a wish to stop ends it at once, from another thread."""
    done = threading.Event()

    def wait() -> None:
        while not done.wait(0.2):
            if context.stop.is_set() or context.abort.is_set():
                server.stop(grace_s=_ABORT_GRACE_S)
                return

    thread = threading.Thread(target=wait, name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
