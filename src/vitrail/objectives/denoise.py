"""DDPM: take the noise of a step out of an image; `vitrail sample` goes back step by step, from noise to data.

- any number of steps; betas grow linearly, or the cosine schedule; zero_snr leaves nothing of the data at the last step
- the model predicts the noise, the data or the velocity; with min_snr, the weights of Hang et al. 2023
"""

from typing import Any, Literal

from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.diffusion import Prediction, Steps
from vitrail.objectives.generate import Generate, GenerateConfig
from vitrail.recipe import config


@config
class DenoiseConfig(GenerateConfig):
    kind: Literal["denoise"] = "denoise"
    predict: Prediction = "noise"
    steps: int = 1000
    schedule: Literal["linear", "cosine"] = "linear"
    zero_snr: bool = False  # nothing of the data is left at the last step; needs predict velocity or data
    min_snr: float | None = None  # limit of the weight of the data's error; 5 is usual; null: all steps weigh alike

    def __post_init__(self) -> None:
        super().__post_init__()
        self.process.check(self.predict)
        if self.sampling.steps > self.steps:
            raise ValueError(
                f"sampling.steps {self.sampling.steps} must be at most steps {self.steps}; set sampling: {{steps: ...}}"
            )

    @property
    def process(self) -> Steps:
        return Steps(steps=self.steps, schedule=self.schedule, zero_snr=self.zero_snr, min_snr=self.min_snr)

    @property
    def longest(self) -> int:
        return self.steps

    def build(self, model: Any, statistics: Statistics) -> "Denoise":
        return Denoise(self, model, statistics, self.process, self.predict)


class Denoise(Generate):
    def even_times(self, way: Tensor) -> Tensor:
        return self.process.draw_times(1 - way)  # step 0 is next to the data
