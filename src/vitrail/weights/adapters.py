"""What the tensors of other projects' files become here.

Names are brought to one vocabulary, close to timm's, by tables of regular expressions; what is then done with a tensor
(reordered heads, kernels, positions, tokens) follows from its name there. A file is recognised by names that only its
kind has. Adapters:
- timm: timm's ViTs, DINO, DINOv2 and DINOv3, and encoders of facebookresearch/mae
- mae: facebookresearch/mae with its decoder
- hf: ViT, ViTMAE, DINOv2 and DINOv3 of Hugging Face transformers, of versions 4 and 5
- dit: facebookresearch/DiT; sit: willisma/SiT, whose files have the same names; diffusers: Hugging Face's DiT
- monai: MONAI's UNETR and ViT; a model that computes the same has encoder: {positions: learned, eps: 1.0e-5}
- ucf: UCF-VIT; torchditan: TorchDiTan; torchtitan-mae: its masked autoencoder
- vitrail: a run or checkpoint of this library, or a file with its names
"""

import math
import re
from functools import partial

import torch

from vitrail.weights import pieces
from vitrail.weights.checks import check_diffusers, check_hf, check_monai, check_times, check_ucf
from vitrail.weights.files import Weights
from vitrail.weights.names import IGNORED, NEVER, OTHERS, TABLES, rename
from vitrail.weights.own import translate_own
from vitrail.weights.pieces import Pairs, Piece, Target, Translation, place_patch_embed
from vitrail.weights.positions import place_positions
from vitrail.weights.rotations import find_rotations

GATE_FIRST = "mlp.fc1 holds gate and value: taken as timm's SwiGLUPacked, whose gate comes first and is SiLU"


def translate(weights: Weights, target: Target, adapter: str, names: tuple[str, ...] | None = None) -> Translation:
    if adapter == "vitrail":
        return translate_own(weights, target, names)
    return _foreign(weights, target, adapter)


# ---------------------------------------------------------------- files of other projects


