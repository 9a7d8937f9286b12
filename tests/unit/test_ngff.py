"""NGFF metadata: versions, axes, composed transforms, units, and paths that must not escape."""

import json
from pathlib import Path
from typing import Any

import pytest

from vitrail.data.formats.ngff import find_images, read_multiscale, safe_join
from vitrail.errors import UserError

ZYX = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]


def scale(*values: float) -> dict[str, Any]:
    return {"type": "scale", "scale": list(values)}


def translation(*values: float) -> dict[str, Any]:
    return {"type": "translation", "translation": list(values)}


def level(path: str, *transforms: dict[str, Any]) -> dict[str, Any]:
    return {"path": path, "coordinateTransformations": list(transforms)}


def save(group: Path, entry: dict[str, Any], version: str = "0.5", **more: Any) -> Path:
    """Write only the metadata of an image group."""
    group.mkdir(parents=True, exist_ok=True)
    if version == "0.4":
        (group / ".zgroup").write_text('{"zarr_format": 2}')
        (group / ".zattrs").write_text(json.dumps({"multiscales": [{"version": "0.4", **entry}], **more}))
    else:
        attributes = {"ome": {"version": version, "multiscales": [entry], **more}}
        (group / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}))
    return group


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_versions_say_the_same(tmp_path, version: str) -> None:
    entry = {
        "axes": ZYX,
        "datasets": [
            level("s0", scale(8, 4, 4)),
            level("deep/s1", scale(16, 8, 8), translation(4, 2, 2)),
        ],
    }
    image = read_multiscale(save(tmp_path, entry, version))
    assert image.version == version
    assert [axis.name for axis in image.axes] == ["z", "y", "x"]
    assert image.unit() == "nanometer"
    assert image.spacing(1) == (16, 8, 8)
    assert image.levels[0].translation == (0, 0, 0)
    assert image.levels[1].translation == (4, 2, 2)
    assert image.array_path(1) == tmp_path / "deep" / "s1"
    assert image.channels is None


def test_level_transform_comes_first(tmp_path) -> None:
    entry = {
        "axes": ZYX,
        "datasets": [level("0", scale(2, 2, 2), translation(1, 1, 1))],
        "coordinateTransformations": [scale(10, 20, 30), translation(5, 5, 5)],
    }
    only = read_multiscale(save(tmp_path, entry)).levels[0]
    assert only.scale == (20, 40, 60)
    assert only.translation == (15, 25, 35)


def test_time_and_channels(tmp_path) -> None:
    axes = [{"name": "t", "type": "time", "unit": "second"}, {"name": "c", "type": "channel"}, *ZYX]
    entry = {"axes": axes, "datasets": [level("0", scale(0.5, 1, 8, 4, 4))]}
    image = read_multiscale(save(tmp_path, entry, omero={"channels": [{"label": "dapi"}, {"label": "actin"}]}))
    assert (image.find("time"), image.find("channel"), image.spatial) == (0, 1, (2, 3, 4))
    assert image.spacing(0) == (8, 4, 4)
    assert image.channels == ("dapi", "actin")


