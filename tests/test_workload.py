"""Workloads: what is read, drawn, planned and sent."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.documents import Node, parse_yaml
from tuner.errors import InputError
from tuner.records import PlannedRequest
from tuner.workload import (
    PROBE_TEXT,
    Plan,
    Sampling,
    Vocabulary,
    Workload,
    class_names,
    constant,
    load_workloads,
    longest,
    ordinary_vocabulary,
    plan,
    request_body,
    settle_mix,
    vocabulary_from_tokens,
)
from tuner.workload.lengths import parse_lengths
from tuner.workload.model import Arrivals, parse_workload

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = Vocabulary(1000, frozenset({0, 1, 2, 999}))
FOUR = ["long_in_long_out", "long_in_short_out", "short_in_long_out", "short_in_short_out"]


def workload(text: str, name: str = "test") -> Workload:
    return parse_workload(parse_yaml(text, f"{name}.yaml"), name, Path())


def planned(load: Workload, rate: float = 10.0, duration: float = 20.0, seed: int = 1, **options: object) -> Plan:
    return plan(load, rate_rps=rate, duration_s=duration, seed=seed, vocabulary=VOCABULARY, **options)  # type: ignore[arg-type]


SIMPLE = workload("input_tokens: {distribution: uniform, min: 20, max: 60}\noutput_tokens: 8")


# --- lengths -----------------------------------------------------------------------------------------------------


def draws(document: object, count: int = 4000) -> list[int]:
    lengths = parse_lengths(Node(document, "test"))
    random = Random(5)
    return [lengths.draw(random) for _ in range(count)]


def test_lognormal_has_the_median_and_percentile_asked_for() -> None:
    values = sorted(draws({"distribution": "lognormal", "median": 256, "p95": 512, "max": 1024}))
    assert statistics.median(values) == pytest.approx(256, rel=0.03)
    assert values[int(0.95 * len(values))] == pytest.approx(512, rel=0.06)
    assert values[0] >= 1
    assert values[-1] <= 1024


def test_the_other_distributions_do_what_they_say() -> None:
    assert set(draws(7)) == {7}
    assert set(draws({"distribution": "constant", "value": 7})) == {7}
    assert set(draws({"distribution": "uniform", "min": 3, "max": 5})) == {3, 4, 5}
    normal = draws({"distribution": "normal", "mean": 100, "sd": 10, "min": 80, "max": 120})
    assert statistics.fmean(normal) == pytest.approx(100, abs=1)
    assert min(normal) >= 80
    assert max(normal) <= 120
    assert set(draws({"distribution": "normal", "mean": 100, "sd": 0})) == {100}
    chosen = draws({"distribution": "empirical", "values": [5, 9, 11], "weights": [1, 3, 0]})
    assert set(chosen) == {5, 9}
    assert chosen.count(9) / len(chosen) == pytest.approx(0.75, abs=0.03)


def test_bounds_follow_from_the_distribution() -> None:
    load = workload(
        "input_tokens: {distribution: lognormal, median: 100, p95: 200, max: 300}\n"
        "output_tokens: {distribution: empirical, values: [5, 900], weights: [1, 0]}\nshared_prefix_tokens: 50"
    )
    assert longest([load, SIMPLE]) == (350, 8)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["workloads", "workloads/small"])
def test_shipped_workloads_are_the_four_classes_and_their_mix(folder: str) -> None:
    found = load_workloads(ROOT / folder)
    assert list(found) == [*FOUR, "mixed"]
    assert list(class_names(found.values())) == FOUR
    assert len({load.digest for load in found.values()}) == 5
    assert all(load.sampling.ignore_eos and load.sampling.temperature == 0 for load in found.values())


def test_shipped_lengths_have_the_medians_that_the_classes_are_known_by() -> None:
    found = load_workloads(ROOT / "workloads")
    expected = {
        "short_in_short_out": (256, 64),
        "short_in_long_out": (256, 768),
        "long_in_short_out": (4096, 64),
        "long_in_long_out": (4096, 512),
    }
    for name, (inputs, outputs) in expected.items():
        requests = planned(found[name], rate=20, duration=20).requests
        assert statistics.median(request.input_tokens for request in requests) == pytest.approx(inputs, rel=0.15)
        assert statistics.median(request.output_tokens for request in requests) == pytest.approx(outputs, rel=0.15)


def test_a_mix_file_brings_its_classes_along() -> None:
    assert list(load_workloads(ROOT / "workloads" / "mixed.yaml")) == [*FOUR, "mixed"]
    assert list(load_workloads(ROOT / "workloads" / "short_in_short_out.yaml")) == ["short_in_short_out"]


def test_digests_follow_everything_that_changes_the_load() -> None:
    base = "input_tokens: 8\noutput_tokens: 8\n"
    texts = [
        base,
        base + "seed: 2",
        base + "shared_prefix_tokens: 4",
        base + "api: chat",
        base + "sampling: {temperature: 1}",
        base + "arrivals: {process: constant}",
        "input_tokens: 9\noutput_tokens: 8",
    ]
    assert len({workload(text).digest for text in texts}) == len(texts)
    assert workload(base).digest == workload("output_tokens: 8\ninput_tokens: 8\nseed: 1\ndescription: x").digest


# --- plan --------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_plan() -> None:
    assert planned(SIMPLE) == planned(SIMPLE)


@given(
    seed=st.integers(0, 2**40),
    slow=st.floats(0.5, 20),
    stretch=st.floats(1.0, 8.0),
    process=st.sampled_from(["poisson", "gamma", "constant"]),
)
@settings(max_examples=40, deadline=None)
def test_another_rate_gives_the_same_requests_on_a_stretched_clock(
    seed: int, slow: float, stretch: float, process: str
) -> None:
    load = workload(
        f"input_tokens: {{distribution: uniform, min: 1, max: 40}}\noutput_tokens: 3\narrivals: {{process: {process}}}"
    )
    one = planned(load, rate=slow, duration=5, seed=seed, min_requests=3).requests
    two = planned(load, rate=slow * stretch, duration=5, seed=seed, min_requests=3).requests
    assert len(two) >= len(one) >= 3
    for left, right in zip(one, two, strict=False):
        assert (left.prompt, left.output_tokens, left.index) == (right.prompt, right.output_tokens, right.index)
        assert left.scheduled_s is not None
        assert right.scheduled_s is not None
        assert left.scheduled_s == pytest.approx(right.scheduled_s * stretch)
    assert all(request.scheduled_s < 5 for request in two[3:] if request.scheduled_s is not None)


@given(
    lengths=st.integers(1, 200),
    prefix=st.integers(0, 40),
    size=st.integers(64, 5000),
    excluded=st.frozensets(st.integers(0, 5000), max_size=50),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_prompts_have_the_exact_length_and_ordinary_tokens_only(
    lengths: int, prefix: int, size: int, excluded: frozenset[int], seed: int
) -> None:
    vocabulary = Vocabulary(size + 50, excluded)
    load = Workload("x", constant(lengths), constant(2), shared_prefix_tokens=prefix)
    requests = plan(load, rate_rps=5, duration_s=2, seed=seed, vocabulary=vocabulary, min_requests=4).requests
    for request in requests:
        assert len(request.prompt) == request.input_tokens == lengths + prefix
        assert all(isinstance(t, int) and 0 <= t < vocabulary.size and t not in excluded for t in request.prompt)
        assert request.prompt[:prefix] == requests[0].prompt[:prefix]
        assert request.shared_prefix_tokens == prefix


@pytest.mark.parametrize("size", [64, 300, 50_000, 200_000])
def test_no_two_prompts_share_a_first_block_unless_they_should(size: int) -> None:
    """Over seeds, classes and requests: 16 tokens is vLLM's smallest default block, and a hit needs all of it."""
    blocks: set[tuple[int, ...]] = set()
    count = 0
    for name in ("a", "b"):
        load = Workload(name, constant(16), constant(1))
        for seed in (*range(20), 2**62):
            requests = plan(load, rate_rps=10, duration_s=5, seed=seed, vocabulary=Vocabulary(size)).requests
            blocks |= {tuple(request.prompt) for request in requests}  # type: ignore[arg-type]
            count += len(requests)
    assert len(blocks) == count


