"""The sampler: a pure function of seed and counter whose crops are uniform over the data."""

import hashlib
import itertools
import math
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vitrail.data.batch import Statistics
from vitrail.data.order.filter import Occupancy
from vitrail.data.order.sampler import PASSES, Extent, Permutation, Sample, Sampler, choose, permute
from vitrail.data.order.tiles import Tiles
from vitrail.data.reading.pool import Policy
from vitrail.launch.world import World
from vitrail.parallel.mesh import Layout
from vitrail.parallel.split import Split
from vitrail.recipe.sections import Augment
from vitrail.training.setup import DataParts, Place, make_loader


def extent(shape, chunk=None, origin=None, *, source=0, item=0, weight=1.0) -> Extent:
    ndim = len(shape)
    return Extent(source, item, tuple(shape), tuple(chunk or shape), tuple(origin or (0,) * ndim), weight)


def visit_of(sampler: Sampler, counter: int) -> int:
    """The number of the visit that a counter falls in, told again from its definition."""
    turn, lane = divmod(counter, sampler.lanes)
    return turn // sampler.reuse * sampler.lanes + lane


def block_of(sample: Sample) -> tuple:
    return (sample.source, sample.item, *[(b.start, b.stop) for b in sample.block])


@st.composite
def cases(draw, most=2):
    """Extents of one dimension count, larger than the crop by any margin, with any chunks and origins."""
    ndim = draw(st.integers(1, 3))
    crop = draw(st.tuples(*[st.integers(1, 6)] * ndim))
    extents = []
    for number in range(draw(st.integers(1, most))):
        shape = tuple(c + draw(st.integers(0, 12)) for c in crop)
        chunk = draw(st.tuples(*[st.integers(1, 9)] * ndim))
        origin = tuple(draw(st.integers(0, c - 1)) for c in chunk)
        extents.append(Extent(number, 0, shape, chunk, origin, draw(st.sampled_from([0.5, 1.0, 3.0]))))
    options = {
        "seed": draw(st.integers(0, 2**63 - 1)),
        "lanes": draw(st.integers(1, 9)),
        "reuse": draw(st.one_of(st.none(), st.integers(1, 5))),
        "block": draw(st.one_of(st.none(), st.tuples(*[st.integers(1, 12)] * ndim))),
        "orientations": draw(st.sampled_from([range(1), range(8)])),
    }
    return extents, crop, options


# ---------------------------------------------------------------- the permutation


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 600), secret=st.integers(0, 2**63 - 1))
def test_permute_is_a_bijection(size: int, secret: int) -> None:
    assert sorted(permute(i, size, secret) for i in range(size)) == list(range(size))


