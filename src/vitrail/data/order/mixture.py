"""Orders of several entries in one run: groups of entries that take turns, and ranks that each read one entry.

Entries with the same variables form a group, since a step's batch has one set of variables. The group of a step is a
function of counter // batch: a cycle of steps holds each group in proportion to its share, spread evenly. Inside its
steps a group has samples in its own order, so that each group's epochs are as exact as if it were alone.

Entries may instead be shared out over data-parallel ranks by the rule of UCF-VIT: ranks in proportion to tiles, rounded
to even and then adjusted until they add up; what an entry has fewer of than the largest is used again. Here ranks are
virtual: a slot of the global batch belongs to one, so that any number of real ranks trains in the same order. An epoch
is as many steps as the largest entry has batches a rank. The study counts the tiles of an entry's first image and gives
each rank images of its own; here the ranks of an entry share all of it, so that batches are counted from the samples
that there are, and none is left out for good. Sample-exact mixing by the global counter needs none of this.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.order.sampler import Order, Orders
from vitrail.errors import UserError

CYCLE = 1024  # steps, at most, in which shares are kept


def rotation(shares: Sequence[float], length: int = CYCLE) -> np.ndarray:
    """Return the group of each step of a cycle: each as often as its share says, at least once, spread evenly."""
    wanted = np.asarray(shares, float) / sum(shares)
    if np.allclose(wanted, wanted[0]):
        return np.arange(len(wanted))
    counts = np.maximum(1, np.floor(wanted * length)).astype(int)
    while counts.sum() < length:  # what rounding left goes to those that lack most
        counts[int(np.argmax(wanted * length - counts))] += 1
    divisor = int(np.gcd.reduce(counts))
    counts //= divisor
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups[np.argsort(places, kind="stable")]


class Groups(Orders):
    """Several orders of samples, one step each in turn; counters are those of the whole run."""

    def __init__(self, orders: Sequence[Order], shares: Sequence[float], *, batch: int):
        super().__init__(orders, lanes=orders[0].lanes)
        self.batch = batch
        self.turns = rotation(shares)
        seen = np.stack([np.cumsum(self.turns == group) for group in range(len(self.orders))])  # [groups, steps]
        self.before = np.concatenate([np.zeros((len(self.orders), 1), int), seen], axis=1)

    @property
    def epoch(self) -> int:
        """Return as many samples as all groups have in a pass of their own."""
        return sum(order.epoch for order in self.orders)

    def places(self, counters: Any) -> tuple[Any, Any]:
        """Return the groups of counters, and which sample of its group each one is."""
        steps, slots = np.divmod(counters, self.batch)
        cycles, turns = np.divmod(steps, len(self.turns))
        groups = self.turns[turns]
        return groups, (cycles * self.before[groups, -1] + self.before[groups, turns]) * self.batch + slots


def one_variable_each(entries: Sequence[Any]) -> tuple[Any, ...]:
    """Return an entry for each variable of each entry, which take turns as entries with different variables do."""
    apart: list[Any] = []
    for entry in entries:
        names = getattr(entry, "variables", None) or entry.open().variables
        if len(names) == 1:
            apart.append(entry)
            continue
        if not (hasattr(entry, "variables") and hasattr(entry, "statistics")):
            raise UserError(
                f"data.one_variable: {entry.kind!r} has no key `variables`, by which one of its {len(names)} variables "
                "could be read; give its config the keys of GridConfig or ItemsConfig, or leave one_variable out"
            )
        if entry.statistics and {len(values) for values in entry.statistics.values()} != {len(names)}:
            raise UserError(
                f"statistics = {entry.statistics} of {entry.path}: give {len(names)} means and stds, one for each of "
                f"{list(names)}"
            )
        for number, name in enumerate(names):
            known = entry.statistics and {key: [values[number]] for key, values in entry.statistics.items()}
            apart.append(replace(entry, variables=[name], statistics=known))
    return tuple(apart)


def group_entries(variables: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Group the numbers of entries with the same variables, in the order of their first appearance."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, names in enumerate(variables):
        groups.setdefault(names, []).append(number)
    return list(groups.values())


def source_shares(mix: str, weights: Sequence[float]) -> list[float] | None:
    """Return the shares of the entries, or None where they follow from their sizes."""
    if mix == "size":
        return None
    return [1.0] * len(weights) if mix == "equal" else list(weights)


def check_batch(batch: int | str) -> int:
    """Return the batch by which groups take turns; refuse one that is not the same in every world."""
    if not isinstance(batch, int):
        raise UserError(
            f"data.batch: {batch!r} is another number of samples in every world, but entries with different variables "
            "take turns by whole batches; give the samples of a step over all ranks as one number"
        )
    return batch


class Shares(NamedTuple):
    """Ranks and batches of each entry."""

    ranks: tuple[int, ...]
    batches: tuple[int, ...]  # of each of its ranks, in one pass over the entry
    repeats: tuple[int, ...]  # passes over the entry in an epoch

    @property
    def steps(self) -> int:
        """Return the steps of an epoch."""
        return max(self.batches)

    @property
    def text(self) -> str:
        """Return the ranks as one word, a:b:c."""
        return ":".join(map(str, self.ranks))


def share_ranks(tiles: Sequence[int], ranks: int) -> list[int]:
    """Share out ranks to entries in proportion to their tiles."""
    total = sum(tiles)
    ideal = [count / total * ranks for count in tiles]
    shared = [round(value) for value in ideal]  # halves to even
    while (number := sum(shared)) != ranks:
        over = [mine - value for mine, value in zip(shared, ideal, strict=True)]
        if number < ranks:
            shared[int(np.argmin(over))] += 1
            continue
        served = [i for i, excess in enumerate(over) if excess >= 0]
        several = [i for i in served if shared[i] > 1]
        shared[max(several, key=lambda i: over[i]) if several else served[-1]] -= 1
    return shared


def share(
    images: Sequence[int],
    tiles: Sequence[int],
    ranks: int,
    batch: int,
    *,
    groups: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    totals: Sequence[int] | None = None,
) -> Shares:
    """Share out ranks and batches, from each entry's images, the tiles of an image, and the batch of a rank.

    `totals` are the samples that each entry really has, where images differ or not all of their tiles are taken.
    """
    for name, given in (("groups", groups), ("batches", batches)):
        if given is not None and len(given) != len(images):
            raise UserError(f"data.balance.{name}: {len(given)} numbers for {len(images)} entries; give one an entry")
    counted = totals or [n * t for n, t in zip(images, tiles, strict=True)]
    shared = list(groups or share_ranks(counted, ranks))
    if 0 in shared:
        raise UserError(
            f"data.balance: entry {shared.index(0)} of data.train is too small for a rank of its own among {ranks}; "
            "use more ranks, leave it out, or share ranks out with data.balance.groups"
        )
    each = [n // r for n, r in zip(images, shared, strict=True)]
    if 0 in each and batches is None and totals is None:
        number = each.index(0)
        raise UserError(
            f"data.balance: entry {number} of data.train has {images[number]} items for {shared[number]} ranks; "
            "use fewer ranks, so that each has an item of its own"
        )
    if totals is None:
        own = tuple(batches or (n * t // batch for n, t in zip(each, tiles, strict=True)))
    else:
        own = tuple(batches or (total // (r * batch) for total, r in zip(totals, shared, strict=True)))
    if 0 in own:
        number = own.index(0)
        raise UserError(
            f"data.balance: a rank's part of entry {number} of data.train is less than a batch of {batch}; "
            "use fewer ranks or a smaller batch"
        )
    return Shares(tuple(shared), own, tuple(math.ceil(max(own) / b) for b in own))


class Balanced(Orders):
    """The order of samples where slot s of the global batch belongs to rank s // (batch / ranks), and it to an entry.

    Each entry has an order of its own, which its ranks go through together: none of its samples is lost or doubled.
    """

    def __init__(self, orders: Sequence[Order], shares: Shares, *, batch: int):
        ranks = sum(shares.ranks)
        if batch % ranks:
            raise UserError(f"data.balance.ranks: {ranks} do not divide data.batch {batch}; choose a multiple")
        super().__init__(orders, lanes=batch)
        self.shares, self.batch = shares, batch
        self.each = batch // ranks  # samples of a rank and step
        self.first = np.cumsum([0, *shares.ranks])  # rank of each entry

    @property
    def epoch(self) -> int:
        return self.shares.steps * self.batch

    def places(self, counters: Any) -> tuple[Any, Any]:
        """Return the groups of counters, and which sample of its group each one is."""
        steps, slots = np.divmod(counters, self.batch)
        entries = np.searchsorted(self.first, slots // self.each, side="right") - 1
        ranks = np.diff(self.first)[entries]
        return entries, (steps * ranks - self.first[entries]) * self.each + slots
