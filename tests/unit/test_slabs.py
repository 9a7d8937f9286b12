"""Parts of samples: put together they are the whole, whether whole crops or just slabs of them are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.data.augment import orient, orientations, window
from vitrail.data.batch import Batch, Labelling, Statistics
from vitrail.data.order.sampler import Extent, Sampler
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.reader import Reader
from vitrail.data.source import Item
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.patches import WHOLE, Part, Slab, cut, join, real_rows
from vitrail.layers.tokens import TOKENS, AdaptiveTokens, gather_tokens, tokenize
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import BlockMask, DecoderConfig, MAEConfig, RandomMask, StratifiedMask
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import ViTConfig
from vitrail.objectives.classify import ClassifyConfig
from vitrail.objectives.objective import Objective
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.objectives.segment import SegmentConfig
from vitrail.parallel.split import Lists, Split, Whole, count_owners

TWO = Statistics((3.0, 5.0), (2.0, 4.0))
TOKEN_INPUTS = ("x", "coordinates", "sizes", "valid")
QUERY_INPUTS = ("queries", "query_sizes", "query_valid")


def parts_of(count: int) -> list[Part]:
    return [Part(index, count) for index in range(count)]


# ---------------------------------------------------------------- cutting


@pytest.mark.parametrize("number", [0, 1, 5, 12])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_parts_join_to_the_whole(number: int, groups: int, count: int) -> None:
    x = torch.arange(2 * groups * number * 2).reshape(2, groups * number, 2)
    cuts = [cut(x, part, groups=groups) for part in parts_of(count)]
    assert len({c.shape for c in cuts}) == 1
    assert torch.equal(join(cuts, groups * number, groups=groups), x)
    for part, piece in zip(parts_of(count), cuts, strict=True):
        real = real_rows(groups * number, part, groups=groups)
        assert (real is None) == (number % count == 0)
        if real is not None:
            assert real.shape == piece.shape[1:2]
            last = x.unflatten(1, (groups, number))[:, :, -1:]
            copies = piece.unflatten(1, (groups, -1))[:, :, ~real.unflatten(0, (groups, -1))[0]]
            assert torch.equal(copies, last.expand_as(copies))
    if number % count:
        total = sum(int(real_rows(groups * number, part, groups=groups).sum()) for part in parts_of(count))  # type: ignore[union-attr]
        assert total == groups * number


# ---------------------------------------------------------------- objectives


class Simulated(Split):
    """One of several ranks that are all in this process."""

    def __init__(self, model: Any, part: Part, values: list[Tensor]):
        super().__init__(model, part)
        self.values, self.moved = values, 0

    def fetch(self, values: Tensor, index_by_part: Sequence[Tensor]) -> Tensor:
        assert torch.equal(values, self.values[self.part.index])
        assert len(index_by_part) == self.part.count
        counts = count_owners(index_by_part, values.shape[1])
        self.moved += sum(n for i, row in enumerate(counts) for j, n in enumerate(row) if i != j)
        return gather_tokens(torch.cat(self.values, dim=1), index_by_part[self.part.index])


def encoder(aggregate: str | None = None, **changes: Any) -> EncoderConfig:
    variables = None if aggregate is None else VariablesConfig(known=("a", "b", "c"), aggregate=aggregate)  # type: ignore[arg-type]
    return EncoderConfig(**({"width": 16, "depth": 1, "heads": 2, "patch": 4, "variables": variables} | changes))


SPARSE = AdaptiveTokens(length=22, fill=False)


def mae(on: str = "all", target: str = "raw", decode_ratio: float = 1.0, mask: Any = None, **of: Any) -> Objective:
    decoder = DecoderConfig(kind="cross", width=16, depth=1, heads=2, decode_ratio=decode_ratio)
    channels = None if "aggregate" in of else 2
    config = MAEConfig(
        encoder=encoder(**of), decoder=decoder, mask=mask or RandomMask(ratio=0.7), channels=channels, shape=(48, 16)
    )
    return ReconstructConfig(on=on, target=target).build(config, TWO)  # type: ignore[arg-type]


def vit(**of: Any) -> Objective:
    settings = {"channels": None if "variables" in of else 2, "classes": 3, "shape": (48, 16), "head_dropout": 0.5}
    return ClassifyConfig().build(ViTConfig(**({"width": 16, "depth": 1, "heads": 2, "patch": 4} | settings | of)), TWO)


def sap(**of: Any) -> Objective:
    channels = None if "aggregate" in of else 2
    config = SAPConfig(encoder=encoder(**of), channels=channels, classes=3, features=4, shape=(48, 16))
    return SegmentConfig().build(config, TWO)


def unetr() -> Objective:
    config = UNETRConfig(encoder=encoder(depth=4), channels=2, classes=3, shape=(48, 16))
    return SegmentConfig().build(config, TWO)


OBJECTIVES: dict[str, Objective] = {
    "mae": mae(),
    "mae hidden": mae(on="hidden"),
    "mae patch": mae(target="patch", decode_ratio=0.6),
    "mae block": mae(mask=BlockMask(ratio=0.6, block=2)),
    "mae stratified": mae(mask=StratifiedMask(ratio=0.7, slabs=12), decode_ratio=0.7),
    "mae adaptive": mae(tokens=SPARSE),
    "mae adaptive hidden": mae(on="hidden", tokens=SPARSE, decode_ratio=0.5),
    "mae query": mae(aggregate="query"),
    "mae separate": mae(aggregate="none"),
    "mae separate part": mae(aggregate="none", decode_ratio=0.4, target="patch"),
    "mae separate adaptive": mae(aggregate="none", tokens=SPARSE),
    "vit": vit(),
    "vit separate": vit(variables=VariablesConfig(known=("a", "b"), aggregate="none")),
    "vit learned": vit(positions="learned"),
    "vit adaptive": vit(tokens=SPARSE),
    "sap": sap(),
    "sap adaptive": sap(tokens=SPARSE),
    "sap separate": sap(aggregate="none"),
    "unetr": unetr(),
}


def make_batch(objective: Objective) -> Batch:
    """Two samples of whole numbers with edges, so that trees have something to follow."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 256, (2, 2, 48, 16), dtype=np.uint8))
    values[:, :, 20:] = 9  # even: no leaves are spent here
    labels = None
    if isinstance(getattr(objective, "config", None), ClassifyConfig):
        labels = torch.tensor([0, 2])
    elif isinstance(getattr(objective, "config", None), SegmentConfig):
        labels = torch.from_numpy(rng.integers(0, 3, (2, 48, 16)))
    return Batch([4, 7], values, labels, ("a", "b"))


