"""Looks at a recipe before a training: a picture of what the model will see, where time goes, and batches themselves.

All set up the parts of a run as a training would, and leave nothing behind: no run folder is made.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from vitrail.data.batch import Batch
from vitrail.data.look.inspect import open_source, suggest_crop
from vitrail.data.look.preview import measure_io, peak_rss
from vitrail.data.look.preview import preview as draw_preview
from vitrail.data.order.sampler import Order
from vitrail.data.reading.loader import Loader
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.launch.world import find_world
from vitrail.objectives.objective import Objective
from vitrail.parallel.agree import on_chief
from vitrail.parallel.flow import Flow
from vitrail.parallel.mesh import layout_of
from vitrail.parallel.split import Alone
from vitrail.recipe import Recipe, steps_of
from vitrail.recipe.load import Given, find_recipe
from vitrail.recipe.sections import Parallel
from vitrail.report.figures import check_picture
from vitrail.report.modes import unsteady
from vitrail.report.units import plain
from vitrail.training.failures import Watchdog
from vitrail.training.run import fitting, joined
from vitrail.training.setup import (
    DataParts,
    Place,
    build_model,
    find_place,
    make_loader,
    make_sampler,
    normalised,
    open_parts,
)
from vitrail.training.trainer import Timed, Trainer

Mode = Literal["real", "syn", "io"]
WARM_UP = 3  # steps that are not counted: compilation, caches
ROUNDS = 3
LONG = 10**9  # steps of a run that a measurement never reaches
ENDLESS = (f"run.steps={LONG}", "schedule.steps=null")  # so that no rate comes to its end


@dataclass(frozen=True)
class Opened:
    """The parts of a run that come before its model."""

    recipe: Recipe
    place: Place
    data: DataParts
    objective: Objective
    sampler: Order

    def loader(self, flow: Flow | Alone | None = None) -> Loader:
        flow = flow or Alone(layout_of(Parallel(), 1))
        return make_loader(self.recipe, self.place, self.data, self.sampler, self.objective, flow, step=0, samples=0)

    def trainer(self) -> Trainer:
        """Build the model in its layout, and what trains it."""
        parts = build_model(self.recipe, self.place, self.data, self.objective)
        return Trainer(self.recipe, self.place, self.data, parts, self.objective, self.sampler.epoch)


@contextmanager
def opened(recipe: Given, overrides: Sequence[str] = ()) -> Iterator[Opened]:
    """Open the data and the objective of a recipe, in a layout that fits here."""
    with opened_as_is(fitting(find_recipe(recipe, overrides), overrides)) as (parts, _):
        yield parts


@contextmanager
def opened_as_is(recipe: Recipe) -> Iterator[tuple[Opened, Watchdog]]:
    """Open them in the layout and the types of the recipe and no others; gives the watchdog of the ranks, too."""
    with joined(recipe) as (place, watchdog):
        yield open_before_model(recipe, place, watchdog), watchdog


def open_before_model(recipe: Recipe, place: Place, watchdog: Watchdog | None = None) -> Opened:
    """Open the data of a recipe, and build what comes before its model."""
    recipe, data, objective = open_parts(recipe, place, watchdog=watchdog)
    return Opened(recipe, place, data, objective, make_sampler(recipe, data))


def preview(recipe: Given, out: str | Path, *, samples: int = 4, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Draw what the model of a recipe will see of the first samples; returns the picture's path and their facts."""
    if samples < 1:
        raise UserError(f"samples: {samples} must be at least 1")
    check_picture(out)
    with opened(recipe, overrides) as parts:
        drawn = draw_preview(
            out,
            sources=parts.data.train.sources,
            loader=parts.loader(),
            objective=parts.objective,
            seed=parts.recipe.run.seed,
            samples=samples,
            batch=parts.data.batch,
            title=f"{parts.recipe.run.name}: what the model will see",
        )
        return drawn | {"normalised": normalised(parts.recipe, parts.data)}


