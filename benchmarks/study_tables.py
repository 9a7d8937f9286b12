"""The planner beside what was published, as rows of numbers: what planner_studies.py prints and the tests judge."""

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s

from vitrail.cost.cluster import Checked, Cluster, load_cluster
from vitrail.cost.plan import Estimate

TOKENS = 64**3  # of a crop of 512^3
FAR = 0.25  # an error that is to be explained
# Rows that are further off than that, and the published rows of as many nodes that each belongs between: of the same
# size where it lies between them in all that it computes and sends, else those whose collectives bound its own.
BESIDE: dict[tuple[str, str, int], tuple[tuple[str, str], ...]] = {
    ("base", "FULL_SHARD", 32): (("huge", "FULL_SHARD"),),
    ("huge", "FULL_SHARD", 128): (("base", "FULL_SHARD"), ("1b", "FULL_SHARD")),
    ("5b", "HYBRID_4", 64): (("5b", "HYBRID_2"), ("5b", "HYBRID_8")),
    ("5b", "HYBRID_4", 128): (("5b", "HYBRID_2"), ("5b", "HYBRID_8")),
    ("5b", "SHARD_GRAD_OP", 64): (("5b", "FULL_SHARD"),),
    ("5b", "SHARD_GRAD_OP", 128): (("5b", "FULL_SHARD"),),
}
WHY = {
    ("base", "FULL_SHARD", 32): "slower than on 16 nodes, and half as fast as on 64: collectives that took longer than "
    "Huge's, with three times the bytes, on as many nodes",
    ("huge", "FULL_SHARD", 128): "faster than on 64 nodes, where Base, 1B, 3B and 5B slow down: collectives that "
    "took less than half as long as those of Base, with fewer bytes, and of 1B",
    ("5b", "HYBRID_4", 64): "slower than both modes that it lies between in all that it computes and sends; of 15B it "
    "is as planned",
    ("5b", "HYBRID_4", 128): "the same",
    ("5b", "SHARD_GRAD_OP", 64): "slower than FULL_SHARD, which gathers once more: collectives that took 1.7 times as "
    "long as FULL_SHARD's",
    ("5b", "SHARD_GRAD_OP", 128): "collectives that took less than on 64 nodes, where FULL_SHARD's took twice as long",
}
BLOCKS = {"base": 12, "huge": 32, "1b": 32, "3b": 32, "5b": 56, "15b": 48}
COLLECTIVES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}  # of a block in a step
IMAGES = 32 * 8  # of a node in a step


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


class Row(NamedTuple):
    """A published row of images/s, and the plan of it."""

    cell: s.Cell
    published: int
    rate: float
    found: Estimate  # of one copy

    @property
    def error(self) -> float:
        return self.rate / self.published - 1


def rows_of(cluster: Cluster) -> list[Row]:
    """All that was published, as `vitrail plan --as-is` plans it."""
    steps = {cell: s.frontier_step(cluster, cell) for cell in s.cells_of()}
    return [Row(cell, rate, steps[cell].rate, steps[cell].found) for cell, rate in s.cells_of().items()]


def by_mode(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row | None]]:
    """Rows by size and strategy, in the order of nodes; without those of other prefetching."""
    found: dict[tuple[str, str], list[Row | None]] = {key: [None] * len(p.NODES) for key in p.IMAGES_PER_SECOND}
    for row in rows:
        model, mode, nodes, more = row.cell
        if not more:
            found[model, mode][p.NODES.index(nodes)] = row
    return found


def mean_error(rows: Iterable[Row]) -> float:
    return statistics.mean(abs(row.error) for row in rows)


def far_off(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if abs(row.error) > FAR]


def beside(model: str, mode: str, nodes: int) -> list[float]:
    """Images/s that a row would have, were it like those that it belongs between; from published numbers alone.

    Of the same size these are their rates. Of other sizes, or other numbers of collectives, a collective takes no
    longer than theirs, of which none can have taken more than its share of the step; and what it hides behind takes
    as long as on one node.
    """
    found, place = [], p.NODES.index(nodes)
    for other, how in BESIDE.get((model, mode, nodes), ()):
        rate = p.IMAGES_PER_SECOND[other, how][place]
        alone = p.IMAGES_PER_SECOND[model, mode][0]
        assert rate
        assert alone
        if mode in COLLECTIVES:
            each = IMAGES * nodes / rate / (BLOCKS[other] * COLLECTIVES[how])
            rate = IMAGES * nodes / max(BLOCKS[model] * COLLECTIVES[mode] * each, IMAGES / alone)
        found.append(float(rate))
    return sorted(found)


def ranked(rows: Sequence[Row], apart: float) -> tuple[int, list[str]]:
    """Pairs of strategies, at the same size and nodes, that measured so far apart; and those predicted otherwise."""
    wrong, pairs = [], 0
    plain = [row for row in rows if not row.cell[3]]
    for left, right in itertools.combinations(plain, 2):
        if (left.cell[0], left.cell[2]) != (right.cell[0], right.cell[2]):
            continue
        better, worse = (left, right) if left.published > right.published else (right, left)
        if better.published / worse.published - 1 <= apart:
            continue
        pairs += 1
        if better.rate <= worse.rate:
            wrong.append(f"{better.cell[0]} on {better.cell[2]}: {better.cell[1]} beats {worse.cell[1]}")
    return pairs, wrong


