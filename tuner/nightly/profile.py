"""`nightly.yaml`: what every night does; read and checked here, nothing is measured."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tuner.documents import Node, digest, read_yaml
from tuner.errors import InputError
from tuner.records import SPEED_NAMES
from tuner.store import usable_name

REASONS = ("no-incumbent", "new-vllm", "new-model", "drift")
"""Why a night may go on searching."""

EVENTS = ("regression", "recovery", "promotion", "version")
"""What a hook can be called for."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
MOST_S = 366 * 86400.0
MOST_HOOK_S = 86400.0  # no hook is waited for longer than until the next night
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TOP = (
    "name",
    "model",
    "slo",
    "workloads",
    "incumbent",
    "vllm",
    "gpus",
    "flags",
    "mixed",
    "speed",
    "rounds",
    "results",
    "regression",
    "search",
    "promotion",
    "keep",
    "hooks",
)


@dataclass(frozen=True, slots=True)
class Regression:
    """What counts as a loss. Effects are relative."""

    minimum_effect: float = 0.05  # within a night
    minimum_drift: float = 0.03  # of a change point over nights
    confirm_rounds: int = 3  # further rounds of a suspicious night


@dataclass(frozen=True, slots=True)
class Search:
    """When and how long a night goes on searching."""

    when: tuple[str, ...] = REASONS
    every: int = 0  # also every so many nights; 0: never for that reason alone
    trials: int = 8
    wall_s: float | None = None
    space: tuple[str, ...] = ("default",)


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a candidate has to show before it becomes the incumbent."""

    allowed: bool = True
    rounds: int = 5
    minimum_gain: float = 0.03  # smaller differences count as the same


@dataclass(frozen=True, slots=True)
class Hook:
    """Somebody to tell. Exactly one of `command`, `webhook` and `webhook_variable` is set."""

    on: tuple[str, ...]
    command: tuple[str, ...] = ()  # argv; the night as JSON on its standard input
    webhook: str = ""
    webhook_variable: str = ""  # environment variable that holds the URL, which may be a secret
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The checked profile; paths are absolute."""

    name: str
    model: str
    slo: Path
    results: Path
    workloads: Path | None = None
    incumbent: Path | None = None  # None: vLLM's defaults until something is promoted
    vllm: str = "vllm"
    gpus: tuple[int, ...] | None = None  # None: the first visible
    flags: tuple[str, ...] = ()  # of every server
    mixed: bool = False
    speed: str = "normal"
    rounds: int = 3
    regression: Regression = field(default_factory=Regression)
    search: Search = field(default_factory=Search)
    promotion: Promotion = field(default_factory=Promotion)
    keep_raw_nights: int = 30
    hooks: tuple[Hook, ...] = ()
    digest: str = ""


def load_profile(path: Path) -> Profile:
    """The profile in the file at `path`, whose relative paths count from its folder; raises InputError."""
    node = read_yaml(path)
    top = node.mapping(_TOP, required=("model", "slo"))
    base = path.resolve().parent
    name = top["name"].text() if "name" in top else path.stem
    if not _NAME.fullmatch(name):
        top.get("name", node).fail("may hold letters, digits, '.', '_' and '-' only", "Shorten it to a plain word.")
    gpus = tuple(item.integer(at_least=0, at_most=1023) for item in top["gpus"].items()) if "gpus" in top else None
    return Profile(
        name=name,
        model=_model(top["model"], base),
        slo=_existing(top["slo"], base),
        results=usable_name(
            _path(top["results"], base) if "results" in top else base / f"results/nightly/{name}", "results"
        ),
        workloads=_existing(top["workloads"], base) if "workloads" in top else None,
        incumbent=_existing(top["incumbent"], base) if "incumbent" in top else None,
        vllm=_executable(top["vllm"], base) if "vllm" in top else "vllm",
        gpus=gpus,
        flags=tuple(_word(item) for item in top["flags"].items()) if "flags" in top else (),
        mixed=top["mixed"].boolean() if "mixed" in top else False,
        speed=top["speed"].text(SPEED_NAMES) if "speed" in top else "normal",
        rounds=top["rounds"].integer(at_least=2, at_most=20) if "rounds" in top else 3,
        regression=_regression(top.get("regression")),
        search=_search(top.get("search")),
        promotion=_promotion(top.get("promotion")),
        keep_raw_nights=_keep(top.get("keep")),
        hooks=tuple(_hook(item) for item in top["hooks"].items()) if "hooks" in top else (),
        digest=digest(node.value),
    )


def _regression(node: Node | None) -> Regression:
    given = {} if node is None else node.mapping(("minimum_effect", "minimum_drift", "confirm_rounds"))
    default = Regression()
    return Regression(
        _share(given["minimum_effect"]) if "minimum_effect" in given else default.minimum_effect,
        _share(given["minimum_drift"]) if "minimum_drift" in given else default.minimum_drift,
        given["confirm_rounds"].integer(at_least=1, at_most=20)
        if "confirm_rounds" in given
        else default.confirm_rounds,
    )


