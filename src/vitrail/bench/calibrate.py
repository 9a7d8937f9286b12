"""Calibration (`vitrail doctor --calibrate`): measures this machine and writes the cluster file that the planner reads.

- one process measures its device (probe.py); several (torchrun, srun, mpirun) measure their links, too: collectives of
  many sizes, explained by a latency and a rate. Ranks of a node form a group, and ranks with the same place on their
  nodes do; all groups of a kind talk at once, so that each finds its share of the network
- what cannot be measured here (links of one process, gaps of the allocator) comes from the known cluster with the same
  device, where there is one, and the file says so
- the host's time to launch a kernel is measured on blocks so small that a device waits for nothing else. Kernels are
  counted as the planner counts them, in the same model on the meta device, so that what Python, autograd and views cost
  beside them is in the number; compiled blocks have fewer kernels, and less Python between them"""

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitrail.bench.probe import TILE, Points, Probe, rising
from vitrail.cost.cluster import Cluster, Curve, Device, Link, known_cluster, write_cluster
from vitrail.cost.trace import trace_model
from vitrail.errors import UserError
from vitrail.foreign import memory_bytes
from vitrail.launch.machine import cpu_model
from vitrail.launch.world import World, connect, find_world, share_of_cores
from vitrail.layers.flops import peak_tflops
from vitrail.models.vit import ViTConfig
from vitrail.parallel.shard import Solo

ASSUMED = Link(latency_us=10.0, gb_s=10.0)  # of links that nobody has measured


def measure_links(
    world: World, device: torch.device, known: Cluster | None, quick: bool, tell: Callable[[str], None]
) -> tuple[Link, Link, str]:
    """Return the links inside a node and between nodes, and a sentence that says what was measured."""
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
    """Return the latency and rate that explain how long collectives take."""
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
    """Fit latency of a hop in microseconds and GB/s of a ring to (bytes, seconds); small and large count alike."""
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
    """Return seconds on the slowest rank, so that all agree; None where the backend has no such collective."""
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


SMALL = ViTConfig(channels=1, shape=(8, 8), patch=4, width=64, depth=8, heads=1, classes=4)


def launch_seconds(probe: Probe, *, compiled: bool) -> float:
    """Return the host's seconds for a kernel, forward and backward, as one rank alone runs them."""
    device, low = probe.device, torch.bfloat16 if probe.on_gpu else torch.float32
    with torch.device("meta"):
        example: dict[str, Any] = SMALL.build().inputs(torch.empty(1, 1, 8, 8))
    compute = "bf16" if probe.on_gpu else "fp32"
    work = trace_model(SMALL, example, _loss, samples=1, compute=compute, compiled=compiled)
    ops = [op for s in work.segments for _ in range(s.count) for op in (*s.forward, *s.backward)]
    kernels = sum(op.kernels for op in (*ops, *work.loss))
    model = SMALL.build().to(device)
    solo = Solo(model, model.blocks(), low)
    if compiled:
        for block in model.blocks():
            block.compile()
    inputs = model.inputs(torch.zeros(1, 1, 8, 8, device=device))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with solo.computing():
            _loss(model(**inputs)).backward()

    step()  # compiles
    return probe.seconds(step, on_device=False) / kernels


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()


GIB = 2**30
Tell = Callable[[str], None]


