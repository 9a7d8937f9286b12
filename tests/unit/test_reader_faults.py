"""A source that fails, stalls and reads short: nothing is lost, nothing hangs, and every end is one sentence."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import LONG, environment
from test_loader import ArraySource, expected, loader_of, reading_threads

from vitrail.data.batch import Labelling
from vitrail.data.dataset import Dataset
from vitrail.data.order.sampler import Sampler
from vitrail.data.reading import pool as bad_data
from vitrail.data.reading import pool as pool_module
from vitrail.data.reading.loader import Loader, count_bad
from vitrail.data.reading.pool import Job, Policy, Pool, ShortRead, SlowRead, Stopped, Tally, read_again, timed
from vitrail.data.reading.reader import Reader
from vitrail.draws import key
from vitrail.errors import BadData, FailedRead, MissingData, TooMuchBad
from vitrail.layers.patches import Part, Slab
from vitrail.recipe.sections import Data


class FaultySource(ArraySource):
    """Fails now and then, by a hash of how often it was asked: errors, delays and short reads."""

    def __init__(self, array: np.ndarray, *, seed: int, lasting: Callable[[tuple], bool] = lambda region: False):
        super().__init__(array)
        self.seed, self.lasting = seed, lasting
        self.asked = 0
        self.faults: dict[str, int] = {"error": 0, "short": 0, "delay": 0}
        self._counting = threading.Lock()

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        with self._counting:
            self.asked += 1
            fault = key(self.seed, "fault", self.asked) % 10
            kind = {0: "error", 1: "error", 2: "short", 3: "delay"}.get(fault)
            if kind:
                self.faults[kind] += 1
        if self.lasting(region):
            raise BadData(f"{self.items[item].name} is broken at {region[0].start}; restore it")
        if kind == "error":
            raise [OSError(errno.EIO, "Input/output error"), TimeoutError("timed out")][fault]
        values = super().read(item, region)
        if kind == "delay":
            time.sleep(0.003)
        return values[:, :-1] if kind == "short" else values


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_data, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(bad_data, "LONGEST_WAIT", 0.002)
    monkeypatch.setattr(pool_module, "PATIENCE", 0.3)


def volume(seed: int = 0, shape: tuple[int, ...] = (1, 21, 24, 18)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call that must not hang."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert box, f"it hangs for more than {seconds} s"
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


# ---------------------------------------------------------------- faults that pass


@pytest.mark.parametrize("cache", [0, 10_000])
@pytest.mark.parametrize("seed", range(2))
def test_faults_that_pass_lose_nothing(cache: int, seed: int) -> None:
    source = FaultySource(volume(), seed=seed)
    loader = loader_of(source, workers=4, prefetch=3, cache=cache, reuse=2)
    loader.obey(Policy(retries=12))
    batches = within(LONG, lambda: list(loader.batches(0, 60)))
    assert [c for b in batches for c in b.counters] == list(range(240))
    for batch in batches:
        for counter, values in zip(batch.counters, batch.values, strict=True):
            np.testing.assert_array_equal(values.numpy(), expected(loader.sampler, [source], counter))
    assert min(source.faults.values()) > 3
    assert count_bad(loader) == (0, 0)
    assert not reading_threads()


def test_a_store_that_fails_and_stalls_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with real files: chunks of a Zarr whose every third opening fails or takes its time."""
    from vitrail.data.chunks.decoded import shared
    from vitrail.data.generate import Volume, write_ome_zarr
    from vitrail.data.sources.zarr import OmeZarrConfig

    values = volume(shape=(40, 40, 40))  # [z, y, x]
    write_ome_zarr(tmp_path / "v.zarr", Volume(values, values), levels=1, chunk=8)
    dataset = Dataset([OmeZarrConfig(path=str(tmp_path / "v.zarr"))], (12, 12, 12), where="data.train")
    monkeypatch.setattr(shared, "limit", 20 * 8**3)  # few stay, so that files are opened again and again
    opened, faults, lock, true_open = 0, [0, 0], threading.Lock(), os.open

    def faulty(path: Any, *arguments: Any, **options: Any) -> int:
        nonlocal opened
        if "v.zarr/s0/c/" in os.fsdecode(path):
            with lock:
                opened += 1
                fault = key(1, "store", opened) % 6
                faults[fault % 2] += fault < 2
            if fault == 0:
                raise OSError(errno.EIO, "Input/output error", path)
            if fault == 1:
                time.sleep(0.002)
        return true_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", faulty)
    sampler = dataset.sampler(seed=0, lanes=4, reuse=2)
    reader = dataset.reader(sampler, lanes=4, cache_bytes=1 << 20)
    loader = Loader(
        sampler,
        reader,
        lambda step: range(8 * step, 8 * step + 8),
        device=torch.device("cpu"),
        workers=4,
        prefetch=2,
        policy=Policy(retries=200),
    )
    batches = within(LONG, lambda: list(loader.batches(0, 12)))
    for batch in batches:
        for counter, crop in zip(batch.counters, batch.values, strict=True):
            inside = tuple(slice(s, s + 12) for s in sampler(counter).start)
            np.testing.assert_array_equal(crop[0].numpy(), values[inside])
    assert min(faults) > 20
    assert not reading_threads()


