"""Data as users of the seeds have them train from a recipe that was converted, with the labels that belong to them.

Each is written here as it lies on their disks, with labels that follow from the values; the real files, where they are
at hand, go the same way.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT, events

import vitrail
from vitrail.cli import main
from vitrail.convert import convert
from vitrail.cost.plan import plan
from vitrail.data import batches
from vitrail.errors import UserError
from vitrail.recipe import load_recipe, yaml

SEEDS = ROOT / "tests/golden/seeds"
REAL = ROOT.parent / "shared" / "data"
NET = "model.net.init_args."
DITAN = "torchditan/llama3_latent_diffusion.toml"
FIELDS = [f"{name}@{level}" for name in "uvz" for level in (200, 500, 850)]
# A model that takes a step in a few milliseconds, on whatever the converted recipe reads.
TINY = [
    "run.device=cpu",
    "run.steps=2",
    "parallel=null",
    "precision={compute: fp32}",
    "schedule.warmup=1",
    "data.batch=2",
]
TINY += ["checkpoint.every=off", "log={every: 1, pictures: off, to: [], report: false}"]
ENCODER = ["width=24", "depth=4", "heads=2"]
DIT = ["model.width=24", "model.depth=1", "model.heads=2", "objective.sampling.steps=1"]


def ucf(folder: Path, task: str, root: Path, names: list[str], **changes: Any) -> list[str]:
    """Write a file of UCF-VIT for a dataset at `root`; the words that convert it."""
    tree = yaml.read(SEEDS / f"ucf-vit/{task}/base_config.yaml")
    (name,) = tree["data"]["dict_root_dirs"]
    changes |= {
        f"data__{key}": {name: item} for key, item in (("dict_root_dirs", str(root)), ("dict_in_variables", names))
    }
    changes |= {"data__num_channels_used": {name: len(names)}, "net__default_vars": names}
    for key, item in changes.items():
        *above, last = key.replace("net__", NET.replace(".", "__")).split("__")
        place = tree
        for part in above:
            place = place[part]
        place[last] = item
    path = folder / task.rpartition("/")[2] / "base_config.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps(tree))
    return [str(path)]


def small(*words: str) -> list[str]:
    return [f"model.encoder.{word}" for word in (*ENCODER, *words)]


# ------------------------------------------------------------ what lies on disks


def basic_ct(folder: Path) -> tuple[list[str], list[str]]:
    """UCF-VIT's volumes, image0.nii and label0.nii, whose classes are stored from 1 on: here one for each 100 units."""
    nibabel = pytest.importorskip("nibabel")
    (folder / "ct").mkdir()
    for number in range(2):
        labels = np.random.default_rng(number).integers(1, 5, (32, 32, 32), dtype=np.uint8)
        labels[0, 0, :4] = 1, 2, 3, 4
        for name, voxels in (("image", labels.astype(np.int16) * 100), ("label", labels)):
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / f"ct/{name}{number}.nii")
    more = {"net__tile_size": [16, 16, 16], "net__fixed_length": 8}
    return ucf(folder, "basic_ct/unetr", folder / "ct", ["ct_res1"], **more), [*small(), "model.features=4"]


def ct_is_right(batch: Any) -> None:
    assert batch.labels.unique().tolist() == [0, 1, 2, 3]
    assert np.array_equal(batch.values[:, 0].numpy() / 100 - 1, batch.labels.numpy())


def era(folder: Path) -> tuple[list[str], list[str]]:
    """Fields of a reanalysis, of which UCF-VIT would know each level by a name of its own."""
    netcdf = pytest.importorskip("netCDF4")
    path = REAL / "era_interim/eraint_uvz.nc"
    if not path.is_file() or folder.name == "made":
        path = folder / "era.nc"
        with netcdf.Dataset(path, "w") as file:
            axes = {
                "month": [1, 7],
                "level": [200, 500, 850],
                "latitude": [*range(90, -74, -4)],
                "longitude": [*range(64)],
            }
            for axis, places in axes.items():
                file.createDimension(axis, len(places))
                file.createVariable(axis, "f4", (axis,))[:] = places
            for number, name in enumerate("uvz"):
                values = np.arange(2 * 3).reshape(2, 3, 1, 1) + 10 * number + np.zeros((2, 3, 41, 64))
                file.createVariable(name, "f8", tuple(axes))[:] = values
    more = {"data__dataset": "era", "net__use_varemb": True, "net__adaptive_patching": False}
    more |= {"net__tile_size": [32, 32], "net__patch_size": 8}
    words = ["model.decoder={kind: self, width: 24, depth: 1, heads: 2}"]
    return ucf(folder, "imagenet/mae", path, FIELDS, **more), [*small(), *words]


