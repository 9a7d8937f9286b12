"""Files of one array each.

NIfTI: volumes (.nii, .nii.gz): CT and MR with labels, single files, folders, imagesTr/labelsTr and nnU-Net's layout.

- the file's x, y, z become the axes z, y, x; sizes and unit come from the header, and the affine is kept in the facts
- scl_slope and scl_inter are applied (float32); where they change nothing, whole numbers stay
- .nii is read by memory map; .nii.gz has no random access, so it is decoded whole and kept while there is room

NumPy: NumPy arrays (.npy by memory map, .npz decoded whole) and raw binary files whose shape and type are given.

- nothing is ever unpickled; an array of objects is refused
- axes are y, x or z, y, x or c, z, y, x unless `axes` names them
"""

import gzip
import math
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.files.handles import Mapped, decoding, default_axes, file_mark, library, whole_items
from vitrail.data.files.paths import local_copy, split_key
from vitrail.data.formats.images import read_header
from vitrail.data.grid import TOLERANCE, Entry, GridConfig, GridSource, Stored, Window, plain_unit, split_axes
from vitrail.data.sources.folders import Case, CaseLayout, find_cases, list_cases
from vitrail.data.stored import NOT_SPACE
from vitrail.errors import BadData, UserError
from vitrail.foreign import BEST_PACKED, check_plain, check_room, open_plain
from vitrail.recipe import config

NIFTI = (".nii.gz", ".nii")
HEADER = 544  # bytes, at most
MOST_START = 2**28  # bytes before the first voxel, extensions and all
MOST_BEHIND = 2**24  # and after the last one
MOST_EXTENSIONS = 1000  # of a header; each is an object of the library


@config
class NiftiConfig(GridConfig):
    """A file, a folder of files, or a folder with imagesTr; labels go by name: beside, in labelsTr, or in `labels`."""

    kind: Literal["nifti"] = "nifti"
    check_affine: bool = True  # refuse labels whose affine places them elsewhere than the image

    def open(self) -> GridSource:
        """Read the headers; no voxel is read yet."""
        return find_cases(self.path, self.labels, NIFTI).made_by(self._open)

    def _open(self, layout: CaseLayout) -> GridSource:
        entries = [self._entry(case, layout) for case in layout.cases]
        return GridSource(self, entries, kind="nifti", notes=layout.notes)

    def _entry(self, case: Case, layout: CaseLayout) -> Entry:
        opened = [open_nifti(path, layout.channels if len(case.images) == 1 else None) for path in case.images]
        images, affine = layout.name_channels([stored for stored, _ in opened]), opened[0][1]
        labels = None
        if case.labels is not None:
            found, placed = open_nifti(case.labels, None)
            labels = replace(_whole_numbers(found), names=layout.labels, spacing=images[0].spacing)
            labels = replace(labels, origin=self._place(labels, affine, placed))
        return Entry(case.name, images, labels, facts={"affine": affine.tolist(), **layout.facts})

    def _place(self, labels: Stored, image: np.ndarray, placed: np.ndarray) -> dict[str, float]:
        """Return where the first voxel of the labels lies on the image's grid, by both affines."""
        if not self.check_affine:
            return dict.fromkeys("zyx", 0.0)
        move = np.linalg.inv(image) @ placed  # voxels of the labels to voxels of the image
        if not np.allclose(move[:3, :3], np.eye(3), atol=TOLERANCE):
            raise BadData(
                f"labels {labels.name} have another affine than the image, {placed.tolist()} instead of "
                f"{image.tolist()}; resample them, or set check_affine: false where only the header is wrong"
            )
        sizes = np.linalg.norm(image[:3, :3], axis=0)
        return {name: float(move[i, 3] * sizes[i]) for i, name in enumerate("xyz")}


def _load(place: Path) -> Any:
    return library("nibabel", "nifti").load(place)


