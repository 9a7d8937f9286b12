"""Instances of affinities: in blocks as in memory, and the scores of two partitions by hand."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from predicting import UNETR, train_run
from support import environment, run, torchrun

import vitrail
from vitrail.data.generate import generate_em, write_ome_zarr
from vitrail.data.sources import guess_kind
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.infer import mutex
from vitrail.infer.engine import Wishes
from vitrail.infer.eyes import Form
from vitrail.infer.instances import Instances, compare
from vitrail.infer.mutex import Blocks
from vitrail.infer.outputs import choose_format
from vitrail.infer.overlaps import Overlaps
from vitrail.infer.places import Frame
from vitrail.objectives.affinities import name_of, pairs, usual_offsets
from vitrail.recipe import kinds

pytest.importorskip("mwatershed", reason="mwatershed is not installed: pip install mwatershed")

SHAPE = (20, 24, 28)
OFFSETS = usual_offsets(SHAPE)
FEW = OFFSETS[:6]


def tissue(shape: tuple[int, ...] = SHAPE, seed: int = 0, cells: int = 14) -> np.ndarray:
    """Cells about random points, with background where two are equally near: some reach through many blocks."""
    rng = np.random.default_rng(seed)
    points = rng.random((cells, len(shape))) * shape
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    distance = np.sort(np.linalg.norm(grid[..., None, :] - points, axis=-1) * [1.5, *[1] * (cells - 1)], axis=-1)
    labels = np.linalg.norm(grid[..., None, :] - points, axis=-1).argmin(axis=-1) + 1
    labels[distance[..., 1] - distance[..., 0] < 0.7] = 0
    return labels


def clean(labels: np.ndarray, offsets: Any = OFFSETS) -> np.ndarray:
    """Affinities in bytes, as a model that makes no mistakes says them."""
    found, _ = pairs(torch.from_numpy(labels)[None], tuple(offsets), 0, None)
    return np.where(found[0].numpy(), np.uint8(250), np.uint8(5))


def in_blocks(affinities: np.ndarray, blocks: Blocks, offsets: Any = OFFSETS, smallest: int = 1) -> np.ndarray:
    """What the stages of a prediction do, one after the other."""
    fragments = np.zeros(blocks.shape, np.uint64)
    for number, box in enumerate(blocks.boxes()):
        wide, inside = blocks.around(box)
        fragments[box] = mutex.fragments(affinities[(slice(None), *wide)], inside, offsets, 0.5, number)
    parts = []
    for box in blocks.boxes():
        wide, inside = blocks.around(box)
        parts.append(mutex.neighbours(affinities[(slice(None), *box)], fragments[wide], inside, offsets))
    names, sizes = np.unique(fragments[fragments > 0], return_counts=True)
    return mutex.renumbered(fragments, names, mutex.merged(names, sizes, mutex.together(parts), 0.5, smallest))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two partitions are the same but for their numbers; 0 is 0."""
    met = np.unique(np.stack([one.ravel(), other.ravel()]).astype(np.int64), axis=1)
    alike = (met[0] == 0) == (met[1] == 0)
    return bool(alike.all()) and all(len(np.unique(side)) == met.shape[1] for side in met)


@pytest.mark.parametrize("chunk", [(10, 6, 7), (8, 24, 4), (7, 9, 11)])
def test_blocks_are_put_together_to_what_one_block_gives(chunk: tuple[int, ...]) -> None:
    labels = tissue()
    affinities = clean(labels)
    whole = mutex.segment(affinities, OFFSETS, 0.5, 1)
    blocks = Blocks.of(SHAPE, chunk, OFFSETS, 0)
    assert blocks.side == chunk
    assert len(blocks.boxes()) > 6
    assert same(in_blocks(affinities, blocks), whole)
    assert whole.max() == 14
    told = mutex.segment(affinities, OFFSETS, 0.5, 700)
    assert same(in_blocks(affinities, blocks, smallest=700), told)
    assert 0 < told.max() < whole.max()
    kept = told > 0
    assert not ((labels == 0) & kept).any()
    assert len(np.unique(np.stack([labels[kept], told[kept]]), axis=1).T) == told.max()  # none runs together


def test_a_bend_through_many_blocks_is_one_instance() -> None:
    labels = np.zeros((16, 16, 16), np.int64)
    labels[1, 1, :] = labels[1, :, 14] = labels[:, 14, 14] = labels[14, 14, :] = 5
    labels[4, 3, :] = 6
    affinities = clean(labels)
    found = in_blocks(affinities, Blocks.of(labels.shape, (4, 4, 4), OFFSETS, 0))
    assert same(found, labels)
    assert same(mutex.segment(affinities, OFFSETS, 0.5, 1), labels)


