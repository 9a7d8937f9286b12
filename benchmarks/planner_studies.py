"""The planner against published studies: one command writes planner_studies.md and its plots.

    python benchmarks/planner_studies.py [--fit] [--out benchmarks]

The Frontier sharding study (images/s of six sizes under nine strategies, memory, prefetch of 5B), torchtitan-mae on
GH200, ORBIT's ladder. `--fit` first seeks nine numbers of clusters/frontier.yaml again, once for all sizes and once
for each choice of sizes that is to predict the others, and writes them. What `vitrail plan` says of its own errors,
`checked` of clusters/{frontier,gh200,h200}.yaml, is written each time. No GPU is needed (what study_memory.py and
planner.py measured is read from results); it takes about a minute, and some more with --fit.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s
import study_tables as t
from study_plots import plot_frontier, plot_ladder, plot_memory

from vitrail.cost.cluster import FOLDER, Checked, Cluster, load_cluster
from vitrail.cost.step import Group, all_gather

HERE = Path(__file__).resolve().parent
MEANING = {  # of the fitted numbers
    "1e10": "share of the bf16 peak that products of up to 10^10 FLOPs reach",
    "1e11": "of 10^11 FLOPs",
    "1e12": "of 10^12 FLOPs and more",
    "odd": "of that, left where a size of the product is odd (15B's 13,545 hidden units)",
    "latency_us": "latency of a hop from node to node, us",
    "gb_s": "a GCD's share of the network on up to 8 nodes, GB/s",
    "gb_s_64": "the same on 64 nodes and more",
    "hop_speed_128": "of a hop's speed, left on 128 nodes (all of it up to 64)",
    "overlap_reduce": "of hidden reductions, free (they compute, too)",
}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


def _missed(ratios: Collection[float]) -> str:
    """Mean error in percent."""
    return f"{100 * statistics.mean(abs(ratio - 1) for ratio in ratios):.1f}"


def _most(ratios: Collection[float]) -> str:
    """The largest error in percent."""
    return f"{100 * max(abs(ratio - 1) for ratio in ratios):.1f}"


def _gib(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def _range(errors: Sequence[float]) -> str:
    return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"


def page(cluster: Cluster, rows: Sequence[t.Row], out: Path) -> str:
    """All of it as Markdown; plots are written beside."""
    grid = t.by_mode(rows)
    hopper = load_cluster("gh200")
    memory, rungs = t.memory_rows(cluster), t.ladder_rows(cluster)
    plots = out / "results"
    plots.mkdir(parents=True, exist_ok=True)
    plot_frontier(grid, plots / "planner_frontier.png")
    plot_memory(memory, plots / "planner_memory.png")
    plot_ladder(rungs, plots / "planner_ladder.png")
    far = t.far_off(rows)
    pairs5, wrong5 = t.ranked(rows, 0.05)
    pairs10, wrong10 = t.ranked(rows, 0.10)
    order_15b = [t.ranked([row for row in rows if row.cell[0] == "15b"], 0.10)][0]
    allocated = t.allocated_rows(cluster)
    plain = [row.planned / row.published for row in allocated if row.published]
    there = [row.as_there / row.published for row in allocated if row.published]
    again = s.software_rows()[0]
    free = [row.ratio for row in memory if not row.full]
    own = {
        row[:2]: row.allocated * cluster.device.fragmentation / row.published
        for row in memory
        if not row.mode.startswith("FULL_SHARD") and not row.full
    }
    holds = s.other_holds()
    lacking = [row for row in rows if not row.found.fits]
    values = {
        "rows": str(len(rows)),
        "mean": _missed([1 + row.error for row in rows]),
        "beyond_10": str(sum(abs(row.error) > 0.10 for row in rows)),
        "by_model": _means(rows, lambda row: row.cell[0]),
        "by_mode": _means(rows, lambda row: row.cell[1]),
        "by_nodes": _means(rows, lambda row: row.cell[2]),
        "mean_plain": _missed([1 + row.error for row in rows if row not in far]),
        "most_plain": _most([1 + row.error for row in rows if row not in far]),
        "cells": table(
            ("model", "mode", *(f"{nodes}" for nodes in p.NODES)),
            (
                (*key, *(f"{r.rate:,.0f} ({percent(1 + r.error)})" if r else "" for r in row))
                for key, row in grid.items()
            ),
        ),
        "far": table(
            ("row", "published", "planned", "by its neighbours", "what differs in that run"),
            (
                (
                    " ".join(row.cell[:2]) + f" on {row.cell[2]}",
                    f"{row.published:,}",
                    f"{row.rate:,.0f} ({percent(1 + row.error)})",
                    " to ".join(f"{rate:,.0f} ({percent(rate / row.published)})" for rate in t.beside(*row.cell[:3])),
                    t.WHY.get(row.cell[:3], "nothing that we know of"),
                )
                for row in far
            ),
        ),
        "number_far": str(len(far)),
        "command": s.command(("base", "FULL_SHARD", 1, ())),
        "command_hybrid": s.command(("5b", "HYBRID_4", 8, ())),
        "command_alone": s.command(("base", "HYBRID_1", 1, ())),
        "example": f"{grid['base', 'FULL_SHARD'][0].rate:,.0f}",
        "numbers": table(
            ("number", "found", "mean error with a fifth less", "with a fifth more"),
            (
                (MEANING[name], f"{s.stored_fits()['all'][name]:.3g}", *(f"{100 * error:.1f} %" for error in both))
                for name, both in t.moved(cluster).items()
            ),
        ),
        "held_out": table(
            ("fitted to", "mean error there", "of each size left out (and with all sizes fitted)"),
            (
                (
                    name,
                    f"{100 * own:.1f} %",
                    ", ".join(f"{m} {100 * a:.1f} % ({100 * b:.1f} %)" for m, (a, b) in rest.items()),
                )
                for name, own, rest in t.left_out(cluster)
            ),
        ),
        "rank5": f"{pairs5 - len(wrong5)} of {pairs5}",
        "rank10": f"{pairs10 - len(wrong10)} of {pairs10}",
        "rank_15b": f"{order_15b[0] - len(order_15b[1])} of {order_15b[0]}",
        "allocated": table(
            ("mode", "model", "published", "the command", "as there", "run again", "as there against that"),
            (
                (
                    row.mode,
                    row.model,
                    _gib(row.published),
                    _against(row.planned, row.published),
                    _against(row.as_there, row.published),
                    _gib(row.again),
                    percent(row.as_there / row.again) if row.again else "",
                )
                for row in allocated
            ),
        ),
        "allocated_rows": str(len(plain)),
        "plain_mean": _missed(plain),
        "plain_ddp": _range([r.planned / r.published - 1 for r in allocated if r.mode == "DDP" and r.published]),
        "plain_rest": _range([r.planned / r.published - 1 for r in allocated if r.mode != "DDP" and r.published]),
        "allocated_mean": _missed(there),
        "allocated_most": _most(there),
        "allocated_again": _most([row.as_there / row.again for row in allocated if row.again]),
        "again_device": again["device"],
        "again_torch": again["torch"],
        "again_date": again["date"],
        "again_most": _most([row.again / row.published for row in memory if not row.failed]),
        "memory_mean": _missed(free),
        "memory_most": _most(free),
        "memory_judged": str(len(free)),
        "memory_full": str(len(memory) - len(free)),
        "memory": table(
            ("mode", "model", "published", "run again", "allocated, as there", "predicted", "error"),
            (
                (
                    *row[:2],
                    _gib(row.published),
                    _gib(row.again) + (", failed" if row.failed else ""),
                    _gib(row.allocated),
                    _gib(row.predicted),
                    "cut" if row.full else percent(row.ratio),
                )
                for row in memory
            ),
        ),
        "own_ddp": _range([ratio - 1 for (mode, _), ratio in own.items() if mode == "DDP"]),
        "own_fsdp": _range([ratio - 1 for (mode, _), ratio in own.items() if mode != "DDP"]),
        "hold_most": _most([r for hold in (0.5, 2.0) for ratios in holds[hold].values() for r in ratios]),
        "unheld": _range([r - 1 for r in holds[0.0]["NO_SHARD"]]),
        "unheld_rest": _most([r for mode in ("HYBRID_2", "FULL_SHARD") for r in holds[0.0][mode]]),
        "patches": table(
            ("mode", "published", "run again with 16", "run again with 14", "predicted with 16", "predicted with 14"),
            (
                (mode, f"{a:.2f}", *(f"{b:.2f} ({percent(b / a)})" for b in others))
                for mode, a, *others in t.patch_rows(cluster)
            ),
        ),
        "lacking": "; ".join(
            f"{model} {mode} on {nodes} ({found.memory_gib:.1f} GiB planned, {found.reserved_gib:.1f} with gaps, "
            f"{'may only just run' if found.tight else 'does not fit'})"
            for (model, mode, nodes, _), _, _, found in lacking
            if nodes == 1
        ),
        "hybrid_4_reserved": f"{p.RESERVED_15B_HYBRID_4_GIB:.1f}",
        "gh200_cudnn": ", ".join(percent(b / a) for *_, a, b in t.gh200_rows(_with_cudnn(hopper))),
        "prefetch": table(
            ("groups gathered ahead in the backward", *p.PREFETCH_MODES),
            (
                (ahead, *(f"{r.rate:.0f}, published {r.published} ({percent(1 + r.error)})" for r in row))
                for ahead, row in t.prefetch_rows(rows)
            ),
        ),
        "gh200_command": s.gh200_command(5, 0.01),
        "ladder_commands": "\n".join(map(s.ladder_command, s.rungs())),
        "gh200": table(
            ("nodes", "masked", "published tokens/s/GPU", "predicted", "error"),
            ((n, f"{100 * k:.0f} %", f"{a:,}", f"{b:,.0f}", percent(b / a)) for n, k, a, b in t.gh200_rows(hopper)),
        ),
        "ladder": table(
            ("rung", "published", "predicted", "predicted s/sample"),
            ((name, a or "out of memory", f"{b:.2f}" if b else "out of memory", f"{c:.2f}") for name, a, b, c in rungs),
        ),
        "pending": ", ".join(
            f"{active - allocated:.1f}"
            for active, allocated in zip(p.ACTIVE_GIB["NO_SHARD"], p.ALLOCATED_GIB["NO_SHARD"], strict=True)
        ),
        "ring_64": f"{1000 * all_gather(0, Group(512, 8), cluster):.0f}",
        "ring_128": f"{1000 * all_gather(0, Group(1024, 8), cluster):.0f}",
        "node_gb_s": f"{8 * cluster.between.gb_s:.0f}",
        "node_gb_s_64": f"{8 * cluster.between.gb_s * cluster.congestion[-1][1]:.0f}",
    }
    text = (HERE / "planner_studies.template").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _means(rows: Sequence[t.Row], of: Callable[[t.Row], object]) -> str:
    """Mean error by what a row is of."""
    groups: dict[object, list[float]] = {}
    for row in rows:
        groups.setdefault(of(row), []).append(1 + row.error)
    return ", ".join(f"{name} {_missed(ratios)} %" for name, ratios in groups.items())


def _against(planned: float, published: float | None) -> str:
    return f"{planned:.2f}" + (f" ({percent(planned / published)})" if published else "")


def _with_cudnn(cluster: Cluster) -> Cluster:
    """With the attention that cuDNN reaches on an H200."""
    device = dataclasses.replace(cluster.device, attention=load_cluster("h200").device.attention)
    return dataclasses.replace(cluster, device=device)


def write_numbers(cluster: Cluster) -> None:
    """The numbers that are fitted, into the cluster's file with its comments."""
    path = FOLDER / f"{cluster.name}.yaml"
    text = path.read_text(encoding="utf-8")
    for key, value in {
        "between": f"{{latency_us: {cluster.between.latency_us:g}, gb_s: {cluster.between.gb_s:g}}}",
        "congestion": _points(cluster.congestion),
        "hop_congestion": _points(cluster.hop_congestion),
        "overlap_reduce": f"{cluster.overlap_reduce:g}",
        "gemm": _points(cluster.device.gemm),
        "gemm_odd": f"{cluster.device.gemm_odd:g}",
    }.items():
        text = re.sub(rf"(?m)^( *{key}:).*$", rf"\1 {value}", text)
    path.write_text(text, encoding="utf-8")


