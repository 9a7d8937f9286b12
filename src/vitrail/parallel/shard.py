"""Sharded data parallelism by FSDP2: parameters, gradients and optimizer state live in shards, and meet when needed.

- equal blocks in a row make a group, `wrap` of them, or as many as have `bucket_mib` of gradients; a group's parameters
  are gathered by one collective and its gradients reduced by one. All that is not in a block is one group, the root's
- fp32 masters; parameters are gathered in the compute type, gradients added in the reduce type
- gradients are sums over ranks, never means: the trainer knows by what to divide
- replicas exchange gradients once a step, shards with every micro-batch (which bounds their memory)
- names of parameters stay those of the plain model

A model that one rank has to itself: nothing is gathered, and nothing reduced.

FSDP2 on one rank gives the same numbers, but for each group of parameters it copies them through buffers of collectives
and runs a good deal of Python, which is most of the step of a small model on a fast device.

- fp32 masters; a group's copies in the compute type are made by one kernel, and their gradients come back by another
- copies live until the backward is over: a model for which that is much is better left to FSDP2, which frees them
- names of parameters stay those of the plain model, which computes with the copies inside `computing()` alone
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from vitrail.errors import UserError
from vitrail.parallel.mesh import Layout, Mesh, local
from vitrail.parallel.private import copy_all, end_gathering, has_begun, parameters_in
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
    """Say before each micro-batch of a step whether it is the last; `reshard` is the layout's.

    Replicas exchange gradients after the last one alone. Parameters that are not freed after a forward stay until then.
    """
    for root in roots:
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or reshard)


def forget_gathered(roots: Iterable[nn.Module]) -> None:
    """Free gathered parameters that are left behind: they would hide a change of shards.

    A forward without backward leaves the root's. A prefetch may also have begun to gather what nothing used any more:
    the next use would find the old values.
    """
    for module in (module for root in roots for module in _sharded(root)):
        end_gathering(module)
        module.reshard()


def forget_failed(root: nn.Module) -> None:
    """Let the next forward begin anew after one that has failed; else it would take itself for a part of it."""
    if isinstance(root, FSDPModule) and has_begun(root) and hasattr(root, "reset_iter_state"):  # since PyTorch 2.13
        root.reset_iter_state()


def chains_of(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return runs of equal blocks that are listed one after another: these run one after another, too.

    Other blocks (of a decoder with skips, say) may branch, and run in another order than they are listed in. A group
    or a prefetch that took them together would gather some too early, and keep them past the next update.
    """
    return [list(chain) for _, chain in groupby(blocks, key=make_of)]


def make_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what is equal for modules that differ in the values of their weights alone."""
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))


def cut(chain: list[nn.Module], c: Parallel, reduce: torch.dtype) -> list[Group]:
    """Cut a chain into groups of `wrap` blocks, or of as few as reach bucket_mib of gradients."""
    size = c.wrap
    if c.bucket_mib is not None:
        size = blocks_of_bucket(chain[0], c.bucket_mib, reduce)
    return [chain[start : start + size] for start in range(0, len(chain), size)]


def blocks_of_bucket(block: nn.Module, mib: int, reduce: torch.dtype) -> int:
    """Return how many such blocks have this much of gradients."""
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


COPIES = 1 / 16  # of a device's memory, at most: beyond that, memory matters more than time

Slot = tuple[nn.Module, str]  # where a parameter is; found anew each time, since a model may have been moved


def suits(parameters: int, layout: Layout, c: Parallel, *, compute: torch.dtype, memory: float | None) -> bool:
    """Say whether a model should do without FSDP2; `memory` of its device is in bytes, if known."""
    if max(layout.sizes) > 1 or c.offload:
        return False
    return compute == torch.float32 or memory is None or parameters * compute.itemsize <= COPIES * memory


class Solo:
    """The weights that a model computes with."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], compute: torch.dtype):
        self.compute = compute
        in_blocks = [_slots(block) for block in blocks]
        taken = {slot for group in in_blocks for slot in group}
        self.groups = [*in_blocks, [slot for slot in _slots(model) if slot not in taken]]
        self._kept: list[list[Tensor]] | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Put copies in the compute type in the parameters' places inside; gradients reach the masters.

        Without gradients copies are kept for the next time, until forget().
        """
        if self.compute == torch.float32:
            yield
            return
        masters = [[parameters_in(module)[name] for module, name in group] for group in self.groups]
        if torch.is_grad_enabled():
            copies = [_Copies.apply(self.compute, *group) for group in masters]
        else:
            copies = self._kept = self._kept or [_copied(self.compute, group) for group in masters]
        self._put(copies)
        try:
            yield
        finally:
            self._put(masters)

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def forget(self) -> None:
        """Drop the copies: the masters have changed."""
        self._kept = None

    def _put(self, groups: Sequence[Sequence[Any]]) -> None:
        for slots, values in zip(self.groups, groups, strict=True):
            for (module, name), value in zip(slots, values, strict=True):
                parameters_in(module)[name] = value


def _slots(module: nn.Module) -> list[Slot]:
    return [(part, name) for part in module.modules() for name, p in parameters_in(part).items() if p is not None]


class _Copies(torch.autograd.Function):
    """Copies of a group's masters, and gradients of the copies as gradients of the masters: one kernel each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that nothing used has no gradient
        copies = _copied(dtype, masters)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for copy, need in zip(copies, needed, strict=True) if not need))
        ctx.dtypes = [master.dtype for master in masters]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True) if g is not None]
        wide = [torch.empty(g.shape, dtype=dtype, device=g.device) for g, dtype in given]
        if given:
            copy_all(wide, [g for g, _ in given])
        ready = iter(wide)
        return None, *(None if g is None else next(ready) for g in gradients)


@torch.no_grad()
def _copied(dtype: torch.dtype, masters: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(master, dtype=dtype) for master in masters]
    if copies:
        copy_all(copies, list(masters))
    return copies
