"""Before anything is scored: warm every class, learn how fast the server is, and prove that its memory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tuner.errors import HarnessError
from tuner.records import LoadResult, RequestResult, RequestStatus
from tuner.trial.broken import Broken
from tuner.trial.context import TrialRequest, seed_for
from tuner.trial.probing import Probing
from tuner.trial.sending import LONGEST, longest_workload

_START_SHARE = 0.7
"""Start a search somewhat below what a burst got through: near the capacity probes tell most."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a burst of one class showed; rough, only to choose rates and ramps by."""

    rate_rps: float
    e2e_s: float


def warm_up(probing: Probing, request: TrialRequest) -> Mapping[str, Speed]:
    """Every class once: traffic of its own shape, with its own prompts (one prompt repeated warms too little: B19)."""
    settings = request.settings
    speeds = {}
    for name in request.workloads:
        result, _ = probing.burst(
            probing.classes[name],
            concurrency=settings.warm_up_concurrency,
            count=2 * settings.warm_up_concurrency,
            seed=seed_for(request.seed, name, "warm-up", 0, request.round),
            purpose="warm-up",
            limit_s=settings.warm_up_s,
            least=1,
        )
        speeds[name] = speed_of(name, result)
        probing.expect(name, speeds[name].e2e_s)
    return speeds


def speed_of(workload: str, result: LoadResult) -> Speed:
    """Answers per second and seconds per answer; what was cut off counts by the share of its tokens that came.

    HarnessError when every request was refused: no configuration can be blamed for that. Broken when nothing came.
    """
    done = [
        (1.0 if r.ok else min(1.0, r.chunks / max(1, r.planned_output_tokens)), r.end_s - r.sent_s)
        for r in result.requests
    ]
    answered = sum(share for share, _ in done)
    if answered == 0:
        first = result.requests[0]
        message = f"no request of the warm-up of {workload} was answered ({first.status.value}: {first.error})"
        if all(request.status is RequestStatus.HTTP_ERROR for request in result.requests):
            raise HarnessError(message)
        raise Broken(message, no_progress=True)
    whole = [seconds for share, seconds in done if share == 1.0]
    begun = [(share, seconds) for share, seconds in done if share > 0]
    e2e_s = fmean(whole) if whole else fmean(seconds / share for share, seconds in begun)
    return Speed(answered / max(result.duration_s, 1e-3), e2e_s)


def prove_memory(probing: Probing, request: TrialRequest, seats: int | None) -> float:
    """The longest input and output at the concurrency of `seats` (max-num-seqs); returns the preemptions it caused.

    "It started" proves nothing: out of memory under load comes from the largest step (vllm#21410, #32090). A server
    that dies here, fails at such a request, or brings not one token of them raises Broken; HarnessError when it calls
    the requests themselves wrong.
    """
    settings = request.settings
    concurrency = min(settings.proof_concurrency, seats or settings.proof_concurrency)
    workload = longest_workload((probing.classes[name] for name in _members(probing, request)), probing.max_model_len)
    result, telemetry = probing.burst(
        workload,
        concurrency=concurrency,
        count=2 * concurrency,
        seed=seed_for(request.seed, LONGEST, "memory-proof", 0, request.round),
        purpose="memory-proof",
        limit_s=settings.proof_s,
        least=0,
    )
    check_proof(result.requests)
    return telemetry.counters.get("preemptions", 0.0)


def check_proof(requests: Sequence[RequestResult]) -> None:
    """Answers count, not only survival: none may be an error of the server's own, and one must have begun."""
    refused = [r for r in requests if r.status in (RequestStatus.HTTP_ERROR, RequestStatus.STREAM_ERROR)]
    if refused:
        message = f"{len(refused)} of {len(requests)} of the longest requests were refused ({refused[0].error})"
        if all(r.status is RequestStatus.HTTP_ERROR and (r.error or "").startswith("HTTP 4") for r in refused):
            raise HarnessError(message)  # the requests are at fault, and they are ours
        raise Broken(message, refuses=True)
    if not any(r.first_s is not None for r in requests):
        first = requests[0]
        raise Broken(f"no token of the longest requests came ({first.status.value}: {first.error})", no_progress=True)


def start_rate(name: str, request: TrialRequest, speeds: Mapping[str, Speed]) -> float:
    """Where the search for a capacity begins, requests/s."""
    return request.start_rates.get(name) or _START_SHARE * speeds[name].rate_rps


def _members(probing: Probing, request: TrialRequest) -> set[str]:
    return {member for name in request.workloads for member in probing.classes[name].mix or (name,)}
