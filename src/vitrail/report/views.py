"""Grids of images, and what is shown of volumes in them: the middle plane across each axis, and some slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.report.figures import EDGE, SOFT, Colour, Sheet, key_width, shorten

VIEW = 1.15  # inches of a plane of a volume

Cut = tuple[str, Any]  # name, and index into the last axes of an array


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


def lay_out(
    samples: Sequence[Sequence[Sequence[np.ndarray]]],
    kinds: Sequence[str],
    cuts: Sequence[Cut],
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the cells of a grid, from views [H, W, 3] of each kind of each sample.

    Kinds of images are columns. Those of volumes are rows of planes and slices, so that one slice is below the other.
    """
    names = names or [""] * len(samples)
    if len(cuts) == 1:
        rows = [([views[0] for views in sample], name) for sample, name in zip(samples, names, strict=True)]
        look: dict[str, Any] = {"columns": len(kinds), "heads": kinds}
    else:
        rows = [
            (pad(views), f"{name}\n{kind}" if name and kind == kinds[0] else kind)
            for sample, name in zip(samples, names, strict=True)
            for kind, views in zip(kinds, sample, strict=True)
        ]
        look = {"columns": len(cuts), "heads": [name for name, _ in cuts], "tile": VIEW, "block": len(kinds)}
    cells = [(view, words if place == 0 else "") for views, words in rows for place, view in enumerate(views)]
    return look | {"cells": cells}


def hold_span(high: float, wide: float) -> float:
    """Return the height of a picture over its width, held to a shape that still shows."""
    return min(max(high / max(wide, 1), 0.25), 2.5)


def draw_grid(
    cells: Sequence[tuple[np.ndarray, str]],
    title: str,
    caption: str,
    *,
    columns: int,
    heads: Sequence[str] = (),
    marks: Sequence[Colour] = (),
    keys: Sequence[tuple[str, Colour]] = (),
    bars: Sequence[tuple[str, float, float, str]] = (),
    tile: float = 2.3,
    block: int = 0,
) -> Sheet:
    """Draw pictures [H, W, 3] in rows above a key of colours; with `marks`, each has its words below in that colour.

    `bars` say what shades mean: words, least and greatest value, and shades. After `block` rows comes a wider gap.
    """
    height, width = cells[0][0].shape[:2]
    tall = tile * hold_span(height, width)
    rows = -(-len(cells) // columns)
    between = 2.5 * ((rows - 1) // block) if block else 0.0  # gaps
    named = not marks and any(words for _, words in cells)
    left, gap, under = 0.15 + 0.3 * named, 0.06, 0.34 if marks else 0.0
    heading = (0.34 if title else 0.08) + (0.26 if heads else 0.04)
    lines = _wrap_keys(keys, columns * (tile + gap))
    barred = 0.52 if bars else 0.0
    footing = 0.1 + barred + 0.22 * len(lines) + (0.24 * len(caption.splitlines()) if caption else 0.0)
    wide = max(left + columns * tile + (columns - 1) * gap + 0.15, 4.6 if caption or title else 0.0)
    sheet = Sheet(wide, heading + rows * (tall + under) + (rows - 1 + between) * gap + footing)
    for number, (picture, words) in enumerate(cells):
        row, column = divmod(number, columns)
        top = heading + row * (tall + under + gap) + (2.5 * gap * (row // block) if block else 0.0)
        across = left + column * (tile + gap)
        frame = marks[number] if marks else None
        sheet.tile(picture, across, top, tile, tall, smooth=width > 256, frame=frame)
        if heads and row == 0:
            sheet.text(across + tile / 2, top - 0.12, heads[column], size=9, ha="center")
        if marks:
            style: Any = {"ha": "center", "va": "top", "linespacing": 1.1, "color": frame}
            sheet.text(across + tile / 2, top + tall + 0.05, words, size=7, **style)
        elif words:
            sheet.text(left - 0.07, top + tall / 2, shorten(words, 40), ha="right", rotation=90)
    foot, across = sheet.high - footing, (wide - left - 0.15) / max(len(bars), 1)
    for number, bar in enumerate(bars):
        _draw_bar(sheet, *bar, left + number * across, foot + 0.11, across - 0.3)
    for number, line in enumerate(lines):
        sheet.key(line, left, foot + barred + 0.16 + 0.22 * number)
    sheet.frame(title, caption, left=left, most=110)
    return sheet


def _draw_bar(
    sheet: Sheet, words: str, low: float, high: float, colours: str, left: float, top: float, wide: float
) -> None:
    """Draw what shades mean."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    strip = sheet.axes(left, top, wide, 0.09)
    bar = sheet.figure.colorbar(ScalarMappable(Normalize(low, high), colours), cax=strip, orientation="horizontal")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7.5, length=2, color=EDGE, labelcolor=SOFT, pad=2)
    bar.ax.locator_params(nbins=5)
    sheet.text(left, top + 0.36, words, size=7.5, color=SOFT)


def _wrap_keys(keys: Sequence[tuple[str, Colour]], wide: float) -> list[list[tuple[str, Colour]]]:
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
