"""Small items that lie ready are read many at once: the same batches, and the same care for bad data."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import LONG

from vitrail.data.augment import Augmenter
from vitrail.data.batch import Labelling, Statistics
from vitrail.data.order.sampler import Extent, Sampler
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy, SlowRead
from vitrail.data.reading.reader import Reader
from vitrail.data.source import Item, ManySource, whole_item
from vitrail.data.sources.items import RECORD, Cifar10Config, DummyConfig
from vitrail.errors import BadData, FailedRead, UserError
from vitrail.recipe.sections import Augment

BATCH = 100
CLASSES = ("cat", "dog", "owl")


class OneByOne:
    """Numbered images in memory; each call is counted, and a few items can be made to fail."""

    axes, variables, class_names = ("y", "x"), ("v",), CLASSES

    def __init__(self, number: int = 300, shape: tuple[int, int] = (4, 5), dtype: str = "uint8", *, first: int = 0):
        random = np.random.default_rng(first)
        self.values = random.integers(0, 255, (number, 1, *shape)).astype(dtype)
        self.dtype, self.shape = self.values.dtype, shape
        self.items = [whole_item(f"image {first + n}", shape, n % 3) for n in range(number)]
        self.alone, self.together = 0, 0
        self.bad: set[int] = set()
        self.fail = lambda: None

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        self.alone += 1
        if item in self.bad:
            raise BadData(f"{self.items[item].name} is broken; mend it")
        return self.values[item][(slice(None), *region)]

    def describe(self) -> dict:
        return {}


class Images(OneByOne):
    """The same with a way to read many."""

    @property
    def alike(self) -> Item:
        return whole_item("", self.shape, None)

    def read_many(self, items: np.ndarray) -> np.ndarray:
        self.together += len(items)
        self.fail()
        if self.bad & set(items.tolist()):
            raise BadData("some image is broken")
        return self.values[items]

    def labels_of(self, items: np.ndarray) -> np.ndarray:
        return items % 3


def loader_of(
    *sources,
    workers: int = 2,
    labels: bool = True,
    augment: Augment | None = None,
    policy: Policy | None = None,
    statistics: Sequence[Statistics] | None = None,
) -> Loader:
    extents = [
        Extent(number, item, one.shape, one.shape, (0, 0), 1.0)
        for number, source in enumerate(sources)
        for item, one in enumerate(source.items)
    ]
    crop = tuple(min(e.shape[axis] for e in extents) for axis in range(2))
    settings = augment or Augment()
    sampler = Sampler(extents, crop, seed=3, lanes=BATCH)
    names = tuple(dict.fromkeys(name for source in sources for name in source.class_names))
    labelling = Labelling("item", names) if labels else None
    return Loader(
        sampler,
        Reader(sources, crop, whole_blocks=False, cache_bytes=2**20, labelling=labelling, retries=0),
        lambda step: range(step * BATCH, (step + 1) * BATCH),
        device=torch.device("cpu"),
        workers=workers,
        prefetch=2,
        augmenter=Augmenter(settings, crop, seed=5, labels="item" if labels else None, axes=("y", "x")),
        policy=policy,
        statistics=statistics,
    )


def assert_alike(found: Loader, expected: Loader, steps: int = 4) -> None:
    for one, other in zip(found.batches(0, steps), expected.batches(0, steps), strict=True):
        assert one.counters == other.counters
        assert one.values.dtype == other.values.dtype
        assert torch.equal(one.values, other.values)
        assert (one.labels is None) == (other.labels is None)
        assert one.labels is None or torch.equal(one.labels, other.labels)
        if one.statistics is not None:
            assert all(torch.equal(a, b) for a, b in zip(one.statistics, other.statistics, strict=True))


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
def test_batches_are_those_of_items_read_one_by_one(workers: int, dtype: str) -> None:
    many = Images(dtype=dtype)
    assert isinstance(many, ManySource)
    assert_alike(loader_of(many, workers=workers), loader_of(OneByOne(dtype=dtype), workers=workers))
    assert many.alone == 0
    assert many.together >= 4 * BATCH


@pytest.mark.parametrize("augment", [Augment(flip=("x",)), Augment(flip=True, resized_crop={"scale": (0.3, 1.0)})])
def test_augmented_batches_are_those_of_items_read_one_by_one(augment: Augment) -> None:
    assert_alike(loader_of(Images(), augment=augment), loader_of(OneByOne(), augment=augment))


def test_several_sources_share_a_batch() -> None:
    statistics = [Statistics((1.0,), (2.0,)), Statistics((3.0,), (4.0,)), Statistics((5.0,), (6.0,))]
    many = [Images(200), Images(100, first=1000, dtype="uint16"), Images(50, first=2000)]
    single = [OneByOne(200), OneByOne(100, first=1000, dtype="uint16"), OneByOne(50, first=2000)]
    assert_alike(loader_of(*many, statistics=statistics), loader_of(*single, statistics=statistics))
    assert all(source.together and not source.alone for source in many)


def test_classes_are_places_in_the_names_of_all_sources() -> None:
    many, single = [Images(90), Images(90, first=500)], [OneByOne(90), OneByOne(90, first=500)]
    for sources in (many, single):
        sources[1].class_names = ("owl", "elk", "cat")
    assert_alike(loader_of(*many), loader_of(*single))


def test_items_of_other_sizes_are_read_one_by_one() -> None:
    # Crops of larger images are no whole items, and lie beside whole ones.
    many, single = (kind(60, (6, 7), first=9) for kind in (Images, OneByOne))
    small, other = Images(60, (4, 5)), OneByOne(60, (4, 5))
    assert_alike(loader_of(many, small), loader_of(single, other))
    assert many.together == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_item_is_named_by_itself(workers: int) -> None:
    source = Images()
    source.bad = {17}
    loader = loader_of(source, workers=workers)
    with pytest.raises(BadData, match=r"^image 17 is broken; mend it$"):
        list(loader.batches(0, 3))


def test_bad_items_are_skipped_as_ever() -> None:
    policy = Policy(on_bad="skip")
    many, single = Images(), OneByOne()
    many.bad = single.bad = {17, 30, 200}
    both = loader_of(many, policy=policy), loader_of(single, policy=policy)
    assert_alike(*both)
    assert both[0].bad.skipped == both[1].bad.skipped
    assert both[0].bad.total > 2
    assert many.together > 100  # those without a bad one among them


def test_values_that_are_not_finite_are_named() -> None:
    source = Images(dtype="float64")
    source.values[44, 0, 1, 2] = np.nan
    with pytest.raises(BadData, match=r"image 44: variable 'v' is NaN or infinite at voxel \[1, 2\]"):
        list(loader_of(source).batches(0, 3))
    source = Images(dtype="float64")
    source.values[44, 0, 1, 2] = 1e300  # beyond what is sent to the device
    with pytest.raises(BadData, match=r"image 44: .* at voxel \[1, 2\]"):
        list(loader_of(source).batches(0, 3))


def test_errors_of_the_file_system_are_tried_again_one_by_one() -> None:
    source = Images()
    times: list[int] = []

    def fail() -> None:
        times.append(1)
        if len(times) == 1:
            raise OSError("the network is away")

    source.fail = fail
    assert_alike(loader_of(source), loader_of(OneByOne()))
    assert source.alone > 0  # the first handful

    source.fail, source.read = fail, lambda item, region: (_ for _ in ()).throw(OSError(5, "gone"))  # type: ignore[method-assign]
    times.clear()
    with pytest.raises(FailedRead, match=r"image \d+ \(voxels y 0 to 3, x 0 to 4\) cannot be read: gone"):
        list(loader_of(source, policy=Policy(retries=0)).batches(0, 1))


@pytest.mark.parametrize("shape", [(3, 1, 4, 5), (1, 4, 5), (-1, 1, 5, 4)])
def test_what_does_not_fit_its_place_is_never_spread_over_it(shape: tuple[int, ...]) -> None:
    class Wrong(Images):
        def read_many(self, items: np.ndarray) -> np.ndarray:
            found = super().read_many(items)
            return found[0] if shape[0] == 1 else found[:3] if shape[0] == 3 else found.reshape(shape)

    source = Wrong()
    assert_alike(loader_of(source), loader_of(OneByOne()))
    assert source.alone == 4 * BATCH


def test_labels_that_are_no_classes_are_told() -> None:
    class Wrong(Images):
        def labels_of(self, items: np.ndarray) -> np.ndarray:
            return np.where(items == 7, least, items % 3)

    for least in (-1, 3):
        assert_alike(loader_of(Wrong()), loader_of(OneByOne()))  # items know better
        for kind in (Wrong, OneByOne):
            source = kind()
            source.items[7] = replace(source.items[7], label=least)
            with pytest.raises(UserError, match=rf"image 7 has the class {least}, but its source has 3 names"):
                list(loader_of(source).batches(0, 3))


def test_mistakes_of_a_source_are_not_read_over() -> None:
    source = Images()
    source.fail = lambda: [][0]
    with pytest.raises(IndexError):
        list(loader_of(source).batches(0, 1))
    assert source.alone == 0


def test_items_that_are_not_alike_are_refused() -> None:
    for keys in ({"shape": (5, 4)}, {"spacing": (2.0, 2.0)}, {"scale": (1.0, 2.0)}, {"slices": 0}):
        source = Images()
        source.items[0] = replace(source.items[0], **keys)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"image 0 has the {next(iter(keys))} .*`alike` of its source Images"):
            Reader([source], (4, 5), whole_blocks=False, cache_bytes=0)


def test_all_threads_read_what_failed_together() -> None:
    class Away(Images):
        def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
            if threading.get_ident() not in threads:
                threads.add(threading.get_ident())
                all_here.wait(LONG)
            return super().read(item, region)

    source, threads, all_here = Away(), set(), threading.Barrier(4)
    source.fail = lambda: (_ for _ in ()).throw(OSError(5, "away"))
    list(loader_of(source, workers=4).batches(0, 1))
    assert len(threads) == 4


def test_a_read_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.reading.pool.PATIENCE", 0.1)
    source, go_on = Images(), threading.Event()
    source.fail = go_on.wait
    try:
        with pytest.raises(SlowRead, match=r"image \d+ \(.*\) and 99 others: the read has not ended after"):
            list(loader_of(source, policy=Policy(limit=0.2)).batches(0, 1))
    finally:
        go_on.set()


def test_memory_of_batches_is_used_again() -> None:
    loader, places = loader_of(Images()), set()
    for batch in loader.batches(0, 30):
        places.add(batch.values.data_ptr())
        del batch
    assert len(places) <= 2 * 2 + 2 + 1


def test_cifar10_reads_many(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in (1, 2, 3):
        records = random.integers(0, 256, (40 * number, RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / f"data_batch_{number}.bin")
    for keys in ({}, {"variables": ["blue", "red"]}, {"split": (0.2, 0.7)}):
        source = Cifar10Config(path=str(tmp_path), **keys).open()  # type: ignore[arg-type]
        assert isinstance(source, ManySource)
        items = random.integers(0, len(source.items), 64)
        out = source.read_many(items)
        assert out.shape == (64, len(source.variables), 32, 32)
        for item, image, label in zip(items.tolist(), out, source.labels_of(items), strict=True):
            np.testing.assert_array_equal(image, source.read(item, (slice(0, 32), slice(0, 32))))
            assert label == source.items[item].label
        one = source.items[3]
        assert (source.alike.shape, source.alike.scale, source.alike.spacing) == (one.shape, one.scale, one.spacing)


def test_dummy_reads_many() -> None:
    source = DummyConfig(shape=(5, 6), items=50, classes=7, split=(0.0, 0.6)).open()
    assert isinstance(source, ManySource)
    items = np.arange(3, 12)
    out = source.read_many(items)
    assert out.shape == (9, 3, 5, 6)
    np.testing.assert_array_equal(out[4], source.read(7, (slice(0, 5), slice(0, 6))))
    assert source.labels_of(items).tolist() == [source.items[item].label for item in items.tolist()]
