"""Augmentation on the device, chosen by the sampler and applied to whole batches."""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
from torch import Tensor

from vitrail.draws import sent
from vitrail.layers.parts import Slab

SMALL = 16 * 2**10  # bytes of a sample: below that a call costs more than another copy


@cache
def orientations(crop: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All (permutation, flipped axes) that keep the crop's shape: 8 for a square, 48 for a cube; the first is none."""
    axes = range(len(crop))
    permutations = [p for p in itertools.permutations(axes) if all(crop[i] == crop[j] for i, j in enumerate(p))]
    flips = [f for n in range(len(crop) + 1) for f in itertools.combinations(axes, n)]
    return [(p, f) for p in permutations for f in flips]


@cache
def _codes(crop: tuple[int, ...]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    return {each: code for code, each in enumerate(orientations(crop))}


def flip_first(crop: tuple[int, ...], codes: Sequence[int], flips: np.ndarray) -> list[int]:
    """The codes of turns of samples of which those axes are flipped before that a table [B, n] names."""
    turns, numbers = orientations(crop), _codes(crop)
    found = []
    for code, flipped in zip(codes, flips.tolist(), strict=True):
        permutation, own = turns[code]
        both = tuple(axis for axis, along in enumerate(permutation) if (axis in own) != flipped[along])
        found.append(numbers[permutation, both])
    return found


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
    turned = values.new_empty(*values.shape[:2], *(size if slab is None else slab.shape))
    if values[0].nbytes > SMALL:
        for row, code in enumerate(codes):
            turned[row : row + 1] = _turn(values[row : row + 1], code, size, slab)
        return turned
    rows: dict[int, list[int]] = {}
    for row, code in enumerate(codes):
        rows.setdefault(code, []).append(row)
    order = sent([row for own in rows.values() for row in own], values.device)
    places = order.split([len(own) for own in rows.values()])
    for code, index in zip(rows, places, strict=True):  # all that turn alike at once
        turned.index_copy_(0, index, _turn(values.index_select(0, index), code, size, slab))
    return turned


def _turn(values: Tensor, code: int, size: tuple[int, ...], slab: Slab | None) -> Tensor:
    """Samples [B, C, ...] that turn alike."""
    permutation, flips = orientations(size)[code]
    if slab is not None:
        values = values.unflatten(2, [w.stop - w.start for w in window(code, slab)])
    values = values.permute(0, 1, *[axis + 2 for axis in permutation])
    return values.flip([axis + 2 for axis in flips]) if flips else values
