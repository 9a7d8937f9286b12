"""What happens to data before the first step: policies reach every loader, bad items are left out, clocks are told."""

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from support import LONG, merge, tiny_recipe
from test_loader import ArraySource

import vitrail
from vitrail.data import batches, statistics
from vitrail.data.batch import Statistics
from vitrail.data.chunks import decoded as chunks
from vitrail.data.dataset import Dataset
from vitrail.data.latents.store import write_latents
from vitrail.data.reading.pool import Policy, SlowRead
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.data.sources.items import LatentsConfig
from vitrail.errors import BadData, UserError
from vitrail.infer.features import RunNetwork
from vitrail.launch.world import World
from vitrail.layers.scores import CannyScore
from vitrail.objectives.reconstruct import Reconstruct
from vitrail.parallel import agree as waiting
from vitrail.recipe.load import diff
from vitrail.recipe.sections import Data
from vitrail.training import setup
from vitrail.training.alike import facts_of_ranks
from vitrail.training.trainer import Trainer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.data.reading.pool.FIRST_WAIT", 0.001)
    monkeypatch.setattr("vitrail.data.reading.pool.PATIENCE", 0.1)


def dataset_of(*configs: Any, crop: tuple[int, ...] = (8, 8), **values: Any) -> Dataset:
    chosen = Data(train=[{"path": "a"}], crop=8, batch=4, **values)
    return Dataset(configs, crop, where="data.train", settings=chosen)


# ---------------------------------------------------------------- every loader


def test_every_loader_of_a_run_obeys_its_recipe(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Policy] = []

    class Watched(setup.Loader):
        def obey(self, policy: Policy) -> None:
            made.append(policy)
            super().obey(policy)

    monkeypatch.setattr(setup, "Loader", Watched)
    monkeypatch.setattr(chunks.shared, "limit", 1)
    tree = tiny_recipe(volume, tmp_path / "run", run__steps=1, data__retries=1, eval__samples=2)
    tree["data"] |= {"read_limit": "50s", "bad": "skip", "most_bad": 3, "cache_mib": 7}
    vitrail.train(tree, quiet=True)
    assert made == [Policy("skip", 3, 1, 50.0)] * 2  # of training, and of validation and pictures
    assert chunks.shared.limit == 7 << 20
    made.clear()
    vitrail.evaluate(tmp_path / "run", overrides=["data.retries=2", "data.cache_mib=0"])
    assert made == [Policy("skip", 3, 2, 50.0)]
    assert (chunks.shared.limit, chunks.shared.bytes) == (0, 0)


def test_entries_with_other_variables_are_held_out_and_keep_their_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_list, rng = [], np.random.default_rng(0)
    for number, name in enumerate("tu"):
        np.save(tmp_path / f"{name}.npy", rng.normal(100 * number, 1 + number, (32, 32)).astype(np.float32))
        entry_list.append({"path": str(tmp_path / f"{name}.npy"), "variables": [name]})
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=2, model__ndim=2, eval__samples=5, log__pictures=2)
    tree["model"]["encoder"]["variables"] = {"known": ["t", "u"]}
    tree["data"] |= {"train": entry_list, "valid": entry_list, "statistics": "each", "crop": 8, "batch": 4}
    seen: list[tuple[tuple[str, ...], list[int]]] = []
    load = setup.Loader.load

    def watched(self: Any, counters: Any, **options: Any) -> Any:
        batch = load(self, counters, **options)
        seen.append((batch.variables, batch.counters))
        assert abs(batch.statistics[0][0, 0] - 100 * (batch.variables == ("u",))) < 1
        return batch

    monkeypatch.setattr(setup.Loader, "load", watched)
    vitrail.train(tree, quiet=True)
    seen.clear()
    np.save(tmp_path / "u.npy", np.zeros((32, 32), np.float32))  # what was measured at first holds for the run
    monkeypatch.setattr("vitrail.data.dataset.statistics.measure", lambda *a, **k: pytest.fail("measured again"))
    vitrail.evaluate(tmp_path / "run")
    assert {names for names, _ in seen} == {("t",), ("u",)}
    assert sorted(c for _, counters in seen for c in counters) == list(range(5))
    vitrail.train(merge(tree, {"run.steps": 3}), quiet=True, other_data=True)