def era_is_right(batch: Any) -> None:
    """The winds of 200 hPa are the strongest, and geopotential grows with height."""
    assert list(batch.variables) == FIELDS
    means = dict(zip(FIELDS, batch.values.double().mean(dim=(0, 2, 3)).tolist(), strict=True))
    if means["z@200"] > 1000:
        assert means["z@200"] > means["z@500"] > means["z@850"] > 0
        assert means["u@200"] > means["u@850"]
        return
    for number, name in enumerate("uvz"):
        assert [means[f"{name}@{level}"] - 10 * number for level in (200, 500, 850)] == pytest.approx(
            [0, 1, 2], abs=3.01
        )
        assert means[f"{name}@850"] - means[f"{name}@200"] == pytest.approx(2)


def isbi(folder: Path) -> tuple[list[str], list[str]]:
    """One stack, image.tif, and label.tif, in which 255 is the inside of cells, which is bright; membranes are dark."""
    tifffile = pytest.importorskip("tifffile")
    root = REAL / "isbi2012"
    if not root.is_dir() or folder.name == "made":
        root = folder / "isbi"
        root.mkdir()
        image = np.random.default_rng(0).integers(0, 255, (5, 64, 64), dtype=np.uint8)
        tifffile.imwrite(root / "image.tif", image, photometric="minisblack")
        tifffile.imwrite(root / "label.tif", np.where(image > 127, 255, 0).astype(np.uint8))
    more = {"data__dataset": "isbi", "data__num_classes": 2, "net__twoD": True, "net__tile_size": [32, 32]}
    given = ucf(folder, "basic_ct/unetr", root, ["em"], **more, net__fixed_length=16)
    return given, [*small(), "model.features=4", "data.train.0.slices=z", "data.train.0.label_map={255: 1}"]


def isbi_is_right(batch: Any) -> None:
    assert batch.values.shape[2:] == batch.labels.shape[1:] == (32, 32)
    inside = batch.labels == 1
    assert 0 < inside.float().mean() < 1
    assert batch.values[:, 0][inside].float().mean() > batch.values[:, 0][~inside].float().mean() + 20


def cifar(folder: Path) -> tuple[list[str], list[str]]:
    """CIFAR-10's binary version; of what is made, an image is as bright as its class says."""
    (folder / "cifar").mkdir()
    rows = [(number % 10, np.full((3, 32, 32), 20 * (number % 10), np.uint8)) for number in range(20)]
    parquet = REAL / "cifar10/test.parquet"
    if parquet.is_file() and folder.name != "made":
        source = vitrail.recipe.kinds.find("source", "parquet")(path=str(parquet)).open()
        whole = (slice(0, 32), slice(0, 32))
        rows = [(source.items[number].label, source.read(number, whole)) for number in range(20)]
    (folder / "cifar/data_batch_1.bin").write_bytes(b"".join(bytes([label]) + image.tobytes() for label, image in rows))
    words = ["dataset_name=cifar10", f"root_dir={folder}/cifar", "num_classes=10"]
    words = [f"--dataset.{word}" for word in words] + ["--model.input_channels=3"]
    return [str(SEEDS / DITAN), "--", *words], DIT


