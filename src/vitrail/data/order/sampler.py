"""The order of crops: a pure function of (seed, counter).

The sampler's whole state is one integer, the counter of samples drawn so far, so that a run resumes at any world size
and with any number of workers. It also suits a reader that decodes large blocks and cuts several crops from each:

- the space of valid crop starts is cut along chunk boundaries into blocks; every start belongs to one block
- lane = counter mod `lanes`; a lane stays `reuse` turns on one block, then takes the next visit
- the visits of a pass are a keyed (Feistel) permutation; each block's share of them is its share of the starts, and
  offsets hash the counter, so crops are uniform over the data
- an item's share is its voxels, in crops, whatever its format, or that of all others of its source: images of one size
  are gone through image by image, as are images of many sizes where whole ones are taken (`fit`, `resized_crop`)
- several orders can be one: each counter of a run belongs to one of them, and has a number of its own there
"""

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vitrail.data.order.filter import NothingLeft, Occupancy
from vitrail.draws import key, keys

TRIES = 64  # places in a block that are looked at for one with enough in it
ROUNDS = 4  # of a permutation
MOST_KEPT = 16  # bits of the numbers that a permutation keeps its hashes of
PASSES = 64  # whose permutations are kept: of little data a batch goes through many


class Sample(NamedTuple):
    source: int
    item: int
    block: tuple[slice, ...]  # voxels that hold every crop of the block
    start: tuple[int, ...]  # of the window
    orientation: int
    window: tuple[int, ...] = ()  # voxels that the sample is cut from: the crop, or more where it is resampled
    attempt: int = 0  # how many samples this one stands in for


class Extent(NamedTuple):
    """An item of a source, as a place that crops are taken from."""

    source: int
    item: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    origin: tuple[int, ...]  # region start modulo chunk
    weight: float
    window: tuple[int, ...] = ()  # voxels that a sample is cut from, where that is not the crop
    slices: int | None = None  # number of the axis across which samples are slices, which crops do not have


class Order(Protocol):
    """An order of samples: random crops, tiles, or several of these in turn."""

    crop: tuple[int, ...]
    extents: list[Extent]
    lanes: int  # blocks that samples come from in turn
    reuse: int  # samples of a block
    largest_block: int  # in voxels

    @property
    def epoch(self) -> int: ...  # samples of one pass

    def __call__(self, counter: int, attempt: int = 0) -> Sample: ...


def choose(order: Order, counters: Sequence[int]) -> list[Sample]:
    """Return the samples of many counters, the same as one by one."""
    at_once = getattr(order, "choose", None)
    return [order(counter) for counter in counters] if at_once is None else at_once(counters)


