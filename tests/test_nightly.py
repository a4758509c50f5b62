"""Nights over servers that are a formula: what is judged, promoted, told and kept, and that a kill loses none of it."""

from __future__ import annotations

import json
import math
import random
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from benchmarks.nightly_power import Nights, World, planted, quiet
from tests.comparing import FormulaPlace, Truth, install
from tests.edited import put
from tuner.cli import main
from tuner.errors import InputError
from tuner.nightly import History, Night, Nightly, Outcome, State, exit_state, load_profile, ready
from tuner.nightly.hooks import tell
from tuner.nightly.level import change, level, noise_floor
from tuner.nightly.profile import Hook, Regression
from tuner.nightly.record import Event
from tuner.nightly.search import kept_plan
from tuner.records import Config, TrialRecord
from tuner.study import SPEEDS, Silent, StopSignals

WORKLOAD = "input_tokens: 32\noutput_tokens: 8\n"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
INCUMBENT: Config = {"max-num-seqs": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slo.yaml").write_text("slo: {ttft: {p95: 500}}\n")
    (tmp_path / "workloads").mkdir()
    for name in ("short", "long"):
        (tmp_path / "workloads" / f"{name}.yaml").write_text(WORKLOAD)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "best.yaml").write_text(f"model: {tmp_path / 'model'}\nmax-num-seqs: 16\n")
    profile(tmp_path)
    return tmp_path


def profile(folder: Path, **changes: object) -> Path:
    document: dict[str, object] = {
        "name": "chat",
        "model": "model",
        "slo": "slo.yaml",
        "workloads": "workloads",
        "incumbent": "best.yaml",
        "results": "history",
        "search": {"space": ["max-num-seqs=4,16,64"], "trials": 4},
    }
    path = folder / "nightly.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in {**document, **changes}.items() if v is not None}))
    return path


def steady(version: str, config: Config) -> dict[str, float]:
    seqs = int(config.get("max-num-seqs", 4))
    return dict.fromkeys(("short", "long"), 10.0 * {4: 0.8, 16: 1.0, 64: 0.9}[seqs])


class Calendar:
    """One night after the other in a folder, each by a new object as if by a new process."""

    def __init__(self, folder: Path, truth: Truth = steady, noise: float = 0.02, night_sd: float = 0.008) -> None:
        self.folder, self.truth, self.noise, self.night_sd = folder, truth, noise, night_sd
        self.place = FormulaPlace(truth)
        self._draw = random.Random(5)
        self.time = float(int(time.time())) - 60 * 86_400.0

    def night(
        self,
        factor: float = 1.0,
        *,
        vllms: tuple[str, ...] = ("0.32.0",),
        events: dict[int, Callable[[TrialRecord], TrialRecord]] | None = None,
        **options: bool,
    ) -> Outcome:
        """`factor` slows the incumbent alone, and not the defaults or other configurations."""
        tonight = math.exp(self._draw.gauss(0, self.night_sd))

        def truth(version: str, config: Config) -> dict[str, float] | None:
            found = self.truth(version, config)
            lost = factor if dict(config) == INCUMBENT else 1.0
            return None if found is None else {name: rate * tonight * lost for name, rate in found.items()}

        self.place = FormulaPlace(truth, self.noise, events or {})
        self.time += 86_400.0
        inputs = ready(load_profile(self.folder / "nightly.yaml"), [install(version) for version in vllms], ())
        return Nightly(
            inputs, self.place, StopSignals(), Silent(), pause_s=0.0, clock=lambda: self.time, **options
        ).run()

    @property
    def history(self) -> History:
        return History(self.folder / "history")

    def kinds(self) -> list[str]:
        return [event.kind for night in self.history.nights() for event in night.events]


# --- the arithmetic ----------------------------------------------------------------------------------------------


def test_the_noise_floor_comes_from_history_as_it_grows() -> None:
    draw = random.Random(1)

    def nights(count: int, night_sd: float, run_sd: float) -> list[object]:
        found = []
        for _ in range(count):
            shared = draw.gauss(0, night_sd)
            found.append(level([math.exp(shared + draw.gauss(0, run_sd)) for _ in range(3)]))
        return found

    first = noise_floor([], 3)
    assert first.night_sd == pytest.approx(math.hypot(0.03 / math.sqrt(3), 0.01))
    calm = noise_floor(nights(60, 0.002, 0.005), 3)  # type: ignore[arg-type]
    restless = noise_floor(nights(60, 0.05, 0.01), 3)  # type: ignore[arg-type]
    assert calm.night_sd < 0.008
    assert restless.night_sd == pytest.approx(0.05, rel=0.3)


