"""The prompts on which answers are compared: the user's own or those that come with the tuner; it sends nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.documents import Node, digest, read_text
from tuner.quality.default_prompts import DEFAULT_PROMPTS

LEAST, MOST = 8, 512
"""Prompts of a set: with fewer no interval means anything, with more a trial spends its time on nothing else."""
ANSWER_TOKENS = 64
"""Longest answer, tokens. Longer ones tell little more: after the first difference two answers go their own ways."""
MAX_FILE_BYTES = 4 << 20
MAX_PROMPT_CHARACTERS = 200_000

_REMEDY = 'Write `{"prompt": "…"}` or `{"messages": [{"role": "user", "content": "…"}]}` into each line.'


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the order of the file; a prompt is a conversation, of one turn where it was plain text."""

    source: str  # `built-in` or the file as given
    prompts: tuple[tuple[Message, ...], ...]
    answer_tokens: int
    digest: str


def built_in() -> PromptSet:
    """The 48 prompts that come with the tuner."""
    return _made("built-in", [(Message("user", text),) for text in DEFAULT_PROMPTS])


def load_prompts(path: Path) -> PromptSet:
    """A file of prompts: JSON lines (`.jsonl`, `.json`: texts, `prompt` or `messages`), else one prompt a line.

    InputError for anything that is no such file, for too few or too many prompts and for repeated ones: answers to the
    same prompt are no further evidence.
    """
    where = str(path)
    lines = read_text(path, max_bytes=MAX_FILE_BYTES, what="file of prompts").splitlines()
    as_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    found: dict[tuple[Message, ...], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = Node(line, where, f"line {number}")
        prompt = _parsed(place) if as_json else (Message("user", line.strip()),)
        if sum(len(message.content) for message in prompt) > MAX_PROMPT_CHARACTERS:
            place.fail(f"has more than {MAX_PROMPT_CHARACTERS} characters", "Shorten the prompt.")
        if prompt in found:
            place.fail(f"repeats line {found[prompt]}", "Leave it out: the same prompt twice is no further evidence.")
        found[prompt] = number
    if not LEAST <= len(found) <= MOST:
        Node(len(found), where, "prompts").fail(
            f"there must be {LEAST} to {MOST} prompts", "Take a sample of your traffic; 50 are a good number."
        )
    return _made(where, list(found))


def _parsed(place: Node) -> tuple[Message, ...]:
    """One line of JSON as a conversation."""
    try:
        value: object = json.loads(str(place.value))
    except (ValueError, RecursionError):
        place.fail("is not JSON", _REMEDY)
    if isinstance(value, str):
        return (Message("user", Node(value, place.where, place.path).text()),)
    if not isinstance(value, Mapping) or not {"prompt", "messages"} & value.keys():
        place.fail("is neither a text nor an object with `prompt` or `messages`", _REMEDY)
    entries = Node(value, place.where, place.path).mapping()
    if "prompt" in entries:
        return (Message("user", entries["prompt"].text()),)
    turns = []
    for item in entries["messages"].items():
        turn = item.mapping(required=("role", "content"))
        turns.append(Message(turn["role"].text(("system", "user", "assistant")), turn["content"].text()))
    if not turns or turns[-1].role != "user":
        entries["messages"].fail("must end with a message of the user", _REMEDY)
    return tuple(turns)


def _made(source: str, prompts: list[tuple[Message, ...]]) -> PromptSet:
    content = [[[message.role, message.content] for message in prompt] for prompt in prompts]
    return PromptSet(source, tuple(prompts), ANSWER_TOKENS, digest([ANSWER_TOKENS, content]))
