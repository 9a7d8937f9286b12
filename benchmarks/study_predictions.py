"""The planner's answers to the published studies, and the numbers that its Frontier is fitted with.

- an answer is that of `vitrail plan` with `--as-is`: command() gives its words, and nothing is added to it
- recipes are configs/vit_fsdp_study/*.yaml, configs/orbit/113b.yaml and configs/mae3d/torchtitan_2b.yaml
- Base is predicted with patches of 14 (base14.yaml), which its figures seem to be of, whatever the study's tables say
- HYBRID_1 is predicted as replicas that exchange nothing: one GCD, times their number. PyTorch's first FSDP makes
  NO_SHARD of a shard group of one rank, and then adds gradients over that one rank. The study's HYBRID_1 rows show no
  sign of communication either
- nine numbers of clusters/frontier.yaml are fitted (NUMBERS); all else is specification or an assumption
"""

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import published

from vitrail.cost.cluster import Cluster, Link, load_cluster
from vitrail.cost.memory import BYTES
from vitrail.cost.plan import GIB, Estimate, Shares, estimate, num_parameters, settle, time_for
from vitrail.parallel.mesh import layout_of
from vitrail.recipe import Recipe, load_recipe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RESULTS = Path(__file__).resolve().parent / "results"
PER_NODE, BATCH = 8, 32  # GCDs of a node, images of a GCD
SIDE = 224  # of an image
RECIPES = {"base": "base14", "base16": "base"}  # how Base seems to have been run, and what the study's tables say
TITAN = "mae3d/torchtitan_2b.yaml"
# What is fitted, and where the search for it begins. Nothing else of the cluster's file was solved for.
NUMBERS = {
    "1e10": 0.2,  # share of the bf16 peak that a product of so many FLOPs reaches, and smaller ones
    "1e11": 0.3,
    "1e12": 0.4,  # and larger ones
    "odd": 1.0,  # of that, what is left where a size of the product is odd, as 15B's 13,545 hidden units are
    "latency_us": 100.0,  # from node to node, on the way round a ring
    "gb_s": 2.0,  # of a GCD's share of the network, on up to 8 nodes
    "gb_s_64": 1.0,  # the same on 64 and more
    "hop_speed_128": 0.5,  # of a hop's speed, what is left on 128 nodes; all of it up to 64
    "overlap_reduce": 0.8,  # share of hidden reductions that is free: they compute, too
}
PRODUCTS = ("1e10", "1e11", "1e12")
SHARES = (*PRODUCTS, "odd", "hop_speed_128", "overlap_reduce")  # at most 1

FITS = {  # what is fitted to which sizes; the first is what the cluster's file has, the others predict the sizes left
    "all": ("base", "huge", "1b", "3b", "5b", "15b"),
    "Base to 3B": ("base", "huge", "1b", "3b"),
    "Base, 1B, 5B": ("base", "1b", "5b"),
    "Huge, 3B, 15B": ("huge", "3b", "15b"),
}

Cell = tuple[str, str, int, tuple[str, ...]]  # size, the study's name of a strategy, nodes, further changes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A recipe with the layout that it names, on so many GPUs of a cluster."""

    recipe: Recipe  # settled
    cluster: Cluster
    gpus: int
    copies: int = 1  # of all that, which do not talk to each other

    @cached_property
    def found(self) -> Estimate:
        """What `vitrail plan --as-is` answers."""
        return estimate(self.recipe, self.cluster, self.gpus)

    @property
    def rate(self) -> float:
        return self.copies * self.found.samples_per_second

    @property
    def quick_rate(self) -> float:
        """The same without its memory, which a fit need not know."""
        layout = layout_of(self.recipe.parallel, self.gpus)
        shares = Shares.of(self.recipe, layout)
        return self.copies * shares.batch / time_for(self.recipe, self.cluster, layout, shares).seconds


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


def words_of(cell: Cell) -> tuple[str, tuple[str, ...], int, int]:
    """Recipe, changes, GCDs and how many copies of all that."""
    model, mode, nodes, more = cell
    gpus, copies = (1, PER_NODE * nodes) if mode == "HYBRID_1" else (PER_NODE * nodes, 1)
    return f"vit_fsdp_study/{RECIPES.get(model, model)}.yaml", (*changes_of(mode), *more), gpus, copies


def command(cell: Cell) -> str:
    path, changes, gpus, _ = words_of(cell)
    return f"vitrail plan configs/{path} {' '.join(changes)} --cluster frontier --gpus {gpus} --as-is"


def frontier_step(cluster: Cluster, cell: Cell) -> Prediction:
    path, changes, gpus, copies = words_of(cell)
    return Prediction(recipe_of(path, changes, "frontier"), cluster, gpus, copies)


def parameters_of(step: Prediction) -> float:
    return float(f"{num_parameters(step.recipe):.3g}")


def cells_of(*models: str) -> dict[Cell, int]:
    """Cells of these sizes, or of all, and the images/s that were published: strategies, then 5B without prefetch."""
    found = {
        (model, mode, nodes, ()): rate
        for (model, mode), row in published.IMAGES_PER_SECOND.items()
        for nodes, rate in zip(published.NODES, row, strict=True)
        if rate
    }
    late = {
        ("5b", mode, 8, ("parallel.prefetch.backward=0",)): rate
        for mode, rate in zip(published.PREFETCH_MODES, published.PREFETCH_5B[0], strict=True)
    }
    return {cell: rate for cell, rate in (found | late).items() if not models or cell[0] in models}


class Gib(NamedTuple):
    """Memory of a GCD."""

    allocated: float
    kept: float  # with what the study's software keeps besides: reserved, or active
    full: bool  # whether that is all that the GCD has


