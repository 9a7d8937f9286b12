"""Batches, labels and statistics, as they flow from the data to an objective."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.layers.patches import Slab


@dataclass
class Batch:
    """Samples on a device, not normalised: in the type of the data, or float32 once clipped or resampled."""

    counters: list[int]  # the samples' places in the global order: the key of every draw
    values: Tensor  # [B, C, *crop], or a slab of it
    labels: Tensor | None = None  # [B] int64, the class of each item; or [B, *crop], of each voxel, after `label_map`
    variables: tuple[str, ...] = ()  # names of the channels, in their order
    slab: Slab | None = None  # what the values are of each crop, where other ranks hold the rest; labels are whole
    statistics: tuple[Tensor, Tensor] | None = None  # [B, C] mean and std, where sources have their own
    soft: Tensor | None = None  # [B, classes]: how much of each class a mixed sample is
    span: tuple[Tensor, Tensor] | None = None  # [B, C] values that scores of trees take for black and white

    def narrow(self, start: int, stop: int) -> "Batch":
        part = slice(start, stop)
        return replace(
            self,
            counters=self.counters[part],
            values=self.values[part],
            labels=None if self.labels is None else self.labels[part],
            statistics=None if self.statistics is None else (self.statistics[0][part], self.statistics[1][part]),
            soft=None if self.soft is None else self.soft[part],
            span=None if self.span is None else (self.span[0][part], self.span[1][part]),
        )

    def __len__(self) -> int:
        return len(self.counters)


@dataclass(frozen=True)
class Labelling:
    """The meaning of labels, and what they belong to."""

    of: Literal["item", "voxel"]
    names: tuple[str, ...]  # of the classes: label 0 is the first; none where labels are numbers of instances
    ignore: int | None = None  # a value of voxels that have no class


class Statistics(NamedTuple):
    """Mean and standard deviation of each variable, as the model's inputs are normalised with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean), torch.tensor(self.std)


class EntryStatistics(Statistics):
    """Statistics that differ between entries: the shared ones, and in the manifest those of each entry."""

    entries: list[list[list[float]]]  # [mean, std] of each
    places: list[str]  # which entries these are

    def _asdict(self) -> dict[str, Any]:
        return super()._asdict() | {"entries": self.entries, "places": self.places}
