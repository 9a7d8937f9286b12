"""What layouts of other projects can say of a model, and the settings that lie beside their weights.

Each layout is a function from a Subject to a Layout; what it cannot say is refused by the key of the recipe.
Keys of settings are those that the projects read: timm's config.json, that of Hugging Face, and a bundle's of MONAI.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.models.model import Model, encoder_of
from vitrail.weights.backwards import Style


@dataclass(frozen=True)
class Subject:
    """A model, and what is known of its data."""

    model: Model
    statistics: tuple[list[float], list[float]]  # mean and std of each channel, of values as they are read
    are_bytes: bool  # whether these are from 0 to 255
    names: tuple[str, ...] = ()  # of classes
    variables: tuple[str, ...] = ()
    norm_pixels: bool = False  # a masked autoencoder predicts patches that are normalised each by itself

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def encoder(self) -> Any:
        return encoder_of(self.config)

    @property
    def shape(self) -> tuple[int, ...]:
        return per_axis(self.config.shape, self.config.ndim)

    @property
    def hidden(self) -> int:
        """Count the hidden channels of an MLP of the encoder."""
        model: Any = self.model
        return model.encoder.blocks[0].mlp.fc1.out_features

    def key(self, name: str) -> str:
        """Return the recipe's key of a setting of the encoder."""
        return f"model.{name}" if self.encoder is self.config else f"model.encoder.{name}"


@dataclass(frozen=True)
class Layout:
    """How a model is written: the style of names, files of settings, and a line that opens them."""

    style: Style
    files: dict[str, dict[str, Any]]  # by their names
    opens: str
    layer_scale: bool = False  # its blocks have layer scales, whatever the model's have
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] | None = None  # that the weights are read with


def refuse(subject: Subject, what: str, wanted: dict[str, Any], kinds: Sequence[str]) -> None:
    """Refuse what a layout cannot say; `wanted` are values of keys of the encoder, one or some that fit."""
    kind = subject.config.kind
    if kind not in kinds:
        only = "; --only encoder writes its encoder" if hasattr(subject.config, "encoder") and "vit" in kinds else ""
        raise UserError(f"model.kind: {kind} is no model of {what}, which has {' and '.join(kinds)}{only}")
    e = subject.encoder
    values = {"kv_heads": e.kv_heads or e.heads, "tokens.kind": e.tokens.kind, "ndim": subject.config.ndim}
    always = {
        "tokens.kind": "uniform",
        "variables": None,
        "kv_heads": e.heads,
        "norm": "layer",
        "residual": "pre",
        "patch_norm": False,
        "positions": ("learned", "sincos", "none"),
    }
    for name, expected in (always | wanted).items():
        value = values[name] if name in values else getattr(e, name)
        fits = value in expected if isinstance(expected, tuple) else value == expected
        if not fits:
            has = " or ".join(map(_word, expected)) if isinstance(expected, tuple) else _word(expected)
            key = "model.ndim" if name == "ndim" else subject.key(name)
            shown = "named ones" if name == "variables" else _word(value)
            raise UserError(f"{key}: {shown} is nothing that {what} can say, whose models have {has}")


