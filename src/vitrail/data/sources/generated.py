"""Data that are made, without files.

`dummy`: random values made once and given again for every item, so that reading costs nothing, for benchmarks. Classes
go round: item % classes.

`synthetic`: objects in noise, of any size: images or volumes with classes and labels of voxels.

- an item holds objects of one kind (ball, box, diamond or shell), which is its class; `mixed` puts all kinds into each
- every voxel is a pure function of (seed, item, place): windows of a huge volume cost no more than their own voxels
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.source import (
    Item,
    ItemsConfig,
    ItemSource,
    LazySequence,
    choose_channels,
    normalize_window,
    whole_item,
)
from vitrail.draws import key, stream
from vitrail.errors import UserError
from vitrail.recipe import config

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
        if not 2 <= len(self.shape) <= 3 or min((*self.shape, self.channels, self.items, self.classes)) < 1:
            raise UserError(
                f"shape = {list(self.shape)}, channels = {self.channels}, items = {self.items} and "
                f"classes = {self.classes} of dummy data must be positive, with 2 or 3 axes; mend them"
            )
        size = math.prod(self.shape) * self.channels * np.dtype(self.dtype).itemsize
        if size > MOST_BYTES:
            raise UserError(
                f"shape = {list(self.shape)} of dummy data takes {size:,} bytes of memory; choose a smaller one"
            )

    def open(self) -> "DummySource":
        """Draw the values."""
        return DummySource(self)


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
        if not 2 <= len(self.shape) <= 3 or min((*self.shape, self.channels, self.items, self.objects)) < 1:
            raise UserError(
                f"shape = {list(self.shape)}, channels = {self.channels}, items = {self.items} and "
                f"objects = {self.objects} of synthetic data must be positive, with 2 or 3 axes; mend them"
            )
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
