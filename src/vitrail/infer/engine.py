"""Rows of predictions, one after another: tiles are read ahead by threads, the device computes, sums are blended.

The reading is that of training (data/reading/loader.py): chunks are kept, windows pooled, values changed and resampled
on the device. Tiles are those of tiling.py; whoever takes the rows writes them meanwhile, in a thread of his own.
"""

import math
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.data.dataset import Dataset
from vitrail.data.order.sampler import Extent
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy, read_again
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.infer.blend import Band, Row
from vitrail.infer.eyes import Eyes, Form, Looking, finish
from vitrail.infer.mutex import Offsets
from vitrail.infer.tiling import Cut, Tile, TilesInOrder, Tiling
from vitrail.layers.patches import per_axis
from vitrail.models.model import encoder_of, known_variables
from vitrail.training.stitch import Blend, in_window

SIDES = {2: 512, 3: 64}  # voxels of a chunk of what is written, by the axes of an item
UNNAMED = re.compile(r"image|channel\d+")  # what variables are called whose file has no names
MOST_VOXELS, MOST_SAMPLES = 2**22, 16  # of a batch, where no size was asked for


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How tiles are cut and put together."""

    overlap: float = 0.5  # of a tile and the next
    blend: Blend = "gaussian"
    flips: tuple[int, ...] = ()  # axes of a sample
    batch: int | None = None  # tiles computed at once; None: as many as suit their size
    memory: int = 2 << 30  # bytes for the sums of rows in the making
    chunk: int | None = None  # voxels along each side of a chunk of what is written; None: as suits the axes
    threshold: float = 0.5  # affinity above which two voxels are likelier of one instance than not
    smallest: int = 1  # voxels of an instance; smaller ones become background

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise UserError(f"overlap: {self.overlap} must be a share of a tile, from 0 to less than 1, such as 0.5")
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch: {self.batch} must be at least 1")
        if self.chunk is not None and self.chunk < 4:
            raise UserError(f"chunk: {self.chunk} must be at least 4 voxels, such as 64")
        if not 0 < self.threshold < 1:
            raise UserError(f"threshold: {self.threshold} must be an affinity between 0 and 1, such as 0.5")
        if self.smallest < 1:
            raise UserError(f"smallest: {self.smallest} must be at least 1 voxel")

    def batch_of(self, crop: Sequence[int]) -> int:
        """Return a number that depends on the tiles alone, so that all machines compute the same ones together."""
        return self.batch or max(1, min(MOST_SAMPLES, MOST_VOXELS // math.prod(crop)))


class Engine:
    """Predictions of what one dataset holds; each of its sources is a view of the same items."""

    def __init__(
        self,
        eyes: Eyes,
        form: Form,
        dataset: Dataset,
        wishes: Wishes,
        *,
        whole: bool = False,
        name: str = "the input",
    ):
        """`whole`: each item is one row, for what is kept as a whole anyway."""
        self.eyes, self.form, self.dataset, self.wishes, self.name = eyes, form, dataset, wishes, name
        self.views = self._extents()
        first = self.views[0][0]
        self.offsets = self._offsets(first) if form.write == "affinities" else ()  # instances are made of these
        cell = self._cell(first)
        ndim = len(first.shape)
        side = wishes.chunk or SIDES.get(ndim, 64)
        self.chunk = None if whole or cell is None else max(4, side // max(cell))
        room = max(1, wishes.memory // (8 * (form.values + 1)))  # sums, and the row that is handed out
        self.tiling = Tiling(self.views, Cut(wishes.overlap, cell, self.chunk, room))
        self.order = TilesInOrder(self.tiling, eyes.crop)
        self.values = eyes.values_of(dataset.sources)
        self.size = wishes.batch_of(eyes.crop)

    def _extents(self) -> list[list[Extent]]:
        """Return the items as each source has them, with the windows that tiles are cut from."""
        found: list[list[Extent]] = [[] for _ in self.dataset.sources]
        for extent in self.dataset.windows():
            found[extent.source].append(extent)
        return found

    def _cell(self, first: Extent) -> tuple[int, ...] | None:
        if self.form.on == "item":
            return None
        if self.dataset.settings.fit is not None:
            raise UserError(
                f"{self.name}: this run saw images resized by data.fit, so what it says of voxels lies on none of "
                "theirs; train on crops (data.crop without data.fit), or ask for what is of a whole image"
            )
        if self.form.on == "voxels":
            return (1,) * len(first.shape)
        patch = list(per_axis(encoder_of(self.eyes.config).patch, self.eyes.config.ndim))
        if len(self.views) > 1:
            raise UserError("planes: features of slices lie on grids of their own; give one axis, such as --planes z")
        scales = {self.dataset.sources[0].items[extent.item].scale for extent in self.views[0]}
        if any(set(scale) != {1.0} for scale in scales):
            raise UserError(
                f"{self.name}: features lie on a grid of patches, which resampled voxels do not share; choose a level "
                f"of the voxel size that was trained on, or set spacing to null"
            )
        if first.slices is not None:
            patch.insert(first.slices, 1)
        return tuple(patch)

    def _offsets(self, first: Extent) -> Offsets:
        """Return the offsets of affinities, in voxels of the items; refused where a neighbour there is another."""
        if self.wishes.flips:
            raise UserError(
                "flips: a neighbour on one side is one on the other when flipped, so affinities are not averaged over "
                "flips; leave it out"
            )
        if len(self.views) > 1:
            raise UserError("planes: affinities of slices have neighbours of their own; give one axis, such as z")
        if any(set(self.dataset.sources[0].items[e.item].scale) != {1.0} for e in self.views[0]):
            raise UserError(
                f"{self.name}: affinities are of voxels as large as those of the training, and these are resampled; "
                "choose a level of that voxel size, or set spacing to null"
            )
        told: Any = self.eyes.objective
        across = first.slices
        return tuple(offset if across is None else (*offset[:across], 0, *offset[across:]) for offset in told.offsets)

    def rows(
        self,
        looking: Looking,
        rows: Sequence[int],
        *,
        workers: int,
        prefetch: int,
        tick: Callable[[], None] = lambda: None,
    ) -> Generator[Row, None, None]:
        """Yield rows, in rising order; their tiles are read ahead by threads. `tick` is called after each batch."""
        runs = list(self.tiling.runs(rows))
        if not runs:
            return
        size, total = self.size, self.tiling.tiles
        each = [np.arange(run.tiles.start // size, -(-run.tiles.stop // size)) for run in runs]
        numbers = np.concatenate(each)
        numbers = numbers[np.concatenate([[True], numbers[1:] != numbers[:-1]])]  # one that two runs share

        def counters(step: int) -> list[int]:
            first = int(numbers[step]) * size
            return [min(counter, total - 1) for counter in range(first, first + size)]

        loader = self._loader(counters, looking, workers=workers, prefetch=prefetch)
        with closing(loader.batches(0, len(numbers))) as batches:
            found, at = None, -1
            for run, mine in zip(runs, each, strict=True):
                band = Band(run, self.form.values, self.wishes.blend, looking.device)
                for number in mine.tolist():
                    if number != at:
                        batch = next(batches)
                        found, at = looking(batch, self.form, self._places(batch.counters), self.wishes.flips), number
                        tick()
                    assert found is not None
                    for row, counter in enumerate(range(number * size, min((number + 1) * size, total))):
                        if counter in run.tiles:
                            yield from band.add(self.tiling.tile(counter), self._in_cells(loader, counter, found[row]))
                yield from band.rest()

    def tiles(
        self, looking: Looking, *, workers: int, prefetch: int, tick: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Tile, Tensor], None, None]:
        """Yield every tile, in order, with what is said of it alone."""
        size, total = self.size, self.tiling.tiles

        def counters(step: int) -> list[int]:
            return list(range(step * size, min((step + 1) * size, total)))

        loader = self._loader(counters, looking, workers=workers, prefetch=prefetch)
        with closing(loader.batches(0, -(-total // size))) as batches:
            for batch in batches:
                found = looking(batch, self.form, self._places(batch.counters), self.wishes.flips)
                tick()
                for counter, values in zip(batch.counters, found, strict=True):
                    yield self.tiling.tile(counter), values

    def _loader(
        self, counters: Callable[[int], Sequence[int]], looking: Looking, *, workers: int, prefetch: int
    ) -> Loader:
        return Loader(
            self.order,
            self.dataset.reader(self.order, lanes=1, cache_bytes=0),
            counters,
            device=looking.device,
            workers=workers,
            prefetch=prefetch,
            statistics=self.eyes.statistics_of(self.dataset),
            values=self.values,
            policy=Policy(retries=self.dataset.settings.retries, limit=float(self.dataset.settings.read_limit)),
        )

    def _places(self, counters: Sequence[int]) -> list[int]:
        """Return numbers of tiles by where they lie, whatever else is cut."""
        found = []
        for counter in counters:
            tile = self.tiling.tile(counter)
            found.append(key(0, "tile", tile.item, tile.view, *tile.start) % 2**40)
        return found

    def _in_cells(self, loader: Loader, counter: int, values: Tensor) -> Tensor:
        """Bring what is said of a sample to the cells of its tile."""
        sample = self.order(counter)
        if self.form.on == "voxels":
            return in_window(loader, sample, values)
        across = self.views[sample.source][sample.item].slices
        return values if across is None else values.unsqueeze(across + 1)

    def finish(self, row: Row) -> np.ndarray:
        """Return what is written of a row: [*cells], or [channels, *cells]."""

        def given() -> np.ndarray:
            source, (item, box) = self.dataset.sources[0], self.tiling.place(row.number)
            read = partial(source.read, item, box)
            return read_again(read, lambda: source.items[item].name, retries=self.dataset.settings.retries)

        return finish(self.form, self.eyes, row.values, self.values, given)


def in_bytes(form: Form, eyes: Eyes) -> Form:
    """Return the form of the affinities that instances are made of."""
    return replace(form, write="affinities", channels=eyes.names, dtype=np.dtype(np.uint8))


def taken_for(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """Say which variables, that have names of their own, are taken for others; None where nothing is renamed."""
    pairs = [(a, b) for a, b in zip(names, wanted, strict=False) if a != b and not UNNAMED.fullmatch(a)]
    if not pairs or set(wanted) <= set(names):
        return None
    return "in their order, " + ", ".join(f"{a} is taken for {b}" for a, b in pairs[:6])


def check_variables(eyes: Eyes, names: Sequence[str], name: str) -> list[str] | None:
    """Return which variables are to be read, or how those that are there are to be called; None: as they are."""
    known, number = known_variables(eyes.config), len(eyes.variables)
    if tuple(names) == eyes.variables:
        return None
    if known is not None and set(names) <= set(known.known):
        return None
    if set(eyes.variables) <= set(names):
        return list(eyes.variables)
    if known is None and len(names) == number and not set(names) & set(eyes.variables):
        return list(eyes.variables)
    raise UserError(
        f"{name} has {len(names)} variable{'s' * (len(names) != 1)} ({', '.join(names[:6])}), but {eyes.run} was "
        f"trained on {number} ({', '.join(eyes.variables[:6])}); choose or rename them with "
        f"--set 'variables=[{', '.join(eyes.variables[:6])}]', or give data of the same variables"
    )
