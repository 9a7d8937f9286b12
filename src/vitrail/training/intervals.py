"""How sure a held-out score is: an interval of 95 %, by drawing the held-out items again and again (bootstrap).

The sums of each sample are kept, beside those of all. What is drawn are items, since the samples of one are alike; with
fewer than five items it is samples, and the interval says so: it may then be too narrow.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.draws import key

DRAWS = 1000
LEVEL = 0.95
FEWEST = 5  # items, or else samples, from which there is an interval


class Units:
    """The sums of each sample that this rank has measured, by the samples' counters."""

    def __init__(self, samples: int):
        self.samples = samples
        self._rows: list[tuple[int, dict[str, Tensor]]] = []
        self.whole = True  # whether the sums of all samples could be told apart

    def add(self, counter: int, sums: dict[str, Tensor]) -> None:
        self._rows.append((counter, sums))

    def table(self, names: Sequence[str], like: Tensor) -> Tensor:
        """Return [samples, 1 + names]: whether a sample was measured, and its sums; to be added up over ranks."""
        table = torch.zeros(self.samples, 1 + len(names), dtype=torch.float64)
        for counter, sums in self._rows:
            given = [sums.get(name) for name in names]
            row = torch.stack([torch.zeros((), dtype=torch.float64) if x is None else x.cpu().double() for x in given])
            table[counter, 1:] += row
            table[counter, 0] = 1
        if not self.whole:
            table[:] = float("nan")
        return table.to(like.device)


def bootstrap(
    table: np.ndarray,
    items: Sequence[Any],
    names: Sequence[str],
    summarise: Callable[[dict[str, float]], dict[str, float]],
    *,
    seed: int,
) -> dict[str, Any] | None:
    """Return the interval of each metric, for the sums [samples, names] of samples and the item of each."""
    known = {item: number for number, item in enumerate(dict.fromkeys(items))}
    by_item = len(known) >= FEWEST
    if by_item:
        sums = np.zeros((len(known), table.shape[1]))
        np.add.at(sums, [known[item] for item in items], table)
    else:
        sums = table
    if len(sums) < FEWEST or not np.isfinite(sums).all():
        return None
    draws = np.random.default_rng(key(seed, "bootstrap"))
    times = draws.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=DRAWS)
    found = [summarise(dict(zip(names, row.tolist(), strict=True))) for row in times @ sums]
    ends = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    metrics: dict[str, list[float]] = {}
    for name in found[0]:
        values = np.array([one[name] for one in found], dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values) > DRAWS // 2:  # a class that is in few items has no score in many draws
            metrics[name] = [float(end) for end in np.percentile(values, ends)]
    few = f"{len(known)} item{'s' * (len(known) > 1)}"
    over = few if by_item else f"{len(sums)} samples of {few}, which are alike: it may be too narrow"
    return {"level": LEVEL, "over": over, "metrics": metrics}
