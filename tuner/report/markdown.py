"""The report as Markdown: the same numbers as the HTML, with tables where that has figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.export import ALONE
from tuner.failures import plain
from tuner.report.model import Curve, CurvePoint, Ref, Report
from tuner.report.quality import ABOUT, HEAD, cells
from tuner.report.words import (
    config_text,
    duration,
    interval,
    number,
    percent,
    rate_text,
    ratio,
    setting_text,
    value_text,
)


def markdown(report: Report, *, base: str = "") -> str:
    """`base` leads from where the text will lie to the study's folder, with a slash at its end unless empty."""
    sections = [
        _verdict(report),
        _capacity(report, base),
        _flags(report, base),
        _quality(report, base),
        _findings(report, base),
        _search(report, base),
        _pareto(report, base),
        _trouble(report, base),
        _time(report),
        _environment(report),
        _records(report, base),
    ]
    return plain("\n\n".join(section for section in sections if section)) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; cells are escaped so that no content can break it."""
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return plain(str(value)).replace("|", "\\|").replace("\n", " ")


def _link(ref: Ref, base: str) -> str:
    name = f"{ref.number}.{ref.replicate}" if ref.replicate else str(ref.number)
    return f"[{name}]({base}{ref.path})"


def _verdict(report: Report) -> str:
    facts = report.environment
    lines = [f"# {report.definition.model}", f"**{report.headline}**"]
    lines += [f"> {warning}" for warning in report.warnings]
    lines.append(f"Study {report.definition.name}, vLLM {facts.vllm_version} on {' + '.join(facts.gpus) or facts.cpu}.")
    if report.decision:
        noise = "" if report.noise is None else f" One run differs from the next by {percent(report.noise)} (sd)."
        lines.append(f"{report.rounds} interleaved rounds on fresh servers with unseen requests.{noise}")
    if report.winner_config:
        lines.append(
            f"{'Flags to deploy' if report.decision else 'Best so far, not verified'}: `"
            + " ".join(f"--{name} {value_text(value)}" for name, value in report.winner_config.items())
            + "`"
        )
    returned = [flag for flag in report.flags if flag.kept and flag.after is None]
    lines += [f"`--{flag.name} {value_text(flag.before)} → vLLM's default`" for flag in returned]
    return "\n\n".join(lines)


def _capacity(report: Report, base: str) -> str:
    said = report.wording
    rates = (f"baseline, {said.unit}", f"best, {said.unit}", "best ÷ baseline, each class by itself")
    head = ("class", "SLO", "weight", *rates, "regret", "trials")
    rows = [
        (
            row.workload,
            ", ".join(row.limits),
            percent(row.weight),
            rate_text(row.baseline),
            rate_text(row.best),
            ratio(row.gain),
            "–" if row.regret is None else percent(row.regret),
            ", ".join(_link(ref, base) for ref in dict.fromkeys((*row.baseline_refs, *row.best_refs))),
        )
        for row in report.classes
    ]
    note = (
        f"{said.about} Ranges are the least and greatest over the replicates that count; ≥ and ≤ mark what is only a "
        f"bound. Gains carry 95 % intervals. {ALONE}"
    )
    title = f"## {said.short.capitalize()} by class"
    return "\n\n".join([title, table(head, rows), note, *(_curve(c, base) for c in report.curves)])


def _curve(curve: Curve, base: str) -> str:
    title = f"### {curve.workload}: {curve.metric.upper()} P{curve.percentile:g}, limit {curve.limit_s * 1000:g} ms"
    points = [("baseline", p) for p in curve.baseline] + [("best", p) for p in curve.best]
    rows = [
        (who, number(p.rate_rps), number(p.value_s * 1000), _range(p), p.requests, p.failed, _link(p.ref, base))
        for who, p in points
    ]
    return title + "\n\n" + table(("", "requests/s", "ms", "95 %", "requests", "failed", "record"), rows)


def _range(point: CurvePoint) -> str:
    if point.low_s is None:
        return "–"
    high = "∞" if point.high_s is None else number(point.high_s * 1000)
    return f"{number(point.low_s * 1000)}–{high}"


def _flags(report: Report, base: str) -> str:
    if not report.flags:
        return "## What each flag changed\n\nNo flag is worth changing." if report.decision else ""
    rows = [
        (
            f"`--{flag.name}`",
            setting_text(flag.before),
            setting_text(flag.after),
            ratio(flag.effect),
            flag.effect.n if flag.effect else "–",
            flag.note,
            ", ".join(_link(ref, base) for ref in flag.refs),
        )
        for flag in report.flags
    ]
    head = ("flag", "baseline", "best", f"{report.wording.short} with ÷ without (95 %)", "runs", "", "without it")
    return "## What each flag changed\n\n" + table(head, rows)


def _quality(report: Report, base: str) -> str:
    if not report.quality:
        return ""
    rows = [(_link(row.ref, base), row.change, *cells(row.comparison)) for row in report.quality]
    return f"## Do the answers stay the same\n\n{ABOUT}\n\n" + table(HEAD, rows)


def _findings(report: Report, base: str) -> str:
    if not report.findings:
        return ""
    rows = [
        (
            f.role,
            f.workload,
            number(f.rate_rps),
            f"**{f.name}**: {f.explanation}",
            f"{f.confidence * 100:.0f} %",
            "; ".join(f.evidence),
            _link(f.ref, base),
        )
        for f in report.findings
    ]
    head = ("configuration", "class", "at, requests/s", "limit", "confidence", "evidence", "record")
    return "## What limits it\n\n" + table(head, rows)


def _search(report: Report, base: str) -> str:
    parts = ["## The search, one change at a time"]
    if len(report.path) > 1:
        rows = [
            (
                _link(step.ref, base),
                step.change,
                step.reason,
                ratio(step.objective),
                "–" if step.factor is None else f"{step.factor:.2f}×",
            )
            for step in report.path
        ]
        parts.append(table(("trial", "change", "why", "objective", "÷ the step before"), rows))
    if report.importance:
        parts.append(table(("knob", "share of the objective's variance"), _shares(report.importance)))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _shares(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(f"`--{name}`", percent(share)) for name, share in sorted(shares.items(), key=lambda item: -item[1])]


def _pareto(report: Report, base: str) -> str:
    rows = [
        (
            p.workload,
            _link(p.ref, base),
            p.role,
            number(p.rate_rps),
            number(p.output_tps),
            f"{number(p.ttft_p99.value * 1000)} ({number(p.ttft_p99.low * 1000)}–{number(p.ttft_p99.high * 1000)})",
            "yes" if p.front else "",
        )
        for p in report.pareto
    ]
    if not rows:
        return ""
    head = ("class", "trial", "", "requests/s", "output tokens/s", "TTFT P99, ms (95 %)", "on the Pareto front")
    title = "## TTFT and throughput\n\nEach trial at the fastest rate at which a probe kept the SLO."
    return f"{title}\n\n{table(head, rows)}"


def _trouble(report: Report, base: str) -> str:
    if not report.trouble:
        return ""
    rows = [
        (
            f"{row.kind} ({row.verdict})",
            f"{row.explanation} `{row.cause}`",
            row.remedy,
            "; ".join(f"`{config}`" for config in row.configs),
            ", ".join(_link(ref, base) for ref in row.refs),
        )
        for row in report.trouble
    ]
    values = [
        (f"`--{knob.knob}`", ", ".join(map(value_text, knob.ran)), ", ".join(map(value_text, knob.failed)))
        for knob in report.knobs
    ]
    return "\n\n".join(
        [
            "## What does not run, and why",
            table(("what happened", "cause", "remedy", "configurations", "records"), rows),
            table(("knob", "ran", "only in configurations that did not run"), values),
        ]
    )


def _time(report: Report) -> str:
    rows = [(name, duration(seconds)) for name, seconds in sorted(report.time_s.items(), key=lambda item: -item[1])]
    gpus = f", {number(report.gpu_s / 3600)} GPU hours" if report.definition.gpus else ""
    return f"## Where the time went\n\n{duration(report.wall_s)} of trials{gpus}.\n\n" + table(("phase", "time"), rows)


def _environment(report: Report) -> str:
    facts, definition = report.environment, report.definition
    driver = f", driver {facts.driver}, CUDA {facts.cuda}" if facts.driver else ""
    how = f"objective {definition.objective}, speed {definition.speed}, seed {definition.seed}"
    rows = [
        ("vLLM", facts.vllm_version),
        ("GPU", (" + ".join(facts.gpus) or "none") + driver),
        ("host", f"{facts.cpu}, {facts.cpu_count} CPUs, {number(facts.memory_bytes / 2**30)} GiB, {facts.platform}"),
        ("Python", facts.python_version),
        ("fixed flags", config_text(definition.fixed) if definition.fixed else "none"),
        ("baseline", config_text(definition.baseline)),
        ("tuner", f"vllm-tune {definition.tuner_version}, {how}"),
        ("digests", ", ".join(f"{name} `{digest[:12]}`" for name, digest in _digests(report).items())),
    ]
    commands = "\n".join(report.reproduce)
    notes = "".join(f"\n\nNote: {note}" for note in report.notes)
    text = table(("", ""), rows)
    return f"## Environment and how to reproduce\n\n{text}\n\n```\n{commands}\n```{notes}"


def _digests(report: Report) -> dict[str, str]:
    definition = report.definition
    digests = {"environment": report.environment.digest, "SLO": definition.slo_digest, "space": definition.space_digest}
    return {**digests, **definition.workload_digests}


def _records(report: Report, base: str) -> str:
    names = report.definition.workloads
    rows = [
        (
            _link(row.ref, base),
            row.change + ("" if row.round is None else f" ({row.kind}, round {row.round + 1})"),
            row.reason,
            row.state + (f": {row.failure}" if row.failure else ""),
            ratio(row.objective),
            *(interval(row.rates.get(name)) for name in names),
            duration(row.duration_s),
        )
        for row in report.trials
    ]
    head = ("trial", "step", "why", "outcome", "objective", *(f"{name}, requests/s" for name in names), "time")
    return "## Records\n\nEvery number above comes from these records.\n\n" + table(head, rows)
