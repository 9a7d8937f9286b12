"""Pages of pictures as one PNG: rows of images with words, scale bars and lines over them, then charts of numbers.

Layout is by hand, in inches, so that images of any shape keep their proportions and nothing global is touched.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.files import write_picture
from vitrail.report.panels import encode, find_range, label_colour, overlay, paint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 130
_TEXT: dict[str, Any] = {"parse_math": False, "color": "#1f2933"}
_PALE: dict[str, Any] = _TEXT | {"color": "#52606d"}
_LINES = (0.98, 0.62, 0.12)  # amber, which no grey value has
_BARS = "#4a6f8f"
_LINE = 0.165  # inches a line of small text takes
_CHART = 1.15  # inches of height
_MOST_COLOURS = 255  # labels beyond it number things, which share colours


@dataclass(frozen=True)
class Panel:
    """An image on a page."""

    picture: np.ndarray  # [H, W, 3] colours from 0 to 1
    words: str = ""  # above it
    aspect: float = 1.0  # physical height of a pixel over its width
    bar: tuple[float, str] | None = None  # a scale bar: its share of the width, and its words
    lines: np.ndarray | None = None  # [N, 2, 2] from and to (x, y), in pixels


@dataclass(frozen=True)
class Chart:
    """A histogram on a page: bars between edges, or one for each name."""

    words: str
    heights: Sequence[float]
    edges: Sequence[float] = ()
    names: Sequence[str] = ()


def shade(values: np.ndarray, value_range: tuple[float, float] | None = None) -> np.ndarray:
    """[C, H, W] as colours [H, W, 3], three channels or one; the range is that of the values where none is given."""
    values = np.asarray(values, np.float32)
    return paint(values, find_range([values], value_range))


def colour_labels(picture: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Labels [H, W] in colour over a picture; 0 leaves it as it is, and numbers of things share colours."""
    shown = np.where(labels > 0, (labels.astype(np.int64) - 1) % _MOST_COLOURS + 1, 0)
    return overlay(picture, shown, np.stack([label_colour(n) for n in range(int(shown.max(initial=0)) + 1)]), None)


def label_key(names: Mapping[int, str]) -> list[tuple[str, tuple[float, ...]]]:
    """What the colours of labels mean."""
    shown = [value for value in names if value > 0][:12]
    return [(names[value], tuple(label_colour((value - 1) % _MOST_COLOURS + 1))) for value in shown]


def draw_page(
    path: str | Path,
    rows: Sequence[Sequence[Panel]],
    *,
    title: str,
    caption: str = "",
    charts: Sequence[Chart] = (),
    key: Sequence[tuple[str, tuple[float, ...]]] = (),
    tile: float = 2.6,
) -> Path:
    """Draw the page to a PNG and return its path; `tile` is the width of a panel in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    gap, edge = 0.14, 0.2
    across = max(len(row) for row in rows)
    wide = max(across * (tile + gap) - gap, 6.4) + 2 * edge
    heads = [_LINE * max(len(panel.words.splitlines()) for panel in row) + 0.06 for row in rows]
    heights = [max(_height(panel, tile) for panel in row) for row in rows]
    words = caption.splitlines()
    foot = (0.3 if key else 0.0) + (_CHART + 0.75 if charts else 0.0) + 0.08
    high = 0.42 + _LINE * len(words) + sum(heads) + sum(heights) + gap * len(rows) + foot
    figure = Figure(figsize=(wide, high), dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.text(edge / wide, 1 - 0.2 / high, title, fontsize=11, weight="bold", va="center", **_TEXT)
    for number, line in enumerate(words):
        figure.text(edge / wide, 1 - (0.4 + _LINE * number) / high, line, fontsize=8, va="center", **_PALE)
    top = 0.42 + _LINE * len(words)
    for row, head, height in zip(rows, heads, heights, strict=True):
        top += head
        for column, panel in enumerate(row):
            tall = _height(panel, tile)
            shown = min(tile, tall / max(_ratio(panel), 1e-6))  # narrower, where the panel is very tall
            left = edge + column * (tile + gap)
            axes = figure.add_axes((left / wide, 1 - (top + tall) / high, shown / wide, tall / high))
            _draw_panel(axes, panel, shown, tall)
        top += height + gap
    x = edge
    for name, colour in key:
        figure.text(x / wide, 1 - (top + 0.1) / high, "■", fontsize=9, va="center", color=colour)
        figure.text((x + 0.15) / wide, 1 - (top + 0.1) / high, name, fontsize=8, va="center", **_TEXT)
        x += 0.38 + 0.068 * len(name)
    if charts:
        _draw_charts(figure, charts, wide=wide, high=high, edge=edge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    return write_picture(path, encode(picture, grey=False))


def _ratio(panel: Panel) -> float:
    return panel.picture.shape[0] * panel.aspect / panel.picture.shape[1]


def _height(panel: Panel, tile: float) -> float:
    """Inches; long ones are narrowed, flat ones stretched, so that both still show."""
    return tile * min(max(_ratio(panel), 0.15), 1.4)


def _draw_panel(axes: Axes, panel: Panel, width: float, height: float) -> None:
    from matplotlib.collections import LineCollection

    high, wide = panel.picture.shape[:2]
    axes.imshow(
        np.rint(np.clip(panel.picture, 0, 1) * 255).astype(np.uint8),
        aspect="auto",
        interpolation="nearest" if max(high, wide) <= 256 else "antialiased",
        extent=(0, wide, high, 0),
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(panel.words, fontsize=8, pad=3, loc="left", linespacing=1.1, **_TEXT)
    if panel.lines is not None and len(panel.lines):
        dense = width * 72 * math.sqrt(2 / len(panel.lines))  # about the points between two lines
        thin = float(np.clip(0.06 * dense, 0.2, 0.8))
        axes.add_collection(LineCollection(list(panel.lines), colors=[_LINES], linewidths=thin))
        axes.set_xlim(0, wide)
        axes.set_ylim(high, 0)
    if panel.bar is not None:
        _draw_scale_bar(axes, *panel.bar, high=height)


def _draw_scale_bar(axes: Axes, share: float, words: str, *, high: float) -> None:
    """White on black, so that it shows on anything."""
    y = 6 / 72 / high  # points from the lower border
    for start, stop, colour, thick in ((0.04, 0.04 + share, "black", 5), (0.043, 0.037 + share, "white", 3)):
        axes.plot([start, stop], [y] * 2, transform=axes.transAxes, color=colour, lw=thick, solid_capstyle="butt")
    box: dict[str, Any] = {"boxstyle": "round,pad=0.2", "facecolor": "black", "alpha": 0.6, "edgecolor": "none"}
    axes.text(0.05, 12 / 72 / high, words, transform=axes.transAxes, color="white", fontsize=7, va="bottom", bbox=box)


def _draw_charts(figure: Figure, charts: Sequence[Chart], *, wide: float, high: float, edge: float) -> None:
    room = (wide - 2 * edge + 0.2) / len(charts)
    for number, chart in enumerate(charts):
        left = edge + number * room + 0.05
        axes = figure.add_axes((left / wide, 0.42 / high, min(room - 0.3, 5.0) / wide, _CHART / high))
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
        axes.tick_params(labelsize=7, length=2, color="#9aa5b1", labelcolor="#52606d")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("#9aa5b1")
        axes.set_title(shorten(chart.words, int(room / 0.065)), fontsize=8, pad=3, loc="left", **_TEXT)


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