def batches(
    recipe: Given, *, overrides: Sequence[str] = (), first: int = 0, last: int | None = None, trust: bool = False
) -> Iterator[Batch]:
    """Yield this rank's batches of the steps `first` to `last` (by default to the run's end), as training has them.

    For a loop of one's own: `vitrail.data.batches(recipe)`.

    They come in the same order and with the same values, augmented, on the recipe's device, read ahead by threads.
    Ranks that share samples get them whole. A process group that is there is used; otherwise the ranks of the launcher
    meet as for a training, until the batches end. `trust` is that of train().
    """
    recipe = find_recipe(recipe, overrides)
    with trusted(trust), _met(recipe) as place:
        parts = open_before_model(recipe, place)
        total = steps_of(parts.recipe.run.steps, batch=parts.data.batch, epoch=parts.sampler.epoch)
        end = total if last is None else last
        if not 0 <= first <= end <= total:
            raise UserError(f"first, last: {first} to {end} are no steps of this run, which has {total}")
        layout = layout_of(recipe.parallel, place.world.size)
        which = place.world.rank // (layout.context * layout.tensor) % layout.data  # of the ranks with other samples
        with closing(parts.loader(Alone(layout, which)).batches(first, end)) as found:
            yield from found


@contextmanager
def _met(recipe: Recipe) -> Iterator[Place]:
    """Meet the other ranks, in their process group if they have one."""
    if not dist.is_initialized():
        place = find_place(recipe)
        try:
            yield place
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return
    world = replace(find_world(), rank=dist.get_rank(), size=dist.get_world_size())
    cuda = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    store, group = dist.HashStore(), dist.new_group(backend="gloo")
    try:
        yield Place(world, device, torch.get_num_threads(), store, store, group, group)
    finally:
        dist.destroy_process_group(group)


