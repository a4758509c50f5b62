"""The report as one HTML file that needs nothing else: styles and figures are in it, and it runs no script."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from tuner.export import ALONE
from tuner.failures import plain
from tuner.report import words
from tuner.report.figures import bars_svg, curve_svg, effects_svg, pareto_svg, timeline_svg
from tuner.report.model import Report
from tuner.report.quality import ABOUT, HEAD, cells


def html(report: Report, *, base: str = "") -> str:
    """`base` leads from where the page will lie to the study's folder, with a slash at its end unless empty."""
    environment = Environment(
        loader=PackageLoader("tuner.report", "templates"),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )
    environment.filters.update(
        {
            "number": words.number,
            "interval": words.interval,
            "ratio": words.ratio,
            "percent": words.percent,
            "duration": words.duration,
            "milliseconds": words.milliseconds,
            "value": words.value_text,
            "setting": words.setting_text,
            "rate": words.rate_text,
            "config": words.config_text,
        }
    )
    return environment.get_template("report.html").render(
        report=report,
        base=base,
        about_gains=ALONE,
        about_quality=ABOUT,
        quality_head=HEAD,
        quality_rows=tuple((row, cells(row.comparison)) for row in report.quality),
        figures={name: Markup(svg) for name, svg in figures(report).items()},
        workloads=tuple(dict.fromkeys(point.workload for point in report.pareto)),
    )


def _plain(value: object) -> object:
    """What a log or a server said may hold characters that no page may; markup of our own stays as it is."""
    return plain(value) if type(value) is str else value


def figures(report: Report) -> Mapping[str, str]:
    """Every figure as SVG by name (`curve 0`, `timeline`, …); left out where there is nothing to draw."""
    found = {f"curve {index}": curve_svg(curve) for index, curve in enumerate(report.curves)}
    if any(row.objective is not None for row in report.trials):
        found["timeline"] = timeline_svg(report.trials)
    if effects := effects_svg(report.flags):
        found["effects"] = effects
    for workload in dict.fromkeys(point.workload for point in report.pareto):
        found[f"pareto {workload}"] = pareto_svg([p for p in report.pareto if p.workload == workload], workload)
    if report.importance:
        found["importance"] = bars_svg(report.importance, "share of the objective's variance")
    if report.time_s:
        found["time"] = bars_svg(report.time_s, "time over all trials", seconds=True)
    return found
