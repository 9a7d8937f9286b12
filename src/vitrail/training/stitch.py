"""Whole items scored from tiles: every voxel once, by what all tiles that cover it say together.

- along each axis an item is cut where a tile begins or ends, so that tiles are made of whole cells
- logits of a cell are added up over its tiles, weighted by where in each tile it lies (`blend`), on the host, and after
  the last of these tiles scored and forgotten. Tiles come from one end of an item's longest axis to the other, so that
  what is kept is where a row of tiles overlaps the next, however long the item
- a rank has a run of tiles, and scores the cells whose first tile is one of them; tiles of later runs that reach into
  these it computes, too. So ranks exchange nothing, and score the same however many they are
- voxels are those of the items: logits of samples at another voxel size are interpolated back
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.order.mixture import Groups
from vitrail.data.order.sampler import Extent, Order, Sample, choose
from vitrail.data.order.tiles import Tiles
from vitrail.data.reading.loader import Loader
from vitrail.data.source import without

Blend = Literal["gaussian", "constant"]
SIGMA, LEAST = 0.125, 1e-3  # of a window; the weight of its corners at least: those of MONAI


class Share(NamedTuple):
    """The counters of a rank: of its own run of tiles, and of later tiles that reach into the cells of these."""

    own: list[int]
    others: list[int]


class Voxels(NamedTuple):
    """Voxels that no other tile says anything of any more."""

    logits: Tensor  # [K, n]
    labels: Tensor  # [n]


class Cells:
    """The cells of the tiles of one item, which are numbers first, first + 1, ... of all tiles."""

    def __init__(self, tiles: Sequence[Sample], first: int):
        starts = np.array([tile.start for tile in tiles])
        ends = starts + np.array([tile.window for tile in tiles])
        self.cuts = [np.unique(np.concatenate(both)) for both in zip(starts.T, ends.T, strict=True)]
        self.shape = tuple(len(cuts) - 1 for cuts in self.cuts)
        covered = [self._numbers(self._range(tile)).ravel() for tile in tiles]
        self.tiles = np.repeat(first + np.arange(len(tiles)), [len(cells) for cells in covered])
        found = np.unique(np.concatenate(covered), return_index=True, return_inverse=True, return_counts=True)
        self.known, at, self.back, self.counts = found  # numbers of cells; of each tile's cells: which of these
        self.first = self.tiles[at]  # the tile that covers each first

    def of(self, tile: Sample) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
        """Yield the cells of a tile: number, place among all that are known, and voxels of the tile."""
        ranges = self._range(tile)
        numbers = self._numbers(ranges)
        places = np.searchsorted(self.known, numbers)
        for at in np.ndindex(numbers.shape):
            inside = (
                slice(int(cuts[r.start + i] - s), int(cuts[r.start + i + 1] - s))
                for cuts, r, i, s in zip(self.cuts, ranges, at, tile.start, strict=True)
            )
            yield int(numbers[at]), int(places[at]), tuple(inside)

    def _range(self, tile: Sample) -> list[range]:
        each = zip(self.cuts, tile.start, tile.window, strict=True)
        return [range(*np.searchsorted(cuts, [start, start + size]).tolist()) for cuts, start, size in each]

    def _numbers(self, ranges: Sequence[range]) -> np.ndarray:
        return np.asarray(np.ravel_multi_index(np.ix_(*ranges), self.shape))


class Plan:
    """The tiles of an evaluation in the order of their places, their cells, and who scores which."""

    def __init__(self, order: Order, counters: Sequence[int], ranks: int):
        tiles: dict[tuple[int, int, tuple[int, ...]], tuple[int, Sample]] = {}
        for counter, sample in zip(counters, choose(order, counters), strict=True):
            tiles.setdefault((sample.source, sample.item, sample.start), (counter, sample))  # again in another pass
        shapes = {(extent.source, extent.item): extent.shape for extent in order.extents}

        def place(found: tuple[int, Sample]) -> tuple[int, ...]:
            sample = found[1]
            shape = shapes[sample.source, sample.item]
            longest = sorted(range(len(shape)), key=lambda axis: -shape[axis])
            return (sample.source, sample.item, *(sample.start[axis] for axis in longest))

        chosen = sorted(tiles.values(), key=place)
        self.bounds = np.array([len(chosen) * rank // ranks for rank in range(ranks + 1)])  # of runs
        self.cells: dict[tuple[int, int], Cells] = {}
        needed: list[set[int]] = [set() for _ in range(ranks)]
        ends = [
            n for n in range(1, len(chosen) + 1) if n == len(chosen) or place(chosen[n])[:2] != place(chosen[n - 1])[:2]
        ]
        for begin, end in zip([0, *ends], ends, strict=False):
            samples = [sample for _, sample in chosen[begin:end]]
            cells = self.cells[samples[0].source, samples[0].item] = Cells(samples, begin)
            owner = np.searchsorted(self.bounds, cells.first, side="right") - 1
            for rank, tile in np.unique(np.stack([owner[cells.back], cells.tiles]), axis=1).T.tolist():
                needed[rank].add(tile)
        self.overlaps = any(bool((cells.counts > 1).any()) for cells in self.cells.values())
        self.shares = []
        for rank, (low, high) in enumerate(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)):
            later = sorted(number for number in needed[rank] if number >= high)
            self.shares.append(Share([chosen[n][0] for n in range(low, high)], [chosen[n][0] for n in later]))


class Stitch:
    """The tiles that a rank has computed and keeps until the others of the same voxels are there."""

    def __init__(self, plan: Plan, rank: int, blend: Blend):
        self.plan, self.blend = plan, blend
        self.low, self.high = plan.bounds[rank], plan.bounds[rank + 1]
        self.open: dict[tuple[int, ...], tuple[Tensor | None, Tensor | None, int]] = {}  # and tiles that are to come

    def add(self, tile: Sample, logits: Tensor | None, labels: Tensor | None) -> Iterator[Voxels]:
        """Take logits [K, *S] and labels [*S] of a tile, None of one that cannot be read; yield what is complete."""
        cells = self.plan.cells[tile.source, tile.item]
        for number, place, inside in cells.of(tile):
            if not self.low <= cells.first[place] < self.high:
                continue
            name, count = (tile.source, tile.item, number), int(cells.counts[place])
            total, known, left = self.open.pop(name, (None, None, count))
            if logits is not None and labels is not None:
                part = logits[(slice(None), *inside)]
                if count > 1:  # what one tile alone says stays as it is
                    part = part * blend_weights(tile.window, self.blend)[inside]
                total = part if total is None else total.add_(part)
                known = labels[inside].clone() if known is None else known  # no view of the whole tile
            if left > 1:
                self.open[name] = (total, known, left - 1)
            elif total is not None and known is not None:
                yield Voxels(total.flatten(1), known.flatten())


def plan_tiles(order: Order, samples: int, ranks: int) -> Plan | None:
    """Plan how tiles are put together.

    None for samples of other kinds, and for tiles none of which overlap and whose voxels are those of the items.
    """
    if not all(isinstance(one, Tiles) for one in (order.orders if isinstance(order, Groups) else [order])):
        return None
    plan = Plan(order, range(samples), ranks)
    return plan if plan.overlaps or any(is_resampled(extent, order.crop) for extent in order.extents) else None


def is_resampled(extent: Extent, crop: tuple[int, ...]) -> bool:
    """Tell whether samples of an item have voxels of another size."""
    return bool(extent.window) and tuple(n for axis, n in enumerate(extent.window) if axis != extent.slices) != crop


@lru_cache(maxsize=16)
def blend_weights(window: tuple[int, ...], blend: Blend) -> Tensor:
    """Return the weights of a tile's voxels: all alike, or those of a Gaussian about its middle."""
    weights = torch.ones(window)
    if blend == "constant":
        return weights
    for axis, size in enumerate(window):
        places = torch.arange(size, dtype=torch.float32) - (size - 1) / 2
        along = torch.exp(-places.square() / (2 * (SIGMA * size) ** 2))
        weights = weights * along.view([-1 if a == axis else 1 for a in range(len(window))])
    return weights.clamp(min=max(float(weights.min()), LEAST))


