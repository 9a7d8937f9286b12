"""Panels of samples: what a model was given, what it made of them, and what was right.

Reconstruction: target, what the model saw, its prediction and the error, one sample a row.
- hidden voxels are drawn in one flat colour that no grey value has
- the prediction is pasted into the visible target, as the model's reader would use it
- every picture of a panel shares one value range, and every error one colour scale
Segmentation: image, true and predicted labels in colour over it, one sample a row; class 0 has no colour.
Classification: a grid of images, each with the class that the model names, and the true one where it is wrong.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.files import write_picture

if TYPE_CHECKING:
    from PIL.Image import Image

HIDDEN = (0.16, 0.38, 0.62)  # flat blue: hidden from the model
BROKEN = (0.90, 0.10, 0.45)  # flat pink: not a finite number
NOT_SCORED = (0.93, 0.94, 0.95)  # error column, where the model was shown the answer
COLUMNS = ("target", "shown to the model", "prediction", "absolute error")
_DPI = 150
_MOST_BYTES = 400_000
_MOST_ROWS = 8
_MOST_IMAGES = 48  # of a classification
_MOST_KEYS = 24
_TILE = 1.9  # inches
# Of classes 1, 2, ...
LABEL_COLOURS = (
    (0.90, 0.62, 0.00),
    (0.34, 0.71, 0.91),
    (0.00, 0.62, 0.45),
    (0.84, 0.37, 0.00),
    (0.80, 0.47, 0.65),
    (0.94, 0.89, 0.26),
    (0.00, 0.45, 0.70),
)
RIGHT, WRONG = (0.13, 0.47, 0.27), (0.75, 0.16, 0.18)


def reconstruction_panel(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str = "",
    caption: str = "",
    value_range: tuple[float, float] | None = None,
    slices: int = 1,
    aspect: float = 1.0,
    ndim: int | None = None,
) -> Path:
    """Draw rows of {target, prediction, hidden, name?} to a PNG and return its path.

    `target` and `prediction` are [spatial] or [C, spatial] with C 1 or 3; `hidden` is a boolean [spatial] array, true
    where the model saw nothing (the key `masked` holds the same where `hidden` is absent). Volumes show `slices`
    slices along their first axis, the middle one when it is 1. `value_range` None takes the targets' percentiles 0.5
    and 99.5; `aspect` is the physical height of a pixel over its width; `ndim` settles what the arrays leave open.
    """
    samples = [_read_row(row, ndim) for row in rows]
    if not samples:
        raise ValueError("a panel needs at least one row")
    lo, hi = find_range([target for target, _, _, _ in samples], value_range)
    tiles = [tile for sample in samples for tile in _cut(*sample, slices)][:_MOST_ROWS]
    # The worst hundredth of the voxels may saturate, so that a few outliers do not blacken the rest.
    errors = np.concatenate([np.abs(p - t).mean(0)[h].ravel() for t, p, h, _ in tiles])
    errors = errors[np.isfinite(errors)]
    top = float(np.percentile(errors, 99)) if errors.size else 0.0
    top = top if top > 0 else (hi - lo) or 1.0
    image = _draw(tiles, (lo, hi), top, title, caption, aspect)
    return write_picture(path, encode(image, grey=all(target.shape[0] == 1 for target, _, _, _ in tiles)))


def segmentation_panel(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    ignore: int | None = None,
    title: str = "",
    caption: str = "",
    value_range: tuple[float, float] | None = None,
    aspect: float = 1.0,
) -> Path:
    """Draw rows of {image, truth, prediction, name?} to a PNG and return its path.

    `image` is [C, spatial] (the first variable is shown, or three as colours), `truth` and `prediction` are numbers of
    classes [spatial]; volumes show the middle slice of their first axis. Voxels of label `ignore` are not scored.
    """
    if not rows:
        raise ValueError("a panel needs at least one row")
    tiles = []
    for row in rows[:_MOST_ROWS]:
        image, truth, guess = (np.asarray(row[key]) for key in ("image", "truth", "prediction"))
        if truth.ndim not in (2, 3) or guess.shape != truth.shape or image.shape[1:] != truth.shape:
            raise ValueError(
                f"a panel needs an image [C, spatial] and labels [spatial] of 2 or 3 axes, got {image.shape}, "
                f"{truth.shape} and {guess.shape}"
            )
        name = str(row.get("name") or "")
        if truth.ndim == 3:
            z = len(truth) // 2
            image, truth, guess, name = image[:, z], truth[z], guess[z], f"{name}\nslice {z}".strip()
        tiles.append((_viewable(image), truth, guess, name))
    span = find_range([image for image, _, _, _ in tiles], value_range)
    colours = np.stack([label_colour(number) for number in range(len(names))])
    cells, seen = [], set()
    for image, truth, guess, name in tiles:
        grey = paint(image, span)
        cells += [
            (grey, name),
            (overlay(grey, truth, colours, ignore), ""),
            (overlay(grey, guess, colours, None), ""),
        ]
        seen |= {int(value) for value in np.union1d(truth, guess)}
    shown = [number for number in range(1, len(names)) if number in seen][:_MOST_KEYS]
    keys = [(_shorten(names[number], 24), tuple(colours[number])) for number in shown]
    if ignore is not None and ignore in seen:
        keys.append(("not scored", NOT_SCORED))
    picture = _draw_grid(
        cells,
        columns=3,
        heads=("image", "true labels", "prediction"),
        keys=keys,
        title=title,
        caption=caption,
        aspect=aspect,
    )
    return write_picture(path, encode(picture, grey=False))


def classification_panel(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str = "",
    caption: str = "",
    value_range: tuple[float, float] | None = None,
    aspect: float = 1.0,
) -> Path:
    """Draw {image, truth, prediction, likelihood, right} as a grid of images to a PNG and return its path.

    `image` is [C, spatial] (the first variable is shown, or three as colours; of a volume the middle slice), `truth`
    and `prediction` are names, `likelihood` is the model's own for its prediction.
    """
    if not rows:
        raise ValueError("a panel needs at least one image")
    images = [np.asarray(row["image"]) for row in rows[:_MOST_IMAGES]]
    images = [_viewable(image[:, image.shape[1] // 2] if image.ndim == 4 else image) for image in images]
    span = find_range(images, value_range)
    cells = []
    for image, row in zip(images, rows, strict=False):
        words = f"{_shorten(str(row['prediction']), 20)}  {row['likelihood']:.0%}"
        if not row["right"]:
            words += f"\nis {_shorten(str(row['truth']), 20)}"
        cells.append((paint(image, span), words))
    marks = [RIGHT if row["right"] else WRONG for row in rows[: len(cells)]]
    keys = [("right", RIGHT), ("wrong", WRONG)]
    columns = min(len(cells), 8 if len(cells) > 12 else 6 if len(cells) > 4 else 4)
    picture = _draw_grid(
        cells, columns=columns, marks=marks, keys=keys, title=title, caption=caption, aspect=aspect, tile=1.15
    )
    return write_picture(path, encode(picture, grey=False))


def _viewable(image: np.ndarray) -> np.ndarray:
    """Three variables as colours, of any other number the first."""
    return image.astype(np.float32) if image.shape[0] == 3 else image[:1].astype(np.float32)


def label_colour(number: int) -> np.ndarray:
    """Colours that most eyes can tell apart (Okabe and Ito's) for the first classes, then hues spread evenly."""
    from matplotlib.colors import hsv_to_rgb

    if number <= len(LABEL_COLOURS):
        return np.array(LABEL_COLOURS[number - 1] if number else (0.0, 0.0, 0.0))
    return np.array(hsv_to_rgb((number * 0.618 % 1, 0.75, 0.95 - 0.3 * (number % 2))))


def overlay(grey: np.ndarray, labels: np.ndarray, colours: np.ndarray, ignore: int | None) -> np.ndarray:
    """Labels in colour over the image, which still shows through; class 0 leaves it as it is."""
    known = (labels > 0) & (labels < len(colours))
    # Over a lightened image: dark structures would blacken their colours.
    mixed = np.where(known[..., None], 0.28 * (0.3 + 0.7 * grey) + 0.72 * colours[np.where(known, labels, 0)], grey)
    if ignore is not None:
        mixed[labels == ignore] = NOT_SCORED
    return mixed


def _draw_grid(
    cells: Sequence[tuple[np.ndarray, str]],
    *,
    columns: int,
    heads: Sequence[str] = (),
    marks: Sequence[tuple[float, float, float]] = (),
    keys: Sequence[tuple[str, tuple[float, ...]]],
    title: str,
    caption: str,
    aspect: float,
    tile: float = 2.3,
) -> Image:
    """Pictures [H, W, 3] in rows above a key of colours; with `marks`, each has its words under it in that colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image as Pillow

    height, width = cells[0][0].shape[:2]
    tall = min(max(height * aspect / max(width, 1), 0.25), 2.5)
    rows = -(-len(cells) // columns)
    named = not marks and any(words for _, words in cells)
    left, right, gap, under = 0.15 + 0.3 * named, 0.15, 0.06, 0.34 if marks else 0.0
    heading = (0.34 if title else 0.08) + (0.26 if heads else 0.04)
    lines = _wrap_keys(keys, columns * (tile + gap))
    footing = 0.1 + 0.22 * len(lines) + (0.24 * len(caption.splitlines()) if caption else 0.0)
    wide = max(left + columns * tile + (columns - 1) * gap + right, 4.6 if caption or title else 0.0)
    size = (wide, heading + rows * (tile * tall + under) + (rows - 1) * gap + footing)
    figure = Figure(figsize=size, dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    text: dict[str, Any] = {"color": "#1f2933", "parse_math": False}
    for number, (picture, words) in enumerate(cells):
        row, column = divmod(number, columns)
        x, top = left + column * (tile + gap), heading + row * (tile * tall + under + gap)
        ax = figure.add_axes((x / size[0], 1 - (top + tile * tall) / size[1], tile / size[0], tile * tall / size[1]))
        ax.imshow(
            np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8),
            aspect="auto",
            interpolation="nearest" if width <= 256 else "antialiased",
        )
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        if heads and row == 0:
            ax.set_title(heads[column], fontsize=9, pad=5, **text)
        if marks:
            ax.spines[:].set(visible=True, color=marks[number], linewidth=1.6)
            ax.set_xlabel(words, fontsize=7, labelpad=3, parse_math=False, color=marks[number], linespacing=1.1)
        elif words:
            ax.set_ylabel(_shorten(words, 40), fontsize=8, labelpad=5, **text)
    y = footing - 0.16
    for line in lines:
        x = left
        for words, colour in line:
            figure.text(x / size[0], y / size[1], "■", fontsize=9, va="center", color=colour)
            figure.text((x + 0.15) / size[0], y / size[1], words, fontsize=8, va="center", **text)
            x += _key_width(words)
        y -= 0.22
    if title:
        words = _shorten(title, 110)
        figure.text(left / size[0], 1 - 0.2 / size[1], words, fontsize=11, weight="bold", va="center", **text)
    if caption:
        figure.text(left / size[0], 0.08 / size[1], caption, fontsize=8, va="bottom", **{**text, "color": "#52606d"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        canvas.draw()
    return Pillow.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def _key_width(words: str) -> float:
    return 0.38 + 0.068 * len(words)  # inches


def _wrap_keys(keys: Sequence[tuple[str, Any]], wide: float) -> list[list[tuple[str, Any]]]:
    """The keys in lines that fit."""
    lines: list[list[tuple[str, Any]]] = []
    used = 0.0
    for key in keys:
        if not lines or used + _key_width(key[0]) > wide:
            lines.append([])
            used = 0.0
        lines[-1].append(key)
        used += _key_width(key[0])
    return lines


def _read_row(row: Mapping[str, Any], ndim: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Target and prediction as float32 [C, spatial], hidden as bool [spatial]."""
    target, prediction = (np.asarray(row[key], dtype=np.float32) for key in ("target", "prediction"))
    hidden: Any = np.asarray(row["hidden"] if row.get("hidden") is not None else row["masked"])
    if hidden.dtype != np.bool_:
        hidden = ~np.isfinite(hidden) if np.issubdtype(hidden.dtype, np.floating) else hidden.astype(bool)
    if target.shape != prediction.shape:
        raise ValueError(f"target {target.shape} and prediction {prediction.shape} must have one shape")
    if ndim is None:
        ndim = 3 if target.ndim == 4 else hidden.ndim if hidden.ndim in (target.ndim, target.ndim - 1) else target.ndim
    if target.ndim == ndim:
        target, prediction = target[None], prediction[None]
    if hidden.ndim == ndim + 1:
        hidden = hidden.any(0)
    if (
        ndim not in (2, 3)
        or target.ndim != ndim + 1
        or target.shape[0] not in (1, 3)
        or hidden.shape != target.shape[1:]
    ):
        raise ValueError(
            f"a panel needs 2-D or 3-D arrays of 1 or 3 channels, got {target.shape}, hidden {hidden.shape}"
        )
    return target, prediction, hidden, str(row.get("name") or "")


def _cut(
    target: np.ndarray, prediction: np.ndarray, hidden: np.ndarray, name: str, slices: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, str]]:
    """The 2-D tiles [C, H, W] of a sample: itself, or slices at the middles of equal parts of its first axis."""
    if hidden.ndim == 2:
        return [(target, prediction, hidden, name)]
    depth, slices = hidden.shape[0], max(1, min(slices, hidden.shape[0]))
    places = [int((i + 0.5) * depth / slices) for i in range(slices)]
    return [(target[:, z], prediction[:, z], hidden[z], f"{name}\nslice {z}" if name else f"slice {z}") for z in places]


