"""Pictures of a sweep that are bars: configurations, parts of the step, effects, interactions, the ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_cells import WORDS, Cell
from vitrail.report.bench_study import Study
from vitrail.report.bench_style import (
    BROKEN,
    COLOURS,
    FONT,
    MARKERS,
    fit_values,
    make_figure,
    name_bars,
    name_panel,
    put_legend,
    shorten,
)
from vitrail.report.plots import BLUE, FAINT, GREEN, INK, LINE, ORANGE, PALE
from vitrail.report.units import compact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 32
_MOST_PANELS = 6
_PARTS = {"data": ORANGE, "forward": BLUE, "backward": PALE, "optimizer": GREEN}


def choose_bars(cells: Sequence[Cell]) -> tuple[list[Cell], int]:
    """The cells to draw, fastest first and those without a speed last, and how many were left out.

    Of many, each configuration stands with its fastest batch alone; the slowest are left out before those without.
    """
    ordered = sorted(cells, key=lambda cell: (not cell.ok, -cell.rate if cell.ok else list(BROKEN).index(cell.status)))
    if len(ordered) > MOST_BARS:
        first: dict[Any, Cell] = {}
        for cell in ordered:
            first.setdefault(cell.rest(), cell)
        ordered = list(first.values())
    done = [cell for cell in ordered if cell.ok]
    broken = [cell for cell in ordered if not cell.ok][: MOST_BARS // 2]
    kept = done[: MOST_BARS - len(broken)] + broken
    return kept, len(cells) - len(kept)


def draw_bars(study: Study, cells: Sequence[Cell], work: str) -> Figure | None:
    """Samples per second of each cell; what was not measured is named in place of its bar."""
    chosen, left = choose_bars(cells)
    if not any(cell.ok for cell in chosen):
        return None
    figure, (ax,) = make_figure("Configurations, fastest first" + (f": {work}" if work else ""), _height(chosen))
    top = max(max(cell.rate, cell.high) for cell in chosen if cell.ok)
    for row, cell in enumerate(chosen):
        if cell.ok:
            ax.barh(row, cell.rate, height=0.66, color=BLUE if row == 0 else PALE, linewidth=0)
            ax.plot([cell.low, cell.high], [row, row], color=INK, linewidth=1.2)
            mfu = cell.number("mfu")
            words = f"{compact(cell.rate)} /s" + (f", MFU {100 * mfu:.1f} %" if math.isfinite(mfu) else "")
            full = [c.size for c in cells if c.status == "oom" and c.rest() == cell.rest()] if left else []
            words += f"; out of memory from {min(full):g}" if full else ""
            _write(ax, max(cell.rate, cell.high) + 0.01 * top, row, words, FAINT)
        else:
            _write_broken(ax, 0.01 * top, row, cell.status)
    name_bars(ax, [study.describe(cell, work=False, batch=True) for cell in chosen])
    ax.set_xlabel("samples/s")
    fit_values(figure, ax)
    return figure


def draw_split(study: Study, cells: Sequence[Cell], work: str) -> Figure | None:
    """The parts of a step as stacked bars; communication runs beside the others and so has its own thin bar."""
    chosen, _ = choose_bars([c for c in cells if c.ok and any(c.number("split", part) > 0 for part in _PARTS)])
    if not chosen:
        return None
    from matplotlib.patches import Patch

    figure, (ax,) = make_figure("Where a step goes" + (f": {work}" if work else ""), _height(chosen) + 0.3)
    talks = [cell.number("split", "communication") for cell in chosen]
    for row, cell in enumerate(chosen):
        start = 0.0
        for part, colour in _PARTS.items():
            width = 1000 * cell.number("split", part)
            if width > 0:
                ax.barh(row, width, left=start, height=0.62, color=colour, edgecolor="white", linewidth=0.6)
                start += width
        rest = 1000 * cell.number("step_seconds", "median") - start
        if rest > 0:
            ax.barh(row, rest, left=start, height=0.62, color="white", edgecolor=FAINT, linewidth=0.6)
        if talks[row] > 0:
            ax.barh(row + 0.4, 1000 * talks[row], height=0.14, color=INK, linewidth=0)
    name_bars(ax, [study.describe(cell, work=False, batch=True) for cell in chosen])
    ax.set_xlabel("milliseconds of a step")
    handles = [Patch(facecolor=colour) for colour in _PARTS.values()] + [Patch(facecolor="white", edgecolor=FAINT)]
    labels = [*_PARTS, "rest"]
    if any(talk > 0 for talk in talks):
        handles.append(Patch(facecolor=INK))
        labels.append("communication (beside the others)")
    put_legend(figure, handles, labels)
    return figure


def draw_effects(effects: Sequence[dict[str, Any]]) -> Figure | None:
    """Percent change of speed and of memory, with the interval of the speed and each pair's own change."""
    effects = [effect for effect in effects if not effect["changes_work"]] or list(effects)
    if not effects:
        return None
    effects = sorted(effects, key=lambda effect: -effect["percent"])[:MOST_BARS]
    figure, (speed, memory) = make_figure("What each factor does, all else equal", _height(effects), (2, 1))
    for row, effect in enumerate(effects):
        value = effect["percent"]
        speed.barh(row, value, height=0.6, color=BLUE if effect["sure"] else PALE, linewidth=0)
        if effect["low"] is not None:
            speed.plot([effect["low"], effect["high"]], [row, row], color=INK, linewidth=1.6, zorder=4)
        if effect["pairs"] > 1:
            speed.plot(effect["pair_percent"], [row + 0.4] * 2, "|-", color=FAINT, linewidth=0.8, markersize=5)
        if effect["memory_percent"] is not None:
            memory.barh(row, effect["memory_percent"], height=0.6, color=ORANGE, linewidth=0)
    name_bars(speed, [f"{e['factor']}: {e['from']} → {e['to']}  (n={e['pairs']})" for e in effects], most=52)
    name_bars(memory, [""] * len(effects))
    for ax, name in ((speed, "samples/s, % change"), (memory, "peak memory, % change")):
        ax.axvline(0, color=FAINT, linewidth=0.8)
        ax.set_xlabel(name)
        ax.margins(x=0.08)
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, -2), max(high, 2))  # a fraction of a percent does not fill the panel
    return figure


