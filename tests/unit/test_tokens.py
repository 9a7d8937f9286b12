"""Adaptive and uniform tokens behind one encoder: padding, separate variables, masks, the way back."""

from dataclasses import replace

import pytest
import torch

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.scores import CannyScore, GradientScore
from vitrail.layers.tokens import AdaptiveTokens, RegisteredScore, Tokens, UniformTokens, tokenize
from vitrail.layers.variables import VariablesConfig
from vitrail.models import (
    MAE,
    SAP,
    UNETR,
    DecoderConfig,
    EncoderConfig,
    MAEConfig,
    SAPConfig,
    UNETRConfig,
    ViT,
    ViTConfig,
)
from vitrail.models.mae import BlockMask, RandomMask, make_mask
from vitrail.models.model import make_inputs
from vitrail.objectives.reconstruct import ReconstructConfig

SPARSE = AdaptiveTokens(length=40, score=GradientScore(), fill=False)
SPARSE3D = AdaptiveTokens(length=281, score=GradientScore(), fill=False)


def picture(ndim: int = 2, channels: int = 2, batch: int = 2) -> torch.Tensor:
    """Flat but for two small bright boxes: its trees need few leaves."""
    image = torch.zeros(batch, channels, *(32,) * ndim)
    image[(slice(None), slice(None), *[slice(8, 12)] * ndim)] = 1.0
    image[(slice(1, None), slice(1, None), *[slice(24, 26)] * ndim)] = -2.0
    return image


def model_of(kind: str, ndim: int, tokens: AdaptiveTokens | UniformTokens):
    shape = 32
    encoder = EncoderConfig(width=24, depth=4, heads=2, patch=4, tokens=tokens, positions="rope")
    if kind == "vit":
        return ViT(ViTConfig(width=24, depth=2, heads=2, patch=4, tokens=tokens, classes=3, channels=2, ndim=ndim))
    if kind == "vit-attention":
        c = ViTConfig(width=24, depth=2, heads=2, patch=4, tokens=tokens, classes=3, channels=2, ndim=ndim)
        return ViT(replace(c, pool="attention", cls_token=True))
    if kind == "sap":
        return SAP(SAPConfig(encoder=encoder, channels=2, classes=3, ndim=ndim, shape=shape, features=8))
    return UNETR(UNETRConfig(encoder=encoder, channels=2, classes=3, ndim=ndim, shape=shape, features=4))


