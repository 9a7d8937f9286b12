"""Samples on one page: a row a class, a column a sample; volumes as their middle slices in three directions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.report.files import write_picture
from vitrail.report.panels import encode, find_range, paint

MOST_ROWS, MOST_COLUMNS = 20, 10
_DPI = 130
_SMALLEST = 64  # pixels of a picture's longer side
_LARGEST = 256
_TEXT: dict[str, Any] = {"parse_math": False, "color": "#1f2933"}


def draw_grid(
    path: Path,
    rows: Sequence[tuple[str, Sequence[np.ndarray]]],
    *,
    title: str,
    caption: str = "",
    heads: Sequence[str] = (),
    spacing: Sequence[float] = (),
    value_range: tuple[float, float] | None = None,
) -> Path:
    """Draw rows of (name, samples [C, *S]); three channels are colours, of any other number the first is shown."""
    cuts = [(name, [_cut(sample, spacing) for sample in samples]) for name, samples in rows]
    span = find_range([cut for _, row in cuts for sample in row for cut in sample], value_range)
    strips = []
    for name, row in cuts:
        cells = [_resize(_strip([paint(cut, span) for cut in sample])) for sample in row]
        strips.append((name, _strip(cells)))
    return write_picture(path, encode(_draw(strips, title, caption, heads), grey=False))


def _cut(sample: np.ndarray, spacing: Sequence[float]) -> list[np.ndarray]:
    """A sample [C, H, W], C 1 or 3, or the middle slices of a volume across z, y and x; voxels as long as in space."""
    sample = np.asarray(sample, np.float32)
    if len(sample) != 3:
        sample = sample[:1]
    spacing = tuple(spacing) or (1.0,) * (sample.ndim - 1)
    for axis, size in enumerate(spacing, start=1):
        length = max(1, round(sample.shape[axis] * min(size / min(spacing), 8.0)))
        places = (np.arange(length) + 0.5) * sample.shape[axis] / length
        sample = sample.take(places.astype(int), axis)
    if sample.ndim == 3:
        return [sample]
    z, y, x = (size // 2 for size in sample.shape[1:])
    return [sample[:, z], sample[:, :, y], sample[:, :, :, x]]


def _resize(picture: np.ndarray) -> np.ndarray:
    """Small pictures [H, W, 3] enlarged by a whole number, so that their pixels show; large ones thinned out."""
    longest = max(picture.shape[:2])
    if longest < _SMALLEST:
        times = -(-_SMALLEST // longest)
        return picture.repeat(times, axis=0).repeat(times, axis=1)
    step = -(-longest // _LARGEST)
    return picture[::step, ::step]


def _strip(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures side by side, with white between them."""
    high, wide = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    gap = max(1, wide // 24)
    strip = np.ones((high, len(pictures) * (wide + gap) - gap, 3), np.float32)
    for place, picture in enumerate(pictures):
        left = place * (wide + gap)
        strip[: picture.shape[0], left : left + picture.shape[1]] = picture
    return strip


def _draw(strips: Sequence[tuple[str, np.ndarray]], title: str, caption: str, heads: Sequence[str]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    longest = max(len(name) for name, _ in strips)
    left, gap, head = 0.2 + 0.075 * min(longest, 24), 0.05, 0.45 + (0.2 if heads else 0.0)
    widest = max(strip.shape[1] for _, strip in strips)
    inch = max(90.0, widest / 9.0)  # pixels of a picture
    foot = 0.12 + 0.17 * len(caption.splitlines())
    wide = max(left + widest / inch + 0.2, 5.0)
    high = head + sum(strip.shape[0] / inch + gap for _, strip in strips) + foot
    figure = Figure(figsize=(wide, high), dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.text(0.15 / wide, 1 - 0.2 / high, title, fontsize=10, weight="bold", va="center", **_TEXT)
    for number, words in enumerate(heads):
        x = left + (number + 0.5) * (widest / inch) / len(heads)
        figure.text(x / wide, 1 - (head - 0.12) / high, words, fontsize=8, ha="center", va="center", **_TEXT)
    top = head
    for name, strip in strips:
        across, tall = strip.shape[1] / inch, strip.shape[0] / inch
        axes = figure.add_axes((left / wide, 1 - (top + tall) / high, across / wide, tall / high))
        axes.imshow(np.rint(strip * 255).astype(np.uint8), aspect="auto", interpolation="antialiased")
        axes.set_axis_off()
        words = name if len(name) <= 24 else name[:23] + "…"
        middle = 1 - (top + tall / 2) / high
        figure.text((left - 0.1) / wide, middle, words, fontsize=8, ha="right", va="center", **_TEXT)
        top += tall + gap
    style = {**_TEXT, "color": "#52606d"}
    figure.text(0.15 / wide, 0.08 / high, caption, fontsize=7.5, va="bottom", **style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
