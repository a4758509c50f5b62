"""Recorded traffic as users bring it: five file formats into one `Trace`; it schedules and sends nothing."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tuner.documents import Node, digest, read_text, suggestion
from tuner.workload.lengths import MAX_LENGTH

FORMATS = ("auto", "jsonl", "sharegpt", "azure", "mooncake", "burstgpt")
MAX_TRACE_BYTES = 1 << 30
BLOCK_TOKENS = 512
"""Mooncake: one hash id for every 512 tokens of the prompt, the last one possibly shorter."""

CHARACTERS_PER_TOKEN = 4
"""English text in common tokenizers; only where no server has counted (`resolve_texts`)."""

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request; `line` is where it stands in the file.

    `input_tokens` is 0 for text that nobody has tokenised. `blocks` number the 512-token blocks of the prompt: equal
    leading numbers mean equal leading tokens. `response` is a recorded answer whose length counts as the output's.
    """

    line: int
    at_s: float | None
    input_tokens: int
    output_tokens: int
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    response: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of time, the first at 0 where they have times."""

    path: str
    kind: str
    rows: tuple[TraceRow, ...]
    digest: str
    notes: tuple[str, ...] = ()

    @property
    def timed(self) -> bool:
        return self.rows[0].at_s is not None


def load_trace(path: Path, kind: str = "auto") -> Trace:
    """The trace in the file; raises `InputError` with the line number."""
    return read_trace(read_text(path, max_bytes=MAX_TRACE_BYTES, what="trace"), str(path), kind)


def read_trace(text: str, where: str, kind: str = "auto") -> Trace:
    """As `load_trace`, from text."""
    if not text.strip():
        Node(text, where, "trace").fail("the trace is empty", "Give a file with at least one request.")
    kind = _detect(text, where) if kind == "auto" else kind
    rows = list(_READERS[kind](text, where))
    if not rows:
        Node(text[:80], where, "trace").fail("the trace holds no request", "Give a file with at least one request.")
    untimed = next((row for row in rows if row.at_s is None), None)
    if untimed is not None and any(row.at_s is not None for row in rows):
        place = Node(None, f"{where}, line {untimed.line}", "timestamp")
        place.fail("is missing here although other lines have it", "Give every line a timestamp, or none.")
    notes = []
    times = [row.at_s for row in rows if row.at_s is not None]
    if times != sorted(times):
        notes.append("the rows were not in order of time and have been sorted")
        rows.sort(key=lambda row: row.at_s or 0.0)
    if any(row.response is not None for row in rows):
        notes.append(
            f"text lengths are estimated at {CHARACTERS_PER_TOKEN} characters a token until a server counts them"
        )
    return cut(Trace(where, kind, tuple(rows), digest([kind, text]), tuple(notes)), 0.0, None)


def cut(trace: Trace, start_s: float, end_s: float | None) -> Trace:
    """The rows from `start_s` up to `end_s` after the first row, on a clock that starts with the first one kept."""
    if not trace.timed:
        return trace
    origin = trace.rows[0].at_s or 0.0
    end = math.inf if end_s is None else end_s
    kept = [row for row in trace.rows if start_s <= (row.at_s or 0.0) - origin < end]
    first = (kept[0].at_s or 0.0) if kept else 0.0
    rows = tuple(kept) if first == 0.0 else tuple(replace(row, at_s=(row.at_s or 0.0) - first) for row in kept)
    whole = start_s == 0.0 and end_s is None
    return replace(trace, rows=rows, digest=trace.digest if whole else digest([trace.digest, start_s, end_s]))


def resolve_texts(trace: Trace, tokenize: Callable[[str], Sequence[int]]) -> Trace:
    """Texts as token ids and recorded answers as exact lengths, by a server's `/tokenize`."""
    rows = []
    for row in trace.rows:
        if row.text is not None:
            tokens = tuple(tokenize(row.text))
            row = replace(row, text=None, tokens=tokens, input_tokens=len(tokens))
        if row.response is not None:
            row = replace(row, response=None, output_tokens=len(tokenize(row.response)))
        rows.append(row)
    return replace(trace, rows=tuple(rows), notes=tuple(note for note in trace.notes if "estimated" not in note))


def estimated_tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / CHARACTERS_PER_TOKEN))


def _detect(text: str, where: str) -> str:
    first = text.lstrip().splitlines()[0]
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        return "mooncake" if '"hash_ids"' in first or '"input_length"' in first else "jsonl"
    columns = [column.strip() for column in first.split(",")]
    if all(name in columns for name in _AZURE):
        return "azure"
    if all(name in columns for name in _BURSTGPT):
        return "burstgpt"
    place = Node(first[:80], f"{where}, line 1", "trace")
    place.fail("is no known trace format", f"Name it: `format:` one of {', '.join(FORMATS[1:])}.")


