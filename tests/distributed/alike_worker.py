"""Ranks that disagree, many cases in one launch: `alike_worker.py HOME`, with HOME/volume.zarr and HOME/other.zarr."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import tiny_recipe, write_recipe

import vitrail
from vitrail.cli import main as main_verb
from vitrail.cli.words import end
from vitrail.errors import BadData, UserError
from vitrail.infer.encode import encode
from vitrail.training import alike, trainer
from vitrail.training.evaluate import Evaluator
from vitrail.training.run import evaluate, train
from vitrail.weights.runs import BadCheckpoint

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OTHER = 1  # the rank that differs

RECIPES: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"optimizer__lr": 2e-3}, r"optimizer\.lr is not the same on all ranks: 0\.001 on rank 0 and 0\.002 on"),
    "seed": ({"run__seed": 4}, r"run\.seed .* 3 on rank 0 and 4 on rank 1; start every rank with the same recipe"),
    "batch": ({"data__batch": 12}, r"data\.batch .* 6 on rank 0 and 12 on rank 1;"),
    "mask ratio": ({"model__mask__ratio": 0.5}, r"model\.mask\.ratio .* 0\.75 on rank 0 and 0\.5 on rank 1;"),
    "clip": ({"optimizer__clip": 3.0}, r"optimizer\.clip .* on rank 0 and 3\.0 on rank 1;"),
    "precision": ({"precision__compute": "bf16"}, r"precision\.compute .* 'auto' on rank 0 and 'bf16' on rank 1;"),
    "two keys": (
        {"run__seed": 4, "data__batch": 12},
        r"run\.seed \(and data\.batch\) is not the same on all ranks: 3 on rank 0 and 4 on",
    ),
    "path": ({"data__train": [{"path": "elsewhere.zarr"}]}, r"data\.train\.0\.path .* 'volume\.zarr' on rank 0 and"),
    "kind": ({"schedule__kind": "constant"}, r"schedule\.kind .* 'cosine' on rank 0 and 'constant' on rank 1"),
    "stage": ({"data__stage": {"dir": "copies"}}, r"data\.stage .* null on rank 0 and"),
}


def refused(words: str, call: Any, *arguments: Any, **options: Any) -> None:
    """On every rank, with the same sentence; the next case begins anew."""
    with pytest.raises(UserError, match=words) as caught:
        call(*arguments, **options)
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, str(caught.value))
    assert len(set(told)) == 1, told
    assert "\n" not in told[0]
    dist.destroy_process_group()


def main() -> None:
    home, differs = Path(sys.argv[1]), RANK == OTHER
    here = home / f"rank{RANK}"  # one path, and under it what each rank has there
    here.mkdir()
    os.chdir(here)
    shutil.copytree(home / "volume.zarr", "volume.zarr")
    run_dir = home / "run"

    def recipe(**changes: Any) -> dict[str, Any]:
        common = {"run__steps": 2, "data__batch": 6, "checkpoint": {"every": 2}, "eval__samples": 6}
        return tiny_recipe(Path("volume.zarr"), run_dir, **common | changes)

    for changes, words in RECIPES.values():
        refused(words, train, recipe(**changes if differs else {}), quiet=True)
        assert not run_dir.exists()
    with pytest.MonkeyPatch.context() as patch:
        if differs:
            patch.setattr(torch, "__version__", "1.0")
        refused(r"the version of torch .* on rank 0 and '1\.0' on rank 1;", train, recipe(), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        if differs:
            patch.setattr(vitrail, "__version__", "0.0")
        refused(r"the version of vitrail is not the same", train, recipe(), quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        if differs:
            read = alike._file_digest
            patch.setattr(alike, "_file_digest", lambda path: "0" if path.name == "trainer.py" else read(path))
        refused(r"the file vitrail/training/trainer\.py is not the same on all", train, recipe(), quiet=True)
    refused(r"--trust .* false on rank 0 and true on rank 1", train, recipe(), quiet=True, trust=differs)

    # The same words everywhere, and other data behind them.
    other = home / ("other.zarr" if differs else "volume.zarr")
    shutil.rmtree(here / "volume.zarr")
    shutil.copytree(other, here / "volume.zarr")
    values = r"data\.train\.0\.values .*is not the same .*; see that every node reads the same files"
    refused(values, train, recipe(), quiet=True)
    codec = ["codec={kind: identity}"]
    refused(values, encode, recipe(), home / "latents", overrides=codec, quiet=True)
    smaller = home / ("smaller.zarr" if differs else "volume.zarr")
    shutil.rmtree(here / "volume.zarr")
    shutil.copytree(smaller, here / "volume.zarr")
    refused(r"data\.train\.0\.sizes \(and .*\) is not the same on", train, recipe(), quiet=True)
    shutil.rmtree(here / "volume.zarr")
    shutil.copytree(home / "volume.zarr", here / "volume.zarr")

    # What may differ does no harm, and the verbs that follow compare as well.
    own = {"data__workers": RANK, "data__cache_mib": 64 + RANK, "data__prefetch": 1 + RANK}
    staged = {"data__stage": {"dir": str(here / "copies"), "limit_gib": 1 + RANK}}
    assert train(recipe(**own, **staged), quiet=True).code == 0
    refused(r"--samples .* 6 on rank 0 and 12 on rank 1", evaluate, run_dir, samples=12 if differs else 6)
    refused(r"run\.seed .* 0 on rank 0 and 1 on rank 1;", evaluate, run_dir, overrides=[f"run.seed={RANK}"])
    refused(r"--rows .* 8 on rank 0 and 4 on rank 1", encode, recipe(), home / "latents", rows=4 if differs else 8,
            overrides=codec, quiet=True)  # fmt: skip
    assert not (home / "latents").exists()
    assert np.isfinite(evaluate(run_dir)["metrics"]["loss"])

    # Of a pipeline's stages one finds no place for its part: the other does not wait for it in the loading.
    staged = {"run__dir": str(home / "staged"), "parallel": {"pipeline": RANKS}, "data__micro_batch": 3}
    assert train(recipe(**staged), quiet=True).code == 0
    with pytest.MonkeyPatch.context() as patch:
        if differs:
            patch.setattr(trainer, "check_tensors", not_of_this_model)
        words = r"no checkpoint in .* is usable: .* is passed over: rank 1: another model's;"
        refused(words, train, recipe(**staged, run__steps=4), quiet=True)

    with pytest.raises(SystemExit) as ended:
        main_verb(["train", str(write_recipe(here / "recipe.yaml", recipe(run__dir=str(home / "b"), run__seed=RANK)))])
    assert ended.value.code == 2
    dist.destroy_process_group()

    # The last case, of which the ranks die: what one alone cannot read is told by the other, which does not wait.
    if not differs:
        evaluate(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "metrics", broken)
        with pytest.raises(UserError, match="image 7 is broken"):
            evaluate(run_dir)
    os._exit(0)  # at once, without the farewell that the cases before would wait for


def not_of_this_model(*_: Any) -> None:
    raise BadCheckpoint("another model's")


def broken(*_: Any, **__: Any) -> None:
    raise BadData("image 7 is broken; mend it")


if __name__ == "__main__":
    main()
    end(0)
