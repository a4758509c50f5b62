"""Owns the held-out scenarios: simulated tuning problems that the search must not be designed on."""

from __future__ import annotations

from dataclasses import replace

from tuner.sim.profile import Profile
from tuner.sim.profiles import A10G, A100, H100, L4, L40S, LLAMA_1B, LLAMA_3B, LLAMA_8B, LLAMA_70B, QWEN_32B, RTX4090
from tuner.sim.scenario import Load, Scenario

A100_DOCUMENTS = Scenario(
    name="a100-documents",
    profile=Profile(A100, LLAMA_8B),
    loads=(
        Load("classify", 6000, 24, ttft_ms=4000, tpot_ms=120, start_rps=1.2),
        Load("summarise", 4000, 150, ttft_ms=3000, tpot_ms=55, start_rps=1.5),
    ),
    knobs={
        "max-num-batched-tokens": (768, 1024, 1536, 2048, 4096, 8192, 16384),
        "max-num-seqs": (32, 64, 128, 256, 512, 768, 1024),
        "long-prefill-token-threshold": (0, 512, 1024, 2048),
        "async-scheduling": (False, True),
    },
    limiter="prefill-interference",
    note="Documents on an older large card, with short and with longer answers.",
)

H100_32B = Scenario(
    name="h100-32b",
    profile=Profile(H100, replace(QWEN_32B, max_model_len=8192), defaults=(("max-num-seqs", 512),)),
    loads=(
        Load("reasoning", 400, 900, ttft_ms=3000, tpot_ms=70, start_rps=1.0),
        Load("retrieval", 3500, 150, ttft_ms=4000, tpot_ms=110, start_rps=1.0),
    ),
    knobs={
        "gpu-memory-utilization": (0.88, 0.9, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97),
        "max-num-seqs": (16, 24, 32, 48, 64, 128, 256, 512),
        "max-num-batched-tokens": (512, 1024, 2048, 4096, 8192),
        "watermark": (0.0, 0.02, 0.05),
    },
    limiter="kv-bound",
    note="Weights fill most of the card; little memory is left for KV.",
)

RTX4090_AGENTS = Scenario(
    name="rtx4090-agents",
    profile=Profile(
        replace(RTX4090, request_s=3.5e-3, prompt_token_s=1.5e-6, token_s=45e-6, chunk_s=110e-6, cores=6), LLAMA_1B
    ),
    loads=(
        Load("tool_call", 400, 40, ttft_ms=250, tpot_ms=25, start_rps=40.0, shared_prefix_tokens=800),
        Load("answer", 300, 200, ttft_ms=350, tpot_ms=25, start_rps=20.0, shared_prefix_tokens=800),
    ),
    knobs={
        "api-server-count": (1, 2, 3, 4),
        "enable-prefix-caching": (False, True),
        "max-num-seqs": (64, 128, 256, 512),
        "max-num-batched-tokens": (1024, 2048, 8192),
        "block-size": (16, 32),
    },
    limiter="api-server-bound",
    note="Short agent calls with a common system prompt on a desktop host.",
)

L4_8B = Scenario(
    name="l4-8b",
    profile=Profile(L4, replace(LLAMA_8B, max_model_len=4096)),
    loads=(
        Load("chat", 300, 300, ttft_ms=2500, tpot_ms=160, start_rps=1.5),
        Load("extract", 1800, 60, ttft_ms=4000, tpot_ms=250, start_rps=0.7),
    ),
    knobs={
        "gpu-memory-utilization": (0.88, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96),
        "max-num-seqs": (8, 16, 32, 48, 64, 96, 128, 256),
        "max-num-batched-tokens": (512, 1024, 2048, 4096),
        "max-cudagraph-capture-size": (64, 512),
    },
    limiter="kv-bound",
    note="A card that the model just fits; crashes on every side.",
)

H100X4_70B = Scenario(
    name="h100x4-70b",
    profile=Profile(
        replace(H100, devices=4, cores=64),
        replace(LLAMA_70B, max_model_len=8192),
        defaults=(("tensor-parallel-size", 2),),
    ),
    loads=(
        Load("chat", 600, 300, ttft_ms=1500, tpot_ms=60, start_rps=2.0),
        Load("long_in_short_out", 3000, 100, ttft_ms=3000, tpot_ms=90, start_rps=1.0),
    ),
    knobs={
        "tensor-parallel-size": (2, 4),
        "data-parallel-size": (1, 2),
        "gpu-memory-utilization": (0.9, 0.92, 0.94, 0.95, 0.96),
        "max-num-seqs": (32, 64, 128, 256, 1024),
        "max-num-batched-tokens": (1024, 2048, 4096, 8192),
    },
    limiter="kv-bound",
    note="A large model on two of four cards.",
)

A10G_3B = Scenario(
    name="a10g-3b",
    profile=Profile(A10G, LLAMA_3B, start_noise=0.05, step_noise=0.08, hiccup_share=0.002, hiccup_s=0.03),
    loads=(
        Load("short_in_long_out", 150, 350, ttft_ms=1500, tpot_ms=90, start_rps=8.0, sigma=0.25),
        Load("short_in_short_out", 200, 80, ttft_ms=1500, tpot_ms=90, start_rps=15.0, sigma=0.25),
    ),
    knobs={
        "max-num-seqs": (64, 128, 192, 256, 320, 384, 512, 640),
        "max-num-batched-tokens": (1024, 2048, 4096, 8192),
        "gpu-memory-utilization": (0.84, 0.86, 0.88, 0.9, 0.92, 0.94),
        "max-cudagraph-capture-size": (256, 512),
    },
    limiter="queueing",
    note="The default limit on sequences binds first; starts differ by 5 %.",
)

L40S_STEADY = Scenario(
    name="l40s-steady",
    profile=Profile(L40S, LLAMA_8B),
    loads=(
        Load("short_in_long_out", 300, 400, ttft_ms=2000, tpot_ms=45, start_rps=8.0),
        Load("short_in_short_out", 200, 150, ttft_ms=2000, tpot_ms=45, start_rps=18.0),
    ),
    knobs={
        "max-num-batched-tokens": (512, 1024, 2048, 4096, 8192),
        "max-num-seqs": (64, 128, 256, 512),
        "performance-mode": ("balanced", "throughput"),
        "gpu-memory-utilization": (0.88, 0.9, 0.92, 0.94),
    },
    limiter="decode-bound",
    note="Little to gain.",
)

HELD_OUT = (A100_DOCUMENTS, H100_32B, RTX4090_AGENTS, L4_8B, H100X4_70B, A10G_3B, L40S_STEADY)
