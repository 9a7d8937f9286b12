"""Layouts: what presets mean, which ranks form groups, what is refused and that what is proposed instead works."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from support import ROOT, merge, tiny_recipe
from torch import nn

from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.models.model import Model, Stage
from vitrail.parallel import check, shard
from vitrail.parallel.check import ImpossibleLayout, refuse
from vitrail.parallel.flow import Gradients
from vitrail.parallel.mesh import Layout, Mesh, layout_of
from vitrail.recipe import Recipe, config, kinds, load_recipe
from vitrail.recipe.sections import Parallel

# ---------------------------------------------------------------- groups of ranks


@pytest.fixture
def fake_world():
    """A process group of any size in one process; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world: int, rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "copies"), [(Layout(1, 4, True), 1), (Layout(4, 1, False), 4), (Layout(2, 2, True), 2)]
)
def test_copies_count_once_in_the_norm_of_the_gradient(fake_world, layout, copies):
    """Every rank adds its share; those that hold the same numbers must add up to one of them."""
    fake_world(4, 0)
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert Gradients(model, Mesh.make(layout, "cpu"), layout).squares() == 25 / copies


def groups(start: Any, layout: Layout, axis: str) -> list[list[int]]:
    """The groups that the ranks of a layout form along an axis, each once."""
    world, found = layout.data * layout.parts * layout.pipeline, []
    for rank in range(world):
        start(world, rank)
        mesh = Mesh.make(layout, "cpu")
        ranks = dist.get_process_group_ranks(mesh[axis].get_group())
        assert ranks[mesh.rank(axis)] == rank
        if ranks not in found:
            found.append(ranks)
    return found


