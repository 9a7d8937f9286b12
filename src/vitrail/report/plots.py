"""Curves of a run as small SVG pictures: lines of metrics in, one picture out, None where there is nothing to draw.

All pictures share one size and one style, so that a page can set them side by side. Text stays text, in the reader's
own sans-serif. Long runs are thinned to their extremes per stretch, so that a spike is never lost.
"""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vitrail.report.metrics import Line, name_metric, select, series
from vitrail.report.units import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE = "#1f2933", "#616e7c", "#d9dfe6"
BLUE, ORANGE, GREEN, RED, PALE = "#1f6feb", "#d9730d", "#1a7f5a", "#c0362c", "#b9d2f8"
_SIZE = (4.6, 2.55)  # inches; at 96 pixels an inch this is 442 pixels wide
_FONT = 8.5
_MOST_POINTS = 600
_MOST_CLASSES = 8  # with a name each; of more, the lowest few are named
_FAMILY = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
_ROUND = [1, 2, 2.5, 5, 10]  # ticks at these times a power of ten
_LOCK = threading.Lock()  # matplotlib's settings are global while a picture is written


def loss_curve(lines: Sequence[Line]) -> str | None:
    """Training loss as logged and smoothed, and the loss of each evaluation."""
    train, evals = select(lines, "train"), select(lines, "eval")
    steps, losses = series(train, "loss")
    eval_steps, eval_losses = series(_unfold(evals), "loss")
    if not steps and not eval_steps:
        return None
    figure, ax = _make_axes("Loss", lines)
    if steps:
        style = "o" if len(steps) == 1 else "-"
        long = len(steps) >= 20
        colour, width = (PALE, 1.0) if long else (BLUE, 1.5)
        ax.plot(*_thin(steps, losses), style, color=colour, linewidth=width, markersize=4, label="train")
        if long:
            ax.plot(*_thin(steps, _smooth(losses)), color=BLUE, linewidth=1.7, label="train, smoothed")
    if eval_steps:
        ax.plot(*_thin(eval_steps, eval_losses), "o", color=ORANGE, markersize=4, label="evaluation", zorder=4)
    _scale_losses(ax, losses + eval_losses)
    broken = [number_of(line.get("step")) for line in train if not math.isfinite(number_of(line.get("loss")))]
    for step in broken[:200]:
        ax.plot(step, 0.02, "|", color=RED, transform=ax.get_xaxis_transform(), markersize=7)
    if broken:
        ax.plot([], [], "|", color=RED, label="not finite")
    _put_legend(ax, place="best")
    return save_svg(figure)


def eval_against_mean(lines: Sequence[Line]) -> str | None:
    """Squared error on hidden voxels beside their variance, which is the error of predicting the mean."""
    evals = select(lines, "eval")
    figure, ax = _make_axes("Evaluation: error on hidden voxels", lines)
    values: list[float] = []
    for weights, colour in (("ema", BLUE), ("raw", GREEN)):
        some = _unfold([line for line in evals if (line.get("weights") or "raw") == weights])
        steps, errors = series(some, "mse")
        if steps:
            name = "averaged weights" if weights == "ema" else "weights"
            label = f"mean squared error, {name}"
            ax.plot(*_thin(steps, errors), "o-", color=colour, markersize=3.5, linewidth=1.6, label=label)
            values += errors
    steps, variances = series(_unfold(evals), "variance")
    if not values or not steps:
        return None
    ax.plot(*_thin(steps, variances), "--", color=FAINT, linewidth=1.3, label="predicting the mean (variance)")
    if len(steps) == 1:
        ax.axhline(variances[0], linestyle="--", color=FAINT, linewidth=1.3)
    ax.set_ylim(0, 1.45 * max(values + variances, default=1.0) or 1.0)
    ax.set_ylabel("squared value", color=FAINT)
    _put_legend(ax)
    return save_svg(figure)


