"""Windows that share chunks, read together: exactly, each chunk once, and by the loader without anybody noticing."""

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from test_loader import reading_threads

from vitrail.data.augment import Augmenter, orientations
from vitrail.data.batch import Labelling
from vitrail.data.chunks import layers as chunk_layers
from vitrail.data.chunks.decoded import ChunkReader, open_chunks, parts
from vitrail.data.chunks.layers import find_layers
from vitrail.data.order.sampler import Extent, Sampler
from vitrail.data.order.tiles import Tiles
from vitrail.data.reading import pool as pool_module
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy, SlowRead
from vitrail.data.reading.reader import Reader
from vitrail.data.sources.zarr import ZarrConfig
from vitrail.errors import BadData, MissingData
from vitrail.layers.patches import Part, Slab
from vitrail.recipe.sections import Augment


def write(path: Path, shape: Sequence[int], chunk: Sequence[int], dtype: str = "uint8") -> np.ndarray:
    values = np.random.default_rng(0).integers(1, 250, shape).astype(dtype)
    array = zarr.create_array(str(path), shape=values.shape, dtype=values.dtype, chunks=tuple(chunk))
    array[...] = values
    return values


def some_windows(shape: Sequence[int], number: int, seed: int) -> list[tuple[slice, ...]]:
    rng = np.random.default_rng(seed)
    ends = np.sort([[rng.choice(n + 1, 2, replace=False) for n in shape] for _ in range(number)], axis=-1)
    return [tuple(slice(int(a), int(b)) for a, b in window) for window in ends]


