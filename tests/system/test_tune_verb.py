"""`vitrail tune` from end to end: real trials, a recipe that trains, and ranks with unequal memory that agree."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import environment, run, torchrun
from support import vitrail as command

from vitrail.recipe import load_recipe

RANKS = """
import json, os, sys
from pathlib import Path
from vitrail.bench.tune import tune
out = Path(sys.argv[2])
found = tune(sys.argv[1], multiple=2, most=4, out=out, plugins=["less_memory"])
out.with_name(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""

# One rank has no memory for more than two samples: PyTorch's own allocator refuses what is asked of it.
LESS_MEMORY = """
import os
import torch
from vitrail.training.trainer import Trainer
step = Trainer.step
def step_with_less(self, batch, **options):
    if os.environ["RANK"] == "2" and len(batch) > 2:
        torch.empty(2**50, dtype=torch.uint8)
    return step(self, batch, **options)
Trainer.step = step_with_less
"""


def recipe_file(folder: Path, *, side: int, width: int, depth: int, batch: Any) -> Path:
    source = {"kind": "dummy", "path": "dummy", "shape": [side, side], "channels": 3, "classes": 10, "items": 1000}
    tree = {
        "run": {"name": "tiny", "dir": str(folder / "run"), "steps": 2, "device": "cpu"},
        "model": {"kind": "vit", "width": width, "depth": depth, "heads": 2, "patch": 4, "classes": 10},
        "objective": {"kind": "classify"},
        "data": {"train": [source], "crop": side, "batch": batch},
        "checkpoint": {"every": "off"},
        "log": {"every": 1, "pictures": "100%", "tensorboard": False},
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_a_global_batch_is_kept_and_the_recipe_trains(tmp_path: Path) -> None:
    import vitrail

    recipe = recipe_file(tmp_path, side=16, width=16, depth=1, batch=6)
    out = tmp_path / "tuned.yaml"
    code, output = command("tune", recipe, "optimizer.lr=1e-4", "--multiple", "6", "--out", out, "--json")
    assert code == 0, output
    found = json.loads(output[output.index("{") :])
    assert [(trial["size"], trial["verdict"]) for trial in found["trials"]] == [(6, "ok")]
    assert (found["batch"], found["micro_batch"], found["recipe"]) == (6, 6, str(out))
    assert "6 a rank: ok" in output
    tuned = load_recipe(out)
    assert (tuned.data.batch, tuned.data.micro_batch, tuned.optimizer.lr) == (6, 6, 1e-4)
    outcome = vitrail.train(out, quiet=True)
    assert (outcome.code, outcome.step) == (0, 2)


@pytest.mark.slow
def test_ranks_with_unequal_memory_agree(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, side=16, width=16, depth=1, batch="1/rank")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "less_memory.py").write_text(LESS_MEMORY)
    script, out = tmp_path / "ranks.py", tmp_path / "tuned.yaml"
    script.write_text(RANKS)
    env = environment(PYTHONPATH=str(tmp_path / "site"))
    code, output = run(*torchrun(4, script, recipe, out), env=env)
    assert code == 0, output
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    for found in ranks:
        for trial in found["trials"]:
            trial.pop("seconds")  # each rank's own
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    good, bad = ranks[0]["trials"]
    assert (good["size"], good["verdict"]) == (2, "ok")
    assert (bad["size"], bad["verdict"], bad["rank"]) == (4, "out of memory", 2), bad
    assert "allocate" in bad["why"]
    assert load_recipe(out).data.batch == "2/rank"
