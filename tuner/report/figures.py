"""Figures of a report as SVG text for inlining; colours are CSS variables of the page, so they follow its theme.

matplotlib draws with one fixed colour for every role; those are replaced by `var(--…)` in its output. It draws only
what it is given.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tuner.report.model import Curve, CurvePoint, FlagRow, ParetoPoint, TrialRow
from tuner.report.words import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, BASELINE, BEST, LIMIT, OTHER = (
    "#010101",
    "#020202",
    "#030303",
    "#040404",
    "#050505",
    "#060606",
    "#070707",
)
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    BASELINE: "--baseline",
    BEST: "--best",
    LIMIT: "--limit",
    OTHER: "--other",
}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
DECADE = 10.0
"""Beyond this factor between least and greatest latency the axis is logarithmic."""
WIDTH_IN, HEIGHT_IN = 5.4, 3.3
LEAST_BAR = 0.002
"""Bars shorter than this share of the longest cannot be seen and are left out."""
_BROKEN = "requests failed"


def curve_svg(curve: Curve) -> str:
    """Latency percentile over offered rate, baseline and best, with the limit and both capacities."""

    def draw(axes: Axes) -> None:
        finite = [p.value_s for p in (*curve.baseline, *curve.best) if math.isfinite(p.value_s)]
        top = 1.4 * max([curve.limit_s, *finite]) * 1000
        axes.axhline(curve.limit_s * 1000, color=LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            "SLO",
            (0.01, curve.limit_s * 1000),  # what breaks the promise lies on the right
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            color=LIMIT,
            fontsize=9,
        )
        for points, capacity, colour, marker, label in (
            (curve.baseline, curve.baseline_rps, BASELINE, "o", "baseline"),
            (curve.best, curve.best_rps, BEST, "s", "best"),
        ):
            if not points:
                continue
            _draw_points(axes, points, colour, marker, label, top)
            if capacity is not None:
                axes.axvline(capacity, color=colour, linewidth=1.0, linestyle=":")
        if any(math.isinf(point.value_s) for point in (*curve.baseline, *curve.best)):
            axes.plot([], [], "^", color=LIMIT, markersize=7, label=_BROKEN)  # one word for both colours
        if top / 1000 > DECADE * min([curve.limit_s, *finite]):
            from matplotlib.ticker import LogLocator

            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter(lambda value, _: "")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylim(top=top)
        axes.yaxis.set_major_formatter(_plain)
        axes.set_xlabel("offered rate, requests/s")
        axes.set_ylabel(f"{curve.metric.upper()} P{curve.percentile:g}, ms")
        _legend(axes)

    return _svg(draw, name=f"curve {curve.workload} {curve.metric} {curve.percentile:g}")


def _draw_points(axes: Axes, points: Sequence[CurvePoint], colour: str, marker: str, label: str, top: float) -> None:
    good = [point for point in points if math.isfinite(point.value_s)]
    rates = [point.rate_rps for point in good]
    values = [point.value_s * 1000 for point in good]
    low = [0.0 if point.low_s is None else max(0.0, point.value_s - point.low_s) * 1000 for point in good]
    high = [0.0 if point.high_s is None else max(0.0, point.high_s - point.value_s) * 1000 for point in good]
    axes.errorbar(
        rates, values, yerr=(low, high), fmt=marker, color=colour, markersize=5, elinewidth=1, capsize=2, label=label
    )
    broken = [point.rate_rps for point in points if not math.isfinite(point.value_s)]
    if broken:
        axes.plot(broken, [top / 1.15] * len(broken), "^", color=colour, markersize=7, clip_on=False)


def timeline_svg(trials: Sequence[TrialRow]) -> str:
    """The objective of every trial in the order of running, and the best of the search so far."""
    valued = [(index, row) for index, row in enumerate(trials) if row.objective is not None]

    def draw(axes: Axes) -> None:
        axes.axhline(1.0, color=BASELINE, linewidth=1.0, linestyle=":")
        best, steps = 0.0, []
        for index, row in valued:
            if row.round is None and row.objective is not None:
                best = max(best, row.objective.value)
                steps.append((index, best))
        for finish, colour, marker, label in ((False, OTHER, "o", "search"), (True, BEST, "s", "finish")):
            chosen = [(i, row.objective) for i, row in valued if (row.round is not None) is finish and row.objective]
            if not chosen:
                continue
            values = [estimate.value for _, estimate in chosen]
            spread = (
                [estimate.value - estimate.low for _, estimate in chosen],
                [estimate.high - estimate.value for _, estimate in chosen],
            )
            axes.errorbar(
                [i for i, _ in chosen],
                values,
                yerr=spread,
                fmt=marker,
                color=colour,
                markersize=5,
                elinewidth=1,
                capsize=2,
                label=label,
            )
        if steps:
            axes.step(*zip(*steps, strict=True), where="post", color=BEST, linewidth=1.2, label="best of the search")
        gone = [index for index, row in enumerate(trials) if row.objective is None]
        if gone:
            axes.plot(
                gone, [0.02] * len(gone), "x", color=LIMIT, transform=axes.get_xaxis_transform(), label="not measured"
            )
        axes.set_xticks(range(len(trials)), [str(row.ref.number) for row in trials])
        if len(trials) > 30:
            axes.set_xticks(range(0, len(trials), math.ceil(len(trials) / 30)))
        axes.set_xlabel("trial, in the order of running")
        axes.set_ylabel("capacity ÷ baseline's")
        _legend(axes)

    return _svg(draw, name="timeline", width=2 * WIDTH_IN, height=3.6)


def effects_svg(flags: Sequence[FlagRow]) -> str:
    """Capacity with each flag ÷ without it, with 95 % intervals; empty where no effect was measured."""
    shown = [(flag, flag.effect) for flag in flags if flag.effect is not None]
    if not shown:
        return ""

    def draw(axes: Axes) -> None:
        for position, (flag, effect) in enumerate(reversed(shown)):
            assert effect is not None
            colour = BEST if flag.kept else OTHER
            high = min(effect.high, effect.value * 20)
            axes.errorbar(
                [effect.value],
                [position],
                xerr=([effect.value - effect.low], [high - effect.value]),
                fmt="s" if flag.kept else "o",
                color=colour,
                markersize=6,
                elinewidth=1.4,
                capsize=3,
            )
        axes.axvline(1.0, color=BASELINE, linewidth=1.0, linestyle=":")
        axes.set_yticks(range(len(shown)), [f"--{flag.name}" for flag, _ in reversed(shown)])
        axes.set_ylim(-0.7, len(shown) - 0.3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("capacity with the flag ÷ without it")

    return _svg(draw, name="effects", width=1.5 * WIDTH_IN, height=1.1 + 0.42 * len(shown))


def pareto_svg(points: Sequence[ParetoPoint], workload: str) -> str:
    """TTFT P99 over output tokens/s at each trial's fastest rate within the SLO."""

    def draw(axes: Axes) -> None:
        for role, colour, marker, label in (
            ("", OTHER, "o", "other trials"),
            ("baseline", BASELINE, "o", "baseline"),
            ("best", BEST, "s", "best"),
        ):
            chosen = [point for point in points if point.role == role]
            if chosen:
                axes.plot(
                    [point.output_tps for point in chosen],
                    [point.ttft_p99.value * 1000 for point in chosen],
                    marker,
                    color=colour,
                    markersize=6,
                    label=label,
                )
        front = sorted((p.output_tps, p.ttft_p99.value * 1000) for p in points if p.front)
        axes.step(*zip(*front, strict=True), where="post", color=MUTED, linewidth=1.0, label="Pareto front")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_plain)
        axes.xaxis.set_major_formatter(_plain)
        axes.set_xlabel("output tokens/s")
        axes.set_ylabel("TTFT P99, ms")
        _legend(axes)

    return _svg(draw, name=f"pareto {workload}")


