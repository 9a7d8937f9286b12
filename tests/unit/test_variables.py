"""Channels as variables: tokenizers by name, aggregation, heads, parts of the known ones."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.attention import CrossAttention
from vitrail.layers.variables import Aggregate, VariableEmbed, VariableHead, VariablesConfig
from vitrail.models import MAE, DecoderConfig, EncoderConfig, MAEConfig, ViT, ViTConfig
from vitrail.models.mae import RandomMask
from vitrail.objectives.reconstruct import ReconstructConfig

KNOWN = tuple(f"v{i}" for i in range(7))
ERA = Path(__file__).parents[2].parent / "shared" / "data" / "era_interim" / "eraint_uvz.nc"


def encoder(aggregate: str = "query", known: tuple[str, ...] = KNOWN, **more: object) -> EncoderConfig:
    variables = VariablesConfig(known=known, aggregate=aggregate, group=3)  # type: ignore[arg-type]
    return EncoderConfig(width=24, depth=2, heads=2, patch=4, variables=variables, **more)  # type: ignore[arg-type]


def classifier(aggregate: str) -> ViT:
    c = encoder(aggregate)
    return ViT(ViTConfig(width=24, depth=2, heads=2, patch=4, variables=c.variables, classes=3, shape=(8, 12)))


def test_aggregation_is_cross_attention() -> None:
    torch.manual_seed(0)
    made = Aggregate(24, heads=4)
    plain = CrossAttention(width=24, heads=4, qk_norm=False, bias=True, eps=1e-6)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(std=0.3)
        for p in (plain.q.bias, plain.kv.bias):
            p.zero_()
        plain.q.weight.copy_(made.q.weight)
        plain.kv.weight.copy_(made.kv.weight)
        plain.proj.load_state_dict(made.proj.state_dict())
    x = torch.randn(2, 5, 7, 24, requires_grad=True)
    expected = plain(made.query.expand(10, 1, 24), x.flatten(0, 1)).reshape(2, 5, 24)
    got = made(x)
    assert torch.allclose(got, expected, atol=1e-5)
    (ours,) = torch.autograd.grad(got.square().sum(), x)
    (theirs,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_fresh_query_takes_the_mean() -> None:
    made = classifier("query").encoder.patch_embed
    assert isinstance(made, VariableEmbed)
    assert made.aggregate is not None
    x = torch.randn(1, 2, 5, 24)
    value = made.aggregate.kv.weight.unflatten(0, (2, 2, 12))[:, 1].flatten(0, 1)
    assert torch.allclose(made.aggregate(x), made.aggregate.proj(x.mean(2) @ value.T), atol=1e-6)


@pytest.mark.parametrize("aggregate", ["query", "groups"])
def test_names_count_and_not_places(aggregate: str) -> None:
    model = classifier(aggregate)
    images = torch.randn(2, 3, 8, 12)
    one = model(**model.inputs(images, ["v5", "v0", "v3"]))
    other = model(**model.inputs(images[:, [2, 0, 1]], ["v3", "v5", "v0"]))
    renamed = model(**model.inputs(images, ["v0", "v5", "v3"]))
    assert torch.allclose(one, other, atol=1e-5)
    assert not torch.allclose(one, renamed, atol=1e-3)


@pytest.mark.parametrize("aggregate", ["query", "groups", "none"])
@pytest.mark.parametrize("names", [["v2"], ["v6", "v1"], list(KNOWN)])
def test_any_part_of_the_known_variables(aggregate: str, names: list[str]) -> None:
    model = classifier(aggregate)
    inputs = model.inputs(torch.randn(1, len(names), 8, 12), names)
    assert inputs["x"].shape[1] == 6 * (len(names) if aggregate == "none" else 1)
    assert model(**inputs).shape == (1, 3)


def test_only_the_parts_of_a_batch_get_gradients() -> None:
    model = classifier("groups")
    model(**model.inputs(torch.randn(2, 2, 8, 12), ["v6", "v1"])).square().sum().backward()
    embed = model.encoder.patch_embed
    assert isinstance(embed, VariableEmbed)
    assert embed.weight.grad is not None
    used = embed.weight.grad.abs().sum((1, 2)) > 0
    assert used.tolist() == [name in ("v6", "v1") for name in KNOWN]


def test_hundreds_of_channels_in_groups() -> None:
    known = tuple(f"band{i}" for i in range(300))
    c = VariablesConfig(known=known, aggregate="groups", group=16)
    model = ViT(ViTConfig(width=24, depth=1, heads=2, patch=4, variables=c, classes=2, shape=8))
    assert model(**model.inputs(torch.randn(1, 300, 8, 8))).shape == (1, 2)
    assert model.encoder.patch_embed.group_aggregate.query.shape == (math.ceil(300 / 16), 24)  # type: ignore[union-attr]


@pytest.mark.parametrize("separate", [False, True])
def test_head_rows_follow_the_names(separate: bool) -> None:
    torch.manual_seed(0)
    head = VariableHead(8, 4, 3, bias=True, separate=separate)
    torch.nn.init.normal_(head.bias)
    tokens = torch.randn(2, 5, 8)
    whole = torch.nn.functional.linear(tokens, head.weight, head.bias).unflatten(-1, (4, 3))  # B N P V
    if separate:
        got = head(torch.cat([tokens, tokens], dim=1), (2, 0))
        assert torch.allclose(got, torch.cat([whole[..., 2], whole[..., 0]], dim=1), atol=1e-6)
    else:
        assert torch.allclose(head(tokens, (2, 0)), whole[..., [2, 0]].flatten(-2), atol=1e-6)


@pytest.mark.parametrize("aggregate", ["query", "groups", "none"])
@pytest.mark.parametrize("kind", ["self", "cross", "linear"])
@pytest.mark.parametrize("on", ["hidden", "all"])
def test_mae_predicts_the_variables_of_the_batch(aggregate: str, kind: str, on: str) -> None:
    if kind == "linear" and on == "hidden":
        pytest.skip("a linear decoder sees no context, so this pair is refused")
    decoder = DecoderConfig(kind=kind, width=16, depth=1, heads=2, decode_ratio=0.5)  # type: ignore[arg-type]
    config = MAEConfig(encoder=encoder(aggregate), decoder=decoder, mask=RandomMask(ratio=0.5), shape=(8, 16))
    config.check()
    model = MAE(config)
    objective = ReconstructConfig(on=on).build(config, Statistics((1.0, 2.0), (1.0, 3.0)))  # type: ignore[arg-type]
    batch = Batch([3, 4], torch.randn(2, 2, 8, 16), variables=("v4", "v1"))
    inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
    output = model(**inputs)
    assert output.shape == targets.values.shape
    # What each target is: the value of its own variable, normalised by that variable's statistics.
    mean, std = objective.scales(targets.tokens, targets.index, targets.statistics)  # type: ignore[attr-defined]
    painted = targets.values * std + mean
    tokens = targets.tokens.values.gather(1, targets.index[..., None].expand_as(painted))
    assert torch.allclose(painted, tokens, atol=1e-5)
    objective.loss(output, targets).sum.backward()


def test_separate_variables_are_masked_alike_in_number() -> None:
    config = MAEConfig(encoder=encoder("none"), mask=RandomMask(ratio=0.75), shape=16)
    objective = ReconstructConfig().build(config, Statistics((0.0,) * 3, (1.0,) * 3))
    batch = Batch([0], torch.randn(1, 3, 16, 16), variables=("v0", "v3", "v6"))
    inputs, _ = objective.prepare(batch, Draws(0, [0]))
    assert inputs["x"].shape == (1, 3 * 4, 16)
    assert inputs["queries"].shape == (1, 3 * 12, 2)


def test_unknown_variables_are_named_with_the_known() -> None:
    model = classifier("query")
    with pytest.raises(ValueError, match=r"\['q'\] are not known to the model; it knows \['v0', .*'v6'\]"):
        model.inputs(torch.randn(1, 2, 8, 12), ["v0", "q"])
    with pytest.raises(ValueError, match="3 channels, but 2 variables"):
        model.inputs(torch.randn(1, 3, 8, 12), ["v0", "v1"])
    with pytest.raises(ValueError, match="say which"):
        model.inputs(torch.randn(1, 3, 8, 12))
    with pytest.raises(ValueError, match="more than once"):
        model.inputs(torch.randn(1, 2, 8, 12), ["v0", "v0"])
    with pytest.raises(ValueError, match="more than once"):
        VariablesConfig(known=("a", "b", "a"))
    with pytest.raises(ValueError, match="at least one"):
        VariablesConfig(known=())
    plain = ViT(ViTConfig(width=24, depth=1, heads=2, patch=4, channels=3))
    with pytest.raises(ValueError, match="2 channels, the model 3"):
        plain.inputs(torch.randn(1, 2, 8, 12))


@pytest.mark.skipif(not ERA.is_file(), reason="the ERA-Interim fields are not here")
def test_era_interim_fields() -> None:
    """Winds and geopotential, told apart by name: learns to tell months apart from any two of three."""
    netcdf = pytest.importorskip("scipy.io", reason="scipy reads the classic netCDF")
    with netcdf.netcdf_file(str(ERA), mmap=False) as file:
        fields = {
            name: np.array(file.variables[name][:], np.float32) * getattr(file.variables[name], "scale_factor", 1.0)
            for name in ("u", "v", "z")
        }
    stack = torch.from_numpy(np.stack([fields[name] for name in ("u", "v", "z")], axis=2).astype(np.float32))
    images = stack.flatten(0, 1)[:, :, :128, :128]  # [months x levels, 3, latitude, longitude]
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    images = torch.nn.functional.avg_pool2d(images, 4)[:6]
    known = VariablesConfig(known=("u", "v", "z", "t"))
    model = ViT(ViTConfig(width=32, depth=1, heads=2, patch=8, variables=known, classes=len(images), shape=32))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        names = [["u", "v", "z"], ["z", "u"], ["v"]][step % 3]
        chosen = images[:, ["uvz".index(name) for name in names]]
        loss = torch.nn.functional.cross_entropy(model(**model.inputs(chosen, names)), torch.arange(len(images)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    answer = model(**model.inputs(images[:, [2, 0]], ["z", "u"])).argmax(-1)
    assert (answer == torch.arange(len(images))).float().mean() > 0.8
