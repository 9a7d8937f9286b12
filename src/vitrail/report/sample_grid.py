"""Samples that a model has made, beside real data: one row a class, so that likeness and variety are seen at a glance.

- without classes, rows are just filled; what was given (a condition) stands to the left of each sample and its truth
- volumes show their middle slice; three channels are colours, of more the first three, of fewer the first
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.report.files import write_picture
from vitrail.report.panels import encode, find_range, paint

_DPI = 150
_COLUMNS = 4  # of samples, and as many of real data, where there are no classes
_TEXT: dict[str, Any] = {"color": "#1f2933", "parse_math": False}


def sample_grid(
    path: str | Path,
    made: np.ndarray,
    real: np.ndarray,
    *,
    given: np.ndarray | None = None,
    alike: bool = False,
    names: Sequence[str] | None = None,
    title: str = "",
    caption: str = "",
    value_range: tuple[float, float] | None = None,
) -> Path:
    """Draw samples and data [B, C, *S] to a PNG and return its path; both are of the classes `names` [B].

    What was given has the units of the samples if it is `alike`; else it may have any, and has shades of its own.
    """
    span = find_range([flat(image) for image in real], value_range)
    samples, truths = ([paint(flat(image), span) for image in images] for images in (made, real))
    if given is not None:
        own = span if alike else find_range([flat(image) for image in given], None)
        shown = [paint(flat(image), own) for image in given]
        blocks = [("given", shown), ("sample", samples), ("data", truths)]
        rows = [("", [[images[i]] for _, images in blocks]) for i in range(len(made))]
        return _write(path, rows, [head for head, _ in blocks], title, caption)
    places: dict[str, list[int]] = {}
    for number in range(len(made)):
        places.setdefault(names[number] if names is not None else f"\n{number // _COLUMNS}", []).append(number)
    rows = [
        ("" if name.startswith("\n") else name, [[images[i] for i in at] for images in (samples, truths)])
        for name, at in places.items()
    ]
    return _write(path, rows, ["samples", "data"], title, caption)


def flat(image: np.ndarray) -> np.ndarray:
    """[C, H, W] with one channel or three, of an image or volume [C, *S]."""
    image = image if image.ndim == 3 else image[:, image.shape[1] // 2]
    return image[: 3 if len(image) >= 3 else 1].astype(np.float32)


def _write(
    path: str | Path,
    rows: Sequence[tuple[str, Sequence[Sequence[np.ndarray]]]],
    heads: Sequence[str],
    title: str,
    caption: str,
) -> Path:
    """Rows of a name and blocks of pictures [H, W, 3]; a gap is between blocks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    height, width = rows[0][1][0][0].shape[:2]
    counts = [max(len(blocks[b]) for _, blocks in rows) for b in range(len(heads))]
    shape = min(max(height / max(width, 1), 0.25), 2.5)
    tile = max(min(9.0 / sum(counts), 6.0 / len(rows) / shape, 1.6), 0.45)  # inches
    tall = tile * shape
    gap, between = 0.04, 0.22
    longest = max((len(name) for name, _ in rows), default=0)
    left = 0.15 + 0.075 * min(longest, 24)
    top, foot = (0.34 if title else 0.08) + 0.26, 0.12 + (0.22 if caption else 0.0)
    wide = left + sum(counts) * (tile + gap) + between * (len(heads) - 1) + 0.15
    size = (max(wide, 4.6), top + len(rows) * (tall + gap) + foot)
    figure = Figure(figsize=size, dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for row, (name, blocks) in enumerate(rows):
        low = size[1] - top - (row + 1) * (tall + gap) + gap
        if name:
            words = name if len(name) <= 24 else name[:23] + "…"
            place = ((left - 0.08) / size[0], (low + tall / 2) / size[1])
            figure.text(*place, words, fontsize=8, ha="right", va="center", **_TEXT)
        x = left
        for head, count, pictures in zip(heads, counts, blocks, strict=True):
            if row == 0:
                figure.text(x / size[0], 1 - (top - 0.12) / size[1], head, fontsize=9, va="center", **_TEXT)
            for number, picture in enumerate(pictures):
                box = ((x + number * (tile + gap)) / size[0], low / size[1], tile / size[0], tall / size[1])
                axes = figure.add_axes(box)
                axes.imshow(
                    np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8),
                    aspect="auto",
                    interpolation="nearest" if width <= 128 else "antialiased",
                )
                axes.set_axis_off()
            x += count * (tile + gap) + between
    if title:
        figure.text(0.15 / size[0], 1 - 0.2 / size[1], title, fontsize=11, weight="bold", va="center", **_TEXT)
    if caption:
        style = {**_TEXT, "color": "#52606d"}
        figure.text(0.15 / size[0], 0.08 / size[1], caption, fontsize=8, va="bottom", **style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
    return write_picture(path, encode(drawn, grey=False))
