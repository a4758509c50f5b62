"""Traces as users bring them: five formats, replayed as recorded, cut to a window, scaled in rate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.documents import parse_yaml
from tuner.errors import InputError
from tuner.workload import Plan, Vocabulary, Workload, load_trace, longest, plan, resolve_texts
from tuner.workload.model import parse_workload
from tuner.workload.traces import FORMATS, read_trace

RECORDED = Path(__file__).parent / "recorded" / "traces"
AZURE, MOONCAKE = RECORDED / "azure_code_sample.csv", RECORDED / "mooncake_conversation_sample.jsonl"
VOCABULARY = Vocabulary(5000)

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
120.5,GPT-4,36,1,37,Conversation log
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str, str], Path]:
    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def workload(path: Path, rest: str = "", arrivals: str = "{process: trace}") -> Workload:
    text = f"trace: {{file: {path}{rest}}}\narrivals: {arrivals}"
    return parse_workload(parse_yaml(text, "t.yaml"), "t", Path())


def replayed(load: Workload, rate: float = 0.0, duration: float = 1e6, seed: int = 1, **options: int) -> Plan:
    return plan(load, rate_rps=rate, duration_s=duration, seed=seed, vocabulary=VOCABULARY, **options)


def times(result: Plan) -> list[float]:
    return [request.scheduled_s or 0.0 for request in result.requests]


# --- formats -----------------------------------------------------------------------------------------------------


def test_azure_csv_with_seven_digits_and_long_gaps() -> None:
    trace = load_trace(AZURE)
    assert trace.kind == "azure"
    first, second = trace.rows[:2]
    assert (first.at_s, first.input_tokens, first.output_tokens, first.line) == (0.0, 4808, 10, 2)
    assert second.at_s == pytest.approx(0.052, abs=1e-5)
    gaps = [(later.at_s or 0) - (row.at_s or 0) for row, later in zip(trace.rows, trace.rows[1:], strict=False)]
    assert max(gaps) > 25


def test_mooncake_jsonl() -> None:
    trace = load_trace(MOONCAKE)
    assert trace.kind == "mooncake"
    assert [row.at_s for row in trace.rows] == [0, 0, 0, 0, 3, 3, 5.999, 9, 9, 12]
    assert trace.rows[8].output_tokens == 1


def test_burstgpt_csv(made: Callable[[str, str], Path]) -> None:
    trace = load_trace(made("burst.csv", BURSTGPT))
    assert trace.kind == "burstgpt"
    assert [row.at_s for row in trace.rows] == [0, 40, 113, 115.5]
    assert [row.input_tokens for row in trace.rows] == [472, 1087, 417, 36]


def test_own_jsonl_with_lengths_ids_and_text(made: Callable[[str, str], Path]) -> None:
    lines = [
        {"timestamp": 1.5, "input_tokens": 10, "output_tokens": 2},
        {"timestamp": 2, "prompt": [7, 8, 9], "output_tokens": 3},
        {"timestamp": 4, "prompt": "hello there", "output_tokens": 4},
    ]
    load = workload(made("own.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    result = replayed(load)
    assert times(result) == [0, 0.5, 2.5]
    assert [request.prompt for request in result.requests[1:]] == [(7, 8, 9), "hello there"]
    assert [request.input_tokens for request in result.requests] == [10, 3, 0]
    assert [request.output_tokens for request in result.requests] == [2, 3, 4]


SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "question one"}, {"from": "gpt", "value": "x" * 40}]},
    {"id": "b", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "two"}]},
    {"conversation": [{"role": "user", "content": "question three"}, {"role": "assistant", "content": "y" * 8}]},
]


def test_sharegpt_json_takes_first_questions_and_estimates_answers(made: Callable[[str, str], Path]) -> None:
    load = workload(made("share.json", json.dumps(SHAREGPT)), arrivals="{process: poisson}")
    assert load.trace is not None
    assert [(row.text, row.output_tokens) for row in load.trace.rows] == [("question one", 10), ("question three", 2)]
    result = replayed(load, rate=5, duration=3)
    assert {request.prompt for request in result.requests} == {"question one", "question three"}
    assert any("estimated" in note for note in result.notes)
    assert any("repeat" in note for note in result.notes)
    assert longest([load]) == (4, 10)


def test_a_server_counts_texts_exactly(made: Callable[[str, str], Path]) -> None:
    trace = load_trace(made("share.json", json.dumps(SHAREGPT)))
    resolved = resolve_texts(trace, lambda text: [ord(letter) for letter in text])
    assert resolved.rows[0].tokens == tuple(map(ord, "question one"))
    assert [(row.input_tokens, row.output_tokens) for row in resolved.rows] == [(12, 40), (14, 8)]
    assert not resolved.notes


# --- replay ------------------------------------------------------------------------------------------------------


def test_as_recorded_keeps_bursts_and_gaps() -> None:
    result = replayed(workload(AZURE))
    trace = load_trace(AZURE)
    assert times(result) == [row.at_s for row in trace.rows]
    assert [request.input_tokens for request in result.requests] == [row.input_tokens for row in trace.rows]
    assert all(len(request.prompt) == request.input_tokens for request in result.requests)


def test_a_window_starts_its_own_clock() -> None:
    result = replayed(workload(MOONCAKE, ", start_s: 3, end_s: 9"))
    assert times(result) == [0, 0, pytest.approx(2.999)]
    assert [request.input_tokens for request in result.requests] == [2012, 915, 1053]


def test_scaling_sets_the_mean_rate_and_keeps_the_shape() -> None:
    load = workload(MOONCAKE)
    recorded, fast = replayed(load), replayed(load, rate=7.5)
    factor = (9 / 12) / 7.5
    assert times(fast) == pytest.approx([at_s * factor for at_s in times(recorded)])
    assert (len(fast.requests) - 1) / times(fast)[-1] == pytest.approx(7.5)
    assert [request.prompt for request in fast.requests] == [request.prompt for request in recorded.requests]


def test_a_duration_cuts_and_a_minimum_extends() -> None:
    load = workload(MOONCAKE)
    assert len(replayed(load, duration=3.5).requests) == 6
    assert len(replayed(load, duration=3.5, min_requests=8).requests) == 8
    assert any("whole trace was used" in note for note in replayed(load).notes)


def test_hash_ids_reproduce_prefix_sharing_to_the_token(made: Callable[[str, str], Path]) -> None:
    rows = [(1100, [0, 1, 2]), (1300, [0, 1, 3]), (700, [0, 4]), (600, [5, 1]), (512, [0])]
    lines = [
        json.dumps({"timestamp": i, "input_length": n, "output_length": 1, "hash_ids": [10**15 + h for h in hashes]})
        for i, (n, hashes) in enumerate(rows)
    ]
    requests = replayed(workload(made("m.jsonl", "\n".join(lines)))).requests
    prompts = [request.prompt for request in requests]

    def common(a: int, b: int) -> int:
        pairs = zip(prompts[a], prompts[b], strict=False)
        return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(prompts[a]), len(prompts[b])))

    assert [len(prompt) for prompt in prompts] == [1100, 1300, 700, 600, 512]
    assert 1024 <= common(0, 1) < 1024 + 16
    assert 512 <= common(0, 2) < 512 + 16
    assert common(0, 3) < 16
    assert common(0, 4) == 512
    assert [request.shared_prefix_tokens for request in requests] == [1024, 1024, 512, 0, 512]


def test_sharing_is_told_under_other_arrivals_too() -> None:
    requests = replayed(workload(MOONCAKE, arrivals="{process: poisson}"), rate=5, duration=4).requests
    assert len(requests) > 12, "more than the trace holds, so that whole prompts come again"
    assert all(request.shared_prefix_tokens >= 512 for request in requests if request.input_tokens >= 512)


def test_prompts_of_token_ids_tell_what_they_share_at_the_grain_of_the_cache(made: Callable[[str, str], Path]) -> None:
    common = list(range(1000, 1064))
    rows = [{"prompt": [*common, *range(2000 + 100 * i, 2036 + 100 * i)], "output_tokens": 4} for i in range(3)]
    rows.append({"prompt": list(range(9000, 9100)), "output_tokens": 4})
    path = made("own.jsonl", "\n".join(map(json.dumps, rows)))
    load = workload(path, arrivals="{process: constant}")
    found = replayed(load, rate=1.0, duration=4.5)
    shared = sorted(request.shared_prefix_tokens for request in found.requests)
    assert shared == [0, 64, 64, 64]
    again = replayed(load, rate=1.0, duration=8.5)  # the whole trace twice over
    assert {request.shared_prefix_tokens for request in again.requests} == {100}


def test_seeds_change_made_prompts_and_keep_the_sharing() -> None:
    one, two = (replayed(workload(MOONCAKE), seed=seed).requests for seed in (1, 2))
    assert one[0].prompt[:512] == one[1].prompt[:512]
    assert two[0].prompt[:512] == two[1].prompt[:512]
    assert one[0].prompt[:16] != two[0].prompt[:16]


def test_zero_and_overlong_requests_are_refused_with_their_line(made: Callable[[str, str], Path]) -> None:
    result = replayed(workload(made("burst.csv", BURSTGPT)), max_model_len=1000)
    assert [request.output_tokens for request in result.requests] == [18, 1]
    assert len(result.rejected) == 2
    assert "1087 + 230 tokens exceed the model length of 1000 (line 3 of the trace)" in result.rejected[0]
    assert "output of 0 cannot be sent (line 4 of the trace)" in result.rejected[1]


def test_a_trace_without_times_needs_other_arrivals(made: Callable[[str, str], Path]) -> None:
    path = made("own.jsonl", '{"input_tokens": 5, "output_tokens": 2}\n{"input_tokens": 6, "output_tokens": 3}')
    with pytest.raises(InputError, match="needs a trace with timestamps"):
        workload(path)
    result = replayed(workload(path, arrivals="{process: constant}"), rate=2, duration=4)
    assert {(request.input_tokens, request.output_tokens) for request in result.requests} == {(5, 2), (6, 3)}
    assert len({request.prompt for request in result.requests}) == len(result.requests)


def test_rows_out_of_order_are_sorted_and_it_is_said(made: Callable[[str, str], Path]) -> None:
    lines = [f'{{"timestamp": {at}, "input_tokens": 5, "output_tokens": {at}}}' for at in (3, 1, 2)]
    result = replayed(workload(made("own.jsonl", "\n".join(lines))))
    assert [request.output_tokens for request in result.requests] == [1, 2, 3]
    assert any("sorted" in note for note in result.notes)


def test_a_single_moment_has_no_rate(made: Callable[[str, str], Path]) -> None:
    load = workload(made("own.jsonl", '{"timestamp": 3, "input_tokens": 5, "output_tokens": 2}'))
    assert len(replayed(load).requests) == 1
    with pytest.raises(InputError, match="no rate that could be scaled"):
        replayed(load, rate=2.0)


def test_the_digest_follows_the_content_and_the_window(made: Callable[[str, str], Path]) -> None:
    digests = [
        workload(MOONCAKE).digest,
        workload(MOONCAKE, ", start_s: 3").digest,
        workload(made("copy.jsonl", MOONCAKE.read_text().replace("500", "501"))).digest,
    ]
    assert len(set(digests)) == 3
    assert workload(made("same.jsonl", MOONCAKE.read_text())).digest == digests[0]


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "place", "rule"),
    [
        ("t.jsonl", "", "", "is empty"),
        ("t.jsonl", "{}\n{", "line 1", "required"),
        ("t.jsonl", '{"input_tokens": 1, "output_tokens": 1}\n{', "line 2", "is not JSON"),
        ("t.jsonl", '{"input_tokens": 1.5, "output_tokens": 1}', "line 1", "whole number"),
        ("t.jsonl", '{"input_tokens": 1, "prompt": "x", "output_tokens": 1}', "line 1", "exactly one"),
        ("t.jsonl", '{"input_tokens": 1, "output_token": 1}', "line 1", "unknown"),
        ("t.jsonl", '{"prompt": [1, -2], "output_tokens": 1}', "line 1", "at least 0"),
        ("t.jsonl", '{"timestamp": 1, "input_tokens": 1, "output_tokens": 1}\n{"input_tokens": 1, "output_tokens": 1}',
         "line 2", "missing here"),
        ("t.jsonl", '{"timestamp": NaN, "input_tokens": 1, "output_tokens": 1}', "line 1", "finite"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "line 1", "2 blocks"),
        ("t.jsonl", '{"input_tokens": 1e12, "output_tokens": 1}', "line 1", "at most 1e.07"),
        ("t.jsonl", '{"prompt": "x", "output_tokens": 1e12}', "line 1", "at most 1e.07"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1e12, "output_length": 1, "hash_ids": []}', "line 1", "at most"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 1e12, "hash_ids": [1]}', "line 1", "at most"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,99999999,2", "line 2", "0 to 10000000"),
        ("t.json", "[1]", "", "must be a mapping"),
        ("t.json", "[{}]", "", "required"),
        ("t.json", "[]", "", "no request"),
        ("t.json", "[{", "", "is not JSON"),
        ("t.csv", "a,b\n1,2", "line 1", "no known trace format"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-99-01,1,2", "line 2", "not a date"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1", "line 2", "2 cells"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1,-2", "line 2", "number of tokens"),
        ("t.csv", BURSTGPT + "x,GPT-4,1,1,2,API log\n", "line 6", "number of seconds"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "", "no request"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_line(
    made: Callable[[str, str], Path], name: str, text: str, place: str, rule: str
) -> None:
    with pytest.raises(InputError, match=rule) as caught:
        load_trace(made(name, text))
    assert place in caught.value.where


HALVES = "\\ud83d \\ude00"  # of a character that JSON writes as two escapes side by side
OWN = '{"prompt": "x", "output_tokens": 1}\n{"prompt": "%s", "output_tokens": 1}'
ASKED = '[{"conversations": [{"from": "human", "value": "%s"}, {"from": "gpt", "value": "%s"}]}]'


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("t.jsonl", OWN % HALVES, "line 2: prompt"),
        ("t.json", ASKED % (HALVES, "x"), "trace[0].conversations[0].value"),
        ("t.json", ASKED % ("x", HALVES), "trace[0].conversations[1].value"),
    ],
)
def test_half_a_character_is_refused_where_it_stands(
    made: Callable[[str, str], Path], name: str, text: str, place: str
) -> None:
    with pytest.raises(InputError, match="half of a character") as caught:
        load_trace(made(name, text))
    assert place in str(caught.value)
    assert load_trace(made(name, text.replace(" \\ude00", "\\ude00"))).rows[-1].text in ("\U0001f600", "x")


def test_line_separators_inside_a_text_are_part_of_it(made: Callable[[str, str], Path]) -> None:
    trace = load_trace(made("t.jsonl", '{"prompt": "a\u2028b\x85c", "output_tokens": 1}\r\n'))
    assert trace.rows[0].text == "a\u2028b\x85c"


def test_a_named_format_is_taken_at_its_word(made: Callable[[str, str], Path]) -> None:
    with pytest.raises(InputError, match="no column `TIMESTAMP`"):
        load_trace(made("burst.csv", BURSTGPT), "azure")


KEYS = "timestamp input_tokens output_tokens prompt input_length output_length hash_ids conversations from value role"
HEADS = st.sampled_from(
    [
        "",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        BURSTGPT,
        '{"hash_ids": [1], "timestamp": 0, ',
        "[{",
        '[{"conversations": ',
    ]
)


@settings(max_examples=400, deadline=None)
@given(HEADS, st.text(max_size=120), st.sampled_from(FORMATS))
def test_any_text_gives_a_trace_or_an_input_error(head: str, text: str, kind: str) -> None:
    with contextlib.suppress(InputError):  # anything else fails the test
        read_trace(head + text, "fuzz", kind)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(KEYS.split()),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["jsonl", "mooncake", "sharegpt"]),
)
def test_any_json_gives_a_trace_or_an_input_error(document: object, kind: str) -> None:
    text = json.dumps(document if kind != "sharegpt" else [document])
    with contextlib.suppress(InputError):
        read_trace(text, "fuzz", kind)
