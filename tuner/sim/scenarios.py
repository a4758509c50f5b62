"""Owns the development scenarios: simulated tuning problems that the search may be designed on (`held_out` is not)."""

from __future__ import annotations

from dataclasses import replace

from tuner.sim.profile import Profile
from tuner.sim.profiles import A10G, H100, H200, L4, L40S, LLAMA_1B, LLAMA_3B, LLAMA_8B, QWEN_14B
from tuner.sim.scenario import Load, Scenario

KV_BOUND = Scenario(
    name="kv-bound",
    profile=Profile(L40S, replace(QWEN_14B, max_model_len=8192)),
    loads=(
        Load("short_in_long_out", 256, 768, ttft_ms=2000, tpot_ms=90, start_rps=3.5),
        Load("long_in_long_out", 3000, 500, ttft_ms=4000, tpot_ms=90, start_rps=0.9),
    ),
    knobs={
        "gpu-memory-utilization": (0.88, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98),
        "max-num-seqs": (16, 24, 32, 48, 64, 96, 128, 256),
        "max-num-batched-tokens": (256, 512, 1024, 2048, 4096),
        "max-cudagraph-capture-size": (32, 128, 512),
    },
    limiter="kv-bound",
    note="28 GiB of weights on a 44 GiB card: sequences are preempted long before the device is busy.",
)

