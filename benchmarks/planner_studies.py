"""The planner against published studies: one command writes planner_studies.md and its plots.

    python benchmarks/planner_studies.py [--calibrate] [--out benchmarks]

The Frontier sharding study (images/s and memory of four sizes under five strategies, prefetch of 5B; 5B and 15B),
torchtitan-mae on GH200, ORBIT's ladder. `--calibrate` first solves for three values of clusters/frontier.yaml again
and writes them there. No GPU is needed (what study_memory.py measured is read from results); it takes about 20 s.
"""

import argparse
import dataclasses
import re
import statistics
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import published as p
import study_predictions as s
import study_tables as t
from study_plots import plot_frontier, plot_ladder, plot_large, plot_memory

from vitrail.cost.cluster import FOLDER, Cluster, load_cluster

HERE = Path(__file__).resolve().parent


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


def page(cluster: Cluster, out: Path) -> str:
    """All of it as Markdown; plots are written beside."""
    rates = t.frontier_rates(cluster)
    missed = t.errors(rates)
    hopper = load_cluster("gh200")
    memory, rungs, large = t.memory_rows(cluster), t.ladder_rows(cluster), t.large_rates(cluster)
    plots = out / "results"
    plots.mkdir(parents=True, exist_ok=True)
    plot_frontier(rates, plots / "planner_frontier.png")
    plot_memory(memory, plots / "planner_memory.png")
    plot_large(large, plots / "planner_large.png")
    plot_ladder(rungs, plots / "planner_ladder.png")
    cells = table(
        ("model", "mode", *(f"{nodes}" for nodes in p.NODES)),
        (
            (model, mode, *(f"{r:,.0f} ({percent(1 + e)})" for r, e in zip(rates[model, mode], row, strict=True)))
            for (model, mode), row in missed.items()
        ),
    )
    by_model = {
        model: statistics.mean(abs(e) for (m, _), row in missed.items() if m == model for e in row[: t.JUDGED])
        for model in p.MODELS
    }
    pairs5, wrong5 = t.ranked(rates, 0.05)
    pairs10, wrong10 = t.ranked(rates, 0.10)
    allocated = t.allocated_rows(cluster)
    shares = [planned / gib for *_, gib, _, planned in allocated if gib]
    shares_again = [planned / gib for *_, gib, planned in allocated if gib]
    again = s.software_rows()[0]
    free = [row.ratio for row in memory if not row.full]
    own = {
        row[:2]: row.allocated * cluster.device.fragmentation / row.published
        for row in memory
        if not row.mode.startswith("FULL_SHARD") and not row.full
    }
    holds = s.other_holds()
    prefetch = t.prefetch_rows(cluster)
    on_one_node = {mode: row[0].reserved for (model, mode), row in large.items() if model == "15b" and row[0]}
    values = {
        "model_errors": ", ".join(f"{model} {100 * error:.0f} %" for model, error in by_model.items()),
        "mean": f"{100 * t.mean_error(rates):.1f}",
        "cells": cells,
        "rank5": f"{pairs5 - len(wrong5)} of {pairs5}",
        "rank10": f"{pairs10 - len(wrong10)} of {pairs10}",
        "wrong10": "; ".join(wrong10) or "none",
        "wrong5": "; ".join(pair for pair in wrong5 if pair not in wrong10) or "none",
        "full_on_32": ", ".join(f"{m} {percent(1 + missed[m, 'FULL_SHARD'][5])}" for m in ("huge", "1b", "3b")),
        "no_shard_on_32": percent(1 + missed["3b", "NO_SHARD"][5]),
        "epochs": ", ".join(f"{rate:,}" for rate in p.EPOCHS_OF_A_LOG),
        "allocated": table(
            ("mode", "model", "published", "run again", "planned", "against published", "against run again"),
            (
                (mode, m, _gib(a), _gib(b), _gib(c), percent(c / a) if a else "", percent(c / b) if b else "")
                for mode, m, a, b, c in allocated
            ),
        ),
        "allocated_again": _most(shares_again),
        "allocated_rows": str(len(shares)),
        "allocated_mean": _missed(shares),
        "allocated_most": _most(shares),
        "again_device": again["device"],
        "again_torch": again["torch"],
        "again_date": again["date"],
        "again_most": _most([row.again / row.published for row in memory if not row.failed]),
        "memory_mean": _missed(free),
        "memory_most": _most(free),
        "memory_judged": str(len(free)),
        "memory_full": str(len(memory) - len(free)),
        "memory": table(
            ("mode", "model", "published", "run again", "allocated, planned", "predicted", "error"),
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
        "ddp_14": _range(missed["base", "DDP"][: t.JUDGED]),
        "ddp_16": _range(t.errors(t.rates_by_the_tables(cluster))["base", "DDP"][: t.JUDGED]),
        "patches": table(
            ("mode", "published", "run again with 16", "run again with 14", "predicted with 16", "predicted with 14"),
            (
                (mode, f"{a:.2f}", *(f"{b:.2f} ({percent(b / a)})" for b in others))
                for mode, a, *others in t.patch_rows(cluster)
            ),
        ),
        "sensitivity": table(
            ("assumed instead", "mean error", "ranked as measured, beyond 10 %", "beyond 5 %"),
            ((name, f"{100 * error:.1f} %", *counts) for name, error, *counts in t.sensitivity(cluster)),
        ),
        "gh200_cudnn": ", ".join(percent(b / a) for *_, a, b in t.gh200_rows(_with_cudnn(hopper))),
        "prefetch": table(
            ("backward prefetch", "FULL_SHARD", "HYBRID_2", "HYBRID_16"),
            ((name, *(f"{rate:.0f} (published {measured})" for rate, measured in row)) for name, row in prefetch),
        ),
        "prefetch_most": _most([rate / measured for rate, measured in prefetch[-1][1]]),
        "gh200": table(
            ("nodes", "masked", "published tokens/s/GPU", "predicted", "error"),
            ((n, f"{100 * k:.0f} %", f"{a:,}", f"{b:,.0f}", percent(b / a)) for n, k, a, b in t.gh200_rows(hopper)),
        ),
        "ladder": table(
            ("rung", "published", "predicted", "predicted s/sample"),
            ((name, a or "out of memory", f"{b:.2f}" if b else "out of memory", f"{c:.2f}") for name, a, b, c in rungs),
        ),
        "large": "\n\n".join(_large_table(large, model) for model in ("5b", "15b")),
        **{f"large_{m}": f"{100 * t.large_error(large, m):.0f}" for m in ("5b", "15b")},
        **{f"order_{m}": t.large_order(large, m, 0.10) for m in ("5b", "15b")},
        "hybrid_4_gib": f"{on_one_node['HYBRID_4']:.0f}",
        "hybrid_4_reserved": f"{p.RESERVED_15B_HYBRID_4_GIB:.1f}",
        "grad_op_gib": f"{on_one_node['SHARD_GRAD_OP']:.1f}",
        "limit": f"{0.95 * cluster.device.memory_gib:.1f}",
        "slope": f"{cluster.device.gemm[-3][1]:.2f}",
        "launch": f"{cluster.device.launch_us:.0f}",
        "launched": f"{1000 * p.LAUNCHED_OF_A_LOG:.0f}",
        "outside": f"{p.STEPS_OF_AN_EPOCH * s.outside_steps(cluster):.1f}",
        "epoch": f"{p.STEPS_OF_AN_EPOCH * s.published_seconds('base', 'FULL_SHARD', 1):.1f}",
        "mean_128": f"{100 * statistics.mean(abs(row[-1]) for row in missed.values()):.0f}",
        "pending": ", ".join(
            f"{active - allocated:.1f}"
            for active, allocated in zip(p.ACTIVE_GIB["NO_SHARD"], p.ALLOCATED_GIB["NO_SHARD"], strict=True)
        ),
        "latency": f"{cluster.between.latency_us:.0f}",
        "gb_s": f"{cluster.between.gb_s:.2f}",
        "node_gb_s": f"{8 * cluster.between.gb_s:.1f}",
    }
    text = (HERE / "planner_studies.template").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _with_cudnn(cluster: Cluster) -> Cluster:
    """With the attention that cuDNN reaches on an H200."""
    device = dataclasses.replace(cluster.device, attention=load_cluster("h200").device.attention)
    return dataclasses.replace(cluster, device=device)


def write_calibrated(cluster: Cluster) -> None:
    """Into the cluster's file, with its comments."""
    path = FOLDER / f"{cluster.name}.yaml"
    points = ", ".join(f"[{flops:.1e}, {share}]" for flops, share in cluster.device.gemm)
    link = f"{{latency_us: {cluster.between.latency_us}, gb_s: {cluster.between.gb_s}}}"
    text = path.read_text(encoding="utf-8")
    for key, value in (("between", link), ("gemm", f"[{points}]")):
        text = re.sub(rf"(?m)^( *{key}:).*$", rf"\1 {value}", text)
    path.write_text(text, encoding="utf-8")


def _large_table(large: t.Large, model: str) -> str:
    def show(cell: t.Cell | None) -> str:
        if cell is None:
            return ""
        error = f" ({percent(cell.rate / cell.published)})" if cell.published else ""
        return f"{cell.rate:,.0f}{error}" + ("" if cell.fits else f", {cell.reserved:.0f} GiB")

    rows = ((mode, *map(show, large[model, mode])) for mode in t.LARGE)
    return table((model, *(f"{nodes}" for nodes in p.NODES)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="solve for the values of clusters/frontier.yaml first")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    cluster = load_cluster("frontier")
    if options.calibrate:
        cluster = s.calibrate(cluster)
        write_calibrated(cluster)
    path = options.out / "planner_studies.md"
    path.write_text(page(cluster, options.out), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
