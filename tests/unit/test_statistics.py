"""Statistics: measured once, shared or of each entry, and used where samples have their own."""

import dataclasses
import itertools
import json
import math
import os
import shutil
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from vitrail.data import statistics
from vitrail.data.batch import Batch, EntryStatistics, Statistics
from vitrail.data.dataset import Dataset, open_in_order
from vitrail.data.files.fingerprint import changed, data_state, fingerprint
from vitrail.data.normalize import Values
from vitrail.data.order.sampler import Extent, Sample, Sampler
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy
from vitrail.data.sources.arrays import NumpyConfig
from vitrail.data.sources.hdf5 import Hdf5Config
from vitrail.data.statistics import measure, remembered
from vitrail.draws import Draws
from vitrail.errors import BadData, UserError
from vitrail.models.mae import MAEConfig
from vitrail.objectives.objective import normalise
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.recipe.normalize import Logarithm, Percentiles, Standard
from vitrail.recipe.sections import Data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def two(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "dark.npy", rng.normal(10, 2, (16, 16)).astype(np.float32))
    np.save(tmp_path / "bright.npy", rng.normal(1000, 50, (16, 16)).astype(np.float32))
    return [NumpyConfig(path=str(tmp_path / name)) for name in ("dark.npy", "bright.npy")]


def dataset_of(configs, *, where="data.train", **values) -> Dataset:
    chosen = Data(train=[{"path": "a"}], crop=16, batch=4, **values)
    return Dataset(configs, (16, 16), where=where, settings=chosen, mixed=True)


# ---------------------------------------------------------------- measured


def test_each_entry_has_its_own(two) -> None:
    dataset = dataset_of(two, statistics="each")
    base = statistics.shared(dataset, seed=0)
    found = statistics.of_entries(dataset, base, names=dataset.variables, seed=0)
    for one, config in zip(found, two, strict=True):
        array = np.load(config.path)
        assert one.mean[0] == pytest.approx(array.mean(dtype=float))
        assert one.std[0] == pytest.approx(array.std(dtype=float))
    both = np.concatenate([np.load(config.path).ravel() for config in two]).astype(float)
    assert base.mean[0] == pytest.approx(both.mean())
    assert base.std[0] == pytest.approx(both.std())
    assert statistics.of_entries(dataset_of(two), base, names=dataset.variables, seed=0) is None


@pytest.mark.parametrize("kinds", [None, [Percentiles(percentiles=(0.0, 100.0))]])
def test_samples_that_cannot_be_read_are_left_out(kinds) -> None:
    """A place whose substitutes are bad too is done without; only where nearly all are is there nothing to measure."""

    class Order:
        crop, extents = (4,), [SimpleNamespace(source=0, window=None)]

        def __call__(self, counter, attempt):
            return SimpleNamespace(source=0, item=counter, window=(4,))

    class Reader:
        sources, dtype = [SimpleNamespace(variables=("a",))], np.dtype("float32")
        good: set[int]

        def size_of(self, source, item, window):
            return window

        def name_of(self, sample):
            return "a"

        def read_into(self, out, sample):
            if sample.item not in self.good:
                raise BadData("a is broken")
            out[:] = [0, 0, 2, 2]

    reader, policy = Reader(), Policy(on_bad="skip")
    reader.good = {1, 5, 6, 7}
    found = measure(Order(), reader, samples=8, kinds=kinds, policy=policy)
    assert found == Statistics((1.0,), (1.0,))
    reader.good = {1, 5, 6}
    with pytest.raises(UserError, match="only 3 of 8 samples could be read"):
        measure(Order(), reader, samples=8, kinds=kinds, policy=policy)


def test_percentiles_become_minus_one_and_one(two) -> None:
    dataset = dataset_of(two[:1], normalize={"percentiles": [5, 95]})
    found = statistics.shared(dataset, seed=0)
    low, high = np.percentile(np.load(two[0].path), [5, 95])
    assert (low - found.mean[0]) / found.std[0] == pytest.approx(-1, abs=0.05)
    assert (high - found.mean[0]) / found.std[0] == pytest.approx(1, abs=0.05)


