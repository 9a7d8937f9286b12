"""Predictions in files beside labels: Dice, IoU and the Rand score of objects, by hand and as scikit-image has it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from typer.testing import CliRunner

from vitrail.cli import app
from vitrail.errors import UserError
from vitrail.infer.compare import compare
from vitrail.infer.objects import Pairs, count_pairs, find_objects, thin

MAP = "label_map={255: 0, 0: 1}"


def cells(*shape: int) -> np.ndarray:
    """Labels as ISBI-2012 has them: cells are 255, and membranes, a grid of lines, are 0."""
    labels = np.full(shape, 255, np.uint8)
    labels[:, ::9] = labels[:, :, ::13] = 0
    return labels


def write(path: Path, values: np.ndarray, **options: Any) -> str:
    tifffile.imwrite(path, values, photometric="minisblack", **options)
    return str(path)


def random_border(*shape: int, seed: int = 0, share: float = 0.4) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < share


def test_pairs_by_hand() -> None:
    true = np.array([1, 1, 1, 0, 2, 2])
    found = np.array([1, 1, 2, 2, 2, 2])
    # of the truth 3 * 2 + 2 * 1 pairs; found are 2 * 1 + 3 * 2 beside the border of the truth; in both 2 * 1 + 2 * 1
    assert count_pairs(true, found) == Pairs(both=4, found=8, true=8)
    assert count_pairs(true, found).scores() == {"rand_f_score": 0.5, "rand_split": 0.5, "rand_merge": 0.5}
    assert count_pairs(true, true).scores() == {"rand_f_score": 1, "rand_split": 1, "rand_merge": 1}
    merged, split = count_pairs(true, np.ones(6, int)).scores(), count_pairs(true, np.arange(1, 7)).scores()
    assert merged == {"rand_f_score": 16 / 28, "rand_split": 1, "rand_merge": 8 / 20}
    assert split["rand_f_score"] == split["rand_split"] == 0
    assert np.isnan(split["rand_merge"])
    assert count_pairs(true, np.zeros(6, int)) == Pairs(0, 0, 8)  # all border: each voxel is alone
    assert count_pairs(np.zeros(6, int), found) == Pairs()
    assert Pairs(1, 2, 3).plus(Pairs(10, 20, 30)) == Pairs(11, 22, 33)


def test_objects_hang_together_by_faces() -> None:
    border = np.array([[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 0]], bool)
    assert find_objects(border).tolist() == [[1, 0, 2, 2], [0, 3, 0, 2], [3, 3, 0, 2]]
    spiral = np.ones((7, 7), bool)
    spiral[0, :] = spiral[:, -1] = spiral[-1, :] = spiral[2:, 0] = spiral[2, :5] = spiral[2:5, 4] = spiral[4, 2:4] = (
        False
    )
    assert find_objects(spiral).max() == 1
    assert find_objects(np.ones((2, 3), bool)).max() == 0


@pytest.mark.parametrize("shape", [(40, 50), (13, 14, 15), (200,)])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_objects_are_those_of_scipy(shape: tuple[int, ...], share: float) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    border = random_border(*shape, share=share)
    found, number = ndimage.label(~border)
    mine = find_objects(border)
    assert mine.max() == number
    pairs = set(zip(mine.ravel().tolist(), found.ravel().tolist(), strict=True))
    assert len(pairs) == number + 1  # one to one, and borders are 0 in both


def test_borders_are_thinned_until_objects_meet() -> None:
    line = np.array([[0, 1, 0, 0, 0, 2, 0, 0]])
    assert thin(line).tolist() == [[1, 1, 1, 1, 2, 2, 2, 2]]  # both reach the middle at once: the lower number has it
    corner = np.array([[2, 0, 0], [0, 0, 0], [0, 0, 1]])
    assert thin(corner).tolist() == [[2, 2, 1], [2, 1, 1], [1, 1, 1]]
    assert thin(np.zeros((2, 2), np.int64)).tolist() == [[0, 0], [0, 0]]
    objects = find_objects(random_border(9, 10, 11, share=0.8))
    grown = thin(objects)
    assert (grown > 0).all()
    assert (grown == objects)[objects > 0].all()


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_image(seed: int) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    true = find_objects(cells(1, 60, 70)[0] == 0)
    found = thin(find_objects(random_border(60, 70, seed=seed, share=0.45)))
    scores = count_pairs(true, found).scores()
    error, *sides = metrics.adapted_rand_error(true, found)
    assert 1 - scores["rand_f_score"] == pytest.approx(error, abs=1e-12)
    assert sorted(sides) == pytest.approx(sorted([scores["rand_split"], scores["rand_merge"]]), abs=1e-12)


def test_classes_in_a_file(tmp_path: Path) -> None:
    labels = cells(5, 64, 64)
    guess = (labels == 0).astype(np.uint8)
    guess[3, 9, 14:20] = 0  # a gap in a membrane between two cells of 8 x 12
    paths = write(tmp_path / "classes.tif", guess), write(tmp_path / "label.tif", labels)
    found = compare(*paths, settings=[MAP], border="membrane", slices="z", names=["cell", "membrane"])
    membrane, missed = int((labels == 0).sum()), 6
    metrics = found["metrics"]
    assert found["voxels"] == labels.size
    assert metrics["accuracy"] == 1 - missed / labels.size
    assert metrics["dice_membrane"] == 2 * (membrane - missed) / (2 * membrane - missed)
    assert metrics["iou_membrane"] == (membrane - missed) / membrane
    rows, columns = (
        [n - first - 1 for first, n in zip(cut, [*cut[1:], 64], strict=True)]
        for cut in ([*range(0, 64, 9)], [*range(0, 64, 13)])
    )
    sizes = [row * column for row in rows for column in columns]
    true = 5 * sum(size * (size - 1) for size in sizes)
    merged = 2 * 96 * 96
    assert metrics["rand_split"] == 1
    assert metrics["rand_merge"] == true / (true + merged)
    assert metrics["rand_f_score"] == 2 * true / (2 * true + merged)
    assert metrics["adapted_rand_error"] == 1 - metrics["rand_f_score"]
    assert "rand_threshold" not in metrics
    # As one volume, all slices of a column of cells are one object, and the gap merges two of them.
    assert compare(*paths, settings=[MAP], border="1")["metrics"]["rand_merge"] < metrics["rand_merge"]
    # A part of both, of which the third slice is wrong; and the same part that was predicted alone.
    part = compare(*paths, settings=[MAP, "region={z: [0, 3]}"], border="1", slices="z")
    assert part["metrics"]["rand_f_score"] == part["metrics"]["accuracy"] == 1
    alone = write(tmp_path / "alone.tif", guess[3:])
    there = compare(alone, paths[1], settings=[MAP, "region={z: [3, 5]}"], border="1", slices="z")
    assert there["voxels"] == labels[3:].size
    assert there["metrics"]["iou_class 1"] < 1


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_the_best_threshold_of_probabilities(tmp_path: Path, dtype: Any) -> None:
    labels = cells(2, 64, 64)
    likely = np.where(labels == 0, 0.85, 0.05)
    likely[1, 9, 14:20] = 0.25  # the gap is closed below 0.25
    shares = np.stack([1 - likely, likely], axis=1)
    stored = np.rint(shares * 255).astype(np.uint8) if dtype == np.uint8 else shares.astype(dtype)
    path = write(tmp_path / "shares.ome.tif", stored, metadata={"axes": "ZCYX"})
    true = write(tmp_path / "label.tif", labels)
    found = compare(path, true, settings=[MAP], border="membrane", slices="z", names=["cell", "membrane"])
    metrics, each = found["metrics"], found["rand_f_scores"]
    assert metrics["rand_threshold"] == 0.1
    assert metrics["rand_f_score"] == 1
    assert each["0.1"] == each["0.2"] == 1
    assert each["0.3"] == each["0.8"] == metrics["rand_f_score_of_classes"] < 1
    assert each["0.9"] < 0.1  # no membrane is left
    assert metrics["dice_membrane"] < 1


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    labels = write(tmp_path / "label.tif", cells(5, 64, 64))
    classes = write(tmp_path / "classes.tif", (cells(4, 64, 64) == 0).astype(np.uint8))
    with pytest.raises(UserError, match="cut the labels to what was predicted"):
        compare(classes, labels, settings=[MAP])
    region = "region={z: [0, 4]}"
    with pytest.raises(UserError, match="255 is not the number of a class"):
        compare(write(tmp_path / "p.ome.tif", np.zeros((5, 2, 64, 64), np.uint8), metadata={"axes": "ZCYX"}), labels)
    with pytest.raises(UserError, match="--border glia: expected the number of a class"):
        compare(classes, labels, settings=[MAP, region], border="glia")
    with pytest.raises(UserError, match="--border 2: expected one of the classes 0, 1, or its number"):
        compare(classes, labels, settings=[MAP, region], border="2")
    with pytest.raises(UserError, match=r"label_map = {0: 300} of .* maps to 300, which is no uint8"):
        compare(classes, labels, settings=["label_map={0: 300}", region])
    shares = write(tmp_path / "s.ome.tif", np.zeros((4, 2, 64, 64), np.float32), metadata={"axes": "ZCYX"})
    with pytest.raises(UserError, match=r"--names a, b, c: .* has channels for 2 classes alone"):
        compare(shares, labels, settings=[MAP, region], border="c", names=["a", "b", "c"])
    with pytest.raises(UserError, match="--slices w: the labels have the axes z, y, x"):
        compare(classes, labels, settings=[MAP, region], border="1", slices="w")
    with pytest.raises(UserError, match="classes are whole numbers, not float32"):
        compare(write(tmp_path / "one.tif", np.zeros((5, 64, 64), np.float32)), labels, settings=[MAP])
    with pytest.raises(UserError, match="labels are one channel of whole numbers"):
        compare(classes, write(tmp_path / "grey.tif", np.zeros((4, 64, 64), np.float32)))
    with pytest.raises(UserError, match="expected stored values and classes"):
        compare(classes, labels, settings=["label_map=3", region])


def test_classes_of_any_whole_type(tmp_path: Path) -> None:
    labels = (cells(6, 20, 20) == 0).astype(np.uint8)
    paths = [str(tmp_path / f"{name}.npy") for name in ("classes", "label")]
    np.save(paths[1], labels)
    for dtype in (np.uint64, np.int16, bool):
        np.save(paths[0], labels.astype(dtype))
        assert compare(*paths, border="1")["metrics"]["rand_f_score"] == 1


def test_items_of_folders(tmp_path: Path) -> None:
    """A class that the first item lacks may be the border; items of other names are not compared in silence."""
    with_border = cells(1, 20, 20)[0] == 0
    for folder, names in (("found", "ab"), ("true", "ab"), ("others", "ac")):
        (tmp_path / folder).mkdir()
        for name, values in zip(names, (0 * with_border, 2 * with_border), strict=True):
            write(tmp_path / folder / f"{name}.tif", values.astype(np.uint8))
    folders = [str(tmp_path / folder) for folder in ("found", "true", "others")]
    assert compare(folders[0], folders[1], border="2")["metrics"]["rand_f_score"] == 1
    with pytest.raises(UserError, match="b would be compared with c; give folders of the same items"):
        compare(folders[0], folders[2], border="2")


def test_the_verb(tmp_path: Path) -> None:
    labels = cells(2, 64, 64)
    true = write(tmp_path / "label.tif", labels)
    classes = write(tmp_path / "classes.tif", (labels == 0).astype(np.uint8))
    words = ["eval", classes, "--labels", true, "--set", MAP, "--border", "1", "--slices", "z", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"]["rand_f_score"] == 1
