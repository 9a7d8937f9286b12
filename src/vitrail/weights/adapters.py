"""What the tensors of other projects' files become here.

Names are brought to one vocabulary, close to timm's, by tables of regular expressions; what is then done with a tensor
(reordered heads, kernels, positions, tokens) follows from its name there. A file is recognised by names that only its
kind has. Adapters:
- timm: timm's ViTs, DINO, DINOv2 and DINOv3, and encoders of facebookresearch/mae
- mae: facebookresearch/mae with its decoder
- hf: ViT, ViTMAE, DINOv2 and DINOv3 of Hugging Face transformers, of versions 4 and 5
- dit: facebookresearch/DiT
- monai: MONAI's UNETR; a model that computes the same has encoder: {size: B/16, positions: learned, eps: 1.0e-5}
- vitrail: a run or checkpoint of this library, or a file with its names
"""

import math
import re
from functools import partial

import torch

from vitrail.weights import pieces
from vitrail.weights.files import Weights
from vitrail.weights.names import IGNORED, NEVER, OTHERS, TABLES, rename
from vitrail.weights.own import translate_own
from vitrail.weights.pieces import Piece, Target, Translation, is_superposed, place_patch_embed, rope_inflation
from vitrail.weights.positions import place_positions

HF_MODELS = ("vit", "vit_mae", "vit_msn", "ijepa", "dinov2", "dinov2_with_registers", "dinov3_vit")

# Tokens that are not turned stand where coordinates are 0. Patches among themselves see distances alone.
PREFIX_OF_DINOV3 = (
    "DINOv3's class token and registers stand at the centre of the image, the model's at its first patch, so that they "
    "see the patches turned otherwise; set rope_origin: centre"
)


def translate(weights: Weights, target: Target, adapter: str, names: tuple[str, ...] | None = None) -> Translation:
    if adapter == "vitrail":
        return translate_own(weights, target, names)
    kind = getattr(getattr(target.model, "config", None), "kind", None)
    if adapter == "monai" and kind != "unetr":
        return Translation(wrong=[f"MONAI's UNETR goes into a unetr, not into a {kind}"])
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
        _check_settings(weights, target, out)
    else:
        out.notes.append(
            f"such files do not say how many heads there are: the {target.encoder.heads} of the model were taken"
        )
    if adapter == "monai":
        _check_unetr(weights, found, target, out)
    halves = _rotations(weights, found, target, out, adapter)
    place_positions(weights, found, target, out, adapter=adapter, turned=halves)
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
            flat = len(weights.shapes[name]) == 2  # a linear layer of MONAI's, whose rows are as ours
            as_kernel = [partial(pieces.as_kernel, patch=target.patch)] if flat else []
            place_patch_embed(name, ours, target, out, *as_kernel)
        elif found_part := re.fullmatch(r"(.*\.attn)\.q\.(weight|bias)", ours):
            _join_heads(found, new, found_part, target, out, halves=halves)
        elif re.fullmatch(r".*\.attn\.[kv]\.(weight|bias)", ours):
            continue  # with its q
        elif ".attn.qkv." in ours and ours in target.parameters:
            masked = ours.endswith("bias") and f"{name}_mask" in weights.shapes
            width = target.head_width(ours)
            make = partial(pieces.fused_head_major, head_width=width, halves=halves, masked_keys=masked)
            out.pieces[ours] = Piece((name,), make)
        elif ".mlp.packed." in ours or (".mlp.fc1." in ours and _is_packed(ours, weights.shapes[name], target)):
            for index, layer in enumerate(("gate", "fc1")):
                to = re.sub(r"\.mlp\.\w+\.", f".mlp.{layer}.", ours)
                out.pieces[to] = Piece((name,), partial(pieces.part, index=index, of=2))
        elif re.match(r"(decoder\.head|final\.proj)\.", ours) and file_patch:
            out.pieces[ours] = Piece((name,), partial(pieces.voxel_rows, old=file_patch, new=target.patch))
        else:
            out.pieces[ours] = Piece((name,))
    _zero_biases(target, out)
    return out


