"""Small parts of models and of what they are asked: pooling, tables, rotations, masks, heads, reconstructions."""

import pytest
import torch

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens, rope_table
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig, hidden_width
from vitrail.models.mae import DecoderConfig, MAEConfig, RandomMask, hide, split_tokens
from vitrail.models.model import make_inputs
from vitrail.models.sap import SAPConfig
from vitrail.models.vit import ViTConfig
from vitrail.objectives.reconstruct import ReconstructConfig

SMALL = {"width": 24, "depth": 2, "heads": 2, "patch": 4}


def test_the_mean_is_over_patches_alone() -> None:
    model = ViTConfig(**SMALL, channels=1, cls_token=True, registers=2).build()
    x = torch.randn(3, 3 + 5, 24)
    torch.testing.assert_close(model.pool_and_classify(x, {}), x[:, 3:].mean(dim=1))


def test_padding_is_no_part_of_the_mean() -> None:
    model = ViTConfig(**SMALL, channels=1, cls_token=True).build()
    x, valid = torch.randn(2, 1 + 5, 24), torch.tensor([[True, True, False, True, False], [True] * 5])
    expected = torch.stack([x[0, [1, 2, 4]].mean(dim=0), x[1, 1:].mean(dim=0)])
    torch.testing.assert_close(model.pool_and_classify(x, {"valid": valid}), expected)


def test_blocks_of_the_decoder_have_rows_of_their_own_in_the_drop_path_table() -> None:
    torch.manual_seed(0)
    encoder, decoder = EncoderConfig(**SMALL), DecoderConfig(width=24, depth=3, heads=2)
    c = MAEConfig(ndim=2, encoder=encoder, decoder=decoder, channels=1, shape=16)
    model = c.build()
    inputs, tokens = make_inputs(c, torch.randn(2, 1, 16, 16))
    inputs = hide(inputs, *split_tokens(c, torch.rand(2, tokens.number), tokens))
    seen: dict[str, torch.Tensor] = {}
    for name, blocks in (("encoder", model.encoder.blocks), ("decoder", model.decoder.blocks)):
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _, given, name=f"{name} {index}": seen.update({name: given[2]}))
    table = torch.arange(2 * 5 * 2).float().view(2, 5, 2)
    model(**inputs, drop_path=table)
    assert list(seen) == ["encoder 0", "encoder 1", "decoder 0", "decoder 1", "decoder 2"]
    for row, factors in enumerate(seen.values()):
        assert torch.equal(factors, table[:, row])


def test_reconstructions_lie_where_their_tokens_do() -> None:
    torch.manual_seed(0)
    c = MAEConfig(ndim=2, encoder=EncoderConfig(**SMALL), channels=1, shape=16)
    model, images, noise = c.build(), torch.randn(2, 1, 16, 16), torch.rand(2, 16)
    inputs, tokens = make_inputs(c, images)
    visible, hidden = split_tokens(c, noise, tokens)
    found, was_hidden = model.reconstruct(images, noise)
    predicted = model(**hide(inputs, visible, hidden))
    for sample in range(2):
        torch.testing.assert_close(found[sample, hidden[sample]], predicted[sample])
        assert sorted(was_hidden[sample].nonzero().flatten().tolist()) == sorted(hidden[sample].tolist())


