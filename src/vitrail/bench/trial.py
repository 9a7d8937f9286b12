"""A few training steps in a process of their own: do they fit, and how long do they take?

- the real trainer with its optimizer state, average and gradients; a batch that repeats one or two samples of the data
- as many batches lie on the device as a run would have read ahead
- a small file tells how it went; running out of memory is a result like any other
- the process ends when the one that started it does: its standard input is then closed

`python -m vitrail.bench.trial ORDER RESULT` is started by vitrail.bench.supervise, once for each rank.
"""

import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.disk import write_whole
from vitrail.errors import is_out_of_memory
from vitrail.foreign import trusted

GIB = 2**30


def take_steps(recipe: Any, *, rows: int | None = None, steps: int = 3, trust: bool = False) -> dict[str, Any]:
    """Train for some steps on this rank, in the process group that its environment names; what they took.

    `rows` are the samples of this rank that a step computes, where fewer than the batch tell enough.
    """
    import torch
    import torch.distributed as dist

    from vitrail.training import setup
    from vitrail.training.trainer import Trainer

    place = setup.find_place(recipe)
    try:
        cuda = place.device.type == "cuda"
        if cuda:
            wait_for_memory(place.device)
            torch.cuda.reset_peak_memory_stats()
        with trusted(trust):
            data = setup.open_data(recipe, place, None)
        recipe = setup.complete(recipe, data)
        objective = recipe.objective.build(recipe.model, data.statistics)
        setup.equip(objective, recipe, place, data, trust=trust)
        sampler = setup.make_sampler(recipe, data)
        parts = setup.build_model(recipe, place, data, objective)
        trainer = Trainer(recipe, place, data, parts, objective, sampler.epoch)
        loader = setup.make_loader(recipe, place, data, sampler, objective, parts.flow, step=0, samples=0)
        share = data.batch // parts.flow.layout.data
        batch = repeat(loader.load(loader.counters(0)[: min(2, share)]), share)
        ahead = [batch.values.clone() for _ in range(recipe.data.prefetch + 1)] if cuda else []
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
            "parameters": parts.parameters,
            "device": torch.cuda.get_device_name(place.device) if cuda else "CPU",
            **memory_of(place.device, place.world.local_size),
        }
    finally:
        if dist.is_initialized() and place.world.size == 1:
            dist.destroy_process_group()


def wait_for_memory(device: Any, *, longest: float = 10.0, pause: float = 0.2) -> None:
    """Until what the device has free rises no more: the memory of a trial that was ended may come back late."""
    import torch

    deadline, free = time.monotonic() + longest, -1
    while time.monotonic() < deadline and torch.cuda.mem_get_info(device)[0] > free:
        free = torch.cuda.mem_get_info(device)[0]
        time.sleep(pause)


def repeat(batch: Any, size: int) -> Any:
    """A batch of so many samples, made of those of a smaller one in turn."""
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
    )


def memory_of(device: Any, processes: int) -> dict[str, Any]:
    """Peaks of this process in bytes, and what it may have; a host's memory is shared by its processes."""
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
    from vitrail.memory import memory_bytes

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated": peak, "reserved": peak, "memory": memory_bytes() // processes, "retries": 0}


# ---------------------------------------------------------------- the process


def end_with_parent() -> None:
    """End this process as soon as its standard input is closed."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """The order has recipe (a tree), plugins, trust, rows and steps."""
    order, result = json.loads(Path(arguments[0]).read_text()), Path(arguments[1])
    end_with_parent()
    try:
        from vitrail.errors import UserError
        from vitrail.recipe import load_recipe
        from vitrail.recipe.kinds import load_plugin
        from vitrail.training.failures import is_lost_connection, summary

        for module in order["plugins"]:
            load_plugin(module)
        recipe = load_recipe(order["recipe"])
        found = take_steps(recipe, rows=order["rows"], steps=order["steps"], trust=order["trust"])
    except MemoryError as error:
        found = {"status": "oom", "error": f"MemoryError: {error}".strip(": ")}
    except Exception as error:
        if is_out_of_memory(error):
            found = {"status": "oom", "error": summary(error)[:300]}
        elif is_lost_connection(error):  # another rank knows why
            found = {"status": "lost", "error": summary(error)[:300]}
        else:
            found = {"status": "failed", "error": summary(error)[:1000]}
            if not isinstance(error, UserError):
                import traceback

                traceback.print_exc()
    write_whole(result, json.dumps(found).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: to leave a process group in order may wait for ranks that are gone


if __name__ == "__main__":
    main(sys.argv[1:])
