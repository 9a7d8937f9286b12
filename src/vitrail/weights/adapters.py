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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from vitrail.layers.patches import per_axis
from vitrail.weights import pieces
from vitrail.weights.files import Weights
from vitrail.weights.own import translate_own
from vitrail.weights.pieces import Piece, Target, Translation, is_superposed, place_patch_embed, rope_inflation

Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]

_BLOCK: list[tuple[str, str]] = [  # of timm-like blocks, after "blocks.N."
    (r"gamma_([12])", r"ls\1.gamma"),
    (r"attn\.([qkv])_bias", r"attn.\1.bias"),  # beside fused weights, where keys have no bias
    (r"attn\.q_norm\.", "attn.norm_qk.q."),
    (r"attn\.k_norm\.", "attn.norm_qk.k."),
    (r"mlp\.w12\.", "mlp.packed."),
    (r"mlp\.w3\.", "mlp.fc2."),
    (r"mlp\.w1\.", "mlp.gate."),
    (r"mlp\.w2\.", "mlp.fc1."),
    (r"mlp\.fc1_g\.", "mlp.gate."),
    (r"mlp\.fc1_x\.", "mlp.fc1."),
]
TIMM: Rules = [
    (r"(cls_token|pos_embed|norm\..*|head\..*)", r"\1"),
    (r"(?:reg_token|register_tokens|storage_tokens)", "registers"),
    (r"norm_pre\.(.*)", r"input_norm.\1"),
    (r"patch_embed\.proj\.(.*)", r"patch_embed.proj.\1"),
    (r"blocks\.\d+\.(\d+\..*)", r"blocks.\1"),  # in chunks, as DINOv2 is trained
    (r"(blocks\.\d+\..*)", r"\1"),
]
MAE: Rules = [
    *TIMM,
    (r"mask_token", "decoder.mask_token"),
    (r"decoder_pos_embed", "decoder.pos_embed"),
    (r"decoder_embed\.(.*)", r"decoder.embed.\1"),
    (r"decoder_blocks\.(.*)", r"decoder.blocks.\1"),
    (r"decoder_norm\.(.*)", r"decoder.norm.\1"),
    (r"decoder_pred\.(.*)", r"decoder.head.\1"),
]
_HF_LAYER: list[tuple[str, str]] = [
    (r"(?:attention\.)?attention\.(?:query|q_proj)\.", "attn.q."),
    (r"(?:attention\.)?attention\.(?:key|k_proj)\.", "attn.k."),
    (r"(?:attention\.)?attention\.(?:value|v_proj)\.", "attn.v."),
    (r"attention\.(?:output\.dense|o_proj)\.", "attn.proj."),
    (r"intermediate\.dense\.", "mlp.fc1."),
    (r"output\.dense\.", "mlp.fc2."),
    (r"mlp\.weights_in\.", "mlp.packed."),
    (r"mlp\.weights_out\.", "mlp.fc2."),
    (r"mlp\.gate_proj\.", "mlp.gate."),
    (r"mlp\.up_proj\.", "mlp.fc1."),
    (r"mlp\.down_proj\.", "mlp.fc2."),
    (r"layernorm_before\.", "norm1."),
    (r"layernorm_after\.", "norm2."),
    (r"layer_scale([12])\.lambda1", r"ls\1.gamma"),
]
_HF = r"(?:vit\.|dinov2\.|dinov2_with_registers\.)?"
_HF_BLOCKS = _HF + r"(?:encoder\.layer|layers|layer|model\.layer)"  # the last two are DINOv3's
HF: Rules = [
    (_HF + r"embeddings\.cls_token", "cls_token"),
    (_HF + r"embeddings\.position_embeddings", "pos_embed"),
    (_HF + r"embeddings\.register_tokens", "registers"),
    (_HF + r"embeddings\.patch_embeddings\.projection\.(.*)", r"patch_embed.proj.\1"),
    (_HF + r"embeddings\.patch_embeddings\.(weight|bias)", r"patch_embed.proj.\1"),
    (_HF_BLOCKS + r"\.(\d+\..*)", r"blocks.\1"),
    (_HF + r"(?:layernorm|norm)\.(.*)", r"norm.\1"),
    (r"classifier\.(.*)", r"head.\1"),
    (r"decoder\.mask_token", "decoder.mask_token"),
    (r"decoder\.decoder_pos_embed", "decoder.pos_embed"),
    (r"decoder\.decoder_embed\.(.*)", r"decoder.embed.\1"),
    (r"decoder\.decoder_(?:layers|encoder\.layer)\.(\d+\..*)", r"decoder.blocks.\1"),
    (r"decoder\.decoder_norm\.(.*)", r"decoder.norm.\1"),
    (r"decoder\.decoder_pred\.(.*)", r"decoder.head.\1"),
]
DIT: Rules = [
    (r"pos_embed", "pos_embed"),
    (r"x_embedder\.proj\.(.*)", r"patch_embed.proj.\1"),
    (r"t_embedder\.mlp\.0\.(.*)", r"time_embed.fc1.\1"),
    (r"t_embedder\.mlp\.2\.(.*)", r"time_embed.fc2.\1"),
    (r"y_embedder\.embedding_table\.weight", "label_embed.table"),
    (r"(blocks\.\d+)\.adaLN_modulation\.1\.(.*)", r"\1.modulation.\2"),
    (r"(blocks\.\d+\..*)", r"\1"),
    (r"final_layer\.adaLN_modulation\.1\.(.*)", r"final.modulation.\1"),
    (r"final_layer\.linear\.(.*)", r"final.proj.\1"),
]
_END = r"(?:\.conv)*\.(weight|bias)"
MONAI: Rules = [
    (r"vit\.patch_embedding\.position_embeddings", "pos_embed"),
    (r"vit\.patch_embedding\.patch_embeddings(?:\.1)?" + _END, r"patch_embed.proj.\1"),
    (r"vit\.(blocks\.\d+)\.(norm1|norm2|attn\.qkv)" + _END, r"\1.\2.\3"),
    (r"vit\.(blocks\.\d+)\.attn\.out_proj" + _END, r"\1.attn.proj.\2"),
    (r"vit\.(blocks\.\d+)\.mlp\.linear(1|2)" + _END, r"\1.mlp.fc\2.\3"),
    (r"vit\.norm" + _END, r"norm.\1"),
    (r"encoder1\.layer\.((?:conv|norm)[123])" + _END, r"decoder.image.\1.\2"),
    (r"encoder([234])\.transp_conv_init" + _END, lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.0.{m[2]}"),
    (
        r"encoder([234])\.blocks\.(\d)\.0" + _END,
        lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.{int(m[2]) + 1}.{m[3]}",
    ),
    (
        r"encoder([234])\.blocks\.(\d)\.1\.((?:conv|norm)[123])" + _END,
        lambda m: f"decoder.skips.{int(m[1]) - 2}.blocks.{m[2]}.{m[3]}.{m[4]}",
    ),
    (r"decoder([2345])\.transp_conv" + _END, lambda m: f"decoder.ups.{5 - int(m[1])}.up.{m[2]}"),
    (
        r"decoder([2345])\.conv_block\.((?:conv|norm)[123])" + _END,
        lambda m: f"decoder.ups.{5 - int(m[1])}.block.{m[2]}.{m[3]}",
    ),
    (r"out" + _END, r"decoder.out.\1"),
]

# Tensors that say nothing about what a model computes; and those that say nothing where no rule above takes them.
NEVER = [(r".*bias_mask", "it only marks that keys have no bias"), (r".*num_batches_tracked", "a counter")]
IGNORED = [
    *NEVER,
    (r"(?:.*embeddings\.)?mask_token", "it stands in for hidden patches in pre-training"),
    (r"rope(?:_embed)?\.periods", "rotations are computed here"),
    (r"(?:.*\.)?pooler\..*", "a layer on the class token that this library does not have"),
    (r"(?:dino_head|ibot_head|head_dist|dist_token).*", "a head of pre-training"),
    (r"vit\.blocks\.\d+\.(?:norm_cross_attn|cross_attn)\..*", "cross-attention that MONAI stores and never uses"),
    (r"vit\.patch_embedding\.cls_token", "a token that MONAI stores and never uses"),
]

SIGNATURES: dict[str, tuple[list[str], list[str]]] = {  # names that a file of this kind has, and has not
    "vitrail": ([r"encoder\.blocks\.0\.attn\.qkv\.weight"], []),
    "timm": (
        [r"blocks\.(?:0\.)?0\.attn\.qkv\.weight", r"patch_embed\.proj\.weight"],
        [r"decoder_blocks\..*", r"blocks\.0\.mlp\.linear1\.weight"],
    ),
    "mae": ([r"blocks\.0\.attn\.qkv\.weight", r"decoder_blocks\.0\.attn\.qkv\.weight"], []),
    "hf": ([_HF_BLOCKS + r"\.0\.attention\.(?:attention\.query|q_proj)\.weight"], []),
    "dit": ([r"x_embedder\.proj\.weight", r"blocks\.0\.adaLN_modulation\.1\.weight"], []),
    "monai": ([r"vit\.blocks\.0\.mlp\.linear1\.weight", r"encoder1\..*"], []),
}
TABLES: dict[str, Rules] = {"timm": TIMM, "mae": MAE, "hf": HF, "dit": DIT, "monai": MONAI}
ADAPTERS = tuple(SIGNATURES)


def recognise(names: Iterable[str]) -> list[str]:
    """List the adapters whose names these are."""
    given = list(names)

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in given)

    return [name for name, (there, absent) in SIGNATURES.items() if all(map(has, there)) and not any(map(has, absent))]


