"""`vitrail embed` and `vitrail probe` as their page shows them, and their words for people."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from predicting import train_run, write_em
from support import ROOT, tiny_recipe, vitrail

import vitrail as library


def test_commands_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vitrail import cli

    page = (ROOT / "docs/probe.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    calls = [words for words in map(shlex.split, lines) if words[1] in ("probe", "embed")]
    assert len(calls) > 6
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for part in ("train", "valid"):
        for digit in range(3):
            folder = tmp_path / "data/digits" / part / str(digit)
            folder.mkdir(parents=True)
            for number in range(5):
                Image.fromarray(rng.integers(0, 255, (8, 8)).astype(np.uint8)).save(folder / f"{number}.png")
    write_em(tmp_path / "data/em.zarr", shape=(24, 24, 80))
    (tmp_path / "runs").mkdir()
    entries = [[{"path": f"data/digits/{part}", "kind": "image_folder"}] for part in ("train", "valid")]
    model = {"kind": "vit", "ndim": 2, "width": 16, "depth": 1, "heads": 2, "patch": 4}
    changes: dict[str, Any] = {"data__train": entries[0], "data__valid": entries[1], "data__augment": {}}
    changes |= {"model": model, "objective": {"kind": "classify"}, "data__crop": 8, "run__steps": 1}
    library.train(tiny_recipe(tmp_path, tmp_path / "runs/digits-vit", **changes), quiet=True)
    train_run(tmp_path / "runs", tmp_path / "data/em.zarr", "demo-mae3d")
    shutil.copytree(ROOT / "configs/demo", tmp_path / "configs/demo")
    recipe = (ROOT / "configs/demo/unetr3d.yaml").read_text(encoding="utf-8")
    assert "labels: structures" in recipe
    for words in calls:
        with pytest.raises(SystemExit) as ended:
            cli.main([*words[1:], "--quiet", *(["--steps", "3"] if words[1] == "probe" else [])])
        assert not ended.value.code, words
        told = capsys.readouterr().out
        if words[1] == "embed":
            assert Path(words[words.index("--out") + 1]).exists()
        else:
            assert re.search(r"^attentive  +[01]\.\d{3} +[01]\.\d{3} to [01]\.\d{3}", told, re.M), told
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(code, {})
    assert capsys.readouterr().out.count(".png") == 3


def test_wrong_input_is_a_sentence(tmp_path: Path) -> None:
    for words, sentence in (
        (["probe", tmp_path / "none"], "give the folder of a run"),
        (["embed", tmp_path / "none", tmp_path, "--out", tmp_path / "f.zarr"], "give the folder of a run"),
    ):
        code, output = vitrail(*words)
        assert code == 2, output
        assert sentence in output
        assert "Traceback" not in output
