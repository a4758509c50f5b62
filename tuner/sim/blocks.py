"""Owns the KV blocks of one simulated engine and the prefix cache over them; it knows no requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Blocks:
    """Counts blocks; only blocks whose content can be hit again have an identity (their hash).

    Freed blocks queue up and are taken from the front, which evicts what was cached in them, as in vLLM (least recently
    used first, the tail of a request before its head). The queue holds runs of blocks rather than blocks.
    """

    __slots__ = ("_known", "_queue", "free", "total")

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._queue: deque[_Run] = deque([_Run(total, None)])
        self._known: dict[int, _Cached] = {}

    def hits(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are cached."""
        count = 0
        for key in hashes:
            if key not in self._known:
                break
            count += 1
        return count

    def idle(self, hashes: Sequence[int]) -> int:
        """How many of these cached blocks are in the free queue, so that a hit takes them from it."""
        return sum(1 for key in hashes if self._known[key].run is not None)

    def take(self, count: int) -> None:
        """Allocate anonymous blocks; the caller has checked `free`."""
        self.free -= count
        queue = self._queue
        while count:
            run = queue[0]
            if run.hashes is None:
                part = min(count, run.count)
                run.count -= part
                count -= part
                if not run.count:
                    queue.popleft()
                continue
            while run.hashes and count:
                key = run.hashes.popleft()
                cached = self._known.get(key)
                if cached is not None and cached.run is run:
                    del self._known[key]
                    count -= 1
            if not run.hashes:
                queue.popleft()

    def hold(self, hashes: Sequence[int]) -> None:
        """Use cached blocks once more."""
        for key in hashes:
            cached = self._known[key]
            if cached.run is not None:
                cached.run = None
                self.free -= 1
            cached.users += 1

    def name(self, key: int) -> bool:
        """Give an allocated block its hash; False when that content is cached already and the block stays anonymous."""
        if key in self._known:
            return False
        self._known[key] = _Cached()
        return True

    def release(self, anonymous: int, hashes: Sequence[int]) -> None:
        """Free what one request held; cached content stays until its block is taken again."""
        if anonymous:
            self.free += anonymous
            last = self._queue[-1] if self._queue else None
            if last is not None and last.hashes is None:
                last.count += anonymous
            else:
                self._queue.append(_Run(anonymous, None))
        if hashes:
            idle: deque[int] = deque()
            run = _Run(0, idle)
            for key in reversed(hashes):
                cached = self._known[key]
                cached.users -= 1
                if not cached.users:
                    cached.run = run
                    idle.append(key)
            if idle:
                self.free += len(idle)
                self._queue.append(run)

    def forget(self) -> bool:
        """Drop the cache, as /reset_prefix_cache does; refused (False) while cached blocks are in use."""
        if any(cached.run is None for cached in self._known.values()):
            return False
        self._known.clear()
        self._queue = deque([_Run(self.free, None)]) if self.free else deque()
        return True


class _Run:
    """Neighbouring free blocks: a number of anonymous ones, or cached ones by hash."""

    __slots__ = ("count", "hashes")

    def __init__(self, count: int, hashes: deque[int] | None) -> None:
        self.count = count
        self.hashes = hashes


class _Cached:
    __slots__ = ("run", "users")

    def __init__(self) -> None:
        self.users = 1
        self.run: _Run | None = None


def chain(prompt: Sequence[int], block: int) -> tuple[int, ...]:
    """One hash per full block of the prompt; equal only when everything up to there is equal.

    The last token of a prompt is always computed, so a prompt of whole blocks leaves its last block out.
    """
    keys = []
    key = 0
    for end in range(block, len(prompt), block):
        key = hash((key, tuple(prompt[end - block : end])))
        keys.append(key)
    return tuple(keys)
