"""Where the cells of a prediction lie in the world, as far as the input tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Map(NamedTuple):
    """The place of an image on a map."""

    crs: str | None  # of coordinates, as PROJ writes it; None: they are of none that is known
    transform: tuple[float, ...]  # a, b, c, d, e, f: x = a column + b row + c, y = d column + e row + f, of corners


@dataclass(frozen=True)
class Frame:
    """Where the cells of an item lie."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spacing: tuple[float, ...]
    unit: str | None
    origin: tuple[float, ...] | None  # of the centre of the first cell
    affine: np.ndarray | None  # of NIfTI: x, y, z of cells to the world
    map: Map | None = None  # of GeoTIFF
    start: tuple[int, ...] = ()  # voxels of the input before the region that was asked for


def frame_of(source: Any, item: int, shape: tuple[int, ...], cell: Sequence[int]) -> Frame:
    """Return where the cells of an item lie, of which each is so many voxels large."""
    found = source.items[item]
    shift = [(c - 1) / 2 for c in cell]
    origin, affine, chart, start = (
        getattr(source, name)(item) if hasattr(source, name) else None
        for name in ("origin_of", "affine_of", "map_of", "start_of")
    )
    if origin is not None:
        origin = tuple(o + s * size for o, s, size in zip(origin, shift, found.spacing, strict=True))
    if affine is not None:
        move = np.eye(4)
        for name, c, s in zip(source.axes, cell, shift, strict=True):
            at = "xyz".index(name)
            move[at, at], move[at, 3] = c, s
        affine = affine @ move
    if chart is not None:
        a, b, c, d, e, f = chart[1]
        tall, wide = cell
        chart = Map(chart[0], (a * wide, b * tall, c, d * wide, e * tall, f))
    spacing = tuple(size * c for size, c in zip(found.spacing, cell, strict=True))
    return Frame(found.name, shape, tuple(source.axes), spacing, found.unit, origin, affine, chart, tuple(start or ()))


def untold(frame: Frame, suffix: str) -> list[str]:
    """Say what files with an ending cannot tell of where their cells lie."""
    found, chart = [], frame.map
    kept = suffix in (".tif", ".tiff") and chart is not None
    if chart is not None and chart.crs is not None and not kept:
        found.append(f"{suffix} does not keep the place on the map ({chart.crs[:60]}); .tif does")
    if any(frame.start) and suffix in (".npy", ".png", ".tif", ".tiff", ".ome.tif") and not kept:
        corner = ", ".join(f"{name} {at}" for name, at in zip(frame.axes, frame.start, strict=True))
        found.append(f"{suffix} does not tell that its first voxel is {corner} of the input; OME-Zarr and NIfTI do")
    return found