def _join_heads(
    found: dict[str, str], new: str, parts: re.Match[str], target: Target, out: Translation, *, halves: bool
) -> None:
    ours = f"{parts.group(1)}.qkv.{parts.group(2)}"
    q, k, v = (found.get(re.sub(r"\.attn\.q\.", f".attn.{letter}.", new)) for letter in "qkv")
    if ours not in target.parameters or q is None or v is None:
        return
    make = partial(pieces.head_major, head_width=target.head_width(ours), halves=halves)
    if k is not None:
        out.pieces[ours] = Piece((q, k, v), make)
    elif ours.endswith("bias"):  # keys without one, as DINOv3's
        out.pieces[ours] = Piece((q, v), lambda q, v: make(q, torch.zeros_like(q), v))


def _is_packed(ours: str, shape: tuple[int, ...], target: Target) -> bool:
    """Return whether gate and value are one tensor: the model keeps them apart, and each has half the rows."""
    gate = target.parameters.get(ours.replace(".fc1.", ".gate."))
    return gate is not None and shape[0] == 2 * gate.shape[0]


def _zero_biases(target: Target, out: Translation) -> None:
    """Give layers whose file has no biases those of 0, which compute the same."""
    for name, piece in list(out.pieces.items()):
        bias = name.removesuffix("weight") + "bias"
        if (
            name.endswith((".attn.qkv.weight", ".patch_embed.proj.weight"))
            and bias in target.parameters
            and bias not in out.pieces
        ):
            out.pieces[bias] = Piece(piece.sources[:1], pieces.zeros(*target.parameters[bias].shape))


def _check_settings(weights: Weights, target: Target, out: Translation) -> None:
    """Compare config.json of a Hugging Face model with the model that is filled."""
    settings, e = weights.settings, target.encoder
    if settings is None:
        out.notes.append(f"no config.json beside the file: the {e.heads} heads of the model were taken")
        return
    if (kind := settings.get("model_type", "vit")) not in HF_MODELS:
        out.problems.append(f"model_type is {kind!r} in config.json; known are {', '.join(HF_MODELS)}")
    decoder_heads = getattr(getattr(target.model.config, "decoder", None), "heads", None)
    for key, ours, told in (
        ("num_attention_heads", e.heads, out.wrong),
        ("decoder_num_attention_heads", decoder_heads, out.decoder),
    ):
        if key in settings and ours is not None and settings[key] != ours:
            told.append(f"{key} is {settings[key]} in config.json, the model has {ours} heads; set that number")
    if settings.get("hidden_act", "gelu") != "gelu" and target.config.mlp == "gelu":
        out.wrong.append(f"its activation is {settings['hidden_act']!r}, the model's is the exact GELU")
    # DINOv2's gates are SiLU whatever hidden_act says, DINOv3's are what it says.
    gate = settings.get("hidden_act", "gelu") if settings.get("model_type") == "dinov3_vit" else "silu"
    if target.config.mlp == "swiglu" and gate not in ("silu", "swish"):
        out.wrong.append(f"its gates are {gate!r}, the model's SiLU")
    eps = settings.get("layer_norm_eps")
    if isinstance(eps, int | float) and not math.isclose(eps, target.config.eps):
        out.notes.append(f"its norms have eps {eps:g}, the model's {target.config.eps:g}; encoder.eps sets it")


