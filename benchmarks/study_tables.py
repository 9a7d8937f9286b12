"""The planner beside what was published, as rows of numbers: what planner_studies.py prints and the tests judge."""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s

from vitrail.cost.cluster import Cluster

JUDGED = 7  # columns: 1 to 64 nodes
LARGE = ("HYBRID_2", "HYBRID_4", "HYBRID_8", "HYBRID_16", "FULL_SHARD", "SHARD_GRAD_OP")
TOKENS = 64**3  # of a crop of 512^3

Rates = dict[tuple[str, str], list[float]]
Published = Mapping[tuple[str, str], Sequence[int | None]]
Large = dict[tuple[str, str], list["Cell | None"]]


class MemoryRow(NamedTuple):
    """GiB of a GCD under a mode."""

    mode: str
    model: str
    published: float
    again: float  # the study's program on an H200
    failed: bool  # it ran out of memory there
    allocated: float  # by the planner
    predicted: float
    full: bool  # whether that is all that the GCD has

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


class Cell(NamedTuple):
    """A large model on some nodes."""

    rate: float
    fits: bool
    reserved: float  # GiB
    published: int | None  # images/s


def frontier_rates(cluster: Cluster, *, as_run: bool = True) -> Rates:
    return {
        (model, mode): [s.frontier_step(cluster, model, mode, nodes, as_run=as_run).rate for nodes in p.NODES]
        for model, mode in p.IMAGES_PER_SECOND
    }


def rates_by_the_tables(cluster: Cluster) -> Rates:
    """With the patches of Base that the study's tables have."""
    return frontier_rates(s.calibrate(cluster, as_run=False), as_run=False)


def errors(rates: Rates) -> Rates:
    """Predicted over measured less 1, by cell."""
    return {
        key: [predicted / measured - 1 for predicted, measured in zip(rates[key], row, strict=True)]
        for key, row in p.IMAGES_PER_SECOND.items()
    }


def mean_error(rates: Rates) -> float:
    return statistics.mean(abs(error) for row in errors(rates).values() for error in row[:JUDGED])


def ranked(rates: Rates, apart: float, published: Published = p.IMAGES_PER_SECOND) -> tuple[int, list[str]]:
    """Pairs of strategies, at the same size and nodes, that measured so far apart; and those predicted otherwise."""
    wrong, pairs = [], 0
    for (model, one), (other_model, other) in itertools.combinations(published, 2):
        if model != other_model:
            continue
        for column, nodes in enumerate(p.NODES[:JUDGED]):
            left, right = published[model, one][column], published[model, other][column]
            if left is None or right is None or max(left, right) / min(left, right) - 1 <= apart:
                continue
            pairs += 1
            if (left - right) * (rates[model, one][column] - rates[model, other][column]) <= 0:
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
            s.software(model, mode, nodes)["out_of_memory"],
            *s.gib_of(cluster, model, mode, nodes, kind),
        )
        for mode, nodes, kind, row in cells
        for model, measured in zip(p.MODELS, row, strict=True)
    ]


def allocated_rows(cluster: Cluster) -> list[tuple[str, str, float | None, float | None, float]]:
    """Mode, model, allocated memory as published, of the study's program on an H200 and by the planner; GiB."""
    rows = []
    for model, mode, nodes in itertools.product(p.MODELS, (*p.ALLOCATED_GIB, "FULL_SHARD"), (1, 128)):
        if nodes == 1 or mode == "FULL_SHARD":
            published = p.ALLOCATED_GIB[mode][p.MODELS.index(model)] if mode in p.ALLOCATED_GIB else None
            again = s.software(model, mode, nodes)["allocated"]
            name = f"{mode}, {nodes} nodes" if nodes > 1 else mode
            rows.append((name, model, published, again, s.allocated_gib(cluster, model, mode, nodes)))
    for (model, mode), gib in p.LARGE_ALLOCATED_GIB.items():
        nodes = 2 if mode == "HYBRID_16" else 1
        rows.append((mode, model, gib, None, s.allocated_gib(cluster, model, mode, nodes)))
    return rows


