"""Augmentation on the device, chosen by the sampler and applied to whole batches."""

import itertools
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vitrail.layers.parts import Slab


@cache
def orientations(crop: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All (permutation, flipped axes) that keep the crop's shape: 8 for a square, 48 for a cube; the first is none."""
    axes = range(len(crop))
    permutations = [p for p in itertools.permutations(axes) if all(crop[i] == crop[j] for i, j in enumerate(p))]
    flips = [f for n in range(len(crop) + 1) for f in itertools.combinations(axes, n)]
    return [(p, f) for p in permutations for f in flips]


def window(code: int, slab: Slab) -> tuple[slice, ...]:
    """The region of the crop as it lies in the file that is a slab of it once it is turned by the code."""
    permutation, flips = orientations(slab.size)[code]
    start, stop = slab.rows.start, slab.rows.stop
    if 0 in flips:
        start, stop = slab.size[0] - stop, slab.size[0] - start
    along = permutation[0]  # the axis of the file that becomes the first one
    return tuple(slice(start, stop) if axis == along else slice(0, size) for axis, size in enumerate(slab.size))


def orient(values: Tensor, codes: list[int], slab: Slab | None = None) -> Tensor:
    """Turn each sample of [B, C, *S] by its code: only transposes and flips, so every intensity is kept.

    Of slabs the values are flat [B, C, voxels]: each lies in its file along an axis of its own.
    """
    if slab is not None and not any(codes):
        return values.unflatten(2, slab.shape)
    if not any(codes):
        return values
    size = tuple(values.shape[2:]) if slab is None else slab.size
    rows: dict[int, list[int]] = {}
    for row, code in enumerate(codes):
        rows.setdefault(code, []).append(row)
    turned = values.new_empty(*values.shape[:2], *(size if slab is None else slab.shape))
    for code, own in rows.items():  # all that turn alike at once
        permutation, flips = orientations(size)[code]
        index = torch.tensor(own).to(values.device, non_blocking=True)
        some = values.index_select(0, index)
        if slab is not None:
            some = some.unflatten(2, [w.stop - w.start for w in window(code, slab)])
        some = some.permute(0, 1, *[axis + 2 for axis in permutation])
        turned.index_copy_(0, index, some.flip([axis + 2 for axis in flips]) if flips else some)
    return turned


def flip_some(values: Tensor, flips: np.ndarray) -> Tensor:
    """Flip those axes of each sample of [B, C, *S] that a table [B, n] names."""
    for axis, chosen in enumerate(flips.T):
        if chosen.any():
            mask = torch.from_numpy(chosen.copy()).to(values.device, non_blocking=True)
            mask = mask.view(-1, *[1] * (values.ndim - 1))
            values = torch.where(mask, values.flip(axis + 2), values)
    return values
