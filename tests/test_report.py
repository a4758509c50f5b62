"""The report says what the records say: every number recomputes from raw requests, every link leads somewhere."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest

from tests.simulated_study import REMOVED, SETTINGS, STEPS, WINNER, measured_runs, shared_study
from tuner.capacity import find_capacity
from tuner.cli import build_parser, main
from tuner.cli.report import FORMAT_NAMES
from tuner.errors import ExitCode
from tuner.export import ALONE, POINT_ESTIMATES
from tuner.finish import Conclusion, Decision, FlagEffect, effects, judge
from tuner.metrics import overall, score_all
from tuner.records import Bound, Capacity, ClassMetrics, Estimate, Probe, TrialRecord, TrialState
from tuner.report import FORMATS, TABLE_FORMATS, Material, Report, build, check, load, recompute, write
from tuner.report.html import figures, html
from tuner.report.markdown import markdown, table
from tuner.report.recompute import compare, rescore
from tuner.report.study import in_order
from tuner.report.tables import TABLES, probe_rows
from tuner.report.tables import table as trials_table
from tuner.report.words import duration, interval, number, ratio
from tuner.store import ResultsFolder, dumps, write_atomic
from tuner.study.inputs import kept
from tuner.study.result import StudyFile, read_study, write_study

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def folder() -> ResultsFolder:
    return ResultsFolder(shared_study())


@pytest.fixture(scope="module")
def report(folder: ResultsFolder) -> Report:
    return load(folder)


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return html(report)


@pytest.fixture
def copy(tmp_path: Path) -> ResultsFolder:
    """A copy of the study, to be changed."""
    root = tmp_path / "demo"
    shutil.copytree(shared_study(), root)
    return ResultsFolder(root)


def material(folder: ResultsFolder, trials: Sequence[TrialRecord] | None = None) -> Material:
    records = folder.trials() if trials is None else trials
    inputs = kept(folder)
    return Material(read_study(folder), inputs.slo, in_order(records), {}, inputs.space)


# --- every number from the raw requests ---------------------------------------------------------------------------


def from_raw(folder: ResultsFolder, record: TrialRecord) -> TrialRecord:
    """The record with every score and capacity computed anew from nothing but its raw requests."""
    slo = kept(folder).slo

    def again(probe: Probe) -> Probe:
        classes = rescore(probe, folder.requests(record, probe.requests_file), slo)
        outcome, margin = overall(classes)
        return replace(probe, classes=classes, outcome=outcome, margin=margin)

    def no_more(*_: object) -> Probe:
        raise AssertionError("the stored probes were enough when they were measured")

    def capacity(name: str, stored: Capacity) -> Capacity:
        probes = [again(probe) for probe in stored.probes]
        return find_capacity(no_more, name, start_rps=1.0, settings=SETTINGS, seeds=itertools.count(), known=probes)

    return replace(record, capacities={name: capacity(name, stored) for name, stored in record.capacities.items()})


def test_every_figure_of_the_report_recomputes_from_the_raw_requests(folder: ResultsFolder, report: Report) -> None:
    raw = [from_raw(folder, record) for record in folder.trials()]
    again = build(material(folder, raw))
    same = replace(again, written_at=report.written_at, importance=report.importance)
    assert compare(report, same) == []


def test_the_verdict_recomputes_from_the_raw_requests(folder: ResultsFolder) -> None:
    result = read_study(folder).result
    assert result is not None
    raw = [from_raw(folder, record) for record in folder.trials() if record.round is not None]
    finish, ablation = measured_runs(raw)
    weights = {name: promise.weight for name, promise in kept(folder).slo.classes.items()}
    assert compare(result.conclusion, judge(finish, 0, weights)) == []
    removed = dict(enumerate(REMOVED, start=len(STEPS)))
    assert compare(result.effects, effects((*finish, *ablation), WINNER, removed, weights)) == []


def test_the_check_compares_every_scored_probe(folder: ResultsFolder) -> None:
    result = check(folder)
    assert result.compared == sum(len(c.probes) for r in folder.trials() for c in r.capacities.values()) > 50
    assert result.without_requests == 0
    assert result.differences == ()


def test_a_number_that_was_altered_is_found(copy: ResultsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy.trial_folder(WINNER, 2) / "trial.json"
    record = json.loads(path.read_text())
    record["capacities"]["long_in_long_out"]["probes"][0]["classes"]["long_in_long_out"]["goodput_rps"] += 0.5
    write_atomic(path, json.dumps(record))
    result = check(copy)
    assert len(result.differences) == 1
    assert "trial 4.2" in result.differences[0]
    assert "long_in_long_out.goodput_rps" in result.differences[0]
    assert main(["report", str(copy.root), "--check"]) == ExitCode.HARNESS
    assert "differ from the raw requests" in capsys.readouterr().err


@pytest.mark.parametrize("end_s", [0.7 + 0.1, 5.3, 29.000000001, 61.7])
@pytest.mark.parametrize("inside", [False, True])
def test_a_window_that_ends_at_a_request_is_found_again(folder: ResultsFolder, end_s: float, inside: bool) -> None:
    """Stored are start and length, whose sum can miss the end by a rounding."""
    record = next(record for record in folder.trials() if record.capacities)
    probe = next(iter(record.capacities.values())).probes[0]
    (name,) = probe.classes
    slo, some = kept(folder).slo, folder.requests(record, probe.requests_file)[0]
    meant = math.nextafter(end_s, math.inf) if inside else end_s
    for ramp_s in (0.1, 0.3, 1 / 3, 0.7):
        times = (ramp_s, (ramp_s + end_s) / 2, end_s)
        made = (replace(some, scheduled_s=at, sent_s=at, first_s=at, last_s=at, end_s=at) for at in times)
        requests = tuple(replace(request, index=index) for index, request in enumerate(made))
        classes = score_all(requests, {name: slo.classes[name]}, window=(ramp_s, meant))
        stored = replace(probe, ramp_s=ramp_s, window_s=meant - ramp_s, classes=classes)
        assert classes[name].requests == (3 if inside else 2)
        assert compare(classes, rescore(stored, requests, slo)) == []


def test_a_probe_without_its_raw_requests_is_counted(copy: ResultsFolder) -> None:
    shutil.rmtree(copy.trial_folder(WINNER, 2) / "probes")
    record = next(r for r in copy.trials() if (r.number, r.replicate) == (WINNER, 2))
    result = recompute(copy, copy.trials(), kept(copy).slo)
    assert result.without_requests == sum(len(capacity.probes) for capacity in record.capacities.values())
    assert result.differences == ()


# --- what it says -------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_names_the_flags(report: Report, page: str) -> None:
    assert report.decision == "improved"
    assert report.gain is not None
    assert report.headline.startswith(f"Improved: {report.gain.value:.2f} times")
    assert page.index(report.headline) < page.index('id="capacity"')
    assert "SIMULATED" in page
    assert "--max-num-seqs 256" in page
    assert [step.ref.number for step in report.path] == [0, 1, 3, 4]


def test_capacity_rows_hold_the_result_of_the_study(folder: ResultsFolder, report: Report) -> None:
    result = read_study(folder).result
    assert result is not None
    for row in report.classes:
        rates = result.rates[row.workload]
        assert row.baseline is not None
        assert row.best is not None
        assert row.baseline.value == pytest.approx(rates.baseline_rps)
        assert row.best.value == pytest.approx(rates.best_rps)
        assert row.gain == rates.gain
        assert [ref.replicate for ref in row.best_refs] == [2, 3, 4]


def test_a_flag_that_returns_to_the_default_and_one_without_proof_are_told_as_they_are(copy: ResultsFolder) -> None:
    study = read_study(copy)
    assert study.result is not None
    gain = Estimate(1.42, 1.31, 1.54, 3)
    effects_ = (FlagEffect("max-num-seqs", None, gain, True), FlagEffect("block-size", 32, gain, False))
    changed = replace(study.result, config={"block-size": 32}, effects=effects_)
    write_study(copy, replace(study, result=changed))
    written = load(copy)
    rows = {row.name: row for row in written.flags}
    assert (rows["max-num-seqs"].before, rows["max-num-seqs"].after) == (16, None)
    assert rows["block-size"].note == "not shown to matter; kept because leaving it out was not verified"
    assert "| `--max-num-seqs` | 16 | vLLM's default | 1.42× (1.31–1.54) |" in markdown(written)
    assert "--max-num-seqs 16 → vLLM" in html(written)
    write_study(copy, replace(study, result=replace(changed, config={}, dropped=("block-size",))))
    rows = {row.name: row for row in load(copy).flags}
    assert rows["block-size"].after is None
    assert rows["block-size"].note == "left out: 32 made no difference that could be shown"


def test_capacities_are_told_to_be_estimates_and_bounds_are_marked(copy: ResultsFolder, report: Report) -> None:
    for text in (markdown(report), html(report)):
        assert POINT_ESTIMATES in text
        assert ALONE in text
        assert "each class by itself" in text
    for record in copy.trials():
        if record.number == WINNER and record.round == 1:
            capacities = {name: replace(c, bound=Bound.ABOVE) for name, c in record.capacities.items()}
            copy.write_trial(replace(record, capacities=capacities))
    row = load(copy).classes[0]
    assert f"| ≥ {interval(row.best)} |" in markdown(load(copy))
    assert f"≥ {interval(row.best)}" in html(load(copy))


def test_what_does_not_run_is_listed_with_its_cause(report: Report) -> None:
    (row,) = report.trouble
    assert row.refs[0].number == 2
    assert "max_num_seqs" in row.cause
    seqs = next(knob for knob in report.knobs if knob.knob == "max-num-seqs")
    assert (seqs.ran, seqs.failed) == ((16, 64, 256), (4096,))


def test_the_time_adds_up_to_the_trials(report: Report) -> None:
    assert sum(report.time_s.values()) == pytest.approx(report.wall_s)


def test_the_front_holds_exactly_what_nothing_beats(report: Report) -> None:
    for point in report.pareto:
        rivals = [p for p in report.pareto if p.workload == point.workload]
        beaten = any(p.output_tps > point.output_tps and p.ttft_p99.value < point.ttft_p99.value for p in rivals)
        assert point.front is not beaten


def conclude(study: StudyFile, **changes: object) -> StudyFile:
    assert study.result is not None
    conclusion: Conclusion = replace(study.result.conclusion, **changes)
    return replace(study, result=replace(study.result, conclusion=conclusion))


def test_the_commands_to_reproduce_name_everything_that_was_asked(report: Report, folder: ResultsFolder) -> None:
    definition, space = read_study(folder).definition, kept(folder).space
    verify, again, _ = (build_parser().parse_args(shlex.split(line, comments=True)[1:]) for line in report.reproduce)
    assert verify.command == "verify"
    assert [word.partition("=")[0] for word in again.space] == [knob.name for knob in space.knobs]
    assert again.finish_rounds == str(definition.finish_rounds)
    assert again.trials == (None if definition.budget.trials is None else str(definition.budget.trials))
    assert (again.speed, again.seed) == (definition.speed, str(definition.seed))


@pytest.mark.parametrize("decision", list(Decision))
def test_every_verdict_can_be_reported(copy: ResultsFolder, decision: Decision) -> None:
    winner = {Decision.IMPROVED: WINNER, Decision.KEEP_DEFAULTS: 0, Decision.NO_FEASIBLE: None}[decision]
    write_study(copy, conclude(read_study(copy), decision=decision, winner=winner))
    written = load(copy)
    words = {"improved": "Improved", "keep-defaults": "Keep the baseline", "no-feasible": "No feasible configuration"}
    assert written.headline.startswith(words[str(decision)])
    for format_name in FORMATS:
        assert write(written, copy, format_name)[0].stat().st_size > 1000


def test_a_running_study_can_be_reported(copy: ResultsFolder) -> None:
    write_study(copy, replace(read_study(copy), result=None, plan=None))
    for record in copy.trials():
        if record.round is not None:
            shutil.rmtree(copy.trial_folder(record.number, record.replicate))
    written = load(copy)
    assert written.headline.startswith("No verdict yet")
    assert written.winner == WINNER
    assert 'class="verdict none"' in html(written)


def test_a_study_without_a_trial_can_be_reported(copy: ResultsFolder) -> None:
    write_study(copy, replace(read_study(copy), result=None, plan=None))
    shutil.rmtree(copy.root / "trials")
    written = load(copy)
    assert written.trials == ()
    assert "No verdict yet" in html(written)
    assert "No verdict yet" in markdown(written)


def test_a_probe_that_failed_requests_is_drawn_at_the_top(folder: ResultsFolder, report: Report) -> None:
    curve = report.curves[0]
    broken = replace(curve.baseline[-1], value_s=math.inf, low_s=None, high_s=None, failed=9)
    failing = replace(report, curves=(replace(curve, baseline=(*curve.baseline[:-1], broken)),))
    assert "requests failed" in figures(failing)["curve 0"]
    assert "| ∞ |" in markdown(failing)


# --- the page -----------------------------------------------------------------------------------------------------

VOID = {"wbr", "meta", "link", "br", "img", "hr", "input", "path", "use", "rect", "circle", "line"}


class Page(HTMLParser):
    """Collects ids and links, and fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [value for key, value in attrs if key in ("href", "src", "xlink:href") and value]
        self.scripts += tag == "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_every_link_leads_somewhere(page: str, folder: ResultsFolder) -> None:
    parsed = Page(page)
    assert parsed.scripts == 0
    assert len(parsed.ids) == len(set(parsed.ids))
    for link in parsed.links:
        if link.startswith("#"):
            assert link[1:] in parsed.ids
        elif not link.startswith("data:"):
            assert (folder.root / link).is_file(), link
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http" not in without_namespaces
    assert "@import" not in page


