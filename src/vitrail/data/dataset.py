"""From the `data` section of a recipe to loaders and statistics."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from vitrail.data.augment import orientations
from vitrail.data.batch import Labelling, Statistics
from vitrail.data.reader import Reader
from vitrail.data.sampler import Extent, Sampler
from vitrail.data.source import ClassifiedSource, LabelledSource, Source
from vitrail.draws import key
from vitrail.errors import UserError

MOST_CLASSES = 10_000  # labels beyond it number things rather than kinds of things


class Dataset:
    """The sources of one list (`data.train` or `data.valid`), checked against each other and the crop.

    `labels` says what an objective needs the classes of: each "item", each "voxel", or nothing.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        crop: tuple[int, ...],
        *,
        where: str,
        labels: Literal["item", "voxel"] | None = None,
    ):
        self.crop, self.where, self.labels = crop, where, labels
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
            if labels == "item" and not (isinstance(source, ClassifiedSource) and source.class_names):
                raise UserError(
                    f"{name}: the objective needs the class of every image, but {c.path} has none; "
                    "put the images into one folder a class, such as cat/1.png and dog/1.png"
                )
            if labels == "voxel" and not isinstance(source, LabelledSource):
                raise UserError(
                    f"{name}: the objective needs the class of every voxel, but {c.kind.replace('_', ' ')}s have no "
                    "labels of voxels; use ome_zarr"
                )
            if labels == "voxel" and not (isinstance(source, LabelledSource) and source.label_dtype is not None):
                found = source.describe().get("labels")
                have = f"it has {', '.join(found)}" if found else "it has none"
                raise UserError(
                    f"{name}: the objective needs the class of every voxel; name the labels of {c.path} with "
                    f"`labels: {found[0] if found else '...'}` ({have})"
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

    def reader(self, sampler: Sampler, *, lanes: int, cache_bytes: int, labelling: Labelling | None = None) -> Reader:
        """Whole blocks are read where they are used again and those of all lanes (as many as one rank sees) fit."""
        reader = Reader(self.sources, self.crop, whole_blocks=False, cache_bytes=cache_bytes, labelling=labelling)
        largest = sampler.largest_block * max(reader.voxel_bytes(s) for s in self.sources)
        reader.whole_blocks = sampler.reuse > 1 and lanes * largest <= cache_bytes
        return reader

    def class_names(self, ignore: int | None = None) -> tuple[str, ...]:
        """Names of the classes as the sources tell them, label 0 first; empty where they tell none.

        Classes of items are those of all sources, in the order of their first appearance. Values of voxels are named
        without gaps, but for 0 and `ignore`; sources that name a value differently are refused.
        """
        if self.labels == "item":
            return tuple(dict.fromkeys(name for s in self.sources for name in getattr(s, "class_names", ())))
        named: dict[int, str] = {}
        for number, source in enumerate(self.sources):
            for value, name in getattr(source, "label_names", {}).items():
                if named.setdefault(value, name) != name:
                    raise UserError(
                        f"{self.where}.{number}: label {value} is {name!r} here but {named[value]!r} in another entry; "
                        "give the same meaning to the labels of every entry"
                    )
        values = [value for value in named if value != ignore]
        if not values:
            return ()
        if min(values) < 0 or max(values) >= MOST_CLASSES:
            raise UserError(
                f"{self.where}: labels from {min(values)} to {max(values)} are named, which are no numbers of classes; "
                "renumber them from 0, or name the classes in objective.names"
            )
        missing = [value for value in range(1, max(values)) if value not in named and value != ignore]
        if missing:  # often a value for voxels that nobody has looked at, which would bring hundreds of classes along
            after = min(value for value in values if value > missing[0])
            last = max(value for value in missing if value < after)
            gap = f"{missing[0]} is" if last == missing[0] else f"{missing[0]} to {last} are"
            raise UserError(
                f"{self.where}: label {after} is named, {gap} not: set objective.ignore: {after} or objective.names"
            )
        return tuple(named.get(value, f"class {value}") for value in range(max(values) + 1))

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
