"""A checkpoint of any layout continues in any other: parameters, moments and averages are those of one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import losses, merge, parameters, run, tiny_recipe, torchrun

WORKER = Path(__file__).parent / "worker.py"
FIRST, ALL = 2, 3  # steps; the last takes all that was stored: parameters, moments and the average

# World size, then the `parallel` section. Chosen such that every axis comes and goes.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "shard4": (4, {}),
    "tensor2": (2, {"tensor": 2}),
    "context2": (2, {"context": 2}),
    "pipeline2": (2, {"pipeline": 2}),
    "pipeline2-tensor2": (4, {"pipeline": 2, "tensor": 2}),
    "hybrid-stop": (4, {"strategy": "NO_SHARD", "tensor": 2}),
}


def recipe_of(volume: Path, folder: Path, layout: str, steps: int) -> dict[str, Any]:
    encoder = {"width": 32, "depth": 2, "heads": 4, "patch": 4, "positions": "rope", "drop_path": 0.2}
    changes = {
        "model.encoder": encoder,
        "model.decoder": {"kind": "cross", "width": 32, "depth": 1, "heads": 4},
        "optimizer": {"kind": "adamw", "lr": 1e-3, "eps": 1e-5},
        "schedule": {"kind": "constant", "warmup": 0},  # the same for the first steps as for all
        "ema": {"decay": 0.9},
        "checkpoint": {"every": FIRST},
        "eval": {"every": ALL, "samples": 2},
        "data.micro_batch": 2,
        "parallel": LAYOUTS[layout][1],
    }
    return merge(tiny_recipe(volume, folder, run__steps=steps), changes)


def train_all(home: Path, trees: list[tuple[str, dict[str, Any]]]) -> None:
    """One launch a world size."""
    for world in (1, 2, 4):
        mine = [tree for layout, tree in trees if LAYOUTS[layout][0] == world]
        cases = home / f"cases-{world}.json"
        cases.write_text(json.dumps(mine))
        code, output = run(*torchrun(world, WORKER, cases))
        assert code == 0, output[-6000:]


PAIRS = [(first, second) for first in LAYOUTS for second in LAYOUTS if first != second]


def continue_all(volume: Path, home: Path, pairs: list[tuple[str, str]]) -> Path:
    """The first steps in each layout, and from there the rest in another."""
    train_all(home, [(first, recipe_of(volume, home / first, first, FIRST)) for first in LAYOUTS])
    trees = [("one", recipe_of(volume, home / "whole", "one", ALL))]
    for first, second in pairs:
        folder = home / f"{first}-then-{second}"
        shutil.copytree(home / first, folder)
        trees.append((second, recipe_of(volume, folder, second, ALL)))
    train_all(home, trees)
    return home


@pytest.fixture(scope="module")
def every_pair(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return continue_all(volume, tmp_path_factory.mktemp("pairs"), PAIRS)


def check(runs: Path, first: str, second: str) -> None:
    whole, found = runs / "whole", runs / f"{first}-then-{second}"
    assert len(losses(found)) == ALL
    np.testing.assert_allclose(losses(found), losses(whole), rtol=1e-5)
    for weights in ("raw", "ema"):
        expected, got = parameters(whole, weights), parameters(found, weights)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(got[key], value, atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_layout_continues_from_every_other(every_pair: Path, first: str, second: str) -> None:
    check(every_pair, first, second)
