"""The interface of objectives: a batch becomes inputs and targets, and outputs are compared with targets.

An objective holds no parameters and knows of no ranks. `prepare` makes whole samples from the batch and its draws
alone; `loss` returns a sum and a count, and the trainer divides by the count of all ranks and micro-batches.

Where ranks share samples, parallel/split.py cuts what `prepare` gives by the `axes` that the objective declares
(TokenAxes): which inputs and targets have a row for each token. Targets without such rows are whole, and so is the
output that they are compared with.

An objective that learns from labels says so in its config: `labels: ClassVar` is "item" (the class of each item) or
"voxel" (of each voxel). Then the batch carries them, `names` (the classes, label 0 first; filled in from the data where
it is None) and, for voxels, `ignore` (a value that is not scored) are fields of that config, and model.classes follows.
Where that depends on the model, the config has `labels_with(model)` instead. A config without `names` takes labels of
voxels as they are, as numbers of instances, and says itself how many outputs the model has (`fit`).
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.layers.tokens import TokenAxes, Tokens
from vitrail.models.model import Model, make_inputs

Prepare = TypeVar("Prepare", bound=Callable[..., Any])


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    count: Tensor


class Objective(ABC):
    metrics: tuple[str, ...]  # what summarise() gives
    best_metric: ClassVar[str]  # the one that the best checkpoint is chosen by, unless the recipe names another
    larger_is_better: frozenset[str] = frozenset()  # those of the metrics that should grow; the others should shrink
    pictured: int = 3  # samples in a picture
    axes: TokenAxes = TokenAxes()  # which inputs and targets have a row for each token
    wants_average: ClassVar[bool] = False  # results of raw weights are much worse than those of their average (ema)
    predicts: ClassVar[tuple[str, ...]] = ()  # what of new data can be written, beside embeddings; the first is usual
    decodes: ClassVar[bool] = False  # it makes latents, which the recipe's codec turns into pixels

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_pictures(cls)

    @abstractmethod
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
        """Make keyword inputs of the model (`x` and side inputs) and whatever loss() needs to judge its output."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Any) -> Loss: ...

    @abstractmethod
    def measure(self, output: Tensor, targets: Any) -> dict[str, Tensor]:
        """Sums over a validation batch, to be added over batches and ranks (float64)."""

    @abstractmethod
    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the added sums."""

    def count(self, output: Tensor, targets: Any) -> dict[str, Tensor]:
        """Counts of classes in a validation batch, of any shape, to be added as measure() is: see counts.py."""
        return {}

    def each(self, output: Tensor, targets: Any) -> Tensor | None:
        """Return how badly each sample did [B], so that the worst can be shown; None where that is not told."""
        return None

    def equip(  # noqa: B027 - most need nothing of it
        self, *, value_range: tuple[float, float] | None = None, decode: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Take what the data and the codec tell: the range of whole numbers, and the way from latents to pixels."""

    def choose(self, counters: Sequence[int], label_of: Callable[[int], int | None]) -> list[int]:
        """Choose the held-out samples that a picture shows; `label_of` tells the class of an item that has one."""
        return list(counters[: self.pictured])

    def example(
        self,
        batch: Batch,
        draws: Draws,
        run: Callable[[dict[str, Any]], Tensor],
        *,
        first: int = 0,
        size: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Any]:
        """Return what rows() is given; every rank computes it, and gets the same.

        `run` gives the output for inputs; `first` is the place in the picture of the first of these samples, `size` how
        many surely fit at once, and `tick` is called when it has run.
        """
        inputs, targets = self.prepare(batch, draws, evaluating=True)
        output = run(inputs)
        tick()
        return output, targets

    @abstractmethod
    def rows(self, batch: Batch, output: Tensor, targets: Any) -> list[dict[str, Any]]:
        """Return what a picture shows of each sample, as arrays on the host."""

    @abstractmethod
    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        """Write a picture of what the model does, with so many slices of volumes, and return its caption."""

    def flops(self, model: Model) -> Flops:
        """Forward of one training sample under this objective."""
        return model.flops()

    @abstractmethod
    def tokens_per_sample(self) -> int:
        """Count all tokens of a sample, hidden ones too, as tokens/s does."""

    def tokens_at(self, layer: str) -> int:
        """Count the tokens of a training sample that a linear layer of a block computes with, by the layer's name."""
        return self.tokens_per_sample()


def check_pictures(kind: type[Objective]) -> None:
    """Refuse an objective whose example() or draw() does not take what it is given."""
    try:
        inspect.signature(kind.example).bind(None, None, None, None, first=0, size=1, tick=None)
        inspect.signature(kind.draw).bind(None, None, [], step=0, held_out=True, slices=1)
    except TypeError as error:
        raise UserError(
            f"objective: the pictures of {kind.__name__} cannot be made ({error}); write what one shows of each sample "
            "as rows(self, batch, output, targets), then draw(self, path, rows, *, step, held_out, slices=1), and "
            "example() with a keyword `first`, if there is one"
        ) from None


