"""What `vitrail data balance` tells: how entries are shared out over ranks, and that no sample is lost or doubled.

Two ways are compared: ranks that each read one entry (balance.py), and mixing by the global counter, of which ranks
take slices. Of both, an epoch is gone through as the loaders of all ranks do it (proof.py).
"""

from collections import Counter
from typing import Any

import numpy as np

from vitrail.data.balance import Balanced, Shares
from vitrail.data.dataset import Dataset
from vitrail.data.proof import MOST, prove
from vitrail.data.sampler import Order
from vitrail.data.tiles import Tiles
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Balance


def compare(recipe: Recipe, ranks: int | None = None) -> dict[str, Any]:
    """Both ways for the training data of a recipe on so many data-parallel ranks; those of data.balance if None."""
    c = recipe.data
    ranks = ranks or (1 if c.balance is None else c.balance.ranks)
    batch = c.global_batch(ranks)
    if batch % ranks:
        raise UserError(f"--ranks {ranks}: they do not divide data.batch {batch}; choose another number of either")
    given = c.balance if c.balance is not None and c.balance.ranks == ranks else Balance(ranks=ranks)
    settings = c.model_copy(update={"balance": given, "batch": batch})
    crop = per_axis(c.crop, recipe.model.ndim)
    train = Dataset(c.train, crop, where="data.train", settings=settings, mixed=True)
    options: dict[str, Any] = {"seed": recipe.run.seed, "lanes": c.lanes or batch, "reuse": c.reuse, "batch": batch}
    by_rank: dict[str, Any] = {}
    if c.balance is not None and c.balance.ranks != ranks and (c.balance.groups or c.balance.batches):
        by_rank["note"] = (
            f"data.balance gives groups or batches for {c.balance.ranks} ranks, which say nothing about {ranks}: "
            "they are left out here"
        )
    try:
        balanced = train.sampler(**options)
        assert isinstance(balanced, Balanced)
        by_rank |= _by_rank(balanced.shares) | {"epoch": balanced.epoch, **prove(balanced, batch, ranks)}
    except UserError as error:
        by_rank |= {"error": str(error)}
    train.settings = settings.model_copy(update={"balance": None})
    order = train.sampler(**options)
    by_counter = {
        "samples": samples_of(order, len(train.sources)),
        "epoch": order.epoch,
        **prove(order, batch, ranks),
    }
    items = Counter(e.source for e in train.extents)
    entries = [
        {"entry": number, "path": str(config.path), "items": items[number]}
        for number, config in enumerate(train.configs)
    ]
    return {"ranks": ranks, "batch": batch, "entries": entries, "by_rank": by_rank, "by_counter": by_counter}


def _by_rank(shares: Shares) -> dict[str, Any]:
    return {
        "groups": shares.text,
        "ranks": list(shares.ranks),
        "batches_per_rank": list(shares.batches),
        "steps": shares.steps,
    }


def samples_of(order: Order, entries: int) -> list[int]:
    """How many samples of each entry an epoch has: counted, or for huge ones by the shares of the order."""
    if isinstance(order, Tiles):
        found = np.zeros(entries, int)
        for number, extent in enumerate(order.extents):
            found[extent.source] += order.tiles_of(number)
        return found.tolist()
    number = min(order.epoch, MOST)
    counts = Counter(order(counter).source for counter in range(number))
    return [round(counts[entry] * order.epoch / number) for entry in range(entries)]


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row an entry, of what compare() gives."""
    ruled, counted = found["by_rank"], found["by_counter"]
    columns = [name for name in ("ranks", "batches_per_rank") if name in ruled]

    def used(way: dict[str, Any], number: int) -> str:
        return ", ".join(f"{name}: {n}" for name, n in way["used"][number].items())

    return [
        entry
        | {name: ruled[name][number] for name in columns}
        | ({"used_by_rank": used(ruled, number)} if "used" in ruled else {})
        | {"samples_by_counter": counted["samples"][number], "used_by_counter": used(counted, number)}
        for number, entry in enumerate(found["entries"])
    ]
