"""The look of a sweep's pictures: that of a run's curves, wider; lines differ in marker and dash as in colour."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitrail.report.plots import BLUE, FAINT, GREEN, INK, LINE, ORANGE, RED, save_svg, tick_label
from vitrail.report.units import compact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.4  # inches; the page shows a picture at its full width
FONT = 8.5
_DPI = 150  # of the PNG
COLOURS = (BLUE, ORANGE, GREEN, "#a03e99", INK, "#4aa3df", "#c9a100", RED)
MARKERS = "os^DvPX*"
MOST_LINES = len(COLOURS)
# How what was not measured is shown: marker, colour.
BROKEN = {"oom": ("x", RED), "failed": ("+", "#8a4b00"), "skipped": ("|", FAINT)}


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    name: str  # of its files
    title: str
    caption: str
    figure: Figure


def make_figure(title: str, height: float, widths: Sequence[float] = (1,), rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty picture with panels side by side, in rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained", facecolor="white")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08, h_pad=0.06)
    grid = figure.add_gridspec(rows, len(widths), width_ratios=list(widths))
    for place in range(rows * len(widths)):
        ax = figure.add_subplot(grid[place // len(widths), place % len(widths)])
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LINE)
        ax.grid(color=LINE, linewidth=0.6, alpha=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=LINE, labelcolor=FAINT, labelsize=FONT, length=3)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(tick_label))
            axis.label.set(fontsize=FONT, color=FAINT)
    figure.suptitle(shorten(title, 100), fontsize=10, color=INK, weight="bold", x=0.012, ha="left", parse_math=False)
    return figure, figure.axes


def name_panel(ax: Axes, title: str, *, most: int = 36) -> None:
    ax.set_title(shorten(title, most), fontsize=9, color=INK, loc="left", parse_math=False)


def scale_counts(ax: Axes, values: Iterable[float], name: str) -> None:
    """A logarithmic axis of counts with a tick for each that occurs."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = sorted(set(values))
    if len(ticks) > 9:
        ticks = ticks[:: math.ceil(len(ticks) / 9)]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(round(value))))
    ax.set_xlabel(name)


def scale_rates(ax: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis of speeds, with ticks that can be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(max(values) / min(values))
    ax.set_yscale("log")
    ax.set_ylim(min(values) / 1.3, max(values) * 1.3)
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_label))
    ax.yaxis.set_minor_formatter(NullFormatter())


def shorten(name: str, most: int) -> str:
    """Without the middle where it is too long: the end tells cells apart as the start does."""
    if len(name) <= most:
        return name
    return f"{name[: most // 2]}…{name[most // 2 + 1 - most :]}"


def name_bars(ax: Axes, names: Sequence[str], *, most: int = 64) -> None:
    """Names down the left side, the first on top."""
    ax.set_yticks(range(len(names)))
    ax.set_yticklabels([shorten(name, most) for name in names], fontsize=8, color=INK, parse_math=False)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def put_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the panels, in as many columns as fit; many rows make the picture taller, not the panels lower."""
    if not handles:
        return
    short = [shorten(label, 120) for label in labels]
    for columns in range(min(6, len(short)), 0, -1):
        legend = figure.legend(
            handles, short, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, handlelength=2.2
        )
        for text in legend.get_texts():
            text.set(color=INK, parse_math=False)
        if columns == 1 or measure(legend, figure) < 0.97 * figure.bbox.width:
            break
        legend.remove()
    rows = math.ceil(len(short) / columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, rows - 2))


def fit_values(figure: Figure, ax: Axes) -> None:
    """Start the axis at 0 and end it so that the bars, their thin lines and the words beside them are inside.

    The words take no part in the layout: far outside the panel they would undo it.
    """
    for text in ax.texts:
        text.set_in_layout(False)
    drawn: list[Any] = [*ax.get_lines()]
    bars: list[Any] = [*ax.patches]
    ends = [float(value) for line in drawn for value in line.get_xdata()]
    ends += [bar.get_x() + bar.get_width() for bar in bars]
    top = 1.02 * max(filter(math.isfinite, ends), default=1.0)
    ax.set_xlim(0, top)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `measure`
        figure.draw_without_rendering()
    room = ax.get_window_extent().width
    for text in ax.texts:
        left = max(room - 1.05 * measure(text, figure), 0.2 * room)  # what remains for the bar
        top = max(top, text.get_position()[0] * room / left)
    ax.set_xlim(0, top)


def measure(artist: Any, figure: Figure) -> float:
    """The width that something takes in a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        return artist.get_window_extent(FigureCanvasAgg(figure).get_renderer()).width


def save_picture(figure: Figure) -> tuple[str, bytes]:
    """SVG text and PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    svg = save_svg(figure)
    figure.set_dpi(_DPI)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return svg, stream.getvalue()