class VoxelObjective(Objective):
    """An objective that gives each voxel a class: overlapping tiles are put together before their voxels are scored."""

    predicts = ("classes", "probabilities")

    @abstractmethod
    def logits(self, output: Tensor, targets: Any) -> Tensor:
        """[B, classes, *S] of what the model gives."""

    @abstractmethod
    def score(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return those sums of measure() that count voxels, for logits [B, classes, *S] and labels [B, *S]."""

    def tally(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what count() does, for logits [B, classes, *S] and labels [B, *S]."""
        return {}


def labels_wanted(objective: Any, model: Any) -> Literal["item", "voxel"] | None:
    """Return what an objective learns the classes of, by its config and that of its model."""
    if hasattr(objective, "labels_with"):
        return objective.labels_with(model)
    return getattr(objective, "labels", None)


def check_prepare(objective: Objective) -> None:
    """Refuse an objective whose prepare() does not take what it is given, or that would split samples itself."""
    earlier = [name for name in ("part", "exchange") if name in inspect.signature(objective.prepare).parameters]
    earlier += [name for name in ("needs_whole", "join", "slab") if hasattr(objective, name)]
    if earlier:
        raise UserError(
            f"objective: {type(objective).__name__} has {', '.join(earlier)}, which objectives had before they knew "
            "nothing of ranks; write prepare(self, batch, draws, *, evaluating=False), for whole samples, and say in "
            "`axes` which inputs and targets have a row for each token, as CONTRIBUTING.md shows"
        )
    try:
        inspect.signature(objective.prepare).bind(None, None, evaluating=True)
    except TypeError as error:
        raise UserError(
            f"objective: {type(objective).__name__}.prepare() cannot be called ({error}); write it as "
            "prepare(self, batch, draws, *, evaluating=False), for whole samples, as CONTRIBUTING.md shows"
        ) from None


def by_slabs(prepare: Prepare) -> Prepare:
    """Mark a prepare() that can do with slabs of crops (Batch.slab); one that is written over it is not marked.

    It makes tokens of a batch's values by tokenize() or make_inputs() alone, with the slab, and sees no other voxels.
    """
    prepare.by_slabs = True  # type: ignore[attr-defined]
    return prepare


def inputs_of(model: Any, batch: Batch, statistics: Statistics, draws: Draws | None) -> tuple[dict[str, Any], Tokens]:
    """Make the inputs of a model for all tokens of a batch, in their order, and the tokens (the way back to voxels)."""
    images, names = normalise(batch.values, batch.statistics or statistics), batch.variables or None
    grown: dict[str, Any] = {"scored": batch.values, "span": batch.span, "draws": draws}
    return make_inputs(model, images, variables=names, slab=batch.slab, **grown)


def drop_path_table(draws: Draws, rates: list[float]) -> Tensor | None:
    """Factors [B, depth, 2] of the residual branches: 0 where a branch is dropped, else 1 / (1 - rate)."""
    if not any(rates):
        return None
    rate = torch.tensor(rates)[:, None]
    return (draws.uniform("drop_path", len(rates), 2) >= rate) / (1 - rate)


def normalise(values: Tensor, statistics: Statistics | tuple[Tensor, Tensor]) -> Tensor:
    """[B, C, *S] as read to mean 0 and variance 1 of each variable, float32; by statistics of all, or [B, C]."""
    tables = statistics.tensors() if isinstance(statistics, Statistics) else statistics
    mean, std = (sent(t, values.device)[..., *[None] * (values.ndim - 2)] for t in tables)
    return (values.float() - mean) / std


def check_names(names: tuple[str, ...] | None) -> None:
    """Refuse class names that cannot be told apart."""
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ValueError(f"names {list(names)} must be at least two different names, one for each class")


def check_labels(labels: Tensor | None, num_classes: int, *, ignore: int | None = None) -> Tensor:
    """Return the labels of a batch as int64, checked where no device is waited for; loaders check all they read."""
    if labels is None:
        raise ValueError("the batch has no labels; give it labels, or read them with a loader that knows of them")
    labels = labels.long()
    if labels.device.type == "cpu":
        wrong = (labels < 0) | (labels >= num_classes)
        if ignore is not None:
            wrong &= labels != ignore
        if wrong.any():
            others = "model.classes or objective.ignore" if labels.ndim > 1 else "model.classes"
            raise UserError(
                f"labels: {int(labels[wrong][0])} is not the number of a class; there are {num_classes}, from 0; "
                f"mend the labels, or set {others}"
            )
    return labels
