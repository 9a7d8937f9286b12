"""Compiled blocks on the meta device: what the compiler keeps for the backward, and what it fuses.

- a block goes through the real front end (graph capture, autograd, the partitioner that decides what is kept), so that
  recomputation is what training does; only code generation is left out
- matrix products, attention and convolutions are kernels of their own. All between them that hangs together is one,
  which reads its inputs and writes its outputs once. These are the compiler's own rules in short
- RMSNorm is the one kernel that GPUs have for it: the meta device takes it apart, and the parts keep more
"""

import heapq
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from vitrail.cost.private import compile_anew, is_view, take_apart, tensors_in, watchers
from vitrail.cost.recorder import Op, Recorder, op_of, size_of, stand_in, workspace

_FREE = ("aten._unsafe_view", "aten.empty", "aten.new_empty")


class Unit:
    """One kernel: the nodes that it computes."""

    def __init__(self, nodes: list[Any], fused: bool):
        self.nodes, self.fused = nodes, fused
        self.writes: list[Any] = []  # nodes whose results others read
        self.reads: list[Any] = []  # results of others that it reads, or views of these
        self.over: list[Any] = []  # of these, what it may write over


class Fused:
    """A graph that runs kernel by kernel on the meta device: it makes what would be written, and nothing between.

    It is called with a list of inputs that is its own, so that each can die after its last use.
    """

    def __init__(self, module: Any, earlier: frozenset[str]):
        self._boxed_call = True  # tells the compiler so; it copies what an object has, not what its class has
        self.module, self.earlier = module, earlier  # names that the forward has computed, where this is a backward
        self.nodes = list(module.graph.nodes)
        self.users = self._users()
        self.units = self._order(self._units())
        self.dying = self._last_uses()

    def _users(self) -> dict[Any, list[Any]]:
        """Find who reads each result, itself or through views."""
        users: dict[Any, list[Any]] = defaultdict(list)
        for node in self.nodes:
            if not (node.op == "call_function" and passes(node)):
                for one in node.all_input_nodes:
                    users[source_of(one)].append(node)
        return users

    def _levels(self) -> dict[Any, int]:
        """Put products and attention at odd levels, what lies between two of them at the even one, as late as can be.

        What is cheap is computed where it is needed, not earlier and stored.
        """
        level: dict[Any, int] = {}
        for node in self.nodes:
            before = max((level[one] for one in node.all_input_nodes), default=0)
            if node.op != "call_function" or passes(node):
                level[node] = before
            elif is_kernel(node):
                level[node] = before + 2 if before % 2 else before + 1
            else:
                level[node] = before + before % 2
        for node in reversed(self.nodes):
            if _fuses(node):
                later = [level[user] - is_kernel(user) for user in self.users[node] if user.op == "call_function"]
                if later and len(later) == len(self.users[node]):
                    level[node] = max(level[node], min(later))
        return level

    def _units(self) -> list[Unit]:
        level = self._levels()
        parent = {node: node for node in self.nodes if _fuses(node)}

        def root(node: Any) -> Any:
            while parent[node] is not node:
                node = parent[node]
            return node

        for node in parent:
            for user in self.users[node]:
                if user in parent and level[user] == level[node]:
                    parent[root(node)] = root(user)
        groups: dict[Any, list[Any]] = defaultdict(list)
        for node in parent:
            groups[root(node)].append(node)
        units = [Unit(nodes, True) for nodes in groups.values()]
        units += [Unit([node], False) for node in self.nodes if node.op == "call_function" and is_kernel(node)]
        return self._bounds(units)

    def _bounds(self, units: list[Unit]) -> list[Unit]:
        """Fill in what kernels read and write. What only fused ones read is made in each of them, but for sums."""
        owner = {node: unit for unit in units for node in unit.nodes}
        stored = set()
        for node, unit in owner.items():
            for user in self.users[node]:
                inner = user in owner and owner[user].fused
                if not unit.fused or not inner or (_reduces(node) and owner[user] is not unit):
                    stored.add(node)
        for unit in units:
            unit.writes = [node for node in unit.nodes if node in stored]
            found: dict[Any, None] = {}
            waiting = [one for node in unit.nodes for one in node.all_input_nodes]
            seen = set()
            while waiting:
                one = waiting.pop()
                source = source_of(one)
                if one in seen or (owner.get(source) is unit and unit.fused):
                    continue
                seen.add(one)
                if source in owner and source not in stored:
                    waiting += source.all_input_nodes
                else:
                    found[one] = None
            unit.reads = list(found)
            unit.over = self._overwritten(unit, stored) if unit.fused else []
        return [unit for unit in units if unit.writes]

    def _overwritten(self, unit: Unit, stored: set[Any]) -> list[Any]:
        """Return inputs in whose place a result of the same size is written: those that one result alone is made of.

        That is the compiler's own rule; what the graph was given is never written over.
        """
        inside = set(unit.nodes)
        made = {node for node in unit.nodes if node in stored or _reduces(node)}
        readers: dict[Any, set[Any]] = defaultdict(set)
        for node in made:
            waiting, seen = list(node.all_input_nodes), set()
            while waiting:
                source = source_of(waiting.pop())
                if source in seen:
                    continue
                seen.add(source)
                if source in made or (source not in inside and (source in stored or not _fuses(source))):
                    readers[source].add(node)
                else:
                    waiting += source.all_input_nodes
        free = list(unit.writes)
        over = []
        for source, found in readers.items():
            reader = next(iter(found))
            same = reader in free and sizes_of(source)[:1] == sizes_of(reader)
            if len(found) == 1 and same and source.op == "call_function" and source not in inside:
                free.remove(reader)
                over.append(source)
        return over

    def _order(self, units: list[Unit]) -> list[Unit]:
        """Put kernels in the order of the graph, as far as what they need allows."""
        place = {node: index for index, node in enumerate(self.nodes)}
        owner = {node: unit for unit in units for node in unit.writes}
        follows: dict[Unit, set[Unit]] = defaultdict(set)
        for unit in units:
            for source in map(source_of, unit.reads):
                if source in owner and owner[source] is not unit:
                    follows[owner[source]].add(unit)
        waits = Counter(other for unit in units for other in follows[unit])
        number = {unit: (place[unit.nodes[-1]], index) for index, unit in enumerate(units)}
        ready = [(number[unit], unit) for unit in units if not waits[unit]]
        heapq.heapify(ready)
        ordered = []
        while ready:
            _, unit = heapq.heappop(ready)
            ordered.append(unit)
            for other in follows[unit]:
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(ready, (number[other], other))
        assert len(ordered) == len(units), "kernels that wait for each other"
        return ordered

    def _last_uses(self) -> dict[int, list[Any]]:
        """Tell after which kernel each result is needed no more; views of it are made when it is asked for."""
        last: dict[Any, int] = {}
        for index, unit in enumerate(self.units):
            for node in (*unit.writes, *map(source_of, unit.reads)):
                last[node] = index
        kept = {source_of(one) for one in self.nodes[-1].all_input_nodes}
        dying: dict[int, list[Any]] = defaultdict(list)
        for node in self.nodes:
            if node not in kept and (node.op == "placeholder" or node in last):
                dying[last.get(node, -1)].append(node)
        return dying

    def __call__(self, inputs: list[Any]) -> Any:
        watcher = next((mode for mode in watchers() if isinstance(mode, Recorder)), None)
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
        read = tensors_in(arguments)
        written = tensors_in(node.meta["val"])
        op = op_of(node.target, read, written, arguments, node.meta["val"])
        if op is not None:
            watcher.add(op, again=again)
        if "attention_backward" in name_of(node):
            watcher.note(workspace(read[1]) + sum(map(size_of, written)))


