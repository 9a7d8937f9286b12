"""Measurement of one recipe: set up as a training is, in this process and its fellow ranks; no run folder is made.

- warm-up is left out: steps until three in a row take the same time, within bounds (compilation, autotuning, caches)
- a window is a number of steps; its number is its time divided by these, so that a loader which comes in bursts is
  counted in full. Steps follow one another without extra waits: one lasts from the end of the step before to its own
- with several ranks a window is that of the slowest, and so is the time that waits for data
- the result is the median over windows, with the quartiles beside it (the extremes of fewer than four)
- modes: real; syn, one batch that is on the device already; io, loading alone; compute, syn on one rank alone

Where the time of a step goes is seen in a few steps with marks between their parts, apart from the steps that are
timed. A mark on a GPU is an event in its stream, so nothing waits for it; on a CPU it is the clock. Parts last from
their mark to the next one:

- data: from the end of a step to the moment at which the next batch is there
- forward: masks, noise and tokens too, and the loss; backward: with what sharding exchanges during it
- optimizer: all that comes after: gradients added up and clipped, the update, the moving average

A pass that is replayed shows no parts: forward and backward then have the shares that they have of a usual one. Before
each of the two the device is held while the host launches ahead, so that it hardly waits for launches here either.
Communication overlaps with these, so it is measured by a profiler and counted besides: the time in which NCCL or gloo
is at work on this rank, its waiting for slower ranks included."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from vitrail.bench import check_mode
from vitrail.bench.runner import SCHEMA, describe
from vitrail.data.batch import Batch
from vitrail.errors import UserError
from vitrail.launch.machine import environment
from vitrail.launch.world import find_world
from vitrail.layers.flops import peak_tflops
from vitrail.parallel.agree import gather_json, on_chief, share_json
from vitrail.parallel.mesh import layout_of
from vitrail.parallel.split import Alone
from vitrail.recipe.load import Given, find_recipe
from vitrail.report.bench_cells import spread
from vitrail.report.facts import strict
from vitrail.report.modes import UNSTEADY
from vitrail.training.diagnose import ENDLESS, LONG, Opened, opened_as_is
from vitrail.training.evaluate import memory_gib
from vitrail.training.profiling import parted
from vitrail.training.setup import Place
from vitrail.training.timeline import covered, is_collective
from vitrail.training.trainer import Timed, Trainer


class Energy:
    """The counter of one device; None where it does not tell."""

    def __init__(self, device: torch.device):
        self._library: Any
        self._handle: Any
        self._library, self._handle = _open(device) if device.type == "cuda" else (None, None)

    def joules(self) -> float | None:
        """Return what it has used since some moment in the past, always the same one."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1000 if code == 0 else None


