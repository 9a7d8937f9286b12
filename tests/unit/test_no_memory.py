"""Memory that runs out in a training is told in a sentence: which memory, at what, and the keys that make room."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import events, merge, tiny_recipe

import vitrail
from vitrail.errors import RunFailed
from vitrail.objectives.reconstruct import Reconstruct
from vitrail.training import session
from vitrail.training.evaluate import Evaluator

TINY = {"run__steps": 4, "checkpoint__every": 2, "eval__every": 2, "eval__samples": 4, "data__batch": 4}
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...")
HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 64 bytes")


@pytest.mark.parametrize(
    ("error", "changes", "words"),
    [
        (
            GPU,
            {},
            "the device ran out of memory in a training step (step 3, all samples of a rank at once) (CUDA out of "
            "memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...); set a data.micro_batch below the "
            "batch of a rank (the same result in more passes), parallel.recompute=full, a smaller data.crop or model, "
            "or let `vitrail tune RECIPE` find the largest batch that fits; docs/memory.md says what each saves",
        ),
        (
            HOST,
            {"data.micro_batch": 2},
            "the host ran out of memory in a training step (step 3, 2 samples at once) .* set data.micro_batch=1 "
            ".* parallel.recompute=full, fewer data.workers, a smaller data.crop",
        ),
        (
            MemoryError(),
            {"data.micro_batch": 1, "parallel.recompute": "full"},
            "the host ran out of memory .* (MemoryError); set fewer data.workers, a smaller data.crop or model, or let",
        ),
    ],
)
def test_a_step_says_what_it_had_no_room_for(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, changes: dict[str, Any], words: str
) -> None:
    usual = Reconstruct.loss

    def fail(self: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and (tmp_path / "run/checkpoints/step-00000002").exists():
            raise error
        return usual(self, *arguments)

    monkeypatch.setattr(Reconstruct, "loss", fail)
    tree = merge(tiny_recipe(volume, tmp_path / "run", **TINY), changes | {"checkpoint.background": False})
    with pytest.raises(RunFailed) as told:
        vitrail.train(tree, quiet=True)
    for part in words.split(" .* "):
        assert part in str(told.value)
    assert told.value.__cause__ is error
    assert events(tmp_path / "run", "end")[-1]["message"] == str(told.value)
    monkeypatch.undo()
    again = merge(tree, {"data.micro_batch": 1, "parallel.recompute": "full"})
    assert vitrail.train(again, quiet=True).code == 0  # what it advises may be changed in a run that goes on


def test_an_evaluation_and_the_start_say_so_too(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise GPU

    tree = tiny_recipe(volume, tmp_path / "run", **TINY)
    monkeypatch.setattr(Evaluator, "metrics", fail)
    with pytest.raises(RunFailed, match=r"while held-out .* measured \(after step 2\)"):
        vitrail.train(tree, quiet=True)
    monkeypatch.setattr(session, "build_model", fail)
    with pytest.raises(RunFailed, match=r"the device ran out of memory while the model was built \(CUDA .* tune"):
        vitrail.train(merge(tree, {"run.dir": str(tmp_path / "new")}), quiet=True)
    assert not (tmp_path / "new").exists()


def test_other_errors_stay_as_they_are(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Reconstruct, "loss", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        vitrail.train(tiny_recipe(volume, tmp_path / "run", **TINY), quiet=True)
