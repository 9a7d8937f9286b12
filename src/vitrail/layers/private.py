"""PyTorch's private names that the layers lean on, all of them; test_private_layers.py tells when one has changed.

Attention over some of the keys needs the log-sum-exp of the kernels, which no public function gives.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._compile import _disable_dynamo as not_compiled
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset", "constant_when_compiled", "not_compiled"]

F = TypeVar("F", bound=Callable[..., object])

_ops = torch.ops.aten

cpu_flash = _ops._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = _ops._scaled_dot_product_flash_attention_for_cpu_backward
flash = _ops._scaled_dot_product_flash_attention
flash_backward = _ops._scaled_dot_product_flash_attention_backward
cudnn = _ops._scaled_dot_product_cudnn_attention
cudnn_backward = _ops._scaled_dot_product_cudnn_attention_backward
efficient = _ops._scaled_dot_product_efficient_attention
efficient_backward = _ops._scaled_dot_product_efficient_attention_backward
packed_flash = _ops._flash_attention_forward
packed_flash_backward = _ops._flash_attention_backward


# torch.compiler's own marks import all of the compiler: a second of every start, also where nothing is compiled.
def constant_when_compiled(function: F) -> F:
    """Marks a function whose result is a constant to compiled code, as torch.compiler.assume_constant_result does."""
    vars(function)["_dynamo_marked_constant"] = True
    return function
