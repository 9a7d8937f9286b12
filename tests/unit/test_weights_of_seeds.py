"""Weights of the programs that users come from: TorchDiTan, torchtitan-mae, UCF-VIT, SiT and diffusers' DiT."""

import contextlib
import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from parity.references import Block, DiT, LabelEmbedder, PatchEmbed, TimeEmbedder, empty, scramble
from PIL import Image
from support import tiny_recipe
from torch import Tensor, nn

import vitrail
from vitrail.diffusion import SamplingConfig, Straight, sample
from vitrail.errors import UserError
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens, gather_tokens, unpatchify
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViTConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, hide
from vitrail.models.model import make_inputs
from vitrail.objectives.denoise import DenoiseConfig
from vitrail.objectives.flow import FlowConfig
from vitrail.recipe.sections import Init
from vitrail.weights import load_initial, load_weights


def refusal(config: Any, given: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_weights(config.build(), given, **options)
    return str(caught.value)


# ---------------------------------------------------------------- torchtitan's blocks


class LlamaAttention(nn.Module):
    """Grouped queries and rotations of neighbouring channels, by their definition."""

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.head_width = width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.head_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_width)) for w in (self.wq, self.wk, self.wv))
        if angles is not None:
            turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # N 1 K/2
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.contiguous().unflatten(-1, (-1, 2))) * turn).flatten(-2)
                for t in (q, k)
            )
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.wo(out.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, *, groups: int | None = None, modulated: bool = False):
        super().__init__()
        self.attention = LlamaAttention(width, heads, groups or heads)
        self.feed_forward = LlamaMLP(width, hidden)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        if modulated:
            self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, angles: Tensor | None = None, condition: Tensor | None = None) -> Tensor:
        parts = [torch.zeros(1), torch.zeros(1), torch.ones(1)] * 2
        if condition is not None:
            parts = list(self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1))
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.attention_norm(x) * (1 + scale1) + shift1, angles)
        return x + gate2 * self.feed_forward(self.ffn_norm(x) * (1 + scale2) + shift2)


