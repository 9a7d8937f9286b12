"""Step time, MFU, memory and data wait of the 2B 3-D MAE on one GPU, with real data flowing from an OME-Zarr.

    python benchmarks/mae3d_2b.py [--steps 20] [--side 704] [--out benchmarks/results]

A generated EM volume is mirrored to the wanted side, given fresh noise (so that it compresses like EM) and written as
OME-Zarr in 64^3 chunks; then configs/mae3d/2b.yaml is trained as it is, for each decode ratio. The first steps
(compilation) are left out; medians with quartiles over the rest.
"""

import argparse
import datetime
import json
import platform
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.data.generate import Volume, generate_em, write_ome_zarr
from vitrail.launch.machine import environment

ROOT = Path(__file__).resolve().parent.parent
SKIP = 8


def write_volume(path: Path, side: int) -> float:
    """Mirror a small generated volume to side^3 with noise; returns the compression ratio on disk.

    The noise of a plane is one of a few, shifted at random: a compressor looks no further than a chunk.
    """
    small = generate_em((192, 192, 192), seed=0)
    pad = [(0, side - 192)] * 3
    image = np.pad(small.image, pad, mode="symmetric")
    rng = np.random.default_rng(0)
    bank = rng.normal(0, 10, (16, side, side)).astype(np.int16)
    for number, plane in enumerate(image):  # in place, plane by plane: no second copy of the volume
        noise = np.roll(bank[number % len(bank)], rng.integers(0, side, 2), (0, 1))
        plane[...] = np.clip(plane + noise, 0, 255).astype(np.uint8)
    labels = np.pad(small.labels, pad, mode="symmetric")
    write_ome_zarr(path, Volume(image=image, labels=labels, label_names=small.label_names), levels=1, chunk=64)
    stored = sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and "labels" not in f.parts)
    return image.nbytes / stored


def measure(volume: Path, home: Path, steps: int, overrides: list[str]) -> dict[str, object]:
    """Train for so many steps and read the run's own log."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run = home / "run"
    shutil.rmtree(run, ignore_errors=True)
    vitrail.train(
        ROOT / "configs/mae3d/2b.yaml",
        overrides=[
            f"run.dir={run}", f"run.steps={steps}", f"data.train.0.path={volume}", "log.every=1", "schedule.warmup=4",
            "log.activations=off", "checkpoint.every=off", "log.tensorboard=false", *overrides,
        ],
    )  # fmt: skip
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [e for e in events if e["event"] == "train" and e["step"] > SKIP and "samples_per_s" in e]
    seconds = [e["step_seconds"] for e in lines]
    middle = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4)
    typical = min(lines, key=lambda e: abs(e["step_seconds"] - middle))
    started = next(e for e in events if e["event"] == "start")
    return {
        "overrides": overrides,
        "steps_measured": len(seconds),
        "step_seconds": middle,
        "step_seconds_quartiles": [quartiles[0], quartiles[2]],
        "samples_per_s": typical["samples_per_s"],
        "tokens_per_s": typical["tokens_per_s"],
        "tflops": typical["tflops"],
        "mfu": typical["mfu"],
        "hfu": typical["hfu"],
        "memory_gib": max(e["memory_gib"] for e in lines),
        "data_wait": statistics.mean(e["data_wait"] for e in lines),
        "parameters": started["parameters"],
        "losses": [round(e["loss"], 4) for e in events if e["event"] == "train"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--side", type=int, default=704)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--extra", nargs="*", default=[], help="further sets of overrides, comma-separated keys")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp())
    volume = home / "volume.zarr"
    ratio = write_volume(volume, arguments.side)
    cases = [["model.decoder.decode_ratio=0.25"], ["model.decoder.decode_ratio=1.0"]]
    cases += [extra.split(",") for extra in arguments.extra]
    rows: list[dict] = []
    result = {
        "benchmark": "mae3d_2b",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "environment": environment(),
        "volume": {"side": arguments.side, "chunk": 64, "compression": ratio},
        "rows": rows,
    }
    for overrides in cases:
        rows.append(measure(volume, home, arguments.steps, overrides))
        # After each case, so that a run that is cut off keeps what it has measured.
        (arguments.out / "mae3d_2b.json").write_text(json.dumps(result, indent=1) + "\n")
        print(table(rows), flush=True)
    shutil.rmtree(home)


def table(rows: list[dict]) -> str:
    lines = [
        "| case | s/step (quartiles) | MFU | HFU | TFLOP/s | peak GiB | data wait |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["step_seconds_quartiles"]
        lines.append(
            f"| {', '.join(row['overrides'])} | {row['step_seconds']:.3f} ({low:.3f}-{high:.3f}) | {row['mfu']:.1%} | "
            f"{row['hfu']:.1%} | {row['tflops']:.0f} | {row['memory_gib']:.1f} | {row['data_wait']:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
