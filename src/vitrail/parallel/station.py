"""Stages for PyTorch's schedules of pipelines, whose private names they reach into.

Imported where there is a pipeline alone: with it comes PyTorch's compiler, a second of every other start.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage


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
        group: dist.ProcessGroup,
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
