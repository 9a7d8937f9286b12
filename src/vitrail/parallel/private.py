"""Names of PyTorch that are not public, which another version may change: all that this room uses of them.

Tried with PyTorch 2.11 to 2.13. tests/unit/test_private.py has a test of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

# Many tensors at once, one kernel each.
add_all, copy_all, norms_of = torch._foreach_add_, torch._foreach_copy_, torch._foreach_norm


def group_of(name: str) -> Any:
    """Return the process group of a name, which operators can be given."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of several axes as one of one axis."""
    return mesh._flatten(name)


def parameters_in(module: nn.Module) -> dict[str, Any]:
    """Return the module's own parameters by name, in which others may be put in their places."""
    return module._parameters


def end_gathering(module: FSDPModule) -> None:
    """Wait for the parameters of a module that a prefetch has begun to gather: reshard() does not see them."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        if group is not None and group._all_gather_result is not None:
            group.wait_for_unshard()


# ---------------------------------------------------------------- collectives that compilers can trace

# Their names since PyTorch 2.13, and before.
_all_gather, _reduce_scatter = (
    getattr(functional, f"{name}_single", None) or getattr(functional, f"{name}_tensor")
    for name in ("all_gather", "reduce_scatter")
)


def all_gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return every rank's x, one after another along dim."""
    return _arrived(_all_gather(x.contiguous(), dim, group))


def sum_scattered(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return this rank's part along dim of the sum over ranks."""
    return _arrived(_reduce_scatter(x.contiguous(), "sum", dim, group))


def summed(x: Tensor, group: Any) -> Tensor:
    """Return the sum over ranks."""
    return _arrived(functional.all_reduce(x.contiguous(), "sum", group))


def _arrived(x: Tensor) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


# ---------------------------------------------------------------- a stage of a pipeline


class Shell(nn.Module):
    """A part of the model for PyTorch's schedules, which see no parameters of it."""

    number = 0  # of the micro-batch

    def __init__(self, run: Callable[..., Any]):
        super().__init__()
        self.run = run

    def forward(self, *carried: Tensor) -> Any:
        return self.run(self.number, *carried)


class Station(PipelineStage):
    """A part in a schedule. It has memory for what it receives only while that is in use.

    It reaches into PyTorch's stage: args_recv_info, grad_recv_info, _prepare_*_infra.
    """

    def __init__(
        self,
        shell: Shell,
        index: int,
        number: int,
        device: torch.device,
        group: Any,
        incoming: Sequence[Any],
        outgoing: Sequence[Any],
        begin_backward: Callable[[bool], None],
    ):
        """Incoming and outgoing tensors are described by what makes them: `empty(device)`."""
        examples = [tuple(spec.empty("meta") for spec in specs) for specs in (incoming, outgoing)]
        super().__init__(shell, index, number, device, input_args=examples[0], output_args=examples[1], group=group)
        self.shell, self.incoming, self.outgoing, self.begin_backward = shell, incoming, outgoing, begin_backward
        self.nothing = torch.empty(0, device=device)

    def _prepare_forward_infra(self, *arguments: Any, **options: Any) -> Any:
        result = super()._prepare_forward_infra(*arguments, **options)
        self._release(*self.args_recv_info.values())
        return result

    def _prepare_backward_infra(self, *arguments: Any, **options: Any) -> Any:
        result = super()._prepare_backward_infra(*arguments, **options)
        self._release(*self.grad_recv_info.values())
        return result

    def _release(self, *infos: Any) -> None:
        for info in (one for several in infos for one in several):
            info.buffer = self.nothing

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        for info, spec in zip(self.args_recv_info[fwd_chunk_id], self.incoming, strict=True):
            info.buffer = spec.empty(self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            for info, spec in zip(self.grad_recv_info[bwd_chunk_id], self.outgoing, strict=True):
                info.buffer = spec.empty(self.device).detach()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        self.shell.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self.begin_backward(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._release(self.args_recv_info[bwd_chunk_id], () if self.is_last else self.grad_recv_info[bwd_chunk_id])
