"""Owns which tokens run in which step: the V1 scheduler over sequences and KV blocks; it knows no seconds.

Every decoding sequence advances by exactly one token a step, so decodes are kept as counts: by the step at which they
finish, and by the phase (step modulo block size) at which they need a new block. A step costs no time per sequence.
Simplified against vLLM: decodes are served before partial prefills within a step (in vLLM by order of admission, which
is the same unless several partial prefills exhaust the budget).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tuner.sim.blocks import Blocks
from tuner.sim.profile import Effective


class Sequence:
    """One request inside the engine."""

    __slots__ = (
        "anonymous",
        "cached",
        "computed",
        "decoding",
        "end",
        "first_scheduled",
        "generated",
        "hashes",
        "held",
        "key",
        "output",
        "preemptions",
        "prompt",
        "segments",
        "since",
        "target",
    )

    def __init__(self, key: int, prompt: int, output: int, hashes: tuple[int, ...] = ()) -> None:
        """`prompt` and `output` in tokens; `hashes` of the leading full blocks that others may share."""
        self.key = key
        self.prompt = self.target = prompt
        self.output = output
        self.hashes = hashes
        self.computed = 0  # tokens whose KV is there, while prefilling
        self.generated = 0  # before the current decode segment
        self.since = 0  # step that emitted the first token of the current segment
        self.end = 0  # step that will emit the last one
        self.decoding = False
        self.anonymous = 0  # blocks held without a hash, while prefilling
        self.held: list[int] = []
        self.segments: list[tuple[int, int]] = []  # (first step, tokens) of finished decode segments
        self.cached = -1  # prompt tokens found in the cache at first admission
        self.first_scheduled = 0
        self.preemptions = 0


@dataclass(slots=True)
class Step:
    """What one step does."""

    number: int
    tokens: int = 0
    decodes: int = 0
    context: int = 0  # KV tokens that the decodes read
    sequences: int = 0
    pairs: float = 0.0
    completing: list[Sequence] = field(default_factory=list)  # prefills that end, so that a first token comes out


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0


class Scheduler:
    """Waiting and running requests of one engine. `plan` begins a step, `commit` ends it."""

    def __init__(self, effective: Effective, kv_tokens: int) -> None:
        self.effective = effective
        self.block = effective.block
        self.blocks = Blocks(kv_tokens // effective.block)
        self._watermark = int(effective.watermark * self.blocks.total)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # by admission; the last is preempted first
        self.prefilling: dict[Sequence, None] = {}
        self.step = 0
        self.decodes = 0
        self.context = 0  # KV tokens of the decodes, before this step's
        self.due = [0] * self.block  # decodes that need a new block at a step, by step modulo block size
        self.finishing: dict[int, list[Sequence]] = {}
        self.counters = Counters()

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> Step:
        """Choose the tokens of the next step and allocate their blocks."""
        self.step += 1
        step = Step(self.step)
        preempted = False
        phase = self.step % self.block
        while self.due[phase] > self.blocks.free:
            self._preempt(taken=False)
            preempted = True
        self.blocks.take(self.due[phase])
        step.decodes = step.tokens = self.decodes
        self.context += self.decodes
        left = self.effective.budget - self.decodes
        for sequence in tuple(self.prefilling):
            if left <= 0:
                break
            if sequence not in self.prefilling:
                continue  # preempted for one before it
            size = self._chunk(sequence, left, alone=len(self.running) == 1 and not self.waiting)
            while self._missing(sequence, size) > self.blocks.free:
                victim, decoded = self._preempt(taken=True)
                preempted = True
                if decoded:
                    step.decodes -= 1
                    step.tokens -= 1
                    left += 1
                if victim is sequence:
                    break
            if sequence in self.prefilling:
                self._compute(sequence, size, step)
                left -= size
        if not preempted:
            self._admit(left, step)
        step.context = self.context
        step.sequences = len(self.running)
        return step

    def commit(self, step: Step) -> list[Sequence]:
        """Emit the tokens of the step; returns what finished, with its blocks freed."""
        number = step.number
        counters = self.counters
        counters.steps += 1
        counters.tokens += step.tokens
        for sequence in step.completing:
            del self.prefilling[sequence]
            sequence.decoding = True
            sequence.since = number
            sequence.end = number + sequence.output - sequence.generated - 1
            self.due[(number + 1 - sequence.target) % self.block] += 1
            self.decodes += 1
            self.context += sequence.target
            self.finishing.setdefault(sequence.end, []).append(sequence)
        return self.finish(number)

    def finish(self, number: int) -> list[Sequence]:
        """Take out what ends with this step."""
        finished = self.finishing.pop(number, None)
        if finished is None:
            return []
        for sequence in finished:
            self._leave(sequence, number)
        return finished

    def advance(self, steps: int, context: int) -> None:
        """Account for steps of decodes alone that the caller ran; `context` after the last."""
        self.step += steps
        self.context = context
        self.counters.steps += steps
        self.counters.tokens += steps * self.decodes
        self.finish(self.step)

    def abort(self, sequence: Sequence) -> None:
        """Drop a request whose client has gone; between steps only."""
        if sequence in self.running:
            if sequence.decoding:
                self.finishing[sequence.end].remove(sequence)
                self._leave(sequence, self.step)
            else:
                del self.running[sequence]
                del self.prefilling[sequence]
                self.blocks.release(sequence.anonymous, sequence.held)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self, left: int, step: Step) -> None:
        limit = self.effective.active_seqs
        while self.waiting and left > 0 and len(self.running) < limit:
            sequence = self.waiting[0]
            hits = self.blocks.hits(sequence.hashes) if sequence.hashes else 0
            sequence.computed = hits * self.block
            size = self._chunk(sequence, left, alone=not self.running and len(self.waiting) == 1)
            if size > left:
                break  # without chunked prefill a prompt runs in one step or not at all
            upto = sequence.target if self.effective.reserve_full else sequence.computed + size
            head = sequence.hashes[:hits]
            need = -(-upto // self.block) - hits + (self.blocks.idle(head) if hits else 0)
            # An idle engine admits whatever fits, or it would wait for ever.
            if need + (self._watermark if self.running else 0) > self.blocks.free:
                break
            self.waiting.popleft()
            self.running[sequence] = None
            self.prefilling[sequence] = None
            sequence.held = list(head)
            sequence.anonymous = 0
            if hits:
                self.blocks.hold(head)
            if sequence.cached < 0:
                sequence.cached = sequence.computed
                sequence.first_scheduled = self.step
            if self.effective.prefix:
                self.counters.prefix_queries += sequence.target
                self.counters.prefix_hits += sequence.computed
            self._compute(sequence, size, step)
            left -= size

    def _chunk(self, sequence: Sequence, left: int, *, alone: bool) -> int:
        size = sequence.target - sequence.computed
        if not self.effective.chunked:
            return size
        threshold = self.effective.threshold
        if 0 < threshold < size and not alone:
            size = threshold
        return min(size, left)

    def _missing(self, sequence: Sequence, size: int) -> int:
        return -(-(sequence.computed + size) // self.block) - sequence.anonymous - len(sequence.held)

    def _compute(self, sequence: Sequence, size: int, step: Step) -> None:
        """Run `size` tokens of a prefill, whose blocks fit."""
        missing = self._missing(sequence, size)
        self.blocks.take(missing)
        sequence.anonymous += missing
        step.tokens += size
        step.pairs += size * (sequence.computed + 0.5 * size)
        sequence.computed += size
        self.counters.prefill_tokens += size
        full = sequence.computed // self.block
        if sequence.hashes:
            for key in sequence.hashes[len(sequence.held) : full]:
                if not self.blocks.name(key):
                    break
                sequence.anonymous -= 1
                sequence.held.append(key)
        if sequence.computed >= sequence.target:
            step.completing.append(sequence)

    def _leave(self, sequence: Sequence, last: int) -> None:
        """A decode ends after the step `last`."""
        tokens = last - sequence.since + 1
        sequence.segments.append((sequence.since, tokens))
        sequence.generated += tokens
        sequence.decoding = False
        self.decodes -= 1
        length = sequence.target + last - sequence.since
        self.context -= length
        self.due[(sequence.since + 1 - sequence.target) % self.block] -= 1
        self.blocks.release(-(-length // self.block) - len(sequence.held), sequence.held)
        sequence.held = []
        del self.running[sequence]

    def _preempt(self, *, taken: bool) -> tuple[Sequence, bool]:
        """Throw the last admitted request out; it computes everything again.

        `taken`: the decodes have their blocks for this step. Returns the request and whether it was decoding.
        """
        sequence = next(reversed(self.running))
        decoded = sequence.decoding
        if decoded:
            self.finishing[sequence.end].remove(sequence)
            self._leave(sequence, self.step if taken else self.step - 1)
            if taken:
                # Its token of this step was planned, but will not be computed.
                first, tokens = sequence.segments.pop()
                sequence.segments.append((first, tokens - 1))
                sequence.generated -= 1
            sequence.target = sequence.prompt + sequence.generated
        else:
            del self.running[sequence]
            del self.prefilling[sequence]
            self.blocks.release(sequence.anonymous, sequence.held)
            sequence.held = []
        sequence.computed = sequence.anonymous = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence, decoded
