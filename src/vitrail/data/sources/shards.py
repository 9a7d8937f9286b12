"""Parquet files of encoded images, as the Hugging Face hub stores them; each row is an item.

- one file, a folder of shards (`train-00000-of-00005.parquet`), or a repository with such a folder `data`
- images are a column of bytes, or of {bytes, path}; classes a column of numbers or names, whose names the metadata tell
- a row group is read at once and kept while there is room: small ones (100 rows) suit random access

WebDataset shards: tar files whose members of the same key make a sample; each sample is an item.

- one shard, a folder of them, or a pattern such as `train-{000000..000099}.tar`
- the headers of a shard are read once and kept in the cache folder; members are then read by their offset, in any order
- image: jpg, png, tif, webp or npy; class: `cls` (a number or a name) or a key of `json`; labels of pixels: `seg.png`
"""

import contextlib
import io
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from vitrail.data.files.cache import keep
from vitrail.data.files.handles import Whole, decoding, library
from vitrail.data.files.paths import (
    base_name,
    file_state,
    file_type,
    join,
    list_files,
    local_copy,
    parent,
    read_exactly,
)
from vitrail.data.source import LazySequence
from vitrail.data.sources.image_folder import THREADS, ImagesConfig, ImageSource, open_images
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_room, open_plain, parse_json, room
from vitrail.recipe import config

CACHE_BYTES = 256 * 2**20  # of row groups as stored
# Any number of rows can be one image, named again and again: so many at a time, and so much more than is told in all.
AT_ONCE, AT_ONCE_BYTES, MORE, FEW_BYTES = 16, 256 * 2**20, 8, 64 * 2**20
MOST_ROWS = 2**31
BYTES_A_CLASS = 32  # of a row, while the classes are read
CLASS_COLUMNS = ("label", "labels", "class", "cls", "fine_label", "category")