def test_faults_and_lasting_ones_together() -> None:
    """Under skip, every sample is right or a right substitute, and the same at any number of workers."""
    seen = []
    for workers in (0, 1, 4):
        source = FaultySource(volume(), seed=workers, lasting=lambda r: r[0].start <= 6 < r[0].stop)
        loader = loader_of(source, workers=workers, cache=1 << 20)
        loader.obey(Policy("skip", most=10_000, retries=12))
        batches, bad = within(LONG, lambda loader=loader: list(loader.batches(0, 20))), 0
        for batch in batches:
            for counter, values in zip(batch.counters, batch.values, strict=True):
                attempt = 0
                while touches(loader.sampler, counter, attempt):
                    attempt += 1
                bad += attempt
                np.testing.assert_array_equal(values.numpy(), of_attempt(loader.sampler, source, counter, attempt))
        assert loader.bad.total == bad > 10  # each bad attempt counts once
        assert len(loader.bad.take_news()) == bad
        seen.append(loader.bad.total)
    assert len(set(seen)) == 1


def touches(sampler: Sampler, counter: int, attempt: int) -> bool:
    start = sampler(counter, attempt).start[0]
    return start <= 6 < start + 6


def of_attempt(sampler: Sampler, source: ArraySource, counter: int, attempt: int) -> np.ndarray:
    sample = sampler(counter, attempt)
    return source.arrays[sample.item][(slice(None), *(slice(s, s + 6) for s in sample.start))]


def test_a_bad_chunk_spoils_only_the_crops_that_touch_it() -> None:
    """With whole blocks or without, the same crops are bad: the cache does not change the answer."""
    outcomes = []
    for cache in (0, 1 << 20):
        source = FaultySource(volume(), seed=0, lasting=lambda r: any(a.start <= 3 < a.stop for a in r[:1]))
        source.seed = -1
        loader = loader_of(source, cache=cache, workers=0)
        loader.obey(Policy(retries=12))
        good = []
        for counter in range(40):
            try:
                loader.load([counter])
                good.append(counter)
            except BadData:
                assert loader.sampler(counter).start[0] <= 3
        outcomes.append(good)
    assert outcomes[0] == outcomes[1]
    assert 0 < len(outcomes[0]) < 40


# ---------------------------------------------------------------- retries


def test_waits_grow_and_end() -> None:
    waits: list[float] = []
    calls = iter(range(100))

    def read() -> str:
        if next(calls) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return "done"

    bad_data.FIRST_WAIT, bad_data.LONGEST_WAIT = 0.1, 0.5  # the fixture puts them back
    assert read_again(read, lambda: "x", retries=3, wait=waits.append) == "done"
    assert waits == pytest.approx([0.1, 0.3, 0.5])