class TorchDiTan(nn.Module):
    """forward(latents, times of 0 to 1, labels): the first half of a head's channels is turned by the column."""

    def __init__(self, size: int, patch: int, width: int, heads: int, hidden: int, classes: int, channels: int):
        super().__init__()
        self.side, self.patch, self.head_width = size // patch, patch, width // heads
        self.x_embedder = PatchEmbed(size, patch, channels, width)
        self.t_embedder, self.y_embedder = TimeEmbedder(width), LabelEmbedder(classes, width)
        self.layers = nn.ModuleDict({str(i): LlamaBlock(width, heads, hidden, modulated=True) for i in range(2)})
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, patch * patch * channels, bias=False)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4, 2), torch.ones(4, 2)))

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.x_embedder(x)
        condition = self.t_embedder(times) + self.y_embedder.embedding_table(labels)
        pairs = self.head_width // 4
        frequencies = 10000.0 ** (-4 * torch.arange(pairs) / self.head_width)
        number = torch.arange(self.side**2)[:, None]
        angles = torch.cat([number % self.side * frequencies, number // self.side * frequencies], dim=1)
        for layer in self.layers.values():
            x = layer(x, angles, condition)
        x = self.output(self.norm(x)).unflatten(1, (self.side, self.side)).unflatten(-1, (self.patch, self.patch, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class State:
    """What torchtitan saves besides: an entry that is not a tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "log": State}


DITAN: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "patch": 2, "hidden": 48, "mlp": "swiglu", "norm": "rms"}
DITAN |= {"eps": 1e-5, "bias": False, "positions": "rope", "theta": 10000.0, "final": "plain"}
DITAN |= {"channels": 3, "shape": 8, "classes": 5, "time_scale": 1e-3}


@torch.no_grad()
def test_torchditan(tmp_path: Path) -> None:
    theirs = scramble(TorchDiTan(8, 2, 32, 2, 48, 5, 3))
    state = theirs.state_dict()
    moments = {f"state.{name}.exp_avg": torch.zeros_like(p) for name, p in theirs.named_parameters()}
    tree = {"model": state, "optimizer": moments, "train_state": State()}
    dcp.save(tree, checkpoint_id=tmp_path / "step-3", no_dist=True)
    dcp.save(dict(state), checkpoint_id=tmp_path / "weights", no_dist=True)
    torch.save({"model": state}, tmp_path / "checkpoint.pt")
    generator = torch.Generator().manual_seed(1)
    images, times, labels = torch.randn(3, 3, 8, 8, generator=generator), torch.rand(3), torch.tensor([0, 4, 5])
    expected = theirs(images, times, labels)
    for given in (state, tmp_path / "step-3", tmp_path / "weights", tmp_path / "checkpoint.pt"):
        ours = empty(DiTConfig(**DITAN))
        report = load_weights(ours, given)
        assert report.adapter == "torchditan"
        assert not report["skipped"]
        # Our objectives tell 1000 times the time.
        found = ours(**ours.inputs(images), times=1000 * times, labels=labels)
        torch.testing.assert_close(unpatchify(found, (2, 2), (8, 8)), expected, atol=1e-5, rtol=1e-5)
    assert "set time_scale: 0.001" in refusal(DiTConfig(**DITAN | {"time_scale": 1.0}), state)
    assert "set theta: 10000" in refusal(DiTConfig(**DITAN | {"theta": 100.0}), state)
    assert "set positions: rope" in refusal(DiTConfig(**DITAN | {"positions": "sincos"}), state)
    (tmp_path / "step-3" / ".metadata").write_bytes(b"\x80\x02cposix\nsystem\n.")
    assert "posix" in refusal(DiTConfig(**DITAN), tmp_path / "step-3")


class TorchtitanMAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.patch_embedding = nn.Module()
        self.encoder.patch_embedding.proj = nn.Conv3d(1, 48, 4, 4, bias=False)
        self.encoder.layers = nn.ModuleDict({str(i): LlamaBlock(48, 4, 64, groups=2) for i in range(2)})
        self.encoder.norm = nn.RMSNorm(48, eps=1e-5)
        self.decoder.embedding = nn.Linear(48, 24, bias=False)
        self.decoder.mask_token = nn.Parameter(torch.empty(1, 1, 24))
        self.decoder.layers = nn.ModuleDict({"0": LlamaBlock(24, 2, 32)})
        self.decoder.norm = nn.RMSNorm(24, eps=1e-5)
        self.decoder.output = nn.Linear(24, 64, bias=False)


@torch.no_grad()
def test_torchtitan_mae() -> None:
    """Its rotations are of no model here, so that its weights are refused; taken all the same, each has its place."""
    theirs = scramble(TorchtitanMAE())
    make: dict[str, Any] = {"width": 48, "depth": 2, "heads": 4, "kv_heads": 2, "patch": 4, "hidden": 64}
    make |= {"mlp": "swiglu", "norm": "rms", "eps": 1e-5, "bias": False, "positions": "rope"}
    c = MAEConfig(
        encoder=EncoderConfig(**make),
        decoder=DecoderConfig(width=24, depth=1, heads=2, hidden=32),
        ndim=3,
        channels=1,
        shape=8,
    )
    assert "by the number of a patch in the flattened volume" in refusal(c, theirs.state_dict())
    ours = empty(c)
    report = load_weights(ours, theirs.state_dict(), strict=False)
    assert report.adapter == "torchtitan-mae"
    assert not report["skipped"]
    assert not report["unused"]
    x = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(1))
    for layer, block in ((theirs.encoder.layers["1"], ours.encoder.blocks[1]),):
        torch.testing.assert_close(block(x), layer(x), atol=1e-5, rtol=1e-5)
    y = x[..., :24]
    torch.testing.assert_close(ours.decoder.blocks[0](y), theirs.decoder.layers["0"](y), atol=1e-5, rtol=1e-5)
    volume = torch.randn(1, 1, 8, 8, 8)
    tokens = theirs.encoder.patch_embedding.proj(volume).flatten(2).mT
    torch.testing.assert_close(ours.encoder.patch_embed(ours.inputs(volume)["x"]), tokens, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- UCF-VIT


class UCF(nn.Module):
    """Its masked autoencoder and its diffusion model: no class token, both tables of positions are learned."""

    def __init__(self, *, times: bool = False, variables: int = 0):
        super().__init__()
        channels = variables or 3
        self.patch_embed = PatchEmbed(16, 4, 1 if variables else 3, 24)
        self.token_embeds = nn.ModuleList([self.patch_embed] * variables) if variables else self.patch_embed
        self.pos_embed = nn.Parameter(torch.empty(1, 16, 24))
        self.blocks = nn.Sequential(*(Block(24, 2) for _ in range(2)))
        self.norm = nn.LayerNorm(24, eps=1e-6)
        self.decoder_embed, self.decoder_pred = nn.Linear(24, 16), nn.Linear(16, 16 * channels)
        self.decoder_pos_embed = nn.Parameter(torch.empty(1, 16, 16))
        self.decoder_blocks = nn.Sequential(Block(16, 2))
        self.decoder_norm = nn.LayerNorm(16)
        if times:
            self.timeEmbeddingMap = nn.Module()
            self.timeEmbeddingMap.linear1, self.timeEmbeddingMap.linear2 = nn.Linear(24, 24), nn.Linear(24, 24)
        else:
            self.mask_token = nn.Parameter(torch.empty(1, 1, 16))
        if variables:
            self.var_embed = nn.Parameter(torch.empty(1, variables, 24))
            self.var_query = nn.Parameter(torch.empty(1, 1, 24))
            self.var_agg = nn.Module()
            self.var_agg.q, self.var_agg.kv = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
            self.var_agg.proj = nn.Linear(24, 24)

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder_pred(self.decoder_norm(self.decoder_blocks(x + self.decoder_pos_embed)))

    def reconstruct(self, images: Tensor, order: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed
        x = self.decoder_embed(self.norm(self.blocks(gather_tokens(x, order[:, :4]))))
        x = torch.cat([x, self.mask_token.expand(len(x), 12, -1)], dim=1)
        return self.decode(gather_tokens(x, order.argsort(dim=1)))

    def denoise(self, images: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-math.log(10000.0) * torch.arange(12) / 12)
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        time = self.timeEmbeddingMap.linear2(self.timeEmbeddingMap.linear1(waves).relu())
        x = self.patch_embed(images) + self.pos_embed + time[:, None]
        return self.decode(self.decoder_embed(self.norm(self.blocks(x))))

    def gather(self, images: Tensor) -> Tensor:
        x = torch.stack([self.patch_embed(image[:, None]) for image in images.unbind(1)], dim=2) + self.var_embed
        k, v = self.var_agg.kv(x).unflatten(-1, (2, 2, 12)).unbind(-3)  # B N V H K
        weights = (k * self.var_agg.q(self.var_query).unflatten(-1, (2, 12))).sum(-1).div(math.sqrt(12)).softmax(dim=2)
        return self.var_agg.proj((weights[..., None] * v).sum(dim=2).flatten(-2))


MAKE: dict[str, Any] = {"width": 24, "depth": 2, "heads": 2, "patch": 4, "positions": "learned"}
SMALL = {"width": 16, "depth": 1, "heads": 2}


def mae(**changes: Any) -> MAEConfig:
    channels = None if "variables" in changes else 3
    return MAEConfig(
        encoder=EncoderConfig(**(MAKE | changes)), decoder=DecoderConfig(**SMALL), channels=channels, shape=16
    )


@torch.no_grad()
def test_masked_autoencoders_of_ucf(tmp_path: Path) -> None:
    theirs = scramble(UCF(), std=0.2)
    torch.save({"epoch": 3, "model_state_dict": theirs.state_dict(), "loss_list": [1.0]}, tmp_path / "mae_even.ckpt")
    ours = empty(mae())
    report = load_weights(ours, tmp_path / "mae_even.ckpt")
    assert report.adapter == "ucf"
    assert not report["skipped"]
    assert set(report.names("unused")) == {"token_embeds.proj.weight", "token_embeds.proj.bias"}
    generator = torch.Generator().manual_seed(1)
    images, order = torch.randn(2, 3, 16, 16, generator=generator), torch.rand(2, 16, generator=generator).argsort(1)
    inputs = ours.inputs(images)
    places = inputs["coordinates"]
    seen, asked = order[:, :4], order[:, 4:]
    found = ours(
        gather_tokens(inputs["x"], seen), coordinates=gather_tokens(places, seen), queries=gather_tokens(places, asked)
    )
    expected = gather_tokens(theirs.reconstruct(images, order), asked)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)  # its decoder's norm has another eps
    other = theirs.state_dict() | {"token_embeds.proj.bias": torch.ones(24)}
    assert "of which it is another name" in refusal(mae(), other)
    alone = {name: value for name, value in theirs.state_dict().items() if not name.startswith("patch_embed")}
    load_weights(empty(mae()), alone)


def test_volumes_of_ucf() -> None:
    """Patches of three axes tell that the table is of three, too: 4 x 2 x 2 are no 4 x 4."""
    state = scramble(UCF()).state_dict()
    state = {name: value for name, value in state.items() if "token_embeds" not in name and "pred" not in name}
    kernel = torch.randn(24, 1, 4, 4, 4)
    state |= {"patch_embed.proj.weight": kernel, "token_embeds.proj.weight": kernel}
    state |= {"decoder_pred.weight": torch.randn(64, 16), "decoder_pred.bias": torch.randn(64)}
    c = dataclasses.replace(mae(), ndim=3, channels=1, shape=(16, 8, 8))
    model = c.build()
    report = load_weights(model, state)
    assert not report["skipped"]
    assert not report["resized"]
    assert any("of NIfTI x, y and z, which are z, y and x here" in note for note in report.notes)
    assert torch.equal(model.encoder.pos_embed.table, state["pos_embed"][0])
    assert "its 16 positions are no grid of equal sides" in refusal(dataclasses.replace(c, shape=12), state)


@torch.no_grad()
def test_diffusion_models_of_ucf() -> None:
    theirs = scramble(UCF(times=True), std=0.2)
    c = DiffusionViTConfig(encoder=EncoderConfig(**MAKE), decoder=DiffusionDecoderConfig(**SMALL), channels=3, shape=16)
    ours = empty(c)
    report = load_weights(ours, theirs.state_dict())
    assert not report["skipped"]
    images, times = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 800.0])
    found = ours(**ours.inputs(images), times=times)
    torch.testing.assert_close(found, theirs.denoise(images, times), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_variables_of_ucf() -> None:
    theirs = scramble(UCF(variables=3), std=0.2)
    ours = empty(mae(variables=VariablesConfig(known=("u", "v", "t"))))
    twice = {n: v for n, v in theirs.state_dict().items() if not n.startswith("patch_embed")}
    twice["token_embeds.2.proj.weight"] = torch.ones(24, 1, 4, 4)
    assert "token_embeds.2.proj.weight is not token_embeds.0.proj.weight" in refusal(ours.config, twice)
    report = load_weights(ours, theirs.state_dict())
    assert not report["skipped"]
    assert any("in the model's order" in note for note in report.notes)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    found = ours.encoder.patch_embed(ours.inputs(images)["x"])
    torch.testing.assert_close(found, theirs.gather(images), atol=1e-5, rtol=1e-5)


class UCFTrees(nn.Module):
    """Its masked autoencoder on leaves of a tree, told by their number or by numbers of pixels: size, x and y."""

    def __init__(self, length: int, *, pixels: bool):
        super().__init__()
        self.token_embeds = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 24), nn.LayerNorm(24))
        self.blocks, self.norm = nn.Sequential(*(Block(24, 2) for _ in range(2))), nn.LayerNorm(24, eps=1e-6)
        self.decoder_embed, self.decoder_pred = nn.Linear(24, 16), nn.Linear(16, 48)
        self.decoder_blocks, self.decoder_norm = nn.Sequential(Block(16, 2)), nn.LayerNorm(16)
        self.mask_token = nn.Parameter(torch.empty(1, 1, 16))
        self.pixels = pixels
        if pixels:
            self.adaptive_pos_dep_emb = nn.Sequential(nn.Linear(3, 24), nn.GELU())
            self.decoder_adaptive_pos_dep_emb = nn.Sequential(nn.Linear(3, 16), nn.GELU())
        else:
            self.pos_embed = nn.Parameter(torch.empty(1, length, 24))
            self.decoder_pos_embed = nn.Parameter(torch.empty(1, length, 16))

    def places(self, leaves: Tensor) -> tuple[Tensor, Tensor]:
        if self.pixels:
            return self.adaptive_pos_dep_emb(leaves), self.decoder_adaptive_pos_dep_emb(leaves)
        return self.pos_embed.expand(len(leaves), -1, -1), self.decoder_pos_embed.expand(len(leaves), -1, -1)

    def reconstruct(self, x: Tensor, leaves: Tensor, order: Tensor) -> Tensor:
        places, decoded = self.places(leaves)
        x = gather_tokens(self.token_embeds(x) + places, order[:, :4])
        x = self.decoder_embed(self.norm(self.blocks(x)))
        x = torch.cat([x, self.mask_token.expand(len(x), order.shape[1] - 4, -1)], dim=1)
        x = gather_tokens(x, order.argsort(dim=1)) + decoded
        return self.decoder_pred(self.decoder_norm(self.decoder_blocks(x)))


def on_trees(told: str, length: int = 13, **changes: Any) -> MAEConfig:
    tokens = AdaptiveTokens(length=length, score=GradientScore(), told=told)  # type: ignore[arg-type]
    positions = {"pixels": "none", "number": "learned", "place": "sincos"}[told]
    return mae(**({"tokens": tokens, "positions": positions, "patch_norm": True, "patch_bias": True} | changes))


@pytest.mark.parametrize("told", ["number", "pixels"])
@torch.no_grad()
def test_adaptive_tokens_of_ucf(told: str) -> None:
    theirs = scramble(UCFTrees(13, pixels=told == "pixels"), std=0.1)
    ours = empty(on_trees(told, eps=1e-5))
    for block in (*ours.encoder.blocks, *ours.decoder.blocks, ours.encoder):
        for norm in (getattr(block, name, None) for name in ("norm1", "norm2", "norm")):
            if norm is not None:
                norm.eps = 1e-6
    if told == "number":  # in the order of its leaves, which in two dimensions is not that of ours
        assert "a number is that of another leaf" in refusal(ours.config, theirs.state_dict())
    report = load_weights(ours, theirs.state_dict(), strict=told == "pixels")
    assert report.adapter == "ucf"
    assert not report["skipped"]
    assert not report["unused"]
    assert any("here they are by means" in note for note in report.notes)
    generator = torch.Generator().manual_seed(1)
    images, order = torch.rand(2, 3, 16, 16, generator=generator), torch.rand(2, 13, generator=generator).argsort(1)
    inputs, tokens = make_inputs(ours.config, images)
    leaves = torch.cat([tokens.sizes[..., :1], tokens.coordinates.flip(-1)], dim=-1)  # type: ignore[index]
    assert len(leaves[..., 0].unique()) > 1
    inputs = hide(inputs, order[:, :4], order[:, 4:])
    expected = gather_tokens(theirs.reconstruct(tokens.values, leaves, order), order[:, 4:])
    torch.testing.assert_close(ours(**inputs), expected, atol=1e-4, rtol=1e-4)
    # A run trains such a model, and its shapes are those of the file.
    ready = on_trees(told).build()
    assert ready(**inputs).isfinite().all()
    if told == "number":  # of another length: interpolated along the sequence, as UCF-VIT does it for SAP
        longer = empty(on_trees(told, length=16))
        (entry, _) = load_weights(longer, theirs.state_dict(), strict=False)["resized"]
        assert entry.note == "grid 13 to 16"
        rows = F.interpolate(theirs.pos_embed.mT, 16, mode="linear", align_corners=False)[0].T
        torch.testing.assert_close(longer.encoder.pos_embed.table, rows)


def test_leaves_of_ucf_in_their_order() -> None:
    """It puts the four parts of a cell in its place, the lower ones first, and the eight of a volume as they lie."""
    for ndim, theirs in ((2, [(8, 0), (8, 8), (0, 0), (0, 8)]), (3, list(itertools.product((0, 8), repeat=3)))):
        c = dataclasses.replace(on_trees("number", length=2**ndim), ndim=ndim, channels=1, shape=16)
        _, tokens = make_inputs(c, torch.rand(1, 1, *[16] * ndim))
        assert tokens.tree is not None
        ours = [tuple(corner) for corner in tokens.tree.corner[0].tolist()]
        assert sorted(ours) == sorted(theirs)
        state, voxels = scramble(UCFTrees(2**ndim, pixels=False)).state_dict(), 4**ndim
        state |= {"token_embeds.0.weight": torch.ones(voxels), "token_embeds.0.bias": torch.zeros(voxels)}
        state |= {"token_embeds.1.weight": torch.randn(24, voxels), "decoder_pred.weight": torch.randn(voxels, 16)}
        state["decoder_pred.bias"] = torch.randn(voxels)
        if ours == theirs:
            assert not load_weights(c.build(), state)["skipped"]
        else:
            assert "a number is that of another leaf" in refusal(c, state)
            assert any("another leaf" in note for note in load_weights(c.build(), state, strict=False).notes)
        assert (ours == theirs) is (ndim == 3)


def test_positions_of_leaves_that_are_no_tokens() -> None:
    """UCF-VIT's SAP cuts a layout of leaves into patches, and tells them the leaves' pixels; its table is not used."""
    state = {
        name: value
        for name, value in scramble(UCFTrees(16, pixels=True)).state_dict().items()
        if not name.startswith("token_embeds")
    }
    state |= {"patch_embed.proj.weight": torch.randn(24, 3, 4, 4), "patch_embed.proj.bias": torch.randn(24)}
    state |= {"token_embeds.proj.weight": state["patch_embed.proj.weight"], "pos_embed": torch.randn(1, 16, 24)}
    for config in (mae(), on_trees("pixels", patch_norm=False, patch_bias=None), on_trees("place", patch_norm=False)):
        assert "made of the sizes and places of leaves, and its tokens of parts" in refusal(config, state)
    model = mae().build()
    report = load_weights(model, state, strict=False)
    assert set(report.names("skipped")) == {"encoder.pos_embed.table", "decoder.pos_embed.table"}
    assert any("sizes and places of leaves" in note for note in report.notes)


def test_trees_of_ucf_into_other_models() -> None:
    """A model that is told otherwise is refused, and the rest taken where asked."""
    state = scramble(UCFTrees(16, pixels=False)).state_dict()
    more = scramble(UCFTrees(16, pixels=True)).state_dict()
    for model in (mae(patch_norm=True), on_trees("place"), on_trees("pixels")):
        assert "told their number; set tokens: {kind: adaptive, told: number" in refusal(model, state)
    for model in (mae(patch_norm=True), on_trees("place"), on_trees("number", length=16)):
        assert "told their pixels; set tokens: {kind: adaptive, told: pixels" in refusal(model, more)
    sure = dataclasses.replace(
        on_trees("pixels"), encoder=dataclasses.replace(on_trees("pixels").encoder, positions="sincos")
    )
    assert "set positions: none, not sincos" in refusal(sure, more)
    assert "set patch_norm: true and patch_bias: true" in refusal(on_trees("number", patch_bias=None), state)
    model = mae(patch_norm=True).build()
    report = load_weights(model, more, strict=False)
    assert set(report.names("skipped")) == {"encoder.pos_embed.table", "decoder.pos_embed.table"}
    assert torch.equal(model.encoder.patch_embed.proj.weight, more["token_embeds.1.weight"])
    assert torch.equal(model.encoder.patch_embed.norm_out.weight, more["token_embeds.2.weight"])


# ---------------------------------------------------------------- denoisers with the names of DiT


DIT: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "patch": 2, "channels": 4, "shape": 8, "classes": 5}


def foreign_dit() -> Any:
    return scramble(DiT(size=8, patch=2, width=32, depth=2, heads=2, classes=5), std=0.1)


@torch.no_grad()
def test_sit() -> None:
    """It has DiT's names, times from 0 to 1, and puts out twice the channels, of which it uses the first half."""
    theirs = foreign_dit()
    generator = torch.Generator().manual_seed(1)
    images, times, labels = torch.randn(3, 4, 8, 8, generator=generator), torch.rand(3), torch.tensor([0, 4, 5])
    expected = theirs(images, times, labels)
    for learn_sigma in (False, True):
        ours = empty(DiTConfig(**DIT, time_scale=1e-3, learn_sigma=learn_sigma))
        report = load_weights(ours, theirs.state_dict(), adapter="sit")
        assert not report["skipped"]
        found = unpatchify(ours(**ours.inputs(images), times=1000 * times, labels=labels), (2, 2), (8, 8))
        torch.testing.assert_close(found, expected[:, : found.shape[1]], atol=1e-5, rtol=1e-5)
    plain = DiTConfig(**DIT, learn_sigma=True)
    assert "set time_scale: 0.001" in refusal(plain, theirs.state_dict(), adapter="sit")
    scaled = DiTConfig(**DIT, learn_sigma=True, time_scale=1e-3)
    assert "set time_scale: 1; where the file is SiT's, set adapter: sit" in refusal(scaled, theirs.state_dict())
    assert any("needs adapter: sit" in note for note in load_weights(plain.build(), theirs.state_dict()).notes)


def test_an_objective_takes_what_predicts_as_it_asks(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.pt")
    torch.save(foreign_dit().state_dict(), path)
    noise, unit = DiTConfig(**DIT, learn_sigma=True).build(), DiTConfig(**DIT, time_scale=1e-3).build()
    with pytest.raises(UserError, match=r"set init\.adapter: sit and model\.time_scale: 0\.001; strict: false"):
        load_initial(noise, Init(path=path), objective=FlowConfig())
    load_initial(noise, Init(path=path, strict=False), objective=FlowConfig())
    load_initial(noise, Init(path=path), objective=DenoiseConfig())
    with pytest.raises(UserError, match="predicts noise, the objective wants data"):
        load_initial(noise, Init(path=path), objective=DenoiseConfig(predict="data"))
    load_initial(unit, Init(path=path, adapter="sit"), objective=FlowConfig())
    with pytest.raises(UserError, match="predicts velocities from noise to data, the objective wants noise"):
        load_initial(unit, Init(path=path, adapter="sit"), objective=DenoiseConfig())


@torch.no_grad()
def test_a_run_starts_from_sit_and_samples_with_its_velocities(tmp_path: Path) -> None:
    for number, name in enumerate("abcde"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), 50 * number, np.uint8)).save(tmp_path / "images" / name / "0.png")
    theirs = scramble(DiT(size=8, patch=2, width=32, depth=2, heads=2, classes=5, channels=3), std=0.1)
    torch.save(theirs.state_dict(), tmp_path / "SiT.pt")
    source = [{"path": str(tmp_path / "images")}]
    with torch.enable_grad():
        outcome = vitrail.train(
            tiny_recipe(
                tmp_path,
                tmp_path / "run",
                run__steps=1,
                checkpoint__every=1,
                model={"kind": "dit", **DIT, "channels": 3, "time_scale": 1e-3},
                objective={"kind": "flow", "sampling": {"sampler": "euler", "steps": 4}},
                data={"train": source, "valid": source, "crop": 8, "batch": 2},
                optimizer={"kind": "sgd", "lr": 1e-12, "weight_decay": 0.0},
                init={"path": str(tmp_path / "SiT.pt"), "adapter": "sit"},
                eval__samples=2,
            ),
            quiet=True,
        )
    model = vitrail.load(outcome.run_dir)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 5])

    def ask(x: Tensor, times: Tensor) -> Tensor:
        told = Straight().told(times)
        return unpatchify(model(**model.inputs(x), times=told, labels=labels), (2, 2), (8, 8))

    settings = SamplingConfig(sampler="euler", steps=4)
    found = sample(Straight(), "velocity", ask, x, settings, fresh=torch.zeros_like)
    for step in range(4):
        x = x + theirs(x, torch.full((2,), step / 4), labels)[:, :3] / 4
    torch.testing.assert_close(found, x, atol=1e-4, rtol=1e-4)


def as_diffusers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names that diffusers gives them."""
    out: dict[str, Tensor] = {}
    moved = {
        r"x_embedder\.": "pos_embed.",
        r"final_layer\.adaLN_modulation\.1\.": "proj_out_1.",
        r"final_layer\.linear\.": "proj_out_2.",
        r"blocks\.(\d+)\.adaLN_modulation\.1\.": r"transformer_blocks.\1.norm1.linear.",
        r"blocks\.(\d+)\.attn\.proj\.": r"transformer_blocks.\1.attn1.to_out.0.",
        r"blocks\.(\d+)\.mlp\.fc1\.": r"transformer_blocks.\1.ff.net.0.proj.",
        r"blocks\.(\d+)\.mlp\.fc2\.": r"transformer_blocks.\1.ff.net.2.",
    }
    for name, value in state.items():
        if found := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(\w+)", name):
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                out[f"transformer_blocks.{found[1]}.attn1.to_{letter}.{found[2]}"] = part
        elif found := re.fullmatch(r"t_embedder\.mlp\.([02])\.(\w+)", name):
            for block in range(2):
                inner = f"timestep_embedder.linear_{1 + int(found[1]) // 2}.{found[2]}"
                out[f"transformer_blocks.{block}.norm1.emb.{inner}"] = value
        elif name.startswith("y_embedder"):
            for block in range(2):
                out[f"transformer_blocks.{block}.norm1.emb.class_embedder.embedding_table.weight"] = value
        elif pattern := next((pattern for pattern in moved if re.match(pattern, name)), None):
            out[re.sub(pattern, moved[pattern], name)] = value
    return out


@torch.no_grad()
def test_dit_of_diffusers(tmp_path: Path) -> None:
    theirs = foreign_dit()
    state = as_diffusers(theirs.state_dict())
    torch.save(state, tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "num_attention_heads": 2}')
    generator = torch.Generator().manual_seed(1)
    images, times, labels = torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([3, 700]), torch.tensor([0, 5])
    for given in (state, tmp_path):
        ours = empty(DiTConfig(**DIT, learn_sigma=True))
        report = load_weights(ours, given)
        assert report.adapter == "diffusers"
        assert not report["skipped"]
        assert {entry.note for entry in report["unused"]} == {"the same in every block"}
        found = unpatchify(ours(**ours.inputs(images), times=times.float(), labels=labels), (2, 2), (8, 8))
        torch.testing.assert_close(found, theirs(images, times, labels), atol=1e-5, rtol=1e-5)
    assert "the model has 4 heads" in refusal(DiTConfig(**DIT | {"heads": 4}, learn_sigma=True), tmp_path)
    assert "set positions: sincos" in refusal(DiTConfig(**DIT, learn_sigma=True, positions="rope"), state)
    name = "transformer_blocks.1.norm1.emb.class_embedder.embedding_table.weight"
    assert "is not that of the first block" in refusal(
        DiTConfig(**DIT, learn_sigma=True), state | {name: torch.zeros(6, 32)}
    )


# ---------------------------------------------------------------- files that are none of these

ODD_SHAPES = ((), (0,), (3,), (1,) * 7)


@pytest.mark.parametrize("kind", ["torchditan", "torchtitan-mae", "ucf", "variables", "sit", "diffusers"])
def test_tensors_of_any_shape_are_refused_in_a_sentence(kind: str) -> None:
    """Also those that no rule expects: of no axes, of no numbers, of too many axes."""
    c: Any = DiTConfig(**DIT, learn_sigma=True)
    options: dict[str, Any] = {}
    state: dict[str, Tensor] = foreign_dit().state_dict()
    if kind == "torchditan":
        c, state = DiTConfig(**DITAN), scramble(TorchDiTan(8, 2, 32, 2, 48, 5, 3)).state_dict()
    elif kind == "torchtitan-mae":
        encoder = EncoderConfig(width=48, depth=2, heads=4, kv_heads=2, patch=4, hidden=64, mlp="swiglu", norm="rms")
        c, options = MAEConfig(encoder=encoder, decoder=DecoderConfig(**SMALL), ndim=3, channels=1), {"strict": False}
        state = scramble(TorchtitanMAE()).state_dict()
    elif kind == "ucf":
        c, state = mae(), scramble(UCF()).state_dict()
    elif kind == "variables":
        c, state = mae(variables=VariablesConfig(known=("u", "v", "t"))), scramble(UCF(variables=3)).state_dict()
    elif kind == "sit":
        c, options = DiTConfig(**DIT, time_scale=1e-3), {"adapter": "sit"}
    else:
        state = as_diffusers(state)
    model = c.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = {re.sub(r"\d+", "#", name): name for name in state}  # of blocks that are alike, one
    for name in seen.values():
        for shape in ODD_SHAPES:
            with contextlib.suppress(UserError):  # parts that the model has not may be anything
                load_weights(model, state | {name: torch.zeros(shape)}, **options)
                model.load_state_dict(before)
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_names_settings_and_numbers_that_no_file_has(tmp_path: Path) -> None:
    c, state = DiTConfig(**DITAN), scramble(TorchDiTan(8, 2, 32, 2, 48, 5, 3)).state_dict()
    long = state | {f"layers.{'1' * 5000}.attention_norm.weight": torch.ones(32)}
    assert "its tensors are not shaped as those of such a file" in refusal(c, long)
    turned = state | {"norm.weight": torch.ones(32, dtype=torch.complex64)}
    assert "norm.weight holds complex numbers" in refusal(c, turned)
    sparse = state | {"norm.weight": torch.ones(32).to_sparse()}
    assert "its tensors are not shaped as those of such a file" in refusal(c, sparse)
    torch.save(as_diffusers(foreign_dit().state_dict()), tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 1' + "0" * 400 + "}")
    assert "num_attention_heads is 1000" in refusal(DiTConfig(**DIT, learn_sigma=True), tmp_path)
