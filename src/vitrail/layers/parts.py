"""Equal parts of a list of tokens, for ranks that share the tokens of a sample.

- part r of n tokens is the rows r*s to (r+1)*s - 1, with s = n / parts rounded up; where n does not divide, the last
  ones are copies of the last token, and are marked as invalid
- a list of several variables, one after the other, is cut within each of them
- a slab is the same cut of the voxels themselves: an equal part of a crop along its first axis
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Which of how many equal parts."""

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
    """Which rows of cut() are no copies [groups*s], for `number` rows of all groups; None where no part has copies."""
    number //= groups
    if number % part.count == 0:
        return None
    size = part_size(number, part.count)
    return (part.index * size + torch.arange(size, device=device) < number).repeat(groups)


def mark_copies(valid: Tensor | None, real: Tensor | None, batch: int) -> Tensor | None:
    """Which rows of a part count [B, groups*s]: those that were valid and are no copies; None where all do."""
    if real is None:
        return valid
    return real.expand(batch, -1) if valid is None else valid & real


def join(parts: Sequence[Tensor], number: int, *, groups: int = 1) -> Tensor:
    """All `number` rows [B, groups*n, ...] of the parts [B, groups*s, ...] in their order: the inverse of cut()."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.unflatten(1, (groups, part.shape[1] // groups)) for part in parts], dim=2)
    return whole[:, :, : number // groups].flatten(1, 2)


def count_owners(index_by_part: Sequence[Tensor], rows: int) -> list[list[int]]:
    """How many of the rows that part i asks for lie with part j; part j has the rows j*rows to (j+1)*rows - 1.

    The host waits for these numbers, since it must know how much to send.
    """
    count = len(index_by_part)
    owners = [torch.bincount(index.flatten() // rows, minlength=count) for index in index_by_part]
    return torch.stack(owners).tolist()


def all_at_home(counts: list[list[int]]) -> bool:
    """Whether every part asks for rows of its own alone."""
    return not any(n for i, row in enumerate(counts) for j, n in enumerate(row) if i != j)
