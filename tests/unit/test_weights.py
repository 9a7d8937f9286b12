"""Weights from elsewhere: what is read, what is refused, and that inflated models start as the ones they come from."""

import argparse
import dataclasses
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.references import MAE as ForeignMAE
from parity.references import scramble
from PIL import Image
from safetensors.torch import save_file
from support import events, run, tiny_recipe, torchrun
from torch import Tensor, nn

import vitrail
from vitrail.errors import UserError
from vitrail.layers.attention import attend, rotate
from vitrail.layers.tokens import (
    AdaptiveTokens,
    gather_tokens,
    grid_coordinates,
    inflated_rope_table,
    patchify,
    rope_table,
)
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import ViTConfig
from vitrail.recipe.sections import Init
from vitrail.weights import Report, load_initial, load_weights
from vitrail.weights.files import open_weights
from vitrail.weights.names import ADAPTERS
from vitrail.weights.pieces import head_major, patch_kernel, position_table, resize, sincos_rows

MAKE: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "patch": 4}
SIZES = {"size": 16, "patch": 4, "width": 24, "depth": 2, "heads": 2}


def vit(**changes: Any) -> Any:
    return (
        ViTConfig(**{**MAKE, "channels": 3, "shape": 16, "positions": "learned", "cls_token": True, **changes})
        .build()
        .eval()
    )


