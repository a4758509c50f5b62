"""Owns the API server processes of a simulated server as one queue for host time; it knows no engine."""

from __future__ import annotations

from tuner.sim.profile import Effective, Profile


class Frontend:
    """Requests on their way in and tokens on their way out share the time of `api_servers` processes.

    The processes are taken as one that is as many times faster; more of them than cores (two are the engine's and the
    client's) bring nothing. A request needs several turns of the event loop before the engine has it, and every turn
    waits for the tokens of a step that are being sent, as far as sending keeps the loop busy.
    """

    __slots__ = (
        "_prompt_token_s",
        "_request_s",
        "_sent_at",
        "_token_s",
        "_turn_s",
        "_turns",
        "busy_s",
        "free_at",
        "latency_s",
    )

    def __init__(self, profile: Profile, effective: Effective, speed: float = 1.0) -> None:
        machine = profile.machine
        useful = max(1, min(effective.api_servers, machine.cores - 2))
        share = speed / useful
        self._request_s = machine.request_s * share
        self._prompt_token_s = machine.prompt_token_s * share
        self._token_s = (machine.token_s + machine.chunk_s / effective.stream_interval) * share
        self._turns = machine.turns
        self._turn_s = self._sent_at = 0.0
        self.latency_s = 0.5 * machine.latency_s * speed
        self.free_at = 0.0
        self.busy_s = 0.0

    def receive(self, at: float, prompt_tokens: int) -> float:
        """A request arrives; returns when the engine has it."""
        work = self._request_s + self._prompt_token_s * prompt_tokens
        start = at if at > self.free_at else self.free_at
        self.free_at = start + work
        self.busy_s += work
        return start + work + self._turns * self._turn_s + self.latency_s

    def send(self, at: float, tokens: int) -> float:
        """A step ends with `tokens` tokens; returns when the client has them (the middle one of them)."""
        work = self._token_s * tokens
        start = at if at > self.free_at else self.free_at
        self.free_at = start + work
        self.busy_s += work
        between = at - self._sent_at
        self._sent_at = at
        self._turn_s = work * work / between if between > work else work
        return start + 0.5 * work + self.latency_s
