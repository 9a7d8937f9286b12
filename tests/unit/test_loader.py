"""Reader and loader: the voxels that the sampler names, in order, whatever the cache and the threads do."""

import dataclasses
import threading
import time
import types
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support import LONG
from torch import Tensor

from vitrail.data.augment import Augmenter, Raw, orient, orientations
from vitrail.data.batch import Batch, Statistics
from vitrail.data.chunks.decoded import ChunkCache
from vitrail.data.dataset import Dataset
from vitrail.data.order.sampler import Extent, Sample, Sampler
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import LINE, Buffers, Pool, Several, SlowRead, aligned
from vitrail.data.reading.reader import Reader, fit_image, host_dtype, pool
from vitrail.data.source import Item
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import BadData, UserError
from vitrail.recipe.sections import Augment

AXES = ("z", "y", "x")


class ArraySource:
    """Arrays [C, *spatial] as a source that counts its reads and does what a test asks for before each."""

    def __init__(self, *arrays: np.ndarray, chunk: int = 8, variables: Sequence[str] | None = None):
        self.arrays = arrays
        self.axes = AXES[-(arrays[0].ndim - 1) :]
        self.variables = tuple(variables or (f"v{i}" for i in range(len(arrays[0]))))
        self.dtype = arrays[0].dtype
        self.items = [
            Item(
                f"a{i}",
                a.shape[1:],
                tuple(min(chunk, s) for s in a.shape[1:]),
                (0,) * (a.ndim - 1),
                (1.0,) * (a.ndim - 1),
                None,
            )
            for i, a in enumerate(arrays)
        ]
        self.reads: Counter = Counter()
        self.before = lambda: None

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        self.reads[(item, *[(r.start, r.stop) for r in region])] += 1
        self.before()
        return self.arrays[item][(slice(None), *region)].copy()

    def describe(self) -> dict:
        return {}

    # A dataset opens configs; this is its own.
    path, weight = "array", 1.0

    def open(self) -> "ArraySource":
        return self


@pytest.fixture
def volume() -> ArraySource:
    rng = np.random.default_rng(0)
    return ArraySource(rng.integers(0, 255, (2, 21, 24, 18), dtype=np.uint8))


def dataset_of(*sources: ArraySource, crop: int | tuple[int, ...] = 6) -> Dataset:
    crop = (crop,) * len(sources[0].axes) if isinstance(crop, int) else crop
    return Dataset(sources, crop, where="data.train")


def loader_of(
    *sources: ArraySource,
    crop: int | tuple[int, ...] = 6,
    batch: int = 4,
    lanes: int = 4,
    reuse: int = 4,
    turn: bool = False,
    workers: int = 2,
    prefetch: int = 2,
    cache: int = 1 << 20,
) -> Loader:
    dataset = dataset_of(*sources, crop=crop)
    sampler = dataset.sampler(seed=1, lanes=lanes, reuse=reuse, turn=turn)
    return Loader(
        sampler,
        dataset.reader(sampler, lanes=lanes, cache_bytes=cache),
        lambda step: range(step * batch, (step + 1) * batch),
        device=torch.device("cpu"),
        workers=workers,
        prefetch=prefetch,
    )


def expected(sampler: Sampler, sources: Sequence[ArraySource], counter: int) -> np.ndarray:
    """The crop straight from the array, unturned."""
    sample = sampler(counter)
    window = tuple(slice(s, s + c) for s, c in zip(sample.start, sampler.crop, strict=True))
    return sources[sample.source].arrays[sample.item][(slice(None), *window)]


def reading_threads() -> list[threading.Thread]:
    """Threads that read and do not end, however long they are given: a closed loader waits for them but a moment."""
    found = [t for t in threading.enumerate() if t.name.startswith("vitrail-reader")]
    for thread in found:
        thread.join(LONG)
    return [t for t in found if t.is_alive()]


# ---------------------------------------------------------------- the right voxels, in order


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("cache", [0, 3000, 1 << 20])
def test_batches_are_slices_of_the_source(volume: ArraySource, workers: int, prefetch: int, cache: int) -> None:
    loader = loader_of(volume, workers=workers, prefetch=prefetch, cache=cache)
    batches = list(loader.batches(2, 27))
    assert [c for b in batches for c in b.counters] == list(range(8, 108))
    for batch in batches:
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [volume], counter))
    assert not reading_threads()


def test_crops_come_turned_as_the_sampler_says(volume: ArraySource) -> None:
    loader = loader_of(volume, turn=True)
    codes = set()
    for batch in loader.batches(0, 25):
        for counter, values in zip(batch.counters, batch.values, strict=True):
            code = loader.sampler(counter).orientation
            codes.add(code)
            crop = torch.from_numpy(expected(loader.sampler, [volume], counter))[None]
            assert torch.equal(values, orient(crop, [code])[0])
    assert len(codes) > 30