def test_given_and_none(two) -> None:
    assert statistics.shared(dataset_of(two, normalize="none"), seed=0) == Statistics((0.0,), (1.0,))
    given = dataset_of(two, normalize={"mean": [3], "std": [2]})
    assert statistics.shared(given, seed=0) == Statistics((3.0,), (2.0,))
    wrong = dataset_of(two, normalize={"mean": [3, 4], "std": [2, 2]})
    with pytest.raises(UserError, match=r"data\.normalize: give 1 means and stds, one for each of"):
        statistics.shared(wrong, seed=0)
    for way in ("none", {"mean": [0], "std": [1]}):
        with pytest.raises(UserError, match=r"data\.statistics: 'each' measures every entry, but data\.normalize does"):
            statistics.check(Data(train=[{}], crop=1, batch=1, statistics="each", normalize=way))
    for way in ({}, {"mean": [1]}, {"mean": [1], "std": [1], "percentiles": [1, 99]}):
        with pytest.raises(ValueError, match="give mean and std, or percentiles"):
            Data(train=[{}], crop=1, batch=1, normalize=way)


def seen(dataset: Dataset, *, scope: str = "data.train") -> torch.Tensor:
    """All of the dataset's items, as a model sees them."""
    base = statistics.shared(dataset, seed=0)
    own = statistics.of_entries(dataset, base, names=dataset.variables, seed=0)
    values = Values(dataset.settings.normalize, dataset.variables, base, [s.dtype for s in dataset.sources])
    _, order = open_in_order(dataset.configs, dataset.crop, dataset.settings, where=scope)
    reader = dataset.reader(order, lanes=1, cache_bytes=0)
    device = torch.device("cpu")
    loader = Loader(order, reader, device=device, workers=0, prefetch=1, statistics=own, values=values)
    batch = loader.load(range(order.epoch))
    return normalise(batch.values, batch.statistics or base)


def test_volumes_by_their_own_range_as_ucf_has_it(tmp_path) -> None:
    """Of each volume (x - min) / (max - min), exactly; whatever its brightness and its part of the data."""
    rng, expected = np.random.default_rng(0), []
    (tmp_path / "ct").mkdir()
    for number in range(3):
        values = rng.integers(-1000, 1000 * (1 + number), (16, 32), dtype=np.int16)
        np.save(tmp_path / f"ct/{number}.npy", values)
        expected += list(np.split((values - values.min()) / (float(values.max()) - values.min()), 2, axis=1))
    way = {"kind": "minmax", "to": [0, 1]}
    dataset = dataset_of([NumpyConfig(path=str(tmp_path / "ct"))], normalize=way, statistics="volume")
    found = seen(dataset)[:, 0].double().numpy()
    np.testing.assert_allclose(found, np.array(expected), atol=1e-6)
    assert (found.min(), found.max()) == pytest.approx((0, 1), abs=1e-6)
    way = {"kind": "percentiles", "percentiles": [5, 95], "to": [0, 1]}
    found = seen(dataset_of([NumpyConfig(path=str(tmp_path / "ct"))], normalize=way, statistics="volume"))
    for number, volume in enumerate(found.unflatten(0, (3, 2))):
        values = np.load(tmp_path / f"ct/{number}.npy")
        low, high = np.percentile(values, [5, 95])
        ends = (values.min() - low) / (high - low), (values.max() - low) / (high - low)
        assert (volume.min().item(), volume.max().item()) == pytest.approx(ends, abs=1e-4)
    # One training sample knows nothing of the others: mean and variance of each volume.
    plain = seen(dataset_of([NumpyConfig(path=str(tmp_path / "ct"))], statistics="volume"))
    for volume in plain.unflatten(0, (3, 2)):
        assert volume.mean().item() == pytest.approx(0, abs=1e-4)
        assert volume.var().item() == pytest.approx(1, abs=1e-2)


