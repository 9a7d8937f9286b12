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

COLOURS = {
    "DDP": "#7f7f7f", "NO_SHARD": "#1f77b4", "HYBRID_1": "#2ca02c", "HYBRID_2": "#9467bd", "HYBRID_4": "#8c564b",
    "HYBRID_8": "#17becf", "HYBRID_16": "#bcbd22", "FULL_SHARD": "#d62728", "SHARD_GRAD_OP": "#ff7f0e",
}  # fmt: skip
TITLES = {"base": "Base, 0.09 B", "huge": "Huge, 0.64 B", "1b": "1B", "3b": "3B", "5b": "5B", "15b": "15B"}


def _axes(axis: Any, title: str) -> None:
    axis.set(title=title, xlabel="nodes of 8 GCDs", xscale="log", yscale="log")
    axis.set_xticks(p.NODES, [str(nodes) for nodes in p.NODES])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def plot_frontier(rows: dict[tuple[str, str], Any], path: Path) -> None:
    """Images/s of a GCD, so that ideal weak scaling is flat."""
    figure, axes = plt.subplots(3, 2, figsize=(11, 12))
    for axis, (model, title) in zip(axes.flat, TITLES.items(), strict=True):
        for mode, colour in COLOURS.items():
            there = [row for row in rows.get((model, mode), ()) if row]
            nodes = [row.cell[2] for row in there]
            axis.plot(nodes, [row.published / 8 / n for row, n in zip(there, nodes, strict=True)], "o", color=colour)
            predicted = [row.rate / 8 / n for row, n in zip(there, nodes, strict=True)]
            if there:
                axis.plot(nodes, predicted, "-", color=colour, label=mode)
        _axes(axis, title)
        axis.set_yscale("linear")
        axis.set_ylim(bottom=0)
        axis.set_ylabel("images/s a GCD")
        axis.legend(fontsize=8, title="dots published, lines predicted")
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
