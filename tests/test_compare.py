"""Comparisons over servers that are a formula: what each word means, what is run, kept and concluded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.comparing import FormulaPlace, Truth, flags, install
from tests.edited import put
from tests.simulated_study import shared_study
from tuner.cli import main
from tuner.comparison import (
    Asked,
    Comparison,
    Standing,
    compare,
    contrast,
    prepare,
    read_comparison,
    read_configuration,
)
from tuner.errors import EnvironmentFault, ExitCode, InputError, Interrupted
from tuner.finish import Measured
from tuner.records import Bound, Config, TrialRecord, TrialState
from tuner.serve_args import to_vllm_yaml
from tuner.store import ResultsFolder
from tuner.study import Silent, StopSignals

WEIGHTS = {"short": 0.5, "long": 0.5}
WORKLOAD = "input_tokens: 32\noutput_tokens: 8\n"
SLO = "slo: {ttft: {p95: 500}}\n"


# --- the verdict -------------------------------------------------------------------------------------------------


def runs(number: int, values: list[float], **changes: object) -> list[Measured]:
    made = [
        Measured(number, turn, dict.fromkeys(WEIGHTS, v), dict.fromkeys(WEIGHTS, -0.1)) for turn, v in enumerate(values)
    ]
    return [replace(run, **changes) for run in made]  # type: ignore[arg-type]


def test_what_both_sides_share_in_a_round_is_no_noise() -> None:
    days = [1.0, 1.5, 0.7, 1.2]
    judged = contrast(runs(0, days) + runs(1, [1.1 * day for day in days]), 1, 0, WEIGHTS)
    assert judged.overall.standing is Standing.BETTER
    assert judged.overall.ratio is not None
    assert judged.overall.ratio.value == pytest.approx(1.1)
    assert judged.overall.ratio.low == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("ours", "standing"),
    [
        ([1.12, 1.10, 1.13, 1.11], Standing.BETTER),
        ([0.88, 0.90, 0.87, 0.89], Standing.WORSE),
        ([1.01, 0.99, 1.00, 1.005], Standing.SAME),
        ([1.02, 1.021, 1.019, 1.02], Standing.SAME),  # shown, but not worth a change
        ([1.20, 0.90, 1.10, 0.95], Standing.UNRESOLVED),
    ],
)
def test_the_four_verdicts(ours: list[float], standing: Standing) -> None:
    judged = contrast(runs(0, [1.0] * 4) + runs(1, ours), 1, 0, WEIGHTS)
    assert judged.overall.standing is standing
    assert {c.standing for c in judged.classes.values()} == {standing}


def test_a_side_that_once_failed_loses_to_one_that_never_did() -> None:
    good, bad = runs(0, [1.0, 1.0]), runs(1, [2.0, 2.0])
    bad[1] = replace(bad[1], ran=False, values={}, excess={})
    assert contrast(good + bad, 1, 0, WEIGHTS).overall.standing is Standing.WORSE
    judged = contrast(good + bad, 0, 1, WEIGHTS)
    assert judged.overall.standing is Standing.BETTER
    assert "did not run in 1 of 2 rounds" in judged.overall.reason
    neither = contrast([replace(run, ran=False) for run in good] + bad, 1, 0, WEIGHTS)
    assert neither.overall.standing is Standing.UNRESOLVED


def test_a_capacity_known_from_below_only_claims_one_direction() -> None:
    above = frozenset({"short"})
    better = contrast(runs(0, [1.0] * 3) + runs(1, [2.0, 2.1, 1.9], at_least=above), 1, 0, WEIGHTS)
    assert better.overall.standing is Standing.BETTER
    assert "at least" in better.overall.reason
    unknown = contrast(runs(0, [2.0, 2.1, 1.9], at_least=above) + runs(1, [2.2, 2.4, 2.3]), 1, 0, WEIGHTS)
    assert unknown.overall.standing is Standing.UNRESOLVED


def test_false_claims_are_as_rare_as_the_interval_says() -> None:
    import random

    draw, claims = random.Random(7), 0
    for _ in range(1000):
        ours, other = ([math.exp(draw.gauss(0, 0.03)) for _ in range(4)] for _ in range(2))
        judged = contrast(runs(0, other) + runs(1, ours), 1, 0, WEIGHTS)
        claims += judged.overall.standing in (Standing.BETTER, Standing.WORSE)
    assert claims <= 65  # 5 % of 1,000 and three standard errors


# --- what a word means -------------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "slo.yaml").write_text(SLO)
    folder = tmp_path / "workloads"
    folder.mkdir()
    (folder / "short.yaml").write_text(WORKLOAD)
    model = tmp_path / "model"
    model.mkdir()
    config = {
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
    (model / "config.json").write_text(json.dumps(config))
    return {"slo": tmp_path / "slo.yaml", "workloads": folder, "model": model, "root": tmp_path}


def asked(inputs: dict[str, Path], *words: str, **changes: object) -> Asked:
    made = Asked(
        words=words,
        vllms=("vllm",),
        model=str(inputs["model"]),
        slo=inputs["slo"],
        workloads=inputs["workloads"],
        rounds=3,
        name="test",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def written(inputs: dict[str, Path], name: str, config: Config) -> str:
    path = inputs["root"] / name
    path.write_text(to_vllm_yaml(str(inputs["model"]), config, flags(), {}))
    return str(path)


CONFIG: Config = {
    "max-num-seqs": 64,
    "enable-prefix-caching": False,
    "gpu-memory-utilization": 0.9,
    "compilation-config": '{"mode": 3}',
}


def test_a_written_configuration_is_read_back_as_it_was(inputs: dict[str, Path]) -> None:
    model, config = read_configuration(Path(written(inputs, "best.yaml", CONFIG)), flags())
    assert model == str(inputs["model"])
    assert config == CONFIG


def test_a_file_against_the_defaults(inputs: dict[str, Path]) -> None:
    best = written(inputs, "best.yaml", {"max-num-seqs": 64})
    definition, traffic, _ = prepare(asked(inputs, "defaults", best, given=("--max-model-len", "256")), [install()])
    assert [side.config for side in definition.sides] == [{}, {"max-num-seqs": 64}]
    assert definition.fixed == {"max-model-len": 256}
    assert definition.workloads == ("short",)
    assert set(traffic.slo.classes) == {"short"}


def test_a_study_brings_its_slo_flags_and_baseline(tmp_path: Path) -> None:
    folder = str(shared_study())
    inputs = {"slo": tmp_path, "workloads": tmp_path, "model": tmp_path}
    bare = asked(inputs, "baseline", folder, model=None, slo=None, workloads=None)
    definition, _, _ = prepare(bare, [install()])
    baseline, best = definition.sides
    assert baseline.config == {"max-num-seqs": 16}
    assert best.config == {"max-num-seqs": 256, "max-num-batched-tokens": 2048}
    assert definition.fixed == {"max-model-len": 16384}
    assert definition.model == "meta/llama-8b"
    defaults = prepare(replace(bare, words=("defaults", folder)), [install()])[0]
    assert defaults.sides[0].config == {}
    assert defaults.fixed == {"max-model-len": 16384}


def test_two_executables_serve_one_configuration(inputs: dict[str, Path]) -> None:
    best = written(inputs, "best.yaml", {"max-num-seqs": 64})
    definition, _, _ = prepare(asked(inputs, best, vllms=("a", "b")), [install("0.32.0"), install("0.33.0")])
    assert [side.vllm_version for side in definition.sides] == ["0.32.0", "0.33.0"]
    assert definition.sides[0].config == definition.sides[1].config
    assert [side.source for side in definition.sides] == ["vLLM 0.32.0", "vLLM 0.33.0"]


def test_the_same_on_both_sides_is_said(inputs: dict[str, Path]) -> None:
    _, _, notes = prepare(asked(inputs, "defaults", "defaults"), [install()])
    assert notes == ("both sides are the same: what is found shows the noise",)


@pytest.mark.parametrize(
    ("words", "changes", "field", "says"),
    [
        (("defaults",), {}, "configurations", "two sides"),
        ((), {}, "configurations", "two sides"),
        (("nowhere", "defaults"), {}, "configuration", "neither a file"),
        (("baseline", "defaults"), {}, "configuration", "tells of none"),
        (("defaults", "defaults"), {"slo": None}, "--slo", "is missing"),
        (("defaults", "defaults"), {"model": None}, "--model", "told by none"),
        (("defaults", "defaults"), {"model": "./nowhere"}, "--model", "neither a folder"),
        (("defaults", "defaults"), {"given": ("--max-nun-seqs", "4")}, "--max-nun-seqs", "no such flag"),
        (("defaults", "defaults"), {"given": ("--max-model-len", "16")}, "input_tokens.max", "exceeds"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    inputs: dict[str, Path], words: tuple[str, ...], changes: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(InputError) as error:
        prepare(asked(inputs, *words, **changes), [install()])
    assert field in str(error.value)
    assert says in str(error.value)


def test_a_flag_that_contradicts_a_file_is_refused(inputs: dict[str, Path]) -> None:
    best = written(inputs, "best.yaml", {"max-num-seqs": 64})
    with pytest.raises(InputError, match="is 64 in one of the configurations"):
        prepare(asked(inputs, best, "defaults", given=("--max-num-seqs", "8")), [install()])


# --- running -----------------------------------------------------------------------------------------------------


def seqs(version: str, config: Config) -> dict[str, float] | None:
    return {"short": 12.0 if config.get("max-num-seqs") == 64 else 10.0}


class Bench:
    def __init__(self, inputs: dict[str, Path], truth: Truth = seqs) -> None:
        best = written(inputs, "best.yaml", {"max-num-seqs": 64})
        self.definition, self.traffic, _ = prepare(asked(inputs, "defaults", best), [install()])
        self.folder, self.truth = ResultsFolder(inputs["root"] / "compare"), truth
        self.signals = StopSignals()

    def run(self, **events: object) -> tuple[Comparison, FormulaPlace]:
        place = FormulaPlace(self.truth, **events)  # type: ignore[arg-type]
        return self.on(place), place

    def on(self, place: FormulaPlace) -> Comparison:
        installs = {install().path: install()}
        return compare(self.definition, self.traffic, installs, self.folder, place, self.signals, Silent(), pause_s=0.0)


def test_rounds_are_interleaved_with_requests_of_their_own(inputs: dict[str, Path]) -> None:
    comparison, place = Bench(inputs).run()
    assert [request.proposal.number for request in place.calls] == [0, 1, 1, 0, 1, 0]
    for turn in range(3):
        assert len({request.seed for request in place.calls if request.round == turn}) == 1
    assert len({request.seed for request in place.calls}) == 3
    assert comparison.result is not None
    judged = comparison.result.against_first[1]
    assert judged.overall.standing is Standing.BETTER
    assert comparison.result.rates[1]["short"].value == pytest.approx(12.0, rel=0.05)
    assert read_comparison(ResultsFolder(inputs["root"] / "compare")) == comparison


class Killed(Exception):
    """Stands for kill -9."""


def kill(record: TrialRecord) -> TrialRecord:
    raise Killed


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_a_kill_loses_nothing_that_was_finished(inputs: dict[str, Path], at: int) -> None:
    bench = Bench(inputs)
    with pytest.raises(Killed):
        bench.run(events={at: kill})
    assert len(bench.folder.trials()) == at - 1
    comparison, place = bench.run()
    assert len(place.calls) == 6 - (at - 1)
    assert comparison.result is not None
    assert comparison.result.against_first[1].overall.standing is Standing.BETTER
    again, place = bench.run()
    assert place.calls == []
    assert again == comparison


def test_a_stop_is_obeyed_and_gone_on_from(inputs: dict[str, Path]) -> None:
    bench = Bench(inputs)

    def stop(record: TrialRecord) -> TrialRecord:
        bench.signals.stop.set()
        return replace(record, state=TrialState.INTERRUPTED, capacities={})

    with pytest.raises(Interrupted):
        bench.run(events={3: stop})
    bench.signals.stop.clear()
    assert bench.run()[0].result is not None


def test_another_vllm_cannot_go_on_with_a_comparison(inputs: dict[str, Path]) -> None:
    bench = Bench(inputs)
    with pytest.raises(Killed):
        bench.run(events={3: kill})
    place = FormulaPlace(seqs)
    moved: Callable[..., object] = lambda vllm, gpus: replace(  # noqa: E731
        FormulaPlace.facts(place, vllm, gpus), digest="another kind"
    )
    place.facts = moved  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentFault, match="Start a new one"):
        bench.on(place)


def test_a_side_that_does_not_start_is_worse_and_no_fault(inputs: dict[str, Path]) -> None:
    comparison, _ = Bench(inputs, lambda version, config: None if config.get("max-num-seqs") else {"short": 1.0}).run()
    assert comparison.result is not None
    judged = comparison.result.against_first[1].overall
    assert judged.standing is Standing.WORSE
    assert judged.ratio is None
    assert comparison.result.failures == ("", "did not run in 3 of 3 rounds")


def test_an_open_end_is_marked(inputs: dict[str, Path]) -> None:
    def above(record: TrialRecord) -> TrialRecord:
        return replace(record, capacities={n: replace(c, bound=Bound.ABOVE) for n, c in record.capacities.items()})

    comparison, _ = Bench(inputs).run(events=dict.fromkeys(range(1, 7), above))
    assert comparison.result is not None
    assert comparison.result.against_first[1].overall.standing is Standing.UNRESOLVED
    assert all(side["short"].at_least for side in comparison.result.rates)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("definition", "speed"), "x"),
        (("definition", "workloads"), []),
        (("definition", "workloads"), ["no-such"]),
        (("definition", "sides"), []),
        (("environments",), []),
        (("result", "against_first"), {}),
        (("result", "values"), [[{"short": math.nan}], [{"short": 1.0}]]),
    ],
)
def test_an_edited_comparison_is_one_clear_error(inputs: dict[str, Path], path: tuple[str, ...], value: object) -> None:
    bench = Bench(inputs)
    bench.run()
    file = bench.folder.root / "comparison.json"
    document = json.loads(file.read_text())
    put(document, path, value)
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"comparison\.json"):
        read_comparison(bench.folder)


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("compare", "configurations = None: need two sides"),
        ("compare defaults", "need two sides"),
        ("compare a b c", "are more than two"),
        ("compare a b --vllm x --vllm y --vllm z", "is given more than twice"),
        ("compare a b --margin 100", "--margin = '100': must be less than 100 %"),
        ("compare a b --rounds 1", "--rounds"),
        ("compare a b --slo nowhere", "--slo = 'nowhere': is no file"),
        ("compare --resume nowhere", "holds no comparison.json"),
        ("compare a --resume nowhere", "keeps its sides and flags"),
        ("compare --resume nowhere --rounds 4", "is kept by the comparison"),
        ("verify nowhere.yaml", "is no file"),
        ("nightly --profile nowhere.yaml", "is no file"),
    ],
)
def test_wrong_words_end_with_2_before_anything_starts(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == ExitCode.INPUT
    assert says in capsys.readouterr().err
