"""Augmentation on the device, chosen by the sampler and applied to whole batches."""

import itertools
from functools import cache

import torch
from torch import Tensor


@cache
def orientations(crop: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All (permutation, flipped axes) that keep the crop's shape: 8 for a square, 48 for a cube; the first is none."""
    axes = range(len(crop))
    permutations = [p for p in itertools.permutations(axes) if all(crop[i] == crop[j] for i, j in enumerate(p))]
    flips = [f for n in range(len(crop) + 1) for f in itertools.combinations(axes, n)]
    return [(p, f) for p in permutations for f in flips]


def orient(values: Tensor, codes: list[int]) -> Tensor:
    """Turn each sample of [B, C, *S] by its code: only transposes and flips, so every intensity is kept."""
    if not any(codes):
        return values
    table = orientations(tuple(values.shape[2:]))
    turned = []
    for sample, code in zip(values, codes, strict=True):
        permutation, flips = table[code]
        sample = sample.permute(0, *[axis + 1 for axis in permutation])
        turned.append(sample.flip([axis + 1 for axis in flips]) if flips else sample)
    return torch.stack(turned)
