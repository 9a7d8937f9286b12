"""The planner beside what was published, as rows of numbers: what planner_studies.py prints and the tests judge."""

import dataclasses
import itertools
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s

from vitrail.cost.cluster import Cluster

JUDGED = 7  # columns: 1 to 64 nodes
LARGE = ("HYBRID_2", "HYBRID_4", "HYBRID_8", "HYBRID_16", "FULL_SHARD", "SHARD_GRAD_OP")
TOKENS = 64**3  # of a crop of 512^3

Rates = dict[tuple[str, str], list[float]]
Large = dict[tuple[str, str], list["Cell"]]


class MemoryRow(NamedTuple):
    """GiB of a GCD under a mode."""

    mode: str
    model: str
    published: float
    again: float  # the study's program on an H200
    allocated: float  # by the planner
    predicted: float
    full: bool  # whether that is all that the GCD has

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


class Cell(NamedTuple):
    """A large model on so many nodes."""

    nodes: int
    rate: float
    fits: bool
    reserved: float  # GiB
    published: int | None  # images/s


def frontier_rates(cluster: Cluster, *, as_run: bool = True) -> Rates:
    return {
        (model, mode): [s.frontier_step(cluster, model, mode, nodes, as_run=as_run).rate for nodes in p.NODES]
        for model, mode in p.IMAGES_PER_SECOND
    }


def errors(rates: Rates) -> Rates:
    """Predicted over measured less 1, by cell."""
    return {
        key: [predicted / measured - 1 for predicted, measured in zip(rates[key], row, strict=True)]
        for key, row in p.IMAGES_PER_SECOND.items()
    }


def mean_error(rates: Rates) -> float:
    return statistics.mean(abs(error) for row in errors(rates).values() for error in row[:JUDGED])


def ranked(rates: Rates, apart: float) -> tuple[int, list[str]]:
    """Pairs of strategies, at the same size and nodes, that measured so far apart; and those predicted otherwise."""
    wrong, pairs = [], 0
    for model, (one, other) in itertools.product(p.MODELS, itertools.combinations(p.MODES, 2)):
        for column, nodes in enumerate(p.NODES[:JUDGED]):
            left, right = (p.IMAGES_PER_SECOND[model, mode][column] for mode in (one, other))
            if max(left, right) / min(left, right) - 1 <= apart:
                continue
            pairs += 1
            if (left > right) != (rates[model, one][column] > rates[model, other][column]):
                better, worse = (one, other) if left > right else (other, one)
                wrong.append(f"{model} on {nodes}: {better} beats {worse}")
    return pairs, wrong


def memory_rows(cluster: Cluster) -> list[MemoryRow]:
    """Reserved memory, and active memory under FULL_SHARD."""
    cells = [(mode, 1, "reserved", row) for mode, row in p.RESERVED_GIB.items()]
    cells += [("FULL_SHARD", nodes, "active", row) for nodes, row in p.FULL_SHARD_ACTIVE_GIB.items()]
    return [
        MemoryRow(
            f"{mode}, {nodes} nodes" if nodes > 1 else mode,
            model,
            measured,
            s.software(model, mode, nodes)[kind],
            *s.gib_of(cluster, model, mode, nodes, kind),
        )
        for mode, nodes, kind, row in cells
        for model, measured in zip(p.MODELS, row, strict=True)
    ]


def allocated_rows(cluster: Cluster) -> list[tuple[str, str, float, float]]:
    """Mode, model, allocated memory as published and by the planner; GiB."""
    cells = [(mode, model, row[i]) for mode, row in p.ALLOCATED_GIB.items() for i, model in enumerate(p.MODELS)]
    cells += [(mode, model, gib) for (model, mode), gib in p.LARGE_ALLOCATED_GIB.items()]
    return [
        (mode, model, gib, s.allocated_gib(cluster, model, mode, 2 if mode == "HYBRID_16" else 1))
        for mode, model, gib in cells
    ]