@pytest.mark.parametrize("kind", ["vit", "vit-attention", "sap", "unetr"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_padding_changes_nothing(kind: str, ndim: int) -> None:
    """Other values, places and sizes of padded tokens: the same outputs and gradients."""
    torch.manual_seed(0)
    model = model_of(kind, ndim, SPARSE if ndim == 2 else SPARSE3D)
    inputs, tokens = make_inputs(model.config, picture(ndim))
    valid = inputs["valid"]
    assert not valid.all()
    assert valid.any(1).all()
    other = dict(inputs)
    for name in ("x", "coordinates", "sizes"):
        garbage = torch.rand_like(inputs[name]) * 50
        other[name] = torch.where(valid.unsqueeze(-1), inputs[name], garbage)
    results = []
    for given in (inputs, other):
        model.zero_grad()
        output = model(**given)
        if kind == "sap":
            output = tokens.paint(output)
        output.square().sum().backward()
        results.append((output.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    for one, two in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(one, two, atol=1e-4 * (1 + float(one.abs().max())))


@pytest.mark.parametrize("kind", ["vit", "vit-attention", "sap", "unetr"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_full_trees_have_no_mask(kind: str, ndim: int) -> None:
    """Attention takes its kernels without a mask, and gives what it gives with one that hides nothing."""
    torch.manual_seed(0)
    model = model_of(kind, ndim, replace(SPARSE if ndim == 2 else SPARSE3D, fill=True))
    inputs, tokens = make_inputs(model.config, picture(ndim))
    assert inputs["valid"] is None
    assert tokens.tree.valid.all()
    assert torch.allclose(model(**inputs), model(**inputs | {"valid": tokens.tree.valid}), atol=1e-5)


@pytest.mark.parametrize("kind", ["self", "cross", "linear"])
@pytest.mark.parametrize("on", ["hidden", "all"])
def test_padding_is_not_scored(kind: str, on: str) -> None:
    if kind == "linear" and on == "hidden":
        pytest.skip("a linear decoder sees no context, so this pair is refused")
    torch.manual_seed(0)
    decoder = DecoderConfig(kind=kind, width=16, depth=1, heads=2)  # type: ignore[arg-type]
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=SPARSE)
    config = MAEConfig(encoder=encoder, decoder=decoder, mask=RandomMask(ratio=0.5), channels=2, shape=32)
    config.check()
    model = MAE(config)
    objective = ReconstructConfig(on=on).build(config, Statistics((0.0, 0.0), (1.0, 1.0)))  # type: ignore[arg-type]
    batch = Batch([0, 1], picture(), variables=("a", "b"))
    inputs, targets = objective.prepare(batch, Draws(0, [0, 1]))
    assert targets.valid is not None
    assert not targets.valid.all()
    sums = []
    for noise in (0.0, 30.0):
        given = dict(inputs)
        hide = ~inputs["valid"].unsqueeze(-1)
        given["x"] = inputs["x"] + noise * hide
        given["coordinates"] = inputs["coordinates"] + noise * hide
        given["query_sizes"] = inputs["query_sizes"] + noise * ~inputs["query_valid"].unsqueeze(-1)
        wrong = replace(targets, values=targets.values + noise * ~targets.valid.unsqueeze(-1))
        loss = objective.loss(model(**given), wrong)
        sums.append(loss)
        measured = objective.measure(model(**given), wrong)
        assert measured["voxels.0"] + measured["voxels.1"] <= loss.count
    assert torch.allclose(sums[0].sum, sums[1].sum, rtol=1e-5)
    assert sums[0].count == targets.valid.sum() * 16 * 2


def test_mask_hides_a_share_of_what_is_valid() -> None:
    noise = torch.rand(3, 40, generator=torch.manual_seed(0))
    valid = torch.arange(40) < torch.tensor([[40], [20], [3]])
    mask = make_mask(RandomMask(ratio=0.75), noise, (40,), valid)
    seen = valid.gather(1, mask.visible).sum(1)
    assert mask.visible.shape == (3, 10)
    assert seen.tolist() == [10, 5, 1]
    assert torch.equal(torch.cat(list(mask), 1).sort(1).values, torch.arange(40).expand(3, -1))


@pytest.mark.parametrize("tokens", [UniformTokens(), AdaptiveTokens(length=40, score=GradientScore())])
@pytest.mark.parametrize("separate", [False, True])
def test_paint_brings_values_back(tokens: AdaptiveTokens | UniformTokens, separate: bool) -> None:
    image = picture(channels=3)
    made = tokenize(image, tokens, (4, 4), separate=separate)
    assert made.values.shape == (
        (2, 3 * made.coordinates.shape[1] // 3, 16) if separate else (2, *made.values.shape[1:])
    )
    assert torch.equal(made.paint(made.values), image)
    merged = made.paint(made.values, merge=True)
    torch.testing.assert_close(merged, image.mean(dim=1, keepdim=True) if separate else image)
    assert made.values.shape[:2] == made.coordinates.shape[:2]


def test_a_tree_for_each_variable() -> None:
    image = picture(channels=2)
    c = replace(SPARSE, per_variable=True)
    made = tokenize(image, c, (4, 4), separate=True)
    assert made.tree is not None
    assert len(made.tree) == 4
    assert torch.equal(made.paint(made.values), image)
    shared = tokenize(image, SPARSE, (4, 4), separate=True)
    assert not torch.equal(made.coordinates, shared.coordinates)  # each follows its own channel
    alone = tokenize(image[:, 1:], SPARSE, (4, 4))
    assert torch.equal(made.coordinates[:, 40:], alone.coordinates)
    with pytest.raises(ValueError, match="aggregate: none"):
        EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=c)
    known = VariablesConfig(known=("a", "b"), aggregate="none")
    model = ViT(ViTConfig(width=24, depth=1, heads=2, patch=4, tokens=c, variables=known, classes=2))
    assert model(**model.inputs(image, ["b", "a"])).shape == (2, 2)


def test_a_shared_tree_keeps_channels_together() -> None:
    image = torch.rand(1, 3, 16, 16, generator=torch.manual_seed(0))
    made = tokenize(image, AdaptiveTokens(length=16, score=GradientScore(), min_leaf=4), (4, 4))
    for token in range(16):
        y, x = (made.coordinates[0, token] - 2).long().tolist()
        assert torch.equal(made.values[0, token].view(4, 4, 3).permute(2, 0, 1), image[0, :, y : y + 4, x : x + 4])


def test_physical_units() -> None:
    made = tokenize(picture(), AdaptiveTokens(length=40, score=GradientScore()), (4, 4))
    centres, sizes = made.physical((2.0, 0.5))
    assert torch.equal(centres, made.coordinates * torch.tensor([2.0, 0.5]))
    assert sizes.prod(-1).sum(1).tolist() == pytest.approx([32 * 32] * 2)
    uniform = tokenize(picture(), UniformTokens(), (4, 8))
    assert uniform.physical((2.0, 0.5))[1][0, 0].tolist() == [8.0, 4.0]


def test_random_settings_come_from_draws() -> None:
    image = (torch.rand(2, 1, 64, 64, generator=torch.manual_seed(0)) * 255).to(torch.uint8)
    c = AdaptiveTokens(length=40, score=CannyScore(random=True))
    first = tokenize(image, c, (4, 4), draws=Draws(0, [5, 6]))
    again = tokenize(image, c, (4, 4), draws=Draws(0, [5, 6]))
    other = tokenize(image, c, (4, 4), draws=Draws(0, [7, 8]))
    swapped = tokenize(image.flip(0), c, (4, 4), draws=Draws(0, [6, 5]))
    assert torch.equal(first.coordinates, again.coordinates)
    assert torch.equal(first.coordinates, swapped.coordinates.flip(0))
    assert not torch.equal(first.coordinates, other.coordinates)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"200.*3n"):
        AdaptiveTokens(length=200).check((64, 64), (4, 4))
    with pytest.raises(ValueError, match="7n"):
        AdaptiveTokens(length=196).check((64, 64, 64), (4, 4, 4))
    with pytest.raises(ValueError, match="cubes"):
        AdaptiveTokens(length=196).check((64, 64), (4, 8))
    with pytest.raises(ValueError, match="learned"):
        EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=SPARSE, positions="learned")
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=SPARSE)
    with pytest.raises(ValueError, match="random"):
        MAEConfig(encoder=encoder, mask=BlockMask(), channels=1, shape=32).check()
    with pytest.raises(ValueError, match="not a multiple"):
        ViT(ViTConfig(size="Ti/16", shape=100, channels=3))
    with pytest.raises(UserError, match="no_such"):
        tokenize(picture(), AdaptiveTokens(length=40, score=RegisteredScore(name="no_such")), (4, 4))
    model = ViT(ViTConfig(size="Ti/16", channels=3))
    with pytest.raises(ValueError, match="takes \\[batch, channels, y, x\\]"):
        model.inputs(torch.randn(3, 64, 64))


def test_adaptive_pictures_are_drawn_in_pixels(tmp_path) -> None:
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=SPARSE)
    decoder = DecoderConfig(width=16, depth=1, heads=2)
    config = MAEConfig(encoder=encoder, decoder=decoder, channels=2, shape=32)
    objective = ReconstructConfig().build(config, Statistics((0.0, 0.0), (1.0, 1.0)))
    batch = Batch([0, 1], picture(), variables=("a", "b"))
    inputs, targets = objective.prepare(batch, Draws(0, [0, 1]), evaluating=True)
    output = MAE(config)(**inputs).detach()
    objective.draw(tmp_path / "p.png", objective.rows(batch, output, targets), step=3, held_out=True)
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert isinstance(targets.tokens, Tokens)


@pytest.mark.parametrize("per_variable", [False, True])
def test_separate_variables_vote_for_classes(per_variable: bool) -> None:
    from vitrail.objectives.segment import SegmentConfig

    tokens = replace(SPARSE, per_variable=per_variable)
    known = VariablesConfig(known=("a", "b"), aggregate="none")
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=tokens, variables=known)
    config = SAPConfig(encoder=encoder, classes=3, shape=32, features=4)
    objective = SegmentConfig(names=("x", "y", "z")).build(config, Statistics((0.0, 0.0), (1.0, 1.0)))
    batch = Batch([0, 1], picture(), torch.zeros(2, 32, 32, dtype=torch.long), ("a", "b"))
    inputs, targets = objective.prepare(batch, Draws(0, [0, 1]))
    output = SAP(config)(**inputs)
    assert targets.tokens.paint(output, merge=True).shape == (2, 3, 32, 32)
    assert objective.loss(output, targets).sum.isfinite()
    objective.measure(output.detach(), targets)


