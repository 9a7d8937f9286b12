"""Probes of features beside plain formulas, and on features whose answer is known."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.infer.features import nearest_classes, nearest_shares
from vitrail.infer.readouts import (
    attentive,
    count,
    dice,
    linear,
    mean_dice_interval,
    principal_colours,
    shares_of,
    to_voxels,
)
from vitrail.objectives.segment import confusion


def clusters(number: int, *, seed: int, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Features about one centre a class, far from 0 and of other sizes along each axis."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(number) % classes
    features = centres[labels] + torch.randn(number, width, generator=generator)
    return features * torch.logspace(-3, 3, width) + 100, labels


def test_a_line_between_clusters_is_found_whatever_their_scale() -> None:
    features, labels = clusters(120, seed=0)
    queries, truth = clusters(60, seed=1)
    shares = torch.nn.functional.one_hot(labels, 3).float()
    logits = linear(features, shares, torch.arange(120), queries, seed=0)
    assert (logits.argmax(dim=1) == truth).float().mean() > 0.95
    scaled = linear(10 * features - 5, shares, torch.arange(120), 10 * queries - 5, seed=0)
    assert (logits.argmax(dim=1) == scaled.argmax(dim=1)).all()
    again = linear(features, shares, torch.arange(120), queries, seed=0)
    assert torch.equal(logits, again)


def test_a_linear_probe_of_noise_is_no_surer_than_its_samples() -> None:
    """Patches of one crop are alike: were they on both sides, weights would not be held back."""
    generator = torch.Generator().manual_seed(0)
    crops = torch.randn(20, 16, generator=generator).repeat_interleave(30, dim=0)
    features = crops + 0.01 * torch.randn(600, 16, generator=generator)
    shares = torch.nn.functional.one_hot(torch.arange(20) % 2, 2).float().repeat_interleave(30, dim=0)
    groups = torch.arange(20).repeat_interleave(30)
    queries = torch.randn(200, 16, generator=generator)
    held, leaked = (linear(features, shares, g, queries, seed=0).softmax(dim=1) for g in (groups, torch.arange(600)))
    assert held.max(dim=1).values.mean() < leaked.max(dim=1).values.mean() - 0.1


def test_attention_finds_the_one_token_that_tells() -> None:
    """A class is what one token of twelve points to, anywhere; the mean of all tokens hides it."""
    generator = torch.Generator().manual_seed(0)

    def samples(number: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randn(number, 12, 8, generator=generator)
        tokens[..., 0] = 0
        tokens[..., 1:3] *= 3
        labels = torch.arange(number) % 2
        where = torch.randint(12, (number,), generator=generator)
        tokens[torch.arange(number), where, 0] = 4
        tokens[torch.arange(number), where, 1] = 2.0 * labels - 1
        return tokens, labels

    (tokens, labels), (queries, truth) = samples(600), samples(200)
    shares = torch.nn.functional.one_hot(labels, 2).float()
    told = attentive(tokens, shares, queries, heads=2, steps=200, seed=0)
    assert (told.argmax(dim=1) == truth).float().mean() > 0.85
    plain = linear(tokens.mean(dim=1), shares, torch.arange(600), queries.mean(dim=1), seed=0)
    assert (plain.argmax(dim=1) == truth).float().mean() < 0.75
    state = torch.get_rng_state()
    assert torch.equal(
        attentive(tokens, shares, queries, heads=2, steps=3, seed=4),
        attentive(tokens, shares, queries, heads=2, steps=3, seed=4),
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_tells_of_each_token() -> None:
    tokens = torch.randn(40, 9, 8, generator=torch.Generator().manual_seed(0))
    labels = (tokens[..., 0] > 0).long()
    shares = torch.nn.functional.one_hot(labels, 2).float()
    told = attentive(tokens[:30], shares[:30], tokens[30:], heads=3, steps=150, seed=0)
    assert told.shape == (10, 9, 2)
    assert (told.argmax(dim=-1) == labels[30:]).float().mean() > 0.9


def test_votes_for_shares_are_those_for_classes() -> None:
    features, labels = clusters(60, seed=0)
    queries, _ = clusters(30, seed=1)
    shares = nearest_shares(features, torch.nn.functional.one_hot(labels, 3).float(), queries, neighbours=5)
    assert shares.sum(dim=1) == pytest.approx(torch.ones(30), abs=1e-5)
    assert torch.equal(shares.argmax(dim=1), nearest_classes(features, labels, queries, neighbours=5))


def test_shares_of_patches_and_back() -> None:
    grid, patch = (2, 3, 4), (2, 4, 3)
    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(3, (2, *grid), generator=generator)
    labels = cells
    for axis, side in enumerate(patch, 1):
        labels = labels.repeat_interleave(side, dim=axis)
    shares = shares_of(labels, patch, 3)
    assert torch.equal(shares.argmax(dim=-1), cells.flatten(1))
    assert torch.equal(shares.sum(dim=-1), torch.ones(2, 24))
    # A class that fills one half is in the same half again: patches meet where they did.
    half = torch.zeros(1, 4, 12, 12, dtype=torch.int16)
    half[:, :, :, 6:] = 2
    assert torch.equal(to_voxels(shares_of(half, patch, 3), grid, patch), half)


def test_voxels_that_are_not_scored_count_nowhere() -> None:
    labels = torch.tensor([[[0, 1, -1, -1], [1, 1, -1, -1]]])
    shares = shares_of(labels, 2, 2)
    assert shares[0].tolist() == [[0.25, 0.75], [0.0, 0.0]]
    both, either = count(torch.ones_like(labels), labels, 2)
    assert (both.tolist(), either.tolist()) == ([[0.0, 3.0]], [[1.0, 7.0]])


def test_counts_are_those_of_the_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, guess = torch.randint(3, (2, 5, 7, 7), generator=generator)
    both, either = count(guess, truth, 4)
    table = confusion(guess, truth, 4).double()
    assert torch.equal(both.sum(dim=0), table.diagonal())
    assert torch.equal(either.sum(dim=0), table.sum(dim=0) + table.sum(dim=1))
    found = dice(both.sum(dim=0), either.sum(dim=0))
    assert found[3].isnan()
    assert found[0] == 2 * both.sum(dim=0)[0] / either.sum(dim=0)[0]


def test_the_interval_is_that_of_crops_drawn_anew() -> None:
    both = torch.tensor([[10.0], [0.0], [10.0], [5.0]]).double()
    either = torch.full((4, 1), 20.0).double()
    span = mean_dice_interval(both, either, seed=0)
    assert span is not None
    rng = np.random.default_rng(0)
    means = [(2 * both[d].sum() / either[d].sum()).item() for d in rng.integers(4, size=(4000, 4))]
    assert span == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.07)
    assert mean_dice_interval(both[:1], either[:1], seed=0) is None
    low, high = mean_dice_interval(both[[0, 0, 0]], either[[0, 0, 0]], seed=0) or (0, 0)
    assert low == high == 1.0


def test_colours_are_the_first_components() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(500, 5, generator=generator) * torch.tensor([9.0, 4.0, 2.0, 0.1, 0.1])
    colours = principal_colours(tokens, tokens[:200].view(2, 100, 5))
    assert colours.shape == (2, 100, 3)
    assert (colours.min(), colours.max()) == (0, 1)
    for axis in range(3):
        along = np.corrcoef(colours[..., axis].flatten(), tokens[:200, axis])[0, 1]
        assert along > 0.95
    assert principal_colours(tokens[:, :2], tokens[None, :4, :2]).shape == (1, 4, 3)