def separate_of(objective: Any) -> int:
    whole = getattr(objective.model, "encoder", objective.model)
    return 2 if whole.variables is not None and whole.separate else 1


def check_join(whole: Tensor, pieces: list[Tensor], groups: int) -> None:
    assert len({piece.shape for piece in pieces}) == 1
    assert torch.equal(join(pieces, whole.shape[1], groups=groups), whole)


def check_parts(name: str, whole: tuple[Any, Any], prepared: list[tuple[Any, Any]]) -> None:
    """Every detail of the parts' inputs and targets against those of the whole."""
    objective, count = OBJECTIVES[name], len(prepared)
    groups = separate_of(objective)
    inputs, targets = whole
    for names in (TOKEN_INPUTS, QUERY_INPUTS):
        if names[0] not in inputs:
            continue
        number = inputs[names[0]].shape[1]
        even = number // groups % count == 0
        for key in names:
            pieces = [given.get(key) for given, _ in prepared]
            if key.endswith("valid"):
                assert all((piece is None) == (even and key not in inputs) for piece in pieces)
                if pieces[0] is None:
                    continue
                true = inputs.get(key, torch.ones(2, number, dtype=torch.bool))
                check_join(true, pieces, groups)
                assert sum(int(p.sum()) for p in pieces) == int(true.sum())  # copies are marked
            elif key in inputs:
                check_join(inputs[key], pieces, groups)
            else:
                assert pieces == [None] * count
    for given, _ in prepared:
        assert given.keys() - {"valid", "query_valid"} == inputs.keys() - {"valid", "query_valid"}
        for key in inputs.keys() - {*TOKEN_INPUTS, *QUERY_INPUTS, "tree", "image"}:
            same = (
                torch.equal(given[key], inputs[key]) if isinstance(inputs[key], Tensor) else given[key] == inputs[key]
            )
            assert same, key
    if name.startswith("vit"):
        assert all(torch.equal(part, targets) for _, part in prepared)
        return
    if name == "unetr":
        assert torch.equal(torch.cat([given["image"] for given, _ in prepared], dim=2), inputs["image"])
        if count > 1:
            prepared = [(given, part.targets) for given, part in prepared]
    if name.startswith("sap") and count > 1:
        number = inputs["x"].shape[1]
        assert all((part.lists.lengths, part.lists.groups) == ((number,), groups) for _, part in prepared)
        prepared = [(given, part.targets) for given, part in prepared]
    if name.startswith(("sap", "unetr")):
        assert all(torch.equal(part.labels, targets.labels) for _, part in prepared)
        return
    # Loss and metrics of any output: those of the parts add up to those of the whole.
    output = torch.from_numpy(np.random.default_rng(1).standard_normal(targets.values.shape).astype(np.float32))
    seen = targets.num_visible
    outputs = [
        torch.cat([cut(output[:, :seen], p, groups=groups), cut(output[:, seen:], p, groups=groups)], dim=1)
        for p in parts_of(count)
    ]
    lists = Lists(targets.lengths, groups)
    assert torch.equal(lists.join(outputs), output)
    for key in ("values", "index", "variables"):
        of_parts, of_whole = [getattr(part, key) for _, part in prepared], getattr(targets, key)
        if of_whole.ndim == 1:
            assert all(torch.equal(part, of_whole) for part in of_parts)
        else:
            assert torch.equal(lists.join(of_parts), of_whole)
    for _, part in prepared:
        assert sum(part.lengths) == part.values.shape[1]
        assert all(torch.equal(a, b) for a, b in zip(part.statistics, targets.statistics, strict=True))
    expected = objective.measure(output, targets)
    measured = [objective.measure(out, part) for out, (_, part) in zip(outputs, prepared, strict=True)]
    for key, value in expected.items():
        torch.testing.assert_close(sum(m[key] for m in measured), value, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("evaluating", [False, True])
def test_parts_of_whole_samples(name: str, evaluating: bool) -> None:
    objective = OBJECTIVES[name]
    batch = make_batch(objective)
    draws = Draws(0, batch.counters)
    whole = objective.prepare(batch, draws, evaluating=evaluating)
    if "adaptive" in name and evaluating:
        marks = [whole[0][key] for key in ("valid", "query_valid") if key in whole[0]]
        assert not torch.cat(marks, dim=1).all()  # padding of the tree, besides that of the parts
    for count in (1, 2, 3, 4):
        splits = [Split(objective.model, part) for part in parts_of(count)]  # type: ignore[attr-defined]
        prepared = [split.prepare(objective, batch, draws, evaluating=evaluating) for split in splits]
        check_parts(name, whole, prepared)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slabs_give_the_same_parts(name: str) -> None:
    objective: Any = OBJECTIVES[name]
    batch = make_batch(objective)
    draws = Draws(0, batch.counters)
    whole = objective.prepare(batch, draws)
    for count in (2, 3, 4):
        slabs = [Split(objective.model, part).slab(objective, (48, 16)) for part in parts_of(count)]
        if "adaptive" in name:
            assert slabs == [None] * count
            continue
        assert slabs == [Slab(part, (48, 16)) for part in parts_of(count)]
        batches = [
            Batch(batch.counters, batch.values[:, :, s.rows.start : s.rows.stop], batch.labels, batch.variables, s)
            for s in slabs
        ]
        separate = separate_of(objective) > 1
        values = [
            tokenize(b.values, OBJECTIVES["vit"].model.tokens, (4, 4), separate=separate).values  # type: ignore[attr-defined]
            for b in batches
        ]
        ranks = [Simulated(objective.model, part, values) for part in parts_of(count)]
        prepared = [rank.prepare(objective, b, draws) for b, rank in zip(batches, ranks, strict=True)]
        check_parts(name, whole, prepared)
        moved = {rank.moved for rank in ranks}
        at_home = name == "mae stratified" or not name.startswith("mae")
        assert (moved == {0}) == at_home
        if at_home:  # and nothing is fetched at all
            splits = [Split(objective.model, part) for part in parts_of(count)]
            check_parts(name, whole, [s.prepare(objective, b, draws) for b, s in zip(batches, splits, strict=True)])


def test_slabs_are_read_where_planes_of_patches_divide() -> None:
    objective: Any = OBJECTIVES["mae"]
    assert Split(objective.model, WHOLE).slab(objective, (48, 16)) is None
    assert Split(objective.model, Part(4, 5)).slab(objective, (48, 16)) is None  # of 12 planes
    slab = Split(objective.model, Part(2, 3)).slab(objective, (48, 16))
    assert slab is not None
    assert slab.rows == range(32, 48)
    assert slab.shape == (16, 16)
    narrowed = Batch([0, 1], torch.zeros(2, 1, 16, 16), slab=slab).narrow(0, 1)
    assert narrowed.slab == slab
    with pytest.raises(ValueError, match="read them whole"):
        tokenize(torch.zeros(1, 1, 12, 16), OBJECTIVES["vit"].model.tokens, (4, 4), slab=slab)  # type: ignore[attr-defined]


def test_a_prepare_of_ones_own_sees_whole_crops_and_is_cut() -> None:
    """Whatever it makes of values; one that is not marked may look at any voxel."""

    class Own(type(OBJECTIVES["mae"])):  # type: ignore[misc]
        def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
            inputs, targets = super().prepare(batch, draws, evaluating=evaluating)
            assert batch.slab is None
            return inputs | {"x": inputs["x"] * 2}, targets

    plain: Any = OBJECTIVES["mae"]
    own = Own(plain.config, plain.model, plain.statistics)
    batch = make_batch(plain)
    draws = Draws(0, batch.counters)
    whole = own.prepare(batch, draws)
    splits = [Split(own.model, part) for part in parts_of(5)]
    assert [split.slab(own, (48, 16)) for split in splits] == [None] * 5
    check_parts("mae", whole, [split.prepare(own, batch, draws) for split in splits])


def test_the_output_of_tokens_that_are_painted_is_joined_first() -> None:
    assert OBJECTIVES["sap"].axes.output == (TOKENS,)
    assert not OBJECTIVES["sap"].axes.targets
    for name in ("mae", "vit", "unetr"):
        assert bool(OBJECTIVES[name].axes.output) == bool(OBJECTIVES[name].axes.targets) == (name == "mae")
    for name in ("sap", "sap adaptive", "sap separate"):
        objective: Any = OBJECTIVES[name]
        batch = make_batch(objective)
        inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
        groups = separate_of(objective)
        number = inputs["x"].shape[1]
        output = torch.randn(2, number, 16 * 3, requires_grad=True)
        outputs = [cut(output, part, groups=groups) for part in parts_of(5)]
        shared = Split(objective.model, Part(0, 5)).prepare(objective, batch, Draws(0, batch.counters))[1]
        assert isinstance(shared, Whole)
        joined = shared.lists.join(outputs)
        assert torch.equal(joined, output)
        objective.loss(joined, targets).sum.backward()  # gradients flow through
        assert output.grad is not None


# ---------------------------------------------------------------- reading


class ArraySource:
    """An array [C, *S] with labels of its voxels; notes what is read."""

    variables, axes = ("a", "b"), ("z", "y", "x")

    def __init__(self, shape: tuple[int, ...], dtype: str = "uint8"):
        rng = np.random.default_rng(0)
        self.array = rng.integers(0, 256, (2, *shape)).astype(dtype)
        self.labels = rng.integers(0, 3, shape).astype(np.uint8)
        self.dtype, self.label_dtype = self.array.dtype, self.labels.dtype
        self.items = [Item("array", shape, (4,) * len(shape), (0,) * len(shape), (1.0,) * len(shape), None)]
        self.read_voxels = 0

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        self.read_voxels += int(np.prod([r.stop - r.start for r in region]))
        return self.array[(slice(None), *region)]

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        return self.labels[region]


def loaders(source: Any, crop: tuple[int, ...], count: int, *, blocks: bool, labels: bool = False) -> list[Loader]:
    """One loader for the whole crop and one for each slab, over all orientations."""
    extent = Extent(0, 0, source.items[0].shape, source.items[0].chunk, source.items[0].origin, 1.0)
    codes = range(len(orientations(crop)))
    sampler = Sampler([extent], crop, seed=0, lanes=2, reuse=4, orientations=codes)
    labelling = Labelling("voxel", ("x", "y", "z")) if labels else None
    reader = Reader([source], crop, whole_blocks=blocks, cache_bytes=1 << 20, labelling=labelling)
    slabs = [None, *(Slab(part, crop) for part in parts_of(count))]
    return [Loader(sampler, reader, device=torch.device("cpu"), workers=0, prefetch=1, slab=slab) for slab in slabs]


@pytest.mark.parametrize("code", range(48))
def test_a_slab_of_every_orientation_is_a_window_of_the_file(code: int) -> None:
    crop = torch.arange(6**3).reshape(1, 1, 6, 6, 6)
    for count in (2, 3):
        slabs = [Slab(part, (6, 6, 6)) for part in parts_of(count)]
        read = [crop[(slice(None), slice(None), *window(code, slab))].flatten(2) for slab in slabs]
        turned = [orient(flat, [code], slab) for flat, slab in zip(read, slabs, strict=True)]
        assert torch.equal(torch.cat(turned, dim=2), orient(crop, [code]))


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("crop", [(6, 6, 6), (6, 4, 6)])
def test_slabs_of_the_loader_make_the_crop(crop: tuple[int, ...], blocks: bool) -> None:
    source = ArraySource((13, 12, 14))
    whole, *slabs = loaders(source, crop, 3, blocks=blocks)
    counters = list(range(200))
    assert {whole.sampler(c).orientation for c in counters} == set(range(len(orientations(crop))))
    expected = whole.load(counters)
    found = [loader.load(counters) for loader in slabs]
    assert expected.slab is None
    assert [b.slab for b in found] == [loader.slab for loader in slabs]
    assert all(b.values.dtype == torch.uint8 and b.values.is_contiguous() for b in found)
    assert torch.equal(torch.cat([b.values for b in found], dim=2), expected.values)
    again = slabs[1].load(counters, whole=True)  # for pictures
    assert again.slab is None
    assert torch.equal(again.values, expected.values)


def test_only_the_slab_is_read() -> None:
    source = ArraySource((13, 12, 14))
    _, slab, *_ = loaders(source, (6, 6, 6), 3, blocks=False)
    slab.load(list(range(30)))
    assert source.read_voxels == 30 * 6**3 // 3


@pytest.mark.parametrize("blocks", [True, False])
def test_labels_of_voxels_are_whole(blocks: bool) -> None:
    whole, *slabs = loaders(ArraySource((13, 12, 14)), (6, 6, 6), 2, blocks=blocks, labels=True)
    counters = list(range(60))
    expected = whole.load(counters)
    for loader in slabs:
        assert torch.equal(loader.load(counters).labels, expected.labels)


def test_slabs_are_read_ahead_like_crops() -> None:
    whole, slab, *_ = loaders(ArraySource((13, 12, 14)), (6, 6, 6), 2, blocks=True)
    for loader in (whole, slab):
        loader.counters, loader.workers, loader.prefetch = (lambda step: range(step * 4, step * 4 + 4)), 2, 2
    for one, two in zip(whole.batches(0, 5), slab.batches(0, 5), strict=True):
        assert torch.equal(one.values[:, :, :3], two.values)


def test_a_bad_voxel_in_a_slab_is_named_by_its_place() -> None:
    source = ArraySource((6, 6, 6), "float32")
    source.array[1, 4, 1, 2] = np.nan
    first, second = loaders(source, (6, 6, 6), 2, blocks=False)[1:]
    counter = next(c for c in range(500) if first.sampler(c).orientation == 0)
    assert first.load([counter]).values.isfinite().all()
    with pytest.raises(UserError, match=r"'b' is NaN or infinite at voxel \[4, 1, 2\]"):
        second.load([counter])
