"""From the `data` section of a recipe to loaders and statistics."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.augment import orientations
from vitrail.data.batch import Statistics
from vitrail.data.reader import Reader
from vitrail.data.sampler import Extent, Sampler
from vitrail.data.source import Source
from vitrail.draws import key
from vitrail.errors import UserError


class Dataset:
    """The sources of one list (`data.train` or `data.valid`), checked against each other and the crop."""

    def __init__(self, configs: Sequence[Any], crop: tuple[int, ...], *, where: str):
        self.crop, self.where = crop, where
        self.sources: list[Source] = [c.open() for c in configs]
        self.variables = self.sources[0].variables
        self.axes = self.sources[0].axes
        extents = []
        for number, (source, c) in enumerate(zip(self.sources, configs, strict=True)):
            name = f"{where}.{number}"
            if source.variables != self.variables:
                raise UserError(
                    f"{name}: variables {list(source.variables)} do not match {list(self.variables)} of {where}.0; "
                    "choose the same `variables` for every entry"
                )
            if len(source.axes) != len(crop):
                raise UserError(
                    f"{name}: {c.path} has {len(source.axes)} axes ({', '.join(source.axes)}), "
                    f"but the model has {len(crop)}; set model.ndim to {len(source.axes)} or choose other data"
                )
            for index, item in enumerate(source.items):
                if any(s < size for s, size in zip(item.shape, crop, strict=True)):
                    raise UserError(
                        f"{name}: {item.name} is {_by(item.shape)} voxels ({', '.join(source.axes)}), smaller than "
                        f"data.crop {_by(crop)}; use a smaller crop or a larger region"
                    )
                extents.append(Extent(number, index, item.shape, item.chunk, item.origin, c.weight))
        self.extents = extents

    def sampler(self, *, seed: int, lanes: int, reuse: int | None, block: Any = None, turn: bool = False) -> Sampler:
        codes = self.orientation_codes() if turn else (0,)
        return Sampler(self.extents, self.crop, seed=seed, lanes=lanes, reuse=reuse, block=block, orientations=codes)

    def orientation_codes(self) -> list[int]:
        """Turns that keep the crop's shape and the voxels' size: thick sections are never laid on their side."""
        spacings = {item.spacing for source in self.sources for item in source.items}

        def keeps(axes: tuple[int, ...]) -> bool:
            return all(math.isclose(s[i], s[j], rel_tol=0.01) for s in spacings for i, j in enumerate(axes))

        return [code for code, (axes, _) in enumerate(orientations(self.crop)) if keeps(axes)]

    def reader(self, sampler: Sampler, *, lanes: int, cache_bytes: int) -> Reader:
        """Whole blocks are read where they are used again and those of all lanes (as many as one rank sees) fit."""
        reader = Reader(self.sources, self.crop, whole_blocks=False, cache_bytes=cache_bytes)
        largest = sampler.largest_block * reader.channels * max(s.dtype.itemsize for s in self.sources)
        reader.whole_blocks = sampler.reuse > 1 and lanes * largest <= cache_bytes
        return reader

    def fit_statistics(self, *, seed: int, samples: int = 128, voxels: int = 2**27) -> Statistics:
        """Mean and standard deviation of each variable over crops drawn like training samples, in float64."""
        number = max(4, min(samples, voxels // math.prod(self.crop)))
        sampler = self.sampler(seed=key(seed, "statistics"), lanes=1, reuse=1)
        reader = self.reader(sampler, lanes=1, cache_bytes=0)
        crop = np.empty((reader.channels, *self.crop), reader.dtype)
        total = np.zeros((2, reader.channels))
        for counter in range(number):
            reader.read_into(crop, sampler(counter))
            flat = crop.reshape(reader.channels, -1).astype(np.float64)
            if counter == 0:
                # Sums of differences from a first value: exactly 0 for constants, and no loss under a large mean.
                first = flat[:, :1].copy()
            flat -= first
            total += [flat.mean(axis=1), np.square(flat).mean(axis=1)]
        mean, square = total / number
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        # A constant variable carries nothing to scale.
        return Statistics(tuple((mean + first[:, 0]).tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