def bench(
    what: Any,
    *,
    modes: Sequence[Mode] = (),
    seconds: float = 5.0,
    workers: Sequence[int] = (),
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a recipe's data: training on them (real), on one batch again and again (syn), loading alone (io).

    `what` may also be the path of data, of which loading alone is measured.
    """
    if not seconds > 0:
        raise UserError(f"seconds: {seconds} must be above 0")
    trains = is_recipe(what)
    recipe = what if trains else recipe_for(str(what))
    known: tuple[Mode, ...] = ("real", "syn", "io") if trains else ("io",)
    modes = modes or known
    if strange := [mode for mode in modes if mode not in known]:
        raise UserError(f"mode: {strange[0]!r} trains, which needs a recipe; {what} is data, which --mode io measures")
    results: list[dict[str, Any]] = []
    training = [mode for mode in modes if mode != "io"]
    for place, number in enumerate(workers or (None,)):
        more = [] if number is None else [f"data.workers={number}"]
        with opened(recipe, [*overrides, *ENDLESS, *more]) as parts:
            batch = parts.data.batch
            if training and place == 0:  # reading threads are compared by loading alone
                results += _train(parts, training, seconds)
            if "io" in modes:
                results.append(measure_io(parts.loader(), seconds=seconds))
    return {"batch": batch, "results": results, "summary": summarise(results, batch)}


def _train(parts: Opened, modes: Sequence[Mode], seconds: float) -> list[dict[str, Any]]:
    """Time steps of a training on data as they come, or on one batch that was loaded before.

    The ways take turns, a few rounds each: one after the other, a machine that is busy for a while would make either
    look slow. No reader works in the turns of the other.
    """
    trainer = parts.trainer()
    loader = parts.loader(trainer.flow)
    same = loader.load(loader.counters(0))
    rounds: dict[Mode, list[list[tuple[float, float]]]] = {mode: [] for mode in modes}  # seconds and wait of steps
    skipped = loader.prefetch + 1  # batches that are read while nothing else is done

    def turn(mode: Mode, count: int) -> list[tuple[float, float]]:
        if mode == "syn":
            return _steps(trainer, itertools.repeat(same, count))
        return _steps(trainer, loader.batches(trainer.done, trainer.done + skipped + count))[skipped:]

    _steps(trainer, itertools.repeat(same, WARM_UP))
    slowest = max(turn(mode, 1)[0][0] for mode in modes)
    # Ranks step together, so that all must take as many.
    count = on_chief(lambda: max(2, math.ceil(seconds / ROUNDS / slowest)), parts.place.control)
    for _ in range(ROUNDS):
        for mode in modes:
            rounds[mode].append(turn(mode, count))
    return [_summarise_steps(mode, taken, loader.workers, parts.data.batch) for mode, taken in rounds.items()]


def _steps(trainer: Trainer, batches: Iterator[Batch]) -> list[tuple[float, float]]:
    """Take a step on each batch; seconds of each with its wait, and the wait."""
    taken = []
    for batch, wait in Timed(batches):
        began = time.perf_counter()
        trainer.step(batch, stop_wish=None, watch=False)
        if batch.values.is_cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began + wait, wait))
    return taken


def _summarise_steps(mode: Mode, rounds: list[list[tuple[float, float]]], workers: int, batch: int) -> dict[str, Any]:
    steps = [step for taken in rounds for step in taken]
    median = statistics.median(seconds for seconds, _ in steps)
    medians = [statistics.median(seconds for seconds, _ in taken) for taken in rounds]
    return {
        "mode": mode,
        "workers": workers,
        "steps": len(steps),
        "step_seconds": median,
        "fastest_round": min(medians),
        "slowest_round": max(medians),
        "samples_per_s": batch / median,
        "wait_percent": 100 * sum(wait for _, wait in steps) / sum(seconds for seconds, _ in steps),
        "peak_rss_gib": peak_rss(),
    }


def summarise(results: Sequence[dict[str, Any]], batch: int) -> str:
    """Say in one sentence what limits a training, or why these numbers do not tell."""
    if reason := unsteady(results):
        return f"no verdict: {reason}; other work keeps this machine busy, so measure again when it is quiet"
    real, syn, io = (next((r for r in results if r["mode"] == mode), None) for mode in ("real", "syn", "io"))
    parts = []
    if real is not None:
        parts.append(f"{real['wait_percent']:.0f} % of the step waits for data")
        if syn is not None:
            slower = 100 * (real["step_seconds"] / syn["step_seconds"] - 1)
            parts.append(
                f"a step takes {real['step_seconds']:.3g} s with real data and {syn['step_seconds']:.3g} s with data "
                f"made once ({slower:+.0f} %)"
            )
    elif syn is not None:
        parts.append(f"a step takes {syn['step_seconds']:.3g} s with data made once")
    if io is not None:
        parts.append(f"loading alone gives {plain(io['samples_per_s'], 3)} samples/s ({io['gb_per_s']:.3g} GB/s)")
        if syn is not None:
            wanted = batch / syn["step_seconds"]
            slow = io["samples_per_s"] < 1.1 * wanted
            advice = "raise data.workers or data.reuse, or set data.stage" if slow else "reading is fast enough"
            parts.append(f"the model can take {plain(wanted, 3)} samples/s: {advice}")
        else:
            most = max(io["where_percent"], key=io["where_percent"].__getitem__)
            parts.append(f"most of the time goes to: {most}")
    return "; ".join(parts)


def is_recipe(what: Any) -> bool:
    """Tell whether this is a recipe or a run rather than data."""
    if not isinstance(what, str | Path):
        return True
    place = Path(what)
    return (place / "recipe.yaml").is_file() if place.is_dir() else place.suffix.lower() in (".yaml", ".yml", ".json")


def recipe_for(path: str) -> dict[str, Any]:
    """Make a recipe that reads crops of some data; its model is never built."""
    config, source = open_source(path, kind=None, settings=None)
    crop = suggest_crop(source)
    across = source.items[0].slices
    crop = tuple(size for axis, size in enumerate(crop) if axis != across)
    common = math.gcd(*crop)
    patch = next((size for size in range(common // 2, 0, -1) if common % size == 0), 1)  # so that there are a few
    encoder = {"width": 16, "depth": 1, "heads": 1, "patch": patch, "positions": "sincos"}
    return {
        "run": {"name": "bench", "steps": 1},
        "model": {"kind": "mae", "ndim": len(crop), "encoder": encoder},
        "data": {
            "train": [{"path": path, "kind": config.kind}],
            "crop": list(crop),
            "batch": 16,
            "normalize": "none",
        },
    }