def test_several_sources_and_items() -> None:
    rng = np.random.default_rng(0)
    sources = [
        ArraySource(*[rng.integers(0, 255, (1, 12 + i, 20), dtype=np.uint8) for i in range(3)]),
        ArraySource(rng.integers(0, 255, (1, 30, 30), dtype=np.uint8)),
    ]
    loader = loader_of(*sources, crop=(5, 7))
    seen = set()
    for batch in loader.batches(0, 40):
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, sources, counter))
            seen.add((loader.sampler(counter).source, loader.sampler(counter).item))
    assert seen == {(0, 0), (0, 1), (0, 2), (1, 0)}


def test_a_zarr_region_that_starts_inside_a_chunk(tmp_path) -> None:
    from vitrail.data.generate import Volume, write_ome_zarr

    values = np.random.default_rng(0).integers(0, 255, (20, 20, 33), dtype=np.uint8)
    write_ome_zarr(tmp_path / "v.zarr", Volume(values, values), levels=1, chunk=8)
    config = OmeZarrConfig(path=str(tmp_path / "v.zarr"), region={"x": [5, 30]})
    dataset = Dataset([config], (6, 6, 6), where="data.train")
    assert dataset.extents[0].origin == (0, 0, 5)
    sampler = dataset.sampler(seed=0, lanes=4, reuse=4)
    loader = Loader(
        sampler,
        dataset.reader(sampler, lanes=4, cache_bytes=1 << 20),
        lambda step: range(8 * step, 8 * step + 8),
        device=torch.device("cpu"),
        workers=2,
        prefetch=2,
    )
    for batch in loader.batches(0, 10):
        for counter, crop in zip(batch.counters, batch.values, strict=True):
            z, y, x = sampler(counter).start
            np.testing.assert_array_equal(crop[0].numpy(), values[z : z + 6, y : y + 6, 5 + x : 11 + x])


def test_single_samples_by_number(volume: ArraySource) -> None:
    loader = loader_of(volume)
    batch = loader.load([7, 3])
    assert batch.counters == [7, 3]
    for counter, values in zip(batch.counters, batch.values, strict=True):
        np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [volume], counter))
    assert len(loader.load([])) == 0


def test_a_slow_source_keeps_the_order(volume: ArraySource) -> None:
    """Reads take different times, so that later ones end before earlier ones."""
    durations = iter([0.03, 0.0, 0.01] * 400)
    lock = threading.Lock()

    def wait() -> None:
        with lock:
            duration = next(durations)
        time.sleep(duration)

    volume.before = wait
    loader = loader_of(volume, workers=4, prefetch=3, cache=0)
    batches = list(loader.batches(0, 12))
    assert [c for b in batches for c in b.counters] == list(range(48))
    for batch in batches:
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [volume], counter))


def test_batches_are_read_ahead(volume: ArraySource) -> None:
    """While the first batch is computed with, the next ones are read: as many as prefetch says, and not all."""
    loader = loader_of(volume, workers=2, prefetch=2, cache=0)
    batches = loader.batches(0, 100)
    next(batches)
    wanted, deadline = 8, time.monotonic() + LONG
    while sum(volume.reads.values()) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(volume.reads.values()) >= wanted
    time.sleep(0.2)
    assert sum(volume.reads.values()) < 100  # of 400
    batches.close()


# ---------------------------------------------------------------- the cache


