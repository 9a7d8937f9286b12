"""Colour jitter as one 3 x 3 matrix a sample: brightness, contrast, saturation, then hue.

All four are linear in red, green and blue: contrast pulls towards the mean grey of the sample, saturation towards the
grey of each pixel, and hue turns colours about the axis of greys. Bytes stay between 0 and 255.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.draws import between, sent, uniforms
from vitrail.errors import UserError

GREY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look
# Luminance and two differences of colour (YIQ), between which hue is an angle.
_YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


def jitter(
    values: Tensor,
    counters: Sequence[int],
    settings: Any,
    seed: int,
    variables: Sequence[str],
    *,
    highest: float | None,
) -> Tensor:
    """[B, C, *S] float32, of which the variables red, green and blue change; up to `highest`, if there is one."""
    missing = [name for name in ("red", "green", "blue") if name not in variables]
    if missing:
        raise UserError(
            f"data.augment.jitter: changes the variables red, green and blue, but the data have "
            f"{', '.join(variables) or 'no names'}; name them so with `variables`, or leave jitter out"
        )
    places = sent([variables.index(name) for name in ("red", "green", "blue")], values.device)
    colours = values.index_select(1, places)  # [B, 3, *S]
    flat = colours.flatten(2)
    drawn = _draw(settings, seed, counters)
    brightness, contrast, matrix = (sent(part.astype(np.float32), values.device) for part in drawn)
    flat = flat * brightness.view(-1, 1, 1)
    grey = sent(GREY.astype(np.float32), values.device) @ flat.mean(2, keepdim=True)  # [B, 1]
    flat = torch.lerp(grey[:, None].expand(-1, 3, 1), flat, contrast.view(-1, 1, 1))
    flat = (matrix[..., None] * flat[:, None]).sum(2)  # three products a value: no matrix unit, which would round
    if highest is not None:
        flat = flat.clamp(0, highest)
    return values.index_copy(1, places, flat.view_as(colours))


def _draw(settings: Any, seed: int, counters: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors of brightness and of contrast [B], and the matrices of saturation and hue [B, 3, 3]."""
    numbers = between(uniforms(seed, "augment.jitter", counters, 4), -1, 1)
    limits = np.array([settings.brightness, settings.contrast, settings.saturation])
    brightness, contrast, saturation = np.maximum(0.0, 1 + limits * numbers[:, :3]).T
    angles = (2 * math.pi * settings.hue * numbers[:, 3]).tolist()
    turn = np.tile(np.eye(3), (len(counters), 1, 1))
    turn[:, 1:, 1:] = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    pulled = saturation[:, None, None]
    pull = pulled * np.eye(3) + (1 - pulled) * np.outer(np.ones(3), GREY)
    return brightness.copy(), contrast.copy(), np.linalg.inv(_YIQ) @ turn @ _YIQ @ pull