def test_trees_see_values_by_the_statistics_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared ones, those of each entry, of bytes 0 and 255; and where nothing is known, that is said."""
    rng, seen = np.random.default_rng(0), []
    np.save(tmp_path / "ct.npy", rng.normal(100, 10, (32, 32)).astype(np.int16))
    np.save(tmp_path / "xrd.npy", rng.normal(0, 0.001, (32, 32)).astype(np.float32))
    np.save(tmp_path / "bytes.npy", rng.integers(90, 110, (32, 32)).astype(np.uint8))
    files = {name: {"path": str(tmp_path / f"{name}.npy"), "variables": ["a"]} for name in ("ct", "xrd", "bytes")}
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=1, model__ndim=2, log__pictures="off")
    tree["model"]["encoder"] |= {"tokens": {"kind": "adaptive", "length": 13, "min_leaf": 1}}
    prepare = Reconstruct.prepare

    def watched(self: Any, batch: Any, *given: Any, **options: Any) -> Any:
        seen.append(tuple(part.flatten().tolist() for part in batch.span))
        return prepare(self, batch, *given, **options)

    monkeypatch.setattr(Reconstruct, "prepare", watched)
    cases: list[tuple[str, dict[str, Any], list[tuple[float, float]]]] = [
        ("ct", {}, [(70, 130)]),
        ("bytes", {"augment": {"noise": 0.1}}, [(0, 255)]),
        ("ct xrd", {"statistics": "each"}, [(70, 130), (-0.003, 0.003)]),
        ("ct", {"normalize": {"percentiles": [0, 100]}}, [(65, 135)]),
        ("bytes", {"normalize": "none"}, [(0, 255)]),
    ]
    for number, (names, keys, expected) in enumerate(cases):
        data = {"train": [files[name] for name in names.split()], "valid": [], "crop": 8, "batch": 8, **keys}
        vitrail.train(merge(tree, {"data": data, "run.dir": str(tmp_path / f"run{number}")}), quiet=True)
        found = {pair for batch in seen for pair in zip(*batch, strict=True)}
        seen.clear()
        for low, high in expected:
            width = high - low
            assert any(abs(a - low) < 0.2 * width and abs(b - high) < 0.2 * width for a, b in found), (names, found)
    # A network of such a run sees crops of other data as it saw its own.
    network, grown = RunNetwork(tmp_path / "run0"), []
    monkeypatch.setattr(CannyScore, "score", lambda self, images, noise, span: grown.append(span) or images[:, 0])
    network(torch.zeros(2, 1, 8, 8))
    assert grown[0][0].shape == (2, 1)
    assert grown[0][0].mean().item() == pytest.approx(70, abs=5)
    data = {"train": [files["ct"]], "valid": [], "crop": 8, "batch": 8, "normalize": "none"}
    with pytest.raises(UserError, match=r"data\.normalize is none, so nothing is known of what is dark and bright"):
        vitrail.train(merge(tree, {"data": data, "run.dir": str(tmp_path / "none")}), quiet=True)


def test_batches_of_one_variable_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As UCF-VIT's single_channel: a step has one variable of many, all as often."""
    rng = np.random.default_rng(0)
    values = np.stack([rng.normal(100 * number, 1, (32, 32)) for number in range(3)]).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    entry = {"path": str(tmp_path / "a.npy"), "axes": "cyx"}
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=6, model__ndim=2, eval__samples=6)
    tree["data"] |= {"train": [entry], "valid": [entry], "crop": 8, "batch": 4, "one_variable": True}
    with pytest.raises(UserError, match=r"data\.one_variable: .*give model\.encoder\.variables=\{known"):
        vitrail.train(tree, quiet=True)
    names = [f"channel{number}" for number in range(3)]
    tree["model"]["encoder"]["variables"] = {"known": names}
    known = {"mean": [0.0, 100.0, 200.0], "std": [1.0, 2.0, 3.0]}
    own = merge(tree, {"data.train": [entry | {"statistics": known}]})
    for batch in batches(own, last=3):
        at = names.index(batch.variables[0])
        assert [table[0].item() for table in batch.statistics] == [known["mean"][at], known["std"][at]]
    for few in (known["mean"][:2], known["mean"] * 2):
        with pytest.raises(UserError, match=r"statistics = .*: give 3 means and stds, one for each of .*channel0"):
            next(batches(merge(tree, {"data.train": [entry | {"statistics": {"mean": few, "std": [1.0] * len(few)}}]})))
    found = list(batches(tree))
    assert [len(batch.variables) for batch in found] == [1] * 6
    assert sorted(batch.variables[0] for batch in found) == sorted(names * 2)
    for batch in found:
        assert batch.values.shape == (4, 1, 8, 8)
        assert abs(float(batch.values.mean()) - 100 * names.index(batch.variables[0])) < 2
    assert vitrail.train(tree, quiet=True).code == 0
    assert vitrail.train(merge(tree, {"run.steps": 7}), quiet=True).step == 7  # its stored recipe names the entries
    assert vitrail.evaluate(tmp_path / "run")["samples"] == 6