def test_a_block_is_read_once_for_all_its_crops(volume: ArraySource) -> None:
    loader = loader_of(volume, workers=4, lanes=2, reuse=8)
    list(loader.batches(0, loader.sampler.epoch // 4))
    blocks = {tuple((b.start, b.stop) for b in loader.sampler(c).block) for c in range(loader.sampler.epoch)}
    assert {name[1:] for name in volume.reads} == blocks
    assert set(volume.reads.values()) == {1}  # the whole pass fits


def test_old_blocks_make_room_for_new_ones(volume: ArraySource) -> None:
    """With room for three of many blocks each visit still reads its block once, not its crops one by one."""
    dataset = dataset_of(volume)
    sampler = dataset.sampler(seed=0, lanes=2, reuse=8)
    reader = Reader([volume], (6, 6, 6), whole_blocks=True, cache_bytes=3 * sampler.largest_block * 2)
    out = np.empty((2, 6, 6, 6), np.uint8)
    visits = 40
    for counter in range(visits * 8):
        reader.read_into(out, sampler(counter))
    blocks = {tuple((b.start, b.stop) for b in sampler(c).block) for c in range(visits * 8)}
    assert {name[1:] for name in volume.reads} == blocks
    assert len(blocks) < sum(volume.reads.values()) <= visits


def test_threads_that_want_the_same_block_read_it_once(volume: ArraySource) -> None:
    """All threads ask at the same moment, and the read does not end before they have."""
    loader = loader_of(volume, lanes=1, reuse=16)
    threads = 8
    barrier = threading.Barrier(threads)
    asked = threading.Semaphore(0)
    volume.before = lambda: [asked.acquire(timeout=LONG) for _ in range(threads - 1)] and time.sleep(0.05)
    outs = [np.empty((2, 6, 6, 6), np.uint8) for _ in range(threads)]

    def read(number: int) -> None:
        barrier.wait()
        if number:
            asked.release()
        loader.reader.read_into(outs[number], loader.sampler(number))

    jobs = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(LONG)
    assert sum(volume.reads.values()) == 1
    for number, out in enumerate(outs):
        np.testing.assert_array_equal(out, expected(loader.sampler, [volume], number))


def bytes_of(cache: ChunkCache) -> int:
    """What the arrays of a cache take."""
    return sum(array.nbytes for held in cache._kept.values() for array in held.values if array is not None)


@pytest.mark.parametrize("dtype", ["uint8", "float64", ">i2"])
def test_the_limit_of_memory_is_kept(dtype: str) -> None:
    """Blocks held or being read never exceed the limit, which fits three of the largest; answers stay right."""
    array = np.random.default_rng(0).integers(0, 255, (1, 40, 40)).astype(dtype)
    source = ArraySource(array)
    dataset = dataset_of(source)
    sampler = dataset.sampler(seed=0, lanes=8, reuse=4)
    limit = 3 * sampler.largest_block * array.itemsize
    reader = Reader([source], (6, 6), whole_blocks=True, cache_bytes=limit)
    most = 0

    def look() -> None:
        nonlocal most
        time.sleep(0.001)
        most = max(most, reader.blocks.bytes)

    source.before = look
    loader = Loader(
        sampler, reader, lambda s: range(8 * s, 8 * s + 8), device=torch.device("cpu"), workers=6, prefetch=2
    )
    for batch in loader.batches(0, 40):
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(sampler, [source], counter))
    assert 0 < most <= limit
    assert bytes_of(reader.blocks) == reader.blocks.bytes <= limit


def test_a_block_beyond_the_limit_is_not_read_whole(volume: ArraySource) -> None:
    dataset = dataset_of(volume)
    sampler = dataset.sampler(seed=0, lanes=2, reuse=4)
    reader = Reader([volume], (6, 6, 6), whole_blocks=True, cache_bytes=100)
    out = np.empty((2, 6, 6, 6), np.uint8)
    for counter in range(20):
        reader.read_into(out, sampler(counter))
        np.testing.assert_array_equal(out, expected(sampler, [volume], counter))
    assert all(stop - start == 6 for name in volume.reads for start, stop in name[1:])
    assert not len(reader.blocks)


def test_whole_blocks_are_read_only_where_those_of_all_lanes_fit(volume: ArraySource) -> None:
    """Otherwise each block would be forgotten before its lane comes back, and read whole for every crop."""
    dataset = dataset_of(volume)
    sampler = dataset.sampler(seed=0, lanes=4, reuse=4)
    enough = 4 * sampler.largest_block * 2
    assert dataset.reader(sampler, lanes=4, cache_bytes=enough).whole_blocks
    assert not dataset.reader(sampler, lanes=4, cache_bytes=enough - 1).whole_blocks
    once = dataset.sampler(seed=0, lanes=4, reuse=1)
    assert not dataset.reader(once, lanes=4, cache_bytes=enough).whole_blocks


def test_a_block_that_failed_can_be_read_again(volume: ArraySource) -> None:
    loader = loader_of(volume, workers=0)
    failing = True

    def fail() -> None:
        if failing:
            raise OSError("disk on fire")

    volume.before = fail
    loader.reader.retries = 0
    with pytest.raises(BadData, match=r"a0 .* cannot be read: disk on fire"):
        loader.load([0])
    failing = False
    np.testing.assert_array_equal(loader.load([0]).values[0].numpy(), expected(loader.sampler, [volume], 0))
    assert loader.reader.blocks.bytes == bytes_of(loader.reader.blocks)


# ---------------------------------------------------------------- errors and early ends


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_an_error_of_a_reading_thread_is_raised_as_it_is(volume: ArraySource, workers: int, cache: int) -> None:
    loader = loader_of(volume, workers=workers, cache=cache, lanes=4, reuse=1)
    error = UserError("chunk c/0/0/1 is missing")
    calls = iter(range(10**6))

    def fail() -> None:
        if next(calls) >= 10:
            raise error

    volume.before = fail
    batches = loader.batches(0, 1000)
    good: list[Batch] = []
    with pytest.raises(UserError) as caught:
        good.extend(batches)
    assert caught.value is error
    assert len(good) <= 3
    assert next(batches, None) is None  # once
    assert not reading_threads()


def test_an_error_while_the_consumer_is_slow_does_not_hang(volume: ArraySource) -> None:
    loader = loader_of(volume, workers=2, prefetch=1, cache=0)
    calls = iter(range(10**6))

    def fail() -> None:
        if next(calls) >= 13:
            raise OSError("gone")

    volume.before = fail
    loader.reader.retries = 0
    slowly = (time.sleep(0.05) for _ in loader.batches(0, 1000))
    with pytest.raises(BadData, match="gone"):
        list(slowly)
    assert not reading_threads()


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_closing_early_ends_the_threads(volume: ArraySource, taken: int, prefetch: int) -> None:
    before = threading.active_count()
    volume.before = lambda: time.sleep(0.002)
    batches = loader_of(volume, workers=3, prefetch=prefetch, cache=0).batches(0, 10**6)
    for _ in range(taken):
        next(batches)
    batches.close()
    assert threading.active_count() == before


def test_a_consumer_that_fails_ends_the_threads(volume: ArraySource) -> None:
    before = threading.active_count()

    def consume() -> None:
        for _ in loader_of(volume, workers=3).batches(0, 10**6):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        consume()
    deadline = time.monotonic() + LONG
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_no_batches_at_all(volume: ArraySource) -> None:
    assert list(loader_of(volume).batches(5, 5)) == []
    assert not reading_threads()


# ---------------------------------------------------------------- types

TYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "int32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float32,
    "bool": torch.uint8,
    ">u2": torch.int32,
    ">i2": torch.int16,
    ">f4": torch.float32,
    ">f8": torch.float32,
}


