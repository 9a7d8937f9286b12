"""What people swap is added by one file, and the page on each kind shows exactly that file."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT, events, losses, tiny_recipe, write_recipe

from vitrail import cli
from vitrail.recipe import kinds

# Slot, name of the kind, and the page that shows its file.
FILES = (
    ("source", "beamline", "plugins.md"),
    ("optimizer", "signs", "plugins.md"),
    ("schedule", "stairs", "plugins.md"),
    ("model", "strongest", "plugins.md"),
    ("model", "tiny", "plugins.md"),
    ("objective", "focal", "plugins.md"),
    ("logger", "diary", "logging.md"),
    ("augmentation", "dead_lines", "augment.md"),
    ("sampler", "noisy", "diffusion.md"),
)
IMAGES = {"kind": "synthetic", "shape": [16, 16], "items": 16}


def shown_file(slot: str, name: str, page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert f"`my_lab/{name}.py`" in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = [block for block in blocks if f'kinds.register("{slot}", "{name}"' in block]
    return code


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own, whose kinds are forgotten afterwards."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds, "_registered", {slot: {} for slot in kinds.BUILT_IN})
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "my_lab"]:
        del sys.modules[module]


def call(*words: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    assert not ended.value.code


def recipe_for(slot: str, name: str, lab: Path) -> dict[str, Any]:
    """A training of two steps that names the kind."""
    image = {"crop": 16, "batch": 4, "train": [IMAGES], "valid": [IMAGES], "augment": {}}
    encoder = {"width": 16, "depth": 1, "heads": 2, "patch": 4}
    tree = tiny_recipe(lab / "none", lab / "run", run__steps=2, checkpoint__every=2, eval__every=2)
    tree["data"] |= image
    tree |= {"model": {"kind": "vit", **encoder}, "objective": {"kind": "classify"}}
    if slot == "source":
        np.random.default_rng(0).integers(0, 255, (40, 40, 40), np.uint8).tofile(lab / "scan.cube")
        entry = {"kind": "beamline", "path": "scan.cube", "voxel_size": [8, 8, 8], "unit": "nm"}
        return tiny_recipe(lab, lab / "run", data__train=[entry], data__valid=[entry], run__steps=2)
    if slot == "sampler":
        flow = {"kind": "flow", "sampling": {"sampler": {"kind": "noisy", "share": 0.2}, "steps": 3}}
        return tree | {"model": {"kind": "dit", **encoder}, "objective": flow}
    changes: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": {"kind": "signs", "lr": 1e-3}},
        "schedule": {"schedule": {"kind": "stairs", "at": ["50%"], "gamma": 0.5}},
        "model": {"model": {"kind": "strongest", **encoder} if name == "strongest" else {"kind": "tiny", "width": 8}},
        "objective": {"objective": {"kind": "focal", "gamma": 1.0}},
        "logger": {"log": {"every": 1, "to": [{"kind": "diary", "path": "diary.txt"}]}},
        "augmentation": {"data": {**image, "augment": {"more": [{"kind": "dead_lines", "share": 0.5}]}}},
    }
    return tree | changes[slot]


@pytest.mark.parametrize(("slot", "name", "page"), FILES)
def test_one_file_adds_a_kind(slot: str, name: str, page: str, lab: Path) -> None:
    (lab / "my_lab" / f"{name}.py").write_text(shown_file(slot, name, page))
    recipe = write_recipe(lab / "recipe.yaml", recipe_for(slot, name, lab))
    plugin = ("--plugin", f"my_lab.{name}")
    call("train", recipe, "--quiet", *plugin)
    assert np.isfinite(losses(lab / "run")).all()
    assert name in kinds.known(slot)
    if slot == "schedule":
        rates = [event["lr"] for event in events(lab / "run", "train")]
        assert rates == [rates[0], rates[0] / 2]  # at half of the two steps
    if slot == "logger":
        assert "train step 2: loss=" in (lab / "diary.txt").read_text()
    if slot == "sampler":
        for number, words in enumerate([(), ("--sampler", "noisy"), ("--sampler", "euler")]):
            out = ("--out", lab / f"{number}", "--format", "npy", "--number", 1)
            call("sample", lab / "run", *out, "--quiet", *words, *plugin)
        by_recipe, by_name, euler = (np.load(lab / f"{number}" / "samples" / "00000.npy") for number in range(3))
        assert not np.array_equal(by_recipe, by_name)  # another share of new noise
        assert not np.array_equal(by_name, euler)
