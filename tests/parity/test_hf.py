"""ViT, ViTMAE, DINOv2 and DINOv3 of Hugging Face transformers: their weights here give their outputs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from references import empty, scramble, sincos_2d

from vitrail.errors import UserError
from vitrail.layers.tokens import gather_tokens
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import DecoderConfig, MAEConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights import load_weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
B16 = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


def encoder_of(sizes: dict[str, int], patch: int, **more: Any) -> dict[str, Any]:
    names = {"width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"}
    return {key: sizes[name] for key, name in names.items()} | {"patch": patch, "cls_token": True, "eps": 1e-12} | more


@pytest.mark.parametrize(
    ("sizes", "size", "patch"),
    [(SMALL, 32, 8), pytest.param(B16, 224, 16, marks=pytest.mark.slow)],
    ids=["small", "B/16"],
)
@torch.no_grad()
def test_vit(tmp_path: Path, sizes: dict[str, int], size: int, patch: int) -> None:
    config = transformers.ViTConfig(**sizes, image_size=size, patch_size=patch, num_labels=5)
    theirs = scramble(transformers.ViTForImageClassification(config), std=0.02)
    c = ViTConfig(**encoder_of(sizes, patch, positions="learned"), shape=size, channels=3, pool="cls", classes=5)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected = theirs(pixel_values=images).logits
    theirs.save_pretrained(tmp_path)  # its names on disk are not those in memory
    for given in (theirs.state_dict(), tmp_path, tmp_path / "model.safetensors"):
        ours = empty(c)
        report = load_weights(ours, given)
        assert report.adapter == "hf"
        assert not report["skipped"]
        assert not report["unused"]
        torch.testing.assert_close(ours(**ours.inputs(images)), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_oblong_vit(tmp_path: Path) -> None:
    """Without a config.json, 4 x 9 patches are no 6 x 6: the model's own grid decides."""
    config = transformers.ViTConfig(**SMALL, image_size=(32, 72), patch_size=8)
    theirs = scramble(transformers.ViTModel(config, add_pooling_layer=False), std=0.2)
    ours = empty(ViTConfig(**encoder_of(SMALL, 8, positions="learned"), shape=(32, 72), channels=3, pool="tokens"))
    report = load_weights(ours, theirs.state_dict())
    assert any("4 x 9 after 1 of other tokens or 6 x 6" in note for note in report.notes)
    theirs.save_pretrained(tmp_path)
    assert not any("or 6 x 6" in note for note in load_weights(empty(ours.config), tmp_path).notes)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"image_size": [40, 72]}))
    with pytest.raises(UserError, match=r"config\.json says 5 x 9 patches, but the file holds 37 positions"):
        load_weights(empty(ours.config), tmp_path)
    images = torch.randn(2, 3, 32, 72, generator=torch.Generator().manual_seed(1))
    expected = theirs(pixel_values=images).last_hidden_state[:, 1:]
    torch.testing.assert_close(ours(**ours.inputs(images)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(48, 48), (24, 40)], ids=["larger", "smaller"])
