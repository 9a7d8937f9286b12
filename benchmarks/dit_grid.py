"""TorchDiTan's grid for its 0.5B diffusion transformer: patch, batch, recomputation, compilation, precision.

    python benchmarks/dit_grid.py [--minutes 8] [--out benchmarks/results/dit_grid]
    python benchmarks/dit_grid.py --tables         what was measured and what was planned, for dit_grid.md; needs no GPU
    vitrail report benchmarks/results/dit_grid

It is the sweep that `vitrail bench configs/dummy/dit_0.5b.yaml --mode syn --sweep ...` makes, but cells follow each
other in one process, which spares each its start. A call goes on where the last one stopped, and ends with 75 when its
minutes are over and something is left. `--quick` measures a small model, to try the script on a CPU.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from planner import STOPPED, clean, compare, predict
from planner import summary as summary_of

from vitrail.bench.measure import environment_of, measure
from vitrail.bench.runner import Options, Stopped, Sweep, plan_sweep
from vitrail.bench.sweep import Cell
from vitrail.cost.cluster import Cluster, load_cluster
from vitrail.errors import is_out_of_memory
from vitrail.training.failures import summary

ROOT = Path(__file__).resolve().parent.parent
RECIPE = os.path.relpath(ROOT / "configs/dummy/dit_0.5b.yaml")
PATCHES, BATCHES = "model.patch=2,4,8", "data.batch=16/rank,64/rank,256/rank"
GRIDS = (
    (PATCHES, BATCHES, "parallel.recompute=none,{every: 2}", "parallel.compile=true,false", "precision.compute=bf16"),
    # float8 where it is meant to be used, in compiled blocks.
    (PATCHES, BATCHES, "parallel.recompute=none", "parallel.compile=true", "precision.compute=float8"),
)
SMALL = ("model.width=32", "model.depth=2", "model.heads=2", "data.crop=8", "data.train.0.shape=[8, 8]")
SMALL_GRIDS = (("model.patch=2,4", "data.batch=2/rank,4/rank", "parallel.compile=false", "precision.compute=fp32"),)


class Here(Sweep):
    """A sweep whose cells run in this process."""

    def measure(self, cell: Cell) -> dict[str, Any]:
        clean()
        order = self.order(cell, watched=False)
        asked = {name: order[name] for name in ("mode", "windows", "steps", "warm_up", "name", "keys")}
        try:
            return measure(order["recipe"], order["overrides"], **asked)
        except Exception as error:
            status = "oom" if is_out_of_memory(error) else "failed"
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            return {"status": status, "error": summary(error)[:1000], "environment": environment_of(device)}
        finally:
            clean()


def tables(rows: Sequence[dict[str, Any]], overrides: Sequence[str], cluster: Cluster) -> str:
    """What was measured, a line for each patch and batch; and the errors of the plan, a line for each number format."""
    kinds = dict.fromkeys((row["precision"], row["recompute"], row["compile"]) for row in rows)
    lines: dict[tuple[int, int], dict[tuple[str, str, bool], str]] = {}
    for row in rows:
        place, kind = (row["keys"]["model.patch"], row["batch_per_rank"]), (row["precision"], row["recompute"])
        lines.setdefault(place, {})[*kind, row["compile"]] = found_words(row)
    names = [f"{p}, recompute {r}, {'compiled' if c else 'eager'}" for p, r, c in kinds]
    text = ["| patch | batch | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for (patch, batch), line in lines.items():
        text.append(f"| {patch} | {batch} | " + " | ".join(line.get(kind, "") for kind in kinds) + " |")
    text += ["", "| format | memory | step time | cells that ran | fits wrong |", "|---|---|---|---|---|"]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        told = summary_of([beside_plan(row, overrides, cluster) for row in rows if row["precision"] == precision])
        errors = [
            f"{told[name]['mean']:.1%}, {told[name]['worst']:.1%}" if name in told else ""
            for name in ("memory_error", "time_error")
        ]
        ran, wrong = told.get("time_error", {}).get("cells", 0), ", ".join(told["fits_wrong"]) or "none"
        text.append(f"| {precision} | {' | '.join(errors)} | {ran} | {wrong} |")
    return "\n".join(text)


def found_words(row: dict[str, Any]) -> str:
    """Samples/s, MFU where it is known, peak memory."""
    if row["status"] != "ok":
        return "out of memory"
    share = f"{row['mfu']:.1%}, " if row["mfu"] else ""
    return f"{row['samples_per_s']:,.0f}/s, {share}{row['memory']['allocated_gib'] or 0:.1f}"


def beside_plan(row: dict[str, Any], overrides: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    """A result compared with its plan, as a row of planner.py's table."""
    changes = [f"{key}={json.dumps(value)}" for key, value in row["keys"].items()]
    measured = row | row.get("memory", {})
    guess = predict(RECIPE, cluster, [*overrides, *changes])
    return {"cell": row["name"], "compared": compare(measured, guess, cluster.device.memory_gib)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no cell is begun")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/dit_grid")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--tables", action="store_true", help="print what is in --out; measure nothing")
    parser.add_argument("--cluster", default="h200", help="that --tables plans for")
    given = parser.parse_args(arguments)
    if given.tables:
        lines = (given.out / "results.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["status"] in ("ok", "oom")]
        print(
            tables(rows, json.loads((given.out / "sweep.json").read_text())["overrides"], load_cluster(given.cluster))
        )
        return 0
    began = time.monotonic()
    for grid in SMALL_GRIDS if given.quick else GRIDS:
        options = Options(windows=3, steps=4, warm_up=4, most_seconds=60 * given.minutes - (time.monotonic() - began))
        planned = plan_sweep(
            RECIPE,
            SMALL if given.quick else (),
            sweep=grid,
            mode="syn",
            out=given.out,
            options=options,
            tell=lambda line: print(line, flush=True),
        )
        try:
            Here(**vars(planned)).run()
        except Stopped as stop:
            print(stop, file=sys.stderr)
            return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
