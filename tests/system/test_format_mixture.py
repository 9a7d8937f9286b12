"""Volumes of different formats, shapes and voxel sizes train together, with and without labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import events, losses, tiny_recipe, vitrail, write_recipe

from vitrail.data.generate import Volume, write_ome_zarr

pytest.importorskip("nibabel")


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same smooth noise, stored three times: 8 nm in OME-Zarr, 20 x 12 x 12 nm in TIFF, 10 x 5 x 5 nm in NIfTI."""
    import nibabel
    import tifffile

    folder = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)

    def volume(*shape: int) -> np.ndarray:
        return rng.integers(0, 255, shape).astype(np.uint8)

    em = volume(40, 48, 56)
    write_ome_zarr(folder / "a.zarr", Volume(em, em // 128), levels=2, version="0.5", chunk=16)
    stack = volume(36, 44, 52)
    options = {"imagej": True, "resolution": (1 / 12, 1 / 12)}
    tifffile.imwrite(folder / "b_image.tif", stack, metadata={"axes": "ZYX", "spacing": 20, "unit": "nm"}, **options)
    tifffile.imwrite(folder / "b_label.tif", stack // 128 * np.uint8(255), compression="zlib")
    ct = volume(60, 50, 70)
    for name, values in (("c", ct), ("c_labels", ct // 128)):
        image = nibabel.Nifti1Image(values, np.diag([5e-6, 5e-6, 1e-5, 1]))
        image.header.set_xyzt_units("mm")
        nibabel.save(image, folder / f"{name}.nii.gz")
    return folder


def entries(folder: Path) -> list[dict[str, Any]]:
    return [
        {"path": str(folder / "a.zarr"), "spacing": [12, 12, 12]},
        {"path": str(folder / "b_image.tif"), "spacing": [24, 14, 14], "label_map": {255: 1}},
        {"path": str(folder / "c.nii.gz"), "unit": "nm", "spacing": [10, 7, 7], "region": {"x": [0.1, 1]}},
    ]


def test_three_formats_train_together(volumes: Path, tmp_path: Path) -> None:
    mixed = entries(volumes)
    tree = tiny_recipe(volumes, tmp_path / "run", run__steps=3, data__train=mixed, data__valid=mixed, data__workers=2)
    code, output = vitrail("train", write_recipe(tmp_path / "r.yaml", tree))
    assert code == 0, output
    assert np.isfinite(losses(tmp_path / "run")).all()
    assert len(events(tmp_path / "run", "train")) == 3


def test_labels_of_three_formats_train_together(volumes: Path, tmp_path: Path) -> None:
    a, b, c = entries(volumes)
    mixed = [a | {"labels": "structures"}, b, c | {"labels": str(volumes / "c_labels.nii.gz")}]
    tree = tiny_recipe(volumes, tmp_path / "run", run__steps=2, data__train=mixed, data__valid=mixed)
    tree["model"] = {
        "kind": "unetr",
        "ndim": 3,
        "encoder": {"width": 24, "depth": 2, "heads": 2, "patch": 4},
        "skips": False,
    }
    tree["objective"] = {"kind": "segment", "names": ["background", "bright"]}
    code, output = vitrail("train", write_recipe(tmp_path / "r.yaml", tree))
    assert code == 0, output
    assert np.isfinite(losses(tmp_path / "run")).all()
