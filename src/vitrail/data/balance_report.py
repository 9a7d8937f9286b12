"""What `vitrail data balance` tells: how entries are shared out over ranks, and that no sample is lost or doubled.

Two ways are compared: ranks that each read one entry (balance.py), and mixing by the global counter, of which ranks
take slices. Of both, an epoch is gone through as the loaders of all ranks do it. Samples are counted one by one; where
there are more than that is worth, the parts that their order is made of are counted instead, which proves the same.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.balance import Balanced, Shares, share
from vitrail.data.dataset import Dataset
from vitrail.data.mixture import Groups
from vitrail.data.sampler import Order
from vitrail.data.tiles import Tiles, segment
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Balance

MOST = 100_000  # samples that are named one by one
MOST_COUNTERS = 10_000_000  # that are dealt to ranks; steps beyond are dealt alike


def compare(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """Both ways for the training data of a recipe on so many data-parallel ranks."""
    c = recipe.data
    batch = c.global_batch(ranks)
    if batch % ranks:
        raise UserError(f"--ranks {ranks}: they do not divide data.batch {batch}; choose another number of either")
    given = c.balance if c.balance is not None and c.balance.ranks == ranks else Balance(ranks=ranks)
    settings = c.model_copy(update={"balance": given})
    crop = per_axis(c.crop, recipe.model.ndim)
    train = Dataset(c.train, crop, where="data.train", settings=settings, mixed=True)
    images, tiles = train.count_tiles()
    options: dict[str, Any] = {"seed": recipe.run.seed, "lanes": c.lanes or batch, "reuse": c.reuse}
    entries = [
        {"entry": number, "path": str(config.path), "items": n, "samples_per_item": t}
        for number, (config, n, t) in enumerate(zip(train.configs, images, tiles, strict=True))
    ]
    by_rank: dict[str, Any]
    try:
        shares = share(images, tiles, ranks, batch // ranks, groups=given.groups, batches=given.batches)
        by_rank = _by_rank(shares, images, tiles, batch // ranks)
        if len(train.groups) == 1:
            balanced = train.sampler(batch=batch, **options)
            assert isinstance(balanced, Balanced)
            by_rank |= {"in_vitrail": prove(balanced, batch, ranks)}
    except UserError as error:
        by_rank = {"error": str(error)}
    train.settings = settings.model_copy(update={"balance": None})
    order = train.sampler(batch=batch, **options)
    by_counter = {"samples": samples_of(order, len(images)), "epoch": order.epoch, **prove(order, batch, ranks)}
    return {"ranks": ranks, "batch": batch, "entries": entries, "by_rank": by_rank, "by_counter": by_counter}


def _by_rank(shares: Shares, images: Sequence[int], tiles: Sequence[int], each: int) -> dict[str, Any]:
    """The rule, and what an epoch by it leaves out or uses again where every rank keeps files of its own."""
    seen = [r * b * each for r, b in zip(shares.ranks, shares.batches, strict=True)]
    total = [n * t for n, t in zip(images, tiles, strict=True)]
    return {
        "groups": shares.text,
        "ranks": list(shares.ranks),
        "batches_per_rank": list(shares.batches),
        "times_used": list(shares.repeats),
        "steps": shares.steps,
        "left_out": [max(0, all_ - s) for all_, s in zip(total, seen, strict=True)],
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


def prove(order: Order, batch: int, ranks: int) -> dict[str, Any]:
    """Go through an epoch as the ranks do; how many samples are lost and doubled, and how that was found."""
    number = order.epoch if order.epoch <= MOST_COUNTERS else MOST_COUNTERS // batch * batch
    dealt = deal(number, batch, ranks)
    found = [_compare(dealt, number)]
    if isinstance(order, Groups | Balanced):
        part, own = order.places(np.sort(dealt))
        parts = [(each, own[part == number]) for number, each in enumerate(order.orders)]
        found += [_compare(counters, int(counters.max(initial=-1)) + 1) for _, counters in parts]
        tiled = [each for each, _ in parts if isinstance(each, Tiles)]
    else:
        tiled = [order] if isinstance(order, Tiles) else []
    found += [prove_tiles(each) for each in tiled]
    lost, doubled = (sum(column) for column in zip(*found, strict=True))
    return {"lost": lost, "doubled": doubled, "how": "enumerated" if order.epoch <= MOST else "counted"}


def _compare(counters: np.ndarray, number: int) -> tuple[int, int]:
    """How many of range(number) are missing among counters, and how many come again."""
    distinct = len(np.unique(counters))
    return number - distinct, len(counters) - distinct


def deal(epoch: int, batch: int, ranks: int) -> np.ndarray:
    """Counters of an epoch, rank after rank and step after step, as loaders ask for them."""
    share = batch // ranks
    steps = np.arange(math.ceil(epoch / batch))[:, None] * batch
    dealt = np.concatenate([(steps + rank * share + np.arange(share)).ravel() for rank in range(ranks)])
    return dealt[dealt < epoch]


def prove_tiles(order: Tiles) -> tuple[int, int]:
    """Tiles of a pass that are lost and doubled."""
    if order.epoch <= MOST:
        seen = Counter((s.source, s.item, s.start) for s in map(order, range(order.epoch)))
        return order.epoch - len(seen), order.epoch - len(seen)
    # Every block once, its tiles one after the other, and lanes whose segments meet without a gap.
    blocks, ends = order.blocks(0)
    found = [_compare(blocks, len(order.counts)), (abs(order.epoch - int(ends[-1])), 0)]
    lanes = min(order.lanes, order.epoch)
    first = np.array([segment(lane, order.epoch, order.lanes) for lane in range(lanes)])
    turns = np.array([len(range(lane, order.epoch, order.lanes)) for lane in range(lanes)])
    found.append((int(np.abs(first - np.cumsum([0, *turns[:-1]])).sum()), 0))
    lost, doubled = (sum(column) for column in zip(*found, strict=True))
    return lost, doubled


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row an entry, of what compare() gives."""
    ruled, counted = found["by_rank"], found["by_counter"]
    columns = [name for name in ("ranks", "batches_per_rank", "times_used", "left_out") if name in ruled]
    return [
        entry | {name: ruled[name][number] for name in columns} | {"samples_by_counter": counted["samples"][number]}
        for number, entry in enumerate(found["entries"])
    ]
