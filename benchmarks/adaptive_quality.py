"""Adaptive against uniform patches at equal quality: time and Dice of segmentation, several seeds, on one GPU.

    python benchmarks/adaptive_quality.py [--isbi data/isbi2012] [--seconds 480] [--only tissue isbi ...] [--seeds 3]
    python benchmarks/adaptive_quality.py --page        # writes the tables of adaptive_quality.md; needs no GPU
    python benchmarks/adaptive_quality.py --trees       # what trees leave of the labels, for the page; needs no GPU

One model (`sap`: a token says the classes of its own voxels) is trained on uniform patches of 4, 8 and 16 voxels, and
on the leaves of trees whose smallest is 4 voxels wide: same batch, optimizer and crops, only the tokens differ. The
rate is constant after its warm-up and the averaged weights are measured, so that a run until some step is what a
training of so many steps would have given. All are compared after the same steps; all but the smallest uniform patches,
whose steps take several times as long, then go on for some more, since equal quality may need more of the cheap steps.
The time to a Dice is the step where the line through the evaluations has it, times the median seconds of a step.
Warm-up and evaluations are left out of the time; making scores and trees is not.

Generated tissue fills its images from edge to edge (`tissue`, and in three dimensions `tissue3d`, which is trained on
if --only names it), or a disc in each, with resin around it (`resin`); `isbi` is ISBI-2012, image.tif and label.tif in
the folder that --isbi names, with the last six of its thirty slices held out. All are made or copied into arrays that
are mapped into memory, so that no step waits for a file to be decoded.

Each cell is written to results/adaptive_quality.json as soon as it is there. A call makes those that the file lacks;
after --seconds it begins none, and ends with 75 if some are left: the same call again goes on. A cell that fails is
noted, does not end the others, and is tried again by the next call. `--quick` is a try of the whole on a CPU, with
small images and models, in minutes; its results are a file of their own.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adaptive_quality_tables import DATA, Variant, last, page, tables, trees_table
from planner import SAME, STOPPED, clean, machine, open_results, refuse_mixing, write_json

import vitrail
from vitrail.data.generate import LABEL_NAMES, generate_em
from vitrail.errors import is_out_of_memory
from vitrail.layers.scores import CannyScore
from vitrail.layers.trees import build_trees
from vitrail.training.failures import summary

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks/adaptive_quality.md"
MARK = "<!-- written by adaptive_quality.py --page, from here to the end -->"
SMALL = 4  # voxels: the smallest patch, and the smallest leaf
RESIN, GRAIN = 190, 6.0  # grey level around the discs, and its noise
HELD_OUT = 6  # slices of ISBI-2012
Entry = dict[str, Any]  # of data.train or data.valid
Entries = tuple[Entry, Entry, list[str]]  # what is trained on, what is held out, and the names of the classes


@dataclass(frozen=True)
class Size:
    """The sizes of the images, the model and the training."""

    crop: int  # of images
    crop3d: int
    train: tuple[int, int, int]  # voxels of the volume whose slices are trained on
    valid: tuple[int, int, int]
    train3d: tuple[int, int, int]
    valid3d: tuple[int, int, int]
    width: int
    depth: int
    heads: int
    features: int  # of a voxel
    steps: int  # after which all are compared
    longer: int  # times so many steps of all but the smallest uniform patches
    warmup: int
    batch: int
    rate: float
    evaluations: int  # until the steps after which all are compared
    samples: int  # of an evaluation


FULL = Size(
    crop=512, crop3d=64, train=(32, 768, 768), valid=(32, 512, 512), train3d=(96, 128, 192), valid3d=(64, 128, 128),
    width=256, depth=6, heads=4, features=32,
    steps=160, longer=3, warmup=20, batch=4, rate=1e-3, evaluations=8, samples=8,
)  # fmt: skip
QUICK = Size(
    crop=64, crop3d=16, train=(16, 128, 128), valid=(16, 128, 128), train3d=(32, 48, 48), valid3d=(32, 48, 48),
    width=48, depth=2, heads=2, features=8,
    steps=60, longer=2, warmup=12, batch=4, rate=3e-3, evaluations=4, samples=8,
)  # fmt: skip


def variants(crop: int, ndim: int) -> list[Variant]:
    """Uniform patches of three sizes, and trees of fewer tokens than there are small patches."""
    whole = (crop // SMALL) ** ndim
    uniform = [Variant(patch, (crop // patch) ** ndim, False) for patch in (SMALL, 2 * SMALL, 4 * SMALL)]
    fewer = [(SMALL, 2 if ndim == 3 else 4), (SMALL, 4 if ndim == 3 else 8), (2 * SMALL, 8)]
    return uniform + [Variant(patch, leaves(whole // share, ndim), True) for patch, share in fewer]


def leaves(most: int, ndim: int) -> int:
    """The most leaves that a tree of at most so many can have: each split gains 2^ndim - 1."""
    return most - (most - 1) % (2**ndim - 1)


def steps_of(variant: Variant, size: Size) -> int:
    smallest = variant.patch == SMALL and not variant.adaptive
    return size.steps * (1 if smallest else size.longer)


@dataclass(frozen=True)
class Cell:
    data: str
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data}, {self.variant.name}, seed {self.seed}"


def ndim_of(data: str) -> int:
    return 3 if data == "tissue3d" else 2


def cells(chosen: Sequence[str], size: Size, seeds: int) -> list[Cell]:
    """Seed by seed: a call that is cut off leaves fewer seeds, not fewer cells. Volumes come at the end."""
    return [
        Cell(data, variant, seed)
        for ndim in (2, 3)
        for seed in range(seeds)
        for data in chosen
        if ndim_of(data) == ndim
        for variant in variants(size.crop if ndim == 2 else size.crop3d, ndim)
    ]


# ---------------------------------------------------------------- data


@dataclass
class Home:
    """The folder that data are written to, each the first time that it is asked for."""

    folder: Path
    size: Size
    isbi: Path | None
    known: dict[str, Entries] = field(default_factory=dict)

    def entries(self, data: str) -> Entries:
        if data not in self.known:
            parts = self.arrays(data)
            names = ["background", "membrane"] if data == "isbi" else list(LABEL_NAMES)
            train, valid = (self.write(f"{data}-{part}", *parts[part]) for part in ("train", "valid"))
            self.known[data] = train, valid, names
        return self.known[data]

    def arrays(self, data: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Images and labels, [z, y, x] bytes."""
        if data == "isbi":
            assert self.isbi is not None
            image, label = (read_stack(self.isbi / f"{name}.tif") for name in ("image", "label"))
            label = (label == 0).astype(np.uint8)  # membranes are black
            return {"train": (image[:-HELD_OUT], label[:-HELD_OUT]), "valid": (image[-HELD_OUT:], label[-HELD_OUT:])}
        s = self.size
        shapes = (s.train3d, s.valid3d) if data == "tissue3d" else (s.train, s.valid)
        found = {part: grown(shape, seed) for part, shape, seed in zip(("train", "valid"), shapes, (0, 1), strict=True)}
        if data != "resin":
            return found
        return {part: embed(*pair, self.size.crop, seed) for seed, (part, pair) in enumerate(found.items())}

    def write(self, name: str, image: np.ndarray, labels: np.ndarray) -> Entry:
        paths = [self.folder / f"{name}-{part}.npy" for part in ("image", "labels")]
        for path, values in zip(paths, (image, labels), strict=True):
            np.save(path, values)
        return {"path": str(paths[0]), "labels": str(paths[1]), "kind": "numpy", "axes": "zyx"}