def name_of(node: Any) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else ""


def is_kernel(node: Any) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in flop_registry or str(node.target).startswith("vitrail_cost.")


def passes(node: Any) -> bool:
    """Tell views, results of one that has several, and numbers that are no tensors."""
    if not isinstance(node.meta.get("val"), Tensor) and not is_kernel(node):
        return not isinstance(node.meta.get("val"), tuple | list) or is_view(node.target)
    return name_of(node) == "getitem" or is_view(node.target) or str(node.target).startswith(_FREE)


def _fuses(node: Any) -> bool:
    return node.op == "call_function" and not passes(node) and not is_kernel(node)


def _reduces(node: Any) -> bool:
    """Tell whether a result is smaller than what it is made of: another kernel would not make it again."""
    sizes = [one.meta["val"].numel() for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
    made = [t.numel() for t in tensors_in(node.meta["val"])]
    return bool(sizes) and max(made) < max(sizes)


def source_of(node: Any) -> Any:
    """Return what a view is of."""
    while node.op == "call_function" and passes(node) and node.args and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def sizes_of(node: Any) -> list[int]:
    return [size_of(t) for t in tensors_in(node.meta.get("val"))]


def written_by(unit: Unit) -> list[int]:
    return [size for node in unit.writes for size in sizes_of(node)]


def compile_block(block: nn.Module) -> None:
    """Make a block compute as compiled code would, for a Recorder to watch."""
    block.compile(backend=_backend, dynamic=False)


def compiling() -> ExitStack:
    """Return settings to call compiled blocks under: every shape is compiled anew, however many there were."""
    stack = compile_anew()
    # What the compiler has to say is said again when the run is compiled.
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.callback(logging.disable, logging.root.manager.disable)
    logging.disable(logging.WARNING)
    return stack


def _backend(graph: Any, examples: list[Any]) -> Any:
    names: set[str] = set()

    def forward(module: Any) -> Fused:
        names.update(node.name for node in module.graph.nodes if node.op == "call_function")
        return Fused(module, frozenset())

    return take_apart(forward, lambda module: Fused(module, frozenset(names)))(graph, examples)


def _made(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(_made(one) for one in value)
    return value


def _fused_cost(unit: Unit) -> Op:
    """Cost a fused kernel: what comes from outside is read once, what goes there written once; row sums are kernels.

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
    """Tell a sum over the tokens of a batch, such as the gradient of a bias is."""
    if not str(node.target).startswith("aten.sum.dim"):
        return False
    value = node.all_input_nodes[0].meta["val"]
    dims: Sequence[int] = node.args[1]
    return value.ndim > 1 and value.ndim - 1 not in dims and -1 not in dims


@stand_in
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@stand_in
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(grad, *ctx.saved_tensors)


rms_norm.register_autograd(_backward, setup_context=_keep)


def as_kernels(model: nn.Module, *, spared: Sequence[nn.Module] = ()) -> None:
    """Make every RMSNorm of a model one operation, but for those of blocks that are compiled."""
    compiled = {module for block in spared for module in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.weight is not None and module not in compiled:
            module.forward = lambda x, norm=module: rms_norm(x, norm.weight)[0]  # type: ignore[misc, method-assign]
