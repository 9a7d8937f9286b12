"""Rectified flow: learn the velocity of straight ways from noise (time 0) to data (time 1).

- times are uniform, or logit-normal, which spends more of the training in the middle; `shift` above 1 moves training
  and sampling towards noise, as large images want
- computed in fp32; the model is told 1000 times the time. SiT tells the time itself: model.time_scale: 0.001
"""

from typing import Any, Literal

from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.diffusion import Straight
from vitrail.errors import UserError
from vitrail.objectives.generate import Generate, GenerateConfig
from vitrail.recipe import config


@config
class FlowConfig(GenerateConfig):
    kind: Literal["flow"] = "flow"
    times: Literal["uniform", "logit_normal"] = "uniform"
    mean: float = 0.0  # of the logit of times: above 0 nearer to data
    std: float = 1.0
    shift: float = 1.0  # above 1 nearer to noise; 3 is usual for large images

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.process  # its own checks

    @property
    def process(self) -> Straight:
        return Straight(times=self.times, mean=self.mean, std=self.std, shift=self.shift)

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        if getattr(model, "time_scale", 1.0) > 1:
            raise UserError(
                f"model.time_scale: {model.time_scale:g}, but objective 'flow' tells the model 1000 times the time "
                "already; leave it out, or set 0.001 for a model that knows times of 0 to 1"
            )

    def build(self, model: Any, statistics: Statistics) -> "RectifiedFlow":
        return RectifiedFlow(self, model, statistics, self.process, "velocity")


class RectifiedFlow(Generate):
    def even_times(self, way: Tensor) -> Tensor:
        return way
