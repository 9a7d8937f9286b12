"""CIFAR-10 in its binary version: data_batch_1.bin to data_batch_5.bin, test_batch.bin and batches.meta.txt.

A record is one byte of class and 3 x 32 x 32 bytes of red, green and blue. The version for Python is a pickle, and
opening a pickle can run code: it is refused.

Latents as a source: items that `vitrail data encode` stored, with their own statistics and classes.

Data that are made, without files.

`dummy`: random values made once and given again for every item, so that reading costs nothing, for benchmarks. Classes
go round: item % classes.

`synthetic`: objects in noise, of any size: images or volumes with classes and labels of voxels.

- an item holds objects of one kind (ball, box, diamond or shell), which is its class; `mixed` puts all kinds into each
- every voxel is a pure function of (seed, item, place): windows of a huge volume cost no more than their own voxels
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from vitrail.data.files.handles import decoding
from vitrail.data.files.paths import (
    base_name,
    file_type,
    join,
    list_files,
    list_folders,
    local_copy,
    parent,
    read_bytes,
)
from vitrail.data.latents.store import TYPES, open_rows
from vitrail.data.source import Item, ItemsConfig, ItemSource, LazySequence, choose_channels, whole_item
from vitrail.data.stored import normalize_window
from vitrail.draws import key, stream
from vitrail.errors import BadData, UserError
from vitrail.recipe import config
from vitrail.recipe.durations import Rule

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes
FILES = {"train": r"data_batch_\d+\.bin", "test": r"test_batch\.bin", "all": r"(data_batch_\d+|test_batch)\.bin"}


@config
class Cifar10Config(ItemsConfig):
    """The folder of the binary version, or one of its files."""

    kind: Literal["cifar10"] = "cifar10"
    part: Literal["train", "test", "all"] = "train"  # of a folder

    def open(self) -> "Cifar10Source":
        """Check the sizes of the files and read the classes."""
        return Cifar10Source(self)


class Cifar10Source(ItemSource):
    """Images of 32 x 32 pixels in ten classes."""

    axes = ("y", "x")
    dtype = np.dtype("uint8")

    def __init__(self, settings: Cifar10Config) -> None:
        files = self._list_files(settings)
        self.records = [self._map(path) for path in files]
        self.alike = whole_item("", SHAPE[1:], None)
        self.shape, self._files = SHAPE[1:], [base_name(path) for path in files]
        self._firsts = np.cumsum([0, *(len(records) for records in self.records)])
        self.class_names = self._read_names(parent(files[0]))
        self.variables, self._channels = choose_channels(settings.variables, ("red", "green", "blue"), settings.path)
        self._classes = np.concatenate([records[:, 0] for records in self.records])
        wrong = np.flatnonzero(self._classes >= len(self.class_names))
        if len(wrong):
            raise BadData(
                f"{settings.path}: {self._name(int(wrong[0]))} has the class {self._classes[wrong[0]]}, but there are "
                f"{len(self.class_names)}; fetch the binary version of CIFAR-10 again"
            )
        super().__init__(settings, LazySequence(len(self._classes), self._name), self._classes)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, y, x]."""
        (top, bottom), (left, right) = normalize_window(SHAPE[1:], region)
        file, row = self._place(self.kept[item])
        pixels = self.records[file][row, 1:].reshape(SHAPE)
        return np.ascontiguousarray(pixels[self._channels, top:bottom, left:right])

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """Read whole images [B, C, y, x]."""
        numbers = self.kept[items]
        files = np.searchsorted(self._firsts, numbers, side="right") - 1
        records = np.empty((len(items), RECORD), np.uint8)
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            records[here] = np.take(np.asarray(self.records[file]), numbers[here] - self._firsts[file], axis=0)
        pixels = records[:, 1:].reshape(-1, *SHAPE)
        return pixels if self._channels == [0, 1, 2] else pixels[:, self._channels]

    def labels_of(self, items: np.ndarray) -> np.ndarray:
        """Return the classes of images [B]."""
        return self._classes[self.kept[items]]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"files": self._files}

    def _place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return file, int(number - self._firsts[file])

    def _name(self, number: int) -> str:
        file, row = self._place(number)
        return f"{self._files[file]}:{row}"

    def _list_files(self, settings: Cifar10Config) -> list[str]:
        path = settings.path
        if file_type(path) == "file":
            if not path.endswith(".bin"):
                raise UserError(self._refuse(path))
            return [path]
        if file_type(path) is None:
            raise UserError(f"data path {path!r} does not exist; check the spelling")
        for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"):
            if folder in list_folders(path):
                path = join(path, folder)
                break
        names = list_files(path)
        found = [name for name in names if re.fullmatch(FILES[settings.part], name)]
        if not found and any(re.fullmatch(r"(data_batch_\d+|test_batch|batches\.meta)", name) for name in names):
            raise UserError(self._refuse(path))
        if not found:
            raise UserError(f"{path} holds no {settings.part} files of CIFAR-10 (data_batch_1.bin, ...); fetch them")
        numbers = [int(n) for name in found for n in re.findall(r"\d+", name)]
        missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
        if missing:
            raise UserError(f"{path} lacks data_batch_{missing[0]}.bin; fetch it")
        return [join(path, name) for name in found]

    def _refuse(self, path: str) -> str:
        return (
            f"{path} holds the version of CIFAR-10 for Python, a pickle, which can run code when it is opened and is "
            "never read here; fetch the binary version (cifar-10-binary.tar.gz) or parquet files"
        )

    def _map(self, path: str) -> np.ndarray:
        with decoding(path):
            place = local_copy(path)
            size = place.stat().st_size
            if not size or size % RECORD:
                raise BadData(
                    f"{path} has {size:,} bytes, which are not whole records of {RECORD:,}: it is cut short or no file "
                    "of CIFAR-10; fetch it again"
                )
            return np.memmap(place, np.uint8, "r").reshape(-1, RECORD)

    def _read_names(self, folder: str) -> tuple[str, ...]:
        if file_type(join(folder, "batches.meta.txt")) != "file":
            return CLASSES
        lines = read_bytes(join(folder, "batches.meta.txt")).decode("utf-8", "replace").split()
        return tuple(lines) or CLASSES