def score(lines: Sequence[Line]) -> str | None:
    """The metric that the best checkpoint is chosen by, and where it was best; losses have curves of their own."""
    name, larger = _best_metric(lines)
    evals = select(lines, "eval")
    if name in (None, "loss") or any("mse_over_variance" in row for row in _unfold(evals)):
        return None
    label = name_metric(name)
    figure, ax = _make_axes(f"Evaluation: {label}", lines)
    points: list[tuple[float, float]] = []
    for weights, colour in (("raw", GREEN), ("ema", BLUE)):
        steps, values = series(_unfold([e for e in evals if (e.get("weights") or "raw") == weights]), name)
        if steps:
            kind = "averaged weights" if weights == "ema" else "weights"
            ax.plot(*_thin(steps, values), "o-", color=colour, markersize=3.5, linewidth=1.6, label=kind)
            points += zip(steps, values, strict=True)
    if not points:
        return None
    step, value = (max if larger else min)(points, key=lambda point: point[1])
    words = f"best, {value:.4g} at step {step:.0f}"
    ax.plot(step, value, "o", color=ORANGE, markersize=7, fillstyle="none", label=words, zorder=4)
    ax.set_ylabel(f"{label}, {'higher' if larger else 'lower'} is better", color=FAINT, parse_math=False)
    _put_legend(ax, place="best")
    return save_svg(figure)


def class_scores(lines: Sequence[Line]) -> str | None:
    """Dice of each class, a thin line each; of many classes those that end lowest stand out."""
    evals = select(lines, "eval")
    rows = _unfold([e for e in evals if e.get("weights") == "ema"] or evals)
    found = {name: series(rows, name) for name in dict.fromkeys(n for row in rows for n in row if _is_class(n))}
    found = {name: points for name, points in found.items() if points[0]}
    if not found:
        return None
    figure, ax = _make_axes("Evaluation: Dice of each class", lines)
    lowest = sorted(found, key=lambda name: found[name][1][-1])
    named = list(found) if len(found) <= _MOST_CLASSES else lowest[: _MOST_CLASSES - 2]
    for name in sorted(found, key=lambda name: name in named):  # those with names lie above
        style: Any = {"color": LINE}
        if name in named:
            shade = named.index(name) / max(len(named) - 1, 1) * 0.85
            style = {"color": _shade("viridis", shade), "label": _tail(name.removeprefix("dice_"))}
        steps, values = _thin(*found[name])
        ax.plot(steps, values, "o-" if len(steps) < 30 else "-", markersize=2.5, linewidth=1.1, **style)
    ax.set_ylim(0, 1.02)
    ax.set_ylabel("Dice", color=FAINT)
    _put_legend(ax, columns=2, size=7, place="best")
    return save_svg(figure)


def learning_rate(lines: Sequence[Line]) -> str | None:
    """The learning rate over the steps."""
    return _draw_field(lines, "lr", "Learning rate", "", BLUE)


def gradient_norm(lines: Sequence[Line]) -> str | None:
    """The gradient norm before clipping; a log axis, because spikes matter."""
    return _draw_field(lines, "grad_norm", "Gradient norm", "", GREEN, log=True)


def memory(lines: Sequence[Line]) -> str | None:
    """Memory in use over the steps."""
    return _draw_field(lines, "memory_gib", "Memory", "GiB", ORANGE, from_zero=True)


def throughput(lines: Sequence[Line]) -> str | None:
    """Samples a second, and below it the share of time spent waiting for data."""
    train = select(lines, "train")
    steps, speeds = series(train, "samples_per_s")
    if not steps:
        return None
    figure, ax = _make_axes("Throughput and data wait", lines, rows=2)
    ax.plot(*_thin(steps, speeds), "o" if len(steps) == 1 else "-", color=BLUE, linewidth=1.4, markersize=4)
    ax.set_ylim(0, 1.12 * max(speeds) or 1.0)
    ax.set_ylabel("samples/s", color=FAINT)
    low = figure.axes[1]
    wait_steps, waits = series(train, "data_wait")
    low.fill_between(*_thin(wait_steps, [100 * w for w in waits]), color=ORANGE, alpha=0.35, linewidth=0)
    low.plot(*_thin(wait_steps, [100 * w for w in waits]), color=ORANGE, linewidth=1)
    low.set_ylim(0, max(10.0, 112 * max(waits, default=0.0)))
    low.set_ylabel("wait, %", color=FAINT)
    return save_svg(figure)