def _foreign(weights: Weights, target: Target, adapter: str) -> Translation:
    out = Translation()
    found: dict[str, str] = {}  # name in the vocabulary -> name in the file
    others: dict[str, list[str]] = {}  # what it means -> names in the file
    for name in weights.shapes:
        other = next((what for pattern, what in OTHERS if re.fullmatch(pattern, name)), None)
        if other is not None:
            others.setdefault(other, []).append(name)
            out.ignored[name] = f"it belongs to {other}"
            continue
        never = any(re.fullmatch(pattern, name) for pattern, _ in NEVER)
        new = None if never else rename(name, TABLES[adapter])
        reason = next((reason for pattern, reason in IGNORED if re.fullmatch(pattern, name)), None)
        if new is None and reason is not None:
            out.ignored[name] = reason
        elif new is not None:
            found[new] = name
    for what, names in others.items():
        out.problems.append(f"the file has {names[0]}: {what}, which no model here computes")
    if adapter == "hf":
        check_hf(weights, target, out)
    elif adapter != "diffusers" or weights.settings is None:
        out.notes.append(
            f"such files do not say how many heads there are: the {target.encoder.heads} of the model were taken"
        )
    if adapter == "monai":
        check_monai(weights, found, target, out)
    if adapter == "ucf":
        check_ucf(weights, found, target, out)
    if "time_embed.fc1.weight" in found:
        check_times(target, out, adapter)
    if adapter == "diffusers":
        check_diffusers(weights, target, out)
        pairs, silent = None, True
    elif adapter == "ucf":  # which turns nothing
        pairs, silent = None, "size_embed.weight" in found
    else:
        pairs = find_rotations(weights, found, target, out, adapter)
        silent = pairs is not None
    place_positions(weights, found, target, out, adapter=adapter, silent=silent)
    file_patch = (
        tuple(weights.shapes[found["patch_embed.proj.weight"]][2:]) if "patch_embed.proj.weight" in found else ()
    )
    for new, name in found.items():
        if new in ("cls_token", "registers", "pos_embed", "decoder.pos_embed"):
            continue  # done by place_positions
        ours = (
            new if new.startswith(("decoder.", "head.", "time_embed.", "label_embed.", "final.")) else f"encoder.{new}"
        )
        if ours.startswith("encoder.patch_embed.proj."):
            flat = len(weights.shapes[name]) == 2  # a linear layer (MONAI's, UCF-VIT's), whose columns are as ours
            as_kernel = [partial(pieces.as_kernel, patch=target.patch)] if flat else []
            place_patch_embed(name, ours, target, out, *as_kernel)
        elif found_part := re.fullmatch(r"(.*\.attn)\.q\.(weight|bias)", ours):
            _join_heads(found, new, found_part, target, out, pairs=pairs)
        elif re.fullmatch(r".*\.attn\.[kv]\.(weight|bias)", ours):
            continue  # with its q
        elif ".attn.qkv." in ours and ours in target.parameters:
            masked = ours.endswith("bias") and f"{name}_mask" in weights.shapes
            width = target.head_width(ours)
            make = partial(pieces.fused_head_major, head_width=width, pairs=pairs, masked_keys=masked)
            out.pieces[ours] = Piece((name,), make)
        elif ".mlp.packed." in ours or (".mlp.fc1." in ours and _is_packed(ours, weights.shapes[name], target)):
            if ".mlp.packed." not in ours and GATE_FIRST not in out.notes:
                out.notes.append(GATE_FIRST)
            for index, layer in enumerate(("gate", "fc1")):
                to = re.sub(r"\.mlp\.\w+\.", f".mlp.{layer}.", ours)
                out.pieces[to] = Piece((name,), partial(pieces.part, index=index, of=2))
        elif ours.startswith("final.proj.") and adapter == "sit" and _is_doubled(ours, weights.shapes[name], target):
            out.pieces[ours] = Piece((name,), partial(pieces.first_channels, voxels=math.prod(target.patch)))
        elif ours.endswith("size_embed.weight"):
            out.pieces[ours] = Piece((name,), pieces.axes_turned)
        elif ours.endswith((".patch_embed.variable", ".aggregate.query")):
            out.pieces[ours] = Piece((name,), lambda rows: pieces.Made(rows.flatten(0, 1)))
        elif ours.endswith(".aggregate.kv.weight"):
            width = target.encoder.width // target.encoder.heads
            out.pieces[ours] = Piece((name,), partial(pieces.keys_and_values, head_width=width))
        elif re.match(r"(decoder\.head|final\.proj)\.", ours) and file_patch:
            out.pieces[ours] = Piece((name,), partial(pieces.voxel_rows, old=file_patch, new=target.patch))
        else:
            out.pieces[ours] = Piece((name,))
    _zero_biases(target, out)
    return out


def _join_heads(
    found: dict[str, str], new: str, parts: re.Match[str], target: Target, out: Translation, *, pairs: Pairs | None
) -> None:
    ours = f"{parts.group(1)}.qkv.{parts.group(2)}"
    q, k, v = (found.get(re.sub(r"\.attn\.q\.", f".attn.{letter}.", new)) for letter in "qkv")
    if ours not in target.parameters or q is None or v is None:
        return
    make = partial(pieces.head_major, head_width=target.head_width(ours), pairs=pairs)
    if k is not None:
        out.pieces[ours] = Piece((q, k, v), make)
    elif ours.endswith("bias"):  # keys without one, as DINOv3's
        out.pieces[ours] = Piece((q, v), lambda q, v: make(q, torch.zeros_like(q), v))


def _is_doubled(ours: str, shape: tuple[int, ...], target: Target) -> bool:
    """Return whether the file puts out variances besides, which the model does not."""
    return ours in target.parameters and shape[0] == 2 * target.parameters[ours].shape[0]


def _is_packed(ours: str, shape: tuple[int, ...], target: Target) -> bool:
    """Return whether gate and value are one tensor: the model keeps them apart, and each has half the rows."""
    gate = target.parameters.get(ours.replace(".fc1.", ".gate."))
    return gate is not None and shape[0] == 2 * gate.shape[0]


def _zero_biases(target: Target, out: Translation) -> None:
    """Give layers whose file has no biases those of 0, which compute the same."""
    for name, piece in list(out.pieces.items()):
        bias = name.removesuffix("weight") + "bias"
        if (
            name.endswith((".attn.qkv.weight", ".patch_embed.proj.weight", "final.proj.weight"))
            and bias in target.parameters
            and bias not in out.pieces
        ):
            out.pieces[bias] = Piece(piece.sources[:1], pieces.zeros(*target.parameters[bias].shape))
