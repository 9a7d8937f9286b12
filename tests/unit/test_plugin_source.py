"""A user's own source, as the page on plugins shows it: by --plugin, by entry point, and what is said without."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from support import ROOT, environment, tiny_recipe, vitrail, write_recipe

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's module and a scan that it reads."""
    folder = tmp_path_factory.mktemp("lab")
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]  # the others are other kinds
    assert len(code.splitlines()) <= 20
    (folder / "my_lab").mkdir()
    (folder / "my_lab" / "__init__.py").touch()
    (folder / "my_lab" / "beamline.py").write_text(code)
    np.random.default_rng(0).integers(0, 255, (40, 40, 40), np.uint8).tofile(folder / "scan.cube")
    return folder


def call(lab: Path, *words: str | Path, more: Path | None = None) -> tuple[int, str]:
    paths = [str(ROOT / "tests"), str(lab), *([str(more)] if more else [])]
    return vitrail(
        *words, cwd=lab, env=environment(PYTHONPATH=os.pathsep.join(paths), VITRAIL_CACHE=str(lab / "cache"))
    )


def test_a_plugin_is_read_trained_on_and_asked_for(lab: Path) -> None:
    code, said = call(
        lab, "data", "inspect", "scan.cube", "--kind", "beamline", "--plugin", "my_lab.beamline", "--json"
    )
    assert code == 0, said
    facts = json.loads(said[said.index("{") :])
    assert (facts["kind"], facts["shape"], facts["axes"]) == ("beamline", [40, 40, 40], ["z", "y", "x"])

    entry = {"kind": "beamline", "path": "scan.cube", "voxel_size": [8, 8, 8], "unit": "nm"}
    changes = {"data__train": [entry], "data__valid": [entry], "run__steps": 2}
    recipe = write_recipe(lab / "recipe.yaml", tiny_recipe(lab, lab / "run", **changes))
    code, said = call(lab, "train", recipe, "--plugin", "my_lab.beamline")
    assert code == 0, said
    for verb in ("train", "eval"):
        code, said = call(lab, verb, lab / "run")
        assert code == 2, said
        assert f"{lab / 'run'} was begun with --plugin my_lab.beamline, and no run imports code unasked" in said


def test_an_entry_point_needs_no_plugin(lab: Path, tmp_path: Path) -> None:
    """What pip would write for the page's pyproject.toml."""
    (announced,) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n(.*?)\n```', PAGE, re.DOTALL)
    info = tmp_path / "my_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{announced[0]}]\n{announced[1].replace(chr(34), '')}\n")
    code, said = call(lab, "data", "inspect", "scan.cube", "--kind", "beamline", "--json", more=tmp_path)
    assert code == 0, said
    assert json.loads(said[said.index("{") :])["shape"] == [40, 40, 40]