def activations(lines: Sequence[Line]) -> str | None:
    """Root mean square of the activations: a line per layer when they are few, a heat map when they are many."""
    train = [line for line in select(lines, "train") if isinstance(line.get("activation_rms"), dict)]
    names = list(dict.fromkeys(str(name) for line in train for name in line["activation_rms"]))[:256]
    if not names:
        return None
    rows = [{**line["activation_rms"], "step": line.get("step")} for line in train]
    rows = sorted((row for row in rows if math.isfinite(number_of(row["step"]))), key=lambda row: row["step"])
    figure, ax = _make_axes("Activation size by layer (root mean square)", lines)
    if len(names) <= 6:
        top = 0.0
        for index, name in enumerate(names):
            steps, values = series(rows, name)
            style: Any = {"color": _shade("viridis", index / max(len(names) - 1, 1) * 0.85), "linewidth": 1.3}
            ax.plot(*_thin(steps, values), "o-" if len(steps) < 30 else "-", markersize=2.5, label=_tail(name), **style)
            top = max([top, *values])
        ax.set_ylim(0, 1.5 * top or 1.0)  # the legend stands above the lines
        _put_legend(ax, columns=2, size=7)
    elif len(rows) < 2:
        ax.plot([number_of(rows[0].get(name)) if rows else math.nan for name in names], "o-", color=BLUE, markersize=3)
        ax.set_xlabel("layer, counted from 0", color=FAINT, labelpad=1)
    else:
        _draw_heat(figure, ax, rows[:: math.ceil(len(rows) / 200)], names)
    return save_svg(figure)


def histogram(counts: Sequence[float], edges: Sequence[float]) -> str | None:
    """The distribution of the data's values; `edges` has one entry more than `counts`."""
    if not counts or len(edges) != len(counts) + 1:
        return None
    from matplotlib.ticker import MaxNLocator

    figure, ax = _make_axes("Values", [])
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=_ROUND))
    total = sum(counts) or 1
    ax.stairs([100 * c / total for c in counts], list(edges), fill=True, color=PALE)
    ax.stairs([100 * c / total for c in counts], list(edges), color=BLUE, linewidth=1)
    ax.set_xlabel("value", color=FAINT, labelpad=1)
    ax.set_ylabel("share of voxels, %", color=FAINT)
    return save_svg(figure)


# The curves of the page, in reading order: name, and what makes the picture.
CURVES: dict[str, Callable[[Sequence[Line]], str | None]] = {
    "Loss over the steps": loss_curve,
    "Evaluation against predicting the mean": eval_against_mean,
    "Score over the steps": score,
    "Dice of each class": class_scores,
    "Learning rate": learning_rate,
    "Gradient norm": gradient_norm,
    "Throughput and data wait": throughput,
    "Memory": memory,
    "Activation size by layer": activations,
}