def find_range(targets: Sequence[np.ndarray], given: tuple[float, float] | None) -> tuple[float, float]:
    if given is not None:
        lo, hi = float(given[0]), float(given[1])
    else:
        # A panel needs no exact percentile: a sixteenth of a large volume tells it.
        values = np.concatenate([t.ravel()[:: 16 if t.size > 2**20 else 1] for t in targets])
        values = values[np.isfinite(values)]
        lo, hi = (float(v) for v in np.percentile(values, (0.5, 99.5))) if values.size else (0.0, 1.0)
    return (lo, hi) if math.isfinite(hi - lo) and hi > lo else (lo if math.isfinite(lo) else 0.0, lo + 1.0)


def paint(image: np.ndarray, value_range: tuple[float, float]) -> np.ndarray:
    """[C, H, W] values as [H, W, 3] colours; what is not finite gets its own colour."""
    lo, hi = value_range
    unit = np.clip((image - lo) / (hi - lo), 0, 1)
    bad = ~np.isfinite(unit).all(0)
    colours = np.moveaxis(np.broadcast_to(unit, (3, *unit.shape[1:])), 0, -1).copy()
    colours[bad] = BROKEN
    return colours


def _draw(
    tiles: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, str]],
    value_range: tuple[float, float],
    top: float,
    title: str,
    caption: str,
    aspect: float,
) -> Image:
    """The panel as a picture in memory, through matplotlib's objects: nothing global is touched."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from PIL import Image as Pillow

    height, width = tiles[0][2].shape
    # Very long or very flat pictures are held to a shape that still shows.
    tall = min(max(height * aspect / max(width, 1), 0.25), 2.5)
    heading = 0.32 if title else 0.0
    footing = 0.26 * len(caption.splitlines()) if caption else 0.0
    size = (4 * _TILE + 0.9, _TILE * tall * len(tiles) + 0.08 * (len(tiles) - 1) + 1.0 + heading + footing)
    figure = Figure(figsize=size, dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, below, above = 0.55 / size[0], (0.62 + footing) / size[1], 1 - (heading + 0.3) / size[1]
    grid = figure.add_gridspec(
        len(tiles), 4, left=left, right=1 - 0.15 / size[0], bottom=below, top=above, wspace=0.05, hspace=0.05 / tall
    )
    text: dict[str, Any] = {"color": "#1f2933", "parse_math": False}  # names may hold a dollar sign
    heat = colormaps["magma"]
    axes = [[figure.add_subplot(grid[r, c]) for c in range(4)] for r in range(len(tiles))]
    for r, (target, prediction, hidden, name) in enumerate(tiles):
        shown, guess = paint(target, value_range), paint(prediction, value_range)
        masked = np.where(hidden[..., None], np.asarray(HIDDEN), shown)
        pasted = np.where(hidden[..., None], guess, shown)
        error = np.abs(prediction - target).mean(0)
        heated = heat(np.clip(np.nan_to_num(error) / top, 0, 1))[..., :3]
        heated[~np.isfinite(error)] = BROKEN
        heated[~hidden] = NOT_SCORED
        for c, picture in enumerate((shown, masked, pasted, heated)):
            ax = axes[r][c]
            # Whole bytes: matplotlib would cut fractions off, and flat colours would not match their key.
            ax.imshow(
                np.rint(picture * 255).astype(np.uint8),
                aspect="auto",
                interpolation="nearest" if width <= 256 else "antialiased",
            )
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            if r == 0:
                ax.set_title(COLUMNS[c], fontsize=9, pad=5, **text)
        axes[r][0].set_ylabel(_shorten(name, 40), fontsize=8, labelpad=6, **text)
    for left_axis, right_axis, scale, colours, label in (
        (axes[-1][0], axes[-1][2], Normalize(*value_range), "gray", "value"),
        (axes[-1][3], axes[-1][3], Normalize(0, top), "magma", "absolute error"),
    ):
        x0, x1 = left_axis.get_position().x0, right_axis.get_position().x1
        bar_axis = figure.add_axes((x0, below - 0.2 / size[1], x1 - x0, 0.09 / size[1]))
        bar = figure.colorbar(ScalarMappable(scale, colours), cax=bar_axis, orientation="horizontal")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7.5, length=2, color="#9aa5b1", labelcolor="#52606d", pad=2)
        bar.ax.locator_params(nbins=7 if label == "value" else 4)
        figure.text(x0, below - 0.5 / size[1], label, fontsize=7.5, va="center", color="#52606d")
    broken = any(not (np.isfinite(target).all() and np.isfinite(guess).all()) for target, guess, _, _ in tiles)
    keys = [(1, "hidden from the model", HIDDEN)] + [(2, "not a finite number", BROKEN)] * broken
    for column, words, colour in keys:
        x0 = axes[-1][column].get_position().x0
        figure.text(x0, below - 0.5 / size[1], f"■ {words}", fontsize=7.5, va="center", color=colour)
    if title:
        figure.text(left, 1 - 0.2 / size[1], _shorten(title, 110), fontsize=11, weight="bold", va="center", **text)
    if caption:
        figure.text(left, 0.08 / size[1], caption, fontsize=8, va="bottom", **{**text, "color": "#52606d"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may hold letters that the font lacks
        canvas.draw()
    return Pillow.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def encode(image: Image, *, grey: bool) -> bytes:
    """The picture as PNG below the size limit: grey ones first with a palette, all then with fewer pixels."""
    from PIL import Image as Pillow

    scale, content = 1.0, b""
    while scale > 0.2:
        wide, high = round(image.width * scale), round(image.height * scale)
        small = image if scale == 1.0 else image.resize((wide, high), Pillow.Resampling.LANCZOS)
        candidates = [small]
        if grey or scale < 0.5:  # colour pictures suffer more from a palette than from fewer pixels
            candidates.append(small.quantize(256, dither=Pillow.Dither.NONE))
        for candidate in candidates:
            stream = io.BytesIO()
            candidate.save(stream, format="PNG", dpi=(_DPI * scale, _DPI * scale))
            content = stream.getvalue()
            if len(content) < _MOST_BYTES:
                return content
        # The size goes with the pixels, so the next guess is near; always by a good step, so that it ends.
        scale *= min(0.85, 0.97 * math.sqrt(_MOST_BYTES / len(content)))
    return content


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
