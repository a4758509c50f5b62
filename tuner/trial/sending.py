"""From a workload to the requests that the load generator sends to one server; it sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from tuner.client import LoadRequest
from tuner.records import ClassSlo, Metric, PlannedRequest
from tuner.workload import PATHS, Arrivals, Workload, constant, longest, request_body

LONGEST = "longest"
"""Name of the workload of the memory proof."""


def load_requests(
    requests: Sequence[PlannedRequest],
    classes: Mapping[str, Workload],
    *,
    model: str,
    detokenize: Callable[[Sequence[int]], str],
) -> tuple[LoadRequest, ...]:
    """`classes` by class name say how each request is sampled and sent. A chat request needs text (`detokenize`)."""
    made = []
    for request in requests:
        workload = classes[request.class_name]
        if workload.api == "chat" and not isinstance(request.prompt, str):
            request = replace(request, prompt=detokenize(request.prompt), input_tokens=0)
        made.append(
            LoadRequest(
                index=request.index,
                class_name=request.class_name,
                scheduled_s=request.scheduled_s or 0.0,
                body=request_body(request, model=model, sampling=workload.sampling, api=workload.api),
                path=PATHS[workload.api],
                planned_input_tokens=request.input_tokens,
                planned_output_tokens=request.output_tokens,
                ignore_eos=workload.sampling.ignore_eos,
            )
        )
    return tuple(made)


def longest_workload(workloads: Iterable[Workload], max_model_len: int | None) -> Workload:
    """The longest input with the longest output that any class can ask for, as far as the server accepts it."""
    input_tokens, output_tokens = longest(workloads)
    if max_model_len is not None:
        output_tokens = min(output_tokens, max_model_len - 1)
        input_tokens = min(input_tokens, max_model_len - output_tokens)
    return Workload(LONGEST, constant(max(1, input_tokens)), constant(max(1, output_tokens)), Arrivals("closed"))


def drain_s(slos: Iterable[ClassSlo], longest_output: int, cap_s: float) -> float:
    """How long to wait for answers after the last request was due, seconds.

    Three times what the limits leave to a request: whatever takes longer has missed them by far, and its exact time
    would change nothing. At least 10 s, so that a passing stall does not turn late answers into failed ones.
    """
    waits = [_longest_within(slo, longest_output) for slo in slos]
    known = [wait for wait in waits if wait is not None]
    return cap_s if len(known) < len(waits) else min(cap_s, max(10.0, 3 * max(known, default=cap_s)))


def _longest_within(slo: ClassSlo, output_tokens: int) -> float | None:
    """Seconds that an answer may take within the limits; None where they do not say."""
    least: dict[Metric, float] = {}
    for limit in slo.limits:
        least[limit.metric] = min(limit.limit_s, least.get(limit.metric, limit.limit_s))
    pace = least.get(Metric.TPOT, least.get(Metric.ITL))
    if Metric.E2E in least:
        return least[Metric.E2E]
    return None if pace is None or Metric.TTFT not in least else least[Metric.TTFT] + pace * output_tokens