def _check_header(path: str, place: Path) -> None:
    """Refuse sizes that no file has, before the library takes memory for them."""
    first = place.with_suffix(".hdr") if place.suffix == ".img" else place
    for pair in (first, place.with_suffix(".img")):
        check_plain(pair)  # of two files the library opens both
    packed = first.suffix == ".gz"
    with open_plain(first) as held, gzip.open(held) if packed else held as file:
        head = file.read(HEADER)
        order = "<" if head[:4] in (b"\x5c\1\0\0", b"\x1c\2\0\0") else ">"
        if len(head) < 348 or int.from_bytes(head[:4], "little" if order == "<" else "big") not in (348, 540):
            raise BadData(f"{path} cannot be read: it has no header of NIfTI; restore or convert it")
        old = head[0] == 0x5C or head[3] == 0x5C
        sizes = struct.unpack_from(f"{order}8h", head, 40) if old else struct.unpack_from(f"{order}8q", head, 16)
        start = struct.unpack_from(f"{order}f", head, 108)[0] if old else struct.unpack_from(f"{order}q", head, 168)[0]
        if not 1 <= sizes[0] <= 7 or min(sizes[1 : sizes[0] + 1]) < 1 or not 0 <= start <= MOST_START:
            raise BadData(
                f"{path} says that its dimensions are {list(sizes[1 : max(1, sizes[0]) + 1])}, from byte {start:.15g}; "
                "restore the file"
            )
        extended = head[348 if old else 540 :][:1] not in (b"", b"\0")
        at, whole, count = (352 if old else 544), int(start) or MOST_START, 0
        while extended and at + 8 <= whole:
            file.seek(at)
            if len(told := file.read(8)) < 8:
                break
            (length,) = struct.unpack_from(f"{order}i", told)
            if not 8 <= length <= whole - at:
                raise BadData(f"{path} says that an extension of its header has {length:,} bytes; restore the file")
            at, count = at + length, count + 1
            if count > MOST_EXTENSIONS:
                raise BadData(f"{path} has more than {MOST_EXTENSIONS:,} extensions of its header; restore the file")


def open_nifti(path: str, channels: tuple[str, ...] | None) -> tuple[Stored, np.ndarray]:
    """Open an array; return it and its affine."""
    library("nibabel", "nifti")
    place = local_copy(path)
    with decoding(path):
        _check_header(path, place)
        image = _load(place)
        header, proxy = image.header, image.dataobj
        if not hasattr(header, "get_xyzt_units"):
            raise BadData(f"{path} is no NIfTI file but {type(image).__name__}; convert it")
        slope, inter = (1.0 if proxy.slope is None else float(proxy.slope)), float(proxy.inter or 0.0)
        sizes, raw = tuple(int(n) for n in proxy.shape), np.dtype(proxy.dtype)
        zooms, unit = header.get_zooms(), plain_unit(header.get_xyzt_units()[0])
        affine = np.asarray(image.affine, np.float64)
        files = tuple({str(part.filename): None for part in image.file_map.values()})  # of .hdr and .img, two
        mark, packed = (path, file_mark(place)), place.suffix != ".nii"
        if packed:  # by the type that is read: the header tells its bits besides, and those may be others
            size = math.prod(sizes) * raw.itemsize
            if place.suffix == ".gz" and size > BEST_PACKED * place.stat().st_size:
                raise BadData(f"{path} says that it holds {size:,} bytes, more than can be packed in it; restore it")
            check_room(path, size)
        mapped = None if packed else Mapped(path, place, raw, int(proxy.offset), sizes, "F")
    if not 2 <= len(sizes) <= 5:
        raise BadData(f"{path} has {len(sizes)} dimensions; 2 to 5 can be read")
    named = len(sizes) == 4 and channels is not None and sizes[3] == len(channels)
    axes = ("x", "y", "z", "c" if named else "t", "c")[: len(sizes)]
    scaled = slope != 1.0 or inter != 0.0
    dtype = np.dtype(np.float32) if scaled else raw.newbyteorder("=")

    def decode() -> np.ndarray:
        with decoding(path):
            return np.ascontiguousarray(_read_whole(place).T)

    def read(window: Window) -> np.ndarray:
        values = (whole_items(mark, decode) if mapped is None else mapped().T)[window]
        return (values * np.float32(slope) + np.float32(inter)).astype(dtype) if scaled else values.astype(dtype)

    shape = sizes[::-1]
    chunk = shape if packed else (1,) * len(shape)
    spacing = {name: float(zoom) for name, zoom in zip("xyz", zooms, strict=False) if zoom > 0}
    origin = dict.fromkeys("xyz"[: len(shape)], 0.0)
    return Stored(path, shape, axes[::-1], dtype, chunk, read, spacing, unit, origin, channels, files=files), affine


