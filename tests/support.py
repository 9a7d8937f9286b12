"""Small recipes, volumes and processes for the tests."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LONG = 1200.0  # seconds after which a process hangs, however busy the machine is


def merge(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tree with `a.b` keys replaced."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def tiny_recipe(volume: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A 3-D MAE that takes a step in a few milliseconds; `a__b=value` changes the key a.b."""
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(run_dir), "seed": 3, "steps": 20, "device": "cpu"},
        "model": {
            "kind": "mae",
            "ndim": 3,
            "encoder": {"width": 24, "depth": 2, "heads": 2, "patch": 4, "positions": "rope", "drop_path": 0.2},
            "mask": {"kind": "random", "ratio": 0.75},
            "decoder": {"kind": "cross", "width": 16, "depth": 1, "heads": 2, "drop_path": 0.1},
        },
        "data": {
            "train": [{"path": str(volume), "region": {"x": [0, 0.6]}}],
            "valid": [{"path": str(volume), "region": {"x": [0.6, 1]}}],
            "crop": 16,
            "batch": 8,
            "augment": {"orientations": True},
        },
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "schedule": {"kind": "cosine", "warmup": "10%"},
        "checkpoint": {"every": 10},
        "eval": {"every": 10, "samples": 8},
        "log": {"every": 1, "pictures": "off", "tensorboard": False, "report": False},
    }
    return merge(tree, {key.replace("__", "."): value for key, value in changes.items()})


def recomputed(blocks: Any, choice: Any) -> Any:
    """Plan what blocks recompute and carry it out, in place; returns the plan."""
    from vitrail.parallel.recompute import carry_out, plan

    made = plan(blocks, choice)
    carry_out(blocks, made.kept)
    return made


def write_volume(path: Path, *, size: int = 48, seed: int = 0) -> Path:
    """A small smooth volume as OME-Zarr."""
    from vitrail.data.generate import generate_em, write_ome_zarr

    volume = generate_em((size, size, size), seed=seed)
    write_ome_zarr(path, volume, levels=1, chunk=16)
    return path


def write_recipe(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Events of a run; for repeated steps the later one, as after a resume."""
    lines = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return list({e["step"]: e for e in lines if e["event"] == event}.values())


def losses(run_dir: Path) -> np.ndarray:
    return np.array([e["loss"] for e in sorted(events(run_dir, "train"), key=lambda e: e["step"])])


def parameters(run_dir: Path, weights: str = "raw", checkpoint: int | None = None) -> dict[str, np.ndarray]:
    import vitrail

    model = vitrail.load(run_dir, weights=weights, checkpoint=checkpoint)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def environment(**extra: str) -> dict[str, str]:
    """For child processes: one thread, no launcher variables of our own."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    paths = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    # A crash in compiled code tells where it was, also in workers that do not start by the command line.
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": paths, **extra}


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start the command line in a process group of its own, so that all of it can be ended."""
    options.setdefault("env", environment())
    return subprocess.Popen(
        [str(a) for a in arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process and its children, whatever state they are in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(*arguments: str | Path, timeout: float = LONG, **options: Any) -> tuple[int, str]:
    """Run to the end; exit code and output."""
    process = start(*arguments, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    return process.returncode, output


def eventually(condition: Callable[[], Any]) -> bool:
    """Whether something comes true, however busy the machine is."""
    deadline = time.monotonic() + LONG
    while not (found := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def is_gone(number: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def vitrail(*arguments: str | Path, **options: Any) -> tuple[int, str]:
    return run(sys.executable, "-m", "vitrail", *arguments, **options)


def torchrun(ranks: int, *arguments: str | Path, launcher: tuple[str, ...] = ()) -> list[str]:
    """The command that runs a module or script on several local ranks."""
    prefix = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*prefix, *launcher, *[str(a) for a in arguments]]


_SMALL = {"width": 16, "depth": 2, "heads": 2, "patch": 4}
_ADAPTIVE = {"kind": "adaptive", "length": 16, "score": {"kind": "gradient"}}
_DECODER = {"width": 16, "depth": 1, "heads": 2}
# One of each kind, for images of 16 x 16 with 3 channels and 4 classes, and an objective for it.
MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "vit": ({"kind": "vit", "classes": 4, **_SMALL, "positions": "rope"}, "classify"),
    "vit, learned": ({"kind": "vit", "classes": 4, **_SMALL, "positions": "learned", "drop_path": 0.1}, "classify"),
    "mae, self": ({"kind": "mae", "encoder": _SMALL, "decoder": {"kind": "self", **_DECODER}}, "reconstruct"),
    "mae, cross": ({"kind": "mae", "encoder": _SMALL, "decoder": {"kind": "cross", **_DECODER}}, "reconstruct"),
    "unetr": ({"kind": "unetr", "encoder": _SMALL | {"depth": 4}}, "segment"),
    "sap": ({"kind": "sap", "encoder": {**_SMALL, "tokens": _ADAPTIVE}}, "segment"),
    "dit": ({"kind": "dit", "classes": 4, **_SMALL}, "flow"),
    "diffusion_vit": (
        {"kind": "diffusion_vit", "encoder": _SMALL, "decoder": {"kind": "transformer", **_DECODER}},
        "denoise",
    ),
    "autoencoder": ({"kind": "autoencoder"}, "autoencode"),
}
