"""Labels on their way from the files to a batch: always of the very same voxels, and of the class that was meant."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from support import events, merge, tiny_recipe
from test_loader import ArraySource, bytes_of

import vitrail
from vitrail import disk
from vitrail.data.batch import Batch, Labelling, Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.formats.ngff import write_ome_zarr
from vitrail.data.generate import write_digits
from vitrail.data.reading.loader import Loader
from vitrail.data.source import ClassifiedSource, LabelledSource
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.layers.variables import VariablesConfig
from vitrail.models.vit import ViTConfig
from vitrail.objectives.classify import ClassifyConfig
from vitrail.objectives.segment import SegmentConfig
from vitrail.recipe.sections import Data, Run
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.evaluate import Evaluator
from vitrail.training.setup import DataParts, complete, labelling_of

NAMES = ("background", "membrane", "mitochondria", "vesicles", "nucleus")
SHAPE = (20, 24, 28)
ANIMALS = ("cat", "dog", "fox")
NUMBERS = {
    "samples": 0,
    "optimizer_steps": 0,
    "skipped": 0,
    "skipped_in_a_row": 0,
    "threads": 1,
    "statistics": {"mean": [0.0], "std": [1.0]},
    "recipe": {},
}  # what every manifest holds


@dataclasses.dataclass
class Volume:
    image: np.ndarray
    labels: np.ndarray | None
    label_names: tuple[str, ...] = NAMES


def labels_of(values: Any) -> Any:
    """The label that belongs to a voxel's value: any shift or turn of one against the other would show."""
    return values // 3 % len(NAMES)


@pytest.fixture(scope="module")
def zarr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume in which every voxel has a value of its own, and labels that follow from it."""
    values = np.random.default_rng(0).permutation(np.prod(SHAPE)).reshape(SHAPE).astype(np.uint16)
    path = tmp_path_factory.mktemp("labels") / "a.zarr"
    return write_ome_zarr(path, Volume(values, labels_of(values).astype(np.uint8)), levels=1, chunk=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and valid/ of images whose grey value is ten times their class; valid/ lacks the second class."""
    root = tmp_path_factory.mktemp("images")
    for part, classes in (("train", ANIMALS), ("valid", ("cat", "fox"))):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            value = 10 * ANIMALS.index(name) + 5
            for number in range(4):
                Image.fromarray(np.full((8, 8), value, np.uint8)).save(root / part / name / f"{number}.png")
    return root


