"""Every model of the seeds: parameters to the last one, FLOPs, and the list of them."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support import ROOT
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UserError
from vitrail.layers.backends import use_backend
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models import (
    SAP,
    DecoderConfig,
    DiffusionDecoderConfig,
    DiffusionViTConfig,
    DiTConfig,
    EncoderConfig,
    MAEConfig,
    SAPConfig,
    StudyViTConfig,
    UNETRConfig,
    ViT,
    ViTConfig,
)
from vitrail.models.catalog import describe, entries, find, measure
from vitrail.recipe import load_recipe

GOLDEN = {
    ("vit", "UCF-B/16"): 86_613_736,
    ("vit", "B/16"): 86_567_656,  # timm's vit_base_patch16_224
    ("mae", "UCF-B/16"): 111_982_592,
    ("mae", "2B"): 2_055_577_600,
    ("mae", "8B"): 6_997_681_152,
    ("study_vit", "Base"): 87_028_840,
    ("study_vit", "Huge"): 635_392_896,
    ("study_vit", "1B"): 914_252_416,
    ("study_vit", "3B"): 3_067_445_632,
    ("study_vit", "5B"): 5_349_511_040,
    ("study_vit", "15B"): 14_720_355_376,
    ("dit", "XL/2"): 674_834_720,
}
ROUNDED = {("dit", "0.5B"): 461.9, ("dit", "1B"): 1363.8, ("dit", "7B"): 7128.5}
GFLOPS = {("study_vit", "Base"): 105.9 / 3, ("unetr", "B/16"): 146.4, ("dit", "XL/2"): 237.2}


def test_parameters_and_flops_are_those_of_the_seeds() -> None:
    rows = {(row["model"], row["size"]): row for row in map(measure, entries())}
    for name, parameters in GOLDEN.items():
        assert rows[name]["parameters"] == parameters, name
    for name, millions in ROUNDED.items():
        assert round(rows[name]["parameters"] / 1e6, 1) == millions, name
    for name, flops in GFLOPS.items():
        assert rows[name]["flops"] / 1e9 == pytest.approx(flops, rel=2e-3), name


def test_list_as_json() -> None:
    done = subprocess.run([sys.executable, "-m", "vitrail", "models", "--json"], capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert {"vit", "study_vit", "mae", "unetr", "sap", "diffusion_vit", "dit"} == {row["model"] for row in rows}
    assert all(isinstance(row[key], int) and row[key] > 0 for row in rows for key in ("parameters", "flops"))
    assert all(row["size"] and row["origin"] for row in rows)


def test_one_in_detail() -> None:
    found = describe("sap")
    assert "adaptive" in found["about"]
    assert found["keys"]["encoder.positions"] == "sincos"
    assert found["keys"]["features"] == 256
    assert [row["size"] for row in found["sizes"]] == ["UCF-B/16", "UCF-B/4"]
    assert [entry.size for entry in find("dit:XL/2")] == ["XL/2"]
    with pytest.raises(UserError, match="did you mean 'unetr'"):
        find("untr")
    with pytest.raises(UserError, match="'B/14' is not a size of dit; there are S/2"):
        find("dit:B/14")


def test_a_size_in_detail_has_its_own_values() -> None:
    keys = describe("mae:2B")["keys"]
    expected = {"width": 3072, "depth": 16, "heads": 32, "kv_heads": 8, "patch": 8, "hidden": 11264, "theta": 500_000}
    assert {name: keys[f"encoder.{name}"] for name in expected} == expected
    assert (keys["decoder.width"], keys["decoder.hidden"], keys["mask.ratio"], keys["shape"]) == (512, 1536, 0.95, 512)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.model}:{entry.size}")
def test_every_listed_size_can_be_named_in_a_recipe(entry) -> None:
    from vitrail.models.model import encoder_of

    inside = "size" not in {field.name for field in fields(entry.config)}
    size: dict[str, Any] = {"encoder": {"size": entry.size}} if inside else {"size": entry.size}
    if entry.model == "sap":
        size["encoder"]["tokens"] = {"kind": "adaptive", "length": entry.config.encoder.tokens.length}
    model = {"kind": entry.model, "ndim": entry.config.ndim, **size}
    tree = {"run": {"name": "sized", "steps": 1}, "data": {"train": [{"path": "a.zarr"}], "crop": 64, "batch": 1}}
    named, listed = encoder_of(load_recipe(tree | {"model": model}).model), encoder_of(entry.config)
    for key in ("width", "depth", "heads", "kv_heads", "patch", "hidden", "mlp", "norm", "bias", "theta"):
        assert getattr(named, key) == getattr(listed, key), key


@pytest.mark.parametrize("size", ["2B", "8B"])
def test_the_recipes_of_torchtitan_mae_are_its_models(size: str) -> None:
    recipe = load_recipe(ROOT / f"configs/mae3d/torchtitan_{size.lower()}.yaml")
    made = replace(recipe.model, channels=1, shape=recipe.data.crop)
    assert made == replace(find(f"mae:{size}")[0].config, encoder=made.encoder)
    with torch.device("meta"):
        assert sum(p.numel() for p in made.build().parameters()) == GOLDEN["mae", size]


def test_pages_say_which_decoder_their_numbers_are_of() -> None:
    counts = []
    for name, ratio in (("torchtitan_2b", 1.0), ("2b", 0.25), ("2b", 1.0)):
        recipe = load_recipe(ROOT / f"configs/mae3d/{name}.yaml", [f"model.decoder.decode_ratio={ratio}"])
        with torch.device("meta"):
            counts.append(replace(recipe.model, channels=1, shape=512).build().flops().training / 1e12)
    words = "{:,.0f} TFLOP a step, where this one computes {:.0f} (a quarter of the hidden tokens decoded) or {:.0f}"
    assert words.format(*counts) in " ".join((ROOT / "benchmarks/mae3d_2b.md").read_text().split())
    assert f"{counts[0]:,.0f} TFLOP a step" in (ROOT / "README.md").read_text()


def small(**more: object) -> ViTConfig:
    channels = None if "variables" in more else 3
    return ViTConfig(width=24, depth=2, heads=2, patch=4, classes=5, shape=16, channels=channels, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(pool="attention", registers=2),
        small(variables=VariablesConfig(known=("a", "b", "c", "d", "e"))),
        small(variables=VariablesConfig(known=("a", "b", "c", "d"), aggregate="groups", group=2)),
        small(variables=VariablesConfig(known=("a", "b"), aggregate="none")),
        small(tokens=AdaptiveTokens(length=13, score=GradientScore())),
        small(tokens=AdaptiveTokens(length=13, score=GradientScore(), told="pixels")),
        small(pool="tokens"),
        StudyViTConfig(width=24, depth=2, heads=2, patch=4, classes=5, shape=16, channels=3),
        SAPConfig(
            encoder=EncoderConfig(
                width=24, depth=1, heads=2, patch=4, tokens=AdaptiveTokens(length=13, score=GradientScore())
            ),
            channels=3,
            classes=4,
            shape=16,
            features=6,
        ),
    ],
)
def test_flops_are_what_pytorch_counts(config) -> None:
    model = config.build()
    inputs = model.inputs(torch.randn(1, config.channels, 16, 16))
    inputs.pop("valid", None)  # a mask would be counted by other operations
    with use_backend("math"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert counter.get_total_flops() == pytest.approx(model.flops().forward, rel=1e-6)


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("channels", [1, 3, 20])
@pytest.mark.parametrize("batch", [1, 2])
def test_shapes_channels_and_sides(ndim: int, channels: int, batch: int) -> None:
    shape = (16, 24, 32)[:ndim]
    images = torch.randn(batch, channels, *shape)
    data: dict[str, Any] = {"channels": channels, "ndim": ndim, "shape": shape}
    encoder = EncoderConfig(width=24, depth=4, heads=2, patch=4)
    number, voxels = math.prod(s // 4 for s in shape), 4**ndim
    vit = ViTConfig(width=24, depth=1, heads=2, patch=4, classes=7, **data).build()
    assert vit(**vit.inputs(images)).shape == (batch, 7)
    mae = MAEConfig(encoder=encoder, decoder=DecoderConfig(width=24, depth=1, heads=2), **data).build()
    prediction, hidden = mae.reconstruct(images, torch.rand(batch, number))
    assert prediction.shape == (batch, number, voxels * channels)
    assert hidden.sum(1).tolist() == [number - number // 4] * batch
    unetr = UNETRConfig(encoder=encoder, classes=4, features=2, **data).build()
    assert unetr(**unetr.inputs(images)).shape == (batch, 4, *shape)
    diffusion = DiffusionViTConfig(encoder=encoder, decoder=DiffusionDecoderConfig(kind="linear"), **data).build()
    times = torch.arange(batch)
    assert diffusion(**diffusion.inputs(images), times=times).shape == (batch, number, voxels * channels)
    dit = DiTConfig(width=24, depth=1, heads=2, patch=4, classes=3, **data).build()
    assert dit(**dit.inputs(images), times=times, labels=times).shape == (batch, number, voxels * channels)
    tokens = AdaptiveTokens(length=1 + 3 * (2**ndim - 1), score=GradientScore())
    sap = SAPConfig(encoder=replace(encoder, tokens=tokens), classes=4, features=4, **data).build()
    assert sap(**sap.inputs(images)).shape == (batch, tokens.length, voxels * 4)


@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_classifier_overfits_a_batch(pool: str) -> None:
    torch.manual_seed(0)
    config = ViTConfig(width=32, depth=2, heads=2, patch=4, classes=4, channels=1, pool=pool, cls_token=True)  # type: ignore[arg-type]
    _overfits(ViT(config), lambda model, x: model(**model.inputs(x)))


def test_study_vit_overfits_a_batch() -> None:
    torch.manual_seed(0)
    config = StudyViTConfig(width=32, depth=2, heads=2, patch=4, classes=4, channels=1, shape=16)
    _overfits(config.build(), lambda model, x: model(**model.inputs(x)))


def test_sap_overfits_a_batch() -> None:
    from vitrail.models.model import make_inputs

    torch.manual_seed(0)
    tokens = AdaptiveTokens(length=40, score=GradientScore())
    encoder = EncoderConfig(width=32, depth=2, heads=2, patch=4, tokens=tokens)
    model = SAP(SAPConfig(encoder=encoder, channels=1, classes=2, shape=16, features=8))
    images = torch.rand(2, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = (images[:, 0] > 0.5).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    inputs, made = make_inputs(model.config, images)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(made.paint(model(**inputs)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def _overfits(model: torch.nn.Module, run) -> None:
    x, y = torch.randn(8, 1, 16, 16), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(run(model, x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_head_dropout_is_an_input() -> None:
    model = ViT(ViTConfig(width=24, depth=1, heads=2, patch=4, classes=3, channels=1, head_dropout=0.5))
    inputs = model.inputs(torch.randn(2, 1, 16, 16))
    none = model(**inputs, head_dropout=torch.zeros(2, 24))
    assert torch.equal(none, model.head.bias.expand(2, 3))
    assert torch.equal(model(**inputs, head_dropout=torch.ones(2, 24)), model(**inputs))


def test_mistakes_of_callers_are_named() -> None:
    model = ViT(ViTConfig(width=24, depth=1, heads=2, patch=4, classes=3, channels=1, shape=16, positions="learned"))
    images = torch.randn(2, 1, 16, 16)
    with pytest.raises(ValueError, match=r"call model\(\*\*model.inputs\(images\)\)"):
        model(images)
    with pytest.raises(ValueError, match="'droppath' is no input of ViT; did you mean 'drop_path'"):
        model(**model.inputs(images), droppath=torch.ones(2, 1, 2))
    with pytest.raises(ValueError, match=r"images of \[8, 32\] do not fit learned positions for \[16, 16\]"):
        model.inputs(torch.randn(1, 1, 8, 32))
    with pytest.raises(ValueError, match="channels 3 contradicts the 2 variables"):
        replace(model.config, channels=3, variables=VariablesConfig(known=("a", "b")))
    with pytest.raises(ValueError, match="ndim 0"):
        ViTConfig(width=24, depth=1, heads=2, patch=4, ndim=0)
    with pytest.raises(ValueError, match="give a list of names"):
        VariablesConfig(known="abc")  # type: ignore[arg-type]
    encoder = EncoderConfig(width=8, depth=1, heads=1, patch=4, positions="rope")
    decoder = DecoderConfig(width=8, depth=1, heads=4)
    with pytest.raises(ValueError, match="head width 2 has no room"):
        MAEConfig(encoder=encoder, decoder=decoder, channels=1, shape=16).build()
    mae = MAEConfig(encoder=encoder, decoder=replace(decoder, heads=1), channels=1, shape=32).build()
    with pytest.raises(ValueError, match=r"noise \[1, 16\] must have one number for each token, \[2, 16\]"):
        mae.reconstruct(images, torch.rand(1, 16))
    _, hidden = mae.reconstruct(images, torch.rand(2, 16))  # smaller than configured: its own tokens are counted
    assert hidden.sum(1).tolist() == [12, 12]


def test_dropout_of_tokens() -> None:
    config = ViTConfig(width=24, depth=1, heads=2, patch=4, classes=3, channels=1, pool="tokens")
    model = ViT(config)
    assert model(**model.inputs(torch.randn(2, 1, 8, 8)), head_dropout=torch.ones(2, 24)).shape == (2, 4, 3)
