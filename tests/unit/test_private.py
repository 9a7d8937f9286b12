"""Names of PyTorch that are not public: that they are there, and do what is asked of them, in this version."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from vitrail.parallel import private, station

ROOM = Path(private.__file__).parent


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_no_other_file_of_the_room_uses_such_names() -> None:
    used = re.compile(r"torch(\.\w+)*\._[a-z]|import _[a-z]|\b(?!self\b|cls\b)\w+\)?\._(?!refuse_unknown)[a-z]\w*")
    for path in ROOM.glob("*.py"):
        if path.name != "private.py":
            assert not used.findall(path.read_text()), path.name


def test_many_tensors_at_once() -> None:
    some, more = [torch.ones(3), torch.full((2, 2), 2.0)], [torch.arange(3.0), torch.ones(2, 2)]
    private.add_all(some, more)
    assert torch.equal(some[0], torch.tensor([1.0, 2.0, 3.0]))
    private.copy_all(some, more)
    assert all(torch.equal(a, b) for a, b in zip(some, more, strict=True))
    assert [float(norm) for norm in private.norms_of(more)] == pytest.approx([5**0.5, 2.0])


def test_a_group_is_found_by_its_name(alone: None) -> None:
    group: Any = dist.group.WORLD
    assert private.group_of(group.group_name) is group


def test_axes_become_one(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    flat = private.flatten(mesh, "both")
    assert flat.mesh_dim_names == ("both",)
    assert flat.size() == 1


def test_collectives_give_what_has_arrived(alone: None) -> None:
    x, group = torch.arange(6.0).view(2, 3), dist.group.WORLD
    for found in (private.all_gathered(x, 1, group), private.sum_scattered(x, 0, group), private.summed(x, group)):
        assert type(found) is torch.Tensor
        assert torch.equal(found, x)


def test_parameters_can_be_replaced_in_their_place() -> None:
    layer = nn.Linear(2, 3, bias=False)
    assert private.parameters_in(layer) == {"weight": layer.weight, "bias": None}
    other = torch.zeros(3, 2)
    private.parameters_in(layer)["weight"] = other
    assert layer.weight is other


def test_what_is_being_gathered_is_waited_for(alone: None) -> None:
    layer: Any = nn.Linear(2, 3)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    assert not private.has_begun(layer)
    with torch.no_grad():
        layer(torch.ones(1, 2))
    layer.reshard()
    assert private.has_begun(layer)
    private.end_gathering(layer)  # nothing has begun
    waited = []
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        group._all_gather_result, group.wait_for_unshard = SimpleNamespace(), lambda: waited.append(1)
    private.end_gathering(layer)
    assert waited == [1] * len(groups)


def test_a_stage_of_a_pipeline_has_memory_only_while_it_receives(alone: None) -> None:
    """By the names that a station reaches into; tests/distributed runs them."""
    for name in ("_prepare_forward_infra", "_prepare_backward_infra", "get_fwd_recv_ops", "get_bwd_recv_ops"):
        assert callable(getattr(PipelineStage, name))

    class Made:
        def empty(self, device: Any) -> torch.Tensor:
            return torch.empty(2, device=device, requires_grad=True)

    begun: list[bool] = []
    shell = station.Shell(lambda number, *carried: carried)
    device = torch.device("cpu")
    made = station.Station(shell, 0, 1, device, dist.group.WORLD, [Made()], [Made()], begun.append)
    info = SimpleNamespace(buffer=torch.ones(2))
    made._release([info])
    assert info.buffer is made.nothing
    assert {"args_recv_info", "grad_recv_info"} <= vars(made).keys()
