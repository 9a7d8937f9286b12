"""UNETR: shapes, taps, steps up, FLOPs, and that it learns. Equality with MONAI's is in tests/parity."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitrail.layers.backends import use_backend
from vitrail.layers.convolutions import InstanceNorm, channels_last, upsampling
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.unetr import UNETR, UNETRConfig

SMALL = EncoderConfig(width=24, depth=4, heads=2, patch=4)


def config(encoder: EncoderConfig = SMALL, **changes: Any) -> UNETRConfig:
    defaults = {"encoder": encoder, "features": 2, "ndim": 3, "channels": 1, "classes": 3, "shape": 16}
    return UNETRConfig(**(defaults | changes))


def make(c: UNETRConfig, seed: int = 0) -> UNETR:
    """As the trainer does it: on the meta device first, initialised afterwards."""
    with torch.device("meta"):
        model = c.build()
    rules = init_rules(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever initialisation forgets will show
    initialise(model, rules, seed)
    assert not list(model.buffers())
    return model


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- shapes

MAKES: dict[str, dict[str, Any]] = {
    "skips": {},
    "plain blocks": {"residual": False, "norm": "affine"},
    "no skips": {"skips": False},
    "linear": {"decoder": "linear"},
}


@pytest.mark.parametrize("make_of", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("batch", "channels", "size", "patch"),
    [
        (1, 1, (16, 16, 16), 4),
        (2, 3, (16, 24), 8),
        (2, 20, (32, 16), 16),
        (1, 1, (8, 32, 16), (2, 8, 16)),
        (1, 2, (64, 128), 32),
        (3, 1, (32,), 4),
    ],
)
def test_every_make_gives_classes_of_every_voxel(
    make_of: dict[str, Any], batch: int, channels: int, size: tuple[int, ...], patch: int | tuple[int, ...]
) -> None:
    c = config(replace(SMALL, patch=patch), ndim=len(size), channels=channels, shape=size, **make_of)
    c.check()
    model = make(c)
    out = model(**model.inputs(images(batch, channels, *size)))
    assert out.shape == (batch, 3, *size)
    assert torch.isfinite(out).all()
    out.square().mean().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == []


def test_samples_do_not_mix() -> None:
    model = make(config())
    x = images(3, 1, 16, 16, 16)
    together = model(**model.inputs(x))
    for i in range(3):
        assert torch.allclose(model(**model.inputs(x[i : i + 1])), together[i : i + 1], atol=1e-5)


def test_class_token_registers_and_rope() -> None:
    encoder = replace(SMALL, cls_token=True, registers=2, positions="rope", width=32, norm="rms", mlp="swiglu")
    for make_of in MAKES.values():
        model = make(config(encoder, **make_of))
        assert model(**model.inputs(images(2, 1, 16, 16, 16))).shape == (2, 3, 16, 16, 16)


def test_another_size_than_the_configured_one() -> None:
    """The image says how large it is; positions are coordinates."""
    model = make(config())
    assert model(**model.inputs(images(1, 1, 8, 16, 32))).shape == (1, 3, 8, 16, 32)


def test_a_voxel_stays_in_its_place() -> None:
    """Tokens reach the grid in the right order: a linear decoder without attention's help sees only its own patch."""
    c = config(replace(SMALL, positions="none"), decoder="linear", shape=(16, 8, 8))
    model = make(c)
    x = torch.zeros(1, 1, 16, 8, 8)
    x[..., 12:, :4, 4:] = 1.0
    maps = model(**model.inputs(x))
    # The odd patch stands out at its own centre.
    flat = maps[0, :, 2::4, 2::4, 2::4].sub(maps[0, :, 2:3, 6:7, 2:3]).abs().sum(dim=0)
    assert flat.flatten().argmax() == torch.tensor([3, 0, 1]) @ torch.tensor([4, 2, 1])


# ---------------------------------------------------------------- taps and steps


@pytest.mark.parametrize(("depth", "expected"), [(4, [1, 2, 3]), (6, [1, 2, 3]), (8, [2, 4, 6]), (12, [3, 6, 9])])
def test_taps(depth: int, expected: list[int]) -> None:
    c = config(replace(SMALL, depth=depth))
    assert c.taps() == expected
    model = make(c)
    inputs = model.inputs(images(1, 1, 16, 16, 16))
    side = model.derive({key: value for key, value in inputs.items() if key != "x"})
    x, kept = inputs["x"], []
    for stage in model.stages():
        x = stage.run(x, side)
        if stage.name in {f"encoder.blocks.{i}" for i in expected}:
            kept.append(x)
    assert len(side["taps"]) == 3
    assert all(a is b for a, b in zip(side["taps"], kept, strict=True))
    assert [s.name for s in model.stages()][-6:] == [
        *("decoder.bottleneck", "decoder.up1", "decoder.up2", "decoder.up3", "decoder.up4", "decoder.out")
    ]


