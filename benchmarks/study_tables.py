"""The planner beside what was published, as rows of numbers: what planner_studies.py prints and the tests judge."""

import dataclasses
import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s

from vitrail.cost.cluster import Cluster

JUDGED = 7  # columns: 1 to 64 nodes
LARGE = ("HYBRID_2", "HYBRID_4", "HYBRID_8", "HYBRID_16", "FULL_SHARD", "SHARD_GRAD_OP")
TOKENS = 64**3  # of a crop of 512^3

Rates = dict[tuple[str, str], list[float]]
Large = dict[tuple[str, str], list[tuple[float, bool, float]]]


def frontier_rates(cluster: Cluster) -> Rates:
    return {
        (model, mode): [s.frontier_step(cluster, model, mode, nodes).rate for nodes in p.NODES]
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


def memory_rows(cluster: Cluster) -> list[tuple[str, str, float, float, float, bool]]:
    """Mode, model, measured, the planner's own, with what the study's software keeps besides; GiB; whether clipped."""
    cells = [(mode, 1, row) for mode, row in p.RESERVED_GIB.items()]
    cells += [("FULL_SHARD", nodes, row) for nodes, row in p.FULL_SHARD_ACTIVE_GIB.items()]
    return [
        (f"{mode}, {nodes} nodes" if nodes > 1 else mode, model, measured, *s.gib_of(cluster, model, mode, nodes))
        for mode, nodes, row in cells
        for model, measured in zip(p.MODELS, row, strict=True)
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


def sensitivity(cluster: Cluster) -> list[tuple[str, float, str]]:
    """How the mean error and the ranking change with what was assumed, the four numbers solved for again."""
    device = cluster.device
    fp32 = dataclasses.replace(device, gemm_fp32=((1e8, 0.1), (1e9, 0.4), (1e10, 0.6), (1e12, 0.7)))
    variants = {
        "as it is": cluster,
        "products in fp32 reach 0.6 to 0.7 of their peak": dataclasses.replace(cluster, device=fp32),
        "80 % of hidden communication is free": s.calibrate(dataclasses.replace(cluster, overlap=0.8)),
        "all of it is free": s.calibrate(dataclasses.replace(cluster, overlap=1.0)),
        "no congestion": s.calibrate(dataclasses.replace(cluster, congestion=((1.0, 1.0),))),
        "large products reach 0.45 of the bf16 peak": s.calibrate(cluster, top=0.45),
        "large products reach 0.65 of the bf16 peak": s.calibrate(cluster, top=0.65),
    }
    found = []
    for name, variant in variants.items():
        rates = frontier_rates(variant)
        pairs, wrong = ranked(rates, 0.10)
        found.append((name, mean_error(rates), f"{pairs - len(wrong)} of {pairs}"))
    return found


def large_rates(cluster: Cluster) -> Large:
    """Images/s, whether it fits, and GiB reserved, by nodes."""
    found: Large = {}
    for model, mode in itertools.product(("5b", "15b"), LARGE):
        cells = []
        for nodes in p.NODES:
            group = int(mode.removeprefix("HYBRID_")) if mode.startswith("HYBRID") else 1
            if group > s.PER_NODE * nodes:
                continue
            cell = s.frontier_step(cluster, model, mode, nodes)
            cells.append((cell.rate, cell.fits, cell.memory.reserved(cluster.device) / s.GIB))
        found[model, mode] = cells
    return found
