"""A study obeys the quality guard: who is compared, who may win, what is said, and that a kill changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.formula import FACTS, FormulaExecutor
from tests.test_quality import made
from tests.test_study import CLASSES, SLO, definition
from tuner.errors import InputError
from tuner.export import answers_text
from tuner.quality import Answer, Answers, Closeness, built_in
from tuner.records import Budget, Config, Proposal, QualityScores, StepKind, TrialRecord
from tuner.report.build import Material, build
from tuner.report.html import html
from tuner.report.markdown import markdown
from tuner.space import Space, load_space
from tuner.space.model import make_space
from tuner.store import ResultsFolder, dumps, write_atomic
from tuner.study import Silent, StopSignals, Study, StudyResult, read_study
from tuner.study.guard import Guard
from tuner.trial import TrialRequest

PLAIN = load_space("max-num-seqs=1,4,16", "kv-cache-dtype=auto,fp8,int4")
SPACE: Space = make_space(
    PLAIN.name,
    [replace(knob, lossy=True, default="auto") if knob.name == "kv-cache-dtype" else knob for knob in PLAIN.knobs],
)
ANSWERS = Answers("digest", (Answer((1,), (2,), (-1.0,), (-1.0,)),))


def faster_when_lossy(config: Config) -> dict[str, float]:
    """int4 is fastest and fp8 fast; the sequence limit helps a little."""
    dtype = {"fp8": 1.5, "int4": 2.0}.get(str(config.get("kv-cache-dtype")), 1.0)
    seqs = {1: 1.0, 4: 1.3, 16: 1.35}[int(config.get("max-num-seqs", 1))]
    return dict.fromkeys(CLASSES, 4.0 * dtype * seqs)


@dataclass
class Answering(FormulaExecutor):
    """A formula whose servers also answer: `flips` and `drift` by value of the lossy knob; one missing: refused."""

    closeness: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"auto": (0.004, 0.004), "fp8": (0.006, 0.01), "int4": (0.2, 0.4)}
    )
    folder: ResultsFolder | None = None
    examined: list[TrialRequest] = field(default_factory=list)

    def run(self, request: TrialRequest) -> TrialRecord:
        record = FormulaExecutor.run(self, request)
        if request.quality is None or not record.capacities:
            return record
        assert self.folder is not None
        self.examined.append(request)
        found = self.closeness.get(str(request.proposal.config.get("kv-cache-dtype", "auto")))
        reference = request.quality.reference is None
        if found is None:
            return replace(record, quality=QualityScores("digest", reference, (), refused="status 500"))
        if reference:
            write_atomic(self.folder.trial_folder(record.number, record.replicate) / "a.json", dumps(ANSWERS))
            scores = made(0.0, 0.0, len(self.asked))
        else:
            assert request.quality.reference == ANSWERS
            scores = made(*found, len(self.asked))
        return replace(record, quality=replace(scores, reference=reference, answers_file="a.json"))


def study(root: Path, executor: Answering, **changes: object) -> Study:
    asked = definition(lossy_allowed=True, budget=Budget(trials=9), **changes)
    executor.folder = folder = ResultsFolder(root)
    return Study(asked, SLO, SPACE, folder, executor, FACTS, StopSignals(), Silent(), pause_s=0.0)


def result_of(root: Path) -> StudyResult:
    found = read_study(ResultsFolder(root)).result
    assert found is not None
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answering]:
    """A study from its start to its verdict, and what its servers were asked."""
    root, executor = tmp_path_factory.mktemp("whole"), Answering(faster_when_lossy)
    study(root, executor).run()
    return root, executor


def test_a_degraded_value_cannot_win_and_an_equivalent_one_does(whole: tuple[Path, Answering]) -> None:
    result = result_of(whole[0])
    assert result.conclusion.decision == "improved"
    assert result.config["kv-cache-dtype"] == "fp8"
    assert result.conclusion.winner is not None
    assert result.quality[result.conclusion.winner].verdict is Closeness.EQUIVALENT
    tried = [r.config.get("kv-cache-dtype") for r in ResultsFolder(whole[0]).trials()]
    assert tried.count("int4") == 1, "nothing is built on a value whose answers were found wanting"


def test_who_is_compared(whole: tuple[Path, Answering]) -> None:
    examined = whole[1].examined
    asked = [(r.proposal.step.kind, str(r.proposal.config.get("kv-cache-dtype")), r.round) for r in examined]
    baselines = [one for one in asked if one[0] is StepKind.BASELINE]
    assert len(baselines) == 2, "the reference and its own noise, on fresh servers"
    search = [dtype for kind, dtype, turn in asked if turn is None and kind is not StepKind.BASELINE]
    assert sorted(search) == ["fp8", "int4"], "once for each new set of lossy values"
    finish = [r for r in examined if r.round is not None]
    assert finish
    assert all("kv-cache-dtype" in r.proposal.config for r in finish)
    assert len({r.proposal.number for r in finish}) == len(finish), "each contender once"


def test_the_finish_alone_decides(tmp_path: Path) -> None:
    """Close enough when first compared, and found wanting in the finish: the best of the rest wins, and it is said."""

    @dataclass
    class Worse(Answering):
        def run(self, request: TrialRequest) -> TrialRecord:
            bad = request.round is not None
            self.closeness = {"auto": (0.004, 0.004), "fp8": (0.2, 0.4) if bad else (0.006, 0.01), "int4": (0.2, 0.4)}
            return Answering.run(self, request)

    study(tmp_path, Worse(faster_when_lossy)).run()
    result = result_of(tmp_path)
    assert result.conclusion.decision == "improved"
    assert "kv-cache-dtype" not in result.config
    assert [found.verdict for found in result.quality.values()] == [Closeness.DEGRADED]
    assert any("may not win, its answers are not the baseline's" in note for note in result.conclusion.notes)


def test_what_cannot_be_compared_cannot_win(tmp_path: Path) -> None:
    answering = Answering(faster_when_lossy, closeness={"auto": (0.004, 0.004)})
    study(tmp_path, answering).run()
    assert "kv-cache-dtype" not in result_of(tmp_path).config


def test_without_the_baselines_answers_the_study_ends_early(tmp_path: Path) -> None:
    executor = Answering(faster_when_lossy, closeness={})
    with pytest.raises(InputError, match=r"could not be had: status 500.*without --allow-lossy"):
        study(tmp_path, executor).run()
    assert len(executor.asked) == 2


def test_nothing_is_compared_when_it_was_not_asked_for(tmp_path: Path) -> None:
    executor = Answering(faster_when_lossy)
    asked = definition(lossy_allowed=False, budget=Budget(trials=4))
    executor.folder = ResultsFolder(tmp_path)
    lossless = make_space("s", [knob for knob in SPACE.knobs if not knob.lossy])
    Study(asked, SLO, lossless, executor.folder, executor, FACTS, StopSignals(), Silent(), pause_s=0.0).run()
    assert executor.examined == []


@pytest.mark.parametrize("at", [2, 12])
def test_a_kill_changes_nothing(tmp_path: Path, whole: tuple[Path, Answering], at: int) -> None:
    class Killed(Exception):
        pass

    def kill(record: TrialRecord) -> TrialRecord:
        raise Killed

    with pytest.raises(Killed):
        study(tmp_path, Answering(faster_when_lossy, events={at: kill})).run()
    study(tmp_path, Answering(faster_when_lossy)).run()
    one, other = result_of(whole[0]), result_of(tmp_path)
    assert one.conclusion.decision == other.conclusion.decision
    assert dict(one.config) == dict(other.config)
    assert {n: q.verdict for n, q in one.quality.items()} == {n: q.verdict for n, q in other.quality.items()}


def test_it_is_shown(whole: tuple[Path, Answering]) -> None:
    folder = ResultsFolder(whole[0])
    report = build(Material(read_study(folder), SLO, folder.trials(), {}))
    assert {row.comparison.verdict for row in report.quality} == {Closeness.EQUIVALENT, Closeness.DEGRADED}
    for text in (markdown(report), html(replace(report, curves=()))):
        assert "Do the answers stay the same" in text
        assert "degraded" in text
        assert "of 100 tokens are chosen differently" in text
    result = result_of(whole[0])
    assert result.conclusion.winner is not None
    assert answers_text(result.quality[result.conclusion.winner]).startswith("equivalent, compared with")


@pytest.mark.parametrize("elsewhere", ["/etc/passwd", "../../study.json", "link.json"])
def test_answers_are_read_from_the_trials_folder_only(
    tmp_path: Path, whole: tuple[Path, Answering], elsewhere: str
) -> None:
    folder = ResultsFolder(Path(shutil.copytree(whole[0], tmp_path / "copy")))
    first = next(record for record in folder.trials() if record.quality is not None and record.quality.reference)
    assert first.quality is not None
    (folder.trial_folder(first.number, first.replicate) / "link.json").symlink_to("/etc/passwd")
    altered = replace(first, quality=replace(first.quality, answers_file=elsewhere))
    again = Proposal(first.number, first.config, first.step)
    with pytest.raises(InputError, match="within the trial's folder"):
        Guard(SPACE, {}, built_in(), folder).examination(again, None, [altered])
