"""Tells others about a night: commands and webhooks; whatever happens to them is noted and never loses the night."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from tuner.nightly.profile import Hook
from tuner.nightly.record import Event, Night
from tuner.records import FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Told:
    """One hook that was called, and how it went; `problem` is empty where it was well received."""

    hook: str
    problem: str


def tell(
    hooks: Sequence[Hook], profile: str, night: Night, summary: str, environment: Mapping[str, str] | None = None
) -> tuple[Told, ...]:
    """Call every hook that one of the night's events is for, each with all of them that it is for."""
    told = []
    for hook in hooks:
        events = [event for event in night.events if event.kind in hook.on]
        if events:
            told.append(_call(hook, message(profile, night, events, summary), environment or os.environ))
    return tuple(told)


def message(profile: str, night: Night, events: Sequence[Event], summary: str) -> dict[str, object]:
    """What hooks are given, as JSON. `text` is one line, which is what chat systems show."""
    lines = "; ".join(f"{event.kind}: {event.text}" for event in events)
    return {
        "format_version": FORMAT_VERSION,
        "text": f"vllm-tune nightly {profile}, night {night.number}: {lines}",
        "profile": profile,
        "night": night.number,
        "state": night.state.value,
        "events": [{"kind": event.kind, "text": event.text, "since": event.since} for event in events],
        "vllm": night.environment.vllm_version,
        "host": night.environment.host,
        "summary_markdown": summary,
    }


def _call(hook: Hook, content: Mapping[str, object], environment: Mapping[str, str]) -> Told:
    """Whatever a hook is made of: the night it tells of is over, and the next one must not die of it again."""
    name = hook.command[0] if hook.command else f"webhook ${hook.webhook_variable}"
    try:
        if hook.command:
            return Told(name, _run(hook, content, environment))
        if hook.webhook:
            name = "webhook"  # until its host, which may be shown, is known
            name = f"webhook {_host(hook.webhook)}"
        url = environment.get(hook.webhook_variable, "") if hook.webhook_variable else hook.webhook
        return Told(name, _post(url, hook.timeout_s, content))
    except (ValueError, OverflowError, httpx.InvalidURL) as error:
        return Told(name, f"cannot be called ({type(error).__name__})")  # its text may hold the address


def _run(hook: Hook, content: Mapping[str, object], environment: Mapping[str, str]) -> str:
    """No shell: the words are the program and its arguments; the message is its standard input."""
    try:
        done = subprocess.run(
            hook.command,
            input=json.dumps(content),
            encoding="utf-8",
            errors="replace",  # what it prints is in whatever encoding it likes
            capture_output=True,
            timeout=hook.timeout_s,
            env={**environment, "TUNE_EVENTS": ",".join(_kinds(content))},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {hook.timeout_s:g} s"
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    if done.returncode != 0:
        return f"ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    return ""


def _post(url: str, timeout_s: float, content: Mapping[str, object]) -> str:
    try:
        answer = httpx.post(url, json=content, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"was not reached ({type(error).__name__})"  # its text may hold the address, which may be a secret
    return "" if answer.is_success else f"answered {answer.status_code}"


def _kinds(content: Mapping[str, object]) -> list[str]:
    events = content["events"]
    assert isinstance(events, list)
    return [event["kind"] for event in events]


def _host(url: str) -> str:
    """The path and the query of a webhook are often its secret."""
    return httpx.URL(url).host
