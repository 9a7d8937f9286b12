"""Whether labels lie on the grid of their image: the same voxel size, and all of the image or a box inside it."""

from dataclasses import replace

import numpy as np

from vitrail.data.stored import TOLERANCE, Stored, Window, by, choose_level, pool_factors, pooled
from vitrail.errors import BadData


def placed_like(image: Stored, labels: Stored, *, always: bool) -> Stored:
    """Labels whose file tells no voxel size, as pictures do, have that of the image of the same shape.

    So have all, `always`, where the recipe gives another voxel size than the files.
    """
    for level in (image, *image.levels):
        same = labels.grid == level.grid and labels.spatial(labels.shape) == level.spatial(level.shape)
        if same and (always or not set(level.grid) <= set(labels.spacing)):
            return replace(labels, spacing=level.spacing, origin=level.origin)
    return labels


def labels_for(image: Stored, labels: Stored, *, pool: bool) -> Stored:
    """The level of the labels that lies on the image; a finer one is thinned out, where the image may be pooled."""
    where = f"labels {labels.name}"
    if labels.grid != image.grid:
        raise BadData(
            f"{where} have the axes {', '.join(labels.grid)}, the image {', '.join(image.grid)}; "
            "write them in the same order"
        )
    for level in (labels, *labels.levels):
        if level.dtype.kind not in "biu" or (level.num_channels or 1) > 1:
            raise BadData(
                f"{where} have {level.num_channels or 1} channels of type {level.dtype}; they must be one whole "
                "number a voxel, the number of its class"
            )
    for level in (labels, *labels.levels):
        if np.allclose(level.voxel(), image.voxel(), rtol=TOLERANCE, atol=0):
            return level
    wanted = image.voxel()
    finest = (labels, *labels.levels)[choose_level(labels, wanted)]
    made = pooled(finest, pool_factors(finest, wanted), labels=True)
    if pool and np.allclose(made.voxel(), wanted, rtol=TOLERANCE, atol=0):
        return made
    raise BadData(
        f"{where} have no level of spacing {list(wanted)}, only {list(labels.voxel())}; "
        "choose another level of the image or resample them"
    )


def label_box(image: Stored, labels: Stored) -> Window:
    """Where the labels lie in the image, in whole voxels: all of it, or a box inside it."""
    shape, size = image.spatial(image.shape), labels.spatial(labels.shape)
    placed = all(set(s.grid) <= set(s.origin) for s in (image, labels))
    starts = [
        (labels.origin[n] - image.origin[n]) / v if placed else 0.0
        for n, v in zip(image.grid, image.voxel(), strict=True)
    ]
    whole = [round(start) for start in starts]
    fits = (
        all(abs(a - b) <= TOLERANCE for a, b in zip(starts, whole, strict=True))
        and all(0 <= a <= a + n <= m for a, n, m in zip(whole, size, shape, strict=True))
        and (placed or size == shape)
    )
    if not fits:
        at = f" at voxel {[round(s, 3) for s in starts]} of the image" if placed else ""
        raise BadData(
            f"labels {labels.name} do not cover the image {image.name} or a box inside it: they are "
            f"{by(size)} voxels{at}, the image {by(shape)}; resample them onto the image"
        )
    return tuple(slice(a, a + n) for a, n in zip(whole, size, strict=True))
