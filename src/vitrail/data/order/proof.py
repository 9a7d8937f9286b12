"""Proof that an epoch, gone through as the loaders of all ranks do it, loses no sample and doubles none.

- counters: ranks ask for each of an epoch once, and the parts of an order get theirs without a gap
- tiles: those that samples name are compared with all that there are. Of a part that is gone through k times and a
  rest, each comes k times or once more; a part that is gone through once has each exactly once
- random crops: a pass visits every block as often as its share of the data asks for, rounded either way

Samples are named one by one; where there are more than that is worth, blocks and lanes are counted instead.
`vitrail data balance` shows this for two ways to share entries out over ranks: ranks that each read one entry
(mixture.py), and mixing by the global counter, of which ranks take slices.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.order.mixture import Balanced, Groups, Shares
from vitrail.data.order.sampler import Order, Sample, Sampler, choose, permute
from vitrail.data.order.tiles import Tiles, segment
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Balance

MOST = 100_000  # samples that are named one by one
MOST_COUNTERS = 10_000_000  # that are dealt to ranks; steps beyond are dealt alike

TIMES = {0: "never", 1: "once", 2: "twice"}

Name = tuple[int, int, tuple[int, ...]]  # source, item, and where a tile or a block begins


def prove(order: Order, batch: int, ranks: int) -> dict[str, Any]:
    """Count samples of an epoch that are lost and doubled, tell how, and how often those of an entry come."""
    number = order.epoch if order.epoch <= MOST_COUNTERS else MOST_COUNTERS // batch * batch
    dealt = deal(number, batch, ranks)
    found, parts = [compare_counters(dealt, number)], [(order, order.epoch)]
    if isinstance(order, Groups | Balanced):
        part, own = order.places(np.sort(dealt))
        mine = [own[part == index] for index in range(len(order.orders))]
        found += [compare_counters(counters, len(counters)) for counters in mine]
        parts = [(each, round(len(m) * order.epoch / number)) for each, m in zip(order.orders, mine, strict=True)]
    named = order.epoch <= MOST
    used: dict[int, dict[str, Any]] = {}
    if named:
        seen = [(s.source, s.item, s.start) for s in choose(order, dealt.tolist())]
    for each, drawn in parts:
        if not isinstance(each, Tiles):
            found.append(prove_crops(each) if isinstance(each, Sampler) else (0, 0))
            if drawn != each.epoch:
                for source in {e.source for e in each.extents}:
                    used[source] = {"passes": round(drawn / each.epoch, 3)}
            continue
        if named:
            sources = {e.source for e in each.extents}
            counts = Counter(name for name in seen if name[0] in sources)
            found.append(compare_tiles(each, counts, drawn))
        else:
            found.append(prove_tiles(each))
            counts = None
        used |= _times(each, counts, drawn)
    lost, doubled = (sum(column) for column in zip(*found, strict=True))
    of = "tiles" if all(isinstance(each, Tiles) for each, _ in parts) else "visits of blocks"
    how = {"lost": lost, "doubled": doubled, "of": of, "how": "enumerated" if named else "counted"}
    return how | {"used": [used.get(source, {"passes": 1}) for source in sorted({e.source for e in order.extents})]}


def deal(epoch: int, batch: int, ranks: int) -> np.ndarray:
    """List the counters of an epoch, rank after rank and step after step, as loaders ask for them."""
    share = batch // ranks
    steps = np.arange(math.ceil(epoch / batch))[:, None] * batch
    dealt = np.concatenate([(steps + rank * share + np.arange(share)).ravel() for rank in range(ranks)])
    return dealt[dealt < epoch]


def compare_counters(counters: np.ndarray, number: int) -> tuple[int, int]:
    """Count how many of range(number) are missing among counters, and how many come again."""
    distinct = np.unique(counters)
    return number - int(((distinct >= 0) & (distinct < number)).sum()), len(counters) - len(distinct)


def all_tiles(order: Tiles) -> Iterator[Name]:
    """Yield every tile that there is, by where tiles lie and not by the order."""
    for extent, starts, kept in zip(order.extents, order.starts, order.kept, strict=True):
        for place in itertools.product(*[range(len(s)) for s in starts]):
            if kept is None or kept[place]:
                yield extent.source, extent.item, tuple(int(s[i]) for s, i in zip(starts, place, strict=True))


def compare_tiles(order: Tiles, seen: Counter[Name], drawn: int) -> tuple[int, int]:
    """Count tiles that come less and more often than so many samples of so many tiles ask for."""
    tiles = set(all_tiles(order))
    least, rest = divmod(drawn, len(tiles))
    most = least + (rest > 0)
    lost = sum(max(0, least - seen[name]) for name in tiles)
    doubled = sum(max(0, number - (most if name in tiles else 0)) for name, number in seen.items())
    return lost, doubled


def prove_tiles(order: Tiles) -> tuple[int, int]:
    """Count tiles of a pass that are lost and doubled; of many by their blocks alone."""
    if order.epoch <= MOST:
        return compare_tiles(
            order, Counter((s.source, s.item, s.start) for s in choose(order, range(order.epoch))), order.epoch
        )
    # Every block once, its tiles one after the other, and lanes whose segments meet without a gap.
    blocks, ends = order.blocks(0)
    found = [compare_counters(blocks, len(order.counts)), (abs(order.epoch - int(ends[-1])), 0)]
    lanes = min(order.lanes, order.epoch)
    first = np.array([segment(lane, order.epoch, order.lanes) for lane in range(lanes)])
    turns = np.array([len(range(lane, order.epoch, order.lanes)) for lane in range(lanes)])
    found.append((int(np.abs(first - np.cumsum([0, *turns[:-1]])).sum()), 0))
    lost, doubled = (sum(column) for column in zip(*found, strict=True))
    return lost, doubled


def prove_crops(order: Sampler) -> tuple[int, int]:
    """Count the samples of a pass by which blocks fall short of their share of visits, and exceed it."""
    rounds = math.ceil(order.visits / order.lanes)
    counters = range(rounds * order.lanes * order.reuse)  # the last round goes on into the next pass
    if len(counters) > MOST:  # visits are a permutation: none of the first ones comes again
        secret = key(order.seed, "pass", 0)
        visits = np.array([permute(visit, order.visits, secret) for visit in range(min(MOST // 10, order.visits))])
        return 0, compare_counters(visits, 0)[1] + int((visits >= order.visits).sum())
    seen: Counter[Name] = Counter()
    for counter, sample in zip(counters, choose(order, counters), strict=True):
        turn, lane = divmod(counter, order.lanes)
        if turn // order.reuse * order.lanes + lane < order.visits:
            seen[_block(sample)] += 1
    shares = np.diff(order.cumulative, prepend=0.0) / order.cumulative[-1] * order.visits
    lost = doubled = 0
    for which, (extent, cuts) in enumerate(zip(order.extents, order.cuts, strict=True)):
        for place, low in enumerate(itertools.product(*[c[:-1] for c in cuts])):
            wanted = shares[order.first[which] + place]
            number = seen.pop((extent.source, extent.item, tuple(map(int, low))), 0)
            lost += max(0, order.reuse * math.floor(wanted + 1e-6) - number)
            doubled += max(0, number - order.reuse * math.ceil(wanted - 1e-6))
    return lost, doubled + seen.total()


def _block(sample: Sample) -> Name:
    return sample.source, sample.item, tuple(part.start for part in sample.block)


def _times(order: Tiles, seen: Counter[Name] | None, drawn: int) -> dict[int, dict[str, Any]]:
    """Count, for each source of an order, how many of its tiles come how many times in an epoch."""
    found: dict[int, dict[str, Any]] = {}
    for source in sorted({e.source for e in order.extents}):
        if seen is not None:
            times = Counter(seen[name] for name in all_tiles(order) if name[0] == source)
        else:  # which of several sources the rest of a pass falls on is not looked for
            number = sum(order.tiles_of(n) for n, e in enumerate(order.extents) if e.source == source)
            rest = round(drawn % order.epoch * number / order.epoch)
            times = Counter({drawn // order.epoch: number - rest, drawn // order.epoch + 1: rest})
        found[source] = {TIMES.get(k, f"{k} times"): number for k, number in sorted(times.items()) if number}
    return found


def compare(recipe: Recipe, ranks: int | None = None) -> dict[str, Any]:
    """Compare both ways for the training data of a recipe; ranks are data-parallel, or those of data.balance."""
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
    """Count the samples of each entry in an epoch; estimate those of huge ones by the shares of the order."""
    if isinstance(order, Tiles):
        found = np.zeros(entries, int)
        for number, extent in enumerate(order.extents):
            found[extent.source] += order.tiles_of(number)
        return found.tolist()
    number = min(order.epoch, MOST)
    counts = Counter(sample.source for sample in choose(order, range(number)))
    return [round(counts[entry] * order.epoch / number) for entry in range(entries)]


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row an entry, of what compare() gives."""
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
