"""Lion (Chen et al. 2023): steps of one size, in the direction of the sign of a mean of gradients."""

from typing import Literal

from torch import Tensor

from vitrail.recipe import config, must
from vitrail.training.optimizers.optimizer import OptimizerConfig, Role, Shards, Update, kept
from vitrail.training.private import foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_, foreach_sub_


class Lion(Update):
    moments = ("exp_avg",)

    def __init__(self, betas: tuple[float, float]):
        self.betas = betas

    def apply(self, shards: Shards, *, rate: float, decay: float, skip: Tensor | None) -> None:
        averages = shards.moments["exp_avg"]
        gradients, stay = kept(shards.gradients, averages, skip)
        directions = list(foreach_lerp(averages, gradients, 1 - self.betas[0]))
        foreach_sign_(directions)
        foreach_mul_(directions, rate * stay)
        foreach_mul_(shards.parameters, 1 - rate * decay * stay)
        foreach_sub_(shards.parameters, directions)
        foreach_lerp_(averages, gradients, 1 - self.betas[1])


@config
class LionConfig(OptimizerConfig):
    kind: Literal["lion"] = "lion"
    lr: float = 1e-4  # a tenth of AdamW's, since no step is smaller than the rate
    weight_decay: float = 0.5  # ten times AdamW's, for the same decay in a step
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        must("be at least 0 and below 1", betas=self.betas)

    def update(self, role: Role) -> Update:
        return Lion(self.betas)
