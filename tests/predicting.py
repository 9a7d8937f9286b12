"""Runs of a few steps that predict, and plain ways to tell what they ought to say."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import merge, tiny_recipe

import vitrail
from vitrail.data.generate import generate_em, write_ome_zarr
from vitrail.data.order.tiles import tile_starts
from vitrail.objectives.objective import normalise

SHAPE = (24, 28, 40)
CROP = 16
UNETR: dict[str, Any] = {
    "kind": "unetr",
    "ndim": 3,
    "decoder": "linear",
    "encoder": {"width": 24, "depth": 4, "heads": 2, "patch": 4, "positions": "rope"},
}


def write_em(path: Path, *, shape: tuple[int, int, int] = SHAPE) -> Path:
    """A volume with labels, whose voxels are thicker than wide."""
    return write_ome_zarr(path, generate_em(shape, seed=0), spacing=(8.0, 4.0, 4.0), levels=1, chunk=16)


def train_run(place: Path, volume: Path, name: str, **changes: Any) -> Path:
    """A run of two steps; `segment` says whether it names voxels."""
    tree = tiny_recipe(volume, place / name, run__steps=2, checkpoint__every=1, eval__every=1, eval__samples=2)
    for part in ("train", "valid"):
        tree["data"][part][0].pop("region")
    vitrail.train(merge(tree, {key.replace("__", "."): value for key, value in changes.items()}), quiet=True)
    return place / name


def train_segmentation(place: Path, volume: Path, name: str = "seg", **changes: Any) -> Path:
    entry = [{"path": str(volume), "labels": "structures"}]
    options = {"model": UNETR, "objective": {"kind": "segment"}, "data__train": entry, "data__valid": entry}
    return train_run(place, volume, name, **(options | changes))


def plain_probabilities(run: Path, values: np.ndarray, *, overlap: float = 0.5, gaussian: bool = True) -> np.ndarray:
    """All tiles of a volume [C, *S] added up in memory, in 64 bits."""
    model = vitrail.load(run)
    shape, crop = values.shape[1:], (CROP,) * (values.ndim - 1)
    images = normalise(torch.from_numpy(values)[None], model.eyes.statistics)
    weight = torch.ones(crop, dtype=torch.float64)
    for axis, size in enumerate(crop if gaussian else ()):
        bell = np.exp(-((np.arange(size) - (size - 1) / 2) ** 2) / (2 * (size / 8) ** 2))
        weight *= torch.from_numpy(bell).view([-1 if a == axis else 1 for a in range(len(crop))])
    weight = weight.clamp(min=1e-3)
    total, weights = torch.zeros(4, *shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for start in itertools.product(*[tile_starts(n, CROP, overlap).tolist() for n in shape]):
        inside = tuple(slice(s, s + CROP) for s in start)
        with torch.no_grad():
            logits = model(**model.inputs(images[(slice(None), slice(None), *inside)]))[0]
        total[(slice(None), *inside)] += logits.double() * weight
        weights[inside] += weight
    return (total / weights).softmax(dim=0).numpy()
