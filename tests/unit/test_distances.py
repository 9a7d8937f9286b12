"""Distances between sets of samples, against closed forms and what must leave them alone."""

import math

import pytest
import torch
from torch import Tensor

from vitrail.infer.features import (
    Cloud,
    Gaussian,
    apart,
    directions,
    frechet,
    kid,
    nearest_classes,
    precision_recall,
    sliced_wasserstein,
    squared_mmd,
    wilson,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(width: int, seed: int = 9) -> Tensor:
    return torch.linalg.qr(normal(width, width, seed=seed)).Q


def test_frechet_closed_forms() -> None:
    # Diagonal covariances: (m - m')^2 + (s - s')^2 of each direction.
    mean, other = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([3.0, 1.0, 0.0])
    std, other_std = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 2.0, 0.5])
    wanted = float((mean - other).square().sum() + (std - other_std).square().sum())
    basis = turn(3)
    one = Gaussian.of(basis @ mean.double(), basis @ torch.diag(std.double() ** 2) @ basis.T)
    two = Gaussian.of(basis @ other.double(), basis @ torch.diag(other_std.double() ** 2) @ basis.T)
    assert apart(one, two) == pytest.approx(wanted, abs=1e-10)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    first, second = (normal(40, 4, seed=s) @ normal(4, 4, seed=s + 10) for s in (1, 2))
    covariances = [torch.cov(each.T) for each in (first, second)]
    # The trace by the eigenvalues of the product, which are real and not negative.
    shared = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.sqrt().sum()
    apart = (first.mean(0) - second.mean(0)).square().sum()
    wanted = apart + covariances[0].trace() + covariances[1].trace() - 2 * shared
    assert frechet(first, second) == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize("number", [5, 40, 300])
def test_frechet_of_few_samples(number: int) -> None:
    features = normal(number, 64) * torch.logspace(0, -6, 64)
    assert frechet(features, features) < 1e-9
    assert frechet(features, features.flip(0)) < 1e-9
    assert frechet(features, features + 2) == pytest.approx(4 * 64, rel=1e-9)
    # Scaled by 3: the difference of the standard deviations along every direction, and of the means.
    wanted = 4 * (features.mean(0).square().sum() + torch.cov(features.T).trace())
    assert frechet(features, 3 * features) == pytest.approx(float(wanted), rel=1e-7)


def test_frechet_invariances() -> None:
    first, second, basis = normal(50, 6), normal(30, 6, seed=1) * 2 + 1, turn(6)
    base = frechet(first, second)
    assert frechet(second, first) == pytest.approx(base, rel=1e-9)
    assert frechet(first @ basis + 7, second @ basis + 7) == pytest.approx(base, rel=1e-9)
    assert frechet(5 * first, 5 * second) == pytest.approx(25 * base, rel=1e-9)


def test_kid_closed_forms() -> None:
    first, second = normal(7, 3), normal(5, 3, seed=1)

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 3 + 1) ** 3

    wanted = sum(kernel(a, b) for i, a in enumerate(first) for j, b in enumerate(first) if i != j) / (7 * 6)
    wanted += sum(kernel(a, b) for i, a in enumerate(second) for j, b in enumerate(second) if i != j) / (5 * 4)
    wanted -= 2 * sum(kernel(a, b) for a in first for b in second) / (7 * 5)
    assert squared_mmd(first, second) == pytest.approx(wanted, rel=1e-12)
    basis = turn(3)
    assert squared_mmd(first @ basis, second @ basis) == pytest.approx(wanted, rel=1e-9)


def test_kid_is_unbiased_and_tells_its_spread() -> None:
    found = [kid(normal(40, 4, seed=2 * s), normal(40, 4, seed=2 * s + 1), subsets=2).value for s in range(100)]
    assert abs(sum(found)) / 100 < 4 * float(torch.tensor(found).std()) / 10  # the same distribution: 0 on average
    assert min(found) < 0
    value, spread = kid(normal(100, 4), normal(100, 4, seed=1) + 2, subsets=20)
    assert value > 4 * spread > 0
    assert kid(normal(100, 4), normal(100, 4, seed=1) + 2, subsets=20) == (value, spread)  # the same draws
    assert math.isnan(kid(normal(3, 4), normal(3, 4, seed=1)).spread)


def test_precision_and_recall() -> None:
    real, samples = normal(300, 3), normal(200, 3, seed=1)
    precision, recall = precision_recall(samples, real)
    assert min(precision, recall) > 0.75
    assert precision_recall(real, samples) == (recall, precision)
    assert precision_recall(real, real) == (1.0, 1.0)
    assert precision_recall(samples + 100, real) == (0.0, 0.0)
    narrow = 0.1 * samples  # few of the kinds, but good ones
    precision, recall = precision_recall(narrow, real)
    assert precision > 0.95
    assert recall < 0.1
    basis = turn(3)
    assert precision_recall(5 * narrow @ basis + 1, 5 * real @ basis + 1) == (precision, recall)


