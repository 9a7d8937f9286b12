"""Compiled blocks on the meta device: what the compiler keeps for the backward, and what it fuses.

The block goes through the real front end (graph capture, autograd, the partitioner that decides what is kept), so that
recomputation is what training does. Only code generation is left out: fusion.py says what is one kernel.
"""

import logging
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from vitrail.cost.fusion import Fusion, Unit, name_of, passes, source_of, written_by
from vitrail.cost.recorder import Op, Recorder, op_of, size_of, workspace


def compile_block(block: nn.Module) -> None:
    """Make a block compute as compiled code would, for a Recorder to watch."""
    block.compile(backend=_backend, dynamic=False)


def compiling() -> ExitStack:
    """Settings to call compiled blocks under: every shape is compiled anew, however many there were."""
    stack = ExitStack()
    # What is compiled here counts towards the limit of a run in this process, which would then go on uncompiled.
    stack.callback(torch._dynamo.reset_code_caches)
    limits = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}
    known: dict[str, Any] = {name: most for name, most in limits.items() if hasattr(torch._dynamo.config, name)}
    stack.enter_context(torch._dynamo.config.patch(**known))
    # What the compiler has to say is said again when the run is compiled.
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    return stack


@lru_cache
def _tables() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _backend(graph: Any, examples: list[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward_names: set[str] = set()

    def forward(module: Any, _: Any) -> Any:
        forward_names.update(node.name for node in module.graph.nodes if node.op == "call_function")
        return _boxed(Fused(module, frozenset()))

    def backward(module: Any, _: Any) -> Any:
        return _boxed(Fused(module, frozenset(forward_names)))

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=_tables(),
    )
    return compiler(graph, examples)


def _boxed(graph: "Fused") -> Any:
    """The list of inputs is ours, so that each can die after its last use."""

    def run(inputs: list[Any]) -> Any:
        return graph(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Fused(Fusion):
    """A graph that runs kernel by kernel on the meta device: it makes what would be written, and nothing between."""

    def __init__(self, module: Any, earlier: frozenset[str]):
        super().__init__(module.graph)
        self.module, self.earlier = module, earlier
        self._last_uses()

    def _last_uses(self) -> None:
        """After which kernel each result is not needed any more; views of it are made when it is asked for."""
        last: dict[Any, int] = {}
        for index, unit in enumerate(self.units):
            for node in (*unit.writes, *map(source_of, unit.reads)):
                last[node] = index
        kept = {source_of(one) for one in self.nodes[-1].all_input_nodes}
        self.dying: dict[int, list[Any]] = defaultdict(list)
        for node in self.nodes:
            if node not in kept and (node.op == "placeholder" or node in last):
                self.dying[last.get(node, -1)].append(node)

    def __call__(self, inputs: list[Any]) -> Any:
        watcher = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)
        values: dict[Any, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                values[node] = inputs.pop(0)
            elif node.op == "get_attr":
                values[node] = getattr(self.module, node.target)
        for node in self.dying.get(-1, ()):
            values.pop(node, None)
        for index, unit in enumerate(self.units):
            if watcher is not None:
                self._account(unit, watcher)
            for node in unit.over:
                if node in self.dying.get(index, ()):
                    values.pop(node, None)
            for node in unit.writes:
                values[node] = _made(node.meta["val"])
            for node in self.dying.get(index, ()):
                values.pop(node, None)
        output = self.nodes[-1].args[0]
        return [self._value(one, values) if isinstance(one, torch.fx.Node) else one for one in output]

    def _value(self, node: Any, values: dict[Any, Any]) -> Any:
        """A result, or a view of one."""
        if node in values:
            return values[node]
        if not (node.op == "call_function" and passes(node)):
            return _made(node.meta["val"])
        source, t = self._value(node.args[0], values), node.meta["val"]
        if not isinstance(source, Tensor):
            return source[node.args[1]] if name_of(node) == "getitem" else _made(t)
        # The same storage; where in it matters to nobody. Several views at once are made one by one.
        return torch.as_strided(source, t.shape, t.stride(), 0) if isinstance(t, Tensor) else source

    def _account(self, unit: Unit, watcher: Recorder) -> None:
        again = bool(self.earlier) and all(node.name in self.earlier for node in unit.nodes)
        if unit.fused:
            watcher.add(_fused_cost(unit), again=again)
            return
        node = unit.nodes[0]
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        read = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(node.meta["val"]) if isinstance(t, Tensor)]
        op = op_of(node.target, read, written, arguments, node.meta["val"])
        if op is not None:
            watcher.add(op, again=again)
        if "attention_backward" in name_of(node):
            watcher.note(workspace(read[1]) + sum(map(size_of, written)))


def _made(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(_made(one) for one in value)
    return value


def _fused_cost(unit: Unit) -> Op:
    """What comes from outside is read once, what goes there written once; sums over rows are kernels of their own.

    The compiler lays loops so that most kernels go straight on: all are taken for dense.
    """
    inputs = [one.meta["val"] for one in unit.reads if isinstance(one.meta.get("val"), Tensor)]
    read = sum(map(size_of, inputs))
    # In the type of what is read: inside a kernel all is fp32.
    item = min((t.element_size() for t in inputs if t.is_floating_point()), default=4)
    summed = sorted(node.all_input_nodes[0].meta["val"].numel() * item for node in unit.nodes if _sums_rows(node))
    if all(_sums_rows(node) for node in unit.writes):  # then the largest of them is the kernel
        summed = summed[:-1]
    return Op("memory", 0.0, float(read + sum(written_by(unit)) + sum(summed)), kernels=1 + len(summed))


def _sums_rows(node: Any) -> bool:
    """A sum over the tokens of a batch, such as the gradient of a bias is."""
    if not str(node.target).startswith("aten.sum.dim"):
        return False
    value = node.all_input_nodes[0].meta["val"]
    dims: Sequence[int] = node.args[1]
    return value.ndim > 1 and value.ndim - 1 not in dims and -1 not in dims