def test_each_separate_variable_is_masked_by_itself() -> None:
    variables = VariablesConfig(known=("a", "b", "c"), aggregate="none")
    c = MAEConfig(ndim=2, encoder=EncoderConfig(**SMALL, variables=variables), mask=RandomMask(ratio=0.75), shape=16)
    _, tokens = make_inputs(c, torch.randn(2, 3, 16, 16), variables=["a", "b", "c"])
    noise = torch.rand(2, 48, generator=torch.Generator().manual_seed(0))
    visible, hidden = split_tokens(c, noise, tokens)
    assert torch.equal(torch.cat([visible, hidden], dim=1).sort(dim=1).values, torch.arange(48).expand(2, 48))
    for sample in range(2):
        for variable in range(3):
            mine = visible[sample][visible[sample] // 16 == variable] - 16 * variable
            least = noise[sample, 16 * variable : 16 * (variable + 1)].argsort()[:4]
            assert sorted(mine.tolist()) == sorted(least.tolist())


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_rotations_are_those_of_scaled_patches_and_tokens_before_them_are_not_turned(scale: float) -> None:
    encoder = ViTConfig(**SMALL, channels=1, cls_token=True, positions="rope", rope_scale=scale).build().encoder
    centres = torch.tensor([[[2.0, 2.0], [2.0, 6.0], [10.0, 6.0]]])  # in voxels: patches (0, 0), (0, 1) and (2, 1)
    found = encoder.rope(centres, prefix=1, head_width=12, turns=None)
    patches = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [2.0, 1.0]]])
    torch.testing.assert_close(found, rope_table(patches * scale, 12, encoder.config.theta))


def test_sizes_of_tokens_are_powers_of_two_of_a_patch() -> None:
    encoder = ViTConfig(**SMALL, channels=1, tokens=AdaptiveTokens(length=4, score=GradientScore())).build().encoder
    sizes, valid = torch.tensor([[[4.0, 4.0], [8.0, 8.0], [32.0, 32.0]]]), torch.tensor([[True, True, False]])
    assert encoder.log_sizes(sizes, None).tolist() == [[[0, 0], [1, 1], [3, 3]]]
    assert encoder.log_sizes(sizes, valid).tolist() == [[[0, 0], [1, 1], [0, 0]]]


def test_hidden_widths() -> None:
    assert hidden_width(24, "gelu", None, None) == 96
    assert hidden_width(24, "gelu", 2.7, None) == 64  # 64.8, rounded down as others do
    assert hidden_width(24, "swiglu", 2.0, None) == 48
    assert hidden_width(24, "swiglu", 2.0, 13) == 13


def test_the_head_of_sap_is_two_layers_with_a_gelu_between() -> None:
    torch.manual_seed(0)
    c = SAPConfig(ndim=2, encoder=EncoderConfig(**SMALL, cls_token=True), features=3, channels=1, classes=2, shape=16)
    model, x = c.build(), torch.randn(2, 1 + 16, 24)
    inner = model.expand(x[:, 1:]).view(2, 16, 16, 3)
    exact = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    torch.testing.assert_close(model.name_voxels(x, {}), model.head(exact).flatten(-2), rtol=1e-5, atol=1e-6)


def test_tokens_to_predict_are_chosen_by_draws_of_their_own() -> None:
    decoder = DecoderConfig(width=24, depth=1, heads=2, decode_ratio=0.5)
    c = MAEConfig(ndim=2, encoder=EncoderConfig(**SMALL), decoder=decoder, channels=1, shape=16)
    objective, draws = ReconstructConfig().build(c, Statistics((0.0,), (1.0,))), Draws(0, [5, 6])
    _, tokens = make_inputs(c, torch.randn(2, 1, 16, 16))
    visible, hidden = objective.split(tokens, draws, False)
    expected, all_hidden = split_tokens(c, draws.uniform("mask", 16), tokens)
    chosen = draws.uniform("decode", 12).argsort(dim=1)[:, :6]
    assert torch.equal(visible, expected)
    assert torch.equal(hidden.sort().values, all_hidden.gather(1, chosen).sort().values)


def test_the_variance_of_what_was_hidden_is_about_its_mean() -> None:
    c = MAEConfig(ndim=2, encoder=EncoderConfig(**SMALL), channels=1, shape=16)
    objective = ReconstructConfig().build(c, Statistics((0.0,), (1.0,)))
    batch = Batch([0, 1], 100 + torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    _, targets = objective.prepare(batch, Draws(0, batch.counters), evaluating=True)
    sums = objective.measure(targets.values + 1, targets)
    found = objective.summarise({name: float(value) for name, value in sums.items()})
    assert found["variance"] == pytest.approx(float(targets.values.double().var(correction=0)), rel=1e-4)
    assert found["mse_over_variance"] == pytest.approx(1 / found["variance"], rel=1e-4)