def test_windows_logarithms_and_variables(tmp_path) -> None:
    rng = np.random.default_rng(0)
    ct = rng.integers(-2000, 3000, (2, 16, 16), dtype=np.int16)
    np.save(tmp_path / "ct.npy", ct)
    entry = [NumpyConfig(path=str(tmp_path / "ct.npy"), axes="cyx", variables=["a", "b"])]
    ends = torch.from_numpy(ct[None]).float().clamp(-1000, 400)
    torch.testing.assert_close(
        seen(dataset_of(entry, normalize={"kind": "window", "window": [-1000, 400]})), (ends + 300) / 700
    )
    log = torch.sign(ends := torch.from_numpy(ct[None]).float()) * (1 + ends.abs() / 10).log()
    ways = {"kind": "variables", "of": {"b": {"kind": "log", "scale": 10}}, "others": {"kind": "none"}}
    found = seen(dataset_of(entry, normalize=ways))
    assert found[:, 0].equal(ends[:, 0])
    torch.testing.assert_close(found[:, 1], (log[:, 1] - log[:, 1].mean()) / log[:, 1].std(correction=0))
    values = Values(Logarithm(scale=10.0), ["a", "b"], Statistics((0.0, 0.0), (1.0, 1.0)))
    torch.testing.assert_close(values.restore(values.change(ends[:, 1:], ["b"]), ["b"]), ends[:, 1:])
    clipped = dataset_of(entry, normalize={"kind": "percentiles", "percentiles": [10, 90], "clip": True})
    assert seen(clipped).aminmax() == (pytest.approx(-1, abs=1e-5), pytest.approx(1, abs=1e-5))
    with pytest.raises(UserError, match=r"data\.normalize\.of\.bb: the data have no such variable; did you mean 'b'\?"):
        statistics.shared(dataset_of(entry, normalize={"kind": "variables", "of": {"bb": {"kind": "log"}}}), seed=0)
    for way in ({"kind": "window", "window": [0, 1]}, {"kind": "variables", "of": {}, "others": {"kind": "none"}}):
        with pytest.raises(UserError, match=r"data\.statistics: 'volume' measures every volume, but data\.normalize"):
            statistics.check(Data(train=[{}], crop=1, batch=1, statistics="volume", normalize=way))