def _points(curve: Iterable[tuple[float, float]]) -> str:
    return "[" + ", ".join(f"[{f'{x:g}' if x < 1e5 else f'{x:.1e}'}, {share:g}]" for x, share in curve) + "]"


def write_checked(name: str, rows: Sequence[Checked]) -> None:
    """What plans were compared with, at the end of a cluster's file."""
    path = FOLDER / f"{name}.yaml"
    text = path.read_text(encoding="utf-8").partition("checked:")[0].rstrip()
    form = "- {{strategy: {}, parameters: {:.2e}, gpus: {}, errors: {}}}"
    lines = [form.format(row.strategy, row.parameters, list(row.gpus), list(row.errors)) for row in rows]
    head = "checked:  # samples/s planned over measured, less 1; written by benchmarks/planner_studies.py"
    path.write_text("\n".join([text, head, *lines, ""]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="look for the nine numbers of clusters/frontier.yaml first")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    cluster = load_cluster("frontier")
    if options.fit:
        fits = {name: s.fit(cluster, s.cells_of(*models)) for name, models in s.FITS.items()}
        (s.RESULTS / "study_fits.json").write_text(json.dumps(fits, indent=1) + "\n", encoding="utf-8")
        cluster = s.with_numbers(cluster, fits["all"])
        write_numbers(cluster)
    rows = t.rows_of(cluster)
    for name, compared in t.checked(rows).items():
        write_checked(name, compared)
    path = options.out / "planner_studies.md"
    path.write_text(page(cluster, rows, options.out), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
