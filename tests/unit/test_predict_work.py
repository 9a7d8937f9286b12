"""The place where a prediction is made: whose it is, what is left in it, and ranks that wait for one."""

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from predicting import SHAPE, UNETR, train_run, train_segmentation, write_em

import vitrail
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.infer.engine import taken_for

SMALL: dict[str, Any] = {"chunk": 8, "memory": 0.0002}  # many pillars and rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predict-work")
    write_em(place / "em.zarr")
    train_segmentation(place, place / "em.zarr")
    return place


@pytest.fixture(scope="module")
def values(place: Path) -> np.ndarray:
    return OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)


@pytest.mark.parametrize("ending", ["nii.gz", "tif", "npy"])
def test_the_watchdog_is_told_while_one_rank_writes_a_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    from vitrail.infer import outputs
    from vitrail.training.failures import SLOW_PHASE, Watchdog

    beats: list[tuple[str, float]] = []
    beat, copies = Watchdog.beat, []
    copying = outputs.Result._copying

    def note(self: Watchdog, step: int, phase: str, **options: Any) -> None:
        beat(self, step, phase, **options)
        beats.append((phase, self.limit))

    def watched(self: outputs.Result, item: int) -> Any:
        def copy(*tick: Any) -> None:
            before = len(beats)
            copying(self, item)(*tick)
            copies.append(len(beats) - before)

        return copy

    monkeypatch.setattr(Watchdog, "beat", note)
    monkeypatch.setattr(outputs.Result, "_copying", watched)
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / f"c.{ending}", **SMALL)
    assert copies == [SHAPE[0] // SMALL["chunk"]]  # once for each slab
    assert {limit for phase, limit in beats if phase == "predicting"} == {SLOW_PHASE}


def test_drafts_that_a_kill_left_are_not_published(
    place: Path, values: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.disk import draft_of
    from vitrail.infer import outputs

    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "in" / f"{name}.npy", values[0])
    publish = outputs.Result.publish

    def leave(self: outputs.Result, *tick: Any) -> None:
        draft_of(self.work / "result/a.npy").write_bytes(b"half")
        publish(self, *tick)

    monkeypatch.setattr(outputs.Result, "publish", leave)
    vitrail.predict(place / "seg", tmp_path / "in", out=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.npy", "b.npy"]


def test_what_another_call_is_just_making_is_not_removed(place: Path, tmp_path: Path) -> None:
    work = tmp_path / ".c.zarr.predict"
    work.mkdir()
    (work / "result").mkdir()
    handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being predicted by another process"):
            vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr")
    finally:
        os.close(handle)
    assert (work / "result").is_dir()
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"]


def test_no_two_items_get_one_file() -> None:
    from vitrail.infer.outputs import file_names
    from vitrail.infer.places import Frame

    names = ["a-2.png", "a.png", "a.tif", "b/a.png", "../a.png", "/etc/a.png"]
    frames = [Frame(name, (4, 4), ("y", "x"), (1.0, 1.0), None, None, None) for name in names]
    found = file_names(frames, ".png")
    assert found == ["a-2.png", "a.png", "a-2-2.png", "b/a.png", "a-4.png", "a-5.png"]


def test_variables_of_other_names_are_not_renamed_without_a_word() -> None:
    assert taken_for(("nir", "swir"), ["red", "green"]) == (
        "in their order, nir is taken for red, swir is taken for green"
    )
    assert taken_for(("channel0", "channel1"), ["red", "green"]) is None
    assert taken_for(("image",), ["em"]) is None
    assert taken_for(("red", "green", "blue"), ["green", "red"]) is None  # chosen by name


def test_a_note_says_which_variables_are_taken_for_others(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "other.npy", values)
    facts = vitrail.predict(
        place / "seg", tmp_path / "other.npy", out=tmp_path / "out.npy", settings=["variables=[nir]"], **SMALL
    )
    assert any("nir is taken for image" in note for note in facts["notes"]), facts["notes"]


def test_planes_larger_than_memory_are_written_piece_by_piece(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.infer import files

    tifffile, nibabel = pytest.importorskip("tifffile"), pytest.importorskip("nibabel")
    options: dict[str, Any] = {"write": "probabilities", "chunk": 8}
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "whole.npy", **options)
    expected = np.load(tmp_path / "whole.npy")
    pieces, taken = files.Filling.pieces, list[int]()

    def watched(self: files.Filling, **how: bool) -> Any:
        for box, part in pieces(self, **how):
            taken.append(part.nbytes)
            yield box, part

    monkeypatch.setattr(files, "LARGEST_PIECE", 3000)  # a plane has 4480 bytes, a chunk 2048
    monkeypatch.setattr(files.Filling, "pieces", watched)
    for ending in (".npy", ".tif", ".nii", ".nii.gz"):
        out = tmp_path / f"p{ending}"
        vitrail.predict(place / "seg", place / "em.zarr", out=out, **options)
        if ending == ".npy":
            found = np.load(out)
        else:
            found = tifffile.imread(out) if ending == ".tif" else np.asarray(nibabel.load(out).dataobj).T
        np.testing.assert_array_equal(found, expected)
    assert max(taken) <= 3000


def test_chunks_of_features_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.infer import files
    from vitrail.infer.eyes import Form
    from vitrail.infer.places import Frame

    values = np.random.default_rng(0).normal(size=(24, 6, 7, 9)).astype(np.float32)
    taken = np.zeros(values.shape, int)

    class Stored:
        shape = values.shape

        def __getitem__(self, box: Any) -> np.ndarray:
            whole = tuple(slice(b.start // 4 * 4, -(-b.stop // 4) * 4) for b in box[1:])
            taken[(slice(None), *whole)] += 1  # as a chunk of all channels is decoded as a whole
            return values[box]

    form = Form("embeddings", "patches", tuple(map(str, range(24))), values.dtype, 24)
    frame = Frame("a", values.shape[1:], ("z", "y", "x"), (1.0,) * 3, None, None, None)
    for largest in (files.LARGEST_PIECE, 24 * 4**3 * 4):
        monkeypatch.setattr(files, "LARGEST_PIECE", largest)
        taken[:] = 0
        with open(tmp_path / "a.npy", "wb") as file:
            files.write_file(file, "npy", ".npy", "a.npy", files.Filling(Stored(), form, frame, 4, lambda: None))
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), values)
        assert taken.max() == 1


def test_a_region_keeps_its_place_where_the_file_tells_none(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    np.save(tmp_path / "em.npy", values[0])
    settings = ["region={z: [4, 24], x: [8, 40]}", "voxel_size=[8, 4, 4]", "unit=micrometer"]
    made = vitrail.predict(place / "seg", tmp_path / "em.npy", out=tmp_path / "c.zarr", settings=settings)
    assert OmeZarrConfig(path=str(tmp_path / "c.zarr")).open().describe()["translation"] == [32.0, 0.0, 32.0]
    assert not any("first voxel" in note for note in made["notes"])
    vitrail.predict(place / "seg", tmp_path / "em.npy", out=tmp_path / "c.nii", settings=settings)
    np.testing.assert_allclose(nibabel.load(tmp_path / "c.nii").affine @ [0, 0, 0, 1], [32, 0, 32, 1])
    made = vitrail.predict(place / "seg", tmp_path / "em.npy", out=tmp_path / "c.npy", settings=settings)
    assert any("its first voxel is z 4, y 0, x 8 of the input" in note for note in made["notes"])
    made = vitrail.predict(place / "seg", tmp_path / "em.npy", out=tmp_path / "w.zarr", settings=settings[1:])
    assert OmeZarrConfig(path=str(tmp_path / "w.zarr")).open().describe()["translation"] == [0.0, 0.0, 0.0]


def test_a_voxel_size_that_is_given_changes_the_affine(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    affine = np.array([[0.0, -0.4, 0, 5], [0.5, 0, 0, -7], [0, 0, 0.8, 3], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(values[0].T, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "scan.nii")
    turned = np.array([[0.0, -1.0, 0, 5], [1.0, 0, 0, -7], [0, 0, 2.0, 3], [0, 0, 0, 1]])
    for name, settings in (
        ("mm", ["voxel_size=[2, 1, 1]"]),
        ("um", ["voxel_size=[2000, 1000, 1000]", "unit=micrometer"]),
    ):
        out = tmp_path / f"{name}.nii"
        vitrail.predict(place / "seg", tmp_path / "scan.nii", out=out, settings=settings)
        found = nibabel.load(out)
        np.testing.assert_allclose(found.affine, turned, atol=1e-6)
        assert found.header.get_xyzt_units()[0] == "mm"
        np.testing.assert_allclose(found.header.get_zooms(), [1, 1, 2], rtol=1e-6)


def test_slices_along_n_become_files_of_their_numbers(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.stack([values[0]] * 2))
    vitrail.predict(place / "seg", tmp_path / "many.npy", out=tmp_path / "out", settings=["axes=nzyx"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["many-0.npy", "many-1.npy"]


@pytest.fixture(scope="module")
def flat(place: Path) -> Path:
    """A 2-D run of slices of the volume."""
    entry = [{"path": str(place / "em.zarr"), "labels": "structures", "slices": "z"}]
    changes: dict[str, Any] = {"data__train": entry, "data__valid": entry, "model": UNETR | {"ndim": 2}}
    return train_segmentation(place, place / "em.zarr", "slices", **changes)


def test_a_map_stays_one(place: Path, flat: Path, values: np.ndarray, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    transform, corner = rasterio.Affine(10, 0, 500_000, 0, -20, 4_000_000), rasterio.Affine.translation(8, 4)
    options = {"driver": "GTiff", "height": 28, "width": 40, "count": 1, "dtype": "uint8"}
    with rasterio.open(tmp_path / "map.tif", "w", crs="EPSG:32633", transform=transform, **options) as file:
        file.write(values[:, 5])
    region: dict[str, Any] = {"settings": ["region={y: [4, 28], x: [8, 40]}"]}
    for write in ("classes", "probabilities"):
        out = tmp_path / f"{write}.tif"
        made = vitrail.predict(flat, tmp_path / "map.tif", out=out, write=write, picture=f"{out}.png", **region)
        assert made["picture"] == f"{out}.png", made["notes"]
        assert not any("map (" in note or "first voxel" in note for note in made["notes"])
        vitrail.predict(flat, tmp_path / "map.tif", out=tmp_path / f"{write}.npy", write=write, **region)
        with rasterio.open(out) as found:
            assert found.crs == rasterio.CRS.from_epsg(32633)
            assert found.transform.almost_equals(transform @ corner)
            expected = np.load(tmp_path / f"{write}.npy")
            np.testing.assert_array_equal(found.read(), expected.reshape(found.count, 24, 32))
            assert found.descriptions == ((None,) if write == "classes" else load_classes(flat))
    vitrail.predict(flat, tmp_path / "map.tif", out=tmp_path / "f.tif", write="embeddings", **region)
    with rasterio.open(tmp_path / "f.tif") as found:
        assert found.transform.almost_equals(transform @ corner @ rasterio.Affine.scale(4))
    vitrail.predict(flat, tmp_path / "map.tif", out=tmp_path / "c.ome.tif", **region)
    with rasterio.open(tmp_path / "c.ome.tif") as found:
        np.testing.assert_array_equal(found.read(1), np.load(tmp_path / "classes.npy"))
    made = vitrail.predict(flat, tmp_path / "map.tif", out=tmp_path / "c.zarr")
    assert any("does not keep the place on the map (EPSG:32633); .tif does" in note for note in made["notes"])


def load_classes(run: Path) -> tuple[str, ...]:
    names: tuple[str, ...] = vitrail.load(run).eyes.names
    return names


def test_data_smaller_than_a_crop_are_mirrored_and_cut(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    small = values[0, :9, :, :21]
    np.save(tmp_path / "small.npy", small)
    wide = np.pad(small, ((0, 7), (0, 0), (0, 0)), mode="reflect")
    model = vitrail.load(place / "seg")
    for write in ("probabilities", "embeddings"):
        out = tmp_path / f"{write}.npy"
        made = vitrail.predict(place / "seg", tmp_path / "small.npy", out=out, write=write, chunk=4)
        assert any("small.npy is 9 x 28 x 21 smaller than the 16 x 16 x 16" in note for note in made["notes"])
        expected = model.predict(wide, write=write)
        expected = expected[:, :9] if write == "probabilities" else expected[:, :2]
        np.testing.assert_allclose(np.load(out), expected, atol=1e-6)
        np.testing.assert_allclose(model.predict(small, write=write), expected, atol=1e-6)
    picture = tmp_path / "small.png"
    made = vitrail.predict(place / "seg", tmp_path / "small.npy", out=tmp_path / "c.zarr", picture=picture)
    assert made["picture"] == str(picture)
    assert model.predict(values[0, :1, :2, :3]).shape == (1, 2, 3)
    with pytest.raises(UserError, match="is smaller than a patch of the model 4 x 4 x 4"):
        model.embed(small[:3])
    np.save(tmp_path / "tiny.npy", small[:3])
    with pytest.raises(UserError, match=r"tiny.npy is smaller than a patch of the model 4 x 4 x 4"):
        vitrail.predict(place / "seg", tmp_path / "tiny.npy", out=tmp_path / "f.zarr", write="embeddings")


@pytest.mark.parametrize("part", [np.s_[:9], np.s_[:, :10], np.s_[:9, :10, :11]])
def test_three_planes_of_thin_volumes_go_on_as_each_needs(
    flat: Path, values: np.ndarray, tmp_path: Path, part: tuple[slice, ...]
) -> None:
    small = np.ascontiguousarray(values[0][part])
    np.save(tmp_path / "thin.npy", small)
    vitrail.predict(flat, tmp_path / "thin.npy", out=tmp_path / "thin.zarr", planes="zyx", chunk=8)
    model = vitrail.load(flat)

    def along(axis: int) -> np.ndarray:
        every = [model.predict(plane[None], write="probabilities") for plane in np.moveaxis(small, axis, 0)]
        return np.log(np.stack(every, axis=axis + 1))  # logits but for a number of each voxel

    expected = np.mean([along(axis) for axis in range(3)], axis=0).argmax(axis=0)
    np.testing.assert_array_equal(np.asarray(zarr.open_group(str(tmp_path / "thin.zarr"), mode="r")["s0"]), expected)
    np.testing.assert_array_equal(model.predict(small, planes="zyx"), expected)


def test_features_beyond_the_last_whole_patch_are_left_out(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    model = vitrail.load(place / "seg")
    part = values[0, :18, :17, :19]
    found = model.embed(part)
    assert found.shape == (24, 4, 4, 4)
    np.testing.assert_array_equal(found, model.embed(part[:16, :16, :16]))
    np.save(tmp_path / "part.npy", part)
    vitrail.predict(place / "seg", tmp_path / "part.npy", out=tmp_path / "f.npy", write="embeddings")
    np.testing.assert_array_equal(np.load(tmp_path / "f.npy"), found)


def test_voxels_that_none_hides_are_as_they_were_read(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    window = {"kind": "window", "window": [100, 150]}
    run = train_run(place, place / "em.zarr", "windowed", data__normalize=window)
    part = values[:, :16, :16, :16]
    found = vitrail.load(run).predict(part)
    patches = (found == part[0]).reshape(4, 4, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(64, -1)
    assert patches.all(axis=1).sum() == 16  # a quarter of the patches is seen
    assert ((found < 100) | (found > 150)).mean() > 0.05


def test_reconstructions_are_of_the_variables_that_are_given(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    both = np.concatenate([values, 500 + values / 2]).astype(np.float32)
    for name, order in (("ab", [0, 1]), ("ba", [1, 0]), ("b", [1])):
        np.save(tmp_path / f"{name}.npy", both[order])
    entry = [{"path": str(tmp_path / "ab.npy"), "axes": "czyx", "variables": ["a", "b"]}]
    kinds = {"kind": "variables", "of": {"b": {"kind": "log", "scale": 100.0}}}
    changes = {"data__train": entry, "data__valid": entry, "data__normalize": kinds}
    run = train_run(tmp_path, place / "em.zarr", "named", **changes, model__encoder__variables={"known": ["a", "b"]})
    means = {}
    for name in ("ab", "ba", "b"):
        settings = ["axes=czyx", f"variables=[{','.join(name)}]"]
        vitrail.predict(run, tmp_path / f"{name}.npy", out=tmp_path / f"{name}.zarr", settings=settings)
        group = zarr.open_group(str(tmp_path / f"{name}.zarr"), mode="r")
        omero: Any = dict(group.attrs)["ome"]
        assert [channel["label"] for channel in omero["omero"]["channels"]] == list(name)
        means[name] = [float(channel.mean()) for channel in np.asarray(group["s0"])]
    assert means["ab"] == pytest.approx([float(channel.mean()) for channel in both], rel=0.1)
    assert means["ba"] == pytest.approx(means["ab"][::-1], rel=1e-3)
    assert means["b"] == pytest.approx(means["ab"][1:], rel=0.1)


def test_statistics_of_volumes_are_of_what_there_is(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    from vitrail.infer.eyes import Eyes
    from vitrail.infer.predict import Opened
    from vitrail.weights.runs import list_checkpoints, read_manifest, stored_recipe

    run = train_segmentation(place, place / "em.zarr", "volumes", data__statistics="volume")
    manifest = read_manifest(list_checkpoints(run / "checkpoints")[0])
    np.save(tmp_path / "small.npy", values[0, :3])
    options: dict[str, Any] = {"write": None, "dtype": None, "planes": None, "kind": None, "settings": ()}
    seen = Opened(Eyes(run, manifest, stored_recipe(manifest)), str(tmp_path / "small.npy"), **options, pad=True)
    assert seen.source.items[0].shape == (16, 28, 40)
    found = seen.eyes.statistics_of(seen.dataset)
    assert found is not None
    assert found[0].mean[0][0] == pytest.approx(values[0, :3].mean())


def test_coarser_levels_are_the_same_early_and_late(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.infer import outputs

    options: dict[str, Any] = {"write": "probabilities", "dtype": "float16", "chunk": 4, "memory": 0.0002}
    late = list[int]()
    stages = outputs.Result.stages

    def counted(self: outputs.Result) -> Any:
        found = stages(self)
        late.append(len(found[0]))
        return found

    monkeypatch.setattr(outputs.Result, "stages", counted)
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "early.zarr", **options)
    monkeypatch.setattr(outputs.Result, "_go_on", lambda *_: None)
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "late.zarr", **options)
    assert late == [0, 3 * 4 * 5]
    files = [
        {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "zarr.json"}
        for root in (tmp_path / "early.zarr", tmp_path / "late.zarr")
    ]
    assert files[0] == files[1]
    assert len(files[0]) > 4 * 300


def test_chunks_have_the_bytes_that_zarr_writes(tmp_path: Path) -> None:
    from vitrail.data.formats import ngff

    values = np.random.default_rng(0).normal(size=(2, 7, 10)).astype(np.float32)
    group = ngff.create_group(tmp_path / "a.zarr", {})
    for name in ("zarr", "own"):
        level = ngff.create_level(group, name, values.shape, (1, 4, 4), values.dtype, axes=("c", "y", "x"))
        if name == "zarr":
            level[...] = values
        else:
            box = (slice(0, 2), slice(4, 7), slice(0, 10))
            ngff.write_chunks(tmp_path / "a.zarr/own", (1, 4, 4), box, values[:, 4:], 3)
            ngff.write_chunks(tmp_path / "a.zarr/own", (1, 4, 4), (slice(0, 2), slice(0, 4), box[2]), values[:, :4], 1)
        np.testing.assert_array_equal(level[...], values)
    stored = [sorted((tmp_path / "a.zarr" / name / "c").rglob("*")) for name in ("zarr", "own")]
    assert [p.name for p in stored[0]] == [p.name for p in stored[1]]
    assert [p.read_bytes() for p in stored[0] if p.is_file()] == [p.read_bytes() for p in stored[1] if p.is_file()]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_of_labels_the_most_frequent_stays(dtype: str) -> None:
    from vitrail.data.formats.ngff import coarser

    labels = np.random.default_rng(0).integers(0, 5, (7, 8, 10)).astype(dtype)
    found = coarser(labels, labels=True)
    assert found.dtype == labels.dtype
    wide = np.pad(labels, ((0, 1), (0, 0), (0, 0)), mode="edge")
    for at in np.ndindex(found.shape):
        box = wide[tuple(slice(2 * n, 2 * n + 2) for n in at)]
        assert found[at] == np.bincount(box.ravel()).argmax()


def test_others_hear_of_rank_0_while_it_makes_many_stores_and_tidies(tmp_path: Path) -> None:
    from vitrail.infer.eyes import Form
    from vitrail.infer.outputs import Result
    from vitrail.infer.places import Frame

    heard = list[int]()
    frames = [Frame(f"{n}.tif", (8, 8), ("y", "x"), (1.0, 1.0), None, None, None) for n in range(3)]
    form = Form("classes", "voxels", None, np.dtype(np.uint8), 2)
    result = Result(tmp_path / "out", form, frames, ("tiff", ".tif", True), chunk=4)
    result.begin({}, lambda: heard.append(1))
    assert len(heard) == 3
    result.open_log(0, 0)
    for number in range(3):
        result.write(number, number, (slice(0, 8), slice(0, 8)), np.zeros((8, 8), np.uint8))
    for (calls,) in [result.stages()]:
        for call in calls:
            call(lambda: None)
    heard.clear()
    result.publish(lambda: heard.append(1))
    result.close()
    assert len(heard) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_rows_of_a_long_item_are_sums_of_their_own_tiles() -> None:
    import torch

    from vitrail.data.order.sampler import Extent
    from vitrail.infer.blend import Band
    from vitrail.infer.tiling import Cut, Tiling
    from vitrail.training.stitch import blend_weights

    shape, window = (60, 12, 8), (8, 8, 8)
    views = [[Extent(0, 0, shape, shape, (0, 0, 0), 1.0, window=window)]]
    tiling = Tiling(views, Cut(0.25, (1, 1, 1), 4, 10**6))  # tiles begin within rows
    (run,) = tiling.runs(range(tiling.rows))
    band, weights = Band(run, 1, "gaussian", torch.device("cpu")), blend_weights(window, "gaussian")
    total, weight, rows = torch.zeros(shape), torch.zeros(shape), []
    for number in run.tiles:
        tile, values = tiling.tile(number), torch.rand(1, *window) + number
        total[tile.box] += values[0] * weights
        weight[tile.box] += weights
        rows += list(band.add(tile, values))
    rows += list(band.rest())
    assert [row.number for row in rows] == list(range(15))
    found = torch.cat([row.values[0] for row in rows])
    torch.testing.assert_close(found, total / weight, rtol=1e-5, atol=0)
