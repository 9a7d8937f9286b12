"""A look at data: numbers, sentences on what to beware of, what to write in a recipe, and a picture of any source."""

import itertools
import re
from dataclasses import field
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from support import write_volume

from vitrail.data.dataset import Dataset
from vitrail.data.look.inspect import (
    decoded_per_voxel,
    entry_of,
    inspect,
    look,
    picture,
    read_settings,
    warn,
)
from vitrail.data.look.picture import spread, variable_groups
from vitrail.data.look.preview import touched
from vitrail.data.look.propose import suggest_crop, suggest_recipe
from vitrail.data.source import Item
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.errors import UserError
from vitrail.recipe import config, load_recipe, yaml


@config
class FakeConfig:
    path: str = "fake"
    kind: Literal["fake"] = "fake"
    region: dict[str, list[int | float]] = field(default_factory=dict)
    split: tuple[float, float] = (0.0, 1.0)
    start: float = 0.0
    end: float = 1.0
    level: int = 0


class Fake:
    """A source in memory."""

    def __init__(
        self,
        values,
        *,
        chunk=None,
        spacing=None,
        unit="nanometer",
        labels=None,
        names=("one",),
        variables=(),
        number=1,
        bad=(),
        **facts,
    ):
        self.values, self.labels, self.bad, self.facts = values, labels, set(bad), facts
        shape = values.shape[1:]
        self.axes = ("z", "y", "x")[-len(shape) :]
        self.variables = tuple(variables) or tuple(f"v{i}" for i in range(len(values)))
        self.dtype = values.dtype
        self.label_dtype = None if labels is None else labels.dtype
        self.label_names = dict(enumerate(names, 1))
        one = (1.0,) * len(shape)
        self.items = [
            Item(f"item{i}", shape, chunk or shape, (0,) * len(shape), spacing or one, unit) for i in range(number)
        ]

    def read(self, item, region):
        if item in self.bad:
            raise UserError(f"item{item}: chunk 3 is missing")
        return self.values[(slice(None), *region)]

    def read_labels(self, item, region):
        return self.labels[region]

    def describe(self):
        return {"kind": "fake", "path": "fake", **self.facts}


