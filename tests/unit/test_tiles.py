"""Tiles: every one exactly once an epoch, whatever the sizes, overlaps, lanes, ranks and workers."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vitrail.data.dataset import InOrder
from vitrail.data.order.filter import Occupancy
from vitrail.data.order.proof import deal
from vitrail.data.order.sampler import Extent
from vitrail.data.order.tiles import Tiles, segment, shuffled, tile_starts
from vitrail.errors import UserError


def extent(shape, chunk=None, origin=None, *, source=0, item=0, window=()) -> Extent:
    return Extent(source, item, shape, chunk or shape, origin or (0,) * len(shape), 1.0, window)


def names(samples) -> list[tuple]:
    return [(s.source, s.item, s.start) for s in samples]


@st.composite
def cases(draw):
    ndim = draw(st.integers(1, 3))
    crop = draw(st.tuples(*[st.integers(1, 6)] * ndim))
    extents = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(c + draw(st.integers(0, 11)) for c in crop)
        chunk = draw(st.tuples(*[st.integers(1, 9)] * ndim))
        origin = tuple(draw(st.integers(0, c - 1)) for c in chunk)
        extents.append(Extent(number % 2, number // 2, shape, chunk, origin, 1.0))
    options = {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "lanes": draw(st.integers(1, 40)),
        "overlap": draw(st.floats(0, 0.99) | st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 0.9])] * ndim)),
        "edges": draw(st.booleans()),
        "block": draw(st.none() | st.tuples(*[st.integers(1, 12)] * ndim)),
    }
    return extents, crop, options


def check_epochs(case, epochs: int) -> None:
    extents, crop, options = case
    tiles = Tiles(extents, crop, **options)
    if tiles.epoch > 3000:
        return
    overlap = options["overlap"] if isinstance(options["overlap"], tuple) else [options["overlap"]] * len(crop)
    expected = {
        (e.source, e.item, start)
        for e in extents
        for start in itertools.product(
            *[
                tile_starts(size, c, o, edges=options["edges"]).tolist()
                for size, c, o in zip(e.shape, crop, overlap, strict=True)
            ]
        )
    }
    assert tiles.epoch == len(expected)
    for number in range(epochs):
        samples = [tiles(counter) for counter in range(number * tiles.epoch, (number + 1) * tiles.epoch)]
        assert Counter(names(samples)) == Counter(expected)
        for s in samples:
            shape = next(e.shape for e in extents if (e.source, e.item) == (s.source, s.item))
            for start, size, block, whole in zip(s.start, crop, s.block, shape, strict=True):
                assert 0 <= block.start <= start
                assert start + size <= block.stop <= whole
            assert np.prod([b.stop - b.start for b in s.block]) <= tiles.largest_block


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_tile_comes_once_an_epoch(case) -> None:
    check_epochs(case, 2)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(case=cases())
def test_every_tile_comes_once_an_epoch_at_length(case) -> None:
    check_epochs(case, 3)


def check_ranks(case, batch_share: int, worlds: list[int], counter: int) -> None:
    """Worlds that take turns, each from where the last one stopped: the order goes on as if there were one rank."""
    extents, crop, options = case
    tiles, again = (Tiles(extents, crop, **options) for _ in range(2))
    done, seen = counter, []
    for world in worlds:
        batch = batch_share * world
        dealt = deal(2 * batch, batch, world)  # two steps, rank after rank
        by_rank = dealt.reshape(world, 2, batch_share)
        for step in range(2):
            for rank in range(world):  # a rank's workers may take its samples in any order
                mine = [done + int(c) for c in by_rank[rank, step]]
                seen += sorted((c, *names([tiles(c)])) for c in reversed(mine))
        done += 2 * batch
    assert seen == [(c, *names([again(c)])) for c in range(counter, done)]


@settings(max_examples=30, deadline=None)
@given(
    case=cases(),
    share=st.integers(1, 3),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    counter=st.integers(0, 10**6),
)
def test_another_world_goes_on_in_the_same_order(case, share: int, worlds: list[int], counter: int) -> None:
    check_ranks(case, share, worlds, counter)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    case=cases(),
    share=st.integers(1, 4),
    worlds=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    counter=st.integers(0, 10**9),
)
def test_another_world_goes_on_in_the_same_order_at_length(case, share, worlds, counter) -> None:
    check_ranks(case, share, worlds, counter)


@given(total=st.integers(1, 500), lanes=st.integers(1, 600))
def test_segments_are_the_whole_sequence(total: int, lanes: int) -> None:
    assert sorted(segment(i, total, lanes) for i in range(total)) == list(range(total))


@given(size=st.integers(1, 300), secret=st.integers(0, 2**63 - 1))
def test_shuffled_is_an_order(size: int, secret: int) -> None:
    assert sorted(shuffled(size, secret).tolist()) == list(range(size))


def test_orders_differ_by_seed_and_pass() -> None:
    tiles = [Tiles([extent((40, 40), (8, 8))], (4, 4), seed=seed, lanes=4) for seed in range(3)]
    orders = {tuple(names(map(t, range(n * t.epoch, (n + 1) * t.epoch)))) for t in tiles for n in range(3)}
    assert len(orders) == 9
    assert len({tuple(t.blocks(n)[0]) for t in tiles for n in range(3)}) == 9  # of the blocks, too


def test_golden_order() -> None:
    """The order of a run is part of its result: it must not change between versions."""
    tiles = Tiles([extent((10, 12), (4, 4))], (4, 4), seed=7, lanes=2)
    assert [tiles(i).start for i in range(9)] == [
        (6, 8),
        (0, 0),
        (4, 8),
        (4, 0),
        (0, 8),
        (6, 0),
        (4, 4),
        (0, 4),
        (6, 4),
    ]


# ---------------------------------------------------------------- where tiles lie


@example(size=10, window=4, overlap=0.0)
@given(size=st.integers(1, 80), window=st.integers(1, 20), overlap=st.floats(0, 1, exclude_max=True))
def test_edge_tiles_reach_the_border(size: int, window: int, overlap: float) -> None:
    window = min(size, window)
    starts = tile_starts(size, window, overlap)
    covered = np.zeros(size, bool)
    for start in starts:
        covered[start : start + window] = True
    assert covered.all()
    assert starts[0] == 0
    assert starts[-1] == size - window
    assert (np.diff(starts) > 0).all()
    inner = tile_starts(size, window, overlap, edges=False)
    assert (np.diff(inner) == window - int(window * overlap)).all()
    assert inner.tolist() == starts[: len(inner)].tolist()


def study_count(size: int, tile: int, overlap: float, use_all: bool) -> int:
    """Tiles along an axis as UCF-VIT counts them; right for overlaps of 0 and a half."""
    parts = 1 if overlap == 0 else int(tile / int(tile * overlap))
    step = tile if overlap == 0 else int(tile * overlap)
    count = (size // tile - 1) * parts + 1
    if use_all:
        count += int((size / tile - size // tile) * parts) + (size % step != 0)
    return count


@given(half=st.integers(1, 16), more=st.integers(0, 70), overlap=st.sampled_from([0.0, 0.5]))
def test_as_many_tiles_as_the_study_where_that_is_consistent(half: int, more: int, overlap: float) -> None:
    tile, size = 2 * half, 2 * half + more
    assert len(tile_starts(size, tile, overlap)) == study_count(size, tile, overlap, True)
    if overlap == 0:
        assert len(tile_starts(size, tile, overlap, edges=False)) == study_count(size, tile, overlap, False)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_of_a_volume_along_any_axis(axis: int) -> None:
    shape, window = (5, 7, 9), [4, 4, 4]
    window[axis] = 1
    tiles = Tiles([extent(shape, (2, 3, 4), window=tuple(window))], (4, 4), seed=0, lanes=3, overlap=0.5)
    samples = [tiles(i) for i in range(tiles.epoch)]
    assert {s.start[axis] for s in samples} == set(range(shape[axis]))
    assert len(set(names(samples))) == tiles.epoch
    assert all(s.window == tuple(window) for s in samples)


def test_tiles_of_a_block_come_together_in_their_lane() -> None:
    tiles = Tiles([extent((64, 64), (16, 16))], (8, 8), seed=0, lanes=4)
    assert tiles.epoch == 64
    assert tiles.reuse == 4
    for lane in range(4):
        blocks = [tiles(c).block for c in range(lane, 64, 4)]
        runs = [block for block, _ in itertools.groupby(blocks)]
        assert len(runs) == 4  # sixteen tiles in four blocks, none come back to


def test_a_tile_that_cannot_be_read_gives_way_to_another() -> None:
    tiles = Tiles([extent((64, 64), (16, 16))], (8, 8), seed=0, lanes=4)
    stand_ins = [tiles(3, attempt) for attempt in range(1, 20)]
    assert [s.attempt for s in stand_ins] == list(range(1, 20))
    assert len(set(names(stand_ins))) > 10
    assert stand_ins == [tiles(3, attempt) for attempt in range(1, 20)]


@settings(max_examples=40, deadline=None)
@given(case=cases(), share=st.sampled_from([0.1, 0.5, 1.0]), density=st.sampled_from([0.05, 0.3]))
def test_tiles_with_enough_in_them_come_once_an_epoch(case, share: float, density: float) -> None:
    extents, crop, options = case
    rng = np.random.default_rng(options["seed"])
    masks = [rng.random(e.shape) < density for e in extents]
    filled = [Occupancy(mask, e.shape, (1,) * len(crop), share) for mask, e in zip(masks, extents, strict=True)]
    everything = Tiles(extents, crop, **options)
    if everything.epoch > 2000:
        return
    whole = {(s.source, s.item): mask for s, mask in zip(extents, masks, strict=True)}

    def enough(sample) -> bool:
        box = whole[sample.source, sample.item][tuple(slice(s, s + c) for s, c in zip(sample.start, crop, strict=True))]
        return bool(box.mean() >= share - 1e-12)

    expected = Counter(names(s for s in map(everything, range(everything.epoch)) if enough(s)))
    if not expected:
        with pytest.raises(UserError, match=r"data\.filter: no tile has enough in it"):
            Tiles(extents, crop, **options, occupancy=filled)
        return
    tiles = Tiles(extents, crop, **options, occupancy=filled)
    assert Counter(names(map(tiles, range(tiles.epoch)))) == expected
    in_order = names(map(InOrder(tiles), range(tiles.epoch)))
    assert Counter(in_order) == expected
    place = {(e.source, e.item): number for number, e in enumerate(extents)}
    assert in_order == sorted(in_order, key=lambda name: (place[name[:2]], name[2]))


def test_overlaps_are_one_or_one_an_axis() -> None:
    with pytest.raises(UserError, match=r"data\.tiles\.overlap: \[0\.5\] are not one number for each of 2 axes"):
        Tiles([extent((8, 8))], (4, 4), seed=0, lanes=1, overlap=[0.5])