def cifar_is_right(batch: Any) -> None:
    assert batch.values.shape[1:] == (3, 32, 32)
    if (batch.values == batch.values[:, :1, :1, :1]).all():
        assert (batch.values[:, 0, 0, 0] // 20).tolist() == batch.labels.tolist()


def em(folder: Path) -> tuple[list[str], list[str]]:
    """torchtitan-mae's folder of volumes, DATA/NAME/NAME.zarr/recon-1/em/fibsem-uint8/s0, of many sizes."""
    import zarr

    for number, size in enumerate((32, 48)):
        group = zarr.open_group(str(folder / f"em/jrc_{number}/jrc_{number}.zarr"), mode="w")
        array = group.create_array("recon-1/em/fibsem-uint8/s0", shape=(size,) * 3, chunks=(16,) * 3, dtype="uint8")
        array[:] = 100 + number
    words = [f"--training.data_dir={folder}/em", "--training.img_size=16", "--training.mask_ratio=0.5"]
    decoder = "model.decoder={kind: self, width: 24, depth: 1, heads: 2}"
    made = [*small("hidden=48", "kv_heads=1"), decoder]
    return [str(SEEDS / "torchtitan-mae/demo.toml"), "--", *words], made


def em_is_right(batch: Any) -> None:
    assert batch.values.shape[1:] == (1, 16, 16, 16)
    assert set(batch.values.unique().tolist()) <= {100, 101}


def latents(folder: Path) -> tuple[list[str], list[str]]:
    """TorchDiTan's latents of Cosmos-Tokenizer-CI8x8: one file, bytes x that stand for x * 16 / 255, and classes."""
    from safetensors.numpy import save_file

    labels = np.arange(20) % 5
    stored = np.full((20, 16, 8, 8), 40, np.uint8) * labels.astype(np.uint8)[:, None, None, None]
    save_file({"latents": stored, "labels": labels.astype(np.int16)}, str(folder / "ci8x8.safetensors"))
    words = [f"root_dir={folder}/ci8x8.safetensors", "num_classes=5", "image_size=[8, 8]"]
    return [str(SEEDS / DITAN), "--", *(f"--dataset.{word}" for word in words)], DIT


def latents_are_right(batch: Any) -> None:
    assert batch.values.shape[1:] == (16, 8, 8)
    assert batch.values[:, 3, 4, 5].tolist() == pytest.approx([40 * 16 / 255 * k for k in batch.labels.tolist()])


CASES: dict[str, tuple[Callable[[Path], tuple[list[str], list[str]]], Callable[[Any], None]]] = {
    "basic_ct": (basic_ct, ct_is_right),
    "era": (era, era_is_right),
    "isbi": (isbi, isbi_is_right),
    "cifar": (cifar, cifar_is_right),
    "em": (em, em_is_right),
    "latents": (latents, latents_are_right),
}
HERE = {"era": "era_interim", "isbi": "isbi2012", "cifar": "cifar10"}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "made") for name in CASES), *((name, "real") for name in HERE)], ids=lambda word: word
)
def test_data_of_the_seeds_train_from_a_converted_recipe(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "real" and not (REAL / HERE[name]).is_dir():
        pytest.skip("the real data are not here")
    write, is_right = CASES[name]
    (tmp_path / kind).mkdir()
    given, changes = write(tmp_path / kind)
    recipe = tmp_path / "recipe.yaml"
    words = given[1:]
    with pytest.raises(SystemExit) as done:
        main(["convert", given[0], "-o", str(recipe), *words])
    assert done.value.code == 0
    overrides = [*TINY, *changes, f"run.dir={tmp_path}/run"]
    found = list(batches(recipe, overrides=[*overrides, "data.batch=8"], last=2))
    assert [len(batch) for batch in found] == [8, 8]
    for batch in found:
        is_right(batch)
    assert vitrail.train(recipe, overrides=overrides, quiet=True).code == 0
    lines = events(tmp_path / "run", "train")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(np.isfinite(line["loss"]) for line in lines)


def test_what_stacks_of_slices_still_need_is_said(tmp_path: Path) -> None:
    """The file of UCF-VIT does not say along which axis the stack lies, nor that its labels are 0 and 255."""
    (tmp_path / "made").mkdir()
    given, changes = isbi(tmp_path / "made")
    tree = convert(given[0]).tree
    *changes, slices, _ = changes
    with pytest.raises(
        UserError, match=r"the model has 2; set model\.ndim to 3, cut it .* data\.train\.0\.slices=z, or"
    ):
        next(batches(tree, overrides=[*TINY, *changes]))
    with pytest.raises(UserError, match=r"label 255 at voxel .* renumber them with label_map in the entry of the data"):
        next(batches(tree, overrides=[*TINY, *changes, slices]))


FILES = sorted(path for path in SEEDS.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SEEDS).with_suffix("")))
def test_a_converted_recipe_is_planned_as_it_is(path: Path) -> None:
    """At the size that the file says, and without its data."""
    gpus = 1 if "torchditan" in path.parts else 32  # which says that it has one
    (found,) = plan(load_recipe(convert(path).tree), cluster="dgx_h100", gpus=gpus, as_is=True)
    assert found.samples_per_second > 0
