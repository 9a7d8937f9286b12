"""Several entries in one run: shares, turns of entries with different variables, and the same order in every world."""

import dataclasses
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.augment import Augmenter
from vitrail.data.dataset import Dataset
from vitrail.data.order.mixture import Groups, group_entries, rotation
from vitrail.data.order.sampler import Extent, Sampler, choose
from vitrail.data.reading.loader import Loader
from vitrail.data.source import Item
from vitrail.errors import UserError
from vitrail.recipe.sections import Augment, Data


class ArraySource:
    """An array in memory, and its own config."""

    kind, path, axes = "array", "array", ("z", "y", "x")

    def __init__(self, array: np.ndarray, *, variables=("v",), weight=1.0, chunk=4, slices=None, labels=None):
        self.array, self.variables, self.weight, self.labels = array, tuple(variables), weight, labels
        self.axes = ("z", "y", "x")[-(array.ndim - 1) :]
        shape = array.shape[1:]
        ndim = len(shape)
        self.items = [Item("a", shape, (chunk,) * ndim, (0,) * ndim, (1.0,) * ndim, None, slices=slices)]
        self.dtype = array.dtype
        self.label_dtype = None if labels is None else labels.dtype
        self.label_names: dict[int, str] = {}

    def open(self) -> "ArraySource":
        return self

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        return self.array[(slice(None), *region)]

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        return self.labels[region]

    def describe(self) -> dict:
        return {}


def numbered(*shape: int, first: int = 0, variables: int = 1) -> np.ndarray:
    """Each voxel has a number of its own."""
    count = int(np.prod(shape))
    return np.stack([np.arange(first, first + count, dtype=np.int32).reshape(shape)] * variables)


def settings_of(**values) -> Data:
    return Data(train=[{"path": "a"}], crop=4, batch=4, **values)


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("mix", "expected"), [("size", [11 / 68, 57 / 68]), ("equal", [0.5, 0.5]), ("weights", [0.25, 0.75])]
)
def test_shares_of_entries(mix: str, expected: list[float]) -> None:
    """11 and 19 voxels in one axis, with weights 1 and 3."""
    entries = [ArraySource(numbered(11, 4), weight=1.0), ArraySource(numbered(19, 4), weight=3.0)]
    dataset = Dataset(entries, (4, 4), where="data.train", settings=settings_of(mix=mix))
    order = dataset.sampler(seed=0, lanes=1, reuse=1)
    counts = Counter(order(counter).source for counter in range(4000))
    assert [counts[n] / 4000 for n in range(2)] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("fit", [None, {"by": "v", "above": 23, "share": 0.1}])
def test_items_of_one_entry_by_their_voxels_or_alike(fit: dict | None) -> None:
    """An item of 8 x 8 and one of 40 x 8, next to an entry of one of 8 x 8; a filter leaves parts of the first out."""
    small, large = numbered(8, 8), numbered(40, 8)
    counts = {}
    for draw in ("voxels", "items"):
        entries = [ArraySource(small), ArraySource(small)]
        entries[0].items = [entries[0].items[0], dataclasses.replace(entries[0].items[0], name="b", shape=(40, 8))]
        entries[0].read = lambda item, region: (small, large)[item][(slice(None), *region)]
        entries[0].draw = draw
        dataset = Dataset(entries, (4, 4), where="data.train", settings=settings_of(filter=fit))
        order = dataset.sampler(seed=0, lanes=1, reuse=1)
        found = Counter((s.source, s.item) for s in map(order, range(4000)))
        counts[draw] = [found[key] / 4000 for key in ((0, 0), (0, 1), (1, 0))]
    if fit is None:
        assert counts["voxels"] == pytest.approx([1 / 7, 5 / 7, 1 / 7], abs=0.03)
        assert counts["items"] == pytest.approx([3 / 7, 3 / 7, 1 / 7], abs=0.03)
    assert counts["items"][0] == pytest.approx(counts["items"][1], abs=0.03)
    assert counts["items"][2] == pytest.approx(counts["voxels"][2], abs=0.03)
    with pytest.raises(UserError, match=r"data\.tiles: .* leave out data\.mix and the entries' weight and draw"):
        Dataset(entries, (4, 4), where="data.train", settings=settings_of(tiles={})).sampler(seed=0, lanes=1, reuse=1)