def load(dataset: Dataset, labelling: Labelling | None, counters: range = range(40), **options: Any) -> Iterator[Batch]:
    settings = {"lanes": 4, "reuse": 4, "turn": True, "workers": 2, "cache": 1 << 20} | options
    sampler = dataset.sampler(seed=1, lanes=settings["lanes"], reuse=settings["reuse"], turn=settings["turn"])
    reader = dataset.reader(sampler, lanes=4, cache_bytes=settings["cache"], labelling=labelling)
    loader = Loader(
        sampler,
        reader,
        lambda step: counters[step * 4 : step * 4 + 4],
        device=torch.device("cpu"),
        workers=settings["workers"],
        prefetch=2,
    )
    return loader.batches(0, len(counters) // 4)


# ---------------------------------------------------------------- voxels


@pytest.mark.parametrize("cache", [0, 1 << 20])
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("crop", [(8, 8, 8), (6, 10, 6), (5, 7, 9)])
def test_labels_are_those_of_the_same_voxels(zarr: Path, cache: int, workers: int, crop: tuple[int, ...]) -> None:
    source = OmeZarrConfig(path=str(zarr), labels="structures", region={"x": [3, 27], "z": [1, 20]})
    dataset = Dataset([source], crop, where="data.train", labels="voxel")
    seen = set()
    for batch in load(dataset, Labelling("voxel", NAMES), cache=cache, workers=workers):
        assert batch.labels is not None
        assert batch.labels.shape == (4, *crop)
        assert torch.equal(batch.labels, labels_of(batch.values[:, 0]))
        assert batch.variables == ("image",)
        seen |= set(batch.values.flatten().tolist())
        part = batch.narrow(1, 3)
        assert part.labels is not None
        assert torch.equal(part.labels, batch.labels[1:3])
        assert part.variables == batch.variables
    assert len(seen) > 1000


def test_whole_blocks_hold_labels_within_the_limit_of_memory(zarr: Path) -> None:
    dataset = Dataset(
        [OmeZarrConfig(path=str(zarr), labels="structures")], (6, 6, 6), where="data.train", labels="voxel"
    )
    sampler = dataset.sampler(seed=1, lanes=4, reuse=4)
    labelling = Labelling("voxel", NAMES)
    enough = 4 * sampler.largest_block * 3  # two bytes of image and one of labels
    assert dataset.reader(sampler, lanes=4, cache_bytes=enough, labelling=labelling).whole_blocks
    assert not dataset.reader(sampler, lanes=4, cache_bytes=enough - 1, labelling=labelling).whole_blocks
    assert dataset.reader(sampler, lanes=4, cache_bytes=enough - 1).whole_blocks

    dataset.sources[0].keeps_chunks = dataset.sources[0].reads_straight = False  # as those of other formats
    reader = dataset.reader(sampler, lanes=4, cache_bytes=enough, labelling=labelling)
    out, labels = np.empty((1, 6, 6, 6), reader.dtype), np.empty((6, 6, 6), reader.label_dtype)
    for counter in range(60):
        reader.read_into(out, sampler(counter), labels)
        np.testing.assert_array_equal(labels, labels_of(out[0]))
        assert bytes_of(reader.blocks) == reader.blocks.bytes <= enough
    assert len(reader.blocks)


def test_labels_that_nobody_needs_are_not_read(zarr: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset([OmeZarrConfig(path=str(zarr), labels="structures")], (6, 6, 6), where="data.train")
    monkeypatch.setattr(dataset.sources[0], "read_labels", None)
    batch = next(load(dataset, None))
    assert batch.labels is None
    assert batch.narrow(0, 2).labels is None


def test_a_label_of_no_class_is_told_with_its_place(zarr: Path) -> None:
    dataset = Dataset(
        [OmeZarrConfig(path=str(zarr), labels="structures")], (8, 8, 8), where="data.train", labels="voxel"
    )
    with pytest.raises(
        UserError, match=r"a.zarr: label 4 at voxel \[\d+, \d+, \d+\] .* 4 classes are 0 \(background\)"
    ):
        list(load(dataset, Labelling("voxel", NAMES[:4])))
    for batch in load(dataset, Labelling("voxel", NAMES[:4], ignore=4)):
        assert batch.labels is not None
        assert int(batch.labels.max()) == 4


class Own(ArraySource):
    kind = "own"


def test_missing_labels_are_asked_for(zarr: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.valid.0: .* `labels: structures` \(it has structures\)"):
        Dataset([OmeZarrConfig(path=str(zarr))], (8, 8, 8), where="data.valid", labels="voxel")
    bare = write_ome_zarr(tmp_path / "bare.zarr", Volume(np.zeros(SHAPE, np.uint8), None), levels=1)
    with pytest.raises(UserError, match="it has none"):
        Dataset([OmeZarrConfig(path=str(bare))], (8, 8, 8), where="data.train", labels="voxel")
    with pytest.raises(UserError, match=r"data.train.0: .* none are found for .*train; say where .* with `labels`"):
        Dataset([ImageFolderConfig(path=str(folder / "train"))], (8, 8), where="data.train", labels="voxel")
    with pytest.raises(UserError, match=r"data.train.0: .* which data of kind own cannot have; use one that can"):
        Dataset([Own(np.zeros((1, 8, 8), np.uint8))], (8, 8), where="data.train", labels="voxel")
    with pytest.raises(UserError, match=r"data.train.0: .* class of every image, .* one folder a class"):
        Dataset([ImageFolderConfig(path=str(folder / "train/cat"))], (8, 8), where="data.train", labels="item")
    with pytest.raises(UserError, match="class of every image"):
        Dataset([OmeZarrConfig(path=str(zarr))], (8, 8, 8), where="data.train", labels="item")


def test_sources_say_what_they_have(zarr: Path, folder: Path) -> None:
    volume = OmeZarrConfig(path=str(zarr), labels="structures").open()
    assert isinstance(volume, LabelledSource)
    assert volume.label_names == dict(enumerate(NAMES))
    assert volume.label_dtype == np.uint8
    assert OmeZarrConfig(path=str(zarr)).open().label_dtype is None
    assert isinstance(ImageFolderConfig(path=str(folder / "train")).open(), ClassifiedSource)


def test_labels_on_other_axes_or_of_another_type_are_refused(zarr: Path, tmp_path: Path) -> None:
    values = np.zeros((16, 16, 16), np.uint8)
    path = write_ome_zarr(tmp_path / "turned.zarr", Volume(values, values), levels=1)
    (path / "s0" / disk.MARK).unlink()  # it tells of metadata that somebody has changed
    metadata = path / "labels" / "structures" / "zarr.json"
    document = json.loads(metadata.read_text())
    document["attributes"]["ome"]["multiscales"][0]["axes"].reverse()
    metadata.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"have the axes x, y, z, the image z, y, x"):
        OmeZarrConfig(path=str(path), labels="structures").open()
    path = write_ome_zarr(tmp_path / "floats.zarr", Volume(values, values.astype(np.float32)), levels=1)
    with pytest.raises(UserError, match="float32; they must be one whole number"):
        OmeZarrConfig(path=str(path), labels="structures").open()


# ---------------------------------------------------------------- items


def test_classes_of_items_go_by_their_names(folder: Path) -> None:
    """Folders of one part or source may lack a class, or come in another order; the numbers stay those of the names."""
    train = Dataset([ImageFolderConfig(path=str(folder / "train"))], (8, 8), where="data.train", labels="item")
    valid = Dataset(
        [ImageFolderConfig(path=str(folder / part)) for part in ("valid", "train")],
        (8, 8),
        where="data.valid",
        labels="item",
    )
    assert train.class_names() == ("cat", "dog", "fox")
    assert valid.class_names() == ("cat", "fox", "dog")
    for dataset in (train, valid):
        for names in (("cat", "dog", "fox"), ("fox", "bird", "dog", "cat")):
            for batch in load(dataset, Labelling("item", names), workers=0):
                assert batch.labels is not None
                assert batch.labels.dtype == torch.int64
                meant = [ANIMALS[int(v) // 10] for v in batch.values[:, 0, 0, 0]]
                assert [names[int(label)] for label in batch.labels] == meant


# ---------------------------------------------------------------- recipes


def recipe_of(model: Any, objective: Any, crop: int) -> Any:
    """What complete() looks at."""
    data = Data(train=(SimpleNamespace(path="a"),), crop=crop, batch=4)
    recipe = vitrail.recipe.Recipe
    return recipe.model_construct(run=Run(name="a", steps=1), model=model, objective=objective, data=data)


def parts(*datasets: Dataset) -> DataParts:
    return DataParts(datasets[0], datasets[1] if len(datasets) > 1 else None, Statistics((0.0,), (1.0,)), 4)


def vit(**changes: Any) -> ViTConfig:
    settings = {"width": 16, "depth": 1, "heads": 2, "patch": 4, "channels": 1, "classes": None}
    return ViTConfig(**(settings | changes))


def images(folder: Path, part: str = "train", **options: Any) -> Dataset:
    config = ImageFolderConfig(path=str(folder / part), **options)
    return Dataset([config], (8, 8), where=f"data.{part}", labels="item")


def test_the_data_give_the_classes(folder: Path) -> None:
    data = parts(images(folder), images(folder, "valid"))
    for classes in (None, 0, 3):
        done = complete(recipe_of(vit(classes=classes), ClassifyConfig(), 8), data)
        assert done.model.classes == 3
        assert done.model.shape == (8, 8)
        assert done.objective.names == ("cat", "dog", "fox")
        assert complete(done, data) == done
    assert labelling_of(done, data.train) == Labelling("item", ("cat", "dog", "fox"))
    with pytest.raises(
        UserError, match=r"model.classes: 10, but the data have 3 classes \(cat, dog, fox\); set it to 3"
    ):
        complete(recipe_of(vit(classes=10), ClassifyConfig(), 8), data)
    named = ClassifyConfig(names=("fox", "dog", "cat", "bird"))
    assert complete(recipe_of(vit(), named, 8), data).model.classes == 4
    with pytest.raises(UserError, match=r"model.classes: 3, but objective.names has 4 classes"):
        complete(recipe_of(vit(classes=3), named, 8), data)
    with pytest.raises(UserError, match=r"data.train: class 'fox' is not among the classes \['cat', 'dog'\]"):
        complete(recipe_of(vit(), ClassifyConfig(names=("cat", "dog")), 8), data)
    with pytest.raises(UserError, match=r"data.train: class 'dog' is not among"):
        complete(
            recipe_of(vit(), ClassifyConfig(), 8),
            parts(images(folder, "valid"), images(folder)),
        )


def volumes(zarr: Path, where: str = "data.train") -> Dataset:
    return Dataset([OmeZarrConfig(path=str(zarr), labels="structures")], (8, 8, 8), where=where, labels="voxel")


def test_label_volumes_give_the_classes(zarr: Path, tmp_path: Path) -> None:
    model = vit(ndim=3)
    done = complete(recipe_of(model, SegmentConfig(), 8), parts(volumes(zarr)))
    assert done.objective.names == NAMES
    assert done.model.classes == len(NAMES)
    assert labelling_of(done, volumes(zarr)) == Labelling("voxel", NAMES)
    done = complete(recipe_of(model, SegmentConfig(ignore=4), 8), parts(volumes(zarr)))
    assert done.objective.names == NAMES[:4]
    assert labelling_of(done, volumes(zarr)) == Labelling("voxel", NAMES[:4], 4)
    done = complete(recipe_of(model, SegmentConfig(ignore=0), 8), parts(volumes(zarr)))
    assert done.objective.names == NAMES
    with pytest.raises(UserError, match=r"model.classes: 3, but the data have 5 classes \(background, membrane"):
        complete(recipe_of(vit(ndim=3, classes=3), SegmentConfig(), 8), parts(volumes(zarr)))

    values = np.zeros(SHAPE, np.uint8)
    unnamed = write_ome_zarr(tmp_path / "unnamed.zarr", Volume(values, values, ()), levels=1)
    with pytest.raises(UserError, match=r"do not name their classes; set objective.names"):
        complete(recipe_of(model, SegmentConfig(), 8), parts(volumes(unnamed)))
    done = complete(recipe_of(vit(ndim=3, classes=2), SegmentConfig(), 8), parts(volumes(unnamed)))
    assert done.objective.names == ("class 0", "class 1")
    done = complete(recipe_of(model, SegmentConfig(names=("a", "b", "c")), 8), parts(volumes(unnamed)))
    assert done.model.classes == 3

    other = write_ome_zarr(tmp_path / "other.zarr", Volume(values, values, ("background", "vesicles")), levels=1)
    with pytest.raises(UserError, match=r"data.valid: its labels mean \['background', 'vesicles'\]"):
        complete(recipe_of(model, SegmentConfig(), 8), parts(volumes(zarr), volumes(other, "data.valid")))
    both = [OmeZarrConfig(path=str(path), labels="structures") for path in (zarr, other)]
    with pytest.raises(UserError, match=r"data.train.1: label 1 is 'vesicles' here but 'membrane' in another"):
        Dataset(both, (8, 8, 8), where="data.train", labels="voxel").class_names()


@pytest.mark.parametrize(
    ("named", "ignore", "words"),
    [
        (
            {0: "bg", 1: "cell", 255: "unlabelled"},
            None,
            "label 255 is named, 2 to 254 are not: set objective.ignore: 255",
        ),
        ({0: "bg", 2: "cell"}, None, "label 2 is named, 1 is not: set objective.ignore: 2 or objective.names"),
        ({0: "bg", 1: "a", 4: "b", 9: "c"}, None, "label 4 is named, 2 to 3 are not"),
        ({0: "bg", 1: "a", 4: "b"}, 1, "label 4 is named, 2 to 3 are not"),
        ({0: "bg", 1: "cell", 255: "unlabelled"}, 255, ("bg", "cell")),
        ({1: "cell", 2: "nucleus"}, None, ("class 0", "cell", "nucleus")),
        ({0: "bg", 2: "cell"}, 1, ("bg", "class 1", "cell")),
        ({0: "bg", 1: "void", 2: "cell"}, 1, ("bg", "void", "cell")),
    ],
)
def test_labels_are_named_without_gaps(zarr: Path, named: dict[int, str], ignore: int | None, words: Any) -> None:
    dataset = volumes(zarr)
    source: Any = SimpleNamespace(label_names=named)
    dataset.sources = [source]
    if isinstance(words, tuple):
        assert dataset.class_names(ignore) == words
    else:
        with pytest.raises(UserError, match=f"data.train: {words}"):
            dataset.class_names(ignore)


def evaluator_of(dataset: Dataset, samples: int, seed: int = 0) -> Evaluator:
    sampler = dataset.sampler(seed=seed, lanes=1, reuse=1)
    reader = dataset.reader(sampler, lanes=1, cache_bytes=0)
    loader = Loader(sampler, reader, device=torch.device("cpu"), workers=1, prefetch=1)
    objective: Any = SimpleNamespace(config=SimpleNamespace(labels="item"))
    return Evaluator(objective, loader, seed=0, samples=samples, batch=4)


def test_no_image_is_measured_twice(folder: Path, zarr: Path) -> None:
    valid = images(folder, "valid")
    evaluator = evaluator_of(valid, 64)
    assert evaluator.samples == 8
    assert evaluator.note == "eval.samples: 64, but there are 8 held-out items, each one crop: all are measured"
    for samples in (5, 8):
        evaluator = evaluator_of(valid, samples)
        assert (evaluator.samples, evaluator.note) == (samples, None)
    for dataset in (valid, images(folder)):
        for seed in range(50):
            sampler = evaluator_of(dataset, 64, seed).loader.sampler
            assert sorted(sampler(i).item for i in range(sampler.epoch)) == list(range(len(dataset.extents)))
    # Larger images and volumes have more than one crop, and weights ask for repetition.
    config = ImageFolderConfig(path=str(folder / "valid"))
    assert evaluator_of(Dataset([config], (4, 4), where="data.valid"), 64).samples == 64
    assert evaluator_of(volumes(zarr), 640).samples == 640
    both = [config, ImageFolderConfig(path=str(folder / "train"), weight=3.0)]
    assert evaluator_of(Dataset(both, (8, 8), where="data.valid"), 64).samples == 64


def test_known_variables_decide_the_channels(folder: Path) -> None:
    known: dict[str, Any] = {"variables": VariablesConfig(known=("red", "grey")), "channels": None}
    done = complete(recipe_of(vit(**known), ClassifyConfig(), 8), parts(images(folder)))
    assert done.model.channels == 2
    known["variables"] = VariablesConfig(known=("red", "infrared"))
    with pytest.raises(UserError, match=r"model.variables: .*grey.*'red', 'infrared'"):
        complete(recipe_of(vit(**known), ClassifyConfig(), 8), parts(images(folder)))
    with pytest.raises(UserError, match=r"model.channels: 3, but the data have 1 variables"):
        complete(recipe_of(vit(channels=3), ClassifyConfig(), 8), parts(images(folder)))


# ---------------------------------------------------------------- the best checkpoint


def test_the_best_follows_the_direction_of_its_metric(tmp_path: Path) -> None:
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for larger, best in ((False, (0.2, 3)), (True, (0.9, 2))):
            settings: dict[str, Any] = {"keep": 9, "background": False, "group": None, "cpu_mesh": None}
            kept = Checkpoints(tmp_path / str(larger), larger_is_better=larger, **settings)
            for step, value in enumerate([0.5, 0.9, 0.2, 0.6], 1):
                kept.save(step, {"model.w": torch.zeros(1)}, NUMBERS | {"metrics": {"m": value}}, value)
            assert kept.best == best
            again = Checkpoints(tmp_path / str(larger), larger_is_better=larger, **settings)
            again.remember_best("m")
            assert again.best == best
            assert not again.is_better(best[0])
    finally:
        if started:
            dist.destroy_process_group()


# ---------------------------------------------------------------- digits, and whole runs


def test_digits(tmp_path: Path) -> None:
    path = write_digits(tmp_path / "digits")
    sources = [ImageFolderConfig(path=str(path / part)).open() for part in ("train", "valid")]
    assert [len(s.items) for s in sources] == [1437, 360]
    for source in sources:
        assert source.class_names == tuple("0123456789")
        assert source.items[0].shape == (8, 8)
        assert source.dtype == np.uint8
    with pytest.raises(UserError, match="exists"):
        write_digits(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits"]


def test_a_run_that_classifies(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tree = merge(
        tiny_recipe(tmp_path, run_dir, log__pictures=20),
        {
            "run.steps": 12,
            "model": {
                "kind": "vit",
                "channels": 1,
                "width": 16,
                "depth": 1,
                "heads": 2,
                "patch": 4,
                "head_dropout": 0.1,
            },
            "objective": {"kind": "classify", "smoothing": 0.1},
            "data": {
                "train": [{"path": str(folder / "train")}],
                "valid": [{"path": str(folder / "valid")}],
                "crop": 8,
                "batch": 8,
            },
            "optimizer.lr": 0.01,
        },
    )
    vitrail.train(tree, quiet=True)
    last = events(run_dir, "eval")[-1]["metrics"]
    assert set(last) == {"loss", "accuracy"}
    assert last["accuracy"] == 1.0
    assert events(run_dir, "picture")
    assert vitrail.load(run_dir).head.weight.shape == (3, 16)


def test_a_run_that_segments(volume: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tree = merge(
        tiny_recipe(volume, run_dir, log__pictures=20),
        {
            "run.steps": 10,
            "eval": {"every": 5, "samples": 4},
            "model": {
                "kind": "sap",
                "ndim": 3,
                "features": 8,
                "encoder": {"width": 24, "depth": 1, "heads": 2, "patch": 4},
            },
            "objective": {"kind": "segment"},
            "data.train": [{"path": str(volume), "labels": "structures", "region": {"x": [0, 0.6]}}],
            "data.valid": [{"path": str(volume), "labels": "structures", "region": {"x": [0.6, 1]}}],
            "optimizer.lr": 0.005,
        },
    )
    vitrail.train(tree, quiet=True)
    first, last = (events(run_dir, "eval")[i]["metrics"] for i in (0, -1))
    assert {"loss", "accuracy", "mean_dice", "dice_background", "dice_membrane"} <= set(last)
    assert last["mean_dice"] >= first["mean_dice"] or last["loss"] < first["loss"]
    assert events(run_dir, "picture")