@config
class ParquetConfig(ImagesConfig):
    """Rows of parquet files."""

    kind: Literal["parquet"] = "parquet"
    part: str | None = None  # of a folder with several: train, test, ...; None: train, or the only one
    image: str | None = None  # column of the images; None: the only one of bytes, or the one named image
    label: str | None = None  # column of the classes; None: one named label, labels, class, ..., if there is one
    labels: str | None = None  # column of images of labels, for segmentation

    def open(self) -> ImageSource:
        """Read the metadata of all files, the classes of all rows, and the first image."""
        shards = [_Shard.open(place) for place in self._list_shards()]
        table = _Rows(shards)
        columns = table.columns
        image = self._pick_image(columns)
        labels, names = self._read_classes(table, columns)
        masks = self.labels
        if masks is not None:
            self._check_column(masks, columns, "labels")
        return open_images(
            self,
            table,
            lambda row: table.file(row, image),
            labels=labels,
            class_names=names,
            state="\n".join([image, *(shard.state for shard in shards)]),
            title=lambda name: join(parent(shards[0].name), name),
            files=lambda: [shard.name for shard in shards],
            open_labels=None if masks is None else lambda row: table.file(row, masks),
            labels_name=masks,
        )

    def _list_shards(self) -> list[str]:
        """List the files of one part, all there."""
        if file_type(self.path) != "folder":
            return [self.path]
        folder = self.path
        files = [name for name in list_files(folder) if name.endswith(".parquet")]
        if not files:
            folder = join(folder, "data")
            files = [n for n in list_files(folder) if n.endswith(".parquet")] if file_type(folder) == "folder" else []
        if not files:
            raise UserError(f"{self.path} holds no parquet files, nor does a folder `data` in it; give one that does")
        parts: dict[str, list[str]] = {}
        for name in files:
            parts.setdefault(re.sub(r"(-\d+-of-\d+.*|-?\d*)\.parquet$", "", name) or "all", []).append(name)
        chosen = self.part or ("train" if "train" in parts else next(iter(parts)) if len(parts) == 1 else None)
        if chosen not in parts:
            problem = f"part = {self.part!r} is not in {folder}" if self.part else f"{folder} has several parts"
            raise UserError(f"{problem}; choose with `part` from {', '.join(parts)}")
        for name in parts[chosen]:
            count = re.search(r"-of-(\d+)", name)
            if count and int(count.group(1)) != len(parts[chosen]):
                raise UserError(
                    f"{folder} holds {len(parts[chosen])} of the {int(count.group(1))} files {chosen}-*.parquet; "
                    "fetch the others"
                )
        return [join(folder, name) for name in parts[chosen]]

    def _pick_image(self, columns: dict[str, Any]) -> str:
        if self.image is not None:
            self._check_column(self.image, columns, "image")
            return self.image
        fitting = [name for name, kind in columns.items() if _holds_bytes(kind) and name != self.labels]
        preferred = [name for name in ("image", "img", "jpg", "png", "pixels") if name in fitting]
        if len(fitting) == 1 or preferred:
            return (preferred or fitting)[0]
        found = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
        what = "several columns" if fitting else "no column"
        raise UserError(f"{self.path} has {what} of encoded images; name one with `image`, of {found}")

    def _check_column(self, name: str, columns: dict[str, Any], key: str) -> None:
        if name not in columns:
            raise UserError(f"{key} = {name!r} is no column of {self.path}; choose from {', '.join(columns)}")
        if key != "label" and not _holds_bytes(columns[name]):
            raise UserError(f"{key} = {name!r} of {self.path} holds {columns[name]}, not the bytes of images")

    def _read_classes(self, table: "_Rows", columns: dict[str, Any]) -> tuple[np.ndarray | None, list[str]]:
        """Read the class of every row (-1 where it has none), and the names."""
        column = self.label or next((name for name in CLASS_COLUMNS if name in columns), None)
        if column is None:
            return None, []
        self._check_column(column, columns, "label")
        arrow = library("pyarrow", "parquet")
        kind = _plain(columns[column])
        if not (arrow.types.is_integer(kind) or arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            if self.label is None:  # a column that only happens to be called so
                return None, []
            raise UserError(f"label = {column!r} of {self.path} holds {kind}; classes are whole numbers or names")
        check_room(f"column {column!r} of {self.path}, of {len(table):,} rows,", BYTES_A_CLASS * len(table))
        if not arrow.types.is_integer(kind):
            return table.read_words(column)
        values = table.read_numbers(column)
        names = table.class_names(column)
        highest = int(values.max(initial=-1))
        if names and highest >= len(names):
            raise BadData(
                f"{self.path}: class {highest} in column {column!r}, but it names {len(names)}; mend the file"
            )
        if highest >= 100_000:
            raise UserError(
                f"label = {column!r} of {self.path} counts up to {highest}: no number of a class; name another"
            )
        return values, names or [str(number) for number in range(highest + 1)]


def _numbers(values: Any) -> np.ndarray:
    """Return whole numbers of Arrow as an array; -1 where one is missing."""
    found: np.ndarray = values.cast(library("pyarrow", "parquet").int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return found


def _plain(kind: Any) -> Any:
    """Return the type of the values of a column, also where a dictionary keeps them, as pandas does."""
    return kind.value_type if library("pyarrow", "parquet").types.is_dictionary(kind) else kind


def _holds_bytes(kind: Any) -> bool:
    arrow = library("pyarrow", "parquet")
    if arrow.types.is_struct(kind):
        index = kind.get_field_index("bytes")
        if index < 0:  # none, or several
            return False
        kind = kind.field(index).type
    return arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)


@dataclass(frozen=True)
class _Shard:
    """One file: its metadata, and the first row of each row group."""

    name: str
    place: str
    metadata: Any
    schema: Any
    starts: np.ndarray  # of row groups, and the end
    state: str

    @classmethod
    def open(cls, path: str) -> "_Shard":
        place = local_copy(path)
        with decoding(path):
            if not place.stat().st_size:
                raise BadData(f"{path} is an empty file, of 0 bytes; restore or remove it")
            file = library("pyarrow.parquet", "parquet").ParquetFile(place)
            metadata, schema = file.metadata, file.schema_arrow
            file.close()
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            rows = [group.num_rows for group in groups]
            if min(rows, default=0) < 0 or sum(rows) > MOST_ROWS:
                raise BadData(f"{path} says that it has {sum(rows):,} rows; restore the file")
            for group in groups:
                for number in range(group.num_columns):
                    if other := group.column(number).file_path:
                        raise BadData(f"{path} keeps a column in the file {other!r}; write all into one file")
        return cls(path, str(place), metadata, schema, np.cumsum([0, *rows]), file_state(place))

    def read(self, group: int, column: str) -> Any:
        """Read a column of a row group."""
        told = self._told(group, column)
        most = min(max(FEW_BYTES, MORE * told), room())
        pieces, size = [], 0
        # Each of them may be the one large value that is told of.
        for piece in self.batches(group, column, max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, told)))):
            pieces.append(piece)
            size += piece.nbytes
            if size > most:
                raise BadData(
                    f"{self.name}: row group {group} says that it has {told:,} bytes, but becomes more than {most:,}; "
                    "restore the file, or write it without dictionaries"
                )
        with decoding(f"{self.name}, row group {group}, column {column!r}"):
            found = library("pyarrow", "parquet").chunked_array(pieces, type=self.schema.field(column).type)
            if found.type.num_fields:  # {bytes, path}
                found = library("pyarrow.compute", "parquet").struct_field(found, "bytes")
            return found

    def rows(self, group: int) -> int:
        return int(self.starts[group + 1] - self.starts[group])

    def batches(self, group: int, column: str, at_once: int, *, words: bool = False) -> Iterator[Any]:
        """Read parts of a column of a row group, `words` as numbers of a dictionary, where each of them is there once.

        Each read has a file of its own, as they come from several threads.
        """
        with decoding(f"{self.name}, row group {group}, column {column!r}"):
            check_room(f"{self.name}, row group {group}", self._told(group, column))
            parquet = library("pyarrow.parquet", "parquet")
            file = parquet.ParquetFile(self.place, metadata=self.metadata, read_dictionary=[column] if words else None)
            count = 0
            try:
                for batch in file.iter_batches(at_once, row_groups=[group], columns=[column], use_threads=False):
                    count += batch.num_rows
                    yield batch.column(0)
            finally:
                file.close()
            if count != self.rows(group):
                raise BadData(
                    f"{self.name}: row group {group} has {count} rows instead of {self.rows(group)}; restore the file"
                )

    def _told(self, group: int, column: str) -> int:
        """Return the bytes that a column of a row group says it has, before they were packed."""
        described = self.metadata.row_group(group)
        parts = [described.column(number) for number in range(described.num_columns)]
        return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.partition(".")[0] == column)


