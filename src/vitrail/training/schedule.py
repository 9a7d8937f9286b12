"""Learning-rate schedules: a warm-up, then cosine, linear or constant."""

import math
from typing import Literal

from vitrail.recipe import config, must
from vitrail.recipe.durations import Duration, RunLength


@config
class ScheduleConfig:
    """The warm-up, and what comes after it: `remaining`, or a `rate` of one's own where that needs the step.

    The trainer reads `steps` and `warmup` and asks for `rate` before each step; other durations come as written.
    """

    steps: RunLength | None = None  # duration that the schedule is laid out for; null: the run's length
    warmup: Duration = 0  # duration in which the rate rises to that of the optimizer
    start: float | None = None  # rate of the first step; default: rate / (warm-up steps + 1), rising evenly
    end: float = 0.0  # rate that the steps run towards: that of a step after the last; nothing where it is constant

    def __post_init__(self) -> None:
        must("not be negative", start=self.start, end=self.end)

    def rate(self, step: int, *, base: float, warmup: int, total: int) -> float:
        """Return the rate of a step (counted from 0) out of `total`, of which `warmup` rise to `base`."""
        if step < warmup:
            if self.start is None:
                return base * (step + 1) / (warmup + 1)
            return self.start + (base - self.start) * step / max(warmup - 1, 1)
        done = min(1.0, (step - warmup) / max(total - warmup, 1))
        return self.end + (base - self.end) * self.remaining(done)

    def remaining(self, done: float) -> float:
        """Return the share of the rate that is left when a share of the steps is done."""
        raise NotImplementedError


@config
class CosineConfig(ScheduleConfig):
    kind: Literal["cosine"] = "cosine"

    def remaining(self, done: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * done))


@config
class LinearConfig(ScheduleConfig):
    kind: Literal["linear"] = "linear"

    def remaining(self, done: float) -> float:
        return 1 - done


@config
class ConstantConfig(ScheduleConfig):
    kind: Literal["constant"] = "constant"

    def remaining(self, done: float) -> float:
        return 1.0
