"""From images to a model's inputs: tokens, and what else its config asks for. No parameters take part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vitrail.draws import Draws
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import Tokens, tokenize


def encoder_of(config: Any) -> Any:
    """The encoder's config: a part of the model's, or (for plain ViTs) the model's own."""
    return getattr(config, "encoder", config)


def variable_ids(config: Any, names: Sequence[str] | None, channels: int) -> tuple[int, ...] | None:
    """Where the variables of a batch stand among those that the model knows; None where it knows no names."""
    known = getattr(encoder_of(config), "variables", None)
    if known is None:
        expected = getattr(config, "channels_in", config.channels)
        if expected is not None and channels != expected:
            raise ValueError(
                f"images have {channels} channels, the model {expected}; give it as many, or a model that "
                f"knows variables by name ({'variables' if encoder_of(config) is config else 'encoder.variables'})"
            )
        return None
    if names is None:
        if channels != len(known.known):
            raise ValueError(f"images have {channels} channels: say which of {list(known.known)} these are (variables)")
        names = known.known
    if len(names) != channels:
        raise ValueError(f"images have {channels} channels, but {len(names)} variables are named: {list(names)}")
    return known.ids(names)


def make_inputs(
    config: Any,
    images: Tensor,
    *,
    variables: Sequence[str] | None = None,
    scored: Tensor | None = None,
    draws: Draws | None = None,
) -> tuple[dict[str, Any], Tokens]:
    """Keyword inputs of a model for normalised images [B, C, *S], and their tokens (the way back to voxels).

    `variables` names the channels in order; adaptive trees grow on `scored` (the data as read) and vary with `draws`.
    """
    if images.ndim != config.ndim + 2:
        axes = "zyx"[-config.ndim :] if config.ndim <= 3 else [f"axis {i}" for i in range(config.ndim)]
        expected = f"[batch, channels, {', '.join(axes)}]"
        raise ValueError(f"images have shape {list(images.shape)}; a model of {config.ndim} axes takes {expected}")
    encoder = encoder_of(config)
    size = tuple(images.shape[2:])
    if encoder.positions == "learned" and config.shape is not None and size != per_axis(config.shape, config.ndim):
        raise ValueError(
            f"images of {list(size)} do not fit learned positions for {list(per_axis(config.shape, config.ndim))}; "
            "resize the images, or use positions sincos or rope"
        )
    ids = variable_ids(config, variables, images.shape[1])
    separate = ids is not None and encoder.variables.aggregate == "none"
    patch = per_axis(encoder.patch, config.ndim)
    tokens = tokenize(images, encoder.tokens, patch, separate=separate, scored=scored, draws=draws)
    inputs: dict[str, Any] = {"x": tokens.values, "coordinates": tokens.coordinates}
    if tokens.tree is not None:
        inputs |= {"sizes": tokens.sizes, "valid": tokens.valid}
    if ids is not None:
        inputs["variables"] = ids
    if getattr(config, "output", None) == "pixels":
        inputs["size"] = size
    if getattr(config, "wants_tree", False) and tokens.tree is not None:
        inputs["tree"] = tokens.tree
    if getattr(config, "wants_image", False):
        inputs["image"] = images
    return inputs, tokens