class _Rows(LazySequence):
    """The rows of all files: their names, and what they hold."""

    def __init__(self, shards: list[_Shard]) -> None:
        self.shards = shards
        self._firsts = np.cumsum([0, *(int(shard.starts[-1]) for shard in shards)]).tolist()
        self._groups = Whole(CACHE_BYTES)
        super().__init__(self._firsts[-1], self._name)
        for shard in shards[1:]:
            if not shard.schema.equals(shards[0].schema, check_metadata=False):
                raise UserError(f"{shard.name} has other columns than {shards[0].name}; give them entries of their own")
        if not len(self):
            raise UserError(f"{shards[0].name} has no rows; give files with images")

    @property
    def columns(self) -> dict[str, Any]:
        return {field.name: field.type for field in self.shards[0].schema}

    def _name(self, number: int) -> str:
        shard, row = self._place(number)
        return f"{base_name(self.shards[shard].name)}:{row}"

    def file(self, row: int, column: str) -> BinaryIO:
        """Return the encoded image of a row."""
        number, inside = self._place(row)
        shard = self.shards[number]
        group = bisect_right(shard.starts.tolist(), inside) - 1
        values: Any = self._groups((number, group, column), lambda: shard.read(group, column))
        found = values[inside - int(shard.starts[group])].as_py()
        if found is None:
            raise BadData(f"{shard.name}, row {inside}: column {column!r} holds no bytes; embed the images or drop it")
        return io.BytesIO(found)

    def read_numbers(self, column: str) -> np.ndarray:
        """Read a column of all rows; -1 where a number is missing."""
        return self._convert(column, lambda piece: _numbers(piece.cast(_plain(piece.type))))

    def read_words(self, column: str) -> tuple[np.ndarray, list[str]]:
        """Read a column of all rows as numbers (-1 where a word is missing) of the words, which are sorted."""
        known: dict[str, int] = {}

        def number(piece: Any) -> np.ndarray:
            piece = piece if hasattr(piece, "dictionary") else piece.dictionary_encode()
            own = _numbers(piece.indices)
            # One place more, for -1, which is the last; words that no row has are none.
            numbers = np.full(len(piece.dictionary) + 1, -1)
            for place in np.unique(own[own >= 0]).tolist():
                word = piece.dictionary[place].as_py()
                numbers[place] = -1 if word is None else known.setdefault(word, len(known))
            return numbers[own]

        found = self._convert(column, number, words=True)
        names = sorted(known)
        order = np.empty(len(names) + 1, np.int64)
        order[[known[name] for name in names]], order[-1] = np.arange(len(names)), -1
        return order[found], names

    def _convert(self, column: str, convert: Callable[[Any], np.ndarray], *, words: bool = False) -> np.ndarray:
        """Convert a column of all rows, part by part."""
        parts = []
        for shard in self.shards:
            for group in range(len(shard.starts) - 1):
                rows = shard.rows(group)
                # Some writers leave empty groups.
                for piece in shard.batches(group, column, rows, words=words) if rows else ():
                    with decoding(f"{shard.name}, column {column!r}"):
                        parts.append(convert(piece))
        return np.concatenate(parts)

    def class_names(self, column: str) -> list[str]:
        """Read the names of classes as the hub's metadata tell them."""
        text = (self.shards[0].schema.metadata or {}).get(b"huggingface", b"{}")
        try:
            features = parse_json(text)["info"]["features"]
            names = features[column]["names"] if isinstance(features, dict) else []
        except (KeyError, TypeError, ValueError):
            return []
        # A text would be taken for its letters, and a mapping for its keys.
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []

    def _place(self, row: int) -> tuple[int, int]:
        shard = bisect_right(self._firsts, row) - 1
        return shard, row - self._firsts[shard]


