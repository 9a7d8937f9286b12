"""Local shape descriptors on a GPU are those of the CPU, also far from the middle of a crop, where sums are large."""

import pytest
import torch

from vitrail.objectives.affinities import describe

pytestmark = pytest.mark.gpu


def test_descriptors_are_as_exact_as_on_the_cpu() -> None:
    places = torch.arange(96)
    labels = (places[:, None, None] // 20 * 100 + places[None, :, None] // 24 * 10 + places[:48] // 16 + 1)[None]
    assert labels.shape == (1, 96, 96, 48)
    here, inside = describe(labels, 2.0, 0, None)
    there, inside_there = describe(labels.cuda(), 2.0, 0, None)
    assert torch.equal(inside, inside_there.cpu())
    assert float((here - there.cpu()).abs().max()) < 2e-3
