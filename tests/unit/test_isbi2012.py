"""The benchmark of ISBI-2012: its trainings, how it goes on, its tables and its picture."""

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tifffile
from support import ROOT, run

from vitrail.recipe import load_recipe


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("isbi2012")


def write_stack(folder: Path, side: int = 48) -> Path:
    """Sections of cells (255) and their membranes (0, and dark), in the layout of the real ones."""
    folder.mkdir()
    labels = np.full((30, side, side), 255, np.uint8)
    labels[:, ::12] = labels[:, :, ::16] = 0
    image = np.clip(labels / 2 + np.random.default_rng(0).normal(60, 20, labels.shape), 0, 255).astype(np.uint8)
    for name, values in (("image", image), ("label", labels)):
        tifffile.imwrite(folder / f"{name}.tif", values, photometric="minisblack")
    return folder


def test_trainings_differ_in_their_start_and_labels_alone(script: ModuleType, tmp_path: Path) -> None:
    found, isbi = script.cells(script.FULL, 3), write_stack(tmp_path / "isbi")
    assert len({cell.name for cell in found}) == len(found) == 3 * (1 + 2 * 2)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    trees = []
    for size in (script.FULL, script.CPU):
        home = script.Home(isbi, tmp_path / "runs", size)
        encoders = set()
        for cell in script.cells(size, 1):
            name = "pretrain" if cell.start is None else "finetune"
            recipe = load_recipe(ROOT / f"configs/isbi2012/{name}.yaml", home.overrides(cell))
            tree = recipe.model_dump(mode="json")
            encoders.add(json.dumps(tree["model"]["encoder"], sort_keys=True))
            assert tree["data"]["train"][0]["region"]["z"] == [0, cell.labels or 24]
            assert tree["data"]["valid"][0]["region"]["z"] == [24, 30]
            if cell.start is not None:
                assert (tree["init"] or {}).get("path") == {"pretrained": str(home.run(found[0]))}.get(cell.start)
                for key in ("init", "run"):
                    del tree[key]
                del tree["data"]["train"][0]["region"]
                trees.append((size, tree))
        assert len(encoders) == 1
    assert all(tree == next(other for same, other in trees if same is size) for size, tree in trees)


def test_tables_and_page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(start: str, seed: int, dice: float) -> dict[str, Any]:
        metrics = dict.fromkeys(script.MEASURES, dice)
        return {"status": "ok", "seed": seed, "start": start, "labels": 3, "date": "2026-11-19", "metrics": metrics} | {
            "steps": 1500, "step_seconds": 0.02, "parameters": 5e6, "seconds": 40.0, "device": "a GPU", "torch": "2.11",
        }  # fmt: skip

    first = cell("scratch", 0, 0) | {"start": None, "labels": 0, "evaluated": {"mse_over_variance": 0.4321}}
    cells = {
        "p0": first,
        "a0": cell("scratch", 0, 0.7),
        "b0": cell("pretrained", 0, 0.8),
        "a1": cell("scratch", 1, 0.76),
    }
    cells |= {
        "b1": cell("pretrained", 1, 0.74),
        "a2": cell("scratch", 2, 0) | {"status": "failed", "error": "no memory"},
    }
    machine = {"device": "a GPU", "torch": "2.11", "python": "3.12"}
    stored = {"cells": cells, "settings": {"labels": [24, 3]}, "machine": machine}
    told = "\n".join(script.tables(stored))
    assert "| 3 | random numbers | 2 | 0.730 (0.700 to 0.760) |" in told
    assert "| 3 | pre-training | 2 | 0.770 (0.740 to 0.800) |" in told
    assert (
        "- 3 labelled slices, Rand F-score: with pre-training +0.040 (+0.100, -0.020), better in 1 of 2 seeds" in told
    )
    assert "- a2: failed: no memory" in told
    text = script.page(stored)
    assert "a GPU, PyTorch 2.11, Python 3.12, 2026-11-19." in text
    assert "- Segmentation: 1,500 steps of 20.0 ms, 5.0 M parameters, 40 s with prediction and scores" in text
    assert "error of 0.43 of their variance" in text
    assert "still missing" in script.page(None)
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.PAGE.write_text(f"Words.\n\n{script.MARK}\n\nold\n")
    (tmp_path / "isbi2012.json").write_text(json.dumps(stored))
    assert script.main(["--page", "--out", str(tmp_path)]) == 0
    assert script.PAGE.read_text() == f"Words.\n\n{script.MARK}\n{text}"


