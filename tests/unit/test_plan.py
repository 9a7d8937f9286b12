"""Plans of layouts, with stand-ins for what is traced: what is looked at, what fits, how it is ranked and told."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from support import merge
from typer.testing import CliRunner

from vitrail.cost import page as plan_page
from vitrail.cost import plan as planning
from vitrail.cost import search
from vitrail.cost.cluster import Checked, check_gpus, load_cluster, more_gpus, read_gpus
from vitrail.cost.memory import Memory
from vitrail.cost.plan import complete, estimate, num_parameters, plan, settle
from vitrail.cost.recorder import Op
from vitrail.cost.search import micros
from vitrail.cost.work import Segment, Work
from vitrail.errors import UserError
from vitrail.parallel.check import refuse
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.recipe import load_recipe

SAVED = 40  # bytes a token and channel that a stand-in block keeps


def tree(**changes: Any) -> dict[str, Any]:
    base = {
        "run": {"name": "planned", "steps": 1000},
        "model": {"kind": "vit", "width": 1024, "depth": 16, "heads": 16, "patch": 16, "channels": 3, "classes": 10},
        "objective": {"kind": "classify"},
        "data": {"train": [{"kind": "image_folder", "path": "nowhere"}], "crop": 224, "batch": "8/rank"},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
    }
    return merge(base, {key.replace("__", "."): value for key, value in changes.items()})


def fake_trace(model: Any, objective: Any, *, samples: int, recompute: Any, tensor: int, context: int, **rest: Any):
    built, (_, stages) = planning.model_of(model), rest["pipeline_rank"]
    blocks, flops = built.blocks(), built.flops()
    parameters = sum(p.numel() for p in blocks[0].parameters())
    tokens, width = 196, model.width
    product = Op(
        "gemm", flops.linear * samples / len(blocks) / (tensor * context), 0.0, (tokens * samples, width, width)
    )
    saved = (2 if recompute == "full" else 10 if recompute != "none" else SAVED) * samples * tokens * width
    again = () if recompute == "none" else (product,)
    forward, backward, count = (product,), (product, product), math.ceil(len(blocks) / stages)
    block = Segment("block", count, parameters // tensor, forward, backward, again, saved // (tensor * context), saved)
    return Work((block,), 0, (), 0, samples, flops, tokens)


def fake_memory(work: Work, layout: Layout, *rest: Any, **more: Any) -> Memory:
    (block,) = work.segments
    owned = block.parameters * block.count
    shares = layout.shard * layout.context
    gathered = 0 if layout.shard == 1 else 2 * (block.parameters if layout.reshard else owned)
    return Memory(
        parameters=4 * owned // shares,
        gradients=4 * owned // shares,
        optimizer=8 * owned // shares,
        gathered=gathered,
        activations=block.saved * block.count,
    )


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "trace", fake_trace)
    monkeypatch.setattr(planning, "memory_of", fake_memory)


def ready(cluster: str = "dgx_a100", **changes: Any):
    place = load_cluster(cluster)
    return settle(load_recipe(tree(**changes)), place), place


# ---------------------------------------------------------------- one layout


def test_an_estimate_adds_up() -> None:
    recipe, cluster = ready(parallel__strategy="HYBRID_SHARD", parallel__group=8, parallel__tensor=2)
    one = estimate(recipe, cluster, 64)
    assert (one.strategy, one.group, one.tensor, one.gpus) == ("HYBRID_SHARD", 8, 2, 64)
    assert (one.batch, one.batch_per_rank, one.micro_batch) == (8 * 32, 8, 8)
    assert one.samples_per_second == pytest.approx(one.batch / one.step_seconds)
    assert one.tokens_per_second == pytest.approx(196 * one.samples_per_second)
    flops = planning.model_of(recipe.model).flops().training
    assert one.mfu == pytest.approx(one.samples_per_second * flops / (64 * 312e12))
    assert one.hfu > one.mfu  # the flash backward
    assert one.memory_gib == pytest.approx(sum(one.memory.values()))
    assert one.reserved_gib > one.memory_gib
    assert one.run_hours == pytest.approx(1000 * one.step_seconds / 3600)
    assert one.run_cost is None
    assert sum(one.limits.values()) == pytest.approx(one.step_seconds)


def test_settling_knows_the_device_and_what_is_not_installed_here() -> None:
    assert (ready()[0].precision.compute, ready()[0].parallel.compile) == ("bf16", True)
    laptop = ready("laptop")[0]
    assert (laptop.precision.compute, laptop.parallel.compile) == ("fp32", False)
    eight, h100 = ready("dgx_h100", precision__compute="float8", parallel__offload=True)
    assert eight.precision.compute == "float8"
    assert plan(load_recipe(tree(precision__compute="float8")), cluster=h100, gpus=8, as_is=True)[0].fits
    with pytest.raises(UserError, match=r"float8, but NVIDIA A100.*precision.compute=bf16"):
        ready(precision__compute="float8")


def test_a_price_gives_costs() -> None:
    recipe, cluster = ready()
    one = estimate(recipe, planning.dataclasses.replace(cluster, price=2.0), 8)
    assert one.run_cost == pytest.approx(16 * one.run_hours)
    assert one.cost_per_million_samples == pytest.approx(16 / 3600 * 1e6 / one.samples_per_second)
    epochs = ready(run__steps="3 epochs")[0]
    assert estimate(epochs, cluster, 8).run_hours is None  # the data know how long one is
    samples = ready(run__steps="6400 samples")[0]
    assert estimate(samples, cluster, 8).run_hours == pytest.approx(100 * one.step_seconds / 3600)


def test_sizes_given_instead_of_a_strategy_get_its_name() -> None:
    names = {
        (8, 1, None): "NO_SHARD",
        (1, 8, None): "FULL_SHARD",
        (1, 8, False): "SHARD_GRAD_OP",
        (2, 4, None): "HYBRID_SHARD",
    }
    for (replicate, shard, reshard), name in names.items():
        sizes = {"parallel__replicate": replicate, "parallel__shard": shard, "parallel__reshard": reshard}
        recipe, cluster = ready(**sizes)
        assert estimate(recipe, cluster, 8).strategy == name


# ---------------------------------------------------------------- what the data would tell


def test_what_nobody_tells_is_asked_for() -> None:
    without = tree(model__channels=None)
    with pytest.raises(UserError, match=r"model.channels: the recipe does not tell it .*nowhere.*model.channels=3"):
        complete(load_recipe(without))
    with pytest.raises(UserError, match=r"model.classes: .*give it, such as model.classes=3"):
        complete(load_recipe(tree(model__classes=0)))
    named = complete(load_recipe(tree(model__classes=0, objective__names=["a", "b", "c"])))
    assert named.model.classes == 3
    dummy = {"kind": "dummy", "shape": [224, 224], "channels": 5, "classes": 7}
    told = complete(load_recipe(tree(model__channels=None, model__classes=0, data__train=[dummy])))
    assert (told.model.channels, told.model.classes, told.model.shape) == (5, 7, (224, 224))


def test_data_that_are_there_tell_their_channels(tmp_path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (224, 224)).save(tmp_path / name / "0.png")
    entry = {"kind": "image_folder", "path": str(tmp_path)}
    told = complete(load_recipe(tree(model__channels=None, model__classes=0, data__train=[entry])))
    assert (told.model.channels, told.model.classes) == (3, 2)


# ---------------------------------------------------------------- the search


def test_the_search_ranks_what_fits_and_every_layout_can_be_trained() -> None:
    recipe, cluster = ready()
    found = search.search(recipe, cluster, 16, top=1000)
    assert all(one.fits for one in found)
    rates = [one.samples_per_second for one in found]
    assert rates == sorted(rates, reverse=True)
    kinds = {(one.strategy, one.group, one.tensor, one.context, one.pipeline) for one in found}
    assert ("NO_SHARD", None, 1, 1, 1) in kinds
    assert {one.strategy for one in found} == {"NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"}
    assert {one.group for one in found if one.tensor == one.pipeline == 1} == {None, 2, 4, 8}
    assert max(one.tensor for one in found) == 8  # inside a node
    assert {one.context for one in found} == {1}  # 196 tokens are not worth sharing
    for one in found[::7]:
        again = load_recipe(tree(), one.changes)
        layout = layout_of(again.parallel, 16)
        assert (layout.tensor, layout.context, layout.pipeline) == (one.tensor, one.context, one.pipeline)
        assert again.data.global_batch(layout.data) == one.batch
        refuse(again, 16)


def test_impossible_layouts_are_left_out() -> None:
    recipe, cluster = ready(model__heads=8, model__depth=2, data__batch="1/rank")
    found = search.search(recipe, cluster, 64, top=1000)
    assert {one.pipeline for one in found} == {1}  # one sample cannot fill two stages
    two = search.search(ready(model__depth=2, data__batch="2/rank")[0], cluster, 8, top=1000)
    assert {one.pipeline for one in two} == {1, 2}
    odd = search.search(ready(model__heads=3, model__width=768)[0], cluster, 8, top=1000)
    assert {one.tensor for one in odd} == {1}


def test_a_recipe_that_needs_room_gets_recomputation_and_smaller_passes() -> None:
    recipe, cluster = ready(data__batch="1024/rank")
    found = search.search(recipe, cluster, 8, top=1000)
    assert found[0].fits
    assert {one.recompute for one in found} <= {"none", "keep attention", "full"}
    plain = [one for one in found if (one.strategy, one.tensor, one.pipeline) == ("FULL_SHARD", 1, 1)]
    assert plain[0].recompute != "none" or plain[0].micro_batch < 1024
    keeps = next(one for one in found if one.recompute == "keep attention")
    assert load_recipe(tree(), keeps.changes).parallel.recompute.keep == ("attention",)


def test_any_batch_finds_a_larger_one() -> None:
    recipe, cluster = ready()
    fixed, free = (search.search(recipe, cluster, 8, any_batch=free, top=1000) for free in (False, True))
    assert {one.batch_per_rank for one in fixed} == {8}
    assert max(one.batch_per_rank for one in free) > 8
    assert all(one.fits for one in free)
    assert free[0].samples_per_second >= fixed[0].samples_per_second


def test_what_does_not_fit_has_a_nearest_that_does() -> None:
    big = {"model__width": 8192, "model__depth": 48, "model__heads": 64}  # 39 billion parameters
    recipe, cluster = ready(**big)
    found = search.search(recipe, cluster, 4)
    assert not found[0].fits
    assert found[0].limited_by == "memory"
    near = search.nearest(recipe, cluster, 4)
    assert near is not None
    assert near.fits
    assert near.gpus > 4
    assert f"nearest that fits is {near.gpus} GPUs" in plan_page.advice(near, cluster, 4)
    alone = load_cluster("h200")
    assert search.nearest(settle(load_recipe(tree(**big)), alone), alone, 1) is None
    assert "nothing does on this cluster" in plan_page.advice(None, alone, 1)
    # A layout that needs less at once is nearer than another layout.
    recipe, cluster = ready(data__batch="4096/rank", parallel__strategy="NO_SHARD")
    near = search.nearest(recipe, cluster, 8)
    assert near is not None
    assert (near.strategy, near.gpus, near.batch) == ("NO_SHARD", 8, 8 * 4096)


def test_what_training_refuses_is_not_shown() -> None:
    cases: list[dict[str, Any]] = [
        {"parallel__pipeline": 2, "parallel__schedule": "interleaved", "data__batch": "6/rank"},
        {"parallel__strategy": "DDP", "parallel__bucket_mib": 25},
        {"parallel__strategy": "NO_SHARD", "parallel__bucket_mib": 25, "parallel__prefetch": {"forward": 2}},
        {"parallel__offload": True, "data__batch": "12/rank"},
    ]
    for changes in cases:
        recipe, cluster = ready(**changes)
        for any_batch in (False, True):
            found = search.search(recipe, cluster, 8, top=1000, any_batch=any_batch)
            assert found
            for one in found[:: max(1, len(found) // 8)]:
                refuse(planning.without_device(load_recipe(tree(**changes), one.changes)), 8)
    assert any(one.pipeline == 2 for one in search.search(ready(**cases[0])[0], cluster, 8, top=1000))


def test_answers_are_kept_by_all_that_they_depend_on() -> None:
    for reduce in ("fp32", "bf16"):  # buckets have more blocks of smaller gradients, and prefetching fewer groups
        deep = {"parallel__bucket_mib": 100, "parallel__prefetch": {"forward": 5}, "precision__reduce": reduce}
        recipe, cluster = ready(parallel__strategy="DDP", **deep)
        kinds = {one.strategy for one in search.search(recipe, cluster, 8, top=1000)}
        assert ("DDP" in kinds) == (reduce == "fp32")


def test_micro_batches_are_divisors_of_any_share() -> None:
    def sizes(**changes: Any) -> list[int]:
        recipe, _ = ready(**changes)
        layout = layout_of(recipe.parallel, 8)
        return micros(recipe, layout, planning.Shares.of(recipe, layout))

    assert sizes(data__batch="12/rank") == [12, 6, 4, 2, 1]
    assert sizes(data__batch="4095/rank")[:3] == [4095, 1365, 819]
    assert sizes(data__batch="4095/rank")[-1] == 1
    assert sizes(data__batch="12/rank", data__micro_batch=5) == [5, 3, 2, 1]  # its own first
    assert sizes(data__batch="12/rank", parallel__pipeline=4) == [3, 2, 1]
    rounds = {"parallel__pipeline": 4, "parallel__schedule": "interleaved"}  # 8 stages, in rounds of 4
    assert sizes(data__batch="12/rank", **rounds) == [1]
    assert sizes(data__batch="9/rank", **rounds) == []


def test_no_own_layout_is_faster_than_what_is_found() -> None:
    for batch in (30, 210, 240, 251, 300):
        recipe, cluster = ready(data__batch=f"{batch}/rank", parallel__recompute="full")
        best = search.search(recipe, cluster, 1, top=3)[0]
        for choice in ("none", "{keep: [attention]}", "full"):
            for micro in {
                batch,
                *micros(recipe, layout_of(recipe.parallel, 1), planning.Shares(batch, batch, batch, 1)),
            }:
                words = (f"parallel.recompute={choice}", f"data.micro_batch={micro}", f"data.batch={batch}/rank")
                (own,) = plan(load_recipe(tree(), words), cluster=cluster, gpus=1, as_is=True)
                assert not own.fits or own.samples_per_second <= 1.001 * best.samples_per_second, words


def test_every_way_to_recompute_is_looked_at() -> None:
    for own in ("full", {"every": 2}):
        recipe, cluster = ready(parallel__recompute=own)
        best = search.search(recipe, cluster, 8)[0]
        assert best.recompute == "none"
        assert "parallel.recompute=none" in best.changes
    assert len(search._choices(recipe)) == 4


def test_a_short_last_pass_costs_less_than_a_full_one() -> None:
    def seconds(micro: int) -> float:
        recipe, cluster = ready(data__batch="260/rank", data__micro_batch=micro, parallel__strategy="NO_SHARD")
        one = estimate(recipe, cluster, 8)
        assert sum(one.limits.values()) == pytest.approx(one.step_seconds)
        return one.step_seconds

    assert seconds(260) < seconds(256) < 1.2 * seconds(260)  # not 512 samples' worth
    assert seconds(131) == pytest.approx(seconds(130), rel=0.05)  # 131 and 129


def test_mfu_counts_what_the_objective_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, cluster = ready()
    before = estimate(recipe, cluster, 8)

    def twice(*words: Any, **more: Any) -> Work:
        work = fake_trace(*words, **more)
        return planning.dataclasses.replace(work, flops=work.flops * 2)

    monkeypatch.setattr(planning, "trace", twice)
    after = estimate(recipe, cluster, 8)
    assert after.mfu == pytest.approx(2 * before.mfu)
    assert after.hfu == pytest.approx(2 * before.hfu)


def test_the_nearest_is_looked_for_to_the_end() -> None:
    cluster = load_cluster("dgx_a100")
    assert list(more_gpus(cluster, 5))[:3] == [5, 8, 16]
    assert list(more_gpus(cluster, 24))[:3] == [24, 32, 64]
    assert list(more_gpus(cluster, 1))[-1] == cluster.gpus
    big = {"model__width": 8192, "model__depth": 48, "model__heads": 64}
    for gpus, more in ((5, {}), (4, {"parallel__tensor": 8})):  # no whole nodes when doubled; no layout at all
        near = search.nearest(ready(**big, **more)[0], cluster, gpus)
        assert near is not None
        assert near.gpus > gpus
    recipe, cluster = ready(data__batch="16384/rank", data__micro_batch=16384, parallel__strategy="NO_SHARD")
    near = search.nearest(recipe, cluster, 8)
    assert near is not None
    assert (near.strategy, near.gpus) == ("NO_SHARD", 8)
    assert f"data.micro_batch={near.micro_batch}" in near.changes


def test_any_batch_needs_a_batch_per_rank() -> None:
    with pytest.raises(UserError, match=r"--any-batch: data.batch is 256 .*data.batch=32/rank"):
        plan(load_recipe(tree(data__batch=256)), cluster="dgx_a100", gpus=8, any_batch=True)
    with pytest.raises(UserError, match="--any-batch: --as-is keeps"):
        plan(load_recipe(tree()), cluster="dgx_a100", gpus=8, any_batch=True, as_is=True)
    found = plan(load_recipe(tree(data__micro_batch=8)), cluster="dgx_a100", gpus=16, any_batch=True, top=1000)
    assert {one.pipeline for one in found} > {1, 2}  # whose small batches are less than the recipe's passes


def test_a_global_batch_stays_what_it_is() -> None:
    recipe, cluster = ready(data__batch=256)
    for gpus in (8, 64):
        assert {one.batch for one in search.search(recipe, cluster, gpus)} == {256}
    with pytest.raises(UserError, match=r"data.batch: 10 samples cannot be shared evenly by 64"):
        search.search(ready(data__batch=10, model__heads=3, model__width=768)[0], cluster, 64)


def test_few_layouts_of_113_billion_parameters_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is what takes long: hundreds of layouts are compared by a trace for each way to recompute."""
    asked: list[dict[str, Any]] = []

    def counted(*given: Any, **settings: Any) -> Any:
        asked.append(settings)
        return fake_trace(*given, **settings)

    monkeypatch.setattr(planning, "trace", counted)
    recipe, cluster = ready("frontier", model__width=12288, model__depth=56, model__heads=64, data__batch="1/rank")
    for gpus in (512, 8192, 49152):
        assert search.search(recipe, cluster, gpus, top=1)[0].fits
    assert len({repr(settings) for settings in asked}) <= 20


