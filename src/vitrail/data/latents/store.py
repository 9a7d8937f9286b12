"""The store of latents: images or volumes that a codec has already encoded, with their exact statistics.

As safetensors, a folder with `index.json` and its shards; as Zarr, a group with the same facts as its attribute
`vitrail_latents` and the arrays themselves:

- facts: {version, shape: [C, *S], dtype, rows, variables, mean, std, classes, labelled, shards: [{file, rows, crc32}],
  seal}; no shards in Zarr; `vitrail data encode` adds {codec, data, encoding}: what encoded it, out of what, and how
- `latents` [N, C, *S] and, where there are classes, `labels` [N]; in a shard also `sums` [N], the CRC-32 of each row,
  compared whenever one is read; in Zarr, the frames of zstd have theirs
- mean and std of each channel are of all rows, in float64; they are measured while the rows are written
- version 2 has checksums: of the facts themselves (`seal`), of the head of each shard (`crc32`) and of each row
  (`sums`); version 1, and stores of other programs, have none and are read all the same

Everything a store says of itself is checked before it is used. `shards.py` makes stores that take long.
"""

import itertools
import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.chunks.decoded import open_array
from vitrail.data.chunks.nodes import of_chunks
from vitrail.data.files.handles import decoding
from vitrail.data.files.paths import base_name, file_type, join, local_copy, read_bytes, read_exactly, read_json
from vitrail.data.files.places import find_place
from vitrail.data.stored import Stored
from vitrail.disk import new_folder, told, write_whole
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import METADATA, check_room, parse_json
from vitrail.sums import check_version, sealed, unsealed

VERSION = 2
ATTRIBUTE = "vitrail_latents"  # of a Zarr group, with the facts
PLAN = "plan.json"  # of latents that are still being encoded
MOST_CLASSES = 100_000  # without names; each gets one
FILE = 2**26  # bytes of a file of Zarr, at most: shards are put together in memory
# Types of safetensors; bfloat16, which NumPy has not, is read as its upper half of float32.
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16"}
TYPES |= {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name in zip("IU", ("int", "uint"), strict=True)
    for bits in (8, 16, 32, 64)
}

Rows = tuple[np.ndarray, np.ndarray | None]  # latents [n, C, *S], and their classes [n]


# ---------------------------------------------------------------- facts


def check_facts(facts: dict[str, Any], where: str) -> None:
    """Refuse facts that cannot be those of latents; what is not told is not missed."""
    check_version(facts.get("version", 1), VERSION, where)
    shape = facts.get("shape")
    channels = len(_list(facts, "variables", where))
    if shape is not None:
        known = isinstance(shape, list) and len(shape) in (3, 4) and all(_is_count(size) for size in shape)
        _expect(known, where, "shape", shape, "[C, y, x] or [C, z, y, x] of whole numbers above 0")
        _expect(channels in (0, shape[0]), where, "variables", facts.get("variables"), f"{shape[0]} names")
        channels = shape[0]
    rows = facts.get("rows")
    _expect(rows is None or _is_count(rows), where, "rows", rows, "a whole number above 0")
    for name in ("variables", "classes"):
        values = _list(facts, name, where)
        alike = all(isinstance(value, str) for value in values) and len(set(values)) == len(values)
        _expect(alike, where, name, values, "names that differ")
    for name, least in (("mean", -math.inf), ("std", 0.0)):
        values = _list(facts, name, where)
        wanted = "finite numbers" if name == "mean" else "finite numbers above 0"
        _expect(all(_is_number(value) and value > least for value in values), where, name, values, wanted)
        _expect(not values or len(values) == (channels or len(values)), where, name, values, f"{channels} numbers")
    _expect(len(facts.get("mean") or ()) == len(facts.get("std") or ()), where, "std", facts.get("std"), "one a mean")
    codec = facts.get("codec")
    if isinstance(codec, dict) and (key := wrong_fact({"codec": codec | {"data": facts.get("data")}})) is not None:
        raise BadData(f"{where}: `{key}` is nothing that an encoder tells; restore it, or encode the data anew")
    if "seal" in facts and unsealed(facts) is None:
        raise BadData(
            f"{where} does not match its own checksum: it was damaged or edited; restore it, or take `seal` out of it "
            "if the change is meant"
        )