@pytest.mark.parametrize("dtype", TYPES)
def test_types_travel_to_the_device(dtype: str) -> None:
    kind = np.dtype(dtype)
    high = np.iinfo(kind).max if kind.kind in "iu" else 2 if kind.kind == "b" else 1000
    array = np.random.default_rng(0).integers(0, high, (1, 20, 20)).astype(kind)
    source = ArraySource(array)
    loader = loader_of(source)
    for batch in loader.batches(0, 10):
        assert batch.values.dtype == TYPES[dtype]
        for counter, values in zip(batch.counters, batch.values, strict=True):
            crop = expected(loader.sampler, [source], counter)
            np.testing.assert_array_equal(values.numpy(), crop.astype(host_dtype(kind)))


@pytest.mark.parametrize(
    ("types", "common"),
    [
        (("uint8", "uint8"), torch.uint8),
        (("uint8", "uint16"), torch.int32),
        (("uint16", "float32"), torch.float32),  # numpy's common type is float64
        (("uint8", ">f4"), torch.float32),
        (("uint8", "int8"), torch.int16),
    ],
)
def test_sources_of_different_types_share_one(types: tuple[str, str], common: torch.dtype) -> None:
    sources = [ArraySource(np.arange(100).astype(t).reshape(1, 10, 10)) for t in types]
    loader = loader_of(*sources)
    seen = set()
    for batch in loader.batches(0, 10):
        assert batch.values.dtype == common
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, sources, counter))
            seen.add(loader.sampler(counter).source)
    assert seen == {0, 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("workers", [0, 2])
def test_values_that_are_not_finite_are_named(bad: float, workers: int) -> None:
    array = np.zeros((2, 12, 12), np.float32)
    array[1, 7, 3] = bad
    loader = loader_of(ArraySource(array, variables=("rain", "wind")), workers=workers)
    with pytest.raises(UserError, match=r"^a0: variable 'wind' is NaN or infinite at voxel \[7, 3\].*`region`$"):
        list(loader.batches(0, 1000))


@pytest.mark.filterwarnings("error")
def test_values_too_large_for_the_device_type_are_named() -> None:
    """A float64 beyond float32 becomes infinite on its way."""
    array = np.full((1, 12, 12), 1e200)
    with pytest.raises(UserError, match="infinite"):
        loader_of(ArraySource(array)).load([0])


# ---------------------------------------------------------------- orientations


@pytest.mark.parametrize(
    ("crop", "count"),
    [((4, 4), 8), ((4, 4, 4), 48), ((4, 6), 4), ((4, 4, 6), 16), ((4, 5, 6), 8), ((4,), 2)],
)
def test_orientations_keep_the_shape_and_differ(crop: tuple[int, ...], count: int) -> None:
    table = orientations(crop)
    assert len(table) == count
    values = torch.arange(2 * int(np.prod(crop))).reshape(1, 2, *crop)
    turned = [orient(values, [code]) for code in range(count)]
    assert all(t.shape == values.shape for t in turned)
    assert len({tuple(t.flatten().tolist()) for t in turned}) == count
    assert all(sorted(t.flatten().tolist()) == values.flatten().tolist() for t in turned)
    for t in turned:  # channels stay where they are
        assert set(t[0, 0].flatten().tolist()) == set(values[0, 0].flatten().tolist())
    assert torch.equal(turned[0], values)


def test_code_0_is_the_batch_itself() -> None:
    values = torch.randn(3, 1, 4, 4)
    assert orient(values, [0, 0, 0]) is values
    assert torch.equal(orient(values, [0, 5, 0])[[0, 2]], values[[0, 2]])


@settings(max_examples=30, deadline=None)
@given(codes=st.lists(st.integers(0, 47), min_size=1, max_size=5))
def test_orienting_a_batch_is_orienting_each_sample(codes: list[int]) -> None:
    values = torch.arange(len(codes) * 27, dtype=torch.uint8).reshape(len(codes), 1, 3, 3, 3)
    batch = orient(values, codes)
    assert batch.dtype == torch.uint8
    for i, code in enumerate(codes):
        assert torch.equal(batch[i : i + 1], orient(values[i : i + 1], [code]))


def test_orientations_are_a_group() -> None:
    """Two turns one after the other are one of the 48 again."""
    values = torch.arange(27).reshape(1, 1, 3, 3, 3)
    known = {tuple(orient(values, [code]).flatten().tolist()) for code in range(48)}
    for first in range(0, 48, 5):
        for second in range(48):
            both = orient(orient(values, [first]), [second])
            assert tuple(both.flatten().tolist()) in known


# ---------------------------------------------------------------- batches, datasets, statistics


def test_a_batch_can_be_cut() -> None:
    batch = Batch([4, 5, 6], torch.arange(3.0)[:, None])
    part = batch.narrow(1, 3)
    assert (part.counters, part.values.flatten().tolist(), len(part)) == ([5, 6], [1.0, 2.0], 2)


def numbers(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = array.reshape(len(array), -1).astype(np.float64)
    return flat.mean(axis=1), flat.std(axis=1)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", ">u2"])
def test_statistics_are_those_of_the_whole_volume(dtype: str) -> None:
    """White noise, so that crops near the border are like any other; three variables of different scale."""
    rng = np.random.default_rng(0)
    scale = np.array([10, 20, 60]).reshape(3, 1, 1, 1)
    array = np.clip(rng.normal(100, 1, (3, 24, 24, 24)) * scale / 60 + scale, 0, 250).astype(dtype)
    mean, std = numbers(array)
    found = dataset_of(ArraySource(array), crop=8).fit_statistics(seed=0, samples=600)
    np.testing.assert_allclose(found.mean, mean, rtol=0.01)
    np.testing.assert_allclose(found.std, std, rtol=0.02)


def test_statistics_of_a_crop_as_large_as_the_volume_are_exact() -> None:
    array = np.random.default_rng(0).normal(5, 2, (2, 9, 9))
    mean, std = numbers(array.astype(np.float32))
    found = dataset_of(ArraySource(array), crop=9).fit_statistics(seed=0)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.std, std, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 12345.678])
