"""Owns the run of one simulated engine through virtual time, from arrivals to the times of its steps; never sleeps."""

from __future__ import annotations

from collections import deque

from tuner.errors import HarnessError
from tuner.sim.frontend import Frontend
from tuner.sim.scheduler import Scheduler, Sequence
from tuner.sim.steps import StepTimes

SAMPLE_S = 0.25
NEVER = float("inf")


class Replica:
    """Requests by arrival go in; `starts` and `visible` of every step, peaks and a series come out."""

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        frontend: Frontend,
        sequences: list[Sequence],
        arrivals: list[float],
        noise: list[tuple[float, float]],
        *,
        oom_tokens: int | None,
        give_up_s: float | None,
    ) -> None:
        """`noise`: (factor, extra seconds) of steps, used in a circle; a step of more than `oom_tokens` tokens dies."""
        self.scheduler, self.times, self.frontend = scheduler, times, frontend
        self.sequences, self.arrivals, self.noise = sequences, arrivals, noise
        self.oom_tokens = NEVER if oom_tokens is None else oom_tokens
        self.stop_s = NEVER if give_up_s is None else give_up_s
        self.ready: list[float] = []  # by request: when the engine has it
        self.starts: list[float] = []  # by step
        self.visible: list[float] = []  # by step: when the clients have its tokens
        self.series: list[tuple[float, int, int, float]] = []  # time, running, waiting, share of the KV cache
        self.peak_running = self.peak_step_tokens = self.peak_blocks = 0
        self.died_at: float | None = None
        self.now = 0.0
        self._before = 0.0  # start of the step that ran last
        self._sample_at = 0.0
        self._pending: deque[int] = deque()  # requests that the engine has not seen

    def run(self) -> None:
        """Until everything is answered, the engine dies or the client gives up."""
        scheduler, arrivals, pending, ready = self.scheduler, self.arrivals, self._pending, self.ready
        while True:
            self._receive()
            # With async scheduling the step after the running one has been scheduled already, so that a new request
            # waits for one more.
            cut = self._before if scheduler.effective.asynchronous and scheduler.running else self.now
            while pending and ready[pending[0]] <= cut:
                scheduler.add(self.sequences[pending.popleft()])
            if not scheduler.busy:
                if pending:
                    self.now = max(self.now, ready[pending[0]])
                elif len(ready) < len(arrivals):
                    self.now = max(self.now, arrivals[len(ready)])
                else:
                    return
                self._before = self.now
                continue
            if self.now > self.stop_s:
                return
            if self.now >= self._sample_at:
                self._sample()
            only_decodes = not scheduler.waiting and not scheduler.prefilling
            if not (only_decodes and self._decode()) and not self._step():
                return

    def _receive(self) -> None:
        """Requests that have arrived by now go through the API server."""
        arrivals, ready = self.arrivals, self.ready
        while len(ready) < len(arrivals) and arrivals[len(ready)] <= self.now:
            position = len(ready)
            ready.append(self.frontend.receive(arrivals[position], self.sequences[position].prompt))
            self._pending.append(position)

    def _sample(self) -> None:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting) + len(self._pending)
        usage = 1.0 - scheduler.blocks.free / scheduler.blocks.total
        self.series.append((self.now, len(scheduler.running), waiting, usage))
        self._sample_at = self.now + SAMPLE_S

    def _decode(self) -> bool:
        """Steps of decodes alone, in which the scheduler has no choices until a request arrives, ends or lacks a block.

        False when there is none.
        """
        scheduler, send, cost, noise = self.scheduler, self.frontend.send, self.times.decode, self.noise
        due, finishing, blocks, block = scheduler.due, scheduler.finishing, scheduler.blocks, scheduler.block
        starts, visible, circle = self.starts, self.visible, len(noise)
        asynchronous = scheduler.effective.asynchronous
        number, context, decodes = scheduler.step, scheduler.context, scheduler.decodes
        heard = self.ready[self._pending[0]] if self._pending else NEVER
        arrives = self.arrivals[len(self.ready)] if len(self.ready) < len(self.arrivals) else NEVER
        until = min(arrives, self._sample_at, self.stop_s)
        first, now, before = number, self.now, self._before
        while True:
            need = due[(number + 1) % block]
            if need > blocks.free:
                break
            number += 1
            if need:
                blocks.take(need)
            context += decodes
            factor, extra = noise[number % circle]
            starts.append(now)
            before = now
            now += cost(decodes, context) * factor + extra
            visible.append(send(now, decodes))
            if number in finishing or now >= until or heard <= (before if asynchronous else now):
                break
        steps = number - first
        if not steps:
            return False
        self.now, self._before = now, before
        scheduler.advance(steps, context)
        self._peaks(decodes, decodes)
        return True

    def _step(self) -> bool:
        """One planned step; False when it runs out of memory."""
        scheduler = self.scheduler
        step = scheduler.plan()
        if not step.tokens:
            raise HarnessError("simulated scheduler: a step without tokens while requests wait")
        self._peaks(step.sequences, step.tokens)
        if step.tokens > self.oom_tokens:
            self.died_at = self.now
            return False
        if step.tokens == step.decodes:
            seconds = self.times.decode(step.decodes, step.context)
        else:
            seconds = self.times.mixed(step.tokens, step.sequences, step.context, step.pairs)
        factor, extra = self.noise[step.number % len(self.noise)]
        self.starts.append(self.now)
        self._before = self.now
        self.now += seconds * factor + extra
        self._receive()
        self.visible.append(self.frontend.send(self.now, step.decodes + len(step.completing)))
        scheduler.commit(step)
        return True

    def _peaks(self, sequences: int, tokens: int) -> None:
        blocks = self.scheduler.blocks
        self.peak_running = max(self.peak_running, sequences)
        self.peak_step_tokens = max(self.peak_step_tokens, tokens)
        self.peak_blocks = max(self.peak_blocks, blocks.total - blocks.free)