def test_blocks_and_overlaps_of_slices_are_those_of_samples() -> None:
    for axis in range(3):
        source = ArraySource(numbered(8, 8, 8), slices=axis)
        dataset = Dataset([source], (4, 4), where="data.train", settings=settings_of(tiles={"overlap": [0.5, 0.25]}))
        tiles = dataset.sampler(seed=0, lanes=1, reuse=1)
        assert tiles.epoch == 8 * 3 * 3
        starts = [{tiles(c).start[a] for c in range(tiles.epoch)} for a in range(3)]
        assert starts.pop(axis) == set(range(8))
        assert starts == [{0, 2, 4}, {0, 3, 4}]
        dataset = Dataset([source], (4, 4), where="data.train", settings=settings_of())
        sampler = dataset.sampler(seed=0, lanes=1, reuse=1, block=(8, 2))
        found = [c.tolist() for c in sampler.cuts[0]]
        assert found.pop(axis) == [0, 4, 8]
        assert found == [[0, 5], [0, 2, 4, 5]]


def test_tiles_are_not_cut_from_larger_windows() -> None:
    changes = {"rotate": 45}, {"elastic": {"amplitude": 2}}, {"scale": [0.8, 1.2]}, {"flip": True}, {"scale": [1, 1.2]}
    for number, augment in enumerate(changes):
        made = settings_of(tiles={}, augment=augment)
        dataset = Dataset([ArraySource(numbered(16, 16))], (4, 4), where="data.train", settings=made)
        augmenter = Augmenter(made.augment, (4, 4), seed=0)
        if number < 3:
            with pytest.raises(UserError, match=r"data\.tiles: .* leaves gaps; leave out data\.tiles, or rotate"):
                dataset.sampler(seed=0, lanes=1, reuse=1, augmenter=augmenter)
        else:
            assert dataset.sampler(seed=0, lanes=1, reuse=1, augmenter=augmenter).epoch == 16


def test_tiles_have_no_other_shares() -> None:
    for changed in ({"mix": "equal"}, {}):
        entries = [ArraySource(numbered(8, 8), weight=1.0 if changed else 2.0)]
        dataset = Dataset(entries, (4, 4), where="data.train", settings=settings_of(tiles={}, **changed))
        with pytest.raises(UserError, match=r"data\.tiles: every tile comes once an epoch"):
            dataset.sampler(seed=0, lanes=1, reuse=1)


# ---------------------------------------------------------------- turns


def test_entries_are_grouped_by_their_variables() -> None:
    assert group_entries([("a",), ("b", "c"), ("a",), ("c", "b")]) == [[0, 2], [1], [3]]


