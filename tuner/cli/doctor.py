"""`tune doctor`: whether this machine can run a study, check by check."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tuner.errors import EnvironmentFault, ExitCode, InputError

if TYPE_CHECKING:
    from tuner.environment.checkup import Check

_FORMAT_VERSION = 1


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the machine",
        description="Check whether this machine can run a study: GPU, vLLM, limits, disk, client, clock.",
        epilog="exit codes: 0 when nothing fails (warnings included), 2 bad input, 3 when something does",
    )
    parser.add_argument("--vllm", default="vllm", metavar="PATH", help="which vLLM executable (default: vllm)")
    parser.add_argument("--model", metavar="MODEL", help="also look for this model: a folder or a hub name")
    parser.add_argument("--gpus", metavar="LIST", help="which GPUs, e.g. 0,1 (default: as `tune run` would choose)")
    parser.add_argument("--out", metavar="DIR", default="results", help="where results would go (default: results)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    from tuner.environment.checkup import Status

    checks = []
    for check in _checks(arguments):
        checks.append(check)
        if not arguments.json:
            print(f"{check.status:4}  {check.name:14} {check.evidence}", flush=True)
            if check.remedy:
                print(f"{'':21}→ {check.remedy}", flush=True)
    failed = sum(check.status is Status.FAIL for check in checks)
    if arguments.json:
        from dataclasses import asdict

        found = [asdict(check) for check in checks]
        print(json.dumps({"format_version": _FORMAT_VERSION, "ok": not failed, "checks": found}, indent=2))
    elif failed:
        print(f"\n{failed} of {len(checks)} checks failed; a study would not run here.")
    else:
        warned = sum(check.status is Status.WARN for check in checks)
        print(f"\nA study can run here{f', with {warned} warnings' if warned else ''}.")
    return int(ExitCode.ENVIRONMENT if failed else ExitCode.OK)


def _checks(arguments: argparse.Namespace) -> Iterator[Check]:
    """As they become known; InputError for a bad --gpus."""
    from pathlib import Path

    from tuner.cli.asked import chosen_gpus
    from tuner.environment import checkup
    from tuner.server import find_vllm

    out = Path(arguments.out)
    try:
        install = find_vllm(arguments.vllm)
    except (EnvironmentFault, InputError) as error:
        yield checkup.Check("vllm", checkup.Status.FAIL, str(error), "Install vLLM, or name its executable by --vllm.")
        gpus: tuple[int, ...] = ()
    else:
        yield checkup.check_vllm(install)
        gpus = chosen_gpus(arguments, install)
        if install.device == "cuda" and not install.simulated and not gpus:
            remedy = "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or name a CPU build by --vllm."
            yield checkup.Check("gpu", checkup.Status.FAIL, "a CUDA build of vLLM, and no GPU is visible", remedy)
    if arguments.model is not None:
        yield checkup.check_model(arguments.model)
    yield from checkup.check_gpus(gpus)
    yield checkup.check_locks(gpus)
    yield checkup.check_earlier_runs(out)
    yield checkup.check_limits()
    yield checkup.check_port()
    yield from checkup.check_disk(out)
    yield checkup.check_shared_memory()
    yield checkup.check_memory()
    yield checkup.check_client()
    yield checkup.check_clock()
    yield checkup.check_name()
