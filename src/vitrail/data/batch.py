"""What flows from the data to an objective."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.layers.parts import Slab


@dataclass
class Batch:
    """Samples on a device, in the data's own type until an objective normalises them."""

    counters: list[int]  # the samples' places in the global order: the key of every draw
    values: Tensor  # [B, C, *crop], or a slab of it
    labels: Tensor | None = None  # [B] int64, the class of each item; or [B, *crop], the class of each voxel
    variables: tuple[str, ...] = ()  # names of the channels, in their order
    slab: Slab | None = None  # what the values are of each crop, where other ranks hold the rest; labels are whole

    def narrow(self, start: int, stop: int) -> "Batch":
        labels = None if self.labels is None else self.labels[start:stop]
        return Batch(self.counters[start:stop], self.values[start:stop], labels, self.variables, self.slab)

    def __len__(self) -> int:
        return len(self.counters)


@dataclass(frozen=True)
class Labelling:
    """What labels belong to, and what they mean."""

    of: Literal["item", "voxel"]
    names: tuple[str, ...]  # of the classes: label 0 is the first
    ignore: int | None = None  # a value of voxels that have no class


class Statistics(NamedTuple):
    """Mean and standard deviation of each variable, as the model's inputs are normalised with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean), torch.tensor(self.std)