def _fraction(value: Any) -> float:
    """Return a number, also one that is written as "16/255"."""
    over, stroke, under = value.partition("/") if isinstance(value, str) else (value, "", "")
    try:
        number = 0.0 if isinstance(value, bool) else float(over) / (float(under) if stroke else 1)
    except (TypeError, ZeroDivisionError):
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise ValueError
    return number


FRACTION = 'a number above 0, or two with a stroke, such as "16/255"'
Fraction = Annotated[float, Rule(_fraction, FRACTION, lambda: {"anyOf": [{"type": "number"}, {"type": "string"}]})]


@config
class LatentsConfig(ItemsConfig):
    """A folder of safetensors shards with index.json, one such shard, or a Zarr group of latents."""

    kind: Literal["latents"] = "latents"
    scale: Fraction | None = None  # latents are the stored numbers times this, such as 16/255 of TorchDiTan's bytes
    shift: float = 0.0  # and plus this

    def open(self) -> "LatentsSource":
        """Read the index, the headers of the shards and the classes."""
        return LatentsSource(self)


class LatentsSource(ItemSource):
    """Encoded items, all of the same shape."""

    def __init__(self, settings: LatentsConfig) -> None:
        facts, self.shards = open_rows(settings.path)
        codec, data = facts.get("codec"), facts.get("data")
        self.encoded = {"codec": codec | {"data": data}} if isinstance(codec, dict) else {}  # what they are latents of
        first = self.shards[0]
        whole = np.dtype(TYPES.get(first.dtype, first.dtype)).kind in "iu" and first.dtype != "BF16"
        self.scale, self.shift = settings.scale, settings.shift
        if self.scale is None and whole:
            raise UserError(
                f"{settings.path} holds latents as whole numbers ({first.dtype}), and does not tell of how much: give "
                "`scale`, such as 16/255 for bytes of TorchDiTan, or 1 where they are meant so"
            )
        if self.scale is None and self.shift:
            self.scale = 1.0
        self.shape, count = first.shape[2:], first.shape[1]
        self.axes = ("z", "y", "x")[-len(self.shape) :]
        plain = self.scale is None and first.dtype != "BF16"
        self.dtype = np.dtype(TYPES.get(first.dtype, first.dtype) if plain else "float32")
        known = facts.get("variables") or [f"latent{number}" for number in range(count)]
        self.variables, self._channels = choose_channels(settings.variables, known, settings.path)
        mean, std = facts.get("mean"), facts.get("std")
        # Of all rows, for those who need no fitting any more.
        self.statistics = None
        if mean and std:
            by = self.scale or 1.0
            means, stds = ([float(of[c]) * by for c in self._channels] for of in (mean, std))
            self.statistics = {"mean": [each + self.shift for each in means], "std": stds}
        self._firsts = np.cumsum([0, *(shard.shape[0] for shard in self.shards)])
        labels, self.class_names = self._read_classes(settings.path, facts.get("classes") or ())
        super().__init__(settings, LazySequence(int(self._firsts[-1]), str), labels)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, *spatial]."""
        window = tuple(slice(*bounds) for bounds in normalize_window(self.shape, region))
        number = int(self.kept[item])
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        row = self.shards[shard].row(number - int(self._firsts[shard]))
        values = np.ascontiguousarray(row[self._channels][(slice(None), *window)], self.dtype)
        return values if self.scale is None else values * np.float32(self.scale) + np.float32(self.shift)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"stored_statistics": self.statistics, **self.encoded}

    def _read_classes(self, path: str, names: Sequence[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
        if any(shard.labels is None for shard in self.shards):
            return None, ()
        labels = np.concatenate([shard.labels.astype(np.int64) for shard in self.shards if shard.labels is not None])
        highest = int(labels.max(initial=-1))
        if names and highest >= len(names):
            raise BadData(f"{path}: class {highest} among the labels, but {len(names)} are named; mend it")
        return labels, tuple(names) or tuple(str(number) for number in range(highest + 1))


MOST_BYTES = 4 * 2**30


@config
class DummyConfig(ItemsConfig):
    """Benchmarks without data."""

    path: str = "dummy"  # just a name
    kind: Literal["dummy"] = "dummy"
    shape: tuple[int, ...] = (64, 64)  # of every item, its axes of space
    channels: int = 3
    dtype: Literal["uint8", "uint16", "float16", "float32"] = "float32"
    items: int = 10_000
    classes: int = 10  # of items and of voxels
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_made(self, "classes")
        size = math.prod(self.shape) * self.channels * np.dtype(self.dtype).itemsize
        if size > MOST_BYTES:
            raise UserError(
                f"shape = {list(self.shape)} of dummy data takes {size:,} bytes of memory; choose a smaller one"
            )

    def open(self) -> "DummySource":
        """Draw the values."""
        return DummySource(self)


def _check_made(c: Any, last: str) -> None:
    number = getattr(c, last)
    if not 2 <= len(c.shape) <= 3 or min((*c.shape, c.channels, c.items, number)) < 1:
        raise UserError(
            f"shape = {list(c.shape)}, channels = {c.channels}, items = {c.items} and {last} = {number} of {c.kind} "
            "data must be positive, with 2 or 3 axes; mend them"
        )


class MadeSource(ItemSource):
    """Items that are made, and no files."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings, LazySequence(settings.items, str))
        self.shape = tuple(settings.shape)
        self.axes = ("z", "y", "x")[-len(self.shape) :]
        names = [f"channel{number}" for number in range(settings.channels)]
        self.variables, self._channels = choose_channels(settings.variables, names, settings.path)

    def files(self) -> tuple[str, ...]:
        """Return nothing, whatever lies at a path of its name."""
        return ()


