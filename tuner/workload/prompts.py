"""Prompts of exact length out of ordinary token ids; equal arguments give equal prompts, and it knows no clock."""

from __future__ import annotations

import hashlib
import itertools
import math
from array import array
from functools import lru_cache
from random import Random

from tuner.workload.traces import BLOCK_TOKENS
from tuner.workload.vocabulary import Vocabulary

INDEX_BITS = 24
MAX_INDEX = (1 << INDEX_BITS) - 1
_TAG_BITS = 64


class Forge:
    """Makes prompts out of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids, self._table = _tables(vocabulary)
        self._index_digits = _digits_for(INDEX_BITS, len(self._ids))
        self._tag_digits = _digits_for(_TAG_BITS, len(self._ids))

    def tokens(self, tag: int, index: int, count: int, random: Random | None = None) -> tuple[int, ...]:
        """`count` tokens that belong to (`tag`, `index`) alone; `index` is at most `MAX_INDEX`.

        The leading ones (15 at most) spell index and tag, so that two prompts cannot agree in their first cache block
        by chance; the rest is random.
        """
        ids, size = self._ids, len(self._ids)
        header = [*_spell(index, self._index_digits, size), *_spell(tag, self._tag_digits, size)][:count]
        source = random_for(tag, index) if random is None else random
        body = array("H", source.randbytes(2 * (count - len(header))))
        return (*(ids[digit] for digit in header), *map(self._table.__getitem__, body))

    def blocks(self, tag: int, blocks: tuple[int, ...], count: int) -> tuple[int, ...]:
        """`count` tokens made of one run of 512 for each block number."""
        made = itertools.chain.from_iterable(self.tokens(tag, block, BLOCK_TOKENS) for block in blocks)
        return tuple(itertools.islice(made, count))


@lru_cache(maxsize=4)
def _tables(vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ordinary ids, and 65,536 of them spread evenly: one for every two random bytes, the fastest way to draw."""
    ids = vocabulary.ordinary()
    return ids, tuple(ids[(position * len(ids)) >> 16] for position in range(1 << 16))


def tag_of(salt: str, seed: int) -> int:
    """64 bits that belong to one use of one seed."""
    return int.from_bytes(hashlib.sha256(f"{salt}\0{seed}".encode()).digest()[: _TAG_BITS // 8])


def random_for(tag: int, index: int) -> Random:
    """A source of chance for one request, so that no request depends on how many came before it."""
    return Random((tag << INDEX_BITS) | index)


def _digits_for(bits: int, base: int) -> int:
    return math.ceil(bits / math.log2(base))


def _spell(value: int, digits: int, base: int) -> list[int]:
    spelled = []
    for _ in range(digits):
        value, digit = divmod(value, base)
        spelled.append(digit)
    return spelled
