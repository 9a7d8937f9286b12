"""Samples with something in them: a coarse map of where voxels count, made once an item, answers for any box.

The map counts voxels above a threshold in cells of an eighth of the crop; its summed-area table gives the share of a
box in a few look-ups, as if voxels lay evenly inside a cell. So whether a sample is taken is a function of its place,
and the order of samples stays a pure function of (seed, counter).

A chunk that cannot be read has nothing in it, with `data.bad: skip`; but an error that may pass ends the run, since
ranks with different maps would have different orders.
"""

import io
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from vitrail.data.files.cache import keep
from vitrail.data.reading.pool import Job, Policy, Pool, ShortRead, read_again
from vitrail.data.source import LabelledSource, Source
from vitrail.errors import BadData, UserError

FINENESS = 8  # cells along a crop
PIECE = 2**22  # voxels that are read at once, about
THREADS = 4
PARTS = 8  # along each axis of a piece that is read again for what is good in it

Region = tuple[slice, ...]

log = logging.getLogger(__name__)


class NothingLeft(UserError):
    """No sample has enough in it."""


class Occupancy:
    """A map of an item: how many voxels count, cell by cell, and which boxes have enough of them."""

    def __init__(self, counts: np.ndarray, shape: tuple[int, ...], cell: tuple[int, ...], share: float):
        self.shape, self.cell, self.share = shape, cell, share
        table = counts.astype(np.float64)
        for axis in range(table.ndim):
            table = np.cumsum(table, axis=axis)
        self.table = np.pad(table, [(1, 0)] * table.ndim)  # [i, j, ...]: voxels in the cells before

    def shares(self, starts: Sequence[np.ndarray], window: tuple[int, ...]) -> np.ndarray:
        """Return the share of voxels that count in every box whose start is one of each axis' starts."""
        found = self.table
        for axis, (begin, size) in enumerate(zip(starts, window, strict=True)):
            begin = np.asarray(begin)
            found = self._at(found, axis, begin + size) - self._at(found, axis, begin)
        return found / math.prod(window)

    def enough(self, starts: Sequence[np.ndarray], window: tuple[int, ...]) -> np.ndarray:
        return self.shares(starts, window) >= self.share * (1 - 1e-9)  # sums of a table are not exact

    def has_enough(self, start: Sequence[int], window: tuple[int, ...]) -> bool:
        """Tell the same of one box, from the corners of its table alone."""
        corners, weights = [], []
        for at, size, cell, whole in zip(start, window, self.cell, self.shape, strict=True):
            low, before = _between(at, cell, whole)
            high, after = _between(at + size, cell, whole)
            corners.append([low, low + 1, high, high + 1])
            weights.append([before - 1, -before, 1 - after, after])
        found = self.table[np.ix_(*corners)]
        for weight in reversed(weights):
            found = found @ np.array(weight)
        return bool(found >= self.share * (1 - 1e-9) * math.prod(window))

    def _at(self, table: np.ndarray, axis: int, position: np.ndarray) -> np.ndarray:
        """Look up the table at positions in voxels along an axis, between cells in proportion."""
        cell, cells = self.cell[axis], table.shape[axis] - 1
        low = np.minimum(position // cell, cells - 1)
        width = np.minimum((low + 1) * cell, self.shape[axis]) - low * cell
        part = ((position - low * cell) / width).reshape([-1 if a == axis else 1 for a in range(table.ndim)])
        return np.take(table, low, axis=axis) * (1 - part) + np.take(table, low + 1, axis=axis) * part


def _between(position: int, cell: int, size: int) -> tuple[int, float]:
    """Return the cell of a position along an axis, and how far into it that is."""
    low = min(position // cell, (size - 1) // cell)
    return low, (position - low * cell) / (min((low + 1) * cell, size) - low * cell)


def check_filter(source: Source, by: str, where: str) -> None:
    """Refuse a filter by something that the source does not have."""
    if by == "labels" and not (isinstance(source, LabelledSource) and source.label_dtype is not None):
        raise UserError(
            f"data.filter.by: {where} has no labels of voxels; name a variable, or the labels of this entry"
        )
    if by != "labels" and by not in source.variables:
        raise UserError(
            f"data.filter.by: {where} has no variable {by!r}; use labels or one of {', '.join(source.variables)}"
        )


def cell_of(window: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, size // FINENESS) for size in window)


def occupancy_of(
    source: Source,
    item: int,
    cell: tuple[int, ...],
    *,
    by: str,
    above: float,
    share: float,
    mark: str | None,
    policy: Policy | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Occupancy:
    """Return the map of an item, from the cache or made now; `mark` is the data's fingerprint."""
    facts = source.items[item]
    shape = tuple(math.ceil(s / c) for s, c in zip(facts.shape, cell, strict=True))

    def make() -> np.ndarray:
        return count_voxels(source, item, cell, by=by, above=above, policy=policy, tick=tick)

    def check(kept: bytes) -> np.ndarray:
        found = np.load(io.BytesIO(kept), allow_pickle=False)
        if found.shape != shape or found.dtype != np.float32 or not (found >= 0).all():
            raise ValueError("counts of something else")
        return found

    def pack() -> bytes:
        held = io.BytesIO()
        np.save(held, make(), allow_pickle=False)
        return held.getvalue()

    # Nobody waits for another process that counts: who waits cannot tell that it lives.
    counts = make() if mark is None else keep("filter", f"{mark}-{item}-{cell}", pack, check, wait=False)
    return Occupancy(counts, facts.shape, cell, share)


def count_voxels(
    source: Source,
    item: int,
    cell: tuple[int, ...],
    *,
    by: str,
    above: float,
    policy: Policy | None = None,
    tick: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Count voxels above a threshold in each cell of an item; the item is read once, in pieces of whole cells.

    `tick` is called after every piece.
    """
    facts, policy = source.items[item], replace(policy or Policy(), shared=True)
    variable = None if by == "labels" else source.variables.index(by)
    counts = np.zeros([math.ceil(s / c) for s, c in zip(facts.shape, cell, strict=True)], np.float32)
    steps, told = _steps(facts.shape, facts.chunk, cell), set[str]()

    def name(region: Region) -> str:
        places = zip(source.axes, region, strict=True)
        return f"{facts.name} (voxels {', '.join(f'{axis} {r.start} to {r.stop - 1}' for axis, r in places)})"

    def look(region: Region) -> np.ndarray:
        def take() -> np.ndarray:
            if variable is None:
                voxels = cast(LabelledSource, source).read_labels(item, region)
            else:
                voxels = source.read(item, region)[variable]
            if voxels.shape != tuple(r.stop - r.start for r in region):
                raise ShortRead(f"{list(voxels.shape)} values came for {[r.stop - r.start for r in region]}")
            return voxels

        return read_again(take, partial(name, region), retries=policy.retries) > above

    def fold(found: np.ndarray) -> np.ndarray:
        found = found.astype(np.float32)
        for axis, c in enumerate(cell):
            found = np.add.reduceat(found, np.arange(0, found.shape[axis], c), axis=axis)
        return found

    def count(region: Region) -> np.ndarray:
        return fold(look(region))

    def look_again(region: Region, error: BadData) -> np.ndarray:
        """Look at a piece that cannot be read as a whole: at all but its broken chunks."""
        found = np.zeros([r.stop - r.start for r in region], bool)
        parts = list(itertools.product(*map(_whole_chunks, region, facts.chunk, facts.origin)))
        for part in parts:

            def read(part: Region = part) -> np.ndarray:
                if len(parts) == 1:
                    raise error
                found: np.ndarray = pool.submit(partial(look, part), partial(name, part)).result(policy.limit)
                return found

            if (values := policy.or_none(read, told, _warn)) is not None:
                inner = tuple(slice(p.start - r.start, p.stop - r.start) for p, r in zip(part, region, strict=True))
                found[inner] = values
                tick()
        return found

    def finish(region: Region, job: Job) -> None:
        try:
            found = job.result(policy.limit)
        except BadData as error:
            if not policy.skips(error):
                raise
            found = fold(look_again(region, error))
        counts[tuple(slice(r.start // c, math.ceil(r.stop / c)) for r, c in zip(region, cell, strict=True))] = found
        tick()

    pool, jobs = Pool(THREADS), deque[tuple[Region, Job]]()
    pieces = [
        [slice(a, min(a + step, size)) for a in range(0, size, step)]
        for size, step in zip(facts.shape, steps, strict=True)
    ]
    try:
        for region in itertools.product(*pieces):
            if len(jobs) == 2 * THREADS:
                finish(*jobs.popleft())
            jobs.append((region, pool.submit(partial(count, region), partial(name, region))))
        while jobs:
            finish(*jobs.popleft())
    finally:
        pool.close()
    return counts


def _warn(error: BadData) -> None:
    log.warning("bad data, which data.filter takes for empty: %s", error)


def _whole_chunks(piece: slice, chunk: int, origin: int) -> list[slice]:
    """Cut a piece of an axis on chunk boundaries, into at most so many parts."""
    step = chunk * math.ceil((piece.stop - piece.start) / chunk / PARTS)
    inner = range((piece.start + origin) // step * step + step - origin, piece.stop, step)
    return [slice(a, b) for a, b in itertools.pairwise([piece.start, *inner, piece.stop])]


def _steps(shape: tuple[int, ...], chunk: tuple[int, ...], cell: tuple[int, ...]) -> list[int]:
    """Return the size of a piece: whole cells, about a chunk or more along each axis, but no more than a few GiB."""
    edge = round(PIECE ** (1 / len(shape)))
    return [
        min(math.ceil(min(max(k, edge), 4 * edge) / c) * c, math.ceil(size / c) * c)
        for size, k, c in zip(shape, chunk, cell, strict=True)
    ]
