"""A run from the outside: train(), evaluate() and load()."""

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vitrail.contents import check_contents, check_name
from vitrail.data.entries import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.launch.world import find_world
from vitrail.models.model import Model
from vitrail.parallel.check import refuse
from vitrail.recipe import Recipe, load_recipe
from vitrail.recipe.changes import diff
from vitrail.recipe.find import find_recipe
from vitrail.recipe.sections import Parallel
from vitrail.training.checkpoint import (
    BadCheckpoint,
    check_tensors,
    list_checkpoints,
    read_manifest,
    read_tensors,
    stored_tensors,
    verify,
)
from vitrail.training.collective import gather_json, on_chief
from vitrail.training.guards import StopRequest, Watchdog
from vitrail.training.safe_dcp import UnsafeCheckpoint
from vitrail.training.session import SLOW_PHASE, Outcome, Session
from vitrail.training.setup import Place, build_model, complete, find_place, make_evaluator, open_data
from vitrail.training.waiting import OPENING

__all__ = ["Outcome", "evaluate", "load", "train"]

T = TypeVar("T")
ATTEMPTS = 10  # to read a checkpoint of a run that goes on and removes them


class CheckpointVanished(UserError):
    """A checkpoint was removed while it was read; told by all ranks alike, so that together they try the next."""


def train(
    recipe: Any,
    *,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    quiet: bool = False,
    trust: bool = False,
    other_data: bool = False,
) -> Outcome:
    """Train as a recipe says: a Recipe, a file, a mapping, or the folder of a run to continue.

    `trust` lets a codec run code that comes with its files, and data files read what they name anywhere; `other_data`
    continues a run on other data than it began with. No recipe can say so.
    """
    recipe = find_recipe(recipe, overrides)
    call = {"fresh": fresh, "trust": trust, "other_data": other_data}
    with trusted(trust), joined(recipe, **call) as (place, watchdog), StopRequest() as stop:
        return Session(recipe, place, stop, watchdog, quiet=quiet, **call).run()


def load(run: str | Path, *, checkpoint: str | int | None = None, weights: str | None = None) -> Model:
    """The trained model of a run, on the CPU and ready to be called; averaged weights where the run has them."""

    def read(path: Path, manifest: dict[str, Any]) -> Model:
        recipe = stored_recipe(manifest)
        with torch.device("meta"):
            model: Model = recipe.model.build()
        model.to_empty(device="cpu")
        load_weights(model, path, manifest, which_weights(weights, recipe), None)
        return model.eval()

    return with_checkpoint(run, checkpoint, read)


