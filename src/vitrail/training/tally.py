"""Beside the metrics of a measurement: counts of classes, added up over ranks, and the samples that did worst."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.objectives.counts import tables_of
from vitrail.objectives.objective import Objective, VoxelObjective
from vitrail.parallel.flow import Flow

MOST_WORST = 12  # samples that are shown


class Tally:
    def __init__(self, objective: Objective):
        self.objective = objective
        self.counts: dict[str, Tensor] = {}
        self.scores: list[tuple[float, int]] | None = None  # of this rank's own samples, and their counters

    def add(self, counts: dict[str, Tensor], *, taken: bool, copies: int = 1) -> None:
        """Add counts of a batch, which so many ranks add alike; what is not taken counts as nothing.

        All ranks add the same names.
        """
        for name, value in counts.items():
            value = value / copies if taken else torch.zeros_like(value)
            self.counts[name] = self.counts[name] + value if name in self.counts else value

    def rate(self, each: Tensor | None, counters: Sequence[int], *, taken: bool) -> None:
        """Note how badly samples did, where the objective tells."""
        if each is not None:
            rows = zip(each.double().nan_to_num(math.inf).tolist(), counters, strict=True)
            self.scores = (self.scores or []) + (list(rows) if taken else [])

    def add_up(self, flow: Flow, like: Tensor) -> tuple[dict[str, Any] | None, list[int]]:
        """Return what the counts of all ranks say, and the counters of the worst samples, the worst first."""
        if not self.counts and self.scores is None:
            return None, []
        names = sorted(self.counts)
        parts = [*(self.counts[name] for name in names), self._share(flow)]
        table = torch.cat([part.to(like).flatten() for part in parts])
        dist.all_reduce(table)
        flat = table.split([part.numel() for part in parts])
        *added, worst = (whole.view(part.shape).tolist() for whole, part in zip(flat, parts, strict=True))
        # Ranks that share samples say the same: `copies` is how many did.
        found = [(score / copies, round(number / copies)) for rows in worst for score, number, copies in rows if copies]
        shown = sorted(found, reverse=True)[: min(self.objective.pictured, MOST_WORST)]
        of = "voxels" if isinstance(self.objective, VoxelObjective) else "samples"
        known = getattr(self.objective, "names", ())
        tables = tables_of(dict(zip(names, added, strict=True)), known, of) if names else None
        return tables, [counter for _, counter in shown]

    def _share(self, flow: Flow) -> Tensor:
        """Return [ranks, most, 3]: scores and counters of the worst samples of this rank in its place, else 0."""
        table = torch.zeros(flow.layout.data, MOST_WORST, 3, dtype=torch.float64)
        for place, (score, counter) in enumerate(sorted(self.scores or [], reverse=True)[:MOST_WORST]):
            table[flow.data_rank, place] = torch.tensor([min(score, 1e30), counter, 1], dtype=torch.float64)
        return table
