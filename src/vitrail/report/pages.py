"""Pages of pictures as one PNG: rows of images with words, scale bars and lines over them, then charts of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.figures import EDGE, SOFT, WORDS, Colour, Sheet, shorten
from vitrail.report.panels import draw_lines, find_range, label_colour, overlay, paint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = "#4a6f8f"
_MOST_COLOURS = 255  # labels beyond it number things, which share colours
_LINE = 0.165  # inches that a line of small text takes
_CHART = 1.15  # inches of height


@dataclass(frozen=True)
class Panel:
    """An image on a page."""

    picture: np.ndarray  # [H, W, 3] colours from 0 to 1
    words: str = ""  # above it
    aspect: float = 1.0  # physical height of a pixel over its width
    bar: tuple[float, str] | None = None  # a scale bar: its share of the width, and its words
    lines: np.ndarray | None = None  # [N, 2, 2] from and to (x, y), in pixels

    @property
    def ratio(self) -> float:
        return self.picture.shape[0] * self.aspect / self.picture.shape[1]

    def height(self, tile: float) -> float:
        """Return inches; long ones are narrowed, flat ones stretched, so that both still show."""
        return tile * min(max(self.ratio, 0.15), 1.4)


@dataclass(frozen=True)
class Chart:
    """A histogram on a page: bars between edges, or one for each name."""

    words: str
    heights: Sequence[float]
    edges: Sequence[float] = ()
    names: Sequence[str] = ()


def shade(values: np.ndarray, value_range: tuple[float, float] | None = None) -> np.ndarray:
    """Return [C, H, W] values as colours [H, W, 3]; the range is that of the values where none is given."""
    values = np.asarray(values, np.float32)
    return paint(values, find_range([values], value_range))


def colour_labels(picture: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Put labels [H, W] in colour over a picture; 0 leaves it as it is, and numbers of things share colours."""
    shown = np.where(labels > 0, (labels.astype(np.int64) - 1) % _MOST_COLOURS + 1, 0)
    return overlay(picture, shown, np.stack([label_colour(n) for n in range(int(shown.max(initial=0)) + 1)]), None)


def label_key(names: Mapping[int, str]) -> list[tuple[str, Colour]]:
    """Return what the colours of labels mean."""
    shown = [value for value in names if value > 0][:12]
    return [(names[value], tuple(label_colour((value - 1) % _MOST_COLOURS + 1))) for value in shown]


def draw_page(
    path: str | Path,
    rows: Sequence[Sequence[Panel]],
    *,
    title: str,
    caption: str = "",
    charts: Sequence[Chart] = (),
    key: Sequence[tuple[str, Colour]] = (),
    tile: float = 2.6,
) -> Path:
    """Draw the page to a PNG and return its path; `tile` is the width of a panel in inches."""
    gap, edge = 0.14, 0.2
    across = max(len(row) for row in rows)
    heads = [_LINE * max(len(panel.words.splitlines()) for panel in row) + 0.06 for row in rows]
    heights = [max(panel.height(tile) for panel in row) for row in rows]
    words = caption.splitlines()
    foot = (0.3 if key else 0.0) + (_CHART + 0.75 if charts else 0.0) + 0.08
    top = 0.42 + _LINE * len(words)
    wide = max(across * (tile + gap) - gap, 6.4) + 2 * edge
    sheet = Sheet(wide, top + sum(heads) + sum(heights) + gap * len(rows) + foot, dpi=130)
    sheet.text(edge, 0.2, title, size=11, weight="bold")
    for number, line in enumerate(words):
        sheet.text(edge, 0.4 + _LINE * number, line, color=SOFT)
    for row, head, height in zip(rows, heads, heights, strict=True):
        top += head
        for column, panel in enumerate(row):
            _draw_panel(sheet, panel, edge + column * (tile + gap), top, tile)
        top += height + gap
    sheet.key(key, edge, top + 0.1)
    room = (wide - 2 * edge + 0.2) / max(len(charts), 1)
    for number, chart in enumerate(charts):
        place = (edge + number * room + 0.05, sheet.high - 0.42 - _CHART)
        _draw_chart(sheet.axes(*place, min(room - 0.3, 5.0), _CHART), chart, room)
    return sheet.put(path)


def _draw_panel(sheet: Sheet, panel: Panel, left: float, top: float, tile: float) -> None:
    high, wide = panel.picture.shape[:2]
    tall = panel.height(tile)
    shown = min(tile, tall / max(panel.ratio, 1e-6))  # narrower, where the panel is very tall
    smooth = max(high, wide) > 256
    axes = sheet.image(panel.picture, left, top, shown, tall, smooth=smooth, extent=(0, wide, high, 0))
    axes.set_title(panel.words, fontsize=8, pad=3, loc="left", linespacing=1.1, **WORDS)
    if panel.lines is not None and len(panel.lines):
        dense = shown * 72 * math.sqrt(2 / len(panel.lines))  # about the points between two lines
        draw_lines(axes, panel.lines, float(np.clip(0.06 * dense, 0.2, 0.8)), high, wide)
    if panel.bar is not None:
        _draw_scale_bar(axes, *panel.bar, high=tall)


def _draw_scale_bar(axes: Axes, share: float, words: str, *, high: float) -> None:
    """Draw white on black, so that it shows on anything."""
    y = 6 / 72 / high  # points from the lower border
    for start, stop, colour, thick in ((0.04, 0.04 + share, "black", 5), (0.043, 0.037 + share, "white", 3)):
        axes.plot([start, stop], [y] * 2, transform=axes.transAxes, color=colour, lw=thick, solid_capstyle="butt")
    box: dict[str, Any] = {"boxstyle": "round,pad=0.2", "facecolor": "black", "alpha": 0.6, "edgecolor": "none"}
    axes.text(0.05, 12 / 72 / high, words, transform=axes.transAxes, color="white", fontsize=7, va="bottom", bbox=box)


def _draw_chart(axes: Axes, chart: Chart, room: float) -> None:
    heights = np.asarray(chart.heights, np.float64)
    heights = heights / (heights.sum() or 1.0)
    if chart.names:
        axes.bar(range(len(heights)), heights, color=_BARS)
        fits = max(map(len, chart.names)) * 0.065 < room / len(heights)
        names = list(chart.names) if fits else [shorten(name, 9) for name in chart.names]
        turned: dict[str, Any] = {} if fits else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(range(len(heights)), names, fontsize=7 if fits else 6, parse_math=False, **turned)
    else:
        axes.stairs(heights, chart.edges, fill=True, color=_BARS)
        axes.locator_params(axis="x", nbins=5)
    axes.set_yticks([])
    axes.tick_params(labelsize=7, length=2, color=EDGE, labelcolor=SOFT)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(EDGE)
    axes.set_title(shorten(chart.words, int(room / 0.065)), fontsize=8, pad=3, loc="left", **WORDS)
