"""Exported models give the outputs of the run's model: here, in other libraries where they import, and as programs."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from predicting import UNETR, train_run, train_segmentation, write_em
from support import merge
from torch import Tensor

import vitrail
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.sums import sealed
from vitrail.weights import load_weights
from vitrail.weights.backwards import Style, spell
from vitrail.weights.files import open_weights

CLOSE = {"atol": 2e-5, "rtol": 1e-5}
VIT: dict[str, Any] = {"kind": "vit", "ndim": 2, "width": 32, "depth": 2, "heads": 4, "patch": 8, "cls_token": True}
VIT |= {"pool": "cls"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export")
    write_em(place / "em.zarr")
    drawn = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (place / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = drawn.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "images" / name / f"{number}.png")
    return place


@torch.enable_grad()
def of_images(place: Path, name: str, **changes: Any) -> Path:
    """A run on colour images of two classes, whose weights are far from where they start."""
    entry = [{"path": str(place / "images")}]
    options: dict[str, Any] = {"model": dict(VIT), "objective": {"kind": "classify"}, "data__crop": 32}
    options |= {"data__train": entry, "data__valid": entry, "optimizer__lr": 0.05, "data__augment": {}}
    return place / name if (place / name).exists() else train_run(place, Path("none"), name, **(options | changes))


@torch.enable_grad()
def train_run_on(place: Path, name: str, **changes: Any) -> Path:
    return place / name if (place / name).exists() else train_segmentation(place, place / "em.zarr", name, **changes)


def raw(place: Path, number: int = 2) -> Tensor:
    drawn = torch.randint(0, 256, (number, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    return drawn.float()


@torch.no_grad()
def outputs(run: Path, values: Tensor, **options: Any) -> Tensor:
    """What the run's own model says of raw values."""
    model: Any = vitrail.load(run, **options)
    mean, std = (t.view(1, -1, *[1] * (values.ndim - 2)) for t in model.eyes.statistics.tensors())
    return model(**model.inputs((values - mean) / std))


# ---------------------------------------------------------------- by themselves


def test_an_exported_model_opens_as_its_run_does(place: Path, tmp_path: Path) -> None:
    run = train_run_on(place, "seg", ema={"decay": 0.5})
    made = vitrail.export(run, out=tmp_path / "em", checkpoint=1)
    assert made["difference"] == 0
    assert (made["step"], made["weights"]) == (1, "ema")
    assert {path.name for path in (tmp_path / "em").iterdir()} == {
        *("model.safetensors", "config.json", "recipe.yaml", "data.json")
    }
    values = OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)
    theirs, ours = vitrail.load(run, checkpoint=1), vitrail.load(tmp_path / "em")
    for name, tensor in theirs.state_dict().items():
        assert tensor.equal(ours.state_dict()[name])
    assert np.array_equal(theirs.predict(values), ours.predict(values))
    assert np.array_equal(theirs.embed(values), ours.embed(values))
    raw_made = vitrail.export(run, out=tmp_path / "raw", weights="raw")
    assert raw_made["weights"] == "raw"
    assert vitrail.load(run, weights="raw").state_dict().keys() == vitrail.load(tmp_path / "raw").state_dict().keys()
    first = next(iter(vitrail.load(run, weights="raw").parameters()))
    assert first.equal(next(iter(vitrail.load(tmp_path / "raw").parameters())))


def test_an_exported_model_does_what_a_run_does(place: Path, tmp_path: Path) -> None:
    """It predicts, is scored, starts another model, and is exported once more."""
    run = train_run_on(place, "seg", ema={"decay": 0.5})
    vitrail.export(run, out=tmp_path / "em", checkpoint="last")
    vitrail.predict(tmp_path / "em", place / "em.zarr", out=tmp_path / "a.npy")
    vitrail.predict(run, place / "em.zarr", out=tmp_path / "b.npy")
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    assert vitrail.evaluate(tmp_path / "em")["metrics"] == vitrail.evaluate(run)["metrics"]
    config = vitrail.load(run).config
    report = load_weights(config.build(), tmp_path / "em")
    assert report.adapter == "vitrail"
    assert not report["skipped"]
    assert open_weights(tmp_path / "em").config == config
    vitrail.export(tmp_path / "em", out=tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "em/model.safetensors").read_bytes()


