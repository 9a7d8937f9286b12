"""Scores of whole images and volumes from tiles: against all tiles put together in memory, on any number of ranks."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_loader import ArraySource
from test_training_parts import FlowOf
from torch import nn

from vitrail.data.batch import Batch, Labelling, Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.order.tiles import tile_starts
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy
from vitrail.errors import BadData
from vitrail.objectives.segment import Segment, SegmentConfig, Targets, confusion
from vitrail.parallel.mesh import Layout
from vitrail.recipe.sections import Fit, Tiles
from vitrail.training import evaluate, stitch, tally

NAMES = ("none", "one", "two")
LABELLING = Labelling("voxel", NAMES)


class LabelledArrays(ArraySource):
    """Arrays whose labels follow from their values."""

    label_dtype, label_names = np.dtype(np.uint8), dict(enumerate(NAMES))

    def __init__(self, *shapes: tuple[int, ...], scale: float = 1.0):
        generator = np.random.default_rng(0)
        super().__init__(*(generator.integers(0, 99, (1, *shape)).astype(np.float32) for shape in shapes))
        self.items = [replace(item, scale=(scale,) * len(item.shape)) for item in self.items]

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        return (self.arrays[item][(0, *region)] % 3).astype(np.uint8)


class Given(Segment):
    """Segmentation of what a function of values and places in the tile says."""

    def prepare(self, batch: Batch, draws: Any, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        assert batch.labels is not None
        return {"x": batch.values}, Targets(batch.labels.long(), tokens=None)  # type: ignore[arg-type]


def disagreeing(values: torch.Tensor) -> torch.Tensor:
    """[B, 1, *S] to logits [B, 3, *S] that differ with the place in the tile."""
    places = torch.arange(values[0, 0].numel(), dtype=torch.float32).view(values.shape[2:])
    return torch.cat([torch.cos(values * (k + 1) + places * 0.37) for k in range(3)], dim=1)


def evaluator_of(
    source: Any,
    crop: tuple[int, ...],
    *,
    samples: int = 10**4,
    blend: Any = "gaussian",
    fit: Fit | None = None,
    **tiles: Any,
) -> evaluate.Evaluator:
    dataset = Dataset([source], crop, where="data.valid", labels="voxel")
    dataset.tiled = lambda tiles: None  # type: ignore[assignment,return-value]  # arrays are no config classes
    dataset.settings = dataset.settings.model_copy(update={"tiles": Tiles(**tiles), "mix": "size", "fit": fit})
    sampler = dataset.sampler(seed=5, lanes=1, reuse=1)
    reader = dataset.reader(sampler, lanes=1, cache_bytes=0, labelling=LABELLING)
    loader = Loader(sampler, reader, device=torch.device("cpu"), workers=0, prefetch=1)
    model: Any = SimpleNamespace(output="pixels", classes=3)
    objective = Given(SegmentConfig(names=NAMES), model, Statistics((0.0,), (1.0,)))
    return evaluate.Evaluator(objective, loader, seed=0, samples=samples, batch=3, blend=blend)


def scores(evaluator: evaluate.Evaluator, world: int = 1, say: Any = disagreeing) -> dict[str, float]:
    """What ranks measure, one after another; each runs as many forwards as any other."""
    tables: list[torch.Tensor] = []
    calls: set[int] = set()
    model = nn.Identity()
    model.forward = lambda x: say(x)  # type: ignore[method-assign]
    summarise = evaluator.objective.summarise
    found: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        group = SimpleNamespace(all_reduce=lambda t: tables.append(t.clone()), get_world_size=lambda: world)
        patch.setattr(evaluate, "dist", group)
        patch.setattr(tally, "dist", SimpleNamespace(all_reduce=lambda t: None))
        patch.setattr(evaluator.objective, "summarise", lambda sums: dict.fromkeys(sorted(sums)))
        for rank in range(world):
            ticks: list[int] = []
            flow: Any = FlowOf(model, data_rank=rank, layout=Layout(world, 1, reshard=False))
            found = evaluator.metrics(flow, tick=lambda ticks=ticks: ticks.append(1))
            calls.add(len(ticks))
    assert len(calls) == 1
    sums = dict(zip(found, torch.stack(tables).sum(dim=0).tolist(), strict=True))
    return summarise(sums) | {"voxels": sums["voxels"], "samples": sums["samples"]}


def plain(source: LabelledArrays, crop: tuple[int, ...], overlap: float, *, gaussian: bool) -> dict[str, float]:
    """All tiles of each item added up in memory, and every voxel counted once."""
    table = torch.zeros(3, 3, dtype=torch.float64)
    weight = torch.ones(crop, dtype=torch.float64)
    for axis, size in enumerate(crop if gaussian else ()):
        bell = np.exp(-((np.arange(size) - (size - 1) / 2) ** 2) / (2 * (size / 8) ** 2))
        weight *= torch.from_numpy(bell).view([-1 if a == axis else 1 for a in range(len(crop))])
    weight = weight.clamp(min=1e-3)
    for number, values in enumerate(source.arrays):
        shape = values.shape[1:]
        total = torch.zeros(3, *shape, dtype=torch.float64)
        for start in itertools.product(
            *[tile_starts(s, c, overlap).tolist() for s, c in zip(shape, crop, strict=True)]
        ):
            inside = tuple(slice(s, s + c) for s, c in zip(start, crop, strict=True))
            tile = torch.from_numpy(values[(slice(None), *inside)])[None]
            total[(slice(None), *inside)] += disagreeing(tile)[0].double() * weight
        labels = torch.from_numpy(source.read_labels(number, tuple(slice(0, s) for s in shape)))
        table += confusion(total.argmax(dim=0), labels.long(), 3)
    dice = [2 * float(table[k, k] / (table[k].sum() + table[:, k].sum())) for k in range(3)]
    return {
        "accuracy": float(table.diagonal().sum() / table.sum()),
        "mean_dice": (dice[1] + dice[2]) / 2,
        "voxels": float(table.sum()),
    }


CASES: list[Any] = [
    ([(20, 13), (8, 8), (9, 30)], (8, 8), 0.5, "gaussian"),
    ([(20, 13), (8, 8), (9, 30)], (8, 8), 0.0, "gaussian"),  # tiles at the far edges alone overlap
    ([(11, 14, 9)], (6, 6, 6), 0.25, "gaussian"),
    ([(11, 14, 9), (6, 7, 8)], (6, 6, 6), 0.7, "constant"),
]


@pytest.mark.parametrize(("shapes", "crop", "overlap", "blend"), CASES)
def test_scores_are_those_of_whole_items_on_any_number_of_ranks(
    shapes: list[tuple[int, ...]], crop: tuple[int, ...], overlap: float, blend: str
) -> None:
    source = LabelledArrays(*shapes)
    expected = plain(source, crop, overlap, gaussian=blend == "gaussian")
    assert expected["voxels"] == sum(np.prod(shape) for shape in shapes)
    number = 0
    for world in (1, 2, 3, 7, 40):
        evaluator = evaluator_of(source, crop, overlap=overlap, blend=blend)
        found = scores(evaluator, world)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12), world
        assert found["samples"] == evaluator.samples  # each tile once in the loss
        number = number or found["loss"]
        assert found["loss"] == pytest.approx(number)


def test_tiles_that_do_not_overlap_are_scored_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LabelledArrays((16, 24), (8, 17))
    found = scores(evaluator_of(source, (8, 8), edges=False), 2)
    monkeypatch.setattr(evaluate, "plan_tiles", lambda *_: None)
    assert found == scores(evaluator_of(source, (8, 8), edges=False), 2)
    assert found["voxels"] == 64 * 8
    overlapping = scores(evaluator_of(source, (8, 8), overlap=0.5), 2)
    assert overlapping["voxels"] > 16 * 24 + 8 * 17  # as it was: voxels count as often as tiles cover them


def test_fitted_images_are_scored_in_the_voxels_of_their_samples() -> None:
    """What lies outside of the centre that is taken is not seen, and not scored."""
    assert scores(evaluator_of(LabelledArrays((16, 20), (40, 24)), (8, 8), fit=Fit(resize=10)))["voxels"] == 2 * 64


def test_some_of_the_tiles_are_scored_where_they_lie() -> None:
    source = LabelledArrays((16, 16), (16, 16))
    one, several = (scores(evaluator_of(source, (8, 8), overlap=0.5, samples=7), world) for world in (1, 3))
    assert one == pytest.approx(several)
    assert (one["samples"], one["voxels"] < 2 * 256) == (7, True)
    note = evaluator_of(source, (8, 8), overlap=0.5, samples=7).note
    assert note is not None
    assert "7 of 18 held-out tiles" in note
    assert "eval.samples: 18" in note
    assert evaluator_of(source, (8, 8), overlap=0.5, samples=18).note is None
    assert evaluator_of(source, (8, 8), samples=7).note is None
    note = "eval.samples: 19, but there are 18 held-out tiles: all are measured"
    assert evaluator_of(source, (8, 8), overlap=0.5, samples=19).note == note


def test_memory_does_not_grow_with_the_length_of_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]

    class Watched(stitch.Stitch):
        def add(self, *given: Any) -> Any:
            yield from super().add(*given)
            most.append(sum(total.numel() for total, *_ in self.open.values() if total is not None))

    monkeypatch.setattr(evaluate, "Stitch", Watched)
    largest = []
    for length in (24, 96):
        most.clear()
        evaluator = evaluator_of(LabelledArrays((8, length, 12)), (8, 8, 8), overlap=0.5)
        assert scores(evaluator)["voxels"] == 8 * length * 12
        largest.append(max(most))
        assert most[-1] == 0
    assert largest[0] == largest[1] <= 3 * 8 * 8 * 12


def test_samples_at_another_voxel_size_are_scored_in_the_voxels_of_the_items() -> None:
    """Values are a ramp, of which interpolation loses nothing; labels follow from them."""
    source = LabelledArrays((20, 33), scale=1.5)
    source.arrays = (np.broadcast_to(np.arange(33, dtype=np.float32), (1, 20, 33)).copy(),)
    source.read_labels = lambda item, region: (source.arrays[0][(0, *region)] > 15.5).astype(np.uint8)  # type: ignore[method-assign]

    def say(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([15.5 - values, values - 15.5, values - 1e3], dim=1)

    found = scores(evaluator_of(source, (8, 8), overlap=0.5), 2, say)
    assert found["voxels"] == 20 * 33
    assert found["accuracy"] == 1
    alone = scores(evaluator_of(source, (8, 8), edges=False), 2, say)  # windows of 12, none of which overlap
    assert (alone["voxels"], alone["accuracy"]) == (12 * 24, 1)


def test_a_tile_that_cannot_be_read_leaves_its_voxels_to_the_others() -> None:
    source = LabelledArrays((16, 16))
    evaluator = evaluator_of(source, (8, 8), overlap=0.5)
    evaluator.loader.obey(Policy(on_bad="skip", most=100))
    read = source.read

    def broken(item: int, region: tuple[slice, ...]) -> np.ndarray:
        if region[0].start == 0 and region[1].start == 0:
            raise BadData("no such place")
        return read(item, region)

    source.read = broken  # type: ignore[method-assign]
    for world in (1, 2):
        assert scores(evaluator, world)["voxels"] == 16 * 16 - 4 * 4  # the corner that no other tile covers


def test_blending_is_a_bell_that_never_vanishes() -> None:
    weights = stitch.blend_weights((16, 32), "gaussian")
    assert weights.shape == (16, 32)
    assert weights.min() == pytest.approx(1e-3)
    assert weights[8, 16] == weights.max() == pytest.approx(0.98, abs=0.02)
    assert torch.equal(weights, weights.flip(0, 1))
    assert stitch.blend_weights((3,), "constant").tolist() == [1, 1, 1]


def test_slices_of_volumes_are_put_together_each_for_itself() -> None:
    source, flat = LabelledArrays((3, 20, 13)), LabelledArrays((20, 13))
    source.items = [replace(item, slices=0, chunk=(1, 8, 8)) for item in source.items]
    flat.arrays = tuple(source.arrays[0][:, z] for z in range(3))
    expected = plain(flat, (8, 8), 0.5, gaussian=True)
    found = scores(evaluator_of(source, (8, 8), overlap=0.5), 2)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize("overlap", [0.25, 0.5])
def test_whole_volumes_score_as_with_sliding_windows(blend: Any, overlap: float) -> None:
    inferers = pytest.importorskip("monai.inferers", reason="MONAI is not installed: pip install monai")
    source = LabelledArrays((14, 20, 9))
    values = torch.from_numpy(source.arrays[0])[None]
    whole = inferers.sliding_window_inference(values, (8, 8, 8), 2, disagreeing, overlap, mode=blend)[0].argmax(dim=0)
    labels = torch.from_numpy(source.read_labels(0, (slice(None),) * 3))
    found = scores(evaluator_of(source, (8, 8, 8), overlap=overlap, blend=blend))
    assert found["accuracy"] == pytest.approx(float((whole == labels).double().mean()), abs=1e-12)
    for number, name in enumerate(("none", "one", "two")):
        mine, true = whole == number, labels == number
        dice = 2 * float((mine & true).sum()) / float(mine.sum() + true.sum())
        assert found[f"dice_{name}"] == pytest.approx(dice, abs=1e-12)
