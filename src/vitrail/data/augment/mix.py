"""Mixup and cutmix: two samples and their classes become one.

Partners are the samples with counters 2k and 2k + 1, at every world size, so that a mixed sample is a function of its
counter alone; a rank needs both of them in one batch. A partner with statistics of its own is brought to those of the
sample first, so that what is mixed is what the model sees of either.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.draws import sent, stream
from vitrail.errors import UserError


def mix(
    values: Tensor,
    labels: Tensor,
    counters: Sequence[int],
    settings: Any,
    seed: int,
    num_classes: int,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, C, *S] float32 and classes [B] -> mixed samples, and how much of each class they are [B, classes].

    `statistics` are mean and std [B, C] of each sample, where they differ.
    """
    places = {counter: place for place, counter in enumerate(counters)}
    if any(counter ^ 1 not in places for counter in counters):
        raise UserError(
            "data.augment: mixup and cutmix mix samples two by two, but a rank reads an odd number of them at once; "
            "make data.batch an even number for each rank"
        )
    partners = sent([places[counter ^ 1] for counter in counters], values.device)
    shape = tuple(values.shape[2:])
    boxes: dict[int, tuple[slice, ...]] = {}
    blend, own = [], []  # share of the sample itself in its voxels, where it is blended; and in its class
    drawn = {pair: _draw(settings, seed, pair, shape) for pair in {counter // 2 for counter in counters}}
    for place, counter in enumerate(counters):
        share, box = drawn[counter // 2]
        blend.append(share if box is None else 1.0)
        own.append(share)
        if box is not None:
            boxes[place] = box
    other = values.index_select(0, partners)
    if statistics is not None:
        own_tables = (sent(s, values.device).to(values.dtype) for s in statistics)
        mean, std = (s.view(*s.shape, *[1] * len(shape)) for s in own_tables)  # [B, C, 1, ...]
        ratio = std / std.index_select(0, partners)
        other = (other - mean.index_select(0, partners)) * ratio + mean
    factor = sent(blend, values.device).view(-1, *[1] * (values.ndim - 1))
    mixed = values * factor + other * (1 - factor)
    for place, box in boxes.items():
        mixed[place][(slice(None), *box)] = other[place][(slice(None), *box)]
    weights = sent(own, values.device)[:, None]
    classes = torch.nn.functional.one_hot(labels.long(), num_classes).float()
    return mixed, weights * classes + (1 - weights) * classes.index_select(0, partners)


def _draw(settings: Any, seed: int, pair: int, shape: tuple[int, ...]) -> tuple[float, tuple[slice, ...] | None]:
    """How much of itself a sample keeps, and the box that comes from its partner, if it is one."""
    numbers = stream(seed, "augment.mix", pair)
    cut = settings.cutmix and (not settings.mixup or numbers.random() < 0.5)
    alpha = settings.cutmix if cut else settings.mixup
    share = float(numbers.beta(alpha, alpha))
    if not cut:
        return share, None
    box = _box(numbers, shape, 1 - share)
    return 1 - float(np.prod([(b.stop - b.start) / n for b, n in zip(box, shape, strict=True)])), box


def _box(numbers: np.random.Generator, shape: tuple[int, ...], share: float) -> tuple[slice, ...]:
    """A box of a share of the crop about a random middle; what lies outside is cut off."""
    sides = share ** (1 / len(shape))
    box = []
    for size in shape:
        middle, half = numbers.integers(size), round(sides * size) / 2
        box.append(slice(max(0, round(middle - half)), min(size, round(middle + half))))
    return tuple(box)
