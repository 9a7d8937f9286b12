"""Panels: what a model was given, what it made of it and what was right, each a PNG.

- reconstruction: target, what the model saw, its prediction and the error, one sample a row; hidden voxels have a flat
  colour that no grey value has; the prediction is pasted into the visible target, as the model's reader would use it
- segmentation: image, true and predicted labels in colour over it, one sample a row; class 0 has no colour
- classification: a grid of images, each with the class that the model names, and the true one where it is wrong
- pairs: originals, what came back of them, and the difference
- samples: what a model has made beside real data, one row a class
- tree: the leaves of an adaptive tree over its image, and what its tokens hold of it

All pictures of a panel share one range of values; of a volume the middle slice is shown where nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.figures import EDGE, SOFT, WORDS, Colour, Sheet, key_width, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitrail.layers.trees import Tree

HIDDEN = (0.16, 0.38, 0.62)  # flat blue: hidden from the model
BROKEN = (0.90, 0.10, 0.45)  # flat pink: not a finite number
NOT_SCORED = (0.93, 0.94, 0.95)  # error column, where the model was shown the answer
LINES = (0.98, 0.62, 0.12)  # amber, which no grey value has: borders of leaves and tokens
RIGHT, WRONG = (0.13, 0.47, 0.27), (0.75, 0.16, 0.18)
LABEL_COLOURS = (  # of classes 1, 2, ...
    (0.90, 0.62, 0.00),
    (0.34, 0.71, 0.91),
    (0.00, 0.62, 0.45),
    (0.84, 0.37, 0.00),
    (0.80, 0.47, 0.65),
    (0.94, 0.89, 0.26),
    (0.00, 0.45, 0.70),
)
_COLUMNS = ("target", "shown to the model", "prediction", "absolute error")
_MOST_ROWS = 8
_MOST_IMAGES = 48  # of a classification
_MOST_KEYS = 24
_ACROSS = 4  # samples, and as many of real data, where there are no classes
_TILE = 1.9  # inches of a reconstruction's picture
_TREE_TILE = 3.4  # inches along the longer side of a picture

Tile = tuple[np.ndarray, np.ndarray, np.ndarray, str]  # target, prediction, hidden, name


# ---------------------------------------------------------------- values as colours


def find_range(targets: Sequence[np.ndarray], given: tuple[float, float] | None) -> tuple[float, float]:
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


def _viewable(image: np.ndarray) -> np.ndarray:
    """Return three variables as colours, of any other number the first; of a volume the middle slice."""
    image = image[:, image.shape[1] // 2] if image.ndim == 4 else image
    return image[: 3 if len(image) == 3 else 1].astype(np.float32)


def _span(high: float, wide: float) -> float:
    """Return the height of a picture over its width, held to a shape that still shows."""
    return min(max(high / max(wide, 1), 0.25), 2.5)


# ---------------------------------------------------------------- reconstruction


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
    span = find_range([target for target, _, _, _ in samples], value_range)
    tiles = [tile for sample in samples for tile in _cut(*sample, slices)][:_MOST_ROWS]
    # The worst hundredth of the voxels may saturate, so that a few outliers do not blacken the rest.
    errors = np.concatenate([np.abs(p - t).mean(0)[h].ravel() for t, p, h, _ in tiles])
    errors = errors[np.isfinite(errors)]
    top = float(np.percentile(errors, 99)) if errors.size else 0.0
    top = top if top > 0 else (span[1] - span[0]) or 1.0
    sheet = _draw_reconstruction(tiles, span, top, title, caption, aspect)
    return sheet.put(path, grey=all(target.shape[0] == 1 for target, _, _, _ in tiles))


def _read_row(row: Mapping[str, Any], ndim: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Return target and prediction as float32 [C, spatial], hidden as bool [spatial], and the name."""
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
    """Cut a sample into tiles [C, H, W]: itself, or slices at the middles of equal parts of its first axis."""
    if hidden.ndim == 2:
        return [(target, prediction, hidden, name)]
    depth, slices = hidden.shape[0], max(1, min(slices, hidden.shape[0]))
    places = [int((i + 0.5) * depth / slices) for i in range(slices)]
    return [(target[:, z], prediction[:, z], hidden[z], f"{name}\nslice {z}" if name else f"slice {z}") for z in places]


