"""Stored latents: images or volumes that a codec has already encoded, with their exact statistics.

As safetensors, a folder with `index.json` and its shards; as Zarr, a group with the same facts as its attribute
`vitrail_latents` and the arrays themselves:

- facts: {version, shape: [C, *S], dtype, rows, variables, mean, std, classes, labelled, shards: [{file, rows, crc32}],
  seal}; no shards in Zarr; what `vitrail data encode` wrote also has {codec, data, encoding}: what encoded it, out of
  what, and how
- `latents` [N, C, *S] and, where there are classes, `labels` [N]; in a shard also `sums` [N], the CRC-32 of each row,
  compared whenever one is read; in Zarr, the frames of zstd have theirs
- mean and std of each channel are of all rows, in float64; `write_latents` measures them while it writes
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.files import file_type, join, local_copy, read_bytes, read_exactly, read_json
from vitrail.data.formats import decoding
from vitrail.data.items import ItemsConfig, LazySequence, choose_channels, keep_share, whole_item
from vitrail.data.latents_facts import TYPES, check_facts, check_shards, compare_facts
from vitrail.data.places import find_place
from vitrail.data.protection import of_chunks
from vitrail.data.source import normalize_window
from vitrail.data.stored import Stored
from vitrail.data.zarr_nodes import open_array
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import METADATA, check_room, parse_json
from vitrail.recipe import config

ATTRIBUTE = "vitrail_latents"
PLAN = "plan.json"  # of latents that are still being encoded


@config
class LatentsConfig(ItemsConfig):
    """A folder of safetensors shards with index.json, one such shard, or a Zarr group of latents."""

    kind: Literal["latents"] = "latents"

    def open(self) -> "LatentsSource":
        """Read the index, the headers of the shards and the classes."""
        return LatentsSource(self)


class Shard(NamedTuple):
    """Rows of one file."""

    place: str
    offset: int  # of the first latent, in bytes
    shape: tuple[int, ...]  # [N, C, *S]
    dtype: str
    labels: np.ndarray | None  # [N]
    sums: np.ndarray | None  # [N], CRC-32 of each row
    head: int  # CRC-32 of all else in the file

    @property
    def checksum(self) -> str | None:
        """What tells that a row is damaged."""
        return None if self.sums is None else "crc32"

    def row(self, row: int) -> np.ndarray:
        """One latent, [C, *S]."""
        kind = np.dtype(TYPES[self.dtype]).newbyteorder("<")
        size = math.prod(self.shape[1:]) * kind.itemsize
        found = read_exactly(self.place, self.offset + row * size, size, f"row {row}")
        if self.sums is not None and zlib.crc32(found) != self.sums[row]:
            raise BadData(f"{self.place}: row {row} does not match its checksum; restore the file, or encode it anew")
        return widen(np.frombuffer(found, kind).reshape(self.shape[1:]), self.dtype)


class ZarrRows:
    """Rows of one Zarr group."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._array = self._open("latents")
        self.shape, self.dtype = self._array.shape, str(self._array.dtype)
        has_labels = any(file_type(join(path, "labels", name)) == "file" for name in ("zarr.json", ".zarray"))
        self.labels = None
        if has_labels:
            labels = self._open("labels")
            if labels.shape != self.shape[:1]:
                raise BadData(
                    f"{labels.name} has the shape {list(labels.shape)} for {self.shape[0]} rows; write it anew"
                )
            check_room(labels.name, self.shape[0] * labels.dtype.itemsize)
            self.labels = labels.read((slice(0, self.shape[0]),))

    def row(self, row: int) -> np.ndarray:
        """One latent, [C, *S]."""
        try:
            return self._array.read((slice(row, row + 1), *(slice(0, size) for size in self.shape[1:])))[0]
        except MissingData as error:
            raise BadData(
                f"{self._array.name}, row {row} cannot be read: its chunk is missing; restore it, or write all anew"
            ) from error

    @property
    def checksum(self) -> str | None:
        """What tells that a row is damaged."""
        return of_chunks(self._array.chunk_reader) if self._array.chunk_reader is not None else None

    def _open(self, name: str) -> Stored:
        # A missing chunk is a lost row, never a row of zeros.
        return open_array(find_place(join(self._path, name)), fill=False)


