"""Curves of a run as small figures: lines of metrics in, one figure out, None where there is nothing to draw.

All have one size, so that a page can set them side by side. Long runs are thinned to their extremes per stretch, so
that a spike is never lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vitrail.report.figures import (
    BLUE,
    FAINT,
    GREEN,
    LINE,
    ORANGE,
    PALE,
    RED,
    ROUND,
    make_figure,
    put_legend,
    scale_log,
    tick_label,
)
from vitrail.report.metrics import Line, name_metric, select, series
from vitrail.report.units import number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (4.6, 2.55)  # inches; at 96 pixels an inch this is 442 pixels wide
_MOST_POINTS = 600
_MOST_CLASSES = 8  # with a name each; of more, the lowest few are named


def loss_curve(lines: Sequence[Line]) -> Figure | None:
    """Draw the training loss as logged and smoothed, and the loss of each evaluation."""
    train, evals = select(lines, "train"), select(lines, "eval")
    steps, losses = series(train, "loss")
    eval_steps, eval_losses = series(_unfold(evals), "loss")
    if not steps and not eval_steps:
        return None
    figure, ax = make_axes("Loss", lines)
    if steps:
        style = "o" if len(steps) == 1 else "-"
        long = len(steps) >= 20
        colour, width = (PALE, 1.0) if long else (BLUE, 1.5)
        ax.plot(*thin(steps, losses), style, color=colour, linewidth=width, markersize=4, label="train")
        if long:
            ax.plot(*thin(steps, smooth(losses)), color=BLUE, linewidth=1.7, label="train, smoothed")
    if eval_steps:
        ax.plot(*thin(eval_steps, eval_losses), "o", color=ORANGE, markersize=4, label="evaluation", zorder=4)
    scale_losses(ax, losses + eval_losses)
    broken = [number_of(line.get("step")) for line in train if not math.isfinite(number_of(line.get("loss")))]
    for step in broken[:200]:
        ax.plot(step, 0.02, "|", color=RED, transform=ax.get_xaxis_transform(), markersize=7)
    if broken:
        ax.plot([], [], "|", color=RED, label="not finite")
    put_legend(ax, place="best")
    return figure


def eval_against_mean(lines: Sequence[Line]) -> Figure | None:
    """Draw the squared error on hidden voxels beside their variance, which is the error of predicting the mean."""
    steps, variances = series(_unfold(select(lines, "eval")), "variance")
    figure, ax = make_axes("Evaluation: error on hidden voxels", lines)
    errors = [value for _, value in _plot_evals(ax, lines, "mse", "mean squared error, {}")]
    if not errors or not steps:
        return None
    ax.plot(*thin(steps, variances), "--", color=FAINT, linewidth=1.3, label="predicting the mean (variance)")
    if len(steps) == 1:
        ax.axhline(variances[0], linestyle="--", color=FAINT, linewidth=1.3)
    ax.set_ylim(0, 1.45 * max(errors + variances, default=1.0) or 1.0)
    ax.set_ylabel("squared value")
    put_legend(ax)
    return figure


def score(lines: Sequence[Line]) -> Figure | None:
    """Draw the metric that chooses the best checkpoint, and where it was best; losses have curves of their own."""
    start: Line = (select(lines, "start") or [{}])[-1]
    name, larger = start.get("best_metric"), start.get("larger_is_better") is True
    rows = _unfold(select(lines, "eval"))
    if not isinstance(name, str) or name == "loss" or any("mse_over_variance" in row for row in rows):
        return None
    label = name_metric(name)
    figure, ax = make_axes(f"Evaluation: {label}", lines)
    points = _plot_evals(ax, lines, name, "{}")
    if not points:
        return None
    step, value = (max if larger else min)(points, key=lambda point: point[1])
    words = f"best, {value:.4g} at step {step:.0f}"
    ax.plot(step, value, "o", color=ORANGE, markersize=7, fillstyle="none", label=words, zorder=4)
    ax.set_ylabel(f"{label}, {'higher' if larger else 'lower'} is better", parse_math=False)
    put_legend(ax, place="best")
    return figure


def _plot_evals(ax: Axes, lines: Sequence[Line], name: str, label: str) -> list[tuple[float, float]]:
    """Draw a metric of the weights and of their average, and return its points."""
    points: list[tuple[float, float]] = []
    for weights, words, colour in (("raw", "weights", GREEN), ("ema", "averaged weights", BLUE)):
        evals = [line for line in select(lines, "eval") if (line.get("weights") or "raw") == weights]
        steps, values = series(_unfold(evals), name)
        if steps:
            style: Any = {"color": colour, "markersize": 3.5, "linewidth": 1.6, "label": label.format(words)}
            ax.plot(*thin(steps, values), "o-", **style)
            points += zip(steps, values, strict=True)
    return points


def class_scores(lines: Sequence[Line]) -> Figure | None:
    """Draw Dice of each class, a thin line each; of many classes those that end lowest stand out."""
    evals = select(lines, "eval")
    rows = _unfold([e for e in evals if e.get("weights") == "ema"] or evals)
    names = dict.fromkeys(name for row in rows for name in row if str(name).startswith("dice_"))
    found = {name: points for name in names if (points := series(rows, name))[0]}
    if not found:
        return None
    figure, ax = make_axes("Evaluation: Dice of each class", lines)
    lowest = sorted(found, key=lambda name: found[name][1][-1])
    named = list(found) if len(found) <= _MOST_CLASSES else lowest[: _MOST_CLASSES - 2]
    for name in sorted(found, key=lambda name: name in named):  # those with names lie above
        style: Any = {"color": LINE}
        if name in named:
            shade = named.index(name) / max(len(named) - 1, 1) * 0.85
            style = {"color": _shade("viridis", shade), "label": _tail(name.removeprefix("dice_"))}
        steps, values = thin(*found[name])
        ax.plot(steps, values, "o-" if len(steps) < 30 else "-", markersize=2.5, linewidth=1.1, **style)
    ax.set_ylim(0, 1.02)
    ax.set_ylabel("Dice")
    put_legend(ax, columns=2, size=7, place="best")
    return figure


def throughput(lines: Sequence[Line]) -> Figure | None:
    """Draw samples a second, and below it the share of time spent waiting for data."""
    train = select(lines, "train")
    steps, speeds = series(train, "samples_per_s")
    if not steps:
        return None
    figure, ax = make_axes("Throughput and data wait", lines, rows=2)
    ax.plot(*thin(steps, speeds), "o" if len(steps) == 1 else "-", color=BLUE, linewidth=1.4, markersize=4)
    ax.set_ylim(0, 1.12 * max(speeds) or 1.0)
    ax.set_ylabel("samples/s")
    low = figure.axes[1]
    wait_steps, waits = series(train, "data_wait")
    low.fill_between(*thin(wait_steps, [100 * w for w in waits]), color=ORANGE, alpha=0.35, linewidth=0)
    low.plot(*thin(wait_steps, [100 * w for w in waits]), color=ORANGE, linewidth=1)
    low.set_ylim(0, max(10.0, 112 * max(waits, default=0.0)))
    low.set_ylabel("wait, %")
    return figure


def utilisation(lines: Sequence[Line]) -> Figure | None:
    """Draw the share of the device's peak that the model's operations took, and that of all that were computed."""
    train = select(lines, "train")
    found = {words: series(train, name) for words, name in (("MFU", "mfu"), ("HFU, with recomputation", "hfu"))}
    if not found["MFU"][0]:
        return None
    figure, ax = make_axes("Model FLOPs utilisation", lines)
    _draw_both(ax, {words: (steps, [100 * v for v in values]) for words, (steps, values) in found.items()}, BLUE)
    ax.set_ylabel("% of the peak")
    return figure


def step_time(lines: Sequence[Line]) -> Figure | None:
    """Draw the median step of each logged window, and the slowest."""
    train = select(lines, "train")
    names = (("median", "step_seconds"), ("slowest", "slowest_step_seconds"))
    found = {words: series(train, name) for words, name in names}
    if not found["slowest"][0]:  # of the median alone throughput tells
        return None
    figure, ax = make_axes("Time of a step", lines)
    _draw_both(ax, {words: (steps, [1000 * v for v in values]) for words, (steps, values) in found.items()}, GREEN)
    ax.set_ylabel("ms")
    return figure


def memory(lines: Sequence[Line]) -> Figure | None:
    """Draw the largest memory so far: of a GPU what tensors took and what was reserved, else of the process."""
    train = select(lines, "train")
    used, reserved = series(train, "memory_gib"), series(train, "reserved_gib")
    if not used[0]:
        return None
    figure, ax = make_axes("GPU memory, most so far" if reserved[0] else "Memory, most so far", lines)
    names = ("allocated by tensors", "reserved, of the fullest rank") if reserved[0] else ("of the process", "")
    _draw_both(ax, dict(zip(names, (used, reserved), strict=True)), ORANGE)
    ax.set_ylabel("GiB")
    return figure


def _draw_both(ax: Axes, found: dict[str, tuple[list[float], list[float]]], colour: str) -> None:
    """Draw one line, or two that are named where they differ, from 0 on."""
    (_, first), (name, second) = found.items()
    if first[1] == second[1]:
        del found[name]
    found = {words: points for words, points in found.items() if points[0]}
    for (words, (steps, values)), shade in zip(found.items(), (colour, FAINT), strict=False):
        style = "o" if len(steps) == 1 else "-"
        ax.plot(*thin(steps, values), style, color=shade, linewidth=1.4, markersize=4, label=words)
    ax.set_ylim(0, 1.25 * max(max(values) for _, values in found.values()) or 1.0)
    if len(found) > 1:
        put_legend(ax)


def activations(lines: Sequence[Line]) -> Figure | None:
    """Draw the root mean square of activations: a line per layer when they are few, a heat map when they are many."""
    train = [line for line in select(lines, "train") if isinstance(line.get("activation_rms"), dict)]
    names = list(dict.fromkeys(str(name) for line in train for name in line["activation_rms"]))[:256]
    if not names:
        return None
    rows = [{**line["activation_rms"], "step": line.get("step")} for line in train]
    rows = sorted((row for row in rows if math.isfinite(number_of(row["step"]))), key=lambda row: row["step"])
    figure, ax = make_axes("Activation size by layer (root mean square)", lines)
    if len(names) <= 6:
        top = 0.0
        for index, name in enumerate(names):
            steps, values = series(rows, name)
            style: Any = {"color": _shade("viridis", index / max(len(names) - 1, 1) * 0.85), "linewidth": 1.3}
            ax.plot(*thin(steps, values), "o-" if len(steps) < 30 else "-", markersize=2.5, label=_tail(name), **style)
            top = max([top, *values])
        ax.set_ylim(0, 1.5 * top or 1.0)  # the legend stands above the lines
        put_legend(ax, columns=2, size=7)
    elif len(rows) < 2:
        ax.plot([number_of(rows[0].get(name)) if rows else math.nan for name in names], "o-", color=BLUE, markersize=3)
        ax.set_xlabel("layer, counted from 0", labelpad=1)
    else:
        _draw_heat(figure, ax, rows[:: math.ceil(len(rows) / 200)], names)
    return figure


# The curves of the page, in reading order: name, and what makes the picture.
CURVES: dict[str, Callable[[Sequence[Line]], Any]] = {
    "Loss over the steps": loss_curve,
    "Evaluation against predicting the mean": eval_against_mean,
    "Score over the steps": score,
    "Dice of each class": class_scores,
    "Learning rate": lambda lines: _draw_field(lines, "lr", "Learning rate", BLUE),
    # Before clipping; on a logarithmic axis, because spikes matter.
    "Gradient norm": lambda lines: _draw_field(lines, "grad_norm", "Gradient norm", GREEN, log=True),
    "Throughput and data wait": throughput,
    "Time of a step": step_time,
    "Memory": memory,
    "Model FLOPs utilisation": utilisation,
    "Activation size by layer": activations,
}


def _draw_field(lines: Sequence[Line], name: str, title: str, colour: str, *, log: bool = False) -> Figure | None:
    """Draw a field of the training lines."""
    steps, values = series(select(lines, "train"), name)
    if not steps:
        return None
    figure, ax = make_axes(title, lines)
    ax.plot(*thin(steps, values), "o" if len(steps) == 1 else "-", color=colour, linewidth=1.5, markersize=4)
    ax.set_ylabel(title.lower())
    if log:
        scale_losses(ax, values)
    return figure


def _draw_heat(figure: Figure, ax: Axes, rows: Sequence[Line], names: Sequence[str]) -> None:
    """Draw layers downwards, steps to the right, and size as colour on a log scale."""
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


def make_axes(title: str, lines: Sequence[Line], rows: int = 1, *, over: str = "step") -> tuple[Figure, Axes]:
    """Make an empty plot over steps, in one row or two; resumed sessions are thin marks on the step axis."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = make_figure(title, _SIZE, heights=[2, 1][:rows], share=True)
    starts = [number_of(start.get("step")) for start in select(lines, "start") if start.get("resumed")]
    for row, ax in enumerate(axes):
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=over == "step", steps=ROUND, min_n_ticks=1))
        ax.yaxis.set_major_locator(MaxNLocator(5 if rows == 1 else 4 - row, steps=ROUND))
        ax.tick_params(labelbottom=row == rows - 1)
        for step in filter(math.isfinite, starts):
            ax.axvline(step, color=FAINT, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
    axes[-1].set_xlabel(over, labelpad=1)
    return figure, axes[0]


def scale_losses(ax: Axes, values: Sequence[float]) -> None:
    """Make the axis logarithmic when the values span more than a factor of ten and are all positive."""
    if values and min(values) > 0 and max(values) > 10 * min(values):
        scale_log(ax, values)


def _unfold(evals: Sequence[Line]) -> list[Line]:
    """Return evaluations with their metrics beside the step."""
    return [{**line["metrics"], "step": line.get("step")} for line in evals if isinstance(line.get("metrics"), dict)]


def smooth(values: Sequence[float]) -> list[float]:
    """Average over about a twentieth of the curve to either side: no lag, and unbiased at both ends."""
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


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Keep at most so many points: the smallest and the largest of each stretch, in their order."""
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
    """Cut the start off a long name: layer names differ at the end."""
    return name if len(name) <= most else "…" + name[1 - most :]


def _shade(colours: str, place: float) -> Any:
    from matplotlib import colormaps

    return colormaps[colours](place)
