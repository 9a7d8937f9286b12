"""Names of PyTorch that are not public, which another version may change: all that this room uses of them.

Those of stages of pipelines are in station.py. Tried with PyTorch 2.11 to 2.13; tests/unit/test_private.py has a test
of each.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule

from vitrail.parallel.agree import Group

# Many tensors at once, one kernel each.
add_all, copy_all, norms_of = torch._foreach_add_, torch._foreach_copy_, torch._foreach_norm


def group_of(name: str) -> dist.ProcessGroup:
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


def has_begun(module: FSDPModule) -> bool:
    """Tell whether a forward of the module, or of one around it, has ever begun."""
    state: Any = module._get_fsdp_state()
    return state._is_root is not None


# ---------------------------------------------------------------- collectives that compilers can trace

# Their names since PyTorch 2.13, and before.
_all_gather, _reduce_scatter = (
    getattr(functional, f"{name}_single", None) or getattr(functional, f"{name}_tensor")
    for name in ("all_gather", "reduce_scatter")
)


def all_gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return every rank's x, one after another along dim."""
    return _arrived(_all_gather(x.contiguous(), dim, group))


def sum_scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along dim of the sum over ranks."""
    return _arrived(_reduce_scatter(x.contiguous(), "sum", dim, group))


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks."""
    return _arrived(functional.all_reduce(x.contiguous(), "sum", group))


def _arrived(x: Tensor) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x
