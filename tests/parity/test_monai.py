"""UNETR against MONAI's: the same weights give the same logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vitrail.errors import UserError
from vitrail.models.config import EncoderConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights import load_weights
from vitrail.weights.adapters import translate
from vitrail.weights.files import open_weights
from vitrail.weights.pieces import Target

monai = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed: pip install monai")

AFFINE = ("instance", {"affine": True})
CASES: dict[str, dict[str, Any]] = {
    "3-D": {"spatial_dims": 3, "img_size": (32, 16, 48), "in_channels": 1},
    "2-D": {"spatial_dims": 2, "img_size": (32, 48), "in_channels": 3},
    "perceptron": {
        **{"spatial_dims": 3, "img_size": (16, 32, 16), "in_channels": 2},
        **{"proj_type": "perceptron", "feature_size": 8},
    },
    "perceptron 2-D": {"spatial_dims": 2, "img_size": (64, 32), "in_channels": 20, "proj_type": "perceptron"},
    "without residuals": {
        **{"spatial_dims": 3, "img_size": (16, 32, 16), "in_channels": 1},
        **{"feature_size": 8, "res_block": False},
    },
    "affine": {
        **{"spatial_dims": 3, "img_size": (32, 16, 16), "in_channels": 1},
        **{"feature_size": 8, "norm_name": AFFINE},
    },
    "affine without residuals": {
        **{"spatial_dims": 2, "img_size": (32, 32), "in_channels": 1},
        **{"norm_name": AFFINE, "res_block": False, "qkv_bias": True},
    },
}


def config_like(width: int = 48, heads: int = 4, hidden: int = 80, classes: int = 5, **options: Any) -> UNETRConfig:
    """Ours for the options of theirs."""
    return UNETRConfig(
        encoder=EncoderConfig(
            width=width, depth=12, heads=heads, hidden=hidden, patch=16, positions="learned", eps=1e-5
        ),
        features=options.get("feature_size", 16),
        norm="affine" if isinstance(options.get("norm_name"), tuple) else "instance",
        residual=options.get("res_block", True),
        ndim=options["spatial_dims"],
        channels=options["in_channels"],
        classes=classes,
        shape=options["img_size"],
    )


def theirs(**options: Any) -> nn.Module:
    """Every parameter at random, so that none that is forgotten looks right."""
    torch.manual_seed(0)
    model = monai.UNETR(out_channels=5, hidden_size=48, mlp_dim=80, num_heads=4, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            elif "position" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_outputs_equal_monai(options: dict[str, Any]) -> None:
    reference = theirs(**options)
    model = config_like(**options).build()
    load_weights(model, reference.state_dict(), adapter="monai")
    images = torch.randn(2, options["in_channels"], *options["img_size"])
    expected = reference(images).detach()
    ours = model(**model.inputs(images))
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() < 1e-5


@pytest.mark.parametrize("options", [CASES["2-D"], CASES["affine"]], ids=["2-D", "affine"])
def test_gradients_equal_monai(options: dict[str, Any]) -> None:
    """In double precision: in single, norms of a few voxels differ by more than a mistake would."""
    reference = theirs(**options)
    model = config_like(**options).build()
    load_weights(model, reference.state_dict(), adapter="monai")
    reference.double()
    model.double()
    images = torch.randn(2, options["in_channels"], *options["img_size"], dtype=torch.float64)
    reference(images).square().mean().backward()
    model(**model.inputs(images)).square().mean().backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    pieces = translate(open_weights(gradients), Target(model), "monai").pieces
    for name, parameter in model.named_parameters():
        if "qkv.bias" not in name or options.get("qkv_bias"):
            wanted = pieces[name].make(*(gradients[source] for source in pieces[name].sources)).value
            assert (parameter.grad - wanted).abs().max() <= 1e-8 * wanted.abs().max() + 1e-12, name


def test_parameters_of_the_published_size() -> None:
    """UNETR of the paper: ViT-B/16, 96^3, 14 classes. Theirs has unused norms, ours qkv biases besides."""
    config = config_like(
        width=768, heads=12, hidden=3072, classes=14, spatial_dims=3, img_size=(96, 96, 96), in_channels=1
    )
    with torch.device("meta"):
        ours = sum(p.numel() for p in config.build().parameters())
    reference = 92_802_478  # all parameters of MONAI 1.6.1's UNETR(1, 14, 96)
    assert ours == reference - 12 * 2 * 768 + 12 * 3 * 768


def test_what_does_not_fit_is_refused() -> None:
    options: dict[str, Any] = CASES["2-D"]
    state = theirs(**options).state_dict()
    config = config_like(**options)

    def refused(words: str, given: dict[str, Any] = state, **encoder: Any) -> None:
        other = replace(config, encoder=replace(config.encoder, **encoder))
        with pytest.raises(UserError, match=words):
            load_weights(other.build(), given, adapter="monai")

    refused(r"model.encoder.eps: 1e-06 does not fit MONAI's UNETR, which has 1e-05", eps=1e-6)
    refused(r"model.encoder.positions: rope does not fit", positions="rope")
    refused(r"its encoder has 12 blocks, the model's 8", depth=8)
    refused(r"the model has no place for head\.weight", state | {"head.weight": torch.zeros(1)})
    load_weights(config.build(), {f"module.{name}": tensor for name, tensor in state.items()})


@pytest.mark.parametrize("proj_type", ["conv", "perceptron"])
@pytest.mark.parametrize("size", [(16, 32), (16, 8, 24)], ids=["2-D", "3-D"])
@torch.no_grad()
def test_vits_of_monai(size: tuple[int, ...], proj_type: str) -> None:
    """Its class token has no position, and its classifier a tanh behind it."""
    more = {"hidden_size": 24, "mlp_dim": 40, "num_layers": 2, "num_heads": 2, "proj_type": proj_type}
    reference = monai.ViT(2, size, 8, **more, classification=True, num_classes=3, spatial_dims=len(size)).eval()
    for parameter in reference.parameters():
        parameter.normal_(0.0, 0.2)
    make: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "hidden": 40, "patch": 8, "cls_token": True}
    make |= {"positions": "learned", "eps": 1e-5, "pool": "cls", "ndim": len(size), "channels": 2, "shape": size}
    model = ViTConfig(**make, classes=3).build()
    report = load_weights(model, reference.state_dict())
    assert report.adapter == "monai"
    assert not report["skipped"]
    assert any("a tanh behind its classifier" in note for note in report.notes)
    images = torch.randn(2, 2, *size)
    torch.testing.assert_close(model(**model.inputs(images)).tanh(), reference(images)[0], atol=1e-5, rtol=1e-5)
    # Without the tanh, the classifier is called otherwise.
    plain = {
        name.replace("classification_head.0.", "classification_head."): t for name, t in reference.state_dict().items()
    }
    report = load_weights(model, plain)
    assert not report["skipped"]
    assert not any("a tanh behind" in note for note in report.notes)
    with pytest.raises(UserError, match=r"model\.pool: mean does not fit MONAI's ViT, which has cls"):
        load_weights(ViTConfig(**make | {"pool": "mean"}, classes=3).build(), reference.state_dict())
    # Without a classifier it is the encoder of any model: a UNETR's, say.
    encoder = monai.ViT(2, size, 8, **more, spatial_dims=len(size)).state_dict()
    c = UNETRConfig(
        encoder=EncoderConfig(width=24, depth=2, heads=2, hidden=40, patch=8, positions="learned", eps=1e-5),
        **{"ndim": len(size), "channels": 2, "shape": size, "classes": 2, "skips": False, "features": 4},
    )
    report = load_weights(c.build(), encoder)
    assert not [name for name in report.names("skipped") if name.startswith("encoder.")]


def test_unetrs_of_ucf_vit_are_monais_by_other_names() -> None:
    options: dict[str, Any] = CASES["2-D"]
    state = theirs(**options).state_dict()
    config = config_like(**options)
    ours, other = config.build(), replace(config, encoder=replace(config.encoder, eps=1e-6)).build()
    load_weights(ours, state)
    named = {"patch_embedding.position_embeddings": "pos_embed", "patch_embedding.patch_embeddings": "patch_embed.proj"}
    named |= {"attn.out_proj": "attn.proj", "mlp.linear": "mlp.fc", "vit.": ""}
    renamed = {}
    for name, tensor in state.items():
        if name.startswith("vit.") and "cross_attn" not in name:
            for old, new in named.items():
                name = name.replace(old, new)
        renamed[name] = tensor
    renamed |= {f"token_embeds.proj.{end}": renamed[f"patch_embed.proj.{end}"] for end in ("weight", "bias")}
    assert load_weights(other, renamed).adapter == "ucf"
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))
