"""`make demo` from the outside: all of its steps, shortened, on a small volume."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from predicting import write_em
from support import LONG, ROOT, end, environment, events, eventually, start

from vitrail.recipe import yaml

KEYS = ("run.steps=2", "data.batch=2", "eval.samples=2", "log.pictures=off", "run.device=cpu")


def demo(place: Path, *keys: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "configs/demo/demo.py", *keys],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    return done.returncode, done.stdout, done.stderr


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "configs/demo", tmp_path / "configs/demo")
    write_em(tmp_path / "data/em.zarr", shape=(32, 36, 160))
    return tmp_path


def test_the_demo_goes_all_the_way_beside_earlier_runs(place: Path) -> None:
    (place / "runs/demo-mae3d").mkdir(parents=True)
    (place / "runs/demo-mae3d/mine.txt").write_text("of an earlier run")
    code, told, problems = demo(place, *KEYS)
    assert code == 0, problems
    first, second = place / "runs/demo-mae3d-2", place / "runs/demo-finetune3d"
    (begun,) = events(second, "init")
    assert "runs/demo-mae3d-2" in str(begun)
    classes = zarr.open_group(str(second / "held-out.ome.zarr"), mode="r")["s0"]
    assert classes.shape == (32, 36, 32)
    assert np.asarray(classes).max() < 4
    for path in (second / "held-out.png", second / "report.html", first / "report.html"):
        assert path.stat().st_size > 1000
        assert str(path.relative_to(place)) in told
    commands = [line.split()[2] for line in told.splitlines() if line.startswith("$ ")]
    assert commands == ["train", "train", "predict"]
    assert f"Dice {events(second, 'eval')[-1]['metrics']['dice_membrane']:.2f} of membranes" in told
    assert [path.name for path in (place / "runs/demo-mae3d").iterdir()] == ["mine.txt"]


def test_a_step_of_the_demo_that_fails_is_the_last(place: Path) -> None:
    code, told, problems = demo(place, "run.stepz=2")
    assert code == 2
    assert "did you mean" in problems
    assert "Traceback" not in problems
    assert told.count("$ vitrail") == 1
    assert not (place / "runs").exists()


def test_ctrl_c_ends_the_demo_when_its_step_is_saved(place: Path) -> None:
    words = (sys.executable, "configs/demo/demo.py", *KEYS, "run.steps=100000")
    process = start(*words, cwd=place)
    try:
        assert eventually(lambda: '"train"' in read(place / "runs/demo-mae3d/metrics.jsonl"))
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=LONG)
    finally:
        end(process)
    assert process.returncode == 75, told
    assert told.count("$ vitrail") == 1
    assert "Traceback" not in told
    assert list((place / "runs/demo-mae3d/checkpoints").glob("step-*"))


def test_make_demo_is_this_script_with_its_keys(tmp_path: Path) -> None:
    # Without the folders that a make around this one is told of.
    words = ["make", "--no-print-directory", "-n", "demo", f"VENV={tmp_path}", "KEYS=run.steps=2"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=True).stdout
    assert told.splitlines()[-1].split() == [f"{tmp_path}/bin/python", "configs/demo/demo.py", "run.steps=2"]


def test_the_recipe_on_the_tutorial_is_that_of_the_demo() -> None:
    page = (ROOT / "docs/tutorials/segment.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    recipe = yaml.read(ROOT / "configs/demo/finetune3d.yaml")
    for section, keys in yaml.parse(block).items():
        for key, value in keys.items():
            assert recipe[section][key] == value


@pytest.mark.slow
def test_the_page_of_instances_works_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty folder, as it stands, but for fewer voxels and steps; its recipe is that of configs/demo."""
    from vitrail import cli

    page = (ROOT / "docs/tutorials/instances.md").read_text(encoding="utf-8")
    text = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S))
    monkeypatch.chdir(tmp_path)
    for name, written in re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF\n", text, re.M | re.S):
        Path(name).write_text(written)
        shipped = yaml.read(ROOT / "configs/demo/affinities3d.yaml")
        shipped["run"]["name"] = "cells"
        shipped.pop("log")
        assert yaml.read(Path(name)) == shipped
    shorter = {"generate": ["--shape", "32,36,160"], "train": [*KEYS, "--quiet"], "predict": ["--quiet"]}
    for line in re.sub(r"^cat .*?^EOF\n", "", text, flags=re.M | re.S).splitlines():
        name, *words = shlex.split(line)
        if name != "vitrail":  # pip, which has been run
            continue
        with pytest.raises(SystemExit) as ended:
            cli.main(words + [word for verb, more in shorter.items() if verb in words[:2] for word in more])
        assert not ended.value.code, line
    for path in ("look.png", "held-out.png", "held-out.ome.zarr", "runs/cells/report.html"):
        assert Path(path).exists()