def _draw_field(
    lines: Sequence[Line],
    name: str,
    title: str,
    unit: str,
    colour: str,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> str | None:
    steps, values = series(select(lines, "train"), name)
    if not steps:
        return None
    figure, ax = _make_axes(title, lines)
    ax.plot(*_thin(steps, values), "o" if len(steps) == 1 else "-", color=colour, linewidth=1.5, markersize=4)
    ax.set_ylabel(unit or title.lower(), color=FAINT)
    if log:
        _scale_losses(ax, values)
    if from_zero:
        ax.set_ylim(0, 1.15 * max(values) or 1.0)
    return save_svg(figure)


def _draw_heat(figure: Figure, ax: Axes, rows: Sequence[Line], names: Sequence[str]) -> None:
    """Layers downwards, steps to the right, size as colour on a log scale."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter

    table = [[number_of(row.get(name)) for row in rows] for name in names]
    known = [v for line in table for v in line if math.isfinite(v)]
    positive = [v for v in known if v > 0]
    if positive and len(positive) == len(known):
        norm: Normalize = LogNorm(min(positive), max(max(positive), 1.001 * min(positive)))
    else:
        norm = Normalize(min(known, default=0.0), max(known, default=1.0))
    steps = [number_of(row.get("step")) for row in rows]
    # Each column reaches halfway to its neighbours; the outer edges are as far as the inner ones.
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    edges = [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]
    mesh = ax.pcolormesh(edges, range(len(names) + 1), table, cmap="viridis", norm=norm, rasterized=True)
    ax.set_ylim(len(names), 0)
    every = math.ceil(len(names) / 12)
    ax.set_yticks([i + 0.5 for i in range(0, len(names), every)])
    ax.set_yticklabels([_tail(name) for name in names[::every]], fontsize=7, parse_math=False)
    ax.grid(visible=False)
    bar = figure.colorbar(mesh, ax=ax, pad=0.02, aspect=18)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", labelsize=7, length=2, color=LINE, labelcolor=FAINT)
    for axis_setter in (bar.ax.yaxis.set_major_formatter, bar.ax.yaxis.set_minor_formatter):
        axis_setter(FuncFormatter(tick_label))


def _make_axes(title: str, lines: Sequence[Line], rows: int = 1) -> tuple[Figure, Axes]:
    """An empty picture in the house style; resumed sessions are thin marks on the step axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=_SIZE, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(rows, 1, height_ratios=[2, 1][:rows])
    for row in range(rows):
        ax = figure.add_subplot(grid[row], sharex=figure.axes[0] if row else None)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LINE)
        ax.grid(color=LINE, linewidth=0.6, alpha=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=LINE, labelcolor=FAINT, labelsize=_FONT, length=3)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=_ROUND, min_n_ticks=1))
        ax.yaxis.set_major_locator(MaxNLocator(5 if rows == 1 else 4 - row, steps=_ROUND))
        ax.yaxis.set_major_formatter(FuncFormatter(tick_label))
        ax.yaxis.label.set_fontsize(_FONT)
        ax.xaxis.label.set_fontsize(_FONT)
        if row < rows - 1:
            ax.tick_params(labelbottom=False)
        for start in select(lines, "start"):
            if start.get("resumed") and math.isfinite(number_of(start.get("step"))):
                ax.axvline(number_of(start["step"]), color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
    last = figure.axes[-1]
    last.set_xlabel("step", color=FAINT, labelpad=1)
    if lines:
        last.xaxis.set_major_formatter(FuncFormatter(tick_label))
    figure.suptitle(title, fontsize=10, color=INK, weight="bold", x=0.012, ha="left")
    return figure, figure.axes[0]


def tick_label(value: float, _: Any = None) -> str:
    """A tick without idle zeros: 0.5, 250, 1.25k."""
    power = 0 if abs(value) < 1000 else min(int(math.log10(abs(value)) // 3), 4)
    return f"{value / 1000**power:.4g}{('', 'k', 'M', 'G', 'T')[power]}"


def _scale_losses(ax: Axes, values: Sequence[float]) -> None:
    """A log axis when the values span more than a factor of ten and are all positive."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not values or min(values) <= 0 or max(values) <= 10 * min(values):
        return
    ax.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_label))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _put_legend(ax: Axes, columns: int = 1, size: float = 8, place: Any = "upper right") -> None:
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    legend = ax.legend(handles, labels, frameon=True, fontsize=size, ncols=columns, loc=place, handlelength=1.6)
    legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)
    for text in legend.get_texts():
        text.set(color=INK, parse_math=False)


def _best_metric(lines: Sequence[Line]) -> tuple[Any, bool]:
    """The metric that the run's best checkpoint is chosen by, None where it does not say, and whether it grows."""
    start: Line = (select(lines, "start") or [{}])[-1]
    name = start.get("best_metric")
    return (name if isinstance(name, str) else None), start.get("larger_is_better") is True


def _is_class(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("dice_")


def _unfold(evals: Sequence[Line]) -> list[Line]:
    """Evaluations with their metrics beside the step."""
    return [{**line["metrics"], "step": line.get("step")} for line in evals if isinstance(line.get("metrics"), dict)]


def _smooth(values: Sequence[float]) -> list[float]:
    """An average over about a twentieth of the curve to either side: no lag, and unbiased at both ends."""
    keep = 1 - 1 / max(2.0, len(values) / 40)

    def run(ordered: Iterable[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        sums = []
        for value in ordered:
            total, weight = keep * total + value, keep * weight + 1
            sums.append((total, weight))
        return sums

    both = zip(values, run(values), reversed(run(reversed(values))), strict=True)
    return [(a + b - value) / (m + n - 1) for value, (a, m), (b, n) in both]


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most so many points: the smallest and the largest of each stretch, in their order."""
    if len(steps) <= _MOST_POINTS:
        return list(steps), list(values)
    stretch = math.ceil(2 * len(steps) / _MOST_POINTS)
    kept: list[int] = []
    for begin in range(0, len(steps), stretch):
        part = range(begin, min(begin + stretch, len(steps)))
        kept += sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)})
    kept = sorted({0, *kept, len(steps) - 1})
    return [steps[i] for i in kept], [values[i] for i in kept]


def _tail(name: str, most: int = 22) -> str:
    """The end of a long name: layer names differ there."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _shade(colours: str, place: float) -> Any:
    from matplotlib import colormaps

    return colormaps[colours](place)


def save_svg(figure: Figure) -> str:
    """The picture as SVG text, the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas = FigureCanvasSVG(figure)
    stream = io.StringIO()
    blank: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "vitrail"}
    with _LOCK, matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the measuring font lacks
        canvas.print_svg(stream, metadata=blank)
    svg = re.sub(r"font-family: [^;\"]*", lambda _: f"font-family: {_FAMILY}", stream.getvalue())
    return re.sub(r"font: ([\d.a-z ]*px) [^;\"]*", lambda found: f"font: {found[1]} {_FAMILY}", svg)
