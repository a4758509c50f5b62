"""The table of `bench_client.py`: medians, ranges and ratios from the rounds that were kept; it measures nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

OURS, PEER = "tune", "vllm bench serve"

# (measure, key, name, digits)
ROWS = (
    ("moderate", "ttft_error_mean_ms", "50 streams: TTFT error, mean, ms", 2),
    ("moderate", "ttft_error_p99_ms", "50 streams: TTFT error, P99, ms", 2),
    ("moderate", "itl_error_percent", "50 streams: mean ITL error, %", 2),
    *(
        row
        for rate in (20, 100, 300)
        for row in (
            ("open_loop", f"{rate}_achieved_rps", f"{rate} requests/s: achieved", 2),
            ("open_loop", f"{rate}_own_lag_p99_ms", f"{rate} requests/s: send lag, P99, ms", 2),
            ("open_loop", f"{rate}_lag_p99_ms", f"{rate} requests/s: lag of the arrivals at the server, P99, ms", 2),
            ("open_loop", f"{rate}_ttft_error_p99_ms", f"{rate} requests/s: TTFT error, P99, ms", 2),
        )
    ),
    ("burst", "ttft_error_p99_ms", "256 starts at once: TTFT error, P99, ms", 1),
    ("burst", "ttft_sent_error_p99_ms", "… counted from its own send", 1),
    ("sustained", "chunks_per_s", "most chunks/s with mean and median ITL within 5 %", 0),
    ("sustained", "cpu_s_per_1000_chunks", "CPU seconds per 1,000 chunks", 4),
    ("sustained", "peak_process_mb", "largest process, MB", 0),
    ("sustained", "peak_total_mb", "all processes, MB", 0),
    ("long_prompts", "added_ms", "100 KB prompts add to TTFT, ms", 2),
    ("failures", "reported", "failures reported of 30 in 100 requests", 0),
    ("moderate", "start_s", "start to first request, s", 2),
    ("first_request", "cli_start_s", "`tune bench`: start to first request, s", 2),
)

# (what is promised, measure, key, other load generator or None for the figure itself, relation, limit)
PROMISES = (
    ("chunks/s ÷ vllm bench serve", "sustained", "chunks_per_s", PEER, "≥", 2.0),
    ("chunks/s ÷ guidellm", "sustained", "chunks_per_s", "guidellm", "≥", 8.0),
    ("chunks/s ÷ aiperf", "sustained", "chunks_per_s", "aiperf", "≥", 10.0),
    ("CPU per chunk ÷ vllm bench serve", "sustained", "cpu_s_per_1000_chunks", PEER, "≤", 1 / 3),
    ("256 starts at once: TTFT error P99, ms", "burst", "ttft_error_p99_ms", None, "≤", 15.0),
    ("300 requests/s: achieved", "open_loop", "300_achieved_rps", None, "≥", 298.5),
    ("300 requests/s: send lag P99, ms", "open_loop", "300_own_lag_p99_ms", None, "≤", 2.0),
    ("300 requests/s: TTFT error P99, ms", "open_loop", "300_ttft_error_p99_ms", None, "≤", 1.0),
    ("100 KB prompts add to TTFT, ms", "long_prompts", "added_ms", None, "≤", 0.5),
    ("`tune bench`: start to first request, s", "first_request", "cli_start_s", None, "≤", 0.5),
    ("largest process, MB", "sustained", "peak_process_mb", None, "≤", 100.0),
)


def report(results: Sequence[Mapping[str, Any]], *, machine: str) -> str:
    """Markdown; every cell is the median of the rounds with their range."""
    names = list(dict.fromkeys(result["contender"] for result in results))
    header = ["", *names, *([f"{OURS} ÷ {PEER}"] if PEER in names else [])]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for measure, key, name, digits in ROWS:
        found = {contender: _values(results, contender, measure, key) for contender in names}
        if any(found.values()):
            cells = [name, *(_cell(found[contender], digits) for contender in names)]
            if PEER in names:
                cells.append(_ratio(found.get(OURS, []), found[PEER]))
            lines.append(f"| {' | '.join(cells)} |")
    counts = Counter((result["measure"], result["contender"]) for result in results)
    rounds = max(counts.values(), default=0)
    return "\n".join(
        [f"{machine}. Median of {rounds} rounds (lowest … highest).", "", *lines, "", *_promises(results), ""]
    )


def _promises(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown lines: each promise with what was found; those that cannot be judged are left out."""
    lines = ["| promised | limit | found | kept |", "|---|---|---|---|"]
    for name, measure, key, other, relation, limit in PROMISES:
        ours, theirs = _values(results, OURS, measure, key), _values(results, other or OURS, measure, key)
        if ours and theirs:
            found = statistics.median(ours) / (statistics.median(theirs) if other else 1)
            kept = found >= limit if relation == "≥" else found <= limit
            lines.append(f"| {name} | {relation} {limit:.4g} | {found:.4g} | {'yes' if kept else '**no**'} |")
    return lines


def _values(results: Sequence[Mapping[str, Any]], contender: str, measure: str, key: str) -> list[float]:
    return [
        result["values"][key]
        for result in results
        if result["measure"] == measure and result["contender"] == contender and key in result["values"]
    ]


def _cell(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    text = f"{statistics.median(values):,.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):,.{digits}f} … {max(values):,.{digits}f})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    if not ours or not theirs or statistics.median(theirs) <= 0:
        return "–"
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"
