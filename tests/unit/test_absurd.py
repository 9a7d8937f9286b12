"""Absurd numbers in recipes and command lines: a sentence that names the key, in bounded memory and before any work."""

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MODELS, environment, merge, run, tiny_recipe, write_recipe

from vitrail.cli import main
from vitrail.data.reading.pool import Pool
from vitrail.errors import UserError
from vitrail.recipe import load_recipe
from vitrail.recipe import problems as sizes

HUGE = 10**12
# Changes of a recipe: what `train` says. All of them are refused by arithmetic, or do no harm.
REFUSED = {
    f"data.batch={HUGE}": r"data\.batch: 1e12 samples of 4096 bytes at least on each rank are larger than the .* GiB",
    f"data.batch={HUGE}/rank": r"data\.batch: expected a whole number above 0, or \"N/rank\", got",
    "data.batch=999999999/rank": r"data\.batch: .* samples of 4096 bytes at least on each rank are larger than",
    "model.encoder.width=100000000": r"model\.encoder: width 100000000 and depth 2 make 4e16 parameters or more",
    "model.decoder.width=100000000": r"model\.decoder: width 100000000 and depth 1 make 2e16 parameters or more",
    f"model.encoder.width={HUGE}": r"model\.encoder\.width: 1000000000000 with depth 2 makes 4e24 parameters; expected",
    f"model.encoder.width={10**30}": r"model\.encoder\.width: 1e30 is too large; expected at most 1e15",
    "model.encoder.depth=100000": r"model\.encoder\.depth: 100000 blocks are too many; expected at most 2000",
    f"model.encoder.heads={HUGE}": r"model\.encoder: width 24 must be a multiple of heads 1000000000000",
    "model.encoder.patch=0": r"model\.encoder: patch 0 must be at least 1 voxel along every axis",
    f"model.encoder.patch={HUGE}": r"size \[16, 16, 16\] is not a multiple of patch",
    f"data.crop={10**9}": r"data\.crop: a sample of 1e27 voxels is too large; expected at most 1e15",
    "data.crop=100000": r"data\.crop: a sample of 1e15 bytes at least is larger than the .* GiB of memory here",
    f"data.crop={[16] * 3000}": r"data\.crop: a sample of more than 1e100 voxels is too large",
    "data.workers=100000": r"data\.workers: expected a number of at most 4096, got 100000",
    f"data.prefetch={10**9}": r"data\.prefetch: 1000000000 batches of 32768 bytes at least are larger than the",
    f"eval.samples={HUGE}": r"eval\.samples: 1000000000000 samples cannot even be listed in the memory here",
    f"run.steps={10**30}": r"run\.steps: 1e30 is too large; expected at most 1e15",
    f"run.seed={10**30}": r"run\.seed: expected a number below 9223372036854775808",
    f"checkpoint.keep={10**21}": r"checkpoint\.keep: 1e21 is too large",
    f"optimizer.lr=1{'0' * 400}": r"has more than 100 digits",
    "optimizer.lr=1e999": r"the number 1e999 is too large",
}
VERBS = {
    (
        "plan",
        "RECIPE",
        "--cluster",
        "laptop",
        "model.channels=1",
        "data.crop=100000",
    ): r"samples are too large to plan",
    ("plan", "RECIPE", "--cluster", "h200", "model.channels=1", f"--gpus={HUGE}"): r"--gpus 1000000000000: expected a",
    ("plan", "RECIPE", "--cluster", "laptop", f"model.encoder.width={HUGE}"): r"model\.encoder\.width: .* makes 4e24",
    ("models", "vit:Z/999999999"): r"'Z/999999999' is not a size of vit; there are",
    ("data", "preview", "RECIPE", f"data.batch={HUGE}", "--out", "a.png"): r"data\.batch: 1e12 samples",
    ("data", "preview", "RECIPE", f"--samples={HUGE}", "--out", "a.png"): r"--samples.*less than or equal to 16",
    ("data", "bench", "RECIPE", "--workers=100000", "--mode=io"): r"data\.workers: expected a number of at most 4096",
    ("data", "bench", "RECIPE", f"data.batch={HUGE}", "--mode=io"): r"data\.batch: 1e12 samples",
    (
        "data",
        "generate",
        "a.zarr",
        "--shape=1000000",
    ): r"--shape 1000000: a volume so large does not fit",
    ("data", "generate", "a.zarr", f"--shape={10**20},64,64"): r"--shape .*: a volume so large does not fit",
    ("data", "balance", "RECIPE", f"--ranks={HUGE}"): r"--ranks 1000000000000: they do not divide data\.batch 8",
    (
        "data",
        "encode",
        "RECIPE",
        "codec={kind: identity}",
        "--out=latents",
        f"data.crop={10**9}",
    ): r"\.crop: a sample",
    ("bench", "RECIPE", f"data.batch={HUGE}"): r"data\.batch: 1e12 samples",
    ("tune", "RECIPE", "model.encoder.width=100000000"): r"model\.encoder: width 100000000 and depth 2 make 4e16",
}


