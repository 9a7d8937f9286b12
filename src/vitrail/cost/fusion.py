"""Which operations of a graph are one kernel, and in which order kernels run.

Matrix products, attention and convolutions are kernels of their own. All between them that hangs together is one, which
reads its inputs and writes its outputs once. These are the compiler's own rules in short, and no schedule of its.
"""

import heapq
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vitrail.cost.recorder import is_view, size_of

_FREE = ("aten._unsafe_view", "aten.empty", "aten.new_empty")


class Unit:
    """Nodes that are one kernel."""

    def __init__(self, nodes: list[Any], fused: bool):
        self.nodes, self.fused = nodes, fused
        self.writes: list[Any] = []  # nodes whose results others read
        self.reads: list[Any] = []  # results of others that it reads, or views of these
        self.over: list[Any] = []  # of these, what it may write over


class Fusion:
    """The kernels of a graph, `units`, in their order."""

    def __init__(self, graph: Any):
        self.nodes = list(graph.nodes)
        self.users = self._users()
        self.units = self._order(self._units())

    def _users(self) -> dict[Any, list[Any]]:
        """Who reads a result, itself or through views."""
        users: dict[Any, list[Any]] = defaultdict(list)
        for node in self.nodes:
            if not (node.op == "call_function" and passes(node)):
                for one in node.all_input_nodes:
                    users[source_of(one)].append(node)
        return users

    def _levels(self) -> dict[Any, int]:
        """Products and attention are at odd levels, what lies between two of them at the even one; as late as can be.

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
        """What each kernel reads and writes. What only fused kernels read is made in each of them, but for sums."""
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
        """Inputs in whose place a result of the same size is written: those that one result alone is made of.

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
        """Kernels in the order of the graph, as far as what they need allows."""
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


def name_of(node: Any) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else ""


def is_kernel(node: Any) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in flop_registry or str(node.target).startswith("vitrail_cost.")


def passes(node: Any) -> bool:
    """Views, and results of one that has several; numbers that are no tensors."""
    if not isinstance(node.meta.get("val"), Tensor) and not is_kernel(node):
        return not isinstance(node.meta.get("val"), tuple | list) or is_view(node.target)
    return name_of(node) == "getitem" or is_view(node.target) or str(node.target).startswith(_FREE)


def _fuses(node: Any) -> bool:
    return node.op == "call_function" and not passes(node) and not is_kernel(node)


def _reduces(node: Any) -> bool:
    """Whether a result is smaller than what it is made of: another kernel would not make it again."""
    sizes = [one.meta["val"].numel() for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
    made = [t.numel() for t in tree_leaves(node.meta["val"]) if isinstance(t, Tensor)]
    return bool(sizes) and max(made) < max(sizes)


def source_of(node: Any) -> Any:
    """What a view is of."""
    while node.op == "call_function" and passes(node) and node.args and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def sizes_of(node: Any) -> list[int]:
    return [size_of(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def written_by(unit: Unit) -> list[int]:
    return [size for node in unit.writes for size in sizes_of(node)]
