"""Adaptive patching from image to tokens: score, tree and resampling, on the CPU or a GPU, each stage by itself.

    python benchmarks/adaptive.py [--device cpu|cuda] [--repeats 20] [--case NAME ...] [--out benchmarks/results]

Images are generated tissue: for 2-D four slices of 512^2 side by side, enlarged four times; for 3-D a volume of 128^3
mirrored to 256^3; both in a ball of tissue, with plain resin around it. Warm-up is left out; medians with the least and
the most. On a machine that others use, read the CPU seconds (all threads together) rather than the clock's.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from vitrail.data.generate import generate_em
from vitrail.launch.machine import environment
from vitrail.layers.scores import CannyScore, GradientScore, VarianceScore
from vitrail.layers.trees import build_trees

ROOT = Path(__file__).resolve().parent.parent

# name: dimensions, score, leaves, token side, and seconds that should not be passed on CPU (2 cores) and on an H200
CASES: dict[str, tuple[int, Any, int, int, float | None, float | None]] = {
    "4096^2 canny": (2, CannyScore(), 16384, 16, 0.25, 0.005),
    "4096^2 gradient": (2, GradientScore(), 16384, 16, None, None),
    "256^3 gradient": (3, GradientScore(), 4096, 8, 0.4, 0.003),
    "256^3 variance": (3, VarianceScore(), 4096, 8, None, None),
    "256^3 canny": (3, CannyScore(), 4096, 8, 1.0, 0.003),
}


@cache
def picture(ndim: int) -> torch.Tensor:
    """[1, 1, 4096, 4096] or [1, 1, 256, 256, 256] bytes, the same every time."""
    if ndim == 3:
        volume = np.pad(generate_em((128, 128, 128), seed=0).image, [(0, 128)] * 3, mode="symmetric")
        return embed(torch.from_numpy(volume)[None, None])
    slices = generate_em((16, 512, 512), seed=0).image[2::4]
    mosaic = np.concatenate([np.concatenate(list(slices[:2]), axis=1), np.concatenate(list(slices[2:]), axis=1)])
    wide = functional.interpolate(torch.from_numpy(mosaic)[None, None].float(), scale_factor=4, mode="bicubic")
    return embed(wide.round().clamp(0, 255).byte())


def embed(images: torch.Tensor) -> torch.Tensor:
    """Plain resin outside a ball of 0.45 of the side."""
    axes = [torch.linspace(-1, 1, size).square() for size in images.shape[2:]]
    radius = sum(torch.meshgrid(*axes, indexing="ij"))
    return torch.where(radius < 0.81, images, 190)


def clock(work: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """Seconds of each repeat after a warm-up, waiting for the device before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    seconds, busy = [], []
    for _ in range(repeats):
        wait()
        start, used = time.perf_counter(), time.process_time()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - used)
    return {
        "median": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "cpu": statistics.median(busy),
        "repeats": repeats,
    }


def measure(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    ndim, kind, length, patch, cpu_goal, gpu_goal = CASES[name]
    images = picture(ndim).to(device)
    score = kind.score(images)
    tree = build_trees(score, length=length, patch=patch)
    tokens = tree.serialise(images)

    def whole() -> torch.Tensor:
        return build_trees(kind.score(images), length=length, patch=patch).serialise(images)

    stages = {
        "score": lambda: kind.score(images),
        "tree": lambda: build_trees(score, length=length, patch=patch),
        "serialise": lambda: tree.serialise(images),
        "paint": lambda: tree.paint(tokens),
        "whole": whole,
    }
    sides, counts = (values.tolist() for values in tree.side[tree.valid].unique(return_counts=True))
    return {
        "case": name,
        "leaves": int(tree.valid.sum()),
        "patch": patch,
        "sides": dict(zip(map(str, sides), counts, strict=True)),
        "scored": float((score > 0).float().mean()),
        "goal": gpu_goal if device.type == "cuda" else cpu_goal,
        "stages": {stage: clock(work, device, repeats) for stage, work in stages.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds; whole is image -> score -> tree -> tokens, without paint."""
    lines = [
        "| case | leaves | score | tree | serialise | paint | whole (least-most) | CPU of whole | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        middle = {stage: f"{1e3 * times['median']:.1f}" for stage, times in row["stages"].items()}
        whole = row["stages"]["whole"]
        goal = "" if row["goal"] is None else f"{1e3 * row['goal']:.0f}"
        lines.append(
            f"| {row['case']} | {row['leaves']:,} | {middle['score']} | {middle['tree']} | {middle['serialise']} | "
            f"{middle['paint']} | {middle['whole']} ({1e3 * whole['least']:.1f}-{1e3 * whole['most']:.1f}) | "
            f"{1e3 * whole['cpu']:.0f} | {goal} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    try:
        import cv2

        cv2.setNumThreads(arguments.threads)
        opencv = cv2.__version__
    except ImportError:
        opencv = None
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "adaptive",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "opencv": opencv,
        "python": platform.python_version(),
        "environment": environment(),
        "rows": rows,
    }
    for name in arguments.case:
        rows.append(measure(name, device, arguments.repeats))
        # After each case, so that a run that is cut off keeps what it has measured.
        (arguments.out / f"adaptive_{device.type}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(table(rows).splitlines()[-1] if len(rows) > 1 else table(rows), flush=True)


if __name__ == "__main__":
    main()
