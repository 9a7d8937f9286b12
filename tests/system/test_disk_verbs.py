"""Every verb that writes, in a home full of decoys: nothing but what it was asked to write changes."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import merge, tiny_recipe, write_recipe

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from test_disk import look, write_decoys

from vitrail import cli

SMALL = ("--shape", "16,16,24", "--levels", "1", "--chunk", "8")


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A home with decoys, and the working folder in it."""
    home = write_decoys(tmp_path_factory.mktemp("verbs") / "home")
    work = home / "work"
    for name in ("a/notes.txt", "a/b/data.bin", ".hidden"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        patch.chdir(work)
        yield home


def changed(home: Path, act: Callable[[], Any]) -> set[str]:
    """What an act adds, changes or takes away, but for folders that a new thing lies in."""
    before = look(home)
    act()
    after = look(home)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def only(home: Path, outs: tuple[str, ...], *words: object, code: int = 0) -> None:
    """Run a verb, after which nothing but `outs`, in the working folder, is other than it was."""
    ended: list[int] = []
    found = changed(home, lambda: ended.append(call(*words)))
    assert ended == [code], words
    inside = [f"work/{out}/" for out in outs]
    strange = {n for n in found if not any((n + "/").startswith(out) or out.startswith(n + "/") for out in inside)}
    assert not strange, (words, strange)
    if code == 0:
        assert found or not outs, words


def diffusion(data: str, run: str) -> dict[str, Any]:
    return {
        "run": {"name": "dit", "dir": run, "seed": 3, "steps": 2, "device": "cpu"},
        "model": {"kind": "dit", "ndim": 2, "width": 16, "depth": 1, "heads": 2, "patch": 2, "label_dropout": 0.2},
        "objective": {"kind": "flow", "classes": True, "sampling": {"steps": 1}},
        "data": {"train": [{"path": data}], "valid": [{"path": data}], "crop": 8, "batch": 4},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "checkpoint": {"every": 2},
        "log": {"pictures": 2, "tensorboard": False},
    }


def write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("bar", "disc"):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(random.integers(0, 255, (8, 8), np.uint8)).save(folder / name / f"{number}.png")


def test_no_verb_changes_anything_but_what_it_writes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = home / "work"
    only(home, ("em.zarr",), "data", "generate", "em.zarr", *SMALL)
    only(home, ("em.png",), "data", "inspect", "em.zarr", "--picture", "em.png")
    only(home, ("em.png",), "data", "inspect", "em.zarr", "--picture", "em.png", "--set", "region={x: [0, 0.5]}")
    tree = tiny_recipe(
        work / "em.zarr",
        Path("runs/tiny"),
        run__steps=2,
        data__batch=2,
        data__crop=8,
        eval__samples=2,
        log__report=True,
    )
    write_recipe(work / "mae.yaml", merge(tree, {"checkpoint.every": 1, "log.pictures": 2, "eval.every": 2}))
    only(home, ("seen.png",), "data", "preview", "mae.yaml", "--out", "seen.png", "--samples", "1")
    only(home, ("seen.png",), "data", "preview", "mae.yaml", "--out", "seen.png", "--samples", "2")
    only(home, ("runs/tiny",), "train", "mae.yaml", "--quiet")
    only(home, ("runs/tiny",), "train", "mae.yaml", "run.steps=3", "--quiet")
    only(home, ("runs/tiny/report.html",), "report", "runs/tiny")
    only(home, (), "eval", "runs/tiny")
    write_images(work / "images")
    write_recipe(work / "dit.yaml", diffusion("images", "runs/dit"))
    only(home, ("runs/dit",), "train", "dit.yaml", "--quiet")
    only(home, ("out/samples",), "sample", "runs/dit", "--number", "2", "--out", "out/samples", "--quiet")
    only(home, ("out/samples",), "sample", "runs/dit", "--number", "8", "--out", "out/samples", "--quiet")
    only(home, ("runs/dit/samples",), "sample", "runs/dit", "--number", "2", "--quiet")
    only(home, ("quality.html",), "eval", "out/samples", "--real", "images", "--page", "quality.html", "--number", "8")
    write_recipe(work / "codec.yaml", diffusion("images", "runs/none") | {"codec": {"kind": "identity"}})
    for store in ("safetensors", "zarr"):
        out = f"latents-{store}"
        words = ("data", "encode", "codec.yaml", "--out", out, "--store", store, "--rows", "4", "--quiet")
        only(home, (out,), *words)
    only(home, ("job.sh",), "launch", "slurm", "mae.yaml", "--output", "job.sh", "--time", "1h")
    only(home, ("schema.json",), "schema", "--out", "schema.json")
    only(home, ("schema.json",), "schema", "--out", "schema.json")
    only(home, ("jobs",), "bench", "mae.yaml", "--sweep", "data.batch=2,4", "--jobs", "slurm", "--out", "jobs")
    only(home, (), "data", "balance", "mae.yaml", "--ranks", "2")
    capsys.readouterr()

    # The same names again, where something else lies by now.
    mine = b"\x89PNG\r\n\x1a\n of a person"
    for name in ("em.png", "seen.png", "quality.html", "schema.json", "job.sh", "cluster.yaml", "tuned.yaml"):
        (work / name).write_bytes(mine)
    refused: list[tuple[object, ...]] = [
        ("data", "inspect", "em.zarr", "--picture", "em.png"),
        ("data", "preview", "mae.yaml", "--out", "seen.png"),
        ("eval", "out/samples", "--real", "images", "--page", "quality.html"),
        ("schema", "--out", "schema.json"),
        ("launch", "slurm", "mae.yaml", "--output", "job.sh", "--time", "1h"),
        ("doctor", "--calibrate", "--out", "cluster.yaml"),
        ("tune", "mae.yaml", "--out", "tuned.yaml"),
        ("sample", "runs/dit", "--out", "a", "--quiet"),
        ("data", "encode", "codec.yaml", "--out", "images", "--quiet"),
        ("bench", "mae.yaml", "--sweep", "data.batch=2,4", "--jobs", "slurm", "--out", "a"),
        ("data", "generate", "images", "--kind", "digits"),
        ("train", "mae.yaml", "run.dir=mine", "--quiet"),
        ("train", "mae.yaml", "run.dir=.", "--quiet"),
        ("report", "mine"),
        ("data", "generate", "em.zarr", *SMALL),
    ]
    (work / "mine").mkdir()
    for name in ("mine/recipe.yaml", "mine/report.html", "data.json"):
        (work / name).write_text("{}")
    (work / "images" / "train").mkdir()
    (work / "images" / "train" / "mine.txt").write_text("mine")
    for words in refused:
        only(home, (), *words, code=2)
        assert len(capsys.readouterr().err.strip().splitlines()) == 1, words


@pytest.mark.parametrize(
    "out",
    [
        "a",
        "../photos",
        "../to-folder",
        "../dangling",
        "../ring",
        "../thesis.tex",
        "..",
        "../..",
        ".",
        "a/..",
        "../work",
    ],
)
def test_force_replaces_nothing_of_a_person(home: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    only(home, (), "data", "generate", out, "--force", *SMALL, code=2)
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1, said
    assert "not replaced" in said or "names no folder of its own" in said


def test_force_replaces_a_volume_of_vitrails_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = home / "work"
    only(home, ("v.zarr",), "data", "generate", "v.zarr", *SMALL)
    only(home, ("v.zarr",), "data", "generate", "v.zarr", *SMALL, "--seed", "1", "--force", "--json")
    read = capsys.readouterr()
    assert "v.zarr: replaced what vitrail had written there before, 30 files" in read.err
    assert json.loads(read.out[read.out.index("{") :])["seed"] == 1
    (work / "v.zarr" / "notes.txt").write_text("mine")
    only(home, (), "data", "generate", "v.zarr", *SMALL, "--force", code=2)
    assert "notes.txt in it was not written by vitrail" in capsys.readouterr().err
    (work / "v.zarr" / "notes.txt").unlink()
    chunk = next(path for path in sorted((work / "v.zarr" / "s0" / "c").rglob("*")) if path.is_file())
    held = chunk.read_bytes()
    chunk.unlink()  # as one that is half written
    only(home, (), "data", "generate", "v.zarr", *SMALL, "--force", code=2)
    assert "is missing, so it is not complete" in capsys.readouterr().err
    chunk.write_bytes(held)
    only(home, ("v.zarr",), "data", "generate", "v.zarr", *SMALL, "--force")


def test_digits_are_written_once_and_beside_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only(home, (), "data", "generate", "new/digits", "--kind", "digits", "--force", code=2)
    only(home, ("new/digits",), "data", "generate", "new/digits", "--kind", "digits")
    capsys.readouterr()
    only(home, (), "data", "generate", "new/digits", "--kind", "digits", code=2)
    assert "new/digits exists and is not overwritten" in capsys.readouterr().err
    shutil.rmtree(home / "work" / "new")  # many files to look at, for the tests that follow


@pytest.mark.slow
def test_verbs_that_measure_change_nothing_else_either(home: Path) -> None:
    work = home / "work"
    if not (work / "mae.yaml").exists():
        call("data", "generate", "em.zarr", *SMALL)
        tree = tiny_recipe(work / "em.zarr", Path("runs/tiny"), run__steps=2, data__batch=2, data__crop=8)
        write_recipe(work / "mae.yaml", tree)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    few = ("--windows", "3", "--steps", "1")
    only(home, ("sweep",), "bench", "mae.yaml", "--sweep", "data.batch=2,4", "--out", "sweep", *few)
    only(home, ("sweep",), "report", "sweep")
    only(home, ("sweep",), "report", "sweep")
    only(home, (), "bench", "mae.yaml", *few)
    only(home, ("best.yaml",), "tune", "mae.yaml", "data.batch=2/rank", "--out", "best.yaml", "--most", "4")
    only(home, ("here.yaml",), "doctor", "--calibrate", "--quick", "--out", "here.yaml")
    only(home, (), "data", "bench", "mae.yaml", "--seconds", "0.2", "--mode", "io")
