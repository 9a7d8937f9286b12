"""facebookresearch/mae and DiT: their weights here give their outputs, from our references and timm's blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from references import MAE, Attention, Block, DiT, PatchEmbed, empty, scramble
from torch import Tensor, nn

from vitrail.layers.tokens import gather_tokens, unpatchify
from vitrail.models.config import EncoderConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig
from vitrail.weights import load_weights

Make = Callable[..., nn.Module]


def parts_of(kind: str) -> tuple[Make, Make, Make]:
    """Block, attention and patch embedding: our own, or timm's."""
    if kind == "plain":
        return Block, Attention, PatchEmbed
    reason = "timm needs torchvision, whose wheels do not import beside a CPU-only PyTorch"
    layers = pytest.importorskip("timm.layers", reason=reason, exc_type=ImportError)
    vit = pytest.importorskip("timm.models.vision_transformer", reason=reason, exc_type=ImportError)
    norm = partial(nn.LayerNorm, eps=1e-6)
    return (
        lambda width, heads: vit.Block(width, heads, 4.0, qkv_bias=True, norm_layer=norm),
        lambda width, heads: vit.Attention(width, num_heads=heads, qkv_bias=True),
        lambda size, patch, channels, width: layers.PatchEmbed(size, patch, channels, width),
    )


def predict(model: nn.Module, images: Tensor, order: Tensor, visible: int) -> Tensor:
    """Predictions of the hidden patches, for the reference's order of patches."""
    everything: dict[str, Any] = model.inputs(images)
    seen, asked = order[:, :visible], order[:, visible:]
    coordinates = everything["coordinates"]
    return model(
        gather_tokens(everything["x"], seen),
        coordinates=gather_tokens(coordinates, seen),
        queries=gather_tokens(coordinates, asked),
    )


SMALL_MAE = {"size": 32, "patch": 8, "width": 32, "depth": 2, "heads": 4, "decoder": (16, 2, 2)}
B16_MAE = {"size": 224, "patch": 16, "width": 768, "depth": 12, "heads": 12, "decoder": (512, 8, 16)}


@pytest.mark.parametrize("kind", ["plain", "timm"])
@pytest.mark.parametrize("sizes", [SMALL_MAE, pytest.param(B16_MAE, marks=pytest.mark.slow)], ids=["small", "B/16"])
@torch.no_grad()
def test_mae(kind: str, sizes: dict[str, Any]) -> None:
    block, _, patch_embed = parts_of(kind)
    theirs = scramble(MAE(**sizes, block=block, patch_embed=patch_embed), std=0.02)
    decoder = dict(zip(("width", "depth", "heads"), sizes["decoder"], strict=True))
    make = {key: sizes[key] for key in ("width", "depth", "heads", "patch")}
    c = MAEConfig(
        encoder=EncoderConfig(**make, cls_token=True),
        decoder=DecoderConfig(**decoder),
        channels=3,
        shape=sizes["size"],
    )
    ours = empty(c)
    report = load_weights(ours, theirs.state_dict())
    assert report.adapter == "mae"
    assert not report["skipped"]
    assert report.names("unused") == ["decoder_pos_embed"]  # computed here; of the encoder's, the class token's row is
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, sizes["size"], sizes["size"], generator=generator)
    tokens = (sizes["size"] // sizes["patch"]) ** 2
    expected, order = theirs(images, torch.rand(2, tokens, generator=generator))
    visible = tokens // 4
    found = predict(ours, images, order, visible)
    torch.testing.assert_close(found, gather_tokens(expected, order[:, visible:]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "timm"])
@pytest.mark.parametrize("size", ["small", pytest.param("S/2", marks=pytest.mark.slow)])
@torch.no_grad()
def test_dit(kind: str, size: str) -> None:
    _, attention, patch_embed = parts_of(kind)
    sizes: dict[str, Any] = {"width": 384, "depth": 12, "heads": 6, "patch": 2}
    if size == "small":
        sizes = {"width": 32, "depth": 2, "heads": 2, "patch": 2}
    theirs = scramble(DiT(size=16, classes=10, **sizes, attention=attention, patch_embed=patch_embed), std=0.03)
    ours = empty(DiTConfig(**sizes, channels=4, shape=16, classes=10, learn_sigma=True))
    report = load_weights(ours, theirs.state_dict())
    assert report.adapter == "dit"
    assert not report["skipped"]
    assert report.names("unused") == ["pos_embed"]
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 4, 16, 16, generator=generator)
    times, labels = torch.tensor([0, 17, 999]), torch.tensor([0, 9, 10])  # 10 is no class
    inputs: dict[str, Any] = ours.inputs(images)
    found = unpatchify(ours(**inputs, times=times.float(), labels=labels), (2, 2), (16, 16))
    torch.testing.assert_close(found, theirs(images, times, labels), atol=1e-5, rtol=1e-5)
