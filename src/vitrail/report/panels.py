"""Panels: what a model was given, what it made of it and what was right, each a PNG.

- reconstruction: target, what the model saw, its prediction and the error, one sample a row; hidden voxels have a flat
  colour that no grey value has; the prediction is pasted into the visible target, as the model's reader would use it
- segmentation: image, true and predicted labels in colour over it, one sample a row; class 0 has no colour
- classification: a grid of images, each with the class that the model names, and the true one where it is wrong
- pairs: originals, what came back of them, and the difference
- samples: what a model has made beside real data, one row a class
- tree: the leaves of an adaptive tree over its image, and what its tokens hold of it

Variables are drawn one by one, each in its own range, which all pictures of a panel share; what is known of a sample
stands above it (blocks.py). Of a volume the middle planes and some slices are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.blocks import (
    About,
    Group,
    Scale,
    about_rows,
    choose_cuts,
    draw_blocks,
    keep,
    lay_out,
    take,
)
from vitrail.report.figures import EDGE, SOFT, WORDS, Colour, Sheet, shorten, shorten_middle
from vitrail.report.views import (
    BROKEN,
    HIDDEN,
    NOT_SCORED,
    VIEW,
    Cut,
    cuts_of,
    draw_grid,
    draw_lines,
    find_range,
    hold_span,
    label_colour,
    overlay,
    pad,
    paint,
)

if TYPE_CHECKING:
    from vitrail.layers.trees import Tree

RIGHT, WRONG = (0.13, 0.47, 0.27), (0.75, 0.16, 0.18)
_COLUMNS = ("target", "model sees", "prediction", "absolute error")
_MOST_ROWS = 8
_MOST_IMAGES = 48  # of a classification
_MOST_KEYS = 24
_ACROSS = 4  # samples, and as many of real data, where there are no classes
_MOST_IMAGED = 4  # variables beside labels
_TREE_TILE = 3.4  # inches along the longer side of a picture


def _begin(
    rows: Sequence[Any], images: Sequence[np.ndarray], abouts: Sequence[About], slices: int
) -> tuple[list[Group], list[Cut], int]:
    """Return what is drawn of each sample: groups of its channels, cuts, and of how many samples."""
    if not len(rows):
        raise ValueError("a panel needs at least one row")
    groups = abouts[0].groups(len(images[0]))
    cuts = choose_cuts(cuts_of(images[0].shape[1:], slices), groups)
    return groups, cuts, keep(groups, cuts, _MOST_ROWS)


def _pick(image: np.ndarray, group: Group) -> np.ndarray:
    """Return what a group shows of an image; one that has but one channel is the same for all."""
    image = np.asarray(image)
    return (image if len(image) == 1 else image[group.channels]).astype(np.float32)


def _ranges(
    images: Sequence[np.ndarray], groups: Sequence[Group], given: tuple[float, float] | None = None
) -> list[tuple[float, float]]:
    """Return the range of values that all pictures of a group share."""
    return [find_range([_pick(image, group) for image in images], given) for group in groups]


def _value(group: Group, span: tuple[float, float]) -> dict[int, Scale]:
    """Return the scale of values beside the first kind; colours have none."""
    return {0: Scale(group.unit or "value", *span)} if len(group.channels) == 1 else {}


# ---------------------------------------------------------------- grids of pictures


def reconstruction_panel(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = "", caption: str = "", slices: int = 8
) -> Path:
    """Draw rows of {target, prediction, hidden} to a PNG and return its path.

    All are [C, spatial]; `hidden` is true where the model saw nothing. What `about` says of a row stands above it.
    Volumes show the middle plane across each axis and `slices` slices along the first.
    """
    from matplotlib import colormaps

    abouts = about_rows(rows)
    groups, cuts, most = _begin(rows, [row["target"] for row in rows], abouts, slices)
    rows, abouts = rows[:most], abouts[:most]
    spans = _ranges([row["target"] for row in rows], groups)
    heat, tops = colormaps["magma"], []

    def cut(number: int, name: str, group: Group, at: Any) -> np.ndarray:
        return take(_pick(rows[number][name], group), at, abouts[number].spacing)

    for group, span in zip(groups, spans, strict=True):
        # The worst hundredth of the voxels may saturate, so that a few outliers do not blacken the rest.
        errors = [
            np.abs(cut(n, "prediction", group, at) - cut(n, "target", group, at)).mean(0)[
                cut(n, "hidden", group, at).any(0)
            ]
            for n in range(len(rows))
            for _, at in cuts
        ]
        finite = np.concatenate([each[np.isfinite(each)] for each in errors])
        top = float(np.percentile(finite, 99)) if finite.size else 0.0
        tops.append(top if top > 0 else (span[1] - span[0]) or 1.0)

    def painted(number: int, group: Group, kind: int, at: Cut) -> np.ndarray:
        place = groups.index(group)
        target, prediction = (cut(number, name, group, at[1]) for name in ("target", "prediction"))
        hidden: np.ndarray = np.asarray(cut(number, "hidden", group, at[1]).any(0))
        if kind == 3:
            error = np.abs(prediction - target).mean(0)
            heated = heat(np.clip(np.nan_to_num(error) / tops[place], 0, 1))[..., :3]
            heated[~np.isfinite(error)] = BROKEN
            heated[~hidden] = NOT_SCORED
            return heated
        shown = paint(target, spans[place])
        fill = (shown, np.asarray(HIDDEN), paint(prediction, spans[place]))[kind]
        return np.where(hidden[..., None], fill, shown)

    scales = [
        _value(group, span) | {3: Scale("error", 0.0, top, "magma")}
        for group, span, top in zip(groups, spans, tops, strict=True)
    ]
    keys: list[tuple[str, Colour]] = [("hidden from the model", HIDDEN)]
    if not all(np.isfinite(row[name]).all() for row in rows for name in ("target", "prediction")):
        keys.append(("not a finite number", BROKEN))
    look = lay_out(painted, abouts, groups, _COLUMNS, cuts, scales)
    sheet = draw_blocks(title=title, caption=caption, keys=keys, **look)
    return sheet.put(path, grey=all(len(group.channels) == 1 for group in groups))


def segmentation_panel(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    ignore: int | None = None,
    title: str = "",
    caption: str = "",
    slices: int = 8,
) -> Path:
    """Draw rows of {image, truth, prediction} to a PNG and return its path.

    `image` is [C, spatial], `truth` and `prediction` are numbers of classes [spatial], drawn over the first of what is
    shown of the image; volumes show planes and slices. Voxels of label `ignore` are not scored. Rows may lack truth.
    """
    rows = rows[:_MOST_ROWS]
    abouts = about_rows(rows)
    groups, cuts, _ = _begin(rows, [row["image"] for row in rows], abouts, slices)
    groups = groups[:_MOST_IMAGED]
    spans = _ranges([row["image"] for row in rows], groups)
    colours = np.stack([label_colour(number) for number in range(len(names))])
    seen: set[int] = set()
    known = "truth" in rows[0]

    def painted(number: int, _: Group, kind: int, cut: Cut) -> np.ndarray:
        row, spacing, place = rows[number], abouts[number].spacing, kind if kind < len(groups) else 0
        picture = paint(take(_pick(row["image"], groups[place]), cut[1], spacing), spans[place])
        if kind < len(groups):
            return picture
        truth = known and kind == len(groups)
        labels = take(np.asarray(row["truth" if truth else "prediction"])[None], cut[1], spacing)[0]
        seen.update(np.unique(labels).tolist())
        return overlay(picture, labels, colours, ignore if truth else None)

    kinds = [*(group.name or "image" for group in groups), *(["true labels"] if known else []), "prediction"]
    whole = Group("", groups[0].channels, "")
    look = lay_out(painted, abouts, [whole], kinds, cuts)
    shown = [number for number in range(1, len(names)) if number in seen and names[number]][:_MOST_KEYS]
    keys: list[tuple[str, Colour]] = [(shorten(names[number], 24), tuple(colours[number])) for number in shown]
    if ignore is not None and ignore in seen:
        keys.append(("not scored", NOT_SCORED))
    return draw_blocks(title=title, caption=caption, keys=keys, **look).put(path)


def classification_panel(
    path: str | Path, rows: Sequence[Mapping[str, Any]], *, title: str = "", caption: str = ""
) -> Path:
    """Draw {image, truth, prediction, likelihood, right} as a grid of images to a PNG and return its path.

    `image` is [C, spatial] (colours, or the first of the variables that are shown; of a volume the middle planes, side
    by side), `truth` and `prediction` are names, `likelihood` is the model's own for its prediction.
    """
    rows = rows[:_MOST_IMAGES]
    abouts = about_rows(rows)
    groups, cuts, _ = _begin(rows, [row["image"] for row in rows], abouts, 0)
    [span] = _ranges([row["image"] for row in rows], groups[:1])
    cells = []
    for row, about in zip(rows, abouts, strict=True):
        image = _pick(row["image"], groups[0])
        views = pad([paint(take(image, at, about.spacing), span) for _, at in cuts])
        gap = np.ones((len(views[0]), -(-views[0].shape[1] // 24), 3))
        view = np.concatenate([part for view in views for part in (gap, view)][1:], axis=1)
        words = f"{shorten(str(row['prediction']), 20)}  {row['likelihood']:.0%}"
        if not row["right"]:
            words += f"\nis {shorten(str(row['truth']), 20)}"
        cells.append((view, words + (f"\n{shorten_middle(about.name, 22)}" if about.name else "")))
    marks = [RIGHT if row["right"] else WRONG for row in rows]
    keys = [("right", RIGHT), ("wrong", WRONG)]
    columns = 3 if len(cuts) > 1 else 8 if len(cells) > 12 else 6 if len(cells) > 4 else 4
    look: Any = {"columns": min(len(cells), columns), "tile": 1.15 if len(cuts) == 1 else 3 * VIEW}
    if len(groups) > 1:
        caption += f"; {groups[0].name or 'colours'} is shown, of {len(rows[0]['image'])} variables"
    return draw_grid(cells, title, caption, marks=marks, keys=keys, **look).put(path)


def pairs_panel(
    path: str | Path,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    abouts: Sequence[About] = (),
    title: str = "",
    caption: str = "",
    slices: int = 8,
) -> Path:
    """Draw (original, reconstruction) pairs [C, *spatial] to a PNG; of volumes planes and slices.

    Differences are grey where there are none, and share the range of the originals.
    """
    abouts = list(abouts) or [About()] * len(pairs)
    groups, cuts, most = _begin(pairs, [original for original, _ in pairs], abouts, slices)
    pairs, abouts = pairs[:most], abouts[:most]
    spans = _ranges([original for original, _ in pairs], groups)

    def painted(number: int, group: Group, kind: int, cut: Cut) -> np.ndarray:
        low, high = span = spans[groups.index(group)]
        original, again = (take(_pick(image, group), cut[1], abouts[number].spacing) for image in pairs[number])
        return paint((original, again, again - original + (low + high) / 2)[kind], span)

    scales = [_value(group, span) for group, span in zip(groups, spans, strict=True)]
    look = lay_out(painted, abouts, groups, ("original", "reconstruction", "difference"), cuts, scales)
    sheet = draw_blocks(title=title, caption=caption, **look)
    return sheet.put(path, grey=all(len(group.channels) == 1 for group in groups))


def sample_grid(
    path: str | Path,
    made: Sequence[np.ndarray],
    real: Sequence[np.ndarray],
    *,
    given: Sequence[np.ndarray] | None = None,
    alike: bool = False,
    names: Sequence[str] | None = None,
    abouts: Sequence[About] = (),
    title: str = "",
    caption: str = "",
    value_range: tuple[float, float] | None = None,
    slices: int = 8,
) -> Path:
    """Draw samples and data [B, C, *S] to a PNG and return its path; both are of the classes `names` [B].

    What was given has the units of the samples if it is `alike`; else it may have any, and has shades of its own.
    Without classes, rows are just filled; volumes have a row of planes and slices each, and each variable has a row.
    """
    abouts = list(abouts) or [About()] * len(real)
    groups, cuts, most = _begin(real, real, abouts, slices)
    spans = _ranges(real, groups, value_range)
    kinds = [("given", given)] if given is not None else []
    kinds += [("sample", made), ("data", real)]
    own = None if alike or given is None else find_range([colours_of(image) for image in given])

    def painted(number: int, group: Group, kind: int, cut: Cut) -> np.ndarray:
        name, images = kinds[kind]
        strange = name == "given" and own is not None  # its channels are others
        image = colours_of(images[number]) if strange else _pick(images[number], group)
        span = own if strange and own is not None else spans[groups.index(group)]
        return paint(take(image, cut[1], abouts[number].spacing), span)

    heads = [kind for kind, _ in kinds]
    scales = [_value(group, span) for group, span in zip(groups, spans, strict=True)]
    if len(cuts) > 1 or given is not None or len(groups) > 1:
        several = [replace(a, name=n) for a, n in zip(abouts, names, strict=True)] if names is not None else abouts
        look = lay_out(painted, several[: min(most, len(made))], groups, heads, cuts, scales)
        return draw_blocks(title=title, caption=caption, **look).put(path)
    samples, truths = ([painted(n, groups[0], kind, cuts[0]) for n in range(len(made))] for kind in (0, 1))
    places: dict[str, list[int]] = {}
    for number in range(len(made)):
        places.setdefault(names[number] if names is not None else f"\n{number // _ACROSS}", []).append(number)
    rows = [
        ("" if name.startswith("\n") else name, [[images[i] for i in at] for images in (samples, truths)])
        for name, at in places.items()
    ]
    return _draw_beside(rows, ["samples", "data"], title, caption).put(path)


def colours_of(image: np.ndarray) -> np.ndarray:
    """Return the first three channels of an image or volume, or the first."""
    return image[: 3 if len(image) >= 3 else 1].astype(np.float32)


def _draw_beside(
    rows: Sequence[tuple[str, Sequence[Sequence[np.ndarray]]]], heads: Sequence[str], title: str, caption: str
) -> Sheet:
    """Draw rows of a name and blocks of pictures [H, W, 3], with a gap between blocks."""
    height, width = rows[0][1][0][0].shape[:2]
    counts = [max(len(blocks[b]) for _, blocks in rows) for b in range(len(heads))]
    shape = hold_span(height, width)
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
    return _draw_tree(views, find_range([pixels]), title, _describe(tree, side)).put(path)


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
