"""WebDataset shards: tar files whose members of the same key make a sample; each sample is an item.

- one shard, a folder of them, or a pattern such as `train-{000000..000099}.tar`
- the headers of a shard are read once and kept in the cache folder; members are then read by their offset, in any order
- image: jpg, png, tif, webp or npy; class: `cls` (a number or a name) or a key of `json`; labels of pixels: `seg.png`
"""

import contextlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from vitrail.data.files.cache import keep
from vitrail.data.files.handles import decoding
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
from vitrail.data.sources.encoded import THREADS, ImagesConfig, ImageSource, open_images
from vitrail.errors import BadData, UserError
from vitrail.foreign import open_plain, parse_json
from vitrail.recipe import config

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
