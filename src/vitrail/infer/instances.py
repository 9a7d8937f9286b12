"""Instances on the way to OUT: affinities are kept in the place of work, and cut up when all are there (mutex.py).

- rows are affinities in bytes, written as any prediction is. After the last, each block is made to fragments, then the
  pairs of its fragments are added up, then one process says which fragments are one instance, and then all are
  numbered. Ranks share out blocks; what lies between two such stages is on the disk
- memory is that of a block and of a few numbers for each fragment and pair
- a block of fragments that is written is noted as a row is, so that a call that was killed does not make it again
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.formats.ngff import create_group, create_level
from vitrail.data.source import Source, label_dtype
from vitrail.data.sources import guess_kind
from vitrail.errors import UserError
from vitrail.infer import mutex
from vitrail.infer.engine import Wishes
from vitrail.infer.eyes import Form
from vitrail.infer.files import Tick
from vitrail.infer.mutex import Blocks, Offsets
from vitrail.infer.outputs import PARTS, Result, Stage
from vitrail.infer.overlaps import Overlaps
from vitrail.infer.places import Frame
from vitrail.recipe import kinds

AFFINITIES, FRAGMENTS, PAIRS, SIZES, NUMBERS = "affinities", "fragments", "pairs-{}", "sizes-{}", "numbers"
SIDE = 128  # voxels of a box that is compared


class Instances(Result):
    """A result that is made of affinities when all of them are there."""

    def __init__(
        self,
        out: Path,
        form: Form,
        frames: Sequence[Frame],
        format: tuple[str, str, bool],
        *,
        affinities: Form,
        offsets: Offsets,
        wishes: Wishes,
        rows: int,
        chunk: int | None,
        classes: Sequence[str] = (),
    ):
        super().__init__(out, form, frames, format, chunk=chunk, classes=classes)
        self.affinities, self.offsets, self.wishes, self.rows = affinities, offsets, wishes, rows
        self.blocks = [
            Blocks.of(frame.shape, self._chunks(frame.shape), offsets, wishes.memory) for frame in self.frames
        ]

    def check(self) -> None:
        super().check()
        mutex.library()

    def at_once(self, threads: int, memory: int) -> int:
        return 1  # what is kept of a block is the most that there is memory for

    def _make_stores(self, settings: dict[str, Any], tick: Tick) -> None:
        super()._make_stores(settings, tick)
        for number, frame in enumerate(self.frames):
            where = self._kept(number)
            where.parent.mkdir(parents=True, exist_ok=True)
            group, chunks = create_group(where, {}), self._chunks(frame.shape)
            many = len(self.offsets)
            axes = ("c", *frame.axes)
            create_level(group, AFFINITIES, (many, *frame.shape), (many, *chunks), self.affinities.dtype, axes=axes)
            create_level(group, FRAGMENTS, frame.shape, chunks, np.dtype(np.uint64), axes=frame.axes)

    def _kept(self, item: int) -> Path:
        return self.work / PARTS / f"{item:06d}-pairs.zarr"

    def write(self, row: int, item: int, box: tuple[slice, ...], values: np.ndarray) -> None:
        if values.size:
            self.array(item, AFFINITIES)[(slice(None), *box)] = values
        self.note(row)

    def kept(self, item: int) -> Any:
        """Return the arrays of what is kept of an item until it is done."""
        import zarr

        return zarr.open_group(str(self._kept(item)), mode="r+")

    def array(self, item: int, name: str) -> Any:
        """Return one of them, of which chunks of zeros are written, too."""
        import zarr

        with zarr.config.set({"array.write_empty_chunks": True}):  # which is not kept with an array
            return self.kept(item)[name]

    # ------------------------------------------------------------ when all rows are there

    def stages(self) -> list[list[Stage]]:
        # Ranks share out these lists, which must be the same on all; another may be done with a block by now.
        done, items = {*self.finished()}, range(len(self.frames))
        first, cut = self.rows, list[Stage]()  # numbers of rows from here on are of blocks
        for item in items:
            for number, box in enumerate(self.blocks[item].boxes()):
                cut.append(partial(self._cut, item, number, box, first + number, done))
            first += len(self.blocks[item].boxes())
        found = [self._of_blocks(item, self._add) for item in items]
        named = [self._of_blocks(item, self._name) for item in items]
        joined: list[Stage] = [partial(self._join, item) for item in items]
        return [
            cut,
            [c for each in found for c in each],
            joined,
            [c for each in named for c in each],
            *super().stages(),
        ]

    def _of_blocks(self, item: int, make: Any) -> Iterator[Stage]:
        for number, box in enumerate(self.blocks[item].boxes()):
            yield partial(make, item, number, box)

    def _cut(self, item: int, number: int, box: mutex.Box, note: int, done: set[int], tick: Tick) -> None:
        """Make the fragments of a block."""
        if note in done:
            return
        wide, inside = self.blocks[item].around(box)
        values = self.array(item, AFFINITIES)[(slice(None), *wide)]
        tick()
        found = mutex.fragments(values, inside, self.offsets, self.wishes.threshold, number)
        self.array(item, FRAGMENTS)[box] = found
        self.note(note)

    def _add(self, item: int, number: int, box: mutex.Box, tick: Tick) -> None:
        """Add up the voxels of a block's fragments, and the affinities between them and their neighbours."""
        kept, (wide, inside) = self.kept(item), self.blocks[item].around(box)
        found = kept[FRAGMENTS][wide]
        tick()
        pairs = mutex.neighbours(kept[AFFINITIES][(slice(None), *box)], found, inside, self.offsets)
        own = found[inside]
        sizes = np.unique(own[own > 0], return_counts=True)
        for name, columns in ((PAIRS, pairs), (SIZES, sizes)):
            kept.create_array(name.format(number), data=np.stack([c.astype(np.int64) for c in columns]), overwrite=True)

    def _join(self, item: int, tick: Tick) -> None:
        """Say which fragments are one instance."""
        kept, sizes, pairs = self.kept(item), [], list[mutex.Pairs]()
        for number in range(len(self.blocks[item].boxes())):
            sizes.append(kept[SIZES.format(number)][:])
            one, other, total, count = kept[PAIRS.format(number)][:]
            pairs.append(mutex.Pairs(one.astype(np.uint64), other.astype(np.uint64), total, count))
            tick()
        names, voxels = np.concatenate(sizes, axis=1)  # rising, as blocks come in their order
        c = self.wishes
        numbers = mutex.merged(names.astype(np.uint64), voxels, mutex.together(pairs), c.threshold, c.smallest)
        table = np.stack([names, numbers.astype(np.int64)])
        kept.create_array(NUMBERS, data=table, overwrite=True)

    def _name(self, item: int, number: int, box: mutex.Box, tick: Tick) -> None:
        """Write the instances of a block."""
        names, numbers = self._numbers(item)
        self._put(item, 0, box, mutex.renumbered(self.kept(item)[FRAGMENTS][box], names, numbers))

    @functools.lru_cache(maxsize=1)  # noqa: B019 - of one result alone, while its last item is numbered
    def _numbers(self, item: int) -> tuple[np.ndarray, np.ndarray]:
        names, numbers = self.kept(item)[NUMBERS][:]
        return names.astype(np.uint64), numbers.astype(mutex.NUMBERS)


