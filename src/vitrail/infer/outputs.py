"""What a prediction is written to: OME-Zarr, NIfTI, TIFF, NumPy, images, or a table of classes.

- all is written in a hidden folder beside OUT, and gets its name when it is complete: nothing half-made is ever found
- a row that has been written is noted in a log of its rank; a call that was killed goes on with the others. A row is
  made of whole chunks, so that no two ranks ever write to one
- an OME-Zarr is written where it will lie, and its coarser levels last. Volumes in files of one piece are put together
  in a store of chunks first, and copied from there; images and small volumes of many go through memory
"""

import contextlib
import csv
import fcntl
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from vitrail import disk
from vitrail.contents import Layout, check_layout
from vitrail.data.files.handles import library
from vitrail.data.formats.ngff import coarser, create_group, create_level, describe_channel, describe_pyramid
from vitrail.data.stored import unit_ratio
from vitrail.errors import UserError
from vitrail.foreign import parse_json, read_json, read_plain
from vitrail.infer.eyes import Form
from vitrail.infer.folder import ome_metadata

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
NIFTI_UNITS = {"meter": ("meter", 1.0), "millimeter": ("mm", 1.0), "micrometer": ("micron", 1.0)}
NIFTI_OTHERS = {"nanometer": 1e-3, "angstrom": 1e-4, "picometer": 1e-6}  # written in micrometers
LARGEST_NIFTI = 32767  # voxels along an axis, of the first version
Tick = Callable[[], None]  # is called whenever work gets on
Stage = Callable[[Tick], None]


def ending_of(name: str) -> str | None:
    """Return the ending of a file name that tells a format."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), None)


@dataclass(frozen=True)
class Frame:
    """Where the cells of an item lie."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spacing: tuple[float, ...]
    unit: str | None
    origin: tuple[float, ...] | None  # of the centre of the first cell
    affine: np.ndarray | None  # of NIfTI: x, y, z of cells to the world