def evaluate(
    run: str | Path,
    *,
    checkpoint: str | int | None = None,
    samples: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """Metrics of a run's checkpoint on its validation data; `trust` as for train()."""
    if samples is not None and samples < 1:
        raise UserError(f"samples: {samples} must be at least 1")
    list_or_refuse(run, checkpoint)
    call = {"checkpoint": checkpoint, "samples": samples, "weights": weights}
    with trusted(trust), joined(fitting(find_recipe(run, overrides), overrides), **call) as (place, watchdog):

        def measure(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
            recipe = fitting(stored_recipe(manifest, overrides), overrides)
            which = which_weights(weights, recipe)
            if not recipe.data.valid:
                raise UserError(
                    f"{run}: its recipe has no data.valid to evaluate on; give one: data.valid=[{{path: ...}}]"
                )
            data = open_data(
                recipe,
                place,
                stored_statistics(manifest["statistics"]),
                beat=lambda: watchdog.beat(0, "opening the data", allowance=OPENING),
            )
            watchdog.beat(0, "start", allowance=SLOW_PHASE)
            recipe = complete(recipe, data)
            objective = recipe.objective.build(recipe.model, data.statistics)
            flow = build_model(recipe, place, data, objective).flow
            load_weights(flow.model, path, manifest, which, place.saving)
            evaluator = make_evaluator(recipe, place, data, objective, flow, samples=samples)
            metrics = evaluator.metrics(
                flow, tick=lambda: watchdog.beat(manifest["step"], "validation", allowance=SLOW_PHASE)
            )
            return {
                "run": str(run),
                "step": manifest["step"],
                "weights": which,
                "samples": evaluator.samples,
                "metrics": metrics,
            }

        return with_checkpoint(run, checkpoint, measure, place.control)


# ---------------------------------------------------------------- what they share


def fitting(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe in a layout that the ranks here can have: a run is evaluated wherever it was trained."""
    if recipe.precision.compute == "float8":  # of training, for which it pays; weights are fp32
        recipe = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"compute": "auto"})})
    try:
        refuse(recipe, find_world().size)
    except UserError:
        if any(override.startswith("parallel") for override in overrides):
            raise
        return recipe.model_copy(update={"parallel": Parallel(attention=recipe.parallel.attention)})
    return recipe


def stored_recipe(manifest: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe inside a checkpoint; it is complete, so it has no business with other files."""
    if "extends" in manifest["recipe"]:
        raise UserError("the recipe in this checkpoint extends another file, which no checkpoint of a run does")
    recipe = load_recipe(manifest["recipe"], overrides)
    if overrides:  # another model would take those of the weights that have the same names, and compute something else
        trees = (load_recipe(manifest["recipe"]).to_tree()["model"], recipe.to_tree()["model"])
        for key, old, new in diff(*trees, "model"):
            if not key.startswith("model.mask"):  # what is hidden has no weights: another share may be asked for
                raise UserError(
                    f"{key}: {old!r} became {new!r}; what a checkpoint holds cannot be changed; leave it out"
                )
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
            watchdog.beat(0, "start", allowance=SLOW_PHASE)
            yield place, watchdog
        in_order = True
        if world.size > 1:
            atexit.register(watchdog.part)
    finally:
        if dist.is_initialized() and (in_order or world.size == 1):
            dist.destroy_process_group()


def with_checkpoint(
    run: str | Path, checkpoint: str | int | None, use: Callable[[Path, dict[str, Any]], T], group: Any = None
) -> T:
    """What `use` makes of a verified checkpoint and its manifest; tried with the next if the run removes it meanwhile.

    Rank 0 chooses, since a run that goes on saves and removes checkpoints. What else one rank refuses, a broken image
    say, ends it at once: the others are computing, and would not hear a question.
    """

    def choose() -> tuple[str, dict[str, Any]]:
        path, manifest = find_checkpoint(run, checkpoint)
        return str(path), manifest

    for _ in range(ATTEMPTS):
        path, manifest = choose() if group is None else on_chief(choose, group)
        try:
            return use(Path(path), manifest)
        except CheckpointVanished:
            continue
    raise UserError(
        f"{run}: its checkpoints are removed faster than they can be read; try again when the run has ended"
    )


def list_or_refuse(run: str | Path, checkpoint: str | int | None) -> list[Path]:
    """Checkpoints of a run that were asked for, newest first."""
    check_name(Path(run), "run folder")
    folder = Path(run) / "checkpoints"
    found = list_checkpoints(folder)
    if checkpoint is not None:
        if not str(checkpoint).isdecimal():
            raise UserError(f"checkpoint: {checkpoint!r} is not a step; give a number such as 200")
        found = [p for p in found if int(p.name[5:]) == int(checkpoint)]
    if not found:
        wanted = "checkpoint" if checkpoint is None else f"checkpoint of step {checkpoint}"
        have = ", ".join(str(int(p.name[5:])) for p in list_checkpoints(folder)) or "none"
        raise UserError(f"{run}: no {wanted} here (there are: {have}); give the folder of a run that has saved one")
    return found


def find_checkpoint(run: str | Path, checkpoint: str | int | None) -> tuple[Path, dict[str, Any]]:
    """A verified checkpoint of a run: the one of a step, or the newest good one."""
    for _ in range(ATTEMPTS):
        problems, listed = [], list_or_refuse(run, checkpoint)
        check_contents(Path(run), reading=True)
        for path in listed:
            try:
                manifest = read_manifest(path)
                verify(path, manifest)
                stored_tensors(path, manifest)
                return path, manifest
            except (BadCheckpoint, UnsafeCheckpoint, OSError) as error:
                problems.append(f"{path.name}: {error}")
        if list_or_refuse(run, checkpoint) == listed:  # otherwise the run has saved and removed some meanwhile
            break
    raise UserError(f"{run}: no usable checkpoint ({'; '.join(problems)})")


def which_weights(weights: str | None, recipe: Recipe) -> str:
    if weights not in (None, "ema", "raw"):
        raise UserError(f"weights: {weights!r} is unknown; ask for 'ema' or 'raw'")
    if weights == "ema" and recipe.ema is None:
        raise UserError("weights: this run has no moving average; ask for 'raw'")
    return weights or ("ema" if recipe.ema else "raw")


def load_weights(model: Model, path: Path, manifest: dict[str, Any], weights: str, group: Any) -> None:
    """Fill a model, of which each rank of the group may have a part; all that is stored must have a place in it.

    Ends alike on all ranks, whichever of them finds what is wrong.
    """
    prefix = "ema" if weights == "ema" else "model"
    state = {f"{prefix}.{name}": p.detach() for name, p in model.named_parameters()}
    told: dict[str, Any] = {"names": list(state), "problem": None}
    stored: list[str] = []
    try:
        known = stored_tensors(path, manifest)
        stored = [name for name in known if name.startswith(f"{prefix}.")]
        check_tensors(known, state)
    except (BadCheckpoint, UnsafeCheckpoint, OSError) as error:
        told["problem"] = str(error)
    ranks = [told] if group is None else gather_json(told, group)
    problem = next((rank["problem"] for rank in ranks if rank["problem"]), None)
    taken = {name for rank in ranks for name in rank["names"]}
    unused = next((name for name in stored if name not in taken), None)
    if problem is None and unused is not None:
        problem = f"it has a tensor {unused!r} that the model lacks, so it was made by a different model"
    try:
        if problem is not None:
            raise BadCheckpoint(problem)
        read_tensors(path, manifest, state, group)
    except BadCheckpoint as error:
        there = os.path.exists(path)
        gone = not all([there] if group is None else gather_json(there, group))
        kind = CheckpointVanished if gone else UserError
        raise kind(f"checkpoint {path} was not loaded: {error}; try another one of this run") from None
