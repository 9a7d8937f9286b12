"""`vitrail export` from the outside: the commands and the code of its page, and words for people."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from predicting import write_em
from support import ROOT

PAGE = (ROOT / "docs/export.md").read_text(encoding="utf-8")
SHORT = ("run.steps=2", "eval.every=2", "eval.samples=2", "checkpoint.every=2", "log.pictures=off", "data.batch=2")
NEEDS = {"timm": "torchvision", "onnxruntime": "onnxruntime"}  # what else must be there


def call(words: list[str]) -> int:
    from vitrail import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


def is_there(module: str) -> bool:
    """Whether a module can be used: timm needs a torchvision that fits PyTorch."""
    try:
        if importlib.util.find_spec(NEEDS.get(module, module)) is None:
            return False
        return importlib.import_module(module) is not None
    except (ImportError, RuntimeError):
        return False


def test_the_page_works_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    ran: list[str] = []
    for kind, block in re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.M | re.S):
        if kind == "python":
            used = set(re.findall(r"^(?:import|from) (\w+)", block, re.M))
            if all(map(is_there, used)):
                exec(compile(block, "docs/export.md", "exec"), {})
                ran += sorted(used)
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)[1:]
            if words[:2] == ["data", "generate"] and words[2] == "data/em.zarr":
                write_em(tmp_path / "data/em.zarr", shape=(48, 48, 160))
                continue
            if "onnx" in words and not all(map(is_there, ("onnx", "onnxscript", "onnxruntime"))):
                assert call(words) == 2
                continue
            assert call([*words, *(SHORT if words[0] == "train" else ())]) == 0, line
            if words[0] == "export":
                assert Path(words[words.index("--out") + 1]).exists()
    assert {"vitrail", "torch"} <= {*ran}


def test_words_and_facts_of_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["data", "generate", "digits", "--kind", "digits"]) == 0
    recipe = str(ROOT / "configs/digits/vit.yaml")
    parts = [f"data.{part}=[{{path: digits/{part}, kind: image_folder}}]" for part in ("train", "valid")]
    assert call(["train", recipe, *parts, *SHORT, "run.dir=run", "model.positions=sincos"]) == 0
    capsys.readouterr()
    assert call(["export", "run", "--out", "by-itself"]) == 0
    told = capsys.readouterr()
    assert told.out == "by-itself\n"
    assert "largest difference from the model's outputs: 0; open it with vitrail.load(" in told.err
    assert call(["export", "run", "--out", "for-timm", "--to", "timm", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 2
    assert facts["difference"] < 1e-5
    assert call(["export", "run", "--out", "for-timm", "--to", "timm"]) == 2
    assert "for-timm exists and is not overwritten" in capsys.readouterr().err
    assert call(["export", "run", "--out", "hf", "--to", "huggingface"]) == 2
    assert "model.cls_token: false is nothing that Hugging Face's ViT can say" in capsys.readouterr().err
