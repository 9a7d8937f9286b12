"""One recipe measured: set up as a training is, in this process and its fellow ranks; no run folder is made.

- warm-up is left out: steps until three in a row take the same time, within bounds (compilation, autotuning, caches)
- a window is a number of steps; its number is its time divided by these, so that a loader which comes in bursts is
  counted in full. Steps follow one another without extra waits: one lasts from the end of the step before to its own
- with several ranks a window is that of the slowest, and so is the time that waits for data
- the result is the median over windows, with the quartiles beside it (the extremes of fewer than four)
- modes: real; syn, one batch that is on the device already; io, loading alone; compute, syn on one rank alone
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from vitrail.bench import check_mode
from vitrail.bench.energy import Energy
from vitrail.bench.facts import SCHEMA, describe
from vitrail.bench.numbers import (
    VISIBLE,
    energy_of,
    environment_of,
    memory_of,
    nodes_of,
    notes_on,
    retries_of,
    slowest,
    speed,
    used_since,
)
from vitrail.bench.split import PARTS, communication, split_step
from vitrail.errors import UserError
from vitrail.launch.world import find_world
from vitrail.parallel.mesh import layout_of
from vitrail.recipe.find import find_recipe
from vitrail.report.facts import strict
from vitrail.training.collective import gather_json, on_chief, share_json
from vitrail.training.diagnose import LONG, Alone, Opened, opened_as_is
from vitrail.training.session import SLOW_PHASE
from vitrail.training.setup import Place, build_model
from vitrail.training.trainer import Timed, Trainer

LEAST_WARM, MOST_WARM = 3, 20  # steps of a warm-up that ends by itself, and of its latest that are compared
STEADY = 1.1  # times as long as the shortest of the latest three, at most
WINDOW_SECONDS = 1.0  # aimed at, where the number of steps is not given
LEAST_STEPS, MOST_STEPS = 2, 50  # of such a window

Step = tuple[float, float]  # seconds, and those of them that waited for data


def measure(
    recipe: Any,
    overrides: Sequence[str] = (),
    *,
    mode: str = "real",
    windows: int = 5,
    steps: int | None = None,
    warm_up: int | None = None,
    name: str = "",
    keys: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of one cell, the same on every rank; `steps` of a window and `warm_up` are chosen if None."""
    check_options(mode, windows, steps, warm_up)
    if mode == "compute" and find_world().size > 1:
        raise UserError("mode compute: it is measured on one rank alone; start one process, or use mode syn")
    began = time.monotonic()
    with opened_as_is(find_recipe(recipe, [*overrides, f"run.steps={LONG}"])) as (parts, watchdog):
        device = parts.place.device
        energy, retries = Energy(device), retries_of(device)
        work = _Work(parts, mode)
        try:
            clock = _Clock(work, partial(watchdog.beat, phase="measuring", allowance=SLOW_PHASE))
            warmed = _warm_up(clock, warm_up, parts.place)
            typical = statistics.median(seconds for seconds, _ in warmed[-LEAST_WARM:])
            count = steps or on_chief(lambda: _fitting_steps(typical), parts.place.control)
            skipped, before = work.skipped, energy.joules()
            clock.begin()
            rows = [clock.take(count) for _ in range(windows)]
            mine = memory_of(device) | {
                "retries": retries_of(device) - retries,
                "joules": used_since(before, energy.joules()),
                "windows": [sum(seconds for seconds, _ in row) / count for row in rows],
                "wait": statistics.fmean(wait for row in rows for _, wait in row),
            }
            ranks = gather_json(mine, parts.place.control)
            skipped = work.skipped - skipped
            each = slowest([rank["windows"] for rank in ranks])
            split = work.split(max(rank["wait"] for rank in ranks), statistics.median(each))
        finally:
            work.close()
        result = {
            "schema": SCHEMA,
            "name": name,
            "keys": keys or {},
            "status": "ok",
            "error": None,
            "mode": mode,
            **describe(
                parts.recipe, gpus=parts.place.world.size, nodes=nodes_of(parts.place), on_gpu=device.type == "cuda"
            ),
            **work.facts(),
            **speed(parts, work.trainer, each),
            "split": split,
            "memory": {
                "allocated_gib": max(rank["allocated"] for rank in ranks),
                "reserved_gib": max(rank["reserved"] for rank in ranks),
                "per_rank": [rank["allocated"] for rank in ranks],
            },
            "retries": sum(rank["retries"] for rank in ranks),
            "energy_j": energy_of(ranks, parts.data.batch * count * windows),
            "loss": work.loss,
            "notes": [*work.notes, *notes_on(each, skipped, ranks)],
            "steps": count,
            "warm_up": len(warmed),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": time.monotonic() - began,
            "environment": environment_of(device),
        }
        return share_json(strict(result), parts.place.control)


def check_options(mode: str, windows: int, steps: int | None, warm_up: int | None) -> None:
    check_mode(mode)
    for option, value, least in (("windows", windows, 1), ("steps", steps, 1), ("warm_up", warm_up, 1)):
        if value is not None and value < least:
            raise UserError(f"{option}: {value} must be at least {least}")