@pytest.mark.parametrize("kind", ["ViT", "Dinov2", "Dinov2WithRegisters"])
@torch.no_grad()
def test_positions_are_resized_as_their_own_code_does(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    """With registers they are smoothed, without they are not: another cubic kernel, even where the table grows."""
    sizes = {key: value for key, value in SMALL.items() if kind == "ViT" or key != "intermediate_size"}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=32, patch_size=8)
    theirs = scramble(getattr(transformers, f"{kind}Model")(config), std=0.2)
    theirs.save_pretrained(tmp_path)
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    resized = {"interpolate_pos_encoding": True} if kind == "ViT" else {}
    registers = getattr(config, "num_register_tokens", 0)
    make = encoder_of(SMALL, 8, positions="learned", registers=registers, hidden=128)
    make |= {"eps": config.layer_norm_eps} | ({} if kind == "ViT" else {"layer_scale": 1.0})
    ours = empty(ViTConfig(**make, channels=3, shape=size, pool="tokens"))
    load_weights(ours, tmp_path)
    expected = theirs(pixel_values=images, **resized).last_hidden_state[:, 1 + registers :]
    torch.testing.assert_close(ours(**ours.inputs(images)), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_vitmae(tmp_path: Path) -> None:
    config = transformers.ViTMAEConfig(
        **SMALL,
        image_size=32,
        patch_size=8,
        layer_norm_eps=1e-6,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=64,
    )
    theirs = scramble(transformers.ViTMAEForPreTraining(config))
    theirs.vit.embeddings.position_embeddings.copy_(sincos_2d(32, 4, cls=True))  # a fresh one has zeros
    theirs.decoder.decoder_pos_embed.copy_(sincos_2d(16, 4, cls=True))
    c = MAEConfig(
        encoder=EncoderConfig(**encoder_of(SMALL, 8) | {"eps": 1e-6}),
        decoder=DecoderConfig(width=16, depth=2, heads=2),
        channels=3,
        shape=32,
    )
    generator = torch.Generator().manual_seed(1)
    images, noise = torch.randn(2, 3, 32, 32, generator=generator), torch.rand(2, 16, generator=generator)
    expected = theirs(pixel_values=images, noise=noise).logits
    order = noise.argsort(dim=1)
    theirs.save_pretrained(tmp_path)
    for given in (theirs.state_dict(), tmp_path):
        ours = empty(c)
        report = load_weights(ours, given)
        assert report.adapter == "hf"
        assert not report["skipped"]
        inputs = ours.inputs(images)
        found = ours(
            gather_tokens(inputs["x"], order[:, :4]),
            coordinates=gather_tokens(inputs["coordinates"], order[:, :4]),
            queries=gather_tokens(inputs["coordinates"], order[:, 4:]),
        )
        torch.testing.assert_close(found, gather_tokens(expected, order[:, 4:]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_dinov2(tmp_path: Path, gated: bool) -> None:
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_register_tokens=3,
        use_swiglu_ffn=gated,
    )
    theirs = scramble(transformers.Dinov2WithRegistersModel(config))
    last = [m for m in theirs.encoder.layer[0].mlp.modules() if isinstance(m, torch.nn.Linear)][-1]  # of any name
    hidden = last.in_features if gated else 128
    c = ViTConfig(
        **encoder_of(SMALL, 8, positions="learned", layer_scale=1.0, registers=3, hidden=hidden) | {"eps": 1e-6},
        mlp="swiglu" if gated else "gelu",
        channels=3,
        shape=32,
        pool="tokens",
    )
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = theirs(pixel_values=images).last_hidden_state[:, 4:]
    theirs.save_pretrained(tmp_path)
    for given in (theirs.state_dict(), tmp_path):
        ours = empty(c)
        report = load_weights(ours, given)
        assert not report["skipped"]
        assert report.names("unused") == ["embeddings.mask_token"]
        torch.testing.assert_close(ours(**ours.inputs(images)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_dinov3(tmp_path: Path, gated: bool) -> None:
    """Class token and registers stand at the centre of its image, for which there is rope_origin."""
    act = "silu" if gated else "gelu"
    config = transformers.DINOv3ViTConfig(
        **SMALL, image_size=32, patch_size=8, num_register_tokens=3, use_gated_mlp=gated, hidden_act=act
    )
    theirs = scramble(transformers.DINOv3ViTModel(config))
    make = encoder_of(SMALL, 8, positions="rope", layer_scale=1.0, registers=3, hidden=128, rope_scale=math.pi)
    make |= {"mlp": "swiglu" if gated else "gelu", "eps": 1e-5, "channels": 3, "shape": 32, "pool": "tokens"}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = theirs(pixel_values=images).last_hidden_state[:, 4:]
    theirs.save_pretrained(tmp_path)
    for given in (theirs.state_dict(), tmp_path):
        with pytest.raises(UserError, match="set rope_origin: centre"):
            load_weights(empty(ViTConfig(**make)), given)
        ours = empty(ViTConfig(**make, rope_origin="centre"))
        report = load_weights(ours, given)
        assert report.adapter == "hf"
        assert not report["skipped"]
        assert report.names("unused") == ["embeddings.mask_token"]
        torch.testing.assert_close(ours(**ours.inputs(images)), expected, atol=1e-5, rtol=1e-5)
    make["rope_origin"] = "centre"
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_theta": 50.0}))
    with pytest.raises(UserError, match="set theta: 50"):
        load_weights(empty(ViTConfig(**make)), tmp_path)
    other = "gelu" if gated else "silu"
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_act": other}))
    with pytest.raises(UserError, match=f"'{other}', the model's"):
        load_weights(empty(ViTConfig(**make)), tmp_path)


def test_settings_beside_the_file_are_checked(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    make = encoder_of(SMALL, 8, positions="learned")
    with pytest.raises(UserError, match=r"num_attention_heads is 4 in config.json, the model has 2 heads"):
        load_weights(ViTConfig(**make | {"heads": 2}, channels=3, shape=32).build(), tmp_path)
    report = load_weights(ViTConfig(**make | {"eps": 1e-6}, channels=3, shape=32).build(), tmp_path)
    assert any("eps 1e-12" in note for note in report.notes)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_act": "quick_gelu"}))
    with pytest.raises(UserError, match="'quick_gelu'"):
        load_weights(ViTConfig(**make, channels=3, shape=32).build(), tmp_path)
