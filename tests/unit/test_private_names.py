"""Names of PyTorch that are not public and that the training loop relies on: each is there and does what it should."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.training import private


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("foreach_lerp_", ([torch.tensor([4.0, 0.0])], 0.25), [2.5, 1.5]),
        ("foreach_mul_", (3.0,), [6.0, 6.0]),
        ("foreach_mul_", (torch.tensor(3.0),), [6.0, 6.0]),
        ("foreach_sign_", (), [1.0, 1.0]),
        ("foreach_sub_", ([torch.tensor([1.0, 5.0])],), [1.0, -3.0]),
    ],
)
def test_lists_of_tensors_change_in_place(name: str, arguments: tuple[Any, ...], expected: list[float]) -> None:
    values = torch.full((2,), 2.0)
    change: Callable[..., Any] = getattr(private, name)
    change([values], *arguments)
    assert values.tolist() == expected


def test_a_mean_of_lists_is_new() -> None:
    values: list[Tensor] = [torch.zeros(2)]
    (mean,) = private.foreach_lerp(values, [torch.ones(2)], 0.25)
    assert mean.tolist() == [0.25, 0.25]
    assert values[0].tolist() == [0.0, 0.0]


def test_a_build_tells_its_latest_collectives() -> None:
    words = (
        "import torch, torch.distributed as dist\n"
        "from vitrail.training.failures import record_collectives\n"
        "from vitrail.training.private import recorded_collectives\n"
        "record_collectives()\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "print(b'gloo:all_reduce' in recorded_collectives()['gloo']())\n"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_gpus_memory_has_a_history_and_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and their arguments: what they do needs a GPU."""
    impl = inspect.signature(torch.cuda.memory._record_memory_history_impl)
    asked: list[inspect.BoundArguments] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: asked.append(impl.bind(*a, **k)))
    private.record_memory(10)
    private.record_memory(None)
    assert [bound.arguments for bound in asked] == [{"max_entries": 10}, {"enabled": None}]
    assert private.dump_memory is torch.cuda.memory._dump_snapshot
    inspect.signature(private.dump_memory).bind("a.pickle")
