"""`vitrail plan` as a person calls it: real recipes, nothing replaced, no GPU and no data."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support import LONG, ROOT
from typer.testing import CliRunner

from vitrail.cli.plan import add
from vitrail.cost import trace as tracing
from vitrail.errors import UserError

KEYS = {"strategy", "group", "tensor", "context", "pipeline", "gpus", "fits", "memory_gib", "step_seconds"}
KEYS |= {"samples_per_second", "mfu", "limited_by"}


def call(*words: str) -> str:
    app = typer.Typer()
    app.callback()(lambda: None)
    add(app)
    done = CliRunner().invoke(app, ["plan", *words])
    if done.exception is not None:
        raise done.exception
    return done.output


def layouts(*words: str) -> list[dict[str, Any]]:
    found = json.loads(call(*words, "--json"))["layouts"]
    assert all(set(one) >= KEYS for one in found)
    return found


def config(name: str) -> str:
    return str(ROOT / "configs" / name)


def test_a_recipe_as_it_is() -> None:
    plain = ("--cluster", "dgx_h100", "--gpus", "8", "--as-is", "parallel.compile=false", "data.batch=8/rank")
    (one,) = layouts(config("dummy/dit_0.5b.yaml"), *plain)
    assert (one["strategy"], one["gpus"], one["batch"], one["fits"]) == ("FULL_SHARD", 8, 64, True)
    assert 0.05 < one["mfu"] < 0.7
    assert one["mfu"] < one["hfu"]
    assert one["memory_gib"] < one["reserved_gib"] < 79
    (full,) = layouts(config("dummy/dit_0.5b.yaml"), *plain, "parallel.recompute=full")
    assert full["memory_gib"] < one["memory_gib"]
    assert full["step_seconds"] > one["step_seconds"]
    (alone,) = layouts(config("dummy/dit_0.5b.yaml"), *plain, "parallel.strategy=NO_SHARD")
    assert alone["memory_gib"] > one["memory_gib"]
    (two,) = layouts(
        config("dummy/dit_0.5b.yaml"), *plain, "parallel.tensor=2", "parallel.pipeline=2", "data.micro_batch=4"
    )
    assert (two["tensor"], two["pipeline"], two["batch"]) == (2, 2, 16)
    (short,) = layouts(config("dummy/dit_0.5b.yaml"), *plain, "parallel.context=2")
    assert short["memory_gib"] < one["memory_gib"]


def test_what_is_shown_is_what_as_is_says() -> None:
    words = (config("dummy/dit_0.5b.yaml"), "parallel.compile=false", "data.batch=8/rank", "--cluster", "dgx_h100")
    found = layouts(*words, "--gpus", "16", "--top", "4")
    assert [one["samples_per_second"] for one in found] == sorted(
        (o["samples_per_second"] for o in found), reverse=True
    )
    for one in found[:2]:
        (same,) = layouts(*words, "--gpus", "16", "--as-is", *one["changes"])
        for key in ("strategy", "group", "tensor", "context", "pipeline", "recompute", "batch", "micro_batch"):
            assert same[key] == one[key]
        for key in ("memory_gib", "step_seconds", "mfu"):
            assert same[key] == pytest.approx(one[key])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demo/mae3d.yaml", []),
        ("demo/unetr3d.yaml", ["model.channels=1", "model.classes=4"]),
        ("demo/sap3d.yaml", ["model.channels=1", "model.classes=4"]),
        ("digits/autoencoder.yaml", ["model.channels=1"]),
        ("ct/ddpm3d.yaml", ["model.channels=1"]),
    ],
)
def test_every_kind_of_model_is_planned_without_its_data(name: str, words: list[str]) -> None:
    (one,) = layouts(config(name), *words, "--cluster", "laptop", "--as-is")
    assert one["fits"]
    assert one["step_seconds"] > 0
    assert one["limited_by"]


def test_a_model_of_a_hundred_billion_parameters_is_planned_by_a_few_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace takes some tenths of a second; the other layouts are made of these."""
    path = tmp_path / "large.yaml"
    path.write_text(
        """
run: {name: large, steps: 1000}
model: {kind: vit, width: 12288, depth: 56, heads: 64, patch: 4, positions: learned}
objective: {kind: classify}
data: {train: [{kind: dummy, shape: [128, 128], channels: 48, classes: 3}], crop: 128, batch: 2/rank}
optimizer: {kind: adamw, lr: 1.0e-4}
parallel: {compile: false}
"""
    )
    traces: list[Any] = []
    trace = tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *given: traces.append(given) or trace(*given))
    tracing._work_of.cache_clear()
    whole = json.loads(call(str(path), "--cluster", "frontier", "--gpus", "512..49152", "--json"))
    assert 0 < len(traces) <= 32, len(traces)
    assert whole["parameters"] > 100e9
    assert whole["scaling"] == "weak"
    assert [one["gpus"] for one in whole["layouts"]] == [*(512 * 2**n for n in range(7)), 49152]
    assert all(one["fits"] for one in whole["layouts"])
    with pytest.raises(UserError, match="frontier has 75,264 GPUs"):
        call(str(path), "--cluster", "frontier", "--gpus", "80000")