def _read_whole(place: Path) -> np.ndarray:
    image = _load(place)
    if place.suffix != ".gz":
        return np.asarray(image.dataobj.get_unscaled())
    with gzip.open(place) as file:
        values = np.asarray(type(image).from_stream(file).dataobj.get_unscaled())
        end = file.tell()
        while file.read(2**20):  # the checksum lies behind the last byte, and is compared only there
            if file.tell() > end + MOST_BEHIND:
                raise BadData(f"{place} cannot be read: it goes on behind its last voxel; restore the file")
    return values


def _whole_numbers(labels: Stored) -> Stored:
    """Return labels that are stored as floats, as many tools do, as whole numbers; refuse others."""
    if labels.dtype.kind != "f":
        return labels

    def read(window: Window) -> np.ndarray:
        values = labels.read(window)
        whole = np.rint(values)
        wrong = (whole != values) | (np.abs(values) > np.iinfo(np.int32).max)
        if wrong.any():
            first = np.unravel_index(int(wrong.argmax()), values.shape)
            place = [int(i) + w.start for i, w in zip(first, window, strict=True)]
            raise BadData(
                f"labels {labels.name} hold {values[first]} at {place} ({', '.join(labels.axes)}), which is no class; "
                "write whole numbers, up to 2147483647"
            )
        return whole.astype(np.int32)

    return replace(labels, dtype=np.dtype(np.int32), read=read)


NUMPY = (".npy", ".npz")


@config
class NumpyConfig(GridConfig):
    """A .npy, .npz or raw file, or a folder of .npy or .npz files; labels are such a path too, or a key of the .npz."""

    kind: Literal["numpy"] = "numpy"
    key: str | None = None  # the array of an .npz; `path: file.npz::name` says the same
    shape: list[int] | None = None  # of a raw file, as are the next ones
    dtype: str | None = None  # such as uint8 or <u2
    order: Literal["C", "F"] = "C"  # F: the first axis runs fastest
    offset: int = 0  # bytes before the first voxel
    label_dtype: str = "uint8"  # of raw labels, which have the shape without channels, and nothing before it

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.shape is None) != (self.dtype is None):
            raise UserError(f"{self.path}: shape and dtype of a raw file go together; give both")
        if self.shape is not None and (not self.shape or min(self.shape) < 1 or self.offset < 0):
            raise UserError(f"shape = {self.shape}, offset = {self.offset} of {self.path} must be positive numbers")

    def open(self) -> GridSource:
        """Read the headers; no voxel is read yet."""
        path, key = split_key(self.path, self.key)
        suffixes = NUMPY if self.shape is None else ("",)
        cases, inside = list_cases(path, None, suffixes), None
        if self.labels is not None and path.lower().endswith(".npz") and self.labels in _keys(path):
            inside = self.labels
        elif self.labels is not None:
            cases = list_cases(path, self.labels, suffixes)
        entries = []
        for case in cases:
            (place,), labels = case.images, None
            if inside is not None:
                labels = self._open(place, inside)
            elif case.labels is not None:
                labels = self._open(case.labels, None, labels=True)
            entries.append(Entry(case.name, (self._open(place, key, skip=inside),), labels))
        return GridSource(self, entries, kind="numpy")

    def _open(self, path: str, key: str | None, *, skip: str | None = None, labels: bool = False) -> Stored:
        if path.lower().endswith(".npz"):
            return open_npz(path, key, skip)
        if path.lower().endswith(".npy"):
            return open_npy(path)
        if self.shape is None or self.dtype is None:
            raise UserError(f"{path} is neither .npy nor .npz; give `shape` and `dtype` of a raw file")
        axes = default_axes(len(self.shape)) if self.axes is None else split_axes(self.axes)
        if not labels or len(axes) != len(self.shape):
            return self._open_raw(path, self.shape, "dtype", self.dtype, self.offset)
        space = [size for size, name in zip(self.shape, axes, strict=True) if name not in NOT_SPACE]
        return self._open_raw(path, space, "label_dtype", self.label_dtype, 0)

    def _open_raw(self, path: str, shape: list[int], key: str, given: str, offset: int) -> Stored:
        try:
            dtype = np.dtype(given)
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:  # parts of it are Python
            raise UserError(f"{key} = {given!r} of {path} is no type of numbers; give one such as uint8") from error
        place = local_copy(path)
        with decoding(path):
            found = place.stat().st_size
        needed = offset + dtype.itemsize * math.prod(shape)
        if found != needed:
            raise BadData(
                f"{path} has {found} bytes, but shape = {shape}, {key} = {given} and offset = {offset} "
                f"make {needed}; mend these keys or restore the file"
            )
        return mapped(Mapped(path, place, dtype, offset, shape, self.order), tuple(shape), dtype)


