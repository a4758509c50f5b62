"""What `tune run` ends with says what the verdict says, and an unfinished study tells what it has seen."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulated_study import BUDGET, SEQS, WINNER, shared_study
from tuner.cli.summary import MOST_SHOWN, so_far, summary
from tuner.export import ALONE, POINT_ESTIMATES, deployment
from tuner.finish import FlagEffect
from tuner.records import Bound, Config, Estimate, StepKind
from tuner.serve_args import parse_help
from tuner.store import ResultsFolder
from tuner.study.inputs import kept
from tuner.study.result import StudyFile, read_study, write_study

GAIN = Estimate(1.42, 1.31, 1.54, 3)


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    root = tmp_path / "demo"
    shutil.copytree(shared_study(), root)
    return ResultsFolder(root)


def told(folder: ResultsFolder) -> str:
    return summary(read_study(folder), folder.root, ())


def change(folder: ResultsFolder, config: Config, *effects: FlagEffect, dropped: tuple[str, ...] = ()) -> StudyFile:
    study = read_study(folder)
    assert study.result is not None
    study = replace(study, result=replace(study.result, config=config, effects=effects, dropped=dropped))
    write_study(folder, study)
    return study


def test_the_console_and_the_export_have_the_same_numbers(folder: ResultsFolder) -> None:
    study = read_study(folder)
    help_text = (Path(__file__).parent / "recorded" / "help" / "serve_help_0.32.0.txt").read_text()
    flags = parse_help(help_text, "0.32.0")
    exported = deployment(study, kept(folder).slo, folder.trials(), flags, forced=True)
    text = told(folder)
    for name, pair in exported.classes.items():
        assert pair.baseline is not None
        assert pair.best is not None
        (line,) = (line for line in text.splitlines() if line.startswith(name))
        assert line.split()[1:3] == [f"{pair.baseline.value:.3g}", f"{pair.best.value:.3g}"]
    assert POINT_ESTIMATES in text
    assert "best ÷ baseline (each class by itself)" in text
    assert ALONE.startswith("Each class by itself")


def test_a_bound_is_marked(folder: ResultsFolder) -> None:
    for record in folder.trials():
        if record.number == WINNER and record.round == 1:
            capacities = {name: replace(c, bound=Bound.ABOVE) for name, c in record.capacities.items()}
            folder.write_trial(replace(record, capacities=capacities))
    assert told(folder).count("≥ ") == 2


def test_a_flag_of_the_baseline_that_returns_to_the_default_is_a_change(folder: ResultsFolder) -> None:
    change(folder, {}, FlagEffect(SEQS, None, GAIN, True))
    text = told(folder)
    assert f"  --{SEQS} 16 → vLLM's default: 1.42× (95 %: 1.31–1.54)\n" in text
    assert "none to change" not in text


def test_a_flag_without_proof_is_not_said_to_help(folder: ResultsFolder) -> None:
    change(
        folder,
        {SEQS: 256, BUDGET: 2048},
        FlagEffect(SEQS, 256, None, True),
        FlagEffect(BUDGET, 2048, GAIN, False),
        dropped=("block-size",),
    )
    text = told(folder)
    unproven = "1.42× (95 %: 1.31–1.54); not shown to matter; kept because leaving it out was not verified"
    assert f"--{BUDGET} 2048  (was vLLM's default): {unproven}" in text
    assert f"--{SEQS} 256  (was 16): does not run without it" in text
    assert "Left out, because no difference could be shown: --block-size" in text
    assert "without it is worse" not in text


def test_the_baseline_as_the_result_changes_nothing(folder: ResultsFolder) -> None:
    change(folder, {SEQS: 16})
    assert "Flags: none to change" in told(folder)


def test_an_unfinished_study_tells_what_it_has_seen(folder: ResultsFolder) -> None:
    write_study(folder, replace(read_study(folder), result=None, plan=None))
    lines = told(folder).splitlines()
    assert "no verdict yet; go on with `tune run --resume" in lines[0]
    assert lines[1] == "so far (search values, not verified):"
    assert lines[2].split() == ["trial", "÷", "baseline", "change"]
    rows = {line.split()[0]: line for line in lines[3:]}
    assert next(iter(rows)) == str(WINNER)  # best first
    assert rows["0"].split()[1] == "1.00×"
    assert f"{SEQS} 64 → 256" in rows["3"]
    assert "does not run" in rows["2"]
    assert set(rows) == {"0", "1", "2", "3", "4", "5"}  # the finish is no search value


def test_an_unfinished_study_without_a_trial_is_one_line(folder: ResultsFolder) -> None:
    write_study(folder, replace(read_study(folder), result=None, plan=None))
    shutil.rmtree(folder.root / "trials")
    assert len(told(folder).splitlines()) == 1


def test_a_long_search_is_cut_short(folder: ResultsFolder) -> None:
    one = next(record for record in folder.trials() if record.step.kind is StepKind.ONE)
    many = [replace(one, number=number) for number in range(MOST_SHOWN + 3)]
    lines = so_far(many, {}, {number: 1.0 + number / 10 for number in range(len(many))})
    assert len(lines) == MOST_SHOWN + 3
    assert lines[2].split()[:2] == [str(len(many) - 1), "2.00×"]
    assert lines[-1] == "and 3 more: `tune report`"
