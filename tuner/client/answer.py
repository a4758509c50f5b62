"""Reads one streamed answer: which bytes carry tokens, when they came, how it ended; it opens no socket and no clock.

The usual event of a stream differs from the one before only in its text. The first event is parsed as JSON; from it
comes a *shape*, the bytes before and after the text. A later event of that shape, whose text is a plain JSON string,
is one more token and is not parsed again. Everything else, and every doubt, goes through the JSON parser.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import NamedTuple

MAX_EVENT_BYTES = 4 << 20
MAX_ERROR_CHARS = 500

_TOKEN_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
"""Fields of a chat delta that hold output; `role` alone is no token. vLLM has used both names for reasoning."""

_OTHER_FIELDS = (b"event", b"id", b"retry")
_FAILED_REASONS = ("abort", "error")
"""vLLM's finish reasons for a request that it gave up by itself."""

# The inside of a JSON string (RFC 8259, section 7) in ASCII, without \u escapes.
_plain_text = re.compile(rb'[ !#-\[\]-\x7f]*(?:\\["\\/bfnrt][ !#-\[\]-\x7f]*)*').fullmatch
_any_text = re.compile(rb'[^"\\\x00-\x1f]*(?:\\["\\/bfnrt][^"\\\x00-\x1f]*)*').fullmatch
_PROBE = "\u2020shape-probe\u2020"


