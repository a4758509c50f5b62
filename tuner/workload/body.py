"""The bytes of a request as vLLM's API wants them; it sends nothing."""

from __future__ import annotations

import json

from tuner.records import PlannedRequest
from tuner.workload.model import Sampling

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def request_body(request: PlannedRequest, *, model: str, sampling: Sampling, api: str) -> bytes:
    """A streaming request with usage, in JSON. Token ids need `completions`; `chat` takes text.

    With `ignore_eos` both `min_tokens` and the maximum are sent: `ignore_eos` alone covers only the tokenizer's own
    end token, not the list in generation_config.json (CASES B20).
    """
    body: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
    }
    if api == "chat":
        if not isinstance(request.prompt, str):
            raise ValueError("a chat request needs text")
        body["messages"] = [{"role": "user", "content": request.prompt}]
        body["max_completion_tokens"] = request.output_tokens
    else:
        body["prompt"] = request.prompt
        body["max_tokens"] = request.output_tokens
    if sampling.ignore_eos:
        body["ignore_eos"] = True
        body["min_tokens"] = request.output_tokens
    for key, value in (("top_p", sampling.top_p), ("top_k", sampling.top_k), ("seed", sampling.seed)):
        if value is not None:
            body[key] = value
    return json.dumps(body, separators=(",", ":")).encode()