def _word(value: Any) -> str:
    """Write a value as a recipe has it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def of_timm(subject: Subject) -> Layout:
    e, c = subject.encoder, subject.config
    wanted = {"ndim": 2, "mlp": "gelu", "eps": 1e-6}
    refuse(subject, "timm", wanted, ("vit",))
    if c.pool == "attention" or (c.pool == "tokens" and c.classes):
        raise UserError(f"model.pool: {c.pool} is nothing that timm can say, whose classifiers have cls and mean")
    pool = {"cls": "token", "mean": "avg", "tokens": ""}[c.pool]
    height, width = subject.shape
    patch = per_axis(e.patch, 2)
    hidden = subject.hidden
    arguments: dict[str, Any] = {
        "img_size": [height, width],
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "in_chans": c.channels,
        "embed_dim": e.width,
        "depth": e.depth,
        "num_heads": e.heads,
        "mlp_ratio": hidden / e.width,
        "class_token": e.cls_token,
        "reg_tokens": e.registers,
        "no_embed_class": bool(e.registers) or not e.cls_token,
        "qk_norm": e.qk_norm,
        "init_values": e.layer_scale,
        "pre_norm": e.input_norm,
        "global_pool": pool,
        "fc_norm": False,
    }
    if int(e.width * arguments["mlp_ratio"]) != hidden:
        raise UserError(
            f"{subject.key('hidden')}: {hidden} is no ratio of the width that timm finds again; use another"
        )
    mean, std, notes = _of_values(subject, "mean and std in config.json")
    told = {
        "architecture": "vit_base_patch16_224",
        "num_classes": c.classes or 0,
        "num_features": e.width,
        "global_pool": pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "num_classes": c.classes or 0,
            "input_size": [c.channels, height, width],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": mean,
            "std": std,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    if subject.names and c.classes:
        told["label_names"] = list(subject.names)
    names = r"(cls_token|pos_embed|reg_token|(patch_embed|norm|norm_pre|head)\..*|"
    names += r"blocks\.\d+\.(norm[12]|attn\.(qkv|proj|q_norm|k_norm)|mlp\.fc[12]|ls[12])\..*)"
    model: Any = subject.model
    bias = model.encoder.patch_embed.proj.bias
    if e.input_norm and bias is not None and bias.any():
        raise UserError(
            f"{subject.key('patch_bias')}: a bias of patches beside input_norm is nothing that timm can say, whose "
            "models have none there; set it to false"
        )
    without = "patch_embed.proj.bias" if e.input_norm else None
    style = Style("timm", names, cls_row=not arguments["no_embed_class"], without=without)
    opens = 'timm.create_model("local-dir:{out}", pretrained=True)'
    return Layout(style, {"config.json": told}, opens, notes=notes)


def of_huggingface(subject: Subject) -> Layout:
    e, c = subject.encoder, subject.config
    swiglu = e.mlp == "swiglu" and c.kind == "vit"
    dino = e.layer_scale is not None or e.registers > 0 or swiglu
    what = "Hugging Face's " + ("ViTMAE" if c.kind == "mae" else "Dinov2" if dino else "ViT")
    wanted: dict[str, Any] = {"ndim": 2, "qk_norm": False, "input_norm": False, "cls_token": True}
    wanted["mlp"] = ("gelu", "swiglu") if c.kind == "vit" else "gelu"
    if c.kind == "mae":
        wanted |= {"layer_scale": None, "registers": 0}
    refuse(subject, what, wanted, ("vit", "mae"))
    height, width = subject.shape
    square = len({*subject.shape}) == 1 and len({*per_axis(e.patch, 2)}) == 1
    if not square and (dino or c.kind == "mae"):
        raise UserError(f"model.shape: {list(subject.shape)} is no square, and {what} knows no other")
    hidden = subject.hidden
    mean, std, notes = _of_values(subject, "preprocessor_config.json")
    patch = per_axis(e.patch, 2)
    told: dict[str, Any] = {
        "hidden_size": e.width,
        "num_hidden_layers": e.depth,
        "num_attention_heads": e.heads,
        "image_size": height if square else [height, width],
        "patch_size": patch[0] if square else list(patch),
        "num_channels": c.channels,
        "layer_norm_eps": e.eps,
        "hidden_act": "gelu",
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
    }
    if c.kind == "mae":
        told |= _of_mae(subject, what)
        kind, prefix = "ViTMAEForPreTraining", "vit."
    elif dino:
        kind, prefix = "Dinov2WithRegistersModel" if e.registers else "Dinov2Model", ""
        if c.classes:
            raise UserError(
                f"model.classes: {c.classes} by one token is nothing that {what} can say, whose classifier reads the "
                "class token beside the mean of all; --only encoder writes the encoder, and --to timm a classifier"
            )
        told |= {"model_type": "dinov2_with_registers" if e.registers else "dinov2", "use_swiglu_ffn": swiglu}
        told |= {"num_register_tokens": e.registers} if e.registers else {"use_mask_token": True}
        told["mlp_ratio"] = _ratio_of_dino(subject, hidden, swiglu)
    else:
        told |= {"model_type": "vit", "intermediate_size": hidden}
        if c.classes and c.pool != "cls":
            raise UserError(
                f"model.pool: {c.pool} is nothing that {what} can say, whose classifier reads the class token"
            )
        kind, prefix = ("ViTForImageClassification", "vit.") if c.classes else ("ViTModel", "")
        if c.classes:
            labels = subject.names or tuple(f"class {number}" for number in range(c.classes))
            told |= {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    if kind.endswith("Model") and not c.classes and getattr(c, "pool", "tokens") in ("mean", "attention"):
        notes.append(f"it gives last_hidden_state; model.pool: {c.pool} is left to whoever reads it")
    told["architectures"] = [kind]
    style = Style("hf", _names_of_hf(prefix, dino=dino, gated=swiglu), fused=False, packed=swiglu)
    files = {"config.json": told, "preprocessor_config.json": _preprocessor(subject, mean, std)}
    options = (
        ", add_pooling_layer=False" if kind == "ViTModel" else ""
    )  # a further layer, of which there are no weights
    opens = f'transformers.{kind}.from_pretrained("{{out}}"{options})'
    return Layout(style, files, opens, layer_scale=dino, notes=notes, settings=told)


def _names_of_hf(prefix: str, *, dino: bool, gated: bool) -> str:
    """Return a pattern of names as files have them, which are not those in memory of version 5."""
    inside = [r"attention\.attention\.(query|key|value)", r"attention\.output\.dense"]
    if dino:
        inside += ["norm[12]", r"mlp\.weights_(in|out)" if gated else r"mlp\.fc[12]", "layer_scale[12]"]
    else:
        inside += [r"(intermediate|output)\.dense", "layernorm_(before|after)"]
    blocks = rf"(encoder\.layer|decoder\.decoder_layers)\.\d+\.({'|'.join(inside)})\.\w+"
    outside = r"(embeddings|layernorm)\.[\w.]+"
    start = prefix.replace(".", r"\.")
    rest = r"classifier\.\w+|decoder\.(mask_token|decoder_(pos_embed|(embed|norm|pred)\.\w+))"
    return rf"{start}{outside}|({start}(?=encoder)|(?=decoder)){blocks}|{rest}"


def _of_mae(subject: Subject, what: str) -> dict[str, Any]:
    c = subject.config
    if c.decoder.kind != "self" or (c.decoder.kv_heads or c.decoder.heads) != c.decoder.heads:
        key = "kind" if c.decoder.kind != "self" else "kv_heads"
        value = getattr(c.decoder, key)
        raise UserError(
            f"model.decoder.{key}: {value} is nothing that {what} can say, whose decoder sees all tokens; "
            "--only encoder writes the encoder"
        )
    model: Any = subject.model
    return {
        "model_type": "vit_mae",
        "intermediate_size": subject.hidden,
        "decoder_hidden_size": c.decoder.width,
        "decoder_num_hidden_layers": c.decoder.depth,
        "decoder_num_attention_heads": c.decoder.heads,
        "decoder_intermediate_size": model.decoder.blocks[0].mlp.fc1.out_features,
        "mask_ratio": c.mask.ratio,
        "norm_pix_loss": subject.norm_pixels,
    }


def _ratio_of_dino(subject: Subject, hidden: int, swiglu: bool) -> int:
    """Return the ratio that gives so many hidden channels; DINOv2 knows whole ones alone."""
    width = subject.encoder.width
    for ratio in range(1, 17):
        found = (int(width * ratio * 2 / 3) + 7) // 8 * 8 if swiglu else width * ratio
        if found == hidden:
            return ratio
    raise UserError(f"{subject.key('hidden')}: {hidden} for a width of {width} is no whole ratio, as Dinov2 wants it")


def _preprocessor(subject: Subject, mean: list[float], std: list[float]) -> dict[str, Any]:
    height, width = subject.shape
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": False,  # images of science have a voxel size
        "size": {"height": height, "width": width},
        "do_rescale": subject.are_bytes,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


_OF_MONAI = r"patch_embedding\.(position_embeddings|patch_embeddings\.\w+)|norm\.\w+|blocks\.\d+\.(?!.*\bconv\b).*"


def of_monai(subject: Subject) -> Layout:
    e, c = subject.encoder, subject.config
    unetr = c.kind == "unetr"
    what = "MONAI's UNETR" if unetr else "MONAI's ViT"
    wanted = {"mlp": "gelu", "eps": 1e-5, "qk_norm": False, "input_norm": False, "layer_scale": None, "registers": 0}
    if unetr:
        wanted |= {"cls_token": False, "depth": 12}
    refuse(subject, what, wanted, ("vit", "unetr"))
    hidden = subject.hidden
    patch = per_axis(e.patch, c.ndim)
    shared = {"in_channels": c.channels, "img_size": list(subject.shape), "hidden_size": e.width, "mlp_dim": hidden}
    shared |= {"num_heads": e.heads, "proj_type": "conv", "qkv_bias": True, "spatial_dims": c.ndim}
    if unetr:
        if c.decoder != "conv" or not c.skips:
            key, value = ("decoder", c.decoder) if c.decoder != "conv" else ("skips", "false")
            raise UserError(f"model.{key}: {value} is nothing that {what} can say; --only encoder writes the encoder")
        if set(patch) != {16}:
            raise UserError(f"{subject.key('patch')}: {list(patch)} is nothing that {what} can say, which has 16")
        norm = ["instance", {"affine": True}] if c.norm == "affine" else "instance"
        network = {"_target_": "UNETR", "out_channels": c.classes, "feature_size": c.features, "norm_name": norm}
        network |= {"res_block": c.residual, **shared}
        names = rf"vit\.({_OF_MONAI})|"
        names += r"(en|de)coder\d\.(?!.*\.conv\.conv\.)(.*\.norm[123]|(?!.*\.norm).*\.conv)\.\w+|out\.conv\.conv\.\w+"
    else:
        classified = bool(c.classes)
        if e.cls_token != classified or (classified and c.pool != "cls"):
            key = "cls_token" if e.cls_token != classified else "pool"
            value = _word(getattr(c, key))
            raise UserError(
                f"model.{key}: {value} with {c.classes or 'no'} classes is nothing that {what} can say, which has a "
                "class token where it classifies, and reads that"
            )
        network = {"_target_": "ViT", "patch_size": list(patch), "num_layers": e.depth, **shared}
        network |= {"classification": classified, "num_classes": c.classes or 2, "post_activation": ""}
        names = rf"cls_token|{_OF_MONAI}|classification_head\.\w+"
    mean, std, notes = _of_values(subject, "config.json", scaled=False)
    normalise = {"_target_": "NormalizeIntensity", "subtrahend": mean, "divisor": std, "channel_wise": True}
    told = {"network_def": network, "preprocessing": normalise, "classes": list(subject.names)}
    more = ((r"\1norm_cross_attn.\2", r"((?:vit\.)?blocks\.\d+\.)norm2\.(weight|bias)"),)
    style = Style("monai", names, cls_row=False, more=more)
    opens = 'monai.bundle.ConfigParser(config).get_parsed_content("network_def").load_state_dict(weights)'
    return Layout(style, {"config.json": told}, opens, notes=notes)


def _of_values(subject: Subject, where: str, *, scaled: bool = True) -> tuple[list[float], list[float], list[str]]:
    """Return mean and std as a project's images are normalised: bytes are made 0 to 1 first, if `scaled`."""
    mean, std = subject.statistics
    if scaled and subject.are_bytes:
        return [value / 255 for value in mean], [value / 255 for value in std], []
    notes = [f"{where} has the mean and std of values as they are read"] if scaled else []
    return list(mean), list(std), notes


LAYOUTS: dict[str, Callable[[Subject], Layout]] = {
    "timm": of_timm,
    "huggingface": of_huggingface,
    "monai": of_monai,
}