class DummySource(MadeSource):
    """The same values for every item."""

    def __init__(self, settings: DummyConfig) -> None:
        super().__init__(settings)
        self.dtype = np.dtype(settings.dtype)
        random = stream(settings.seed, "dummy")
        size = (len(self._channels), *self.shape)
        if self.dtype.kind == "f":
            self._values = random.standard_normal(size, np.float32).astype(self.dtype)
        else:
            self._values = random.integers(0, np.iinfo(self.dtype).max, size, self.dtype, endpoint=True)
        self.class_names = tuple(str(number) for number in range(settings.classes))
        self.label_dtype: np.dtype | None = np.dtype("uint8" if settings.classes <= 256 else "int32")
        self.label_names = dict(enumerate(self.class_names))
        self._voxels: np.ndarray | None = None  # labels, made when they are first asked for
        self.alike = whole_item("", self.shape, None)

    def label(self, item: int) -> int:
        return int(self.kept[item]) % self.config.classes

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Return a window, [C, *spatial], without a copy."""
        bounds = normalize_window(self.shape, region)
        return self._values[(slice(None), *(slice(*b) for b in bounds))]

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """Return the values once for each item, [B, C, *spatial], without a copy."""
        return np.broadcast_to(self._values, (len(items), *self._values.shape))

    def labels_of(self, items: np.ndarray) -> np.ndarray:
        """Return the classes of items [B]."""
        return self.kept[items] % self.config.classes

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Return the labels of a window, [*spatial]."""
        bounds = normalize_window(self.shape, region)
        if self._voxels is None:
            random = stream(self.config.seed, "dummy labels")
            self._voxels = random.integers(0, self.config.classes, self.shape).astype(self.label_dtype)
        return self._voxels[tuple(slice(*b) for b in bounds)]


