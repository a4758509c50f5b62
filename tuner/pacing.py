"""When requests are due: pure arrival offsets on a clock that starts at 0; it never sleeps and sends nothing.

Every process has mean gap 1 ÷ rate. Another rate stretches the same arrivals; a larger count extends them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

PROCESSES = ("poisson", "gamma", "constant")


def unit_gaps(process: str, *, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Gaps between arrivals with mean 1, without end.

    `poisson`: exponential gaps. `gamma`: gamma-distributed with shape `burstiness`, as `vllm bench serve` defines it
    (below 1 burstier than Poisson, above 1 more regular; coefficient of variation 1 ÷ √burstiness). `constant`: all 1.
    """
    if process not in PROCESSES:
        raise ValueError(f"unknown arrival process {process!r}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise ValueError(f"burstiness must be positive, not {burstiness!r}")
    if process == "constant":
        return itertools.repeat(1.0)
    random = Random(seed)
    if process == "poisson":
        return iter(lambda: random.expovariate(1.0), None)
    return iter(lambda: random.gammavariate(burstiness, 1.0 / burstiness), None)


def arrival_offsets(
    process: str, *, rate_rps: float, count: int, seed: int, burstiness: float = 1.0
) -> tuple[float, ...]:
    """`count` ascending offsets in seconds; the long-run rate is `rate_rps`, within the noise of the sample."""
    if not (rate_rps > 0 and math.isfinite(rate_rps)):
        raise ValueError(f"the rate must be positive, not {rate_rps!r}")
    gaps = itertools.islice(unit_gaps(process, seed=seed, burstiness=burstiness), count)
    return tuple(offset / rate_rps for offset in itertools.accumulate(gaps))
