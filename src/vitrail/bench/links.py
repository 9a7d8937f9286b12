"""How fast ranks talk to each other: collectives of many sizes, explained by a latency and a rate.

Inside a node its ranks form a group; between nodes, ranks with the same place on their nodes do. All of these groups
talk at once, so that each finds its share of the network.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vitrail.cost.cluster import Cluster, Link
from vitrail.launch.world import World

ASSUMED = Link(latency_us=10.0, gb_s=10.0)  # of links that nobody has measured


def measure_links(
    world: World, device: torch.device, known: Cluster | None, quick: bool, tell: Callable[[str], None]
) -> tuple[Link, Link, str]:
    """Inside a node, between nodes, and a sentence that says what was measured."""
    inside, between = (known.inside, known.between) if known else (ASSUMED, replace(ASSUMED, gb_s=1.0))
    origin = f"of cluster {known.name}" if known else "assumed"
    if world.size == 1:
        return inside, between, f"links are {origin}, since one process has none"
    told, local = [], world.local_size
    for kind, groups in (
        ("inside a node", [range(n, n + local) for n in range(0, world.size, local)] if local > 1 else []),
        ("between nodes", [range(n, world.size, local) for n in range(local)] if world.size > local else []),
    ):
        if not groups:
            told.append(f"links {kind} are {origin}")
            continue
        tell(f"  links {kind}")
        made = [dist.new_group(list(ranks)) for ranks in groups]  # every rank makes every group
        mine = next(number for number, ranks in enumerate(groups) if world.rank in ranks)
        link = measure_group(made[mine], len(groups[0]), device, quick)
        inside, between = (link, between) if kind == "inside a node" else (inside, link)
    return inside, between, "; ".join(["links are measured", *told])


def measure_group(group: Any, ranks: int, device: torch.device, quick: bool) -> Link:
    """The latency and rate that explain how long collectives take."""
    largest = (2**22 if quick else 2**24) if device.type == "cpu" else (2**26 if quick else 2**28)
    found = []
    for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        points = []
        size = 2**12
        while size <= largest:
            seconds = _time_collective(kind, group, ranks, size, device)
            if seconds is None:
                break
            points.append((float(size), seconds / passes))
            size *= 8
        if points:
            found.append(fit(points, ranks))
    return Link(*(float(f"{statistics.median(values):.4g}") for values in zip(*found, strict=True)))


def fit(points: list[tuple[float, float]], ranks: int) -> tuple[float, float]:
    """Latency of a hop in microseconds and GB/s of a ring, from (bytes, seconds); small and large count alike."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    slope = sum(w * (size - x) * (s - y) for w, (size, s) in zip(weights, points, strict=True)) / spread
    slope = max(slope, 1e-15)
    start = max(y - slope * x, 1e-7)
    return 1e6 * start / (ranks - 1), (ranks - 1) / ranks / slope / 1e9


def _time_collective(kind: str, group: Any, ranks: int, size: int, device: torch.device) -> float | None:
    """Seconds on the slowest rank, so that all agree; None where the backend has no such thing."""
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    taken = []
    try:
        for _ in range(7):
            dist.barrier(group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            calls[kind]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
    except (RuntimeError, NotImplementedError) as error:
        if "support" in str(error).lower() or isinstance(error, NotImplementedError):
            return None
        raise
    seconds = torch.tensor([statistics.median(taken[2:])], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)