def _json_lines(text: str, where: str) -> Iterator[tuple[int, Node]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            Node(line[:80], place, "line").fail(f"is not JSON ({error})", "Write one JSON object on each line.")
        yield number, Node(document, place)


def _jsonl(text: str, where: str) -> Iterator[TraceRow]:
    known = ("timestamp", "input_tokens", "output_tokens", "prompt")
    for line, node in _json_lines(text, where):
        entries = node.mapping(known, required=("output_tokens",))
        at_s = entries["timestamp"].number() if "timestamp" in entries else None
        output = entries["output_tokens"].integer(at_least=0, at_most=MAX_LENGTH)
        if ("prompt" in entries) == ("input_tokens" in entries):
            node.child("prompt", None).fail("needs exactly one of `prompt` and `input_tokens`", "Give one of them.")
        if "input_tokens" in entries:
            yield TraceRow(line, at_s, entries["input_tokens"].integer(at_least=0, at_most=MAX_LENGTH), output)
        elif isinstance(entries["prompt"].value, list):
            tokens = tuple(item.integer(at_least=0) for item in entries["prompt"].items())
            yield TraceRow(line, at_s, len(tokens), output, tokens=tokens)
        else:
            yield TraceRow(line, at_s, 0, output, text=entries["prompt"].text())


def _mooncake(text: str, where: str) -> Iterator[TraceRow]:
    numbers: dict[int, int] = {}  # hash id -> order of first appearance
    for line, node in _json_lines(text, where):
        entries = node.mapping(required=("timestamp", "input_length", "output_length", "hash_ids"))
        length = entries["input_length"].integer(at_least=0, at_most=MAX_LENGTH)
        ids = [item.integer() for item in entries["hash_ids"].items()]
        expected = math.ceil(length / BLOCK_TOKENS)
        if len(ids) != expected:
            rule = f"has {len(ids)} ids, but {length} tokens are {expected} blocks of {BLOCK_TOKENS}"
            entries["hash_ids"].fail(rule, "Give one id for each block of 512 tokens.")
        blocks = tuple(numbers.setdefault(item, len(numbers)) for item in ids)
        at_s = entries["timestamp"].number() / 1000.0
        output = entries["output_length"].integer(at_least=0, at_most=MAX_LENGTH)
        yield TraceRow(line, at_s, length, output, blocks=blocks)


def _sharegpt(text: str, where: str) -> Iterator[TraceRow]:
    """A JSON list of conversations; the first question is the prompt, the first answer gives the output length."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        Node(text[:40], where, "trace").fail(f"is not JSON ({error})", "Give a JSON list of conversations.")
    for position, node in enumerate(Node(document, where, "trace").items(), start=1):
        entries = node.mapping()
        turns = entries.get("conversations") or entries.get("conversation")
        if turns is None:
            node.child("conversations", None).fail("this key is required", "Give the turns of the conversation.")
        spoken = [_turn(turn) for turn in turns.items()]
        question = next((said for who, said in spoken if who in ("human", "user")), None)
        answer = next((said for who, said in spoken if who in ("gpt", "assistant", "chatgpt", "bing", "bard")), None)
        if question is not None and answer is not None and _spoken(question) and _spoken(answer):
            asked, answered = question.text(), answer.text()
            yield TraceRow(position, None, 0, estimated_tokens(answered), text=asked, response=answered)


def _spoken(node: Node) -> bool:
    return bool(str(node.value or "").strip())


def _turn(node: Node) -> tuple[str, Node]:
    entries = node.mapping()
    who = entries.get("from") or entries.get("role")
    said = entries.get("value") or entries.get("content")
    if who is None or said is None:
        node.fail("needs `from` and `value`", "Write each turn as {from: human, value: …}.")
    return str(who.value), said


def _csv_rows(text: str, where: str, columns: Sequence[str]) -> Iterator[tuple[str, int, list[str]]]:
    """Place, line number and the cells of `columns` of every row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader)]
        for name in columns:
            if name not in header:
                place = Node(", ".join(header), f"{where}, line 1", "header")
                place.fail(f"has no column `{name}`", suggestion(name, header))
        wanted = [header.index(name) for name in columns]
        for cells in reader:
            place_name = f"{where}, line {reader.line_num}"
            if len(cells) == len(header):
                yield place_name, reader.line_num, [cells[position].strip() for position in wanted]
            elif any(cell.strip() for cell in cells):
                rule = f"has {len(cells)} cells where the header has {len(header)}"
                Node(",".join(cells)[:80], place_name, "row").fail(rule, "Mend or remove the line.")
    except csv.Error as error:
        Node(str(error), f"{where}, line {reader.line_num}", "row").fail("is not CSV", "Mend or remove the line.")


def _azure(text: str, where: str) -> Iterator[TraceRow]:
    for place, line, (stamp, inputs, outputs) in _csv_rows(text, where, _AZURE):
        try:
            moment = datetime.fromisoformat(stamp)
        except ValueError:
            Node(stamp, place, _AZURE[0]).fail("is not a date and time", "Write it as 2023-11-16 18:17:03.9799600.")
        at_s = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        yield TraceRow(line, at_s, _count(inputs, place, _AZURE[1]), _count(outputs, place, _AZURE[2]))


def _burstgpt(text: str, where: str) -> Iterator[TraceRow]:
    for place, line, (stamp, inputs, outputs) in _csv_rows(text, where, _BURSTGPT):
        try:
            at_s = float(stamp)
        except ValueError:
            at_s = math.nan
        if not math.isfinite(at_s):
            Node(stamp, place, _BURSTGPT[0]).fail("is not a number of seconds", "Write seconds, such as 45.0.")
        yield TraceRow(line, at_s, _count(inputs, place, _BURSTGPT[1]), _count(outputs, place, _BURSTGPT[2]))


def _count(text: str, place: str, column: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_LENGTH):
        Node(text, place, column).fail("is not a number of tokens", f"Write a whole number from 0 to {MAX_LENGTH}.")
    return int(text)


_READERS: Mapping[str, Callable[[str, str], Iterable[TraceRow]]] = {
    "jsonl": _jsonl,
    "sharegpt": _sharegpt,
    "azure": _azure,
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
}
