"""Learning-rate schedules: a warm-up, then cosine, linear or constant."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_type_hints

from vitrail.recipe import config, must
from vitrail.recipe.durations import Duration, RunLength

T = TypeVar("T")


@config
class ScheduleConfig:
    """The warm-up, and what comes after it: `remaining`, or a `rate` of one's own where that needs the step.

    The trainer reads `steps` and `warmup`, counts the steps of all fields that are durations, and asks for `rate`
    before each step.
    """

    steps: RunLength | None = None  # duration that the schedule is laid out for; null: the run's length
    warmup: Duration = 0  # duration in which the rate rises to that of the optimizer
    start: float | None = None  # rate of the first step; default: rate / (warm-up steps + 1), rising evenly
    end: float = 0.0  # rate that the steps run towards: that of a step after the last; nothing where it is constant

    def __post_init__(self) -> None:
        must("not be negative", start=self.start, end=self.end)

    def rate(self, step: int, *, base: float, warmup: int, total: int) -> float:
        """Return the rate of a step (counted from 0) out of `total`, of which `warmup` rise to `base`.

        Steps may go on beyond `total`, where the schedule has `steps` of its own: the rate is then what it ended at.
        """
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


def in_steps(schedule: T, count: Callable[[int | str], int]) -> T:
    """Return a schedule whose durations, one or several to a field, are counted in steps; `steps` stays as written."""
    counted: dict[str, Any] = {}
    for name, hint in get_type_hints(type(schedule), include_extras=True).items():
        value = getattr(schedule, name)
        if hint in (Duration, Duration | None) and value is not None:
            counted[name] = count(value)
        elif hint == tuple[Duration, ...]:
            counted[name] = tuple(count(each) for each in value)
    made: T = replace(schedule, **counted)  # type: ignore[type-var]
    return made
