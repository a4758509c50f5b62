"""Owns how long one engine step takes on a profile: a roofline with graphs, attention, collectives and host time."""

from __future__ import annotations

import numpy as np

from tuner.sim.profile import Effective, Profile

MODE_STEP_FACTOR = {"balanced": 1.0, "interactivity": 0.97, "throughput": 1.0}
"""Latency-oriented kernels save a little of the fixed device time at small batches; assumed, not measured."""


class StepTimes:
    """Seconds of a step by its content. Tables over the number of tokens, so that a step costs a few additions.

    device = (memoryᵏ + computeᵏ)^(1/k) of the padded batch + fixed + per sequence + attention + collectives, at least
    the launch time where no graph covers the step; host = fixed + per sequence, hidden under the device with async
    scheduling and added to it without.
    """

    __slots__ = ("_asynchronous", "_decode", "_host", "_mixed", "_per_sequence", "context_s", "pair_s")

    def __init__(self, profile: Profile, effective: Effective, speed: float = 1.0) -> None:
        """`speed` multiplies every time: the draw of one server start."""
        machine, model = profile.machine, profile.model
        most = effective.budget
        tokens = np.arange(most + 1)
        captures = np.array(effective.captures or (0,))
        largest = int(captures[-1])
        inside = tokens <= largest
        padded = np.where(inside, captures[np.minimum(np.searchsorted(captures, tokens), len(captures) - 1)], tokens)
        share = 1.0 / effective.tensor
        memory = model.weight_bytes * share / machine.bandwidth
        compute = padded * (2.0 * model.parameters * share / machine.flops)
        device = (memory**machine.knee + compute**machine.knee) ** (1.0 / machine.knee)
        if effective.tensor > 1:
            size = padded * (model.hidden * 2.0)
            device += 2 * model.layers * (machine.link_latency_s + size / machine.link_bandwidth)
        device += machine.step_s * MODE_STEP_FACTOR[effective.mode]
        # Decodes run on full graphs, steps with prefill on piecewise ones; beyond the largest it is kernel by kernel.
        launched = device if effective.captures else np.maximum(device, machine.eager_s)
        decode = np.where(inside, launched, np.maximum(device, machine.eager_s))
        mixed = machine.mixed_s + np.maximum(launched, np.where(inside, machine.piecewise_s, machine.eager_s))
        sequences = np.arange(effective.seqs + 1)
        extra = 3e-5 * (effective.api_servers - 1)  # the engine feeds one socket for each API server
        host = machine.cpu_step_s + extra + machine.cpu_seq_s * sequences
        per_sequence = machine.step_seq_s * sequences
        pure = np.take(decode, np.minimum(sequences, most)) + per_sequence
        self._decode: list[float] = (pure * speed).tolist()
        self._mixed: list[float] = (mixed * speed).tolist()
        self._host: list[float] = (host * speed).tolist()
        self._per_sequence: list[float] = (per_sequence * speed).tolist()
        self._asynchronous = effective.asynchronous
        self.context_s = speed * model.kv_token_bytes * effective.kv_factor * share / machine.bandwidth
        self.pair_s = speed * model.pair_flops * share / machine.attention_flops

    def decode(self, count: int, context: int) -> float:
        """A step of `count` decodes with `context` tokens of KV among them."""
        device = self._decode[count] + context * self.context_s
        host = self._host[count]
        if self._asynchronous:
            return device if device > host else host
        return device + host

    def mixed(self, tokens: int, sequences: int, context: int, pairs: float) -> float:
        """A step that also prefills: `tokens` in all, `pairs` query-key pairs of prefill attention."""
        device = self._mixed[tokens] + self._per_sequence[sequences] + context * self.context_s + pairs * self.pair_s
        host = self._host[sequences]
        if self._asynchronous:
            return device if device > host else host
        return device + host
