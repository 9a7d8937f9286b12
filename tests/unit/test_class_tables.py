"""What an evaluation says of classes: what was taken for what, scores of each, and the samples that did worst."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import events, tiny_recipe, torchrun
from support import run as run_command

import vitrail
from vitrail.objectives import counts as counting
from vitrail.objectives.counts import count_classes, tables_of
from vitrail.report import write_report
from vitrail.report.page import list_classes

VIT = {"kind": "vit", "ndim": 2, "width": 24, "depth": 1, "heads": 2, "patch": 4}


def folders(place: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, level in (("dark", 30), ("light", 200)):
        (place / name).mkdir(parents=True)
        for number in range(6):
            image = rng.integers(level - 20, level + 20, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(image).save(place / name / f"{number}.png")
    return place


def classify(images: Path, run: Path, **changes: Any) -> dict[str, Any]:
    options = {"run__steps": 4, "checkpoint__every": "off", "eval__every": 4, "eval__samples": 12, "log__pictures": 4}
    tree = tiny_recipe(images, run, **{**options, **changes}, model=VIT, objective={"kind": "classify"})
    entry = [{"path": str(images)}]
    tree["data"] = {"train": entry, "valid": entry, "crop": 16, "batch": 4}
    return tree


def test_pairs_are_counted_and_of_many_classes_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, labels = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 2, 0])
    counts = {name: value.tolist() for name, value in count_classes(predicted, labels, 3).items()}
    table = tables_of(counts, ("a", "b", "c"), "samples")
    assert table["pairs"] == [[1, 0, 1], [0, 1, 0], [0, 1, 1]]  # a row is what is true
    assert (table["true"], table["predicted"], table["right"]) == ([2, 1, 2], [1, 2, 2], [1, 1, 1])
    monkeypatch.setattr(counting, "MOST_PAIRS", 2)
    counts = {name: value.tolist() for name, value in count_classes(predicted, labels, 3).items()}
    assert tables_of(counts, ("a", "b", "c"), "samples") == {k: v for k, v in table.items() if k != "pairs"}


def test_a_run_shows_classes_and_its_worst_samples(tmp_path: Path) -> None:
    images = folders(tmp_path / "images")
    vitrail.train(classify(images, tmp_path / "run"), quiet=True)
    [found] = events(tmp_path / "run", "classes")
    assert found["names"] == ["dark", "light"]
    assert found["true"] == [6, 6]
    assert sum(map(sum, found["pairs"])) == sum(found["predicted"]) == 12
    [evaluated] = events(tmp_path / "run", "eval")
    assert sum(found["right"]) / 12 == pytest.approx(evaluated["metrics"]["accuracy"])
    assert (tmp_path / "run/pictures/classify-worst-00000004.png").is_file()
    html = write_report(tmp_path / "run").read_text()
    for words in ("Worst samples", "the worst 12 of 12", "Scores of each class", "What was taken for what"):
        assert words in html


def test_ranks_find_the_same_classes_and_worst_samples(tmp_path: Path) -> None:
    images = folders(tmp_path / "images")
    tables = []
    for ranks, layout in ((1, "data"), (2, "data"), (2, "tensor")):
        run = tmp_path / f"{ranks}-{layout}"
        recipe = tmp_path / f"{run.name}.yaml"
        tree = classify(images, run, run__steps=1, eval__every=1)
        recipe.write_text(json.dumps(tree | ({"parallel": {"tensor": 2}} if layout == "tensor" else {})))
        code, output = run_command(*torchrun(ranks, "-m", "vitrail", "train", recipe))
        assert code == 0, output[-3000:]
        [found] = events(run, "classes")
        tables.append({name: found[name] for name in ("pairs", "true", "predicted", "right")})
    assert tables[0] == tables[1]
    assert tables[0] == tables[2]  # which share samples, and would count each twice


def test_the_worst_samples_are_drawn_where_entries_have_different_variables(tmp_path: Path) -> None:
    """Pictures of grey and of coloured samples make no batch."""
    colours = folders(tmp_path / "colours")
    for image in colours.rglob("*.png"):
        grey = tmp_path / "grey" / image.relative_to(colours)
        grey.parent.mkdir(parents=True, exist_ok=True)
        Image.open(image).convert("L").save(grey)
    tree = classify(colours, tmp_path / "run", eval__samples=24)
    entries = [{"path": str(tmp_path / name)} for name in ("colours", "grey")]
    tree["model"] = VIT | {"variables": {"known": ["grey", "red", "green", "blue"]}}
    tree["data"] |= {"train": entries, "valid": entries}
    vitrail.train(tree, quiet=True)
    assert not events(tmp_path / "run", "warning")
    assert (tmp_path / "run/pictures/classify-worst-00000004.png").is_file()


def test_voxels_that_are_not_scored_are_not_counted(volume: Path, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 32), dtype=np.uint8)
    labels = (image > 128).astype(np.uint8)
    labels[:, :4] = 255
    np.save(tmp_path / "a.npy", image)
    np.save(tmp_path / "b.npy", labels)
    entry = [{"path": str(tmp_path / "a.npy"), "labels": str(tmp_path / "b.npy")}]
    options = {"run__steps": 1, "checkpoint__every": "off", "eval__every": 1, "eval__samples": 8, "log__pictures": 1}
    objective = {"kind": "segment", "names": ["low", "high"], "ignore": 255}
    model = {"kind": "unetr", "encoder": {"width": 16, "depth": 4, "heads": 2, "patch": 8}, "ndim": 3}
    tree = tiny_recipe(tmp_path / "a.npy", tmp_path / "run", **options, objective=objective, model=model)
    tree["data"] = {"train": entry, "valid": entry, "crop": 16, "batch": 2}
    vitrail.train(tree, quiet=True)
    [found] = events(tmp_path / "run", "classes")
    [evaluated] = events(tmp_path / "run", "eval")
    dices = [2 * r / (t + p) for r, t, p in zip(found["right"], found["true"], found["predicted"], strict=True)]
    metrics = evaluated["metrics"]
    assert dices == pytest.approx([metrics["dice_low"], metrics["dice_high"]], nan_ok=True)
    assert (tmp_path / "run/pictures/segment-worst-00000001.png").is_file()


@pytest.mark.parametrize(
    "line",
    [
        {"names": ["a"], "true": None},
        {"names": ["a", "b"], "true": [1], "predicted": [1], "right": [1]},
        {"names": "ab", "true": "ab", "predicted": "ab", "right": "ab"},
        {},
    ],
)
def test_strange_lines_make_no_table(line: dict[str, Any]) -> None:
    assert list_classes([{"event": "classes", "step": 1} | line]) is None


def test_strange_pairs_are_left_out() -> None:
    whole = {"event": "classes", "step": 1, "names": ["a", 2], "true": [0, "x"], "predicted": [0, 1], "right": [0, 1]}
    for pairs in (None, [[1]], [[1, 2], 3], "ab"):
        found = list_classes([whole | {"pairs": pairs}])
        assert found is not None
        assert found["pairs"] == []
    found = list_classes([whole | {"pairs": [[0, 0], [1, None]]}])
    assert found is not None
    assert [[cell[1] for cell in cells] for _, cells in found["pairs"]] == [["·", "·"], ["100", "·"]]