def rename(name: str, rules: Rules) -> str | None:
    """Return the name in the vocabulary; None where no rule takes it."""
    for pattern, to in rules:
        if found := re.fullmatch(pattern, name):
            new = to(found) if callable(to) else found.expand(to)
            if inner := re.fullmatch(r"((?:decoder\.)?blocks\.\d+\.)(.*)", new):
                return inner.group(1) + _rename_inside(inner.group(2))
            return new
    return None


def _rename_inside(name: str) -> str:
    for pattern, to in (*_HF_LAYER, *_BLOCK):
        if re.match(pattern, name):
            return re.sub("^" + pattern, to, name)
    return name


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
    for name in weights.shapes:
        never = any(re.fullmatch(pattern, name) for pattern, _ in NEVER)
        new = None if never else rename(name, TABLES[adapter])
        reason = next((reason for pattern, reason in IGNORED if re.fullmatch(pattern, name)), None)
        if new is None and reason is not None:
            out.ignored[name] = reason
        elif new is not None:
            found[new] = name
    if adapter == "hf":
        _check_settings(weights, target, out)
    else:
        weights.settings = None  # another program's config.json
        out.notes.append(
            f"such files do not say how many heads there are: the {target.encoder.heads} of the model were taken"
        )
    if adapter == "monai":
        _check_unetr(weights, found, target, out)
    halves = _rotations(weights, found, target, out)
    _positions(weights, found, target, out, turned=halves)
    file_patch = (
        tuple(weights.shapes[found["patch_embed.proj.weight"]][2:]) if "patch_embed.proj.weight" in found else ()
    )
    for new, name in found.items():
        if new in ("cls_token", "registers", "pos_embed", "decoder.pos_embed"):
            continue  # done by _positions
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