def test_precision_by_hand() -> None:
    real = torch.tensor([[0.0], [1.0], [10.0], [11.0]])  # each reaches 1 with one neighbour
    samples = torch.tensor([[-0.5], [2.5], [12.0], [5.0], [5.1]])
    assert precision_recall(samples, real, neighbours=1)[0] == pytest.approx(2 / 5)


def test_sliced_wasserstein_closed_forms() -> None:
    along = directions(5, 400, seed=0)
    assert torch.allclose(along.norm(dim=0), torch.ones(400))
    assert torch.equal(along, directions(5, 400, seed=0))
    assert not torch.equal(along, directions(5, 400, seed=1))
    points, shift = normal(50, 5).float(), torch.tensor([3.0, 0, 0, 0, 4.0])
    projected, moved = points @ along, (points + shift) @ along
    # A shift moves every projection by its part along the direction: 25 / 5 on average over directions.
    assert sliced_wasserstein(projected, moved) == pytest.approx(
        float((shift @ along).square().mean()) ** 0.5, rel=1e-5
    )
    assert sliced_wasserstein(projected, moved) == pytest.approx(math.sqrt(5), rel=0.1)
    assert sliced_wasserstein(projected, projected[torch.randperm(50)]) == 0
    assert sliced_wasserstein(2 * projected, 2 * moved) == pytest.approx(2 * sliced_wasserstein(projected, moved))


def test_what_is_kept_of_a_cloud_changes_nothing() -> None:
    first, *others = (Cloud(normal(60, 4, seed=s) + s) for s in range(3))
    for other in others:
        for call in (frechet, squared_mmd, precision_recall):
            assert call(first, other) == call(first.features, other.features)
    assert precision_recall(first, other, neighbours=5) == precision_recall(
        first.features, other.features, neighbours=5
    )


def test_sliced_wasserstein_of_unequal_numbers() -> None:
    few, many = torch.tensor([[0.0], [6.0]]), torch.tensor([[0.0], [0.0], [6.0]])
    # The mass from 1/2 to 2/3 travels from 6 to 0.
    assert sliced_wasserstein(few, many) == pytest.approx(math.sqrt(36 / 6))
    assert sliced_wasserstein(few, few.repeat(3, 1)) == 0
    assert sliced_wasserstein(many, few) == pytest.approx(math.sqrt(36 / 6))


def test_neighbours_vote_for_classes() -> None:
    """By hand; and all of the neighbours, by their cosine, as a loop over them says."""
    bank = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.2]])
    classes = torch.tensor([2, 2, 0, 1])
    queries = torch.tensor([[9.0, 0.1], [0.1, 3.0], [-0.1, 0.01]])
    assert nearest_classes(bank, classes, queries, neighbours=1).tolist() == [2, 0, 1]
    assert nearest_classes(bank, classes, queries, neighbours=99).tolist() == [2, 0, 1]
    draw = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(50, 4, generator=draw), torch.randn(30, 4, generator=draw)
    classes = torch.randint(0, 5, (50,), generator=draw)
    for neighbours in (3, 20):
        found = nearest_classes(bank, classes, queries, neighbours=neighbours).tolist()
        for query, told in zip(queries, found, strict=True):
            cosines = [float(query @ row / query.norm() / row.norm()) for row in bank]
            votes = dict.fromkeys(range(5), 0.0)
            for place in sorted(range(50), key=lambda place: -cosines[place])[:neighbours]:
                votes[int(classes[place])] += math.exp(cosines[place] / 0.07)
            assert told == max(votes, key=votes.__getitem__)


def test_wilson() -> None:
    share, low, high = wilson(50, 100)
    assert share == 0.5
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0, 10)[:2] == (0.0, 0.0)
    assert wilson(0, 10).high == pytest.approx(1.96**2 / (10 + 1.96**2))
    assert wilson(10, 10).high == pytest.approx(1.0)
    assert wilson(10, 10).low == pytest.approx(1 - wilson(0, 10).high)


def test_refusals() -> None:
    good = normal(10, 3)
    for call in (frechet, kid, precision_recall, sliced_wasserstein):
        with pytest.raises(ValueError, match=r"the same D|same D"):
            call(good, normal(10, 4))
        with pytest.raises(ValueError, match="not finite"):
            call(good, torch.full_like(good, math.nan))
    for call in (frechet, kid, precision_recall):
        with pytest.raises(ValueError, match="too few"):
            call(good, good[:1])
    with pytest.raises(ValueError, match="no share"):
        wilson(3, 2)
