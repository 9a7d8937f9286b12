"""DiT and the layers of conditioning: golden sizes, behaviour, FLOPs."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.layers.attention import attend_reference
from vitrail.layers.backends import use_backend
from vitrail.layers.block import (
    BlockConfig,
    LabelEmbed,
    ModulatedBlock,
    check_class_ids,
    drop_labels,
    join_condition,
    modulate,
    split_condition,
    timestep_features,
)
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.tokens import grid_coordinates, patchify, unpatchify
from vitrail.models.dit import DiT, DiTConfig
from vitrail.models.model import make_inputs
from vitrail.parallel.recompute import recomputed

SMALL = DiTConfig(width=24, depth=2, heads=2, patch=2, channels=3, classes=5, shape=(8, 12))
DITAN = DiTConfig(size="0.5B/2", width=24, depth=2, heads=2, hidden=40, channels=3, classes=5, shape=(8, 12))
MAKES = {
    "dit": SMALL,
    "ditan": DITAN,
    "3-D": replace(SMALL, ndim=3, shape=(4, 6, 8), channels=1, positions="rope", learn_sigma=True),
    "grouped": replace(SMALL, kv_heads=1, affine=True, init="depth_scaled"),
    "learned": replace(SMALL, positions="learned", final="plain", classes=None),
    "rms": replace(SMALL, norm="rms", mlp="swiglu", hidden=32, qk_norm=True, condition_channels=2),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take far longer than these small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(config: DiTConfig, *, awake: bool = False) -> DiT:
    """As the trainer does it; `awake` moves every parameter away from its start, at which the output is 0."""
    with torch.device("meta"):
        model = config.build()
    rules = init_rules(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever initialisation forgets will show
    initialise(model, rules, 0)
    if awake:
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def sample(config: DiTConfig, batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    size = (config.shape,) * config.ndim if isinstance(config.shape, int) else config.shape
    patch = (config.patch,) * config.ndim
    assert size is not None
    assert config.channels_in is not None
    images = torch.randn(batch, config.channels_in, *size, generator=generator)
    inputs = {
        "x": patchify(images, patch),  # type: ignore[arg-type]
        "coordinates": grid_coordinates(size, patch).expand(batch, -1, -1),  # type: ignore[arg-type]
        "times": torch.linspace(0, 900, batch),
    }
    return inputs if config.classes is None else inputs | {"labels": torch.arange(batch) % config.classes}


def count(config: DiTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.build().parameters())


# ---------------------------------------------------------------- golden sizes


def test_dit_xl_2() -> None:
    config = DiTConfig(size="XL/2", channels=4, classes=1000, learn_sigma=True, shape=32)
    assert count(config) == 674_834_720
    with torch.device("meta"):
        flops = config.build().flops()
    blocks = 28 * (2 * 256 * 12 * 1152**2 + 4 * 1152 * 256**2)
    assert blocks / 1e9 == pytest.approx(236.8, abs=0.05)
    # With modulations, embeddings and the last layer: 118.6 G multiply-adds, the paper's "Gflops".
    assert flops.forward / 2e9 == pytest.approx(118.6, abs=0.05)
    assert flops.linear + flops.attention - blocks == 28 * 2 * 6 * 1152**2


@pytest.mark.parametrize(("size", "millions"), [("0.5B", 461.9), ("1B", 1363.8), ("7B", 7128.5)])
def test_ditan_parameters(size: str, millions: float) -> None:
    assert round(count(DiTConfig(size=size, patch=2, channels=16, classes=1000)) / 1e6, 1) == millions


@pytest.mark.parametrize(("width", "depth", "heads", "millions"), [(256, 8, 16, 10.4), (384, 12, 8, 32.6)])
def test_smaller_ditan_parameters(width: int, depth: int, heads: int, millions: float) -> None:
    config = DiTConfig(size="0.5B/2", width=width, depth=depth, heads=heads, channels=16, classes=1000)
    assert round(count(config) / 1e6, 1) == millions


def test_named_sizes_and_overrides() -> None:
    xl = DiTConfig(size="XL/2")
    assert (xl.width, xl.depth, xl.heads, xl.patch) == (1152, 28, 16, 2)
    assert (xl.mlp, xl.norm, xl.eps, xl.bias, xl.positions, xl.final) == (
        "gelu",
        "layer",
        1e-6,
        True,
        "sincos",
        "modulated",
    )
    big = DiTConfig(size="7B/2")
    assert (big.mlp, big.norm, big.eps, big.bias, big.positions, big.theta) == (
        "swiglu",
        "rms",
        1e-5,
        False,
        "rope",
        1e4,
    )
    assert big.encoder.block().hidden == 6912
    changed = DiTConfig(size="7B/2", bias=True, depth=3, patch=4, positions="sincos")
    assert (changed.bias, changed.depth, changed.patch, changed.positions, changed.norm) == (
        True,
        3,
        4,
        "sincos",
        "rms",
    )
    assert replace(big, channels=4) == DiTConfig(size="7B/2", channels=4)
    assert {s: DiTConfig(size=s, patch=2).heads for s in ("S", "B", "L")} == {"S": 6, "B": 12, "L": 16}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": "H/2"}, "size 'H/2' is unknown; use one of S, B, L, XL, 0.5B, 1B, 7B"),
        ({"size": "XL/two"}, "'XL/two' is unknown"),
        ({"size": "XL"}, "patch is missing"),
        ({"width": 8, "patch": 2}, "depth is missing"),
        ({"size": "S/2", "heads": 7}, "multiple of heads 7"),
        ({"size": "S/2", "classes": 0}, "classes 0 must be at least 1"),
        ({"size": "S/2", "label_dropout": 1.5}, "label_dropout 1.5"),
        ({"size": "S/2", "time_scale": 0.0}, "time_scale 0.0 must be above 0"),
        ({"size": "S/2", "time_features": 1}, "time_features 1"),
        ({"size": "S/2", "condition_channels": -1}, "condition_channels -1"),
        ({"size": "S/2", "drop_path": 1.0}, "drop_path 1.0"),
    ],
)
def test_bad_settings_are_named(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiTConfig(**keys)


def test_a_recipe_fills_it() -> None:
    reader = TypeAdapter(DiTConfig)
    read = reader.validate_python({"kind": "dit", "size": "0.5B/2", "patch": [2, 4], "classes": 10})
    assert (read.patch, read.norm, read.classes) == ((2, 4), "rms", 10)
    assert reader.validate_python(reader.dump_python(read, mode="json")) == read
    for unknown in ("cls_token", "pool", "layer_scale"):
        with pytest.raises(ValidationError, match=unknown):
            reader.validate_python({"size": "XL/2", unknown: 1})


def test_what_the_data_decide_is_checked() -> None:
    with pytest.raises(ValueError, match="channels is not known"):
        DiTConfig(size="S/2").build()
    with pytest.raises(ValueError, match="not a multiple of patch"):
        replace(SMALL, shape=(8, 11)).check()
    with pytest.raises(ValueError, match="head width 4 has no room for rope positions on 3 axes"):
        replace(SMALL, width=8, ndim=3, shape=8, positions="rope").check()
    with pytest.raises(ValueError, match="learned positions need the size"):
        replace(SMALL, positions="learned", shape=None).build()


# ---------------------------------------------------------------- layers


def test_timestep_features() -> None:
    t = torch.tensor([0.0, 0.25, 999.0])
    waves = timestep_features(t, 6, max_period=100.0)
    frequencies = [1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)]
    for row, time in zip(waves, t.tolist(), strict=True):
        expected = [math.cos(time * f) for f in frequencies] + [math.sin(time * f) for f in frequencies]
        assert row.tolist() == pytest.approx(expected, abs=1e-4)
    woven = timestep_features(t, 6, max_period=100.0, order="interleaved")
    assert torch.equal(woven[:, 0::2], waves[:, 3:])
    assert torch.equal(woven[:, 1::2], waves[:, :3])
    assert timestep_features(t, 7).shape == (3, 7)
    assert (timestep_features(t, 7)[:, -1] == 0).all()
    assert torch.equal(timestep_features(torch.tensor([7]), 8), timestep_features(torch.tensor([7.0]), 8))
    assert timestep_features(t.double(), 8).dtype == torch.float32
    assert timestep_features(torch.zeros(2, 3), 8).shape == (2, 3, 8)


def test_labels_are_dropped_by_their_noise() -> None:
    labels, noise = torch.tensor([3, 1, 2, 0]), torch.tensor([0.05, 0.1, 0.5, 0.99])
    assert drop_labels(labels, noise, 0.1, 10).tolist() == [10, 1, 2, 0]
    assert torch.equal(drop_labels(labels, noise, 0.0, 10), labels)
    assert drop_labels(labels, noise, 1.0, 10).tolist() == [10] * 4
    assert drop_labels(labels, noise, 0.1, 10).dtype == torch.int64


def test_labels_out_of_range_are_named() -> None:
    check_class_ids(torch.tensor([0, 9, 10]), 10)
    for wrong in (-1, 11):
        with pytest.raises(ValueError, match=f"label {wrong} is out of range: model.classes is 10, .* 0 to 9"):
            check_class_ids(torch.tensor([0, wrong]), 10)
    with pytest.raises(ValueError, match="whole numbers"):
        check_class_ids(torch.tensor([0.5]), 10)
    with pytest.raises(ValueError, match="label 12"):
        LabelEmbed(10, 4)(torch.tensor([12]), 1)
    with pytest.raises(ValueError, match="2 samples"):
        LabelEmbed(10, 4)(torch.tensor([1]), 2)


def test_modulation_at_zero_changes_nothing() -> None:
    x, zero = torch.randn(2, 3, 4), torch.zeros(2, 4)
    assert torch.equal(modulate(x, zero, zero), x)
    assert torch.equal(modulate(x, zero + 1, zero + 2), 3 * x + 1)
    condition, tokens = split_condition(join_condition(zero, x))
    assert torch.equal(condition, zero)
    assert torch.equal(tokens, x)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["layer", "rms", "affine"])
def test_block_in_plain_steps(mlp: str, norm: str) -> None:
    c = BlockConfig(
        width=8,
        heads=2,
        kv_heads=2,
        hidden=12,
        mlp=mlp,
        norm="rms" if norm == "rms" else "layer",
        eps=1e-6,
        bias=True,
        qk_norm=False,
        layer_scale=None,
    )
    block = ModulatedBlock(c, affine=True if norm == "affine" else None)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    condition, tokens = torch.randn(3, 8), torch.randn(3, 5, 8)

    def norm_of(x: Tensor, layer: torch.nn.Module) -> Tensor:
        if norm == "rms":
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        return x * layer.weight + layer.bias if norm == "affine" else x

    def attention(x: Tensor) -> Tensor:
        q, k, v = block.attn.qkv(x).unflatten(-1, (2, 3, 4)).unbind(-2)  # rows are head-major
        return block.attn.proj(attend_reference(q, k, v).flatten(2))

    def feed_forward(x: Tensor) -> Tensor:
        up = block.mlp.fc1(x)
        if mlp == "swiglu":
            return block.mlp.fc2(F.silu(block.mlp.gate(x)) * up)
        return block.mlp.fc2(0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))

    b1, s1, g1, b2, s2, g2 = (
        part[:, None]
        for part in (F.silu(condition) @ block.modulation.weight.T + block.modulation.bias).split(8, dim=1)
    )
    x = tokens + g1 * attention(norm_of(tokens, block.norm1) * (1 + s1) + b1)
    x = x + g2 * feed_forward(norm_of(x, block.norm2) * (1 + s2) + b2)
    out_condition, out = split_condition(block(join_condition(condition, tokens)))
    assert torch.equal(out_condition, condition)
    assert torch.allclose(out, x, atol=1e-4)


# ---------------------------------------------------------------- behaviour


@pytest.mark.parametrize("name", MAKES)
def test_every_make_runs_and_a_fresh_one_answers_zero(name: str) -> None:
    config = MAKES[name]
    inputs = sample(config)
    voxels = 2**config.ndim
    fresh, awake = make(config)(**inputs), make(config, awake=True)
    assert fresh.shape == (2, inputs["x"].shape[1], voxels * (config.channels_out or 0))
    assert torch.equal(fresh, torch.zeros_like(fresh))
    output = awake(**inputs)
    output.square().mean().backward()
    assert [n for n, p in awake.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    one = {key: value[1:] for key, value in inputs.items()}
    assert torch.allclose(awake(**one), output[1:], atol=1e-5)
    assert not list(awake.buffers())


def test_made_in_python_it_is_ready_and_painted() -> None:
    config = replace(SMALL, learn_sigma=True)
    model = config.build()
    images = torch.randn(1, 3, 8, 12)
    inputs, tokens = make_inputs(config, images)
    out = model(**inputs, times=torch.tensor([3]), labels=torch.tensor([4]))
    assert tokens.paint(out).shape == (1, 6, 8, 12)
    # Channels are last in a token, so noise comes before variance.
    assert torch.equal(tokens.paint(patchify(torch.cat([images, -images], dim=1), (2, 2)))[:, :3], images)


def test_times_and_labels_change_the_answer() -> None:
    model = make(SMALL, awake=True)
    inputs = sample(SMALL)
    base = model(**inputs)
    assert not torch.allclose(model(**(inputs | {"times": inputs["times"] + 1})), base, atol=1e-3)
    other = model(**(inputs | {"labels": torch.tensor([0, 4])}))
    assert torch.equal(other[0], base[0])
    assert not torch.allclose(other[1], base[1], atol=1e-3)
    unconditional = model(**{key: value for key, value in inputs.items() if key != "labels"})
    assert torch.equal(unconditional, model(**(inputs | {"labels": torch.tensor([5, 5])})))
    assert torch.equal(unconditional, model(**(inputs | {"labels": None})))
    assert not torch.allclose(unconditional, base, atol=1e-3)


def test_time_scale_multiplies_times() -> None:
    inputs = sample(SMALL)
    flow = make(replace(SMALL, time_scale=1000.0), awake=True)(**(inputs | {"times": inputs["times"] / 1000}))
    assert torch.allclose(flow, make(SMALL, awake=True)(**inputs), atol=1e-3)
    steps = inputs | {"times": torch.tensor([3, 700])}
    assert torch.equal(
        make(SMALL, awake=True)(**steps), make(SMALL, awake=True)(**(steps | {"times": torch.tensor([3.0, 700.0])}))
    )


def test_bad_conditions_are_named() -> None:
    model, inputs = make(SMALL), sample(SMALL)
    with pytest.raises(ValueError, match="label 6 is out of range"):
        model(**(inputs | {"labels": torch.tensor([0, 6])}))
    with pytest.raises(ValueError, match="times are missing"):
        model(x=inputs["x"], coordinates=inputs["coordinates"])
    with pytest.raises(ValueError, match=r"times have shape \[\].* give shape \[2\]"):
        model(**(inputs | {"times": torch.tensor(3.0)}))
    with pytest.raises(ValueError, match="the model knows no classes"):
        make(replace(SMALL, classes=None))(**inputs)


@pytest.mark.parametrize("name", ["dit", "ditan", "learned"])
def test_the_order_of_tokens_means_nothing_but_their_place_does(name: str) -> None:
    model, inputs = make(MAKES[name], awake=True), sample(MAKES[name])
    base = model(**inputs)
    shuffle = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    x = inputs["x"][:, shuffle]
    moved = model(**(inputs | {"x": x, "coordinates": inputs["coordinates"][:, shuffle]}))
    assert torch.allclose(moved, base[:, shuffle], atol=1e-4)
    assert not torch.allclose(model(**(inputs | {"x": x})), base[:, shuffle], atol=1e-2)


def test_padding_is_not_attended_to() -> None:
    model, inputs = make(DITAN, awake=True), sample(DITAN)
    valid = (torch.arange(24) < 20).expand(2, -1)
    masked = model(**inputs, valid=valid)[:, :20]
    few = inputs | {"x": inputs["x"][:, :20], "coordinates": inputs["coordinates"][:, :20]}
    assert torch.allclose(masked, model(**few), atol=1e-4)
    assert not torch.allclose(masked, model(**inputs)[:, :20], atol=1e-3)


def test_condition_channels_go_in_and_not_out() -> None:
    config = replace(SMALL, condition_channels=2)
    inputs = sample(config)
    model = make(config, awake=True)
    assert inputs["x"].shape[-1] == model.inputs(torch.randn(1, 5, 8, 12))["x"].shape[-1] == 4 * 5
    with pytest.raises(ValueError, match="3 channels"):
        model.inputs(torch.randn(1, 3, 8, 12))
    out = model(**inputs)
    assert out.shape[-1] == 4 * 3
    images = unpatchify(inputs["x"], (2, 2), (8, 12))
    images[:, 3:] += 1
    assert not torch.allclose(model(**(inputs | {"x": patchify(images, (2, 2))})), out, atol=1e-3)


def test_drop_path_closes_branches() -> None:
    config = replace(SMALL, depth=3, drop_path=0.5)
    model, inputs = make(config, awake=True), sample(config)
    assert model.drop_path_rates() == [0.0, 0.25, 0.5]
    base = model(**inputs)
    assert torch.equal(model(**inputs, drop_path=torch.ones(2, 3, 2)), base)
    table = torch.ones(2, 3, 2)
    table[0] = 0
    dropped = model(**inputs, drop_path=table)
    assert torch.equal(dropped[1], base[1])
    model.encoder.blocks = torch.nn.ModuleList()
    assert torch.allclose(dropped[0], model(**inputs)[0], atol=1e-5)


@pytest.mark.parametrize("name", MAKES)
def test_stages_say_what_they_need(name: str) -> None:
    model, inputs = make(MAKES[name], awake=True), sample(MAKES[name])
    side = {key: value for key, value in inputs.items() if key != "x"} | {"drop_path": torch.ones(2, 2, 2)}
    x = inputs["x"]
    for stage in model.stages():
        x = stage.run(x, model.derive({key: side[key] for key in {"coordinates", *stage.needs} if key in side}))
    assert torch.equal(x, model(**inputs))
    assert [stage.name for stage in model.stages()] == [
        "encoder.embed",
        "encoder.blocks.0",
        "encoder.blocks.1",
        "final",
    ]


def test_names_and_what_decay_spares() -> None:
    shapes = {name: tuple(p.shape) for name, p in make(SMALL).named_parameters()}
    assert shapes["encoder.patch_embed.proj.weight"] == (24, 12)
    assert shapes["encoder.blocks.1.attn.qkv.weight"] == (72, 24)
    assert shapes["encoder.blocks.1.modulation.weight"] == (144, 24)
    assert shapes["time_embed.fc1.weight"] == (24, 256)
    assert shapes["time_embed.fc2.bias"] == (24,)
    assert shapes["label_embed.table"] == (6, 24)
    assert shapes["final.modulation.weight"] == (48, 24)
    assert shapes["final.proj.bias"] == (12,)
    assert not any("norm" in name for name in shapes)
    ditan = dict(make(DITAN).named_parameters())
    assert {name for name in ditan if name.startswith("final")} == {
        "final.norm.weight",
        "final.proj.weight",
        "final.proj.bias",
    }
    biases = {name.removeprefix("encoder.").split(".bias")[0] for name in ditan if name.endswith("bias")}
    assert biases == {
        "patch_embed.proj",
        "blocks.0.modulation",
        "blocks.1.modulation",
        "time_embed.fc1",
        "time_embed.fc2",
        "final.proj",
    }
    spared = tuple(make(SMALL).spared_from_decay())
    assert [name for name in shapes if name.endswith(spared)] == ["label_embed.table"]


def test_half_precision_keeps_times_and_places() -> None:
    """Times near 1000 are 4 apart in bf16: features are made before anything is rounded."""
    model, inputs = make(DITAN, awake=True), sample(DITAN)
    near = [model.time_embed(torch.tensor([t])) for t in (900.0, 901.0)]
    model.bfloat16()
    rough = [model.time_embed(torch.tensor([t])) for t in (900.0, 901.0)]
    assert (rough[1] - rough[0]).abs().max() > 0.5 * (near[1] - near[0]).abs().max()
    assert model.derive(dict(inputs))["encoder_rope"].dtype == torch.float32
    assert model(**inputs).dtype == torch.bfloat16


def test_recomputation_gives_the_same_gradients() -> None:
    inputs, gradients = sample(SMALL), []
    for again in (False, True):
        model = make(SMALL, awake=True)
        for block in model.blocks():
            block.forward = recomputed(block.forward) if again else block.forward  # type: ignore[method-assign]
        model(**inputs).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["dit", "ditan"])
def test_a_model_overfits_one_batch(name: str) -> None:
    """Noise prediction on two images of two classes, at two times."""
    config = replace(MAKES[name], channels=1, shape=8, width=48, depth=1)
    model, generator = make(config), torch.Generator().manual_seed(0)
    inputs = sample(config)
    noise = torch.randn(inputs["x"].shape, generator=generator)
    level = torch.tensor([0.3, 0.8])[:, None, None]
    inputs["x"] = (1 - level**2).sqrt() * inputs["x"] + level * noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(**inputs), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(noise.square().mean().item())
    assert losses[-1] < 0.1 * losses[0]


# ---------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("name", MAKES)
def test_flops_equal_what_pytorch_counts(name: str) -> None:
    config = MAKES[name]
    model, inputs = make(config, awake=True), sample(config, batch=1)
    with use_backend("math"):
        with FlopCounterMode(display=False) as counter:
            output = model(**inputs)
        flops = model.flops()
        assert counter.get_total_flops() == flops.forward
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()
    # Neither patches nor features of the time need a gradient: one product less for either first layer.
    first = 2 * inputs["x"].shape[1] * inputs["x"].shape[2] * 24 + 2 * 256 * 24
    assert counter.get_total_flops() == flops.training - flops.forward - first
