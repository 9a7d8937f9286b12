"""The numbers of a result, from the windows of a measurement and the facts of its ranks."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from vitrail.launch.machine import environment
from vitrail.layers.flops import peak_tflops
from vitrail.training.diagnose import UNSTEADY, Opened
from vitrail.training.meters import memory_gib
from vitrail.training.setup import Place
from vitrail.training.trainer import Trainer

GIB = 2**30
VISIBLE = "encoder.blocks"  # a layer that sees visible tokens alone, where some are hidden


def speed(parts: Opened, trainer: Trainer | None, windows: list[float]) -> dict[str, Any]:
    """Of the median window; what counts FLOPs is None where nothing is trained."""
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


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles, or the extremes of fewer than four."""
    if len(values) < 4:
        return min(values), max(values)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[0], quartiles[2]


def slowest(windows: Sequence[Sequence[float]]) -> list[float]:
    """Of every window the time of the rank that took longest: where ranks do not meet, only then all have done it."""
    return [max(together) for together in zip(*windows, strict=True)]


def memory_of(device: torch.device) -> dict[str, float]:
    """Largest since the warm-up; on a CPU that of this process, which keeps no reserve."""
    allocated = memory_gib(device)
    on_gpu = device.type == "cuda"
    return {"allocated": allocated, "reserved": torch.cuda.max_memory_reserved(device) / GIB if on_gpu else allocated}


def retries_of(device: torch.device) -> int:
    """Times so far that the allocator gave memory back to the device to go on."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def used_since(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def energy_of(ranks: list[dict[str, Any]], samples: int) -> float | None:
    joules = [rank["joules"] for rank in ranks]
    return None if None in joules else sum(joules) / samples


def notes_on(windows: list[float], skipped: int, ranks: list[dict[str, Any]]) -> list[str]:
    """What makes a result less than it seems."""
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
