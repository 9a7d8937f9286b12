"""PyTorch's private names that the layers lean on, all of them; test_private_layers.py tells when one has changed.

Attention over some of the keys needs the log-sum-exp of the kernels, which no public function gives.
"""

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["compute_local_shape_and_global_offset"]

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
