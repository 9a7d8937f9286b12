"""NumPy arrays (.npy by memory map, .npz decoded whole) and raw binary files whose shape and type are given.

- nothing is ever unpickled; an array of objects is refused
- axes are y, x or z, y, x or c, z, y, x unless `axes` names them
"""

import math
import zipfile
from typing import Literal

import numpy as np

from vitrail.data.files.handles import Mapped, decoding, default_axes, file_mark, whole_items
from vitrail.data.files.paths import local_copy, split_key
from vitrail.data.formats.images import read_header
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, split_axes
from vitrail.data.sources.folders import list_cases
from vitrail.data.stored import NOT_SPACE
from vitrail.errors import BadData, UserError
from vitrail.foreign import BEST_PACKED, check_room, open_plain
from vitrail.recipe import config

SUFFIXES = (".npy", ".npz")


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
        suffixes = SUFFIXES if self.shape is None else ("",)
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
        except TypeError as error:
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

    return Stored(array.name, shape, default_axes(len(shape)), dtype, (1,) * len(shape), read)


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
    return Stored(
        name, shape, default_axes(len(shape)), dtype, shape, lambda window: whole_items(mark, decode)[window].copy()
    )