def test_a_change_is_a_prediction_with_the_right_error_rate() -> None:
    draw, low = random.Random(3), 0
    for _ in range(2000):
        before = [level([math.exp(draw.gauss(0, 0.01) + draw.gauss(0, 0.03)) for _ in range(3)]) for _ in range(9)]
        shared = draw.gauss(0, 0.01)
        found = change(
            [one for one in before if one],
            [one for one in [level([math.exp(shared + draw.gauss(0, 0.03)) for _ in range(3)])] if one],
        )
        assert found is not None
        low += found.probability < 0.05
    assert 60 <= low <= 140  # 5 % of 2,000


def test_quiet_nights_raise_no_alarm_and_real_losses_do() -> None:
    """A small cut of `make bench-nightly`, which has the rates with their intervals."""
    rules = Regression()
    false, _ = quiet(World(), 22, 12, rules)
    assert false <= 1
    found = planted(World(), 8, 2, 15, rules, factor=0.9)
    assert sum(nights <= 2 for nights in found) >= len(found) - 1


def test_a_small_lasting_loss_is_found_by_a_change_point() -> None:
    pytest.importorskip("otava")
    found = planted(World(run_sd=0.015, class_sd=0.01, night_sd=0.005), 12, 10, 10, Regression(), factor=0.955)
    assert sum(nights <= 10 for nights in found) >= 8


def test_the_defaults_tell_whose_fault_it_is() -> None:
    world = Nights(World(run_sd=0.01), 3, Regression())
    for _ in range(8):
        world.night()
    alone = Nights(World(run_sd=0.01), 3, Regression())
    for _ in range(8):
        alone.night()
    assert "look at the machine or vLLM first" in world.night(0.85, defaults=0.68).events[0].text
    assert "so it is this configuration" in alone.night(0.85).events[0].text


# --- nights ------------------------------------------------------------------------------------------------------


def test_quiet_nights_stay_quiet_and_are_kept(folder: Path) -> None:
    calendar = Calendar(folder)
    for _ in range(4):
        outcome = calendar.night()
    assert [night.state for night in calendar.history.nights()] == [State.QUIET] * 4
    assert calendar.kinds() == []
    assert not exit_state(outcome.night)
    rows = (folder / "history" / "history.csv").read_text().splitlines()
    assert len(rows) == 5
    assert rows[0] == "time,night,vllm,incumbent,capacity,capacity_long,capacity_short,defaults,advantage"
    assert [side.name for side in outcome.night.sides] == ["incumbent", "defaults"]


def test_incumbent_and_defaults_are_interleaved_with_new_requests_every_night(folder: Path) -> None:
    calendar = Calendar(folder)
    calendar.night()
    first = calendar.place.calls
    calendar.night()
    second = calendar.place.calls
    assert [request.proposal.number for request in first] == [0, 1, 1, 0, 1, 0]
    assert not {request.seed for request in first} & {request.seed for request in second}


def test_a_loss_is_confirmed_reported_once_and_stands_until_it_is_gone(folder: Path) -> None:
    calendar = Calendar(folder)
    for _ in range(6):
        calendar.night(searching=False)
    outcome = calendar.night(0.85, searching=False)
    assert len(calendar.place.calls) == 12  # three rounds, and three more before anything was said
    assert outcome.night.state is State.REGRESSED
    assert exit_state(outcome.night)
    assert "so it is this configuration" in outcome.night.events[0].text
    again = calendar.night(0.85, searching=False)
    assert again.night.state is State.REGRESSED
    assert again.night.events == ()
    back = calendar.night(1.0, searching=False)
    assert back.night.state is State.QUIET
    assert calendar.kinds() == ["regression", "recovery"]


def test_an_accepted_level_is_the_new_reference(folder: Path) -> None:
    calendar = Calendar(folder)
    for _ in range(5):
        calendar.night(searching=False)
    calendar.night(0.85, searching=False)
    accepted = calendar.night(0.85, accept=True, searching=False)
    assert accepted.night.state is State.QUIET
    assert [calendar.night(0.85, searching=False).night.state for _ in range(3)] == [State.QUIET] * 3


