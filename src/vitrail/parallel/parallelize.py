"""How a plain model becomes a parallel one. Models know nothing of this."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from vitrail.models.model import Model
from vitrail.parallel.mesh import Layout


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    layout: Layout,
    *,
    recompute: bool,
    compiled: bool,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> Model:
    """Apply to a model on the meta device, in this order, because each step wraps the one before it:

    1. recompute: a block's forward is run again in the backward instead of keeping its activations
    2. compile: block by block, so that one compilation serves all of them
    3. shard: each block by itself, then what is left; fp32 masters, gathered in the compute type

    Each step keeps parameter names: blocks are changed in place, never wrapped.
    """
    for block in model.blocks():
        if recompute:
            block.forward = recomputed(block.forward)
        if compiled:
            block.compile()
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=reduce,
        cast_forward_inputs=False,  # it would round coordinates to the compute type
    )
    sharding: dict[str, Any] = {"mesh": mesh if layout.replicate > 1 else mesh["shard"], "mp_policy": policy}
    # The warning is of in-place changes to a model's output, and nothing here makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for block in model.blocks():
        fully_shard(block, reshard_after_forward=layout.reshard, **sharding)
    fully_shard(model, reshard_after_forward=False, **sharding)
    return model


def recomputed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Full activation checkpointing of one block; its random numbers are inputs, so none need restoring."""
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def last_micro_batch(model: nn.Module, last: bool) -> None:
    """Replicas exchange gradients once a step, shards with every micro-batch (which bounds their memory)."""
    model.set_requires_all_reduce(last)  # type: ignore[operator]
