"""Frozen features in files: against those of crops in memory, with where they lie."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from predicting import SHAPE, train_run, train_segmentation, write_em
from safetensors import safe_open

import vitrail
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.infer.features import encode
from vitrail.objectives.objective import normalise


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("embed")
    write_em(place / "em.zarr")
    train_run(place, place / "em.zarr", "mae")
    return place


@pytest.fixture(scope="module")
def values(place: Path) -> np.ndarray:
    return OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if path.suffix == ".zarr":
        group: Any = zarr.open_group(str(path), mode="r")
        return {name: np.asarray(group[name]) for name in group}, dict(group.attrs["vitrail"])
    with safe_open(str(path), framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["vitrail"])  # noqa: SIM118


def plain(run: Path, crop: np.ndarray) -> torch.Tensor:
    """The encoder's last tokens [N, D] of one crop [1, *S]."""
    model: Any = vitrail.load(run)
    images = normalise(torch.from_numpy(crop)[None], model.eyes.statistics)
    with torch.no_grad():
        x, _ = encode(model, model.inputs(images))
    return x[0, model.encoder.prefix :]


@pytest.mark.parametrize("ending", [".safetensors", ".zarr"])
def test_crops_lie_where_they_were_cut(place: Path, values: np.ndarray, tmp_path: Path, ending: str) -> None:
    made = vitrail.embed(place / "mae", place / "em.zarr", out=tmp_path / f"f{ending}", per="crop", batch=3)
    columns, facts = read(tmp_path / f"f{ending}")
    assert made["rows"] == len(columns["features"]) == 2 * 2 * 3
    assert (facts["per"], facts["axes"], facts["unit"], facts["step"]) == ("crop", ["z", "y", "x"], "nanometer", 2)
    assert len(facts["items"]) == 1
    assert not columns["item"].any()
    assert columns["position"] == pytest.approx(columns["voxel"] * (8.0, 4.0, 4.0))
    starts = (columns["voxel"] - 7.5).astype(int)
    assert {tuple(s) for s in starts} == {(z, y, x) for z in (0, 8) for y in (0, 12) for x in (0, 16, 24)}
    for start, feature in zip(starts, columns["features"], strict=True):
        crop = values[(slice(None), *(slice(s, s + 16) for s in start))]
        assert feature == pytest.approx(plain(place / "mae", crop).mean(dim=0).numpy(), abs=1e-5)


def test_an_item_is_the_mean_of_its_crops(place: Path, tmp_path: Path) -> None:
    for per in ("crop", "item"):
        vitrail.embed(place / "mae", place / "em.zarr", out=tmp_path / f"{per}.safetensors", per=per, overlap=0.5)
    (crops, _), (items, _) = read(tmp_path / "crop.safetensors"), read(tmp_path / "item.safetensors")
    assert items["features"] == pytest.approx(crops["features"].mean(axis=0, keepdims=True), abs=1e-5)
    assert items["voxel"].tolist() == [[(n - 1) / 2 for n in SHAPE]]


def test_tokens_are_those_of_predictions(place: Path, tmp_path: Path) -> None:
    cut: dict[str, Any] = {"overlap": 0.25, "memory": 0.0002}
    vitrail.predict(
        place / "mae", place / "em.zarr", out=tmp_path / "p.npy", write="embeddings", overlap=0.25, blend="gaussian"
    )
    grid = np.load(tmp_path / "p.npy")
    for name, dtype in (("t.safetensors", "float16"), ("t.zarr", "float32")):
        vitrail.embed(place / "mae", place / "em.zarr", out=tmp_path / name, per="token", dtype=dtype, **cut)
        columns, facts = read(tmp_path / name)
        assert facts["cell"] == [4, 4, 4]
        assert columns["features"].dtype == dtype
        cells = ((columns["voxel"] - 1.5) / 4).astype(int)
        assert len({tuple(cell) for cell in cells}) == len(cells) == np.prod(grid.shape[1:])
        expected = grid[(slice(None), *cells.T)].T
        assert columns["features"] == pytest.approx(expected, abs=1e-2 if dtype == "float16" else 1e-5)


def test_folders_have_a_row_an_item(place: Path, values: np.ndarray, tmp_path: Path) -> None:
    folder = tmp_path / "volumes"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"v{number}.npy", values[0, :16, :16, number * 8 : number * 8 + 16])
    vitrail.embed(place / "mae", folder, out=tmp_path / "f.safetensors")
    columns, facts = read(tmp_path / "f.safetensors")
    assert [Path(name).name for name in facts["items"]] == ["v0.npy", "v1.npy", "v2.npy"]
    assert columns["item"].tolist() == [0, 1, 2]
    expected = plain(place / "mae", values[:, :16, :16, 8:24]).mean(dim=0).numpy()
    assert columns["features"][1] == pytest.approx(expected, abs=1e-5)


def test_refusals_are_sentences(place: Path, tmp_path: Path) -> None:
    run, volume = place / "mae", place / "em.zarr"
    (tmp_path / "there.zarr").mkdir()
    for options, words in [
        ({"out": tmp_path / "f.npy"}, r"f\.npy tells no format; give a path that ends in \.safetensors or \.zarr"),
        ({"out": tmp_path / "there.zarr"}, "exists and is not overwritten"),
        ({"out": tmp_path / "f.zarr", "per": "voxel"}, "per: 'voxel' is not known; choose item, crop or token"),
        ({"out": tmp_path / "f.zarr", "dtype": "uint8"}, "'uint8' holds no features"),
        ({"out": tmp_path / "f.zarr", "memory": 0}, "memory: 0 GiB must be above 0"),
    ]:
        with pytest.raises(UserError, match=words):
            vitrail.embed(run, volume, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there.zarr"]


def test_a_segmentation_embeds_too(place: Path, tmp_path: Path) -> None:
    run = train_segmentation(place, place / "em.zarr")
    made = vitrail.embed(run, place / "em.zarr", out=tmp_path / "f.safetensors", per="crop")
    assert made["features"] == 24