def test_an_incumbent_that_no_longer_starts_is_a_regression(folder: Path) -> None:
    def broken(version: str, config: Config) -> dict[str, float] | None:
        return None if version == "0.33.0" and config.get("max-num-seqs") == 16 else steady(version, config)

    calendar = Calendar(folder, broken)
    for _ in range(2):
        calendar.night()
    outcome = calendar.night(vllms=("0.33.0",), searching=False)
    assert outcome.night.state is State.REGRESSED
    assert "did not run in 3 of 3 rounds" in outcome.night.events[0].text
    assert outcome.night.drift == ("vLLM: 0.32.0 → 0.33.0",)


def test_a_planted_improvement_is_searched_for_and_promoted(folder: Path) -> None:
    def better_on_the_new(version: str, config: Config) -> dict[str, float]:
        rates = steady(version, config)
        fast = version == "0.33.0" and config.get("max-num-seqs") == 64
        return {name: rate * (1.5 if fast else 1.0) for name, rate in rates.items()}

    calendar = Calendar(folder, better_on_the_new)
    quiet_night = calendar.night()
    assert quiet_night.night.searched is None
    outcome = calendar.night(vllms=("0.33.0",))
    assert outcome.night.searched is not None
    assert outcome.night.searched.reasons == ("new-vllm",)
    assert outcome.night.candidate is not None
    assert outcome.night.candidate.promoted
    assert outcome.night.candidate.contrast.standing == "better"
    assert calendar.kinds() == ["promotion"]
    best = yaml.safe_load((folder / "history" / "best.yaml").read_text())
    assert best["max-num-seqs"] == 64
    assert (folder / "history" / "incumbents" / "0001" / "best.lock.json").is_file()
    after = calendar.night(vllms=("0.33.0",))
    assert after.night.incumbent == 1
    assert dict(after.night.config) == {"max-num-seqs": 64}
    assert after.night.searched is None
    assert after.night.state is State.QUIET


def test_nothing_is_promoted_without_proof_or_against_the_profile(folder: Path) -> None:
    def slightly(version: str, config: Config) -> dict[str, float]:
        fast = version == "0.33.0" and config.get("max-num-seqs") == 64
        return dict.fromkeys(("short", "long"), 10.0 * (1.5 if fast else 1.0))

    profile(folder, promotion={"allowed": False})
    calendar = Calendar(folder, slightly)
    calendar.night()
    outcome = calendar.night(vllms=("0.33.0",))
    assert outcome.night.candidate is not None
    assert not outcome.night.candidate.promoted
    assert dict(calendar.night(vllms=("0.33.0",)).night.config) == INCUMBENT


def test_without_an_incumbent_the_first_night_searches_one(folder: Path) -> None:
    profile(folder, incumbent=None)
    calendar = Calendar(folder)
    outcome = calendar.night()
    assert [side.name for side in outcome.night.sides] == ["incumbent"]
    assert outcome.night.searched is not None
    assert outcome.night.searched.reasons == ("no-incumbent",)
    assert outcome.night.candidate is not None
    assert outcome.night.candidate.promoted
    assert calendar.night().night.searched is None


def test_a_second_search_of_the_same_kind_goes_on_with_the_first(folder: Path) -> None:
    profile(folder, search={"space": ["max-num-seqs=4,16,64"], "trials": 2, "every": 1})
    calendar = Calendar(folder)
    first = calendar.night().night.searched
    second = calendar.night().night.searched
    assert first is not None
    assert second is not None
    assert first.folder == second.folder
    assert (first.trials, second.trials) == (2, 4)


def test_two_versions_in_one_night(folder: Path) -> None:
    def slower(version: str, config: Config) -> dict[str, float]:
        return {name: rate * (0.8 if version == "0.33.0" else 1.0) for name, rate in steady(version, config).items()}

    outcome = Calendar(folder, slower).night(vllms=("0.32.0", "0.33.0"))
    assert [side.name for side in outcome.night.sides] == ["incumbent", "defaults", "incumbent on vLLM 0.33.0"]
    assert outcome.night.version is not None
    assert outcome.night.version.standing == "worse"
    assert [event.kind for event in outcome.night.events] == ["version"]
    assert exit_state(outcome.night)


# --- kills -------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for kill -9: the process is gone between two calls."""


def kill(record: TrialRecord) -> TrialRecord:
    raise Killed


