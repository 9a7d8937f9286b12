"""A plugin for the tests: reconstruction that raises, as a bug would, on the rank that gets a given sample."""

from typing import Any, Literal

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.objectives.reconstruct import Reconstruct, ReconstructConfig
from vitrail.recipe import config, kinds


@config
class RaisingConfig:
    kind: Literal["raising"] = "raising"
    bad: int = 0  # counter of the sample
    target: Literal["raw"] = "raw"
    on: Literal["hidden"] = "hidden"

    def build(self, model: Any, statistics: Statistics) -> "Raising":
        return Raising(self.bad, ReconstructConfig(), model, statistics)


class Raising(Reconstruct):
    def __init__(self, bad: int, *arguments: Any):
        super().__init__(*arguments)
        self.bad = bad

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
        if not evaluating and self.bad in batch.counters:
            raise ArithmeticError(f"sample {self.bad} cannot be")
        return super().prepare(batch, draws, evaluating=evaluating)


kinds.register("objective", "raising", RaisingConfig)