def _search(node: Node | None) -> Search:
    given = {} if node is None else node.mapping(("when", "every", "trials", "wall", "space"))
    default = Search()
    return Search(
        when=tuple(item.text(REASONS) for item in given["when"].items()) if "when" in given else default.when,
        every=given["every"].integer(at_least=0, at_most=1000) if "every" in given else default.every,
        trials=given["trials"].integer(at_least=2, at_most=1000) if "trials" in given else default.trials,
        wall_s=_duration_s(given["wall"]) if "wall" in given else default.wall_s,
        space=tuple(item.text() for item in given["space"].items()) if "space" in given else default.space,
    )


def _promotion(node: Node | None) -> Promotion:
    given = {} if node is None else node.mapping(("allowed", "rounds", "minimum_gain"))
    default = Promotion()
    return Promotion(
        given["allowed"].boolean() if "allowed" in given else default.allowed,
        given["rounds"].integer(at_least=3, at_most=50) if "rounds" in given else default.rounds,
        _share(given["minimum_gain"]) if "minimum_gain" in given else default.minimum_gain,
    )


def _keep(node: Node | None) -> int:
    given = {} if node is None else node.mapping(("raw_nights",))
    return given["raw_nights"].integer(at_least=1, at_most=10_000) if "raw_nights" in given else 30


def _hook(node: Node) -> Hook:
    given = node.mapping(("on", "command", "webhook", "webhook_variable", "timeout"), required=("on",))
    ways = [way for way in ("command", "webhook", "webhook_variable") if way in given]
    if len(ways) != 1:
        node.fail("needs exactly one of `command`, `webhook` and `webhook_variable`", "Write one hook for each.")
    on = tuple(item.text(EVENTS) for item in given["on"].items())
    if not on:
        given["on"].fail("names no event", f"Name some of: {', '.join(EVENTS)}.")
    command = tuple(_word(item) for item in given["command"].items()) if "command" in given else ()
    if "command" in given and not command:
        given["command"].fail("is empty", "Write the program and its arguments as a list.")
    url = given["webhook"].text() if "webhook" in given else ""
    if url and not _is_address(url):
        given["webhook"].fail("is no HTTP address", "Write https://….")
    return Hook(
        on,
        command,
        url,
        given["webhook_variable"].text() if "webhook_variable" in given else "",
        _duration_s(given["timeout"], MOST_HOOK_S) if "timeout" in given else Hook(()).timeout_s,
    )


def _share(node: Node) -> float:
    """A relative effect; percentages by mistake are refused."""
    value = node.number(above=0.0)
    if value >= 1:
        node.fail("must be a share below 1", f"Write {value / 100:g} for {value:g} %.")
    return value


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def _duration_s(node: Node, at_most: float = MOST_S) -> float:
    text = node.value if isinstance(node.value, str) else ""
    if not _DURATION.fullmatch(text):
        node.fail("is not a duration", "Write for example 45m, 2h or 1h30m.")
    seconds = sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhd]", text))
    if seconds <= 0:
        node.fail("must be longer than nothing", "Write for example 45m.")
    if seconds > at_most:
        node.fail(f"is longer than {at_most / 86400:.0f} d", "Write for example 45m.")
    return seconds


def _word(node: Node) -> str:
    """One word of a command line; numbers are written as they stand."""
    if isinstance(node.value, bool) or not isinstance(node.value, str | int | float):
        node.fail("must be one word of a command line", "Quote it.")
    if "\0" in str(node.value):
        node.fail("holds a NUL, which ends a word", "Remove it.")
    return node.text() if str(node.value).strip() and isinstance(node.value, str) else str(node.value)


def _existing(node: Node, base: Path) -> Path:
    path = _path(node, base)
    if not path.exists():
        node.fail("does not exist", f"Paths count from {base}.")
    return path


def _model(node: Node, base: Path) -> str:
    """A folder, counted from the profile's, or a hub name, which stays as it is."""
    text = node.text()
    path = _path(node, base)
    return str(path) if path.is_dir() else text


def _executable(node: Node, base: Path) -> str:
    text = node.text()
    return str(_path(node, base)) if "/" in text else text


def _path(node: Node, base: Path) -> Path:
    """Counted from the profile's folder; `~` is the home, also where Path.expanduser() would raise (unknown users)."""
    text = node.text()
    if "\0" in text:
        node.fail("holds a NUL, which no path can", "Remove it.")
    return base / os.path.expanduser(text)


def check_variables(profile: Profile, environment: dict[str, str]) -> None:
    """InputError where a hook's variable is not set: better now than when there is something to tell."""
    for position, hook in enumerate(profile.hooks):
        if hook.webhook_variable and not environment.get(hook.webhook_variable):
            raise InputError(
                where=profile.name,
                field=f"hooks[{position}].webhook_variable",
                value=hook.webhook_variable,
                rule="is not set in the environment",
                remedy=f"Export {hook.webhook_variable} with the address of the webhook.",
            )