def _rotations(weights: Weights, found: dict[str, str], target: Target, out: Translation, adapter: str) -> bool:
    """Return whether a file's rotations pair channel i with i + K/2, as those of DINOv3 do.

    Few files tell of rotations: timm and Hugging Face compute DINOv3's anew. So a file without positions is DINOv3's
    where it has what DINOv3 has, and is otherwise refused where the model would have to know.
    """
    name = next((n for n in weights.shapes if re.fullmatch(r"rope(?:_embed)?\.periods", n)), None)
    if name is None and "pos_embed" in found:
        if found.get("blocks.0.attn.q.bias", "").endswith("q_bias"):
            out.problems.append(
                "its queries have a bias of their own beside fused weights, as EVA's do, and some of those turn "
                "queries and keys besides their positions, which no file tells"
            )
        elif adapter == "timm" and found.get("blocks.0.ls1.gamma", "").endswith("gamma_1"):
            out.problems.append(
                "its layer scales are named gamma_1, as in facebookresearch/deit (DeiT III) and where queries and keys "
                "are turned (rope) besides its positions (timm's Eva and vit_*_rope_ape_*, naver-ai/rope-vit), which "
                "no file tells: strict: false loads the former rightly, and the latter as another model"
            )
        if "input_norm.weight" in found:
            out.notes.append("norm_pre is CLIP's; where its GELU is the quick one, the model's exact one is another")
        return False
    settings = weights.settings or {} if adapter == "hf" else {}  # others' would be another program's
    alike = {"cls_token", "registers", "blocks.0.ls1.gamma", "blocks.0.ls2.gamma"} <= set(found)
    if name is None and not alike and settings.get("model_type") != "dinov3_vit":
        if target.positions in ("rope", "none"):
            out.problems.append(
                "the file holds no positions, and does not tell whether its model turns queries and keys (rope); of "
                "such files DINOv3's are known, by their class token, registers and layer scales"
            )
        return False
    if target.positions != "rope":
        what = "the file turns" if name is not None else "the file is taken for DINOv3, which turns"
        out.problems.append(f"{what} queries and keys (rope); set positions: rope instead of {target.positions}")
        return True
    if target.ndim != 2 and not (target.ndim == 3 and is_superposed(target)):
        out.problems.append(rope_inflation(target))
    told = settings.get("rope_theta")
    theta, first = float(told) if isinstance(told, int | float) else 100.0, 1.0
    head_width = target.encoder.width // target.encoder.heads
    if name is not None:
        periods = weights.read(name).double()
        if 4 * len(periods) != head_width:
            out.wrong.append(f"its heads are {4 * len(periods)} wide, the model's {head_width}; set heads to fit")
            return True
        first = float(periods[0])
        if len(periods) > 1:
            theta = float(periods[-1] / periods[0]) ** (len(periods) / (len(periods) - 1))
    elif told is None:
        out.notes.append("the file does not tell its rotations: it was taken for DINOv3, whose theta is 100")
    if head_width % 4:
        out.wrong.append(f"DINOv3's heads are a multiple of 4 wide, the model's {head_width}; set heads to fit")
    _compare_with_dinov3(theta, first, target, out)
    return True


def _compare_with_dinov3(theta: float, first: float, target: Target, out: Translation) -> None:
    """Compare coordinates: its go from -1 to 1 over the whole image, whatever its size; ours count patches."""
    c = target.config
    if not math.isclose(theta, c.theta, rel_tol=2e-2):
        out.problems.append(f"its rotations have theta {theta:.4g}, the model's {c.theta:g}; set theta: {theta:.4g}")
    if target.grid is None:
        out.notes.append(
            "its rotations span the whole image, the model's go by patch: equal where rope_scale is 4 pi over the "
            f"number of patches along an axis (it is {c.rope_scale:g})"
        )
        return
    plane = target.grid[-2:]
    wanted = 4 * math.pi / (plane[-1] * first)
    if len(set(plane)) > 1:
        out.problems.append(
            f"its rotations span every axis alike, the model's go by patch, and its {' x '.join(map(str, plane))} "
            "patches are no square; use a square shape"
        )
    elif not math.isclose(c.rope_scale, wanted, rel_tol=1e-3):
        out.problems.append(
            f"its rotations span the whole image, the model's go by patch: with {plane[-1]} patches along an axis they "
            f"are equal where rope_scale is {wanted:.6g}, not {c.rope_scale:g}; set rope_scale: {wanted:.6g}"
        )
    if (c.cls_token or c.registers) and c.rope_origin != "centre":
        out.problems.append(PREFIX_OF_DINOV3)


# ---------------------------------------------------------------- MONAI


def _check_unetr(weights: Weights, found: dict[str, str], target: Target, out: Translation) -> None:
    """Refuse what no weight tells: with another setting the numbers would fit and the model be wrong."""
    config, encoder = target.model.config, target.config
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
            out.wrong.append(f"model.{key}: {value} does not fit MONAI's UNETR, which has {expected}")
    kernel = found.get("decoder.image.conv1.weight")
    channels = target.channels if kernel is None else weights.shapes[kernel][1]
    if channels != target.channels:
        out.wrong.append(
            f"it is of {channels} channels, the model of {target.channels}; set channels: {channels}, as its "
            "convolutions are not shared by other channels"
        )
