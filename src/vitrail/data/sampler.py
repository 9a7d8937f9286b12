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
from typing import NamedTuple, Protocol

import numpy as np

from vitrail.data.filter import Occupancy
from vitrail.draws import key
from vitrail.errors import UserError

TRIES = 64  # places in a block that are looked at for one with enough in it


class Sample(NamedTuple):
    source: int
    item: int
    block: tuple[slice, ...]  # voxels that hold every crop of the block
    start: tuple[int, ...]  # of the window
    orientation: int
    window: tuple[int, ...] = ()  # voxels that the sample is cut from: the crop, or more where it is resampled
    attempt: int = 0  # how many samples this one stands in for


class Extent(NamedTuple):
    """Where crops may be taken from: one item of a source."""

    source: int
    item: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    origin: tuple[int, ...]  # region start modulo chunk
    weight: float
    window: tuple[int, ...] = ()  # voxels that a sample is cut from, where that is not the crop


class Order(Protocol):
    """What names samples: random crops, tiles, or several of these in turn."""

    crop: tuple[int, ...]
    extents: list[Extent]
    lanes: int  # blocks that samples come from in turn
    reuse: int  # samples of a block
    largest_block: int  # in voxels

    @property
    def epoch(self) -> int: ...  # samples of one pass

    def __call__(self, counter: int, attempt: int = 0) -> Sample: ...


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
        occupancy: Sequence[Occupancy | None] | None = None,
        shares: Sequence[float] | None = None,
    ):
        """`occupancy` of each extent leaves out places with little in them; `shares` are those of the sources."""
        self.extents, self.crop, self.seed = list(extents), crop, seed
        chunked = any(c < s for e in extents for c, s in zip(e.chunk, e.shape, strict=True))
        self.reuse = reuse or (4 if chunked else 1)
        self.lanes, self.orientations = lanes, list(orientations)  # codes of augment.orientations()
        self.windows = [e.window or crop for e in extents]
        self.cuts = [_cuts(e, window, block) for e, window in zip(extents, self.windows, strict=True)]
        self.occupancy = list(occupancy or [None] * len(self.extents))
        weights = [_weights(*each) for each in zip(extents, self.windows, self.cuts, self.occupancy, strict=True)]
        if shares is not None:
            totals = np.zeros(len(shares))
            for e, w in zip(extents, weights, strict=True):
                totals[e.source] += w.sum() / e.weight
            weights = [
                w / e.weight * shares[e.source] / (totals[e.source] or 1.0)
                for e, w in zip(extents, weights, strict=True)
            ]
        self.first = np.cumsum([0, *[w.size for w in weights]])  # where each extent's blocks begin
        flat = np.concatenate([w.ravel() for w in weights])
        self.cumulative = np.cumsum(flat)
        self.visits = int(np.count_nonzero(flat))
        if not self.visits:
            raise UserError("data.filter: no place has enough in it; lower `share` or `above`, or choose other data")
        self._last = int(np.flatnonzero(flat)[-1])  # of the blocks that samples may come from
        self.largest_block = max(
            math.prod(int(np.diff(c).max()) + size - 1 for c, size in zip(cuts, window, strict=True))
            for cuts, window in zip(self.cuts, self.windows, strict=True)
        )  # in voxels

    @property
    def epoch(self) -> int:
        """Samples in one pass over all blocks."""
        return self.visits * self.reuse

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        """The sample at a place of the global order; attempts beyond the first stand in for one that cannot be read."""
        turn, lane = divmod(counter, self.lanes)
        pass_number, visit = divmod(turn // self.reuse * self.lanes + lane, self.visits)
        if attempt:  # from anywhere: what cannot be read is often the whole block
            visit = key(self.seed, "substitute", counter, attempt) % self.visits
        shuffled = permute(visit, self.visits, key(self.seed, "pass", pass_number))
        phase = key(self.seed, "phase", pass_number) / 2**63
        place = (shuffled + phase) / self.visits * self.cumulative[-1]
        flat = min(int(np.searchsorted(self.cumulative, place, side="right")), self._last)

        which = int(np.searchsorted(self.first, flat, side="right")) - 1
        extent, cuts, window = self.extents[which], self.cuts[which], self.windows[which]
        cell = np.unravel_index(flat - self.first[which], [len(c) - 1 for c in cuts])
        low = [int(c[i]) for c, i in zip(cuts, cell, strict=True)]
        high = [int(c[i + 1]) for c, i in zip(cuts, cell, strict=True)]
        start = self._start(which, low, high, counter, attempt)
        voxels = tuple(slice(lo, hi - 1 + c) for lo, hi, c in zip(low, high, window, strict=True))
        orientation = self.orientations[key(self.seed, "orientation", counter) % len(self.orientations)]
        return Sample(extent.source, extent.item, voxels, start, orientation, window, attempt)

    def _start(self, which: int, low: list[int], high: list[int], counter: int, attempt: int) -> tuple[int, ...]:
        """Where a sample begins: any place of its block, or one with enough in it."""
        occupancy, window = self.occupancy[which], self.windows[which]
        again = (attempt,) if attempt else ()
        for number in range(TRIES if occupancy else 1):
            tried = (*again, "again", number) if number else again
            start = tuple(
                lo + key(self.seed, "offset", counter, axis, *tried) % (hi - lo)
                for axis, (lo, hi) in enumerate(zip(low, high, strict=True))
            )
            if occupancy is None or occupancy.has_enough(start, window):
                return start
        assert occupancy is not None
        lattice = _lattice(occupancy, low, high)
        found = np.argwhere(occupancy.enough(lattice, window))
        chosen = found[key(self.seed, "lattice", counter, *again) % len(found)]
        return tuple(int(axis[i]) for axis, i in zip(lattice, chosen, strict=True))


def block_steps(extent: Extent, window: tuple[int, ...], block: tuple[int, ...] | None) -> list[int]:
    """Voxels from one block of starts to the next along each axis: as given, or whole chunks."""
    return [
        block[axis] if block else math.ceil(size / chunk) * chunk
        for axis, (size, chunk) in enumerate(zip(window, extent.chunk, strict=True))
    ]


def _cuts(extent: Extent, window: tuple[int, ...], block: tuple[int, ...] | None) -> list[np.ndarray]:
    """Boundaries of the blocks of starts along each axis, on chunk boundaries where there are any."""
    cuts = []
    steps = block_steps(extent, window, block)
    for size, origin, w, step in zip(extent.shape, extent.origin, window, steps, strict=True):
        starts = size - w + 1
        inner = np.arange(step - origin % step if origin else step, starts, step)
        cuts.append(np.concatenate([[0], inner[inner > 0], [starts]]).astype(np.int64))
    return cuts


def _weights(
    extent: Extent, window: tuple[int, ...], cuts: list[np.ndarray], occupancy: Occupancy | None
) -> np.ndarray:
    """How many crops' worth of starts each block has; an item that is stored whole counts as one crop."""
    whole = all(c >= s for c, s in zip(extent.chunk, extent.shape, strict=True))
    weights = np.ones(())
    for c, size in zip(cuts, window, strict=True):
        weights = np.multiply.outer(weights, np.diff(c) / (c[-1] if whole else size))
    if occupancy is not None:
        for cell in np.ndindex(weights.shape):
            low, high = ([int(c[i + end]) for c, i in zip(cuts, cell, strict=True)] for end in (0, 1))
            weights[cell] *= occupancy.enough(_lattice(occupancy, low, high), window).mean()
    return weights * extent.weight


def _lattice(occupancy: Occupancy, low: Sequence[int], high: Sequence[int]) -> list[np.ndarray]:
    """Places of a block, one a cell along each axis, by which its share of places with enough in them is judged."""
    return [
        np.unique(np.append(np.arange(lo, hi, cell), hi - 1))
        for lo, hi, cell in zip(low, high, occupancy.cell, strict=True)
    ]


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