# ---------------------------------------------------------------- numbers of GPUs


def test_numbers_of_gpus_are_read_and_checked() -> None:
    frontier, gh200 = load_cluster("frontier"), load_cluster("gh200")
    assert read_gpus("8..49152", frontier) == [*(8 * 2**n for n in range(13)), 49152]
    assert read_gpus("1..168", gh200) == [1, 2, 4, 8, 16, 32, 64, 128, 168]
    assert read_gpus("12", gh200) == [12]
    for text in ("8..", "8...16", "many", "16..8", "-8", "8-16"):
        with pytest.raises(UserError, match=r"--gpus .*8\.\.512"):
            read_gpus(text, frontier)
    with pytest.raises(UserError, match=r"--gpus 200: cluster gh200 has 168 GPUs \(42 nodes of 4\); choose 1 to 168"):
        check_gpus(gh200, 200)
    with pytest.raises(UserError, match=r"--gpus 10: .*4 GPUs each; choose 8 or 12"):
        check_gpus(gh200, 10)
    with pytest.raises(UserError, match="--gpus 0"):
        check_gpus(gh200, 0)


# ---------------------------------------------------------------- the command


def call(tmp_path, *words: str, **changes: Any) -> str:
    import typer

    from vitrail.cli.plan import add

    app = typer.Typer()
    app.callback()(lambda: None)
    add(app)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tree(**changes)))
    done = CliRunner().invoke(app, ["plan", str(path), *words])
    if done.exception is not None:
        raise done.exception
    return done.output


