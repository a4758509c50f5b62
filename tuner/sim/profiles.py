"""Owns the simulated machines, models and their pairs; constants only."""

from __future__ import annotations

from dataclasses import replace

from tuner.sim.profile import GIB, Machine, Model, Profile

LLAMA_1B = Model("llama-1b", 1.24e9, 2.32 * GIB, 16, 2048, 32, 8, 64, 128256, 16384)
LLAMA_3B = Model("llama-3b", 3.21e9, 6.02 * GIB, 28, 3072, 24, 8, 128, 128256, 16384)
LLAMA_8B = Model("llama-8b", 8.03e9, 15.0 * GIB, 32, 4096, 32, 8, 128, 128256, 16384)
QWEN_14B = Model("qwen-14b", 14.8e9, 27.6 * GIB, 40, 5120, 40, 8, 128, 151936, 16384)
QWEN_32B = Model("qwen-32b", 32.8e9, 61.1 * GIB, 64, 5120, 40, 8, 128, 151936, 16384)
LLAMA_70B = Model("llama-70b", 70.6e9, 131.5 * GIB, 80, 8192, 64, 8, 128, 128256, 16384)
RANDOM_SMALL = Model("random-small", 30e6, 0.06 * GIB, 8, 512, 8, 4, 64, 4096, 4096)

# Fitted by benchmarks/calibrate_sim.py; how close it comes stands in docs/simulator.md.
H200 = Machine(
    name="h200",
    device="cuda",
    memory_bytes=139.8 * GIB,
    free_bytes=139.29 * GIB,
    bandwidth=4.76e12,
    flops=749e12,
    attention_flops=763e12,
    knee=1.22,
    step_s=0.63e-3,
    step_seq_s=6.2e-6,
    cpu_step_s=1.15e-3,
    cpu_seq_s=8.4e-6,
    eager_s=14e-3,
    piecewise_s=4.9e-3,
    mixed_s=1.65e-3,
    request_s=0.48e-3,
    prompt_token_s=0.31e-6,
    token_s=12e-6,
    chunk_s=25.7e-6,
    turns=4.1,
    latency_s=5.3e-3,
    cores=16,
    link_bandwidth=300e9,
    link_latency_s=12e-6,
    start_s=61.0,
    compile_s=29.0,
    default_budget=8192,
    default_seqs=1024,
)

# Scaled from the H200 by data sheets; assumed, not measured. Below 70 GiB vLLM's defaults are smaller.
H100 = replace(H200, name="h100", memory_bytes=79.2 * GIB, free_bytes=78.7 * GIB, bandwidth=3.2e12, flops=740e12)
A100 = replace(
    H200,
    name="a100",
    memory_bytes=79.3 * GIB,
    free_bytes=78.8 * GIB,
    bandwidth=1.9e12,
    flops=270e12,
    attention_flops=230e12,
    piecewise_s=6.5e-3,
    cpu_step_s=1.6e-3,
    cpu_seq_s=12e-6,
    link_bandwidth=220e9,
    link_latency_s=15e-6,
)
L40S = replace(
    H200,
    name="l40s",
    memory_bytes=44.5 * GIB,
    free_bytes=44.0 * GIB,
    bandwidth=0.8e12,
    flops=290e12,
    attention_flops=200e12,
    link_bandwidth=20e9,
    link_latency_s=30e-6,
    default_budget=2048,
    default_seqs=256,
)
RTX4090 = replace(
    L40S,
    name="rtx4090",
    memory_bytes=23.52 * GIB,
    free_bytes=23.1 * GIB,
    bandwidth=0.92e12,
    flops=150e12,
    attention_flops=110e12,
    cores=8,
)
L4 = replace(
    L40S,
    name="l4",
    memory_bytes=22.0 * GIB,
    free_bytes=21.7 * GIB,
    bandwidth=0.27e12,
    flops=95e12,
    attention_flops=60e12,
    cores=8,
    cpu_step_s=2.0e-3,
    cpu_seq_s=14e-6,
)
A10G = replace(L4, name="a10g", memory_bytes=22.1 * GIB, free_bytes=21.6 * GIB, bandwidth=0.52e12, flops=90e12, cores=4)

# Set by hand to the effects that two cores with the `random-small` model showed on vLLM's CPU build.
CPU2 = replace(
    H200,
    name="cpu2",
    device="cpu",
    memory_bytes=22.0 * GIB,
    free_bytes=18.5 * GIB,
    bandwidth=15e9,
    flops=0.25e12,
    attention_flops=0.15e12,
    knee=1.0,
    step_s=2.2e-3,
    step_seq_s=0.5e-3,
    eager_s=2e-3,
    piecewise_s=2e-3,
    mixed_s=1e-3,
    request_s=1.5e-3,
    prompt_token_s=2e-6,
    token_s=80e-6,
    chunk_s=120e-6,
    turns=2.0,
    latency_s=3e-3,
    cores=2,
    start_s=18.0,
    compile_s=25.0,
    default_budget=2048,
    default_seqs=128,
    graph_bytes=0.0,
)

H200_8B = Profile(H200, LLAMA_8B)
CPU2_SMALL = Profile(CPU2, RANDOM_SMALL, defaults=(("kv-cache-memory-bytes", 256 << 20),))

PROFILES = {"h200-8b": H200_8B, "cpu2-small": CPU2_SMALL}
"""By the name that VLLM_SIM_PROFILE takes."""
