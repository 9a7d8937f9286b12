"""Entries with different variables in one run: a step's batch has one set of variables, and sets take turns.

Entries with the same variables form a group. The group of a step is a function of counter // batch: a cycle of steps
holds each group in proportion to its share, spread evenly. Inside its steps a group has samples in its own order, so
that each group's epochs are as exact as if it were alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.orders import Orders
from vitrail.data.sampler import Order
from vitrail.errors import UserError

CYCLE = 1024  # steps, at most, in which shares are kept


def rotation(shares: Sequence[float], length: int = CYCLE) -> np.ndarray:
    """Which group each step of a cycle has: as often as its share says, at least once, and spread evenly."""
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
        """As many samples as all groups have in a pass of their own."""
        return sum(order.epoch for order in self.orders)

    def places(self, counters: Any) -> tuple[Any, Any]:
        """The groups of counters, and which sample of its group each one is."""
        steps, slots = np.divmod(counters, self.batch)
        cycles, turns = np.divmod(steps, len(self.turns))
        groups = self.turns[turns]
        return groups, (cycles * self.before[groups, -1] + self.before[groups, turns]) * self.batch + slots


def group_entries(variables: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Numbers of the entries with the same variables, in the order of their first appearance."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, names in enumerate(variables):
        groups.setdefault(names, []).append(number)
    return list(groups.values())


def source_shares(mix: str, weights: Sequence[float]) -> list[float] | None:
    """Shares of the entries, or None where they follow from their sizes."""
    if mix == "size":
        return None
    return [1.0] * len(weights) if mix == "equal" else list(weights)


def check_batch(batch: int | str) -> int:
    """The batch by which groups take turns: one number in every world."""
    if not isinstance(batch, int):
        raise UserError(
            f"data.batch: {batch!r} is another number of samples in every world, but entries with different variables "
            "take turns by whole batches; give the samples of a step over all ranks as one number"
        )
    return batch
