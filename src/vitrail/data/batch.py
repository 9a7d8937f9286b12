"""What flows from the data to an objective."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Batch:
    """Samples on a device, in the data's own type until an objective normalises them."""

    counters: list[int]  # the samples' places in the global order: the key of every draw
    values: Tensor  # [B, C, *crop]

    def narrow(self, start: int, stop: int) -> "Batch":
        return Batch(self.counters[start:stop], self.values[start:stop])

    def __len__(self) -> int:
        return len(self.counters)


class Statistics(NamedTuple):
    """Mean and standard deviation of each variable, as the model's inputs are normalised with."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean), torch.tensor(self.std)