def noise(*shape: int, dtype="uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(1, 200, shape).astype(dtype)


def sentences(source: Fake) -> str:
    return "\n".join(warn(source, inspect(source), suggest_crop(source)))


def test_numbers_of_a_variable_are_those_of_its_values():
    values = noise(2, 20, 30, dtype="float32")
    values[0, :10] = 0
    values[1, 5, 5] = np.nan
    first, second = inspect(Fake(values), samples=2)["statistics"].values()
    assert first["zeros_percent"] == 50
    assert first["not_finite_percent"] == 0
    assert first["p50"] == np.percentile(values[0], 50)
    assert second["not_finite_percent"] == pytest.approx(100 / 600)
    assert second["mean"] == pytest.approx(np.nanmean(values[1].astype(float)))
    nothing = inspect(Fake(np.full((1, 4, 4), np.nan, "float32")), samples=1)["statistics"]["v0"]
    assert (nothing["mean"], nothing["not_finite_percent"], nothing["histogram"]) == (None, 100.0, None)


def test_labels_are_counted():
    labels = np.zeros((10, 10), np.int32)
    labels[:2] = 1
    found = inspect(Fake(noise(1, 10, 10), labels=labels), samples=1)
    assert found["label_percent"] == {"0": 80.0, "1": 20.0}
    assert found["label_names"] == {"1": "one"}


def test_classes_that_take_turns_are_all_counted():
    """Equal steps through 10,000 items would meet two of ten classes alone."""
    from dataclasses import replace

    source = Fake(noise(1, 8, 8), number=10_000)
    source.class_names = tuple("abcdefghij")
    source.items = [replace(item, label=number % 10) for number, item in enumerate(source.items)]
    counts = inspect(source, samples=1)["class_counts"]
    assert sum(counts.values()) == 2000
    assert min(counts.values()) > 140
    assert "unequal" not in sentences(source)


def test_an_ordinary_volume_needs_no_warning():
    assert sentences(Fake(noise(1, 128, 128, 128), chunk=(64, 64, 64), spacing=(8.0, 8.0, 8.0))) == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Fake(noise(1, 70, 70, 70), chunk=(32, 32, 32), unit=None), "no unit"),
        (Fake(noise(1, 32, 96, 96), spacing=(40.0, 4.0, 4.0)), "10 times as long along z"),
        (Fake(noise(1, 200, 200, 200)), r"the whole item \(7.63 MiB\)"),
        (Fake(noise(1, 64, 512, 512), chunk=(1, 512, 512)), "chunks of 1 x 512 x 512"),
        (Fake(noise(1, 30, 30, 30), path="scan.nii.gz"), "no random access"),
        (Fake(np.ones((1, 30, 30), "uint8")), "one value alone"),
        (Fake(np.where(noise(1, 30, 30) > 5, 1.0, np.nan)), "NaN or infinite"),
        (
            Fake(np.where(np.arange(10000).reshape(1, 100, 100) == 5, 60000, noise(1, 100, 100, dtype="uint16"))),
            "far out",
        ),
        (Fake(noise(1, 60, 60), labels=noise(60, 60, dtype="uint32") * 1000), "number things"),
        (Fake(noise(1, 60, 60), labels=np.eye(60, dtype="uint8") * 5), "label 5 has no name"),
        (Fake(noise(1, 60, 60), labels=np.eye(60, dtype="uint8") * 255, names=()), r'label_map: \{"255": 1\}'),
        (
            Fake(noise(1, 60, 60), labels=np.where(np.eye(60) > 0, 7, np.uint64(2**64 - 1)).astype("uint64"), names=()),
            r'label_map: \{"7": 1, "18446744073709551615": 0\}',
        ),
        (Fake(noise(1, 60, 60), labels=np.where(np.eye(60) > 0, 9, 4), names=()), r'label_map: \{"4": 0, "9": 1\}'),
        (Fake(noise(1, 30, 30), number=9, bad=(0, 1, 2)), r"of 8 crops cannot be read: item\d: chunk 3"),
        (Fake(noise(1, 30, 30), class_counts={"cat": 90, "dog": 3}), "dog has 3 items"),
        (Fake(noise(1, 30, 30), latitude="south first"), "stored south first"),
    ],
)
def test_what_may_go_wrong_is_told(source, words):
    assert re.search(words, sentences(source)), sentences(source)


def test_data_of_which_nothing_can_be_read_are_an_error():
    with pytest.raises(UserError, match="chunk 3 is missing"):
        inspect(Fake(noise(1, 30, 30), bad=(0,)))


def test_decoded_voxels_are_those_of_the_chunks_that_crops_touch():
    item = Item("a", (20, 30), (4, 7), (0, 0), (1.0, 1.0), None)
    crop = (6, 5)
    places = itertools.product(range(20 - 6 + 1), range(30 - 5 + 1))
    counts = [touched(item, (slice(a, a + 6), slice(b, b + 5))) for a, b in places]
    assert decoded_per_voxel(item, crop) == pytest.approx(np.mean(counts) / 30, rel=0.06)
    whole = Item("a", (20, 30), (20, 30), (0, 0), (1.0, 1.0), None)
    assert decoded_per_voxel(whole, crop) == 20
    assert touched(whole, (slice(3, 9), slice(1, 6))) == 600


@pytest.mark.parametrize(
    ("shape", "spacing", "number", "crop"),
    [
        ((512, 512, 512), (8.0, 8.0, 8.0), 1, (64, 64, 64)),
        ((30, 512, 512), (50.0, 4.0, 4.0), 1, (8, 64, 64)),
        ((96, 96, 96), (1.0, 1.0, 1.0), 1, (32, 32, 32)),
        ((32, 32), (1.0, 1.0), 1000, (32, 32)),
        ((28, 28), (1.0, 1.0), 1000, (28, 28)),
        ((241, 480), (0.75, 0.75), 20, (240, 256)),
        ((3, 3), (1.0, 1.0), 9, (3, 3)),
    ],
)
def test_a_crop_is_suggested(shape, spacing, number, crop):
    assert suggest_crop(Fake(np.zeros((1, *shape), "uint8"), spacing=spacing, number=number)) == crop