@pytest.mark.parametrize("most", [0, 700, 1 << 20])  # bytes of a layer
@pytest.mark.parametrize(
    ("shape", "chunk", "dtype"),
    [
        ((50,), (8,), "uint8"),
        ((30, 41), (8, 16), "int16"),
        ((20, 30, 41), (8, 8, 16), "uint8"),
        ((2, 13, 12, 14), (1, 4, 5, 6), "uint16"),
    ],
)
def test_each_window_is_exact_and_each_chunk_is_decoded_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    dtype: str,
    most: int,
) -> None:
    monkeypatch.setattr(chunk_layers, "MOST", most)
    values = write(tmp_path / "a", shape, chunk, dtype)
    for seed, number in enumerate((1, 2, 9)):
        reader = open_chunks(tmp_path / "a")
        assert reader is not None
        windows = some_windows(shape, number, seed)
        wide = [np.zeros([2 * (w.stop - w.start) for w in window], "int32" if seed else dtype) for window in windows]
        outs = [memory[(slice(None, None, 2),) * len(shape)] for memory in wide]  # any strides, a wider type
        threads = [
            threading.Thread(target=layer.read) for layer in find_layers(reader, list(zip(outs, windows, strict=True)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for out, window in zip(outs, windows, strict=True):
            np.testing.assert_array_equal(out, values[window])
        assert reader.decoded == len({part.chunk for window in windows for part in parts(chunk, window)})


def test_layers_are_as_large_as_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes of chunks, one, or a single chunk: 32 bytes each, of which windows touch 4 x 3 x 2."""
    write(tmp_path / "a", (16, 12, 16), (4, 4, 2))
    reader = open_chunks(tmp_path / "a")
    assert reader is not None
    window = (slice(0, 16), slice(1, 12), slice(3, 6))
    for most, layers in ((6 * 32, 4), (2 * 32, 4 * 3), (32, 4 * 3 * 2), (0, 4 * 3 * 2)):
        monkeypatch.setattr(chunk_layers, "MOST", most)
        assert len(find_layers(reader, [(np.zeros((16, 11, 3), np.uint8), window)])) == layers


# ---------------------------------------------------------------- by the loader

LANES, REUSE, PREFETCH = 3, 4, 2
CROP = (6, 6, 6)


class Volume:
    """A zarr of random bytes and loaders of it."""

    def __init__(self, path: Path, *, missing: str = "error"):
        self.values = write(path, (26, 24, 30), (4, 4, 4))
        self.path = path
        self.source = ZarrConfig(path=str(path), missing=missing).open()

    @property
    def decoder(self) -> ChunkReader:
        return self.source.entries[0].images[0].chunk_reader

    def loader(self, *, cache: int = 1 << 16, workers: int = 2, codes: Sequence[int] = (0,), **options: Any) -> Loader:
        extent = Extent(0, 0, self.values.shape, (4, 4, 4), (0, 0, 0), 1.0)
        sampler = Sampler([extent], CROP, seed=9, lanes=LANES, reuse=REUSE, orientations=codes)
        reader = Reader([self.source], CROP, whole_blocks=True, cache_bytes=cache)
        return Loader(
            sampler,
            reader,
            lambda step: range(step * LANES, (step + 1) * LANES),
            device=torch.device("cpu"),
            workers=workers,
            prefetch=PREFETCH,
            **options,
        )

    def crop(self, loader: Loader, counter: int) -> np.ndarray:
        start = loader.sampler(counter).start
        return self.values[tuple(slice(s, s + n) for s, n in zip(start, CROP, strict=True))][None]

    def check(self, loader: Loader, first: int, last: int) -> None:
        for step, batch in enumerate(loader.batches(first, last), first):
            assert list(batch.counters) == list(range(step * LANES, (step + 1) * LANES))
            for counter, values in zip(batch.counters, batch.values, strict=True):
                np.testing.assert_array_equal(values.numpy(), self.crop(loader, counter))
        assert not reading_threads()

    def break_chunk(self, change: Callable[[Path], Any]) -> None:
        change(self.path / "c" / "3" / "3" / "3")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    monkeypatch.setattr("vitrail.data.reading.reader.MUCH_MORE", 0)  # however small it is
    monkeypatch.setattr(pool_module, "PATIENCE", 0.3)
    return Volume(tmp_path / "a")


def chunks_of(loader: Loader, steps: range, grid: tuple[int, ...] = (4, 4, 4)) -> int:
    """Chunks that the samples of some steps touch, each counted once for a block; or once, of a step that is alone."""
    blocks: dict[Any, set[Any]] = {}
    for counter in [c for step in steps for c in loader.counters(step)]:
        sample = loader.sampler(counter)
        window = tuple(slice(s, s + n) for s, n in zip(sample.start, CROP, strict=True))
        name = len(steps) > 1 and tuple((b.start, b.stop) for b in sample.block)
        blocks.setdefault(name, set()).update(part.chunk for part in parts(grid, window))
    return sum(map(len, blocks.values()))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("first", [0, 3])  # a run may go on in the middle of a visit
def test_crops_of_a_visit_are_read_together(volume: Volume, workers: int, first: int) -> None:
    loader = volume.loader(workers=workers)
    assert [len(steps) for steps in loader._visits(first, 14)] == [REUSE - first, REUSE, REUSE, 2]
    volume.check(loader, first, 14)
    ends = [first, 4, 8, 12, 14]
    assert volume.decoder.decoded == sum(chunks_of(loader, range(*each)) for each in itertools.pairwise(ends))


def test_steps_that_share_blocks_with_others_are_not_begun_together(volume: Volume) -> None:
    """They would decode blocks again: tiles, whose lanes go on one by one, and a single block for ever."""
    loader = volume.loader()
    loader.counters = lambda step: range(step * 4, (step + 1) * 4)  # of 3 lanes, with 4 crops of each block
    assert [len(steps) for steps in loader._visits(0, 12)] == [3] * 4
    extent = Extent(0, 0, volume.values.shape, (4, 4, 4), (0, 0, 0), 1.0)
    loader = volume.loader()
    loader.sampler = Tiles([extent], CROP, seed=0, lanes=LANES, overlap=0.5)
    visits = list(loader._visits(0, 100))
    assert sum(len(steps) == 1 for steps in visits) > 90
    volume.check(loader, 0, 20)
    loader = volume.loader()
    loader.sampler = Sampler([extent], CROP, seed=0, lanes=LANES, reuse=REUSE, block=(32, 32, 32))
    assert {len(steps) for steps in loader._visits(0, 12)} == {1}


def test_without_memory_for_a_visit_batches_are_begun_one_by_one(volume: Volume) -> None:
    size = REUSE * LANES * 6**3
    assert [len(steps) for steps in volume.loader(cache=size)._visits(0, 8)] == [4, 4]
    loader = volume.loader(cache=size - 1)
    assert [len(steps) for steps in loader._visits(0, 8)] == [1] * 8
    volume.check(loader, 0, 8)
    volume.check(volume.loader(cache=0), 0, 8)


def test_memory_of_batches_stays_bounded(volume: Volume) -> None:
    loader, held = volume.loader(), None
    for number, batch in enumerate(loader.batches(0, 60)):
        if number == 5:
            held, copy = batch.values[1:], batch.values[1:].clone()
    assert len(loader._values._known) <= 2 * REUSE + PREFETCH + 2
    assert held is not None
    assert torch.equal(held, copy)
    volume.check(loader, 0, 20)


def test_slabs_and_orientations(volume: Volume) -> None:
    codes = range(len(orientations(CROP)))
    whole = volume.loader(codes=codes)
    slabs = [volume.loader(codes=codes, slab=Slab(Part(i, 2), CROP)) for i in range(2)]
    loaders = [loader.batches(1, 9) for loader in (whole, *slabs)]
    for step, (batch, *halves) in enumerate(zip(*loaders, strict=True), 1):
        assert torch.equal(torch.cat([half.values for half in halves], dim=2), batch.values)
        assert torch.equal(whole.load(whole.counters(step)).values, batch.values)


def test_a_broken_chunk_is_an_error_only_for_crops_that_need_it(volume: Volume) -> None:
    volume.break_chunk(lambda path: path.write_bytes(path.read_bytes()[:9]))
    loader = volume.loader()
    bad = {counter for counter in range(96) if touches(loader, counter)}
    first = min(bad) // LANES
    volume.check(loader, 0, first)
    with pytest.raises(BadData, match=r"chunk \{3, 3, 3\}"):
        volume.check(loader, 0, 32)
    assert not reading_threads()
    loader.obey(Policy(on_bad="skip"))
    seen = set()
    for batch in loader.batches(0, 32):
        for counter, sample, values in zip(
            batch.counters, loader_samples(loader, batch.counters), batch.values, strict=True
        ):
            window = tuple(slice(s, s + n) for s, n in zip(sample.start, CROP, strict=True))
            np.testing.assert_array_equal(values[0].numpy(), volume.values[window])
            seen |= {counter} if sample.attempt else set()
    assert seen == bad
    assert loader.bad.total >= len(bad)


def touches(loader: Loader, counter: int, attempt: int = 0) -> bool:
    start = loader.sampler(counter, attempt).start
    return all(s < 16 and s + n > 12 for s, n in zip(start, CROP, strict=True))


def loader_samples(loader: Loader, counters: Sequence[int]) -> list[Any]:
    """The sample of each counter, or the first of those in its place that does not need the broken chunk."""
    attempts = [next(a for a in range(99) if not touches(loader, counter, a)) for counter in counters]
    return [loader.sampler(counter, attempt) for counter, attempt in zip(counters, attempts, strict=True)]


def test_a_missing_chunk_is_named_or_filled(tmp_path: Path, volume: Volume) -> None:
    volume.break_chunk(Path.unlink)
    with pytest.raises(MissingData, match=r"chunk \{3, 3, 3\}"):
        volume.check(volume.loader(), 0, 32)
    filled = Volume(tmp_path / "b", missing="fill")
    filled.break_chunk(Path.unlink)
    filled.values[12:16, 12:16, 12:16] = 0
    filled.check(filled.loader(), 0, 32)
    assert filled.source.filled > 0


def test_errors_that_pass_leave_no_trace(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chunks fail at their first decoding, at most two of those that one crop needs, which is tried four times."""
    decode, failed, guard = ChunkReader.decode, set[tuple[int, ...]](), threading.Lock()

    def fail_once(self: ChunkReader, chunk: tuple[int, ...], *given: Any) -> np.ndarray:
        z, y, x = chunk
        with guard:
            fails = (48 * z + 8 * y + x) % 23 == 0 and chunk not in failed
            failed.update([chunk] if fails else [])
        if fails:
            raise OSError(5, "Input/output error")
        return decode(self, chunk, *given)

    monkeypatch.setattr("vitrail.data.reading.pool.FIRST_WAIT", 0.001)
    monkeypatch.setattr(ChunkReader, "decode", fail_once)
    loader = volume.loader(workers=4)
    volume.check(loader, 0, 16)
    assert failed
    assert not loader.bad.total


def test_a_read_that_does_not_end_is_named(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(ChunkReader, "decode", lambda *given: go_on.wait())
    loader = volume.loader(policy=Policy(limit=0.2))
    try:
        with pytest.raises(SlowRead, match=r"voxels z \d+ to \d+"):
            next(loader.batches(0, 4))
    finally:
        go_on.set()


def test_whoever_stops_early_leaves_no_thread_behind(volume: Volume) -> None:
    loader = volume.loader(augmenter=Augmenter(Augment(), CROP, seed=0))
    batches = loader.batches(0, 10**6)
    next(batches)
    batches.close()
    assert not reading_threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_try_is_not_kept_waiting_by_reads_that_hang(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A read fails once, and all threads get stuck in the visit after it: both are told, and nobody waits for ever."""
    loader = volume.loader(workers=workers, policy=Policy(limit=1.0))
    first = set()
    for counter in range(REUSE * LANES):
        start = loader.sampler(counter).start
        window = tuple(slice(s, s + n) for s, n in zip(start, CROP, strict=True))
        first |= {part.chunk for part in parts((4, 4, 4), window)}
    decode, stop, failed = ChunkReader.decode, threading.Event(), []

    def fail_once(self: ChunkReader, index: Any, *rest: Any) -> Any:
        if tuple(index) not in first:
            stop.wait()
        if not failed:
            failed.append(index)
            raise OSError(5, "I/O error")
        return decode(self, index, *rest)

    monkeypatch.setattr(ChunkReader, "decode", fail_once)
    try:
        with pytest.raises(SlowRead, match="the read has not ended"):
            list(loader.batches(0, 3 * REUSE))
    finally:
        stop.set()
    assert failed


# ---------------------------------------------------------------- floats and labels


class Labelled(Volume):
    """A volume of a type, with labels of its voxels in an array of their own."""

    def __init__(self, path: Path, dtype: str, **options: Any):
        self.values = write(path / "image", (26, 24, 30), (4, 4, 4), dtype)
        self.labels = write(path / "labels", (26, 24, 30), (8, 4, 4), "uint16") % 7
        labels = zarr.open_array(str(path / "labels"), mode="a")
        labels[...] = self.labels
        self.path = path / "image"
        self.source = ZarrConfig(path=str(self.path), labels=str(path / "labels"), **options).open()

    def of(self, loader: Loader, counter: int) -> tuple[np.ndarray, np.ndarray]:
        start = loader.sampler(counter).start
        inside = tuple(slice(s, s + n) for s, n in zip(start, CROP, strict=True))
        return self.values[inside][None], self.labels[inside]


def labelled_loader(volume: Labelled, names: int = 7, ignore: int | None = None, **options: Any) -> Loader:
    labelling = Labelling("voxel", tuple(f"class {n}" for n in range(names)), ignore)
    made = volume.loader(**options)
    reader = Reader([volume.source], CROP, whole_blocks=True, cache_bytes=1 << 20, labelling=labelling, retries=0)
    return Loader(
        made.sampler,
        reader,
        made.counters,
        device=torch.device("cpu"),
        workers=2,
        prefetch=PREFETCH,
        policy=Policy(retries=0),
    )


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.data.reading.reader.MUCH_MORE", 0)
    monkeypatch.setattr(pool_module, "PATIENCE", 0.3)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.usefixtures("however_small")
def test_floats_and_labels_are_read_together(tmp_path: Path, dtype: str) -> None:
    """Each chunk of both arrays is decoded once a visit; what travels in another type of floats is read by itself."""
    volume = Labelled(tmp_path, dtype, label_map={3: 5, 5: 3})
    volume.labels = np.array([0, 1, 2, 5, 4, 3, 6], np.uint16)[volume.labels]
    loader = labelled_loader(volume)
    assert [len(steps) for steps in loader._visits(0, 8)] == [REUSE, REUSE]
    for batch in loader.batches(0, 8):
        assert batch.labels is not None
        for counter, values, labels in zip(batch.counters, batch.values, batch.labels, strict=True):
            image, classes = volume.of(loader, counter)
            np.testing.assert_array_equal(values.numpy(), image)
            np.testing.assert_array_equal(labels.numpy(), classes)
    entry = volume.source.entries[0]
    if dtype != "float64":
        visits = [range(0, REUSE), range(REUSE, 2 * REUSE)]
        assert entry.images[0].chunk_reader.decoded == sum(chunks_of(loader, steps) for steps in visits)
        assert entry.labels.chunk_reader.decoded == sum(chunks_of(loader, steps, (8, 4, 4)) for steps in visits)


@pytest.mark.parametrize("nodata", ["error", "fill"])
@pytest.mark.usefixtures("however_small")
def test_floats_that_are_no_numbers_spoil_only_the_crops_that_hold_them(tmp_path: Path, nodata: str) -> None:
    volume = Labelled(tmp_path, "float32", nodata=nodata, fill_value=-2.5)
    volume.values[13, 11, 14] = np.nan
    stored = zarr.open_array(str(volume.path), mode="a")
    stored[...] = volume.values
    loader = volume.loader()
    assert loader.reader.reads_together(0)

    def holds(counter: int) -> bool:
        start = loader.sampler(counter).start
        return all(s <= at < s + n for s, at, n in zip(start, (13, 11, 14), CROP, strict=True))

    bad = [counter for counter in range(40 * LANES) if holds(counter)]
    assert bad
    if nodata == "fill":
        volume.values[13, 11, 14] = -2.5
        volume.check(loader, 0, 40)
        return
    volume.check(loader, 0, min(bad) // LANES)
    with pytest.raises(BadData, match=r"holds nan at dim_0 = 13|holds nan at z = 13, y = 11, x = 14"):
        volume.check(loader, 0, 40)


@pytest.mark.parametrize("ignore", [None, 6])
@pytest.mark.usefixtures("however_small")
def test_labels_of_no_class_are_named_though_read_together(tmp_path: Path, ignore: int | None) -> None:
    loader = labelled_loader(Labelled(tmp_path, "uint8"), names=6, ignore=ignore)
    if ignore is None:
        with pytest.raises(BadData, match=r"label 6 at voxel \[\d+, \d+, \d+\] .*the 6 classes are 0"):
            list(loader.batches(0, 4))
    else:
        assert all((batch.labels == 6).any() for batch in loader.batches(0, 4))
    assert not reading_threads()


@pytest.mark.usefixtures("however_small")
def test_slabs_have_whole_labels(tmp_path: Path) -> None:
    volume = Labelled(tmp_path, "float32")
    codes = range(len(orientations(CROP)))
    whole = labelled_loader(volume, codes=codes)
    halves = [labelled_loader(volume, codes=codes) for _ in range(2)]
    for number, half in enumerate(halves):
        half.slab = Slab(Part(number, 2), CROP)
    for batch, *parted in zip(*(loader.batches(0, 8) for loader in (whole, *halves)), strict=True):
        assert torch.equal(torch.cat([part.values for part in parted], dim=2), batch.values)
        assert all(torch.equal(part.labels, batch.labels) for part in parted)
