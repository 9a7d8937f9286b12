"""Predictions of new data: against tiles added up in memory, whatever they are cut into and written to."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from predicting import SHAPE, UNETR, plain_probabilities, train_run, train_segmentation, write_em
from support import merge

import vitrail
from vitrail.data.order.tiles import tile_starts
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.draws import Draws, key
from vitrail.errors import UserError
from vitrail.infer.features import encode, pooled
from vitrail.infer.tiling import Cut, Tiling
from vitrail.layers.tokens import unpatchify
from vitrail.models.model import make_inputs
from vitrail.objectives.objective import normalise
from vitrail.report import summary
from vitrail.report.page import list_checkpoints as list_rows
from vitrail.training.stitch import blend_weights
from vitrail.weights.runs import list_checkpoints, read_manifest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predict")
    write_em(place / "em.zarr")
    train_segmentation(place, place / "em.zarr")
    train_run(place, place / "em.zarr", "mae")
    return place


@pytest.fixture(scope="module")
def values(place: Path) -> np.ndarray:
    return OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)


def level(path: Path, number: int = 0) -> np.ndarray:
    return np.asarray(zarr.open_group(str(path), mode="r")[f"s{number}"])


SMALL: dict[str, Any] = {"chunk": 8, "memory": 0.0002}  # many pillars and rows


@pytest.mark.parametrize(("overlap", "blend"), [(0.5, "gaussian"), (0.25, "constant"), (0.0, "gaussian")])
def test_probabilities_are_those_of_all_tiles_in_memory(
    place: Path, values: np.ndarray, tmp_path: Path, overlap: float, blend: Any
) -> None:
    out = tmp_path / "p.ome.zarr"
    options: dict[str, Any] = {"write": "probabilities", "overlap": overlap, "blend": blend}
    made = vitrail.predict(place / "seg", place / "em.zarr", out=out, **options, **SMALL)
    assert made["rows"] > 20
    expected = plain_probabilities(place / "seg", values, overlap=overlap, gaussian=blend == "gaussian")
    assert np.abs(level(out) - expected).max() < 1e-6
    assert level(out).sum(axis=0) == pytest.approx(np.ones(SHAPE), abs=1e-5)


@pytest.mark.parametrize(("overlap", "blend"), [(0.5, "gaussian"), (0.25, "constant")])
def test_probabilities_are_those_of_sliding_windows(
    place: Path, values: np.ndarray, overlap: float, blend: Any
) -> None:
    inferers = pytest.importorskip("monai.inferers", reason="MONAI is not installed: pip install monai")
    model = vitrail.load(place / "seg")
    images = normalise(torch.from_numpy(values)[None], model.eyes.statistics)
    with torch.no_grad():
        logits = inferers.sliding_window_inference(
            images, (16, 16, 16), 4, lambda x: model(**model.inputs(x)), overlap, mode=blend
        )
    found = model.predict(values, write="probabilities", overlap=overlap, blend=blend)
    assert np.abs(found - logits[0].softmax(dim=0).numpy()).max() < 1e-5


def test_what_is_cut_otherwise_is_the_same(place: Path, tmp_path: Path) -> None:
    for write, run in (("classes", "seg"), ("embeddings", "seg"), ("reconstructions", "mae"), ("embeddings", "mae")):
        options = {"write": write, "flips": "all" if write == "classes" else None}
        vitrail.predict(place / run, place / "em.zarr", out=tmp_path / f"{run}-{write}-1.zarr", **options)
        vitrail.predict(place / run, place / "em.zarr", out=tmp_path / f"{run}-{write}-2.zarr", **options, **SMALL)
        one, many = (level(tmp_path / f"{run}-{write}-{n}.zarr") for n in (1, 2))
        np.testing.assert_allclose(one.astype(float), many.astype(float), atol=1e-5)


def test_raw_values_in_memory_give_what_the_verb_writes(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    for write, run in (("probabilities", "seg"), ("classes", "seg"), ("reconstructions", "mae")):
        vitrail.predict(place / run, place / "em.zarr", out=tmp_path / f"{write}.zarr", write=write)
        found = vitrail.load(place / run).predict(values, write=write)
        np.testing.assert_array_equal(found, level(tmp_path / f"{write}.zarr"))


def test_a_loaded_model_normalises_what_it_is_given(place: Path, values: np.ndarray) -> None:
    model = vitrail.load(place / "seg")
    expected = plain_probabilities(place / "seg", values)
    found = model.predict(values, write="probabilities")
    assert np.abs(found - expected).max() < 1e-6
    # The tokens of raw bytes are something else: what was taken for a prediction before.
    crop = torch.from_numpy(values[None, :, :16, :16, :16]).float()
    raw = model(**model.inputs(crop)).softmax(dim=1).detach().numpy()[0]
    assert np.abs(raw - model.predict(values[:, :16, :16, :16], write="probabilities")).max() > 0.05


def test_flips_are_turned_back_and_averaged(place: Path, values: np.ndarray) -> None:
    part = values[:, :, :24, :]  # of which tiles begin at the same places from both ends
    model = vitrail.load(place / "seg")

    def logits(flipped: tuple[int, ...]) -> np.ndarray:
        axes = tuple(axis + 1 for axis in flipped)
        found = model.predict(np.flip(part, axes).copy(), write="probabilities")
        return np.log(np.flip(found, axes))  # but for a number of each voxel

    for flips in ((0,), (1, 2)):
        sets = [tuple(axis for axis in flips if number >> axis & 1) for number in range(8)]
        mean = torch.from_numpy(np.stack([logits(one) for one in dict.fromkeys(sets)])).mean(dim=0)
        found = model.predict(part, write="probabilities", flips=flips)
        np.testing.assert_allclose(found, mean.softmax(dim=0).numpy(), atol=1e-5)


def test_voxels_are_reconstructed_by_the_tiles_in_which_they_are_hidden(place: Path, values: np.ndarray) -> None:
    model = vitrail.load(place / "mae")
    statistics, weights = model.eyes.statistics, blend_weights((16, 16, 16), "gaussian")
    for part in (values[:, :16, :16, :16], values[:, :24, :24, :16]):
        total, hidden = torch.zeros(part.shape[1:]), torch.zeros(part.shape[1:])
        for start in itertools.product(*[tile_starts(n, 16, 0.5).tolist() for n in part.shape[1:]]):
            box = tuple(slice(s, s + 16) for s in start)
            images = normalise(torch.from_numpy(part[(slice(None), *box)])[None], statistics)
            noise = Draws(3, [key(0, "tile", 0, 0, *start) % 2**40]).uniform("mask", 64)
            with torch.no_grad():
                tokens, masked = model.reconstruct(images, noise)
            masked = masked[..., None].expand_as(tokens).float()
            made = (tokens * statistics.std[0] + statistics.mean[0]) * masked
            total[box] += weights * unpatchify(made, (4, 4, 4), (16, 16, 16))[0, 0]
            hidden[box] += weights * unpatchify(masked, (4, 4, 4), (16, 16, 16))[0, 0]
        assert float((hidden > 0).float().mean()) == 0.75 or part.shape[1] > 16
        expected = torch.where(hidden > 0, total / hidden, torch.from_numpy(part[0]).float())
        found = model.predict(part)
        assert found.dtype == np.uint8
        assert np.abs(found - np.clip(np.rint(expected.numpy()), 0, 255)).max() <= 1  # rounded
    whole = model.predict(values)
    assert (whole != values[0]).mean() > 0.9  # nearly all are hidden in one of the tiles


def test_features_are_the_last_tokens_of_the_encoder(place: Path, values: np.ndarray) -> None:
    crop = values[:, :16, :16, :16]
    for run in ("mae", "seg"):
        model = vitrail.load(place / run)
        inputs, _ = make_inputs(model.config, normalise(torch.from_numpy(crop)[None], model.eyes.statistics))
        with torch.no_grad():
            mean = pooled(model, *encode(model, inputs))
        found = model.embed(crop)
        np.testing.assert_allclose(found.mean(axis=(1, 2, 3)), mean[0].numpy(), atol=1e-5)
        assert found.std(axis=(1, 2, 3)).min() > 0
    moved = model.embed(np.roll(values, 4, axis=3)[:, :, :, 8:24])  # by a patch
    np.testing.assert_array_equal(moved, model.embed(values[:, :, :, 4:20]))


def test_values_may_be_a_volume_with_channels_or_several_and_tensors(place: Path, values: np.ndarray) -> None:
    model = vitrail.load(place / "seg")
    one = model.predict(values)
    assert one.shape == SHAPE
    assert one.dtype == np.uint8
    np.testing.assert_array_equal(model.predict(values[0]), one)
    two = model.predict(np.stack([values, values[:, ::-1]]))
    assert two.shape == (2, *SHAPE)
    np.testing.assert_array_equal(two[0], one)
    tensor = model.predict(torch.from_numpy(values))
    assert isinstance(tensor, torch.Tensor)
    assert model.embed(values).shape == (24, *(n // 4 for n in SHAPE))
    assert not model.training
    with pytest.raises(UserError, match=r"the shape \[28, 40\], but the model takes 1 channel"):
        model.predict(values[0, 0])
    with pytest.raises(UserError, match="channels come first"):
        model.predict(values[0][..., None])


def test_a_model_that_is_no_runs_says_so() -> None:
    from vitrail.models import ViT
    from vitrail.models.vit import ViTConfig

    model = ViT(ViTConfig(ndim=2, channels=1, shape=8, width=8, depth=1, heads=1, patch=4, classes=2))
    with pytest.raises(UserError, match="was not loaded from a run"):
        model.predict(np.zeros((8, 8)))


def test_an_ome_zarr_lies_where_the_input_does(place: Path, tmp_path: Path) -> None:
    region = {"settings": ["region={z: [4, 24], x: [8, 40]}"]}
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.ome.zarr", chunk=8, **region)
    source = OmeZarrConfig(path=str(tmp_path / "c.ome.zarr")).open()
    facts = source.describe()
    assert facts["shape"] == [20, 28, 32]
    assert facts["spacing"] == [8.0, 4.0, 4.0]
    assert facts["translation"] == [32.0, 0.0, 32.0]
    assert facts["unit"] == "nanometer"
    assert facts["axes"] == ["z", "y", "x"]
    coarse = OmeZarrConfig(path=str(tmp_path / "c.ome.zarr"), level=1).open().describe()
    assert coarse["spacing"] == [16.0, 8.0, 8.0]
    assert coarse["translation"] == [36.0, 2.0, 34.0]
    properties = json.loads((tmp_path / "c.ome.zarr/zarr.json").read_text())["attributes"]["ome"]["image-label"]
    assert [entry["name"] for entry in properties["properties"]][:2] == ["background", "membrane"]
    fine, half = level(tmp_path / "c.ome.zarr"), level(tmp_path / "c.ome.zarr", 1)
    boxes = fine.reshape(10, 2, 14, 2, 16, 2).transpose(0, 2, 4, 1, 3, 5).reshape(10, 14, 16, 8)
    votes = np.stack([(boxes == number).sum(axis=-1) for number in range(4)])
    np.testing.assert_array_equal(half, votes.argmax(axis=0))


def test_features_lie_in_the_middle_of_their_patches(place: Path, tmp_path: Path) -> None:
    vitrail.predict(place / "mae", place / "em.zarr", out=tmp_path / "f.zarr", write="embeddings", dtype="float16")
    facts = OmeZarrConfig(path=str(tmp_path / "f.zarr")).open().describe()
    assert facts["spacing"] == [32.0, 16.0, 16.0]
    assert facts["translation"] == [12.0, 6.0, 6.0]
    assert facts["shape"] == [6, 7, 10]
    assert len(facts["variables"]) == 24


def test_nifti_keeps_its_affine(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    affine = np.array([[0.0, -0.4, 0, 5], [0.5, 0, 0, -7], [0, 0, 0.8, 3], [0, 0, 0, 1]])
    image = nibabel.Nifti1Image(values[0].T, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "scan.nii.gz")
    for ending, memory in ((".nii.gz", 2.0), (".nii", 0.0002)):
        out = tmp_path / f"classes{ending}"
        vitrail.predict(place / "seg", tmp_path / "scan.nii.gz", out=out, memory=memory)
        found = nibabel.load(out)
        np.testing.assert_allclose(found.affine, affine, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(found.dataobj).T, vitrail.load(place / "seg").predict(values))
        assert found.header.get_xyzt_units()[0] == "mm"
    other = {"settings": ["unit=nanometer"], "out": tmp_path / "nanometers.nii"}
    vitrail.predict(place / "seg", tmp_path / "scan.nii.gz", **other)
    found = nibabel.load(other["out"])
    np.testing.assert_allclose(found.affine, affine, atol=1e-6)
    assert found.header.get_xyzt_units()[0] == "mm"
    vitrail.predict(
        place / "seg", tmp_path / "scan.nii.gz", out=tmp_path / "part.nii", settings=["region={x: [10, 40]}"]
    )
    moved = nibabel.load(tmp_path / "part.nii").affine
    np.testing.assert_allclose(moved @ [0, 0, 0, 1], affine @ [10, 0, 0, 1], atol=1e-6)
    out = tmp_path / "shares.nii.gz"
    vitrail.predict(place / "seg", place / "em.zarr", out=out, write="probabilities", dtype="uint8")
    found = nibabel.load(out)
    assert found.shape == (*SHAPE[::-1], 4)
    np.testing.assert_allclose(np.diag(found.affine), [0.004, 0.004, 0.008, 1], atol=1e-9)
    assert found.header.get_xyzt_units()[0] == "micron"
    shares = vitrail.load(place / "seg").predict(values, write="probabilities")
    np.testing.assert_array_equal(np.asarray(found.dataobj).T, np.rint(shares * 255).astype(np.uint8))


def test_nifti_says_which_axis_is_which(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    np.save(tmp_path / "turned.npy", np.ascontiguousarray(values[0].T))
    settings = ["axes=xyz", "voxel_size=[4, 5, 8]", "unit=micrometer"]
    vitrail.predict(place / "seg", tmp_path / "turned.npy", out=tmp_path / "c.nii", settings=settings)
    found = nibabel.load(tmp_path / "c.nii")
    assert found.shape == (24, 28, 40)
    assert nibabel.aff2axcodes(found.affine) == ("S", "A", "R")  # z, y, x
    np.testing.assert_allclose(found.affine @ [1, 2, 3, 1], [4 * 3, 5 * 2, 8 * 1, 1])


def test_tiff_and_numpy_hold_the_same(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for write in ("classes", "probabilities"):
        expected = vitrail.load(place / "seg").predict(values, write=write)
        for ending, read in ((".tif", tifffile.imread), (".npy", np.load)):
            out = tmp_path / f"{write}{ending}"
            vitrail.predict(place / "seg", place / "em.zarr", out=out, write=write, chunk=8)
            np.testing.assert_array_equal(read(out), expected)
    with tifffile.TiffFile(tmp_path / "classes.tif") as file:
        assert 'PhysicalSizeZ="8.0"' in (file.ome_metadata or "")


def test_labels_beside_the_input_say_nothing(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(values[0].T, np.eye(4)), tmp_path / "image1.nii.gz")
    labels = nibabel.Nifti1Image(np.zeros((8, 8, 8), np.uint8), np.diag([1.0, 1.0, 1.0, 1.0]))
    nibabel.save(labels, tmp_path / "label1.nii.gz")
    vitrail.predict(place / "seg", tmp_path / "image1.nii.gz", out=tmp_path / "out.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), vitrail.load(place / "seg").predict(values))


def test_statistics_of_entries_are_measured_anew(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    run = train_segmentation(place, place / "em.zarr", "each", data__statistics="each")
    np.save(tmp_path / "other.npy", values[0].astype(np.float32) * 3 + 7)
    for path, name in ((place / "em.zarr", "same"), (tmp_path / "other.npy", "other")):
        vitrail.predict(run, path, out=tmp_path / f"{name}.zarr", write="probabilities")
    np.testing.assert_allclose(level(tmp_path / "same.zarr"), level(tmp_path / "other.zarr"), atol=1e-4)


def test_images_are_fitted_as_in_training(flat: Path, tmp_path: Path) -> None:
    entry = [{"path": str(flat / "images")}]
    model = {"kind": "vit", "ndim": 2, **UNETR["encoder"], "depth": 1}
    changes = {"data__train": entry, "data__valid": entry, "model": model, "objective": {"kind": "classify"}}
    run = train_run(flat, flat / "em.zarr", "fitted", **changes, data__fit={"resize": 20})
    (tmp_path / "new").mkdir()
    wide = np.tile(np.arange(40, dtype=np.uint8) * 6, (30, 1))
    Image.fromarray(wide).save(tmp_path / "new/wide.png")
    vitrail.predict(run, tmp_path / "new", out=tmp_path / "classes.csv")
    (row,) = csv.DictReader((tmp_path / "classes.csv").open())
    shares = vitrail.load(run).predict(wide)
    assert [float(row["dark"]), float(row["light"])] == pytest.approx(shares.tolist(), abs=1e-5)


def test_a_folder_of_volumes_becomes_one_of_predictions(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "in" / f"{name}.npy", values[0] if name == "a" else values[0, ::-1])
    made = vitrail.predict(place / "seg", tmp_path / "in", out=tmp_path / "out")
    assert made["items"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.npy", "b.npy"]
    np.testing.assert_array_equal(np.load(tmp_path / "out/a.npy"), vitrail.load(place / "seg").predict(values))
    with pytest.raises(UserError, match="is one file, and there are 2 items"):
        vitrail.predict(place / "seg", tmp_path / "in", out=tmp_path / "out.npy")


@pytest.fixture(scope="module")
def flat(place: Path, values: np.ndarray) -> Path:
    """2-D runs: of slices of the volume, and of images with classes."""
    encoder = UNETR["encoder"]
    entry = [{"path": str(place / "em.zarr"), "labels": "structures", "slices": "z"}]
    changes = {"data__train": entry, "data__valid": entry}
    train_segmentation(place, place / "em.zarr", "slices", model=UNETR | {"ndim": 2}, **changes)
    for number in range(8):
        path = place / f"images/{'dark' if number % 2 else 'light'}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values[0, number, :16, :16] // (1 + number % 2)).save(path)
    entry = [{"path": str(place / "images")}]
    model = {"kind": "vit", "ndim": 2, **encoder, "depth": 1}
    changes = {"data__train": entry, "data__valid": entry, "model": model, "objective": {"kind": "classify"}}
    train_run(place, place / "em.zarr", "vit", **changes)
    return place


def test_a_flat_model_sees_volumes_by_slices_of_one_axis_or_three(
    flat: Path, values: np.ndarray, tmp_path: Path
) -> None:
    model = vitrail.load(flat / "slices")

    def along(axis: int) -> np.ndarray:
        return np.moveaxis(
            np.stack([model.predict(part[None], write="probabilities") for part in np.moveaxis(values[0], axis, 0)]),
            0,
            axis + 1,
        )

    for planes, axes in ((None, (0,)), ("y", (1,)), ("zyx", (0, 1, 2))):
        out = tmp_path / f"{planes}.zarr"
        vitrail.predict(flat / "slices", flat / "em.zarr", out=out, planes=planes, chunk=8)
        each = np.stack([np.log(along(axis)) for axis in axes])  # logits but for a number of each voxel
        np.testing.assert_array_equal(level(out), each.mean(axis=0).argmax(axis=0))
    np.testing.assert_array_equal(model.predict(values[0], planes="zyx"), level(tmp_path / "zyx.zarr"))
    with pytest.raises(UserError, match="'w'; give axes among z, y, x"):
        vitrail.predict(flat / "slices", flat / "em.zarr", out=tmp_path / "w.zarr", planes="w")


def test_classes_of_images_are_a_table(flat: Path, tmp_path: Path) -> None:
    made = vitrail.predict(flat / "vit", flat / "images", out=tmp_path / "classes.csv", batch=3)
    rows = list(csv.DictReader((tmp_path / "classes.csv").open()))
    assert made["items"] == len(rows) == 8
    assert list(rows[0]) == ["item", "class", "dark", "light"]
    model = vitrail.load(flat / "vit")
    for row in rows:
        shares = model.predict(np.asarray(Image.open(flat / "images" / row["item"])))
        assert [float(row["dark"]), float(row["light"])] == pytest.approx(shares.tolist(), abs=1e-5)
        assert row["class"] == ("dark", "light")[int(shares.argmax())]
    with pytest.raises(UserError, match=r"ends in \.csv"):
        vitrail.predict(flat / "vit", flat / "images", out=tmp_path / "classes.zarr")


def test_a_folder_of_images_becomes_one_of_images(flat: Path, tmp_path: Path) -> None:
    vitrail.predict(flat / "slices", flat / "images", out=tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*/*.png"))) == 8
    image = flat / "images/dark/1.png"
    expected = vitrail.load(flat / "slices").predict(np.asarray(Image.open(image)))
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out/dark/1.png")), expected)


def test_adaptive_tokens_predict_crop_by_crop(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    tokens = {"kind": "adaptive", "length": 64, "score": {"kind": "gradient"}}
    model = merge(UNETR, {"kind": "sap", "features": 4, "encoder.tokens": tokens, "encoder.depth": 1})
    model.pop("decoder")
    run = train_segmentation(place, place / "em.zarr", "sap", model=model)
    vitrail.predict(run, place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    np.testing.assert_array_equal(level(tmp_path / "c.zarr"), vitrail.load(run).predict(values))
    assert vitrail.load(run).embed(values).shape == (24, 6, 7, 10)


def test_resampled_input_is_written_on_its_own_grid(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    entry = [{"path": str(place / "em.zarr"), "labels": "structures", "spacing": [8.0, 6.0, 6.0]}]
    run = train_segmentation(
        place, place / "em.zarr", "coarse", data__train=entry, data__valid=entry, data__crop=[16, 16, 16]
    )
    vitrail.predict(run, place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    facts = OmeZarrConfig(path=str(tmp_path / "c.zarr")).open().describe()
    assert facts["shape"] == list(SHAPE)
    assert facts["spacing"] == [8.0, 4.0, 4.0]
    with pytest.raises(UserError, match="features lie on a grid of patches"):
        vitrail.predict(run, place / "em.zarr", out=tmp_path / "f.zarr", write="embeddings")


def test_scores_of_the_whole_are_those_that_eval_finds(place: Path, tmp_path: Path) -> None:
    found = vitrail.evaluate(place / "seg", samples=1000, overrides=["eval.tiles.overlap=0.5", "eval.blend=gaussian"])[
        "metrics"
    ]
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr")
    classes = level(tmp_path / "c.zarr")
    labels = level(place / "em.zarr/labels/structures")
    assert float((classes == labels).mean()) == pytest.approx(found["accuracy"], abs=1e-9)
    both = ((classes == 1) & (labels == 1)).sum()
    assert 2 * both / ((classes == 1).sum() + (labels == 1).sum()) == pytest.approx(found["dice_membrane"], abs=1e-9)


def test_the_best_checkpoint_is_known_everywhere(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    run = train_segmentation(
        place, place / "em.zarr", "steps", run__steps=4, checkpoint__keep="all", optimizer__lr=0.03
    )
    scores = {}
    for folder in list_checkpoints(run / "checkpoints"):
        manifest = read_manifest(folder)
        scores[manifest["step"]] = manifest["metrics"]["mean_dice"]
    best = max(sorted(scores), key=lambda step: scores[step])
    assert vitrail.evaluate(run, checkpoint="best")["step"] == best
    assert json.loads((run / "checkpoints/best.json").read_text()) == {
        "checkpoint": f"step-{best:08d}",
        "score": scores[best],
    }
    marked = [row[0] for row in list_rows(run, summary(run)) if row[-1] == "yes, the best"]
    assert marked == [str(best)]
    assert vitrail.evaluate(run, checkpoint="last")["step"] == 4
    made = vitrail.predict(run, place / "em.zarr", out=tmp_path / "b.zarr", checkpoint="best")
    assert made["step"] == best
    expected = vitrail.load(run, checkpoint=best).predict(values)
    np.testing.assert_array_equal(vitrail.load(run, checkpoint="best").predict(values), expected)
    with pytest.raises(UserError, match="one of best and last"):
        vitrail.load(run, checkpoint="newest")


def test_a_picture_shows_what_was_written(place: Path, tmp_path: Path) -> None:
    for run, write, ending in (
        ("seg", "classes", ".zarr"),
        ("seg", "probabilities", ".nii.gz"),
        ("seg", "probabilities", ".tif"),
        ("mae", "reconstructions", ".npy"),
    ):
        picture = tmp_path / f"{write}{ending}.png"
        options = {"out": tmp_path / f"{write}{ending}", "write": write, "picture": picture}
        made = vitrail.predict(place / run, place / "em.zarr", **options)
        assert made["notes"] == []
        assert made["picture"] == str(picture)
        assert min(Image.open(picture).size) > 200
    with pytest.raises(UserError, match="embeddings are not drawn here"):
        vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "f.zarr", write="embeddings", picture="f.png")


def test_refusals_are_sentences(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", np.stack([values[0]] * 2))
    em, run = place / "em.zarr", place / "seg"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("does not exist", {"path": tmp_path / "no.zarr"}),
        (r"2 variables .* was trained on 1 \(image\)", {"path": tmp_path / "two.npy"}),
        ("'reconstructions' is nothing that objective 'segment' gives", {"write": "reconstructions"}),
        ("overlap: 1.0 must be", {"overlap": 1.0}),
        ("flips: 'q' names 'q'", {"flips": "q"}),
        ("is of probabilities, affinities and embeddings", {"dtype": "uint8"}),
        ("planes: .* leave it out", {"planes": "z"}),
        ("no checkpoint of step 7", {"checkpoint": 7}),
        ("has no such key", {"settings": ["levels=1"]}),
        ("for classes of whole images", {"out": tmp_path / "x.csv"}),
        ("PNG holds images", {"out": tmp_path / "x.png"}),
        ("exists and is not overwritten", {"out": em}),
        (r"ends in \.h5, which is not written", {"out": tmp_path / "x.h5"}),
        ("inf GiB must be a number", {"memory": float("inf")}),
    ]
    for words, options in cases:
        options = {"out": tmp_path / "x.zarr", "path": em} | options
        with pytest.raises(UserError, match=words):
            vitrail.predict(run, options.pop("path"), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.npy"]


def test_work_that_was_begun_is_not_another_predictions(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.infer import outputs

    def stop(*_: Any) -> None:
        raise UserError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(outputs.Result, "publish", stop)
        with pytest.raises(UserError, match="stopped here"):
            vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    with pytest.raises(UserError, match=r"was begun as another prediction .*overlap"):
        vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr", overlap=0.25, **SMALL)
    log = next((tmp_path / ".c.zarr.predict").glob("rows-*.log"))
    rows = log.read_bytes()
    log.write_bytes(rows + b"[1]\n")
    with pytest.raises(UserError, match="to begin anew"):
        vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    log.write_bytes(rows)
    (tmp_path / ".c.zarr.predict/result/link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="which may lead anywhere"):
        vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    (tmp_path / ".c.zarr.predict/result/link").unlink()
    made = vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr", **SMALL)
    assert made["made"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"]


def test_rows_and_tiles_fit_together() -> None:
    from vitrail.data.order.sampler import Extent

    shapes = [(30, 17, 25), (8, 8, 8), (30, 17, 25)]
    views = [
        [Extent(0, n, shape, shape, (0, 0, 0), 1.0, window=(8, 8, 8)) for n, shape in enumerate(shapes)],
        [Extent(1, n, shape, shape, (0, 0, 0), 1.0, window=(8, 1, 8)) for n, shape in enumerate(shapes)],
    ]
    tiling = Tiling(views, Cut(overlap=0.5, cell=(1, 1, 1), chunk=6, most=600))
    covered = [np.zeros(shape, int) for shape in shapes]
    for row in range(tiling.rows):
        item, box = tiling.place(row)
        covered[item][box] += 1
        (run,) = tiling.runs([row])
        assert (run.item, run.number, run.last - run.first) == (item, row, 1)
        for view in (0, 1):  # all that touches the row is among its tiles, and every cell has some of each view
            touched = np.zeros(shapes[item], int)
            for number in run.tiles:
                tile = tiling.tile(number)
                assert tile.item == item
                if tile.view == view:
                    touched[tile.box] += 1
            assert touched[box].min() > 0
    assert all((each == 1).all() for each in covered)
    assert len({(t.item, t.view, t.start) for t in map(tiling.tile, range(tiling.tiles))}) <= tiling.tiles
