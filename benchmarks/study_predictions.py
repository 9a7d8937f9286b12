"""The planner's answers to the published studies, and the four numbers that its Frontier is calibrated on.

- recipes are configs/vit_fsdp_study/*.yaml, configs/orbit/113b.yaml and configs/mae3d/2b.yaml, made torchtitan-mae's
- one rank alone is under FSDP, too, as it was in these studies
- Base is predicted with patches of 14, which its figures seem to be of, whatever its tables say: see planner_studies.md
- HYBRID_1 is predicted as replicas that exchange nothing: PyTorch's first FSDP makes NO_SHARD of a shard group of one
  rank, and then adds gradients over that one rank. The study's HYBRID_1 rows show no sign of communication either
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import published

from vitrail.cost.cluster import Cluster, Link, load_cluster
from vitrail.cost.memory import BYTES, Memory
from vitrail.cost.plan import GIB, Shares, fits, memory_for, num_parameters, settle, time_for
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.recipe import Recipe, load_recipe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RESULTS = Path(__file__).resolve().parent / "results"
PER_NODE, BATCH = 8, 32  # GCDs of a node, images of a GCD
TOP = 0.55  # share of the peak that large products reach: an estimate, for bf16 at 1e12 FLOP and for fp32
SIDE = 224  # of an image
AS_RUN = {"base": "model.patch=14"}  # how a size seems to have been run, where that is not what its recipe says
MEASURED_AS = {"base": "base14"}  # the same in study_memory.py
GEMM_FLOPS = (1e9, 3e9, 1e10, 3e10, 1e11, 3e11, 1e12)
CALIBRATION = {  # what is solved for: from which number
    "slope of the bf16 curve": ("huge", "FULL_SHARD", 1),
    "time outside steps": ("base", "FULL_SHARD", 1),
    "latency between nodes": ("huge", "FULL_SHARD", 64),
    "bandwidth between nodes": ("3b", "FULL_SHARD", 64),
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A settled recipe on so many GPUs of a cluster."""

    recipe: Recipe
    cluster: Cluster
    gpus: int
    copies: int = 1  # of all that, which do not talk to each other
    outside: float = 0.0  # seconds that the clock ran besides, for each step

    @property
    def layout(self) -> Layout:
        return layout_of(self.recipe.parallel, self.gpus)

    @property
    def shares(self) -> Shares:
        return Shares.of(self.recipe, self.layout)

    @property
    def samples(self) -> int:
        return self.copies * self.shares.batch

    @cached_property
    def seconds(self) -> float:
        found = time_for(self.recipe, self.cluster, self.gpus, self.layout, self.shares, fsdp=True)
        return found.seconds + self.outside

    @cached_property
    def memory(self) -> Memory:
        return memory_for(self.recipe, self.cluster, self.layout, self.shares)

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.cluster)

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


def changes_of(mode: str) -> tuple[str, ...]:
    """How the study's name of a mode reads in a recipe."""
    if mode == "DDP":
        return "parallel.strategy=DDP", "parallel.bucket_mib=25", "precision.compute=fp32", "precision.reduce=fp32"
    if mode == "HYBRID_1":
        return ("parallel.strategy=NO_SHARD",)
    if mode.startswith("HYBRID_"):
        return "parallel.strategy=HYBRID_SHARD", f"parallel.group={mode.removeprefix('HYBRID_')}"
    return (f"parallel.strategy={mode}",)


@lru_cache(maxsize=256)
def recipe_of(path: str, changes: tuple[str, ...], cluster_name: str) -> Recipe:
    return settle(load_recipe(CONFIGS / path, changes), load_cluster(cluster_name))


def study_recipe(model: str, mode: str, *more: str, as_run: bool = True) -> Recipe:
    changed = (AS_RUN[model],) if as_run and model in AS_RUN else ()
    return recipe_of(f"vit_fsdp_study/{model}.yaml", (*changes_of(mode), *changed, *more), "frontier")


def frontier_step(cluster: Cluster, model: str, mode: str, nodes: int, *more: str, as_run: bool = True) -> Prediction:
    """One cell of the study; images are of all nodes."""
    gpus, copies = (1, PER_NODE * nodes) if mode == "HYBRID_1" else (PER_NODE * nodes, 1)
    recipe = study_recipe(model, mode, *more, as_run=as_run)
    return Prediction(recipe, cluster, gpus, copies, outside_steps(cluster, as_run=as_run))


@lru_cache(maxsize=64)
def outside_steps(cluster: Cluster, *, as_run: bool = True) -> float:
    """Seconds for each step: what one cell took longer than predicted. The study's clock ran while workers started."""
    model, mode, nodes = CALIBRATION["time outside steps"]
    inside = Prediction(study_recipe(model, mode, as_run=as_run), cluster, PER_NODE * nodes).seconds
    return max(0.0, published_seconds(model, mode, nodes) - inside)


def published_seconds(model: str, mode: str, nodes: int) -> float:
    """Of a step."""
    return PER_NODE * BATCH * nodes / published.IMAGES_PER_SECOND[model, mode][published.NODES.index(nodes)]


class Gib(NamedTuple):
    """Memory of a GCD."""

    allocated: float
    kept: float  # with what the study's software keeps besides: reserved, or active
    full: bool  # whether that is all that the GCD has


