"""Owns the simulated tokenizer: one word, one token, and back; it means nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

_OWN = re.compile(r"w(\d+)")


def encode(text: str, vocabulary: int) -> list[int]:
    """`w17` is token 17; any other word is some token that only depends on the word."""
    return [_token(word, vocabulary) for word in text.split()]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def _token(word: str, vocabulary: int) -> int:
    own = _OWN.fullmatch(word)
    value = int(own[1]) if own else crc32(word.encode())
    return value % vocabulary