def memory_step(cluster: Cluster, model: str, mode: str, nodes: int) -> Prediction:
    """A cell of which memory is known: HYBRID_1 is what PyTorch made of it."""
    return frontier_step(cluster, (model, "NO_SHARD" if mode == "HYBRID_1" else mode, nodes, ()))


def allocated_gib(cluster: Cluster, model: str, mode: str, nodes: int) -> float:
    """What the planner allocates, with two things as the study's program has them.

    - One batch of fp32 images is on the device, and its cast. Here batches are read ahead
    - DDP has buckets of fp32 gradients beside the gradients themselves (it ran without gradient_as_bucket_view) and no
      copies of parameters; gradients come as activations go, and what is more counts
    """
    step = memory_step(cluster, model, mode, nodes)
    found, item = step.found, BYTES[step.recipe.precision.compute]
    images = BATCH * 3 * SIDE**2 * (4 + (item if item < 4 else 0)) / GIB
    peak = found.memory_gib - found.memory["inputs"] + images
    if mode == "DDP":
        owned = 4 * num_parameters(step.recipe) / GIB
        peak += owned - found.memory["gathered"]
        peak += max(0.0, owned - found.memory["gradients"] - found.memory["activations"])
    return peak


def gib_of(cluster: Cluster, model: str, mode: str, nodes: int, kind: str) -> Gib:
    """`kind`: allocated, active or reserved, for each byte allocated as much as when that software ran on an H200."""
    allocated = allocated_gib(cluster, model, mode, nodes)
    row, most = software(model, mode, nodes), cluster.device.memory_gib
    kept = allocated * row[kind] / row["allocated"]
    return Gib(allocated, min(kept, most), full=kept > most)


def software(model: str, mode: str, nodes: int) -> dict[str, Any]:
    """What study_memory.py measured of the study's program, which has names of its own for sizes as they were run."""
    name = RECIPES.get(model, model)
    strategy = "NO_SHARD" if mode == "HYBRID_1" else mode
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


def gh200_words(masked: float) -> tuple[str, ...]:
    return "model.channels=1", f"model.mask.ratio={masked}"


def gh200_command(nodes: int, masked: float) -> str:
    words = " ".join(gh200_words(masked))
    return f"vitrail plan configs/{TITAN} {words} --cluster gh200 --gpus {4 * nodes} --as-is"


def gh200_step(cluster: Cluster, nodes: int, masked: float) -> Prediction:
    return Prediction(recipe_of(TITAN, gh200_words(masked), "gh200"), cluster, 4 * nodes)


def rungs() -> dict[str, tuple[str, ...]]:
    """ORBIT's rungs and their words: one sample a node, then three."""
    alone = ("data.batch=1/rank", "parallel.recompute=none")
    late = ("parallel.prefetch.forward=0", "parallel.prefetch.backward=0")
    full = ("precision.compute=fp32", "precision.reduce=fp32")
    return {
        "unwrapped": (*alone, *late, *full, "parallel.wrap=56"),
        "wrapped": (*alone, *late, *full),
        "bf16": (*alone, *late),
        "prefetch": alone,
        "checkpointing": (),
    }


def ladder_command(rung: str) -> str:
    return " ".join(("vitrail plan configs/orbit/113b.yaml", *rungs()[rung], "--cluster frontier --gpus 512 --as-is"))


def ladder(cluster: Cluster) -> dict[str, Prediction]:
    return {
        name: Prediction(recipe_of("orbit/113b.yaml", words, "frontier"), cluster, 512)
        for name, words in rungs().items()
    }


def with_numbers(cluster: Cluster, numbers: Mapping[str, float]) -> Cluster:
    """The cluster with these values of NUMBERS."""
    n = numbers
    left = round(min(1.0, n["gb_s_64"] / n["gb_s"]), 3)
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(
            cluster.device, gemm=tuple((float(flops), n[flops]) for flops in PRODUCTS), gemm_odd=n["odd"]
        ),
        between=Link(n["latency_us"], n["gb_s"]),
        congestion=((8.0, 1.0), (64.0, left)),
        hop_congestion=((64.0, 1.0), (128.0, n["hop_speed_128"])),
        overlap_reduce=n["overlap_reduce"],
    )


def errors(cluster: Cluster, cells: Mapping[Cell, int]) -> dict[Cell, float]:
    """Predicted over published, less 1."""
    return {cell: frontier_step(cluster, cell).quick_rate / rate - 1 for cell, rate in cells.items()}


def missed(cluster: Cluster, cells: Mapping[Cell, int]) -> float:
    """Mean error; single runs that went wrong count once, not squared."""
    return statistics.mean(map(abs, errors(cluster, cells).values()))


def stored_fits() -> dict[str, dict[str, float]]:
    return json.loads((RESULTS / "study_fits.json").read_text(encoding="utf-8"))


def fit(cluster: Cluster, cells: Mapping[Cell, int]) -> dict[str, float]:
    """The values of NUMBERS with the least mean error: each is tried larger and smaller, by ever less."""
    found = dict(NUMBERS)
    least = missed(with_numbers(cluster, found), cells)
    for step in (0.4, 0.2, 0.1, 0.05, 0.02):
        moved = True
        while moved:
            moved = False
            for name, change in itertools.product(NUMBERS, (1 + step, 1 / (1 + step))):
                value = float(f"{found[name] * change:.3g}")
                tried = found | {name: min(value, 1.0) if name in SHARES else value}
                if (error := missed(with_numbers(cluster, tried), cells)) < least - 1e-5:
                    found, least, moved = tried, error, True
    return found
