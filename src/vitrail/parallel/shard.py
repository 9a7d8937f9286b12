"""Sharded data parallelism by FSDP2: parameters, gradients and optimizer state live in shards, and meet when needed.

- equal blocks in a row make a group, `wrap` of them, or as many as have `bucket_mib` of gradients; a group's parameters
  are gathered by one collective and its gradients reduced by one. All that is not in a block is one group, the root's
- fp32 masters; parameters are gathered in the compute type, gradients added in the reduce type
- gradients are sums over ranks, never means: the trainer knows by what to divide
- replicas exchange gradients once a step, shards with every micro-batch (which bounds their memory)
- names of parameters stay those of the plain model
"""

import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from vitrail.errors import UserError
from vitrail.parallel.mesh import Layout, Mesh, local
from vitrail.recipe.sections import Parallel

Group = list[nn.Module]
Root = tuple[nn.Module, list[nn.Module]]  # what is called, and blocks in it that run one after another

OFFLOAD_ON_CPU = "parameters of a run on a CPU are on the host already"


def apply(
    roots: Sequence[Root], mesh: Mesh, layout: Layout, c: Parallel, *, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Shard every root: its groups of blocks over mesh.blocks, then what is left over mesh.others.

    There is one root, the model; with a pipeline it is listed once for each stage that is here, with the blocks of that
    stage. Parameters may be on the meta device; with offload they are to be materialised on the host.
    """
    if c.offload and mesh.root.device_type == "cpu":
        raise UserError(f"parallel.offload: {OFFLOAD_ON_CPU}; set parallel.offload=false, or run.device=cuda")
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == torch.float32 else compute,
        reduce_dtype=reduce,
        cast_forward_inputs=False,  # it would round coordinates to the compute type
    )
    options: dict[str, Any] = {"mp_policy": policy}
    if c.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    # The warning is of in-place changes to a model's output, and nothing here makes any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    chains = [cut(chain, c, reduce) for _, blocks in roots for chain in chains_of(blocks)]
    for group in (group for chain in chains for group in chain):
        whole = group[0] if len(group) == 1 else group
        fully_shard(whole, mesh=mesh.blocks, reshard_after_forward=layout.reshard, **options)
    for root in dict.fromkeys(root for root, _ in roots):
        fully_shard(root, mesh=mesh.others, reshard_after_forward=False, **options)
        for module in _sharded(root):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if c.prefetch.backward == 0:
                # An empty list is FSDP2's own choice; what is to prefetch nothing prefetches itself, which is there.
                module.set_modules_to_backward_prefetch([module])
    for chain in chains:
        look_ahead([group[0] for group in chain], forward=c.prefetch.forward, backward=c.prefetch.backward)
    if c.prefetch.forward and chains and layout.pipeline == 1:
        first: Any = roots[0][0]
        first.set_modules_to_forward_prefetch([group[0] for group in chains[0][: c.prefetch.forward]])


def last_micro_batch(roots: Iterable[nn.Module], last: bool, *, reshard: bool) -> None:
    """To be called before each micro-batch of a step; `reshard` is the layout's.

    Replicas exchange gradients after the last one alone. Parameters that are not freed after a forward stay until then.
    """
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or reshard)


def forget_gathered(roots: Iterable[nn.Module]) -> None:
    """Free gathered parameters that are left behind: they would hide a change of shards.

    A forward without backward leaves the root's. A prefetch may also have begun to gather what nothing used any more,
    and reshard() does not see that: the next use would find the old values.
    """
    for module in (module for root in roots for module in _sharded(root)):
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is not None and group._all_gather_result is not None:
                group.wait_for_unshard()
        module.reshard()


def chains_of(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Equal blocks that are listed one after another: these run one after another, too.

    Other blocks (of a decoder with skips, say) may branch, and run in another order than they are listed in. A group
    or a prefetch that took them together would gather some too early, and keep them past the next update.
    """
    return [list(chain) for _, chain in groupby(blocks, key=make_of)]


def make_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that differ in the values of their weights alone."""
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))


def cut(chain: list[nn.Module], c: Parallel, reduce: torch.dtype) -> list[Group]:
    """The chain in groups of `wrap` blocks, or of as few as reach bucket_mib of gradients."""
    size = c.wrap
    if c.bucket_mib is not None:
        size = blocks_of_bucket(chain[0], c.bucket_mib, reduce)
    return [chain[start : start + size] for start in range(0, len(chain), size)]


def blocks_of_bucket(block: nn.Module, mib: int, reduce: torch.dtype) -> int:
    """How many such blocks have this much of gradients."""
    numel = sum(local(p).numel() for p in block.parameters())
    return max(1, -(-mib * 2**20 // max(1, numel * reduce.itemsize)))


def look_ahead(chain: list[Any], *, forward: int, backward: int) -> None:
    """Gather so many groups ahead of the one that computes; the default, 0 and 1, is FSDP2's own.

    The chain has a module of each group, which stands for all of it.
    """
    for place, module in enumerate(chain):
        if ahead := chain[place + 1 : place + 1 + forward]:
            module.set_modules_to_forward_prefetch(ahead)
        if backward > 1 and (ahead := chain[max(0, place - backward) : place][::-1]):
            module.set_modules_to_backward_prefetch(ahead)


def _sharded(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
