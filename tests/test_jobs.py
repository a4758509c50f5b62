"""The jobs under docs/jobs: each is read by its own tool or schema, and each `tune` line by the real parser."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tuner.cli import build_parser
from tuner.nightly import load_profile

JOBS = Path(__file__).resolve().parents[1] / "docs" / "jobs"


def accepted(words: list[str]) -> None:
    """The words are what the command line takes; variables of the shell stand for one word each."""
    assert Path(words[0]).name == "tune"
    arguments = build_parser().parse_args([re.sub(r"\$\{?\w+\}?", "x", word) for word in words[1:]])
    assert arguments.command == "nightly"
    assert arguments.profile.endswith("nightly.yaml")


def test_the_profile_with_every_key_is_valid(tmp_path: Path) -> None:
    shutil.copy(JOBS / "nightly.yaml", tmp_path)
    (tmp_path / "slo.yaml").write_text("slo: {ttft: {p99: 500}}\n")
    profile = load_profile(tmp_path / "nightly.yaml")
    assert profile.search.wall_s == 3 * 3600
    assert profile.flags == ("--max-model-len", "16384")
    assert profile.results == tmp_path / "results" / "nightly" / "chat"


def test_systemd_units(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(JOBS / "vllm-tune-nightly.service")
    accepted(shlex.split(unit["Service"]["ExecStart"]))
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    for name in ("vllm-tune-nightly.service", "vllm-tune-nightly.timer"):
        # It also looks for the program, which is not installed here.
        text = (JOBS / name).read_text().replace("/opt/vllm-tune/bin/tune", "/bin/true")
        (tmp_path / name).write_text(text)
    checked = subprocess.run(
        [analyze, "verify", "--man=no", *(str(path) for path in sorted(tmp_path.glob("vllm-tune-nightly.*")))],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in checked.stderr.splitlines() if "vllm-tune-nightly" in line]
    assert (checked.returncode, complaints) == (0, [])


def test_cron_line() -> None:
    lines = (JOBS / "vllm-tune-nightly.cron").read_text().splitlines()
    jobs = [line for line in lines if line and not line.startswith("#") and not re.match(r"[A-Z]+=", line)]
    (job,) = jobs
    *schedule, user, command = job.split(maxsplit=6)
    assert schedule == ["0", "2", "*", "*", "*"]
    assert user == "vllm"
    assert "%" not in command  # cron turns it into a line break (crontab(5))
    assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0
    accepted(shlex.split(command[command.index("tune nightly") : command.index(" >>")]))


def test_github_workflow() -> None:
    document = yaml.safe_load((JOBS / "github-nightly.yml").read_text())
    assert set(document) == {"name", True, "permissions", "concurrency", "jobs"}  # YAML 1.1 reads `on` as true
    assert document[True]["schedule"] == [{"cron": "0 2 * * *"}]
    job = document["jobs"]["nightly"]
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    assert all(subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0 for script in scripts)
    assert "${{" not in "".join(scripts)  # what a user enters must not become a part of a script
    accepted(shlex.split(scripts[0].replace("\\\n", " ").replace('${OTHER_VLLM:+--vllm "$OTHER_VLLM"}', "--vllm b")))


def test_kubernetes_cronjob() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    claim, job = yaml.safe_load_all((JOBS / "kubernetes-cronjob.yaml").read_text())
    for manifest in (claim, job):
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    accepted(container["command"])
    assert pod["hostname"] == "vllm-nightly"  # else a pod's name, and with it the host in every record, is new
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert claim["metadata"]["name"] in {v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]}


def test_slurm_script() -> None:
    path = JOBS / "slurm-nightly.sh"
    text = path.read_text()
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all(text.splitlines().index(line) < first_command for line in directives)  # later ones are ignored
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in directives)
    command = next(line for line in text.splitlines() if line.startswith("exec "))
    accepted(shlex.split(command.removeprefix("exec ")))