def test_images_are_cut_alike() -> None:
    labels = tissue((40, 44), seed=3, cells=9)
    offsets = usual_offsets((40, 44))
    affinities = clean(labels, offsets)
    found = in_blocks(affinities, Blocks.of((40, 44), (16, 16), offsets, 0), offsets)
    assert same(found, mutex.segment(affinities, offsets, 0.5, 1))


def test_what_repels_within_a_block_is_not_joined_by_its_own_pairs() -> None:
    names = np.array([1, 2, 2**32 + 1], np.uint64)
    pairs_ = mutex.Pairs(names[[0, 0, 1]], names[[1, 2, 2]], np.array([200, 255, 0]), np.ones(3, np.int64))
    assert mutex.merged(names, np.ones(3, np.int64), pairs_, 0.5, 1).tolist() == [1, 2, 1]
    assert mutex.merged(names, np.array([5, 1, 5]), pairs_, 0.5, 2).tolist() == [1, 0, 1]
    assert mutex.merged(names, np.ones(3, np.int64), mutex.together([]), 0.5, 1).tolist() == [1, 2, 3]


def test_blocks_fit_into_memory() -> None:
    blocks = Blocks.of((1000, 1000, 1000), (64, 64, 64), usual_offsets((64, 64, 64)), 2 << 30)
    assert blocks.side == (64, 128, 192)
    assert blocks.reach == (9, 9, 9)
    assert 9 * mutex.BYTES * 82 * 146 * 210 < 2 << 30 < 9 * mutex.BYTES * 146 * 146 * 210
    assert Blocks.of((50, 70, 90), (64, 64, 64), OFFSETS, 2 << 30).side == (50, 70, 90)
    # Ranks are taken for dead that are silent for a minute, and the watershed lets no thread speak.
    wide = [n + 18 for n in Blocks.of((4000, 4000, 4000), (64, 64, 64), OFFSETS, 1 << 40).side]
    assert 2**24 < len(OFFSETS) * np.prod(wide) <= 2**25
    covered = np.zeros((50, 70, 90), int)
    for box in Blocks.of((50, 70, 90), (64, 64, 64), OFFSETS, 0).boxes():
        covered[box] += 1
    assert (covered == 1).all()


# ---------------------------------------------------------------- on the disk


