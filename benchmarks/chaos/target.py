"""What is tuned in a run, and what must come out of it; the truths are known because the settings differ manifold."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuner.finish import Decision
from tuner.records import Config

ROOT = Path(__file__).resolve().parents[2]
KNOB = "max-num-seqs"
FEW, MANY = 1, 128
"""`MANY` is also the default of a vLLM on CPU, real or simulated, so that no third value can be tried."""


@dataclass(frozen=True, slots=True)
class Truth:
    """A study with a verdict that is known beforehand."""

    name: str
    baseline: int
    decision: Decision
    best: int
    impossible: int | None = None  # the only value that must be judged infeasible
    environment: Mapping[str, str] = field(default_factory=dict)

    def holds(self, decision: Decision, config: Config) -> bool:
        return decision is self.decision and config.get(KNOB, MANY) == self.best


TRUTHS = (
    Truth("improves", FEW, Decision.IMPROVED, MANY),
    Truth("keeps", MANY, Decision.KEEP_DEFAULTS, MANY),
    Truth(
        "cannot start",
        FEW,
        Decision.KEEP_DEFAULTS,
        FEW,
        impossible=MANY,
        environment={"VLLM_SIM_FAULT": f"start:kv-cache-none if {KNOB}>={MANY}"},
    ),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A vLLM, real or simulated."""

    name: str
    vllm: Path
    model: Path
    fixed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    truths: tuple[Truth, ...] = TRUTHS
    silent_s: float = 20.0  # longest silence of a good start
    output_tokens: int = 8
    ttft_ms: int = 400  # also decides how late the client may be: a twentieth of it
    stride: int = 1  # from one kind of fault to that of the next run


def simulated(folder: Path) -> Target:
    """`vllm-sim` with a small model, both written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    executable, model = folder / "vllm-sim", folder / "model"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tuner.sim.http "$@"\n')
    executable.chmod(0o755)
    model.mkdir(exist_ok=True)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(shape))
    return Target(
        "simulator", executable, model, environment={"VLLM_SIM_PROFILE": "cpu2-small", "VLLM_SIM_START_S": "0.2"}
    )


def real(vllm: Path, model: Path) -> Target:
    """A real vLLM with a model of random weights."""
    fixed = ("--load-format", "dummy", "--max-model-len", "512", "--enforce-eager")
    return Target(
        "vLLM",
        vllm,
        model,
        (*fixed, "--kv-cache-memory-bytes", str(64 * 2**20)),
        truths=(TRUTHS[0], TRUTHS[1]),
        silent_s=90.0,
        output_tokens=32,
        ttft_ms=2000,
        stride=5,
    )


def command(target: Target, truth: Truth, folder: Path, study: Path) -> list[str]:
    """`tune run` of the study; its inputs are written to `folder`. Regular arrivals make short windows sharp."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "short.yaml").write_text(
        "input_tokens: {distribution: constant, value: 16}\n"
        f"output_tokens: {{distribution: constant, value: {target.output_tokens}}}\n"
        "arrivals: {process: gamma, burstiness: 50}\n"
    )
    (folder / "slo.yaml").write_text(f"slo: {{ttft: {{p90: {target.ttft_ms}}}, success: 0.9}}\n")
    return [
        *(sys.executable, "-m", "benchmarks.chaos.tune", "run", "--yes", "--out", str(study)),
        *("--vllm", str(target.vllm), "--model", str(target.model), "--slo", str(folder / "slo.yaml")),
        *("--workloads", str(folder / "short.yaml"), "--speed", "quick", "--baseline", f"{KNOB}={truth.baseline}"),
        *("--trials", "2", "--finish-rounds", "2", "--space", f"{KNOB}={FEW},{MANY}"),
        *(["--", *target.fixed] if target.fixed else []),
    ]


def resume(study: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.chaos.tune", "run", "--yes", "--resume", str(study)]
