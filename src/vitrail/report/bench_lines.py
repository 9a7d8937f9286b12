"""Pictures of a sweep that are lines: over ranks and over batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_cells import WORDS
from vitrail.report.bench_style import (
    BROKEN,
    COLOURS,
    MARKERS,
    MOST_LINES,
    make_figure,
    name_panel,
    put_legend,
    scale_counts,
    scale_rates,
)
from vitrail.report.plots import FAINT, RED
from vitrail.report.units import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = dict[str, Any]


def draw_scaling(lines: Sequence[Line], kind: str) -> Figure | None:
    """Throughput with the ideal, efficiency and memory over ranks; of each strategy the fastest line."""
    lines = _choose(lines)
    if not lines:
        return None
    figure, (speed, share, memory) = make_figure(f"{kind.capitalize()} scaling", 3.6, (1.15, 1, 1))
    first = max((line["points"][0] for line in lines), key=lambda point: point["samples_per_s"] / point["gpus"])
    counts = [point["gpus"] for line in lines for point in line["points"] + line["broken"]]
    ends = [min(counts), max(counts)]
    ideal = [first["samples_per_s"] / first["gpus"] * count for count in ends]
    speed.plot(ends, ideal, "--", color=FAINT, linewidth=1.2, label="ideal")
    share.axhline(100, linestyle="--", color=FAINT, linewidth=1.2)
    for place, line in enumerate(lines):
        style = _style(place)
        x = [point["gpus"] for point in line["points"]]
        _plot_spread(speed, x, line["points"], style, line["label"])
        share.plot(x, [100 * point["efficiency"] for point in line["points"]], **style)
        memory.plot(x, [point["memory_gib"] for point in line["points"]], **style)
        _mark_broken(memory, line["broken"], "gpus", place, style["color"])
    points = [point for line in lines for point in line["points"]]
    scale_rates(speed, [point[name] for point in points for name in ("samples_per_s", "low", "high")] + ideal)
    for ax, name in ((speed, "samples/s"), (share, "efficiency, % of ideal"), (memory, "peak memory of a rank, GiB")):
        name_panel(ax, name)
        scale_counts(ax, counts, "ranks")
    share.set_ylim(0, max(110, *(105 * point["efficiency"] for line in lines for point in line["points"])))
    _from_zero(memory)
    _finish(figure, speed, lines)
    return figure


def draw_batches(lines: Sequence[Line], work: str, unit: str) -> Figure | None:
    """Throughput, MFU and memory over the batch."""
    lines = _choose(lines)
    if not lines:
        return None
    known = any(math.isfinite(number_of(point["mfu"])) for line in lines for point in line["points"])
    panels = [("samples_per_s", "samples/s", 1.0), ("mfu", "MFU, %", 100.0), ("memory_gib", "peak memory, GiB", 1.0)]
    panels = [panel for panel in panels if known or panel[0] != "mfu"]
    title = f"Throughput{', MFU' if known else ''} and memory against the batch" + (f": {work}" if work else "")
    figure, axes = make_figure(title, 3.7, [1] * len(panels))
    sizes = [point["batch"] for line in lines for point in line["points"] + line["broken"]]
    for ax, (field, name, factor) in zip(axes, panels, strict=True):
        falls: list[tuple[float, float]] = []
        for place, line in enumerate(lines):
            style = _style(place)
            x = [point["batch"] for point in line["points"]]
            if field == "samples_per_s":
                _plot_spread(ax, x, line["points"], style, line["short"])
                falls += [(p["batch"], p["samples_per_s"]) for p in line["points"] if p["falls"]]
            else:
                ax.plot(x, [factor * number_of(point[field]) for point in line["points"]], **style)
            _mark_broken(ax, line["broken"], "batch", place, style["color"])
        if falls:
            name_falls = "falls, outside the spread"
            ax.plot(*zip(*falls, strict=True), "o", color=RED, fillstyle="none", markersize=11, label=name_falls)
        name_panel(ax, name)
        scale_counts(ax, sizes, f"batch{unit}")
        _from_zero(ax)
    _finish(figure, axes[0], lines)
    return figure


def _choose(lines: Sequence[Line]) -> list[Line]:
    """Of each strategy the fastest line first, then the rest, as many as can be told apart; in their own order."""

    def top(line: Line) -> float:
        return max(point["samples_per_s"] for point in line["points"])

    seen: dict[Any, int] = {}
    ranked = []
    for line in sorted(lines, key=top, reverse=True):
        turn = seen[line.get("strategy")] = seen.get(line.get("strategy"), 0) + 1
        ranked.append((turn, -top(line), line))
    kept = [id(line) for _, _, line in sorted(ranked, key=lambda entry: entry[:2])[:MOST_LINES]]
    return [line for line in lines if id(line) in kept]


def _style(place: int) -> dict[str, Any]:
    return {
        "color": COLOURS[place],
        "marker": MARKERS[place],
        "linestyle": ("-", (0, (5, 1.5)))[place % 2],
        "linewidth": 1.5,
        "markersize": 4.5,
    }


def _plot_spread(ax: Axes, x: Sequence[float], points: Sequence[Line], style: dict[str, Any], label: str) -> None:
    """A line with the quartiles of the windows."""
    y = [point["samples_per_s"] for point in points]
    below = [max(0.0, v - point["low"]) for v, point in zip(y, points, strict=True)]
    above = [max(0.0, point["high"] - v) for v, point in zip(y, points, strict=True)]
    ax.errorbar(x, y, yerr=[below, above], capsize=2.5, elinewidth=1, label=label, **style)


def _mark_broken(ax: Axes, broken: Sequence[Line], axis: str, place: int, colour: str) -> None:
    """What was not measured: a mark at the foot of the panel, one row a line."""
    for one in broken:
        marker, _ = BROKEN[one["status"]]
        where = ax.get_xaxis_transform()
        ax.plot(
            one[axis], 0.04 + 0.045 * place, marker, color=colour, markersize=6, markeredgewidth=1.6, transform=where
        )


def _from_zero(ax: Axes) -> None:
    drawn: Any = [line.get_ydata() for line in ax.get_lines()]
    tops = [float(value) for values in drawn for value in values if math.isfinite(value)]
    ax.set_ylim(0, 1.12 * max(tops, default=1.0) or 1.0)


def _finish(figure: Figure, ax: Axes, lines: Sequence[Line]) -> None:
    """The legend, with the marks of what was not measured."""
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    for status, (marker, _) in BROKEN.items():
        if any(one["status"] == status for line in lines for one in line["broken"]):
            handles.append(Line2D([], [], color=FAINT, marker=marker, linestyle="", markeredgewidth=1.6))
            labels.append(WORDS[status])
    put_legend(figure, handles, labels)