def test_a_part_is_held_out():
    def held_out(source: Fake, **changes) -> str:
        return suggest_recipe(source, FakeConfig(**changes), suggest_crop(source), {})

    assert "end: 0.8" in held_out(Fake(noise(1, 30, 30), number=30))
    assert "region: {x: [0, 0.68]}" in held_out(Fake(noise(1, 30, 300)))
    assert "region: {z: [0.8, 1]}" in held_out(Fake(noise(1, 500, 40, 40)))
    assert "# valid" in held_out(Fake(noise(1, 30, 300)), split=(0.0, 0.5))  # a part was chosen already
    classified = Fake(noise(1, 30, 30), number=30)
    classified.class_names = ("a", "b")
    assert "split: [0.8, 1]" in held_out(classified)


def test_slices_are_flat_samples():
    from dataclasses import replace

    source = Fake(noise(1, 40, 90, 120), spacing=(40.0, 4.0, 4.0))
    source.items = [replace(item, slices=0) for item in source.items]
    crop = suggest_crop(source)
    assert crop[0] == 1
    told = suggest_recipe(source, FakeConfig(), crop, {})
    assert "model: {ndim: 2}" in told
    assert "region: {z: [0, 0.8]}" in told
    assert f"crop: {crop[1]}" in told


def model(ndim: int, patch: int) -> dict:
    return {"kind": "mae", "ndim": ndim, "encoder": {"width": 12, "depth": 1, "heads": 1, "patch": patch}}


def test_the_suggested_recipe_opens_the_data(tmp_path):
    volume = str(write_volume(tmp_path / "my em.zarr", size=48))
    for number in range(40):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(9, 9)).save(folder / f"{number}.png")
    for path, ndim in ((volume, 3), (str(tmp_path / "images"), 2)):
        _, facts = look(path)
        tree = yaml.parse(facts["recipe"], "recipe")
        assert tree["model"]["ndim"] == ndim
        tree.pop("objective", None)
        recipe = load_recipe(tree | {"run": {"name": "a", "steps": 1}, "model": model(ndim, 2)})
        sizes = [recipe.data.crop] * ndim if isinstance(recipe.data.crop, int) else recipe.data.crop
        for entry in (*recipe.data.train, *recipe.data.valid):
            source = entry.open()
            assert all(n >= c for n, c in zip(source.items[0].shape, sizes, strict=True))
        assert recipe.data.valid
    assert facts["class_counts"] == {"a": 20, "b": 20}


def opens(facts: dict) -> tuple[Dataset, dict]:
    """The training data of the recipe that a look prints, and the recipe's tree."""
    tree = yaml.parse(facts["recipe"], "recipe")
    ndim, learns = tree["model"]["ndim"], tree.get("objective", {}).get("kind")
    rest = {"data": tree["data"], "run": {"name": "a", "steps": 1}, "model": model(ndim, 2)}
    data = load_recipe(rest).data
    crop = (data.crop,) * ndim if isinstance(data.crop, int) else tuple(data.crop)
    labels = {"segment": "voxel", "classify": "item"}.get(learns)
    train, valid = (
        Dataset(entries, crop, where=where, labels=labels, settings=data)
        for entries, where in ((data.train, "data.train"), (data.valid, "data.valid"))
    )
    assert train.variables == valid.variables
    return train, tree


def test_a_ct_is_told_of_its_window(tmp_path):
    values = np.random.default_rng(0).integers(-1000, 1500, (20, 32, 32))
    for dtype, told in (("int16", True), ("float32", False), ("uint8", False)):
        np.save(tmp_path / "a.npy", values.astype(dtype))
        _, facts = look(str(tmp_path / "a.npy"))
        assert any("{kind: window, window: [-1000, 400]}" in words for words in facts["warnings"]) == told