def _open(device: torch.device) -> tuple[Any, Any]:
    """Open NVIDIA's management library and its handle of a device, found by the one name that both sides know."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(handle)) == 0:
            return library, handle
    except (OSError, AttributeError):  # AMD, or no such library or function
        pass
    return None, None


PARTS = ("data", "forward", "backward", "optimizer")
STEPS = 3
CYCLES = 3e9  # a second: more than the clock of a GPU has, so that it is held at least as long as asked
PROFILED = 2


class Marks:
    """Points in time, each with the name of the part that begins there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.points: list[tuple[str, Any]] = []

    def put(self, part: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append((part, event))
        else:
            self.points.append((part, time.perf_counter()))

    def seconds(self) -> Counter[str]:
        """Return the seconds of each part over all steps."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        found: Counter[str] = Counter()
        for (part, began), (_, ended) in zip(self.points, self.points[1:], strict=False):
            found[part] += began.elapsed_time(ended) / 1000 if on_gpu else ended - began
        return found


@contextmanager
def marked(trainer: Trainer, marks: Marks, ahead: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Put marks between the parts of the trainer's steps, for the time of the block; `ahead` comes before backwards."""

    replay, trainer.flow.replay = trainer.flow.replay, None
    if replay is not None:
        replay.make_way()
    try:
        # Each step prepares its own batch.
        with trainer.expecting(lambda: None), parted(trainer, marks.put, ahead):
            yield
    finally:
        trainer.flow.replay = replay


def split_step(
    trainer: Trainer, batches: Iterator[Batch], act: Callable[[Batch], Any], seconds: float, wait: float | None = None
) -> dict[str, float | None]:
    """Return seconds of each part of a step that takes so many, and waits so long for data if that is known better."""
    marks, replays, launching = Marks(trainer.place.device), trainer.flow.replay is not None, 0.0

    def ahead() -> None:
        if launching:
            marks.put("held")
            hold(launching)

    with marked(trainer, marks, ahead):
        began = time.perf_counter()
        act(next(batches))  # in any case, so that as many steps are taken with and without replay
        launching = time.perf_counter() - began if replays else 0.0
        marks.points.clear()
        for _ in range(STEPS):
            marks.put("data")
            batch = next(batches)
            ahead()
            marks.put("forward")
            act(batch)
        marks.put("end")
    found: dict[str, float | None] = {part: spent / STEPS for part, spent in marks.seconds().items()}
    if wait is not None:
        found["data"] = wait
    if replays:
        passing, rest = (sum(found.get(part) or 0.0 for part in some) for some in (PARTS[1:3], (PARTS[0], PARTS[3])))
        share = max(0.0, seconds - rest) / passing if passing else 0.0
        found |= {part: share * (found.get(part) or 0.0) for part in PARTS[1:3]}
    if trainer.flow.pipeline is not None:  # one cannot be told from the other
        found["forward"] = found["backward"] = None
    return {part: found.get(part) for part in PARTS}


def hold(seconds: float) -> None:
    """Keep the GPU from what is launched after this."""
    torch.cuda._sleep(int(CYCLES * seconds))


def communication(batches: Iterator[Batch], act: Callable[[Batch], Any], device: torch.device) -> float | None:
    """Return the share of a step in which this rank's collectives are at work; None where the profiler does not tell.

    A share, because a profiler slows down all that it looks at. Its first step is left out.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    on_gpu, began = device.type == "cuda", 0.0
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=PROFILED, repeat=1)) as profiler:
        for number in range(1 + PROFILED):
            if number:
                profiler.step()
            if number == 1:
                began = time.perf_counter()
            act(next(batches))
            if on_gpu:
                torch.cuda.synchronize(device)
        took = time.perf_counter() - began
    spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if is_collective(e.name, on_gpu)]
    return min(1.0, covered(spans) / 1e6 / took) if spans else None


GIB = 2**30
VISIBLE = "encoder.blocks"  # a layer that sees visible tokens alone, where some are hidden


def speed(parts: Opened, trainer: Trainer | None, windows: list[float]) -> dict[str, Any]:
    """Return the speeds of the median window; what counts FLOPs is None where nothing is trained."""
    median, (low, high) = statistics.median(windows), spread(windows)
    rate = parts.data.batch / median
    objective, world = parts.objective, parts.place.world.size
    found: dict[str, Any] = {
        "windows": windows,
        "step_seconds": {"median": median, "low": low, "high": high},
        "samples_per_s": rate,
        "images_per_s": rate if parts.recipe.model.ndim == 2 else None,
        "tokens_per_s": {
            "all": rate * objective.tokens_per_sample(),
            "visible": rate * objective.tokens_at(VISIBLE),
        },
        "tflops": None,
        "mfu": None,
        "hfu": None,
    }
    if trainer is None:
        return found
    flops, device = objective.flops(trainer.model), parts.place.device
    peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    each = rate / world / 1e12
    hardware = each * flops.hardware(recompute=trainer.flow.again)
    found["tflops"] = each * flops.training
    return found | ({"mfu": found["tflops"] / peak, "hfu": hardware / peak} if peak else {})


def slowest(windows: Sequence[Sequence[float]]) -> list[float]:
    """Return every window's time on the slowest rank: where ranks do not meet, only then all have done it."""
    return [max(together) for together in zip(*windows, strict=True)]


def memory_of(device: torch.device) -> dict[str, float]:
    """Return the peaks in GiB since the warm-up; on a CPU that of this process, which keeps no reserve."""
    allocated = memory_gib(device)
    on_gpu = device.type == "cuda"
    return {"allocated": allocated, "reserved": torch.cuda.max_memory_reserved(device) / GIB if on_gpu else allocated}


def retries_of(device: torch.device) -> int:
    """Count how often the allocator gave memory back to the device to go on."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def used_since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def energy_of(ranks: list[dict[str, Any]], samples: int) -> float | None:
    joules = [rank["joules"] for rank in ranks]
    return None if None in joules else sum(joules) / samples


def notes_on(windows: list[float], skipped: int, ranks: list[dict[str, Any]]) -> list[str]:
    """Say what makes a result less than it seems."""
    notes = []
    if max(windows) > UNSTEADY * min(windows):
        notes.append(f"a step took {min(windows):.3g} s in one window and {max(windows):.3g} s in another")
    if skipped:
        notes.append(f"{skipped} of the timed steps were not finite and left out their update")
    if any(rank["retries"] for rank in ranks):
        notes.append("memory was so short that the allocator had to give some back and try again")
    return notes


def nodes_of(place: Place) -> int:
    return math.ceil(place.world.size / max(1, place.world.local_size))


def environment_of(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    found = environment()
    name = torch.cuda.get_device_name(device) if on_gpu else found["cpu"]["model"]
    return {"device": name, "torch": torch.__version__, **found}


LEAST_WARM, MOST_WARM = 3, 20  # steps of a warm-up that ends by itself, and of its latest that are compared
STEADY = 1.1  # times as long as the shortest of the latest three, at most
WINDOW_SECONDS = 1.0  # aimed at, where the number of steps is not given
LEAST_STEPS, MOST_STEPS = 2, 50  # of such a window

Step = tuple[float, float]  # seconds, and those of them that waited for data


def measure(
    recipe: Given,
    overrides: Sequence[str] = (),
    *,
    mode: str = "real",
    windows: int = 5,
    steps: int | None = None,
    warm_up: int | None = None,
    name: str = "",
    keys: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of one cell, the same on every rank; `steps` of a window and `warm_up` are chosen if None."""
    check_options(mode, windows, steps, warm_up)
    if mode == "compute" and find_world().size > 1:
        raise UserError("mode compute: it is measured on one rank alone; start one process, or use mode syn")
    began = time.monotonic()
    with opened_as_is(find_recipe(recipe, [*overrides, *ENDLESS])) as (parts, watchdog):
        device = parts.place.device
        energy, retries = Energy(device), retries_of(device)
        work = _Work(parts, mode)
        try:
            clock = _Clock(work, partial(watchdog.beat, phase="measuring"))
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
    """The batches of a mode, and the work that is done with them."""

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
            self.trainer = parts.trainer()
            self.parameters = self.trainer.parts.parameters
            self.notes = list(self.trainer.flow.notes)
            loader = parts.loader(self.trainer.flow)
        self.lead = loader.prefetch + 2 if mode in ("real", "io") else 0  # batches that were read while nothing ran
        self.batches: Iterator[Batch]
        self._open = ExitStack()
        if mode in ("real", "io"):
            stream = Timed(self._open.enter_context(closing(loader.batches(0, LONG))), loader.has_next)
            self.batches, coming = (batch for batch, _ in stream), stream.coming
        else:
            same = loader.load(loader.counters(0))
            self.batches, coming = itertools.repeat(same), lambda: same
        if self.trainer is not None:
            self._open.enter_context(self.trainer.expecting(coming))

    def act(self, batch: Batch) -> None:
        if self.trainer is not None:
            self.loss = self.trainer.step(batch, stop_wish=None, watch=False).loss
        elif batch.values.is_cuda:
            torch.cuda.synchronize()

    @property
    def recording(self) -> int:
        """Return after how many steps passes have been recorded, if they are to be."""
        return 0 if self.trainer is None or self.trainer.flow.replay is None else self.trainer.flow.replay.warm + 1

    @property
    def skipped(self) -> int:
        """Return how many steps left out their update, because something was not finite."""
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
        """Return facts of the model and its tokens; those of the encoder are the visible ones."""
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
        """Let the next step begin now, whatever was done since the last one."""
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
    """Take steps that are not counted: so many, or until they are steady; all ranks take the same number.

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