@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_night_that_was_killed_is_taken_up_again(folder: Path, at: int) -> None:
    calendar = Calendar(folder)
    calendar.night()
    before = {path: path.read_bytes() for path in (folder / "history").rglob("night.json")}
    with pytest.raises(Killed):
        calendar.night(events={at: kill})
    calendar.time -= 86_400.0 - 3600.0  # an hour later, not a day
    outcome = calendar.night()
    assert len(calendar.place.calls) == 6 - (at - 1)
    assert outcome.night.number == 2
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_kill_in_the_search_or_promotion_loses_no_trial(folder: Path) -> None:
    profile(folder, incumbent=None)
    whole = Calendar(folder)
    whole.night()
    calls = len(whole.place.calls)
    for at in (5, calls - 3):
        other = folder / f"killed-{at}"
        profile(folder, incumbent=None, results=str(other))
        calendar = Calendar(folder)
        calendar.folder = folder
        with pytest.raises(Killed):
            calendar.night(events={at: kill})
        calendar.time -= 86_000.0
        outcome = calendar.night()
        assert len(calendar.place.calls) == calls - (at - 1)
        assert outcome.night.candidate is not None
        assert outcome.night.candidate.promoted


def test_a_night_of_another_day_begins_anew_and_its_records_are_kept_aside(folder: Path) -> None:
    calendar = Calendar(folder)
    with pytest.raises(Killed):
        calendar.night(events={4: kill})
    calendar.night()
    assert len(calendar.place.calls) == 6
    aside = folder / "history" / "nights" / "0001.abandoned1"
    assert len(list(aside.rglob("trial.json"))) == 3
    assert [night.number for night in calendar.history.nights()] == [1]


def test_what_was_left_undone_after_the_record_is_done_by_the_next_call(folder: Path) -> None:
    calendar = Calendar(folder)
    calendar.night()
    night = folder / "history" / "nights" / "0001"
    for name in ("told.json", "summary.md", "junit.xml"):
        (night / name).unlink()
    (folder / "history" / "history.csv").unlink()
    with pytest.raises(Killed):
        calendar.night(events={1: kill})
    assert {path.name for path in night.glob("*.*")} >= {"told.json", "summary.md", "junit.xml"}
    assert (folder / "history" / "history.csv").is_file()


# --- reports, hooks, rotation ------------------------------------------------------------------------------------


def lost(folder: Path) -> Outcome:
    calendar = Calendar(folder)
    for _ in range(5):
        calendar.night(searching=False)
    return calendar.night(0.8, searching=False)


def test_junit_and_markdown_say_what_was_lost(folder: Path) -> None:
    outcome = lost(folder)
    suite = ElementTree.fromstring((outcome.folder / "junit.xml").read_text())
    assert suite.tag == "testsuite"
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("1", "1", "0")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "against the mean of 5 nights" in str(failure.get("message"))
    text = (outcome.folder / "summary.md").read_text()
    assert "🔴 regressed" in text
    assert "| short | " in text
    assert "| **all** | " in text


def test_control_characters_do_not_break_the_xml(folder: Path) -> None:
    from tuner.nightly import junit

    night = replace(lost(folder).night, notes=("bell \x07 and null \x00 and 🚀",))
    assert "🚀" in str(ElementTree.fromstring(junit("na\x01me", night)).findtext("system-out"))


