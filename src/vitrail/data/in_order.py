"""Every item once, or every tile of it, in the order of the files: what is encoded or predicted as a whole."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.sampler import Sample
from vitrail.data.tiles import Tiles
from vitrail.recipe.sections import Augment, Data
from vitrail.recipe.sections import Tiles as TilesSection


def open_in_order(
    configs: Sequence[Any], crop: tuple[int, ...], data: Data, *, where: str
) -> tuple[Dataset, "InOrder"]:
    """The sources of a list and the order of their tiles: crops of the recipe's tiles, or those that do not overlap.

    Augmentation, weights, mixing and balance, which are for training, do not count.
    """
    tiles = data.tiles or TilesSection()
    plain = {"augment": Augment(), "tiles": tiles, "mix": "size", "balance": None}
    alike = [dataclasses.replace(c, weight=1.0) for c in configs]
    dataset = Dataset(alike, crop, where=where, settings=data.model_copy(update=plain))
    order = dataset.sampler(seed=0, lanes=1, reuse=1)
    assert isinstance(order, Tiles)
    return dataset, InOrder(order)


class InOrder:
    """An Order of samples whose counter goes through the tiles of each item, item by item."""

    lanes = reuse = 1

    def __init__(self, tiles: Tiles):
        self.tiles, self.extents, self.crop = tiles, tiles.extents, tiles.crop
        self.ends = np.cumsum([tiles.tiles_of(number) for number in range(len(self.extents))])
        self.epoch = int(self.ends[-1])
        self.largest_block = 0  # no block is read as a whole
        self.kept = [None if kept is None else np.flatnonzero(kept) for kept in tiles.kept]

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        which = int(np.searchsorted(self.ends, counter, side="right"))
        place = counter - (int(self.ends[which - 1]) if which else 0)
        extent, starts, kept = self.extents[which], self.tiles.starts[which], self.kept[which]
        if kept is not None:
            place = int(kept[place])
        window = extent.window or self.crop
        at = np.unravel_index(place, [len(s) for s in starts])
        start = tuple(int(s[i]) for s, i in zip(starts, at, strict=True))
        block = tuple(slice(s, s + w) for s, w in zip(start, window, strict=True))
        return Sample(extent.source, extent.item, block, start, 0, window, attempt)