def test_volumes_keep_their_statistics_for_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two regions of a volume are normalised alike, a run says how, and its checkpoint knows it for ever."""
    rng, seen = np.random.default_rng(0), set[float]()
    (tmp_path / "ct").mkdir()
    for number in (1, 2):
        values = rng.integers(0, 1000 * number, (32, 32), dtype=np.int16)
        values[0, :2] = 0, 1000 * number
        np.save(tmp_path / f"ct/{number}.npy", values)
    entry = {"path": str(tmp_path / "ct"), "kind": "numpy", "axes": "yx"}
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=1, model__ndim=2, eval__samples=4)
    tree["data"] |= {"train": [entry], "valid": [entry | {"region": {"y": [0.5, 1]}}], "crop": 8, "batch": 8}
    tree["data"] |= {"normalize": {"kind": "minmax", "to": [0, 1]}, "statistics": "volume"}
    load = setup.Loader._finish

    def watched(self: Any, *given: Any) -> Any:
        batch = load(self, *given)
        mean, std = batch.statistics
        assert not mean.any()
        seen.update(std.flatten().tolist())
        return batch

    monkeypatch.setattr(setup.Loader, "_finish", watched)
    vitrail.train(tree)
    assert seen == {1000, 2000}
    words = "data are normalised: each of 2 volumes by itself, on average image: 0 and 1500 become 0 and 1, the rest is"
    assert words in capfd.readouterr().err
    seen.clear()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(statistics, "measure_volume", lambda *a, **k: pytest.fail("measured again"))
    np.save(tmp_path / "ct/2.npy", values // 2)
    vitrail.evaluate(tmp_path / "run", overrides=["data.normalize={kind: minmax, to: [0, 1]}"])
    assert seen == {1000, 2000}
    with pytest.raises(UserError, match=r"data\.normalize: a model sees values as it was trained on them"):
        vitrail.evaluate(tmp_path / "run", overrides=["data.normalize=fit"])
    vitrail.train(merge(tree, {"run.steps": 2}), quiet=True, other_data=True)


def test_held_out_entries_are_normalised_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With data.statistics: each, of entries at other places: not by the training entries in their order."""
    means = {"train": (0, 100), "valid": (50, 200)}
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=1, model__ndim=2, eval__samples=8, log__pictures=10**6)
    rng = np.random.default_rng(0)
    for which, centres in means.items():
        tree["data"][which] = []
        for centre in centres:
            path = tmp_path / f"{centre}.npy"
            np.save(path, rng.normal(centre, 1 + centre / 100, (32, 32)).astype(np.float32))
            tree["data"][which].append({"path": str(path)})
    tree["data"] |= {"statistics": "each", "crop": 8, "batch": 8}
    seen: dict[str, set[int]] = {"train": set(), "valid": set()}
    prepare = Reconstruct.prepare

    def watched(self: Any, batch: Any, draws: Any, *, evaluating: bool = False, **options: Any) -> Any:
        mean, std = (t.flatten().tolist() for t in batch.statistics)
        for values, m, s in zip(batch.values, mean, std, strict=True):
            centre = min((0, 50, 100, 200), key=lambda c: abs(float(values.mean()) - c))
            seen["valid" if evaluating else "train"].add(centre)
            assert (m, s) == (pytest.approx(centre, abs=0.5), pytest.approx(1 + centre / 100, rel=0.2))
        return prepare(self, batch, draws, evaluating=evaluating, **options)

    monkeypatch.setattr(Reconstruct, "prepare", watched)
    vitrail.train(tree, quiet=True)
    vitrail.evaluate(tmp_path / "run")
    assert seen == {which: set(centres) for which, centres in means.items()}


