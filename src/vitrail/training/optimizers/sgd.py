"""Stochastic gradient descent with momentum."""

from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor
from torch.optim.sgd import sgd

from vitrail.recipe import config, must
from vitrail.training.optimizers.optimizer import OptimizerConfig, Role, Shards, Update


class SGD(Update):
    def __init__(self, momentum: float):
        self.momentum = momentum
        self.moments = ("momentum_buffer",) if momentum else ()

    def apply(self, shards: Shards, *, rate: float, decay: float, skip: Tensor | None) -> None:
        buffers: Sequence[Tensor | None] = shards.moments.get("momentum_buffer", [None] * len(shards.parameters))
        sgd(
            shards.parameters,
            shards.gradients,
            cast(list[Tensor | None], buffers),
            fused=True,
            found_inf=skip,
            weight_decay=decay,
            momentum=self.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@config
class SGDConfig(OptimizerConfig):
    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        must("be at least 0 and below 1", momentum=self.momentum)

    def update(self, role: Role) -> Update:
        return SGD(self.momentum)
