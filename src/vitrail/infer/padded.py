"""Data smaller than a crop, as a model sees them: they go on beyond their ends, mirrored about their last voxels.

So do training's samples where augmentation reaches beyond a window (data/augment/affine.py). What lies beyond is cut
off again before anything is written.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vitrail.data.source import Item, LazySequence, Source, without
from vitrail.data.stored import by

# What is asked of a source beside its items and reads. Ways to read faster are left out: they know no other size.
PASSED = frozenset(
    {"axes", "class_names", "config", "describe", "dtype", "files", "filled", "notes", "reads", "variables"}
)


def mirrored(start: int, stop: int, size: int) -> np.ndarray:
    """Return the places from start to stop of an axis that goes on beyond its size."""
    period = max(1, 2 * (size - 1))
    places = np.arange(start, stop) % period
    return np.minimum(np.minimum(places, period - places), size - 1)


class Padded:
    """A source whose items are at least as large as a crop."""

    def __init__(self, source: Source, crop: Sequence[int]):
        self.plain, self.crop = source, tuple(crop)
        self.items: Sequence[Item] = LazySequence(len(source.items), self._widened)

    def __getattr__(self, name: str) -> Any:
        if name not in PASSED:
            raise AttributeError(name)
        return getattr(self.plain, name)

    def _widened(self, number: int) -> Item:
        item = self.plain.items[number]
        return replace(item, shape=least(item, self.crop))

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        shape = self.plain.items[item].shape
        places = [mirrored(r.start, r.stop, size) for r, size in zip(region, shape, strict=True)]
        inside = tuple(slice(int(at.min()), int(at.max()) + 1) for at in places)
        values = self.plain.read(item, inside)
        for axis, (at, window, asked) in enumerate(zip(places, inside, region, strict=True), start=1):
            if asked.stop > shape[axis - 1]:
                values = values.take(at - window.start, axis=axis)
        return values


def least(item: Item, crop: Sequence[int]) -> tuple[int, ...]:
    """Return the size of an item that goes on as far as a crop needs."""
    wanted = [math.ceil(c * s - 1e-3) for c, s in zip(crop, without(item.scale, item.slices), strict=True)]
    if item.slices is not None:
        wanted.insert(item.slices, 1)
    return tuple(map(max, item.shape, wanted))


def padded(source: Source, crop: Sequence[int]) -> tuple[Source, list[str]]:
    """Return a source of which a crop can be cut anywhere, and what is to be said of that."""
    if len(source.items) and len(without(source.items[0].shape, source.items[0].slices)) != len(crop):
        return source, []  # which is refused elsewhere
    small = [item for item in source.items if least(item, crop) != tuple(item.shape)]
    if not small:
        return source, []
    others = f", and {len(small) - 1} more are," if len(small) > 1 else ""
    told = (
        f"{small[0].name} is {by(small[0].shape)}{others} smaller than the {by(crop)} that the model sees at once: "
        "what is missing was mirrored at the end of each axis, and cut off what is written"
    )
    return Padded(source, crop), [told]
