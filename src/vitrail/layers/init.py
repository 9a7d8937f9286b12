"""Initialisation that does not depend on the layout.

Each parameter is drawn from generators seeded by (seed, its full name, block of 2^16 elements), so that a rank draws
only the blocks which its shard touches and any sharding gives the same model. Rules are read from the unwrapped model
on the meta device; the values are written after sharding.

Numbers that a model knows, on the device that it computes on: copied there once, and kept.

A copy from the host makes it wait for the device, and cannot be recorded (parallel/replay.py).
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.draws import stream
from vitrail.errors import UserError
from vitrail.layers.private import compute_local_shape_and_global_offset

BLOCK = 1 << 16


@dataclass(frozen=True)
class Normal:
    std: float


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True)
class Table:
    """A small tensor computed whole, such as a table of positions."""

    values: Callable[[], Tensor]


Rule = Normal | Constant | Table


def mark(parameter: nn.Parameter, rule: Rule) -> nn.Parameter:
    """Give a parameter a rule other than its module's default."""
    parameter.init_rule = rule  # type: ignore[attr-defined]
    return parameter


def init_rules(model: nn.Module) -> dict[str, Rule]:
    """The rule of every parameter by full name; call it before sharding, which replaces the parameters."""
    rules: dict[str, Rule] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}" if prefix else name
            rules[full_name] = getattr(parameter, "init_rule", None) or _default_rule(module, name, full_name)
    return rules


def _default_rule(module: nn.Module, name: str, full_name: str) -> Rule:
    if name == "bias":
        return Constant(0.0)
    if isinstance(
        module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    ):
        return Constant(1.0)
    if isinstance(module, nn.Linear):
        # Xavier, as in facebookresearch/mae: near 0.02 at width 768, and small models start to learn as fast.
        return Normal(math.sqrt(2 / (module.in_features + module.out_features)))
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        # Each output is a sum over the input channels, once for every place where kernels overlap: keep its variance.
        overlap = math.prod(k / s for k, s in zip(module.kernel_size, module.stride, strict=True))
        return Normal(math.sqrt(module.groups / (module.in_channels * overlap)))
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        # He's: twice the variance, half of which a ReLU takes away.
        return Normal(math.sqrt(2 / math.prod(module.weight.shape[1:])))
    raise UserError(
        f"model: nothing is known of how {full_name} of {type(module).__name__} starts; give it a rule where it is "
        "made: mark(parameter, Normal(0.02)), or Constant or Table, from vitrail.layers.init"
    )


@torch.no_grad()
def initialise(model: nn.Module, rules: dict[str, Rule], seed: int) -> None:
    """Write the initial values into the (sharded or plain) parameters of a materialised model."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # drawing releases the GIL
        for name, parameter in model.named_parameters():
            local, offset = local_shard(parameter)
            if local.numel():
                _fill(local.detach(), offset, tuple(parameter.shape), rules[name], name, seed, threads)


def initialise_here(model: nn.Module) -> None:
    """Initialise a model at the end of its own __init__, unless it is on the meta device: it is then ready.

    It starts as a run of seed 0 does.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        initialise(model, init_rules(model), 0)


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a tensor that this rank holds and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offset)


def _fill(
    local: Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    rule: Rule,
    name: str,
    seed: int,
    threads: ThreadPoolExecutor,
) -> None:
    window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    if isinstance(rule, Constant):
        local.fill_(rule.value)
    elif isinstance(rule, Table):
        local.copy_(rule.values().reshape(shape)[window])
    else:
        # Row by row groups: what is drawn at a time stays near one block, whatever the sharding.
        row = math.prod(shape[1:])
        rows = max(1, BLOCK // max(row, 1))
        std = rule.std

        def draw(first: int) -> None:
            last = min(first + rows, local.shape[0])
            start = (offset[0] + first) * row
            values = _normal(seed, name, start, start + (last - first) * row).reshape(last - first, *shape[1:])
            local[first:last].copy_(values[(slice(None), *window[1:])] * std)

        deque(threads.map(draw, range(0, local.shape[0], rows)), maxlen=0)  # raises what a thread raised


def _normal(seed: int, name: str, start: int, stop: int) -> Tensor:
    """Elements start..stop of the endless standard-normal sequence of this name."""
    pieces = []
    for block in range(start // BLOCK, (stop - 1) // BLOCK + 1):
        values = torch.from_numpy(stream(seed, "init:" + name, block).standard_normal(BLOCK, dtype=np.float32))
        pieces.append(values[max(start - block * BLOCK, 0) : min(stop - block * BLOCK, BLOCK)])
    return torch.cat(pieces)


def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers in fp32."""
    return _kept(tuple(map(float, values)), torch.float32, device)


def indices(places: tuple[int, ...], like: Tensor) -> Tensor:
    return _kept(places, torch.int64, like.device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
