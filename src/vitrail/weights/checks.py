"""What other projects' files mean, and neither names nor shapes tell: settings that the model must have."""

import math
import re

from vitrail.weights.files import Weights
from vitrail.weights.pieces import Target, Translation

HF_MODELS = ("vit", "vit_mae", "vit_msn", "ijepa", "dinov2", "dinov2_with_registers", "dinov3_vit")


def check_hf(weights: Weights, target: Target, out: Translation) -> None:
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


def check_monai(weights: Weights, found: dict[str, str], target: Target, out: Translation) -> None:
    """Refuse what no weight tells: with another setting the numbers would fit and the model be wrong."""
    config, encoder = target.model.config, target.config
    unetr = any(re.match(r"encoder1\.|decoder[2-5]\.", name) for name in weights.shapes)
    if unetr and config.kind != "unetr":
        out.wrong.append(f"MONAI's UNETR goes into a unetr, not into a {config.kind}")
        return
    what = "MONAI's UNETR" if unetr else "MONAI's ViT"
    wanted = {
        "encoder.positions": (encoder.positions, "learned"),
        "encoder.eps": (encoder.eps, 1e-5),
        "encoder.norm": (encoder.norm, "layer"),
        "encoder.mlp": (encoder.mlp, "gelu"),
        "encoder.residual": (encoder.residual, "pre"),
        "encoder.kv_heads": (encoder.kv_heads or encoder.heads, encoder.heads),
        "encoder.tokens.kind": (encoder.tokens.kind, "uniform"),
        "encoder.variables": (encoder.variables, None),
    }
    if unetr:
        wanted |= {"decoder": (config.decoder, "conv"), "skips": (config.skips, True)}
    elif "head.weight" in found and hasattr(config, "pool"):
        wanted |= {"pool": (config.pool, "cls")}
        if ".0." in found["head.weight"]:  # a layer by itself has nothing behind it
            out.notes.append("MONAI's ViT puts a tanh behind its classifier where post_activation is left at 'Tanh'")
    for key, (value, expected) in wanted.items():
        if value != expected:
            out.wrong.append(f"model.{key}: {value} does not fit {what}, which has {expected}")
    kernel = found.get("decoder.image.conv1.weight")
    channels = target.channels if kernel is None else weights.shapes[kernel][1]
    if channels != target.channels:
        out.wrong.append(
            f"it is of {channels} channels, the model of {target.channels}; set channels: {channels}, as its "
            "convolutions are not shared by other channels"
        )


def check_times(target: Target, out: Translation, adapter: str) -> None:
    """Compare what times a denoiser was told: steps of 0 to 999, or 0 to 1. Ours are told 0 to 1000."""
    scale = getattr(target.model.config, "time_scale", 1.0)
    unit = adapter in ("sit", "torchditan")
    wanted = 1e-3 if unit else 1.0
    if not math.isclose(scale, wanted):
        what = "from 0 to 1" if unit else "as steps from 0 to 999"
        more = "; where the file is SiT's, set adapter: sit" if adapter == "dit" else ""
        out.problems.append(
            f"its model is told times {what}, and time_scale is {scale:g}; set time_scale: {wanted:g}{more}"
        )
    if adapter == "dit":
        out.notes.append(
            "SiT's files have the names of DiT's, and were trained on velocities and times from 0 to 1: such a one "
            "needs adapter: sit"
        )


def check_diffusers(weights: Weights, target: Target, out: Translation) -> None:
    """Compare config.json of a DiT of Hugging Face's diffusers, each of whose blocks has embeddings of its own."""
    settings, heads = weights.settings or {}, target.encoder.heads
    if settings.get("num_attention_heads", heads) != heads:
        out.wrong.append(
            f"num_attention_heads is {settings['num_attention_heads']} in config.json, the model has {heads} heads"
        )
    if (act := settings.get("activation_fn", "gelu-approximate")) != "gelu-approximate":
        out.wrong.append(f"its activation is {act!r}, the model's the approximated GELU")
    if target.positions != "sincos":
        out.problems.append(f"diffusers' DiT adds sin-cos positions; set positions: sincos, not {target.positions}")
    out.notes.append(
        "waves of the time are those of facebookresearch/DiT, where the published weights come from; diffusers spaces "
        "them otherwise (downscale_freq_shift), so that weights which it trained itself would see other times"
    )
    for name in weights.shapes:
        if found := re.fullmatch(r"transformer_blocks\.[1-9]\d*\.(norm1\.emb\..*)", name):
            first = f"transformer_blocks.0.{found.group(1)}"
            if first not in weights.shapes or not weights.read(name).equal(weights.read(first)):
                out.wrong.append(f"{name} is not that of the first block, and the model has one for all blocks")
                return
            out.ignored[name] = "the same in every block"