def test_places_without_data_are_looked_at(tmp_path):
    values = np.random.default_rng(0).random((20, 32, 32)).astype("float32")
    values[10] = np.nan
    np.save(tmp_path / "a.npy", values)
    source, facts = look(str(tmp_path / "a.npy"))
    assert facts["statistics"]["image"]["not_finite_percent"] == pytest.approx(5)
    assert facts["statistics"]["image"]["mean"] == pytest.approx(np.nanmean(values), rel=1e-4)
    assert not facts["unreadable"]
    assert any("`nodata: fill`" in told for told in facts["warnings"])
    assert picture(source, tmp_path / "a.png", facts=facts).is_file()
    assert facts["chunk"] == []  # not 1 x 1 x 1: any window is read alone


@pytest.mark.parametrize(
    ("stored", "number"),
    [((2**64 - 1, 1), 2), ((2**64 - 1, 5, 9), 3), ((0, 2**64 - 1, 3), 2), ((1, 2), 3), ((0, 1), 2), ((4, 9), 2)],
)
def test_a_recipe_for_labels_names_every_class(stored, number, tmp_path):
    h5py = pytest.importorskip("h5py")
    labels = np.full((16, 32, 32), stored[0], np.uint64)
    for place, value in enumerate(stored[1:]):
        labels[:, 8 + place * 6 : 12 + place * 6] = value
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"], file["clefts"] = noise(16, 32, 32), labels
    source, facts = look(str(tmp_path / "a.h5"), settings={"key": "raw", "labels": "clefts"})
    dataset, tree = opens(facts)
    assert len(tree["objective"]["names"]) == number
    seen = np.unique(dataset.sources[0].read_labels(0, tuple(slice(0, n) for n in dataset.sources[0].items[0].shape)))
    assert seen.max() == number - 1
    assert picture(source, tmp_path / "a.png", facts=facts).is_file()


def test_images_of_many_sizes_are_fitted(tmp_path):
    for number in range(40):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(9 + number, 30)).save(folder / f"{number:02}.png")
    _, facts = look(str(tmp_path / "images"))
    _, tree = opens(facts)
    assert tree["data"]["crop"] == tree["data"]["fit"]["resize"]
    assert any("data.fit brings them to one size" in told for told in facts["warnings"])
    tree["data"].pop("fit")
    with pytest.raises(UserError, match=r"9 x 30 pixels .* set data.fit: \{resize: 28\}.* or use a smaller crop"):
        Dataset([ImageFolderConfig(path=str(tmp_path / "images"))], (28, 28), where="data.train")


def test_a_part_that_is_held_out_already_is_used(tmp_path):
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    held = io.BytesIO()
    Image.fromarray(noise(8, 8)).save(held, "PNG")
    rows = pa.table({"image": [held.getvalue()] * 30, "label": [0, 1] * 15})
    for part in ("train", "test"):
        pq.write_table(rows, tmp_path / f"{part}.parquet")
    _, facts = look(str(tmp_path))
    _, tree = opens(facts)
    assert tree["data"]["train"] == [{"path": str(tmp_path)}]
    assert tree["data"]["valid"] == [{"path": str(tmp_path), "part": "test"}]
    _, facts = look(str(tmp_path / "train.parquet"))
    assert "split: [0.8, 1]" in facts["recipe"]


def test_labels_among_images_are_noted(tmp_path):
    for name in ("ct", "ct_seg"):
        np.save(tmp_path / f"{name}.npy", noise(16, 16, 16))
    _, facts = look(str(tmp_path), kind="numpy")
    assert any(
        told.startswith("ct_seg.npy is read as an image, and is named like labels") for told in facts["warnings"]
    )
    (tmp_path / "ct_seg.npy").rename(tmp_path / "segovia.npy")
    _, facts = look(str(tmp_path), kind="numpy")
    assert not any("named like labels" in told for told in facts["warnings"])


def test_labels_of_a_volume_are_found_and_drawn(tmp_path):
    source, facts = look(str(write_volume(tmp_path / "em.zarr", size=32)))
    assert source.label_dtype is not None
    assert "labels: structures" in facts["recipe"]
    assert sum(facts["label_percent"].values()) == pytest.approx(100)
    with Image.open(picture(source, tmp_path / "a.png", facts=facts)) as drawn:
        assert drawn.size[0] > 800


