"""Where the time of a step goes: a few steps with marks between their parts, apart from the steps that are timed.

A mark on a GPU is an event in its stream, so nothing waits for it; on a CPU it is the clock. Each part lasts from its
mark to the next one, whatever the next one begins:

- data: from the end of a step to the moment at which the next batch is there
- forward: masks, noise and tokens too, and the loss; backward: with what sharding exchanges during it
- optimizer: all that comes after: gradients added up and clipped, the update, the moving average

A pass that is replayed shows no parts: forward and backward then have the shares that they have of a usual one. Before
each of the two the device is held while the host launches ahead, so that it hardly waits for launches here either.

Communication overlaps with these, so it is measured by a profiler and counted besides: the time in which NCCL or gloo
is at work on this rank, its waiting for slower ranks included.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
        """Of each part, over all steps."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        found: Counter[str] = Counter()
        for (part, began), (_, ended) in zip(self.points, self.points[1:], strict=False):
            found[part] += began.elapsed_time(ended) / 1000 if on_gpu else ended - began
        return found


@contextmanager
def marked(trainer: Any, marks: Marks, ahead: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Put marks between the parts of the trainer's steps, for the time of the block; `ahead` comes before backwards."""

    def prepare(micro: Any) -> Any:
        marks.put("forward")
        return type(trainer)._prepare(trainer, micro)

    def judge(output: Any, targets: Any) -> Any:
        loss = type(trainer)._judge(trainer, output, targets)
        ahead()
        marks.put("backward")
        return loss

    gradients = trainer.flow.gradients

    def add_up() -> None:
        marks.put("optimizer")
        type(gradients).add_up(gradients)

    if trainer.flow.pipeline is None:  # in a pipeline forward and backward of micro-batches take turns
        trainer._prepare, trainer._judge = prepare, judge
    gradients.add_up = add_up
    replay, trainer.flow.replay = trainer.flow.replay, None
    if replay is not None:
        replay.make_way()
    try:
        with trainer.expecting(lambda: None):  # each step prepares its own batch
            yield
    finally:
        del gradients.add_up
        trainer.flow.replay = replay
        if trainer.flow.pipeline is None:
            del trainer._prepare, trainer._judge


def split_step(
    trainer: Any, batches: Iterator[Any], act: Callable[[Any], Any], seconds: float, wait: float | None = None
) -> dict[str, float | None]:
    """Seconds of each part of a step that takes so many, and waits so long for data where that is known better."""
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


def communication(batches: Iterator[Any], act: Callable[[Any], Any], device: torch.device) -> float | None:
    """Share of a step in which this rank's collectives are at work; None where the profiler does not tell.

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


def is_collective(name: str, on_gpu: bool) -> bool:
    """Whether this is the kernel of a collective (RCCL's have the same names), or its work on a CPU."""
    return name.startswith(("ncclDevKernel", "ncclKernel")) if on_gpu else name.startswith("gloo:")


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
