"""The plots of planner_studies.md: measured as dots, predicted as lines or bars."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent))

import published as p

COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#9467bd", "#d62728", "#ff7f0e")
TITLES = {"base": "Base, 0.09 B", "huge": "Huge, 0.64 B", "1b": "1B", "3b": "3B", "5b": "5B", "15b": "15B"}


def _axes(axis: Any, title: str) -> None:
    axis.set(title=title, xlabel="nodes of 8 GCDs", xscale="log", yscale="log")
    axis.set_xticks(p.NODES, [str(nodes) for nodes in p.NODES])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def plot_frontier(rates: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Images/s of a GCD, so that ideal weak scaling is flat."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    for axis, model in zip(axes.flat, p.MODELS, strict=True):
        for colour, mode in zip(COLOURS, p.MODES, strict=False):
            measured = [rate / 8 / n for rate, n in zip(p.IMAGES_PER_SECOND[model, mode], p.NODES, strict=True)]
            predicted = [rate / 8 / n for rate, n in zip(rates[model, mode], p.NODES, strict=True)]
            axis.plot(p.NODES, measured, "o", color=colour)
            axis.plot(p.NODES, predicted, "-", color=colour, label=mode)
        _axes(axis, TITLES[model])
        axis.set_yscale("linear")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("images/s a GCD")
    axes.flat[0].legend(fontsize=8, title="dots published, lines predicted")
    _save(figure, path)


def plot_memory(rows: Sequence[Any], path: Path) -> None:
    figure, axes = plt.subplots(1, len(p.MODELS), figsize=(14, 4.2))
    for axis, model in zip(axes, p.MODELS, strict=True):
        mine = [row for row in rows if row.model == model]
        places = range(len(mine))
        bars = {"published": "published", "again": "run again on an H200", "predicted": "predicted"}
        for shift, (column, label) in zip((-0.27, 0.0, 0.27), bars.items(), strict=True):
            axis.bar([x + shift for x in places], [getattr(row, column) for row in mine], 0.25, label=label)
        axis.set_xticks(list(places), [row.mode for row in mine], rotation=60, ha="right", fontsize=8)
        axis.set_title(TITLES[model])
        axis.set_ylabel("GiB a GCD")
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])  # for the legend
    axes[0].legend(fontsize=8)
    _save(figure, path)


def plot_large(large: dict[tuple[str, str], Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6))
    for axis, model in zip(axes, ("5b", "15b"), strict=True):
        modes = [mode for of, mode in large if of == model]
        for colour, mode in zip(COLOURS, modes, strict=True):
            cells = [(nodes, cell) for nodes, cell in zip(p.NODES, large[model, mode], strict=True) if cell]
            predicted = [(nodes, cell.rate / 8 / nodes) for nodes, cell in cells]
            measured = [(nodes, cell.published / 8 / nodes) for nodes, cell in cells if cell.published]
            fits = any(cell.fits for _, cell in cells)
            label = mode if fits else f"{mode} (said not to fit)"
            axis.plot(*zip(*predicted, strict=True), "-" if fits else ":", color=colour, label=label)
            if measured:
                axis.plot(*zip(*measured, strict=True), "o", color=colour)
        _axes(axis, TITLES[model])
        axis.set_yscale("linear")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("images/s a GCD")
        axis.legend(fontsize=8, title="dots published, lines predicted")
    _save(figure, path)


def plot_ladder(rows: Sequence[tuple[str, float | None, float | None, float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    for shift, column, label in ((-0.2, 1, "published"), (0.2, 2, "predicted")):
        heights = [row[column] or 0.0 for row in rows]
        bars = axis.bar([x + shift for x in range(len(rows))], heights, 0.38, label=label)
        axis.bar_label(bars, [f"{height:.2f}" if height else "OOM" for height in heights], fontsize=8)
    axis.set_xticks(range(len(rows)), [row[0] for row in rows])
    axis.set_ylabel("speed-up")
    axis.set_title("113 billion parameters on 512 GCDs")
    axis.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