MOST_CLASSES = 100_000
IMAGES = ("jpg", "jpeg", "png", "tif", "tiff", "webp", "npy", "image.jpg", "image.png", "image.tif", "image.npy")
BLOCK = 512  # bytes, of tar
MOST_HEADER = 2**20  # bytes of a member's header, long names and all
MOST_SHARDS = 100_000
FEW_PLACES, EMPTY = 2**20, 8  # of members in tables, and how many times those that are there


class Samples:
    """The samples of all shards: where their members lie, as tables that are small for millions of them."""

    def __init__(self, shards: Sequence[tuple[str, list[list[Any]]]]) -> None:
        self.places = [place for place, _ in shards]
        rows = [(number, *row) for number, (_, found) in enumerate(shards) for row in found]
        self.shards = np.array([number for number, *_ in rows], np.int32)
        self.names = [key for _, key, _, _ in rows]
        self.classes: list[str | None] = [text for *_, text in rows]  # what the member cls holds, if there is one
        self._check_suffixes([members for _, _, members, _ in rows])
        self._members: dict[str, np.ndarray] = {}  # suffix -> offset and size [N, 2], -1 where there is none
        for number, (_, _, members, _) in enumerate(rows):
            for suffix, member in members.items():
                if suffix not in self._members:
                    self._members[suffix] = np.full((len(rows), 2), -1, np.int64)
                self._members[suffix][number] = member

    def _check_suffixes(self, samples: Sequence[dict[str, Any]]) -> None:
        """Refuse suffixes that few samples have: the tables would be far larger than the shards' headers."""
        suffixes = {suffix for members in samples for suffix in members}
        if len(suffixes) * len(samples) > max(FEW_PLACES, EMPTY * sum(map(len, samples))):
            some = ", ".join(sorted(suffixes)[:3])
            raise BadData(
                f"{self.places[0]}: the {len(samples):,} samples have members with {len(suffixes):,} suffixes ({some}, "
                "...), most of them in few samples; name what is alike in all samples KEY.SUFFIX, without other dots"
            )

    def __len__(self) -> int:
        return len(self.names)

    def has(self, number: int, suffix: str) -> bool:
        return suffix in self._members and bool(self._members[suffix][number, 0] >= 0)

    def suffixes(self, number: int) -> str:
        return ", ".join(suffix for suffix in self._members if self.has(number, suffix))

    def read(self, number: int, suffix: str) -> BinaryIO:
        """Read a member's bytes."""
        place, name = self.places[self.shards[number]], self.names[number]
        if not self.has(number, suffix):
            raise BadData(f"{place}: sample {name} has no member {suffix!r}, only {self.suffixes(number)}; mend it")
        offset, size = self._members[suffix][number].tolist()
        return io.BytesIO(read_exactly(place, offset, size, f"sample {name}, {suffix},"))

    def read_class(self, number: int, label: str) -> str | None:
        """Read a class as text: of a member, or of a key in a member of JSON."""
        suffix, _, key = label.partition(":")
        if not self.has(number, suffix):
            return None
        text = self.read(number, suffix).read().decode("utf-8", "replace").strip()
        if not key:
            return text
        try:
            return str(parse_json(text)[key])
        except (ValueError, KeyError, TypeError) as error:
            place, name = self.places[self.shards[number]], self.names[number]
            raise BadData(f"{place}: sample {name} has no {key!r} in its {suffix} ({error}); mend it") from error


