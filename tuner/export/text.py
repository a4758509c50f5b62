"""Exports that are one text for one machine: vLLM's YAML, a shell script, a systemd unit, JSON and the lock."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import asdict
from datetime import UTC, datetime

from tuner.export.deployment import Deployment, answers_text, ratio_text
from tuner.export.rates import ALONE, Rate
from tuner.records import FORMAT_VERSION, Estimate, Slo
from tuner.serve_args import ServeFlags, to_vllm_yaml
from tuner.study.values import Objective


def head(deployment: Deployment, *, every_flag: bool = False) -> str:
    """What the file is and what its numbers rest on, as plain lines; `every_flag` where notes have no other place."""
    facts = deployment.environment
    lines = [
        f"vLLM configuration for {deployment.model}",
        f"found by vllm-tune {deployment.tuner_version}, study {deployment.study}, trial {deployment.trial}",
        f"measured with vLLM {facts.vllm_version} on {' + '.join(facts.gpus) or facts.cpu}",
        f"verdict: {deployment.verdict}"
        + (f", {ratio_text(deployment.gain)} of the baseline" if deployment.gain else ""),
        *(f"NOT VERIFIED: {warning}" for warning in deployment.warnings),
        *(
            f"{deployment.wording.noun} {name}: {_rate(rates.best)} {deployment.wording.unit}"
            f" (baseline {_rate(rates.baseline)})"
            + (f", {ratio_text(rates.gain)} of it" if rates.gain is not None else "")
            for name, rates in deployment.classes.items()
        ),
        *([] if deployment.quality is None else [f"answers: {answers_text(deployment.quality)}"]),
        *([ALONE] if sum(rates.gain is not None for rates in deployment.classes.values()) > 1 else []),
        deployment.wording.about,
        *(f"SLO {line}" for line in slo_lines(deployment)),
        *(f"{flag.change}: {flag.note}" for flag in deployment.returned),
        *(
            f"--{name} is not written here because its value is a secret; set it yourself"
            for name in deployment.withheld
        ),
    ]
    if every_flag:
        lines += [f"{' '.join(flag.words) or flag.name}: {flag.note}" for flag in deployment.flags]
    return "\n".join(line for text in lines for line in text.splitlines())


def slo_lines(deployment: Deployment) -> list[str]:
    """`short: ttft p99 <= 500 ms, tpot p99 <= 40 ms, success >= 99.9 %`, one line a class."""
    return [
        f"{name}: "
        + ", ".join(f"{limit.metric} p{limit.percentile:g} <= {limit.limit_s * 1000:g} ms" for limit in slo.limits)
        + f", success >= {slo.success * 100:g} %"
        for name, slo in deployment.slo.classes.items()
    ]


def slo_document(slo: Slo) -> dict[str, object]:
    """The promise in the shape of `slo.yaml`, so that `tuner.slo.parse_slo` reads it back."""
    classes: dict[str, dict[str, object]] = {}
    for name, promise in slo.classes.items():
        limits: dict[str, dict[str, float]] = {}
        for limit in promise.limits:
            name_of = "max" if limit.percentile == 100 else f"p{limit.percentile:g}"
            limits.setdefault(limit.metric.value, {})[name_of] = limit.limit_s * 1000
        classes[name] = {**limits, "success": promise.success, "weight": promise.weight}
    return {"classes": classes}


def vllm_yaml(deployment: Deployment, flags: ServeFlags) -> str:
    """For `vllm serve --config best.yaml`."""
    comments = {flag.name: flag.note for flag in deployment.flags} | {"": head(deployment)}
    return to_vllm_yaml(deployment.source, deployment.config, flags, comments)


def shell(deployment: Deployment) -> str:
    """A script that becomes the server; further flags (`--host`, `--port`) are passed on."""
    lines = ["#!/usr/bin/env bash", *_comments(head(deployment)), "set -euo pipefail", ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in deployment.variables.items()]
    lines += ["flags=("]
    for flag in deployment.flags:
        lines += [f"  {line}" for line in (*_comments(flag.note), shlex.join(flag.words)) if line]
    lines += [")", f'exec "${{VLLM:-vllm}}" serve {shlex.quote(deployment.source)} "${{flags[@]}}" "$@"']
    return "\n".join(lines) + "\n"


def systemd(deployment: Deployment) -> str:
    """A system service. It restarts always, because vLLM ends with exit code 0 when its engine has died."""
    words = (
        deployment.vllm_path,
        "serve",
        deployment.source,
        *deployment.words,
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    )
    environment = [f"Environment={_systemd_word(f'{name}={value}')}" for name, value in deployment.variables.items()]
    return "\n".join(
        [
            *_comments(head(deployment, every_flag=True)),
            "",
            "[Unit]",
            f"Description=vLLM serving {_systemd_text(deployment.model)}",
            "Wants=network-online.target",
            "After=network-online.target",
            "",
            "[Service]",
            "Type=exec",
            "# A system user that may read the model. HF_TOKEN and VLLM_API_KEY, if needed, go into the file below.",
            "User=vllm",
            "EnvironmentFile=-/etc/vllm/secrets.env",
            "CacheDirectory=vllm",
            "Environment=VLLM_CACHE_ROOT=/var/cache/vllm HF_HOME=/var/cache/vllm/huggingface",
            *environment,
            f"ExecStart={' '.join(_systemd_word(word) for word in words)}",
            "# vLLM exits with code 0 when its engine has died, so only `always` brings it back.",
            "Restart=always",
            "RestartSec=5",
            "KillMode=mixed",
            "TimeoutStopSec=60",
            "LimitNOFILE=65536",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def as_json(deployment: Deployment) -> str:
    """Everything that the other formats say, for programs."""
    return json.dumps(document(deployment), indent=1, ensure_ascii=False) + "\n"


def lock(deployment: Deployment) -> str:
    """What the configuration was measured with: read by `tune verify`, which names what has drifted since."""
    return json.dumps({"kind": "lock", **document(deployment)}, indent=1, ensure_ascii=False) + "\n"


def document(deployment: Deployment) -> dict[str, object]:
    """The deployment as plain data; keys are part of the interface (docs/export.md)."""
    return {
        "format_version": FORMAT_VERSION,
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tuner_version": deployment.tuner_version,
        "study": deployment.study,
        "trial": deployment.trial,
        "model": deployment.model,
        "verdict": deployment.verdict,
        "verified": deployment.verified,
        "simulated": deployment.simulated,
        "warnings": list(deployment.warnings),
        "command": ["vllm", "serve", deployment.source, *deployment.words],
        "flags": [{"name": flag.name, "value": flag.value, "note": flag.note} for flag in deployment.flags],
        "returned": [{"name": f.name, "baseline": f.baseline, "note": f.note} for f in deployment.returned],
        "withheld": list(deployment.withheld),
        "fixed": dict(deployment.fixed),
        "baseline": dict(deployment.baseline),
        "variables": dict(deployment.variables),
        "gain": _plain(deployment.gain),
        "objective": deployment.objective,
        # What was found at a given rate is no capacity, and `tune verify` would take it for one.
        "capacity_rps": {
            name: {"baseline": _plain(rates.baseline), "best": _plain(rates.best), "gain": _plain(rates.gain)}
            for name, rates in deployment.classes.items()
            if deployment.objective == Objective.CAPACITY
        },
        "runs_rps": [dict(run) for run in deployment.runs],
        "speed": deployment.speed,
        "slo": slo_document(deployment.slo),
        "quality": asdict(deployment.quality) if deployment.quality is not None else None,
        "environment": asdict(deployment.environment),
        "digests": dict(deployment.digests),
        "reproduce": f"tune verify best.yaml (raw records: results/{deployment.study}, trial {deployment.trial})",
    }


def _plain(estimate: Estimate | None) -> dict[str, object] | None:
    """As data; an end that is unbounded is null, since JSON knows no infinity."""
    if estimate is None:
        return None
    return {name: None if value == math.inf else value for name, value in asdict(estimate).items()}


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return "none"
    spread = f" ({rate.low:.3g} to {rate.high:.3g}, n = {rate.n})" if rate.n > 1 else ""
    return f"{rate.mark}{rate.value:.3g}{spread}"


def _comments(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _systemd_text(text: str) -> str:
    # Specifiers start with a percent sign (systemd.unit(5), "Specifiers"); a line break would end the setting.
    return re.sub(r"\s+", " ", text).replace("%", "%%")


def _systemd_word(word: str) -> str:
    """One argument as systemd.service(5), "Command lines", quotes it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@+=:,./%$-]+", escaped) else f'"{escaped}"'
