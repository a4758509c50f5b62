"""Search spaces: read from names, files and words, and cut down to the installed vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.cli import knobs as knobs_command
from tuner.errors import InputError
from tuner.records import KnobValue
from tuner.serve_args import ServeFlags, defaults, parse_help
from tuner.space import STAGES, Kind, Knob, Scale, Space, load_space, restrict, shipped_spaces

HELP = Path(__file__).parent / "recorded" / "help"
FLAGS = {
    version: parse_help((HELP / f"serve_help_{version}.txt").read_text(), version) for version in ("0.26.0", "0.33.0")
}


def named(space: Space) -> dict[str, Knob]:
    return {knob.name: knob for knob in space.knobs}


def written(tmp_path: Path, text: str, name: str = "mine.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def cut(
    space: Space,
    version: str = "0.33.0",
    *,
    fixed: dict[str, KnobValue] | None = None,
    devices: int = 1,
    device_type: str = "cuda",
    lossy: bool = False,
    length: int | None = None,
) -> tuple[dict[str, Knob], str]:
    flags: ServeFlags = FLAGS[version]
    kept, notes = restrict(
        space,
        flags,
        fixed=fixed or {},
        devices=devices,
        device_type=device_type,
        lossy_allowed=lossy,
        max_model_len=length,
    )
    return named(kept), "\n".join(notes)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "conservative", "throughput", "latency"])
def test_shipped_spaces_load_and_hold_what_every_expert_starts_with(name: str) -> None:
    space = load_space(name)
    knobs = named(space)
    assert {"max-num-batched-tokens", "max-num-seqs"} <= set(knobs)
    assert [knob.stage for knob in space.knobs] == sorted(knob.stage for knob in space.knobs)
    assert not any(knob.explicit for knob in space.knobs)
    assert all(knob.note for knob in space.knobs)
    assert "stream-interval" not in knobs, "it improves latency numbers, not latency"
    for knob in space.knobs:
        assert set(knob.coupled) <= {"max-num-seqs", "max-num-batched-tokens"} | {
            f"{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")
        }
        if knob.scale is not Scale.LIST:
            assert list(knob.values) == sorted(knob.values)  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["default", "conservative", "throughput", "latency"])
@pytest.mark.parametrize("version", FLAGS)
def test_shipped_spaces_fit_every_version(name: str, version: str) -> None:
    kept, _ = cut(load_space(name), version, devices=8, lossy=True, length=32768)
    flags = FLAGS[version]
    for knob in kept.values():
        flag = flags.flags[knob.name]
        assert flag.boolean == (knob.kind is Kind.BOOL)
        assert not flag.choices or set(map(str, knob.values)) <= set(flag.choices)


def test_batch_sizes_lie_on_the_grid_of_captured_graphs() -> None:
    for name in shipped_spaces():
        for value in named(load_space(name))["max-num-seqs"].values:
            assert isinstance(value, int)
            assert value in (1, 2, 4) or value % (8 if value < 256 else 16) == 0


def test_scales_spell_out_their_values(tmp_path: Path) -> None:
    text = """
    knobs:
      a: {stage: budget, scale: log2, range: [512, 5000]}
      b: {stage: fit, scale: linear, range: [0.8, 0.96], step: 0.04}
      c: {stage: sequences, values: [64, 8, 16]}
      d: {stage: execution, values: [x, y]}
      e: {stage: caching, values: [true, false], lossy: true, coupled: [a], devices: [cuda], gpus: 2, vllm: ">=0.28"}
      f: {stage: parallel, scale: linear, range: [1, 4], step: 1}
      g: {stage: parallel, kind: float, values: [1, 2]}
    """
    knobs = named(load_space(written(tmp_path, text)))
    assert knobs["a"].values == (512, 1024, 2048, 4096, 5000)
    assert knobs["b"].values == (0.8, 0.84, 0.88, 0.92, 0.96)
    assert (knobs["c"].values, knobs["c"].scale, knobs["c"].kind) == ((8, 16, 64), Scale.ORDERED, Kind.INT)
    assert (knobs["d"].scale, knobs["d"].kind) == (Scale.LIST, Kind.CHOICE)
    assert (knobs["e"].values, knobs["e"].kind, knobs["e"].lossy) == ((False, True), Kind.BOOL, True)
    assert (knobs["e"].coupled, knobs["e"].devices, knobs["e"].min_devices) == (("a",), ("cuda",), 2)
    assert knobs["f"].values == (1, 2, 3, 4)
    assert knobs["g"].kind is Kind.FLOAT
    assert [STAGES[knob.stage] for knob in knobs.values()][:2] == ["fit", "budget"]
    assert all(knob.explicit for knob in knobs.values())


def test_a_space_extends_another_and_removes_from_it(tmp_path: Path) -> None:
    base = written(
        tmp_path, "extends: conservative\nknobs:\n  max-num-seqs: {stage: sequences, values: [1, 2]}", "base.yaml"
    )
    text = "extends: base.yaml\nknobs:\n  long-prefill-token-threshold: null\n  x: {stage: fit, values: [1, 2]}"
    knobs = named(load_space(written(tmp_path, text)))
    assert set(knobs) == {"max-num-seqs", "max-num-batched-tokens", "x"}
    assert knobs["max-num-seqs"].values == (1, 2)
    assert [name for name, knob in knobs.items() if knob.explicit] == ["x"]
    assert base


def test_words_make_a_space_or_change_one() -> None:
    alone = load_space("max_num_seqs=4,1,32", "--enable-prefix-caching=true,false")
    assert [(knob.name, knob.values) for knob in alone.knobs] == [
        ("max-num-seqs", (1, 4, 32)),
        ("enable-prefix-caching", (False, True)),
    ]
    assert alone.knobs[0].coupled == ("max-num-batched-tokens",), "as the default space has it"
    assert load_space("max-num-batched-tokens=2k,1K").knobs[0].values == (1024, 2000)
    assert (
        load_space("compilation_config.cudagraph_mode=FULL,NONE").knobs[0].name == "compilation-config.cudagraph_mode"
    )
    changed = load_space("conservative", "max-num-seqs=4,8", "stream-interval=1,2")
    assert {knob.name: knob.explicit for knob in changed.knobs} == {
        "max-num-batched-tokens": False,
        "max-num-seqs": True,
        "long-prefill-token-threshold": False,
        "stream-interval": True,
    }
    assert changed.digest != load_space("conservative").digest


# --- restricting -------------------------------------------------------------------------------------------------


def test_defaults_come_from_the_installed_vllm() -> None:
    kept, _ = cut(load_space("default"))
    assert kept["gpu-memory-utilization"].default == 0.92
    assert kept["performance-mode"].default == "balanced"
    assert kept["scheduler-reserve-full-isl"].default is True
    assert kept["max-num-seqs"].default is None, "it depends on the size of the device"
    assert cut(load_space("default"), device_type="cpu")[0]["max-num-seqs"].default == 128
    flags = FLAGS["0.33.0"]
    assumed = defaults(flags, device_type="cuda", device_bytes=141 << 30, device_name="NVIDIA H200")
    space, _ = restrict(
        load_space("default"),
        flags,
        fixed={},
        devices=1,
        device_type="cuda",
        lossy_allowed=False,
        max_model_len=None,
        assumed=assumed,
    )
    found = {knob.name: knob.default for knob in space.knobs}
    assert (found["max-num-seqs"], found["max-num-batched-tokens"], found["api-server-count"]) == (1024, 8192, 1)


def test_what_does_not_exist_here_is_left_out_and_said() -> None:
    kept, notes = cut(load_space("default"))
    assert "max-num-partial-prefills" not in kept
    assert "max-num-partial-prefills: left out, it is meant for vLLM <0.31 and this is 0.33.0" in notes
    assert "max-num-partial-prefills" in cut(load_space("default"), "0.26.0")[0]


def test_devices_decide() -> None:
    single, notes = cut(load_space("default"))
    assert "tensor-parallel-size: left out, it needs 2 devices and there are 1" in notes
    double, notes = cut(load_space("default"), devices=2)
    assert set(double) - set(single) == {f"{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")}
    assert double["tensor-parallel-size"].values == (1, 2)
    assert "tensor-parallel-size: value 4 left out, there are 2 devices" in notes
    cpu, notes = cut(load_space("default"), device_type="cpu")
    assert "gpu-memory-utilization: left out, it is meant for cuda, not cpu" in notes
    assert {"max-num-seqs", "max-num-batched-tokens"} <= set(cpu)


def test_lossy_knobs_need_permission() -> None:
    assert "kv-cache-dtype" not in cut(load_space("default"))[0]
    assert "kv-cache-dtype" in cut(load_space("default"), lossy=True)[0]


def test_what_the_user_fixed_is_not_searched(tmp_path: Path) -> None:
    fixed: dict[str, KnobValue] = {"max-num-seqs": 64, "kv-cache-memory-bytes": 1 << 30}
    kept, notes = cut(load_space("default"), fixed=fixed)
    assert not {"max-num-seqs", "gpu-memory-utilization"} & set(kept)
    assert "your --kv-cache-memory-bytes overrules it" in notes
    text = """
    knobs:
      compilation-config.cudagraph_mode: {stage: execution, values: [FULL, NONE]}
      max-num-seqs: {stage: sequences, values: [1, 2]}
    """
    path = written(tmp_path, text)
    for own, free in [
        ('{"mode": 3}', True),
        ('{"cudagraph_mode": "FULL"}', False),
        ('{"cudagraph_mode": {"x": 1}}', False),
    ]:
        kept, _ = cut(load_space(path), fixed={"compilation-config": own})
        assert ("compilation-config.cudagraph_mode" in kept) is free


def test_a_threshold_stays_below_the_model_length() -> None:
    kept, notes = cut(load_space("default"), length=1024)
    assert kept["long-prefill-token-threshold"].values == (0, 512, 1024)
    assert "value 4096 left out, it exceeds the model length of 1024" in notes
    assert "long-prefill-token-threshold" not in cut(load_space("default"), length=100)[0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("max-num-sequences=1,2", "has no flag `--max-num-sequences`.*`--max-num-seqs`"),
        ("num-scheduler-steps=1,8", "--async-scheduling"),
        ("performance-mode=balanced,fast", "takes one of: balanced"),
        ("enforce-eager=1,0", "is a switch"),
        ("max-num-seqs=true,false", "takes a value"),
        ("max-num-partial-prefills=1,2", "removed after"),
        ("max-num-seqs.x=1,2", "has no flag"),
    ],
)
def test_what_the_user_named_must_exist(word: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cut(load_space(word))


def test_one_value_that_is_the_default_leaves_nothing_to_search() -> None:
    kept, notes = cut(load_space("performance-mode=balanced", "max-num-seqs=64"))
    assert set(kept) == {"max-num-seqs"}
    assert "performance-mode: left out, no value other than the default remains" in notes


# --- tune knobs --------------------------------------------------------------------------------------------------


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    import argparse

    parser = argparse.ArgumentParser()
    knobs_command.register(parser.add_subparsers())
    arguments = parser.parse_args(["knobs", *words])
    assert arguments.handler(arguments) == 0
    return capsys.readouterr().out


def test_knobs_lists_what_a_saved_help_offers(capsys: pytest.CaptureFixture[str]) -> None:
    out = listed(capsys, "--help-file", str(HELP / "serve_help_0.33.0.txt"), "--space", "latency")
    lines = {line.split()[0].lstrip("-"): line for line in out.splitlines() if line}
    assert "vLLM 0.33.0 on cuda, 321 flags; search space latency" in out
    assert lines["kv-cache-dtype"].endswith("yes, when lossy knobs are allowed")
    assert lines["tensor-parallel-size"].endswith("yes, from 2 devices")
    assert lines["data-parallel-size"].endswith("no")
    assert "0.92" in lines["gpu-memory-utilization"]
    assert "this is 0.33.0" in lines["max-num-partial-prefills"]


def test_knobs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = listed(capsys, "--help-file", str(HELP / "serve_help_0.26.0.txt"), "--device", "cpu", "--json")
    document = json.loads(out)
    assert (document["vllm"], document["device"], document["space"]) == ("0.26.0", "cpu", "default")
    first = document["knobs"][0]
    assert first["knob"] == "gpu-memory-utilization"
    assert first["in this space"] == "no: it is meant for cuda, not cpu"
    assert first["values"][:2] == [0.8, 0.82]


@pytest.mark.vllm
def test_knobs_asks_the_installed_vllm(capsys: pytest.CaptureFixture[str], vllm_executable: Path) -> None:
    out = listed(capsys, "--vllm", str(vllm_executable))
    assert "on cpu" in out
    assert "max-num-seqs" in out
