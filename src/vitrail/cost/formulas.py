"""Counts of training FLOPs as other projects make them, by name, to compare with what they published.

| name | what it counts for a sample |
|---|---|
| model | what the model computes, 3 x forward: our own count, which MFU uses |
| torchtitan-mae | 6 N + 12 L D v for every token, hidden ones too; N parameters, L and D of the encoder, v visible |
| torchditan | 6 N + 12 L D n for every token; N all parameters, those that run once a sample too |
| olcf | what a counter of operations sees while every block is computed again, attention's scores in the backward too |
| all-tokens | 3 x forward, as if the encoder saw hidden tokens, too |

docs/numbers.md tells how far they are from each other.
"""

from collections.abc import Callable
from typing import Any

import torch

from vitrail.layers.patches import per_axis
from vitrail.models.inputs import encoder_of
from vitrail.recipe.kinds import nearest


def training_flops(name: str, config: Any) -> float:
    """Of one training sample of a model, by a named formula; `config` is the model's, with its channels and shape."""
    if name not in FORMULAS:
        near = nearest(name, list(FORMULAS))
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"formula {name!r} is unknown; {hint}(known: {', '.join(FORMULAS)})")
    if config.shape is None:
        raise ValueError("shape is not known; set it to count FLOPs")
    with torch.device("meta"):
        model = config.build()
    return FORMULAS[name](model)


def utilisation(flops: float, samples_per_s: float, peak_tflops: float) -> float:
    """The share of a device's peak, for samples per second and device."""
    return flops * samples_per_s / (peak_tflops * 1e12)


def _model(model: Any) -> float:
    return model.flops().training


def _torchtitan_mae(model: Any) -> float:
    c = _need(model, "mae", "torchtitan-mae")
    tokens = c.encoder.tokens.count(c.size, c.patch) * c.parts
    visible = int((1 - c.mask.ratio) * tokens)
    return tokens * (6.0 * _parameters(model) + 12.0 * model.encoder.depth * model.encoder.width * visible)


def _torchditan(model: Any) -> float:
    c = _need(model, "dit", "torchditan")
    tokens = encoder_of(c).count_tokens(per_axis(c.shape, c.ndim))
    return tokens * (6.0 * _parameters(model) + 12.0 * model.encoder.depth * model.encoder.width * tokens)


def _olcf(model: Any) -> float:
    return model.flops().hardware(recompute=True)


def _all_tokens(model: Any) -> float:
    c = model.config
    if c.kind != "mae":
        return _model(model)
    tokens = c.encoder.tokens.count(c.size, c.patch) * c.parts
    visible, predicted = (number * c.parts for number in c.token_counts())
    return (model.encoder.flops(tokens) + model.decoder.flops(visible, predicted, False)).training


def _need(model: Any, kind: str, name: str) -> Any:
    if model.config.kind != kind:
        raise ValueError(f"formula {name!r} is for models of kind {kind}, not {model.config.kind}; use 'model'")
    return model.config


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


FORMULAS: dict[str, Callable[[Any], float]] = {
    "model": _model,
    "torchtitan-mae": _torchtitan_mae,
    "torchditan": _torchditan,
    "olcf": _olcf,
    "all-tokens": _all_tokens,
}
