"""A server that is its true capacity plus the noise that the event-driven simulator was found to have; fast, not real.

log(margin + 1) of a probe = slope × (log rate − log capacity − luck of the start) + luck of the requests + luck of this
configuration with these requests + rest. Capacities are `World`'s. Slope and waiting times are measured on `Events` for
each class; the spreads are set so that capacities measured on the table spread over starts, over requests, over pairs
of configuration and requests, and over the rest as they do on `Events`. A second look on a fresh server averages the
luck of starts and the rest, and no other: the requests are the same in every trial of a study.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.search.engine import Engine, Events, Server, Trial, Trials, diagnosed
from benchmarks.sim_truth import FINE, NEAR
from tuner.capacity import SEARCH, point
from tuner.optimizer import Advice
from tuner.records import (
    Bound,
    Capacity,
    ClassMetrics,
    ClientEvidence,
    Config,
    Estimate,
    Failure,
    LimitOutcome,
    Outcome,
    Probe,
    Validity,
    Verdict,
)
from tuner.sim.engine import start_factor
from tuner.sim.memory import starts
from tuner.sim.scenario import SERVER_START_S, Scenario
from tuner.sim.truth import SEEDS, Truth
from tuner.sim.virtual import FAILED_START_S

ROOT = Path(__file__).resolve().parents[2]
STARTS, STREAMS = 3, 6
"""Starts of a configuration, and streams of requests, that the noise is measured on: each start with each stream."""
LUCKS = 400
"""Seeds of starts among which those are chosen whose luck is spread like that of all starts."""
ROUNDS = 4
"""Times that the spreads of the table's probes are scaled until its capacities spread as those on `Events`."""
FLOOR = 0.005
"""No spread is taken to be smaller than this."""
ADVICE_AT = 1.1
"""Rate of the probe that is diagnosed, as a multiple of the capacity."""
MIN_SLOPE = 1.0
TYPICAL = 0.85
"""Share of the best from which on a configuration is one that a search spends its time on."""
CALIBRATION = 5
"""Raised when `calibrate` changes."""
BEND = -0.3
"""Far below the capacity the curve is flatter: half the slope from here on."""


@dataclass(frozen=True, slots=True)
class ClassNoise:
    """One class of one scenario, as `Events` measures it."""

    slope: float
    start_sd: float  # of log capacity, between starts
    request_sd: float  # of one probe's log margin, between requests; the same for every configuration that sees them
    pair_sd: float  # the same, of one configuration with one stream of requests; the same on every start
    rest_sd: float  # of one probe's log margin, whatever start and requests
    wait_s: float  # of a probe, beyond ramp and window


@dataclass(frozen=True, slots=True)
class Noise:
    """One scenario."""

    classes: Mapping[str, ClassNoise]
    together: float  # correlation of the starts' luck between classes


class Table:
    """Servers that draw their measurements; `world` is shared by all searches of a scenario."""

    def __init__(self, scenario: Scenario, world: World, noise: Noise, folder: Path | None = None) -> None:
        """`folder` remembers diagnoses, which are slow; the code of the diagnosis is part of the file's name."""
        self.scenario, self._world, self._noise = scenario, world, noise
        self._file = None if folder is None else folder / f"advice-{scenario.name}-{_diagnosis()}.jsonl"
        self._advice: dict[str, Advice] = {}
        if self._file is not None and self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                stored = json.loads(line)
                self._advice[stored["config"]] = {knob: (word, weight) for knob, word, weight in stored["moves"]}

    def start(self, config: Config, seed: int) -> Server:
        return _Drawn(self.scenario, config, seed, self._world, self._noise)

    def advice(self, config: Config, capacities: Mapping[str, Capacity]) -> Advice:
        """From one probe a class of the event-driven simulator just above the capacity, as a study's capacity search
        has one; the same for every search.
        """
        key = json.dumps(sorted(config.items()))
        if key not in self._advice:
            self._advice[key] = self._diagnosed(config)
            if self._file is not None:
                moves = [(knob, word, weight) for knob, (word, weight) in self._advice[key].items()]
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"config": key, "moves": moves}) + "\n")
        return self._advice[key]

    def _diagnosed(self, config: Config) -> Advice:
        found: dict[str, Capacity] = {}
        for name in self._noise.classes:
            server, rate = Events(self.scenario).start(config, 1), ADVICE_AT * self._world.capacity(config, name)
            if rate > 0 and server.failure is None:
                probe = server.probe(name, rate, 555, "capacity", min(120.0, max(15.0, 50 / rate)))
                found[name] = Capacity(name, rate, 0.0, 1.0, Bound.BRACKETED, (probe,), 0.0, 0.0)
        return diagnosed(self.scenario, config, found)


