"""Names of PyTorch that are not public, which another version may change: all that the planner uses of them.

Tried with PyTorch 2.11 to 2.13; tests/unit/test_private_cost.py has a test of each.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode"]


def watchers() -> list[TorchDispatchMode]:
    """Return what sees each operation now, the outermost first."""
    return _get_current_dispatch_mode_stack()


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors of whatever an operation takes or gives."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(t: Tensor) -> int:
    """Return a number that tensors have in common which share a storage, as long as it lives."""
    return t.untyped_storage()._cdata


def is_view(operation: Any) -> bool:
    """Tell an operation whose results lie in the storage of what it is given."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return False
    aliased = [value.alias_info for value in schema.returns]
    return bool(aliased) and all(info is not None and not info.is_write for info in aliased)


def is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def compile_anew() -> ExitStack:
    """Return settings under which every shape is compiled anew, however many there were; no trace of it is left."""
    stack = ExitStack()
    # What is compiled here counts towards the limit of a run in this process, which would then go on uncompiled.
    stack.callback(torch._dynamo.reset_code_caches)
    limits = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}
    known: dict[str, Any] = {name: most for name, most in limits.items() if hasattr(torch._dynamo.config, name)}
    stack.enter_context(torch._dynamo.config.patch(**known))
    return stack


@lru_cache
def _tables() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def take_apart(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any, list[Any]], Any]:
    """Return a compiler's front end: graphs of the forward and the backward, cut as training cuts them, become calls.

    What is called takes a list of inputs that is its own, and has `_boxed_call`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=lambda graph, _: forward(graph),
        bw_compiler=lambda graph, _: backward(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=_tables(),
    )