def test_every_tap_and_the_image_matter() -> None:
    model = make(config())
    inputs = model.inputs(images(1, 1, 16, 16, 16))
    whole = model(**inputs)
    assert not torch.allclose(model(**(inputs | {"image": inputs["image"] + images(1, 1, 16, 16, 16, seed=1)})), whole)
    for skip in model.decoder.skips:
        weight = skip.ups[0].weight
        before = weight.detach().clone()
        weight.data.mul_(-1)
        assert not torch.allclose(model(**inputs), whole, atol=1e-4)
        weight.data.copy_(before)


def test_steps_up() -> None:
    assert upsampling((16, 16, 16)) == [(2, 2, 2)] * 4
    assert upsampling((1,)) == [(1,), (1,), (1,), (1,)]
    assert upsampling((4, 16, 8)) == [(1, 2, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2)]
    assert upsampling((32, 64)) == [(4, 4), (2, 4), (2, 2), (2, 2)]
    assert upsampling((256,)) == [(4,), (4,), (4,), (4,)]
    with pytest.raises(ValueError, match=r"patch \[12, 8\] must be a power of two"):
        upsampling((12, 8))


@pytest.mark.parametrize("make_of", MAKES.values(), ids=MAKES)
def test_stages_say_what_they_need(make_of: dict[str, Any]) -> None:
    """What a pipeline will do: each stage gets only the side inputs that it names, the taps among them."""
    encoder = replace(SMALL, drop_path=0.1, registers=1)
    model = make(config(encoder, **make_of))
    inputs = model.inputs(images(2, 1, 16, 16, 16)) | {"drop_path": torch.full((2, 4, 2), 0.5)}
    side = {key: value for key, value in inputs.items() if key != "x"} | {"taps": []}
    x = inputs["x"]
    for stage in model.stages():
        x = stage.run(x, model.derive({key: side[key] for key in {"coordinates", *stage.needs} if key in side}))
    assert torch.equal(x, model(**inputs))
    assert len(model.drop_path_rates()) == 4
    assert not torch.allclose(x, model(**(inputs | {"drop_path": torch.ones(2, 4, 2)})))


def test_blocks_are_separate_and_hold_the_repeated_parameters() -> None:
    model = make(config())
    names = [name for block in model.blocks() for name, _ in block.named_parameters()]
    inside = {id(p) for block in model.blocks() for p in block.parameters()}
    assert len(inside) == len(names)
    outside = {name.split(".")[1] for name, p in model.named_parameters() if id(p) not in inside}
    assert outside == {"patch_embed", "norm", "out"}


# ---------------------------------------------------------------- variables and adaptive tokens


@pytest.mark.parametrize("aggregate", ["query", "none"])
def test_variables_are_picked_by_name(aggregate: str) -> None:
    variables = VariablesConfig(known=("em", "dna", "actin"), aggregate=aggregate)  # type: ignore[arg-type]
    c = config(replace(SMALL, variables=variables), channels=None)
    assert c.channels == 3
    model = make(c)
    x = images(2, 3, 16, 16, 16)
    whole = model(**model.inputs(x))
    swapped = model(**model.inputs(x[:, [2, 0, 1]], variables=["actin", "em", "dna"]))
    assert torch.allclose(swapped, whole, atol=1e-4)
    few = model(**model.inputs(x[:, 1:2], variables=["dna"]))
    assert few.shape == whole.shape
    # Without the others is with their columns of the image's convolutions gone.
    assert model.decoder.image.conv1.weight.shape[1] == 3
    assert not torch.allclose(few, model(**model.inputs(x[:, 1:2], variables=["em"])), atol=1e-3)