def allocated_gib(cluster: Cluster, model: str, mode: str, nodes: int, *, as_run: bool = True) -> float:
    """What the planner allocates, with two things as the study's program has them.

    - One batch of fp32 images is on the device, and its cast. Here batches are read ahead
    - DDP has buckets of fp32 gradients beside the gradients themselves (it ran without gradient_as_bucket_view) and no
      copies of parameters; gradients come as activations go, and what is more counts
    """
    recipe = study_recipe(model, mode, as_run=as_run)
    found = Prediction(recipe, cluster, PER_NODE * nodes)
    memory = found.memory
    item = BYTES[recipe.precision.compute]
    images = BATCH * 3 * SIDE**2 * (4 + (item if item < 4 else 0))
    peak = memory.peak - memory.inputs + images
    if mode == "DDP":
        owned = 4 * num_parameters(recipe)
        peak += owned - memory.gathered + max(0, owned - memory.gradients - memory.activations)
    return peak / GIB


def gib_of(cluster: Cluster, model: str, mode: str, nodes: int, kind: str, *, as_run: bool = True) -> Gib:
    """`kind`: allocated, active or reserved, for each byte allocated as much as when that software ran on an H200."""
    allocated = allocated_gib(cluster, model, mode, nodes, as_run=as_run)
    row, most = software(model, mode, nodes, as_run=as_run), cluster.device.memory_gib
    kept = allocated * row[kind] / row["allocated"]
    return Gib(allocated, min(kept, most), full=kept > most)


def software(model: str, mode: str, nodes: int, *, as_run: bool = True) -> dict[str, Any]:
    """What study_memory.py measured of the study's program."""
    name = MEASURED_AS.get(model, model) if as_run else model
    strategy = "NO_SHARD" if mode == "HYBRID_1" else mode  # which PyTorch makes of it
    return next(row for row in software_rows() if (row["model"], row["mode"], row["nodes"]) == (name, strategy, nodes))


@lru_cache(maxsize=2)
def software_rows(name: str = "study_memory.json") -> list[dict[str, Any]]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def other_holds() -> dict[float, dict[str, list[float]]]:
    """What was reserved with other holds over what was with the usual one: by hold, by mode."""
    found: dict[float, dict[str, list[float]]] = {}
    for row in software_rows("study_memory_holds.json"):
        usual = next(one for one in software_rows() if all(one[key] == row[key] for key in ("mode", "model", "nodes")))
        found.setdefault(row["hold"], {}).setdefault(row["mode"], []).append(row["reserved"] / usual["reserved"])
    return found


def gh200_step(cluster: Cluster, nodes: int, masked: float) -> Prediction:
    """torchtitan-mae: 32 heads in encoder and decoder, all tokens decoded, parameters kept after the forward."""
    changes = (
        f"model.mask.ratio={masked}", "model.channels=1", "model.encoder.heads=32", "model.encoder.kv_heads=8",
        "model.decoder.kind=self", "model.decoder.heads=32", "model.decoder.decode_ratio=1.0", "data.batch=1/rank",
        "parallel.strategy=SHARD_GRAD_OP", "parallel.recompute=full", "parallel.compile=false",
    )  # fmt: skip
    return Prediction(recipe_of("mae3d/2b.yaml", changes, "gh200"), cluster, 4 * nodes)


def ladder(cluster: Cluster) -> dict[str, Prediction]:
    """ORBIT's rungs on 512 GCDs; one sample a node, then three."""
    alone = ("data.batch=1/rank", "parallel.recompute=none")
    late = ("parallel.prefetch.forward=0", "parallel.prefetch.backward=0")
    full = ("precision.compute=fp32", "precision.reduce=fp32")
    rungs = {
        "unwrapped": (*alone, *late, *full, "parallel.wrap=56"),
        "wrapped": (*alone, *late, *full),
        "bf16": (*alone, *late),
        "prefetch": alone,
        "checkpointing": (),
    }
    return {
        name: Prediction(recipe_of("orbit/113b.yaml", rung, "frontier"), cluster, 512) for name, rung in rungs.items()
    }


def calibrate(cluster: Cluster, *, top: float = TOP, as_run: bool = True) -> Cluster:
    """The cluster with the values that reproduce three of the four numbers; time outside steps does the fourth."""

    def _slope(cluster: Cluster, slope: float) -> Cluster:
        gemm = tuple((flops, round(top * (flops / 1e12) ** slope, 4)) for flops in GEMM_FLOPS)
        return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, gemm=gemm))

    def solve(what: str, low: float, high: float, change: Callable[[Cluster, float], Cluster]) -> None:
        """Bisect for the value at which a step takes as long as published; steps get slower from low to high."""
        nonlocal cluster
        model, mode, nodes = CALIBRATION[what]
        wanted = published_seconds(model, mode, nodes)
        for _ in range(25):
            middle = math.sqrt(low * high)
            slow = frontier_step(change(cluster, middle), model, mode, nodes, as_run=as_run).seconds > wanted
            low, high = (low, middle) if slow else (middle, high)
        cluster = change(cluster, middle)

    solve("slope of the bf16 curve", 0.02, 1.0, _slope)
    for _ in range(10):
        solve("latency between nodes", 1.0, 2000.0, _latency)
        solve("bandwidth between nodes", 20.0, 0.05, _bandwidth)
    return cluster


def _latency(cluster: Cluster, latency_us: float) -> Cluster:
    return dataclasses.replace(cluster, between=Link(round(latency_us, 1), cluster.between.gb_s))


def _bandwidth(cluster: Cluster, gb_s: float) -> Cluster:
    return dataclasses.replace(cluster, between=Link(cluster.between.latency_us, round(gb_s, 3)))
