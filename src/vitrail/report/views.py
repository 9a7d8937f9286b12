"""Pictures on sheets: values as colours, grids of images and of cuts through volumes, and pages with charts below.

Of a volume are shown the middle plane across each axis, and some slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.figures import EDGE, SOFT, WORDS, Colour, Sheet, key_width, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIDDEN = (0.16, 0.38, 0.62)  # flat blue: hidden from the model
BROKEN = (0.90, 0.10, 0.45)  # flat pink: not a finite number
NOT_SCORED = (0.93, 0.94, 0.95)  # error column, where the model was shown the answer
LINES = (0.98, 0.62, 0.12)  # amber, which no grey value has: borders of leaves and tokens
LABEL_COLOURS = (  # of classes 1, 2, ...
    (0.90, 0.62, 0.00),
    (0.34, 0.71, 0.91),
    (0.00, 0.62, 0.45),
    (0.84, 0.37, 0.00),
    (0.80, 0.47, 0.65),
    (0.94, 0.89, 0.26),
    (0.00, 0.45, 0.70),
)
VIEW = 1.15  # inches of a plane of a volume
_BARS = "#4a6f8f"
_MOST_COLOURS = 255  # labels beyond it number things, which share colours
_LINE = 0.165  # inches that a line of small text takes
_CHART = 1.15  # inches of height

Cut = tuple[str, Any]  # name, and index into the last axes of an array


# ---------------------------------------------------------------- values as colours


def find_range(targets: Sequence[np.ndarray], given: tuple[float, float] | None = None) -> tuple[float, float]:
    """Return the range of values to show: the given one, or percentiles 0.5 and 99.5 of the targets."""
    if given is not None:
        lo, hi = float(given[0]), float(given[1])
    else:
        # A panel needs no exact percentile: a sixteenth of a large volume tells it.
        values = np.concatenate([t.ravel()[:: 16 if t.size > 2**20 else 1] for t in targets])
        values = values[np.isfinite(values)]
        lo, hi = (float(v) for v in np.percentile(values, (0.5, 99.5))) if values.size else (0.0, 1.0)
    return (lo, hi) if math.isfinite(hi - lo) and hi > lo else (lo if math.isfinite(lo) else 0.0, lo + 1.0)


def paint(image: np.ndarray, value_range: tuple[float, float]) -> np.ndarray:
    """Return [C, H, W] values as [H, W, 3] colours; what is not finite gets its own colour."""
    lo, hi = value_range
    unit = np.clip((image - lo) / (hi - lo), 0, 1)
    bad = ~np.isfinite(unit).all(0)
    colours = np.moveaxis(np.broadcast_to(unit, (3, *unit.shape[1:])), 0, -1).copy()
    colours[bad] = BROKEN
    return colours


def label_colour(number: int) -> np.ndarray:
    """Return colours that most eyes can tell apart (Okabe and Ito's) for the first classes, then hues spread evenly."""
    from matplotlib.colors import hsv_to_rgb

    if number <= len(LABEL_COLOURS):
        return np.array(LABEL_COLOURS[number - 1] if number else (0.0, 0.0, 0.0))
    return np.array(hsv_to_rgb((number * 0.618 % 1, 0.75, 0.95 - 0.3 * (number % 2))))


def overlay(grey: np.ndarray, labels: np.ndarray, colours: np.ndarray, ignore: int | None) -> np.ndarray:
    """Put labels in colour over the image, which still shows through; class 0 leaves it as it is."""
    known = (labels > 0) & (labels < len(colours))
    # Over a lightened image: dark structures would blacken their colours.
    mixed = np.where(known[..., None], 0.28 * (0.3 + 0.7 * grey) + 0.72 * colours[np.where(known, labels, 0)], grey)
    if ignore is not None:
        mixed[labels == ignore] = NOT_SCORED
    return mixed


def draw_lines(axes: Axes, lines: np.ndarray, thick: float, high: int, wide: int) -> None:
    """Draw lines [N, 2, 2] over an image of such a size."""
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(list(lines), colors=[LINES], linewidths=thick))
    axes.set_xlim(0, wide)
    axes.set_ylim(high, 0)