class Usage(NamedTuple):
    """The server's own counts; None where it did not say."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


class Event(NamedTuple):
    """What one JSON event says."""

    text: str  # the text of its only choice; empty where there is none, or where it is no plain text
    has_token: bool
    finish_reason: str | None
    stop_reason: object
    usage: Usage | None
    error: str | None


def read_event(document: object) -> Event:
    """Interpret one decoded `data:` payload of /v1/completions or /v1/chat/completions; ValueError if it is neither."""
    if not isinstance(document, dict):
        raise ValueError("an event that is not a JSON object")
    error = document.get("error")
    if error is None and document.get("object") == "error":
        error = document
    if error is not None:
        return Event("", False, None, None, None, _error_text(error))
    choices = document.get("choices")
    if choices is None:
        choices = []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError("`choices` is not a list of objects")
    text, has_token, finish_reason, stop_reason = "", False, None, None
    for choice in choices:
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise ValueError("`delta` is not an object")
        held = [value for value in (choice.get("text"), *(delta.get(name) for name in _TOKEN_FIELDS)) if value]
        # With `return_token_ids` a token shows even where it has no text of its own, such as a part of a character.
        has_token = has_token or bool(held) or bool(choice.get("token_ids"))
        if len(choices) == 1 and len(held) == 1 and isinstance(held[0], str):
            text = held[0]
        if isinstance(choice.get("finish_reason"), str):
            finish_reason, stop_reason = choice["finish_reason"], choice.get("stop_reason")
    usage = document.get("usage")
    return Event(text, has_token, finish_reason, stop_reason, _usage(usage) if isinstance(usage, dict) else None, None)


class Answer:
    """One answer in the making. The connection sets `now_ns` at each read and feeds it the body bytes of that read."""

    __slots__ = (
        "_after",
        "_before",
        "_between_events",
        "_event",
        "_head",
        "_tail",
        "_unfinished",
        "done",
        "error",
        "error_body",
        "finish_reason",
        "first_ns",
        "gaps_us",
        "http_status",
        "ignore_eos",
        "last_ns",
        "now_ns",
        "planned_tokens",
        "status",
        "stop_reason",
        "usage",
    )

    def __init__(self, planned_tokens: int, ignore_eos: bool) -> None:
        self.planned_tokens = planned_tokens
        self.ignore_eos = ignore_eos
        self.now_ns = 0
        self.first_ns = 0  # 0: no token yet
        self.last_ns = 0
        self.gaps_us = array("I")
        self.http_status = 0
        self.error_body = b""
        self.status = ""  # the first thing that went wrong; a value of RequestStatus
        self.error = ""
        self.finish_reason: str | None = None
        self.stop_reason: object = None
        self.done = False
        self.usage = Usage(None, None, None)
        # The shape: an event is `_before` + text + `_after`. No bytes start with an empty tuple of prefixes.
        self._before: bytes | tuple[bytes, ...] = ()
        self._after = b""
        self._head = self._tail = 0
        self._unfinished = b""  # an incomplete line
        self._event: bytes | None = None  # the data lines of an event before its blank line
        self._between_events = True

    @property
    def chunks(self) -> int:
        """Events that carried a non-empty token."""
        return len(self.gaps_us) + 1 if self.first_ns else 0

    def feed(self, body: bytes) -> None:
        """Take the next bytes of the body, however the network cut them."""
        if (
            body.startswith(self._before)
            and body.endswith(self._after)
            and (end := len(body) - self._tail) > self._head
            and _plain_text(body, self._head, end)
            and self._between_events
        ):
            now = self.now_ns
            self.gaps_us.append((now - self.last_ns) // 1000)
            self.last_ns = now
        else:
            self._read(body)

    def fail(self, status: str, error: str) -> None:
        """Record what went wrong; the first failure stands."""
        if not self.status:
            # Servers' messages may hold what no file or terminal takes (lone surrogates).
            self.status, self.error = status, error.encode(errors="backslashreplace").decode()[:MAX_ERROR_CHARS]
            self._before = ()

    def close(self, complete: bool) -> None:
        """The answer is over. `complete`: HTTP says that its body ended where it should."""
        if not self.status and self.http_status not in (0, 200):
            self.fail("http-error", f"HTTP {self.http_status}: {_http_error_text(self.error_body)}")
        if complete and not self._between_events:
            self._read(b"\n\n")
        if self.status:
            return
        missing = [name for name, there in (("finish_reason", self.finish_reason), ("[DONE]", self.done)) if not there]
        if not self.http_status:
            self.fail("early-close", "the connection closed before any answer")
        elif missing:
            self.fail("early-close", f"the stream ended without {' and '.join(missing)}")
        elif self.finish_reason in _FAILED_REASONS:
            self.fail("stream-error", f"finish_reason: {self.finish_reason}")
        elif not self.first_ns:
            said = self.usage.completion_tokens
            self.fail("no-token", f"no event carried a token; the server counted {'none' if said is None else said}")
        elif self.ignore_eos and (said := self.usage.completion_tokens) is not None and said < self.planned_tokens:
            reason = f"finish_reason: {self.finish_reason}, stop_reason: {self.stop_reason}"
            self.fail("short-output", f"{said} of {self.planned_tokens} tokens; {reason}")
        else:
            self.status = "ok"
            self._before = ()

    def _read(self, body: bytes) -> None:
        """The careful way: lines, events, JSON (WHATWG HTML, section 9.2.6: parsing an event stream)."""
        if self.status:
            return
        if self.http_status != 200:
            self.error_body = (self.error_body + body)[: 4 * MAX_ERROR_CHARS]
            return
        data = self._unfinished + body
        held = b""
        if b"\r" in data:
            # A carriage return at the very end may be half of a line end: it waits for the next byte.
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        self._unfinished = rest + held
        for line in lines:
            if not line:
                if self._event is not None:
                    event, self._event = self._event, None
                    self._take(event)
            elif line.startswith(b"data:") or line == b"data":
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                self._event = value if self._event is None else self._event + b"\n" + value
            elif not line.startswith(b":") and line.partition(b":")[0] not in _OTHER_FIELDS:
                self.fail("protocol-error", f"not an event stream: {_shown(line)}")
        if len(self._unfinished) + len(self._event or b"") > MAX_EVENT_BYTES:
            self.fail("protocol-error", f"an event longer than {MAX_EVENT_BYTES} bytes")
        if self.status:
            self._unfinished, self._event = b"", None
        self._between_events = not self._unfinished and self._event is None

    def _take(self, payload: bytes) -> None:
        if self.status or self.done or not payload:
            return
        if payload == b"[DONE]":
            self.done = True
            self._before = ()
            return
        framed = b"data: " + payload + b"\n\n"
        has_shape = framed.startswith(self._before) and framed.endswith(self._after)
        if has_shape and _is_text(framed[self._head : len(framed) - self._tail]):
            self._token()
            return
        try:
            event = read_event(json.loads(payload.decode()))
        except (ValueError, RecursionError) as error:
            self.fail("protocol-error", f"{error}: {_shown(payload)}")
            return
        if event.error is not None:
            self.fail("stream-error", event.error)
            return
        if event.usage is not None:
            self.usage = event.usage
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if event.has_token:
            self._token()
            if not has_shape and event.text and event.finish_reason is None and event.usage is None:
                self._learn(payload, event)

    def _token(self) -> None:
        if self.first_ns:
            self.gaps_us.append((self.now_ns - self.last_ns) // 1000)
        else:
            self.first_ns = self.now_ns
        self.last_ns = self.now_ns

    def _learn(self, payload: bytes, event: Event) -> None:
        """Take the shape of `event`, if another text in its place is proved to be read as just that."""
        try:
            before, found, after = payload.partition(json.dumps(event.text, ensure_ascii=False).encode())
            if not found:
                return  # the server escapes more than it must; the next text may do
            probed = read_event(json.loads(before.decode() + f'"{_PROBE}"' + after.decode()))
        except ValueError:
            return  # half of a character (a lone surrogate), or a text that also stands elsewhere
        if probed == event._replace(text=_PROBE):
            self._before = b"data: " + before + b'"'
            self._after = b'"' + after + b"\n\n"
            self._head, self._tail = len(self._before), len(self._after)


def _is_text(inside: bytes) -> bool:
    """Whether these bytes are the inside of a non-empty JSON string."""
    if not inside or not _any_text(inside):
        return False
    try:
        inside.decode()
    except UnicodeDecodeError:
        return False
    return True


def _usage(usage: dict[str, object]) -> Usage:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return (message if isinstance(message, str) else json.dumps(error))[:MAX_ERROR_CHARS]


def _http_error_text(body: bytes) -> str:
    """The message inside an error body, or the body itself."""
    try:
        document = json.loads(body.decode())
        return read_event(document).error or _shown(body)
    except (ValueError, RecursionError):
        return _shown(body)


def _shown(data: bytes) -> str:
    return data[:200].decode("utf-8", "backslashreplace")