def result_of(out: Path, labels: np.ndarray, *, chunk: int, memory: int, smallest: int = 1) -> Instances:
    """What a prediction writes to, of one volume."""
    form = Form("instances", "voxels", None, mutex.NUMBERS, len(FEW))
    names = tuple(name_of(offset) for offset in FEW)
    frame = Frame("a", labels.shape, ("z", "y", "x"), (8.0, 4.0, 4.0), "nanometer", None, None)
    return Instances(
        out,
        form,
        [frame],
        choose_format(out, "ome_zarr", form, 1),
        affinities=Form("affinities", "voxels", names, np.dtype(np.uint8), len(FEW)),
        offsets=FEW,
        wishes=Wishes(memory=memory, smallest=smallest),
        rows=-(-labels.shape[0] // chunk),
        chunk=chunk,
    )


def begin(result: Instances, affinities: np.ndarray) -> None:
    """Write the rows that are missing."""
    began, chunk = result.begin({"of": "a test"}), result.chunk
    assert chunk is not None
    result.open_log(began["attempt"], 0)
    for row in {*range(result.rows)} - {*began["done"]}:
        box = (slice(row * chunk, (row + 1) * chunk), slice(None), slice(None))
        result.write(row, 0, box, affinities[(slice(None), *box)])


@pytest.mark.parametrize("name", ["a.ome.zarr", "a.tif", "a.nii.gz"])
def test_what_is_written_is_what_memory_gives(tmp_path: Path, name: str) -> None:
    labels = tissue((16, 16, 20))
    affinities = clean(labels, FEW)
    result = result_of(tmp_path / name, labels, chunk=8, memory=2**19, smallest=200)
    assert len(result.blocks[0].boxes()) > 4
    begin(result, affinities)
    for calls in result.stages():
        for call in reversed(calls):  # in any order
            call(lambda: None)
    result.publish()
    result.close()
    kind = guess_kind(str(tmp_path / name))
    found = kinds.find("source", kind)(path=str(tmp_path / name)).open()  # type: ignore[call-arg]
    assert found.dtype == np.uint32
    whole = found.read(0, tuple(slice(0, n) for n in found.items[0].shape))[0]
    assert same(whole, mutex.segment(affinities, FEW, 0.5, 200))
    assert whole.max() == len(np.unique(whole)) - 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_kill_costs_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = tissue((16, 16, 20))
    affinities = clean(labels, FEW)
    options: dict[str, Any] = {"chunk": 8, "memory": 2**19}
    first = result_of(tmp_path / "a.zarr", labels, **options)
    begin(first, affinities)
    cut = first.stages()[0]
    for call in cut[:3]:
        call(lambda: None)
    first.close()
    made = []
    plain = mutex.fragments
    monkeypatch.setattr(mutex, "fragments", lambda *given: made.append(1) or plain(*given))
    again = result_of(tmp_path / "a.zarr", labels, **options)
    begin(again, affinities)
    for calls in again.stages():
        for call in calls:
            call(lambda: None)
    again.publish()
    again.close()
    assert len(made) == len(cut) - 3  # and all ranks have one list of them
    found = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")["s0"][:]  # type: ignore[index]
    assert same(np.asarray(found), mutex.segment(affinities, FEW, 0.5, 1))


CHILD = """
import re, resource, sys
import numpy as np
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/unit"]
import test_instances as tests
from pathlib import Path
from vitrail.infer import mutex
folder, limit = Path(sys.argv[2]), int(sys.argv[3])
affinities = np.load(folder / "affinities.npy", mmap_mode="r")
result = tests.result_of(folder / "a.zarr", affinities[0], chunk=16, memory=limit // 4)
tests.begin(result, affinities)
small = np.ascontiguousarray(affinities[:, :16, :16, :16])
mutex.segment(small, tests.FEW, 0.5, 1)  # what libraries take is not what is measured
stages = result.stages()
data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))
for calls in stages:
    for call in calls:
        call(lambda: None)
result.publish()
result.close()
print("blocks", len(result.blocks[0].boxes()))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_volume(tmp_path: Path) -> None:
    """The watershed of this volume in one piece takes eight times what the process may have more."""
    shape, limit = (64, 96, 112), 28 << 20
    assert np.prod(shape) * len(FEW) * 60 > 8 * limit  # bytes that it takes for each affinity, and more
    labels = tissue((16, 24, 28)).repeat(4, axis=0).repeat(4, axis=1).repeat(4, axis=2)
    affinities = clean(labels, FEW)
    np.save(tmp_path / "affinities.npy", affinities)
    tests = Path(__file__).parents[1]
    words = [sys.executable, "-c", CHILD, str(tests), str(tmp_path), str(limit)]
    code, output = run(*words, env=environment(MALLOC_ARENA_MAX="1"), cwd=tmp_path)
    assert code == 0, output
    assert int(output.split()[-1]) > 20
    found = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")["s0"][:]  # type: ignore[index]
    assert same(np.asarray(found), mutex.segment(affinities, FEW, 0.5, 1))


# ---------------------------------------------------------------- from training to scores


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("instances")
    write_ome_zarr(place / "em.zarr", generate_em((24, 28, 40), seed=0, cells=True), levels=1, chunk=16)
    entry = [{"path": str(place / "em.zarr"), "labels": "cells"}]
    options: dict[str, Any] = {"model": UNETR, "objective": {"kind": "affinities"}}
    train_run(place, place / "em.zarr", "run", data__train=entry, data__valid=entry, **options)
    return place


def test_instances_are_those_of_the_affinities_that_are_written(place: Path, tmp_path: Path) -> None:
    run_dir, volume = place / "run", place / "em.zarr"
    vitrail.predict(run_dir, volume, out=tmp_path / "affinities.zarr", write="affinities", dtype="uint8")
    store = zarr.open_group(str(tmp_path / "affinities.zarr"), mode="r")
    affinities = np.asarray(store["s0"])
    assert affinities.shape == (6, 24, 28, 40)
    told = [channel["label"] for channel in store.attrs["ome"]["omero"]["channels"]]  # type: ignore[index,call-overload]
    assert told == ["z-1", "y-1", "x-1", "z-3", "y-3", "x-3"]
    offsets = usual_offsets((16, 16, 16))
    expected = mutex.segment(affinities, offsets, 0.5, 4)
    picture = tmp_path / "p.png"
    options: dict[str, Any] = {"write": "instances", "smallest": 4}
    made = vitrail.predict(run_dir, volume, out=tmp_path / "i.zarr", truth="cells", picture=picture, **options)
    found = np.asarray(zarr.open_group(str(tmp_path / "i.zarr"), mode="r")["s0"])
    np.testing.assert_array_equal(found, expected)
    assert picture.exists()
    truth = (
        OmeZarrConfig(path=str(volume), labels="cells").open().read_labels(0, tuple(slice(0, n) for n in found.shape))
    )
    assert made["scores"] == pytest.approx(scores_of(truth, found), nan_ok=True)
    values = OmeZarrConfig(path=str(volume)).open().read(0, tuple(slice(0, n) for n in found.shape))
    model = vitrail.load(run_dir)
    np.testing.assert_array_equal(model.predict(values, write="instances", smallest=4), expected)
    np.testing.assert_array_equal(model.predict(values, write="affinities", dtype="uint8"), affinities)


@pytest.mark.slow
def test_ranks_write_the_same(place: Path, tmp_path: Path) -> None:
    volume, out = place / "em.zarr", {ranks: tmp_path / f"{ranks}.zarr" for ranks in (1, 3)}
    options: dict[str, Any] = {"write": "instances", "chunk": 16, "memory": 0.002}
    one = vitrail.predict(place / "run", volume, out=out[1], truth="cells", **options)
    words: list[Any] = [
        "-m",
        "vitrail",
        "predict",
        place / "run",
        volume,
        "--out",
        out[3],
        "--truth",
        "cells",
        "--json",
    ]
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    code, output = run(*torchrun(3, *words, *given))
    assert code == 0, output
    made = json.loads(output[output.index("{") : output.rindex("}") + 1])
    assert made["scores"] == pytest.approx(one["scores"], nan_ok=True)
    stores = [zarr.open_group(str(path), mode="r") for path in out.values()]
    assert sorted(stores[0]) == sorted(stores[1])
    for level in stores[0]:
        np.testing.assert_array_equal(*(np.asarray(store[level]) for store in stores))


def test_what_lies_beyond_a_small_volume_joins_nothing(place: Path, tmp_path: Path) -> None:
    """Items that are smaller than a crop are padded for the model: instances are made of their own voxels alone."""
    shape = (10, 12, 16)
    values = OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, tuple(slice(0, n) for n in shape))[0]
    np.save(tmp_path / "small.npy", values)
    options: dict[str, Any] = {"write": "instances", "smallest": 4}
    vitrail.predict(place / "run", tmp_path / "small.npy", out=tmp_path / "out.npy", **options)
    expected = np.load(tmp_path / "out.npy")
    model = vitrail.load(place / "run")
    np.testing.assert_array_equal(model.predict(values, **options), expected)
    affinities = model.predict(values, write="affinities", dtype="uint8")
    np.testing.assert_array_equal(mutex.segment(affinities, usual_offsets((16, 16, 16)), 0.5, 4), expected)


def test_many_volumes_become_many_files(place: Path, tmp_path: Path) -> None:
    values = OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, tuple(slice(0, n) for n in (24, 28, 40)))[0]
    (tmp_path / "in").mkdir()
    for number, part in enumerate((values, values[:, :, :24])):
        np.save(tmp_path / "in" / f"{number}.npy", part)
    options: dict[str, Any] = {"write": "instances", "chunk": 16}
    vitrail.predict(place / "run", tmp_path / "in", out=tmp_path / "out", **options)
    found = [np.load(tmp_path / "out" / f"{number}.npy") for number in range(2)]
    assert [each.shape for each in found] == [(24, 28, 40), (24, 28, 24)]
    assert all(each.dtype == np.uint32 and each.max() > 1 for each in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flips": "x"}, "flips"),
        ({"dtype": "uint8"}, "leave it out of instances"),
        ({"threshold": 1.0}, "between 0 and 1"),
        ({"smallest": 0}, "at least 1 voxel"),
        ({"truth": "nowhere"}, "nowhere"),
        ({"truth": "cells", "write": "affinities"}, "add --write instances"),
        ({"write": "affinities", "picture": "p.png"}, "ask for instances"),
    ],
)
def test_mistakes_are_sentences(place: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        vitrail.predict(place / "run", place / "em.zarr", out=tmp_path / "a.zarr", **({"write": "instances"} | options))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- scores


def scores_of(truth: Any, found: Any, **options: Any) -> dict[str, float]:
    overlaps = Overlaps()
    overlaps.add(np.asarray(truth), np.asarray(found), **options)
    return overlaps.scores()


def test_scores_by_hand() -> None:
    truth = [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]
    perfect = {"vi_split": 0, "vi_merge": 0, "adapted_rand_error": 0, "f1_50": 1, "f1_75": 1}
    assert scores_of(truth, [7, 7, 7, 7, 3, 3, 3, 3, 0, 0]) == perfect
    merged = scores_of(truth, [1] * 8 + [0, 0])
    assert merged["vi_merge"] == pytest.approx(1)
    assert merged["vi_split"] == 0
    # in both 2 * 12 pairs; found are 56, true 24
    assert merged["adapted_rand_error"] == pytest.approx(1 - 2 * 24 / (56 + 24))
    assert (merged["f1_50"], merged["f1_75"]) == (pytest.approx(2 / 3), 0)  # half of the union is just enough, once
    split = scores_of(truth, [1, 1, 3, 3, 2, 2, 2, 4, 0, 0])
    assert split["vi_split"] == pytest.approx((1 + 0.8112781244591328) / 2)
    assert split["vi_merge"] == 0
    assert split["adapted_rand_error"] == pytest.approx(1 - 2 * (2 + 2 + 6) / (10 + 24))
    assert split["f1_50"] == pytest.approx(2 * 2 / 6)
    assert split["f1_75"] == pytest.approx(2 * 1 / 6)


def test_background_and_what_nobody_has_looked_at() -> None:
    truth, found = [0, 0, 0, 1, 1, 1, 9, 9], [4, 4, 4, 1, 1, 1, 1, 1]
    told = scores_of(truth, found, ignore=9)
    assert (told["vi_split"], told["vi_merge"], told["adapted_rand_error"]) == (0, 0, 0)
    assert told["f1_50"] == pytest.approx(2 / 3)  # one is nowhere
    alone = scores_of([1, 1, 1, 1], [1, 1, 0, 0])
    assert alone["adapted_rand_error"] == pytest.approx(1 - 2 * 2 / (2 + 12))
    assert np.isnan(scores_of([0, 0], [1, 1])["vi_split"])


def test_background_may_be_any_label() -> None:
    plain, found = np.array([0, 0, 0, 1, 1, 1, 2, 2]), np.array([0, 5, 5, 1, 1, 2, 2, 2])
    expected = scores_of(plain, found)
    for nobody in (7, -1):
        truth = np.where(plain == 0, nobody, np.where(plain == 1, 0, plain))  # an instance has the number 0
        assert scores_of(truth, found, background=nobody) == pytest.approx(expected)
    assert scores_of(plain, found, background=None) == pytest.approx(scores_of(plain + 1, found))
    last = 2**64 - 1  # as CREMI has it, in 64 bits without a sign; training reads it as -1
    truth = np.where(plain == 0, last, plain.astype(np.uint64)).astype(np.uint64)
    for same_label in (last, -1):
        assert scores_of(truth, found, background=same_label) == pytest.approx(expected)
        looked_at = scores_of(plain[3:], found[3:])
        assert scores_of(truth, found, ignore=same_label, background=None) == pytest.approx(looked_at)


def test_a_few_slices_in_a_plain_array_are_slices(place: Path, tmp_path: Path) -> None:
    truth = OmeZarrConfig(path=str(place / "em.zarr"), labels="cells", region={"z": (0, 3)}).open()
    cells = truth.read_labels(0, tuple(slice(0, n) for n in truth.items[0].shape))
    np.save(tmp_path / "found.npy", cells.astype(np.uint32))  # which alone is taken for three channels
    scores = compare(truth, [tmp_path / "found.npy"], None, 0, lambda: None)
    assert (scores["f1_75"], scores["adapted_rand_error"]) == (1, 0)


def test_tables_add_up_box_by_box() -> None:
    truth, found = tissue(seed=1), tissue(seed=2)
    overlaps = Overlaps()
    for start in itertools.product(*(range(0, n, 7) for n in SHAPE)):
        box = tuple(slice(s, s + 7) for s in start)
        overlaps.add(truth[box], found[box])
    assert len(overlaps.parts) < 20
    assert overlaps.scores() == pytest.approx(scores_of(truth, found))


def test_scores_are_those_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    truth, found = tissue(seed=1), tissue(seed=2) + 1
    told = scores_of(truth, found)
    split, merge = metrics.variation_of_information(truth, found, ignore_labels=(0,))
    assert (told["vi_split"], told["vi_merge"]) == (pytest.approx(split), pytest.approx(merge))
    assert told["adapted_rand_error"] == pytest.approx(metrics.adapted_rand_error(truth, found)[0])