def wrong_fact(facts: dict[str, Any]) -> str | None:
    """Return a key of facts in a file, as `describe` has told them, whose value no source tells; None if all is well.

    Of latents they hold what encoded them (`codec`), and what the data were before (`codec.data`).
    """
    wrong = [key for key in ("axes", "variables") if not _is_list(facts.get(key), lambda one: isinstance(one, str))]
    wrong += ["spacing"] * (not _is_list(facts.get("spacing"), _is_number))
    wrong += ["unit"] * (not isinstance(facts.get("unit"), str | None))
    wrong += ["dtype"] * (facts.get("dtype") is not None and not _is_dtype(facts["dtype"]))
    codec = facts.get("codec")
    if isinstance(codec, dict):
        ends, data = codec.get("range"), codec.get("data")
        rises = _is_list(ends, _is_number) and (ends is None or (len(ends) == 2 and ends[0] < ends[1]))
        wrong += ["codec.range"] * (not rises)
        inner = wrong_fact(data) if isinstance(data, dict) else None if data is None else ""
        wrong += [f"codec.data.{inner}".rstrip(".")] * (inner is not None)
    elif codec is not None:
        wrong.append("codec")
    return wrong[0] if wrong else None


def _is_list(found: Any, fits: Callable[[Any], bool]) -> bool:
    return found is None or (isinstance(found, list) and all(map(fits, found)))


def _is_dtype(found: Any) -> bool:
    if not isinstance(found, str) or not re.fullmatch("[<>=|]?[a-z]+[0-9]{0,3}", found):
        return False
    try:
        return np.dtype(found).kind in "biuf"
    except (TypeError, ValueError):
        return False


def check_shards(shards: Any, where: str, folder: str) -> None:
    """Refuse a list of shards that are not files beside it, each of them once."""
    if not isinstance(shards, list) or not shards or not all(isinstance(s, dict) and "file" in s for s in shards):
        raise BadData(f"{where} lists no shards ([{{file, rows}}, ...]); write it anew")
    seen = set()
    for shard in shards:
        name, rows = shard["file"], shard.get("rows")
        if not isinstance(name, str) or base_name(name) != name or name in ("", ".", "..") or "\0" in name:
            raise UserError(f"{folder}: the shard {name!r} does not lie in its folder; use plain names")
        if name in seen:
            raise BadData(f"{where} lists the shard {name} twice; write it anew")
        seen.add(name)
        _expect(rows is None or _is_count(rows), where, f"rows of {name}", rows, "a whole number above 0")


def compare_facts(facts: dict[str, Any], shards: Sequence[Any], where: str) -> None:
    """Refuse facts that are not those of the shards: number of rows, shape, type, and whether there are labels."""
    shape, dtype = facts.get("shape"), facts.get("dtype")
    first = shards[0]
    total, found = sum(shard.shape[0] for shard in shards), list(first.shape[1:])
    for shard in shards:
        if list(shard.shape[1:]) != found or shard.dtype != first.dtype:
            raise BadData(f"{where}: its shards differ in shape or type; write them anew")
    kind = "bfloat16" if first.dtype == "BF16" else TYPES.get(first.dtype, first.dtype)
    _expect(shape in (None, found), where, "shape", shape, f"the {found} of the latents")
    _expect(dtype in (None, kind), where, "dtype", dtype, f"{kind}, as the latents are")
    _expect(facts.get("rows") in (None, total), where, "rows", facts.get("rows"), f"the {total} that there are")
    for name in ("mean", "std", "variables"):
        values = facts.get(name)
        _expect(not values or len(values) == found[0], where, name, values, f"{found[0]}, one a channel")
    for labels in (shard.labels for shard in shards if shard.labels is not None):
        _expect(labels.dtype.kind in "iu", where, "labels", labels.dtype.name, "whole numbers")
        highest, limit = int(labels.max(initial=0)), max(MOST_CLASSES, len(facts.get("classes") or ()))
        _expect(highest < limit, where, "labels", highest, f"classes below {limit:,}")
    labelled = all(shard.labels is not None for shard in shards)
    if facts.get("labelled", labelled) != labelled:
        raise BadData(f"{where}: the labels of its latents are missing; restore them, or write all anew")


