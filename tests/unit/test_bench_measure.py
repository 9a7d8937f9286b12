"""One recipe measured in this process: the numbers belong together, and measuring leaves no trace in the trainer."""

import contextlib
import statistics
import time
import types

import pytest
import torch
from support import ROOT

from vitrail.bench import bench, check_mode
from vitrail.bench import measure as measuring
from vitrail.bench import measure as splitting
from vitrail.bench.measure import Marks, marked, slowest, used_since
from vitrail.bench.runner import alone, describe, name_recompute
from vitrail.errors import UserError
from vitrail.parallel import check, float8
from vitrail.recipe import load_recipe
from vitrail.recipe.sections import Recompute
from vitrail.report.bench_cells import spread
from vitrail.training import diagnose

TOY = ROOT / "configs" / "ablate" / "dit_toy.yaml"
MAE = {
    "run": {"name": "toy-mae", "steps": 5, "device": "cpu"},
    "model": {
        "kind": "mae",
        "ndim": 3,
        "encoder": {"width": 24, "depth": 2, "heads": 2, "patch": 4},
        "mask": {"kind": "random", "ratio": 0.75},
        "decoder": {"kind": "self", "width": 16, "depth": 1, "heads": 2},
    },
    "data": {"train": [{"kind": "dummy", "shape": [16, 16, 16], "channels": 1}], "crop": 16, "batch": 4},
}


