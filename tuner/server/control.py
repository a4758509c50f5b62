"""The few calls that steer a server, over loopback; it never measures and never sends load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx

from tuner.server.failure import FailureReason, ServerFailure

_RESET_TRIES_S = 10.0  # blocks of requests that just ended are freed in the next engine steps


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None


class Control:
    """Thread-safe client of one server; every foreign error becomes a ServerFailure with reason `control`."""

    def __init__(self, base_url: str, timeout_s: float = 30.0) -> None:
        # verify: no TLS on loopback, and loading certificates costs 30 ms. trust_env: a proxy must not be asked.
        self._client = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False, verify=False)

    def close(self) -> None:
        self._client.close()

    def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether /health says 200; says nothing about the engine behind it (vllm#39863)."""
        try:
            return self._client.get("/health", timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False

    def models(self) -> tuple[ServedModel, ...]:
        data = self._json("GET", "/v1/models").get("data")
        entries = data if isinstance(data, list) else []
        return tuple(
            ServedModel(entry["id"], length if isinstance(length := entry.get("max_model_len"), int) else None)
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        )

    def metrics_text(self) -> str:
        return self._call("GET", "/metrics").text

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; ServerFailure when the server does not, e.g. because requests still run."""
        deadline = time.monotonic() + _RESET_TRIES_S
        while True:
            answer = self._call("POST", "/reset_prefix_cache")
            # Older versions answer 200 with an empty body and tell a refusal only in the log.
            if not answer.content or _mapping(answer).get("success") is not False:
                return
            if time.monotonic() > deadline:
                raise ServerFailure(
                    FailureReason.CONTROL,
                    f"/reset_prefix_cache refused for {_RESET_TRIES_S:.0f} s: requests still hold blocks",
                )
            time.sleep(0.1)

    def tokenize(self, model: str, text: str, *, special_tokens: bool = False) -> tuple[int, ...]:
        return self._tokens({"model": model, "prompt": text, "add_special_tokens": special_tokens})

    def tokenize_chat(self, model: str, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """A conversation through the model's chat template; ServerFailure where it has none."""
        return self._tokens({"model": model, "messages": list(messages)})

    def complete(self, body: Mapping[str, object], *, timeout_s: float) -> Mapping[str, object]:
        """One whole answer of /v1/completions; never used for load."""
        return _mapping(self._call("POST", "/v1/completions", body, timeout_s=timeout_s))

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        text = self._json("POST", "/detokenize", {"model": model, "tokens": list(tokens)}).get("prompt")
        if not isinstance(text, str):
            raise ServerFailure(FailureReason.CONTROL, "/detokenize answered without a text")
        return text

    def _tokens(self, body: Mapping[str, object]) -> tuple[int, ...]:
        tokens = self._json("POST", "/tokenize", body).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerFailure(FailureReason.CONTROL, "/tokenize answered without a list of token ids")
        return tuple(tokens)

    def _json(self, method: str, path: str, body: object = None) -> dict[str, object]:
        return _mapping(self._call(method, path, body))

    def _call(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> httpx.Response:
        with _translated(f"{method} {path}"):
            answer = self._client.request(
                method, path, json=body, timeout=self._client.timeout if timeout_s is None else timeout_s
            )
            answer.raise_for_status()
            return answer


@contextlib.contextmanager
def _translated(call: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        text = error.response.text[:200]
        raise ServerFailure(FailureReason.CONTROL, f"{call}: status {error.response.status_code}: {text}") from error
    except httpx.HTTPError as error:
        raise ServerFailure(FailureReason.CONTROL, f"{call}: {type(error).__name__}: {error}") from error


def _mapping(answer: httpx.Response) -> dict[str, object]:
    try:
        document = answer.json()
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ServerFailure(FailureReason.CONTROL, f"{answer.request.url.path} answered no JSON object")
    return document