def open_npy(path: str) -> Stored:
    place = local_copy(path)
    with decoding(path):
        with open_plain(place) as file:
            found = read_header(file, path)
        array = Mapped(path, place, found.dtype, found.offset, found.shape, found.order)
        return mapped(array, found.shape, found.dtype)


def mapped(array: Mapped, shape: tuple[int, ...], dtype: np.dtype) -> Stored:
    def read(window: Window) -> np.ndarray:
        return np.array(array()[window])

    return Stored(array.name, shape, default_axes(len(shape)), dtype, (1,) * len(shape), read, guessed=True)


def _keys(path: str) -> list[str]:
    with decoding(path), zipfile.ZipFile(local_copy(path)) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def open_npz(path: str, key: str | None, skip: str | None = None) -> Stored:
    """Open an array of an archive, which has no random access: it is decoded whole and kept while there is room."""
    keys = [k for k in _keys(path) if k != skip]
    if key is None and len(keys) == 1:
        key = keys[0]
    if key not in keys:
        what = "which array to read is not said" if key is None else f"it has no array {key!r}"
        raise UserError(f"{path}: {what}; choose `key` from {', '.join(keys) or 'none, it is empty'}")
    place, name = local_copy(path), f"{path}::{key}"

    member = f"{key}.npy"

    def decode() -> np.ndarray:
        # Not by np.load, for which a member without the suffix goes before the one that was checked.
        with decoding(name), zipfile.ZipFile(place) as archive, archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    with decoding(name), zipfile.ZipFile(place) as archive:
        told = archive.getinfo(member)
        if told.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadData(f"{name} is packed in a way that NumPy does not write; save it with np.savez_compressed")
        with archive.open(member) as file:
            found = read_header(file, name)
        if found.end != told.file_size or told.file_size > BEST_PACKED * place.stat().st_size:
            raise BadData(
                f"{name} says that it holds {found.end:,} bytes, and the archive {told.file_size:,} in "
                f"{place.stat().st_size:,}; restore the file"
            )
        check_room(name, found.end)
        shape, dtype = found.shape, found.dtype
        mark = (name, file_mark(place))
    axes = default_axes(len(shape))
    return Stored(
        name, shape, axes, dtype, shape, lambda window: whole_items(mark, decode)[window].copy(), guessed=True
    )