def frame_of(source: Any, item: int, shape: tuple[int, ...], cell: Sequence[int]) -> Frame:
    """Return where the cells of an item lie, of which each is so many voxels large."""
    found = source.items[item]
    shift = [(c - 1) / 2 for c in cell]
    origin = source.origin_of(item) if hasattr(source, "origin_of") else None
    affine = source.affine_of(item) if hasattr(source, "affine_of") else None
    if origin is not None:
        origin = tuple(o + s * size for o, s, size in zip(origin, shift, found.spacing, strict=True))
    if affine is not None:
        move = np.eye(4)
        for name, c, s in zip(source.axes, cell, shift, strict=True):
            at = "xyz".index(name)
            move[at, at], move[at, 3] = c, s
        affine = affine @ move
    spacing = tuple(size * c for size, c in zip(found.spacing, cell, strict=True))
    return Frame(found.name, shape, tuple(source.axes), spacing, found.unit, origin, affine)


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
        raise UserError(
            f"out: {out} is one file, and there are {items} items; give a folder, in which each gets a file of its name"
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
        ending = ending_of(last) or PurePosixPath(last).suffix
        stem = last[: -len(ending)] if ending and len(ending) < len(last) else last
        stem = re.sub(r'[:*?"<>|\x00-\x1f]', "_", stem)
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
        self._stores: dict[Path, Any] = {}

    # ------------------------------------------------------------ before the first row, on rank 0

    def check(self) -> None:
        disk.check_free(self.out)
        for frame in self.frames[:1]:
            check_format(self.format, self.form, frame)

    def begin(self, settings: dict[str, Any]) -> dict[str, Any]:
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
                self._make_stores(settings)
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

    def _make_stores(self, settings: dict[str, Any]) -> None:
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
            self._write_file(self.work / RESULT / self.names[item], values, self.frames[item])
        else:
            every = (slice(None), *box) if self.form.channels is not None else box
            self.level(item, 0)[every] = values
        self.note(row, noted)

    def note(self, row: int, values: Any = None) -> None:
        """Note that a row is there, so that no later call makes it again."""
        assert self._log is not None
        self._log.write(json.dumps([row, values]).encode() + b"\n")
        self._log.flush()

    def level(self, item: int, number: int) -> Any:
        return self.array(self._store_path(item), f"s{number}")

    def array(self, path: Path, name: str) -> Any:
        """Return an array in the place of work, of which chunks of zeros are written, too."""
        import zarr

        with zarr.config.set({"array.write_empty_chunks": True}):  # which is not kept with an array
            return self.store(path)[name]

    def store(self, path: Path) -> Any:
        """Return a group of arrays in the place of work."""
        import zarr

        if path not in self._stores:
            if len(self._stores) > MOST_NAMED:
                self._stores.clear()
            self._stores[path] = zarr.open_group(str(path), mode="r+")
        return self._stores[path]

    # ------------------------------------------------------------ when all rows are there

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
            self._write_file(self.work / RESULT / self.names[item], self.level(item, 0), self.frames[item], tick)

        return copy

    def _coarsening(self, item: int, frame: Frame, number: int) -> Iterator[Stage]:
        """Yield a call for each chunk of a level, which makes it from the level before."""
        factors, shapes = self._factors(frame), self._shapes(frame)
        if number >= len(factors):
            return
        ratio = tuple(now // before for now, before in zip(factors[number], factors[number - 1], strict=True))
        assert self.chunk is not None
        side = self.chunk
        labels = self.form.write in ("classes", "instances")

        def make(start: tuple[int, ...], tick: Tick) -> None:
            box = tuple(slice(s, min(s + side, n)) for s, n in zip(start, shapes[number], strict=True))
            finer = tuple(
                slice(b.start * r, min(b.stop * r, n)) for b, r, n in zip(box, ratio, shapes[number - 1], strict=True)
            )
            if self.form.channels is None:
                made = coarser(self.level(item, number - 1)[finer], labels=labels, factors=ratio)
                self.level(item, number)[box] = made
                return
            values = self.level(item, number - 1)[(slice(None), *finer)]
            made = np.stack([coarser(one, labels=labels, factors=ratio) for one in values])
            self.level(item, number)[(slice(None), *box)] = made

        for start in product(*(range(0, n, side) for n in shapes[number])):
            yield partial(make, start)

    def publish(self) -> None:
        """Give what is complete its name, on rank 0."""
        with disk.told(self.out):
            if self.format == "csv":
                self._write_table()
            every = (self.work / RESULT).rglob("*")
            for left in [path for path in every if path.suffix == ".partial" or disk.is_draft(path)]:
                disk.remove(left, inside=self.work)  # a chunk or a file that a kill came upon
            made = self.work / RESULT
            disk.publish(made if self.many else made / self.names[0], self.out)
            disk.sync_folder(self.out.parent)
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

    # ------------------------------------------------------------ files of one piece

    def _write_file(self, path: Path, values: Any, frame: Frame, tick: Tick = lambda: None) -> None:
        """Write one file of [*S] or [C, *S], in memory or a store of chunks."""
        with disk.replacing(path, parents=True) as file:
            if self.format == "nifti":
                self._write_nifti(file, values, frame, tick)
            elif self.format == "tiff":
                self._write_tiff(file, values, frame, path.name, tick)
            elif self.format == "npy":
                header = {"descr": np.lib.format.dtype_to_descr(self.form.dtype), "fortran_order": False}
                np.lib.format.write_array_header_2_0(file, header | {"shape": tuple(values.shape)})
                for slab in self._slabs(values, tick):
                    file.write(slab.tobytes())
            else:
                from PIL import Image

                Image.fromarray(np.ascontiguousarray(values[...])).save(file, format="PNG")

    def _slabs(self, values: Any, tick: Tick) -> Iterator[np.ndarray]:
        """Yield [C, *S] in the order of the bytes of a file, as thick as chunks."""
        thick = self.chunk or values.shape[-len(self.frames[0].axes)]
        channels = [()] if self.form.channels is None else [(number,) for number in range(len(self.form.channels))]
        for channel in channels:
            for first in range(0, self._deep(values), thick):
                yield np.ascontiguousarray(values[(*channel, slice(first, first + thick))])
                tick()

    def _deep(self, values: Any) -> int:
        return int(values.shape[0 if self.form.channels is None else 1])

    def _write_nifti(self, file: BinaryIO, values: Any, frame: Frame, tick: Tick) -> None:
        import nibabel

        shape = frame.shape[::-1] + (1,) * (3 - len(frame.shape))
        sizes = (*shape, *([len(self.form.channels)] if self.form.channels is not None else []))
        header = nibabel.Nifti1Header() if max(sizes) <= LARGEST_NIFTI else nibabel.Nifti2Header()
        header.set_data_dtype(self.form.dtype)
        header.set_data_shape(sizes)
        unit, factor = NIFTI_UNITS.get(frame.unit or "", ("micron", NIFTI_OTHERS.get(frame.unit or "", 1.0)))
        if frame.unit not in (*NIFTI_UNITS, *NIFTI_OTHERS):
            unit = "unknown"
        axes = list(frame.axes[::-1])  # of the file, which need not be those of the world in their order
        if not set(axes) <= {"x", "y", "z"}:
            axes = ["x", "y", "z"][: len(axes)]
        axes += [name for name in "xyz" if name not in axes]
        order = ["xyz".index(name) for name in axes]
        affine = frame.affine
        if affine is not None:
            unit = _unit_of(affine, frame)
        if affine is None:
            affine = np.eye(4)
            origin = frame.origin or (0.0,) * len(frame.axes)
            for at, size, start in zip(order, frame.spacing[::-1], origin[::-1], strict=False):
                affine[at, at], affine[at, 3] = size * factor, start * factor
        affine = affine[:, [*order, 3]]
        header.set_sform(affine, code=1)
        header.set_qform(affine, code=1)
        header.set_xyzt_units(unit)
        start = 352 if header["sizeof_hdr"] == 348 else 544
        header["vox_offset"] = start
        with contextlib.ExitStack() as stack:
            target: Any = file
            if self.suffix.endswith(".gz"):
                packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=3, mtime=0)
                target = stack.enter_context(packed)
            target.write(bytes(header.binaryblock).ljust(start, b"\0"))
            for slab in self._slabs(values, tick):
                target.write(slab.astype(header.get_data_dtype(), copy=False).tobytes())

    def _write_tiff(self, file: BinaryIO, values: Any, frame: Frame, name: str, tick: Tick) -> None:
        import tifffile

        letters, metadata = ome_metadata(frame.spacing, frame.unit, name)
        if self.form.channels is not None:
            letters = f"C{letters}"
            metadata["Channel"] = {"Name": list(self.form.channels)}
        flat = len(frame.axes) == 2

        def pages() -> Iterator[np.ndarray]:
            if flat:
                channels = [()] if self.form.channels is None else [(n,) for n in range(len(self.form.channels))]
                yield from (np.ascontiguousarray(values[(*channel, slice(None))]) for channel in channels)
                return
            for slab in self._slabs(values, tick):
                yield from slab

        size = int(np.prod(values.shape)) * self.form.dtype.itemsize
        tifffile.imwrite(
            file,
            pages(),
            shape=tuple(values.shape),
            dtype=self.form.dtype,
            ome=True,
            bigtiff=size > 2**31,
            photometric="minisblack",
            metadata={"axes": letters, **metadata},
        )


def _unit_of(affine: np.ndarray, frame: Frame) -> str:
    """Return the unit of an affine: that in which the voxels' size is what the frame says in its own."""
    sizes = [float(np.linalg.norm(affine[:3, "xyz".index(name)])) for name in frame.axes]
    for unit, (written, _) in NIFTI_UNITS.items():
        ratio = unit_ratio(unit, frame.unit)
        if ratio is not None and np.allclose(np.array(sizes) * ratio, frame.spacing, rtol=1e-4, atol=0):
            return written
    return "unknown"


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
