"""Every part of the data once an epoch: tiles with any overlap, in an order that is a pure function of (seed, counter).

- along an axis tiles begin every `window - int(window * overlap)` voxels; what is left at the end gets a tile that is
  moved back to the border, or none
- tiles that begin in the same chunks form a block; the blocks of a pass come in a keyed order, a block's tiles together
- the sequence of a pass is cut into `lanes` contiguous segments, and counters go round them: neighbours in a batch
  come from different blocks, and each lane stays on its block. All segments together are the pass, whatever divides
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.order.filter import NothingLeft, Occupancy
from vitrail.data.order.sampler import Extent, Sample, across, block_steps, permute
from vitrail.draws import key
from vitrail.errors import UserError


def tile_starts(size: int, window: int, overlap: float = 0.0, *, edges: bool = True) -> np.ndarray:
    """Return where tiles begin along an axis."""
    step = window - int(window * overlap)
    starts = np.arange(0, size - window + 1, step, dtype=np.int64)
    if edges and starts[-1] + window < size:
        starts = np.append(starts, size - window)
    return starts


def segment(index: int, total: int, lanes: int) -> int:
    """Return the index-th place of a sequence whose contiguous segments, one a lane, are gone round in turn."""
    turn, lane = divmod(index, lanes)
    length, longer = divmod(total, lanes)  # the first `longer` lanes have one more
    return lane * length + min(lane, longer) + turn


class Tiles:
    """The order of all tiles of some extents."""

    def __init__(
        self,
        extents: Sequence[Extent],
        crop: tuple[int, ...],
        *,
        seed: int,
        lanes: int,
        overlap: float | Sequence[float] = 0.0,
        edges: bool = True,
        block: tuple[int, ...] | None = None,
        orientations: Sequence[int] = (0,),
        occupancy: Sequence[Occupancy | None] | None = None,
    ):
        self.extents, self.crop, self.seed = list(extents), crop, seed
        self.lanes, self.orientations = lanes, list(orientations)
        self.starts: list[list[np.ndarray]] = []  # of each extent along each axis
        self.firsts: list[list[np.ndarray]] = []  # the number of each block's first tile along each axis, and of all
        self.kept: list[np.ndarray | None] = []  # which tiles have enough in them; None: all
        counts = []  # of tiles in each block of each extent
        self.largest_block = 0  # in voxels
        alike: dict[Any, Any] = {}  # a million images of one size are cut once
        for number, e in enumerate(self.extents):
            window, holder = e.window or crop, occupancy[number] if occupancy else None
            if holder is None and (found := alike.get((e[2:], window))) is not None:
                starts, firsts, count = found
                counts.append(count)
                self.starts.append(starts)
                self.firsts.append(firsts)
                self.kept.append(None)
                continue
            starts = [
                tile_starts(size, w, o, edges=edges)
                for size, w, o in zip(e.shape, window, _per_axis(overlap, e), strict=True)
            ]
            firsts, reach = [], []
            for s, origin, step, w in zip(starts, e.origin, block_steps(e, window, block), window, strict=True):
                which = (s + origin) // step
                first = np.concatenate([[0], np.flatnonzero(np.diff(which)) + 1, [len(s)]])
                firsts.append(first)
                reach.append(int((s[first[1:] - 1] - s[first[:-1]]).max()) + w)
            kept = None if holder is None else holder.enough(starts, window)
            counts.append(_count(firsts, kept))
            if kept is None:
                alike[e[2:], window] = (starts, firsts, counts[-1])
            self.starts.append(starts)
            self.firsts.append(firsts)
            self.kept.append(kept)
            self.largest_block = max(self.largest_block, math.prod(reach))
        self.first = np.cumsum([0, *[c.size for c in counts]])  # where each extent's blocks begin
        self.counts = np.concatenate([c.ravel() for c in counts])
        self.epoch = int(self.counts.sum())
        if not self.epoch:
            raise NothingLeft("data.filter: no tile has enough in it; lower `share` or `above`, or choose other data")
        self.reuse = int(self.counts.max())  # a block's tiles are read together
        self._passes: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def tiles_of(self, extent: int) -> int:
        """Return how many tiles an extent has."""
        return int(self.counts[self.first[extent] : self.first[extent + 1]].sum())

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        """Return the tile of a counter; attempts beyond the first stand in for one that cannot be read."""
        number, index = divmod(counter, self.epoch)
        place = segment(index, self.epoch, self.lanes)
        if attempt:
            place = key(self.seed, "substitute", counter, attempt) % self.epoch
        order, ends = self.blocks(number)
        at = int(np.searchsorted(ends, place, side="right"))
        flat, count = int(order[at]), int(self.counts[order[at]])
        inner = permute(place - int(ends[at]) + count, count, key(self.seed, "tile", number, flat))

        which = int(np.searchsorted(self.first, flat, side="right")) - 1
        extent, starts, firsts, kept = self.extents[which], self.starts[which], self.firsts[which], self.kept[which]
        window = extent.window or self.crop
        cell = np.unravel_index(flat - self.first[which], [len(f) - 1 for f in firsts])
        part = tuple(slice(int(f[i]), int(f[i + 1])) for f, i in zip(firsts, cell, strict=True))
        if kept is not None:
            inner = int(np.flatnonzero(kept[part])[inner])
        tile = np.unravel_index(inner, [p.stop - p.start for p in part])
        start = tuple(int(s[p.start + i]) for s, p, i in zip(starts, part, tile, strict=True))
        voxels = tuple(
            slice(int(s[p.start]), int(s[p.stop - 1]) + w) for s, p, w in zip(starts, part, window, strict=True)
        )
        orientation = self.orientations[key(self.seed, "orientation", counter) % len(self.orientations)]
        return Sample(extent.source, extent.item, voxels, start, orientation, window, attempt)

    def blocks(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the blocks in a pass, and the place where each one's tiles end."""
        found = self._passes.get(number)
        if found is None:
            order = shuffled(len(self.counts), key(self.seed, "pass", number))
            found = (order, np.cumsum(self.counts[order]))
            self._passes = {n: p for n, p in self._passes.items() if n == number - 1} | {number: found}
        return found


def shuffled(size: int, secret: int) -> np.ndarray:
    """Return range(size) in a keyed order, as an array: sorted by a hash (splitmix64) of each number."""
    with np.errstate(over="ignore"):
        x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(secret)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")


def _count(firsts: list[np.ndarray], kept: np.ndarray | None) -> np.ndarray:
    """Count the tiles of each block."""
    if kept is None:
        counts = np.ones((), np.int64)
        for first in firsts:
            counts = np.multiply.outer(counts, np.diff(first))
        return counts
    counts = kept.astype(np.int64)
    for axis, first in enumerate(firsts):
        counts = np.add.reduceat(counts, first[:-1], axis=axis)
    return counts


def _per_axis(overlap: float | Sequence[float], extent: Extent) -> Sequence[float]:
    axes = len(extent.shape)
    if isinstance(overlap, int | float):
        return [overlap] * axes
    given = across(overlap, extent, [0.0] * axes)
    if len(given) != axes:
        number = axes - (extent.slices is not None)
        raise UserError(f"data.tiles.overlap: {list(overlap)} are not one number for each of {number} axes")
    return given