def test_every_replicate_has_its_row(page: str, report: Report) -> None:
    ids = Page(page).ids
    assert all(row.ref.anchor in ids for row in report.trials)


def test_colours_follow_the_theme(page: str) -> None:
    svg = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "var(--best)" in svg
    assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000"}  # nothing that would vanish on a dark page
    assert "prefers-color-scheme: dark" in page


def test_nothing_that_a_record_holds_can_break_the_page(copy: ResultsFolder) -> None:
    nasty = "</title><script>alert(1)</script>\"'|`\x00\x1b[31m\x9b"
    study = read_study(copy)
    write_study(copy, replace(study, definition=replace(study.definition, model=nasty), notes=(nasty,)))
    record = copy.trials()[0]
    copy.write_trial(replace(record, step=replace(record.step, reason=nasty), degraded=(nasty,)))
    written = load(copy)
    assert Page(html(written)).scripts == 0
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", html(written) + markdown(written))
    records = markdown(written).split("## Records")[1]
    rows = [line for line in records.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1


def test_links_lead_back_to_the_study_from_anywhere(copy: ResultsFolder, report: Report, tmp_path: Path) -> None:
    (path,) = write(report, copy, "html", tmp_path / "elsewhere" / "deep" / "r.html")
    links = [link for link in Page(path.read_text()).links if not link.startswith(("#", "data:"))]
    assert links
    assert all((path.parent / link).is_file() for link in links)


def test_links_lead_back_through_names_that_an_address_must_quote(copy: ResultsFolder, tmp_path: Path) -> None:
    moved = ResultsFolder(copy.root.rename(tmp_path / "a #1 (50%)?"))
    report = load(moved)
    (page,) = write(report, moved, "html", tmp_path / "r.html")
    (text,) = write(report, moved, "md", tmp_path / "r.md")
    links = [link for link in Page(page.read_text()).links if not link.startswith(("#", "data:"))]
    links += re.findall(r"\]\(([^)]*trial\.json)\)", text.read_text())
    assert len(links) > 10
    assert not [link for link in links if " " in link]
    assert all((tmp_path / unquote(urlsplit(link).path)).is_file() for link in links)


def test_json_holds_the_whole_report(report: Report, copy: ResultsFolder) -> None:
    (path,) = write(report, copy, "json")
    stored = dumps(report)
    assert "Infinity" in stored  # a number in Python's JSON alone
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found == json.loads(stored, parse_constant=lambda _: None)


def test_markdown_has_the_same_numbers(report: Report) -> None:
    text = markdown(report)
    assert f"**{report.headline}**" in text
    for row in report.classes:
        assert f"{interval(row.baseline)} | {interval(row.best)} | {ratio(row.gain)}" in text
    assert text.count("trials/0004-2/trial.json") > 3
    assert table(("a",), [("x|y\nz",)]) == "| a |\n| --- |\n| x\\|y z |"


# --- tables -------------------------------------------------------------------------------------------------------


def test_tables_hold_every_trial_probe_and_request(copy: ResultsFolder, report: Report) -> None:
    paths = write(report, copy, "csv")
    trials, probes, requests = (pd.read_csv(path) for path in paths)
    records = copy.trials()
    assert len(trials) == len(records)
    stored = [probe for record in records for c in record.capacities.values() for probe in c.probes]
    assert len(probes) == len(stored)
    assert len(requests) == sum(
        len(copy.requests(record, probe.requests_file))
        for record in records
        for capacity in record.capacities.values()
        for probe in capacity.probes
    )
    one = probes.iloc[0]
    mine = requests[
        (requests.number == one.number)
        & (requests.replicate == one.replicate)
        & (requests.requests_file == one.requests_file)
        & requests.scored
    ]
    assert len(mine) == one.requests
    assert mine.ttft_s.mean() == pytest.approx(one.ttft_mean_s)


def test_tables_have_their_columns_without_a_row(copy: ResultsFolder, report: Report) -> None:
    named = re.compile(r"\w+\.")  # `knob.NAME`: as they are met
    filled = [[*pd.read_csv(path, nrows=1).columns] for path in write(report, copy, "csv")]
    crashed = [replace(record, capacities={}, probes=()) for record in copy.trials()]
    for name, columns in zip(TABLES, filled, strict=True):
        fixed = [column for column in columns if not named.match(column)]
        for trials in ([], crashed):
            assert [c for c in trials_table(name, report, trials, copy).columns if not named.match(c)] == fixed


def test_every_column_is_documented(copy: ResultsFolder, report: Report) -> None:
    text = (DOCS / "report.md").read_text()
    documented = set(re.findall(r"`([\w.]+)`", text))
    for path in write(report, copy, "csv"):
        for column in pd.read_csv(path, nrows=1).columns:
            family = column.partition(".")[0]
            generic = re.sub(r"^(ttft|tpot|itl|e2e)_", "METRIC_", column)
            assert {column, f"{family}.NAME", generic} & documented, f"{path.name}: {column}"


def test_parquet_holds_the_same_as_csv(copy: ResultsFolder, report: Report) -> None:
    pytest.importorskip("pyarrow")
    for csv, parquet in zip(write(report, copy, "csv"), write(report, copy, "parquet"), strict=True):
        a, b = pd.read_csv(csv), pd.read_parquet(parquet)
        assert list(a.columns) == list(b.columns)
        assert len(a) == len(b)


def test_a_knob_of_several_types_becomes_text(copy: ResultsFolder) -> None:
    first, second = copy.trials()[:2]
    copy.write_trial(replace(first, config={**first.config, "max-model-len": "auto"}))
    copy.write_trial(replace(second, config={**second.config, "max-model-len": 8192}))
    written = load(copy)
    frame = trials_table("trials", written, copy.trials(), copy)
    assert set(frame["knob.max-model-len"].dropna()) == {"auto", "8192"}


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (8.567, "8.57"), (45.0, "45.0"), (1500.4, "1,500"), (math.inf, "∞")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(47.6, "48 s"), (190, "3 min 10 s"), (7500, "2 h 05 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_every_format(copy: ResultsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FORMAT_NAMES) == {*FORMATS, *TABLE_FORMATS}
    for name in ("html", "md", "json", "csv"):
        assert main(["report", str(copy.root), "--format", name]) == 0
        for line in capsys.readouterr().out.splitlines():
            assert Path(line).is_file()
    assert sorted(path.stem for path in (copy.root / "tables").iterdir()) == sorted(TABLES)


def test_a_folder_without_a_study_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == ExitCode.INPUT
    assert "holds no study.json" in capsys.readouterr().err


def test_what_was_odd_about_scored_probes_is_told_once_a_kind(copy: ResultsFolder) -> None:
    trials = list(copy.trials())
    number = next(i for i, record in enumerate(trials) if record.capacities)
    record = trials[number]
    name, capacity = next(iter(record.capacities.items()))
    notes = [f"{9 + i} of 90 requests left out: chat {i}: 300000 tokens exceed" for i in range(len(capacity.probes))]
    probes = tuple(replace(p, notes=(note,)) for p, note in zip(capacity.probes, notes, strict=True))
    trials[number] = replace(record, capacities={**record.capacities, name: replace(capacity, probes=probes)})
    report = build(material(copy, trials))
    told = [text for text in report.warnings if "left out" in text]
    assert len(told) == 1
    assert told[0].startswith(f"{name}: 9 of 90 requests left out: chat 0")
    assert f"in {len(probes) - 1} other probes" in told[0]
    assert "left out" in markdown(report)
    rows = [row for row in probe_rows(trials[number]) if row["notes"]]
    assert [row["notes"] for row in rows] == notes


def test_windows_of_a_screening_are_scored_time(copy: ResultsFolder) -> None:
    trials = list(copy.trials())
    number = next(i for i, record in enumerate(trials) if record.capacities)
    record = trials[number]
    moved = tuple(p for capacity in record.capacities.values() for p in capacity.probes)
    trials[number] = replace(record, capacities={}, probes=(*record.probes, *moved), state=TrialState.SCREENED)
    assert build(material(copy, trials)).time_s == build(material(copy)).time_s


def test_a_limit_that_no_request_defines_has_no_value_in_a_curve(copy: ResultsFolder) -> None:
    def undefined(metrics: ClassMetrics) -> ClassMetrics:
        limits = (replace(o, observed_s=0.0, share_within=Estimate(0.0, 0.0, 1.0, 0)) for o in metrics.limits)
        return replace(metrics, limits=tuple(limits))

    def without(record: TrialRecord) -> TrialRecord:
        found = {}
        for name, capacity in record.capacities.items():
            probes = (replace(p, classes={k: undefined(m) for k, m in p.classes.items()}) for p in capacity.probes)
            found[name] = replace(capacity, probes=tuple(probes))
        return replace(record, capacities=found)

    report = build(material(copy, [without(record) for record in copy.trials()]))
    assert report.curves
    assert all(not curve.baseline and not curve.best for curve in report.curves)


def test_a_study_that_names_fewer_classes_than_it_has_measured_is_reported(copy: ResultsFolder) -> None:
    study = material(copy)
    name = study.file.definition.workloads[0]
    short = replace(study.file.definition, workloads=(name,))
    report = build(replace(study, file=replace(study.file, definition=short)))
    assert [row.workload for row in report.classes] == [name]
    assert {curve.workload for curve in report.curves} == {name}
