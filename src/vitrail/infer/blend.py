"""Tiles put together: each cell by what all tiles that cover it say, weighted by where in each of them it lies.

Weights are those by which held-out voxels are scored (training/stitch.py). A band of the rows that are not complete yet
is kept on the device; tiles come in the order of their beginnings along the first axis, and a row that no later tile
reaches is handed out and forgotten. Every sum is made in the order of the tiles, wherever a band begins.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.infer.tiling import Run, Tile
from vitrail.training.stitch import Blend, blend_weights


class Row(NamedTuple):
    """A row that is complete."""

    number: int  # over all items
    values: Tensor  # [K, *cells]


class Band:
    """The rows of a run that are in the making."""

    def __init__(self, run: Run, channels: int, blend: Blend, device: torch.device):
        self.run, self.blend = run, blend
        pillar = run.pillar
        self.next = run.first  # the row that is handed out next
        self.base, self.end = pillar.row(run.first).start, pillar.row(run.last - 1).stop
        reach = max(int((last - first).max()) for first, last in (pillar.bounds(view, 0) for view in pillar.views))
        deep = min(reach + pillar.thick, self.end - self.base)
        self.sides = tuple(within.stop - within.start for within in pillar.box)
        views = len(pillar.views)
        self._weights: dict[tuple[int, ...], Tensor] = {}  # by the size of a tile
        self.total = torch.zeros(views, channels, deep, *self.sides, device=device)
        self.weight = torch.zeros(views, 1, deep, *self.sides, device=device)

    def add(self, tile: Tile, values: Tensor) -> Iterator[Row]:
        """Take what a tile says [K, *box]; yield the rows that are complete before it."""
        while self.next < self.run.last and self.run.pillar.row(self.next).stop <= tile.box[0].start:
            yield self._hand_out()
        limits = (slice(self.base, min(self.end, self.base + self.total.shape[2])), *self.run.pillar.box)
        into: list[Any] = []
        out_of: list[Any] = []
        for box, limit in zip(tile.box, limits, strict=True):
            low, high = max(box.start, limit.start), min(box.stop, limit.stop)
            if low >= high:
                return
            into.append(slice(low - limit.start, high - limit.start))
            out_of.append(slice(low - box.start, high - box.start))
        window = tuple(box.stop - box.start for box in tile.box)
        if window not in self._weights:
            self._weights[window] = blend_weights(window, self.blend).to(values.device)
        weights = self._weights[window][tuple(out_of)]
        self.total[(tile.view, slice(None), *into)].addcmul_(values[(slice(None), *out_of)], weights)
        self.weight[(tile.view, 0, *into)].add_(weights)

    def rest(self) -> Iterator[Row]:
        """Yield the rows that are left when all tiles have come."""
        while self.next < self.run.last:
            yield self._hand_out()

    def _hand_out(self) -> Row:
        """Give the next row away, and move what is kept of later ones to the front."""
        cells = self.run.pillar.row(self.next)
        size = cells.stop - cells.start
        values = (self.total[:, :, :size] / self.weight[:, :, :size]).mean(dim=0)
        for kept in (self.total, self.weight):
            left = kept.shape[2] - size
            for first in range(0, left, size):  # piece by piece, since the two places overlap
                many = min(size, left - first)
                kept[:, :, first : first + many] = kept[:, :, first + size : first + size + many]
            kept[:, :, left:] = 0
        row = Row(self.run.number + self.next - self.run.first, values)
        self.base, self.next = cells.stop, self.next + 1
        return row