def _check_ucf_trees(found: dict[str, str], target: Target, out: Translation) -> None:
    """Look whether the model is told of the leaves of a tree what UCF-VIT tells: their numbers, or their pixels."""
    told, c = ("pixels" if "size_embed.weight" in found else "number"), target.config
    kept = c.tokens.kind == "adaptive" and c.tokens.told == told
    if not kept:
        positions = {"pixels": "none", "number": "learned"}[told]
        out.problems.append(
            f"its tokens are adaptive and told their {told}; set tokens: {{kind: adaptive, told: {told}, length: ...}} "
            f"and positions: {positions}"
        )
    elif told == "pixels" and c.positions != "none":
        out.problems.append(f"it has no other positions than by pixels; set positions: none, not {c.positions}")
    elif told == "number" and target.ndim == 2:
        out.problems.append(
            "its trees go through the lower half of a cell before the upper one, those here through the upper one "
            "first, so that a number is that of another leaf, and its positions are but a start"
        )
    tables = r"(?:decoder\.)?pos_embed" if kept else r"(?:decoder\.)?(?:pos_embed|size_embed\..*)"
    for name in [name for name in found if re.fullmatch(tables, name) and not (kept and told == "number")]:
        out.ignored[found.pop(name)] = "of tokens that are told otherwise" if not kept else "not used beside pixels"
    if "patch_embed.proj.bias" in found and "encoder.patch_embed.proj.bias" not in target.parameters:
        out.problems.append("it has a bias between the two norms of a patch; set patch_norm: true and patch_bias: true")
        out.ignored[found.pop("patch_embed.proj.bias")] = "the model has none there"
    out.notes.append(
        "its leaves were made patches by cubic interpolation, here they are by means; norms about its patch layer have "
        f"eps 1e-05, the model's {c.eps:g}"
    )


def check_ucf(weights: Weights, found: dict[str, str], target: Target, out: Translation) -> None:
    """Look at what UCF-VIT stores twice, and at adaptive tokens, which it computes otherwise."""
    for name in weights.shapes:
        if other := re.fullmatch(r"token_embeds\.(?:\d+\.)?proj\.(weight|bias)", name):
            first = found.setdefault(f"patch_embed.proj.{other.group(1)}", name)
            if name != first and weights.read(name).equal(weights.read(first)):
                out.ignored[name] = f"{first} by another name"
            elif name != first:
                out.wrong.append(f"{name} is not {first}, of which it is another name in UCF-VIT")
        elif re.fullmatch(r"(?:neck|mask_header)\.0\..*", name):
            out.ignored[name] = "of the head of UCF-VIT's SAP, whose layers have no GELU between them"
    if "patch_embed.norm_in.weight" in found:
        _check_ucf_trees(found, target, out)
    elif "size_embed.weight" in found:  # of a SAP: its leaves are laid out as an image, and that is cut into patches
        out.problems.append(
            "its positions are made of the sizes and places of leaves, and its tokens of parts of several, which no "
            "model here computes"
        )
        for name in [name for name in found if re.fullmatch(r"(?:decoder\.)?(?:pos_embed|size_embed\..*)", name)]:
            out.ignored[found.pop(name)] = "of such positions, or not used beside them"
    if target.ndim == 3:
        out.notes.append(
            "its axes are those of the arrays that it read: of NIfTI x, y and z, which are z, y and x here"
        )
    if "decoder.norm.weight" in found and not math.isclose(target.config.eps, 1e-5):
        out.notes.append(f"its decoder's last norm has eps 1e-05, the model's {target.config.eps:g}")
    if "patch_embed.variable" in found:
        out.notes.append("the file does not name its variables: they were taken in the model's order")