def test_pictures_of_many_variables_labels_and_broken_values(tmp_path):
    values = noise(6, 20, 40, dtype="float32")
    values[0, :5] = np.nan
    for name, source in {
        "fields": Fake(values, number=3),
        "labels": Fake(noise(1, 20, 40), labels=np.eye(20, 40, dtype="int64") * 1000),
        "flat": Fake(noise(3, 2, 900), variables=("red", "green", "blue")),
        "volume": Fake(noise(2, 3, 90, 20), spacing=(30.0, 1.0, 1.0), labels=noise(3, 90, 20)),
        "constant": Fake(np.zeros((1, 9, 9, 9), "int16")),
    }.items():
        path = picture(source, tmp_path / f"{name}.png", facts=inspect(source))
        assert path.stat().st_size < 450_000
        with Image.open(path) as drawn:
            assert min(drawn.size) > 200


def test_small_parts():
    assert spread(3, 8) == [0, 1, 2]
    places = spread(100, 4)
    assert places == spread(100, 4)
    assert [place // 25 for place in places] == [0, 1, 2, 3]
    assert spread(10_000, 1)[0] < 10_000
    assert variable_groups(("blue", "green", "red"))[0][1] == [2, 1, 0]
    assert len(variable_groups([f"v{i}" for i in range(9)])) == 4
    assert read_settings(["level=1", "region={x: [0, 0.5]}"]) == {"level": 1, "region": {"x": [0, 0.5]}}
    with pytest.raises(UserError, match="expected key=value"):
        read_settings(["level"])


def test_wrong_settings_name_the_key():
    with pytest.raises(UserError, match=r"--set levl: .* did you mean 'level'"):
        entry_of(FakeConfig, {"levl": 1})
    with pytest.raises(UserError, match=r"--set level: .*integer"):
        entry_of(FakeConfig, {"level": "x"})


@pytest.mark.parametrize(("dtype", "size"), [("uint8", 1), ("uint16", 2), ("uint32", 4)])
def test_speed_is_that_of_bytes_as_they_are_stored(dtype, size, tmp_path):
    """Types that PyTorch lacks are widened on their way: that makes nothing faster."""
    import torch

    from vitrail.data.look.preview import measure_io
    from vitrail.data.reading.loader import Loader
    from vitrail.data.sources.arrays import NumpyConfig

    np.save(tmp_path / "a.npy", noise(32, 32, dtype=dtype))
    dataset = Dataset([NumpyConfig(path=str(tmp_path / "a.npy"))], (16, 16), where="data.train")
    sampler = dataset.sampler(seed=0, lanes=1, reuse=1)
    reader = dataset.reader(sampler, lanes=1, cache_bytes=2**20)
    loader = Loader(sampler, reader, lambda step: [step], device=torch.device("cpu"), workers=1, prefetch=1)
    found = measure_io(loader, seconds=0.01)
    assert found["gb_per_s"] * 1e9 == pytest.approx(found["samples_per_s"] * 16 * 16 * size)


def test_the_probe_counts_every_chunk_once(tmp_path):
    """A volume of 3 x 3 x 3 chunks, cold: crops all over it decode each chunk once, and then nothing more."""
    import torch

    from vitrail.data.look.preview import probed
    from vitrail.data.reading.loader import Loader
    from vitrail.data.sources.zarr import OmeZarrConfig

    path = write_volume(tmp_path / "em.zarr", size=48)  # chunks of 16
    dataset = Dataset([OmeZarrConfig(path=str(path))], (16, 16, 16), where="data.train")
    sampler = dataset.sampler(seed=0, lanes=1, reuse=1)
    loader = Loader(
        sampler,
        dataset.reader(sampler, lanes=1, cache_bytes=2**26),
        device=torch.device("cpu"),
        workers=2,
        prefetch=1,
    )
    with probed(loader) as probe:
        loader.load(range(200))
        assert probe.decoded == 27 * 16**3
        assert probe.shares()["read and decode"] > 0
        assert sum(probe.shares().values()) == pytest.approx(100)
        probe.reset()
        loader.load(range(200, 220))
        assert probe.decoded == 0