@cache
def grown(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The tissue that `vitrail data generate --shape ... --seed ...` writes, without the file."""
    volume = generate_em(shape, seed)
    return volume.image, volume.labels


def embed(image: np.ndarray, labels: np.ndarray, period: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tissue in discs half as wide as a crop, one for each area of a crop: a fifth of it. Elsewhere noisy resin."""
    axes = [(np.arange(n) + 0.5) % period - period / 2 for n in image.shape[1:]]
    outside = np.add.outer(axes[0] ** 2, axes[1] ** 2) > (period / 4) ** 2
    noise = np.random.default_rng(seed).normal(RESIN, GRAIN, image.shape)
    resin = np.clip(np.rint(noise), 0, 255).astype(np.uint8)
    return np.where(outside, resin, image), np.where(outside, 0, labels).astype(labels.dtype)


def read_stack(path: Path) -> np.ndarray:
    """All pages of a TIFF."""
    from PIL import Image, ImageSequence

    with Image.open(path) as stack:
        return np.stack([np.asarray(page) for page in ImageSequence.Iterator(stack)])


# ---------------------------------------------------------------- training


def recipe(cell: Cell, entries: Entries, size: Size, run: Path, device: str) -> dict[str, Any]:
    train, valid, names = entries
    ndim, variant = ndim_of(cell.data), cell.variant
    slices = {} if ndim == 3 else {"slices": "z"}
    encoder: dict[str, Any] = {"width": size.width, "depth": size.depth, "heads": size.heads, "patch": variant.patch}
    if variant.adaptive:
        encoder["tokens"] = {"kind": "adaptive", "length": variant.tokens, "min_leaf": SMALL}
    return {
        "run": {
            "name": "adaptive",
            "dir": str(run),
            "seed": cell.seed,
            "steps": steps_of(variant, size),
            "device": device,
        },
        "model": {
            "kind": "sap",
            "ndim": ndim,
            "encoder": encoder | {"positions": "rope"},
            "features": size.features,
        },
        "objective": {"kind": "segment", "names": names},
        "data": {
            "train": [train | slices],
            "valid": [valid | slices],
            "crop": size.crop if ndim == 2 else size.crop3d,
            "batch": size.batch,
            "augment": {"orientations": True},
            "normalize": {"kind": "window", "window": [0, 255]},
        },
        "optimizer": {"kind": "adamw", "lr": size.rate, "weight_decay": 0.01, "clip": 1.0},
        "schedule": {"kind": "constant", "warmup": size.warmup, "start": 0},
        "ema": {"decay": 0.95},
        "eval": {"every": size.steps // size.evaluations, "samples": size.samples},
        "checkpoint": {"every": "off"},
        "log": {"every": 1, "pictures": "off", "activations": "off", "to": [], "report": False},
        # Compiling takes longer than a cell, and as long for each.
        "parallel": {"compile": False},
    }


class Stopped(Exception):
    """Somebody wants this to end."""


def train(cell: Cell, home: Home, device: str) -> dict[str, Any]:
    """Train one cell, and return what its log says."""
    with tempfile.TemporaryDirectory(dir=home.folder) as folder:
        run = Path(folder) / "run"
        asked = recipe(cell, home.entries(cell.data), home.size, run, device)
        if vitrail.train(asked, quiet=True).code != 0:
            raise Stopped
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return found_in(events, home.size.batch)


def found_in(events: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Dice of every evaluation, seconds of the steps after the warm-up, and memory."""
    lines = [event for event in events if event["event"] == "train"]
    timed = [line for line in lines if "step_seconds" in line]
    seconds = [line["step_seconds"] for line in timed]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    evals = [event for event in events if event["event"] == "eval"]
    start = next(event for event in events if event["event"] == "start")
    return {
        "dice": {str(event["step"]): event["metrics"]["mean_dice"] for event in evals},
        "classes": {k: v for k, v in evals[-1]["metrics"].items() if k.startswith("dice_") and k != "dice_background"},
        "step_seconds": {"median": middle, "low": low, "high": high, "steps": len(seconds)},
        "images_per_s": batch / middle,
        "data_wait": statistics.fmean(line["data_wait"] for line in timed),
        # On a CPU it would be that of all cells so far.
        "memory_gib": None if start["device"] == "CPU" else max(line["memory_gib"] for line in lines),
        "parameters": start["parameters"],
        "tokens_of_a_sample": start["tokens_per_sample"],
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def attempt(cell: Cell, home: Home, device: str) -> dict[str, Any]:
    """Train a cell; to fail is a result."""
    clean()
    began = time.monotonic()
    facts = {
        "data": cell.data,
        "patch": cell.variant.patch,
        "tokens": cell.variant.tokens,
        "adaptive": cell.variant.adaptive,
        "seed": cell.seed,
        "date": today(),
    }
    try:
        found = {"status": "ok"} | train(cell, home, device)
    except Stopped:
        raise
    except Exception as error:
        found = {"status": "oom" if is_out_of_memory(error) else "failed", "error": summary(error)[:500]}
    finally:
        clean()
    return facts | found | {"seconds": round(time.monotonic() - began, 1)}


def measure(given: argparse.Namespace, size: Size, path: Path) -> int:
    """Make the cells that the results lack, one after the other."""
    began = time.monotonic()
    chosen = [data for data in DATA if data in given.only]
    if "isbi" in chosen and given.isbi is None:
        print("isbi is left out: --isbi FOLDER, where image.tif and label.tif lie, is missing", file=sys.stderr)
        chosen.remove("isbi")
    stored, here = open_results(path, "cells"), machine()
    done, settings = stored["cells"], json.loads(json.dumps(vars(size)))
    refuse_mixing(done, here, path)
    if stored.setdefault("settings", settings) != settings:
        raise SystemExit(f"{path}: its cells were made with other settings; give another --out, or remove it")
    stored["machine"] = here
    device, left, failed = "cpu" if given.quick else "cuda", 0, 0
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder), size, given.isbi)
        for cell in cells(chosen, size, given.seeds):
            if done.get(cell.name, {}).get("status") in ("ok", "oom"):
                continue
            if time.monotonic() - began > given.seconds:
                left += 1
                continue
            try:
                found = attempt(cell, home, device)
            except Stopped:
                return STOPPED
            done[cell.name] = found | {key: here[key] for key in SAME}
            write_json(path, stored)  # after each cell: a call may be cut off
            failed += found["status"] == "failed"
            print(f"{cell.name}: {told(found)}; {time.monotonic() - began:.0f} s so far", flush=True)
    print(tables(stored))
    if left:
        print(f"{left} cells are left: run this again", file=sys.stderr)
    return STOPPED if left else 1 if failed else 0


def told(found: dict[str, Any]) -> str:
    if found["status"] != "ok":
        return f"{found['status']}: {found['error']}"
    return f"Dice {last(found):.3f}, {1e3 * found['step_seconds']['median']:.1f} ms a step"


# ---------------------------------------------------------------- what trees leave of the labels


def measure_trees(given: argparse.Namespace, size: Size, path: Path) -> None:
    """Labels of held-out images, resampled to leaves and painted back: about the best that these tokens can tell."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder), size, given.isbi)
        for data in DATA:
            if data not in given.only or (data == "isbi" and given.isbi is None):
                continue
            images, labels = crops(home, data)
            for variant in variants(images.shape[-1], images.ndim - 2):
                if variant.adaptive:
                    rows.append({"data": data, "variant": variant.name} | left_of(images, labels, variant))
    write_json(path, {"machine": machine(), "date": today(), "settings": vars(size), "rows": rows})
    print("\n".join(trees_table(rows)))


def crops(home: Home, data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 1, *S] held-out images and their labels [N, *S]."""
    image, labels = (torch.from_numpy(values.copy()) for values in home.arrays(data)["valid"])
    side = home.size.crop3d if ndim_of(data) == 3 else home.size.crop
    if ndim_of(data) == 3:
        return image[None, None, :side, :side, :side], labels[None, :side, :side, :side]
    every = math.ceil(len(image) / home.size.samples)
    return image[::every, None, :side, :side], labels[::every, :side, :side]


def left_of(images: torch.Tensor, labels: torch.Tensor, variant: Variant) -> dict[str, Any]:
    """Leaves by their side, and the Dice of what the tree brings back."""
    length, patch = variant.tokens, variant.patch
    tree = build_trees(CannyScore().score(images), length=length, patch=patch, min_leaf=SMALL)
    classes = int(labels.max()) + 1
    shares = torch.nn.functional.one_hot(labels.long(), classes).movedim(-1, 1).float()
    back = tree.paint(tree.serialise(shares)).argmax(dim=1)
    dices = [
        float(2 * ((back == n) & (labels == n)).sum() / ((back == n).sum() + (labels == n).sum()))
        for n in range(1, classes)
    ]
    sides, counts = (values.tolist() for values in tree.side[tree.valid].unique(return_counts=True))
    shared = {str(side): count / sum(counts) for side, count in zip(sides, counts, strict=True)}
    return {"leaves": shared, "dice": statistics.fmean(dices), "classes": dices, "images": len(images)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isbi", type=Path, default=None, help="folder of ISBI-2012: image.tif and label.tif")
    parser.add_argument("--only", nargs="*", choices=list(DATA), default=list(DATA)[:3], help="some of the data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no cell is begun")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="small images and models, on a CPU")
    parser.add_argument("--trees", action="store_true", help="what trees leave of the labels; trains nothing")
    parser.add_argument("--page", action="store_true", help="write the tables into adaptive_quality.md; trains nothing")
    given = parser.parse_args(arguments)
    if given.page and given.quick:
        parser.error("the page tells of the whole, on a GPU; --quick prints its tables")
    size, name = (QUICK, "adaptive_quality_quick") if given.quick else (FULL, "adaptive_quality")
    path, trees = given.out / f"{name}.json", given.out / f"{name}_trees.json"
    if given.page:
        stored, found = (json.loads(file.read_text()) if file.exists() else None for file in (path, trees))
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(MARK) + len(MARK)] + "\n" + page(stored, found))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if given.trees:
        measure_trees(given, size, trees)
        return 0
    if not given.quick and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here, and this would take days; --quick is a try on a CPU")
    return measure(given, size, path)


if __name__ == "__main__":
    sys.exit(main())
