"""Reading of hand-written YAML: plain values, exact places, and nothing but `InputError` for whatever else comes."""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.documents import MAX_BYTES, Node, parse_yaml, read_text, read_yaml, shipped, suggestion
from tuner.errors import InputError
from tuner.slo import parse_slo
from tuner.space.load import parse_space
from tuner.workload.model import parse_workload


def test_plain_values_come_out_as_python_values() -> None:
    text = "a: 1\nb: 1.5\nc: true\nd: null\ne: word\nf: [1, two]\ng: {h: '1'}\ni: 2024-05-01\nj: 1:30\nk: 1e3\n"
    assert parse_yaml(text, "here").value == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": None,
        "e": "word",
        "f": [1, "two"],
        "g": {"h": "1"},
        "i": "2024-05-01",
        "j": "1:30",
        "k": "1e3",
    }


def test_nodes_know_their_line() -> None:
    root = parse_yaml("a:\n  b:\n    - 1\n    - x\n", "here")
    with pytest.raises(InputError) as caught:
        root.mapping()["a"].mapping()["b"].items()[1].number()
    assert (caught.value.where, caught.value.field) == ("here, line 4", "a.b[1]")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: 1\na: 2", "appears twice"),
        ("a: {b: 1, b: 2}", "appears twice"),
        ("a: &x 1\nb: *x", "alias"),
        ("a: &x [*x]", "alias"),
        ("? [1]\n: 2", "a key that is not a word"),
        ("a: !!python/object/apply:os.system [x]", "tag"),
        ("a: !secret x", "tag"),
        ("a: 2024-99-99", "not a value of its kind"),
        ("a: [", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("[" * 20_000, "nested too deeply"),
        ("a: " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("a: " + "9" * 5000, "not a value of its kind"),
        ("#" * (MAX_BYTES + 1), "at most"),
    ],
)
def test_what_yaml_allows_and_we_do_not(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse_yaml(text, "here")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path, rule in [
        (tmp_path / "none.yaml", "does not exist"),
        (tmp_path, "is a folder"),
        (binary, "not UTF-8"),
        (large, "bytes, more than"),
        (pipe, "no ordinary file"),
        (Path("a\0b"), "does not exist|cannot be read"),
        (Path("a" * 5000), "cannot be read|does not exist"),
    ]:
        with pytest.raises(InputError, match=rule):
            read_yaml(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\n")
    assert read_yaml(path).value == {"a": 1}
    assert read_text(path) == "a: 1\r\n"


@pytest.mark.parametrize("value", [True, "5", None, [5], {}, math.nan, math.inf, -math.inf, 10**400])
def test_what_is_no_number(value: object) -> None:
    with pytest.raises(InputError, match=r"must be a (finite )?number"):
        Node(value, "here", "x").number()


def test_bounds_are_told_as_written() -> None:
    assert Node(3, "here").number(above=2, at_least=3, at_most=3) == 3.0
    assert Node(4.0, "here").integer() == 4
    for call, rule in [
        (lambda: Node(2, "here").number(above=2), "greater than 2"),
        (lambda: Node(2, "here").number(at_least=3), "at least 3"),
        (lambda: Node(2, "here").number(at_most=1), "at most 1"),
        (lambda: Node(2.5, "here").integer(), "whole number"),
        (lambda: Node(1, "here").boolean(), "true or false"),
        (lambda: Node(" ", "here").text(), "must be text"),
        (lambda: Node("c", "here").text(("a", "b")), "none of the choices"),
        (lambda: Node("ab", "here").items(), "must be a list"),
        (lambda: Node([], "here").mapping(), "must be a mapping"),
        (lambda: Node({}, "here").mapping(("a",), required=("a",)), "required"),
    ]:
        with pytest.raises(InputError, match=rule):
            call()


def test_suggestions_name_the_nearest_or_a_short_list() -> None:
    assert "`ttft`" in suggestion("ttfft", ["ttft", "tpot"])
    assert suggestion("zzz", ["b", "a"]) == "Known here: a, b."
    assert "zzz" not in suggestion("zzz", [f"name{i}" for i in range(50)])


def test_shipped_files_are_found() -> None:
    assert (shipped("search_spaces") / "default.yaml").is_file()
    assert (shipped("workloads") / "mixed.yaml").is_file()


def test_the_examples_of_the_documentation_hold(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "inputs.md").read_text()
    promise, load, trace, space = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "monday.jsonl").write_text(
        "".join(f'{{"timestamp": {at}, "input_tokens": 5, "output_tokens": 5}}\n' for at in range(0, 7200, 600))
    )
    slo = parse_slo(parse_yaml(promise, "docs").value, "docs", ("long_in_long_out", "other"))
    assert slo.classes["long_in_long_out"].limits[0].limit_s == 1.5
    assert parse_workload(parse_yaml(load, "docs"), "load", tmp_path).output_tokens is not None
    recorded = parse_workload(parse_yaml(trace, "docs"), "trace", tmp_path).trace
    assert recorded is not None
    assert len(recorded.rows) == 6
    assert "block-size" not in parse_space(parse_yaml(space, "docs"), True, tmp_path)


WORDS = """
slo classes ttft tpot p99 max weight success short input_tokens output_tokens distribution median p95 arrivals process
mix trace file seed knobs extends range values stage scale step vllm gpus coupled max-num-seqs
lognormal constant poisson weights default log2 linear list int budget >=0.3
"""
WORD = st.sampled_from(WORDS.split())
KEYS = WORD | st.text(max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | WORD
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=25
)
QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(DOCUMENTS)
def test_any_document_gives_a_result_or_an_input_error(tmp_path: Path, document: object) -> None:
    root = Node(document, "fuzz")
    for read in (
        lambda: parse_slo(document, "fuzz", ("short", "long")),
        lambda: parse_workload(root, "short", tmp_path),
        lambda: parse_space(root, True, tmp_path),
    ):
        with contextlib.suppress(InputError):  # anything else fails the test
            read()


@QUICK
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_gives_a_result_or_an_input_error(text: str) -> None:
    with contextlib.suppress(InputError):
        parse_slo(parse_yaml(text, "fuzz").value, "fuzz", ("short",))
