"""Weights of MONAI's UNETR for ours: other names, the same numbers.

- its patch kernel has channels before voxels, ours after; its fused qkv rows are (q, k, v; head), ours head-major
- it has no bias in qkv, unless asked for: ours is 0 then
- what it stores and never uses (norms of a cross-attention that is not there) is left out
A model that computes the same has encoder: {size: B/16, positions: learned, eps: 1.0e-5}, and its shape.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.models.unetr import UNETRConfig

_UNUSED = re.compile(r"vit\.(blocks\.\d+\.(norm_cross_attn|cross_attn)\.|patch_embedding\.cls_token)")

# Each name of MONAI's, as a pattern, and ours; the parts that say ".conv" and nothing else are taken out first.
_NAMES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"vit\.patch_embedding\.position_embeddings", "encoder.pos_embed.table"),
    (r"vit\.patch_embedding\.patch_embeddings\.(?:1\.)?(weight|bias)", r"encoder.patch_embed.proj.\1"),
    (r"vit\.blocks\.(\d+)\.(norm1|norm2|attn\.qkv)\.(weight|bias)", r"encoder.blocks.\1.\2.\3"),
    (r"vit\.blocks\.(\d+)\.attn\.out_proj\.(weight|bias)", r"encoder.blocks.\1.attn.proj.\2"),
    (r"vit\.blocks\.(\d+)\.mlp\.linear(1|2)\.(weight|bias)", r"encoder.blocks.\1.mlp.fc\2.\3"),
    (r"vit\.norm\.(weight|bias)", r"encoder.norm.\1"),
    (r"encoder1\.layer\.((?:conv|norm)[123])\.(weight|bias)", r"decoder.image.\1.\2"),
    (r"encoder([234])\.transp_conv_init\.weight", lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.0.weight"),
    (
        r"encoder([234])\.blocks\.(\d)\.0\.weight",
        lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.{int(m[2]) + 1}.weight",
    ),
    (
        r"encoder([234])\.blocks\.(\d)\.1\.((?:conv|norm)[123])\.(weight|bias)",
        lambda m: f"decoder.skips.{int(m[1]) - 2}.blocks.{m[2]}.{m[3]}.{m[4]}",
    ),
    (r"decoder([2345])\.transp_conv\.weight", lambda m: f"decoder.ups.{5 - int(m[1])}.up.weight"),
    (
        r"decoder([2345])\.conv_block\.((?:conv|norm)[123])\.(weight|bias)",
        lambda m: f"decoder.ups.{5 - int(m[1])}.block.{m[2]}.{m[3]}",
    ),
    (r"out\.(weight|bias)", r"decoder.out.\1"),
]


def monai_unetr(state: Mapping[str, Tensor], config: "UNETRConfig") -> dict[str, Tensor]:
    """The state dict of a MONAI UNETR in the names and shapes of ours; what cannot be the same model is refused."""
    _check_config(config)
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.removeprefix("module.")  # left behind by data-parallel wrappers
        if not _UNUSED.match(name):
            ours = _rename(name)
            out[ours] = _reshape(ours, tensor, config)
    _check_depth(out, config)
    if config.encoder.bias:
        for i in range(config.encoder.depth or 0):
            weight = out[f"encoder.blocks.{i}.attn.qkv.weight"]
            out.setdefault(f"encoder.blocks.{i}.attn.qkv.bias", torch.zeros_like(weight[:, 0]))
    return out


def _rename(name: str) -> str:
    plain = re.sub(r"(\.conv)+\.", ".", name)
    for pattern, ours in _NAMES:
        if (match := re.fullmatch(pattern, plain)) is not None:
            return ours(match) if callable(ours) else match.expand(ours)
    raise ValueError(f"{name} is not a name of MONAI's UNETR (with conv_block=True); choose another adapter")


def _reshape(ours: str, tensor: Tensor, config: "UNETRConfig") -> Tensor:
    if ours == "encoder.pos_embed.table":
        return tensor.squeeze(0)
    if ours == "encoder.patch_embed.proj.weight" and tensor.ndim > 2:  # D C *P
        return tensor.movedim(1, -1).flatten(1)
    if ".attn.qkv." in ours:
        return rearrange(tensor, "(three h k) ... -> (h three k) ...", three=3, h=config.encoder.heads)
    return tensor


def _check_config(config: "UNETRConfig") -> None:
    """What no weight tells: with any other setting the numbers would fit and the model be wrong."""
    encoder = config.encoder
    wanted = {
        "encoder.positions": (encoder.positions, "learned"),
        "encoder.eps": (encoder.eps, 1e-5),
        "encoder.norm": (encoder.norm, "layer"),
        "encoder.mlp": (encoder.mlp, "gelu"),
        "encoder.residual": (encoder.residual, "pre"),
        "encoder.kv_heads": (encoder.kv_heads or encoder.heads, encoder.heads),
        "encoder.tokens.kind": (encoder.tokens.kind, "uniform"),
        "encoder.variables": (encoder.variables, None),
        "decoder": (config.decoder, "conv"),
        "skips": (config.skips, True),
    }
    for key, (value, expected) in wanted.items():
        if value != expected:
            raise ValueError(f"model.{key}: {value} does not fit MONAI's UNETR, which has {expected}")


def _check_depth(out: dict[str, Tensor], config: "UNETRConfig") -> None:
    depth = len({name for name in out if re.fullmatch(r"encoder\.blocks\.\d+\.attn\.qkv\.weight", name)})
    if depth != config.encoder.depth:
        raise ValueError(f"the weights have {depth} blocks, model.encoder.depth is {config.encoder.depth}")