def test_the_seed_of_a_class_gives_it_other_requests() -> None:
    text = "input_tokens: {distribution: uniform, min: 20, max: 60}\noutput_tokens: 8\nseed: 2"
    assert planned(workload(text)).requests[0] != planned(SIMPLE).requests[0]


def test_a_shared_prefix_belongs_to_its_seed() -> None:
    load = Workload("x", constant(4), constant(1), shared_prefix_tokens=32)
    one, two = (planned(load, seed=seed).requests[0].prompt[:16] for seed in (1, 2))
    assert one != two


def test_requests_beyond_the_model_length_are_refused_and_reported_and_the_rate_is_kept() -> None:
    load = workload("input_tokens: {distribution: uniform, min: 1, max: 100}\noutput_tokens: 10")
    free, cut = planned(load, duration=100), planned(load, duration=100, max_model_len=60)
    assert len(cut.requests) == len(free.requests)
    assert [request.scheduled_s for request in cut.requests] == [request.scheduled_s for request in free.requests]
    assert all(request.input_tokens + request.output_tokens <= 60 for request in cut.requests)
    assert len(cut.rejected) == pytest.approx(len(cut.requests), rel=0.15)
    assert all("exceed the model length of 60" in reason for reason in cut.rejected)
    assert [request.index for request in cut.requests] == list(range(len(cut.requests)))