# ---------------------------------------------------------------- before the first step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        place = tmp_path / "images" / ("cat" if number % 2 else "dog") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(place)
    return tmp_path / "images"


def test_images_that_cannot_be_opened_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cat/3.png", "dog/0.png"):
        (folder / name).write_bytes(b"")
    entry = ImageFolderConfig(path=str(folder))
    with pytest.raises(BadData, match=r"cat/3\.png is an empty file"):
        dataset_of(entry)
    dataset = dataset_of(entry, bad="skip")
    assert len(dataset.extents) == 10
    for name in ("cat/3.png", "dog/0.png"):
        assert f"left out of data.train: {folder}/{name} is an empty file" in caplog.text
    assert {dataset.sampler(seed=0, lanes=1, reuse=1)(i).item for i in range(10)} == set(range(10))
    with pytest.raises(BadData, match=r"data\.train: 2 items cannot be used, .* raise data\.most_bad 1 if so many"):
        dataset_of(entry, bad="skip", most_bad=1)


def test_ranks_that_leave_out_other_items_differ(folder: Path) -> None:
    entry = ImageFolderConfig(path=str(folder))
    before = facts_of_ranks([dataset_of(entry, bad="skip")], Policy())
    assert before["data.train.0"]["items"] == 12
    (folder / "cat" / "3.png").write_bytes(b"")
    after = facts_of_ranks([dataset_of(entry, bad="skip")], Policy())
    assert [key for key, _, _ in diff(before, after)] == [
        "data.train.0.items",
        "data.train.0.sizes",
        "data.train.0.values",
    ]


def test_exact_statistics_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(3, 2, (20, 2, 8, 8)).astype(np.float32)
    values[:, 1] = 5
    write_latents(tmp_path / "a", [(values, None)])
    dataset = dataset_of(LatentsConfig(path=str(tmp_path / "a")))
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.data.dataset.statistics.measure", lambda *a, **k: pytest.fail("measured"))
        found = statistics.shared(dataset, seed=0)
    assert found.mean == pytest.approx((values[:, 0].mean(dtype=float), 5.0), rel=1e-5)
    assert found.std == pytest.approx((values[:, 0].std(dtype=float), 1.0), rel=1e-5)
    ranks = dataset_of(LatentsConfig(path=str(tmp_path / "a")), normalize={"percentiles": [5, 95]})
    assert statistics.shared(ranks, seed=0) != found


def test_statistics_are_measured_with_the_policy_for_bad_data(caplog: pytest.LogCaptureFixture) -> None:
    source = ArraySource(np.full((1, 8, 8), 7, np.uint8), np.full((1, 8, 8), 9, np.uint8))
    ticks: list[int] = []

    def fail_at_first(error: Exception, times: int) -> None:
        left = [error] * times

        def before() -> None:
            if left:
                raise left.pop()

        source.before = before  # type: ignore[assignment]

    fail_at_first(OSError(5, "Input/output error"), 3)
    found = dataset_of(source).fit_statistics(seed=0, samples=4, tick=lambda: ticks.append(1))
    assert found == Statistics((8.0,), (1.0,))
    assert len(ticks) == 4
    fail_at_first(BadData("a0 is broken; restore it"), 1)
    with pytest.raises(BadData, match="a0 is broken"):
        dataset_of(source).fit_statistics(seed=0)
    fail_at_first(BadData("a0 is broken; restore it"), 1)
    dataset_of(source, bad="skip").fit_statistics(seed=0, samples=4)
    assert "statistics are measured without it: a0 is broken" in caplog.text
    source.before = lambda: time.sleep(3)
    with pytest.raises(SlowRead, match=r"a\d \(voxels y 0 to 7, x 0 to 7\): the read has not ended after"):
        dataset_of(source, bad="skip", read_limit="1s").fit_statistics(seed=0)


