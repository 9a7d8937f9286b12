"""Which tokens a mask leaves visible: the lowest scores, of equal ones those with the lowest noise."""

import pytest
import torch

from vitrail.models.mae import AnyMask, BlockMask, GridMask, RandomMask, TubeMask, make_mask

NOISE = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "mask", [RandomMask(ratio=0.9), BlockMask(ratio=0.9), TubeMask(ratio=0.9), GridMask(ratio=0.9)]
)
def test_the_lowest_stay(mask: AnyMask) -> None:
    scores = mask.score(NOISE, (8, 8))
    for visible, score, noise in zip(make_mask(mask, NOISE, (8, 8)).visible, scores, NOISE, strict=True):
        order = sorted(range(64), key=lambda token: (float(score[token]), float(noise[token])))
        assert visible.tolist() == sorted(order[:6])


def test_every_sample_has_a_lattice_of_its_own() -> None:
    noise = NOISE.clone()
    noise[:, :2] = torch.tensor([[0.1, 0.1], [0.1, 0.9], [0.9, 0.1], [0.9, 0.9]])  # of a stride of 2: shifts of 0 and 1
    found = make_mask(GridMask(ratio=0.75), noise, (8, 8)).visible
    for visible, first in zip(found, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True):
        assert visible.tolist() == [8 * y + x for y in range(first[0], 8, 2) for x in range(first[1], 8, 2)]
