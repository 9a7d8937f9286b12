"""DiffusionViT and the decoder of tokens: behaviour, FLOPs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.layers.backends import use_backend
from vitrail.layers.block import timestep_features
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViT, DiffusionViTConfig
from vitrail.models.model import make_inputs

ENCODER = EncoderConfig(width=24, depth=2, heads=2, patch=4)
DECODER = DiffusionDecoderConfig(width=16, depth=2, heads=2, mlp_ratio=2.0)
SMALL = DiffusionViTConfig(encoder=ENCODER, decoder=DECODER, channels=3, shape=(8, 12))
NAMED = VariablesConfig(known=("u", "v", "t"))
MAKES = {
    "plain": SMALL,
    "3-D": replace(SMALL, ndim=3, channels=1, shape=(8, 4, 12), encoder=replace(ENCODER, positions="rope")),
    "linear": replace(SMALL, decoder=DiffusionDecoderConfig(kind="linear")),
    "prefix": replace(SMALL, encoder=replace(ENCODER, cls_token=True, registers=2, positions="learned", mlp="swiglu")),
    "condition": replace(SMALL, condition_channels=2),
    "variables": replace(SMALL, encoder=replace(ENCODER, variables=NAMED)),
    "separate": replace(SMALL, encoder=replace(ENCODER, variables=replace(NAMED, aggregate="none"))),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take far longer than these small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(config: DiffusionViTConfig) -> DiffusionViT:
    """As the trainer does it: on the meta device first, initialised afterwards."""
    with torch.device("meta"):
        model = config.build()
    rules = init_rules(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever initialisation forgets will show
    initialise(model, rules, 0)
    return model


def images_for(config: DiffusionViTConfig, batch: int = 2) -> Tensor:
    assert isinstance(config.shape, tuple)
    assert config.channels_in is not None
    return torch.randn(batch, config.channels_in, *config.shape, generator=torch.Generator().manual_seed(0))


def sample(config: DiffusionViTConfig, batch: int = 2) -> dict:
    inputs, _ = make_inputs(config, images_for(config, batch))
    return inputs | {"times": torch.arange(batch) * 400 + 3}


def test_the_readme_example() -> None:
    """Two hundred and fifty-six tokens of 768 values, painted as an image of three channels."""
    small = DiffusionDecoderConfig(width=32, depth=1, heads=4)
    config = DiffusionViTConfig(encoder=EncoderConfig(size="Ti/16", depth=1), decoder=small, channels=3, shape=256)
    inputs, tokens = make_inputs(config, torch.randn(1, 3, 256, 256))
    out = config.build()(**inputs, times=torch.tensor([10]))
    assert out.shape == (1, 256, 768)
    assert tokens.paint(out).shape == (1, 3, 256, 256)


@pytest.mark.parametrize("name", MAKES)
def test_every_make_runs(name: str) -> None:
    config = MAKES[name]
    model, inputs = make(config), sample(config)
    out = model(**inputs)
    voxels = 4**config.ndim
    assert out.shape == (2, inputs["x"].shape[1], voxels if name == "separate" else voxels * (config.channels or 0))
    out.square().mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    one = {key: value if key == "variables" else value[1:] for key, value in inputs.items()}
    assert torch.allclose(model(**one), out[1:], atol=1e-5)
    assert not list(model.buffers())


def test_the_time_is_added_to_every_token_once() -> None:
    model, inputs = make(MAKES["prefix"]), sample(MAKES["prefix"])
    side = model.derive(dict(inputs))
    added = model.begin(inputs["x"], side) - model.encoder.embed(inputs["x"], side)
    waves = timestep_features(inputs["times"], 24, order="interleaved")
    expected = model.time_embed.fc2(F.relu(model.time_embed.fc1(waves)))
    assert added.shape[1] == 3 + 6
    assert torch.allclose(added, expected[:, None].expand_as(added), atol=1e-5)
    moved = model(**(inputs | {"times": inputs["times"] + 1}))
    assert not torch.allclose(moved, model(**inputs), atol=1e-4)
    assert torch.equal(model(**(inputs | {"times": inputs["times"].float()})), model(**inputs))
    flow = make(replace(MAKES["prefix"], time_scale=1000.0))
    assert torch.allclose(flow(**(inputs | {"times": inputs["times"] / 1000})), model(**inputs), atol=1e-3)


def test_bad_times_are_named() -> None:
    model, inputs = make(SMALL), sample(SMALL)
    with pytest.raises(ValueError, match="times are missing"):
        model(x=inputs["x"], coordinates=inputs["coordinates"])
    with pytest.raises(ValueError, match="time 1001 is out of range: times are 0 to 1000"):
        model(**(inputs | {"times": torch.tensor([0, 1001])}))
    with pytest.raises(ValueError, match=r"time 1.5 is out of range: times are 0 to 1\b"):
        make(replace(SMALL, time_scale=1000.0))(**(inputs | {"times": torch.tensor([0.5, 1.5])}))
    with pytest.raises(ValueError, match=r"give shape \[2\]"):
        model(**(inputs | {"times": torch.tensor([1])}))


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="time_steps 0"):
        replace(SMALL, time_steps=0)
    with pytest.raises(ValueError, match="use kind: uniform"):
        replace(SMALL, encoder=replace(ENCODER, tokens=AdaptiveTokens(length=4)))
    with pytest.raises(ValueError, match="condition_channels are unnamed"):
        replace(MAKES["variables"], condition_channels=1)
    with pytest.raises(ValueError, match="use kind: linear"):
        replace(DECODER, depth=0)
    with pytest.raises(ValueError, match="multiple of heads"):
        replace(DECODER, heads=3)
    with pytest.raises(ValueError, match="head width 4 has no room for rope positions on 3 axes"):
        replace(MAKES["3-D"], decoder=replace(DECODER, heads=4)).check()
    with pytest.raises(ValueError, match="channels is not known"):
        DiffusionViTConfig(encoder=ENCODER).build()
    assert DiffusionViTConfig(encoder=replace(ENCODER, variables=NAMED)).channels == 3


@pytest.mark.parametrize("name", ["plain", "3-D", "prefix"])
def test_the_order_of_tokens_means_nothing_but_their_place_does(name: str) -> None:
    model, inputs = make(MAKES[name]), sample(MAKES[name])
    base = model(**inputs)
    shuffle = torch.randperm(base.shape[1], generator=torch.Generator().manual_seed(0))
    x = inputs["x"][:, shuffle]
    moved = model(**(inputs | {"x": x, "coordinates": inputs["coordinates"][:, shuffle]}))
    assert torch.allclose(moved, base[:, shuffle], atol=1e-5)
    assert not torch.allclose(model(**(inputs | {"x": x})), base[:, shuffle], atol=1e-3)


@pytest.mark.parametrize("name", ["plain", "prefix"])
def test_padding_is_not_attended_to(name: str) -> None:
    model, inputs = make(MAKES[name]), sample(MAKES[name])
    valid = (torch.arange(6) < 4).expand(2, -1)
    few = inputs | {"x": inputs["x"][:, :4], "coordinates": inputs["coordinates"][:, :4]}
    assert torch.allclose(model(**inputs, valid=valid)[:, :4], model(**few), atol=1e-5)


def test_a_batch_may_carry_some_of_the_variables() -> None:
    for name in ("variables", "separate"):
        config = MAKES[name]
        model, images = make(config), images_for(config)
        inputs, tokens = make_inputs(config, images[:, :2], variables=["t", "u"])
        out = model(**inputs, times=torch.tensor([1, 2]))
        assert tokens.paint(out).shape == (2, 2, 8, 12)
        swapped, again = make_inputs(config, images[:, :2].flip(1), variables=["u", "t"])
        other = again.paint(model(**swapped, times=torch.tensor([1, 2])))
        assert torch.allclose(other.flip(1), tokens.paint(out), atol=1e-5)


def test_drop_path_has_a_spread_in_either_half() -> None:
    encoder, decoder = replace(ENCODER, drop_path=0.2), replace(DECODER, depth=3, drop_path=0.5)
    config = replace(SMALL, encoder=encoder, decoder=decoder)
    model, inputs = make(config), sample(config)
    assert model.drop_path_rates() == [0.0, 0.2, 0.0, 0.25, 0.5]
    assert torch.equal(model(**inputs, drop_path=torch.ones(2, 5, 2)), model(**inputs))
    for block in range(5):
        table = torch.ones(2, 5, 2)
        table[:, block] = 0
        assert not torch.allclose(model(**inputs, drop_path=table), model(**inputs), atol=1e-4)


@pytest.mark.parametrize("name", MAKES)
def test_stages_say_what_they_need(name: str) -> None:
    model, inputs = make(MAKES[name]), sample(MAKES[name])
    table = torch.ones(2, len(model.blocks()), 2)
    side = {key: value for key, value in inputs.items() if key != "x"} | {"drop_path": table}
    x = inputs["x"]
    for stage in model.stages():
        x = stage.run(x, model.derive({key: side[key] for key in {"coordinates", *stage.needs} if key in side}))
    assert torch.equal(x, model(**inputs))


def test_names_and_what_decay_spares() -> None:
    shapes = {name: tuple(p.shape) for name, p in make(MAKES["prefix"]).named_parameters()}
    assert shapes["time_embed.fc1.weight"] == shapes["time_embed.fc2.weight"] == (24, 24)
    assert shapes["decoder.embed.weight"] == (16, 24)
    assert shapes["decoder.blocks.1.mlp.fc1.weight"] == (32, 16)
    assert shapes["decoder.head.weight"] == (48, 16)
    spared = tuple(make(SMALL).spared_from_decay())
    assert {name for name in shapes if name.endswith(spared)} >= {
        "encoder.prefix_tokens",
        "encoder.pos_embed.table",
        "decoder.pos_embed.table",
    }


@pytest.mark.parametrize("kind", ["transformer", "linear"])
def test_a_model_overfits_one_batch(kind: str) -> None:
    decoder = DiffusionDecoderConfig(kind=kind, width=32, depth=1, heads=2)  # type: ignore[arg-type]
    config = replace(SMALL, encoder=replace(ENCODER, width=48, depth=1), decoder=decoder, channels=1)
    model, inputs = make(config), sample(config)
    noise = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1))
    inputs["x"] = 0.6 * inputs["x"] + 0.8 * noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(**inputs), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("name", MAKES)
def test_flops_equal_what_pytorch_counts(name: str) -> None:
    config = MAKES[name]
    model, inputs = make(config), sample(config, batch=1)
    with use_backend("math"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert counter.get_total_flops() == pytest.approx(model.flops().forward, rel=1e-6)
