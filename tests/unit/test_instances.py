"""Instances of affinities: in blocks as in memory, and the scores of two partitions by hand."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mwatershed", reason="mwatershed is not installed: pip install mwatershed")

from vitrail.infer import mutex
from vitrail.infer.mutex import Blocks
from vitrail.infer.overlaps import Overlaps
from vitrail.objectives.affinities import pairs, usual_offsets

SHAPE = (20, 24, 28)
OFFSETS = usual_offsets(SHAPE)


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
    covered = np.zeros((50, 70, 90), int)
    for box in Blocks.of((50, 70, 90), (64, 64, 64), OFFSETS, 0).boxes():
        covered[box] += 1
    assert (covered == 1).all()


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