def test_the_command_shows_a_table_and_the_best(tmp_path) -> None:
    page = call(tmp_path, "--cluster", "dgx_a100", "--gpus", "8", "--top", "3", "--price", "2")
    lines = page.splitlines()
    assert "parameters, on 8 GPUs of dgx_a100 (NVIDIA A100-SXM4-80GB, 79.2 GiB, 8 a node)" in lines[0]
    assert lines[2].split()[0] == "strategy"
    assert "there may be more: --top 6" in page
    for words in ("memory of a rank in GiB: parameters", "seconds of a step: compute", "it is limited by", "USD"):
        assert words in page
    assert page.count("A100") == 1


def test_the_command_speaks_json(tmp_path) -> None:
    whole = json.loads(call(tmp_path, "--cluster", "dgx_a100", "--gpus", "16", "--json"))
    promised = {"strategy", "group", "tensor", "context", "pipeline", "gpus", "fits", "memory_gib", "step_seconds"}
    promised |= {"samples_per_second", "mfu", "limited_by"}
    assert len(whole["layouts"]) == 10
    assert all(promised <= set(one) for one in whole["layouts"])
    words = ("parallel.strategy=HYBRID_SHARD", "parallel.group=4", "--cluster", "dgx_a100", "--gpus", "16", "--json")
    (one,) = json.loads(call(tmp_path, *words, "--as-is"))["layouts"]
    assert (one["strategy"], one["group"], one["changes"]) == ("HYBRID_SHARD", 4, [])


