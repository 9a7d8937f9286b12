"""Of the window that a turned crop is cut from, only what it touches is read; the sample is the same."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.augment import Augmenter
from vitrail.data.augment.geometry import Geometry, touched_by
from vitrail.data.chunks import decoded as chunks
from vitrail.data.chunks.decoded import spans_of
from vitrail.data.dataset import Dataset
from vitrail.data.reading.loader import Loader
from vitrail.data.sources.zarr import ZarrConfig
from vitrail.recipe.sections import Augment

AXES = ("z", "y", "x")
TURNS: dict[str, dict[str, Any]] = {
    "rotate": {"rotate": 180},
    "all": {"rotate": 180, "scale": [0.7, 1.4], "shear": 15, "flip": True, "elastic": {"amplitude": 3, "grid": 2}},
    "a little": {"rotate": 20, "scale": [0.5, 0.6]},
    "boxes": {"rotate": 90, "resized_crop": {"scale": [0.3, 1.0]}},
}


def read_by(move: Any, size: tuple[int, ...], crop: tuple[int, ...], step: int) -> np.ndarray:
    """Every voxel of the window that the sample is made of, [N, n], with the neighbours that weigh nothing."""
    places = np.stack(np.meshgrid(*[np.arange(c) for c in crop], indexing="ij"), axis=-1).reshape(-1, len(crop))
    at = places.astype(np.float64)
    if move.nodes is not None:  # no node is exceeded between nodes
        near = np.minimum(places // step, np.array(move.nodes.shape[1:]) - 1)
        at = at + np.stack([nodes[tuple(near.T)] for nodes in move.nodes], axis=1)
    at = at @ move.matrix.T + move.origin
    low = np.floor(at).astype(np.int64)
    corners = np.concatenate([low + np.array(corner) for corner in np.ndindex(*[2] * len(crop))])
    period = np.maximum(1, 2 * (np.array(size) - 1))
    corners = np.abs(corners) % period
    return np.minimum(corners, period - corners)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TURNS)),
    st.integers(2, 3),
    st.data(),
)
def test_nothing_that_is_read_is_left_out(name: str, ndim: int, data: st.DataObject) -> None:
    crop = tuple(data.draw(st.lists(st.integers(4, 40 if ndim == 2 else 14), min_size=ndim, max_size=ndim)))
    spacing = tuple(data.draw(st.lists(st.sampled_from([1.0, 2.5]), min_size=ndim, max_size=ndim)))
    shape = tuple(data.draw(st.integers(c, 4 * c)) for c in crop)  # some cut the window short: it is mirrored
    geometry = Geometry(Augment.model_validate(TURNS[name]), crop, AXES[-ndim:], seed=data.draw(st.integers(0, 99)))
    size = geometry.window(shape, spacing, (1.0,) * ndim)
    move = geometry.draw(data.draw(st.integers(0, 999)), size, spacing, (1.0,) * ndim, 0)
    grid = data.draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim))
    starts = data.draw(st.lists(st.integers(0, 20), min_size=ndim, max_size=ndim))
    spans = [spans_of(g, slice(a, a + s)) for g, a, s in zip(grid, starts, size, strict=True)]
    found = touched_by(move, size, crop, geometry.amplitude, spans)
    assert found.shape == tuple(len(span) for span in spans)
    voxels = read_by(move, size, crop, geometry.step)
    which = [np.searchsorted(span[:, 1], along) for span, along in zip(spans, voxels.T, strict=True)]
    assert found[tuple(which)].all()


def test_a_turned_cube_touches_little_of_the_box_around_all_its_turns() -> None:
    crop = (512,) * 3
    geometry = Geometry(Augment(rotate=180), crop, AXES, seed=0)
    size = geometry.window((2000,) * 3, (1.0,) * 3, (1.0,) * 3)
    shares = []
    for counter in range(4):
        spans = [spans_of(64, slice(0, s)) for s in size]
        touched = geometry.touched(counter, size, (1.0,) * 3, (1.0,) * 3, 0, spans)
        assert touched is not None
        shares.append(touched.mean())
    assert math.prod(size) > 5 * math.prod(crop)
    assert max(shares) < 0.4


def test_what_is_left_out_where_it_would_not_pay_or_is_needed() -> None:
    ones, spans = (1.0,) * 3, [spans_of(8, slice(0, 80))] * 3
    small = Augmenter(Augment(rotate=10), (32,) * 3, seed=0)
    assert small.touched(0, (36,) * 3, ones, ones, 0, spans) is None  # the crop is most of its window
    assert Augmenter(Augment(flip=True), (32,) * 3, seed=0).touched(0, (80,) * 3, ones, ones, 0, spans) is None
    spoilt = Augmenter(Augment.model_validate({"rotate": 180, "sections": {"missing": 0.1}}), (32,) * 3, seed=0)
    assert spoilt.touched(0, (80,) * 3, ones, ones, 0, spans) is None  # sections look at their neighbours


def test_spans_of_chunks() -> None:
    assert spans_of(8, slice(3, 20)).tolist() == [[0, 4], [5, 12], [13, 16]]
    assert spans_of(8, slice(8, 16)).tolist() == [[0, 7]]
    assert spans_of(8, slice(9, 12)).tolist() == [[0, 2]]


@pytest.mark.parametrize("axes", ["zyx", "czyx"])
def test_samples_are_those_of_whole_windows(axes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (*([2] if "c" in axes else []), 90, 90, 90)
    stored = zarr.create_array(
        tmp_path / "v.zarr", shape=shape, chunks=(*([1] if "c" in axes else []), 8, 8, 8), dtype="u1"
    )
    stored[...] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    crop = (24, 24, 24)
    augmenter = Augmenter(Augment(rotate=180, scale=(0.8, 1.2)), crop, seed=3)

    def batch() -> tuple[torch.Tensor, int]:
        """Values of a batch whose memory held other voxels before, and chunks that were decoded for it."""
        data = Dataset([ZarrConfig(path=str(tmp_path / "v.zarr"), axes=axes)], crop, where="data.train")
        sampler = data.sampler(seed=0, lanes=4, reuse=1, augmenter=augmenter)
        reader = data.reader(sampler, lanes=4, cache_bytes=2**20)
        loader = Loader(sampler, reader, device=torch.device("cpu"), workers=2, prefetch=1, augmenter=augmenter)
        monkeypatch.setattr(chunks, "shared", cache)
        monkeypatch.setattr("vitrail.data.sources.zarr.shared", cache)
        found = loader.load([0, 1, 2, 3]).values
        return found, sum(e.images[0].chunk_reader.decoded for source in data.sources for e in source.entries)

    cache = chunks.ChunkCache(limit=0)
    some, few = batch()
    monkeypatch.setattr(Geometry, "touched", lambda *_: None)
    whole, many = batch()
    assert torch.equal(some, whole)
    assert few < 0.6 * many