class _Work:
    """What is done with batches in a mode, and where they come from."""

    def __init__(self, parts: Opened, mode: str):
        self.parts, self.mode = parts, mode
        self.trainer: Trainer | None = None
        self.loss: float | None = None
        self.notes: list[str] = []  # on how the model was made parallel
        place = parts.place
        if mode == "io":
            layout = layout_of(parts.recipe.parallel, place.world.size)
            # Ranks that share samples read whole ones here; the mesh has tensor and context innermost.
            loader = parts.loader(Alone(layout, (place.world.rank // layout.parts) % layout.data))
            with torch.device("meta"):
                self.parameters = sum(p.numel() for p in parts.recipe.model.build().parameters())
        else:
            model = build_model(parts.recipe, place, parts.data, parts.objective)
            self.parameters = model.parameters
            self.notes = list(model.flow.notes)
            self.trainer = Trainer(parts.recipe, place, parts.data, model, parts.objective, parts.sampler.epoch)
            loader = parts.loader(self.trainer.flow)
        self.lead = loader.prefetch + 2 if mode in ("real", "io") else 0  # batches that were read while nothing ran
        self.batches: Iterator[Any]
        self._open = ExitStack()
        if mode in ("real", "io"):
            stream = Timed(self._open.enter_context(closing(loader.batches(0, LONG))), loader.has_next)
            self.batches, coming = (batch for batch, _ in stream), stream.coming
        else:
            same = loader.load(loader.counters(0))
            self.batches, coming = itertools.repeat(same), lambda: same
        if self.trainer is not None:
            self._open.enter_context(self.trainer.expecting(coming))

    def act(self, batch: Any) -> None:
        if self.trainer is not None:
            self.loss = self.trainer.step(batch, stop_wish=None, watch=False).loss
        elif batch.values.is_cuda:
            torch.cuda.synchronize()

    @property
    def recording(self) -> int:
        """Steps after which passes have been recorded, if they are to be."""
        return 0 if self.trainer is None or self.trainer.flow.replay is None else self.trainer.flow.replay.warm + 1

    @property
    def skipped(self) -> int:
        """Steps so far that were no steps, because something was not finite."""
        return 0 if self.trainer is None else self.trainer.skipped

    def split(self, wait: float, seconds: float) -> dict[str, float | None]:
        if self.trainer is None:
            return dict.fromkeys((*PARTS, "communication")) | {"data": wait}
        # Three more steps would tell little of a loader: the wait is that of the steps that were timed.
        known = wait if self.mode == "real" else None
        found = split_step(self.trainer, self.batches, self.act, seconds, known)
        several = self.parts.place.world.size > 1
        share = communication(self.batches, self.act, self.parts.place.device) if several else None
        return found | {"communication": None if share is None else share * seconds}

    def facts(self) -> dict[str, Any]:
        """Of the model and its tokens; those of the encoder are the visible ones."""
        objective, data = self.parts.objective, self.parts.data
        layout = layout_of(self.parts.recipe.parallel, self.parts.place.world.size)
        return {
            "parameters": self.parameters,
            "tokens_all": objective.tokens_per_sample(),
            "tokens_visible": objective.tokens_at(VISIBLE),
            "batch": data.batch,
            "batch_per_rank": data.batch // layout.data,
        }

    def close(self) -> None:
        self._open.close()


class _Clock:
    """Steps one after the other, each with its seconds."""

    def __init__(self, work: _Work, beat: Callable[[int], None]):
        self.work, self.beat = work, beat
        self.done = 0
        self.begin()

    def begin(self) -> None:
        """The next step begins now, whatever was done since the last one."""
        self.last = time.perf_counter()

    def take(self, count: int) -> list[Step]:
        taken = []
        for _ in range(count):
            self.beat(self.done)
            began = time.perf_counter()
            batch = next(self.work.batches)
            wait = time.perf_counter() - began
            self.work.act(batch)
            now = time.perf_counter()
            taken.append((now - self.last, wait))
            self.done, self.last = self.done + 1, now
        return taken


def _warm_up(clock: _Clock, wanted: int | None, place: Place) -> list[Step]:
    """Steps that are not counted: so many, or until they are steady; all ranks take the same number.

    The peak of memory counts from the second on: the first one compiles, and replayed ones allocate nothing.
    """
    taken = clock.take(1)
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)
    if wanted is not None:
        taken += clock.take(wanted - 1)
    else:
        least = max(LEAST_WARM, clock.work.lead, clock.work.recording + LEAST_WARM)
        while len(taken) < max(MOST_WARM, least):
            taken += clock.take(1)
            latest = [seconds for seconds, _ in taken[-LEAST_WARM:]]
            steady = len(taken) >= least and max(latest) <= STEADY * min(latest)
            if share_json(steady, place.control):
                break
    return taken


def _fitting_steps(seconds: float) -> int:
    return min(MOST_STEPS, max(LEAST_STEPS, math.ceil(WINDOW_SECONDS / max(seconds, 1e-6))))