def test_what_is_compared_is_near_what_is_traced() -> None:
    from vitrail.cost.cluster import load_cluster
    from vitrail.cost.plan import Shares, memory_for, settle, time_for
    from vitrail.parallel.mesh import layout_of
    from vitrail.recipe import load_recipe

    cluster = load_cluster("dgx_h100")
    words = ["parallel.compile=false", "data.batch=16/rank", "data.micro_batch=8"]
    for more in ([], ["parallel.tensor=4"], ["parallel.context=2"], ["parallel.recompute=full", "parallel.pipeline=2"]):
        recipe = settle(load_recipe(config("dummy/dit_0.5b.yaml"), [*words, *more]), cluster)
        layout = layout_of(recipe.parallel, 8)
        shares = Shares.of(recipe, layout)
        rough, exact = (memory_for(recipe, cluster, layout, shares, rough=rough).peak for rough in (True, False))
        assert rough == pytest.approx(exact, rel=0.3), more
        rough, exact = (time_for(recipe, cluster, layout, shares, rough=rough).seconds for rough in (True, False))
        assert rough == pytest.approx(exact, rel=0.15), more
        if "parallel.tensor=4" not in more and "parallel.context=2" not in more:  # nothing is divided
            assert rough == pytest.approx(exact)


def test_the_verb_costs_nothing_until_it_is_called() -> None:
    code = "import sys; from vitrail.cli import plan; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    assert done.stdout.strip() == "[]", done.stderr


def test_wrong_words_are_told_before_torch_is_loaded() -> None:
    for words in (
        ["--cluster", "dgx"],
        ["--cluster", "gh200", "--gpus", "5000"],
        ["--cluster", "gh200", "--price", "inf"],
    ):
        code = f"""
import sys, typer
from vitrail.errors import UserError
from vitrail.cli.plan import add
app = typer.Typer()
app.callback()(lambda: None)
add(app)
try:
    app(["plan", "nowhere.yaml", *{words}], standalone_mode=False)
except UserError as error:
    print("torch" in sys.modules, str(error)[:9])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
        assert done.stdout.startswith("False "), (done.stdout, done.stderr)


def test_no_layout_of_ones_own_on_one_gpu_is_faster_than_what_is_found() -> None:
    words = (config("vit_fsdp_study/3b.yaml"), "--cluster", "dgx_a100", "--gpus", "1", "parallel.compile=false")
    for batch in (30, 45):
        (best, *_) = layouts(*words, f"data.batch={batch}/rank", "--top", "3")
        assert best["fits"]
        for again in ("none", "{keep: [attention]}", "full"):
            for micro in (batch, batch // 3):
                more = (f"data.batch={batch}/rank", f"parallel.recompute={again}", f"data.micro_batch={micro}")
                (own,) = layouts(*words, *more, "--as-is")
                assert not own["fits"] or own["samples_per_second"] <= 1.001 * best["samples_per_second"], more
