"""What the code computed before still comes out: first batches and losses of every shipped recipe, and a stored run.

Bits are compared where golden.json knows this kind of machine (`python tests/golden/make.py` adds it, from a commit
that is known to be right); elsewhere batches are the same bytes all the same, and losses nearly so.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import cases
from support import ROOT, losses

import vitrail
from vitrail.report import write_report

KNOWN: dict[str, dict[str, Any]] = json.loads(cases.GOLDEN.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return cases.train_all(tmp_path_factory.mktemp("golden"))


def test_every_shipped_recipe_is_among_them() -> None:
    shipped = {str(path.relative_to(ROOT / "configs"))[:-5] for path in (ROOT / "configs").rglob("*.yaml")}
    assert shipped == set(cases.RECIPES)
    assert shipped == {name for recipes in KNOWN.values() for name in recipes}


@pytest.mark.parametrize("name", cases.RECIPES)
def test_first_batches_and_losses(found: dict[str, dict[str, Any]], name: str) -> None:
    machine = cases.machine()
    same = name in KNOWN.get(machine, {})  # else it was computed on other machines alone
    expected = KNOWN[machine if same else next(other for other in KNOWN if name in KNOWN[other])][name]
    if same or name not in cases.RESAMPLED | cases.COMPUTED:
        assert found[name]["batches"] == expected["batches"]
    if same:
        assert found[name]["losses"] == expected["losses"]
    was, now = ([float.fromhex(loss) for loss in each["losses"]] for each in (expected, found[name]))
    np.testing.assert_allclose(now, was, rtol=0.02 if "bf16" in (ROOT / f"configs/{name}.yaml").read_text() else 1e-4)


def test_a_run_of_an_early_version_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is evaluated, resumed to the losses that it had before it was stopped, reported and loaded."""
    cases.write_data(tmp_path)
    folder = Path(shutil.copytree(cases.RUN, tmp_path / "runs/old"))
    expected = losses(folder)
    assert len(expected) == 10
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = next(line for line in metrics if line["event"] == "eval" and line["step"] == 5)["metrics"]
    monkeypatch.chdir(tmp_path)
    assert vitrail.evaluate("runs/old")["metrics"] == pytest.approx(measured, rel=1e-5)
    assert vitrail.train("runs/old", quiet=True).step == 10
    found = losses(folder)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    if cases.machine() == cases.RUN_MACHINE:
        assert list(found) == list(expected)
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000005", "step-00000010"]
    assert "early stop" not in write_report(folder).read_text()
    assert sum(p.numel() for p in vitrail.load("runs/old").parameters()) > 0