def test_a_class_that_never_fits_is_an_input_error() -> None:
    with pytest.raises(InputError, match="do not fit a model length of 16"):
        planned(SIMPLE, max_model_len=16)


def test_at_least_the_requests_asked_for_even_beyond_the_duration() -> None:
    result = planned(SIMPLE, rate=1.0, duration=2.0, min_requests=50)
    assert len(result.requests) == 50
    assert result.requests[-1].scheduled_s == pytest.approx(50, rel=0.5)


def test_a_closed_loop_has_no_times() -> None:
    closed = workload("input_tokens: 5\noutput_tokens: 5\narrivals: {process: closed, concurrency: 4}")
    result = planned(closed, rate=0.0, duration=0.0, min_requests=9)
    assert (len(result.requests), result.concurrency) == (9, 4)
    assert {request.scheduled_s for request in result.requests} == {None}
    proof = planned(SIMPLE, rate=2.0, duration=10.0, concurrency=3)
    assert (len(proof.requests), proof.concurrency) == (20, 3)
    assert proof.requests[0].prompt == planned(SIMPLE).requests[0].prompt


def test_gamma_arrivals_are_as_bursty_as_asked() -> None:
    bursty = workload("input_tokens: 5\noutput_tokens: 5\narrivals: {process: gamma, burstiness: 0.25}")
    times = [request.scheduled_s or 0.0 for request in planned(bursty, rate=50, duration=60).requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(2.0, rel=0.15)


def test_a_mix_follows_its_proportions_and_each_request_stays_in_its_class() -> None:
    found = settle_mix(load_workloads(ROOT / "workloads"), dict.fromkeys(FOUR[:3], 1.0) | {FOUR[3]: 3.0})
    assert found["mixed"].mix == pytest.approx({**dict.fromkeys(FOUR[:3], 1 / 6), FOUR[3]: 0.5})
    result = planned(found["mixed"], rate=50, duration=40, members=found)
    counts = {name: sum(request.class_name == name for request in result.requests) for name in FOUR}
    assert counts[FOUR[3]] / len(result.requests) == pytest.approx(0.5, abs=0.05)
    for request in result.requests:
        inputs, outputs = found[request.class_name].input_tokens, found[request.class_name].output_tokens
        assert inputs is not None
        assert outputs is not None
        assert inputs.minimum <= request.input_tokens <= inputs.maximum
        assert outputs.minimum <= request.output_tokens <= outputs.maximum
    alone = {request.prompt for request in planned(found[FOUR[3]], rate=50, duration=40).requests}
    assert not alone & {request.prompt for request in result.requests}, "a mix has prompts of its own"


def test_plans_that_make_no_sense_are_programming_errors() -> None:
    for rate, duration in [(-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, -1.0), (0.0, 1.0)]:
        with pytest.raises(ValueError, match=r"rate|duration"):
            planned(SIMPLE, rate=rate, duration=duration)
    with pytest.raises(ValueError, match="needs the classes"):
        planned(Workload("m", None, None, mix={"a": 1.0}))


# --- bodies ------------------------------------------------------------------------------------------------------

REQUEST = PlannedRequest(0, "x", 0.0, (5, 6, 7), 3, 12)


def test_a_completions_body_fixes_the_output_length_twice() -> None:
    body = json.loads(request_body(REQUEST, model="m", sampling=Sampling(), api="completions"))
    assert body == {
        "model": "m",
        "prompt": [5, 6, 7],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "max_tokens": 12,
        "min_tokens": 12,
        "ignore_eos": True,
    }


def test_a_chat_body_has_text_and_the_new_name_of_the_limit() -> None:
    request = PlannedRequest(0, "x", 0.0, "hello", 0, 12)
    sampling = Sampling(temperature=0.7, ignore_eos=False, top_p=0.9, top_k=5, seed=3)
    body = json.loads(request_body(request, model="m", sampling=sampling, api="chat"))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 12
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"]) == (0.7, 0.9, 5, 3)
    assert not {"min_tokens", "ignore_eos", "max_tokens", "prompt"} & set(body)
    with pytest.raises(ValueError, match="needs text"):
        request_body(REQUEST, model="m", sampling=Sampling(), api="chat")


# --- vocabulary --------------------------------------------------------------------------------------------------


def write(folder: Path, **files: object) -> Path:
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def test_special_multimodal_and_missing_ids_are_no_ordinary_tokens(tmp_path: Path) -> None:
    vocab = {f"w{i}": i for i in range(200) if i != 50}
    folder = write(
        tmp_path,
        config={
            "text_config": {"vocab_size": 256, "eos_token_id": [3, 4]},
            "image_token_id": 100,
            "audio_token_index": 101,
            "vision_config": {"pad_token_id": 102},
            "num_tokens": 7,
        },
        tokenizer={"model": {"vocab": vocab}, "added_tokens": [{"id": 200, "content": "<x>", "special": True}]},
        tokenizer_config={"added_tokens_decoder": {"5": {"content": "<y>"}}},
    )
    vocabulary = ordinary_vocabulary(folder)
    assert vocabulary is not None
    assert vocabulary.size == 201
    assert vocabulary.excluded == {3, 4, 5, 50, 100, 101, 102, 200}


def test_other_tokenizer_files(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        config={"vocab_size": 300},
        tekken={"config": {"default_num_special_tokens": 20}},
        tokenizer={"model": {}},
    )
    assert ordinary_vocabulary(folder) == Vocabulary(300, frozenset(range(20)))
    unigram = write(tmp_path, tokenizer={"model": {"vocab": [["a", 0.0]] * 120}}, tekken={})
    assert ordinary_vocabulary(unigram) == Vocabulary(120)


def test_a_model_that_is_not_local_has_no_vocabulary_yet(tmp_path: Path) -> None:
    assert ordinary_vocabulary(None) is None
    assert ordinary_vocabulary(tmp_path) is None
    assert ordinary_vocabulary(write(tmp_path, config={"model_type": "x"})) is None


def test_a_broken_model_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        ordinary_vocabulary(tmp_path)


def test_the_vocabulary_of_a_server_is_what_plain_text_uses() -> None:
    assert len(set(PROBE_TEXT.split())) == 26 * 26
    vocabulary = vocabulary_from_tokens([*range(10, 100), 10])
    assert vocabulary.ordinary() == tuple(range(10, 100))
    with pytest.raises(InputError, match="at least 64"):
        vocabulary_from_tokens([1, 2, 3]).ordinary()


def test_workloads_are_told_apart_by_arrivals() -> None:
    assert workload("input_tokens: 5\noutput_tokens: 5").arrivals == Arrivals("poisson")