def test_large_volumes_are_measured_in_parts(tmp_path, monkeypatch) -> None:
    """All of a volume once, part by part; of one too large some parts, which the seed chooses."""
    item = SimpleNamespace(shape=(5, 40, 33), chunk=(2, 8, 16), origin=(1, 3, 0), slices=None)
    cuts, count = statistics.parts_of(item, 600), np.zeros(item.shape, int)
    for part in itertools.product(*cuts):
        assert math.prod(stop - start for start, stop in part) <= 600
        count[tuple(slice(*bounds) for bounds in part)] += 1
    assert (count == 1).all()
    assert cuts[1][0] == (0, 5)  # up to the chunk's border
    values = np.random.default_rng(0).normal(5, 3, (64, 64)).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    dataset = dataset_of([NumpyConfig(path=str(tmp_path / "a.npy"))], statistics="volume")
    monkeypatch.setattr(statistics, "PART", 256)
    (whole,) = statistics.of_volumes(dataset, 0, seed=0)
    assert (whole.mean[0], whole.std[0]) == pytest.approx((values.mean(), values.std()), abs=1e-4)
    monkeypatch.setattr(statistics, "WHOLE", 1024)
    item = dataclasses.replace(dataset.sources[0].items[0], chunk=(16, 16))
    monkeypatch.setattr(dataset.sources[0], "items", [item])
    some = [statistics.measure_volume(dataset, 0, 0, [Standard()], seed=seed) for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    assert some[0] != whole
    assert some[0].mean[0] == pytest.approx(5, abs=0.5)


def test_an_entry_brings_its_own(two) -> None:
    own = dataclasses.replace(two[1], statistics={"mean": [7.0], "std": [3.0]})
    dataset = dataset_of([two[0], own])
    base = Statistics((1.0,), (2.0,))
    assert statistics.of_entries(dataset, base, names=dataset.variables, seed=0) == [base, Statistics((7.0,), (3.0,))]
    wrong = dataset_of([dataclasses.replace(own, statistics={"mean": [7.0, 1.0], "std": [3.0, 1.0]})])
    with pytest.raises(UserError, match=r"data\.train\.0\.statistics: give 1 means and stds"):
        statistics.of_entries(wrong, base, names=wrong.variables, seed=0)


def test_held_out_entries_take_those_of_the_same_file(two) -> None:
    train = dataset_of(two[:1], statistics="each")
    known = [Statistics((5.0,), (6.0,))]
    valid = dataset_of(two, where="data.valid", statistics="each")
    found = statistics.of_entries(
        valid,
        known[0],
        names=valid.variables,
        seed=0,
        known=list(zip(statistics.places_of(train, train.configs), known, strict=True)),
    )
    assert found[0] == known[0]
    assert found[1].mean[0] == pytest.approx(1000, rel=0.05)


def test_held_out_entries_go_by_path_and_variables(two) -> None:
    known = [Statistics((250.0,), (1.0,)), Statistics((0.5,), (0.2,))]
    train = [NumpyConfig(path=two[0].path, variables=[name]) for name in ("t", "u")]
    places = statistics.places_of(dataset_of(train), train)
    for number in range(2):
        valid = dataset_of(train[number : number + 1], where="data.valid", statistics="each")
        options = {"names": ("t", "u"), "seed": 0, "known": list(zip(places, known, strict=True))}
        assert statistics.of_entries(valid, known[0], **options) == [known[number]]
    # Two parts of one file: a third part has the moments of both.
    parts = [NumpyConfig(path=two[0].path, region={"x": region}) for region in ((0, 0.25), (0.25, 0.5))]
    places = [statistics.places_of(dataset_of(two[:1]), [part])[0] for part in parts]
    options |= {"known": list(zip(places, [Statistics((1.0,), (1.0,)), Statistics((3.0,), (1.0,))], strict=True))}
    valid = dataset_of(two[:1], where="data.valid", statistics="each")
    assert statistics.of_entries(valid, known[0], **options | {"names": valid.variables})[0].mean == (2.0,)


def test_entries_of_a_checkpoint_are_not_measured_again(two, monkeypatch) -> None:
    train = dataset_of(two, statistics="each")
    places = statistics.places_of(train, two)
    first = [Statistics((1.0,), (2.0,)), Statistics((3.0,), (4.0,))]
    manifest = json.loads(json.dumps(statistics.with_entries(Statistics((5.0,), (6.0,)), first, places)._asdict()))
    kept = statistics.stored(manifest)
    monkeypatch.setattr("vitrail.data.dataset.statistics.measure", lambda *a, **k: pytest.fail("measured again"))
    options = {"names": train.variables, "seed": 0, "known": statistics.known_of(kept)}
    assert statistics.of_entries(train, kept, **options) == first
    assert statistics.of_entries(dataset_of(two[::-1], statistics="each"), kept, **options) == first[::-1]
    assert statistics.known_of(statistics.stored({"mean": [1], "std": [2]})) == []


def test_variables_of_several_sets(tmp_path, two) -> None:
    np.save(tmp_path / "ab.npy", np.stack([np.full((16, 16), 4.0), np.full((16, 16), 6.0)]).astype(np.float32))
    ab = NumpyConfig(path=str(tmp_path / "ab.npy"), axes="cyx", variables=["a", "b"])
    b = NumpyConfig(path=two[0].path, variables=["b"])
    dataset = dataset_of([ab, b])
    assert dataset.variables == ("a", "b")
    base = statistics.shared(dataset, seed=0)
    assert base.mean[0] == 4.0
    assert base.mean[1] == pytest.approx((6 + np.load(two[0].path).mean(dtype=float)) / 2)
    found = statistics.of_entries(dataset, base, names=dataset.variables, seed=0)
    assert found == [base, Statistics(base.mean[1:], base.std[1:])]


# ---------------------------------------------------------------- kept


def test_measured_once_for_the_same_data_and_settings(two, monkeypatch) -> None:
    first = statistics.shared(dataset_of(two), seed=0)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.data.dataset.statistics.measure", lambda *a, **k: pytest.fail("measured again"))
        assert statistics.shared(dataset_of(two), seed=0) == first
    assert statistics.shared(dataset_of(two, normalize={"percentiles": [1, 99]}), seed=0) != first
    np.save(two[0].path, np.full((16, 16), 5, np.float32))
    assert statistics.shared(dataset_of(two), seed=0).mean[0] < first.mean[0]


def test_what_cannot_be_told_apart_is_not_kept(two) -> None:
    import types

    assert fingerprint([types.SimpleNamespace(path="x")], {}) is None
    assert fingerprint([NumpyConfig(path="https://example.org/a.npy")], {}) is None
    made: list[int] = []
    for _ in range(2):
        remembered(None, lambda: made.append(1))
    assert len(made) == 2
    assert fingerprint(two, {"a": 1}) == fingerprint(two, {"a": 1}) != fingerprint(two, {"a": 2})


def test_labels_elsewhere_and_files_beyond_any_limit_are_noticed(tmp_path, two, monkeypatch) -> None:
    labels = tmp_path / "elsewhere" / "labels.npy"
    labels.parent.mkdir()
    np.save(labels, np.zeros((16, 16), np.uint8))
    config = NumpyConfig(path=two[0].path, labels=str(labels))
    marks = [fingerprint([config], {}), fingerprint(two[:1], {}, [config.open()])]  # told by a key, or by the source
    np.save(labels, np.zeros((16, 16), np.uint16))
    assert fingerprint([config], {}) != marks[0]
    assert fingerprint(two[:1], {}, [config.open()]) != marks[1]

    for name in ("a", "b"):
        (tmp_path / "many" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "many" / name / f"{number}.npy").write_bytes(b"1")
    many = NumpyConfig(path=str(tmp_path / "many"))
    first = fingerprint([many], {})
    (tmp_path / "many" / "b" / "19.npy").write_bytes(b"22")
    second = fingerprint([many], {})
    monkeypatch.setattr("vitrail.data.files.fingerprint.MOST_FILES", 10)
    third = fingerprint([many], {})
    (tmp_path / "many" / "b" / "20.npy").write_bytes(b"22")
    assert len({first, second, third, fingerprint([many], {})}) == 4


def test_names_inside_a_file_are_no_paths(tmp_path, monkeypatch) -> None:
    """A key, an axis or a kind is never looked up in the working folder; labels are where the source found them."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        file["raw"] = np.zeros((8, 8), np.float32)
        file["truth"] = np.zeros((8, 8), np.uint8)
    configs = [
        Hdf5Config(path="a.h5", key="raw", unit="nm", axes="yx"),
        Hdf5Config(path="a.h5", key="raw", labels="truth"),
        Hdf5Config(path=str(tmp_path / "a.h5"), key="raw", labels="/truth"),
    ]
    sources = [config.open() for config in configs]
    before = [data_state(config, source) for config, source in zip(configs, sources, strict=True)]
    alone = data_state(configs[0])
    assert [state["files"] for state in before] == [1, 1, 1]
    for name in ("raw", "nm", "yx", "hdf5", "error", "truth"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("x")
    assert [data_state(config, source) for config, source in zip(configs, sources, strict=True)] == before
    assert data_state(configs[0]) == alone

    np.save("truth/labels.npy", np.zeros((8, 8), np.uint8))
    np.save("image.npy", np.zeros((8, 8), np.float32))
    config = NumpyConfig(path="image.npy", labels="truth/labels.npy")
    copy = NumpyConfig(path=str(tmp_path / "copy.npy"), labels=str(tmp_path / "copied.npy"))
    shutil.copy2("image.npy", "copy.npy")
    shutil.copy2("truth/labels.npy", "copied.npy")
    states = [data_state(config), data_state(config, config.open()), data_state(config, copy.open())]
    assert states == [states[0]] * 3  # a staged copy knows that the labels lie elsewhere, and counts for nothing itself
    assert states[0]["files"] == 2


def test_folders_beyond_any_limit_are_not_listed(tmp_path, monkeypatch) -> None:
    for name in ("a", "b/deep", "c/deep"):
        (tmp_path / "many" / name).mkdir(parents=True)
        for number in range(20):
            (tmp_path / "many" / name / f"{number}.npy").write_bytes(b"1")
    config = NumpyConfig(path=str(tmp_path / "many"))
    ticks: list[int] = []
    whole = data_state(config, tick=lambda: ticks.append(1))
    assert whole["files"] == 60
    assert len(ticks) >= 60
    monkeypatch.setattr("vitrail.data.files.fingerprint.MOST_FILES", 10)
    monkeypatch.setattr("vitrail.data.files.fingerprint.MOST_LISTED", 10)
    listed: list[str] = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top, **more: listed.append(str(top)) or walk(top, **more))
    first = data_state(config)
    assert listed == [str(tmp_path / "many"), str(tmp_path / "many" / "a")]
    assert data_state(config) == first != whole
    os.utime(tmp_path / "many" / "c", ns=(1, 1))
    assert data_state(config) != first


def test_a_state_follows_links_and_not_places(tmp_path, two) -> None:
    """Files behind links count, in no circle; copies that keep times are the same, and what changed is told."""
    real, linked = tmp_path / "real" / "deep", tmp_path / "linked"
    real.mkdir(parents=True)
    linked.mkdir()
    for number in range(3):
        (real / f"{number}.npy").write_bytes(b"1")
    (linked / "folder").symlink_to(real)
    (real / "round").symlink_to(linked)
    (linked / "nowhere").symlink_to(tmp_path / "nothing")
    config = NumpyConfig(path=str(linked))
    before = data_state(config)
    assert before["files"] == 3
    assert before["bytes"] == 3
    (real / ".lock").write_bytes(b"")
    (real / ".lock").unlink()
    assert data_state(config) == before  # the time of a folder is none of the data's
    for name in (".DS_Store", "._1.npy", "Thumbs.db", "README.txt"):
        (real / name).write_bytes(b"idle")
    (real / ".cache").mkdir()
    (real / ".cache/0.npy").write_bytes(b"idle")
    assert data_state(config) == before
    (real / "out").mkdir()
    (real / "out/0.npy").write_bytes(b"1")
    assert data_state(config, leave_out=[linked / "folder/out"]) == before != data_state(config)
    (real / ".zattrs").write_text("{}")
    assert data_state(config, leave_out=[real / "out"]) != before
    (real / ".zattrs").unlink()
    shutil.rmtree(real / "out")
    (tmp_path / "elsewhere").symlink_to(linked)
    assert data_state(NumpyConfig(path=str(tmp_path / "elsewhere"))) == before
    os.utime(real / "1.npy", ns=(1, 1))
    assert changed(before, data_state(config)) == "the times or names of its 3 files are others"
    (real / "3.npy").write_bytes(b"22")
    assert changed(before, data_state(config)) == "3 files with 3 bytes became 4 with 5"
    assert changed(before, before) is None
    assert changed(None, before) is None  # what was never known cannot have changed

    copied = tmp_path / "copied.npy"
    shutil.copy2(two[0].path, copied)
    assert data_state(NumpyConfig(path=str(copied))) == data_state(two[0])
    assert data_state(NumpyConfig(path=f"{copied}::key")) == data_state(two[0])


def test_a_state_of_urls(tmp_path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/state/a.npy", b"one")
    config = NumpyConfig(path="memory://state/a.npy")
    before = data_state(config)
    assert before["bytes"] == 3
    assert data_state(config) == before
    memory.pipe("/state/a.npy", b"two!")
    assert changed(before, data_state(config)) == "1 files with 3 bytes became 1 with 4"
    assert data_state(NumpyConfig(path="memory://state/none.npy")) is None


def test_percentiles_of_many_variables_need_no_more_memory(monkeypatch) -> None:
    class Reader:
        sources = (SimpleNamespace(variables=tuple("abcdefgh")),)
        dtype = np.dtype(np.float32)

        def size_of(self, source: int, item: int, window: tuple[int, ...]) -> tuple[int, ...]:
            return (64, 64)

        def read_into(self, crop: np.ndarray, sample: Sample) -> None:
            crop[...] = np.linspace(0, 100, 4096).reshape(64, 64) * np.arange(1, 9)[:, None, None]

        def name_of(self, sample: Sample) -> str:
            return ""

    order = Sampler([Extent(0, 0, (64, 64), (64, 64), (0, 0), 1.0)], (64, 64), seed=0, lanes=1)
    taken: list[int] = []
    percentile = np.percentile
    monkeypatch.setattr(np, "percentile", lambda values, *a: taken.append(values.size) or percentile(values, *a))
    monkeypatch.setattr("vitrail.data.statistics.SPREAD", 2**20)
    found = measure(order, Reader(), kinds=[Percentiles(percentiles=(10, 90))] * 8)
    assert sum(taken) <= 2**20
    assert found.mean == pytest.approx([50 * n for n in range(1, 9)], rel=0.01)
    assert found.std == pytest.approx([40 * n for n in range(1, 9)], rel=0.01)


def test_a_broken_cache_is_done_without(tmp_path, monkeypatch) -> None:
    assert remembered("x", lambda: [1]) == [1]
    assert remembered("x", lambda: pytest.fail("made again")) == [1]
    (file,) = (tmp_path / "cache" / "statistics").iterdir()
    file.write_text("{")
    assert remembered("x", lambda: [2]) == [2]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert remembered("x", lambda: [3]) == [3]


def test_checkpoints_carry_the_entries() -> None:
    base = Statistics((1.0,), (2.0,))
    assert statistics.with_entries(base, None) is base
    both = statistics.with_entries(base, [base, Statistics((3.0,), (4.0,))], ["a", "b"])
    assert isinstance(both, EntryStatistics)
    stored = json.loads(json.dumps(both._asdict()))
    assert stored == {"mean": [1.0], "std": [2.0], "entries": [[[1.0], [2.0]], [[3.0], [4.0]]], "places": ["a", "b"]}
    assert stored == {name: list(value) for name, value in both._asdict().items()}  # as a resumed run compares them
    assert both == base


# ---------------------------------------------------------------- used


def test_samples_with_their_own_statistics() -> None:
    values = torch.randn(3, 2, 4, 4) * 5 + 7
    mean, std = torch.rand(3, 2), torch.rand(3, 2) + 0.5
    found = normalise(values, (mean, std))
    for sample, each, m, s in zip(values, found, mean, std, strict=True):
        assert torch.equal(each, normalise(sample[None], Statistics(tuple(m.tolist()), tuple(s.tolist())))[0])


@pytest.mark.parametrize("on", ["hidden", "all"])
@pytest.mark.parametrize("separate", [False, True])
def test_reconstruction_of_samples_with_their_own_statistics(on: str, separate: bool) -> None:
    """The batch is prepared as if each sample were alone with the statistics of all."""
    encoder: dict = {"width": 16, "depth": 1, "heads": 1, "patch": 2}
    if separate:
        encoder["variables"] = {"known": ["a", "b"], "aggregate": "none"}
    from pydantic import TypeAdapter

    model = TypeAdapter(MAEConfig).validate_python(
        {
            "ndim": 2,
            "shape": 8,
            "channels": 2,
            "encoder": encoder,
            "decoder": {"kind": "self", "width": 16, "depth": 1, "heads": 1},
        }
    )
    values = torch.randn(2, 2, 8, 8) * 5 + 7
    mean, std = torch.rand(2, 2), torch.rand(2, 2) + 0.5
    objective = ReconstructConfig(on=on).build(model, Statistics((0.0, 0.0), (1.0, 1.0)))
    batch = Batch([4, 9], values, variables=("a", "b"), statistics=(mean, std))
    inputs, targets = objective.prepare(batch, Draws(0, [4, 9]))
    error = torch.zeros_like(targets.values)
    for n, counter in enumerate((4, 9)):
        alone = ReconstructConfig(on=on).build(model, Statistics(tuple(mean[n].tolist()), tuple(std[n].tolist())))
        own, expected = alone.prepare(Batch([counter], values[n : n + 1], variables=("a", "b")), Draws(0, [counter]))
        assert torch.equal(inputs["x"][n], own["x"][0])
        assert torch.equal(targets.values[n], expected.values[0])
    sums = objective.measure(error + targets.values, targets)
    assert sums["squared_error.0"] == 0
    scored = targets.values[:, targets.num_visible :].double().sum().item()
    assert (sums["sum.0"] + sums["sum.1"]).item() == pytest.approx(scored, rel=1e-6, abs=1e-6)
    assert batch.narrow(1, 2).statistics[0].equal(mean[1:])