class _Receiver(BaseHTTPRequestHandler):
    received: list[dict[str, object]] = []  # noqa: RUF012
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).received.append(json.loads(body))
        self.send_response(type(self).status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def webhook() -> Iterator[tuple[str, type[_Receiver]]]:
    receiver = type("Receiver", (_Receiver,), {"received": [], "status": 200})
    server = HTTPServer(("127.0.0.1", 0), receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret", receiver
    server.shutdown()
    thread.join()
    server.server_close()


def test_hooks_are_told_and_their_failures_lose_nothing(
    folder: Path, webhook: tuple[str, type[_Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, receiver = webhook
    out = folder / "told.txt"
    monkeypatch.setenv("CHAT_URL", url)
    hooks = [
        {"on": ["regression"], "command": ["sh", "-c", f'(cat; echo; echo "$TUNE_EVENTS") > "{out}"']},
        {"on": ["regression"], "webhook_variable": "CHAT_URL"},
        {"on": ["promotion"], "command": ["false"]},
        {"on": ["regression"], "command": ["sh", "-c", "echo broken >&2; exit 3"]},
        {"on": ["regression"], "command": ["no-such-program"]},
        {"on": ["regression"], "command": ["sleep", "20"], "timeout": "0.2s"},
        {"on": ["regression"], "webhook": "http://127.0.0.1:9/path/with/secret", "timeout": "2s"},
    ]
    profile(folder, hooks=hooks)
    outcome = lost(folder)
    assert json.loads(out.read_text().splitlines()[0])["state"] == "regressed"
    assert out.read_text().splitlines()[1] == "regression"
    assert [message["night"] for message in receiver.received] == [6]
    assert "capacity" in str(receiver.received[0]["text"])
    problems = {told.hook: told.problem for told in outcome.told if told.problem}
    assert problems == {
        "sh": "ended with exit code 3: broken",
        "no-such-program": "cannot be run (No such file or directory)",
        "sleep": "did not end within 0.2 s",
        "webhook 127.0.0.1": "was not reached (ConnectError)",
    }
    assert (outcome.folder / "night.json").is_file()


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ({"command": ["sh", "-c", r"printf 'ge\344ndert' >&2; exit 1"]}, "exit code 1: ge\ufffdndert"),
        ({"command": ["sh", "a\0b"]}, "cannot be called (ValueError)"),
        ({"command": ["true"], "timeout_s": 1e300}, ""),
        ({"webhook": "https://hooks.example.com:port/x"}, "cannot be called (InvalidURL)"),
        ({"webhook_variable": "ODD_URL"}, "was not reached (InvalidURL)"),
        ({"webhook": "http://127.0.0.1:9/", "timeout_s": 1e300}, ""),
    ],
)
def test_no_hook_whatever_it_is_made_of_kills_the_night(
    folder: Path, hook: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD_URL", "https://hooks.example.com:port/x")
    words = {name: tuple(value) if isinstance(value, list) else value for name, value in hook.items()}
    night = replace(Calendar(folder).night().night, events=(Event("regression", "lost"),))
    (told,) = tell([Hook(("regression",), **words)], "chat", night, "")  # type: ignore[arg-type]
    assert problem in told.problem


def test_raw_data_of_old_nights_goes_and_records_stay(folder: Path) -> None:
    profile(folder, keep={"raw_nights": 2})
    calendar = Calendar(folder)
    for _ in range(4):
        calendar.night()
    nights = folder / "history" / "nights"
    with_trials = [path.parent.parent.name for path in sorted(nights.glob("*/rounds/trials"))]
    assert with_trials == ["0003", "0004"]
    assert len(calendar.history.nights()) == 4
    assert calendar.night().night.changes["overall"].nights == 4


def test_the_csv_is_read_by_otava_itself(folder: Path) -> None:
    importer = pytest.importorskip("otava.importer", exc_type=ImportError)
    from otava.config import load_config_from_file

    calendar = Calendar(folder)
    for _ in range(3):
        calendar.night()
    config = load_config_from_file(str(folder / "history" / "otava.yaml"))
    test = config.tests["nightly"]
    test.file = str(folder / "history" / "history.csv")
    series = importer.CsvImporter().fetch_data(test)
    assert len(series.time) == 3
    assert set(series.data) == {"capacity", "capacity_long", "capacity_short", "defaults", "advantage"}


# --- the profile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"modle": "x"}, "modle", "unknown"),
        ({"slo": "nowhere.yaml"}, "slo", "does not exist"),
        ({"name": "../x"}, "name", "letters, digits"),
        ({"rounds": 1}, "rounds", "at least 2"),
        ({"speed": "hasty"}, "speed", "none of the choices"),
        ({"gpus": ["a"]}, "gpus[0]", "must be a number"),
        ({"flags": "--max-num-seqs 4"}, "flags", "must be a list"),
        ({"regression": {"minimum_effect": 5}}, "regression.minimum_effect", "share below 1"),
        ({"search": {"when": ["monday"]}}, "search.when[0]", "none of the choices"),
        ({"search": {"wall": "tomorrow"}}, "search.wall", "not a duration"),
        ({"keep": {"raw_nights": 0}}, "keep.raw_nights", "at least 1"),
        ({"hooks": [{"on": ["regression"]}]}, "hooks[0]", "exactly one of"),
        ({"hooks": [{"on": ["regression"], "command": []}]}, "hooks[0].command", "is empty"),
        ({"hooks": [{"on": [], "command": ["x"]}]}, "hooks[0].on", "names no event"),
        ({"hooks": [{"on": ["regression"], "webhook": "ftp://x"}]}, "hooks[0].webhook", "no HTTP address"),
        ({"hooks": [{"on": ["regression"], "webhook": "https://x:port/"}]}, "hooks[0].webhook", "no HTTP address"),
        ({"hooks": [{"on": ["drift"], "command": ["x"]}]}, "hooks[0].on[0]", "none of the choices"),
        ({"hooks": [{"on": ["recovery"], "command": ["a\0b"]}]}, "hooks[0].command[0]", "holds a NUL"),
        (
            {"hooks": [{"on": ["recovery"], "command": ["x"], "timeout": "999999999999d"}]},
            "hooks[0].timeout",
            "is longer than 1 d",
        ),
        ({"search": {"wall": "999999999999d"}}, "search.wall", "is longer than"),
        ({"slo": "~no-such-user/slo.yaml"}, "slo", "does not exist"),
        ({"results": "a\0b"}, "results", "holds a NUL"),
        ({"results": "\ud800"}, "results", "half of a character"),
    ],
)
def test_a_wrong_profile_is_refused(folder: Path, changes: dict[str, object], field: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        load_profile(profile(folder, **changes))
    assert error.value.field == field
    assert says in str(error.value)


def test_flags_that_contradict_the_incumbent_are_refused(folder: Path) -> None:
    loaded = load_profile(profile(folder, flags=["--max-num-seqs", "32"]))
    with pytest.raises(InputError, match="is 16 in one of the configurations"):
        ready(loaded, [install()], ())


def test_a_record_of_a_night_reads_back(folder: Path) -> None:
    outcome = Calendar(folder).night()
    assert History(folder / "history").nights() == (outcome.night,)
    assert isinstance(outcome.night, Night)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[(("sides", 0, "values", 0, "short"), value) for value in (0, -1, math.nan, math.inf)],
        (("sides", 0, "values", 0), {"short": 1.0}),
        (("sides",), []),
        (("weights",), {}),
        *[(("started_at",), value) for value in (1e300, math.nan)],
        *[(("searched",), {"reasons": [], "folder": at, "verdict": "", "trials": 1}) for at in ("../precious", "/x")],
    ],
)
def test_a_record_that_would_blind_later_nights_is_named(
    folder: Path, path: tuple[str | int, ...], value: object
) -> None:
    calendar = Calendar(folder)
    file = calendar.night().folder / "night.json"
    document = json.loads(file.read_text())
    put(document, path, value)
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"0001/night\.json"):
        calendar.night(0.6)