@pytest.mark.parametrize(
    ("error", "tries", "sentence"),
    [
        (OSError(errno.EIO, "Input/output error"), 3, "v1 cannot be read after 3 tries: Input/output error; check"),
        (TimeoutError("timed out"), 3, "v1 cannot be read after 3 tries: timed out"),
        (ShortRead("[1] values came for the [2]"), 3, r"after 3 tries: \[1\] values came"),
        (EOFError("it ends after 3 bytes"), 3, "after 3 tries: it ends after 3 bytes"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/d/v1"),
            1,
            r"v1 cannot be read \(/d/v1\): .*readable for",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/d/v1"), 1, "moved or removed"),
    ],
)
def test_what_lasts_is_one_sentence(error: Exception, tries: int, sentence: str) -> None:
    asked = 0

    def read() -> None:
        nonlocal asked
        asked += 1
        raise error

    with pytest.raises(FailedRead, match=sentence) as caught:
        read_again(read, lambda: "v1", retries=2)
    assert asked == tries
    assert caught.value.__cause__ is error


def test_other_errors_are_not_tried_again() -> None:
    source = ArraySource(volume())
    loader = loader_of(source, cache=0)

    def fail() -> None:
        raise RuntimeError("a bug")

    source.before = fail
    with pytest.raises(RuntimeError, match="a bug"):
        loader.load([0])
    assert sum(source.reads.values()) == 1


# ---------------------------------------------------------------- reads that do not end


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_a_read_that_does_not_end_is_named(workers: int, cache: int) -> None:
    source = ArraySource(volume())
    loader = loader_of(source, workers=workers, cache=cache, lanes=4, reuse=1)
    loader.obey(Policy(limit=0.3))
    release, calls = threading.Event(), iter(range(10**6))
    source.before = lambda: next(calls) >= 9 and release.wait()
    good: list[Any] = []
    sentence = r"a0 \(voxels z \d+ to \d+, .*\): the read has not ended after \d+ s; .* data.read_limit"
    try:
        with pytest.raises(SlowRead, match=sentence):
            good.extend(loader.batches(0, 1000))
    finally:
        release.set()
    assert len(good) <= 3


def test_a_slow_read_is_not_skipped_and_does_not_count_while_it_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty reads of 20 s by one thread are no slow read: each has its own clock."""
    source, clock = ArraySource(volume()), [0.0]

    def take_long() -> None:
        clock[0] += 20
        time.sleep(0.02)  # so that it is looked at

    source.before = take_long
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    loader = loader_of(source, workers=1, cache=0, batch=40)
    loader.obey(Policy("skip", limit=400))
    assert len(loader.load(range(40))) == 40
    assert loader.bad.total == 0


def test_one_who_waits_is_set_free_when_the_pool_closes() -> None:
    pool, release = Pool(1), threading.Event()
    job = pool.submit(lambda: release.wait(), lambda: "job")
    waiting = pool.submit(lambda: 1, lambda: "after it")
    closer = threading.Timer(0.2, pool.close)
    closer.start()
    with pytest.raises(Stopped):
        within(LONG, lambda: job.result(LONG))
    with pytest.raises(Stopped):
        waiting.result(LONG)
    with pytest.raises(Stopped):
        pool.submit(lambda: 1, lambda: "late")
    release.set()
    closer.join()


def test_a_single_call_has_a_clock_too() -> None:
    assert timed(lambda: 3, lambda: "v1", LONG) == 3
    release = threading.Event()
    with pytest.raises(SlowRead, match="v1: the read has not ended"):
        timed(lambda: release.wait(), lambda: "v1", 0.1)
    release.set()


def test_a_job_may_raise_a_time_out_of_its_own() -> None:
    job = Job(lambda: [][0], lambda: "job")
    job.call = lambda: (_ for _ in ()).throw(TimeoutError("its own"))
    job.run()
    with pytest.raises(TimeoutError, match="its own"):
        job.result(5)


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    """Closing the loader and leaving the interpreter both go on while a read sleeps for ever."""
    script = """
        import sys, time
        sys.path.insert(0, {unit!r})
        import numpy as np
        from test_loader import ArraySource, loader_of
        from vitrail.data.reading.pool import Policy
        from vitrail.errors import UserError
        source = ArraySource(np.zeros((1, 20, 20, 20), np.uint8))
        loader = loader_of(source, workers=2, cache=0)
        loader.obey(Policy(limit=2))  # before the first read: one under way keeps the limit that it began with
        batches = loader.batches(0, 100)
        try:
            next(batches)
            source.before = lambda: time.sleep(3600)
            list(batches)
        except UserError as error:
            print(error)
    """
    text = textwrap.dedent(script.format(unit=str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment(), capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the read has not ended after" in done.stdout


# ---------------------------------------------------------------- the policy


def broken(source: ArraySource, error: Exception, after: int = 0) -> None:
    calls = iter(range(10**6))

    def fail() -> None:
        if next(calls) >= after:
            raise error

    source.before = fail


def test_an_error_is_the_default() -> None:
    source = ArraySource(volume())
    broken(source, MissingData("chunk {0, 1} in /d/v1 is missing"))
    with pytest.raises(MissingData, match="chunk"):
        list(loader_of(source, workers=4).batches(0, 10))


def test_skips_are_capped_and_the_last_sentence_names_the_cap() -> None:
    source = ArraySource(volume())
    broken(source, BadData("/d/v1 is cut short; restore it"), after=12)
    loader = loader_of(source, workers=4, cache=0)
    loader.obey(Policy("skip", most=5))
    words = r"5 samples were skipped \(.* times\), as many as data\.most_bad .* another bad one: .* cut short; restore"
    with pytest.raises(TooMuchBad, match=words):
        within(LONG, lambda: list(loader.batches(0, 100)))
    assert loader.bad.total < 5  # those of batches that were handed out
    assert count_bad(loader, loader) == (2 * loader.bad.total, 0)


def test_ranks_that_share_samples_do_not_skip_what_only_one_cannot_read() -> None:
    policy = Policy("skip", shared=True)
    assert policy.skips(BadData("all see that"))
    assert not policy.skips(FailedRead("this node's link is down"))
    assert Policy("skip").skips(FailedRead("gone"))
    assert not Policy("fill").skips(MissingData("gone"))


def test_bad_samples_count_at_once_and_are_news_with_their_batch() -> None:
    tally = Tally(before=Counter(c=1, a=2))
    for item in ("a", "b", "a"):
        tally.meet(item, BadData(f"{item} is cut short"), 6)
    assert (tally.total, tally.take_news()) == (0, [])
    tally.take([("a", "a is cut short"), ("b", "b is cut short")])
    assert tally.skipped == {"a": 1, "b": 1}
    assert tally.take_news() == [("a", "a is cut short"), ("b", "b is cut short")]
    assert tally.take_news() == []
    with pytest.raises(TooMuchBad, match=r"^6 samples were skipped \(a 4 times, c once, b once\), .* one: a is gone$"):
        tally.meet("a", BadData("a is gone"), 6)
    tally.meet("c", BadData("c is gone"), 8)
    tally.meet("d", BadData("d is gone"), 8)
    with pytest.raises(TooMuchBad, match=r"\(a 4 times, c 2 times, b once and 1 other\)"):
        tally.meet("e", BadData("e is gone"), 8)


@pytest.mark.parametrize("workers", [0, 4])
def test_bad_samples_are_counted_with_the_batch_that_they_were_to_be_in(workers: int) -> None:
    """However far threads have read ahead."""
    source = FaultySource(volume(), seed=workers, lasting=lambda r: r[0].start <= 6 < r[0].stop)
    loader = loader_of(source, workers=workers, cache=0)
    loader.obey(Policy("skip", most=10_000, retries=12))
    bad = 0
    for batch in loader.batches(0, 6):
        for counter in batch.counters:
            attempt = 0
            while touches(loader.sampler, counter, attempt):
                attempt += 1
            bad += attempt
        assert loader.bad.total == bad
        time.sleep(0.05)  # for threads to read on
    assert bad > 5


def test_the_policy_of_a_recipe() -> None:
    data = Data.model_construct(bad="skip", most_bad=7, retries=1, read_limit=90)
    assert Policy.of(data) == Policy("skip", 7, 1, 90.0)
    # Several ranks: before the others give up on this one.
    assert Policy.of(data, hang_limit=60, shared=True) == Policy("skip", 7, 1, 48.0, True)
    assert Policy.of(data, hang_limit=600).limit == 90


def test_numbers_that_are_none_and_labels_that_no_class_has_are_bad_data() -> None:
    array = np.ones((1, 12, 12), np.float32)
    array[0, 3, 4] = np.nan
    dataset = Dataset([ArraySource(array)], (12, 12), where="data.train")
    sampler = dataset.sampler(seed=0, lanes=1, reuse=1)
    reader = dataset.reader(sampler, lanes=1, cache_bytes=0)
    with pytest.raises(BadData, match=r"variable 'v0' is NaN or infinite at voxel \[3, 4\]"):
        reader.read_into(np.empty((1, 12, 12), np.float32), sampler(0))
    source: Any = ArraySource(np.zeros((1, 12, 12), np.uint8))
    labels = np.zeros((12, 12), np.uint8)
    labels[5, 6] = 9
    source.label_dtype, source.label_names = labels.dtype, {}
    source.read_labels = lambda item, region: labels[region]
    labelling = Labelling("voxel", ("background", "cell"))
    reader = Reader([source], (12, 12), whole_blocks=False, cache_bytes=0, labelling=labelling)
    with pytest.raises(BadData, match=r"label 9 at voxel \[5, 6\] .* objective.ignore: 9"):
        reader.read_into(np.empty((1, 12, 12), np.uint8), sampler(0), np.empty((12, 12), np.uint8))


def test_skipping_reads_whole_crops_where_ranks_share_them() -> None:
    """A rank that read a slab alone would not see what is wrong in the other's, and the two would disagree."""
    source = ArraySource(volume())
    loader = loader_of(source, cache=0)
    slab = Slab(Part(0, 3), (6, 6, 6))
    loader = Loader(loader.sampler, loader.reader, device=torch.device("cpu"), workers=1, prefetch=1, slab=slab)
    assert loader.load([0]).values.shape == (1, 1, 2, 6, 6)
    loader.obey(Policy("skip"))
    assert loader.load([0]).values.shape == (1, 1, 6, 6, 6)
    assert loader.load([0]).slab is None
