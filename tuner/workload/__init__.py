"""The load of a study: classes of traffic, lengths, prompts, arrivals and bodies; nothing here sends or sleeps."""

from tuner.workload.body import PATHS, request_body
from tuner.workload.lengths import Lengths, constant
from tuner.workload.model import (
    MIXED,
    Arrivals,
    Sampling,
    Workload,
    class_names,
    load_workloads,
    longest,
    settle_mix,
)
from tuner.workload.plan import Plan, plan
from tuner.workload.traces import Trace, load_trace, resolve_texts
from tuner.workload.vocabulary import PROBE_TEXT, Vocabulary, ordinary_vocabulary, vocabulary_from_tokens

__all__ = [
    "MIXED",
    "PATHS",
    "PROBE_TEXT",
    "Arrivals",
    "Lengths",
    "Plan",
    "Sampling",
    "Trace",
    "Vocabulary",
    "Workload",
    "class_names",
    "constant",
    "load_trace",
    "load_workloads",
    "longest",
    "ordinary_vocabulary",
    "plan",
    "request_body",
    "resolve_texts",
    "settle_mix",
    "vocabulary_from_tokens",
]