def checked(rows: Sequence[Row]) -> dict[str, tuple[Checked, ...]]:
    """What files of clusters say of their plans. Nobody would plan HYBRID_1 by that name, so it is left out."""
    frontier = []
    for (model, mode), cells in by_mode(rows).items():
        there = [row for row in cells if row and mode != "HYBRID_1"]
        if there:
            numbers = tuple(s.PER_NODE * row.cell[2] for row in there)
            parameters = s.parameters_of(s.frontier_step(load_cluster("frontier"), (model, mode, there[0].cell[2], ())))
            errors = tuple(round(row.error, 2) + 0.0 for row in there)  # no -0.0
            frontier.append(Checked(there[0].found.strategy, parameters, numbers, errors))
    hopper = load_cluster("gh200")
    gh200 = [
        Checked("SHARD_GRAD_OP", s.parameters_of(step), (step.gpus,), (round(planned / measured - 1, 2),))
        for nodes, masked, measured, planned in gh200_rows(hopper)
        for step in [s.gh200_step(hopper, nodes, masked)]
    ]
    h200: dict[float, list[float]] = {}
    for row in json.loads((s.RESULTS / "planner.json").read_text(encoding="utf-8"))["rows"]:
        if "time_error" in row["compared"]:  # of seconds
            rate = round(1 / (1 + row["compared"]["time_error"]) - 1, 2) + 0.0  # no -0.0
            h200.setdefault(float(f"{row['measured']['parameters']:.3g}"), []).append(rate)
    alone = [Checked("NO_SHARD", size, (1,) * len(errors), tuple(errors)) for size, errors in sorted(h200.items())]
    return {"frontier": tuple(frontier), "gh200": tuple(gh200), "h200": tuple(alone)}


def left_out(cluster: Cluster) -> list[tuple[str, float, dict[str, tuple[float, float]]]]:
    """What was fitted to and the mean error there; by size left out, that with this fit and with the one to all."""
    found = []
    for name, numbers in s.stored_fits().items():
        fitted = s.with_numbers(cluster, numbers)
        others = {m: s.cells_of(m) for m in s.FITS["all"] if m not in s.FITS[name]}
        by_size = {m: (s.missed(fitted, cells), s.missed(cluster, cells)) for m, cells in others.items()}
        found.append((name, s.missed(fitted, s.cells_of(*s.FITS[name])), by_size))
    return found


def moved(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """The mean error with each of the fitted numbers a fifth smaller, and larger."""
    numbers, cells = s.stored_fits()["all"], s.cells_of()

    def error(name: str, factor: float) -> float:
        value = numbers[name] * factor
        changed = numbers | {name: min(1.0, value) if name in s.SHARES else value}
        return s.missed(s.with_numbers(cluster, changed), cells)

    return {name: (error(name, 0.8), error(name, 1.2)) for name in numbers}


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


class Allocated(NamedTuple):
    """GiB of a GCD that PyTorch allocated at most."""

    mode: str
    model: str
    published: float | None
    again: float | None  # of the study's program on an H200
    planned: float  # by the command
    as_there: float  # with two things as the study's program has them


def allocated_rows(cluster: Cluster) -> list[Allocated]:
    cells = [
        (model, mode, nodes, p.ALLOCATED_GIB[mode][p.MODELS.index(model)] if mode in p.ALLOCATED_GIB else None)
        for model, mode, nodes in itertools.product(p.MODELS, (*p.ALLOCATED_GIB, "FULL_SHARD"), (1, 128))
        if nodes == 1 or mode == "FULL_SHARD"
    ]
    cells += [(*key, 2 if key[1] == "HYBRID_16" else 1, gib) for key, gib in p.LARGE_ALLOCATED_GIB.items()]
    return [
        Allocated(
            f"{mode}, {nodes} nodes" if nodes > 2 else mode,
            model,
            published,
            s.software(model, mode, nodes)["allocated"] if model in p.MODELS else None,
            s.memory_step(cluster, model, mode, nodes).found.memory_gib,
            s.allocated_gib(cluster, model, mode, nodes),
        )
        for model, mode, nodes, published in cells
    ]


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
            *(s.software(model, mode, nodes)[kind] for model in ("base16", "base")),
            *(s.gib_of(cluster, model, mode, nodes, kind).kept for model in ("base16", "base")),
        )
        for mode, nodes, kind, measured in cells
    ]


def gh200_rows(cluster: Cluster) -> list[tuple[int, float, float, float]]:
    """Nodes, masked share, tokens a second and GPU measured and predicted."""
    return [
        (nodes, masked, measured, TOKENS * s.gh200_step(cluster, nodes, masked).rate / (4 * nodes))
        for (nodes, masked), measured in p.GH200_TOKENS.items()
    ]


def ladder_rows(cluster: Cluster) -> list[tuple[str, float | None, float | None, float]]:
    """Rung, published and predicted speed-up (None where it does not fit), and seconds a sample."""
    rungs = s.ladder(cluster)
    first = rungs["wrapped"].rate
    return [
        (name, p.LADDER.get(name), rung.rate / first if rung.found.fits else None, 1 / rung.rate)
        for name, rung in rungs.items()
    ]


def prefetch_rows(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """5B on 8 nodes, by groups gathered ahead in the backward."""
    late = ("parallel.prefetch.backward=0",)
    wanted = {0: late, 1: ()}
    known = {row.cell: row for row in rows}
    return [(ahead, [known["5b", mode, 8, more] for mode in p.PREFETCH_MODES]) for ahead, more in wanted.items()]