def _list(facts: dict[str, Any], name: str, where: str) -> list[Any]:
    values = facts.get(name)
    _expect(values is None or isinstance(values, list), where, name, values, "a list")
    return values or []


def _expect(good: bool, where: str, name: str, value: Any, wanted: str) -> None:
    if not good:
        shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:97]}..."
        raise BadData(f"{where}: `{name}` is {shown}, expected {wanted}; restore it, or encode the data anew")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


# ---------------------------------------------------------------- reading


def open_rows(path: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the facts of stored latents and their shards, checked against each other."""
    facts, where = _find_facts(path)
    check_facts(facts, where)
    shards: list[Any]
    if where == path:
        shards = [open_shard(path)]
    elif base_name(where) == "index.json":
        shards = [open_shard(join(path, s["file"]), s.get("rows"), s.get("crc32")) for s in facts["shards"]]
    else:
        shards = [ZarrRows(path)]
    compare_facts(facts, shards, where)
    return facts, shards


def _find_facts(path: str) -> tuple[dict[str, Any], str]:
    """Return the facts of latents, and the file that tells them; none where the path is a single shard."""
    kind, index = file_type(path), join(path, "index.json")
    if kind is None:
        raise UserError(f"data path {path!r} does not exist; check the spelling")
    if kind == "file":
        return {}, path
    for name in ("zarr.json", ".zattrs"):
        if file_type(join(path, name)) == "file":
            attributes = _load(join(path, name))
            facts = (attributes.get("attributes") or attributes).get(ATTRIBUTE)
            if not isinstance(facts, dict):
                raise UserError(f"{path} has no attribute {ATTRIBUTE!r}, so it holds no latents; use kind: zarr")
            return facts, join(path, name)
    if file_type(index) == "file":
        facts = _load(index)
        check_shards(facts.get("shards"), index, path)
        return facts, index
    if file_type(join(path, PLAN)) == "file":
        raise UserError(f"{path} is not encoded to its end; finish it with the same `vitrail data encode` command")
    raise UserError(f"{path} has no index.json, nor Zarr metadata; give a folder of latents")


def _load(path: str) -> dict[str, Any]:
    with decoding(path):
        found = read_json(path)
        if not isinstance(found, dict):
            raise BadData(f"{path} is no list of facts; write it anew")
        return found


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
        """Name what tells that a row is damaged."""
        return None if self.sums is None else "crc32"

    def row(self, row: int) -> np.ndarray:
        """Read one latent, [C, *S]."""
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
        """Read one latent, [C, *S]."""
        try:
            return self._array.read((slice(row, row + 1), *(slice(0, size) for size in self.shape[1:])))[0]
        except MissingData as error:
            raise BadData(
                f"{self._array.name}, row {row} cannot be read: its chunk is missing; restore it, or write all anew"
            ) from error

    @property
    def checksum(self) -> str | None:
        """Name what tells that a row is damaged."""
        return of_chunks(self._array.chunk_reader) if self._array.chunk_reader is not None else None

    def _open(self, name: str) -> Stored:
        # A missing chunk is a lost row, never a row of zeros.
        return open_array(find_place(join(self._path, name)), fill=False)


def open_shard(path: str, rows: int | None = None, head: int | None = None) -> Shard:
    """Read the header of a safetensors file, checked against its size; nothing is unpickled.

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
                f"{path}: latents are {list(shape)} of {kind}; expected [N, C, y, x] or [N, C, z, y, x] of floats or "
                "whole numbers"
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
                told = header[name]["dtype"]
                if told not in TYPES:
                    raise BadData(f"{path}: its {name} are {told}; expected whole numbers, such as I64; write it anew")
                beside[name] = values = np.frombuffer(stored, np.dtype(TYPES[told]).newbyteorder("<"))
                if len(values) != shape[0]:
                    raise BadData(f"{path} has {len(values)} {name} for {shape[0]} rows; write it anew")
        if head is not None and head != found:
            raise BadData(f"{path} does not match its checksum in index.json; restore it, or encode the data anew")
        return Shard(str(place), 8 + length + start, shape, kind, beside["labels"], beside["sums"], found)


def _span(path: str, tensor: dict[str, Any], size: int) -> tuple[int, int]:
    """Return first byte of a tensor and the one after its last, counted from the end of the header."""
    start, end = tensor["data_offsets"]
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= size:
        raise BadData(
            f"{path} is cut short: a tensor lies at bytes {start} to {end} of {size:,} after the header; restore it"
        )
    return start, end


def widen(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return bfloat16 as float32; everything else as it is."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values


# ---------------------------------------------------------------- writing


def write_latents(
    path: str | Path,
    batches: Iterable[Rows],
    *,
    classes: Sequence[str] = (),
    variables: Sequence[str] | None = None,
    rows: int = 1024,
    store: Literal["safetensors", "zarr"] = "safetensors",
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write batches as they come, `rows` to a shard; all appears at once, when complete.

    Returns the facts that are stored, `more` among them. The mean and standard deviation of each channel are exact, in
    float64.
    """
    target = Path(path)
    moments = Moments()
    with told(target), new_folder(target) as draft:
        measured = _measured(batches, moments)
        shards = (_write_zarr if store == "zarr" else _write_shards)(draft, measured, rows)
        if not moments.count:
            raise UserError(f"{target} would hold no latents; give at least one batch")
        facts = describe(moments, classes=classes, variables=variables) | dict(more or {})
        if store == "zarr":
            import zarr

            zarr.open_group(str(draft), mode="r+").attrs[ATTRIBUTE] = facts = sealed(facts)
        else:
            facts = write_index(draft, facts, shards)
    return facts


def write_index(folder: Path, facts: dict[str, Any], shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Write the index of safetensors shards; return the facts with their seal."""
    facts = sealed(facts | {"shards": shards})
    write_whole(folder / "index.json", json.dumps(facts, indent=1))
    return facts


def describe(moments: "Moments", *, classes: Sequence[str], variables: Sequence[str] | None) -> dict[str, Any]:
    """Return the facts that every store of latents has."""
    mean, std = moments.result()
    return {
        "version": VERSION,
        "shape": list(moments.shape),
        "dtype": moments.dtype,
        "rows": moments.rows,
        "variables": list(variables or [f"latent{number}" for number in range(moments.shape[0])]),
        "mean": mean,
        "std": std,
        "classes": list(classes),
        "labelled": moments.labelled,
    }


class Moments:
    """Mean and standard deviation of each channel, of parts merged in float64."""

    def __init__(self) -> None:
        self.count = self.rows = 0  # voxels of a channel; items
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.labelled = False

    def add(self, latents: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Take in [n, C, *S], and their classes [n]."""
        self._expect(tuple(latents.shape[1:]), str(latents.dtype), labels is not None)
        values = np.moveaxis(latents, 1, 0).reshape(self.shape[0], -1).astype(np.float64)
        count, mean = values.shape[1], values.mean(axis=1)
        if not np.isfinite(mean).all():
            raise UserError(f"row {self.rows} and later ones hold NaN or infinite latents; encode without them")
        self._merge(count, len(latents), mean, np.square(values - mean[:, None]).sum(axis=1))

    def state(self) -> dict[str, Any]:
        """Return all in JSON, from which merge() goes on exactly."""
        if not self.shape:
            return {"rows": 0}
        numbers = {"mean": self._mean.tolist(), "square": self._square.tolist()}
        facts = {"shape": list(self.shape), "dtype": self.dtype, "labelled": self.labelled}
        return {"rows": self.rows, "count": self.count, **facts, **numbers}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what others have measured."""
        if state["rows"]:
            self._expect(tuple(state["shape"]), state["dtype"], state["labelled"])
            self._merge(state["count"], state["rows"], np.array(state["mean"]), np.array(state["square"]))

    def _expect(self, shape: tuple[int, ...], dtype: str, labelled: bool) -> None:
        if not self.shape:
            self.shape, self.dtype, self.labelled = shape, dtype, labelled
            self._mean, self._square = np.zeros(shape[0]), np.zeros(shape[0])
        if shape != self.shape or dtype != self.dtype:
            raise UserError(
                f"latents of {list(shape)} {dtype} after those of {list(self.shape)} {self.dtype}; all must be alike"
            )
        if labelled != self.labelled:
            raise UserError("some latents have classes and others have none; give all of them one, or none")

    def _merge(self, count: int, rows: int, mean: np.ndarray, square: np.ndarray) -> None:
        total = self.count + count
        step = mean - self._mean
        self._mean += step * count / total
        self._square += square + step**2 * self.count * count / total
        self.count, self.rows = total, self.rows + rows

    def result(self) -> tuple[list[float], list[float]]:
        std = np.sqrt(self._square / self.count)
        return self._mean.tolist(), np.where(std > 0, std, 1.0).tolist()


def _measured(batches: Iterable[Rows], moments: Moments) -> Iterator[Rows]:
    for latents, labels in batches:
        if latents.ndim not in (4, 5) or (labels is not None and labels.shape != latents.shape[:1]):
            raise UserError(
                f"a batch of {list(latents.shape)} is none of latents [n, C, *S] with a class a row; mend it"
            )
        if len(latents):
            moments.add(latents, labels)
            yield latents, labels


def _write_shards(folder: Path, batches: Iterator[Rows], rows: int) -> list[dict[str, Any]]:
    shards = []
    for number, (latents, labels) in enumerate(_regroup(batches, rows)):
        name = f"latents-{number:05d}.safetensors"
        write_whole(folder / name, shard_bytes(latents, labels))
        shards.append({"file": name, "rows": len(latents), "crc32": open_shard(str(folder / name)).head})
    return shards


def _write_zarr(folder: Path, batches: Iterator[Rows], rows: int) -> list[dict[str, Any]]:
    """Write a chunk a row, which is what is read, and a file for many of them."""
    import zarr
    from zarr.codecs import ZstdCodec

    first = next(batches, None)
    if first is None:
        return []
    one = first[0].shape[1:]
    rows = max(1, min(rows, FILE // first[0][:1].nbytes))
    # Rows of zeros are written too: to a reader, a chunk that is absent is a row that was lost.
    make = partial(
        zarr.create_group(str(folder)).create_array,
        config={"write_empty_chunks": True},
        compressors=ZstdCodec(level=0, checksum=True),
    )
    arrays = {"latents": make("latents", shape=(0, *one), chunks=(1, *one), shards=(rows, *one), dtype=first[0].dtype)}
    if first[1] is not None:
        arrays["labels"] = make("labels", shape=(0,), chunks=(2**16,), dtype=np.int64)
    for latents, labels in _regroup(itertools.chain([first], batches), rows):
        _append(arrays, latents, labels)  # whole files: one that grows is written anew each time
    return []


def _append(arrays: Mapping[str, Any], latents: np.ndarray, labels: np.ndarray | None) -> None:
    arrays["latents"].append(latents)
    if labels is not None:
        arrays["labels"].append(labels)


def _regroup(batches: Iterable[Rows], rows: int) -> Iterator[Rows]:
    """Yield the rows of batches `rows` at a time; the last time, as many as are left."""
    waiting: list[Rows] = []
    for batch in batches:
        waiting.append(batch)
        while sum(len(latents) for latents, _ in waiting) >= rows:
            latents, labels = joined(waiting)
            yield latents[:rows], None if labels is None else labels[:rows]
            rest = (latents[rows:], None if labels is None else labels[rows:])
            waiting = [rest] if len(rest[0]) else []
    if waiting:
        yield joined(waiting)


def joined(batches: Sequence[Rows]) -> Rows:
    """Return the rows of several batches as one; some have classes only where all have."""
    latents = np.concatenate([some for some, _ in batches])
    labels = None if batches[0][1] is None else np.concatenate([np.asarray(some) for _, some in batches])
    return latents, None if labels is None else labels.astype(np.int64)


def row_sums(latents: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of each row as it is stored."""
    stored = latents.astype(latents.dtype.newbyteorder("<"), copy=False)
    return np.array([zlib.crc32(row.tobytes()) for row in stored], np.uint32)


def shard_bytes(latents: np.ndarray, labels: np.ndarray | None, metadata: dict[str, str] | None = None) -> bytes:
    """Return a safetensors file of rows, their classes, and the CRC-32 of each row."""
    from safetensors.numpy import save

    return save(
        {"latents": latents, "sums": row_sums(latents), **({} if labels is None else {"labels": labels})}, metadata
    )
