"""Random values made once and given again for every item: no cost of reading, for benchmarks.

Shape, channels, type and number of items are yours to choose. Classes go round: item % classes.
"""

import math
from typing import Any, Literal

import numpy as np

from vitrail.data.items import ItemsConfig, LazySequence, choose_channels, keep_share, whole_item
from vitrail.data.source import normalize_window
from vitrail.draws import stream
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


class DummySource:
    """The same values for every item."""

    def __init__(self, settings: DummyConfig) -> None:
        self.config = settings
        self.shape = tuple(settings.shape)
        self.axes = ("z", "y", "x")[-len(self.shape) :]
        self.dtype = np.dtype(settings.dtype)
        names = [f"channel{number}" for number in range(settings.channels)]
        self.variables, self._channels = choose_channels(settings.variables, names, settings.path)
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
        self._kept = kept = keep_share(settings, LazySequence(settings.items, str))
        self.items = LazySequence(
            len(kept), lambda item: whole_item(str(kept[item]), self.shape, int(kept[item]) % settings.classes)
        )

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """[C, *spatial] of a window, without a copy."""
        bounds = normalize_window(self.shape, region)
        return self._values[(slice(None), *(slice(*b) for b in bounds))]

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """The values once for each item, [B, C, *spatial], without a copy."""
        return np.broadcast_to(self._values, (len(items), *self._values.shape))

    def labels_of(self, items: np.ndarray) -> np.ndarray:
        """The classes of items [B]."""
        return self._kept[items] % self.config.classes

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """The labels of a window, [*spatial]."""
        bounds = normalize_window(self.shape, region)
        if self._voxels is None:
            random = stream(self.config.seed, "dummy labels")
            self._voxels = random.integers(0, self.config.classes, self.shape).astype(self.label_dtype)
        return self._voxels[tuple(slice(*b) for b in bounds)]

    def files(self) -> tuple[str, ...]:
        """None are read, whatever lies at a path of its name."""
        return ()

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "dummy",
            "path": self.config.path,
            "axes": list(self.axes),
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": [1.0] * len(self.shape),
            "unit": None,
            "items": len(self.items),
            "classes": list(self.class_names),
        }