@config
class WebdatasetConfig(ImagesConfig):
    """Samples of tar files."""

    kind: Literal["webdataset"] = "webdataset"
    image: str | None = None  # suffix of the images; None: jpg, png, tif, webp or npy, whichever a sample has
    label: str | None = None  # suffix of the classes, or `json:KEY`; None: cls where there is one
    labels: str | None = None  # suffix of images of labels; None: seg.png where there is one
    classes: list[str] | None = None  # names of the classes by their numbers

    def open(self) -> ImageSource:
        """Read the headers of all shards, or what is kept of them, and look at the first image."""
        places = [(path, local_copy(path)) for path in self._list_shards()]
        with ThreadPoolExecutor(THREADS) as pool:
            indices = list(pool.map(lambda found: read_index(*found), places))
        samples = Samples([(str(place), index) for (_, place), index in zip(places, indices, strict=True)])
        if not len(samples):
            raise UserError(f"{self.path} holds no samples; give tar files of images")
        labels = self.labels or ("seg.png" if samples.has(0, "seg.png") else None)
        suffixes = [self._pick_image(samples, number, labels) for number in range(len(samples))]
        classes, names = self._read_classes(samples)
        return open_images(
            self,
            samples.names,
            lambda number: samples.read(number, suffixes[number]),
            labels=classes,
            class_names=names,
            state="\n".join(file_state(place) for _, place in places),
            files=lambda: [path for path, _ in places],
            open_labels=None if labels is None else lambda number: samples.read(number, labels),
            labels_name=labels,
        )

    def _list_shards(self) -> list[str]:
        if "{" in base_name(self.path):
            return [join(parent(self.path), name) for name in expand(base_name(self.path))]
        if file_type(self.path) != "folder":
            return [self.path]
        found = [join(self.path, name) for name in list_files(self.path) if name.endswith(".tar")]
        if not found:
            raise UserError(f"{self.path} holds no tar files; give a shard, a folder of shards or a pattern of them")
        return found

    def _pick_image(self, samples: Samples, number: int, labels: str | None) -> str:
        wanted = (self.image,) if self.image else IMAGES
        found = next((suffix for suffix in wanted if suffix != labels and samples.has(number, suffix)), None)
        if found is None:
            what = f"member {self.image!r}" if self.image else f"image ({', '.join(IMAGES[:7])})"
            raise BadData(
                f"{self.path}: sample {samples.names[number]} has no {what}, only {samples.suffixes(number)}; "
                "mend the shard, or `image`"
            )
        return found

    def _read_classes(self, samples: Samples) -> tuple[list[int] | None, list[str]]:
        """Read the class of every sample, and the names."""
        label = self.label or ("cls" if samples.classes[0] is not None else None)
        if label is None:
            return None, []
        values = samples.classes
        if label != "cls":
            with ThreadPoolExecutor(THREADS) as pool:
                values = list(pool.map(lambda number: samples.read_class(number, label), range(len(samples))))
        if None in values:
            name = samples.names[values.index(None)]
            raise BadData(f"{self.path}: sample {name} has no class ({label}); mend the shard, or `label`")
        texts = [str(value) for value in values]
        if all(text.isdecimal() for text in texts):
            numbers = [int(text.lstrip("0")[:19] or 0) for text in texts]  # more digits are too many for any class
            names = self.classes or [str(number) for number in range(min(max(numbers) + 1, MOST_CLASSES))]
            if max(numbers) >= len(names):
                worst = samples.names[numbers.index(max(numbers))]
                raise UserError(f"{self.path}: sample {worst} has the class {max(numbers)}; mend it, or `classes`")
            return numbers, names
        names = self.classes or sorted(set(texts))
        places = {name: number for number, name in enumerate(names)}
        for name, text in zip(samples.names, texts, strict=True):
            if text not in places:
                raise UserError(f"{self.path}: sample {name} has the class {text!r}, not among `classes`; mend it")
        return [places[text] for text in texts], names


