"""A model that one rank has to itself: nothing is gathered, and nothing reduced.

FSDP2 on one rank gives the same numbers, but for each group of parameters it copies them through buffers of collectives
and runs a good deal of Python, which is most of the step of a small model on a fast device.

- fp32 masters; a group's copies in the compute type are made by one kernel, and their gradients come back by another
- copies live until the backward is over: a model for which that is much is better left to FSDP2, which frees them
- names of parameters stay those of the plain model, which computes with the copies inside `computing()` alone
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.parallel.mesh import Layout
from vitrail.recipe.sections import Parallel

COPIES = 1 / 16  # of a device's memory, at most: beyond that, memory matters more than time

Slot = tuple[nn.Module, str]  # where a parameter is; found anew each time, since a model may have been moved


def suits(parameters: int, layout: Layout, c: Parallel, *, compute: torch.dtype, memory: float | None) -> bool:
    """Whether a model of so many parameters should do without FSDP2; `memory` of its device in bytes, if known."""
    if max(layout.sizes) > 1 or c.offload:
        return False
    return compute == torch.float32 or memory is None or parameters * compute.itemsize <= COPIES * memory


class Solo:
    """The weights that a model computes with."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], compute: torch.dtype):
        self.compute = compute
        in_blocks = [[(module, name) for module in block.modules() for name in module._parameters] for block in blocks]
        taken = {slot for group in in_blocks for slot in group}
        rest = [(module, name) for module in model.modules() for name in module._parameters]
        groups = [*in_blocks, [slot for slot in rest if slot not in taken]]
        self.groups = [[(m, n) for m, n in group if m._parameters[n] is not None] for group in groups]
        self._kept: list[list[Tensor]] | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The model's parameters are in the compute type inside; gradients reach the masters.

        Without gradients copies are kept for the next time, until forget().
        """
        if self.compute == torch.float32:
            yield
            return
        masters = [[module._parameters[name] for module, name in group] for group in self.groups]
        if torch.is_grad_enabled():
            copies = [_Copies.apply(self.compute, *group) for group in masters]
        else:
            copies = self._kept = self._kept or [_copied(self.compute, group) for group in masters]  # type: ignore[arg-type]
        self._put(copies)
        try:
            yield
        finally:
            self._put(masters)

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def forget(self) -> None:
        """The masters have changed."""
        self._kept = None

    def _put(self, groups: Sequence[Sequence[Any]]) -> None:
        for slots, values in zip(self.groups, groups, strict=True):
            for (module, name), value in zip(slots, values, strict=True):
                module._parameters[name] = value


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
            torch._foreach_copy_(wide, [g for g, _ in given])
        ready = iter(wide)
        return None, *(None if g is None else next(ready) for g in gradients)


@torch.no_grad()
def _copied(dtype: torch.dtype, masters: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(master, dtype=dtype) for master in masters]
    if copies:
        torch._foreach_copy_(copies, list(masters))
    return copies
