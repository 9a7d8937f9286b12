"""What goes wrong with single sections of electron microscopy: lost, moved or out of focus.

They are made in the window as it was read, before it is turned: sections lie across the axis that they were cut along.
Labels of voxels move with the image, since people label what they see.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.affine import mirror
from vitrail.data.augment.intensity import SPREAD, blur
from vitrail.draws import stream


def spoil(
    sample: Tensor,
    labels: Tensor | None,
    settings: Any,
    axis: int,
    *,
    seed: int,
    counter: int,
    mean: Tensor,
    std: Tensor,
) -> None:
    """Spoil sections of one sample [C, *S] across an axis, in place; mean and std are [C], on the host."""
    numbers = stream(seed, "augment.sections", counter)
    sections, sides = sample.shape[axis + 1], sample.ndim - 2
    missing, shifted, blurred = numbers.random((3, sections)) < [
        [settings.missing],
        [settings.shifted],
        [settings.blurred],
    ]
    black, onwards = numbers.random((2, sections)) < 0.5
    shifts = numbers.integers(-settings.shift, settings.shift, (sections, sides), endpoint=True)
    widths = numbers.uniform(0.5 * settings.blur, settings.blur, sections)

    for place in np.flatnonzero(blurred):
        section = sample.select(axis + 1, int(place))
        soft = blur(section.float()[None], [float(widths[place])], range(2, 2 + sides))[0]
        section.copy_(soft if sample.is_floating_point() else soft.round())
    moved = np.where((shifted & onwards)[:, None], shifts, 0).cumsum(0) + np.where(
        (shifted & ~onwards)[:, None], shifts, 0
    )
    for first, last in _runs(moved):
        _move(sample.narrow(axis + 1, first, last - first), moved[first], axis + 1, first_dim=1)
        if labels is not None:
            _move(labels.narrow(axis, first, last - first), moved[first], axis, first_dim=0)
    for place in np.flatnonzero(missing):
        level = (0 * mean if sample.dtype == torch.uint8 else mean - SPREAD * std) if black[place] else mean
        level = level if sample.is_floating_point() else level.round()
        sample.select(axis + 1, int(place)).copy_(level.to(sample.dtype).view(-1, *[1] * sides))


def _runs(moved: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last + 1 of neighbouring sections that are moved alike."""
    edges = [0, *(np.flatnonzero((np.diff(moved, axis=0) != 0).any(1)) + 1), len(moved)]
    return ((int(a), int(b)) for a, b in itertools.pairwise(edges) if moved[a].any())


def _move(part: Tensor, shift: np.ndarray, axis: int, *, first_dim: int) -> None:
    """Shift a stack of sections sideways in place, mirrored at the borders."""
    source = part
    for dim, by in zip([d for d in range(first_dim, part.ndim) if d != axis], shift.tolist(), strict=True):
        size = part.shape[dim]
        source = source.index_select(dim, mirror(torch.arange(size) - by, size).to(part.device))
    part.copy_(source)
