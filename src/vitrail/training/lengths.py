"""How many steps a run and its schedule have, and the learning rate at each of them."""

from functools import partial
from typing import Any, NamedTuple

from vitrail.recipe import Recipe, steps_of
from vitrail.training.schedule import in_steps


class Lengths(NamedTuple):
    """The steps of a run, and the rates over them."""

    total: int
    planned: int  # steps that the schedule is for
    warmup: int
    base_rate: float
    schedule: Any

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rate: float = self.schedule.rate(step, base=self.base_rate, warmup=self.warmup, total=self.planned)
        return rate


def lay_out(recipe: Recipe, *, batch: int, epoch: int) -> Lengths:
    """Count the steps of a run and of its schedule, `batch` samples a step and `epoch` a pass over the data."""
    total = steps_of(recipe.run.steps, batch=batch, epoch=epoch)
    planned = recipe.schedule.steps
    planned = total if planned is None else steps_of(planned, total=total, batch=batch, epoch=epoch)
    count = partial(steps_of, total=planned, batch=batch, epoch=epoch)
    schedule = in_steps(recipe.schedule, count)
    return Lengths(total, planned, count(recipe.schedule.warmup), recipe.optimizer.base_rate(batch), schedule)