PREFILL_INTERFERENCE = Scenario(
    name="prefill-interference",
    profile=Profile(H200, LLAMA_8B),
    loads=(
        Load("long_in_short_out", 4096, 64, ttft_ms=1500, tpot_ms=45, start_rps=6.0),
        Load("long_in_long_out", 4096, 512, ttft_ms=1500, tpot_ms=30, start_rps=5.0),
    ),
    knobs={
        "max-num-batched-tokens": (512, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
        "max-num-seqs": (16, 32, 64, 128, 256, 1024),
        "long-prefill-token-threshold": (0, 256, 512, 1024, 2048),
        "performance-mode": ("balanced", "interactivity", "throughput"),
    },
    limiter="prefill-interference",
    note="Long prompts on a large card: a budget of two prompts makes decodes wait 200 ms.",
)

DECODE_BOUND = Scenario(
    name="decode-bound",
    profile=Profile(H200, LLAMA_8B, defaults=(("max-cudagraph-capture-size", 256),)),
    loads=(
        Load("short_in_long_out", 256, 768, ttft_ms=3000, tpot_ms=20, start_rps=23.0, weight=2.0),
        Load("short_in_short_out", 256, 128, ttft_ms=1500, tpot_ms=20, start_rps=70.0),
    ),
    knobs={
        "max-num-batched-tokens": (1024, 2048, 4096, 8192, 16384),
        "max-num-seqs": (128, 192, 256, 320, 384, 512, 1024),
        "max-cudagraph-capture-size": (128, 256, 384, 512, 1024),
        "performance-mode": ("balanced", "interactivity"),
    },
    limiter="decode-bound",
    note="Many short prompts with long answers: the batch grows, partly beyond the graphs, until a step is too long.",
)

API_SERVER_BOUND = Scenario(
    name="api-server-bound",
    profile=Profile(
        replace(
            H100,
            name="h100-slow-host",
            request_s=1.2e-3,
            prompt_token_s=1e-6,
            token_s=20e-6,
            chunk_s=45e-6,
            cpu_step_s=1.8e-3,
            cpu_seq_s=20e-6,
            cores=8,
        ),
        LLAMA_1B,
    ),
    loads=(
        Load("short_in_short_out", 128, 48, ttft_ms=150, tpot_ms=15, start_rps=90.0),
        Load("short_in_long_out", 128, 256, ttft_ms=250, tpot_ms=15, start_rps=28.0),
    ),
    knobs={
        "api-server-count": (1, 2, 3, 4, 6, 8),
        "max-num-seqs": (64, 128, 256, 512, 1024),
        "max-num-batched-tokens": (1024, 2048, 8192),
        "stream-interval": (1, 2, 4),
    },
    limiter="api-server-bound",
    note="A small model on a slow host: one API server process is busy before the device is.",
)

DEFAULTS_BEST = Scenario(
    name="defaults-best",
    profile=Profile(H200, LLAMA_8B),
    loads=(
        Load("short_in_long_out", 256, 768, ttft_ms=1000, tpot_ms=20, start_rps=24.0),
        Load("short_in_short_out", 256, 128, ttft_ms=500, tpot_ms=20, start_rps=70.0),
    ),
    knobs={
        "max-num-batched-tokens": (1024, 2048, 4096, 8192, 16384),
        "max-num-seqs": (64, 128, 256, 512, 1024),
        "async-scheduling": (False, True),
        "max-cudagraph-capture-size": (128, 256, 512),
        "block-size": (16, 32, 64),
    },
    limiter="decode-bound",
    note="Nothing in the space is better than the defaults.",
)

INTERACTION = Scenario(
    name="interaction",
    profile=Profile(
        L40S,
        LLAMA_8B,
        defaults=(("gpu-memory-utilization", 0.55), ("max-num-seqs", 48), ("max-model-len", 8192)),
    ),
    loads=(
        Load("medium_in_long_out", 1000, 700, ttft_ms=2500, tpot_ms=80, start_rps=1.6),
        Load("medium_in_medium_out", 1200, 400, ttft_ms=2500, tpot_ms=80, start_rps=2.5),
    ),
    knobs={
        "gpu-memory-utilization": (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9),
        "max-num-seqs": (32, 40, 48, 64, 80, 96, 128, 160),
        "max-num-batched-tokens": (1024, 2048, 4096),
        "watermark": (0.0, 0.05),
    },
    limiter="queueing",
    note="More sequences alone are preempted, more memory alone is not used; both together pay.",
)

NARROW = Scenario(
    name="narrow",
    profile=Profile(L4, replace(LLAMA_3B, vocabulary=202048, max_model_len=4096)),
    loads=(
        Load("short_in_long_out", 100, 300, ttft_ms=2500, tpot_ms=130, start_rps=9.0),
        Load("short_in_short_out", 100, 100, ttft_ms=2500, tpot_ms=130, start_rps=20.0),
    ),
    knobs={
        "gpu-memory-utilization": (0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96),
        "max-num-seqs": (128, 256, 320, 384, 512, 640, 768, 1024),
        "max-num-batched-tokens": (1024, 2048, 4096, 8192, 16384),
        "max-cudagraph-capture-size": (256, 512),
    },
    limiter="queueing",
    note="More sequences crash in the sampler's warm-up unless memory utilisation goes down first.",
)

NOISY = Scenario(
    name="noisy",
    profile=Profile(
        A10G, replace(LLAMA_3B, max_model_len=8192), start_noise=0.06, step_noise=0.1, hiccup_share=0.003, hiccup_s=0.04
    ),
    loads=(
        Load("long_in_short_out", 3000, 100, ttft_ms=3000, tpot_ms=70, sigma=0.3, start_rps=1.5),
        Load("long_in_long_out", 2000, 400, ttft_ms=3000, tpot_ms=45, sigma=0.3, start_rps=1.3),
    ),
    knobs={
        "max-num-batched-tokens": (256, 512, 768, 1024, 2048, 4096, 8192),
        "max-num-seqs": (16, 32, 64, 128, 256),
        "long-prefill-token-threshold": (0, 256, 512, 1024),
        "gpu-memory-utilization": (0.88, 0.9, 0.92, 0.94),
    },
    limiter="prefill-interference",
    note="Few requests a second, wide lengths, starts that differ by 6 %.",
)

QUEUEING = Scenario(
    name="queueing",
    profile=Profile(L40S, LLAMA_3B),
    loads=(
        Load("short_in_long_out", 200, 400, ttft_ms=1000, tpot_ms=50, start_rps=25.0),
        Load("short_in_short_out", 300, 100, ttft_ms=800, tpot_ms=50, start_rps=45.0),
    ),
    knobs={
        "max-num-seqs": (64, 128, 192, 256, 320, 384, 512, 640, 768),
        "max-num-batched-tokens": (768, 1024, 2048, 4096, 8192),
        "gpu-memory-utilization": (0.88, 0.9, 0.92, 0.94),
        "async-scheduling": (False, True),
    },
    limiter="queueing",
    note="The default limit of 256 sequences leaves the device half used.",
)

PARALLEL = Scenario(
    name="parallel",
    profile=Profile(replace(L40S, devices=4, cores=32), replace(QWEN_14B, max_model_len=8192)),
    loads=(
        Load("short_in_long_out", 300, 400, ttft_ms=1500, tpot_ms=60, start_rps=5.0),
        Load("long_in_short_out", 3000, 100, ttft_ms=2500, tpot_ms=90, start_rps=1.5),
    ),
    knobs={
        "tensor-parallel-size": (1, 2, 4),
        "data-parallel-size": (1, 2, 4),
        "max-num-seqs": (64, 128, 256, 512),
        "max-num-batched-tokens": (512, 1024, 2048, 4096, 8192),
        "gpu-memory-utilization": (0.9, 0.92, 0.94),
    },
    limiter="decode-bound",
    note="Four cards without a fast link, of which the defaults use one.",
)

SCENARIOS = (
    KV_BOUND,
    PREFILL_INTERFERENCE,
    DECODE_BOUND,
    API_SERVER_BOUND,
    DEFAULTS_BEST,
    INTERACTION,
    NARROW,
    NOISY,
    QUEUEING,
    PARALLEL,
)
