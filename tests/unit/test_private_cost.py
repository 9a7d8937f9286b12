"""Names of PyTorch that are not public and that the planner relies on: each is there and does what it should."""

import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.cost import private

ROOM = Path(private.__file__).parent


def test_no_other_file_of_the_room_uses_such_names() -> None:
    used = re.compile(r"torch(\.\w+)*\._[a-z]|_cdata|_schema\b|import _[a-z]")
    for path in ROOM.glob("*.py"):
        if path.name != "private.py":
            found = [line for line in path.read_text().splitlines() if used.search(line) and "infer_schema" not in line]
            assert found == [], path.name


def test_operations_are_watched() -> None:
    seen = []

    class Watch(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((str(func), private.watchers()))
            return func(*args, **kwargs or {})

    assert private.watchers() == []
    with Watch() as outer:
        assert private.watchers() == [outer]
        torch.ones(2) + torch.ones(2)
    assert ("aten.add.Tensor", []) in seen  # it does not watch itself


def test_tensors_are_found_in_whatever_holds_them() -> None:
    a, b, c = torch.zeros(3, 2).unbind()
    pair = namedtuple("pair", "x y")
    found = private.tensors_in((a, [b, 1, None], {"c": pair(c, "text")}))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


def test_views_share_a_storage() -> None:
    x = torch.arange(6.0)
    assert private.storage_key(x) == private.storage_key(x.view(2, 3)[1])
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_views_are_told_from_other_operations() -> None:
    aten = torch.ops.aten
    assert all(private.is_view(op) for op in (aten.view.default, aten.select.int, aten.split.Tensor))
    assert not any(private.is_view(op) for op in (aten.add.Tensor, aten.add_.Tensor, aten.cat.default, len))


def test_a_compiled_module_is_known() -> None:
    layer = nn.Linear(2, 2)
    assert not private.is_compiled(layer)
    layer.compile(backend="eager")
    assert private.is_compiled(layer)


def test_graphs_of_both_passes_become_calls() -> None:
    """Every shape is compiled, more than PyTorch would; what is taken apart still is the function."""
    graphs: list[tuple[str, Any]] = []

    class Call:
        def __init__(self, name: str, graph: Any) -> None:
            graphs.append((name, graph))
            self._boxed_call, self.graph = True, graph

        def __call__(self, inputs: list[Any]) -> Any:
            return self.graph(*inputs)

    backend = private.take_apart(lambda graph: Call("forward", graph), lambda graph: Call("backward", graph))
    function = torch.compile(lambda x: (x.sin() * x).sum(), backend=backend, dynamic=False)
    with private.compile_anew():
        limit = torch._dynamo.config.recompile_limit
        for size in range(1, 12):
            x = torch.rand(size, requires_grad=True)
            function(x).backward()
            torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())
    assert torch._dynamo.config.recompile_limit < limit
    assert [name for name, _ in graphs] == ["forward", "backward"] * 11
    assert all(node.op != "call_method" for _, graph in graphs for node in graph.graph.nodes)
