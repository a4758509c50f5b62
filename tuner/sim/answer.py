"""Owns one answer of the simulated API server: what was asked and the JSON of its chunks; it sends nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tuner.sim.tokens import encode
from tuner.sim.web import Request


class Refused(Exception):
    """A request that vLLM would refuse; becomes its error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.status, self.param)


def error_body(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion request, read and checked."""

    prompt: tuple[int, ...]
    output: int  # tokens that will come
    reason: str  # finish_reason
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    model: str


def read(body: bytes, *, chat: bool, models: tuple[str, ...], max_len: int, vocabulary: int) -> Asked:
    """Refused for what vLLM answers with an error."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise Refused(400, "BadRequestError", f"Invalid JSON: {error}") from error
    if not isinstance(document, dict):
        raise Refused(400, "BadRequestError", "The body must be a JSON object.")
    model = str(document.get("model") or models[0])
    if model not in models:
        raise Refused(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    prompt = _prompt(document, chat, vocabulary)
    if not prompt:
        raise Refused(400, "BadRequestError", "Either prompt or prompt_embeds must be provided and non-empty.")
    room = max_len - len(prompt)
    asked = _count(document, "max_completion_tokens") if chat else None
    if asked is None:
        asked = _count(document, "max_tokens")
    most = asked if asked is not None else room if chat else 16
    if most < 1 or most > room:
        raise Refused(
            400,
            "BadRequestError",
            f"This model's maximum context length is {max_len} tokens. However, you requested {most} output tokens and "
            f"your prompt contains {len(prompt)} input tokens, for a total of {most + len(prompt)} tokens.",
            "input_tokens",
        )
    output, reason = most, "length"
    if not document.get("ignore_eos", False):
        # The simulated model stops by itself after a length that depends on the prompt.
        natural = max(_count(document, "min_tokens") or 0, 20 + 37 * sum(prompt[:8]) % 400)
        if natural < most:
            output, reason = natural, "stop"
    options = document.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused(400, "BadRequestError", "`stream_options` must be an object.", "stream_options")
    return Asked(
        prompt,
        output,
        reason,
        chat,
        bool(document.get("stream", False)),
        bool(options.get("include_usage", False)),
        bool(options.get("continuous_usage_stats", False)),
        model,
    )


def _count(document: dict[str, object], name: str) -> int | None:
    value = document.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise Refused(400, "BadRequestError", f"`{name}` must be a whole number.", name)
    return value


def _prompt(document: dict[str, object], chat: bool, vocabulary: int) -> tuple[int, ...]:
    if chat:
        messages = document.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Refused(400, "BadRequestError", "`messages` must be a list of objects.", "messages")
        words = " ".join(f"{message.get('role')} {message.get('content')}" for message in messages)
        return tuple(encode(words, vocabulary))
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tuple(encode(prompt, vocabulary))
    if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
        raise Refused(400, "BadRequestError", "`prompt` must be a string or a list of token ids.", "prompt")
    wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise Refused(400, "BadRequestError", f"Token id {wrong} is out of vocabulary", "prompt")
    return tuple(prompt)


class Answer:
    """Where one answer stands."""

    def __init__(self, key: int, asked: Asked, request: Request, rank: int, arrived: float, created: int) -> None:
        self.key, self.asked, self.request, self.rank = key, asked, request, rank
        self.arrived = arrived  # simulated clock
        self.first = self.last = arrived
        self.decoded = 0.0
        self.made = 0
        self.cached = 0
        self.unsent: list[str] = []
        self.details = False  # report cached tokens
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._id = f"{prefix}-sim{key:08x}"
        self._created = created
        self._head = f'{{"id":"{self._id}","object":"{kind}","created":{created},"model":{json.dumps(asked.model)},'

    def word(self) -> str:
        """The text of the next token; also counts it."""
        self.made += 1
        return f" w{(self.key * 7919 + self.made * 101) % 30000 + 100}"

    def role(self) -> bytes:
        """The first chunk of a chat, which holds no token."""
        delta = (
            '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'
        )
        return (self._head + delta).encode()

    def chunk(self, text: str, reason: str | None) -> bytes:
        finish = "null" if reason is None else f'"{reason}"'
        usage = f',"usage":{json.dumps(self.usage())}' if self.asked.continuous_usage else ""
        part = f'"delta":{{"content":"{text}"}}' if self.asked.chat else f'"text":"{text}"'
        tail = f'"choices":[{{"index":0,{part},"logprobs":null,"finish_reason":{finish},"stop_reason":null}}]{usage}}}'
        return (self._head + tail).encode()

    def usage_chunk(self) -> bytes:
        return (self._head + f'"choices":[],"usage":{json.dumps(self.usage())}}}').encode()

    def usage(self) -> dict[str, object]:
        prompt = len(self.asked.prompt)
        details = {"cached_tokens": self.cached} if self.details and self.cached else None
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.made,
            "completion_tokens": self.made,
            "prompt_tokens_details": details,
        }

    def whole(self, text: str, reason: str) -> bytes:
        """The body where no stream was asked for."""
        if self.asked.chat:
            part: dict[str, object] = {"message": {"role": "assistant", "content": text}}
        else:
            part = {"text": text}
        document = {
            "id": self._id,
            "object": "chat.completion" if self.asked.chat else "text_completion",
            "created": self._created,
            "model": self.asked.model,
            "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": reason, "stop_reason": None}],
            "usage": self.usage(),
        }
        return json.dumps(document).encode()
