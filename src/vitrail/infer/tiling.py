"""Where tiles and rows of a prediction lie: arithmetic alone, so that items of any number and size are cut at once.

- an item is cut across its first axis into pillars, so wide that what is kept of one fits into memory; a pillar is cut
  along its first axis into rows, as thick as the chunks of what is written. A row is the unit of work: ranks share out
  rows, and a call that was killed goes on with those that are missing
- tiles of a pillar come in the order of where they begin along the first axis. So those that touch a row are a run of
  numbers, and no tile beyond the last one that touches it need be computed
- tiles are numbered over all items, and batches are groups of numbers in a row: which tiles are computed together
  depends neither on ranks nor on where a call goes on, so that results do not, to the last bit
- cells are what is written: voxels, patches (of features), or one for a whole item (of its class)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vitrail.data.order.sampler import Extent, Sample
from vitrail.data.order.tiles import tile_starts

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """How items are cut: what tiles share, how large cells are, and what fits into memory."""

    overlap: float
    cell: tuple[int, ...] | None  # voxels of a cell along the axes of an item; None: an item is one cell
    chunk: int | None  # cells of a row along the first axis, and of what is written along the others; None: all of it
    most: int  # cells of all views together that are kept at once, at least those of one row of tiles

    def cells(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the size of an item in cells."""
        return (1,) * len(shape) if self.cell is None else tuple(n // c for n, c in zip(shape, self.cell, strict=True))


class View(NamedTuple):
    """The tiles of an item as one source sees it: of a volume as it is, or of its slices across an axis."""

    source: int
    window: tuple[int, ...]  # voxels of the item
    starts: tuple[np.ndarray, ...]  # of tiles along each axis, in voxels


class Tile(NamedTuple):
    """One tile, and the cells that it says something of."""

    item: int
    view: int
    start: tuple[int, ...]  # voxels
    box: Box  # cells


@dataclass(frozen=True)
class Pillar:
    """A part of an item that is worked through along the first axis."""

    cut: Cut
    views: tuple[View, ...]
    shape: tuple[int, ...]  # of the item, in cells
    box: Box  # cells along all axes but the first
    thick: int  # cells of a row

    @property
    def rows(self) -> int:
        return -(-self.shape[0] // self.thick)

    def row(self, number: int) -> slice:
        """Return the cells of a row along the first axis."""
        return slice(number * self.thick, min((number + 1) * self.thick, self.shape[0]))

    @cached_property
    def _inside(self) -> list[list[range]]:
        """Return which tiles of each view touch the box, along each axis but the first."""
        found = []
        for view in self.views:
            ranges = []
            for axis, within in enumerate(self.box, start=1):
                first, last = self.bounds(view, axis)
                begin, end = np.searchsorted(last, within.start, "right"), np.searchsorted(first, within.stop)
                ranges.append(range(int(begin), int(end)))
            found.append(ranges)
        return found

    def bounds(self, view: View, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first cell of each tile along an axis, and the one behind its last."""
        starts = view.starts[axis]
        if self.cut.cell is None:
            return np.zeros_like(starts), np.ones_like(starts)
        cell = self.cut.cell[axis]
        return starts // cell, (starts + view.window[axis]) // cell

    @cached_property
    def _layers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return view, place, first and last cell of each layer of tiles along the first axis, and where tiles end."""
        rows = []
        for number, view in enumerate(self.views):
            first, last = self.bounds(view, 0)
            count = math.prod(len(r) for r in self._inside[number])
            at = np.arange(len(first))
            rows.append(np.stack([np.full_like(at, number), at, first, last, np.full_like(at, count)]))
        table = np.concatenate(rows, axis=1)
        table = table[:, np.lexsort((table[1], table[0], table[2]))]
        return table[0], table[1], table[2], table[3], np.cumsum(table[4])

    @property
    def tiles(self) -> int:
        return int(self._layers[4][-1])

    def tiles_of(self, first: int, last: int) -> range:
        """Return the numbers of the tiles between the first and the last that touch rows first..last-1."""
        _, _, begin, end, ends = self._layers
        low, high = self.row(first).start, self.row(last - 1).stop
        touching = np.flatnonzero((begin < high) & (end > low))
        return range(int(ends[touching[0] - 1]) if touching[0] else 0, int(ends[touching[-1]]))

    def tile(self, item: int, number: int) -> Tile:
        """Return a tile of the pillar."""
        views, places, _, _, ends = self._layers
        layer = int(np.searchsorted(ends, number, side="right"))
        within = number - (int(ends[layer - 1]) if layer else 0)
        which = int(views[layer])
        view, ranges = self.views[which], self._inside[which]
        inside = np.unravel_index(within, [len(r) for r in ranges])
        at = [int(places[layer]), *(r.start + int(i) for r, i in zip(ranges, inside, strict=True))]
        start = tuple(int(starts[i]) for starts, i in zip(view.starts, at, strict=True))
        cells = (self.bounds(view, axis) for axis in range(len(start)))
        box = tuple(slice(int(first[i]), int(last[i])) for (first, last), i in zip(cells, at, strict=True))
        return Tile(item, which, start, box)


class Run(NamedTuple):
    """Rows of a pillar, one after another, and the tiles that are needed for them, numbered over all items."""

    item: int
    pillar: Pillar
    first: int  # row of the pillar
    last: int  # and the one behind the last
    number: int  # of the first row, over all items
    tiles: range


class Tiling:
    """All tiles and rows of some items, each of which one or several sources see."""

    def __init__(self, views: Sequence[Sequence[Extent]], cut: Cut):
        """`views` are the items of each source, in the same order; only as much of one counts as all of them have."""
        self.cut, self.extents = cut, [extent for view in views for extent in view]
        known: dict[tuple[tuple[int, ...], ...], int] = {}
        self.kinds: list[list[Pillar]] = []  # pillars of items of each shape
        which = []
        for same in zip(*views, strict=True):
            shapes = tuple(extent.shape for extent in same)
            if shapes not in known:
                known[shapes] = len(self.kinds)
                self.kinds.append(_pillars(same, cut))
            which.append(known[shapes])
        self.which = np.array(which)
        self.tile_ends, self.row_ends = (
            np.cumsum(np.array([sum(size) for size in sizes])[self.which])
            for sizes in zip(*(self._sizes(pillars) for pillars in self.kinds), strict=True)
        )

    @staticmethod
    def _sizes(pillars: list[Pillar]) -> tuple[list[int], list[int]]:
        return [pillar.tiles for pillar in pillars], [pillar.rows for pillar in pillars]

    @property
    def tiles(self) -> int:
        return int(self.tile_ends[-1])

    @property
    def rows(self) -> int:
        return int(self.row_ends[-1])

    @property
    def items(self) -> int:
        return len(self.which)

    def cells(self, item: int) -> tuple[int, ...]:
        return self.kinds[self.which[item]][0].shape

    def rows_of(self, item: int) -> range:
        """Return the numbers of an item's rows."""
        return range(int(self.row_ends[item - 1]) if item else 0, int(self.row_ends[item]))

    def runs(self, rows: Sequence[int]) -> Iterator[Run]:
        """Put rows, in rising order, together to runs of one pillar each."""
        at = 0
        while at < len(rows):
            item, pillar, first, tiles_before = self._find_row(rows[at])
            last, begun = first + 1, at
            at += 1
            while at < len(rows) and rows[at] == rows[at - 1] + 1 and last < pillar.rows:
                at, last = at + 1, last + 1
            mine = pillar.tiles_of(first, last)
            tiles = range(tiles_before + mine.start, tiles_before + mine.stop)
            yield Run(item, pillar, first, last, rows[begun], tiles)

    def place(self, number: int) -> tuple[int, Box]:
        """Return the item of a row, and its cells."""
        item, pillar, row, _ = self._find_row(number)
        return item, (pillar.row(row), *pillar.box)

    def tile(self, number: int) -> Tile:
        item = int(np.searchsorted(self.tile_ends, number, side="right"))
        number -= int(self.tile_ends[item - 1]) if item else 0
        for pillar in self.kinds[self.which[item]]:
            if number < pillar.tiles:
                return pillar.tile(item, number)
            number -= pillar.tiles
        raise IndexError(number)

    def _find_row(self, number: int) -> tuple[int, Pillar, int, int]:
        """Return the item and the pillar of a row, its number there, and the tiles of all pillars before."""
        item = int(np.searchsorted(self.row_ends, number, side="right"))
        number -= int(self.row_ends[item - 1]) if item else 0
        before = int(self.tile_ends[item - 1]) if item else 0
        for pillar in self.kinds[self.which[item]]:
            if number < pillar.rows:
                return item, pillar, number, before
            number, before = number - pillar.rows, before + pillar.tiles
        raise IndexError(number)


def _pillars(seen: Sequence[Extent], cut: Cut) -> list[Pillar]:
    """Cut an item into pillars; `seen` is the item as each source has it, perhaps beyond its end (padded.py)."""
    cells = cut.cells([min(sizes) for sizes in zip(*(extent.shape for extent in seen), strict=True)])
    views = []
    for extent in seen:
        starts = []
        for axis, (size, window) in enumerate(zip(extent.shape, extent.window, strict=True)):
            cell = 1 if cut.cell is None else cut.cell[axis]
            starts.append(tile_starts(size // cell, window // cell, cut.overlap if window > 1 else 0.0) * cell)
        views.append(View(extent.source, extent.window, tuple(starts)))
    thick = cells[0] if cut.chunk is None else min(cut.chunk, cells[0])
    deep = 1 if cut.cell is None else max(view.window[0] // cut.cell[0] for view in views)
    sides = list(cells[1:])
    if cut.chunk is not None:
        most = max(1, cut.most // (len(views) * min(deep + thick, cells[0])))
        while math.prod(sides) > most and max(sides) > cut.chunk:
            longest = sides.index(max(sides))
            sides[longest] = -(-sides[longest] // (2 * cut.chunk)) * cut.chunk  # half of it, in whole chunks
    boxes: list[Box] = [()]
    for side, size in zip(sides, cells[1:], strict=True):
        boxes = [(*box, slice(at, min(at + side, size))) for box in boxes for at in range(0, size, side)]
    return [Pillar(cut, tuple(views), cells, box, thick) for box in boxes]


class TilesInOrder:
    """An order of samples whose counter goes through the tiles of a tiling."""

    lanes = reuse = 1
    largest_block = 0  # no block is read as a whole

    def __init__(self, tiling: Tiling, crop: tuple[int, ...]):
        self.tiling, self.crop, self.extents = tiling, crop, tiling.extents

    @property
    def epoch(self) -> int:
        return self.tiling.tiles

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        tile = self.tiling.tile(counter)
        view = self.tiling.kinds[self.tiling.which[tile.item]][0].views[tile.view]
        block = tuple(slice(s, s + w) for s, w in zip(tile.start, view.window, strict=True))
        return Sample(view.source, tile.item, block, tile.start, 0, view.window, attempt)
