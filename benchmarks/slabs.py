"""UNETR's maps in slabs: loss and memory of a rank where 1, 2 and 4 ranks share each sample.

    python benchmarks/slabs.py [--crops 96 128] [--ranks 1 2 4] [--out benchmarks/results]

Each row is a training of two steps through `vitrail train`'s own path, on processes of this machine (gloo): a UNETR of
a narrow encoder, so that convolutions are nearly all of the memory. What is told are the losses of both steps (by SGD,
since Adam makes much of rounding) and the most resident memory that a rank had above what it had after a training with
crops of 32; the largest of the ranks' counts.
Needs about 2 GiB for a crop of 96 on one rank, and eight times as much for one of 192.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import vitrail

ROOT = Path(__file__).resolve().parent.parent
RECIPE: dict[str, Any] = {
    "model": {
        "kind": "unetr",
        "ndim": 3,
        "encoder": {"width": 96, "depth": 4, "heads": 4, "patch": 16, "positions": "rope"},
        "features": 16,
    },
    "objective": {"kind": "segment"},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "log": {"every": 1, "pictures": "off", "report": False},
    "checkpoint": {"every": 2, "keep": 1},
}


def resident() -> float:
    """Return MiB of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(volume: str, crop: int, run: str) -> None:
    tree = RECIPE | {
        "run": {"name": "slabs", "dir": run, "steps": 2, "seed": 0, "device": "cpu"},
        "data": {
            "train": [{"path": volume, "labels": "structures"}],
            "valid": [],
            "crop": crop,
            "batch": 1,
            "lanes": 1,
            "workers": 1,
            "prefetch": 1,
        },
        "parallel": {"context": int(os.environ["WORLD_SIZE"])},
    }
    vitrail.train(tree)


def work(volume: str, crop: int, home: str) -> None:
    """Train two steps as one rank; write its memory."""
    torch.set_num_threads(1)
    train(volume, 32, f"{home}/first")  # what is loaded once is loaded now
    before = resident()
    train(volume, crop, f"{home}/run")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(home, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(peak - before))


def measure(volume: Path, crop: int, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--work", str(volume), str(crop), home]
        # Tensors are given back to the system when they are freed, else resident memory has holes that nothing uses.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr[-4000:])
        memory = max(json.loads(file.read_text()) for file in Path(home).glob("rank-*.json"))
        lines = [json.loads(line) for line in Path(home, "run", "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "train"]
    return {"crop": crop, "ranks": ranks, "mib": memory, "losses": losses}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| crop | ranks | MiB of a rank | of one rank's | loss of steps 1, 2 | off by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = next(other for other in rows if other["crop"] == row["crop"])
        off = max(abs(a - b) for a, b in zip(row["losses"], one["losses"], strict=True))
        losses = ", ".join(f"{loss:.6f}" for loss in row["losses"])
        ratio = f"1 / {one['mib'] / row['mib']:.2f}"
        lines.append(f"| {row['crop']}^3 | {row['ranks']} | {row['mib']:.0f} | {ratio} | {losses} | {off:.1e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crops", type=int, nargs="+", default=[96, 128])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        volume, crop, home = given.work
        work(volume, int(crop), home)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        volume = Path(folder, "em.zarr")
        side = str(max(given.crops))
        command = [sys.executable, "-m", "vitrail", "data", "generate", str(volume), "--shape", ",".join([side] * 3)]
        subprocess.run(command, check=True)
        for crop in given.crops:
            for ranks in given.ranks:
                rows.append(measure(volume, crop, ranks))
                print(table(rows).splitlines()[-1], flush=True)
    facts = {"date": f"{datetime.date.today()}", "python": platform.python_version(), "torch": torch.__version__}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "slabs.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
