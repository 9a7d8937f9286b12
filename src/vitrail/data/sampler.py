"""Which crop comes next: a pure function of (seed, counter).

The sampler's whole state is one integer, the counter of samples drawn so far, so that a run resumes at any world size
and with any number of workers. It also suits a reader that decodes large blocks and cuts several crops from each:

- the space of valid crop starts is cut along chunk boundaries into blocks; every start belongs to one block
- lane = counter mod `lanes`; a lane stays `reuse` turns on one block, then takes the next visit
- the visits of a pass are a keyed (Feistel) permutation; each block's share of them is its share of the starts, and
  offsets hash the counter, so crops are uniform over the data
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.draws import key


class Sample(NamedTuple):
    source: int
    item: int
    block: tuple[slice, ...]  # voxels that hold every crop of the block
    start: tuple[int, ...]  # of the crop
    orientation: int


class Extent(NamedTuple):
    """Where crops may be taken from: one item of a source."""

    source: int
    item: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    origin: tuple[int, ...]  # region start modulo chunk
    weight: float


class Sampler:
    def __init__(
        self,
        extents: Sequence[Extent],
        crop: tuple[int, ...],
        *,
        seed: int,
        lanes: int,
        reuse: int | None = None,
        block: tuple[int, ...] | None = None,
        orientations: Sequence[int] = (0,),
    ):
        self.extents, self.crop, self.seed = list(extents), crop, seed
        chunked = any(c < s for e in extents for c, s in zip(e.chunk, e.shape, strict=True))
        self.reuse = reuse or (4 if chunked else 1)
        self.lanes, self.orientations = lanes, list(orientations)  # codes of augment.orientations()
        self.cuts = [_cuts(e, crop, block) for e in extents]
        weights = [_weights(e, crop, cuts) for e, cuts in zip(extents, self.cuts, strict=True)]
        self.first = np.cumsum([0, *[w.size for w in weights]])  # where each extent's blocks begin
        self.cumulative = np.cumsum(np.concatenate([w.ravel() for w in weights]))
        self.visits = int(self.first[-1])
        self.largest_block = max(
            math.prod(int(np.diff(c).max()) + size - 1 for c, size in zip(cuts, crop, strict=True))
            for cuts in self.cuts
        )  # in voxels

    @property
    def epoch(self) -> int:
        """Samples in one pass over all blocks."""
        return self.visits * self.reuse

    def __call__(self, counter: int) -> Sample:
        turn, lane = divmod(counter, self.lanes)
        pass_number, visit = divmod(turn // self.reuse * self.lanes + lane, self.visits)
        shuffled = permute(visit, self.visits, key(self.seed, "pass", pass_number))
        phase = key(self.seed, "phase", pass_number) / 2**63
        place = (shuffled + phase) / self.visits * self.cumulative[-1]
        flat = min(int(np.searchsorted(self.cumulative, place, side="right")), self.visits - 1)

        which = int(np.searchsorted(self.first, flat, side="right")) - 1
        extent, cuts = self.extents[which], self.cuts[which]
        cell = np.unravel_index(flat - self.first[which], [len(c) - 1 for c in cuts])
        low = [int(c[i]) for c, i in zip(cuts, cell, strict=True)]
        high = [int(c[i + 1]) for c, i in zip(cuts, cell, strict=True)]
        start = tuple(
            lo + key(self.seed, "offset", counter, axis) % (hi - lo)
            for axis, (lo, hi) in enumerate(zip(low, high, strict=True))
        )
        voxels = tuple(slice(lo, hi - 1 + c) for lo, hi, c in zip(low, high, self.crop, strict=True))
        orientation = self.orientations[key(self.seed, "orientation", counter) % len(self.orientations)]
        return Sample(extent.source, extent.item, voxels, start, orientation)


def _cuts(extent: Extent, crop: tuple[int, ...], block: tuple[int, ...] | None) -> list[np.ndarray]:
    """Boundaries of the blocks of starts along each axis, on chunk boundaries where there are any."""
    cuts = []
    for axis, (size, chunk, origin, c) in enumerate(zip(extent.shape, extent.chunk, extent.origin, crop, strict=True)):
        starts = size - c + 1
        step = block[axis] if block else math.ceil(c / chunk) * chunk
        inner = np.arange(step - origin % step if origin else step, starts, step)
        cuts.append(np.concatenate([[0], inner[inner > 0], [starts]]).astype(np.int64))
    return cuts


def _weights(extent: Extent, crop: tuple[int, ...], cuts: list[np.ndarray]) -> np.ndarray:
    """How many crops' worth of starts each block has; an item that is stored whole counts as one crop."""
    whole = all(c >= s for c, s in zip(extent.chunk, extent.shape, strict=True))
    weights = np.ones(())
    for c, size in zip(cuts, crop, strict=True):
        weights = np.multiply.outer(weights, np.diff(c) / (c[-1] if whole else size))
    return weights * extent.weight


def permute(index: int, size: int, secret: int) -> int:
    """A keyed permutation of range(size): four Feistel rounds, walking until the value falls inside."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low_bits = (1 << half) - 1
    while True:
        left, right = index >> half, index & low_bits
        for round_number in range(4):
            left, right = right, left ^ (key(secret, "feistel", round_number, right) & low_bits)
        index = left << half | right
        if index < size:
            return index
