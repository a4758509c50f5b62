"""A night as Markdown for a pull request, as JUnit XML for CI and as JSON for programs; it decides nothing."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from tuner.comparison import Contrast
from tuner.nightly.level import Change, objectives
from tuner.nightly.record import Night, SideRuns, State

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

WORDS = {
    State.QUIET: "✅ quiet",
    State.SUSPECTED: "🟡 suspected: a loss that is not beyond doubt; nothing is reported yet",
    State.REGRESSED: "🔴 regressed",
}


def markdown(profile: str, night: Night, notes: Sequence[str] = ()) -> str:
    """The summary: verdict, events, capacities, what changed, what was searched."""
    facts = night.environment
    lines = [
        f"## vLLM nightly `{profile}` – night {night.number}: {WORDS[night.state]}",
        "",
        f"vLLM {facts.vllm_version} on {' + '.join(facts.gpus) or facts.cpu}, {night.wall_s / 60:.0f} min of "
        f"measurement, incumbent {incumbent_text(night)}",
    ]
    if night.simulated:
        lines += ["", "**SIMULATED: it says nothing about vLLM.**"]
    lines += [*([""] if night.events else []), *(f"- **{event.kind}**: {event.text}" for event in night.events)]
    lines += ["", *_capacity_table(night)]
    if night.drift:
        lines += ["", "Changed since the night before:", *(f"- {item}" for item in night.drift)]
    if night.version is not None:
        lines += ["", f"The other vLLM ({night.sides[-1].vllm_version}) is {_stands(night.version)}."]
    if night.searched is not None:
        reasons = ", ".join(night.searched.reasons)
        lines += ["", f"Searched ({reasons}): {night.searched.trials} configurations, {night.searched.verdict}."]
    if night.candidate is not None:
        word = "promoted" if night.candidate.promoted else "not promoted"
        flags = " ".join(f"`--{n} {v}`" for n, v in night.candidate.config.items()) or "defaults"
        lines += [f"Candidate {flags}: {_stands(night.candidate.contrast)} – {word}."]
    if night.accepted:
        lines += ["", "Tonight's level was accepted as the new reference."]
    lines += ["", *(f"> {note}" for note in (*night.notes, *notes))]
    return "\n".join(lines).rstrip() + "\n"


def junit(profile: str, night: Night) -> str:
    """One suite; a regression is a failure, a suspicion is skipped (CI stays green), anything else passes."""
    suite = ElementTree.Element("testsuite", name=f"vllm-tune nightly {profile}", time=f"{night.wall_s:.1f}")
    lost = [event for event in night.events if event.kind == "regression"]
    case = _case(suite, "incumbent", "capacity", night)
    if night.state is State.REGRESSED:
        text = lost[0].text if lost else "; ".join(night.notes) or "a loss that was reported before still stands"
        ElementTree.SubElement(case, "failure", message=text, type="regression").text = text
    elif night.state is State.SUSPECTED:
        ElementTree.SubElement(case, "skipped", message="a loss is suspected, but not beyond doubt")
    if night.version is not None:
        case = _case(suite, "version", night.sides[-1].vllm_version, night)
        if night.version.standing == "worse":
            text = _stands(night.version)
            ElementTree.SubElement(case, "failure", message=text, type="version").text = text
    if night.searched is not None:
        _case(suite, "search", night.searched.verdict, night)
    if night.candidate is not None:
        _case(suite, "promotion", "promoted" if night.candidate.promoted else "not promoted", night)
    cases = list(suite)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    suite.set("errors", "0")
    out = ElementTree.SubElement(suite, "system-out")
    out.text = _valid(markdown(profile, night))
    for element in suite.iter():
        for name, value in element.attrib.items():
            element.set(name, _valid(value))
        if element.text:
            element.text = _valid(element.text)
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def incumbent_text(night: Night) -> str:
    flags = " ".join(f"`--{name} {value}`" for name, value in night.config.items()) or "vLLM's defaults"
    return f"{night.incumbent} ({flags})"


def _capacity_table(night: Night) -> list[str]:
    """SLO capacity, requests/s: geometric means of tonight's runs, and the incumbent against the nights before."""
    names = [side.name for side in night.sides]
    lines = [
        f"| SLO capacity, requests/s | {' | '.join(names)} | against the nights before |",
        f"|---|{'---:|' * len(names)}---|",
    ]
    for workload in night.weights:
        cells = [_rate(side, workload) for side in night.sides]
        change = night.changes.get(workload if len(night.weights) > 1 else "overall")
        lines.append(f"| {workload} | {' | '.join(cells)} | {_changed(change)} |")
    if len(night.weights) == 1:
        return lines
    cells = [_overall(side, night) for side in night.sides]
    lines.append(f"| **all** | {' | '.join(cells)} | {_changed(night.changes.get('overall'))} |")
    return lines


def _rate(side: SideRuns, workload: str) -> str:
    values = [run[workload] for run in side.values if workload in run]
    if not values:
        return side.failure or "–"
    mark = "≥ " if workload in side.at_least else ""
    return f"{mark}{_mean(values):.3g} ({min(values):.3g} to {max(values):.3g}, n = {len(values)})"


def _overall(side: SideRuns, night: Night) -> str:
    values = objectives(side.values, night.weights)
    return f"{_mean(values):.3g}" if values else side.failure or "–"


def _changed(change: Change | None) -> str:
    if change is None:
        return "no nights before"
    return f"{change.effect:+.1%} (95 %: {change.low:+.1%} to {change.high:+.1%}), {change.nights} nights"


def _stands(contrast: Contrast) -> str:
    if contrast.ratio is None:
        return f"{contrast.standing}: {contrast.reason}"
    ratio = contrast.ratio
    return f"{contrast.standing}: {ratio.value:.3f} times (95 %: {ratio.low:.3f} to {ratio.high:.3f}, n = {ratio.n})"


def _case(suite: ElementTree.Element, group: str, name: str, night: Night) -> ElementTree.Element:
    return ElementTree.SubElement(
        suite, "testcase", classname=f"nightly.{group}", name=name, time=f"{night.wall_s:.1f}"
    )


def _valid(text: str) -> str:
    """Without the characters that XML 1.0 has no way to write (section 2.2)."""
    return _FORBIDDEN.sub("", text)


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