# ---------------------------------------------------------------- augmentation that cannot be


def test_changes_that_samples_cannot_undergo_are_refused() -> None:
    grey = ArraySource(np.zeros((1, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"data\.augment\.jitter: .* but data\.train\.0 has v0; name them so with"):
        dataset_of(grey, augment={"jitter": {"hue": 0.1}})
    coloured = ArraySource(np.zeros((3, 8, 8), np.uint8), variables=["blue", "green", "red"])
    dataset_of(coloured, augment={"jitter": {"hue": 0.1}})
    volume = ArraySource(np.zeros((1, 8, 8, 8), np.uint8))
    with pytest.raises(UserError, match=r"data\.augment\.resized_crop: .* data\.train\.0 has 3 axes \(z, y, x\)"):
        dataset_of(volume, crop=(8, 8, 8), augment={"resized_crop": {}})


def test_mixing_an_odd_batch_is_refused_before_there_is_a_run(folder: Path, tmp_path: Path) -> None:
    tree = merge(
        tiny_recipe(tmp_path, tmp_path / "run", run__steps=2),
        {
            "model": {"kind": "vit", "channels": 1, "width": 8, "depth": 1, "heads": 1, "patch": 4},
            "objective": {"kind": "classify"},
            "data": {"train": [{"path": str(folder)}], "crop": 8, "batch": 5, "augment": {"mixup": 0.8}},
        },
    )
    with pytest.raises(UserError, match=r"data\.batch: .* each of 1 data-parallel ranks reads 5 of 5 .* multiple of 2"):
        vitrail.train(tree, quiet=True)
    assert not (tmp_path / "run").exists()
    # Samples are mixed before a batch is cut into micro-batches.
    tree["data"] |= {"batch": 6, "micro_batch": 3}
    assert vitrail.train(tree, quiet=True).step == 2


# ---------------------------------------------------------------- waiting for rank 0


class Ranks:
    """Two threads as two ranks: what rank 0 shares is what both get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.barrier, self.shared = threading.Barrier(2, timeout=LONG), {}
        monkeypatch.setattr(waiting, "share_json", self.share)
        monkeypatch.setattr(waiting.dist, "get_rank", lambda group: self.rank())
        monkeypatch.setattr(waiting, "EVERY", 0.0)

    def rank(self) -> int:
        return int(threading.current_thread().name)

    def share(self, value: Any, group: Any) -> Any:
        if self.rank() == 0:
            self.shared = value
        self.barrier.wait()
        found = self.shared
        self.barrier.wait()
        return found

    def run(self, action: Any) -> tuple[dict[int, Any], dict[int, int]]:
        results: dict[int, Any] = {}
        beats = {0: 0, 1: 0}

        def work() -> None:
            rank = self.rank()

            def beat() -> None:
                beats[rank] += 1

            try:
                results[rank] = waiting.on_chief_for_long(action, None, beat)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, name=str(rank), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        return results, beats


def test_those_who_wait_for_rank_0_hear_that_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)

    def count(tick: Any) -> list[int]:
        for _ in range(5):
            tick()
        return [1, 2]

    assert ranks.run(count) == ({0: [1, 2], 1: [1, 2]}, {0: 5, 1: 5})

    def fail(tick: Any) -> None:
        tick()
        raise UserError("it is broken")

    results, beats = ranks.run(fail)
    assert {rank: str(error) for rank, error in results.items()} == {0: "it is broken", 1: "it is broken"}
    assert beats == {0: 1, 1: 1}


def test_ranks_that_are_done_hear_of_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    told: dict[int, Any] = {}

    def gather(value: Any, group: Any) -> list[Any]:
        told[ranks.rank()] = value
        ranks.barrier.wait()
        found = [told[0], told[1]]
        ranks.barrier.wait()
        return found

    monkeypatch.setattr(waiting, "gather_json", gather)
    monkeypatch.setattr(waiting, "on_chief_for_long", waiting.together_for_long)

    def count(tick: Any) -> int:
        for _ in range(5 * ranks.rank()):
            tick()
        return ranks.rank()

    assert ranks.run(count) == ({0: 0, 1: 1}, {0: 5, 1: 5})

    def fail(tick: Any) -> None:
        tick()
        if ranks.rank():
            tick()
            raise UserError("it is broken")

    results, beats = ranks.run(fail)
    assert {rank: str(error) for rank, error in results.items()} == dict.fromkeys(range(2), "rank 1: it is broken")
    assert beats == {0: 2, 1: 2}


def test_the_watchdog_is_told_while_data_are_opened(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.training.failures import OPENING, Watchdog

    beats: list[tuple[str, float]] = []
    beat = Watchdog.beat

    def note(self: Watchdog, step: int, phase: str, **options: Any) -> None:
        beat(self, step, phase, **options)
        beats.append((phase, self.limit))

    monkeypatch.setattr(waiting, "EVERY", 0.0)
    monkeypatch.setattr(Watchdog, "beat", note)
    tree = tiny_recipe(volume, tmp_path / "run", run__steps=1, data__filter={"by": "image", "share": 0.01})
    vitrail.train(tree, quiet=True)
    opening = [number for number, (phase, _) in enumerate(beats) if phase == "opening the data"]
    assert len(opening) > 10  # pieces of maps and samples of statistics
    assert beats[opening[0]][1] == OPENING
    assert beats[opening[-1] + 1][0] == "start"


def test_a_loop_of_ones_own_gets_the_batches_of_training(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tiny_recipe(volume, tmp_path / "run", run__steps=3, data__batch=4, eval__every=3, eval__samples=1)
    tree["data"]["augment"] |= {"flip": True, "noise": 0.1}
    seen: list[Any] = []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batch, **more: seen.append(batch) or step(self, batch, **more))
    vitrail.train(tree, quiet=True)
    monkeypatch.undo()

    def same(found: Any, wanted: Any) -> bool:
        return found.counters == wanted.counters and torch.equal(found.values, wanted.values)

    found = list(batches(tree))
    assert len(found) == 3
    assert all(map(same, found, seen))
    assert not dist.is_initialized()
    (again,) = batches(tree, first=2)
    assert same(again, seen[2])
    assert [len(batch) for batch in batches(tree, overrides=["data.batch=2"], last=1)] == [2]
    with pytest.raises(UserError, match="first, last: 2 to 9 are no steps of this run, which has 3"):
        next(batches(tree, first=2, last=9))

    # In a process group that is there, which stays; and as one rank of two, of four that share samples in pairs.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert same(next(batches(tree)), seen[0])
        assert dist.is_initialized()
        for ranks, changes in ((2, []), (4, ["parallel.tensor=2"])):
            for rank in range(ranks):
                here = find_place_of(rank, ranks)
                monkeypatch.setattr("vitrail.training.diagnose._met", lambda recipe, here=here: here)
                half = slice(2 * (rank * 2 // ranks), 2 * (rank * 2 // ranks) + 2)
                one = next(batches(tree, overrides=changes))
                assert one.counters == seen[0].counters[half]
                assert torch.equal(one.values, seen[0].values[half])
    finally:
        dist.destroy_process_group()


def find_place_of(rank: int, ranks: int) -> Any:
    """The place of a rank, whose agreements are with itself."""
    store = dist.HashStore()
    return nullcontext(setup.Place(World(rank, ranks), torch.device("cpu"), 1, store, store, None, None))