def patch_rows(cluster: Cluster) -> list[tuple[str, float, float, float, float, float]]:
    """Of Base: mode, GiB as published; of the study's program with patches of 16 and of 14; predicted with either.

    What is allocated; under FULL_SHARD active.
    """
    cells = [(mode, 1, "allocated", row[0]) for mode, row in p.ALLOCATED_GIB.items() if mode != "HYBRID_1"]
    cells += [("FULL_SHARD", nodes, "active", row[0]) for nodes, row in p.FULL_SHARD_ACTIVE_GIB.items()]
    return [
        (
            f"{mode}, {nodes} nodes" if nodes > 1 else mode,
            measured,
            *(s.software("base", mode, nodes, as_run=as_run)[kind] for as_run in (False, True)),
            *(s.gib_of(cluster, "base", mode, nodes, kind, as_run=as_run).kept for as_run in (False, True)),
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
    """How error and ranking change with what was assumed; values that this changes are solved for again."""
    device = cluster.device
    fp32 = dataclasses.replace(device, gemm_fp32=((1e8, 0.1), (1e9, 0.4), (1e10, 0.6), (1e12, 0.7)))
    variants = {
        "as it is": frontier_rates(cluster),
        "Base has patches of 16, as its tables say": rates_by_the_tables(cluster),
        "products in fp32 reach 0.6 to 0.7 of their peak": frontier_rates(dataclasses.replace(cluster, device=fp32)),
        "hidden reductions cost a tenth": _solved(cluster, overlap_reduce=0.9),
        "hidden reductions cost three tenths": _solved(cluster, overlap_reduce=0.7),
        "all that is hidden costs a tenth": _solved(cluster, overlap=0.9, overlap_reduce=None),
        "all that is hidden is free": _solved(cluster, overlap=1.0, overlap_reduce=None),
        "no congestion": _solved(cluster, congestion=((1.0, 1.0),)),
        "large products reach 0.45 of the bf16 peak": frontier_rates(s.calibrate(cluster, top=0.45)),
        "large products reach 0.65 of the bf16 peak": frontier_rates(s.calibrate(cluster, top=0.65)),
    }
    return [(name, mean_error(rates), counted(rates, 0.10), counted(rates, 0.05)) for name, rates in variants.items()]


def _solved(cluster: Cluster, **changes: Any) -> Rates:
    return frontier_rates(s.calibrate(dataclasses.replace(cluster, **changes)))


def counted(rates: Rates, apart: float, published: Published = p.IMAGES_PER_SECOND) -> str:
    """How many of the pairs that differ by more are ranked as measured."""
    pairs, wrong = ranked(rates, apart, published)
    return f"{pairs - len(wrong)} of {pairs}"


def large_rates(cluster: Cluster) -> Large:
    """By nodes; None where a group has more ranks than there are."""
    found: Large = {}
    for model, mode in itertools.product(("5b", "15b"), LARGE):
        group = int(mode.removeprefix("HYBRID_")) if mode.startswith("HYBRID") else 1
        rates = p.LARGE_IMAGES_PER_SECOND.get((model, mode), (None,) * len(p.NODES))
        found[model, mode] = []
        for nodes, published in zip(p.NODES, rates, strict=True):
            if group > s.PER_NODE * nodes:
                found[model, mode].append(None)
                continue
            cell = s.frontier_step(cluster, model, mode, nodes)
            reserved = cell.memory.reserved(cluster.device) / s.GIB
            found[model, mode].append(Cell(cell.rate, cell.fits, reserved, published))
    return found


def large_error(large: Large, model: str) -> float:
    """Mean over 1 to 64 nodes, whether or not it is said to fit."""
    cells = [cell for (of, _), row in large.items() if of == model for cell in row[:JUDGED]]
    return statistics.mean(abs(cell.rate / cell.published - 1) for cell in cells if cell and cell.published)


def large_order(large: Large, model: str, apart: float) -> str:
    """How many pairs of strategies are ranked as measured."""
    rates = {key: [cell.rate if cell else 0.0 for cell in row] for key, row in large.items()}
    published = {key: row for key, row in p.LARGE_IMAGES_PER_SECOND.items() if key[0] == model}
    return counted(rates, apart, published)


def ran_all_the_same(large: Large) -> set[tuple[str, str, int]]:
    """What is said not to fit, and was run: model, mode, nodes."""
    return {
        (model, mode, nodes)
        for (model, mode), row in large.items()
        for nodes, cell in zip(p.NODES, row, strict=True)
        if cell and cell.published and not cell.fits
    }


def prefetch_rows(cluster: Cluster) -> list[tuple[str, list[tuple[float, int]]]]:
    """5B on 8 nodes: what is prefetched, and images/s predicted and published by mode."""
    return [
        (
            name,
            [
                (s.frontier_step(cluster, "5b", mode, 8, f"parallel.prefetch.backward={ahead}").rate, measured)
                for mode, measured in zip(("FULL_SHARD", "HYBRID_2", "HYBRID_16"), row, strict=True)
            ],
        )
        for ahead, (name, row) in enumerate(p.PREFETCH_5B.items())
    ]