def calibrate(out: Path | None = None, quick: bool = False, tell: Tell = lambda line: None) -> Cluster:
    """Measure on every rank that this was started on; the first one writes the file, if one is named."""
    if out is not None and (os.path.lexists(out) or not out.parent.is_dir()):
        raise UserError(f"--out: {out} exists or has no folder; give the path of a new file, such as my_cluster.yaml")
    began, world = time.monotonic(), find_world()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", world.device_index(torch.cuda.device_count())) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    connect(world, device.type, timeout=timedelta(minutes=10))
    try:
        if not on_gpu:
            torch.set_num_threads(share_of_cores(world))
        probe = make_probe(device, quick)
        known = known_cluster(device_name(device))
        tell(f"measuring {device_name(device)}{f' on {world.size} ranks' if world.size > 1 else ''}")
        measured = measure_device(probe, known, tell)
        inside, between, told = measure_links(world, device, known, quick, tell)
        if world.size > 1:
            dist.barrier()
    finally:
        dist.destroy_process_group()
    per_node = world.local_size if world.size > 1 or not on_gpu else torch.cuda.device_count()
    cluster = Cluster(
        name="calibrated" if out is None else out.stem,
        device=measured,
        gpus_per_node=per_node,
        nodes=max(1, world.size // world.local_size),
        inside=inside,
        between=between,
        source=f"Measured by `vitrail doctor --calibrate` on {device_name(device) if on_gpu else cpu_model()}; {told}"
        f"{f'; attention is taken to compute tiles of {TILE} tokens' if on_gpu else ''}.",
        overlap=known.overlap if known else 0.9 if on_gpu else 0.0,
        overlap_reduce=known.overlap_reduce if known else None,
        price=known.price if known else None,
        measured={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": str(torch.version.cuda or torch.version.hip or "none"),
            "ranks": str(world.size),
            "seconds": f"{time.monotonic() - began:.0f}",
        },
    )
    if out is not None and world.chief:
        write_cluster(cluster, out)
    return cluster


def make_probe(device: torch.device, quick: bool) -> Probe:
    if device.type == "cuda":
        return Probe(device, 3, 0.03, 0.1) if quick else Probe(device, 5, 0.15, 0.5)
    return Probe(device, 3, 0.02, 0.05) if quick else Probe(device, 5, 0.1, 0.4)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


# ---------------------------------------------------------------- one device


def measure_device(probe: Probe, known: Cluster | None, tell: Tell) -> Device:
    name, on_gpu = device_name(probe.device), probe.on_gpu
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before anything is measured
    tell("  matrix products")
    half, single = probe.products(torch.bfloat16), probe.products(torch.float32)
    tell("  attention")
    attention = probe.attention(torch.bfloat16 if on_gpu else torch.float32)
    tell("  convolutions, copies and launches")
    convolutions = probe.convolutions(torch.bfloat16 if on_gpu else torch.float32)
    best = {"bf16": max(rate for _, rate in half), "fp32": max(rate for _, rate in single)}
    peaks = {**best, **{kind: 1e12 * peak for kind, peak in (known.device.tflops if known else {}).items()}}
    if (told := peak_tflops(name)) is not None:
        peaks["bf16"] = 1e12 * told
    # The planner takes half of the bf16 rate for attention in fp32, which is what a CPU computes in.
    in_half = peaks["bf16"] if on_gpu else peaks["bf16"] / 2
    bandwidth, launch = probe.bandwidth(), launch_seconds(probe, compiled=False)
    compiled = launch_seconds(probe, compiled=True) if on_gpu else None  # a CPU's blocks are not compiled unless asked
    between = probe.elementwise(torch.bfloat16) if on_gpu else {}
    if on_gpu:
        free, total = torch.cuda.mem_get_info(probe.device)
        reserve = max(0, total - free - torch.cuda.memory_reserved(probe.device))
    else:
        total, reserve = memory_bytes(), rss
    return Device(
        name=name,
        memory_gib=round(total / GIB, 2),
        tflops={kind: _short(peak / 1e12) for kind, peak in peaks.items()},
        bandwidth_gb_s=_short(bandwidth / 1e9),
        gemm=_curve(half, peaks["bf16"]),
        gemm_fp32=_curve(single, peaks["fp32"]),
        attention={way: _curve(points, in_half) for way, points in attention.items()},
        convolution=_curve(convolutions, peaks["bf16" if on_gpu else "fp32"]),
        launch_us=_short(1e6 * launch),
        launch_compiled_us=None if compiled is None else _short(1e6 * compiled),
        kernel_us=_short(1e6 * probe.kernel()) if on_gpu else 0.0,
        elementwise={walk: _curve(points, bandwidth) for walk, points in between.items()},
        attention_tile=TILE if on_gpu else 1,
        reserve_gib=_short(reserve / GIB),
        fragmentation=known.device.fragmentation if known else 1.05 if on_gpu else 1.0,
    )


def _curve(points: Points, peak: float) -> Curve:
    return tuple((x, _short(min(1.0, rate / peak))) for x, rate in rising(points))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# ---------------------------------------------------------------- what is shown


def table(cluster: Cluster) -> list[dict[str, Any]]:
    """Return one row a fact, for people."""
    device = cluster.device
    peak = device.tflops["bf16"]
    rows = [
        ("device", f"{cluster.nodes} x {cluster.gpus_per_node} x {device.name}, {device.memory_gib:.1f} GiB"),
        ("bf16 peak", f"{peak:.4g} TFLOP/s"),
        ("matrix products, bf16", _best(device.gemm, peak)),
        ("matrix products, fp32", _best(device.gemm_fp32, device.tflops["fp32"])),
        ("attention, forward", _best(device.attention["forward"], peak)),
        ("attention, backward", _best(device.attention["backward"], peak)),
        ("convolutions", _best(device.convolution, peak if device.name != "cpu" else device.tflops["fp32"])),
        ("memory", f"{device.bandwidth_gb_s:.4g} GB/s"),
        ("kernels between products", _reached(device.elementwise)),
        ("kernel launch", f"{device.launch_us:.3g} us, {device.compiled_us:.3g} us in compiled blocks"),
        ("least of a kernel", f"{device.kernel_us:.3g} us on the device"),
        ("taken by libraries", f"{device.reserve_gib:.3g} GiB"),
        ("links inside a node", f"{cluster.inside.gb_s:.4g} GB/s, {cluster.inside.latency_us:.3g} us"),
        ("links between nodes", f"{cluster.between.gb_s:.4g} GB/s, {cluster.between.latency_us:.3g} us"),
    ]
    return [{"what": what, "found": found} for what, found in rows]


def _reached(curves: dict[str, Curve]) -> str:
    shares = [f"{walk.replace('_', ' ')} {max(y for _, y in curve):.0%}" for walk, curve in curves.items()]
    return f"up to {', '.join(shares)} of that" if shares else "taken for as fast as that"


def _best(curve: Curve, peak: float) -> str:
    share = max(y for _, y in curve)
    return f"up to {share * peak:.4g} TFLOP/s ({share:.0%})"