KINDS = ("ball", "box", "diamond", "shell")
CHUNK = 64  # voxels on each side of what is made at once


@config
class SyntheticConfig(ItemsConfig):
    """Data to try things with."""

    path: str = "synthetic"  # just a name
    kind: Literal["synthetic"] = "synthetic"
    shape: tuple[int, ...] = (64, 64)  # of every item, its axes of space
    channels: int = 1
    items: int = 1000
    classes: int = 4  # kinds of objects: ball, box, diamond, shell
    objects: int = 1  # in each item
    mixed: bool = False  # objects of all kinds in each item, which then has no class of its own
    noise: float = 0.1  # standard deviation, of the range from black to white
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_made(self, "objects")
        if not 1 <= self.classes <= len(KINDS) or not self.noise >= 0:
            raise UserError(
                f"classes = {self.classes} of synthetic data must be 1 to {len(KINDS)}, and noise = {self.noise} not "
                "negative; mend them"
            )

    def open(self) -> "SyntheticSource":
        """Open the source; nothing is made yet."""
        return SyntheticSource(self)


class Thing(NamedTuple):
    """An object of an item."""

    kind: int
    centre: np.ndarray  # [axes]
    radius: float
    bright: np.ndarray  # [C]


class SyntheticSource(MadeSource):
    """Items made when they are read."""

    dtype = np.dtype("uint8")

    def __init__(self, settings: SyntheticConfig) -> None:
        super().__init__(settings)
        self.class_names = () if settings.mixed else KINDS[: settings.classes]
        self.label_dtype: np.dtype | None = np.dtype("uint8")
        self.label_names = {0: "background", **{n + 1: name for n, name in enumerate(KINDS[: settings.classes])}}

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, *spatial]."""
        number, bounds = int(self.kept[item]), normalize_window(self.shape, region)
        dark = stream(self.config.seed, "background", number).uniform(0.1, 0.4, self.config.channels)
        values = np.empty((len(self._channels), *(hi - lo for lo, hi in bounds)), np.float32)
        values[:] = dark[self._channels].reshape(-1, *[1] * len(bounds))
        for thing in self._things(number):
            place, inside = self._draw(thing, bounds)
            if inside is not None:
                part = values[(slice(None), *place)]
                part[:, inside] = thing.bright[self._channels, None]
        for out, channel in zip(values, self._channels, strict=True):
            out += self.config.noise * self._noise(key(self.config.seed, "noise", number, channel), bounds)
        return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Return the labels of a window, [*spatial]: 0, or one more than the number of a kind."""
        bounds = normalize_window(self.shape, region)
        labels = np.zeros([hi - lo for lo, hi in bounds], np.uint8)
        for thing in self._things(int(self.kept[item])):
            place, inside = self._draw(thing, bounds)
            if inside is not None:
                labels[place][inside] = thing.kind + 1
        return labels

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"label_names": {str(value): name for value, name in self.label_names.items()}}

    def make_item(self, item: int) -> Item:
        return replace(super().make_item(item), chunk=tuple(min(size, CHUNK) for size in self.shape))

    def label(self, item: int) -> int | None:
        return None if self.config.mixed else self._kind(int(self.kept[item]))

    def _kind(self, number: int) -> int:
        return key(self.config.seed, "kind", number) % self.config.classes

    def _things(self, number: int) -> list[Thing]:
        """Draw the objects of an item; later ones lie on top."""
        c, axes = self.config, len(self.shape)
        random = stream(c.seed, "things", number)
        kinds = random.integers(0, c.classes, c.objects) if c.mixed else np.full(c.objects, self._kind(number))
        centres = random.uniform(0.2, 0.8, (c.objects, axes)) * self.shape
        radii = random.uniform(0.15, 0.35, c.objects) * min(self.shape) / c.objects ** (1 / axes)
        bright = random.uniform(0.5, 1.0, (c.objects, c.channels))
        return [Thing(int(k), m, float(r), b) for k, m, r, b in zip(kinds, centres, radii, bright, strict=True)]

    def _draw(self, thing: Thing, bounds: tuple[tuple[int, int], ...]) -> tuple[tuple[slice, ...], np.ndarray | None]:
        """Find where a window holds an object: a part of the window, and which of its voxels; None if it holds none."""
        place, away = [], []
        for axis, (lo, hi) in enumerate(bounds):
            first = max(lo, int(thing.centre[axis] - thing.radius))
            last = min(hi, int(thing.centre[axis] + thing.radius) + 2)
            if last <= first:
                return (), None
            place.append(slice(first - lo, last - lo))
            distance = np.abs(np.arange(first, last) - thing.centre[axis]) / thing.radius
            away.append(distance.reshape(-1, *[1] * (len(bounds) - 1 - axis)))
        kind = KINDS[thing.kind]
        if kind == "box":
            inside = np.ones((), bool)
            for distance in away:
                inside = inside & (distance < 0.8)
            return tuple(place), inside
        total = sum(away) if kind == "diamond" else np.sqrt(sum(distance**2 for distance in away))
        return tuple(place), (total < 1) & (total > 0.6) if kind == "shell" else total < 1

    def _noise(self, seed: int, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Make nearly normal numbers, of mean 0 and standard deviation 1, each a hash of its voxel's place."""
        index: np.ndarray = np.zeros((), np.uint64)
        for size, (lo, hi) in zip(self.shape, bounds, strict=True):
            index = index[..., None] * np.uint64(size) + np.arange(lo, hi, dtype=np.uint64)
        index = index + np.uint64(seed)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            index = (index ^ (index >> np.uint64(shift))) * np.uint64(factor)
        index ^= index >> np.uint64(31)
        # The sum of four 16-bit numbers: mean 2, variance 4/12, in units of 2^16.
        total = np.zeros(index.shape, np.float32)
        for shift in (0, 16, 32, 48):
            total += (index >> np.uint64(shift)) & np.uint64(0xFFFF)
        return (total / 2**16 - 2) * np.float32(3**0.5)