def _rotations(weights: Weights, found: dict[str, str], target: Target, out: Translation) -> bool:
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
        return False
    settings = weights.settings or {}
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


# ---------------------------------------------------------------- positions and tokens before the patches


def _positions(weights: Weights, found: dict[str, str], target: Target, out: Translation, *, turned: bool) -> None:
    cls, registers, table = (found.get(n) for n in ("cls_token", "registers", "pos_embed"))
    counts = tuple(math.prod(weights.shapes[n][:-1]) for n in (cls, registers) if n is not None)
    skip, grid = 0, None
    if table is not None:
        rows = math.prod(weights.shapes[table][:-1])
        if "decoder.image.conv1.weight" in found:  # MONAI's: no other tokens, and positions of volumes as of images
            fits = target.grid is not None and math.prod(target.grid) == rows
            grid = target.grid if fits else pieces.square_grid(rows, target.ndim)
            if grid is None:
                out.wrong.append(f"its {rows} positions are no grid of equal sides")
        else:
            skip, grid = _find_grid(rows, cls is not None, sum(counts), target, _grid_by_settings(weights))
            if grid is None:
                out.wrong.append(f"its {rows} positions are no square grid, with or without a class token")
    _first_tokens(cls, registers, counts, table if skip else None, skip, target, out)
    if grid is not None and table is not None:
        _table(weights, table, grid, skip, "encoder", target, out)
    elif table is None and target.positions in ("sincos", "learned") and not turned:
        out.problems.append(f"the file holds no positions, but the model adds {target.positions} ones; set positions")
    decoder = found.get("decoder.pos_embed")
    if decoder is None or grid is None:
        return
    if not hasattr(getattr(target.model, "decoder", None), "mask_token"):
        out.ignored[decoder] = "the model has no such decoder"
        return
    _table(weights, decoder, grid, skip, "decoder", target, out)
    if skip and float(weights.read(decoder).reshape(-1, weights.shapes[decoder][-1])[:skip].abs().max()) > 1e-6:
        out.decoder.append("the decoder's class token has a position in the file, and none here")


