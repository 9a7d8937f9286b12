"""AdamW, and Adam, whose weight decay is part of the gradient."""

from typing import Literal

from torch import Tensor
from torch.optim.adam import adam

from vitrail.recipe import config, must
from vitrail.training.optimizers.optimizer import (
    OptimizerConfig,
    Role,
    Shards,
    Update,
)


class Adam(Update):
    moments = ("exp_avg", "exp_avg_sq")
    counts = True

    def __init__(self, betas: tuple[float, float], eps: float, *, decoupled: bool):
        self.betas, self.eps, self.decoupled = betas, eps, decoupled

    def apply(self, shards: Shards, *, rate: float, decay: float, skip: Tensor | None) -> None:
        adam(
            shards.parameters,
            shards.gradients,
            shards.moments["exp_avg"],
            shards.moments["exp_avg_sq"],
            [],
            shards.steps,
            fused=True,
            found_inf=skip,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=rate,
            weight_decay=decay,
            eps=self.eps,
            maximize=False,
        )


class _AdamConfig(OptimizerConfig):
    """The checks of what both have."""

    betas: tuple[float, float]
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        must("not be negative", eps=self.eps)
        must("be at least 0 and below 1", betas=self.betas)


@config
class AdamWConfig(_AdamConfig):
    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def update(self, role: Role) -> Update:
        return Adam(self.betas, self.eps, decoupled=True)


@config
class AdamConfig(_AdamConfig):
    kind: Literal["adam"] = "adam"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def update(self, role: Role) -> Update:
        return Adam(self.betas, self.eps, decoupled=False)
