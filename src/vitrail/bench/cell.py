"""The child process of a benchmark: it measures a recipe, or tries whether some steps of it fit.

`python -m vitrail.bench.cell ORDER` does what the order (a small JSON file) says, alone or on each rank that a launcher
has started; supervise.py starts it, or a job. Running out of memory, crashes and hangs so touch no other process.

- of a measurement rank 0 leaves the result in a file; a rank that fails leaves a note beside it, which says why. The
  first rank of a job says when it begins (`.started`): one that the scheduler ends is not taken for one that waits
- a trial takes a few steps with the real trainer, its optimizer state, average and gradients, on a batch that repeats
  one or two samples of the data, with as many batches on the device as a run would have read ahead; each rank leaves
  how it went. Running out of memory is a result like any other
- the process ends when the one that started it does: its standard input is then closed
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from vitrail import disk
from vitrail.bench.supervise import note_path, started_path
from vitrail.disk import write_whole
from vitrail.errors import RunFailed, UserError, chain_of, is_out_of_memory
from vitrail.foreign import trusted


def main(arguments: Sequence[str]) -> int:
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if order["watched"]:
        end_with_parent()
    return _try(order) if "rows" in order else _measure(order)


def end_with_parent() -> None:
    """End this process as soon as its standard input is closed."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _measure(order: dict[str, Any]) -> int:
    """Measure a recipe, and leave the result or a note."""
    from vitrail.launch.world import find_world

    out, note = Path(order["out"]), None
    try:
        note = note_path(out, find_world().rank)
        disk.remove(note, inside=note.parent)
        if order.get("job") and find_world().chief:
            write_whole(started_path(out), json.dumps(who()).encode())
        _load_plugins(order)
        from vitrail.bench.measure import measure

        asked = {name: order[name] for name in ("mode", "windows", "steps", "warm_up", "name", "keys")}
        result = measure(order["recipe"], order["overrides"], **asked)
        if find_world().chief:
            write_whole(out, json.dumps(result, allow_nan=False).encode())
    except Exception as error:
        text = describe_failure(error)
        with contextlib.suppress(Exception):  # a device that broke may not tell its name
            import torch

            from vitrail.bench.measure import environment_of

            text["environment"] = environment_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        write_whole(note or note_path(out, 0), json.dumps(text).encode())
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _try(order: dict[str, Any]) -> NoReturn:
    """Take some steps, and leave how they went."""
    try:
        _load_plugins(order)
        from vitrail.recipe import load_recipe

        recipe = load_recipe(order["recipe"])
        found = take_steps(recipe, rows=order["rows"], steps=order["steps"], trust=order["trust"])
    except Exception as error:
        found = describe_failure(error)
        if found["status"] == "failed" and not found["lost"] and not isinstance(error, UserError):
            import traceback

            traceback.print_exc()
    write_whole(Path(order["out"]), json.dumps(found).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: to leave a process group in order may wait for ranks that are gone


def _load_plugins(order: dict[str, Any]) -> None:
    from vitrail.recipe.plugins import load_plugin

    for module in order["plugins"]:
        load_plugin(module)


def describe_failure(error: Exception) -> dict[str, Any]:
    """Return what is known of a failure: whether memory ran out, another rank had gone, or the input was wrong."""
    from vitrail.training.failures import summary

    full = is_out_of_memory(error)
    return {
        "status": "oom" if full else "failed",
        "error": summary(error)[:1000],
        "lost": is_lost(error),
        "wrong_input": isinstance(error, UserError) and not isinstance(error, RunFailed) and not full,
    }


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, means that another rank has gone, which then knows more."""
    from vitrail.training.failures import is_lost_connection

    return any(map(is_lost_connection, chain_of(error)))


def who() -> dict[str, str]:
    """Return which job this process belongs to, or which process of which host it is, and when."""
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
    job = next((os.environ[name] for name in names if os.environ.get(name)), None)
    told = f"job {job}" if job else f"process {os.getpid()} on {socket.gethostname()}"
    return {"who": told, "date": datetime.now(UTC).isoformat(timespec="seconds")}


# ---------------------------------------------------------------- a trial


def take_steps(recipe: Any, *, rows: int | None = None, steps: int = 3, trust: bool = False) -> dict[str, Any]:
    """Train for some steps on this rank, in the process group that its environment names, and return what they took.

    `rows` are the samples of this rank that a step computes, where fewer than the batch tell enough. No watchdog looks
    on, as it does in a measurement: the supervisors of all ranks do, and want each rank's own reason.
    """
    import torch
    import torch.distributed as dist

    from vitrail.training.diagnose import open_before_model
    from vitrail.training.setup import equip, find_place

    place = find_place(recipe)
    cuda = place.device.type == "cuda"
    try:
        if cuda:
            wait_for_memory(place.device)
            torch.cuda.reset_peak_memory_stats()
        with trusted(trust):
            parts = open_before_model(recipe, place)
        equip(parts.objective, parts.recipe, place, parts.data, trust=trust)
        trainer = parts.trainer()
        loader = parts.loader(trainer.flow)
        share = parts.data.batch // trainer.flow.layout.data
        batch = repeat(loader.load(loader.counters(0)[: min(2, share)]), share)
        ahead = [batch.values.clone() for _ in range(parts.recipe.data.prefetch + 1)] if cuda else []
        seconds, losses, finite = [], [], False
        for _ in range(steps):
            began = time.perf_counter()
            told = trainer.step(batch.narrow(0, rows or share), stop_wish=None, watch=False)  # waits for the device
            seconds.append(time.perf_counter() - began)
            losses.append(told.loss)
            finite = finite or told.finite
        del ahead
        if not finite:  # then no optimizer state was made, and nothing is known
            return {"status": "failed", "error": "loss or gradient was not finite in any step", "losses": losses}
        return {
            "status": "ok",
            "step_seconds": statistics.median(seconds[1:] or seconds),
            "seconds": seconds,
            "losses": losses,
            "parameters": trainer.parts.parameters,
            "device": torch.cuda.get_device_name(place.device) if cuda else "CPU",
            **memory_of(place.device, place.world.local_size),
        }
    finally:
        if dist.is_initialized() and place.world.size == 1:
            dist.destroy_process_group()


def wait_for_memory(device: Any, *, longest: float = 10.0, pause: float = 0.2) -> None:
    """Wait until what the device has free rises no more: the memory of a trial that was ended may come back late."""
    import torch

    deadline, free = time.monotonic() + longest, -1
    while time.monotonic() < deadline and torch.cuda.mem_get_info(device)[0] > free:
        free = torch.cuda.mem_get_info(device)[0]
        time.sleep(pause)


def repeat(batch: Any, size: int) -> Any:
    """Return a batch of so many samples, made of those of a smaller one in turn."""
    import torch

    order = [number % len(batch) for number in range(size)]
    index = torch.tensor(order, device=batch.values.device)

    def take(tensor: Any) -> Any:
        return None if tensor is None else tensor[index]

    return replace(
        batch,
        counters=list(range(size)),
        values=take(batch.values),
        labels=take(batch.labels),
        statistics=None if batch.statistics is None else tuple(map(take, batch.statistics)),
        soft=take(batch.soft),
        span=None if batch.span is None else tuple(map(take, batch.span)),
    )


def memory_of(device: Any, processes: int) -> dict[str, Any]:
    """Return the peaks of this process in bytes, and what it may have; a host's memory is shared by its processes."""
    if device.type == "cuda":
        import torch

        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "used": total - free,  # by all: libraries and other processes take some beside the allocator
            "memory": total,
            "retries": stats.get("num_alloc_retries", 0),
        }
    from vitrail.foreign import memory_bytes

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated": peak, "reserved": peak, "memory": memory_bytes() // processes, "retries": 0}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