# ---------------------------------------------------------------- against what is true


def open_truth(config: Any, labels: str, form: Form, read: Source) -> Any:
    """Open what was read with its labels; refused where there are none, or where nothing is compared with them."""
    if form.write != "instances":
        raise UserError(f"truth: instances are compared with it, not {form.write}; add --write instances")
    if not hasattr(config, "labels"):
        raise UserError(f"truth: data of kind {config.kind} have no labels of voxels; leave it out")
    source = replace(config, labels=labels).open()
    if label_dtype(source) is None:
        raise UserError(f"truth: {config.path} has no labels {labels!r}; name those that it has")
    if [(item.name, item.shape) for item in source.items] != [(item.name, item.shape) for item in read.items]:
        raise UserError(
            f"truth: the labels {labels!r} cover a part of {config.path}; predict that part, such as "
            "--set 'region={x: [0, 0.5]}'"
        )
    return source


def compare(
    truth: Any, written: Sequence[Path], ignore: int | None, background: int | None, tick: Tick
) -> dict[str, float]:
    """Return the scores of instances in files beside the labels of a source, of all items together, box by box."""
    overlaps = Overlaps()
    for number, (item, path) in enumerate(zip(truth.items, written, strict=True)):
        kind = guess_kind(str(path))
        told = {"axes": ",".join(truth.axes)} if kind == "numpy" else {}  # which a few slices do not tell by themselves
        made = kinds.find("source", kind)(path=str(path), **told).open()
        for start in product(*(range(0, n, SIDE) for n in item.shape)):
            box = tuple(slice(at, min(at + SIDE, n)) for at, n in zip(start, item.shape, strict=True))
            overlaps.add(truth.read_labels(number, box), made.read(0, box)[0], ignore, background)
            tick()
    return overlaps.scores()
