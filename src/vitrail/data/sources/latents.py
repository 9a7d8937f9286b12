"""Latents as a source: items that `vitrail data encode` stored, with their own statistics and classes."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from vitrail.data.latents.store import TYPES, open_rows
from vitrail.data.source import ItemsConfig, ItemSource, LazySequence, choose_channels, normalize_window
from vitrail.errors import BadData
from vitrail.recipe import config


@config
class LatentsConfig(ItemsConfig):
    """A folder of safetensors shards with index.json, one such shard, or a Zarr group of latents."""

    kind: Literal["latents"] = "latents"

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
        labels, self.class_names = self._read_classes(settings.path, facts.get("classes") or ())
        super().__init__(settings, LazySequence(int(self._firsts[-1]), str), labels)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, *spatial]."""
        window = tuple(slice(*bounds) for bounds in normalize_window(self.shape, region))
        number = int(self.kept[item])
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        row = self.shards[shard].row(number - int(self._firsts[shard]))
        return np.ascontiguousarray(row[self._channels][(slice(None), *window)], self.dtype)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"stored_statistics": self.statistics, **self.encoded}

    def _read_classes(self, path: str, names: Sequence[str]) -> tuple[np.ndarray | None, tuple[str, ...]]:
        if any(shard.labels is None for shard in self.shards):
            return None, ()
        labels = np.concatenate([shard.labels for shard in self.shards if shard.labels is not None])
        highest = int(labels.max(initial=-1))
        if names and highest >= len(names):
            raise BadData(f"{path}: class {highest} among the labels, but {len(names)} are named; mend it")
        return labels, tuple(names) or tuple(str(number) for number in range(highest + 1))