class Bounds(NamedTuple):
    """A block of places where samples begin, and the voxels that hold all of these samples."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    voxels: tuple[slice, ...]


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
        even: Collection[int] = (),
    ):
        """Cut extents into blocks. Their `occupancy` leaves out places with little in them; `shares` are of sources.

        The items of `even` sources are drawn alike, whatever their sizes.
        """
        self.extents, self.crop, self.seed = list(extents), crop, seed
        self.lanes, self.orientations = lanes, list(orientations)  # codes of augment.orientations()
        self.windows = [e.window or crop for e in extents]
        reused = any(_holds_several(e, window) for e, window in zip(extents, self.windows, strict=True))
        self.reuse = reuse or (4 if reused else 1)
        self.occupancy = list(occupancy or [None] * len(self.extents))
        self.cuts: list[list[np.ndarray]] = []
        self._whole: list[tuple[slice, ...] | None] = []  # the voxels of items that are taken whole, their one block
        weights: list[np.ndarray] = []
        alike: dict[Any, Any] = {}  # a million images of one size are cut once
        for e, window, filled in zip(extents, self.windows, self.occupancy, strict=True):
            what = (e[2:], window)
            found = alike.get(what)
            if found is None:
                cuts = _cuts(e, window, block)
                whole = tuple(slice(0, size) for size in window) if all(c[-1] == 1 for c in cuts) else None
                found = alike[what] = (cuts, _weights(e, window, cuts), whole)
            self.cuts.append(found[0])
            self._whole.append(found[2])
            weights.append(found[1] if filled is None else found[1] * _filled(filled, window, found[0]))
        for source in even:
            mine = [i for i, e in enumerate(extents) if e.source == source and weights[i].sum() > 0]
            each = sum(weights[i].sum() for i in mine) / max(1, len(mine))
            for i in mine:
                weights[i] = weights[i] * (each / weights[i].sum())
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
            raise NothingLeft("data.filter: no place has enough in it; lower `share` or `above`, or choose other data")
        self._last = int(np.flatnonzero(flat)[-1])  # of the blocks that samples may come from
        self.largest_block = max(
            math.prod(int(np.diff(c).max()) + size - 1 for c, size in zip(cuts, window, strict=True))
            for (_, window), (cuts, *_) in alike.items()
        )  # in voxels
        self._known: dict[int, Bounds] = {}  # of the latest blocks, by number: each is asked for `reuse` times
        self._passes: dict[int, tuple[Permutation, float]] = {}  # the latest, with their phases

    def weight_of(self, extent: int) -> float:
        """Return the crops' worth of places of an extent, times its weight or share."""
        before, after = (self.cumulative[i - 1] if i else 0.0 for i in self.first[extent : extent + 2])
        return float(after - before)

    @property
    def epoch(self) -> int:
        """Return the samples in one pass over all blocks."""
        return self.visits * self.reuse

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        """Return the sample of a counter; attempts beyond the first stand in for one that cannot be read."""
        return self.choose([counter], attempt)[0]

    def choose(self, counters: Sequence[int], attempt: int = 0) -> list[Sample]:
        """Return the samples of many counters, the same as one by one."""
        turns, lanes = np.divmod(np.asarray(counters, np.int64), self.lanes)
        passes, visits = np.divmod(turns // self.reuse * self.lanes + lanes, self.visits)
        if attempt:  # from anywhere: what cannot be read is often the whole block
            visits = np.array([key(self.seed, "substitute", c, attempt) % self.visits for c in counters])
        blocks = np.empty_like(visits)
        for number in np.unique(passes).tolist():
            blocks[passes == number] = self._find_blocks(number, visits[passes == number])
        which = np.searchsorted(self.first, blocks, side="right") - 1
        codes = [self.orientations[0]] * len(counters)
        if len(self.orientations) > 1:
            drawn = keys(self.seed, "orientation", counters) % np.uint64(len(self.orientations))
            codes = [self.orientations[place] for place in drawn.tolist()]
        each = zip(which.tolist(), blocks.tolist(), counters, codes, strict=True)
        return [self._sample(*given, attempt) for given in each]

    def _sample(self, number: int, block: int, counter: int, orientation: int, attempt: int) -> Sample:
        """Return the sample of a counter in a block of an extent."""
        extent, window, voxels = self.extents[number], self.windows[number], self._whole[number]
        if voxels is not None:
            start = (0,) * len(window)  # the only place there is
        else:
            low, high, voxels = self._bounds(number, block)
            start = self._start(number, low, high, counter, attempt)
        return Sample(extent.source, extent.item, voxels, start, orientation, window, attempt)

    def _find_blocks(self, pass_number: int, visits: np.ndarray) -> np.ndarray:
        """Find the numbers of the blocks of some visits, among those of all extents."""
        found = self._passes.get(pass_number)
        if found is None:
            order = Permutation(self.visits, key(self.seed, "pass", pass_number))
            found = order, key(self.seed, "phase", pass_number) / 2**63
            # A new one: other threads may be looking at the old.
            self._passes = dict([*self._passes.items()][1 - PASSES :]) | {pass_number: found}
        order, phase = found
        places = (order(visits) + phase) / self.visits * self.cumulative[-1]
        return np.minimum(np.searchsorted(self.cumulative, places, side="right"), self._last)

    def _bounds(self, number: int, block: int) -> Bounds:
        found = self._known.get(block)
        if found is None:
            cuts, window = self.cuts[number], self.windows[number]
            cell = np.unravel_index(block - self.first[number], [len(c) - 1 for c in cuts])
            low = tuple(int(c[i]) for c, i in zip(cuts, cell, strict=True))
            high = tuple(int(c[i + 1]) for c, i in zip(cuts, cell, strict=True))
            voxels = tuple(slice(lo, hi - 1 + size) for lo, hi, size in zip(low, high, window, strict=True))
            if len(self._known) >= 2 * self.lanes:
                self._known = {}  # a new one: other threads may be looking at the old
            found = self._known[block] = Bounds(low, high, voxels)
        return found

    def _start(
        self, which: int, low: Sequence[int], high: Sequence[int], counter: int, attempt: int
    ) -> tuple[int, ...]:
        """Draw where a sample begins: any place of its block, or one with enough in it."""
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
        lattice = [_places(*each) for each in zip(low, high, occupancy.cell, strict=True)]
        found = np.argwhere(occupancy.enough(lattice, window))
        chosen = found[key(self.seed, "lattice", counter, *again) % len(found)]
        return tuple(int(axis[i]) for axis, i in zip(lattice, chosen, strict=True))


def block_steps(extent: Extent, window: tuple[int, ...], block: tuple[int, ...] | None) -> list[int]:
    """Return the voxels from one block of starts to the next along each axis: as given, or whole chunks."""
    steps = [math.ceil(size / chunk) * chunk for size, chunk in zip(window, extent.chunk, strict=True)]
    return steps if block is None else list(across(block, extent, steps))


def across(given: Sequence[Any], extent: Extent, default: Sequence[Any]) -> Sequence[Any]:
    """Turn one value an axis of a sample into one an axis of an item: across slices it is the default."""
    if extent.slices is None or len(given) != len(extent.shape) - 1:
        return given
    return [*given[: extent.slices], default[extent.slices], *given[extent.slices :]]


def _cuts(extent: Extent, window: tuple[int, ...], block: tuple[int, ...] | None) -> list[np.ndarray]:
    """Return the boundaries of the blocks of starts along each axis, on chunk boundaries where there are any."""
    cuts = []
    steps = block_steps(extent, window, block)
    for size, origin, w, step in zip(extent.shape, extent.origin, window, steps, strict=True):
        starts = size - w + 1
        inner = np.arange(step - origin % step if origin else step, starts, step)
        cuts.append(np.concatenate([[0], inner[inner > 0], [starts]]).astype(np.int64))
    return cuts


def _is_whole(extent: Extent) -> bool:
    """Tell whether an item has to be decoded as one."""
    return all(c >= s for c, s in zip(extent.chunk, extent.shape, strict=True))


def _holds_several(extent: Extent, window: tuple[int, ...]) -> bool:
    """Tell whether an item is worth several crops once decoded: chunks are, and volumes larger than a crop."""
    if not _is_whole(extent):
        return True
    return len(extent.shape) > 2 and math.prod(extent.shape) >= 2 * math.prod(window)


def _weights(extent: Extent, window: tuple[int, ...], cuts: list[np.ndarray]) -> np.ndarray:
    """Share out the crops' worth of voxels of an item over its blocks, by their starts."""
    weights = np.full((), extent.weight * math.prod(s / w for s, w in zip(extent.shape, window, strict=True)))
    for c in cuts:
        weights = np.multiply.outer(weights, np.diff(c) / c[-1])
    return weights


def _places(low: int, high: int, cell: int) -> np.ndarray:
    """List places along an axis of a block, one a cell."""
    return np.unique(np.append(np.arange(low, high, cell), high - 1))


def _filled(occupancy: Occupancy, window: tuple[int, ...], cuts: list[np.ndarray]) -> np.ndarray:
    """Return the share of each block's places with enough in them, judged by one place a cell along each axis."""
    lattices = [
        [_places(low, high, cell) for low, high in itertools.pairwise(c.tolist())]
        for c, cell in zip(cuts, occupancy.cell, strict=True)
    ]
    counts = [np.array([len(places) for places in lattice]) for lattice in lattices]
    others, rows = [np.concatenate(lattice) for lattice in lattices[1:]], []
    for places in lattices[0]:
        found = occupancy.enough([places, *others], window).sum(axis=0, dtype=np.float64)
        for axis, number in enumerate(counts[1:]):
            found = np.add.reduceat(found, np.cumsum([0, *number[:-1]]), axis=axis)
        rows.append(found)
    return np.stack(rows) / functools.reduce(np.multiply.outer, counts)


def permute(index: int, size: int, secret: int) -> int:
    """Permute range(size) by a key: four Feistel rounds, walking until the value falls inside."""
    if size == 1:
        return 0
    half = half_bits(size)
    low_bits = (1 << half) - 1
    while True:
        left, right = index >> half, index & low_bits
        for round_number in range(ROUNDS):
            left, right = right, left ^ (key(secret, "feistel", round_number, right) & low_bits)
        index = left << half | right
        if index < size:
            return index


def half_bits(size: int) -> int:
    """Return half of the bits of the numbers below a size."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


class Permutation:
    """permute() of many numbers: rounds hash half of the bits alone, so that few hashes serve them all and are kept."""

    def __init__(self, size: int, secret: int):
        self.size, self.secret = size, secret
        self.half = half_bits(size)
        self._known: dict[int, np.ndarray] = {}  # by round: hashes [2^half], -1 where not known yet

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Return the places of some numbers, each below the size."""
        found, open_ = index.astype(np.int64), np.arange(len(index))
        while len(open_):
            left, right = found[open_] >> self.half, found[open_] & ((1 << self.half) - 1)
            for number in range(ROUNDS):
                left, right = right, left ^ self._hash(number, right)
            found[open_] = left << self.half | right
            open_ = open_[found[open_] >= self.size]
        return found

    def _hash(self, number: int, values: np.ndarray) -> np.ndarray:
        """Return the low bits of key(secret, "feistel", round, value)."""
        if self.half > MOST_KEPT:
            return self._hash_anew(number, values)
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = np.full(1 << self.half, -1, np.int32)
        new = values[known[values] < 0]
        if len(new):
            known[new] = self._hash_anew(number, new)
        return known[values]

    def _hash_anew(self, number: int, values: np.ndarray) -> np.ndarray:
        bits = keys(self.secret, f"feistel:{number}", values.tolist())
        return (bits & np.uint64((1 << self.half) - 1)).astype(np.int64)


class Orders:
    """Several orders that share out the counters of a run; `places` tells how."""

    def __init__(self, orders: Sequence[Order], *, lanes: int):
        self.orders, self.lanes = list(orders), lanes
        self.crop = self.orders[0].crop
        self.extents = [e for order in self.orders for e in order.extents]
        self.reuse = max(order.reuse for order in self.orders)
        self.largest_block = max(order.largest_block for order in self.orders)

    def places(self, counters: Any) -> tuple[Any, Any]:
        """Return the orders of counters, by number, and which sample of its order each one is."""
        raise NotImplementedError

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        number, own = self.places(counter)
        return self.orders[int(number)](int(own), attempt)

    def choose(self, counters: Sequence[int]) -> list[Sample]:
        """Return the samples of many counters, the same as one by one."""
        numbers, own = self.places(np.asarray(counters, np.int64))
        samples: dict[int, Sample] = {}
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            samples |= zip(rows.tolist(), choose(self.orders[number], own[rows].tolist()), strict=True)
        return [samples[row] for row in range(len(counters))]
