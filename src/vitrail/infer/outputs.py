"""What a prediction is written to: OME-Zarr, NIfTI, TIFF, NumPy, images, or a table of classes.

- all is written in a hidden folder beside OUT, and gets its name when it is complete: nothing half-made is ever found
- a row that has been written is noted in a log of its rank; a call that was killed goes on with the others. A row is
  made of whole chunks, so that no two ranks ever write to one
- an OME-Zarr is written where it will lie, and its coarser levels last. Volumes in files of one piece are put together
  in a store of chunks first, and copied from there (files.py); images and small volumes of many go through memory
"""

import csv
import fcntl
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from vitrail import disk
from vitrail.contents import Layout, check_layout
from vitrail.data.files.handles import library
from vitrail.data.formats.ngff import (
    coarser,
    create_group,
    create_level,
    describe_channel,
    describe_pyramid,
    write_chunks,
)
from vitrail.errors import UserError
from vitrail.foreign import parse_json, read_json, read_plain
from vitrail.infer.eyes import Form
from vitrail.infer.files import Filling, Tick, write_file
from vitrail.infer.places import Frame

SUFFIXES = {  # formats by the ending of OUT
    ".ome.zarr": "ome-zarr",
    ".zarr": "ome-zarr",
    ".nii.gz": "nifti",
    ".nii": "nifti",
    ".ome.tif": "tiff",
    ".tif": "tiff",
    ".tiff": "tiff",
    ".npy": "npy",
    ".png": "png",
    ".csv": "csv",
}
OTHERS = [
    ".jpg",
    ".jpeg",
    ".gif",
    ".bmp",
    ".webp",
    ".h5",
    ".hdf5",
    ".nc",
    ".npz",
    ".n5",
    ".mrc",
    ".nrrd",
    ".mha",
    ".mhd",
    ".dcm",
    ".tsv",
    ".json",
    ".txt",
]
USUAL = {"nifti": ".nii.gz", "tiff": ".tif", "image_folder": ".png", "numpy": ".npy", "geotiff": ".tif"}  # by INPUT
SETTINGS, RESULT, PARTS, LOG = "settings.json", "result", "parts", re.compile(r"rows-(\d+)-\d+\.log")
LAYOUT = Layout("prediction in the making", (SETTINGS,), (RESULT, PARTS))
LARGEST = 2**30  # bytes of a log
MOST_LEVELS, MOST_NAMED = 8, 64
MANY_FILES = 1000  # after which publishing says that it gets on
Stage = Callable[[Tick], None]


