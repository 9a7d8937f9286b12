"""A run from the outside: train() and evaluate()."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.launch.world import find_world
from vitrail.parallel.check import refuse
from vitrail.recipe import Recipe
from vitrail.recipe.load import Given, find_recipe
from vitrail.recipe.plugins import telling
from vitrail.recipe.sections import Parallel
from vitrail.training.evaluate import check_metrics, led_by
from vitrail.training.failures import StopRequest, Watchdog
from vitrail.training.memory import in_words
from vitrail.training.session import Outcome, Session
from vitrail.training.setup import Place, build_model, find_place, make_evaluator, open_parts
from vitrail.weights.runs import list_or_refuse, load_weights, stored_recipe, which_weights, with_checkpoint


def train(
    recipe: Given,
    *,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    quiet: bool = False,
    trust: bool = False,
    other_data: bool = False,
    change: bool = False,
) -> Outcome:
    """Train as a recipe says: a Recipe, a file, a mapping, or the folder of a run to continue.

    `trust` lets a codec run code that comes with its files, and data files read what they name anywhere; `other_data`
    continues a run on other data than it began with, and `change` with changes to its recipe that alter what it learns
    from here on. No recipe can say so.
    """
    recipe = find_recipe(recipe, overrides)
    call = {"fresh": fresh, "trust": trust, "other_data": other_data, "change": change}
    group = joined(recipe, **call)
    with trusted(trust), group as (place, watchdog), StopRequest() as stop, telling(), in_words(recipe, watchdog):
        return Session(recipe, place, stop, watchdog, quiet=quiet, **call).run()


def evaluate(
    run: str | Path,
    *,
    checkpoint: str | int | None = None,
    samples: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """Measure a run's checkpoint on its validation data; `trust` as for train()."""
    if samples is not None and samples < 1:
        raise UserError(f"samples: {samples} must be at least 1")
    list_or_refuse(run, checkpoint)
    call = {"checkpoint": checkpoint, "samples": samples, "weights": weights}
    recipe = fitting(find_recipe(run, overrides), overrides)
    with trusted(trust), joined(recipe, **call) as (place, watchdog), telling():

        def measure(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
            recipe = fitting(stored_recipe(manifest, overrides), overrides)
            which = which_weights(weights, recipe)
            if recipe.data.normalize != stored_recipe(manifest).data.normalize:
                raise UserError(
                    "data.normalize: a model sees values as it was trained on them, whatever it is evaluated on; leave "
                    "it out"
                )
            if not recipe.data.valid:
                raise UserError(
                    f"{run}: its recipe has no data.valid to evaluate on; give one: data.valid=[{{path: ...}}]"
                )
            recipe, data, objective = open_parts(recipe, place, stored_statistics(manifest["statistics"]), watchdog)
            flow = build_model(recipe, place, data, objective).flow
            load_weights(flow.model, path, manifest, which, place.saving)
            evaluator = make_evaluator(recipe, place, data, objective, flow, samples=samples)
            metrics = evaluator.metrics(flow, tick=lambda: watchdog.beat(manifest["step"], "validation"))
            check_metrics(objective, metrics)
            metrics = led_by(recipe.checkpoint.best or objective.best_metric, metrics)
            found = {
                "run": str(run),
                "step": manifest["step"],
                "weights": which,
                "samples": evaluator.samples,
                "metrics": metrics,
            }
            sure = evaluator.intervals() if place.world.chief else None
            more = {"intervals": sure, "note": evaluator.note}
            return found | {name: value for name, value in more.items() if value}

        return with_checkpoint(run, checkpoint, measure, place.control)


# ---------------------------------------------------------------- what they share


def fitting(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe in a layout that the ranks here can have: a run is evaluated wherever it was trained."""
    if recipe.precision.compute == "float8":  # of training, for which it pays; weights are fp32
        recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "auto"})})
    try:
        refuse(recipe, find_world().size)
    except UserError:
        if any(override.startswith("parallel") for override in overrides):
            raise
        return recipe.model_copy(update={"parallel": Parallel(attention=recipe.parallel.attention)})
    return recipe


@contextmanager
def joined(recipe: Recipe, **call: Any) -> Iterator[tuple[Place, Watchdog]]:
    """Take part in the process group for the time of the block, watched over from the start.

    Ranks that have other recipes, software or words of a call than the first are refused.

    A rank of several that fails leaves the group as it is: NCCL may wait for the others when it is shut down, with
    nobody watching any more and the error not yet shown. Such a process can but end.
    """
    place = find_place(recipe, **call)
    world = place.world
    in_order = False
    try:
        with Watchdog(place.store, world.rank, world.size, least=float(recipe.run.hang_limit)) as watchdog:
            watchdog.beat(0, "start")
            yield place, watchdog
        in_order = True
        if world.size > 1:
            atexit.register(watchdog.part)
    finally:
        if dist.is_initialized() and (in_order or world.size == 1):
            dist.destroy_process_group()