def timm_state(seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """An encoder under timm's names: what is left of an MAE without its decoder, its positions learned."""
    model = scramble(ForeignMAE(**{**SIZES, "decoder": (16, 1, 2), **changes}), seed)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["pos_embed"] += torch.randn(state["pos_embed"].shape, generator=torch.Generator().manual_seed(seed + 1))
    return {name: value for name, value in state.items() if "decoder" not in name and name != "mask_token"}


def refusal(model: nn.Module, given: Any, **options: Any) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, given, **options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return str(caught.value)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("wrap", [None, "model", "state_dict", "teacher"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone."])
def test_every_kind_of_file_gives_the_same(tmp_path: Path, wrap: str | None, prefix: str) -> None:
    state = timm_state()
    expected = vit()
    load_weights(expected, state)
    named = {prefix + name: value for name, value in state.items()}
    tree = named if wrap is None else {wrap: named, "epoch": 3, "optimizer": {"state": {}}}
    torch.save(tree, tmp_path / "weights.pth")
    torch.save(tree, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(named, tmp_path / "weights.safetensors")
    for name in ("weights.pth", "old.pt", "weights.safetensors"):
        model = vit()
        assert load_weights(model, str(tmp_path / name)).adapter == "timm"
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_averaged_weights_come_first_and_that_is_said() -> None:
    plain, averaged = timm_state(0), timm_state(5)
    model = vit()
    report = load_weights(model, {"model": plain, "model_ema": averaged})
    assert torch.equal(model.encoder.norm.weight, averaged["norm.weight"])
    assert any("model_ema" in note for note in report.notes)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code was run')",))


def test_arguments_of_training_scripts_are_passed_over(tmp_path: Path) -> None:
    state = timm_state()
    torch.save({"model": state, "args": argparse.Namespace(lr=1e-3, out="runs"), "epoch": 3}, tmp_path / "weights.pth")
    model = vit()
    load_weights(model, tmp_path / "weights.pth")
    assert torch.equal(model.encoder.norm.weight, state["norm.weight"])
    torch.save({"model": state, "args": argparse.Namespace(inner=Harmful())}, tmp_path / "harmful.pth")
    assert "would run code" in refusal(vit(), tmp_path / "harmful.pth")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    for number, tree in enumerate(({"model": timm_state(), "args": Harmful()}, Harmful())):
        torch.save(tree, tmp_path / f"{number}.pth")
        assert "would run code" in refusal(vit(), tmp_path / f"{number}.pth")
        (tmp_path / f"{number}.bin").write_bytes(pickle.dumps(tree, protocol=2))
        assert f"{number}.bin: " in refusal(vit(), tmp_path / f"{number}.bin")


def test_kinds_of_files_that_are_more_than_weights(tmp_path: Path) -> None:
    more = {"model": timm_state(), "words": {"a", "b"}, "bytes": b"abc"}
    for name, new in (("new.pt", True), ("old.pt", False)):
        torch.save(more, tmp_path / name, pickle_protocol=4, _use_new_zipfile_serialization=new)
        assert "holds Python objects besides tensors" in refusal(vit(), tmp_path / name)
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
    assert "is a TorchScript program" in refusal(vit(), tmp_path / "program.pt")
    for name, content in (("cut.pt", (tmp_path / "new.pt").read_bytes()[:5000]), ("page.pt", b"Page not found")):
        (tmp_path / name).write_bytes(content)
        assert "fetch it again" in refusal(vit(), tmp_path / name)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "weights.h5").write_bytes(b"x")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "nothing.pt")
    assert "not a whole safetensors file" in refusal(vit(), tmp_path / "cut.safetensors")
    assert "empty.pt: " in refusal(vit(), tmp_path / "empty.pt")
    assert "read from .safetensors" in refusal(vit(), tmp_path / "weights.h5")
    assert "not list" in refusal(vit(), tmp_path / "list.pt")
    assert "no tensors were found" in refusal(vit(), tmp_path / "nothing.pt")
    assert "no such file" in refusal(vit(), tmp_path / "absent.pt")
    assert "holds no weights" in refusal(vit(), tmp_path)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    state = timm_state()
    names = sorted(state)
    table = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(table.values()):
        save_file({name: state[name] for name in names if table[name] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    one, many = vit(), vit()
    load_weights(one, state)
    load_weights(many, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))
    index.write_text(json.dumps({"weight_map": table | {names[0]: "../elsewhere.safetensors"}}))
    assert "does not lie beside it" in refusal(vit(), tmp_path)


# ---------------------------------------------------------------- names


def test_what_is_not_recognised_is_refused_with_the_adapters() -> None:
    message = refusal(vit(), {"conv1.weight": torch.zeros(3)})
    assert "no known kind" in message
    assert "vitrail, timm, mae, hf, dit, sit, diffusers, monai, ucf, torchditan, torchtitan-mae" in message
    assert "adapter: 'tim' is unknown" in refusal(vit(), timm_state(), adapter="tim")
    both = timm_state() | {"encoder.blocks.0.attn.qkv.weight": torch.zeros(3)}
    assert "it could be vitrail or timm" in refusal(vit(), both)


def test_the_report_accounts_for_every_tensor() -> None:
    state = timm_state() | {
        "mask_token": torch.zeros(1, 24),
        "head.weight": torch.zeros(5, 24),
        "head.bias": torch.zeros(5),
    }
    model = vit(classes=5, shape=24)
    report = load_weights(model, state)
    names = {entry.name for entry in report.entries if entry.action != "unused"}
    assert names == {name for name, _ in model.named_parameters()}
    used = {source for entry in report.entries for source in entry.sources} | set(report.names("unused"))
    assert used == set(state)
    assert report.names("unused") == ["mask_token"]
    assert report.names("resized") == ["encoder.pos_embed.table"]
    assert len(report["permuted"]) == 4
    assert json.loads(json.dumps(report.to_json()))["adapter"] == "timm"
    text = str(report)
    assert "encoder.blocks.0-1.attn.qkv.weight" in text
    assert "grid 4 x 4 to 6 x 6" in text
    assert "2 of the model were taken" in text


def test_heads_become_whole() -> None:
    q, k, v = (torch.arange(4.0) + 10 * i for i in range(3))
    assert head_major(q, k, v, head_width=2).value.tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]
    pair = head_major(q, k[:2], v[:2], head_width=2)  # two heads of queries have one of keys and values
    assert pair.value.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    with pytest.raises(ValueError, match="3 wide"):
        head_major(q, k, v, head_width=3)


# ---------------------------------------------------------------- refusals


def test_loads_that_would_be_wrong_are_refused() -> None:
    state = timm_state()
    assert "2 blocks, the model's 3; set depth: 2" in refusal(vit(depth=3), state)
    assert "2 blocks, the model's 1" in refusal(vit(depth=1), state, strict=False)
    cut = {name: value for name, value in state.items() if not name.startswith("blocks.1")}
    assert "1 blocks, the model's 2" in refusal(vit(), cut)
    assert "patches of the file are 4 x 4 voxels, the model's 8 x 8" in refusal(vit(patch=8), state)
    assert "its tokens are 24 wide, the model's 32; set width" in refusal(vit(width=32), state, strict=False)
    scaled = refusal(vit(layer_scale=1.0), state)
    assert "does not have encoder.blocks.0.ls1.gamma" in scaled
    assert "; set layer_scale: null; or, where" in scaled
    assert "no place for patch_embed.proj.bias, blocks.0." in refusal(vit(bias=False), state)
    assert "; set bias: true" in refusal(vit(bias=False), state)
    assert "; set mlp: gelu" in refusal(vit(mlp="swiglu", hidden=96), state)
    assert "; set qk_norm: false" in refusal(vit(qk_norm=True), state)
    assert "; set norm: layer" in refusal(vit(norm="rms"), state)
    assert "; set input_norm: false" in refusal(vit(input_norm=True), state)
    more = {f"blocks.{i}.ls{j}.gamma": torch.ones(24) for i in range(2) for j in (1, 2)}
    assert "; set layer_scale: 1.0" in refusal(vit(), state | more)
    assert "set cls_token: true and registers: 0" in refusal(vit(cls_token=False), state)
    assert "set cls_token: true and registers: 0" in refusal(vit(registers=4), state)
    assert "set positions: learned" in refusal(vit(positions="sincos"), state)
    assert "set positions: learned" in refusal(vit(positions="rope"), state)
    without = {name: value for name, value in state.items() if name != "pos_embed"}
    assert "holds no positions" in refusal(vit(), without)
    assert "encoder.blocks.0.attn.qkv.weight" in refusal(vit(kv_heads=1), state)
    pooled = {name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: v for name, v in state.items()}
    assert "has fc_norm.weight: a norm after pooling (fc_norm)" in refusal(vit(), pooled)


def with_table(height: int, width: int, *, cls: bool = True) -> dict[str, Tensor]:
    table = torch.randn(1, height * width + cls, 24, generator=torch.Generator().manual_seed(2))
    return timm_state() | {"pos_embed": table}


def test_a_table_that_may_be_of_several_grids(tmp_path: Path) -> None:
    """14 x 16 patches and a class token are as many rows as 15 x 15: the model's own grid decides, or nothing does."""
    state = with_table(14, 16)
    model = vit(shape=(56, 64))
    (note,) = [note for note in load_weights(model, state).notes if "positions" in note]
    assert "its 225 positions may be 14 x 16 after 1 of other tokens or 15 x 15" in note
    assert torch.equal(model.encoder.pos_embed.table, state["pos_embed"][0, 1:])
    square = vit(shape=60)
    assert any("the model's own grid was taken, 15 x 15" in note for note in load_weights(square, state).notes)
    assert torch.equal(square.encoder.pos_embed.table, state["pos_embed"][0])
    for shape in (16, (28, 32)):
        assert "its 225 positions may be" in refusal(vit(shape=shape), state)
    save_file(state, tmp_path / "model.safetensors")
    settings = {"architecture": "vit", "pretrained_cfg": {"input_size": [3, 56, 64]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    told = vit()
    report = load_weights(told, tmp_path)
    assert [entry.note for entry in report["resized"]] == ["grid 14 x 16 to 4 x 4"]
    assert not any("positions" in note for note in report.notes)
    # 6 x 6 or 4 x 9: proportions of the model's own grid count, also where it is of another size.
    assert "may be 8 x 18 after 1 of other tokens or 12 x 12" in refusal(vit(shape=(16, 36)), with_table(8, 18))
    oblong = load_weights(vit(shape=(16, 32)), with_table(7, 14))
    assert [entry.note for entry in oblong["resized"]] == ["grid 7 x 14 to 4 x 8"]
    assert "its 98 positions are no square grid" in refusal(vit(), with_table(7, 14, cls=False))


def test_own_names_do_not_tell_a_grid() -> None:
    state = scramble(vit()).state_dict()
    report = load_weights(vit(shape=(8, 32)), state)
    assert any("may be 2 x 8 or 4 x 4; the model's own grid was taken" in note for note in report.notes)
    assert not any("may be" in note for note in load_weights(vit(), state).notes)
    assert "may be 2 x 8 or 4 x 4; use the run itself" in refusal(vit(shape=(12, 48)), state)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.0.gamma_1", "vit_*_rope_ape_*"),
        ("rope.freqs", "frequencies were learned"),
        ("blocks.1.attn.norm.weight", "a norm of what attention gives"),
        ("blocks.1.mlp.norm.weight", "a norm inside its MLPs"),
        ("attn_pool.latent", "pooling by attention"),
        ("dist_token", "token of distillation"),
        ("blocks.0.attn.rel_pos.mlp.fc1.weight", "biases by distance"),
        ("rel_pos_bias.relative_position_bias_table", "biases by distance"),
        ("blocks.0.attn.lambda_q1", "differential attention"),
        ("blocks.0.attn.q_norm.weight", "no place for"),
        ("patch_embed.backbone.stem.conv.weight", "patches that other layers make first"),
        ("patch_embed.norm.weight", "patches that other layers make first"),
        ("neck.0.weight", "no place for"),
    ],
)
def test_names_of_other_mathematics(name: str, said: str) -> None:
    """What a file computes besides is refused in words, where all that the model has would fit."""
    state = timm_state() | {name: torch.ones(24)}
    if "gamma" in name:
        state |= {f"blocks.{i}.gamma_{j}": torch.ones(24) for i in range(2) for j in (1, 2)}
        state["pos_embed"] = state["pos_embed"][:, 1:]
        assert said in refusal(vit(layer_scale=1.0), state)
        load_weights(vit(layer_scale=1.0), state, strict=False)
        return
    assert said in refusal(vit(), state)


def test_values_that_are_not_finite_are_refused() -> None:
    state = timm_state()
    state["blocks.1.mlp.fc2.bias"][3] = math.nan
    assert "blocks.1.mlp.fc2.bias holds values that are not finite" in refusal(vit(), state)  # the model is untouched


def test_a_refusal_does_not_contradict_itself() -> None:
    """A tensor whose shape is wrong is not told a second time, as one without a place."""
    message = refusal(vit(patch=8), timm_state())
    assert "patches of the file are 4 x 4 voxels" in message
    assert "no place" not in message
    assert "strict" not in message


def test_options_that_are_none() -> None:
    assert "head: 'no' is unknown; use true, false or auto" in refusal(vit(), timm_state(), head="no")
    report = load_weights(vit(classes=2), timm_state(), only="encoder")
    assert report.names("skipped") == ["head.weight", "head.bias"]
    assert "has no 'encoders'" in refusal(vit(), timm_state(), only="encoders")


def test_not_strict_loads_what_fits_and_says_the_rest() -> None:
    model = vit(cls_token=False, layer_scale=0.5)
    report = load_weights(model, timm_state(), strict=False)
    assert set(report.names("unused")) == {"cls_token"}
    assert len(report.names("skipped")) == 4
    assert any("cls_token: true" in note for note in report.notes)
    assert model.encoder.blocks[0].ls1.gamma.eq(0.5).all()


def test_the_classifier_is_loaded_or_left_as_asked() -> None:
    state = timm_state() | {"head.weight": torch.ones(5, 24), "head.bias": torch.ones(5)}
    right, other = vit(classes=5), vit(classes=3)
    assert load_weights(right, state).names("skipped") == []
    assert right.head.bias.eq(1).all()
    assert "head.weight is 5 x 24 in the file and 3 x 24 in the model; head: false starts it anew" in refusal(
        other, state
    )
    report = load_weights(other, state, head="auto")
    assert {entry.note for entry in report["skipped"]} == {"5 classes in the file, 3 in the model"}
    fresh = vit(classes=5)
    assert len(load_weights(fresh, state, head=False)["skipped"]) == 2
    assert fresh.head.bias.eq(0).all()
    assert len(load_weights(vit(classes=5), timm_state())["skipped"]) == 2  # a file without one


def test_only_some_parts() -> None:
    foreign = scramble(ForeignMAE(**SIZES, decoder=(16, 1, 2)))
    c = MAEConfig(
        encoder=EncoderConfig(**MAKE, cls_token=True),
        decoder=DecoderConfig(width=8, depth=2, heads=2),
        channels=3,
        shape=16,
    )
    assert "decoder.mask_token is 1 x 1 x 16 in the file" in refusal(c.build(), foreign.state_dict())
    report = load_weights(c.build(), foreign.state_dict(), only=["encoder"])
    assert all(name.startswith("decoder.") for name in report.names("skipped"))
    assert "has no 'encoders'; its parts are encoder, decoder" in refusal(
        c.build(), foreign.state_dict(), only=["encoders"]
    )
    # A model without a decoder of that kind takes the encoder alone.
    assert load_weights(vit(), foreign.state_dict()).adapter == "mae"


# ---------------------------------------------------------------- DINO's names


def test_names_of_dinov2() -> None:
    state = {}
    for name, value in timm_state().items():
        if ".mlp.fc1." in name:
            state[name.replace("fc1", "w12")] = torch.cat([value[:32], value[32:64] + 1])
        elif ".mlp.fc2." in name:
            state[name.replace("fc2", "w3")] = value[:, :32] if value.ndim == 2 else value
        else:
            state[name] = value
    gammas = {f"blocks.{i}.ls{j}.gamma": torch.full((24,), float(i + j)) for i in range(2) for j in (1, 2)}
    state |= gammas | {"register_tokens": torch.ones(1, 3, 24), "mask_token": torch.zeros(1, 24)}
    model = vit(registers=3, layer_scale=1.0, mlp="swiglu", hidden=32)
    load_weights(model, state)
    block = model.encoder.blocks[1]
    assert torch.equal(block.mlp.gate.weight, state["blocks.1.mlp.w12.weight"][:32])
    assert torch.equal(block.mlp.fc1.weight, state["blocks.1.mlp.w12.weight"][32:])
    assert torch.equal(block.mlp.fc2.weight, state["blocks.1.mlp.w3.weight"])
    assert block.ls2.gamma.eq(3).all()
    assert model.encoder.prefix_tokens[1:].eq(1).all()


def test_blocks_in_chunks() -> None:
    state = timm_state()
    chunked = {name.replace("blocks.", "blocks.0."): value for name, value in state.items()}
    one, many = vit(), vit()
    load_weights(one, state)
    load_weights(many, chunked)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def dinov3_attention(x: Tensor, state: dict[str, Tensor], side: int, heads: int) -> Tensor:
    """Attention of DINOv3 by its definition: rotated halves, coordinates from -1 to 1, keys without bias."""
    bias = state["attn.qkv.bias"] * state["attn.qkv.bias_mask"]
    q, k, v = (x @ state["attn.qkv.weight"].T + bias).unflatten(-1, (3, heads, -1)).unbind(2)
    centres = 2 * (torch.arange(side) + 0.5) / side - 1
    places = torch.stack(torch.meshgrid(centres, centres, indexing="ij"), dim=-1).flatten(0, 1)
    angles = (2 * math.pi * places[:, :, None] / state["rope_embed.periods"]).flatten(1).tile(2)[:, None]  # N 1 K

    def turned(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    return attend(turned(q), turned(k), v).flatten(2) @ state["attn.proj.weight"].T + state["attn.proj.bias"]


def test_rotations_of_dinov3() -> None:
    """Its channels are put in this library's order; the scale of its coordinates is the encoder's to have."""
    width, heads, side = 32, 2, 4
    state = timm_state(width=width)
    del state["pos_embed"]
    periods = 100.0 ** (torch.arange(4) / 4)
    mask = torch.ones(3 * width)
    mask[width : 2 * width] = 0
    state |= {"rope_embed.periods": periods, "storage_tokens": torch.ones(1, 4, width)}
    state |= {f"blocks.{i}.attn.qkv.bias_mask": mask for i in range(2)}
    make: dict[str, Any] = {"width": width, "positions": "rope", "registers": 4, "rope_scale": 4 * math.pi / side}
    model = vit(**make)
    assert "stand at the centre of the image" in refusal(model, state)
    report = load_weights(model, state, strict=False)
    assert any("stand at the centre" in note for note in report.notes)
    assert not any("rope_scale" in note for note in report.notes)
    x = torch.randn(2, side * side, width, generator=torch.Generator().manual_seed(3))
    one = {name.removeprefix("blocks.0."): value for name, value in state.items()}
    expected = dinov3_attention(x, one, side, heads)
    places = grid_coordinates((side, side), (1, 1)) - 0.5
    found = model.encoder.blocks[0].attn(x, rope_table(places * (4 * math.pi / side), width // heads, 100.0))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert "set positions: rope" in refusal(vit(width=width, registers=4), state)
    assert "heads are 16 wide, the model's 8" in refusal(vit(**make, heads=4), state)
    assert "set theta: 100" in refusal(vit(**make, theta=50.0), state)
    assert "set rope_scale: 3.14159" in refusal(vit(**make | {"rope_scale": 1.0}), state)
    assert "4 x 8 patches are no square" in refusal(vit(**make, shape=(16, 32)), state)


@pytest.mark.parametrize(
    "periods", [torch.zeros(3), torch.tensor([1.0, 2.0, -3.0]), torch.zeros(()), torch.zeros(3, 3)]
)
def test_rotations_that_no_file_has(periods: Tensor) -> None:
    state = timm_state() | {"rope_embed.periods": periods}
    del state["pos_embed"]
    for strict in (True, False):
        refusal(vit(positions="rope"), state, strict=strict)


def test_rotations_that_no_file_tells() -> None:
    """timm does not store DINOv3's: they are known by what else is there, or the file is refused."""
    width, side = 32, 4
    plain = timm_state(width=width)
    del plain["pos_embed"]
    state = {n: v for n, v in plain.items() if not n.endswith("attn.qkv.bias")} | {"reg_token": torch.ones(1, 4, width)}
    for i in range(2):
        state |= {f"blocks.{i}.gamma_{j}": torch.ones(width) for j in (1, 2)}
        state |= {f"blocks.{i}.attn.{letter}_bias": plain[f"blocks.{i}.attn.qkv.bias"][:width] for letter in "qv"}
    told = state | {"rope.periods": 100.0 ** (torch.arange(4) / 4)}
    make: dict[str, Any] = {"width": width, "registers": 4, "layer_scale": 1.0, "rope_scale": 4 * math.pi / side}
    one, other = vit(**make, positions="rope"), vit(**make, positions="rope")
    report = load_weights(one, state, strict=False)
    assert any("taken for DINOv3, whose theta is 100" in note for note in report.notes)
    load_weights(other, told, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    keys = one.encoder.blocks[0].attn.qkv.bias.view(2, 3, 16)[:, 1]
    assert keys.eq(0).all()
    assert "set theta: 100" in refusal(vit(**make, positions="rope", theta=10.0), state)
    assert "set rope_scale" in refusal(vit(**make | {"rope_scale": 1.0}, positions="rope"), state)
    for positions in ("none", "learned", "sincos"):
        assert "taken for DINOv3, which turns" in refusal(vit(**make, positions=positions), state)
    table = {"pos_embed": torch.randn(1, side**2 + 5, width)}
    assert "as EVA's do" in refusal(vit(**make | {"rope_scale": 1.0}), state | table)
    for positions in ("none", "rope"):  # nothing tells what it is
        assert "does not tell whether its model turns" in refusal(vit(width=width, positions=positions), plain)


# ---------------------------------------------------------------- channels, grids and one more axis


def test_a_kernel_for_other_channels() -> None:
    kernel = torch.randn(6, 3, 4, 4)
    image = torch.randn(2, 1, 8, 8)
    expected = nn.functional.conv2d(image.expand(-1, 3, -1, -1), kernel, stride=4).flatten(2).mT
    for channels in (1, 2, 5):
        made = patch_kernel(kernel, patch=(4, 4), channels=channels)
        found = patchify(image.expand(-1, channels, -1, -1), (4, 4)) @ made.value.T
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert made.action == "inflated"
    assert patch_kernel(kernel, patch=(4, 4), channels=3).action == "copied"


def test_a_kernel_for_variables() -> None:
    model = vit(variables=VariablesConfig(known=("em", "tag")), channels=None)
    state = timm_state()
    report = load_weights(model, state)
    assert all("patch_embed" in name for name in report.names("skipped"))
    expected = state["patch_embed.proj.weight"].sum(dim=1).flatten(1).T
    for variable in range(2):
        torch.testing.assert_close(model.encoder.patch_embed.weight[variable], expected)


def test_resized_tables() -> None:
    flat = torch.arange(4.0)[:, None].repeat(1, 3)  # a ramp along the only axis
    assert resize(flat, (4,), (8,))[3:5].mean() == 1.5
    rows = torch.randn(16, 5)
    assert torch.equal(position_table(rows, old=(4, 4), new=(4, 4)).value, rows)
    assert position_table(torch.ones(1, 17, 5), old=(4, 4), new=(7, 3), skip=1).value.allclose(torch.ones(21, 5))
    volume = resize(torch.ones(8, 2), (2, 2, 2), (3, 4, 5))
    assert volume.allclose(torch.ones(60, 2))
    deep = position_table(rows, old=(4, 4), new=(3, 4, 4))
    assert torch.equal(deep.value.view(3, 16, 5), rows.expand(3, -1, -1))
    smooth = sincos_rows((8, 8), 8)
    near = resize(sincos_rows((4, 4), 8), (4, 4), (8, 8)).view(8, 8, 8)[2:6, 2:6]
    assert (near - smooth.view(8, 8, 8)[2:6, 2:6]).abs().max() > 0  # sizes only: another grid has its own coordinates
    with pytest.raises(ValueError, match="3 axes cannot serve a model of 2"):
        position_table(rows, old=(4, 2, 2), new=(4, 4))


def deep(images: Tensor, depth: int) -> Tensor:
    return images.unsqueeze(2).expand(-1, -1, depth, -1, -1)


@pytest.mark.parametrize(
    ("positions", "depth", "cls"), [("learned", 8, False), ("learned", 4, True), ("none", 8, False)]
)
@torch.no_grad()
def test_an_inflated_vit_starts_as_the_flat_one(positions: str, depth: int, cls: bool) -> None:
    """With a class token only where the volume is one patch deep: else patches outnumber it as they did not before."""
    flat = scramble(vit(positions=positions, cls_token=cls, pool="tokens"))
    solid = vit(positions=positions, cls_token=cls, pool="tokens", ndim=3, shape=(depth, 16, 16))
    state = timm_state()
    if not cls:
        del state["cls_token"]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    if positions == "none":
        del state["pos_embed"]
    load_weights(flat, state, strict=positions != "none")  # a file does not tell that there are none
    report = load_weights(solid, state, strict=positions != "none")
    assert "encoder.patch_embed.proj.weight" in report.names("inflated")
    assert ("encoder.pos_embed.table" in report.names("inflated")) == (positions == "learned")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = flat(**flat.inputs(images))
    found = solid(**solid.inputs(deep(images, depth))).unflatten(1, (depth // 4, 16))
    torch.testing.assert_close(found, expected[:, None].expand_as(found), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_inflated_rotations_start_as_the_flat_ones() -> None:
    """Weights of images in an encoder of volumes: axial rotations would be others, superposed ones start alike."""
    flat = vit(positions="rope", cls_token=False, pool="tokens")
    state = timm_state()
    del state["cls_token"], state["pos_embed"]
    load_weights(flat, state, strict=False)
    volumes = {"positions": "rope", "cls_token": False, "pool": "tokens", "ndim": 3, "shape": (8, 16, 16)}
    axial, solid = vit(**volumes), vit(**volumes, rope="superposed")
    for model in (axial, solid):
        load_weights(model, state, strict=False)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = flat(**flat.inputs(images))[:, None].expand(-1, 2, -1, -1).flatten(1, 2)
    inputs = solid.inputs(deep(images, 8))
    assert not torch.allclose(axial(**inputs), expected, atol=1e-3)
    torch.testing.assert_close(solid(**inputs), expected, atol=1e-5, rtol=1e-5)
    solid.encoder.rope_turns += 0.3
    assert not torch.allclose(solid(**inputs), expected, atol=1e-3)


def test_inflated_rope_is_relative_in_depth_too() -> None:
    q, k = torch.randn(2, 1, 1, 1, 12, generator=torch.Generator().manual_seed(1))
    turns = torch.linspace(0.1, 0.7, 6)

    def product(a: list[float], b: list[float]) -> float:
        tables = [inflated_rope_table(torch.tensor([[p]]), 12, 100.0, turns) for p in (a, b)]
        return float((rotate(q, tables[0]) * rotate(k, tables[1])).sum())

    assert product([1.0, 2.0, 3.0], [4.0, 4.0, 4.0]) == pytest.approx(
        product([2.0, 5.0, 0.0], [5.0, 7.0, 1.0]), abs=1e-5
    )
    assert product([1.0, 2.0, 3.0], [4.0, 4.0, 4.0]) != pytest.approx(
        product([1.0, 2.0, 3.0], [2.0, 4.0, 4.0]), abs=1e-3
    )
    turns.requires_grad_()
    inflated_rope_table(torch.rand(1, 4, 3), 12, 100.0, turns).sum().backward()
    assert turns.grad is not None
    assert turns.grad.abs().min() > 0


# ---------------------------------------------------------------- runs of this library


@pytest.fixture(scope="module")
def trained(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tiny_recipe(
        volume,
        tmp_path_factory.mktemp("weights") / "run",
        run__steps=4,
        checkpoint__every=2,
        model__encoder__positions="learned",
        ema={"decay": 0.5},
        optimizer__lr=1e-2,
    )
    return vitrail.train(tree, quiet=True).run_dir


def own(**changes: Any) -> EncoderConfig:
    return EncoderConfig(**{"width": 24, "depth": 2, "heads": 2, "patch": 4, "positions": "learned", **changes})


def test_a_run_gives_its_encoder_to_other_models(trained: Path) -> None:
    source = vitrail.load(trained)
    for model in (
        ViTConfig(width=24, depth=2, heads=2, patch=4, positions="learned", ndim=3, channels=1, shape=16).build(),
        UNETRConfig(encoder=own(depth=2), ndim=3, channels=1, shape=16, classes=2, skips=False, features=4).build(),
        SAPConfig(encoder=own(), ndim=3, channels=1, shape=16, classes=2).build(),
    ):
        report = load_weights(model, trained)
        assert report.adapter == "vitrail"
        assert not [name for name in report.names("skipped") if name.startswith("encoder.")]
        for name, value in source.encoder.named_parameters():
            assert torch.equal(model.encoder.get_parameter(name), value), name
    larger = ViTConfig(
        width=24, depth=2, heads=2, patch=4, positions="learned", ndim=3, channels=1, shape=(16, 24, 32)
    ).build()
    assert load_weights(larger, trained).names("resized") == ["encoder.pos_embed.table"]


def test_variables_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(*known: str) -> Any:
        variables = VariablesConfig(known=known)
        c = MAEConfig(
            encoder=own(variables=variables), decoder=DecoderConfig(width=8, depth=1, heads=2), channels=None, shape=16
        )
        return c.build()

    source, target = scramble(model("em", "tag", "dye")), model("dye", "new", "em")

    def opened(given: Any) -> Any:
        weights = open_weights(given)
        weights.config = source.config
        return weights

    monkeypatch.setattr("vitrail.weights.load.open_weights", opened)
    load_weights(target, source.state_dict())
    old, new = source.encoder.patch_embed.weight, target.encoder.patch_embed.weight
    assert torch.equal(new[0], old[2])
    assert torch.equal(new[2], old[0])
    torch.testing.assert_close(new[1], old.mean(dim=0))
    old, new = (m.decoder.head.bias.view(16, 3) for m in (source, target))
    assert torch.equal(new[:, 0], old[:, 2])
    assert torch.equal(new[:, 2], old[:, 0])


def test_a_unetr_of_monai() -> None:
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed", exc_type=ImportError)
    theirs = scramble(nets.UNETR(1, 2, (32, 32), 4, 24, 48, 2, spatial_dims=2))

    def ours(shape: int, channels: int = 1) -> Any:
        encoder = own(width=24, depth=12, heads=2, patch=16, hidden=48, eps=1e-5)
        c = UNETRConfig(encoder=encoder, ndim=2, channels=channels, shape=shape, classes=2, features=4)
        return c.build().eval()

    model = ours(32)
    report = load_weights(model, theirs.state_dict())
    assert report.adapter == "monai"
    assert not report["skipped"]
    assert any("2 of the model were taken" in note for note in report.notes)
    assert len(report["permuted"]) == 12  # the rest is copied, and so is a bias of 0
    assert "decoder.out.weight" in report.names("copied")
    images = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(**model.inputs(images)), theirs(images), atol=1e-5, rtol=1e-5)
    assert load_weights(ours(64), theirs.state_dict()).names("resized") == ["encoder.pos_embed.table"]
    assert "goes into a unetr" in refusal(vit(), theirs.state_dict())
    # 16 positions of a volume may be 4 x 4, 2 x 2 x 4 or 1 x 4 x 4: nothing is guessed.
    flat = scramble(nets.UNETR(1, 2, (16, 64, 64), 4, 24, 48, 2)).state_dict()
    c = UNETRConfig(encoder=own(width=24, depth=12, heads=2, patch=16, hidden=48, eps=1e-5), ndim=3, channels=1)
    cube = dataclasses.replace(c, shape=32, classes=2, features=4).build()
    assert "its 16 positions are no grid of equal sides" in refusal(cube, flat)
    assert "it is of 1 channels, the model of 3; set channels: 1" in refusal(ours(32, 3), theirs.state_dict())


def test_a_run_into_the_same_model_is_that_model(trained: Path) -> None:
    averaged, earlier = vitrail.load(trained), vitrail.load(trained, checkpoint=2)
    model = averaged.config.build()
    report = load_weights(model, trained)
    assert {entry.action for entry in report.entries} == {"copied"}
    assert any("averaged weights of step 4" in note for note in report.notes)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), averaged.parameters(), strict=True))
    load_weights(model, trained / "checkpoints" / "step-00000002")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), earlier.parameters(), strict=True))


def test_a_run_of_another_make_is_refused(trained: Path) -> None:
    def message(**changes: Any) -> str:
        make = {"width": 24, "depth": 2, "heads": 2, "patch": 4, "positions": "learned", "ndim": 3, "channels": 1}
        return refusal(ViTConfig(**{**make, "shape": 16, **changes}).build(), trained)

    assert "has heads 2, the model 4; set it to 2" in message(heads=4)
    assert "set positions: learned" in message(positions="rope")
    assert "mlp gelu, the model swiglu" in message(mlp="swiglu", hidden=96)
    assert "patches of the file are 4 x 4 x 4 voxels" in message(patch=8)
    assert message(ndim=2).endswith("into the vit: a run of 3 axes cannot fill a model of 2")


def as_run(monkeypatch: pytest.MonkeyPatch, config: Any, classes: tuple[str, ...] | None = None) -> None:
    """State dicts are read as a run's whose config is known."""

    def opened(given: Any) -> Any:
        weights = open_weights(given)
        weights.config, weights.classes = config, classes
        return weights

    monkeypatch.setattr("vitrail.weights.load.open_weights", opened)


def test_settings_that_no_shape_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(**changes: Any) -> Any:
        return vit(**{"positions": "rope", "cls_token": False, **changes})

    source = scramble(model())
    state = source.state_dict()
    as_run(monkeypatch, source.config)
    load_weights(model(), state)
    assert "rope_scale is 1, the model's 2; set rope_scale: 1" in refusal(model(rope_scale=2.0), state)
    assert "theta is 100, the model's 50; set theta: 100" in refusal(model(theta=50.0), state)
    assert "are axial, the model's superposed; set rope: axial" in refusal(model(rope="superposed"), state)
    volumes: dict[str, Any] = {"ndim": 3, "shape": (4, 16, 16)}
    assert "set rope: superposed" in refusal(model(**volumes), state)
    load_weights(model(**volumes, rope="superposed"), state)
    solid = scramble(model(**volumes, rope="superposed"))
    as_run(monkeypatch, solid.config)
    load_weights(model(**volumes, rope="superposed"), solid.state_dict())
    assert "set rope: superposed" in refusal(model(**volumes), solid.state_dict())


def test_settings_of_decoders_times_and_trees_that_no_shape_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(source: Any, **changes: Any) -> str:
        as_run(monkeypatch, source)
        load_weights(source.build(), source.build().state_dict())
        return refusal(replace(source, **changes).build(), source.build().state_dict())

    blocks = DecoderConfig(width=32, depth=1, heads=4)
    mae = MAEConfig(encoder=own(positions="rope"), decoder=blocks, channels=1, shape=16)
    assert "decoder has heads 4, the model's 2; set decoder.heads: 4" in told(mae, decoder=replace(blocks, heads=2))
    grouped = replace(blocks, kv_heads=2)
    other = replace(grouped, heads=8, kv_heads=4)
    assert "has kv_heads 2, the model's 4; set decoder.kv_heads: 2" in told(
        replace(mae, decoder=grouped), decoder=other
    )
    assert "has theta 100, the model's 50; set decoder.theta: 100" in told(mae, decoder=replace(blocks, theta=50.0))
    dit = DiTConfig(width=24, depth=2, heads=2, patch=4, channels=1, shape=16, time_scale=1e-3)
    assert "times by 0.001, the model by 1; set time_scale: 0.001" in told(dit, time_scale=1.0)

    numbered = AdaptiveTokens(length=16, min_leaf=2, told="number")
    tree = MAEConfig(encoder=own(tokens=numbered), decoder=blocks, channels=1, shape=16)
    by_place = replace(tree.encoder, tokens=replace(numbered, told="place"), positions="sincos")
    said = "tokens are told their number, the model's their place"
    assert said in told(replace(tree, encoder=replace(tree.encoder, positions="sincos")), encoder=by_place)
    assert said in told(tree, encoder=own())
    monkeypatch.undo()
    config = SAPConfig(encoder=own(tokens=numbered, cls_token=True), channels=3, shape=16, classes=2)
    assert "the file's positions are of places; set tokens.told: place" in refusal(config.build(), timm_state())


def test_a_register_is_no_class_token(monkeypatch: pytest.MonkeyPatch) -> None:
    source = scramble(vit(positions="sincos", cls_token=False, registers=1, pool="mean"))
    as_run(monkeypatch, source.config)
    target = vit(positions="sincos", cls_token=True, pool="mean")
    before = target.encoder.prefix_tokens.detach().clone()
    message = refusal(target, source.state_dict())
    assert "cls_token: false and registers: 1, the model true and 0; set cls_token: false and registers: 1" in message
    assert "no place" not in refusal(vit(positions="sincos", cls_token=False), source.state_dict())
    report = load_weights(target, source.state_dict(), strict=False)
    assert report.names("skipped") == ["encoder.prefix_tokens"]
    assert torch.equal(target.encoder.prefix_tokens, before)


def test_a_classifier_of_other_features(monkeypatch: pytest.MonkeyPatch) -> None:
    source = scramble(vit(classes=3, pool="cls"))
    as_run(monkeypatch, source.config)
    load_weights(vit(classes=3, pool="cls"), source.state_dict())
    said = "saw pool: cls, the model's sees mean"
    assert said in refusal(vit(classes=3, pool="mean"), source.state_dict())
    model = vit(classes=3, pool="mean")
    report = load_weights(model, source.state_dict(), head="auto")
    assert [said in entry.note for entry in report["skipped"]] == [True, True]
    assert model.head.bias.eq(0).all()
    assert load_weights(vit(classes=3), source.state_dict(), only=["encoder"]).names("skipped")


def test_classes_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    source = scramble(vit(classes=3))
    state = source.state_dict()
    as_run(monkeypatch, source.config, ("cell", "soil", "void"))
    model = vit(classes=3)
    report = load_weights(model, state, names=["void", "cell", "soil"])
    assert set(report.names("permuted")) == {"head.weight", "head.bias"}
    assert torch.equal(model.head.weight, source.head.weight[[2, 0, 1]])
    assert torch.equal(model.head.bias, source.head.bias[[2, 0, 1]])
    assert not load_weights(vit(classes=3), state, names=["cell", "soil", "void"])["permuted"]
    others = ["cell", "soil", "wall"]
    said = "the run's classes are cell, soil, void, the model's cell, soil, wall"
    assert f"{said}; head: false starts the classifier anew" in refusal(vit(classes=3), state, names=others)
    report = load_weights(vit(classes=3), state, names=others, head="auto")
    assert {entry.note for entry in report["skipped"]} == {said}
    assert any("matched by number" in note for note in load_weights(vit(classes=3), state).notes)
    assert not any("matched by number" in note for note in load_weights(vit(), state).notes)


def test_classes_of_a_segmenter_are_matched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    c = UNETRConfig(encoder=own(), ndim=2, channels=1, shape=16, classes=3, skips=False, features=4)
    source, model = scramble(c.build()), c.build()
    as_run(monkeypatch, c, ("a", "b", "c"))
    load_weights(model, source.state_dict(), names=("c", "a", "b"))
    assert torch.equal(model.decoder.out.weight, source.decoder.out.weight[[2, 0, 1]])


def test_a_file_without_a_recipe_says_what_was_taken() -> None:
    report = load_weights(vit(positions="rope"), vit(positions="rope").state_dict())
    (note,) = [note for note in report.notes if note.startswith("no recipe beside the file")]
    for said in ("heads 2", "patch 4 x 4", "rope (axial, theta 100, rope_scale 1)", "residual pre", "tokens uniform"):
        assert said in note
    assert "cls_token true, registers 0, pool mean" in note


def test_normalisation_of_a_run_is_told(trained: Path) -> None:
    assert any("images were normalised by mean" in note for note in open_weights(trained).notes)


def test_the_names_of_a_recipe_reach_the_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = scramble(vit(classes=2))
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    as_run(monkeypatch, source.config, ("a", "b"))
    model = vit(classes=2)
    load_initial(model, Init(path=str(tmp_path / "weights.pt")), ("b", "a"))
    assert torch.equal(model.head.bias, source.head.bias.flip(0))


def test_a_run_takes_the_classes_of_another_by_name(tmp_path: Path) -> None:
    for name in ("cat", "fox"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((8, 8), 10 + number + 50 * (name == "fox"), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    source = [{"path": str(tmp_path / "images")}]
    tree = tiny_recipe(
        tmp_path,
        tmp_path / "first",
        run__steps=2,
        checkpoint__every=1,
        model={"kind": "vit", "channels": 1, "width": 16, "depth": 1, "heads": 2, "patch": 4},
        objective={"kind": "classify"},
        data={"train": source, "valid": source, "crop": 8, "batch": 4},
        optimizer={"kind": "sgd", "lr": 1.0, "weight_decay": 0.0},
    )
    first = vitrail.load(vitrail.train(tree, quiet=True).run_dir)
    tree |= {"init": {"path": str(tmp_path / "first")}, "run": tree["run"] | {"dir": str(tmp_path / "second")}}
    tree |= {"objective": {"kind": "classify", "names": ["fox", "cat"]}}
    tree["optimizer"] |= {"lr": 1e-12}
    second = vitrail.load(vitrail.train(tree, quiet=True).run_dir)
    assert first.head.bias.abs().min() > 0
    torch.testing.assert_close(second.head.bias, first.head.bias.flip(0), atol=1e-6, rtol=1e-6)
    (event,) = events(tmp_path / "second", "init")
    assert [entry["name"] for entry in event["entries"] if entry["action"] == "permuted"] == [
        "head.weight",
        "head.bias",
    ]


@pytest.mark.parametrize("positions", ["sincos", "learned"])
@torch.no_grad()
def test_a_flat_mae_run_inflated(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a run, whose config is known: sin-cos positions of two axes go on as a learned table."""
    c = MAEConfig(
        encoder=own(positions=positions), decoder=DecoderConfig(width=16, depth=1, heads=2), channels=1, shape=16
    )
    flat = scramble(c.build())
    solid_config = MAEConfig(
        encoder=own(), decoder=DecoderConfig(width=16, depth=1, heads=2), ndim=3, channels=1, shape=(8, 16, 16)
    )
    solid = solid_config.build().eval()

    def opened(given: Any) -> Any:
        weights = open_weights(given)
        weights.config = c
        return weights

    monkeypatch.setattr("vitrail.weights.load.open_weights", opened)
    report = load_weights(solid, flat.state_dict())
    assert not report["skipped"]
    images = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    volumes = deep(images, 8)
    seen = torch.tensor([[0, 3, 5, 10], [1, 2, 8, 15]])
    hidden = torch.stack([torch.tensor([i for i in range(16) if i not in row]) for row in seen.tolist()])
    both = [torch.cat([index, index + 16], dim=1) for index in (seen, hidden)]  # the same places in both layers

    def predict(model: Any, images: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
        inputs = model.inputs(images)
        x, places = inputs["x"], inputs["coordinates"]
        return model(
            gather_tokens(x, seen), coordinates=gather_tokens(places, seen), queries=gather_tokens(places, hidden)
        )

    expected = predict(flat, images, seen, hidden)  # [2, 12, 16]
    found = predict(solid, volumes, *both).unflatten(1, (2, 12)).unflatten(-1, (4, 16))
    torch.testing.assert_close(found, expected[:, None, :, None].expand_as(found), atol=1e-5, rtol=1e-5)
    computed = MAEConfig(encoder=own(positions="sincos"), decoder=c.decoder, ndim=3, channels=1, shape=16).build()
    assert "set positions: learned" in refusal(computed, flat.state_dict())
    turned = MAEConfig(encoder=own(positions="rope"), decoder=c.decoder, ndim=3, channels=1, shape=16).build()
    assert "positions" in refusal(turned, flat.state_dict())


# ---------------------------------------------------------------- in a run


def test_a_run_starts_from_weights_and_continues_without_them(trained: Path, volume: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({name: p.detach().clone() for name, p in vitrail.load(trained).named_parameters()}, weights)
    tree = tiny_recipe(
        volume,
        tmp_path / "run",
        run__steps=2,
        checkpoint__every=1,
        model__encoder__positions="learned",
        optimizer={"kind": "sgd", "lr": 1e-12, "weight_decay": 0.0},
        init={"path": str(weights)},
        ema={"decay": 0.9},
    )
    outcome = vitrail.train(tree, quiet=True)
    started = vitrail.load(outcome.run_dir)  # the average, which was made after the weights were there
    for name, value in vitrail.load(trained).named_parameters():
        torch.testing.assert_close(started.get_parameter(name), value, atol=1e-6, rtol=1e-6)
    (event,) = events(outcome.run_dir, "init")
    assert event["adapter"] == "vitrail"
    weights.unlink()
    tree["run"]["steps"] = 3
    assert vitrail.train(tree, quiet=True).step == 3


def test_the_section_of_the_recipe(volume: Path, tmp_path: Path) -> None:
    tree = tiny_recipe(volume, tmp_path / "run", init={"path": "weights.pt", "only": ["encoder"], "head": "auto"})
    recipe = vitrail.load_recipe(tree)
    assert recipe.init.model_dump(mode="json") == {
        "path": "weights.pt",
        "adapter": "auto",
        "only": ["encoder"],
        "head": "auto",
        "strict": True,
    }
    assert vitrail.load_recipe(recipe.to_tree()) == recipe
    for adapter in ("auto", *ADAPTERS):
        assert vitrail.load_recipe(tree, [f"init.adapter={adapter}"]).init.adapter == adapter
    with pytest.raises(UserError, match=r"init\.adapter: .*monai.*'keras'"):
        vitrail.load_recipe(tree, ["init.adapter=keras"])
    with pytest.raises(UserError, match=r"init\.path: missing"):
        vitrail.load_recipe(tree | {"init": {}})


def test_a_run_that_cannot_start_leaves_nothing(trained: Path, volume: Path, tmp_path: Path) -> None:
    tree = tiny_recipe(volume, tmp_path / "run", init={"path": str(trained), "adapter": "timm"})
    with pytest.raises(UserError, match=r"^init: .* \(timm\) was not loaded into the mae: it holds no blocks"):
        vitrail.train(tree, quiet=True)
    assert not (tmp_path / "run").exists()


WORKER = """
import json, sys, vitrail
from vitrail.cli.words import end
vitrail.train(json.load(open(sys.argv[1])), quiet=True)
end(0)
"""


def test_every_rank_takes_its_shard(trained: Path, volume: Path, tmp_path: Path) -> None:
    """Two ranks in shards start from what one rank starts from."""
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    tree = tiny_recipe(
        volume,
        tmp_path / "run",
        run__steps=1,
        checkpoint__every=1,
        model__encoder__positions="learned",
        optimizer={"kind": "sgd", "lr": 1e-12, "weight_decay": 0.0},
        init={"path": str(trained)},
        eval__samples=1,
    )
    (tmp_path / "recipe.json").write_text(json.dumps(tree))
    code, output = run(*torchrun(2, program, tmp_path / "recipe.json"))
    assert code == 0, output[-3000:]
    started = vitrail.load(tmp_path / "run")
    for name, value in vitrail.load(trained).named_parameters():
        torch.testing.assert_close(started.get_parameter(name), value, atol=1e-6, rtol=1e-6)


def test_reports_are_short() -> None:
    """A table of a few dozen lines, whatever the depth."""
    state = timm_state(depth=6)
    assert len(str(load_weights(vit(depth=6), state)).splitlines()) < 30
    assert isinstance(Report("a", "timm", ()).to_json()["entries"], tuple | list)
    assert "weights from a (timm)" in str(Report("a", "timm", ()))