def test_a_range_is_a_scaling_curve(tmp_path) -> None:
    weak = call(tmp_path, "--cluster", "dgx_a100", "--gpus", "8..64", "--plot", str(tmp_path / "curve.png"))
    assert "weak scaling (batch per rank), against 8 GPUs" in weak
    assert "100 % ####" in weak
    assert (tmp_path / "curve.png").stat().st_size > 5000
    strong = json.loads(call(tmp_path, "--cluster", "dgx_a100", "--gpus", "8..512", "--json", data__batch=64))
    assert strong["scaling"] == "strong"
    assert [one["gpus"] for one in strong["layouts"]] == [8, 16, 32, 64, 128, 256, 512]
    assert len(strong["efficiency"]) == 7
    assert strong["efficiency"][-1] < 1


def test_numbers_that_cannot_be_used_are_left_out_of_a_curve(tmp_path) -> None:
    few = {"data__batch": 16, "model__heads": 3, "model__width": 768, "model__depth": 4}
    page = call(tmp_path, "--cluster", "dgx_a100", "--gpus", "8..128", **few)
    assert "128 GPUs are left out: data.batch: 16 samples cannot be shared evenly" in page
    assert "strong scaling (one batch for all), against 8 GPUs" in page
    with pytest.raises(UserError, match="cannot be shared evenly"):
        call(tmp_path, "--cluster", "dgx_a100", "--gpus", "128..256", **few)