def in_voxels(loader: Loader, tile: Sample, logits: Tensor, labels: Tensor) -> Voxels:
    """Bring logits [K, *S] and labels [*S] of a tile's sample to the voxels of its window: [K, *window], [*window]."""
    across = loader.reader.item(tile.source, tile.item).slices
    if not is_moved(loader, tile):
        return Voxels(in_window(loader, tile, logits), labels if across is None else labels.unsqueeze(across))
    return Voxels(in_window(loader, tile, logits), torch.from_numpy(loader.reader.labels_of(tile)).long())


def is_moved(loader: Loader, tile: Sample) -> bool:
    """Tell whether the voxels of a tile's sample are others than those of its window."""
    reader = loader.reader
    (layout,) = reader.layouts([tile])
    kept = without(tile.window, reader.item(tile.source, tile.item).slices)
    return kept != reader.crop or set(layout.scale) != {1.0}


def in_window(loader: Loader, tile: Sample, values: Tensor) -> Tensor:
    """Bring values [K, *S] of a tile's sample to the voxels of its window [K, *window], interpolated if need be."""
    reader, across = loader.reader, loader.reader.item(tile.source, tile.item).slices
    if is_moved(loader, tile):
        (layout,) = reader.layouts([tile])
        kept = without(tile.window, across)
        each = ([0], [layout.size], [layout.spacing], [layout.scale], [0])
        move = loader.augmenter.geometry.draw_many(*each)[0]  # voxel o of the crop lies at origin + matrix o
        factors = without(reader.factors(tile.source, tile.item, tile.window), across)
        for axis, (size, factor) in enumerate(zip(kept, factors, strict=True)):
            places = (torch.arange(size) + 0.5) / factor - 0.5
            places = ((places - move.origin[axis]) / move.matrix[axis, axis]).clamp(0, values.shape[axis + 1] - 1)
            low = places.float().floor().long()
            high = (low + 1).clamp(max=values.shape[axis + 1] - 1)
            share = (places.float() - low).view([-1 if a == axis + 1 else 1 for a in range(values.ndim)])
            below, above = (values.index_select(axis + 1, at.to(values.device)) for at in (low, high))
            values = torch.lerp(below, above, share.to(values.device))
    return values if across is None else values.unsqueeze(across + 1)
