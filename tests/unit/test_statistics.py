"""Statistics: measured once, shared or of each entry, and used where samples have their own."""

import json

import numpy as np
import pytest
import torch

from vitrail.data import entries
from vitrail.data.batch import Batch, EntryStatistics, Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.sources.numpy import NumpyConfig
from vitrail.data.statistics import fingerprint, remembered
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.models.mae import MAEConfig
from vitrail.objectives.objective import normalise
from vitrail.objectives.reconstruct import ReconstructConfig
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
    base = entries.shared(dataset, seed=0)
    found = entries.of_entries(dataset, base, names=dataset.variables, seed=0)
    for one, config in zip(found, two, strict=True):
        array = np.load(config.path)
        assert one.mean[0] == pytest.approx(array.mean(dtype=float))
        assert one.std[0] == pytest.approx(array.std(dtype=float))
    both = np.concatenate([np.load(config.path).ravel() for config in two]).astype(float)
    assert base.mean[0] == pytest.approx(both.mean())
    assert base.std[0] == pytest.approx(both.std())
    assert entries.of_entries(dataset_of(two), base, names=dataset.variables, seed=0) is None


def test_percentiles_become_minus_one_and_one(two) -> None:
    dataset = dataset_of(two[:1], normalize={"percentiles": [5, 95]})
    found = entries.shared(dataset, seed=0)
    low, high = np.percentile(np.load(two[0].path), [5, 95])
    assert (low - found.mean[0]) / found.std[0] == pytest.approx(-1, abs=0.05)
    assert (high - found.mean[0]) / found.std[0] == pytest.approx(1, abs=0.05)


def test_given_and_none(two) -> None:
    assert entries.shared(dataset_of(two, normalize="none"), seed=0) == Statistics((0.0,), (1.0,))
    given = dataset_of(two, normalize={"mean": [3], "std": [2]})
    assert entries.shared(given, seed=0) == Statistics((3.0,), (2.0,))
    wrong = dataset_of(two, normalize={"mean": [3, 4], "std": [2, 2]})
    with pytest.raises(UserError, match=r"data\.normalize: give 1 means and stds, one for each of"):
        entries.shared(wrong, seed=0)
    for way in ("none", {"mean": [0], "std": [1]}):
        with pytest.raises(UserError, match=r"data\.statistics: 'each' measures every entry, but data\.normalize does"):
            entries.check(Data(train=[{}], crop=1, batch=1, statistics="each", normalize=way))
    for way in ({}, {"mean": [1]}, {"mean": [1], "std": [1], "percentiles": [1, 99]}):
        with pytest.raises(ValueError, match="give mean and std, or percentiles"):
            Data(train=[{}], crop=1, batch=1, normalize=way)


def test_an_entry_brings_its_own(two) -> None:
    import dataclasses

    own = dataclasses.replace(two[1], statistics={"mean": [7.0], "std": [3.0]})
    dataset = dataset_of([two[0], own])
    base = Statistics((1.0,), (2.0,))
    assert entries.of_entries(dataset, base, names=dataset.variables, seed=0) == [base, Statistics((7.0,), (3.0,))]
    wrong = dataset_of([dataclasses.replace(own, statistics={"mean": [7.0, 1.0], "std": [3.0, 1.0]})])
    with pytest.raises(UserError, match=r"data\.train\.0\.statistics: give 1 means and stds"):
        entries.of_entries(wrong, base, names=wrong.variables, seed=0)


def test_held_out_entries_take_those_of_the_same_file(two) -> None:
    train = dataset_of(two[:1], statistics="each")
    known = [Statistics((5.0,), (6.0,))]
    valid = dataset_of(two, where="data.valid", statistics="each")
    found = entries.of_entries(valid, known[0], names=valid.variables, seed=0, known=entries.places(train, known))
    assert found[0] == known[0]
    assert found[1].mean[0] == pytest.approx(1000, rel=0.05)


def test_variables_of_several_sets(tmp_path, two) -> None:
    np.save(tmp_path / "ab.npy", np.stack([np.full((16, 16), 4.0), np.full((16, 16), 6.0)]).astype(np.float32))
    ab = NumpyConfig(path=str(tmp_path / "ab.npy"), axes="cyx", variables=["a", "b"])
    b = NumpyConfig(path=two[0].path, variables=["b"])
    dataset = dataset_of([ab, b])
    assert dataset.variables == ("a", "b")
    base = entries.shared(dataset, seed=0)
    assert base.mean[0] == 4.0
    assert base.mean[1] == pytest.approx((6 + np.load(two[0].path).mean(dtype=float)) / 2)
    found = entries.of_entries(dataset, base, names=dataset.variables, seed=0)
    assert found == [base, Statistics(base.mean[1:], base.std[1:])]


# ---------------------------------------------------------------- kept


def test_measured_once_for_the_same_data_and_settings(two, monkeypatch) -> None:
    first = entries.shared(dataset_of(two), seed=0)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.data.dataset.statistics.measure", lambda *a, **k: pytest.fail("measured again"))
        assert entries.shared(dataset_of(two), seed=0) == first
    assert entries.shared(dataset_of(two, normalize={"percentiles": [1, 99]}), seed=0) != first
    np.save(two[0].path, np.full((16, 16), 5, np.float32))
    assert entries.shared(dataset_of(two), seed=0).mean[0] < first.mean[0]


def test_what_cannot_be_told_apart_is_not_kept(two) -> None:
    import types

    assert fingerprint([types.SimpleNamespace(path="x")], {}) is None
    assert fingerprint([NumpyConfig(path="https://example.org/a.npy")], {}) is None
    made: list[int] = []
    for _ in range(2):
        remembered(None, lambda: made.append(1))
    assert len(made) == 2
    assert fingerprint(two, {"a": 1}) == fingerprint(two, {"a": 1}) != fingerprint(two, {"a": 2})


def test_a_broken_cache_is_done_without(tmp_path, monkeypatch) -> None:
    assert remembered("x", lambda: [1]) == [1]
    assert remembered("x", lambda: pytest.fail("made again")) == [1]
    (tmp_path / "cache" / "statistics" / "x.json").write_text("{")
    assert remembered("x", lambda: [2]) == [2]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert remembered("x", lambda: [3]) == [3]


def test_checkpoints_carry_the_entries() -> None:
    base = Statistics((1.0,), (2.0,))
    assert entries.with_entries(base, None) is base
    both = entries.with_entries(base, [base, Statistics((3.0,), (4.0,))])
    assert isinstance(both, EntryStatistics)
    stored = json.loads(json.dumps(both._asdict()))
    assert stored == {"mean": [1.0], "std": [2.0], "entries": [[[1.0], [2.0]], [[3.0], [4.0]]]}
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
    assert sums["squared_error"] == 0
    raw = (targets.values * targets.std + targets.mean)[:, targets.num_visible :]
    assert sums["sum"].item() == pytest.approx(raw.double().sum().item(), rel=1e-6)
    assert batch.narrow(1, 2).statistics[0].equal(mean[1:])