def _draw_reconstruction(
    tiles: Sequence[Tile], span: tuple[float, float], top: float, title: str, caption: str, aspect: float
) -> Sheet:
    """Draw the rows above bars of colours for values and errors."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows, (height, width) = len(tiles), tiles[0][2].shape
    tall = _span(height * aspect, width)
    head = 0.62 if title else 0.3
    foot = 0.62 + (0.26 * len(caption.splitlines()) if caption else 0.0)
    sheet = Sheet(4 * _TILE + 0.9, _TILE * tall * rows + 0.08 * (rows - 1) + 0.08 + head + foot)
    left, across = 0.55, (sheet.wide - 0.7) / (4 + 3 * 0.05)
    down = (sheet.high - head - foot) / (rows + (rows - 1) * 0.05 / tall)
    columns = [left + 1.05 * across * column for column in range(4)]
    heat = colormaps["magma"]
    for row, (target, prediction, hidden, name) in enumerate(tiles):
        shown, guess = paint(target, span), paint(prediction, span)
        error = np.abs(prediction - target).mean(0)
        heated = heat(np.clip(np.nan_to_num(error) / top, 0, 1))[..., :3]
        heated[~np.isfinite(error)] = BROKEN
        heated[~hidden] = NOT_SCORED
        masked, pasted = (np.where(hidden[..., None], fill, shown) for fill in (np.asarray(HIDDEN), guess))
        for column, picture in enumerate((shown, masked, pasted, heated)):
            place = (columns[column], head + row * down * (1 + 0.05 / tall))
            ax = sheet.image(picture, *place, across, down, smooth=width > 256)
            if row == 0:
                ax.set_title(_COLUMNS[column], fontsize=9, pad=5, **WORDS)
            if column == 0:
                ax.set_ylabel(shorten(name, 40), fontsize=8, labelpad=6, **WORDS)
    under = sheet.high - foot
    for first, last, scale, colours, words, most in (
        (0, 2, Normalize(*span), "gray", "value", 7),
        (3, 3, Normalize(0, top), "magma", "absolute error", 4),
    ):
        strip = sheet.axes(columns[first], under + 0.11, columns[last] + across - columns[first], 0.09)
        bar = sheet.figure.colorbar(ScalarMappable(scale, colours), cax=strip, orientation="horizontal")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7.5, length=2, color=EDGE, labelcolor=SOFT, pad=2)
        bar.ax.locator_params(nbins=most)
        sheet.text(columns[first], under + 0.5, words, size=7.5, color=SOFT)
    sheet.text(columns[1], under + 0.5, "■ hidden from the model", size=7.5, color=HIDDEN)
    if any(not (np.isfinite(target).all() and np.isfinite(guess).all()) for target, guess, _, _ in tiles):
        sheet.text(columns[2], under + 0.5, "■ not a finite number", size=7.5, color=BROKEN)
    sheet.frame(title, caption, left=left, most=110)
    return sheet


# ---------------------------------------------------------------- grids of pictures


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
            truth, guess, name = truth[z], guess[z], f"{name}\nslice {z}".strip()
        tiles.append((_viewable(image), truth, guess, name))
    span = find_range([image for image, _, _, _ in tiles], value_range)
    colours = np.stack([label_colour(number) for number in range(len(names))])
    cells, seen = [], set()
    for image, truth, guess, name in tiles:
        grey = paint(image, span)
        labelled = (overlay(grey, truth, colours, ignore), overlay(grey, guess, colours, None))
        cells += [(grey, name), *((picture, "") for picture in labelled)]
        seen |= {int(value) for value in np.union1d(truth, guess)}
    shown = [number for number in range(1, len(names)) if number in seen][:_MOST_KEYS]
    keys: list[tuple[str, Colour]] = [(shorten(names[number], 24), tuple(colours[number])) for number in shown]
    if ignore is not None and ignore in seen:
        keys.append(("not scored", NOT_SCORED))
    heads = ("image", "true labels", "prediction")
    return _draw_grid(cells, title, caption, columns=3, heads=heads, keys=keys, aspect=aspect).put(path)


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
    rows = rows[:_MOST_IMAGES]
    images = [_viewable(np.asarray(row["image"])) for row in rows]
    span = find_range(images, value_range)
    cells = []
    for image, row in zip(images, rows, strict=True):
        words = f"{shorten(str(row['prediction']), 20)}  {row['likelihood']:.0%}"
        if not row["right"]:
            words += f"\nis {shorten(str(row['truth']), 20)}"
        cells.append((paint(image, span), words))
    marks = [RIGHT if row["right"] else WRONG for row in rows]
    keys = [("right", RIGHT), ("wrong", WRONG)]
    columns = min(len(cells), 8 if len(cells) > 12 else 6 if len(cells) > 4 else 4)
    sheet = _draw_grid(cells, title, caption, columns=columns, marks=marks, keys=keys, aspect=aspect, tile=1.15)
    return sheet.put(path)


def pairs_panel(
    path: str | Path, pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, title: str = "", caption: str = ""
) -> Path:
    """Draw (original, reconstruction) pairs [C, *spatial] to a PNG; of volumes the middle slice.

    Three variables are colours, of any other number the first is shown. Differences are grey where there are none, and
    share the range of the originals.
    """
    if not pairs:
        raise ValueError("a panel needs at least one pair")
    cut = [[_viewable(each) for each in pair] for pair in pairs]
    low, high = find_range([original for original, _ in cut], None)
    cells = []
    for original, again in cut[:_MOST_ROWS]:
        difference = again - original + (low + high) / 2
        cells += [(paint(image, (low, high)), "") for image in (original, again, difference)]
    sheet = _draw_grid(cells, title, caption, columns=3, heads=("original", "reconstruction", "difference"))
    return sheet.put(path, grey=all(original.shape[0] == 1 for original, _ in cut))


def _draw_grid(
    cells: Sequence[tuple[np.ndarray, str]],
    title: str,
    caption: str,
    *,
    columns: int,
    heads: Sequence[str] = (),
    marks: Sequence[Colour] = (),
    keys: Sequence[tuple[str, Colour]] = (),
    aspect: float = 1.0,
    tile: float = 2.3,
) -> Sheet:
    """Draw pictures [H, W, 3] in rows above a key of colours; with `marks`, each has its words below in that colour."""
    height, width = cells[0][0].shape[:2]
    tall = tile * _span(height * aspect, width)
    rows = -(-len(cells) // columns)
    named = not marks and any(words for _, words in cells)
    left, gap, under = 0.15 + 0.3 * named, 0.06, 0.34 if marks else 0.0
    heading = (0.34 if title else 0.08) + (0.26 if heads else 0.04)
    lines = _wrap_keys(keys, columns * (tile + gap))
    footing = 0.1 + 0.22 * len(lines) + (0.24 * len(caption.splitlines()) if caption else 0.0)
    wide = max(left + columns * tile + (columns - 1) * gap + 0.15, 4.6 if caption or title else 0.0)
    sheet = Sheet(wide, heading + rows * (tall + under) + (rows - 1) * gap + footing)
    for number, (picture, words) in enumerate(cells):
        row, column = divmod(number, columns)
        top = heading + row * (tall + under + gap)
        ax = sheet.image(picture, left + column * (tile + gap), top, tile, tall, smooth=width > 256)
        if heads and row == 0:
            ax.set_title(heads[column], fontsize=9, pad=5, **WORDS)
        if marks:
            ax.spines[:].set(visible=True, color=marks[number], linewidth=1.6)
            ax.set_xlabel(words, fontsize=7, labelpad=3, linespacing=1.1, **(WORDS | {"color": marks[number]}))
        elif words:
            ax.set_ylabel(shorten(words, 40), fontsize=8, labelpad=5, **WORDS)
    for number, line in enumerate(lines):
        sheet.key(line, left, sheet.high - footing + 0.16 + 0.22 * number)
    sheet.frame(title, caption, left=left, most=110)
    return sheet


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
    Without classes, rows are just filled. Of more than three channels the first three are shown.
    """
    span = find_range([flat(image) for image in real], value_range)
    samples, truths = ([paint(flat(image), span) for image in images] for images in (made, real))
    if given is not None:
        own = span if alike else find_range([flat(image) for image in given], None)
        blocks = {"given": [paint(flat(image), own) for image in given], "sample": samples, "data": truths}
        rows = [("", [[images[i]] for images in blocks.values()]) for i in range(len(made))]
        return _draw_blocks(rows, list(blocks), title, caption).put(path)
    places: dict[str, list[int]] = {}
    for number in range(len(made)):
        places.setdefault(names[number] if names is not None else f"\n{number // _ACROSS}", []).append(number)
    rows = [
        ("" if name.startswith("\n") else name, [[images[i] for i in at] for images in (samples, truths)])
        for name, at in places.items()
    ]
    return _draw_blocks(rows, ["samples", "data"], title, caption).put(path)