@settings(max_examples=50, deadline=None)
@example(power=60, off=1, secret=1)  # its logarithm as a float is 60: one bit too few
@given(power=st.integers(1, 62), off=st.integers(-1, 1), secret=st.integers(0, 2**63 - 1))
def test_permute_stays_inside_sizes_that_cannot_be_listed(power: int, off: int, secret: int) -> None:
    size = max(1, 2**power + off)
    indices = {size - 1, size // 2, 0, min(size - 1, 12345)}
    found = {permute(i, size, secret) for i in indices}
    assert len(found) == len(indices)
    assert all(0 <= i < size for i in found)


@pytest.mark.parametrize("size", [2, 10, 64, 1000, 4096])
def test_permute_is_a_feistel_network_of_four_rounds(size: int) -> None:
    """With two, half of the bits that come out would be those that went in, but for one hash."""
    half = max(1, math.ceil(math.log2(size) / 2))

    def rounds(index: int) -> int:
        left, right = divmod(index, 2**half)
        for number in range(4):
            digest = hashlib.blake2b(f"9:feistel:{number}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ ((int.from_bytes(digest, "little") >> 1) % 2**half)
        return left * 2**half + right

    expected = []
    for index in range(size):
        found = rounds(index)
        while found >= size:
            found = rounds(found)
        expected.append(found)
    assert [permute(index, size, 9) for index in range(size)] == expected
    assert Permutation(size, 9)(np.arange(size)).tolist() == expected


def test_permute_depends_on_its_key() -> None:
    orders = {tuple(permute(i, 50, secret) for i in range(50)) for secret in range(20)}
    assert len(orders) == 20


# ---------------------------------------------------------------- a pure function


@settings(max_examples=60, deadline=None)
@given(case=cases(), counters=st.lists(st.integers(0, 10**7), min_size=1, max_size=12))
def test_a_sample_is_a_function_of_seed_and_counter(case, counters: list[int]) -> None:
    extents, crop, options = case
    one, two = (Sampler(extents, crop, **options) for _ in range(2))
    forwards = [one(c) for c in counters]
    backwards = [two(c) for c in reversed(counters)][::-1]
    assert forwards == backwards


def test_another_seed_gives_another_order() -> None:
    orders = [
        tuple(Sampler([extent((64, 64), (16, 16))], (8, 8), seed=seed, lanes=4)(c).start for c in range(40))
        for seed in range(5)
    ]
    assert len(set(orders)) == 5


def test_passes_differ() -> None:
    sampler = Sampler([extent((64,), (4,))], (4,), seed=0, lanes=1, reuse=1)
    passes = [[block_of(sampler(p * sampler.epoch + i)) for i in range(sampler.epoch)] for p in range(4)]
    assert len({tuple(p) for p in passes}) == 4


def test_golden_values() -> None:
    """The order of a run is part of its result: it must not change between versions."""
    sampler = Sampler([extent((40, 40), (16, 16), (3, 0))], (8, 8), seed=7, lanes=2, reuse=2, orientations=range(8))
    found = [(s.start, s.orientation) for s in map(sampler, range(6))]
    assert found == [((12, 4), 7), ((12, 24), 5), ((7, 8), 3), ((11, 24), 6), ((1, 25), 3), ((32, 7), 0)]


# ---------------------------------------------------------------- inside, and once a pass


@settings(max_examples=150, deadline=None)
@given(case=cases(), counters=st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_crops_lie_inside_their_block_and_the_volume(case, counters: list[int]) -> None:
    extents, crop, options = case
    sampler = Sampler(extents, crop, **options)
    for counter in counters:
        sample = sampler(counter)
        shape = extents[sample.source].shape
        for start, size, block, whole in zip(sample.start, crop, sample.block, shape, strict=True):
            assert 0 <= block.start <= start
            assert start + size <= block.stop <= whole
        assert sample.orientation in options["orientations"]
        volume = math.prod(b.stop - b.start for b in sample.block)
        assert volume <= sampler.largest_block


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_every_start_belongs_to_one_block(case) -> None:
    extents, crop, options = case
    sampler = Sampler(extents, crop, **options)
    for e, cuts in zip(extents, sampler.cuts, strict=True):
        for size, c, edges in zip(e.shape, crop, cuts, strict=True):
            assert edges[0] == 0
            assert edges[-1] == size - c + 1
            assert (np.diff(edges) > 0).all()


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_blocks_are_cut_on_chunk_boundaries(case) -> None:
    extents, crop, options = case
    sampler = Sampler(extents, crop, **{**options, "block": None})
    for e, cuts in zip(extents, sampler.cuts, strict=True):
        for chunk, origin, edges in zip(e.chunk, e.origin, cuts, strict=True):
            assert all((edge + origin) % chunk == 0 for edge in edges[1:-1])


@settings(max_examples=60, deadline=None)
@given(case=cases(), passes=st.integers(1, 2))
def test_a_lane_stays_on_its_block_for_as_many_turns_as_reuse_says(case, passes: int) -> None:
    extents, crop, options = case
    sampler = Sampler(extents, crop, **options)
    blocks: dict[int, set] = {}
    for counter in range(min(400, passes * sampler.epoch)):
        blocks.setdefault(visit_of(sampler, counter), set()).add(block_of(sampler(counter)))
    assert all(len(found) == 1 for found in blocks.values())


@pytest.mark.parametrize("lanes", [1, 3, 8, 100])
@pytest.mark.parametrize("reuse", [1, 4])
def test_blocks_of_equal_weight_are_visited_once_a_pass(lanes: int, reuse: int) -> None:
    """51 starts in 3 blocks of 17 along each axis."""
    sampler = Sampler([extent((54, 54), (17, 17))], (4, 4), seed=1, lanes=lanes, reuse=reuse)
    assert sampler.visits == 9
    assert sampler.epoch == 9 * reuse
    seen: dict[int, tuple] = {}
    for counter in range(4 * (sampler.epoch + lanes * reuse)):
        seen[visit_of(sampler, counter)] = block_of(sampler(counter))
    for number in range(4):
        visited = [seen[visit] for visit in range(9 * number, 9 * number + 9)]
        assert len(set(visited)) == 9


def test_a_heavy_block_gets_its_share_of_visits_in_every_pass() -> None:
    """16 + 16 + 1 starts: with three visits a pass the two large blocks come in each, the sliver in few."""
    sampler = Sampler([extent((36,), (16,))], (4,), seed=0, lanes=1, reuse=1)
    passes = 300
    counts = Counter(block_of(sampler(i)) for i in range(3 * passes))
    expected = {16: 3 * 16 / 33, 1: 3 / 33}
    for (_, _, (low, high)), count in counts.items():
        starts = high - low - 3
        assert count / passes == pytest.approx(expected[starts], abs=0.06)
    assert len(counts) == 3


# ---------------------------------------------------------------- uniform over the data

UNIFORM = {
    "one axis": ([extent((30,), (8,))], (5,), None),
    "ragged edge": ([extent((29, 13), (8, 8))], (4, 4), None),
    "origin": ([extent((29, 13), (8, 8), (5, 3))], (4, 4), None),
    "origin and blocks": ([extent((29, 13), (8, 8), (5, 3))], (4, 4), (16, 8)),
    "blocks that are no multiple of chunks": ([extent((29, 13), (8, 8), (5, 3))], (4, 4), (5, 7)),
    "three axes": ([extent((9, 8, 7), (4, 4, 4), (1, 0, 3))], (3, 3, 3), None),
    "one voxel of margin": ([extent((5, 5), (4, 4))], (4, 4), None),
    "a region smaller than a chunk, across a boundary": ([extent((20, 9), (24, 24), (19, 0))], (4, 4), None),
    "stored whole, in blocks": ([extent((20, 9))], (4, 4), (7, 3)),
    "items of several sizes": (
        [extent((30,), (8,)), extent((11,), (4,), (3,), item=1), extent((6,), (2,), item=2)],
        (5,),
        None,
    ),
    "weights": ([extent((30,), (8,)), extent((20,), (8,), (5,), source=1, weight=3.0)], (5,), None),
}


@pytest.mark.parametrize("name", UNIFORM)
def test_starts_are_uniform(name: str) -> None:
    """Chi-square over all valid starts: within 5 standard deviations of its mean, and none left out."""
    extents, crop, block = UNIFORM[name]
    sampler = Sampler(extents, crop, seed=5, lanes=3, reuse=2, block=block)
    expected = {
        (e.source, e.item, *start): e.weight
        * math.prod(s / (s - c + 1) for s, c in zip(e.shape, crop, strict=True))  # items count by their voxels
        for e in extents
        for start in itertools.product(*[range(s - c + 1) for s, c in zip(e.shape, crop, strict=True)])
    }
    draws = min(40 * len(expected), 12_000)
    drawn = Counter((s.source, s.item, *s.start) for s in map(sampler, range(draws)))
    assert drawn.keys() <= expected.keys()
    total = sum(expected.values())
    chi = sum((drawn[k] - draws * w / total) ** 2 / (draws * w / total) for k, w in expected.items())
    freedom = len(expected) - 1
    # Blocks are visited in proportion, not at random, so the sum may well be smaller than that of free draws.
    assert chi < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 1


@settings(max_examples=25, deadline=None)
@given(case=cases(most=1))
def test_no_start_is_left_out(case) -> None:
    extents, crop, options = case
    sampler = Sampler(extents, crop, **options)
    starts = math.prod(s - c + 1 for s, c in zip(extents[0].shape, crop, strict=True))
    if starts > 60:
        return
    rounds = 30 * max(starts, options["lanes"] * sampler.reuse)
    assert len({sampler(i).start for i in range(rounds)}) == starts


def test_orientations_are_uniform() -> None:
    sampler = Sampler([extent((20, 20), (8, 8))], (4, 4), seed=0, lanes=2, orientations=range(8))
    counts = Counter(sampler(i).orientation for i in range(4000))
    assert len(counts) == 8
    assert max(abs(n - 500) for n in counts.values()) < 5 * math.sqrt(500)


def test_neighbouring_counters_are_not_related() -> None:
    """The offsets of a lane's turns on one block: no correlation from one to the next."""
    sampler = Sampler([extent((67,), (64,))], (4,), seed=0, lanes=1, reuse=2000)
    starts = np.array([sampler(i).start[0] for i in range(2000)], dtype=float)
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 5 / math.sqrt(2000)


# ---------------------------------------------------------------- corner cases


@pytest.mark.parametrize("origin", [0, 1, 15])
def test_a_crop_as_large_as_the_volume(origin: int) -> None:
    sampler = Sampler([extent((16, 16, 16), (16, 16, 16), (origin,) * 3)], (16, 16, 16), seed=0, lanes=4)
    assert all(sampler(i) == Sample(0, 0, (slice(0, 16),) * 3, (0, 0, 0), 0, (16,) * 3) for i in range(50))


def test_a_margin_of_one_voxel_has_two_starts_an_axis() -> None:
    sampler = Sampler([extent((17, 17), (8, 8), (3, 5))], (16, 16), seed=0, lanes=4)
    assert {sampler(i).start for i in range(200)} == set(itertools.product((0, 1), (0, 1)))


def test_items_count_by_their_voxels_whatever_their_chunks() -> None:
    images = [extent((17, 17), source=0, item=i) for i in range(20)]
    images += [extent((17, 17), (4, 17), source=1, item=i) for i in range(20)]
    sampler = Sampler([*images, extent((34, 34), source=2)], (16, 16), seed=0, lanes=5, reuse=1)
    counts = Counter(sampler(i).source for i in range(4400))
    assert [counts[source] / 4400 for source in range(3)] == pytest.approx([20 / 44, 20 / 44, 4 / 44], abs=0.02)


@pytest.mark.parametrize("whole", [True, False])
def test_images_come_once_an_epoch(whole: bool) -> None:
    """Those of one size, and those of many where a sample is made of all of an image."""
    images = [extent((20 + i * whole, 30), item=i) for i in range(23)]
    images = [e._replace(window=e.shape) for e in images] if whole else images
    sampler = Sampler(images, (16, 16), seed=0, lanes=5)
    assert sampler.reuse == 1
    assert sampler.epoch == 23
    for epoch in range(5):
        seen = [sampler(visit).item for visit in range(23 * epoch, 23 * epoch + 23)]
        assert sorted(seen) == list(range(23))


def test_images_of_a_source_with_twice_the_weight_come_twice_as_often() -> None:
    images = [extent((20, 20), item=i % 10, source=i // 10, weight=1.0 + i // 10) for i in range(20)]
    sampler = Sampler(images, (16, 16), seed=0, lanes=4)
    counts = Counter((s.source, s.item) for s in map(sampler, range(3000)))
    assert len(counts) == 20
    assert all(count == pytest.approx(100 * (1 + source), abs=30) for (source, _), count in counts.items())


def test_many_items_alike_are_cut_once() -> None:
    images = [extent((500, 375), item=i) for i in range(2000)]
    for order in (Sampler(images, (224, 224), seed=0, lanes=8), Tiles(images, (224, 224), seed=0, lanes=8)):
        parts = order.cuts if isinstance(order, Sampler) else order.starts
        assert len({id(part) for part in parts}) == 1


def test_places_with_enough_are_counted_block_by_block() -> None:
    mask = np.random.default_rng(0).random((30, 26)) < 0.3
    occupancy = Occupancy(mask.astype(np.float32), (30, 26), (1, 1), 0.4)
    sampler = Sampler([extent((30, 26), (8, 8), (3, 1))], (4, 5), seed=0, lanes=1, occupancy=[occupancy])
    rows, columns = sampler.cuts[0]
    weights = np.diff(sampler.cumulative, prepend=0.0).reshape(len(rows) - 1, len(columns) - 1)
    for i, j in np.ndindex(weights.shape):
        places = [(y, x) for y in range(*rows[i : i + 2]) for x in range(*columns[j : j + 2])]
        share = np.mean([mask[y : y + 4, x : x + 5].mean() >= 0.4 for y, x in places])
        assert weights[i, j] == pytest.approx(30 / 4 * 26 / 5 * len(places) / (27 * 22) * share)


def test_volumes_are_reused_and_images_are_not() -> None:
    assert Sampler([extent((64, 64), (16, 16))], (8, 8), seed=0, lanes=1).reuse == 4
    assert Sampler([extent((64, 64))], (8, 8), seed=0, lanes=1).reuse == 1
    assert Sampler([extent((64, 64))], (8, 8), seed=0, lanes=1, reuse=3).reuse == 3
    assert Sampler([extent((64, 64, 64))], (8, 8, 8), seed=0, lanes=1).reuse == 4  # packed, but worth several crops
    assert Sampler([extent((8, 8, 9))], (8, 8, 8), seed=0, lanes=1).reuse == 1
    assert Sampler([extent((3, 8, 8))._replace(window=(1, 8, 8))], (8, 8), seed=0, lanes=1).reuse == 4  # slices


def test_a_packed_volume_counts_like_an_unpacked_one_and_at_least_as_a_crop() -> None:
    extents = [extent((32, 32, 32)), extent((32, 32, 32), (8, 8, 8), item=1), extent((8, 8, 8), item=2)]
    sampler = Sampler(extents, (8, 8, 8), seed=0, lanes=4, reuse=1)
    counts = Counter(sampler(i).item for i in range(6000))
    for item, crops in enumerate([64, 64, 1]):
        assert counts[item] / 6000 == pytest.approx(crops / 129, abs=0.01)
    packed = Sampler([extent((32, 32, 32), item=i) for i in range(50)], (8, 8, 8), seed=0, lanes=2)
    assert packed.epoch == 200
    read = [packed(counter) for counter in range(200)]
    assert len({(s.item, counter % 2, counter // 8) for counter, s in enumerate(read)}) == 50  # each is decoded once
    assert len({s.start for s in read}) > 150


def test_windows_larger_than_the_crop_lie_inside_their_items() -> None:
    """Windows of a resampled sample, and of a slice: places are uniform over those that the window has."""
    windows = [(7, 5), (1, 6)]
    extents = [extent((12, 9), (4, 4), source=n)._replace(window=w) for n, w in enumerate(windows)]
    sampler = Sampler(extents, (4, 4), seed=0, lanes=3)
    seen: dict[int, set] = {0: set(), 1: set()}
    for counter in range(4000):
        sample = sampler(counter)
        assert sample.window == windows[sample.source]
        for start, size, block in zip(sample.start, sample.window, sample.block, strict=True):
            assert block.start <= start
            assert start + size <= block.stop
        seen[sample.source].add(sample.start)
    assert seen[0] == set(itertools.product(range(6), range(5)))
    assert seen[1] == set(itertools.product(range(12), range(4)))


def test_other_attempts_stand_in_for_a_sample() -> None:
    sampler = Sampler([extent((64, 64), (16, 16))], (8, 8), seed=0, lanes=4)
    stand_ins = [sampler(3, attempt) for attempt in range(1, 20)]
    assert [s.attempt for s in stand_ins] == list(range(1, 20))
    assert len({block_of(s) for s in stand_ins}) > 5  # a whole block may be bad
    assert stand_ins == [sampler(3, attempt) for attempt in range(1, 20)]
    assert sampler(3) == sampler(3, 0)


def test_shares_of_sources_are_kept_whatever_their_sizes() -> None:
    extents = [
        extent((100,), (8,), source=0, weight=5.0),
        extent((12,), (8,), source=1),
        extent((9,), source=1, item=1),
    ]
    sampler = Sampler(extents, (4,), seed=0, lanes=2, reuse=1, shares=[1.0, 3.0])
    counts = Counter(sampler(i).source for i in range(4000))
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.02)


# ---------------------------------------------------------------- ranks

CONFIG = types.SimpleNamespace(
    data=types.SimpleNamespace(
        cache_mib=1,
        workers=0,
        prefetch=1,
        augment=Augment(),
        bad="skip",
        most_bad=7,
        retries=1,
        read_limit=100,
        normalize="fit",
    ),
    run=types.SimpleNamespace(seed=0, hang_limit=50),
    model=types.SimpleNamespace(),
    objective=types.SimpleNamespace(),
)


def loader_of(sampler, batch: int, rank: int, world: int, *, step: int = 0, samples: int = 0):
    place = Place(World(rank=rank, size=world), torch.device("cpu"), 1, None, None, None, None)
    reader = types.SimpleNamespace(
        lanes=None, crop=sampler.crop, labelling=None, sources=[], size_of=lambda source, item, window: window
    )

    def make_reader(_sampler, *, lanes, cache_bytes, labelling, augmented):
        reader.lanes = lanes
        return reader

    train = types.SimpleNamespace(
        reader=make_reader, labels=None, crop=sampler.crop, sample_axes=("y", "x"), sources=[], variables=("v",)
    )
    data = DataParts(train, None, Statistics((0.0,), (1.0,)), batch)  # type: ignore[arg-type]
    flow = types.SimpleNamespace(layout=Layout(world, 1, reshard=False), data_rank=rank, split=Split())
    objective = types.SimpleNamespace(slab=lambda crop, part: None)
    return make_loader(CONFIG, place, data, sampler, objective, flow, step=step, samples=samples)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_world_sees_the_same_samples_in_the_same_order(world: int) -> None:
    sampler = Sampler([extent((40, 40), (16, 16))], (8, 8), seed=0, lanes=8)
    loaders = [loader_of(sampler, 8, rank, world) for rank in range(world)]
    order = [c for step in range(10) for loader in loaders for c in loader.counters(step)]
    assert order == list(range(80))
    limit = 100.0 if world == 1 else 40.0  # before the others take the run for hanging
    assert [loader.policy for loader in loaders] == [Policy("skip", 7, 1, limit)] * world


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_continues_in_any_world_where_it_stopped(world: int) -> None:
    """Also with another batch: 5 steps of 8 samples, then steps of 12."""
    sampler = Sampler([extent((40, 40), (16, 16))], (8, 8), seed=0, lanes=8)
    loaders = [loader_of(sampler, 12, rank, world, step=5, samples=40) for rank in range(world)]
    order = [c for step in (5, 6) for loader in loaders for c in loader.counters(step)]
    assert order == list(range(40, 64))


@settings(max_examples=100, deadline=None)
@given(share=st.integers(1, 6), world=st.integers(1, 4), lanes=st.integers(1, 24), samples=st.integers(0, 50))
def test_the_reader_is_told_how_many_lanes_a_rank_sees(share: int, world: int, lanes: int, samples: int) -> None:
    sampler = Sampler([extent((40,), (16,))], (8,), seed=0, lanes=lanes)
    for rank in range(world):
        loader = loader_of(sampler, share * world, rank, world, samples=samples)
        seen = {c % lanes for step in range(lanes) for c in loader.counters(step)}
        assert loader.reader.lanes == len(seen)  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(case=cases(), first=st.integers(0, 2**40))
def test_many_samples_at_once_are_those_of_each_counter(case, first: int) -> None:
    extents, crop, options = case
    counters = [first, first + 1, 7, *range(3 * options["lanes"]), first * 3]
    together = Sampler(extents, crop, **options).choose(counters)
    alone = Sampler(extents, crop, **options)
    assert together == [alone(counter) for counter in counters]


def test_whole_images_at_once_are_those_of_each_counter() -> None:
    extents = [extent((8, 8), item=n) for n in range(700)] + [extent((12, 9), item=n, source=1) for n in range(40)]
    both = [Sampler(extents, (8, 8), seed=3, lanes=5, orientations=range(8)) for _ in range(2)]
    counters = range(1200, 1200 + both[0].epoch * 2)
    assert choose(both[0], counters) == [both[1](counter) for counter in counters]
    assert choose(lambda counter: both[1](counter), counters[:3]) == choose(both[0], counters[:3])  # any order will do
    assert choose(both[0], []) == []


def test_permutations_of_the_latest_passes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "vitrail.data.order.sampler.Permutation", lambda *given: made.append(given) or Permutation(*given)
    )
    sampler = Sampler([extent((8, 8), item=n) for n in range(5)], (8, 8), seed=3, lanes=256, reuse=4)
    first = choose(sampler, range(4 * 256))  # four turns of about 51 passes
    assert len(made) == 52
    assert choose(sampler, range(4 * 256)) == first
    assert len(made) == 52
    choose(sampler, range(20 * 256))
    assert len(sampler._passes) == PASSES


@settings(max_examples=60, deadline=None)
@given(size=st.one_of(st.integers(1, 3000), st.integers(2**31, 2**40)), secret=st.integers(0, 2**63 - 1))
def test_permutations_of_many_numbers_are_those_of_each(size: int, secret: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    order, expected = Permutation(size, secret), [permute(number, size, secret) for number in index.tolist()]
    for _ in range(2):  # hashes that are known, too
        assert order(index).tolist() == expected


def test_the_order_is_that_of_the_first_version() -> None:
    extents = [extent((8, 8), item=n) for n in range(1000)]
    sampler = Sampler(extents, (8, 8), seed=1, lanes=16, orientations=range(8))
    assert [(s.item, s.orientation) for s in sampler.choose([0, 1, 999, 1000, 123456])] == [
        (313, 1),
        (339, 5),
        (204, 3),
        (667, 5),
        (124, 4),
    ]
