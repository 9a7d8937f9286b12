"""Initial values: a rank that holds a part of a parameter draws the values of that part."""

import pytest
import torch
from torch import nn

from vitrail.layers import init


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 6))


@pytest.mark.parametrize("block", [7, 1 << 16])  # numbers drawn at a time: fewer than a part has, and more than all
@pytest.mark.parametrize("part", [(slice(5, 9), slice(0, 6)), (slice(0, 12), slice(2, 5)), (slice(3, 4), slice(1, 6))])
def test_a_part_has_the_values_of_the_whole(monkeypatch, block: int, part: tuple[slice, slice]) -> None:
    monkeypatch.setattr(init, "BLOCK", block)
    whole, rules = One(), {"weight": init.Normal(0.5)}
    init.initialise(whole, rules, 3)
    assert whole.weight.std() > 0.2
    mine = torch.empty(12, 6)[part].contiguous()
    monkeypatch.setattr(init, "local_shard", lambda parameter: (mine, tuple(each.start for each in part)))
    init.initialise(One(), rules, 3)
    assert torch.equal(mine, whole.weight[part])