def test_damage_and_wrong_words_are_told(place: Path, tmp_path: Path) -> None:
    run = train_run_on(place, "seg", ema={"decay": 0.5})
    vitrail.export(run, out=tmp_path / "em")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        vitrail.export(run, out=tmp_path / "em")
    with pytest.raises(UserError, match="holds that of step 2 alone"):
        vitrail.load(tmp_path / "em", checkpoint=1)
    with pytest.raises(UserError, match="holds the averaged ones alone"):
        vitrail.load(tmp_path / "em", weights="raw")
    for word, options in (
        ("to: 'tensorflow' is not known", {"to": "tensorflow"}),
        ("let it end in .pt2", {"to": "torch"}),
        ("init.only: .encoder. takes its encoder", {"only": "encoder"}),
    ):
        with pytest.raises(UserError, match=word):
            vitrail.export(run, out=tmp_path / "new", **options)
    with pytest.raises(UserError, match="is a folder for --to vitrail"):
        vitrail.export(run, out=tmp_path / "new.onnx")
    assert not (tmp_path / "new").exists()
    weights = tmp_path / "em/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"does not match its checksum in config\.json"):
        vitrail.load(tmp_path / "em")
    content[-1] ^= 1
    weights.write_bytes(content)
    config = tmp_path / "em/config.json"
    config.write_text(config.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(UserError, match="does not match its own checksum"):
        vitrail.load(tmp_path / "em")
    told = json.loads(config.read_text())
    told.pop("seal")
    for change, words in (
        ({"statistics": {"mean": [0.0], "std": [-1.0]}}, "no finite means and positive stds"),
        ({"step": "three"}, "which should be int"),
        ({"files": {}}, "does not say what its weights are"),
        ({"vitrail_export": 99}, "was written by a newer vitrail"),
        ({"recipe": {"extends": "/etc/passwd"}}, "extends another file"),
    ):
        config.write_text(json.dumps(sealed(told | change)))
        with pytest.raises(UserError, match=words):
            vitrail.load(tmp_path / "em")


# ---------------------------------------------------------------- in other libraries

MAE: dict[str, Any] = {
    "kind": "mae",
    "ndim": 2,
    "encoder": {"width": 32, "depth": 2, "heads": 4, "patch": 8, "cls_token": True},
    "decoder": {"kind": "self", "width": 16, "depth": 2, "heads": 2},
}
HF = {
    "vit": ({}, "ViTForImageClassification"),
    "learned": (
        {"model__positions": "learned", "model__eps": 1e-12, "model__bias": False},
        "ViTForImageClassification",
    ),
    "oblong": ({"data__crop": (16, 32), "model__positions": "learned"}, "ViTForImageClassification"),
    "encoder": ({"model__pool": "mean", "model__positions": "none"}, "ViTModel"),
    "dino": ({"model__layer_scale": 0.1, "model__classes": 0}, "Dinov2Model"),
    "registers": (
        {"model__registers": 3, "model__positions": "learned", "model__mlp": "swiglu", "model__hidden": 88},
        "Dinov2WithRegistersModel",
    ),
}


@pytest.mark.parametrize("case", HF)
@torch.no_grad()
def test_hugging_face_gives_the_same(place: Path, tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    changes, kind = HF[case]
    only = "encoder" if kind.endswith("Model") else None
    options = {"add_pooling_layer": False} if kind == "ViTModel" else {}
    run = of_images(place, f"hf-{case}", **{key: value for key, value in changes.items() if key != "model__classes"})
    made = vitrail.export(run, out=tmp_path / "out", to="huggingface", only=only)
    assert made["difference"] < 1e-5
    assert kind in made["opens"]
    loading: dict[str, Any]
    theirs, loading = getattr(transformers, kind).from_pretrained(tmp_path / "out", output_loading_info=True, **options)
    assert not loading["missing_keys"] - {"embeddings.mask_token"}
    assert not loading["unexpected_keys"]
    values = raw(place)[:, :, : json.loads((tmp_path / "out/preprocessor_config.json").read_text())["size"]["height"]]
    told = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
    assert told["do_rescale"]
    mean, std = (torch.tensor(told[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
    images = (values * told["rescale_factor"] - mean) / std
    if only is None:
        torch.testing.assert_close(theirs.eval()(pixel_values=images).logits, outputs(run, values), **CLOSE)
        assert theirs.config.id2label == {0: "ant", 1: "bee"}
        return
    model: Any = vitrail.load(run)
    x, side = None, model.encoder.derive(inputs := model.inputs(images))
    for stage in model.encoder.stages():
        x = stage.run(inputs["x"] if x is None else x, side)
    found = theirs.eval()(pixel_values=images).last_hidden_state
    torch.testing.assert_close(found, x, **CLOSE)


@pytest.mark.parametrize("positions", ["sincos", "learned"])
@torch.no_grad()
def test_vitmae_of_hugging_face_gives_the_same(place: Path, tmp_path: Path, positions: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
    model = merge(MAE, {"encoder.positions": positions})
    run = of_images(place, f"mae-{positions}", model=model, objective={"kind": "reconstruct", "target": "patch"})
    assert vitrail.export(run, out=tmp_path / "out", to="huggingface")["difference"] < 1e-5
    theirs = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.norm_pix_loss
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    expected = theirs(pixel_values=images, noise=noise).logits
    ours: Any = vitrail.load(run)
    found, hidden = ours.reconstruct(images, noise)
    torch.testing.assert_close(found[hidden], expected[hidden], **CLOSE)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__positions": "learned", "model__qk_norm": True, "model__layer_scale": 0.1},
        {"model__input_norm": True, "model__patch_bias": False},
        {"model__registers": 3, "model__positions": "learned"},
        {"model__pool": "mean", "model__cls_token": False, "model__positions": "none", "model__hidden": 40},
    ],
    ids=["plain", "norms", "input", "registers", "mean"],
)
@torch.no_grad()
def test_timm_gives_the_same(place: Path, tmp_path: Path, changes: dict[str, Any], request: Any) -> None:
    run = of_images(place, f"timm-{request.node.callspec.id}", **changes)
    made = vitrail.export(run, out=tmp_path / "out", to="timm")
    assert made["difference"] < 1e-5
    timm = pytest.importorskip(
        "timm", reason="timm needs torchvision, whose wheels do not import beside every PyTorch", exc_type=ImportError
    )
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    mean, std = (torch.tensor(theirs.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    found = theirs((raw(place) / 255 - mean) / std)
    torch.testing.assert_close(found, outputs(run, raw(place)), **CLOSE)


MONAI = {
    "2-D": {"encoder.width": 48, "encoder.heads": 4, "ndim": 2, "features": 4},
    "affine": {"norm": "affine", "residual": False, "encoder.positions": "learned", "features": 4},
}


@pytest.mark.parametrize("case", MONAI)
@torch.no_grad()
def test_unetr_of_monai_gives_the_same(place: Path, tmp_path: Path, case: str) -> None:
    bundle = pytest.importorskip("monai.bundle", reason="MONAI is not installed: pip install monai")
    from safetensors.torch import load_file

    encoder = {"width": 24, "depth": 12, "heads": 2, "patch": 16, "positions": "sincos", "eps": 1e-5}
    model = merge(UNETR | {"decoder": "conv", "encoder": encoder}, MONAI[case])
    ndim = model["ndim"]
    entry = [{"path": str(place / "em.zarr"), "labels": "structures"} | ({"slices": "z"} if ndim == 2 else {})]
    size = 32 if ndim == 2 else (16, 16, 32)
    changes = {"data__crop": 16 if ndim == 2 else size, "data__augment": {}, "data__train": entry, "data__valid": entry}
    if ndim == 2:
        changes["data__crop"] = (16, 32)
    run = train_run_on(place, f"monai-{case}", model=model, **changes)
    assert vitrail.export(run, out=tmp_path / "out", to="monai")["difference"] < 1e-4
    parser = bundle.ConfigParser(json.loads((tmp_path / "out/config.json").read_text()))
    theirs = parser.get_parsed_content("network_def").eval()
    theirs.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    values = torch.randint(0, 256, (1, *changes["data__crop"])).float()
    images = parser.get_parsed_content("preprocessing")(values.clone())
    torch.testing.assert_close(theirs(images[None]), outputs(run, values[None]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("classified", [True, False])
@torch.no_grad()
def test_vit_of_monai_gives_the_same(place: Path, tmp_path: Path, classified: bool) -> None:
    bundle = pytest.importorskip("monai.bundle", reason="MONAI is not installed: pip install monai")
    from safetensors.torch import load_file

    changes = {"model__eps": 1e-5} | ({} if classified else {"model__cls_token": False, "model__pool": "mean"})
    run = of_images(place, f"monai-vit-{classified}", **changes)
    vitrail.export(run, out=tmp_path / "out", to="monai", only=None if classified else "encoder")
    parser = bundle.ConfigParser(json.loads((tmp_path / "out/config.json").read_text()))
    theirs = parser.get_parsed_content("network_def").eval()
    theirs.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    values = raw(place, 1)
    found = theirs(torch.as_tensor(parser.get_parsed_content("preprocessing")(values[0].clone()))[None])[0]
    if classified:
        torch.testing.assert_close(found, outputs(run, values), **CLOSE)
    else:
        features = torch.from_numpy(vitrail.load(run).embed(values.numpy())).flatten(2).movedim(1, 2)
        torch.testing.assert_close(found, features, **CLOSE)


@pytest.mark.parametrize(
    ("to", "changes", "words"),
    [
        ("timm", {"model__positions": "rope"}, r"model.positions: rope is nothing that timm can say"),
        ("timm", {"model__kv_heads": 2}, r"model.kv_heads: 2 is nothing"),
        ("timm", {"model__norm": "rms"}, r"model.norm: rms is nothing"),
        ("timm", {"model__eps": 1e-5}, r"model.eps: 1e-05 is nothing that timm can say, whose models have 1e-06"),
        ("timm", {"model__input_norm": True}, r"model.patch_bias: a bias of patches beside input_norm is nothing"),
        ("huggingface", {"model__qk_norm": True}, r"model.qk_norm: true is nothing that Hugging Face's ViT can say"),
        ("huggingface", {"model__pool": "mean"}, r"model.pool: mean is nothing .* reads the class token"),
        ("huggingface", {"model__registers": 2}, r"model.classes: 2 by one token is nothing"),
        ("monai", {}, r"model.eps: 1e-06 is nothing that MONAI's ViT can say, whose models have 1e-05"),
        (
            "huggingface",
            {"model__tokens": {"kind": "adaptive", "length": 13}},
            r"model.tokens.kind: adaptive is nothing",
        ),
        (
            "torch",
            {"model__tokens": {"kind": "adaptive", "length": 13}},
            r"model.tokens: trees of adaptive tokens grow",
        ),
    ],
)
def test_what_a_layout_cannot_say_is_refused_by_its_key(
    place: Path, tmp_path: Path, to: Any, changes: dict[str, Any], words: str
) -> None:
    name = "refused-" + "-".join(f"{key[7:]}" for key in changes)
    run = of_images(place, name, **changes)
    out = tmp_path / ("out.pt2" if to == "torch" else "out")
    with pytest.raises(UserError, match=words):
        vitrail.export(run, out=out, to=to)
    assert list(tmp_path.iterdir()) == []


NAMES = {
    "blocks.3.attn.qkv.weight": {"timm": "blocks.3.attn.qkv.weight", "monai": "blocks.3.attn.qkv.weight"},
    "blocks.3.attn.q.bias": {"hf": "encoder.layer.3.attention.attention.query.bias"},
    "blocks.3.mlp.fc2.weight": {
        "hf": "encoder.layer.3.output.dense.weight",
        "monai": "blocks.3.mlp.linear2.weight",
    },
    "blocks.12.ls2.gamma": {"timm": "blocks.12.ls2.gamma", "hf": "encoder.layer.12.layer_scale2.lambda1"},
    "blocks.0.attn.norm_qk.k.weight": {"timm": "blocks.0.attn.k_norm.weight"},
    "decoder.skips.1.ups.1.weight": {"monai": "encoder3.blocks.0.0.weight"},
    "decoder.ups.2.block.conv1.weight": {"monai": "decoder3.conv_block.conv1.weight"},
}


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_names_are_read_backwards(name: str) -> None:
    for adapter, expected in NAMES[name].items():
        bare = Style(adapter, r"(?!vit\.|dinov2).*(?<!\.conv)\.(weight|bias|gamma|lambda1)")
        assert spell(name, bare) == expected
    with pytest.raises(ValueError, match="has no name in files of timm"):
        spell("size_embed.weight", Style("timm", ".*"))


def test_an_autoencoder_of_another_decoder_gives_its_encoder(place: Path, tmp_path: Path) -> None:
    model = merge(MAE, {"decoder.kind": "cross"})
    run = of_images(place, "mae-cross", model=model, objective={"kind": "reconstruct"})
    with pytest.raises(UserError, match=r"model.decoder.kind: cross is nothing .* --only encoder writes the encoder"):
        vitrail.export(run, out=tmp_path / "out", to="huggingface")
    with pytest.raises(UserError, match=r"model.kind: mae is no model of timm, .* --only encoder"):
        vitrail.export(run, out=tmp_path / "out", to="timm")
    assert "ViTModel" in vitrail.export(run, out=tmp_path / "hf", to="huggingface", only="encoder")["opens"]
    assert vitrail.export(run, out=tmp_path / "timm", to="timm", only="encoder")["difference"] < 1e-5


# ---------------------------------------------------------------- programs

NORMALIZE = {
    "standard": "fit",
    "window": {"kind": "window", "window": [20.0, 180.0]},
    "log": {"kind": "log", "scale": 30.0},
    "each": {"kind": "variables", "of": {"red": {"kind": "log"}, "green": {"kind": "minmax"}}},
}


@pytest.mark.parametrize("normalize", NORMALIZE)
@torch.no_grad()
def test_a_program_takes_raw_values_of_any_number(place: Path, tmp_path: Path, normalize: str) -> None:
    changes = {"model__kv_heads": 2, "model__positions": "rope", "data__normalize": NORMALIZE[normalize]}
    run = of_images(place, f"torch-{normalize}", **changes)
    made = vitrail.export(run, out=tmp_path / "vit.pt2", to="torch")
    assert made["difference"] < 1e-5
    assert made["values"] == ["batch", 3, 32, 32]
    opened = torch.export.load(tmp_path / "vit.pt2").module()
    model: Any = vitrail.load(run)
    for number in (1, 3):
        values = raw(place, number)
        expected = torch.from_numpy(model.predict(values.numpy()))
        torch.testing.assert_close(opened(values).softmax(dim=-1), expected, **CLOSE)


@torch.no_grad()
def test_programs_of_voxels_and_of_features(place: Path, tmp_path: Path) -> None:
    run = train_run_on(place, "seg", ema={"decay": 0.5})
    assert vitrail.export(run, out=tmp_path / "seg.pt2", to="torch")["gives"] == "logits"
    values = torch.randint(0, 256, (1, 1, 16, 16, 16)).float()
    opened = torch.export.load(tmp_path / "seg.pt2").module()
    torch.testing.assert_close(opened(values), outputs(run, values), **CLOSE)
    assert vitrail.export(run, out=tmp_path / "features.pt2", to="torch", only="encoder")["gives"] == "features"
    found = torch.export.load(tmp_path / "features.pt2").module()(values)
    torch.testing.assert_close(found, torch.from_numpy(vitrail.load(run).embed(values.numpy())), **CLOSE)


@torch.no_grad()
def test_onnxruntime_gives_the_same(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install vitrail[onnx]")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install vitrail[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install vitrail[onnx]")
    model = merge(UNETR, {"decoder": "conv", "encoder.width": 16, "encoder.kv_heads": 1})
    run = train_run_on(place, "conv", model=model)
    made = vitrail.export(run, out=tmp_path / "conv.onnx", to="onnx")
    assert made["difference"] < 1e-4
    session = runtime.InferenceSession(str(tmp_path / "conv.onnx"), providers=["CPUExecutionProvider"])
    for number in (1, 3):
        values = torch.randint(0, 256, (number, 1, 16, 16, 16)).float()
        (found,) = session.run(None, {"values": values.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), outputs(run, values), atol=1e-4, rtol=1e-4)


def test_without_onnx_it_says_what_to_install(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    hidden = "onnxruntime"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == hidden else name and found("json"))
    with pytest.raises(UserError, match="onnxruntime is not installed; pip install"):
        vitrail.export(place / "none", out=tmp_path / "a.onnx", to="onnx")


@pytest.mark.parametrize("more", [(), ("more",)])
@torch.no_grad()
def test_a_program_knows_which_variable_is_which(place: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    model = VIT | {"variables": {"known": [*more, "blue", "red", "green"]}}
    run = of_images(place, f"named{len(more)}", model=model)
    vitrail.export(run, out=tmp_path / "named.pt2", to="torch")
    found = torch.export.load(tmp_path / "named.pt2").module()(raw(place))
    expected = vitrail.load(run).predict(raw(place).numpy())
    np.testing.assert_allclose(found.softmax(dim=1).numpy(), expected, **CLOSE)
