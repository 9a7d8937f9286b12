"""Tables of numbers in one file: columns of as many rows each, as safetensors or Zarr, with facts beside them.

Both are written while rows are made: places and chunks are known before the first one.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from vitrail import disk
from vitrail.data.formats.ngff import create_level
from vitrail.foreign import check_plain

ENDINGS = (".safetensors", ".zarr")
CHUNK = 4 << 20  # bytes of the widest column that are written at once
TYPES = {  # of safetensors
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
}
FACTS = "vitrail"

Columns = dict[str, tuple[np.dtype, tuple[int, ...]]]  # type of each, and the shape of a row


class Write(Protocol):
    def __call__(self, rows: Mapping[str, np.ndarray]) -> None:
        """Write the next rows of all columns."""
        ...


@contextmanager
def writing(target: Path, columns: Columns, rows: int, facts: Mapping[str, Any]) -> Iterator[Write]:
    """Yield what takes the rows; the file or folder gets its name when all of them are there."""
    if target.suffix == ".zarr":
        with disk.new_folder(target) as draft:
            arrays = _Arrays(draft, columns, rows, facts)
            yield arrays
            arrays.finish()
        return
    with disk.replacing(target) as file:
        tensors = _Tensors(file, {name: (kind, (rows, *shape)) for name, (kind, shape) in columns.items()}, facts)
        yield tensors
        tensors.finish()


def write_columns(path: Path, columns: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Write whole columns, of any number of rows each, to a safetensors file."""
    with disk.replacing(path) as file:
        _Tensors(file, {name: (values.dtype, values.shape) for name, values in columns.items()}, facts)(columns)


def read_columns(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read what write_columns() has written."""
    from safetensors import safe_open

    check_plain(path)
    with safe_open(str(path), framework="np") as file:
        facts = json.loads((file.metadata() or {})[FACTS])
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - no mapping


class _Tensors:
    """The columns of a safetensors file, one after another: types and shapes are those of all rows."""

    def __init__(self, file: BinaryIO, columns: Columns, facts: Mapping[str, Any]):
        words = {np.dtype(kind): name for name, kind in TYPES.items()}
        header: dict[str, Any] = {"__metadata__": {FACTS: json.dumps(facts)}}
        self.file, end = file, 0
        self.left: dict[str, int] = {}  # bytes
        self.places: dict[str, int] = {}  # of the next row
        for name, (dtype, shape) in columns.items():
            size = dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": words[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self.places[name], self.left[name] = end, size
            end += size
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self.places = {name: 8 + len(text) + place for name, place in self.places.items()}
        file.write(struct.pack("<Q", len(text)) + text)

    def __call__(self, rows: Mapping[str, np.ndarray]) -> None:
        for name, values in rows.items():
            self.file.seek(self.places[name])
            self.file.write(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
            self.places[name] += values.nbytes
            self.left[name] -= values.nbytes

    def finish(self) -> None:
        assert not any(self.left.values()), self.left


class _Arrays:
    """The columns of a Zarr group; whole chunks are written, so that none is written twice."""

    def __init__(self, folder: Path, columns: Columns, rows: int, facts: Mapping[str, Any]):
        import zarr

        group = zarr.create_group(str(folder), zarr_format=3, attributes={FACTS: dict(facts)})
        widest = max(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())
        self.chunk = max(1, min(rows, CHUNK // widest))
        self.arrays = {}
        for name, (dtype, shape) in columns.items():
            axes = ("row", name)[: 1 + len(shape)]
            self.arrays[name] = create_level(group, name, (rows, *shape), (self.chunk, *shape), dtype, axes=axes)
        self.waiting: list[Mapping[str, np.ndarray]] = []
        self.held, self.at, self.rows = 0, 0, rows

    def __call__(self, rows: Mapping[str, np.ndarray]) -> None:
        self.waiting.append(rows)
        self.held += len(next(iter(rows.values())))
        if self.held >= self.chunk:
            self._write(self.held // self.chunk * self.chunk)

    def _write(self, number: int) -> None:
        joined = {name: np.concatenate([rows[name] for rows in self.waiting]) for name in self.arrays}
        for name, array in self.arrays.items():
            array[self.at : self.at + number] = joined[name][:number]
        self.waiting = [{name: values[number:] for name, values in joined.items()}]
        self.at, self.held = self.at + number, self.held - number

    def finish(self) -> None:
        if self.held:
            self._write(self.held)
        assert self.at == self.rows, (self.at, self.rows)
