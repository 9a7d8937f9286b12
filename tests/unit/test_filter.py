"""Samples with something in them: shares of boxes, and orders that stay functions of seed and counter."""

import errno
import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loader import ArraySource

from vitrail.data.augment import Augmenter
from vitrail.data.dataset import Dataset
from vitrail.data.order.filter import Occupancy, cell_of, count_voxels
from vitrail.data.order.sampler import Extent, Sampler
from vitrail.data.reading.pool import Policy, SlowRead
from vitrail.data.sources.arrays import NumpyConfig
from vitrail.errors import BadData, UserError
from vitrail.recipe.sections import Data


def box(mask: np.ndarray, start, window) -> np.ndarray:
    return mask[tuple(slice(s, s + w) for s, w in zip(start, window, strict=True))]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ndim=st.integers(1, 3), cell=st.integers(1, 4))
def test_shares_of_boxes(data, ndim: int, cell: int) -> None:
    """Exact on the grid of cells, and everywhere where a cell is a voxel."""
    shape = data.draw(st.tuples(*[st.integers(4, 12)] * ndim))
    mask = np.random.default_rng(data.draw(st.integers(0, 99))).random(shape) < 0.3
    counts = mask.astype(float)
    for axis in range(ndim):
        counts = np.add.reduceat(counts, np.arange(0, shape[axis], cell), axis=axis)
    found = Occupancy(counts, shape, (cell,) * ndim, 0.5)
    window = tuple(min(cell * data.draw(st.integers(1, 3)), size) for size in shape)
    start = tuple(data.draw(st.integers(0, (size - w) // cell)) * cell for size, w in zip(shape, window, strict=True))
    share = found.shares([np.array([s]) for s in start], window).item()
    assert share == pytest.approx(box(mask, start, window).mean(), abs=1e-9)
    whole = found.shares([np.array([0])] * ndim, shape).item()
    assert whole == pytest.approx(mask.mean(), abs=1e-9)
    for limit in (share, share + 1e-6):
        found.share = limit
        assert found.has_enough(start, window) == (limit == share)
    if cell == 1:
        starts = [np.arange(size - w + 1) for size, w in zip(shape, window, strict=True)]
        table = found.shares(starts, window)
        for place in np.ndindex(table.shape):
            assert table[place] == pytest.approx(box(mask, place, window).mean(), abs=1e-9)


def sampler_of(mask: np.ndarray, crop: tuple[int, ...], share: float, **options) -> Sampler:
    filled = Occupancy(mask, mask.shape, (1,) * mask.ndim, share)
    extent = Extent(0, 0, mask.shape, (8,) * mask.ndim, (0,) * mask.ndim, 1.0)
    return Sampler([extent], crop, **{"seed": 0, "lanes": 3, "reuse": 2, **options}, occupancy=[filled])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), share=st.sampled_from([0.05, 0.3, 0.6]), counters=st.lists(st.integers(0, 10**6)))
def test_crops_have_enough_in_them(seed: int, share: float, counters: list[int]) -> None:
    mask = np.random.default_rng(seed).random((20, 17)) < 0.2
    mask[:9, :9] = True
    order, again = (sampler_of(mask, (4, 4), share, seed=seed) for _ in range(2))
    for counter in counters:
        for attempt in (0, 1):
            sample = order(counter, attempt)
            assert box(mask, sample.start, (4, 4)).mean() >= share - 1e-9
            assert sample == again(counter, attempt)
            for start, block, size in zip(sample.start, sample.block, mask.shape, strict=True):
                assert block.start <= start
                assert start + 4 <= block.stop <= size


def test_places_with_enough_are_drawn_alike() -> None:
    mask = np.zeros((32, 32), bool)
    mask[3:10, 20:30] = True
    mask[25, 5] = True
    order = sampler_of(mask, (4, 4), 1 / 16)
    allowed = {(int(y), int(x)) for y, x in np.ndindex(29, 29) if mask[y : y + 4, x : x + 4].any()}
    draws = 4_000
    drawn = Counter(order(counter).start for counter in range(draws))
    assert drawn.keys() == allowed
    chi = sum((drawn[place] - draws / len(allowed)) ** 2 for place in allowed) / (draws / len(allowed))
    assert chi < len(allowed) + 5 * math.sqrt(2 * len(allowed))


def test_one_place_among_many_is_found() -> None:
    mask = np.zeros((64, 64), bool)
    mask[40, 41] = True
    order = sampler_of(mask, (1, 1), 1.0)
    assert {order(counter).start for counter in range(40)} == {(40, 41)}
    assert order.visits == 1


def test_nowhere_enough_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.filter: no place has enough in it; lower `share` or `above`"):
        sampler_of(np.zeros((8, 8), bool), (4, 4), 0.1)


# ---------------------------------------------------------------- of a recipe


@pytest.fixture
def entry(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    array = np.zeros((24, 40), np.uint8)
    array[4:9, 10:30] = 200
    np.save(tmp_path / "a.npy", array)
    return NumpyConfig(path=str(tmp_path / "a.npy"))


def dataset_of(entry, **values) -> Dataset:
    chosen = Data(train=[{"path": "a"}], crop=8, batch=4, **values)
    return Dataset([entry], (8, 8), where="data.train", settings=chosen)


def test_maps_count_every_voxel_once(entry) -> None:
    source, array = entry.open(), np.load(entry.path)
    for cell in ((1, 1), (3, 5), (7, 40)):
        counts = count_voxels(source, 0, cell, by=source.variables[0], above=100)
        expected = np.add.reduceat(array > 100, np.arange(0, 24, cell[0]), axis=0, dtype=float)
        assert (counts == np.add.reduceat(expected, np.arange(0, 40, cell[1]), axis=1)).all()
    assert cell_of((64, 4)) == (8, 1)


@pytest.mark.parametrize("tiles", [None, {"overlap": 0.5}])
def test_a_recipe_filters_by_a_variable(entry, tiles) -> None:
    chosen = {"by": entry.open().variables[0], "above": 100, "share": 0.25}
    dataset = dataset_of(entry, filter=chosen, tiles=tiles)
    order = dataset.sampler(seed=0, lanes=2, reuse=1)
    array = np.load(entry.path)
    for counter in range(60):
        assert (box(array, order(counter).start, (8, 8)) > 100).mean() >= 0.25


def test_maps_are_made_once_for_the_same_data(entry, tmp_path, monkeypatch) -> None:
    chosen = {"by": entry.open().variables[0], "above": 100}
    dataset_of(entry, filter=chosen)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.data.order.filter.count_voxels", lambda *a, **k: pytest.fail("made again"))
        dataset_of(entry, filter=chosen)
    changed = np.zeros((24, 40), np.uint8)
    changed[0, 0] = 255
    np.save(tmp_path / "a.npy", changed)
    with pytest.raises(UserError, match=r"data\.filter: nowhere in data\.train\.0 .* above 100 in 0\.05 of a sample"):
        dataset_of(entry, filter=chosen).sampler(seed=0, lanes=1, reuse=1)


def test_maps_of_whole_images_and_of_crops_are_not_confused(entry) -> None:
    chosen = {"by": entry.open().variables[0], "above": 100, "share": 0.1}
    assert dataset_of(entry, filter=chosen, fit={"resize": 8}).occupancy[0].cell == (3, 5)
    assert dataset_of(entry, filter=chosen).occupancy[0].table.shape == (25, 41)


@pytest.mark.parametrize("tiles", [None, {}])
def test_every_entry_has_some_of_what_its_samples_are_cut_from(entry, tmp_path, tiles) -> None:
    array = np.zeros((32, 32), np.uint8)
    array[12:20, 12:20] = 200  # room for a crop, but not for one that turns
    np.save(tmp_path / "small.npy", array)
    np.save(tmp_path / "full.npy", np.full((32, 32), 200, np.uint8))
    pair = [NumpyConfig(path=str(tmp_path / name)) for name in ("full.npy", "small.npy")]
    filter = {"by": entry.open().variables[0], "share": 0.9}
    augment, mix = ({}, "size") if tiles is not None else ({"rotate": 180}, "equal")
    made = Data(train=[{"path": "a"}], crop=8, batch=4, mix=mix, filter=filter, augment=augment, tiles=tiles)
    dataset = Dataset(pair, (8, 8), where="data.train", settings=made)
    if tiles is None:
        assert {dataset.sampler(seed=0, lanes=1, reuse=1)(c).source for c in range(400)} == {0, 1}
    with pytest.raises(UserError, match=r"data\.filter: nowhere in data\.train\.1 \(.*small\.npy\)"):
        dataset.sampler(seed=0, lanes=1, reuse=1, augmenter=Augmenter(made.augment, (8, 8), seed=0))


class Faulty(ArraySource):
    """A source with a broken row, whose reads fail at first."""

    def __init__(self, array: np.ndarray, error: Exception | None = None):
        super().__init__(array[None])
        self.error, self.failed = error, set[tuple[int, ...]]()

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        if self.error is not None and region[0].start >= 8:
            raise self.error
        place = tuple(part.start for part in region)
        if len(self.failed) < 2 and place not in self.failed:  # two places once each, whichever thread comes first
            self.failed.add(place)
            raise OSError(errno.EIO, "Input/output error")
        return super().read(item, region)


def test_maps_are_read_with_the_policy_for_bad_data(entry, monkeypatch, caplog) -> None:
    monkeypatch.setattr("vitrail.data.reading.pool.FIRST_WAIT", 0.001)
    monkeypatch.setattr("vitrail.data.reading.pool.PATIENCE", 0.1)
    monkeypatch.setattr("vitrail.data.order.filter.PIECE", 64)  # pieces of 8 x 8
    array, ticks = np.load(entry.path), []
    options = {"by": "v0", "above": 100}

    def tick() -> None:
        ticks.append(1)

    whole = count_voxels(Faulty(array), 0, (4, 4), tick=tick, **options)
    assert whole.sum() == 100
    assert len(ticks) == 15
    broken = BadData("a0 is broken; restore it")
    with pytest.raises(BadData, match="a0 is broken"):
        count_voxels(Faulty(array, broken), 0, (4, 4), **options)
    part = count_voxels(Faulty(array, broken), 0, (4, 4), policy=Policy("skip"), **options)
    assert (part[:2] == whole[:2]).all()
    assert not part[2:].any()
    assert "which data.filter takes for empty: a0 is broken" in caplog.text
    # What may pass is no reason to leave out a place on one rank alone.
    with pytest.raises(BadData, match=r"a0 \(voxels y 8 to 15, x 0 to 7\) cannot be read after 2 tries"):
        count_voxels(Faulty(array, TimeoutError("late")), 0, (4, 4), policy=Policy("skip", retries=1), **options)
    slow = ArraySource(array[None])
    slow.before = lambda: time.sleep(1)
    with pytest.raises(SlowRead, match=r"a0 \(voxels y 0 to 7, x 0 to 7\): the read has not ended"):
        count_voxels(slow, 0, (4, 4), policy=Policy("skip", limit=0.2), **options)


def test_one_broken_chunk_costs_no_more_than_itself(caplog) -> None:
    class Broken(ArraySource):
        def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
            if all(r.start < 16 and r.stop > 8 for r in region):  # chunk 1, 1
                raise BadData("chunk 1.1 is broken; restore it")
            return super().read(item, region)

    source = Broken(np.full((1, 40, 24), 9, np.uint8))
    for cell in ((8, 8), (3, 5)):
        caplog.clear()
        found = count_voxels(source, 0, cell, by="v0", above=0, policy=Policy("skip"))
        good = np.ones((40, 24))
        good[8:16, 8:16] = 0
        expected = np.add.reduceat(good, np.arange(0, 40, cell[0]), axis=0)
        assert (found == np.add.reduceat(expected, np.arange(0, 24, cell[1]), axis=1)).all()
        assert caplog.text.count("chunk 1.1 is broken") == 1


def test_filters_by_what_is_not_there_are_refused(entry) -> None:
    with pytest.raises(UserError, match=r"data\.filter\.by: data\.train\.0 has no variable 'em'; use labels or one of"):
        dataset_of(entry, filter={"by": "em"})
    with pytest.raises(UserError, match=r"data\.filter\.by: data\.train\.0 has no labels of voxels; name a variable"):
        dataset_of(entry, filter={"by": "labels"})