@pytest.mark.parametrize("make_of", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("size", "length"), [((32, 32), 16), ((24, 32), 16), ((16, 16, 16), 15), ((16, 10, 12), 15)])
def test_adaptive_tokens(make_of: dict[str, Any], size: tuple[int, ...], length: int) -> None:
    """Leaves are brought to the grid; images that are no multiple of a patch, too."""
    tokens = AdaptiveTokens(length=length, score=GradientScore())
    c = config(replace(SMALL, tokens=tokens, cls_token=True), ndim=len(size), shape=size, **make_of)
    c.check()
    model = make(c)
    out = model(**model.inputs(images(2, 1, *size)))
    assert out.shape == (2, 3, *size)
    out.square().mean().backward()
    assert torch.isfinite(model.encoder.patch_embed.proj.weight.grad).all()


@pytest.mark.parametrize("per_variable", [False, True])
def test_adaptive_tokens_of_separate_variables(per_variable: bool) -> None:
    encoder = replace(
        SMALL,
        tokens=AdaptiveTokens(length=16, score=GradientScore(), per_variable=per_variable),
        variables=VariablesConfig(known=("a", "b"), aggregate="none"),
    )
    model = make(config(encoder, ndim=2, channels=None, shape=32))
    assert model(**model.inputs(images(3, 2, 32, 32))).shape == (3, 3, 32, 32)
    assert model(**model.inputs(images(3, 1, 32, 32), variables=["b"])).shape == (3, 3, 32, 32)


# ---------------------------------------------------------------- numbers


def published(**changes: Any) -> UNETRConfig:
    """UNETR of the paper, as in MONAI: 96^3, 14 classes, feature size 16."""
    encoder = EncoderConfig(size="B/16", positions="learned", eps=1e-5)
    return UNETRConfig(**({"encoder": encoder, "ndim": 3, "channels": 1, "classes": 14, "shape": 96} | changes))


def test_published_size() -> None:
    with torch.device("meta"):
        model = published().build()
    flops = model.flops()
    assert flops.forward / 1e9 == pytest.approx(146.4, abs=0.05)
    assert model.encoder.flops(216).forward / flops.forward == pytest.approx(0.27, abs=0.005)
    decoder = sum(p.numel() for p in model.decoder.parameters())
    encoder = sum(p.numel() for p in model.encoder.parameters())
    assert (encoder, decoder) == (88_368_384, 4_443_310)


@pytest.mark.parametrize("make_of", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("size", "patch", "prefix"), [((16, 8, 16), 4, 0), ((32, 64), (16, 32), 2), ((8, 16), (2, 8), 0)]
)
def test_flops_equal_what_pytorch_counts(
    make_of: dict[str, Any], size: tuple[int, ...], patch: int | tuple[int, ...], prefix: int
) -> None:
    encoder = replace(SMALL, patch=patch, registers=prefix)
    model = make(config(encoder, ndim=len(size), shape=size, channels=2, **make_of))
    inputs = model.inputs(images(1, 2, *size))
    with use_backend("math"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert counter.get_total_flops() == pytest.approx(model.flops().forward, rel=1e-6)


def test_golden_output() -> None:
    """A change of initialisation, names or arithmetic shows here."""
    model = make(config())
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 16)] * 3, indexing="ij"))
    out = model(**model.inputs(grid.prod(dim=0).mul(9).sin()[None, None]))
    numbers = [out.mean(), out.std(), out[0, 1, 3, 5, 7], out[0, 2, 15, 0, 8]]
    assert torch.stack(numbers).tolist() == pytest.approx(GOLDEN, abs=2e-4)