def test_constant_data_have_a_standard_deviation_of_1(value: float) -> None:
    """Also where the mean of squares and the square of the mean round differently."""
    array = np.full((2, 16, 16), value, np.float32)
    array[1] = np.random.default_rng(0).normal(size=(16, 16))
    found = dataset_of(ArraySource(array)).fit_statistics(seed=0)
    assert found.std[0] == 1.0
    assert found.mean[0] == pytest.approx(float(np.float32(value)), abs=1e-12)
    assert found.std[1] == pytest.approx(1.0, abs=0.2)


def test_a_small_spread_around_a_large_mean_is_not_lost() -> None:
    array = np.random.default_rng(0).integers(0, 5, (1, 20, 20)).astype(np.int32) + 10**9
    found = dataset_of(ArraySource(array), crop=20).fit_statistics(seed=0)
    assert found.std[0] == pytest.approx(array.std(dtype=np.float64), rel=1e-9)


def test_statistics_are_the_same_each_time_and_do_not_follow_the_order_of_training(volume: ArraySource) -> None:
    one, two = (dataset_of(volume).fit_statistics(seed=3) for _ in range(2))
    assert one == two
    assert dataset_of(volume).fit_statistics(seed=4) != one
    assert all(isinstance(t, Tensor) for t in Statistics(*one).tensors())


def test_datasets_are_checked() -> None:
    two = ArraySource(np.zeros((2, 10, 10), np.uint8), variables=("a", "b"))
    for variables in (("a",), ("b", "a"), ("a", "c")):
        other = ArraySource(np.zeros((len(variables), 10, 10), np.uint8), variables=variables)
        with pytest.raises(UserError, match=r"data\.train\.1: variables .* do not match \['a', 'b'\]"):
            dataset_of(two, other)
    with pytest.raises(UserError, match=r"data\.train\.0: array has 2 axes \(y, x\), but the model has 3"):
        dataset_of(two, crop=(4, 4, 4))
    with pytest.raises(
        UserError, match=r"data\.train\.0: a0 is 10 x 10 pixels \(y, x\), smaller than data.crop 4 x 11"
    ):
        dataset_of(two, crop=(4, 11))


def test_the_order_of_sources_is_that_of_the_recipe() -> None:
    sources = [ArraySource(np.full((1, 10, 10), i, np.uint8)) for i in range(3)]
    weights = types.SimpleNamespace(open=sources[1].open, path="b", weight=5.0)
    dataset = Dataset([sources[0], weights, sources[2]], (4, 4), where="data.valid")
    assert [(e.source, e.weight) for e in dataset.extents] == [(0, 1.0), (1, 5.0), (2, 1.0)]


# ---------------------------------------------------------------- on a device


@pytest.mark.gpu
def test_batches_arrive_on_the_device_as_they_were_read(volume: ArraySource) -> None:
    loader = loader_of(volume, turn=True, workers=4, prefetch=3)
    plain = list(loader.batches(0, 30))
    loader.device = torch.device("cuda", 0)
    for here, there in zip(plain, loader.batches(0, 30), strict=True):
        assert there.values.is_cuda
        assert there.values.dtype == torch.uint8
        assert torch.equal(here.values, there.values.cpu())


def test_thick_sections_are_never_laid_on_their_side() -> None:
    """Voxels of 40 x 4 x 4 nm: the first axis is flipped but not swapped with the others."""
    from types import SimpleNamespace

    from vitrail.data.dataset import Dataset

    source = ArraySource(np.zeros((1, 8, 8, 8), np.uint8))
    config = SimpleNamespace(open=lambda: source, path="a", weight=1.0)
    dataset = Dataset([config], (4, 4, 4), where="data.train")
    assert len(dataset.orientation_codes()) == 48
    source.items = [dataclasses.replace(item, spacing=(40.0, 4.0, 4.0)) for item in source.items]
    codes = dataset.orientation_codes()
    assert len(codes) == 16
    assert all(orientations((4, 4, 4))[code][0][0] == 0 for code in codes)