@given(shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_cycle_keeps_shares_and_spreads_them(shares: list[float]) -> None:
    turns = rotation(shares)
    counts = np.bincount(turns, minlength=len(shares))
    assert counts.min() >= 1
    assert counts / len(turns) == pytest.approx(np.array(shares) / sum(shares), abs=0.01)
    for group, count in enumerate(counts):  # never much longer apart than even turns would be
        places = np.flatnonzero(turns == group)
        gaps = np.diff(np.append(places, places[0] + len(turns)))
        assert gaps.max() <= 2 * len(turns) / count + len(shares)


@settings(max_examples=50, deadline=None)
@given(
    shares=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    batch=st.integers(1, 6),
    first=st.integers(0, 5000),
)
def test_each_group_is_gone_through_without_gaps(shares: list[float], batch: int, first: int) -> None:
    orders = [Sampler([Extent(n, 0, (9,), (4,), (0,), 1.0)], (4,), seed=n, lanes=2) for n in range(len(shares))]
    groups = Groups(orders, shares, batch=batch)
    counters = np.arange(first * batch, (first + 50) * batch)
    group, own = groups.places(counters)
    assert (group.reshape(-1, batch) == group.reshape(-1, batch)[:, :1]).all()  # one group a step
    for number in range(len(shares)):
        mine = own[group == number]
        if len(mine):
            assert mine.tolist() == list(range(mine[0], mine[0] + len(mine)))
    for counter in (0, first * batch, first * batch + batch - 1):
        g, o = groups.places(counter)
        assert groups(counter) == orders[int(g)](int(o))
    assert groups.places(0)[1] == 0
    assert choose(groups, counters[:20].tolist()) == [groups(counter) for counter in counters[:20].tolist()]


def mixed(**values) -> Dataset:
    entries = [
        ArraySource(numbered(12, 12)),
        ArraySource(numbered(12, 12, first=1000, variables=2), variables=("a", "b")),
        ArraySource(numbered(12, 8, first=2000)),
    ]
    return Dataset(entries, (4, 4), where="data.train", settings=settings_of(**values), mixed=True)


def test_batches_have_the_variables_of_one_group() -> None:
    dataset = mixed()
    assert dataset.variables == ("v", "a", "b")
    order = dataset.sampler(seed=0, lanes=4, reuse=None, batch=4)
    reader = dataset.reader(order, lanes=4, cache_bytes=1 << 20)
    loader = Loader(
        order,
        reader,
        lambda step: range(4 * step, 4 * step + 4),
        device=torch.device("cpu"),
        workers=2,
        prefetch=2,
        augmenter=Augmenter(Augment(), (4, 4), seed=0),
    )
    seen = Counter()
    for batch in loader.batches(0, 20):
        seen[batch.variables] += 1
        assert batch.values.shape == (4, len(batch.variables), 4, 4)
        inside = (batch.values >= 1000) & (batch.values < 2000)
        assert inside.all() if batch.variables == ("a", "b") else not inside.any()
    assert len(seen) == 2


def test_what_cannot_take_turns_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.batch: '2/rank' is another number of samples in every world"):
        mixed().sampler(seed=0, lanes=4, reuse=None, batch="2/rank")
    with pytest.raises(UserError, match=r"data\.balance: entries with different variables cannot share a batch"):
        mixed(balance={"ranks": 2}).sampler(seed=0, lanes=4, reuse=None, batch=4)
    with pytest.raises(UserError, match=r"data\.batch: '2/rank' .* with data\.balance give the samples"):
        mixed(balance={"ranks": 2}).sampler(seed=0, lanes=4, reuse=None, batch="2/rank")


# ---------------------------------------------------------------- worlds and workers

KINDS = {
    "crops": {},
    "tiles": {"tiles": {"overlap": 0.3}},
    "balance": {"balance": {"ranks": 2, "groups": [1, 1], "batches": [3, 4]}},
    "filter": {"filter": {"by": "v", "above": 60.0, "share": 0.4}},
}


def check_worlds(dataset: Dataset, batch: int, turns: list[tuple[int, int]], done: int, seed: int) -> None:
    """Worlds, each with another number of workers, go on where the last one stopped."""

    def loader(rank: int, world: int, done: int, workers: int) -> Loader:
        order = dataset.sampler(seed=seed, lanes=batch, reuse=None, batch=batch)
        share = batch // world

        def counters(step: int) -> range:
            return range(done + batch * step + rank * share, done + batch * step + (rank + 1) * share)

        reader = dataset.reader(order, lanes=batch, cache_bytes=1 << 16)
        return Loader(order, reader, counters, device=torch.device("cpu"), workers=workers, prefetch=2)

    alone = [b.values for b in loader(0, 1, done, 0).batches(0, 2 * len(turns))]
    seen = []
    for world, workers in turns:
        ranks = [list(loader(rank, world, done, workers).batches(0, 2)) for rank in range(world)]
        seen += [torch.cat([ranks[rank][step].values for rank in range(world)]) for step in range(2)]
        done += 2 * batch
    assert torch.equal(torch.stack(alone), torch.stack(seen))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_workers_give_the_same_samples_in_the_same_order(kind: str) -> None:
    entries = [ArraySource(numbered(12, 10)), ArraySource(numbered(9, 8, first=1000))]
    dataset = Dataset(entries, (4, 4), where="data.train", settings=settings_of(**KINDS[kind]))
    check_worlds(dataset, 4, [(2, 3), (1, 2), (4, 1), (2, 0)], 0, seed=3)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(5, 20), st.integers(5, 20)), min_size=2, max_size=2),
    crop=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    overlap=st.floats(0, 0.95),
    kind=st.sampled_from(["crops", "tiles", "balance"]),
    share=st.integers(1, 3),
    turns=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 4)), min_size=1, max_size=4),
    done=st.integers(0, 10**6),
    seed=st.integers(0, 2**62),
)
def test_ranks_and_workers_at_length(shapes, crop, overlap, kind, share, turns, done, seed) -> None:
    entries = [ArraySource(numbered(*shape, first=1000 * n)) for n, shape in enumerate(shapes)]
    values = {"tiles": {"overlap": overlap}} if kind == "tiles" else KINDS[kind]
    dataset = Dataset(entries, crop, where="data.train", settings=settings_of(**values))
    check_worlds(dataset, 4 * share, turns, done, seed)


