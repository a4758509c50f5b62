"""What server, device and host say while a probe runs, as one summary; it measures no request and judges nothing."""

from tuner.telemetry.histogram import Histogram
from tuner.telemetry.prometheus import Snapshot, parse
from tuner.telemetry.sampler import Telemetry
from tuner.telemetry.summary import Sample, histogram, summarize

__all__ = ["Histogram", "Sample", "Snapshot", "Telemetry", "histogram", "parse", "summarize"]
