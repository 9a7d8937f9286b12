"""Names of PyTorch that are not public, all that this room uses; tests/unit/test_private_names.py tries each.

Those of its distributed checkpoints are in weights/safe_dcp.py.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

# One kernel for a list of tensors.
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_sign_ = torch._foreach_sign_
foreach_sub_ = torch._foreach_sub_

dump_memory = torch.cuda.memory._dump_snapshot  # what a GPU's memory holds, and its history, as a file


def record_memory(most: int | None) -> None:
    """Note from now on who asks for a GPU's memory and gives it back, the latest events; None ends it."""
    if most is None:
        torch.cuda.memory._record_memory_history(None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=most)


def recorded_collectives() -> dict[str, Callable[[], bytes]]:
    """Return how to ask each backend of this build for its latest collectives."""
    if not dist.is_available():
        return {}
    from torch._C import _distributed_c10d as internals

    names = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
    return {backend: getattr(internals, name) for backend, name in names.items() if hasattr(internals, name)}
