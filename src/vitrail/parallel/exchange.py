"""Rows of values from the ranks that have read them.

Every rank knows what every other asks for, since all draw the same masks: no index travels, only rows, as bytes (so
that uint8 stays uint8, and types that a backend cannot send need no care). Where each rank asks for rows of its own
alone, as with a stratified mask, nothing travels at all.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.layers.parts import all_at_home, count_owners
from vitrail.layers.patches import gather_tokens


class Exchange:
    """Fetches rows within one group of ranks, those that share the samples."""

    def __init__(self, group: Any):
        self.group = group

    def fetch(self, values: Tensor, index_by_part: Sequence[Tensor]) -> Tensor:
        return fetch_rows(values, index_by_part, self.group)


@torch.no_grad()
def fetch_rows(values: Tensor, index_by_part: Sequence[Tensor], group: Any) -> Tensor:
    """Of the rows [B, R*n, F] of all R ranks, of which this one has the values [B, n, F], those that it asks for.

    `index_by_part` holds what each rank asks for, [B, s] of 0 to R*n - 1, the same on every rank; row j*n is the first
    of rank j. No gradient flows: values are data.
    """
    rank, rows = dist.get_rank(group), values.shape[1]
    assert len(index_by_part) == dist.get_world_size(group)
    mine = index_by_part[rank]
    counts = count_owners(index_by_part, rows)  # waits for the device, once
    if all_at_home(counts):
        return gather_tokens(values, mine - rank * rows)
    # What goes to each rank, one after the other, sample by sample, in the order in which it was asked for.
    asked = torch.cat([index.flatten() for index in index_by_part])
    sample = torch.cat([_samples(index) for index in index_by_part])
    given = [row[rank] for row in counts]
    order = (asked // rows != rank).int().argsort(stable=True)[: sum(given)]  # sizes are known by now
    sent = values[sample[order], asked[order] - rank * rows].contiguous().view(torch.uint8)
    got = sent.new_empty(mine.numel(), sent.shape[1])
    dist.all_to_all_single(got, sent, output_split_sizes=counts[rank], input_split_sizes=given, group=group)
    out = torch.empty_like(got)
    out[(mine.flatten() // rows).argsort(stable=True)] = got  # it came owner by owner
    return out.view(values.dtype).unflatten(0, mine.shape)


def _samples(index: Tensor) -> Tensor:
    """The sample that each element of [B, s] belongs to, flat."""
    return torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
