"""What a model is trained for: how a batch becomes inputs and targets, and how far outputs are from targets.

An objective holds no parameters. `prepare` is computed alike on every rank that shares the batch, from the batch and
its draws alone; `loss` returns a sum and a count, and the trainer divides by the count of all ranks and micro-batches.

An objective that learns from labels says so in its config: `labels: ClassVar` is "item" (the class of each item) or
"voxel" (of each voxel). Then the batch carries them, `names` (the classes, label 0 first; filled in from the data where
it is None) and, for voxels, `ignore` (a value that is not scored) are fields of that config, and model.classes follows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitrail.cost.flops import Flops
from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.models.model import Model


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    count: Tensor


class Objective(ABC):
    metrics: tuple[str, ...]  # what summarise() gives
    best_metric: ClassVar[str]  # the one that the best checkpoint is chosen by, unless the recipe names another
    larger_is_better: frozenset[str] = frozenset()  # those of the metrics that should grow; the others should shrink
    pictured: ClassVar[int] = 3  # samples in a picture

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


def normalise(values: Tensor, statistics: Statistics) -> Tensor:
    """[B, C, *S] as read to mean 0 and variance 1 of each variable, float32."""
    mean, std = (t.to(values.device).view(-1, *[1] * (values.ndim - 2)) for t in statistics.tensors())
    return (values.float() - mean) / std


def check_names(names: tuple[str, ...] | None) -> None:
    """Refuse class names that cannot be told apart."""
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ValueError(f"names {list(names)} must be at least two different names, one for each class")


def check_labels(labels: Tensor | None, num_classes: int, *, ignore: int | None = None) -> Tensor:
    """The labels of a batch as int64, checked where that waits for no device; loaders check all that they read."""
    if labels is None:
        raise ValueError("the batch has no labels; give it labels, or read them with a loader that knows of them")
    labels = labels.long()
    if labels.device.type == "cpu":
        wrong = (labels < 0) | (labels >= num_classes)
        if ignore is not None:
            wrong &= labels != ignore
        if wrong.any():
            raise UserError(
                f"labels: {int(labels[wrong][0])} is not the number of a class; there are {num_classes}, from 0; "
                "mend the labels, or set model.classes or objective.ignore"
            )
    return labels
