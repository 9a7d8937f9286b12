"""A plugin for the tests: reconstruction that raises, as a bug would, on the rank that gets a given sample."""

from typing import Any, Literal

import torch.distributed as dist

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.objectives.reconstruct import Reconstruct, ReconstructConfig
from vitrail.recipe import config, kinds


@config
class RaisingConfig:
    kind: Literal["raising"] = "raising"
    bad: int = -1  # counter of the sample
    picture: int | None = None  # rank that cannot make pictures
    target: Literal["raw"] = "raw"
    on: Literal["hidden"] = "hidden"

    def build(self, model: Any, statistics: Statistics) -> "Raising":
        return Raising(self, ReconstructConfig(), model, statistics)


class Raising(Reconstruct):
    def __init__(self, c: RaisingConfig, *arguments: Any):
        super().__init__(*arguments)
        self.bad, self.picture = c.bad, c.picture

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
        if not evaluating and self.bad in batch.counters:
            raise ArithmeticError(f"sample {self.bad} cannot be")
        return super().prepare(batch, draws, evaluating=evaluating)

    def example(self, batch: Batch, *arguments: Any, **options: Any) -> Any:
        if self.picture is not None and dist.get_rank() == self.picture:
            raise ArithmeticError("this picture cannot be")
        return super().example(batch, *arguments, **options)


kinds.register("objective", "raising", RaisingConfig)