def flat(image: np.ndarray) -> np.ndarray:
    """Return an image, or the middle slice of a volume, with one channel or three."""
    image = image if image.ndim == 3 else image[:, image.shape[1] // 2]
    return image[: 3 if len(image) >= 3 else 1].astype(np.float32)


def _draw_blocks(
    rows: Sequence[tuple[str, Sequence[Sequence[np.ndarray]]]], heads: Sequence[str], title: str, caption: str
) -> Sheet:
    """Draw rows of a name and blocks of pictures [H, W, 3], with a gap between blocks."""
    height, width = rows[0][1][0][0].shape[:2]
    counts = [max(len(blocks[b]) for _, blocks in rows) for b in range(len(heads))]
    shape = _span(height, width)
    tile = max(min(9.0 / sum(counts), 6.0 / len(rows) / shape, 1.6), 0.45)  # inches
    tall, gap, between = tile * shape, 0.04, 0.22
    left = 0.15 + 0.075 * min(max((len(name) for name, _ in rows), default=0), 24)
    top, foot = (0.34 if title else 0.08) + 0.26, 0.12 + (0.22 if caption else 0.0)
    wide = left + sum(counts) * (tile + gap) + between * (len(heads) - 1) + 0.15
    sheet = Sheet(max(wide, 4.6), top + len(rows) * (tall + gap) + foot)
    for row, (name, blocks) in enumerate(rows):
        y, x = top + row * (tall + gap), left
        if name:
            sheet.text(left - 0.08, y + tall / 2, shorten(name, 24), ha="right")
        for head, count, pictures in zip(heads, counts, blocks, strict=True):
            if row == 0:
                sheet.text(x, top - 0.12, head, size=9)
            for number, picture in enumerate(pictures):
                sheet.image(picture, x + number * (tile + gap), y, tile, tall, smooth=width > 128)
            x += count * (tile + gap) + between
    sheet.frame(title, caption)
    return sheet


# ---------------------------------------------------------------- trees


def tree_picture(
    path: str | Path,
    image: Any,
    tree: Tree,
    index: int = 0,
    *,
    title: str = "",
    spacing: tuple[float, ...] | None = None,
) -> Path:
    """Draw one image [C, *S] (or [*S]) of a batch with its tree to a PNG and return its path.

    Three channels are colours, of any other number the first is shown; `spacing` is the physical size of a voxel along
    each axis, for the proportions.
    """
    import torch

    ndim, shape = tree.ndim, tree.shape
    if ndim not in (2, 3):
        raise ValueError(f"a tree of {ndim} dimensions cannot be drawn; only images and volumes can")
    values = torch.as_tensor(image)
    values = values.unsqueeze(0) if values.ndim == ndim else values
    if values.ndim != ndim + 1 or tuple(values.shape[1:]) != shape:
        raise ValueError(f"image {list(values.shape)} does not fit a tree over {list(shape)}")
    one = tree[index : index + 1].to("cpu")
    if len(one) == 0:
        raise ValueError(f"index {index} is not in a batch of {len(tree)} trees")
    values = (values if values.shape[0] == 3 else values[:1]).detach().float().cpu()
    held = one.paint(one.serialise(values.unsqueeze(0)))[0].numpy()
    pixels = values.numpy()
    leaves = one.valid[0]
    corner, side = one.corner[0, leaves].numpy(), one.side[0, leaves].numpy()

    scale = spacing or (1.0,) * ndim
    views = []  # name, image, what tokens hold, rectangles, height of a pixel over its width
    for across in (None,) if ndim == 2 else range(3):
        rows, columns = (axis for axis in range(ndim) if axis != across)
        cut, name, shown = slice(None), "", np.ones(len(side), bool)
        if across is not None:
            middle = shape[across] // 2
            shown = (corner[:, across] <= middle) & (middle < corner[:, across] + side)
            name = f"axis {across}, slice {middle} of {shape[across]}"
            pick: Any = (slice(None), *(middle if axis == across else cut for axis in range(3)))
        else:
            pick = slice(None)
        boxes = np.stack([corner[shown, rows], corner[shown, columns], side[shown]], axis=1)
        views.append((name, pixels[pick], held[pick], boxes, scale[rows] / scale[columns]))
    return _draw_tree(views, find_range([pixels], None), title, _describe(tree, side)).put(path)


def _describe(tree: Tree, side: np.ndarray) -> str:
    sides, counts = np.unique(side, return_counts=True)
    parts = ", ".join(f"{count:,} of {size}" for size, count in zip(sides, counts, strict=True))
    same = int(np.prod([-(-size // tree.patch) for size in tree.shape]))
    padding = f" and {tree.length - len(side):,} of padding" if tree.length > len(side) else ""
    cells = "pixels" if tree.ndim == 2 else "voxels"
    return (
        f"{len(side):,} leaves{padding}, by side in {cells}: {parts}\n"
        f"a uniform grid of {tree.patch}-{cells[:-1]} patches has {same:,} tokens"
    )


def _draw_tree(views: list[tuple[Any, ...]], span: tuple[float, float], title: str, caption: str) -> Sheet:
    """Draw leaves over the image, and what the tokens hold: side by side in 2-D, one above the other in 3-D."""
    flat = len(views) == 1
    widths, heights = [], []
    for _, pixels, _, _, aspect in views:
        high, wide = pixels.shape[-2] * aspect, pixels.shape[-1]
        size = (1.5 if flat else 1.0) * _TREE_TILE / max(high, wide)
        widths.append(wide * size)
        heights.append(high * size)
    columns = widths * 2 if flat else widths
    rows = heights if flat else [max(heights)] * 2
    gap, heading, left = 0.12, 0.3 + 0.35 * bool(title), 0.15 if flat else 0.43
    wide = sum(columns) + gap * (len(columns) - 1) + 0.15 + left
    sheet = Sheet(wide, sum(rows) + gap * (len(rows) - 1) + heading + 0.62)
    for number in range(2 * len(views)):
        view, tokens = (0, number == 1) if flat else (number % 3, number >= 3)
        column, row = (number, 0) if flat else (view, int(tokens))
        name, pixels, held, boxes, _ = views[view]
        high, wide = pixels.shape[-2:]
        place = (left + sum(columns[:column]) + gap * column, heading + sum(rows[:row]) + gap * row)
        size = (columns[column], heights[view])
        picture = paint(held if tokens else pixels, span)
        axes = sheet.image(picture, *place, *size, smooth=max(high, wide) > 512, extent=(0, wide, high, 0))
        if not tokens:
            top, start, side = boxes[:, 0], boxes[:, 1], boxes[:, 2]
            # Only the upper and left line of each: its neighbours draw the others, and no line is drawn twice.
            ends = [(start + side, top), (start, top + side)]
            lines = np.concatenate([np.stack([np.stack([start, top], 1), np.stack(end, 1)], 1) for end in ends])
            small = float(np.percentile(side, 25)) * 72 * columns[column] / wide  # points of paper
            draw_lines(axes, lines, float(np.clip(0.09 * small, 0.35, 0.9)), high, wide)
        axes.spines[:].set(visible=True, color=EDGE, linewidth=0.5)
        words = "what the tokens hold" if tokens else "leaves"
        if flat:
            axes.set_title(words, fontsize=9, pad=5, **WORDS)
        elif not tokens:
            axes.set_title(name, fontsize=8.5, pad=5, **WORDS)
        if not flat and view == 0:
            axes.set_ylabel(words, fontsize=9, labelpad=6, **WORDS)
    if title:
        sheet.text(left, 0.22, title, size=11, weight="bold")
    sheet.text(left, sheet.high - 0.1, caption, va="bottom", color=SOFT)
    return sheet


def draw_lines(axes: Axes, lines: np.ndarray, thick: float, high: int, wide: int) -> None:
    """Draw lines [N, 2, 2] over an image of such a size."""
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(list(lines), colors=[LINES], linewidths=thick))
    axes.set_xlim(0, wide)
    axes.set_ylim(high, 0)