def _find_grid(
    rows: int, cls: bool, first: int, target: Target, known: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...] | None]:
    """Return how many rows of a table are not patches', and the grid of the rest."""
    choices = [int(cls), *([first] if first > 1 else []), 0]
    if known is not None:
        return next(((skip, known) for skip in choices if rows - skip == math.prod(known)), (0, None))
    for skip in choices:
        if rows > skip and (grid := pieces.square_grid(rows - skip, 2)) is not None:
            return skip, grid
    plane = None if target.grid is None else target.grid[-2:]
    for skip in choices:
        if rows > skip and (grid := pieces.square_grid(rows - skip, 2, plane)) is not None:
            return skip, grid
    return 0, None


def _grid_by_settings(weights: Weights) -> tuple[int, ...] | None:
    settings = weights.settings or {}
    try:
        size, patch = (per_axis(_tupled(settings[key]), 2) for key in ("image_size", "patch_size"))
        return tuple(s // p for s, p in zip(size, patch, strict=True))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _first_tokens(
    cls: str | None,
    registers: str | None,
    counts: tuple[int, ...],
    table: str | None,
    skip: int,
    target: Target,
    out: Translation,
) -> None:
    c = target.config
    names = [n for n in (cls, registers) if n is not None]
    have = (counts[0] if cls else 0, counts[-1] if registers else 0)
    wanted = (int(c.cls_token), c.registers)
    if have != wanted:
        said = [f"{n} {what}" for n, what in zip(have, ("class token", "registers"), strict=True)]
        out.problems.append(
            f"the file has {' and '.join(said)}, the model {wanted[0]} and {wanted[1]}; "
            f"set cls_token: {'true' if have[0] else 'false'} and registers: {have[1]}"
        )
    elif names:
        own_row = "encoder.pos_embed.cls" in target.parameters  # the class token's position is a parameter of its own
        make = partial(pieces.first_rows, counts=counts, added=0 if own_row and skip < 2 else skip)
        out.pieces["encoder.prefix_tokens"] = Piece((*names, *([table] if table else [])), make)
        if own_row:
            row = partial(pieces.class_row, there=skip == 1)
            out.pieces["encoder.pos_embed.cls"] = Piece((table or names[0],), row)


def _table(
    weights: Weights, name: str, grid: tuple[int, ...], skip: int, part: str, target: Target, out: Translation
) -> None:
    """Turn a table into a learned one; or, where positions are computed, look whether they are the same."""
    positions = target.positions
    ours = f"{part}.pos_embed.table"
    if positions == "learned" and ours in target.parameters:
        assert target.grid is not None
        make = partial(pieces.position_table, old=grid, new=target.grid, skip=skip)
        out.pieces[ours] = Piece((name,), make)
        return
    if positions == "sincos" and target.ndim == 2:
        rows = weights.read(name).float().reshape(-1, weights.shapes[name][-1])[skip:]
        if torch.allclose(rows, pieces.sincos_rows(grid, rows.shape[-1]), atol=1e-4):
            out.ignored[name] = "the same sin-cos positions are computed here"
            return
    out.ignored[name] = f"the model's positions are {positions}"
    (out.problems if part == "encoder" else out.decoder).append(
        f"{name}: the model's positions ({positions}) are not those of the file; set positions: learned"
    )


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