# ---------------------------------------------------------------- windows that are not the crop


class KeepRaw:
    """An augmenter that keeps what it is given."""

    resamples = True

    def touched(self, *_: object) -> None:
        return None

    def __call__(self, raw: Raw) -> Batch:
        self.raw = raw
        return Batch(raw.counters, raw.values, raw.labels, raw.variables)


def raw_of(source: ArraySource, windows: list[tuple[int, ...]], crop: tuple[int, ...], **options) -> tuple:
    """The sampler and what the augmenter is given of the first 12 samples."""
    extents = [
        Extent(0, i, item.shape, item.chunk, item.origin, 1.0, w)
        for i, (item, w) in enumerate(zip(source.items, windows, strict=True))
    ]
    sampler = Sampler(extents, crop, seed=0, lanes=3, reuse=2)
    reader = Reader([source], crop, whole_blocks=True, cache_bytes=1 << 20, **options)
    keep = KeepRaw()
    loader = Loader(sampler, reader, device=torch.device("cpu"), workers=2, prefetch=1, augmenter=keep)
    loader.load(range(12))
    return sampler, keep.raw


def cut(source: ArraySource, sample: Sample) -> np.ndarray:
    window = tuple(slice(s, s + n) for s, n in zip(sample.start, sample.window, strict=True))
    return source.arrays[sample.item][(slice(None), *window)]


def test_windows_of_several_sizes_share_one_room() -> None:
    rng = np.random.default_rng(0)
    source = ArraySource(*[rng.integers(0, 255, (2, n, 20), dtype=np.uint8) for n in (12, 30)])
    sampler, raw = raw_of(source, [(8, 9), (11, 7)], (6, 6))
    assert raw.values.shape == (12, 2, 11, 9)
    assert set(raw.sizes) == {(8, 9), (11, 7)}
    for counter, values, size in zip(raw.counters, raw.values, raw.sizes, strict=True):
        np.testing.assert_array_equal(values[:, : size[0], : size[1]].numpy(), cut(source, sampler(counter)))
    assert raw.scales == [(1.0, 1.0)] * 12


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_of_volumes_lose_their_axis(axis: int) -> None:
    source = ArraySource(np.random.default_rng(0).integers(0, 255, (1, 14, 15, 16), dtype=np.uint8))
    source.items[0] = dataclasses.replace(source.items[0], slices=axis, spacing=(1.0, 2.0, 3.0))
    window = tuple(1 if i == axis else 6 for i in range(3))
    sampler, raw = raw_of(source, [window], (6, 6))
    assert raw.values.shape == (12, 1, 6, 6)
    assert raw.spacings[0] == tuple(s for i, s in enumerate((1.0, 2.0, 3.0)) if i != axis)
    for counter, values in zip(raw.counters, raw.values, strict=True):
        np.testing.assert_array_equal(values.numpy(), cut(source, sampler(counter)).squeeze(axis + 1))


def test_scales_of_two_and_more_are_pooled_before_the_device() -> None:
    source = ArraySource(np.random.default_rng(0).integers(0, 255, (1, 40, 40), dtype=np.uint8))
    source.items[0] = dataclasses.replace(source.items[0], scale=(5.0, 1.5), spacing=(2.0, 3.0))
    sampler, raw = raw_of(source, [(21, 9)], (4, 6))
    assert raw.values.shape == (12, 1, 5, 9)
    assert raw.scales[0] == (1.25, 1.5)
    assert raw.spacings[0] == (8.0, 3.0)
    for counter, values in zip(raw.counters, raw.values, strict=True):
        window = cut(source, sampler(counter))[0, :20].astype(np.float64)
        np.testing.assert_array_equal(values[0].numpy(), np.rint(window.reshape(5, 4, 9).mean(axis=1)))