def test_ranks_lie_as_in_hybrid_stop(fake_world):
    layout = layout_of(Parallel(strategy="HYBRID_SHARD", group=2, tensor=2), 8)
    assert layout == Layout(replicate=2, shard=2, reshard=True, tensor=2)
    assert groups(fake_world, layout, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(groups(fake_world, layout, "shard")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(groups(fake_world, layout, "replicate")) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_all_axes_are_nested_in_the_order_that_is_documented(fake_world):
    layout = Layout(replicate=2, shard=2, reshard=True, context=2, tensor=2, pipeline=2)
    assert groups(fake_world, layout, "tensor")[:2] == [[0, 1], [2, 3]]
    assert groups(fake_world, layout, "context")[:2] == [[0, 2], [1, 3]]
    assert groups(fake_world, layout, "shard")[:2] == [[0, 4], [1, 5]]
    assert groups(fake_world, layout, "replicate")[:2] == [[0, 8], [1, 9]]
    assert groups(fake_world, layout, "pipeline")[:2] == [[0, 16], [1, 17]]
    assert groups(fake_world, layout, "sequence")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    fake_world(32, 13)
    mesh = Mesh.make(layout, "cpu")
    assert (mesh.rank("context"), mesh.rank("tensor"), mesh.data_rank) == (0, 1, 3)
    assert mesh.blocks.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
    assert mesh.others.mesh.tolist() == [list(range(8)), list(range(8, 16))]


# ---------------------------------------------------------------- presets, as the page on layouts has them


def preset_rows() -> list[list[str]]:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    table = re.search(r"^\| preset \|.*?\n\|[-|]+\|\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_table_of_presets_names_all_that_users_know():
    names = {row[0] for row in preset_rows()}
    wanted = {"NO_SHARD", "DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID 2GPUs", "Hybrid-STOP"}
    assert {f"`{name}`" if name.isupper() else name for name in wanted} == names


@pytest.mark.parametrize("row", preset_rows(), ids=lambda row: row[0].strip("`"))
def test_presets_are_what_the_table_says(row, fake_world):
    _, recipe, replicate, shards, mesh_name, reshard = (cell.replace("`", "") for cell in row)
    tree = dict(word.split("=") for word in recipe.replace("parallel.", "").split())
    c = Parallel(**{key: int(value) if value.isdigit() else value for key, value in tree.items()})
    world = 8
    numbers = {"world": world, "group": c.group or 1, "tensor": c.tensor}
    layout = layout_of(c, world)
    assert layout.replicate == eval(replicate, {}, numbers)
    assert layout.shard == eval(shards, {}, numbers)
    assert str(layout.reshard) == reshard
    fake_world(world, 0)
    blocks = Mesh.make(layout, "cpu").blocks
    assert blocks.ndim == len(mesh_name.split(" x ")) if layout.replicate > 1 else blocks.ndim == 1
    assert blocks.shape[-1] == layout.shard


def test_sizes_are_the_same_as_presets():
    assert layout_of(Parallel(replicate=-1, shard=1, reshard=False), 8) == layout_of(Parallel(strategy="DDP"), 8)
    assert layout_of(Parallel(shard=-1), 8) == layout_of(Parallel(), 8)
    hybrid = layout_of(Parallel(strategy="HYBRID_SHARD", group=2), 8)
    assert layout_of(Parallel(replicate=4, shard=2), 8) == layout_of(Parallel(replicate=-1, shard=2), 8) == hybrid
    assert layout_of(Parallel(tensor=-1, strategy="FULL_SHARD"), 4) == Layout(1, 1, True, tensor=4)


# ---------------------------------------------------------------- groups of parameters


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width, bias=False)


def test_groups_are_equal_blocks_in_a_row():
    blocks = [Small(4), Small(4), Small(4), Small(8), Small(4), nn.Linear(4, 4)]
    chains = shard.chains_of(blocks)
    assert [len(chain) for chain in chains] == [3, 1, 1, 1]
    assert [len(group) for group in shard.cut(chains[0], Parallel(wrap=2), torch.float32)] == [2, 1]
    assert [len(group) for group in shard.cut(chains[0], Parallel(wrap=9), torch.float32)] == [3]


def test_buckets_are_filled():
    mib = Small(512)  # of fp32 gradients
    assert shard.blocks_of_bucket(mib, 1, torch.float32) == 1
    assert shard.blocks_of_bucket(mib, 3, torch.float32) == 3
    assert shard.blocks_of_bucket(mib, 3, torch.bfloat16) == 6
    assert shard.blocks_of_bucket(Small(256), 1, torch.float32) == 4
    assert shard.blocks_of_bucket(Small(1024), 1, torch.float32) == 1
    chain = [Small(256) for _ in range(6)]
    c = Parallel(strategy="DDP", bucket_mib=1)
    assert [len(group) for group in shard.cut(chain, c, torch.float32)] == [4, 2]


def test_offload_is_refused_on_a_cpu(fake_world):
    fake_world(1, 0)
    c = Parallel(offload=True)
    with pytest.raises(UserError, match=r"parallel\.offload.*on the host already.*parallel\.offload=false"):
        shard.apply(
            [(model := Small(4), [model.fc])],
            Mesh.make(layout_of(c, 1), "cpu"),
            layout_of(c, 1),
            c,
            compute=torch.float32,
            reduce=torch.float32,
        )


# ---------------------------------------------------------------- refusals

VIT: dict[str, Any] = {
    "model": {"kind": "vit", "ndim": 3, "width": 24, "depth": 2, "heads": 6, "kv_heads": 3, "patch": 4},
    "objective": {"kind": "classify"},
}


def recipe_of(**changes: Any) -> Recipe:
    """The tiny MAE: 64 tokens, 16 of them visible; 2 + 1 blocks, 2 heads each, 7 steps in all; batch 8."""
    return load_recipe(tiny_recipe(Path("volume.zarr"), Path("run"), **changes))


def vit_of(**changes: Any) -> Recipe:
    tree = tiny_recipe(Path("volume.zarr"), Path("run")) | VIT
    return load_recipe(merge(tree, {key.replace("__", "."): value for key, value in changes.items()}))


# (recipe, ranks, what the sentence says)
IMPOSSIBLE: dict[str, tuple[Recipe, int, str]] = {
    "batch": (recipe_of(data__batch=6), 4, "data.batch: 6 samples cannot be shared evenly by 4 data-parallel ranks"),
    "batch below the ranks": (recipe_of(data__batch=2), 4, "data.batch: 2 samples"),
    "heads": (vit_of(parallel__tensor=4), 4, "model.heads: 6 cannot be shared evenly by parallel.tensor=4 ranks"),
    "key-value heads": (vit_of(parallel__tensor=2), 2, "model.kv_heads: 3 cannot be shared"),
    "heads of a part": (recipe_of(parallel__tensor=4), 4, "model.encoder.heads: 2 cannot be shared"),
    "heads of the decoder": (
        recipe_of(parallel__tensor=2, model__decoder__heads=1),
        2,
        "model.decoder.heads: 1 cannot be shared",
    ),
    "hidden channels": (
        recipe_of(parallel__tensor=2, model__decoder__hidden=33),
        4,
        "model.decoder.hidden: 33 cannot be shared",
    ),
    "heads, other axes fixed": (
        vit_of(parallel={"replicate": 1, "shard": 2, "tensor": 4}),
        8,
        "model.heads: 6 cannot be shared",
    ),
    "ulysses and context": (
        recipe_of(parallel={"context": 4, "ulysses": 3}),
        4,
        "parallel.ulysses: 3 does not divide parallel.context=4",
    ),
    "ulysses and heads": (
        recipe_of(parallel={"context": 4, "ulysses": 4}),
        4,
        "parallel.ulysses: 4 ranks cannot share the 2 heads evenly",
    ),
    "ulysses and heads of tensor ranks": (
        recipe_of(parallel={"context": 2, "ulysses": 2, "tensor": 2}),
        4,
        "the 1 head of each tensor rank",
    ),
    "a kernel without rings": (
        recipe_of(parallel={"context": 2, "ulysses": 1, "attention": "flex"}),
        2,
        "parallel.attention: 'flex' cannot attend to keys part by part, as rings do",
    ),
    "a kernel without rings, where heads are too few": (
        recipe_of(parallel={"context": 4, "attention": "xformers"}),
        4,
        "parallel.attention: 'xformers' cannot attend",
    ),
    "visible tokens": (
        recipe_of(parallel__context=32, data__batch=32),
        32,
        "parallel.context=32: 32 ranks cannot share the 16 visible tokens of a sample",
    ),
    "predicted tokens": (
        recipe_of(parallel__context=4, model__decoder__decode_ratio=0.05),
        4,
        "4 ranks cannot share the 2 predicted tokens",
    ),
    "tokens, two axes": (
        recipe_of(parallel={"context": 16, "tensor": 2}),
        32,
        "parallel.context=16 x parallel.tensor=2: 32 ranks cannot share the 16 visible tokens",
    ),
    "tokens of a classifier": (vit_of(parallel__context=128, data__batch=128), 128, "share the 64 tokens of a sample"),
    "pipeline": (
        recipe_of(parallel__pipeline=8, data__micro_batch=1),
        8,
        "parallel.pipeline: 8 ranks with 1 stage each are more than the 7 steps of the model",
    ),
    "interleaved pipeline": (
        recipe_of(parallel={"pipeline": 4, "schedule": "interleaved"}, data__micro_batch=1),
        4,
        "4 ranks with 2 stages each are more than the 7 steps",
    ),
    "stages of 1F1B": (
        recipe_of(parallel={"pipeline": 2, "stages": 2}, data__micro_batch=1),
        2,
        "parallel.stages: with schedule 1F1B a rank has 1 stage, not 2",
    ),
    "one stage interleaved": (
        recipe_of(parallel={"pipeline": 2, "stages": 1, "schedule": "interleaved"}, data__micro_batch=1),
        2,
        "2 stages or more, not 1",
    ),
    "split": (
        recipe_of(parallel={"pipeline": 2, "split": [3, 3]}, data__micro_batch=1),
        2,
        "parallel.split: [3, 3] must be 2 numbers, one for each stage, that add up to the 7 steps",
    ),
    "split in too many": (
        recipe_of(parallel={"pipeline": 2, "split": [3, 3, 1]}, data__micro_batch=1),
        2,
        "parallel.split: [3, 3, 1]",
    ),
    "schedule without pipeline": (
        recipe_of(parallel__schedule="GPipe"),
        2,
        "parallel.schedule: GPipe is for pipelines",
    ),
    "one micro-batch": (
        recipe_of(parallel__pipeline=2),
        4,
        "data.micro_batch: 4 samples of a data-parallel rank make 1 micro-batch of 4, but 2 pipeline stages (1F1B) "
        "need at least 2",
    ),
    "few micro-batches": (
        recipe_of(parallel__pipeline=4, data__micro_batch=4),
        4,
        "make 2 micro-batches of 4, but 4 pipeline stages (1F1B) need at least 4",
    ),
    "few samples": (recipe_of(parallel__pipeline=4), 16, "2 samples of a data-parallel rank make 1 micro-batch of 2"),
    "few samples a rank": (recipe_of(parallel__pipeline=4, data__batch="3/rank"), 8, "3 samples"),
    "interleaved rounds": (
        recipe_of(parallel={"pipeline": 2, "schedule": "interleaved"}, data__batch=10, data__micro_batch=2),
        2,
        "4 pipeline stages (interleaved) need at least 4, a multiple of 2",
    ),
    "buckets of shards": (
        recipe_of(parallel__bucket_mib=25),
        2,
        "parallel.bucket_mib: 25, but FULL_SHARD has no buckets",
    ),
    "buckets of blocks": (
        recipe_of(parallel={"strategy": "DDP", "bucket_mib": 25, "wrap": 2}),
        2,
        "parallel.wrap: 2, but parallel.bucket_mib=25",
    ),
    "wrap": (recipe_of(parallel__wrap=3), 2, "parallel.wrap: 3, but the model has no more than 2 equal blocks"),
    "prefetch": (
        recipe_of(parallel__prefetch={"forward": 3}),
        2,
        "parallel.prefetch.forward: 3 groups ahead are more than the model's 2",
    ),
    "prefetch of wrapped": (
        recipe_of(parallel={"wrap": 2, "prefetch": {"backward": 2}}),
        2,
        "parallel.prefetch.backward: 2 groups ahead",
    ),
    "offload": (recipe_of(parallel__offload=True), 2, "parallel.offload: parameters of a run on a CPU"),
    "offload of matrices": (
        recipe_of(parallel__offload=True, optimizer={"kind": "muon"}),
        2,
        "parallel.offload: optimizer.kind=muon needs whole matrices",
    ),
    "keep nothing": (recipe_of(parallel__recompute={"keep": []}), 1, "nothing is kept, which is recompute: full"),
    "every": (recipe_of(parallel__recompute={"every": 4}), 1, "parallel.recompute.every: 4 is more than"),
    "keep of pieces": (
        recipe_of(parallel={"recompute": {"keep": ["fc1"]}, "chunk": {"mlp": 8}}),
        1,
        "'fc1' cannot be kept with parallel.chunk.mlp=8",
    ),
    "no such role": (
        recipe_of(parallel__recompute={"keep": ["gate", "qkv"]}),
        1,
        "parallel.recompute.keep: 'gate' is no role",
    ),
    "no role at all": (recipe_of(parallel__recompute={"keep": ["gate"]}), 1, "set parallel.recompute=full"),
    "budget": (recipe_of(parallel__recompute={"budget": 0.01}), 1, "parallel.recompute.budget: 0.01 is less than"),
    "no head": (vit_of(parallel__chunk={"head": 8}), 1, "parallel.chunk.head: ViT has no head"),
    "float8": (
        recipe_of(precision={"compute": "float8"}, run__device="cpu"),
        1,
        "precision.compute: float8 cannot be used, since a CPU has no float8 products",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_layouts_are_refused_with_one_that_is_accepted(name):
    recipe, world, sentence = IMPOSSIBLE[name]
    with pytest.raises(ImpossibleLayout) as caught:
        refuse(recipe, world)
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text
    assert caught.value.proposals, text
    for change in caught.value.proposals:
        assert str(change) in text
        refuse(load_recipe(recipe, change.overrides), change.ranks or world)


def proposals_in(text: str) -> list[tuple[list[str], int | None]]:
    """What a sentence of layout_of tells to set or to start."""
    found: list[tuple[list[str], int | None]] = [([word], None) for word in re.findall(r"parallel\.\w+=\w+", text)]
    found += [([], int(number)) for number in re.findall(r"start (?:a multiple of )?(\d+) rank", text)]
    if listed := re.search(r"(parallel\.\w+): .*choose one of ([\d, ]+)$", text):
        found += [([f"{listed[1]}={number}"], None) for number in listed[2].split(", ")]
    return found


@pytest.mark.parametrize(
    ("choice", "world"),
    [
        ({"tensor": 3}, 8),
        ({"tensor": 16}, 8),
        ({"tensor": 4, "context": 4}, 8),
        ({"replicate": 2, "shard": 2}, 8),
        ({"replicate": 2, "shard": 2, "tensor": 2}, 6),
        ({"shard": 3, "replicate": -1}, 8),
        ({"strategy": "HYBRID_SHARD", "group": 3}, 8),
        ({"strategy": "HYBRID_SHARD", "group": 4, "tensor": 4}, 8),
        ({"strategy": "DDP", "group": 2}, 8),
        ({"pipeline": 5}, 2),
    ],
)
def test_sizes_that_do_not_make_the_world_are_refused_with_some_that_do(choice, world):
    with pytest.raises(UserError) as caught:
        layout_of(Parallel(**choice), world)
    proposals = proposals_in(str(caught.value))
    assert proposals, str(caught.value)
    accepted = []
    for overrides, ranks in proposals:
        new = choice | {
            key: int(value) if value.isdigit() else value
            for key, value in (word.removeprefix("parallel.").split("=") for word in overrides)
        }
        layout = layout_of(Parallel(**new), ranks or world)
        accepted.append(layout)
        assert layout.data * layout.parts * layout.pipeline == (ranks or world)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"tensor": -1, "context": -1}, "only one axis"),
        ({"strategy": "DDP", "shard": 2}, "leave one of them out"),
        ({"strategy": "HYBRID_SHARD"}, "parallel.group is missing"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(choice, words):
    with pytest.raises(UserError, match=words):
        layout_of(Parallel(**choice), 4)


@pytest.mark.parametrize(
    ("choice", "world"),
    [
        ({}, 1),
        ({"strategy": "DDP", "bucket_mib": 25}, 1),
        ({"strategy": "DDP", "bucket_mib": 25, "context": 2}, 4),
        ({"tensor": 2, "context": 2}, 8),
        ({"context": 16}, 16),
        ({"context": 3}, 3),
        ({"pipeline": 7}, 7),
        ({"pipeline": 7, "schedule": "GPipe"}, 14),
        ({"pipeline": 2, "schedule": "interleaved"}, 4),
        ({"pipeline": 2, "schedule": "interleaved", "stages": 3}, 2),
        ({"pipeline": 2, "split": [4, 3]}, 2),
        ({"pipeline": -1}, 1),
        ({"wrap": 2, "prefetch": {"forward": 1, "backward": 0}}, 2),
        ({"recompute": {"every": 3}}, 1),
        ({"recompute": {"keep": ["attention"]}, "chunk": {"mlp": 8}}, 1),
    ],
)
def test_possible_layouts_are_accepted(choice, world):
    layout = refuse(recipe_of(parallel=choice, data__micro_batch=1, data__batch="8/rank"), world)
    assert layout.data * layout.parts * layout.pipeline == world


def test_a_missing_torchao_is_told_at_once(monkeypatch):
    monkeypatch.setattr(check.float8, "refusal", lambda device: None)
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(ImpossibleLayout, match=r"torchao is not installed \(pip .*; set precision.compute=bf16"):
        refuse(recipe_of(precision={"compute": "float8"}), 1)


def test_a_model_that_cannot_be_built_is_left_to_others():
    assert refuse(recipe_of(data__crop=15, parallel__tensor=2), 2).tensor == 2


def test_refusals_are_quick_for_large_models_and_worlds():
    changes: dict[str, Any] = {"parallel__tensor": 24, "data__batch": "1/rank"}
    decoder = {"width": 512, "depth": 8, "heads": 16}
    recipe = recipe_of(model__encoder={"size": "G", "patch": 4}, model__decoder=decoder, **changes)
    with pytest.raises(ImpossibleLayout, match=r"model\.encoder\.heads: 16.*set parallel\.tensor=16"):
        refuse(recipe, 3072)


class Foreign(Model):
    """A model of a user's own, whose config knows nothing of tokens and whose blocks attend in their own way."""

    def __init__(self, c: Any):
        super().__init__()
        self.config, self.inner = c, nn.Linear(2, 2)

    def stages(self) -> list[Stage]:
        return [Stage("inner", lambda x, side: self.inner(x), uses=(self.inner,))]

    def blocks(self) -> list[nn.Module]:
        return [self.inner]

    def flops(self) -> Flops:
        return Flops()


@config
class ForeignConfig:
    kind: Literal["foreign"] = "foreign"
    ndim: int = 3
    shape: int | None = None
    channels: int | None = None

    def build(self) -> Foreign:
        return Foreign(self)


def test_models_with_other_attention_share_no_tokens(monkeypatch):
    monkeypatch.setitem(kinds._registered["model"], "foreign", ForeignConfig)
    assert refuse(recipe_of(model={"kind": "foreign"}), 2).shard == 2
    shared = recipe_of(model={"kind": "foreign"}, parallel__context=2)
    with pytest.raises(UserError, match=r"model\.kind 'foreign' hold no attention of vitrail's"):
        refuse(shared, 2)


def test_a_missing_group_lists_those_that_fit():
    with pytest.raises(UserError, match=r"parallel\.group is missing.*one of 1, 2, 3, 6"):
        layout_of(Parallel(strategy="HYBRID_SHARD"), 6)


@pytest.mark.parametrize(("choice", "world"), [({"replicate": -1}, 4), ({"replicate": 2, "reshard": False}, 2)])
def test_copies_have_buckets_however_they_are_asked_for(choice, world):
    assert refuse(recipe_of(parallel=choice | {"bucket_mib": 1}), world).shard == 1