class LatentsSource:
    """Encoded items, all of the same shape."""

    def __init__(self, settings: LatentsConfig) -> None:
        self.config = settings
        facts, self.shards = open_rows(settings.path)
        codec, data = facts.get("codec"), facts.get("data")
        self.encoded = {"codec": codec | {"data": data}} if isinstance(codec, dict) else {}  # what they are latents of
        first = self.shards[0]
        self.shape, count = first.shape[2:], first.shape[1]
        self.axes = ("z", "y", "x")[-len(self.shape) :]
        self.dtype = np.dtype("float32" if first.dtype == "BF16" else TYPES.get(first.dtype, first.dtype))
        known = facts.get("variables") or [f"latent{number}" for number in range(count)]
        self.variables, self._channels = choose_channels(settings.variables, known, settings.path)
        mean, std = facts.get("mean"), facts.get("std")
        # Of all rows, for those who need no fitting any more.
        self.statistics = None
        if mean and std:
            self.statistics = {"mean": [mean[c] for c in self._channels], "std": [std[c] for c in self._channels]}
        self._firsts = np.cumsum([0, *(shard.shape[0] for shard in self.shards)])
        self._labels, self.class_names = self._read_classes(facts.get("classes") or ())
        total = int(self._firsts[-1])
        self.kept = keep_share(settings, LazySequence(total, str))
        self.items = LazySequence(
            len(self.kept), lambda item: whole_item(str(self.kept[item]), self.shape, self._label(item))
        )

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """[C, *spatial] of a window."""
        window = tuple(slice(*bounds) for bounds in normalize_window(self.shape, region))
        number = int(self.kept[item])
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        row = self.shards[shard].row(number - int(self._firsts[shard]))
        return np.ascontiguousarray(row[self._channels][(slice(None), *window)], self.dtype)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "latents",
            "path": self.config.path,
            "axes": list(self.axes),
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": [1.0] * len(self.shape),
            "unit": None,
            "items": len(self.items),
            "classes": list(self.class_names),
            "stored_statistics": self.statistics,
            **self.encoded,
        }

    def _label(self, item: int) -> int | None:
        number = -1 if self._labels is None else int(self._labels[self.kept[item]])
        return None if number < 0 else number

    def _read_classes(self, names: Sequence[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
        if any(shard.labels is None for shard in self.shards):
            return None, ()
        labels = np.concatenate([shard.labels for shard in self.shards if shard.labels is not None])
        highest = int(labels.max(initial=-1))
        if names and highest >= len(names):
            raise BadData(f"{self.config.path}: class {highest} among the labels, but {len(names)} are named; mend it")
        return labels, tuple(names) or tuple(str(number) for number in range(highest + 1))


def open_rows(path: str) -> tuple[dict[str, Any], list[Any]]:
    """The facts of stored latents, and their shards."""
    if file_type(path) == "file":
        return _checked({}, lambda: [open_shard(path)], path)
    if file_type(path) is None:
        raise UserError(f"data path {path!r} does not exist; check the spelling")
    for name in ("zarr.json", ".zattrs"):
        if file_type(join(path, name)) == "file":
            attributes = _load(join(path, name))
            facts = (attributes.get("attributes") or attributes).get(ATTRIBUTE)
            if not isinstance(facts, dict):
                raise UserError(f"{path} has no attribute {ATTRIBUTE!r}, so it holds no latents; use kind: zarr")
            return _checked(facts, lambda: [ZarrRows(path)], join(path, name))
    if file_type(join(path, "index.json")) != "file":
        if file_type(join(path, PLAN)) == "file":
            raise UserError(f"{path} is not encoded to its end; finish it with the same `vitrail data encode` command")
        raise UserError(f"{path} has no index.json, nor Zarr metadata; give a folder of latents")
    facts = _load(join(path, "index.json"))
    check_shards(facts.get("shards"), join(path, "index.json"), path)

    def open_all() -> list[Any]:
        return [open_shard(join(path, s["file"]), s.get("rows"), s.get("crc32")) for s in facts["shards"]]

    return _checked(facts, open_all, join(path, "index.json"))


def _checked(facts: dict[str, Any], open_all: Callable[[], list[Any]], where: str) -> tuple[dict[str, Any], list[Any]]:
    check_facts(facts, where)
    shards = open_all()
    compare_facts(facts, shards, where)
    return facts, shards


def open_shard(path: str, rows: int | None = None, head: int | None = None) -> Shard:
    """The header of a safetensors file, checked against its size; nothing is unpickled.

    `rows` and `head`, the CRC-32 of all but the latents, are those that it should have.
    """
    place = local_copy(path)
    size = place.stat().st_size
    with decoding(path):
        length = int.from_bytes(read_bytes(place, 0, 8), "little")
        if size < 8 or length > size - 8:
            raise BadData(f"{path} is cut short, or no safetensors file; restore it")
        if length > METADATA:
            raise BadData(f"{path} says that its header has {length:,} bytes; restore the file")
        text = read_bytes(place, 8, length)
        header = parse_json(text)
        tensor = header.get("latents")
        if tensor is None:
            raise BadData(f"{path} holds no tensor `latents`, only {', '.join(header)}; name it so")
        shape, kind = tuple(tensor["shape"]), tensor["dtype"]
        start, end = _span(path, tensor, size - 8 - length)
        if not all(type(n) is int and n > 0 for n in shape):
            raise BadData(f"{path}: latents are {list(shape)}; expected whole numbers above 0")
        if kind not in TYPES or not 4 <= len(shape) <= 5:
            raise BadData(
                f"{path}: latents are {list(shape)} of {kind}; expected [N, C, y, x] or [N, C, z, y, x] of floats"
            )
        if end - start != math.prod(shape) * np.dtype(TYPES[kind]).itemsize:
            raise BadData(f"{path} has {end - start:,} bytes of latents, not as many as their shape takes; restore it")
        if rows is not None and rows != shape[0]:
            raise BadData(f"{path} has {shape[0]} rows, but index.json says {rows}; restore the right file")
        found = zlib.crc32(text)
        beside: dict[str, np.ndarray | None] = {"labels": None, "sums": None}
        for name in beside:
            if name in header:
                first, last = _span(path, header[name], size - 8 - length)
                stored = read_bytes(place, 8 + length + first, last - first)
                found = zlib.crc32(stored, found)
                dtype = "uint32" if header[name]["dtype"] == "U32" else TYPES[header[name]["dtype"]]
                beside[name] = values = np.frombuffer(stored, np.dtype(dtype).newbyteorder("<"))
                if len(values) != shape[0]:
                    raise BadData(f"{path} has {len(values)} {name} for {shape[0]} rows; write it anew")
        if head is not None and head != found:
            raise BadData(f"{path} does not match its checksum in index.json; restore it, or encode the data anew")
        return Shard(str(place), 8 + length + start, shape, kind, beside["labels"], beside["sums"], found)


def _span(path: str, tensor: dict[str, Any], size: int) -> tuple[int, int]:
    """First byte of a tensor and the one after its last, counted from the end of the header."""
    start, end = tensor["data_offsets"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= size:
        raise BadData(
            f"{path} is cut short: a tensor lies at bytes {start} to {end} of {size:,} after the header; restore it"
        )
    return start, end


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    """bfloat16 as float32; everything else as it is."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values


def _load(path: str) -> dict[str, Any]:
    with decoding(path):
        found = read_json(path)
        if not isinstance(found, dict):
            raise BadData(f"{path} is no list of facts; write it anew")
        return found