def patch_rows(cluster: Cluster) -> list[tuple[str, float, float, float, float, float]]:
    """Of Base: mode, GiB as published; of the study's program with patches of 16 and of 14; planned with either.

    What is allocated; under FULL_SHARD active, of which the planner does not know.
    """
    cells = [(mode, 1, "allocated", row[0]) for mode, row in p.ALLOCATED_GIB.items() if mode != "HYBRID_1"]
    cells += [("FULL_SHARD", nodes, "active", row[0]) for nodes, row in p.FULL_SHARD_ACTIVE_GIB.items()]
    return [
        (
            f"{mode}, {nodes} nodes" if nodes > 1 else mode,
            measured,
            s.software("base", mode, nodes, as_run=False)[kind],
            s.software("base", mode, nodes)[kind],
            s.allocated_gib(cluster, "base", mode, nodes, as_run=False),
            s.allocated_gib(cluster, "base", mode, nodes),
        )
        for mode, nodes, kind, measured in cells
    ]


def gh200_rows(cluster: Cluster) -> list[tuple[int, float, float, float]]:
    """Nodes, masked share, tokens a second and GPU measured and predicted."""
    return [
        (nodes, masked, measured, TOKENS / s.gh200_step(cluster, nodes, masked).seconds)
        for (nodes, masked), measured in p.GH200_TOKENS.items()
    ]


def ladder_rows(cluster: Cluster) -> list[tuple[str, float | None, float | None, float]]:
    """Rung, published and predicted speed-up (None where it does not fit), and seconds a sample."""
    rungs = s.ladder(cluster)
    first = rungs["wrapped"].rate
    return [
        (name, p.LADDER.get(name), rung.rate / first if rung.fits else None, 1 / rung.rate)
        for name, rung in rungs.items()
    ]


def sensitivity(cluster: Cluster) -> list[tuple[str, float, str, str]]:
    """How the mean error and the ranking change with what was assumed, the four numbers solved for again."""
    device = cluster.device
    fp32 = dataclasses.replace(device, gemm_fp32=((1e8, 0.1), (1e9, 0.4), (1e10, 0.6), (1e12, 0.7)))
    variants = {
        "as it is": cluster,
        "products in fp32 reach 0.6 to 0.7 of their peak": dataclasses.replace(cluster, device=fp32),
        "90 % of hidden communication of either kind is free": s.calibrate(_hiding(cluster, 0.9)),
        "all of it is free": s.calibrate(_hiding(cluster, 1.0)),
        "no congestion": s.calibrate(dataclasses.replace(cluster, congestion=((1.0, 1.0),))),
        "large products reach 0.45 of the bf16 peak": s.calibrate(cluster, top=0.45),
        "large products reach 0.65 of the bf16 peak": s.calibrate(cluster, top=0.65),
    }
    found = []
    for name, variant in variants.items():
        found.append((name, *_judged(frontier_rates(variant))))
    found.insert(1, ("Base has patches of 16, as its tables say", *_judged(frontier_rates(cluster, as_run=False))))
    return found


def _hiding(cluster: Cluster, share: float) -> Cluster:
    return dataclasses.replace(cluster, overlap=share, overlap_reduce=None)


def _judged(rates: Rates) -> tuple[float, str, str]:
    """Mean error, and how many pairs that differ by more than 10 % and by more than 5 % are ranked as measured."""
    counts = [(pairs, len(wrong)) for pairs, wrong in (ranked(rates, 0.10), ranked(rates, 0.05))]
    ten, five = (f"{pairs - wrong} of {pairs}" for pairs, wrong in counts)
    return mean_error(rates), ten, five


def large_rates(cluster: Cluster) -> Large:
    found: Large = {}
    for model, mode in itertools.product(("5b", "15b"), LARGE):
        group = int(mode.removeprefix("HYBRID_")) if mode.startswith("HYBRID") else 1
        places = [nodes for nodes in p.NODES if group <= s.PER_NODE * nodes]
        rates = p.LARGE_IMAGES_PER_SECOND.get((model, mode), (None,) * len(places))
        cells = [s.frontier_step(cluster, model, mode, nodes) for nodes in places]
        found[model, mode] = [
            Cell(nodes, cell.rate, cell.fits, cell.memory.reserved(cluster.device) / s.GIB, published)
            for nodes, cell, published in zip(places, cells, rates, strict=True)
        ]
    return found


def large_error(large: Large, model: str) -> float:
    """Mean over 1 to 64 nodes of what fits."""
    return statistics.mean(
        abs(cell.rate / cell.published - 1)
        for (of, _), cells in large.items()
        for cell in cells
        if of == model and cell.fits and cell.published and cell.nodes <= p.NODES[JUDGED - 1]
    )
