"""Affinities: targets by hand, their loss and counts, and what turning a sample does to them."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from vitrail.data.augment.geometry import orient, orientations
from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.config import EncoderConfig
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.objectives.affinities import AffinitiesConfig, describe, name_of, pairs, usual_offsets
from vitrail.recipe.sections import Data

LABELS = torch.tensor(
    [
        [1, 1, 0, 2],
        [1, 0, 0, 2],
        [9, 9, 2, 2],
    ]
)


def test_targets_by_hand() -> None:
    together, scored = pairs(LABELS[None], ((-1, 0), (0, -1), (2, -3)), 0, None)
    assert together[0, 0].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1]]
    assert together[0, 1].int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert together[0, 2].int().tolist() == [[0] * 4] * 3
    assert scored[0, 0].int().tolist() == [[0] * 4, [1] * 4, [1] * 4]
    assert scored[0, 1].int().tolist() == [[0, 1, 1, 1]] * 3
    assert scored[0, 2].int().tolist() == [[0, 0, 0, 1], [0] * 4, [0] * 4]


def test_background_is_a_label_like_others_where_there_is_none() -> None:
    together, _ = pairs(LABELS[None], ((0, -1),), None, None)
    assert together[0, 0].int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]]


def test_voxels_that_nobody_has_looked_at_are_left_out() -> None:
    together, scored = pairs(LABELS[None], ((-1, 0), (0, -1)), 0, 9)
    assert scored[0].int().tolist() == [[[0] * 4, [1] * 4, [0, 0, 1, 1]], [[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]]
    assert not together[0, 1, 2, 1]


def test_names_of_instances_say_nothing() -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 5, (2, 6, 7, 8)))
    others = torch.tensor([0, 2**40, 7, 3, 2**33])[labels]
    offsets = usual_offsets((6, 7, 8))
    assert all(
        torch.equal(*two) for two in zip(*(pairs(each, offsets, 0, None) for each in (labels, others)), strict=True)
    )


def test_targets_are_those_of_the_turned_sample() -> None:
    """In every way that a cube can lie, a pair of the turned labels is the pair of the same voxels before."""
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, 3, (1, 4, 4, 4)))
    place = torch.arange(64).view(1, 1, 4, 4, 4)
    offset = (-1, 0, 2)
    for code in range(len(orientations((4, 4, 4)))):
        turned, where = orient(labels[:, None], [code])[:, 0], orient(place, [code])[0, 0]
        together, scored = pairs(turned, (offset,), 0, None)
        for at in np.ndindex(4, 4, 4):
            other = tuple(a + n for a, n in zip(at, offset, strict=True))
            inside = all(0 <= n < 4 for n in other)
            assert bool(scored[0, 0][at]) == inside
            if inside:
                one, two = (int(labels.flatten()[where[p]]) for p in (at, other))
                assert bool(together[0, 0][at]) == (one == two != 0)


def test_usual_offsets_fit_the_axes_and_the_crop() -> None:
    assert usual_offsets((32, 32)) == ((-1, 0), (0, -1), (-3, 0), (0, -3), (-9, 0), (0, -9))
    assert usual_offsets((4, 16, 32)) == (
        *((-1, 0, 0), (0, -1, 0), (0, 0, -1)),
        *((0, -3, 0), (0, 0, -3), (0, 0, -9)),
    )
    assert usual_offsets((1, 8, 8)) == ((0, -1, 0), (0, 0, -1), (0, -3, 0), (0, 0, -3))
    assert [name_of(offset) for offset in ((-1, 0, 0), (0, -4, 9), (0, 3))] == ["z-1", "y-4 x+9", "x+3"]


ENCODER = EncoderConfig(width=16, depth=4, heads=2, patch=4)


def models() -> list[Any]:
    tree = AdaptiveTokens(length=43, min_leaf=2, score=GradientScore())
    return [
        UNETRConfig(encoder=ENCODER, ndim=3, channels=1, shape=8, features=4),
        UNETRConfig(encoder=ENCODER, ndim=3, channels=1, shape=8, decoder="linear"),
        SAPConfig(
            encoder=EncoderConfig(width=16, depth=2, heads=2, patch=4, tokens=tree),
            ndim=3,
            channels=1,
            shape=8,
            features=4,
        ),
    ]


def data(crop: int = 8) -> Any:
    return Data(train=[{"kind": "dummy", "path": "dummy", "shape": [crop] * 3}], crop=crop, batch=2)  # type: ignore[list-item]


def built(model: Any, **options: Any) -> tuple[Any, Any]:
    objective, model = AffinitiesConfig(**options).fit(model, ("a",), data())
    return objective.build(model, Statistics((128.0,), (40.0,))), model


def batch_of(labels: torch.Tensor) -> Batch:
    values = torch.from_numpy(np.random.default_rng(2).integers(0, 255, (len(labels), 1, *labels.shape[1:]), np.uint8))
    return Batch(list(range(len(labels))), values, labels, ("a",))


@pytest.mark.parametrize("number", range(3))
def test_models_learn_affinities(number: int) -> None:
    torch.manual_seed(0)
    objective, config = built(models()[number], offsets=((-1, 0, 0), (0, -1, 0), (0, 0, -1)))
    model = config.build()
    labels = torch.ones(2, 8, 8, 8, dtype=torch.long)
    labels[:, :, 4:] = 2
    labels[:, :, :, 5] = 0
    batch = batch_of(labels)
    batch.values = (60 * labels[:, None]).to(torch.uint8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for step in range(25):
        inputs, targets = objective.prepare(batch, Draws(0, [2 * step, 2 * step + 1]))
        output = model(**inputs)
        loss = objective.loss(output, targets)
        assert loss.count == 2
        found.append(float(loss.sum.detach()))
        optimizer.zero_grad()
        loss.sum.backward()
        optimizer.step()
    assert found[-1] < 0.75 * found[0]
    sums = {name: float(value) for name, value in objective.measure(output.detach(), targets).items()}
    assert objective.summarise(sums)["balanced_accuracy"] > 0.6


def test_the_loss_is_a_mean_over_offsets_of_pairs_that_weigh_alike() -> None:
    objective, _ = built(models()[1], offsets=((-1, 0, 0), (0, 0, -3)))
    labels = torch.from_numpy(np.random.default_rng(3).integers(0, 2, (2, 8, 8, 8)))
    labels[1] = 1  # nothing is apart
    _, targets = objective.prepare(batch_of(labels), Draws(0, [0, 1]))
    logits = torch.from_numpy(np.random.default_rng(4).standard_normal((2, 2, 8, 8, 8))).float()
    expected = []
    for sample in range(2):
        each = []
        for number, offset in enumerate(objective.offsets):
            wrong: dict[bool, list[float]] = {True: [], False: []}
            for at in np.ndindex(8, 8, 8):
                other = tuple(a + n for a, n in zip(at, offset, strict=True))
                if min(other) < 0:
                    continue
                true = bool(labels[sample][at] == labels[sample][other] != 0)
                logit = logits[sample, number][at]
                wrong[true].append(float(functional.softplus(-logit if true else logit)))
            shares = {kind: len(wrong[kind]) / (len(wrong[True]) + len(wrong[False])) for kind in wrong}
            shares = {kind: min(max(share, 0.05), 0.95) for kind, share in shares.items()}
            total = sum(sum(wrong[kind]) / (2 * shares[kind]) for kind in wrong)
            each.append(total / (len(wrong[True]) + len(wrong[False])))
        expected.append(sum(each) / 2)
    assert objective.each(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_counts_of_parts_are_those_of_the_whole() -> None:
    objective, config = built(models()[1])
    labels = torch.from_numpy(np.random.default_rng(5).integers(0, 3, (4, 8, 8, 8)))
    logits = torch.from_numpy(np.random.default_rng(6).standard_normal((4, config.classes, 8, 8, 8))).float()

    def sums(part: slice) -> dict[str, float]:
        _, targets = objective.prepare(batch_of(labels[part]), Draws(0, [0] * len(labels[part])))
        return {name: float(value) for name, value in objective.measure(logits[part], targets).items()}

    whole, parts = sums(slice(0, 4)), [sums(slice(0, 1)), sums(slice(1, 4))]
    assert whole == pytest.approx({name: parts[0][name] + parts[1][name] for name in whole})
    together, scored = pairs(labels, objective.offsets, 0, None)
    said = logits > 0
    right = ~together & ~said & scored
    metrics = objective.summarise(whole)
    apart, called = int((~together & scored).sum()), int((~said & scored).sum())
    assert metrics["f1"] == pytest.approx(2 * int(right.sum()) / (apart + called))
    shares = [
        int((kind & (said == kind_said) & scored).sum()) / int((kind & scored).sum())
        for kind, kind_said in ((together, True), (~together, False))
    ]
    assert metrics["balanced_accuracy"] == pytest.approx(sum(shares) / 2)
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("shape", [(9, 11), (5, 6, 7)])
def test_descriptors_are_moments_within_a_window(shape: tuple[int, ...]) -> None:
    sigma, ndim = 2.0, len(shape)
    labels = np.random.default_rng(7).integers(0, 3, shape)
    labels[:3, :4] = 2
    found, inside = describe(torch.from_numpy(labels)[None], sigma, 0, None)
    assert inside[0].tolist() == (labels != 0).tolist()
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    line = np.exp(-(np.arange(-6, 7) ** 2) / (2 * sigma**2))
    for at in np.ndindex(*shape):
        if labels[at] == 0:
            assert (found[(0, slice(None), *at)] == 0).all()
            continue
        away = places - np.array(at)
        weight = np.prod(np.where(abs(away) <= 6, np.exp(-(away**2) / (2 * sigma**2)) / line.sum(), 0), axis=-1)
        weight *= labels == labels[at]
        mean = (weight[..., None] * away).reshape(-1, ndim).sum(axis=0) / weight.sum()
        centred = (away - mean).reshape(-1, ndim)
        spread = (centred * weight.reshape(-1, 1)).T @ centred / weight.sum() / sigma**2
        width = np.sqrt(spread.diagonal().clip(1e-6))
        told = [*(mean / sigma / 2 + 0.5), *spread.diagonal()]
        told += [spread[i, j] / (width[i] * width[j]) / 2 + 0.5 for i, j in itertools.combinations(range(ndim), 2)]
        expected = np.clip([*told, weight.sum()], 0, 1)
        assert found[(0, slice(None), *at)].tolist() == pytest.approx(expected.tolist(), abs=2e-3)


@pytest.mark.parametrize("ignore", [-1, 300])
def test_labels_of_eight_bits_are_no_others(ignore: int) -> None:
    objective, _ = built(models()[1], offsets=((-1, 0, 0),), ignore=ignore, background=ignore, descriptors=2.0)
    labels = torch.full((1, 8, 8, 8), ignore % 256, dtype=torch.uint8)
    _, targets = objective.prepare(batch_of(labels), Draws(0, [0]))
    assert targets.together[:, :, 1:].all()
    assert targets.scored[:, :, 1:].all()
    assert targets.inside.all()


def test_descriptors_are_learned_beside_affinities() -> None:
    objective, config = built(models()[1], offsets=((-1, 0, 0),), descriptors=2.0)
    assert config.classes == 1 + 10
    labels = torch.from_numpy(np.random.default_rng(8).integers(0, 3, (2, 8, 8, 8)))
    _, targets = objective.prepare(batch_of(labels), Draws(0, [0, 1]))
    logits = torch.from_numpy(np.random.default_rng(9).standard_normal((2, 11, 8, 8, 8))).float()
    assert objective.logits(logits, targets).shape == (2, 1, 8, 8, 8)
    plain, _ = built(models()[1], offsets=((-1, 0, 0),))
    alone = plain.each(logits[:, :1], plain.prepare(batch_of(labels), Draws(0, [0, 1]))[1])
    more = objective.each(logits, targets) - alone
    error = ((logits[:, 1:].sigmoid() - targets.shapes) ** 2).mean(dim=1)
    expected = [float(error[n][labels[n] != 0].mean()) for n in range(2)]
    assert more.tolist() == pytest.approx(expected, rel=1e-4)
    with pytest.raises((UserError, ValueError), match="above 0"):
        built(models()[1], descriptors=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offsets": ((0, 0, 0),)}, "no neighbour of its own"),
        ({"offsets": ((1, 0, 0), (-1, 0, 0))}, "turned around"),
        ({"offsets": ((1, 0, 0), (1, 0, 0))}, "must be different"),
        ({"offsets": ((1, 0),)}, "the model has 3 axes"),
        ({"offsets": ((0, 0, -8),)}, "leads out of every crop"),
    ],
)
def test_offsets_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((UserError, ValueError), match=words):
        built(models()[1], **options)


def test_models_that_cannot_say_it_are_refused() -> None:
    from vitrail.models.vit import ViTConfig

    with pytest.raises(UserError, match="give each voxel"):
        built(ViTConfig(width=16, depth=1, heads=2, patch=4, ndim=3, channels=1, classes=2))
    with pytest.raises(UserError, match="leave it out"):
        built(UNETRConfig(encoder=ENCODER, ndim=3, channels=1, shape=8, classes=4))