# ---------------------------------------------------------------- slices, and images of many sizes


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("tiled", [False, True])
def test_slices_across_any_axis_with_their_labels(axis: int, tiled: bool) -> None:
    values = numbered(6, 7, 8)
    source = ArraySource(values, slices=axis, labels=(values[0] % 5).astype(np.uint8))
    chosen = settings_of(tiles={}) if tiled else settings_of()
    dataset = Dataset([source], (4, 4), where="data.train", labels="voxel", settings=chosen)
    assert dataset.sample_axes == tuple(a for n, a in enumerate("zyx") if n != axis)
    order = dataset.sampler(seed=0, lanes=2, reuse=None)
    from vitrail.data.batch import Labelling

    labelling = Labelling("voxel", tuple("abcde"))
    reader = dataset.reader(order, lanes=2, cache_bytes=1 << 20, labelling=labelling)
    batch = Loader(order, reader, device=torch.device("cpu"), workers=0, prefetch=1).load(range(24))
    assert batch.values.shape == (24, 1, 4, 4)
    assert torch.equal(batch.labels.long(), batch.values[:, 0] % 5)
    where = np.stack(np.unravel_index(batch.values.numpy(), (6, 7, 8)))[axis]
    assert (where == where[:, :, :1, :1]).all()  # one plane each


def test_images_of_many_sizes_are_fitted() -> None:
    images = [ArraySource(np.full((1, h, w), 7, np.uint8), chunk=64) for h, w in ((9, 30), (40, 8), (16, 16), (5, 5))]
    dataset = Dataset(images, (6, 6), where="data.train", settings=settings_of(fit={"resize": 8}))
    order = dataset.sampler(seed=0, lanes=2, reuse=None)
    assert order.epoch == 4
    reader = dataset.reader(order, lanes=2, cache_bytes=1 << 20)
    batch = Loader(order, reader, device=torch.device("cpu"), workers=0, prefetch=1).load(range(4))
    assert batch.values.shape == (4, 1, 6, 6)
    assert (batch.values == 7).all()
    assert sorted(order(i).source for i in range(4)) == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"data\.fit\.resize: 4 is less than data\.crop 6 x 6"):
        Dataset(images, (6, 6), where="data.train", settings=settings_of(fit={"resize": 4}))
    with pytest.raises(UserError, match=r"data\.fit\.resize: 16 x 5 is less than data\.crop 6 x 6"):
        Dataset(images, (6, 6), where="data.train", settings=settings_of(fit={"resize": [16, 5]}))
    ramp = ArraySource(np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None], (1, 40, 8)).copy(), chunk=64)
    for size, expected in ((8, [18, 21]), ([8, 8], [2, 37])):  # the centre of it, or all of it
        dataset = Dataset([ramp], (8, 8), where="data.train", settings=settings_of(fit={"resize": size}))
        order = dataset.sampler(seed=0, lanes=1, reuse=None)
        reader = dataset.reader(order, lanes=1, cache_bytes=0)
        values = Loader(order, reader, device=torch.device("cpu"), workers=0, prefetch=1).load(range(1)).values[0, 0]
        assert values[[0, -1], 3].tolist() == pytest.approx(expected, abs=2)
    with pytest.raises(UserError, match=r"data\.fit: is for images, and data\.train\.0 has 3 axes"):
        Dataset(
            [ArraySource(numbered(8, 8, 8))], (6, 6, 6), where="data.train", settings=settings_of(fit={"resize": 8})
        )


