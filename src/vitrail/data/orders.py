"""Several orders of samples as one: each counter of a run belongs to one of them, and has a number of its own there."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.sampler import Order, Sample, choose


class Orders:
    """What orders have in common that share out the counters of a run; `places` tells how."""

    def __init__(self, orders: Sequence[Order], *, lanes: int):
        self.orders, self.lanes = list(orders), lanes
        self.crop = self.orders[0].crop
        self.extents = [e for order in self.orders for e in order.extents]
        self.reuse = max(order.reuse for order in self.orders)
        self.largest_block = max(order.largest_block for order in self.orders)

    def places(self, counters: Any) -> tuple[Any, Any]:
        """The orders of counters, by number, and which sample of its order each one is."""
        raise NotImplementedError

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        number, own = self.places(counter)
        return self.orders[int(number)](int(own), attempt)

    def choose(self, counters: Sequence[int]) -> list[Sample]:
        """The samples of many counters, the same as one by one."""
        numbers, own = self.places(np.asarray(counters, np.int64))
        samples: dict[int, Sample] = {}
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            samples |= zip(rows.tolist(), choose(self.orders[number], own[rows].tolist()), strict=True)
        return [samples[row] for row in range(len(counters))]
