"""A whole trial on a real vLLM on CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.synthetic import slo
from tuner.capacity import DEMO
from tuner.environment import facts, idle_baseline
from tuner.records import Outcome, Slo, TrialState
from tuner.server import find_vllm
from tuner.store import ResultsFolder
from tuner.trial import TrialContext, bench
from tuner.workload import Workload, constant, ordinary_vocabulary


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_trial(vllm_executable: Path, timing_model: Path, tmp_path: Path) -> None:
    # A model that is slow enough to be the limit itself: the smallest one outruns a client on the same two cores.
    install = find_vllm(str(vllm_executable))
    context = TrialContext(
        install=install,
        model=str(timing_model),
        fixed={
            "load-format": "dummy",
            "max-model-len": 512,
            "enforce-eager": True,
            "kv-cache-memory-bytes": 64 * 2**20,
        },
        gpus=(),
        workloads={"chat": Workload("chat", constant(32), constant(16), seed=1, digest="a")},
        slo=Slo({"chat": slo(0.9, ttft=(95, 1.0), tpot=(95, 0.2))}, "digest"),
        folder=ResultsFolder(tmp_path / "study"),
        environment=facts(install, ()),
        idle=idle_baseline(()),
        vocabulary=ordinary_vocabulary(timing_model),
    )
    settings = replace(DEMO, window_s=3.0, warm_up_s=2.0, proof_s=2.0, max_shifts=4, max_probes=3)
    record = bench({"max-num-seqs": 8}, context, workloads=("chat",), seed=1, settings=settings)
    assert (record.state, record.failure) == (TrialState.COMPLETE, None)
    capacity = record.capacities["chat"]
    assert 0.1 < capacity.rate_rps < math.inf
    assert record.effective["max-num-seqs"] == 8
    assert record.degraded == ()
    valid = [probe for probe in capacity.probes if probe.outcome is not Outcome.INVALID]
    assert valid
    for probe in valid:
        requests = context.folder.requests(record, probe.requests_file)
        assert {(r.input_tokens, r.output_tokens) for r in requests if r.ok} == {(32, 16)}
        assert probe.telemetry is not None
        assert probe.telemetry.counters["prefix_hits"] == 0