def bars_svg(shares: Mapping[str, float], label: str, *, seconds: bool = False) -> str:
    """Horizontal bars, largest on top; values are shares (0..1), or seconds."""

    def draw(axes: Axes) -> None:
        visible = {name: value for name, value in shares.items() if value >= LEAST_BAR * max(shares.values())}
        ordered = sorted(visible.items(), key=lambda item: item[1])
        bars = axes.barh([name for name, _ in ordered], [value for _, value in ordered], color=OTHER, height=0.6)
        texts = [duration(value) if seconds else f"{value:.0%}" for _, value in ordered]
        axes.bar_label(bars, texts, padding=4, color=INK, fontsize=9)
        axes.set_xlim(right=1.25 * max(value for _, value in ordered))
        axes.set_xticks([])  # every bar says its value
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
        axes.set_xlabel(label)

    return _svg(draw, name=label, width=1.5 * WIDTH_IN, height=1.0 + 0.36 * len(shares))


def _plain(value: float, _: float) -> str:
    return f"{value:,.10g}"


def _legend(axes: Axes) -> None:
    """Above the axes, where it hides no point."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.2, columnspacing=1.2)


def _svg(draw: Callable[[Axes], None], *, name: str, width: float = WIDTH_IN, height: float = HEIGHT_IN) -> str:
    """Run `draw` on fresh axes and return the figure as an `<svg>` element without ids that another could share."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(mpl.RcParams({**_STYLE, "svg.hashsalt": name})):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    referred = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in referred else "", svg)
    prefix = re.sub(r"\W+", "-", name)
    svg = re.sub(r'((?:id="|url\(#|href="#))(?=[\w-]+)', rf"\g<1>{prefix}-", svg)
    # The size stays as the largest; the page lets it shrink.
    sized = r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"'
    return re.sub(sized, r'\1 style="max-width: \2pt"', svg, count=1).strip()