def draw_interactions(found: Sequence[dict[str, Any]]) -> Figure | None:
    """How the effect of one factor depends on another; a panel for each two, the clearest first."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        panels.setdefault((one["factor"], one["by"]), []).append(one)
    shown = list(panels.items())[:_MOST_PANELS]
    if not shown:
        return None
    columns = 2 if len(shown) in (1, 2, 4) else 3
    rows = math.ceil(len(shown) / columns)
    figure, axes = make_figure("How one factor's effect depends on another", 0.5 + 2.7 * rows, [1] * columns, rows)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    for ax, ((factor, by), lines) in zip(axes, shown, strict=False):
        names = list(dict.fromkeys(point["level"] for line in lines for point in line["points"]))
        for place, line in enumerate(lines[: len(COLOURS)]):
            x = [names.index(point["level"]) + 0.06 * place for point in line["points"]]
            y = [point["percent"] for point in line["points"]]
            ends = [
                (p["percent"] if p["low"] is None else p["low"], p["percent"] if p["high"] is None else p["high"])
                for p in line["points"]
            ]
            spread = [
                [max(0.0, v - low) for v, (low, _) in zip(y, ends, strict=True)],
                [max(0.0, high - v) for v, (_, high) in zip(y, ends, strict=True)],
            ]
            ax.errorbar(
                x,
                y,
                yerr=spread,
                color=COLOURS[place],
                marker=MARKERS[place],
                capsize=3,
                linewidth=1.5,
                linestyle="-" if line["sure"] else ":",
                markersize=5,
                label=f"{line['from']} → {line['to']}",
            )
        ax.axhline(0, color=FAINT, linewidth=0.8)
        ax.set_xticks(range(len(names)))
        shown_names = [name.split()[1] for name in names] if by == "batch" else names  # "batch 16 a rank" is too long
        ax.set_xticklabels(shown_names, fontsize=8, parse_math=False)
        ax.set_xlim(-0.35, len(names) - 0.65)
        most = 100 // columns  # letters above and below a panel
        name_panel(ax, f"{factor}, by {by}", most=most)
        ax.set_xlabel(shorten(by, most), parse_math=False)
        ax.set_ylabel("samples/s, % change")
        legend = ax.legend(fontsize=7.5, frameon=True, loc="best", handlelength=1.8)
        legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)
        for text in legend.get_texts():
            text.set(color=INK, parse_math=False)
    return figure


def draw_ladder(ladder: dict[str, Any], unit: str) -> Figure | None:
    """Relative throughput, one change a rung."""
    rungs = ladder["rungs"]
    title = "Ladder: one change a rung, against the first that ran" + (
        f": {ladder['label']}" if ladder["label"] else ""
    )
    figure, (ax,) = make_figure(title, _height(rungs, 0.34))
    top = max(max(rung["relative"], rung["high"]) for rung in rungs if rung["status"] == "ok")
    for row, rung in enumerate(rungs):
        if rung["status"] != "ok":
            _write_broken(ax, 0.01 * top, row, rung["status"])
            continue
        ax.barh(row, rung["relative"], height=0.62, color=BLUE, alpha=0.45 + 0.55 * row / (len(rungs) - 1), linewidth=0)
        ax.plot([rung["low"], rung["high"]], [row, row], color=INK, linewidth=1.2)
        where = "" if rung["batch"] is None else f", batch {rung['batch']:g}{unit}"
        words = f"{rung['relative']:.2f} ×  ({compact(rung['samples_per_s'])} /s{where})"
        _write(ax, max(rung["relative"], rung["high"]) + 0.01 * top, row, words, FAINT)
    name_bars(ax, [("" if row == 0 else "+ ") + rung["added"] for row, rung in enumerate(rungs)])
    ax.axvline(1, color=LINE, linewidth=1, zorder=0)
    ax.set_xlabel("times as fast")
    fit_values(figure, ax)
    return figure


def _height(rows: Sequence[Any], each: float = 0.27) -> float:
    return 1.0 + each * max(len(rows), 2)


def _write(ax: Axes, x: float, row: float, words: str, colour: str) -> None:
    ax.text(x, row, words, va="center", fontsize=FONT - 1, color=colour, parse_math=False)


def _write_broken(ax: Axes, x: float, row: int, status: str) -> None:
    marker, colour = BROKEN[status]
    ax.plot(x, row, marker, color=colour, markersize=6, markeredgewidth=1.6)
    _write(ax, 2.5 * x, row, WORDS[status], colour)