def _diagnosis() -> str:
    """Of the sources that a diagnosis depends on."""
    found = hashlib.sha256(str(ADVICE_AT).encode())
    for folder in ("tuner/diagnosis", "tuner/sim"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name != "held_out.py":
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


class _Drawn:
    def __init__(self, scenario: Scenario, config: Config, seed: int, world: World, noise: Noise) -> None:
        self._scenario, self._config, self._world, self._noise = scenario, config, world, noise
        self._seed = seed
        self.failure = starts(scenario.profile, config)
        self.start_s = SERVER_START_S if self.failure is None else FAILED_START_S
        share = max(0.0, noise.together)
        self._luck = {
            name: own.start_sd * (math.sqrt(share) * _luck(seed) + math.sqrt(1 - share) * _luck(seed, name))
            for name, own in noise.classes.items()
        }

    def probe(self, workload: str, rate_rps: float, seed: int, purpose: str, window_s: float) -> Probe:
        own, load = self._noise.classes[workload], self._scenario.load(workload)
        capacity = self._world.capacity(self._config, workload)
        if capacity <= 0.0:
            self.failure = Failure(Verdict.RUNTIME, "died", "measure", "died under load", "", "")
        distance = math.log(rate_rps / capacity) - self._luck[workload] if capacity > 0.0 else 3.0
        y = own.slope * distance if distance > BEND else own.slope * (BEND + (distance - BEND) / 2)
        # A longer window than a search's averages over more requests.
        share = math.sqrt(min(1.0, SEARCH.window_for(rate_rps) / window_s))
        y += share * own.request_sd * _luck(workload, seed)
        # Configurations that behave alike carry the same, to the last digit, and share their luck.
        y += share * own.pair_sd * _luck(workload, seed, capacity)
        y += share * own.rest_sd * _luck(workload, seed, capacity, self._seed, rate_rps)
        count = max(1, round(rate_rps * window_s))
        margin = math.expm1(min(3.0, y))
        metrics = _metrics(workload, self._scenario, count, margin, min(rate_rps, max(capacity, 0.0)), window_s)
        return Probe(
            workload=workload,
            rate_rps=rate_rps,
            seed=seed,
            purpose=purpose,
            ramp_s=load.ramp_s,
            window_s=window_s,
            wall_s=load.ramp_s + window_s + own.wait_s,
            started_at=0.0,
            classes={workload: metrics},
            outcome=metrics.outcome,
            margin=margin,
            validity=Validity(True, (), 0.0, rate_rps, rate_rps),
            client=ClientEvidence(1, 0.1, 0.0, 0.0),
            telemetry=None,
            requests_file="",
        )


def _luck(*of: object) -> float:
    """A standard normal number that depends on nothing else."""
    digest = hashlib.blake2b(repr(of).encode(), digest_size=8).digest()
    return NormalDist().inv_cdf((int.from_bytes(digest, "big") + 0.5) / 2**64)


def _metrics(
    name: str, scenario: Scenario, count: int, margin: float, served_rps: float, window_s: float
) -> ClassMetrics:
    limit = scenario.slo.classes[name].limits[0]
    whole = Estimate(1.0, 1.0, 1.0, count)
    outcome = Outcome.MET if margin <= 0 else Outcome.MISSED
    return ClassMetrics(
        class_name=name,
        requests=count,
        failed=0,
        success=whole,
        attainment=whole,
        limits=(LimitOutcome(limit, limit.limit_s * (1 + margin), whole),),
        margin=margin,
        latency={},
        goodput_rps=served_rps,
        throughput_rps=served_rps,
        output_tps=0.0,
        input_tps=0.0,
        statuses={},
        outcome=outcome,
    )


class World:
    """The true capacities of the table: every configuration of a scenario's grid.

    Coarse (one window, to 2 %) for all; exact (`Truth`'s four pooled windows, half a percent) for the defaults and for
    whatever comes within 5 % of the best by the coarse look, so that the optimum and what is near it are exact. Coarse
    capacities are scaled by what they were found to be off among those.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        """What is missing in `folder` is computed: minutes for a scenario that is new."""
        coarse, fine = Truth(scenario, folder, seeds=SEEDS[:1], resolution=0.02), Truth(scenario, folder / FINE)
        rough = [(coarse.objective(config), config) for config in scenario.feasible()]
        coarse.save()
        best = max(value for value, _ in rough)
        near = [{}, *(config for value, config in rough if value >= NEAR * best)]
        names = list(scenario.slo.classes)
        exact = {(_key(config), name): fine.capacity(config, name) for config in near for name in names}
        fine.save()
        off = {
            name: statistics.median(
                math.log(exact[_key(c), name] / coarse.capacity(c, name)) for c in near if exact[_key(c), name] > 0
            )
            for name in names
        }
        self.scenario = scenario
        self._capacities = exact | {
            (_key(config), name): coarse.capacity(config, name) * math.exp(off[name])
            for _, config in rough
            for name in names
            if (_key(config), name) not in exact
        }
        self.optimum = max(self.objective(config) for _, config in rough)
        self._good = [config for value, config in rough if value >= TYPICAL * best]

    def capacity(self, config: Config, workload: str) -> float:
        """Requests/s; 0 where it does not start or dies under load."""
        return self._capacities.get((_key(config), workload), 0.0)

    def objective(self, config: Config) -> float:
        """Weighted geometric mean over classes of capacity ÷ capacity of the defaults; 0 where one class has none."""
        total = 0.0
        for name, promise in self.scenario.slo.classes.items():
            mine = self.capacity(config, name)
            if mine <= 0.0:
                return 0.0
            total += promise.weight * math.log(mine / self.capacity({}, name))
        return math.exp(total)

    def typical(self) -> list[Config]:
        """The defaults, the best, and one of those that are not much worse."""
        best = max(self._good, key=self.objective)
        return [{}, best, random.Random(self.scenario.name).choice(self._good)]


def _key(config: Config) -> str:
    return json.dumps(sorted(config.items()))


@dataclass(frozen=True, slots=True)
class Spread:
    """Components of the standard deviation of one measured log capacity, and the runs that they come from."""

    start: float
    requests: float  # common to all configurations
    pair: float  # of one configuration with one stream of requests, on every start
    rest: float
    runs: tuple[tuple[Trial, ...], ...]  # (configuration, start) × streams of requests


def spreads(engine: Engine, configs: Sequence[Config], starts: Sequence[int], streams: int) -> dict[str, Spread]:
    """Each of `configs` on each of `starts`, each with the same streams of requests; by class.

    Random effects by the analysis of variance (Searle, Casella and McCulloch, Variance Components, chapter 4), the
    configurations' own means taken out.
    """
    start = {load.name: load.start_rps for load in engine.scenario.loads}
    rows = [(config, seed) for config in configs for seed in starts]
    runs = tuple(
        tuple(Trials(engine, 1000 + j).measure(config, seed, start) for j in range(streams)) for config, seed in rows
    )
    c, s, r = len(configs), len(starts), streams
    found = {}
    for name in start:
        logs = np.array([[math.log(trial.rates[name]) for trial in row] for row in runs]).reshape(c, s, r)
        logs -= logs.mean(axis=(1, 2), keepdims=True)
        by_start, cells = logs.mean(axis=2), logs.mean(axis=1)
        by_stream = cells.mean(axis=0)
        rest = float(((logs - by_start[:, :, None] - cells[:, None]) ** 2).sum()) / (c * (s - 1) * (r - 1))
        of_pair = float(((cells - by_stream) ** 2).sum()) / ((c - 1) * (r - 1)) - rest / s
        of_stream = float((by_stream**2).sum()) / (r - 1) - max(0.0, of_pair) / c - rest / (s * c)
        of_start = float((by_start**2).sum()) / (c * (s - 1)) - rest / r
        variances = (of_start, of_stream, of_pair, rest)
        found[name] = Spread(*(math.sqrt(max(FLOOR**2, variance)) for variance in variances), runs)
    return found


def calibrate(world: World) -> Noise:
    """Measure three configurations on `Events`, then set the spreads of the table's probes so that it agrees."""
    events, configs, seeds = Events(world.scenario), world.typical(), typical_starts(world.scenario)
    wanted = spreads(events, configs, seeds, STREAMS)
    classes: dict[str, ClassNoise] = {}
    for name, spread in wanted.items():
        mine = [trial for row in spread.runs[:STARTS] for trial in row]
        rate = math.exp(statistics.fmean(math.log(trial.rates[name]) for trial in mine))
        slope, probe_sd = _curve(events, name, rate, seeds)
        own = math.sqrt(max(0.03**2, probe_sd**2 - (slope * spread.start) ** 2))
        whole = math.hypot(spread.requests, spread.pair, spread.rest)
        probes = [p for row in spread.runs for trial in row for p in trial.capacities[name].probes]
        wait_s = statistics.fmean(p.wall_s - p.ramp_s - p.window_s for p in probes)
        shares = (own * part / whole for part in (spread.requests, spread.pair, spread.rest))
        classes[name] = ClassNoise(slope, spread.start, *shares, wait_s)
    together = _together(wanted)
    for _ in range(ROUNDS):
        table = Table(world.scenario, world, Noise(classes, together))
        got = spreads(table, configs, range(4 * STARTS), 4 * STREAMS)
        for name, noise in classes.items():
            want, have = wanted[name], got[name]
            classes[name] = replace(
                noise,
                request_sd=noise.request_sd * want.requests / have.requests,
                pair_sd=noise.pair_sd * want.pair / have.pair,
                rest_sd=noise.rest_sd * want.rest / have.rest,
            )
    return Noise(classes, together)


def typical_starts(scenario: Scenario) -> list[int]:
    """Seeds of `STARTS` starts whose luck has the mean and the spread of all starts: a few at random would not."""
    lucks = {seed: math.log(start_factor(scenario.profile, seed)) for seed in range(1, LUCKS)}
    wanted = np.array([NormalDist().inv_cdf((i + 0.5) / STARTS) for i in range(STARTS)])
    wanted *= scenario.profile.start_noise / wanted.std(ddof=1)
    return [min(lucks, key=lambda seed: (abs(lucks[seed] - goal), seed)) for goal in wanted.tolist()]


def _curve(events: Events, workload: str, rate_rps: float, seeds: Sequence[int]) -> tuple[float, float]:
    """Rise of log(margin + 1) over 30 % of rate around the capacity, and its spread there, over starts and requests."""
    window_s = min(120.0, max(15.0, 50 / rate_rps))
    levels = []
    for factor in (1 / 1.15, 1.0, 1.15):
        probes = [
            events.start({}, seeds[i % STARTS]).probe(workload, rate_rps * factor, 5000 + i, "calibrate", window_s)
            for i in range(2 * STREAMS)
        ]
        levels.append([found.y for probe in probes if (found := point(probe)) is not None])
    rise = statistics.fmean(levels[2]) - statistics.fmean(levels[0])
    return max(MIN_SLOPE, rise / (2 * math.log(1.15))), statistics.stdev(levels[1])


def _together(found: Mapping[str, Spread]) -> float:
    """Correlation between classes of the luck of a start."""
    if len(found) < 2:
        return 0.0
    means = []
    for name, spread in found.items():
        logs = np.array([[math.log(trial.rates[name]) for trial in row] for row in spread.runs]).mean(axis=1)
        grouped = logs.reshape(-1, STARTS)
        means.append((grouped - grouped.mean(axis=1, keepdims=True)).ravel())
    return max(0.0, float(np.corrcoef(means[0], means[1])[0, 1]))


def stored_noise(world: World, folder: Path) -> Noise:
    """`calibrate`, remembered in a file for as long as the scenario stays the same."""
    file = folder / f"noise-{world.scenario.name}.json"
    of = f"{CALIBRATION}/{world.scenario.identity}"
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.get("of") == of:
            return Noise({name: ClassNoise(**own) for name, own in stored["classes"].items()}, stored["together"])
    noise = calibrate(world)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"of": of, **asdict(noise)}, indent=1), encoding="utf-8")
    return noise
