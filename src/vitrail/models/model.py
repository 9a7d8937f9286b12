"""What every model is: stages in order, through which one tensor flows.

A model knows nothing of ranks. It lists its stages with the side inputs that each needs (pipelines cut there), its
repeated blocks (what is checkpointed, compiled and sharded one by one), its drop-path rates and the parameters that
weight decay spares. parallelize() and the trainer obey these lists.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from vitrail.layers.flops import Flops
from vitrail.layers.sequence import WHOLE, TokenSequence
from vitrail.models.inputs import make_inputs
from vitrail.recipe.kinds import nearest

Side = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of the flow: `run(x, side)`.

    `needs` names the side inputs that it reads, itself or through derive(); `uses` are the modules and bare parameters
    whose weights it reads (None for those that a model lacks), so that a pipeline knows what belongs to a stage.
    """

    name: str
    run: Callable[[Tensor, Side], Tensor]
    needs: tuple[str, ...] = ()
    uses: tuple[nn.Module | nn.Parameter | None, ...] = ()

    def within(self, part: str) -> "Stage":
        """The same step as one of a part of a model."""
        return replace(self, name=f"{part}.{self.name}")


class Model(nn.Module, ABC):
    """Base of all models: forward is the stages one after another."""

    config: Any  # the frozen config that the model was built from
    sequence: TokenSequence = WHOLE  # where the other tokens of a sample are
    watching: dict[str, Tensor] | None = None  # a dict put here is filled with the size of activations by stage

    @abstractmethod
    def stages(self) -> list[Stage]:
        """What the model does, in order."""

    def derive(self, side: Side) -> Side:
        """Side inputs computed once from the given ones (rotation tables, say), the same on every rank."""
        return side

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated parts, which are checkpointed, compiled and sharded one by one."""

    def drop_path_rates(self) -> list[float]:
        """One rate a block, in the order of the drop-path table [B, depth, 2]."""
        return [0.0] * len(self.blocks())

    def spared_from_decay(self) -> list[str]:
        """Names (last parts) of parameters with two or more dimensions that are not weight matrices."""
        return []

    @abstractmethod
    def flops(self) -> Flops:
        """Forward of one training sample."""

    def inputs(self, images: Tensor, variables: Sequence[str] | None = None) -> dict[str, Any]:
        """What forward() takes for normalised images [B, C, *S]: model(**model.inputs(images))."""
        return make_inputs(self.config, images, variables=variables)[0]

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        """Run all stages; when watched, also note the root mean square of the activations after each."""
        stages = self.stages()
        self._refuse_unknown(side, {name for stage in stages for name in stage.needs})
        side = self.derive(side)
        for stage in stages:
            x = stage.run(x, side)
            if self.watching is not None:
                self.watching[stage.name] = x.detach().float().square().mean().sqrt()
        return x

    def _refuse_unknown(self, side: Side, known: set[str]) -> None:
        if "coordinates" not in side:
            raise ValueError("coordinates are missing: models take tokens; call model(**model.inputs(images))")
        for name in side.keys() - known:
            near = nearest(name, sorted(known))
            hint = f"; did you mean {near!r}?" if near else f" (it takes {', '.join(sorted(known))})"
            raise ValueError(f"{name!r} is no input of {type(self).__name__}{hint}")


def block_drop_path(side: Side, index: int) -> Tensor | None:
    """The factors [B, 2] of one block out of the whole table, None without drop path."""
    table = side.get("drop_path")
    return None if table is None else table[:, index]


def spread_drop_path(rate: float, depth: int) -> list[float]:
    """From 0 at the first block to `rate` at the last."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]
