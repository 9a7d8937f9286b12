"""An adaptive tree over its image, and what its tokens hold of it: of a volume, three slices through the middle.

Leaves are squares in one colour that no grey value has; a slice shows those that it cuts.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.report.files import write_picture
from vitrail.report.panels import encode, find_range, paint

if TYPE_CHECKING:
    from vitrail.layers.trees import Tree

LINES = (0.98, 0.62, 0.12)  # amber
_DPI = 150
_TILE = 3.4  # inches along the longer side of a picture
_TEXT = "#1f2933"
_PALE = "#52606d"


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
    return write_picture(path, _draw(views, find_range([pixels], None), title, _describe(tree, side)))


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


def _draw(views: list[tuple[Any, ...]], value_range: tuple[float, float], title: str, caption: str) -> bytes:
    """Leaves over the image, and the image that the tokens hold: side by side in 2-D, one above the other in 3-D."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from PIL import Image

    flat = len(views) == 1
    widths, heights = [], []
    for _, pixels, _, _, aspect in views:
        high, wide = pixels.shape[-2] * aspect, pixels.shape[-1]
        size = (1.5 if flat else 1.0) * _TILE / max(high, wide)
        widths.append(wide * size)
        heights.append(high * size)
    columns = widths * 2 if flat else widths
    rows = heights if flat else [max(heights)] * 2
    gap, heading, footing = 0.12, 0.3 + 0.35 * bool(title), 0.62
    label = 0.0 if flat else 0.28
    wide = sum(columns) + gap * (len(columns) - 1) + 0.3 + label
    high = sum(rows) + gap * (len(rows) - 1) + heading + footing
    figure = Figure(figsize=(wide, high), dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    text: dict[str, Any] = {"parse_math": False, "color": _TEXT}
    for number in range(2 * len(views)):
        view, tokens = (0, number == 1) if flat else (number % 3, number >= 3)
        column, row = (number, 0) if flat else (view, int(tokens))
        name, pixels, held, boxes, _ = views[view]
        left = 0.15 + label + sum(columns[:column]) + gap * column
        bottom = high - heading - sum(rows[:row]) - gap * row - heights[view]
        axes = figure.add_axes((left / wide, bottom / high, columns[column] / wide, heights[view] / high))
        painted = paint(held if tokens else pixels, value_range)
        smooth = max(pixels.shape[-2:]) > 512
        axes.imshow(
            np.rint(painted * 255).astype(np.uint8),
            aspect="auto",
            interpolation="antialiased" if smooth else "nearest",
            extent=(0, pixels.shape[-1], pixels.shape[-2], 0),
        )
        if not tokens:
            top, start, side = boxes[:, 0], boxes[:, 1], boxes[:, 2]
            # Only the upper and left line of each: its neighbours draw the others, and no line is drawn twice.
            lines = np.concatenate(
                [
                    np.stack([np.stack([start, top], 1), np.stack([start + side, top], 1)], 1),
                    np.stack([np.stack([start, top], 1), np.stack([start, top + side], 1)], 1),
                ]
            )
            point = 72 * columns[column] / pixels.shape[-1]  # points of paper a pixel takes
            small = float(np.percentile(side, 25)) * point
            width = float(np.clip(0.09 * small, 0.35, 0.9))
            axes.add_collection(LineCollection(list(lines), colors=[LINES], linewidths=width))
        axes.set_xlim(0, pixels.shape[-1])
        axes.set_ylim(pixels.shape[-2], 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#9aa5b1")
        axes.spines[:].set_linewidth(0.5)
        words = "what the tokens hold" if tokens else "leaves"
        if flat:
            axes.set_title(words, fontsize=9, pad=5, **text)
        else:
            if not tokens:
                axes.set_title(name, fontsize=8.5, pad=5, **text)
            if view == 0:
                axes.set_ylabel(words, fontsize=9, labelpad=6, **text)
    if title:
        figure.text((0.15 + label) / wide, 1 - 0.22 / high, title, fontsize=11, weight="bold", va="center", **text)
    figure.text((0.15 + label) / wide, 0.1 / high, caption, fontsize=8, va="bottom", **{**text, "color": _PALE})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a title may hold letters that the font lacks
        canvas.draw()
    return encode(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]), grey=False)