GOLDEN = [-0.09588, 1.16246, -0.26293, -0.01779]


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("size", [(8, 8, 8), (3, 5, 7), (6, 10), (1, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_is_pytorchs(size: tuple[int, ...], affine: bool) -> None:
    norm = InstanceNorm(5, affine=affine)
    if affine:
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.uniform_(-1, 1)
    norm.double()
    x = channels_last(images(3, 5, *size).double() * 4 + 100).requires_grad_()
    weights = images(3, 5, *size, seed=1)
    expected = F.instance_norm(x.contiguous(), weight=norm.weight, bias=norm.bias)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    out = norm(x)
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    assert torch.allclose(out, expected, atol=1e-9)
    assert torch.allclose(grad, expected_grad, atol=1e-9)
    assert torch.allclose(norm.float()(x.float()), expected.float(), atol=1e-3)


def test_layout_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last is for speed on a CPU; GPUs take maps as they come."""
    model = make(config(norm="affine"))
    inputs = model.inputs(images(2, 1, 16, 16, 16))
    last = model(**inputs)
    monkeypatch.setattr("vitrail.models.unetr.channels_last", lambda x: x.contiguous())
    assert torch.allclose(model(**inputs), last, atol=1e-4)


def test_bf16() -> None:
    model = make(config())
    inputs = model.inputs(images(2, 1, 16, 16, 16))
    exact = model(**inputs)
    rounded = model.bfloat16()(**inputs)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean() + 0.05


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("make_of", [MAKES["skips"], MAKES["plain blocks"]], ids=["skips", "plain blocks"])
def test_it_overfits_one_batch(make_of: dict[str, Any]) -> None:
    model = make(config(features=4, classes=2, **make_of))
    x = images(2, 1, 16, 16, 16)
    smooth = F.avg_pool3d(x, 5, stride=1, padding=2)
    labels = (smooth[:, 0] > 0).long()
    inputs = model.inputs(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(80):
        loss = F.cross_entropy(model(**inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0], (losses[0], losses[-1])


# ---------------------------------------------------------------- what is refused


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"encoder.depth 3 has no room for three taps: use at least 4, or skips: fal"):
        config(replace(SMALL, depth=3))
    config(replace(SMALL, depth=3), skips=False)
    with pytest.raises(ValueError, match=r"encoder.patch \[12, 12, 12\]: .* power of two .*, or decoder: linear"):
        config(replace(SMALL, patch=12))
    config(replace(SMALL, patch=12), decoder="linear", shape=24).check()
    with pytest.raises(ValueError, match=r"has 2 numbers, but there are 3 axes"):
        config(replace(SMALL, patch=(4, 4)))
    with pytest.raises(ValueError, match=r"ndim 4 must be 1, 2 or 3"):
        config(ndim=4)
    with pytest.raises(ValueError, match=r"features 0 must be at least 1"):
        config(features=0)
    with pytest.raises(ValueError, match=r"classes 0 must be at least 1"):
        config(classes=0)
    with pytest.raises(ValueError, match=r"size \[18, 18, 18\] is not a multiple of patch"):
        config(shape=18).check()
    with pytest.raises(ValueError, match=r"shape \[4, 4, 4\] .* leaves a single voxel at the coarsest level"):
        config(shape=4).check()
    with pytest.raises(ValueError, match=r"classes is not known"):
        config(classes=None).build()
    with pytest.raises(ValueError, match=r"channels is not known"):
        config(channels=None).build()


def test_bad_inputs() -> None:
    model = make(config())
    inputs = model.inputs(images(1, 1, 16, 16, 16))
    without = {key: value for key, value in inputs.items() if key != "image"}
    with pytest.raises(ValueError, match=r"the image is missing"):
        model(**without)
    with pytest.raises(ValueError, match=r"60 tokens do not fill the grid \[4, 4, 4\]"):
        model(**(inputs | {"x": inputs["x"][:, :60], "coordinates": inputs["coordinates"][:, :60]}))
    with pytest.raises(ValueError, match=r"images have 2 channels, the model 1"):
        model.inputs(images(1, 2, 16, 16, 16))
    shapeless = make(config(shape=None, decoder="linear"))
    told = shapeless.inputs(images(1, 1, 16, 16, 16))
    assert shapeless(**told).shape[2:] == (16, 16, 16)
    del told["size"]
    with pytest.raises(ValueError, match=r"shape is not known; set model.shape"):
        shapeless(**told)


@pytest.mark.parametrize("decoder", ["conv", "linear"])
def test_other_sizes_than_the_configured_keep_their_place(decoder: str) -> None:
    """As many tokens in another arrangement: the answer has the image's size, not the configured one."""
    model = make(config(ndim=2, shape=16, decoder=decoder, skips=False))
    assert model(**model.inputs(images(1, 1, 32, 8))).shape[2:] == (32, 8)


@torch.no_grad()
def test_named_variables_as_many_as_features() -> None:
    """Where channels in and out are as many, the image must still not be added as it comes."""
    known = VariablesConfig(known=tuple("abcdefgh"))
    model = make(config(replace(SMALL, variables=known), ndim=2, shape=16, channels=None, features=8))
    values = images(2, 3, 16, 16)
    one = model(**model.inputs(values, ["a", "c", "h"]))
    other = model(**model.inputs(values[:, [2, 0, 1]], ["h", "a", "c"]))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_what_a_config_asks_for() -> None:
    assert config().wants_image
    assert not config(skips=False).wants_image
    assert not config(decoder="linear").wants_image
    assert config().output == "pixels"