def test_sizes_are_those_of_the_wanted_voxels() -> None:
    source = ArraySource(numbered(20, 20))
    source.items = [Item("a", (20, 20), (4, 4), (0, 0), (1.0, 1.0), None, scale=(1.5, 1.0))]
    Dataset([source], (13, 13), where="data.train")
    with pytest.raises(UserError, match=r"smaller than data\.crop 14 x 14 at 1\.5 x 1\.0 times its voxel size"):
        Dataset([source], (14, 14), where="data.train")


def test_nothing_to_read_is_refused() -> None:
    empty = ArraySource(numbered(8, 8))
    empty.items = []
    with pytest.raises(UserError, match=r"data\.train: there is nothing in array; choose other data"):
        Dataset([empty], (4, 4), where="data.train")


def test_an_entry_needs_no_settings() -> None:
    config = types.SimpleNamespace(open=lambda: ArraySource(numbered(8, 8)), path="a", weight=1.0)
    assert Dataset([config], (4, 4), where="data.train").sampler(seed=0, lanes=1, reuse=1).epoch == 4


def test_formats_with_other_shapes_and_spacings_train_together(tmp_path, monkeypatch) -> None:
    """OME-Zarr at 8 nm, TIFF at 4 nm with thick sections, NIfTI at 6 mm, each brought to a voxel size of its own."""
    nibabel = pytest.importorskip("nibabel")
    tifffile = pytest.importorskip("tifffile")
    from vitrail import train
    from vitrail.data.formats.ngff import write_ome_zarr

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    volume = np.random.default_rng(1).integers(0, 255, (20, 24, 28), dtype=np.uint8)
    write_ome_zarr(tmp_path / "a.zarr", types.SimpleNamespace(image=volume, labels=None, label_names=()))
    rng = np.random.default_rng(0)
    pages = rng.integers(0, 255, (10, 40, 44), dtype=np.uint8)
    facts = {"axes": "ZYX", "PhysicalSizeX": 4.0, "PhysicalSizeY": 4.0, "PhysicalSizeZ": 12.0}
    units = {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    tifffile.imwrite(tmp_path / "b.ome.tif", pages, metadata=facts | units)
    scan = nibabel.Nifti1Image(rng.normal(0, 300, (24, 22, 20)).astype(np.int16), np.diag([6.0, 6.0, 6.0, 1.0]))
    nibabel.save(scan, tmp_path / "c.nii.gz")
    (tmp_path / "recipe.yaml").write_text(
        """
run: {name: mixed, steps: 2, device: cpu}
model:
  kind: mae
  ndim: 3
  encoder: {width: 16, depth: 1, heads: 1, patch: 4}
  decoder: {kind: self, width: 16, depth: 1, heads: 1}
objective: {kind: reconstruct}
data:
  train:
    - {path: a.zarr, spacing: [8, 8, 8]}
    - {path: b.ome.tif, variables: [image], spacing: [12, 8, 8]}
    - {path: c.nii.gz, variables: [image], spacing: [9, 9, 9]}
  crop: 8
  batch: 6
  mix: equal
  statistics: each
optimizer: {kind: adamw, lr: 1.0e-3}
log: {tensorboard: false}
"""
    )
    outcome = train("recipe.yaml", quiet=True)
    assert outcome is not None