def test_errors_are_coloured(script: ModuleType) -> None:
    truth, found = np.array([[1, 1, 0, 0]], bool), np.array([[1, 0, 1, 0]], bool)
    assert script.errors_of(truth, found)[0].tolist() == [[0, 0, 0], [220, 30, 30], [90, 140, 255], [255, 255, 255]]


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """All of its commands, one after the other, with tiny networks, few steps and a stand-in for the stack."""
    text = (ROOT / "docs/tutorials/isbi2012.md").read_text(encoding="utf-8")
    words = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    shorter = {r"run\.steps=\d+": "run.steps=2", r"data\.crop=\d+": "data.crop=32", r"data\.batch=\d+": "data.batch=2"}
    for pattern, new in shorter.items():
        assert re.search(pattern, words)
        words = re.sub(pattern, new, words)
    shutil.copytree(ROOT / "configs/isbi2012", tmp_path / "configs/isbi2012")
    (tmp_path / "data").mkdir()
    write_stack(tmp_path / "data/isbi2012")
    shell = f'set -e\nvitrail() {{ {shlex.quote(sys.executable)} -m vitrail "$@"; }}\n{words}'
    code, output = run("bash", "-c", shell, cwd=tmp_path, timeout=500)
    assert code == 0, output[-3000:]
    assert output.count("rand_f_score:") == 2
    for name in ("look.png", "membranes.png", "membranes.ome.tif", "membranes-scratch.ome.tif"):
        assert (tmp_path / name).exists()


@pytest.mark.slow
def test_the_whole_goes_on_where_it_was(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    isbi = write_stack(tmp_path / "isbi2012")
    out, runs = tmp_path / "out", tmp_path / "runs"
    tiny = [
        "run.steps=2",
        "data.crop=32",
        "data.batch=2",
        "model.encoder.width=32",
        "log.pictures=off",
        "run.device=cpu",
    ]
    words = ["--cpu", "--isbi", str(isbi), "--out", str(out), "--runs", str(runs), "--seeds", "1", "--keys", *tiny]
    assert script.main([*words, "--seconds", "0"]) == script.STOPPED  # the clock has gone on: none is begun
    assert script.main(words) == 0
    stored = json.loads((out / "isbi2012_cpu.json").read_text())
    assert list(stored["cells"]) == ["pretrain-0", "scratch-3-0", "pretrained-3-0"]
    for cell in list(stored["cells"].values())[1:]:
        assert cell["status"] == "ok", cell
        assert 0 <= cell["metrics"]["rand_f_score"] <= 1
        assert 0 <= cell["metrics"]["dice_membrane"] <= 1
    assert (out / "isbi2012_cpu.png").stat().st_size > 10_000
    assert "| 3 | pre-training | 1 |" in capsys.readouterr().out
    # What is lost is made again from the runs, and trained no more; results of other keys are not mixed in.
    del stored["cells"]["pretrained-3-0"]
    (out / "isbi2012_cpu.json").write_text(json.dumps(stored))
    before = (runs / "pretrained-3-0/metrics.jsonl").read_text()
    assert script.main(words) == 0
    again = (runs / "pretrained-3-0/metrics.jsonl").read_text()
    assert sum('"event": "train"' in line for line in again.splitlines()) == before.count('"event": "train"')
    with pytest.raises(SystemExit, match="had other settings"):
        script.main([*words, "data.batch=3"])
    with pytest.raises(SystemExit, match=r"image\.tif is not there"):
        script.main([*words[:2], str(tmp_path), *words[3:]])