@pytest.mark.slow
def test_absurd_numbers_are_refused_by_name_in_bounded_memory(volume: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tiny_recipe(volume, tmp_path / "run", run__steps=2))
    asked = [["train", "RECIPE", change, "--quiet"] for change in REFUSED] + [list(words) for words in VERBS]
    expected = [*REFUSED.values(), *VERBS.values()]
    cases = write_recipe(tmp_path / "cases.json", [[w.replace("RECIPE", str(recipe)) for w in ws] for ws in asked])  # type: ignore[arg-type]
    child = Path(__file__).parent / "absurd_child.py"
    code, output = run(sys.executable, child, cases, cwd=tmp_path, timeout=600, env=environment())
    told = [json.loads(line) for line in output.splitlines() if line.startswith('{"words"')]
    assert (code, len(told)) == (0, len(asked)), output[-3000:]
    # To bench, a batch that cannot fit is a cell that ran out of memory: it failed, nobody asked for anything wrong.
    wrong = [
        case
        for case, words in zip(told, expected, strict=True)
        if case["code"] != (1 if case["words"][0] == "bench" else 2)
        or not re.search(words, case["said"])
        or "Traceback" in case["said"]
    ]
    assert not wrong, wrong
    assert max(len(case["said"]) for case in told) < 1000
    assert sum(case["rose"] for case in told) < 1000, told  # MiB, nearly all of them libraries
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "cases.json"}


def test_what_might_fit_is_not_refused(tmp_path: Path) -> None:
    tree = tiny_recipe(tmp_path / "em.zarr", tmp_path / "run", data__train=[{"path": "em.zarr", "kind": "ome_zarr"}])
    tree = merge(tree, {"data.valid": []})

    def beyond(share: int = 8, parts: int = 1, ranks: int = 1, memory: float = 24, **changes: Any) -> str | None:
        recipe = load_recipe(merge(tree, {key.replace("__", "."): value for key, value in changes.items()}))
        size = int(memory * 2**30)
        return sizes.beyond(recipe, share=share, parts=parts, ranks=ranks, host=size, device=size)

    assert beyond() is None
    assert beyond(share=6 * 2**20) is None  # of 4 KiB each, in 24 GiB
    assert "data.batch" in str(beyond(share=6 * 2**20 + 1))
    assert beyond(share=6 * 2**22, parts=4) is None  # each rank reads its part
    assert "data.batch" in str(beyond(share=6 * 2**22 + 1, parts=4))
    assert "data.crop" in str(beyond(data__crop=4096))
    assert beyond(share=1, parts=4, data__crop=4096) is None
    assert beyond(data__prefetch=700_000) is None
    assert "data.prefetch" in str(beyond(data__prefetch=800_000))
    large = {"model__encoder__width": 65536, "model__encoder__depth": 128}  # 1.6 trillion parameters
    assert "model.encoder: width 65536 and depth 128 make 1.09e12 parameters or more" in str(beyond(**large))
    assert beyond(ranks=1024, memory=80, **large) is None
    assert sizes.too_many(6 * 2**30, 1, 24 * 2**30) is None
    assert sizes.too_many(6 * 2**30 + 1, 1, 24 * 2**30) is not None
    assert sizes.absurd(load_recipe(merge(tree, {"model.encoder.depth": 2000, "run.seed": 2**62}))) == []


def test_least_parameters_are_no_more_than_there_are() -> None:
    for name, (tree, _) in MODELS.items():
        labelled = {"classes": 4} if name in ("unetr", "sap") else {}
        recipe = {"kind": tree["kind"], "ndim": 2, "channels": 3, "shape": 16, **labelled, **tree}
        config = load_recipe(
            {
                "run": {"name": "a", "steps": 1},
                "model": recipe,
                "objective": {"kind": MODELS[name][1]},
                "data": {"train": [{"path": "a.zarr", "kind": "ome_zarr"}], "crop": 16, "batch": 1},
            }
        ).model
        with torch.device("meta"):
            number = sum(p.numel() for p in config.build().parameters())
        assert sum(sizes.least_parameters(stack) for _, stack in sizes.stacks(config)) <= number, name


def test_threads_that_the_system_refuses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(begun) == 3:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(UserError, match=r"data\.workers: only 3 of 8 threads could be started; set fewer"):
            Pool(8)
    for thread in begun:
        thread.join(600)
        assert not thread.is_alive()


def test_running_out_of_memory_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def list_models() -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes")

    monkeypatch.setattr("vitrail.models.catalog.entries", list_models)
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert re.fullmatch(
        r"error: memory ran out \(RuntimeError: .* 5 bytes\); make data\.micro_batch, .* tune RECIPE` .*\n", told
    )
