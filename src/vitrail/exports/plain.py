"""The same model with fewer settings: what other projects compute by weights, where this one computes it by settings.

- positions that are computed, or none, are a table of them
- layers without a bias have one of 0, blocks without layer scales those of 1
- the position of a class token is added to the token, where a file has no row for it
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.encoder import EncoderConfig
from vitrail.models.model import Model, encoder_of
from vitrail.models.vit import ViTConfig
from vitrail.weights.pieces import sincos_rows


def encoder_alone(model: Model) -> Model:
    """Return the encoder as a ViT that gives its last tokens."""
    c: Any = model.config
    make = {field.name: getattr(encoder_of(c), field.name) for field in fields(EncoderConfig) if field.init}
    config = ViTConfig(**make, ndim=c.ndim, channels=c.channels_in, shape=c.shape, pool="tokens", classes=0)
    return _filled(config, {n: p for n, p in model.state_dict().items() if n.startswith("encoder.")})


def plainer(model: Model, *, cls_row: bool, layer_scale: bool = False) -> Model:
    """Return a model that computes the same by a table of positions, with biases.

    `cls_row`: whether the class token has a row in it. `layer_scale`: whether blocks have some.
    """
    c: Any = model.config
    e = encoder_of(c)
    make: dict[str, Any] = {"positions": "learned", "bias": True, "patch_bias": None, "cls_position": cls_row}
    if layer_scale and e.layer_scale is None:
        make["layer_scale"] = 1.0
    config = replace(c, **make) if e is c else replace(c, encoder=replace(e, **make))
    state = dict(model.state_dict())
    own = state.pop("encoder.pos_embed.cls", None)
    with torch.device("meta"):
        wanted: nn.Module = config.build()
    for name, parameter in wanted.named_parameters():
        if name == "encoder.pos_embed.cls" and own is not None:
            state[name], own = own, None
        elif name not in state:
            state[name] = _same(name, parameter, e, wanted)
    if own is not None:
        state["encoder.prefix_tokens"] = state["encoder.prefix_tokens"].clone()
        state["encoder.prefix_tokens"][:1] += own
    return _filled(config, state)


def _same(name: str, parameter: Tensor, e: Any, model: Any) -> Tensor:
    """Return the value of a new parameter with which the model computes what it did."""
    if name.endswith(".gamma"):
        return torch.ones(parameter.shape)
    if name.endswith("pos_embed.table") and e.positions == "sincos":
        return sincos_rows(model.get_submodule(name.removesuffix(".table")).grid, parameter.shape[-1])
    if name.endswith(("bias", "pos_embed.table", "pos_embed.cls")):
        return torch.zeros(parameter.shape)
    raise AssertionError(f"{name} is new, and no value of it is known")


def _filled(config: Any, state: dict[str, Tensor]) -> Model:
    with torch.device("meta"):
        model: Model = config.build()
    model.to_empty(device="cpu")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()