@pytest.fixture(autouse=True)
def alone_here(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_numbers_of_a_result_belong_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = bench(TOY, ["run.device=cpu", "data.micro_batch=4"], mode="syn", windows=4, steps=3, warm_up=2)
    assert not list(tmp_path.iterdir())  # no run folder
    assert (found["status"], found["mode"], found["model"], found["size"]) == ("ok", "syn", "dit", "0.5B/2")
    assert (found["gpus"], found["nodes"], found["strategy"], found["precision"]) == (1, 1, "FULL_SHARD", "fp32")
    assert (found["batch"], found["batch_per_rank"], found["tokens_all"], found["warm_up"]) == (8, 8, 16, 2)
    assert found["layout"] == {"pipeline": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 1}
    assert len(found["windows"]) == 4
    step = found["step_seconds"]
    assert step["median"] == pytest.approx(statistics.median(found["windows"]))
    assert min(found["windows"]) <= step["low"] <= step["median"] <= step["high"] <= max(found["windows"])
    assert found["samples_per_s"] == pytest.approx(8 / step["median"])
    assert found["images_per_s"] == found["samples_per_s"]
    assert found["tokens_per_s"]["all"] == pytest.approx(16 * found["samples_per_s"])
    model = load_recipe(TOY)
    assert found["parameters"] > 100_000
    assert model.run.name == found["recipe"]
    split = found["split"]
    assert split["communication"] is None
    assert all(split[part] > 0 for part in ("forward", "backward", "optimizer"))
    assert found["tflops"] > 0
    assert found["mfu"] is found["hfu"] is found["energy_j"] is None  # unknown for a CPU
    assert found["memory"]["per_rank"] == [found["memory"]["allocated_gib"]]
    assert found["loss"] > 0
    assert {"device", "torch", "python", "vitrail", "commit"} <= set(found["environment"])


@pytest.mark.parametrize("module", [measuring, diagnose])
def test_the_schedule_of_a_measurement_never_ends(module, monkeypatch):
    def seen(recipe, *_):
        raise InterruptedError(recipe.run.steps, recipe.schedule.steps)

    monkeypatch.setattr(module, "opened_as_is", seen)
    with pytest.raises(InterruptedError) as caught:
        (bench if module is measuring else diagnose.bench)(TOY, overrides=["schedule.steps=20"])
    assert caught.value.args == (diagnose.LONG, None)


def test_tokens_that_are_hidden_are_counted_apart_and_volumes_are_no_images():
    found = bench(MAE, mode="real", windows=2, steps=2)
    assert (found["tokens_all"], found["tokens_visible"]) == (64, 16)
    assert found["tokens_per_s"]["visible"] * 4 == pytest.approx(found["tokens_per_s"]["all"])
    assert found["images_per_s"] is None
    assert 0 < found["split"]["data"] <= max(found["windows"])
    assert found["warm_up"] >= 4  # batches that were read while nothing was computed do not count
    assert load_recipe(MAE).parallel.strategy is None
    assert found["strategy"] == "FULL_SHARD"


def test_loading_alone_builds_no_model(monkeypatch):
    monkeypatch.setattr("vitrail.training.diagnose.build_model", None)
    found = bench(MAE, mode="io", windows=2, steps=3)
    assert found["samples_per_s"] > 0
    assert found["split"]["forward"] is found["tflops"] is found["loss"] is None
    assert found["parameters"] > 1000


def test_modes_and_numbers_are_checked(monkeypatch):
    with pytest.raises(UserError, match="did you mean 'compute'"):
        check_mode("comput")
    for options, words in (
        ({"windows": 0}, "windows: 0 must be at least 1"),
        ({"steps": 0}, "steps: 0"),
        ({"warm_up": 0}, "warm_up: 0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=words):
            bench(TOY, **options)
    monkeypatch.setattr(measuring, "find_world", lambda: types.SimpleNamespace(size=2))
    with pytest.raises(UserError, match="one rank alone"):
        bench(TOY, mode="compute")


def test_one_rank_alone_takes_the_work_of_one_of_several():
    recipe = load_recipe(TOY, ["parallel.strategy=HYBRID_SHARD", "parallel.group=2", "data.batch=32"])
    changed = load_recipe(recipe.to_tree(), alone(recipe, 4))
    assert (changed.data.batch, changed.parallel.strategy, changed.parallel.group) == (8, "NO_SHARD", None)
    with pytest.raises(UserError, match="tensor 2 computes a part of a sample"):
        alone(load_recipe(TOY, ["parallel.tensor=2"]), 4)


def test_facts_are_known_before_the_data_are():
    recipe = load_recipe(MAE, ["model.encoder={size: B/4}", "data.batch=4/rank", "parallel.recompute={every: 2}"])
    found = describe(recipe, gpus=4, nodes=2, on_gpu=True)
    assert (found["size"], found["batch"], found["batch_per_rank"], found["recompute"]) == ("B/4", 16, 4, "every=2")
    assert (found["precision"], found["compile"], found["layout"]["shard"]) == ("bf16", True, 4)
    mixed = describe(load_recipe(MAE, ["parallel.shard=2", "parallel.replicate=2"]), gpus=4, nodes=1, on_gpu=False)
    assert (mixed["strategy"], mixed["size"], mixed["precision"]) == (None, None, "fp32")


def test_warm_up_ends_when_steps_are_steady(monkeypatch):
    monkeypatch.setattr(measuring, "share_json", lambda value, group: value)
    place = types.SimpleNamespace(control=None, device=torch.device("cpu"))

    def steps_taken(times, lead=0, wanted=None, recording=0):
        times = iter(times)
        clock = types.SimpleNamespace(work=types.SimpleNamespace(lead=lead, recording=recording))
        clock.take = lambda count: [(next(times), 0.0) for _ in range(count)]
        return len(measuring._warm_up(clock, wanted, place))

    slow_start = [9.0, 3.0, 1.0, 1.0, 1.05, *[1.0] * 30]
    assert steps_taken(slow_start) == 5
    assert steps_taken(slow_start, lead=8) == 8
    assert steps_taken(slow_start, wanted=2) == 2
    assert steps_taken([1.0] * 30, recording=4) == 7  # steady before a pass is recorded, and again after that
    assert steps_taken([1.0, 2.0] * 30) == measuring.MOST_WARM
    assert steps_taken([1.0] * 60, lead=40) == 40  # read ahead while nothing ran


def test_the_slowest_rank_counts_and_nothing_but_steps_is_timed(monkeypatch):
    """As if a second rank took twice as long; what is done between the warm-up and the windows takes a day."""
    events, build, told, later = [], measuring._Work.__init__, [], [0.0]

    def take_long(seconds):
        later[0] = 86400.0
        return 2

    def begin(self, *words):
        events.append("model")
        build(self, *words)

    monkeypatch.setattr(measuring, "retries_of", lambda device: events.append("retries") or 10 * len(events))
    monkeypatch.setattr(measuring._Work, "__init__", begin)
    monkeypatch.setattr(measuring, "_fitting_steps", take_long)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda clock=time.perf_counter: clock() + later[0])

    def gather(value, group):
        other = value | {"windows": [2 * seconds for seconds in value["windows"]], "wait": 3 * value["wait"]}
        told.append(value)
        return [value, other]

    monkeypatch.setattr(measuring, "gather_json", gather)
    found = bench(MAE, mode="io", windows=2, warm_up=2)
    assert events == ["retries", "model", "retries"]
    assert found["retries"] == 2 * (30 - 10)
    assert found["windows"] == [2 * seconds for seconds in told[0]["windows"]]
    assert found["split"]["data"] == 3 * told[0]["wait"]
    assert found["samples_per_s"] == pytest.approx(4 / statistics.median(found["windows"]))
    assert max(told[0]["windows"]) < 43200


def test_what_is_done_in_float8_is_the_recipes_choice_and_noted(monkeypatch):
    asked = []

    def apply(model, *, device, rows, force):
        asked.append(force)
        return "float8 in some layers"

    monkeypatch.setattr(check, "_no_float8", lambda recipe: None)
    monkeypatch.setattr(float8, "apply", apply)
    for layers in ("auto", "all"):
        words = ["precision.compute=float8", f"precision.float8_layers={layers}"]
        found = bench(TOY, words, mode="syn", windows=1, steps=1, warm_up=1)
        assert found["notes"][0] == "float8 in some layers"
    assert asked == [False, True]


def test_marks_stand_between_the_parts_of_a_step_and_go_away():
    calls = []

    class Gradients:
        def add_up(self):
            calls.append("add up")

    class Trainer:
        place = types.SimpleNamespace(device=torch.device("cpu"))

        def __init__(self):
            self.replay = types.SimpleNamespace(make_way=lambda: calls.append("make way"))
            self.flow = types.SimpleNamespace(gradients=Gradients(), pipeline=None, replay=self.replay)

        @contextlib.contextmanager
        def expecting(self, coming):
            calls.append(coming())
            yield
            calls.append("as before")

        def prepare(self, micro):
            return micro

        def judge(self, output, targets):
            return output + targets

    trainer, marks = Trainer(), Marks(torch.device("cpu"))
    with contextlib.suppress(ZeroDivisionError), marked(trainer, marks):
        assert trainer.flow.replay is None
        assert trainer.prepare(3) == 3
        assert trainer.judge(1, 2) == 3
        trainer.flow.gradients.add_up()
        raise ZeroDivisionError
    assert [part for part, _ in marks.points] == ["forward", "backward", "optimizer"]
    assert calls == ["make way", None, "add up"]
    assert "prepare" not in vars(trainer)
    assert trainer.flow.replay is trainer.replay
    assert "add_up" not in vars(trainer.flow.gradients)


def test_parts_of_a_replayed_pass_have_the_shares_of_one_that_never_waits_for_launches(monkeypatch):
    """Here a launched step takes 1 s, of which 0.2 s are the optimizer's; replayed it takes 0.6 s, 0.7 with a wait."""
    clock = [0.0]
    monkeypatch.setattr(splitting.time, "perf_counter", lambda: clock[0])
    held = []
    monkeypatch.setattr(splitting, "hold", lambda seconds: (held.append(seconds), spend(seconds)))

    def spend(seconds):
        clock[0] += seconds

    class Trainer:
        place = types.SimpleNamespace(device=torch.device("cpu"))
        flow = types.SimpleNamespace(
            gradients=type("Gradients", (), {"add_up": lambda self: None})(),
            pipeline=None,
            replay=types.SimpleNamespace(make_way=lambda: None),
        )
        expecting = staticmethod(contextlib.nullcontext)

        def prepare(self, micro):
            spend(0.2)

        def judge(self, output, targets):
            pass

    def act(batch):
        trainer.prepare(batch)
        trainer.judge(0, 0)
        spend(0.6)
        trainer.flow.gradients.add_up()
        spend(0.2)

    trainer = Trainer()
    found = splitting.split_step(trainer, iter(range(9)), act, 0.6)
    assert held == [pytest.approx(1.0)] * 2 * splitting.STEPS  # before each forward and each backward
    parts = {"data": 0.0, "forward": 0.1, "backward": 0.3, "optimizer": 0.2}
    assert found == pytest.approx(parts)
    found = splitting.split_step(trainer, iter(range(9)), act, 0.7, wait=0.1)  # here it never waits, as it is held
    assert found == pytest.approx(parts | {"data": 0.1})
    trainer.flow.replay, held[:] = None, []
    batches = iter(range(9))
    found = splitting.split_step(trainer, batches, act, 1.0)
    assert found == pytest.approx({"data": 0.0, "forward": 0.2, "backward": 0.6, "optimizer": 0.2})
    assert not held
    assert next(batches) == splitting.STEPS + 1  # one before, as with replay


def test_small_sums():
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert slowest([[1.0, 2.0], [3.0, 1.0]]) == [3.0, 2.0]
    assert (used_since(2.0, 5.0), used_since(None, 5.0), used_since(2.0, None)) == (3.0, None, None)
    assert name_recompute("full") == "full"
    assert name_recompute(Recompute(every=2)) == "every=2"
    assert name_recompute(Recompute(keep=("qkv", "fc1"))) == "keep=qkv+fc1"