def test_pooled_labels_are_those_of_first_voxels() -> None:
    labels = np.arange(1 * 6 * 4).reshape(1, 6, 4)
    np.testing.assert_array_equal(pool(labels, (2, 4), labels=True)[0], labels[0, ::2, ::4])
    np.testing.assert_array_equal(pool(labels, (8, 1), labels=True)[0], labels[0, :1])  # thinner than a box
    assert pool(labels.astype(np.float32), (2, 1)).dtype == np.float32


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int32"])
@pytest.mark.parametrize("shape", [(40, 60), (61, 33), (16, 16), (10, 12)])
def test_images_are_fitted(dtype: str, shape: tuple[int, int]) -> None:
    """A ramp stays a ramp: the shorter side becomes 16 and the centre is taken, without a shift."""
    ramp = np.linspace(0, 200, shape[1], endpoint=False) + 100 / shape[1]  # centres of pixels
    image = np.broadcast_to(ramp, (2, *shape)).astype(dtype)
    got = fit_image(image, 16, (12, 12))
    assert got.shape == (2, 12, 12)
    assert got.dtype == image.dtype
    width = max(16, round(shape[1] * 16 / min(shape)))
    places = (np.arange(12) + (width - 12) // 2 + 0.5) / width * 200
    inside = slice(1, -1) if width == 16 else slice(None)  # at the border of the image, its last pixel is repeated
    np.testing.assert_allclose(got[0, 5].astype(float)[inside], places[inside], atol=4)
    assert fit_image(image[:1].astype(np.int64), 16, (12, 12), labels=True).dtype == np.int64


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_images_are_made_smaller_as_pillow_does_it(dtype: type) -> None:
    """Each pixel is a mean of all that it stands for: without that, fine patterns become others."""
    image = np.random.default_rng(0).integers(0, 200, (1, 96, 64)).astype(dtype)
    expected = np.asarray(Image.fromarray(image[0].astype(np.float32)).resize((16, 24), Image.Resampling.BILINEAR))
    found = fit_image(image, 16, (24, 16))
    assert found.dtype == dtype
    assert np.abs(found[0].astype(np.float32) - expected).max() <= (1e-3 if dtype == np.float32 else 1.01)


@pytest.mark.parametrize(("height", "width"), [(96, 24), (10, 12), (16, 24)])
def test_images_are_squashed_or_stretched_to_a_size(height: int, width: int) -> None:
    """To y and x, whatever their ratio, as Pillow's resize does; all of the image is in the sample."""
    image = np.random.default_rng(0).integers(0, 200, (1, height, width)).astype(np.uint8)
    expected = np.asarray(Image.fromarray(image[0]).resize((24, 16), Image.Resampling.BILINEAR))
    found = fit_image(image, (16, 24), (16, 24))[0].astype(int)
    assert np.abs(found - expected).max() <= 1
    assert np.array_equal(fit_image(image, (16, 24), (8, 8))[0], found[4:12, 8:16])
    labels = fit_image(image, (16, 24), (16, 24), labels=True)[0]
    rows, columns = (np.floor((np.arange(n) + 0.5) * size / n).astype(int) for n, size in ((16, height), (24, width)))
    assert np.array_equal(labels, image[0][np.ix_(rows, columns)])


def test_entries_may_have_statistics_of_their_own() -> None:
    sources = [ArraySource(np.zeros((2, 12, 20), np.uint8)), ArraySource(np.ones((2, 30, 30), np.uint8))]
    loader = loader_of(*sources, crop=(5, 7))
    told = [Statistics((1.0, 2.0), (3.0, 4.0)), Statistics((5.0, 6.0), (7.0, 8.0))]
    keep = KeepRaw()
    own = Loader(
        loader.sampler,
        loader.reader,
        device=torch.device("cpu"),
        workers=1,
        prefetch=1,
        augmenter=keep,
        statistics=told,
    )
    own.load(range(60))
    assert keep.raw.statistics is not None
    mean, std = keep.raw.statistics
    for row, source in enumerate(keep.raw.sources):
        assert mean[row].tolist() == list(told[source].mean)
        assert std[row].tolist() == list(told[source].std)
    assert len(set(keep.raw.sources)) == 2


def test_whole_images_are_pooled_until_a_batch_has_room_for_them() -> None:
    """For boxes of whole images: the shorter side of what is sent stays between 1.5 and 3 crops, if it was larger."""
    rng = np.random.default_rng(0)
    shapes = [(200, 90), (64, 64), (9, 11), (17, 40)]
    source = ArraySource(*[rng.integers(0, 255, (1, *s), dtype=np.uint8) for s in shapes], chunk=1000)
    extents = [Extent(0, i, s, s, (0, 0), 1.0, s) for i, s in enumerate(shapes)]
    sampler = Sampler(extents, (8, 8), seed=0, lanes=1, reuse=1)
    reader = Reader([source], (8, 8), whole_blocks=False, cache_bytes=0)
    augmenter = Augmenter(Augment.model_validate({"resized_crop": {}}), (8, 8), seed=0)
    loader = Loader(sampler, reader, device=torch.device("cpu"), workers=1, prefetch=1, augmenter=augmenter)
    assert [reader.size_of(0, i, s) for i, s in enumerate(shapes)] == [(50, 22), (16, 16), (9, 11), (17, 40)]
    assert loader.room == (50, 40)
    assert loader.load(range(8)).values.shape == (8, 1, 8, 8)


def test_one_panorama_does_not_enlarge_every_batch() -> None:
    rng = np.random.default_rng(0)
    shapes = [(12, 12)] * 6 + [(9, 300), (300, 9)]
    source = ArraySource(*[rng.integers(0, 255, (1, *s), dtype=np.uint8) for s in shapes], chunk=1000)
    extents = [Extent(0, i, s, s, (0, 0), 1.0, s) for i, s in enumerate(shapes)]
    augmenter = Augmenter(Augment.model_validate({"resized_crop": {}}), (8, 8), seed=0)
    seen: list[tuple[int, ...]] = []

    def keep(raw: Raw) -> Batch:
        seen.append(tuple(raw.values.shape[2:]))
        return augmenter(raw)

    sampler = Sampler(extents, (8, 8), seed=0, lanes=1, reuse=1)
    reader = Reader([source], (8, 8), whole_blocks=False, cache_bytes=0)
    loader = Loader(sampler, reader, device=torch.device("cpu"), workers=1, prefetch=1, augmenter=augmenter)
    together = loader.load(range(8)).values
    loader.augmenter = keep  # type: ignore[assignment]
    keep.resamples, keep.touched = True, augmenter.touched  # type: ignore[attr-defined]
    for counter in range(8):
        assert torch.equal(loader.load([counter]).values[0], together[counter])
        assert [sample.item for sample in loader.samples] == [sampler(counter).item]
    assert loader.room == (300, 300)
    assert sorted(seen) == sorted(shapes)


class StraightSource(ArraySource):
    """Keeps chunks itself, and copies to where a window belongs."""

    keeps_chunks = reads_straight = True

    def read_into(self, item: int, region: tuple[slice, ...], out: np.ndarray, touched: None = None) -> None:
        self.before()
        out[...] = self.arrays[item][(slice(None), *region)]

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        raise AssertionError("there is a shorter way")


@pytest.mark.parametrize(("cache", "much_more"), [(0, 0), (1 << 20, 4), (1 << 20, 0)])
def test_windows_are_copied_straight_where_a_source_can(
    cache: int, much_more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no block is kept for them, however large the source is."""
    monkeypatch.setattr("vitrail.data.reading.reader.MUCH_MORE", much_more)
    source = StraightSource(np.random.default_rng(0).integers(0, 60_000, (2, 21, 24, 18), dtype=np.uint16))
    loader = loader_of(source, turn=False, cache=cache)
    assert loader.reader.whole_blocks == (cache > 0)
    own = threading.local()  # a read is tried again by its own thread: never do two tries fail in a row

    def fail_sometimes() -> None:
        own.calls = getattr(own, "calls", -1) + 1
        if own.calls % 5 == 0:
            raise OSError(5, "Input/output error")

    source.before = fail_sometimes
    for batch in loader.batches(0, 5):
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [source], counter))
    assert not len(loader.reader.blocks)


# ---------------------------------------------------------------- memory that is used again


def test_memory_of_batches_is_used_again_but_never_that_of_one_still_held(volume: ArraySource) -> None:
    loader = loader_of(volume, workers=2, prefetch=2)
    places, held, copies = Counter(), [], []  # type: ignore[var-annotated]
    for number, batch in enumerate(loader.batches(0, 40)):
        places[batch.values.data_ptr()] += 1
        if number in (3, 17):
            held.append(batch.values[1:2, :, 2:])  # a view is enough
            copies.append(held[-1].clone())
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [volume], counter))
        del batch
    known = [aligned(array, 1).__array_interface__["data"][0] for array in loader._values._known]
    assert len(known) <= 2 * loader.prefetch + 2
    assert sum(places[place] for place in known) > 20
    for view, copy in zip(held, copies, strict=True):
        assert torch.equal(view, copy)
        assert places[view.untyped_storage().data_ptr()] >= 1


def test_buffers_are_free_when_nobody_refers_to_them() -> None:
    buffers, size = Buffers(), np.dtype(np.uint16)

    def address(array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    first = buffers.take((3, 40), size, limit=1000)
    tensor = torch.from_numpy(first)[1:]
    place = address(first)
    del first
    second = buffers.take((120,), size, limit=1000)
    assert address(second) != place
    del tensor
    third = buffers.take((240,), np.dtype(np.uint8), limit=1000)  # as many bytes
    assert address(third) == place
    del second, third
    whole = buffers.take((1000,), np.dtype(np.uint8), limit=1000)  # the others make room
    assert [array.nbytes for array in buffers._known] == [1000 + LINE]
    assert address(whole) % LINE == 0
    more = buffers.take((500,), np.dtype(np.uint8), limit=1000)  # beyond the limit: not remembered
    assert len(buffers._known) == 1
    assert address(more) != address(whole)


def test_small_samples_are_read_by_the_handful_and_a_slow_one_is_named(
    volume: ArraySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a job has the whole limit, and the error names the one that hangs."""
    stop = threading.Event()
    pool, clock, looks = Pool(1), [0.0], threading.Semaphore(0)

    def look() -> float:
        looks.release()
        return clock[0]

    def take_a_second() -> None:
        clock[0] += 1
        for _ in range(5):  # the one who waits has looked at the clock since: of a few looks not all are its own
            assert looks.acquire(timeout=LONG)

    try:
        with monkeypatch.context() as patch:
            patch.setattr("vitrail.data.reading.pool.time", types.SimpleNamespace(monotonic=look))
            quick = pool.put(Several([take_a_second] * 4, [lambda: "quick"] * 4))
            assert quick.result(1.05) == [None] * 4  # 4 s in all
        slow = pool.put(Several([lambda: None, partial(stop.wait, 5.0)], [lambda: "first", lambda: "second"]))
        with pytest.raises(SlowRead, match=r"^second: the read has not ended"):
            slow.result(0.2)
    finally:
        stop.set()
        pool.close()
    loader = loader_of(volume, workers=2, prefetch=1)
    for batch in loader.batches(0, 3):
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [volume], counter))
