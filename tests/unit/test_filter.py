"""Samples with something in them: shares of boxes, and orders that stay functions of seed and counter."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.dataset import Dataset
from vitrail.data.filter import Occupancy, cell_of, count_voxels
from vitrail.data.sampler import Extent, Sampler
from vitrail.data.sources.numpy import NumpyConfig
from vitrail.errors import UserError
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
        patch.setattr("vitrail.data.filter.count_voxels", lambda *a, **k: pytest.fail("made again"))
        dataset_of(entry, filter=chosen)
    changed = np.zeros((24, 40), np.uint8)
    changed[0, 0] = 255
    np.save(tmp_path / "a.npy", changed)
    with pytest.raises(UserError, match=r"data\.filter: nowhere in data\.train\.0 .* above 100 in 0\.05 of a sample"):
        dataset_of(entry, filter=chosen)


def test_filters_by_what_is_not_there_are_refused(entry) -> None:
    with pytest.raises(UserError, match=r"data\.filter\.by: data\.train\.0 has no variable 'em'; use labels or one of"):
        dataset_of(entry, filter={"by": "em"})
    with pytest.raises(UserError, match=r"data\.filter\.by: data\.train\.0 has no labels of voxels; name a variable"):
        dataset_of(entry, filter={"by": "labels"})