@pytest.mark.parametrize(
    ("words", "changes", "sentence"),
    [
        (["--gpus", "8"], {}, "--cluster is missing; choose one of dgx_a100"),
        (["--cluster", "dgx", "--gpus", "8"], {}, "cluster 'dgx': there is none of this name"),
        (["--cluster", "gh200", "--gpus", "256"], {}, "cluster gh200 has 168 GPUs"),
        (["--cluster", "gh200", "--gpus", "8:16"], {}, r"--gpus 8:16: expected a number"),
        (["--cluster", "gh200", "--gpus", "8", "--plot", "x.png"], {}, "--plot x.png: a curve needs a range"),
        (["--cluster", "gh200", "--gpus", "4..8", "--plot", "x.txt"], {}, "ends with .png, .svg or .pdf"),
        (["--cluster", "gh200", "--gpus", "4..8", "--plot", "no/such/x.png"], {}, "there is no folder no/such"),
        (["--cluster", "gh200", "--price", "inf"], {}, "--price inf: expected what a GPU hour costs"),
        (
            ["--cluster", "gh200", "--gpus", "16", "--as-is", "parallel.tensor=3"],
            {},
            "tensor 3 does not divide the 16 ranks",
        ),
        (
            ["--cluster", "gh200", "--gpus", "16", "--as-is", "parallel.shard=4"],
            {},
            "shard 4 does not make the 16 ranks; start 4 ranks, or set parallel.shard=16",
        ),
        (
            ["--cluster", "gh200", "--gpus", "16", "--as-is"],
            {"data__batch": 8},
            "8 samples cannot be shared evenly by 16 data-parallel ranks",
        ),
        (["--cluster", "gh200", "model.widht=3"], {}, "model.widht: unknown key; did you mean 'width'"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(words: list[str], changes: dict[str, Any], sentence: str, tmp_path) -> None:
    with pytest.raises(UserError, match=sentence):
        call(tmp_path, *words, **changes)


def test_what_does_not_fit_is_said_with_a_way_out(tmp_path) -> None:
    big = {"model__width": 8192, "model__depth": 48, "model__heads": 64}
    page = call(tmp_path, "--cluster", "dgx_a100", "--gpus", "4", **big)
    assert "it does not fit" in page
    assert "nearest that fits is" in page
    assert " !" in page


def test_a_plan_says_how_far_ones_like_it_were_off(tmp_path) -> None:
    """Of its strategy first, of half to twice its size and GPUs, and one GPU apart from more."""
    recipe, bare = ready(data__batch="8/rank", parallel__strategy="DDP")
    size = num_parameters(recipe)
    rows = (
        Checked("DDP", size, (1, 4, 8, 64), (0.5, -0.1, 0.2, 0.9)),
        Checked("FULL_SHARD", 1.5 * size, (8,), (0.3,)),
        Checked("DDP", 3 * size, (8,), (0.7,)),
    )
    cluster = dataclasses.replace(bare, checked=rows)
    found = estimate(recipe, cluster, 8).checked
    assert found is not None
    assert (found["rows"], found["strategies"], found["gpus"]) == (2, ["DDP"], [4, 8])
    assert (found["mean"], found["least"], found["most"]) == (pytest.approx(0.15), -0.1, 0.2)
    other = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": "NO_SHARD"})})
    told = plan_page.trust(estimate(other, cluster, 8), cluster)
    assert "3 plans like this one (DDP, FULL_SHARD, " in told
    assert "4 to 8 GPUs) were off by 20 % in the mean, from -10 to +30 %" in told
    assert estimate(other, cluster, 1).checked == found | {
        "rows": 1, "gpus": [1, 1], "mean": 0.5, "least": 0.5, "most": 0.5
    }  # fmt: skip
    told = f"one plan like this ({size / 1e9:.2g} billion parameters, 1 GPU) was off by +50 %"
    assert told in plan_page.trust(estimate(other, cluster, 1), cluster)
    assert "no plan of about this size" in plan_page.trust(estimate(recipe, cluster, 256), cluster)
    assert "no plan for dgx_a100 has been compared" in call(tmp_path, "--cluster", "dgx_a100", "--gpus", "8", "--as-is")


def test_what_has_room_but_for_gaps_is_tight() -> None:
    """15B on four GCDs ran with 63.1 of 64 GiB reserved: it is not like what cannot run."""
    recipe, cluster = ready()
    memory = estimate(recipe, cluster, 8).memory_gib
    for gib, fits, tight in ((1.3, True, False), (1.05, False, True), (0.9, False, False)):
        device = dataclasses.replace(cluster.device, memory_gib=gib * memory, reserve_gib=0.0, fragmentation=1.1)
        one = estimate(recipe, dataclasses.replace(cluster, device=device), 8)
        assert (one.fits, one.tight) == (fits, tight), gib
        words = "it is limited" if fits else "it may only just run" if tight else "it does not fit"
        assert plan_page.limit(one, cluster).startswith(words)


def test_parameters_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for each of its layouts, and a large model has thousands."""
    recipe, _ = ready()
    expected = num_parameters(recipe)
    monkeypatch.setattr(torch.nn.Module, "parameters", lambda *_: pytest.fail("counted again"))
    assert num_parameters(recipe) == expected


def test_what_fits_instead_can_be_pasted_into_a_shell() -> None:
    one = plan(load_recipe(tree()), cluster=load_cluster("dgx_a100"), gpus=8)[0]
    other = dataclasses.replace(one, changes=("parallel.recompute={keep: [attention]}",))
    told = plan_page.advice(other, load_cluster("dgx_a100"), 8)
    assert "nearest that fits is 'parallel.recompute={keep: [attention]}' (" in told