def ending_of(name: str) -> str | None:
    """Return the ending of a file name that tells a format."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)


def choose_format(out: Path, kind: str, form: Form, items: int) -> tuple[str, str, bool]:
    """Return the format, the ending of its files, and whether OUT is a folder of them."""
    told = ending_of(out.name)
    if form.on == "item":
        if told != ".csv":
            raise UserError(f"out: {out} gets a table of the class of each item; give a path that ends in .csv")
        return "csv", ".csv", False
    if told == ".csv":
        raise UserError(f"out: {out} ends in .csv, which is for classes of whole images; end it in .ome.zarr")
    if told is None and out.suffix.lower() in OTHERS:
        raise UserError(
            f"out: {out} ends in {out.suffix}, which is not written; end it in {', '.join(SUFFIXES)}, or give a folder "
            "without an ending"
        )
    if told is not None and items > 1:
        stack = "; or read the images as slices of one volume, by --kind tiff --set slices_are=z"
        raise UserError(
            f"out: {out} is one file, and there are {items} items; give a folder, in which each gets a file of its name"
            f"{stack if kind == 'image_folder' else ''}"
        )
    suffix = told or USUAL.get(kind, ".ome.zarr")
    if told is None and suffix == ".png" and form.write != "classes":
        suffix = ".tif"
    return SUFFIXES[suffix], suffix, told is None


def check_format(name: str, form: Form, frame: Frame) -> None:
    """Refuse a format that cannot hold what is to be written."""
    what = f"{form.write} of {form.dtype} along {', '.join(frame.axes)}"
    if name == "png" and (len(frame.axes) != 2 or form.channels is not None or form.dtype not in (np.uint8, np.uint16)):
        raise UserError(f"out: PNG holds images of whole numbers, not {what}; end OUT in .tif or .ome.zarr")
    if name == "nifti":
        library("nibabel", "nifti")
        if form.dtype == np.float16:
            raise UserError("dtype: NIfTI has no float16; choose float32 or uint8, or write .ome.zarr")
    if name == "ome-zarr" and len(set(frame.axes)) < len(frame.axes):
        raise UserError(f"out: OME-Zarr needs axes of different names, not {', '.join(frame.axes)}; end OUT in .npy")


def file_names(frames: Sequence[Frame], suffix: str) -> list[str]:
    """Return a name for each item's file, that of its own file with another ending, none twice and none outside."""
    found, taken = [], set[str]()
    for number, frame in enumerate(frames):
        parts = [part for part in PurePosixPath(frame.name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
        parts = parts[-1:] if PurePosixPath(frame.name).is_absolute() else parts
        last = parts.pop() if parts else f"item{number}"
        among = re.fullmatch(r"(.+)\[(\d+)\]", last)  # one of several in a file
        last = among[1] if among else last
        ending = ending_of(last) or PurePosixPath(last).suffix
        stem = last[: -len(ending)] if ending and len(ending) < len(last) else last
        stem = re.sub(r'[:*?"<>|\x00-\x1f]', "_", stem) + (f"-{among[2]}" if among else "")
        name = "/".join((*parts, stem + suffix))
        while name.casefold() in taken:
            stem += f"-{number}"
            name = "/".join((*parts, stem + suffix))
        taken.add(name.casefold())
        found.append(name)
    return found


class Result:
    """What becomes of a prediction on the way to OUT."""

    def __init__(
        self,
        out: Path,
        form: Form,
        frames: Sequence[Frame],
        format: tuple[str, str, bool],
        *,
        chunk: int | None,
        classes: Sequence[str] = (),
    ):
        self.out, self.form, self.frames, self.classes = out, form, list(frames), tuple(classes)
        self.format, self.suffix, self.many = format
        self.chunk = chunk  # None: items go through memory
        self.work = out.with_name(f".{out.name}.predict")
        self.names = file_names(frames, self.suffix) if self.many else [out.name]
        self._lock: int | None = None
        self._log: BinaryIO | None = None
        self._stores: dict[int, Any] = {}
        self.threads = 1  # that may encode chunks and make coarser ones
        self.alone = False  # whether this rank writes all rows, and so knows which coarser chunks are complete
        self._written: Counter[tuple[int, tuple[int, ...]]] = Counter()  # finest chunks of each of the next level
        self._early: set[tuple[int, tuple[int, ...]]] = set()  # those of the next level that are made already

    # ------------------------------------------------------------ before the first row, on rank 0

    def check(self) -> None:
        disk.check_free(self.out)
        for frame in self.frames[:1]:
            check_format(self.format, self.form, frame)

    def begin(self, settings: dict[str, Any], tick: Tick = lambda: None) -> dict[str, Any]:
        """Make the place of work, or go on in that of the same prediction; what was done before, and the attempt."""
        self.check()
        settings = json.loads(json.dumps(settings))
        with disk.told(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if (self.work / SETTINGS).is_file():
                check_layout(self.work, LAYOUT)  # nothing is written through links that somebody put there
                self._take_lock()
                self._compare(settings)
            else:
                if self.work.is_dir() and not self.work.is_symlink():
                    self._take_lock()  # unless another call is just making it
                    self._let_go()
                disk.remove(self.work, inside=self.work.parent)  # of a call that was killed before it began
                self.work.mkdir()
                self._take_lock()
                (self.work / RESULT).mkdir()
                self._make_stores(settings, tick)
                disk.write_whole(self.work / SETTINGS, json.dumps(settings, indent=1) + "\n")
        attempts = [int(found[1]) for path in self.work.iterdir() if (found := LOG.fullmatch(path.name))]
        return {"attempt": max(attempts, default=-1) + 1, "done": sorted(self.finished())}

    def _take_lock(self) -> None:
        self._lock = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.out} is being predicted by another process; wait for it, or end it") from None
        except OSError:  # a system without locks
            pass

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            before = read_json(self.work / SETTINGS)
        except (OSError, ValueError):
            before = {}
        keys = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
        if keys:
            changes = "; ".join(f"{key}: {_short(before.get(key))} became {_short(settings.get(key))}" for key in keys)
            raise UserError(
                f"{self.out} was begun as another prediction ({changes}); choose another path, or remove "
                f"{self.work} to begin anew"
            )

    def _make_stores(self, settings: dict[str, Any], tick: Tick) -> None:
        """Make the arrays that rows are written to, of all items."""
        if self.chunk is None or self.format == "csv":
            return
        for number, frame in enumerate(self.frames):
            where = self._store_path(number)
            where.parent.mkdir(parents=True, exist_ok=True)
            channels = self.form.channels
            if self.format == "ome-zarr":
                block = self._describe(frame)
                group = create_group(where, block, vitrail={"prediction": settings})
            else:
                group = create_group(where, {})
            axes = (("c",) if channels is not None else ()) + frame.axes
            for level, shape in enumerate(self._shapes(frame)):
                whole = (*([len(channels)] if channels is not None else []), *shape)
                create_level(group, f"s{level}", whole, self._chunks(shape), self.form.dtype, axes=axes)
            tick()

    def _chunks(self, shape: Sequence[int]) -> tuple[int, ...]:
        assert self.chunk is not None
        sides = tuple(min(self.chunk, n) for n in shape)
        if self.form.channels is None:
            return sides
        return (len(self.form.channels) if self.form.write == "embeddings" else 1, *sides)

    def _factors(self, frame: Frame) -> list[tuple[int, ...]]:
        """Return how many cells of the finest level one of each level is, along each axis."""
        if self.format != "ome-zarr" or self.chunk is None:
            return [(1,) * len(frame.shape)]
        found, shape = [(1,) * len(frame.shape)], frame.shape
        while max(shape) > self.chunk and len(found) < MOST_LEVELS:
            found.append(tuple(f * (2 if n > 1 else 1) for f, n in zip(found[-1], shape, strict=True)))
            shape = tuple(-(-n // 2) for n in shape)
        return found

    def _shapes(self, frame: Frame) -> list[tuple[int, ...]]:
        return [
            tuple(-(-n // f) for n, f in zip(frame.shape, factors, strict=True)) for factors in self._factors(frame)
        ]

    def _describe(self, frame: Frame) -> dict[str, Any]:
        """Return the NGFF metadata of an item."""
        form, factors = self.form, self._factors(frame)
        block = describe_pyramid(
            form.write,
            frame.spacing,
            frame.unit,
            len(factors),
            axes=frame.axes,
            origin=frame.origin,
            factors=factors,
            channels=form.channels is not None,
        )
        if form.write == "classes":
            properties = [{"label-value": number, "name": name} for number, name in enumerate(self.classes)]
            block["image-label"] = {"properties": properties}
        if form.write == "instances":
            block["image-label"] = {}
        if form.channels is not None and len(form.channels) <= MOST_NAMED:
            block["omero"] = {"channels": [describe_channel(name, form.dtype) for name in form.channels]}
        return block

    def _store_path(self, item: int) -> Path:
        if self.format == "ome-zarr":
            return self.work / RESULT / self.names[item]
        return self.work / PARTS / f"{item:06d}.zarr"

    # ------------------------------------------------------------ rows, on every rank

    def open_log(self, attempt: int, rank: int) -> None:
        self._log = disk.appending(self.work / f"rows-{attempt}-{rank}.log")

    def finished(self) -> dict[int, Any]:
        """Return the rows that are written, by what the logs of all ranks say; a line that was torn does not count."""
        found: dict[int, Any] = {}
        for path in sorted(self.work.iterdir()):
            if LOG.fullmatch(path.name):
                for line in read_plain(path, LARGEST).splitlines(keepends=True):
                    if line.endswith(b"\n"):
                        row, values = _read_line(line, path)
                        found[row] = values
        return found

    def write(self, row: int, item: int, box: tuple[slice, ...], values: np.ndarray) -> None:
        """Write a row, and note that it is there."""
        noted = None
        if self.format == "csv":
            noted = [round(float(value), 6) for value in values.ravel()]
        elif self.chunk is None:
            self._write_file(item, values)
        elif values.size:
            self._put(item, 0, box, values, self.threads)
            self._go_on(item, box)
        self.note(row, noted)

    def note(self, row: int, values: Any = None) -> None:
        """Note that a row is there, so that no later call makes it again."""
        assert self._log is not None
        self._log.write(json.dumps([row, values]).encode() + b"\n")
        self._log.flush()

    def _put(self, item: int, number: int, box: Sequence[slice], values: np.ndarray, threads: int = 1) -> None:
        """Write a box of whole chunks of a level, of all channels."""
        chunks = self._chunks(self._shapes(self.frames[item])[number])
        every = (slice(0, len(values)), *box) if self.form.channels is not None else box
        write_chunks(self._store_path(item) / f"s{number}", chunks, every, values, threads)

    def _go_on(self, item: int, box: Sequence[slice]) -> None:
        """Make the chunks of the next level that are complete with a box of the finest, while others are computed."""
        factors = self._factors(self.frames[item])
        if len(factors) < 2 or self.chunk is None or not self.alone:
            return
        side, ripe = self.chunk, []
        whole, next_whole = self.frames[item].shape, self._shapes(self.frames[item])[1]
        for at in product(*(range(b.start, b.stop, side) for b in box)):
            start = tuple(a // f // side * side for a, f in zip(at, factors[1], strict=True))
            needed = 1
            for s, f, n, m in zip(start, factors[1], whole, next_whole, strict=True):
                needed *= -(-min(min(s + side, m) * f, n) // side) - s * f // side
            self._written[item, start] += 1
            if self._written[item, start] == needed:
                del self._written[item, start]
                ripe.append(start)
        run_stage([self._coarser_chunk(item, 1, start) for start in ripe], self.threads)
        self._early |= {(item, start) for start in ripe}

    def level(self, item: int, number: int) -> Any:
        import zarr

        if (store := self._stores.get(item)) is None:  # several threads may ask at once
            if len(self._stores) > MOST_NAMED:
                self._stores.clear()
            store = self._stores[item] = zarr.open_group(str(self._store_path(item)), mode="r+")
        return store[f"s{number}"]

    # ------------------------------------------------------------ when all rows are there

    def at_once(self, threads: int, memory: int) -> int:
        """Return how many calls of a stage may run at once: chunks of levels, which do not tell of what they do."""
        if self.format != "ome-zarr" or self.chunk is None:
            return 1
        finer = (2 * self.chunk) ** len(self.frames[0].axes) * len(self.form.channels or "x")
        return max(1, min(threads, memory // (4 * finer * self.form.dtype.itemsize)))

    def stages(self) -> list[list[Stage]]:
        """Return what is left to do, in stages: the calls of one are for any ranks, after all of those before it."""
        if self.chunk is None or self.format == "csv":
            return []
        if self.format != "ome-zarr":
            return [[self._copying(number) for number in range(len(self.frames))]]
        deepest = max(len(self._factors(frame)) for frame in self.frames)
        return [
            [call for item, frame in enumerate(self.frames) for call in self._coarsening(item, frame, number)]
            for number in range(1, deepest)
        ]

    def _copying(self, item: int) -> Stage:
        def copy(tick: Tick) -> None:
            self._write_file(item, self.level(item, 0), tick)

        return copy

    def _coarsening(self, item: int, frame: Frame, number: int) -> Iterator[Stage]:
        """Yield a call for each chunk of a level that is not there yet."""
        if number >= len(self._factors(frame)):
            return
        assert self.chunk is not None
        for start in product(*(range(0, n, self.chunk) for n in self._shapes(frame)[number])):
            if number > 1 or (item, start) not in self._early:
                yield self._coarser_chunk(item, number, start)

    def _coarser_chunk(self, item: int, number: int, start: tuple[int, ...]) -> Stage:
        """Return a call that makes a chunk of a level from the level before."""
        frame, side = self.frames[item], self.chunk
        factors, shapes = self._factors(frame), self._shapes(frame)
        ratio = tuple(now // before for now, before in zip(factors[number], factors[number - 1], strict=True))
        assert side is not None
        labels = self.form.write in ("classes", "instances")

        def make(_: Tick) -> None:
            box = tuple(slice(s, min(s + side, n)) for s, n in zip(start, shapes[number], strict=True))
            finer = tuple(
                slice(b.start * r, min(b.stop * r, n)) for b, r, n in zip(box, ratio, shapes[number - 1], strict=True)
            )
            if self.form.channels is None:
                made = coarser(self.level(item, number - 1)[finer], labels=labels, factors=ratio)
            else:
                values = self.level(item, number - 1)[(slice(None), *finer)]
                made = np.stack([coarser(one, labels=labels, factors=ratio) for one in values])
            self._put(item, number, box, made)

        return make

    def publish(self, tick: Tick = lambda: None) -> None:
        """Give what is complete its name, on rank 0."""
        with disk.told(self.out):
            if self.format == "csv":
                self._write_table()
            left = []
            for number, path in enumerate((self.work / RESULT).rglob("*")):
                if path.suffix == ".partial" or disk.is_draft(path):
                    left.append(path)  # a chunk or a file that a kill came upon
                if number % MANY_FILES == 0:
                    tick()
            for path in left:
                disk.remove(path, inside=self.work)
            made = self.work / RESULT
            disk.publish(made if self.many else made / self.names[0], self.out)
            disk.sync_folder(self.out.parent)
            for part in sorted(self.work.glob(f"{PARTS}/*/*/*/*")):  # a large store bit by bit, since that takes long
                disk.remove(part, inside=self.work)
                tick()
            disk.remove(self.work, inside=self.work.parent)

    def _write_table(self) -> None:
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["item", "class", *self.classes])
        found = self.finished()
        for number, frame in enumerate(self.frames):
            shares = found[number]
            writer.writerow([frame.name, self.classes[int(np.argmax(shares))], *shares])
        disk.write_whole(self.work / RESULT / self.names[0], stream.getvalue())

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _write_file(self, item: int, values: Any, tick: Tick = lambda: None) -> None:
        """Write the file of an item of [*S] or [C, *S], in memory or a store of chunks."""
        path = self.work / RESULT / self.names[item]
        with disk.replacing(path, parents=True) as file:
            filling = Filling(values, self.form, self.frames[item], self.chunk, tick)
            write_file(file, self.format, self.suffix, path.name, filling)


def run_stage(calls: Iterable[Stage], threads: int, tick: Tick = lambda: None) -> None:
    """Make calls that are independent, in threads if there are to be several, and tell whenever one is done."""
    waiting = iter(calls)
    if threads == 1:
        for call in waiting:
            call(tick)
            tick()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="vitrail-level") as pool:
        going = {pool.submit(call, lambda: None) for call in islice(waiting, 2 * threads)}
        while going:
            done, going = wait(going, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
                tick()
            going |= {pool.submit(call, lambda: None) for call in islice(waiting, len(done))}


def _read_line(line: bytes, path: Path) -> tuple[int, Any]:
    """Read a row that is written, and what was noted of it."""
    try:
        row, values = parse_json(line)
        if not isinstance(row, int) or not isinstance(values, list | None):
            raise ValueError("it holds something else than rows")
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove {path.parent} to begin anew") from None
    return row, values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