def expand(pattern: str) -> list[str]:
    """List the names of a pattern with one {first..last} or {a,b,...}."""
    found = re.fullmatch(r"([^{}]*)\{(?:(\d+)\.\.(\d+)|([^{}]+))\}([^{}]*)", pattern)
    if found is None:
        raise UserError(f"data path {pattern!r} must have one {{first..last}}, such as train-{{000000..000099}}.tar")
    before, first, last, names, after = found.groups()
    if names is not None:
        return [before + name + after for name in names.split(",")]
    numbers = range(int(first[:19]), int(last[:19]) + 1)
    if len(first) > 18 or len(last) > 18 or len(numbers) > MOST_SHARDS:
        raise UserError(f"data path {pattern!r} stands for more than {MOST_SHARDS:,} shards; name fewer")
    return [f"{before}{number:0{len(first)}d}{after}" for number in numbers]


def read_index(path: str, place: Path) -> list[list[Any]]:
    """Read [key, {suffix: [offset, size]}, cls] of the samples of a shard once, and keep them."""
    return keep("tars", file_state(place), lambda: json.dumps(_scan(path, place)).encode(), json.loads)


def _scan(path: str, place: Path) -> list[list[Any]]:
    """Read [key, {suffix: [offset, size]}, cls] of every sample, in the shard's order."""
    rows: dict[str, list[Any]] = {}
    with decoding(path), open_plain(place) as file:
        size = place.stat().st_size
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path} is compressed as a whole, so no member can be read alone; decompress it")
        file.seek(0)
        headers: Any = _Headers(file, path)
        with _tar(path), tarfile.open(fileobj=headers, mode="r:") as tar:
            last = -1
            for member in tar:
                if not last < member.offset_data <= member.offset_data + member.size <= size:
                    raise BadData(
                        f"{path} is cut short or damaged: {member.name} at byte {member.offset_data:,} says that it "
                        f"has {member.size:,} bytes, of {size:,}; restore the file"
                    )
                last = member.offset_data
                key, suffix = _split(member.name)
                if not member.isreg() or member.sparse or not suffix or base_name(key).startswith((".", "__")):
                    continue
                row = rows.setdefault(key, [key, {}, None])
                if suffix in row[1]:
                    raise BadData(f"{path} holds {member.name} twice; write each key once")
                row[1][suffix] = [member.offset_data, member.size]
                if suffix == "cls":
                    file.seek(member.offset_data)
                    row[2] = file.read(min(member.size, 256)).decode("utf-8", "replace").strip()
                tar.members = []  # type: ignore[attr-defined]  # not to keep them all
            end = tar.offset
        file.seek(end)
        if file.read(BLOCK) != bytes(BLOCK):  # tarfile takes a damaged header for the end
            raise BadData(
                f"{path} is cut short or damaged at byte {end}: the mark of its end is missing; restore the file"
            )
    return list(rows.values())


class _Headers:
    """A tar file of which headers alone are read: these are small, whatever they say of themselves."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self.tell = file.tell

    def seek(self, place: int, whence: int = 0) -> int:
        if place < 0:
            raise BadData(f"{self._path} is damaged: a header names the byte {place}; restore the file")
        return self._file.seek(place, whence)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_HEADER:
            raise BadData(f"{self._path} is damaged: a header says that it has {size:,} bytes; restore the file")
        return self._file.read(size)


@contextlib.contextmanager
def _tar(path: str) -> Iterator[None]:
    try:
        yield
    except tarfile.TarError as error:
        raise BadData(f"{path} is cut short, or no tar file ({error}); restore the file") from error


def _split(name: str) -> tuple[str, str]:
    """Split a name into key and suffix: what comes before and after the first dot of the file's own name."""
    folder, slash, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return folder + slash + stem, suffix.lower()