# ---------------------------------------------------------------- grids


def cuts_of(shape: Sequence[int], slices: int) -> list[Cut]:
    """Return an image itself; of a volume the middle plane across each axis, then slices along the first."""
    if len(shape) == 2:
        return [("", ...)]
    if len(shape) != 3:
        raise ValueError(f"only images and volumes can be drawn, not {len(shape)} axes")
    number = min(slices, shape[0])
    places = [(axis, shape[axis] // 2) for axis in range(3)]
    places += [(0, int((i + 0.5) * shape[0] / number)) for i in range(number)]
    return [
        (f"{'zyx'[axis]} = {place}", (..., *(place if axis == other else slice(None) for other in range(3))))
        for axis, place in places
    ]


def pad(views: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Put views [h, w, 3] in the middle of white ones that are all as large."""
    high, wide = (max(view.shape[axis] for view in views) for axis in (0, 1))
    out = []
    for view in views:
        above, before = (high - view.shape[0]) // 2, (wide - view.shape[1]) // 2
        out.append(np.ones((high, wide, 3)))
        out[-1][above : above + view.shape[0], before : before + view.shape[1]] = view
    return out


def hold_span(high: float, wide: float) -> float:
    """Return the height of a picture over its width, held to a shape that still shows."""
    return min(max(high / max(wide, 1), 0.25), 2.5)


def draw_grid(
    cells: Sequence[tuple[np.ndarray, str]],
    title: str,
    caption: str,
    *,
    columns: int,
    marks: Sequence[Colour],
    keys: Sequence[tuple[str, Colour]] = (),
    tile: float = 2.3,
) -> Sheet:
    """Draw pictures [H, W, 3] in rows, framed in their marks and with their words below, above a key of colours."""
    height, width = cells[0][0].shape[:2]
    tall = tile * hold_span(height, width)
    rows = -(-len(cells) // columns)
    left, gap, under = 0.15, 0.06, 0.04 + 0.145 * max(len(words.splitlines()) for _, words in cells)
    heading = (0.34 if title else 0.08) + 0.04
    lines = wrap_keys(keys, columns * (tile + gap))
    footing = 0.1 + 0.22 * len(lines) + (0.24 * len(caption.splitlines()) if caption else 0.0)
    wide = max(left + columns * tile + (columns - 1) * gap + 0.15, 4.6 if caption or title else 0.0)
    sheet = Sheet(wide, heading + rows * (tall + under) + (rows - 1) * gap + footing)
    for number, ((picture, words), mark) in enumerate(zip(cells, marks, strict=True)):
        row, column = divmod(number, columns)
        top, across = heading + row * (tall + under + gap), left + column * (tile + gap)
        sheet.tile(picture, across, top, tile, tall, smooth=width > 256, frame=mark)
        style: Any = {"ha": "center", "va": "top", "linespacing": 1.1, "color": mark}
        sheet.text(across + tile / 2, top + tall + 0.05, words, size=7, **style)
    for number, line in enumerate(lines):
        sheet.key(line, left, sheet.high - footing + 0.16 + 0.22 * number)
    sheet.frame(title, caption, left=left, most=110)
    return sheet


def wrap_keys(keys: Sequence[tuple[str, Colour]], wide: float) -> list[list[tuple[str, Colour]]]:
    """Return the keys in lines that fit."""
    lines: list[list[tuple[str, Colour]]] = []
    used = 0.0
    for key in keys:
        if not lines or used + key_width(key[0]) > wide:
            lines.append([])
            used = 0.0
        lines[-1].append(key)
        used += key_width(key[0])
    return lines


# ---------------------------------------------------------------- pages


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


def shade(values: np.ndarray) -> np.ndarray:
    """Return [C, H, W] values as colours [H, W, 3], in their own range."""
    values = np.asarray(values, np.float32)
    return paint(values, find_range([values]))


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
