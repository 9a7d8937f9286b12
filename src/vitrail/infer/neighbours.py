"""Accuracy of the nearest neighbours: how well frozen features tell classes apart, with nothing trained on them.

Each held-out item is given the class that its nearest training items vote for, by the features of a run's network. Data
and classes are those of a recipe: `data.train` and `data.valid`, of which each item comes once, unaugmented.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.dataset import Dataset
from vitrail.data.files.stage import configs_to_open
from vitrail.errors import UserError
from vitrail.infer.collection import Real
from vitrail.infer.features import RunNetwork, nearest_classes, wilson
from vitrail.layers.patches import per_axis
from vitrail.recipe.load import find_recipe
from vitrail.recipe.sections import Augment
from vitrail.training.journal import Progress


def knn(
    run: str | Path,
    data: str | Path,
    *,
    neighbours: int = 20,
    number: int | None = None,
    checkpoint: str | int | None = None,
    weights: str | None = None,
    seed: int = 0,
    batch: int = 256,
    device: str | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Measure a run's features on the labelled data of a recipe or run: all, or `number` items of each part."""
    for name, value in {"neighbours": neighbours, "batch": batch, "number": number}.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} must be at least 1")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    network = RunNetwork(run, device=place, checkpoint=checkpoint, weights=weights)
    train, valid = (_open(data, part, seed) for part in ("train", "valid"))
    for part in (train, valid):
        network.check(part.dataset.crop, len(part.variables), f"a sample of {part.title}")
    sizes = [min(number or part.size, part.size) for part in (train, valid)]
    with Progress(sum(sizes), enabled=not quiet) as progress:
        bank, known = _look(network, train, sizes[0], batch, progress.update)
        seen, wanted = _look(network, valid, sizes[1], batch, lambda done: progress.update(sizes[0] + done))
    names = sorted(set(known))
    classes = torch.tensor([names.index(name) for name in known], device=bank.device)
    told = nearest_classes(bank, classes, seen, neighbours=neighbours).tolist()
    found = wilson(sum(names[mine] == name for mine, name in zip(told, wanted, strict=True)), len(wanted))
    notes = [
        f"{part.lost} items of {part.title} cannot be read, and were left out" for part in (train, valid) if part.lost
    ]
    notes += [
        f"items of {part.title} are larger than samples, which are crops at random places"
        for part in (train, valid)
        if not part.once
    ]
    if strange := sorted(set(wanted) - set(names)):
        notes.append(f"of the class {strange[0]!r} there is nothing in {train.title}, so it is never told")
    return {
        "network": network.title,
        "data": str(data),
        "features": bank.shape[1],
        "neighbours": min(neighbours, len(bank)),
        "counts": {"train": len(bank), "valid": len(wanted)},
        "accuracy": found.value,
        "interval": [found.low, found.high],
        "notes": notes,
    }


def _open(given: str | Path, part: str, seed: int) -> Real:
    """Open the labelled items of one part of a recipe."""
    recipe = find_recipe(given)
    c = recipe.data
    entries = list(c.train if part == "train" else c.valid)
    if not entries:
        raise UserError(
            f"{given}: it has no data.{part}, whose classes the neighbours are to tell; give a recipe that has"
        )
    settings = c.model_copy(update={"augment": Augment(), "mix": "size", "balance": None, "tiles": None})
    dataset = Dataset(
        [dataclasses.replace(entry, weight=1.0) for entry in configs_to_open(c, entries)],
        per_axis(c.crop, recipe.model.ndim),
        where=f"data.{part}",
        labels="item",
        settings=settings,
    )
    return Real(dataset, seed=seed, title=f"data.{part} of {given}")


@torch.no_grad()
def _look(network: RunNetwork, part: Real, number: int, batch: int, tick: Any) -> tuple[Tensor, list[str]]:
    """Return the features of so many items, and the names of their classes."""
    features, names = [], list[str]()
    for values, classes in part.batches(number, batch):
        features.append(network(values).features)
        names += [str(name) for name in classes]
        tick(len(names))
    if not features:
        raise UserError(f"{part.title}: none of its items can be read")
    return torch.cat(features), names