def test_an_image_without_edges_can_be_scored() -> None:
    """One leaf, which is seen: nothing is hidden, and no number is made up."""
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, tokens=SPARSE)
    config = MAEConfig(encoder=encoder, decoder=DecoderConfig(width=16, depth=1, heads=2), channels=2, shape=32)
    objective = ReconstructConfig().build(config, Statistics((0.0, 0.0), (1.0, 1.0)))
    batch = Batch([0], torch.zeros(1, 2, 32, 32), variables=("a", "b"))
    inputs, targets = objective.prepare(batch, Draws(0, [0]), evaluating=True)
    output = MAE(config)(**inputs).detach()
    loss = objective.loss(output, targets)
    assert (float(loss.sum), float(loss.count)) == (0.0, 0.0)
    sums = {name: float(value) for name, value in objective.measure(output, targets).items()}
    assert all(value != value for value in objective.summarise(sums).values())


def test_what_no_tree_can_be() -> None:
    with pytest.raises(ValueError, match="min_leaf 3 must be a power of two"):
        AdaptiveTokens(length=40, min_leaf=3)
    with pytest.raises(ValueError, match="patch 6 must be a power of two"):
        AdaptiveTokens(length=40).check((32, 32), (6, 6))
    with pytest.raises(ValueError, match=r"length 400 is more than .* at most 64 leaves"):
        AdaptiveTokens(length=400).check((16, 16), (4, 4))
    c = MAEConfig(encoder=EncoderConfig(size="Ti/16"), decoder=DecoderConfig(kind="linear"), channels=1, shape=64)
    with pytest.raises(UserError, match=r"linear.*Set objective.on=all"):
        ReconstructConfig().build(c, Statistics((0.0,), (1.0,)))
    c = MAEConfig(encoder=EncoderConfig(size="Ti/1"), channels=1, shape=8)
    with pytest.raises(UserError, match="more than one value"):
        ReconstructConfig(target="patch").build(c, Statistics((0.0,), (1.0,)))
