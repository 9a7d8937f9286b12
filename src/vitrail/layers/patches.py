"""Counts of patches, and equal parts of a list of tokens, for ranks that share the tokens of a sample.

- part r of n tokens is the rows r*s to (r+1)*s - 1, with s = n / parts rounded up; where n does not divide, the last
  ones are copies of the last token, and are marked as invalid
- a list of several variables, one after the other, is cut within each of them
- a slab is the same cut of the voxels themselves: an equal part of a crop along its first axis
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def per_axis(value: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """One number for all axes, or one for each."""
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim:
        raise ValueError(f"{list(values)} has {len(values)} numbers, but there are {ndim} axes")
    return values


def grid_of(size: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Count the patches along each axis; every size must be a multiple of its patch."""
    if any(s % p or s < p for s, p in zip(size, patch, strict=True)):
        raise ValueError(f"size {list(size)} is not a multiple of patch {list(patch)} along every axis")
    return tuple(s // p for s, p in zip(size, patch, strict=True))


def num_voxels(patch: tuple[int, ...]) -> int:
    return math.prod(patch)


@dataclass(frozen=True)
class Part:
    """One of several equal parts, by its place among them."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Slab:
    """A part of a crop along its first axis, as it lies after the crop was turned."""

    part: Part
    size: tuple[int, ...]  # of the whole crop, in voxels

    @property
    def rows(self) -> range:
        """Voxels along the first axis of the turned crop."""
        step = self.size[0] // self.part.count
        return range(self.part.index * step, (self.part.index + 1) * step)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.size[1:])


def part_size(number: int, count: int) -> int:
    """Rows of each part of so many."""
    return -(-number // count)


def cut(x: Tensor, part: Part, *, groups: int = 1) -> Tensor:
    """The part's rows of [B, groups*n, ...] within each group: [B, groups*s, ...], the last row repeated as needed."""
    number = x.shape[1] // groups
    size = part_size(number, part.count)
    if part.count == 1 or not number:
        return x
    start = part.index * size
    grouped = x.unflatten(1, (groups, number))
    if start + size <= number:
        return grouped[:, :, start : start + size].flatten(1, 2)
    rows = torch.arange(start, start + size, device=x.device).clamp(max=number - 1)
    return grouped.index_select(2, rows).flatten(1, 2)


def real_rows(number: int, part: Part, *, groups: int = 1, device: torch.device | None = None) -> Tensor | None:
    """Mark rows of cut() that are no copies [groups*s], for `number` rows of all groups; None where no part has any."""
    number //= groups
    if number % part.count == 0:
        return None
    size = part_size(number, part.count)
    return (part.index * size + torch.arange(size, device=device) < number).repeat(groups)


def mark_copies(valid: Tensor | None, real: Tensor | None, batch: int) -> Tensor | None:
    """Tell which rows of a part count [B, groups*s]: those that were valid and are no copies; None where all do."""
    if real is None:
        return valid
    return real.expand(batch, -1) if valid is None else valid & real


def join(parts: Sequence[Tensor], number: int, *, groups: int = 1) -> Tensor:
    """Return all `number` rows [B, groups*n, ...] of parts [B, groups*s, ...] in their order: the inverse of cut()."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.unflatten(1, (groups, part.shape[1] // groups)) for part in parts], dim=2)
    return whole[:, :, : number // groups].flatten(1, 2)