def test_missing_units_stay_unknown_and_mixed_ones_are_refused(tmp_path) -> None:
    bare = [{"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
    image = read_multiscale(save(tmp_path / "bare", {"axes": bare, "datasets": [level("0", scale(1, 1))]}))
    assert image.unit() is None
    mixed = [{**bare[0], "unit": "nanometer"}, {**bare[1], "unit": "micrometer"}]
    image = read_multiscale(save(tmp_path / "mixed", {"axes": mixed, "datasets": [level("0", scale(1, 1))]}))
    with pytest.raises(UserError, match="different units"):
        image.unit()


def test_what_0_6_adds_is_understood(tmp_path) -> None:
    """Axes come from the system that the levels are mapped to; the way on to another system is not taken."""
    sequence = {
        "type": "sequence",
        "input": {"path": "0"},
        "output": {"name": "intrinsic"},
        "transformations": [scale(3, 3), translation(1, 2)],
    }
    entry = {
        "coordinateSystems": [
            {"name": "stage", "axes": [{"name": "v", "type": "space"}, {"name": "u", "type": "space"}]},
            {"name": "intrinsic", "axes": ZYX[1:]},
        ],
        "datasets": [level("0", sequence)],
        "coordinateTransformations": [{**scale(10, 10), "input": "intrinsic", "output": "stage"}],
    }
    image = read_multiscale(save(tmp_path, entry, "0.6"))
    assert [axis.name for axis in image.axes] == ["y", "x"]
    assert image.levels[0].scale == (3, 3)
    assert image.levels[0].translation == (1, 2)


@pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b", "", "..", 7, "a\\..\\b"])
def test_paths_must_stay_inside(tmp_path, path: Any) -> None:
    with pytest.raises(UserError, match="does not lie inside"):
        safe_join(tmp_path, path)
    with pytest.raises(UserError, match="does not lie inside"):
        read_multiscale(save(tmp_path / "group", {"axes": ZYX, "datasets": [level(path, scale(1, 1, 1))]}))


def test_links_must_stay_inside(tmp_path) -> None:
    (tmp_path / "secret").mkdir()
    group = save(tmp_path / "group", {"axes": ZYX, "datasets": [level("s0", scale(1, 1, 1))]})
    (group / "s0").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="leads out"):
        read_multiscale(group)
    (group / "s0").unlink()
    (group / "real").mkdir()
    (group / "s0").symlink_to(group / "real")
    assert read_multiscale(group).array_path(0) == group / "s0"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"axes": ZYX, "datasets": [level("0")]}, "voxel size is unknown"),
        ({"axes": ZYX, "datasets": [level("0", scale(1, 1))]}, "3 numbers"),
        ({"axes": ZYX, "datasets": [level("0", scale(1, 0, 1))]}, "positive"),
        ({"axes": ZYX, "datasets": [level("0", {"type": "affine", "affine": []})]}, "'affine'"),
        ({"axes": ZYX, "datasets": []}, "no levels"),
        ({"axes": [*ZYX, *ZYX], "datasets": [level("0", scale(1, 1, 1))]}, "2 to 5 axes"),
        ({"axes": ["z", "y", "x"], "datasets": [level("0", scale(1, 1, 1))]}, "before version 0.4"),
        ({"datasets": [level("0", scale(1, 1, 1))]}, "2 to 5 axes"),
        ({"axes": ZYX}, "not valid NGFF"),
        ({"axes": ZYX, "datasets": "s0"}, "not valid NGFF"),
    ],
)
def test_wrong_metadata_is_explained(tmp_path, entry: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_multiscale(save(tmp_path, entry))


def test_what_is_not_an_image_is_explained(tmp_path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_multiscale(tmp_path / "nowhere.zarr")
    (tmp_path / "plain").mkdir()
    with pytest.raises(UserError, match="not a zarr group"):
        read_multiscale(tmp_path / "plain")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{nope")
    with pytest.raises(UserError, match="not valid JSON"):
        read_multiscale(tmp_path / "broken")


def test_a_hierarchy_points_to_its_images(tmp_path) -> None:
    root = tmp_path / "big.zarr"
    for group in (root, root / "recon-1", root / "recon-1" / "em"):
        group.mkdir()
        (group / ".zgroup").write_text("{}")
    image = save(root / "recon-1" / "em" / "fibsem", {"axes": ZYX, "datasets": [level("s0", scale(8, 8, 8))]}, "0.4")
    (image / "s0").mkdir()
    (image / "s0" / ".zarray").write_text("{}")
    assert find_images(root) == [image]
    with pytest.raises(UserError, match=r"such as .*recon-1/em/fibsem"):
        read_multiscale(root)
    with pytest.raises(UserError, match=r"one level of an image; give .*fibsem as path"):
        read_multiscale(image / "s0")
