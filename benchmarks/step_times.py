"""Step times of two checkouts of this repository side by side: did a change make training slower?

    git worktree add /tmp/before SOME_COMMIT
    python benchmarks/step_times.py --before /tmp/before [--rounds 3] [--out benchmarks/results]
    python benchmarks/step_times.py --page       # writes step_times.md from the results; needs no GPU
    python benchmarks/step_times.py --before /tmp/before --quick --out DIR      # small models on a CPU, to try it

Four models train on made-up data that lies on the device: ViT-L/16, the 2-billion-parameter masked autoencoder of
512^3 voxels, DiT-XL/2 and UNETR. Each round runs every model once with either checkout, in turns and each in a process
of its own, so that what the machine does meanwhile meets both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from planner import Cell, cells, machine, measure_cell, tiny_cells, write_json

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("before", "now")


def chosen(quick: bool) -> list[Cell]:
    """The models whose steps are timed."""
    if quick:
        return tiny_cells()[:2]
    told: dict[str, Any] = yaml.safe_load((ROOT / "configs/mae3d/2b.yaml").read_text())
    objective = {"kind": "reconstruct", "target": "raw", "on": "hidden"}
    wanted = {cell.name: cell for cell in cells()}
    dit = {"kind": "dit", "size": "XL/2", "classes": 1000}
    return [
        Cell("vit L/16 x 128, compiled", {"kind": "vit", "size": "L/16", "classes": 1000}, "classify", 224, 3, 128,
             compile=True, classes=1000),
        Cell("mae 2B 512^3 x 1, compiled", told["model"], objective, 512, 1, 1, compile=True),
        Cell("dit XL/2 x 64, compiled", dit, "flow", 32, 4, 64, compile=True, classes=1000),
        wanted["unetr B/16 96^3 x 8"],
    ]  # fmt: skip


def measure(checkout: Path, name: str, quick: bool) -> dict[str, Any]:
    """Time one model with the code of a checkout, in a process of its own."""
    paths = [str(checkout / "src"), str(checkout / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", name, *(["--quick"] if quick else [])]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"status": "failed", "error": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not Path(found["package"]).is_relative_to(checkout.resolve()):
        raise SystemExit(f"{found['package']} was measured instead of {checkout}")
    return found


def child(name: str, quick: bool) -> None:
    """Time one model with whatever code the path leads to."""
    import vitrail

    cell = next(cell for cell in chosen(quick) if cell.name == name)
    steps = 4 if quick else 8
    print(json.dumps(measure_cell(cell, steps) | {"package": str(Path(vitrail.__file__).resolve())}))


def page(found: dict[str, Any]) -> str:
    """The table, in Markdown."""
    told = found["machine"]
    lines = [
        "# Step times, before and now",
        "",
        f"{told['device']}, PyTorch {told['torch']}, {found['date']}; commit {found['before']} and today's code, "
        f"in turns, {found['rounds']} rounds, each a process of its own with three windows of 8 steps after 4 that "
        "do not count. Made-up data that lies on the device; AdamW's step included. "
        "Written by `python benchmarks/step_times.py`.",
        "",
        "| model | before, ms a step (range of rounds) | now | now / before | peak GiB before | now |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found["cells"].items():
        failed = [one["error"] for one in rounds if one["status"] != "ok"]
        if failed:
            lines.append(f"| {name} | {failed[0][:80]} | | | | |")
            continue
        times = {side: [1e3 * r["step_seconds"]["median"] for r in rounds if r["side"] == side] for side in SIDES}
        middle = {side: statistics.median(times[side]) for side in SIDES}
        memory = [max(r["allocated_gib"] for r in rounds if r["side"] == side) for side in SIDES]
        words = [f"{middle[side]:.1f} ({min(times[side]):.1f}-{max(times[side]):.1f})" for side in SIDES]
        words += [f"{middle['now'] / middle['before']:.3f}", *(f"{gib:.2f}" for gib in memory)]
        lines.append(f"| {name} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--name", default=None, help="what the page calls it; its commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small models on a CPU")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    path = given.out / "step_times.json"
    if given.child:
        child(given.child, given.quick)
        return 0
    if given.page:
        (ROOT / "benchmarks/step_times.md").write_text(page(json.loads(path.read_text())))
        return 0
    if given.before is None or not (given.before / "src/vitrail").is_dir():
        parser.error("--before: the folder of another checkout, with src/vitrail in it")
    found: dict[str, Any] = {
        "machine": machine(),
        "before": given.name or _commit(given.before),
        "rounds": given.rounds,
        "cells": {cell.name: [] for cell in chosen(given.quick)},
    }
    for turn in range(given.rounds):
        for name, rounds in found["cells"].items():
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                checkout = given.before if side == "before" else ROOT
                rounds.append({"side": side} | measure(checkout, name, given.quick))
                found["date"] = rounds[-1].get("date", found.get("date", ""))[:10]
                print(f"{name}, {side}: {json.dumps(rounds[-1])[:300]}", flush=True)
                write_json(path, found)  # after each: a call may be cut off
    print(page(found))
    return 0


def _commit(checkout: Path) -> str:
    told = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return told.stdout.strip() or checkout.name


if __name__ == "__main__":
    raise SystemExit(main())
