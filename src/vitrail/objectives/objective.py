"""What a model is trained for: how a batch becomes inputs and targets, and how far outputs are from targets.

An objective holds no parameters. `prepare` is computed alike on every rank that shares the batch, from the batch and
its draws alone; `loss` returns a sum and a count, and the trainer divides by the count of all ranks and micro-batches.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.cost.flops import Flops
from vitrail.data.batch import Batch
from vitrail.draws import Draws
from vitrail.models.model import Model


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    count: Tensor


class Objective(ABC):
    metrics: ClassVar[tuple[str, ...]]  # what summarise() gives; smaller is better
    best_metric: ClassVar[str]  # the one that the best checkpoint is chosen by, unless the recipe names another

    @abstractmethod
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
        """Keyword inputs of the model (`x` and side inputs) and whatever loss() needs to judge its output."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Any) -> Loss: ...

    @abstractmethod
    def measure(self, output: Tensor, targets: Any) -> dict[str, Tensor]:
        """Sums over a validation batch, to be added over batches and ranks (float64)."""

    @abstractmethod
    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the added sums."""

    @abstractmethod
    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Any, *, step: int, held_out: bool) -> str:
        """Write a picture of what the model does, and return its caption."""

    def flops(self, model: Model) -> Flops:
        """Forward of one training sample under this objective."""
        return model.flops()

    @abstractmethod
    def tokens_per_sample(self) -> int:
        """All tokens of a sample, hidden ones too: what tokens/s counts."""


def drop_path_table(draws: Draws, rates: list[float]) -> Tensor | None:
    """Factors [B, depth, 2] of the residual branches: 0 where a branch is dropped, else 1 / (1 - rate)."""
    if not any(rates):
        return None
    rate = torch.tensor(rates)[:, None]
    return (draws.uniform("drop_path", len(rates), 2) >= rate) / (1 - rate)