def test_a_plan_may_search_in_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(
        json.dumps({"reasons": [], "folder": "../precious", "budget": {}, "baseline": {}, "enqueued": []})
    )
    with pytest.raises(InputError, match="no folder of a search"):
        kept_plan(tmp_path / "search.json")


# --- a real vLLM -------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_night(
    vllm_executable: Path,
    timing_model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through the command line, on fresh servers; only the probes are shorter than any preset's."""
    speed = SPEEDS["quick"]
    short = replace(
        speed.finish,
        window_s=2.0,
        min_requests=6,
        warm_up_s=1.0,
        proof_s=1.0,
        max_probes=2,
        max_shifts=2,
        max_ramp_s=1.0,
    )
    monkeypatch.setitem(SPEEDS, "quick", replace(speed, finish=short))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("VLLM_TUNE_LOCKS", str(folder / "locks"))
    (folder / "slo.yaml").write_text("slo: {ttft: {p95: 2000}, tpot: {p95: 500}, success: 0.9}\n")
    (folder / "workloads" / "long.yaml").unlink()
    flags = [
        "--load-format",
        "dummy",
        "--max-model-len",
        "512",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "67108864",
    ]
    path = profile(
        folder,
        model=str(timing_model),
        incumbent=None,
        vllm=str(vllm_executable),
        flags=flags,
        speed="quick",
        rounds=2,
    )
    junit = folder / "junit.xml"
    assert main(["nightly", "--profile", str(path), "--no-search", "--junit", str(junit)]) == 0
    (night,) = History(folder / "history").nights()
    assert night.state is State.QUIET
    assert not night.simulated
    assert len(night.runs) == 2
    assert all(run["short"] > 0.1 for run in night.runs)
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    assert "quiet" in capsys.readouterr().out
    assert (folder / "history" / "history.csv").read_text().count("\n") == 2
