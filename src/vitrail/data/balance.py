"""Entries shared out over data-parallel ranks, so that each rank reads from one of them alone.

The rule of UCF-VIT: ranks in proportion to tiles, rounded to even and then adjusted until they add up; what an entry
has fewer of than the largest is used again. Here ranks are virtual: a slot of the global batch belongs to one, so that
any number of real ranks trains in the same order. An epoch is as many steps as the largest entry has batches a rank.

The study counts the tiles of an entry's first image and gives each rank images of its own. Here the ranks of an entry
share all of it, so that batches are counted from the samples that there are: none is left out for good.

Sample-exact mixing by the global counter needs none of this, and `vitrail data balance` shows both.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.orders import Orders
from vitrail.data.sampler import Order
from vitrail.errors import UserError


class Shares(NamedTuple):
    """What each entry gets."""

    ranks: tuple[int, ...]
    batches: tuple[int, ...]  # of each of its ranks, in one pass over the entry
    repeats: tuple[int, ...]  # passes over the entry in an epoch

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return max(self.batches)

    @property
    def text(self) -> str:
        """The ranks as one word, a:b:c."""
        return ":".join(map(str, self.ranks))


def share_ranks(tiles: Sequence[int], ranks: int) -> list[int]:
    """Ranks of each entry in proportion to its tiles."""
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
    """Ranks and batches of each entry, from its images, the tiles of an image, and the batch of a rank.

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
        """The entries of counters, and which sample of its entry each one is."""
        steps, slots = np.divmod(counters, self.batch)
        entries = np.searchsorted(self.first, slots // self.each, side="right") - 1
        ranks = np.diff(self.first)[entries]
        return entries, (steps * ranks - self.first[entries]) * self.each + slots
