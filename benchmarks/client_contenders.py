"""Load generators behind one interface: the command line for a load, and what its result says; it measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Load:
    """`count` requests, all at once (`rate_rps` None) or evenly spaced."""

    count: int
    output_tokens: int
    prompt_tokens: int = 100
    rate_rps: float | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """What a load generator says that it saw; seconds."""

    ttft_s: tuple[float, ...]  # from its own idea of the start, successful requests only
    itl_s: tuple[float, ...]
    succeeded: int
    failed: int
    send_lag_s: tuple[float, ...] = ()
    ttft_sent_s: tuple[float, ...] = ()  # where it tells the two apart


class Contender(Protocol):
    """One load generator. `environment`: variables that it needs."""

    @property
    def name(self) -> str: ...

    @property
    def environment(self) -> Mapping[str, str]: ...

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        """Words that put `load` on the server at `url` and leave the result in `folder`."""

    def read(self, folder: Path) -> Reported:
        """The result that `command` left."""


@dataclass(frozen=True)
class Ours:
    """The load generator of the trials, driven by `client_driver.py`."""

    name: str = "tune"
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        driver = ROOT / "benchmarks" / "client_driver.py"
        return [sys.executable, str(driver), url, json.dumps(asdict(load)), str(folder / "result.json")]

    def read(self, folder: Path) -> Reported:
        found = json.loads((folder / "result.json").read_text())
        return Reported(
            ttft_s=tuple(found["ttft_s"]),
            itl_s=tuple(found["itl_s"]),
            succeeded=found["succeeded"],
            failed=found["failed"],
            send_lag_s=tuple(found["send_lag_s"]),
            ttft_sent_s=tuple(found["ttft_sent_s"]),
        )


@dataclass(frozen=True)
class VllmBench:
    """`vllm bench serve`, its random prompts made by the tokenizer in `tokenizer`."""

    executable: str
    tokenizer: str
    name: str = "vllm bench serve"
    environment: Mapping[str, str] = field(default_factory=lambda: {"HF_HUB_OFFLINE": "1"})

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        rate = ["--request-rate", "inf"]
        if load.rate_rps is not None:
            # A gamma process of so high a shape is an even spacing.
            rate = ["--request-rate", f"{load.rate_rps:g}", "--burstiness", "1000000"]
        words = f"--backend openai --endpoint /v1/completions --model reference --tokenizer {self.tokenizer}"
        words += f" --dataset-name random --random-input-len {load.prompt_tokens} --ignore-eos"
        words += f" --random-output-len {load.output_tokens} --num-prompts {load.count} --disable-tqdm"
        words += " --ready-check-timeout-sec 0 --save-result --save-detailed --result-filename result.json"
        return [
            self.executable,
            "bench",
            "serve",
            *words.split(),
            "--base-url",
            url,
            "--result-dir",
            str(folder),
            *rate,
        ]

    def read(self, folder: Path) -> Reported:
        found = json.loads((folder / "result.json").read_text())
        answered = [index for index, error in enumerate(found["errors"]) if not error]
        return Reported(
            ttft_s=tuple(found["ttfts"][index] for index in answered),
            itl_s=tuple(gap for index in answered for gap in found["itls"][index]),
            succeeded=found["completed"],
            failed=found["failed"],
        )


@dataclass(frozen=True)
class GuideLlm:
    """`guidellm run` with one worker process; it reports no single gaps, only each request's mean."""

    executable: str
    tokenizer: str
    name: str = "guidellm"
    environment: Mapping[str, str] = field(
        default_factory=lambda: {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    )

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        profile = f"kind=throughput,max_concurrency={load.count}"
        if load.rate_rps is not None:
            profile = f"kind=constant,rate={load.rate_rps:g}"
        words = {
            "--backend": f"kind=openai_http,target={url},model=reference,request_format=/v1/completions",
            "--tokenizer": f"kind=huggingface_auto,model={self.tokenizer}",
            "--profile": profile,
            "--constraint": f"kind=max_requests,count={load.count}",
            "--data": f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
            "--output": f"kind=json,path={folder / 'result.json'}",
        }
        return [self.executable, "run", "--disable-console", *(word for pair in words.items() for word in pair)]

    def read(self, folder: Path) -> Reported:
        (benchmark,) = json.loads((folder / "result.json").read_text())["benchmarks"]
        requests = benchmark["requests"]
        timings = [request["info"]["timings"] for request in requests["successful"]]
        tokens = [request["output_metrics"]["text_tokens"] for request in requests["successful"]]
        return Reported(
            ttft_s=tuple(found["first_token_iteration"] - found["request_start"] for found in timings),
            itl_s=tuple(
                (found["last_token_iteration"] - found["first_token_iteration"]) / (count - 1)
                for found, count in zip(timings, tokens, strict=True)
            ),
            succeeded=len(timings),
            failed=len(requests["errored"]),
        )


@dataclass(frozen=True)
class AiPerf:
    """`aiperf profile` with one worker and one record processor."""

    executable: str
    tokenizer: str
    name: str = "aiperf"
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        rate = ["--concurrency", str(load.count)]
        if load.rate_rps is not None:
            rate = ["--request-rate", f"{load.rate_rps:g}", "--request-rate-mode", "constant"]
        words = f"--model reference --endpoint-type completions --streaming --tokenizer {self.tokenizer}"
        words += f" --request-count {load.count} --synthetic-input-tokens-mean {load.prompt_tokens}"
        words += f" --extra-inputs max_tokens:{load.output_tokens} --extra-inputs ignore_eos:true --ui none"
        words += " --export-level records --workers-max 1 --record-processors 1 --no-gpu-telemetry --no-server-metrics"
        return [self.executable, "profile", *words.split(), "--url", url, "--artifact-dir", str(folder), *rate]

    def read(self, folder: Path) -> Reported:
        lines = (folder / "profile_export.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        answered = [record["metrics"] for record in records if not record.get("error")]
        return Reported(
            ttft_s=tuple(found["time_to_first_token"]["value"] / 1e3 for found in answered),
            itl_s=tuple(gap / 1e3 for found in answered for gap in found["inter_chunk_latency"]["value"]),
            succeeded=len(answered),
            failed=len(records) - len(answered),
        )
