"""Recipes: kinds, reading, extends, overrides, the sentences of errors, the way back to YAML, and the JSON Schema."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from support import ROOT

from vitrail.errors import UserError
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import UniformTokens
from vitrail.objectives.flow import FlowConfig
from vitrail.recipe import (
    SAFE_KEYS,
    Duration,
    Recipe,
    config,
    diff,
    json_schema,
    kinds,
    load_recipe,
    seconds_of,
    steps_of,
    unsafe_changes,
    yaml,
)
from vitrail.recipe.normalize import Given, MinMax, Percentiles, Window
from vitrail.recipe.plugins import load_plugin

# --- kinds for these tests alone, so that they say nothing about the real ones


@config
class Encoder:
    width: int = 64
    depth: int = 2
    heads: int = 4
    patch: int | tuple[int, ...] = 4

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


@config
class RandomMask:
    kind: Literal["random"] = "random"
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75


@config
class BlockMask:
    kind: Literal["block"] = "block"
    ratio: float = 0.5
    block: int = 2

    def __post_init__(self) -> None:
        if self.ratio >= 1:
            raise ValueError(f"ratio {self.ratio} must lie below 1")


@config
class ModelOne:
    kind: Literal["one"] = "one"
    encoder: Encoder = Encoder()
    mask: Annotated[RandomMask | BlockMask, Field(discriminator="kind")] = RandomMask()


@config
class ModelTwo:
    kind: Literal["two"] = "two"
    layers: int
    clip: float | None = 1.0


@config
class Objective:
    kind: Literal["reconstruct"] = "reconstruct"
    target: Literal["raw", "patch"] = "raw"


@config
class Volume:
    kind: Literal["volume"] = "volume"
    path: str
    region: dict[str, tuple[int | float, int | float]] | None = None
    weight: float = 1.0


@config
class Pictures:
    kind: Literal["pictures"] = "pictures"
    path: str
    weight: float = 1.0


@config
class AdamW:
    kind: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@config
class SGD:
    kind: Literal["sgd"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9


@config
class Cosine:
    kind: Literal["cosine"] = "cosine"
    warmup: Duration = "5%"


FAKE = {
    "model": {"one": ModelOne, "two": ModelTwo},
    "objective": {"reconstruct": Objective},
    "source": {"volume": Volume, "pictures": Pictures},
    "optimizer": {"adamw": AdamW, "sgd": SGD},
    "schedule": {"cosine": Cosine},
}

BASE = {
    "run": {"name": "trial", "steps": 100},
    "model": {"kind": "one"},
    "data": {"train": [{"path": "data/em.volume"}], "crop": 32, "batch": 16},
}


def guess_kind(path: str) -> str:
    if path.endswith(".volume"):
        return "volume"
    raise UserError(f"{path!r} is of no known format; give its kind")


@pytest.fixture
def fakes(monkeypatch):
    """Only the kinds above exist."""
    import vitrail.data.sources

    table = {slot: {name: f"{__name__}:{cls.__name__}" for name, cls in row.items()} for slot, row in FAKE.items()}
    monkeypatch.setattr(kinds, "BUILT_IN", table)
    monkeypatch.setattr(kinds, "_registered", {slot: {} for slot in FAKE})
    monkeypatch.setattr(vitrail.data.sources, "guess_kind", guess_kind)


def load(*overrides: str, **sections) -> Recipe:
    return load_recipe({**BASE, **sections}, overrides)


def refusal(*overrides: str, tree=None, **sections) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe({**BASE, **sections} if tree is None else tree, overrides)
    return str(caught.value)


# --- config


def test_a_config_is_frozen_and_keyword_only():
    made = Encoder(width=8, heads=2)
    assert (made.width, made.depth) == (8, 2)
    assert made == dataclasses.replace(made)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.width = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Encoder(8)  # type: ignore[misc]


def test_importing_stays_cheap():
    code = (
        "import sys, vitrail.recipe; from vitrail.recipe import config, kinds, durations, yaml\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "from vitrail.recipe import load_recipe, Recipe, json_schema, Duration, Clock, SAFE_KEYS\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        exec("from vitrail.recipe import nothing_of_this_name")


# --- durations and clocks


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (0, 0),
        (7, 7),
        ("7 steps", 7),
        ("1 step", 1),
        ("0%", 0),
        ("0 samples", 0),
        ("1%", 13),
        ("10%", 130),
        ("0.001%", 1),
        ("33.3%", 433),
        ("100%", 1300),
        ("16 samples", 1),
        ("17 samples", 2),
        ("1 sample", 1),
        ("1 epoch", 63),
        ("2.5 epochs", 157),
        ("0.001 epochs", 1),
    ],
)
def test_steps_of(duration, steps):
    assert steps_of(duration, total=1300, batch=16, epoch=1000) == steps


@pytest.mark.parametrize(
    "wrong", [-1, 1.5, True, None, "", "5", "5 %%", "-5%", "101%", "1.5 steps", "1.5 samples", "five steps", "5 weeks"]
)
def test_what_is_no_duration(wrong):
    with pytest.raises(UserError) as caught:
        steps_of(wrong, total=10, batch=2, epoch=5)
    assert str(caught.value) == (
        f"duration {wrong!r}: expected a duration in steps (200), "
        '"N samples", "N epochs" or a percent of the run ("10%")'
    )


def test_a_duration_needs_what_it_is_counted_in():
    with pytest.raises(UserError, match=r"^duration '5%': it cannot be counted in steps without the total$"):
        steps_of("5%", batch=2, epoch=5)
    with pytest.raises(
        UserError, match=r"^duration '1 epochs': it cannot be counted in steps without the batch and epo"
    ):
        steps_of("1 epochs", total=5)


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [("02:00:00", 7200), ("100:01:01", 360061), ("90m", 5400), ("2h", 7200), ("45s", 45), ("1d12h", 129600), (60, 60)],
)
def test_seconds_of(clock, seconds):
    assert seconds_of(clock) == seconds


@pytest.mark.parametrize(
    "wrong", ["", "h", "2 hours", "12h1d", "1:2:3", "00:60:00", "02:00", "-2h", "2.5h", -1, True, 1.5]
)
def test_what_is_no_clock(wrong):
    with pytest.raises(
        UserError, match=r"expected a clock such as \"02:00:00\", \"90m\", \"2h\", \"45s\" or \"1d12h\"$"
    ):
        seconds_of(wrong)


def test_spans_in_a_recipe(fakes):
    recipe = load(
        "run.steps=20 epochs", "run.time_limit=90m", "log.activations=off", "log.every=10 steps", "eval.every= 5 %"
    )
    assert (recipe.run.steps, recipe.run.time_limit) == ("20 epochs", 5400)
    assert (recipe.log.activations, recipe.log.every, recipe.eval.every) == ("off", 10, "5%")
    assert recipe.to_tree()["run"]["time_limit"] == "5400s"
    assert load("run.time_limit=01:30:00") == load("run.time_limit=90m")
    assert refusal("run.steps=10%") == (
        'run.steps: expected more than 0 steps (200), "N samples" or "N epochs", got \'10%\''
    )
    assert refusal("run.steps='100'").endswith("got '100'; write it without quotes")
    assert refusal("run.time_limit=90").endswith('"45s" or "1d12h", got 90')
    for key in ("run.steps", "checkpoint.every", "eval.every", "log.every", "log.pictures", "log.activations"):
        assert refusal(f"{key}=0").startswith(f"{key}: expected ")
    assert load("schedule.warmup=0").schedule.warmup == 0


# --- kinds


def test_kinds_are_found_by_name(fakes):
    assert kinds.find("model", "one") is ModelOne
    assert kinds.known("source") == ["pictures", "volume"]
    with pytest.raises(UserError) as caught:
        kinds.find("optimizer", "adam")
    assert str(caught.value) == (
        "optimizer.kind: 'adam' is not a known optimizer; did you mean 'adamw'? "
        "(known: adamw, sgd; a plugin's needs --plugin MODULE)"
    )
    with pytest.raises(UserError, match=r"^slot 'colour': there is no such slot of kinds; the slots are model, "):
        kinds.find("colour", "red")


def test_a_missing_library_names_its_extra(fakes, monkeypatch, tmp_path):
    (tmp_path / "fake_needy.py").write_text("import absent_library_x\n")
    (tmp_path / "fake_broken.py").write_text("from math import no_such_function\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(kinds.BUILT_IN["source"], "needy", "fake_needy:X")
    monkeypatch.setitem(kinds.BUILT_IN["source"], "broken", "fake_broken:X")
    monkeypatch.setattr(kinds.metadata, "requires", lambda name: ['absent.library_X>=2; extra == "films"', "numpy"])
    with pytest.raises(UserError) as caught:
        kinds.find("source", "needy", key="data.train.0.kind")
    assert str(caught.value) == (
        "data.train.0.kind: 'needy' needs absent_library_x, which is not installed; pip install \"vitrail[films]\""
    )
    monkeypatch.setattr(kinds.metadata, "requires", lambda name: [])
    with pytest.raises(UserError, match=r"not installed; pip install absent-library-x$"):
        kinds.find("source", "needy")
    with pytest.raises(
        UserError, match=r"^source.kind: 'broken' cannot be imported from fake_broken:X: cannot import "
    ):
        kinds.find("source", "broken")


def test_plugins_register_kinds(fakes, monkeypatch, tmp_path):
    (tmp_path / "fake_lab.py").write_text(
        "from typing import Literal\nfrom vitrail.recipe import config, kinds\n\n"
        "@config\nclass Beam:\n    kind: Literal['beam'] = 'beam'\n    path: str\n"
        "    def open(self): ...\n\n"
        "kinds.register('source', 'beam', Beam)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = {"kind": "beam", "path": "x"}
    tree = {**BASE, "data": {**BASE["data"], "train": [source, {"path": "a.volume"}]}}
    assert refusal(tree=tree) == (
        "data.train.0.kind: 'beam' is not a known source (known: pictures, volume; a plugin's needs --plugin MODULE)"
    )
    load_plugin("fake_lab")
    recipe = load_recipe(tree)
    assert [source.kind for source in recipe.data.train] == ["beam", "volume"]
    assert recipe.to_tree()["data"]["train"][0] == source


def test_plugins_that_cannot_be_loaded(fakes, monkeypatch, tmp_path):
    (tmp_path / "fake_wrong.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module, message in {
        "fake_absent.part": "--plugin fake_absent.part: cannot be imported: No module named 'fake_absent'; "
        "it is neither in the current folder nor installed: give the path of its file, or set PYTHONPATH",
        "fake_wrong": "--plugin fake_wrong: cannot be imported: fake_wrong.py:1: ZeroDivisionError: division by zero "
        "(the line: 1 / 0)",
        "../evil.py": "--plugin ../evil.py: there is no such file",
        "a-b": "--plugin 'a-b': expected a module's dotted name, such as my_lab.beamline, or the path of a file, such "
        "as my_lab/beamline.py",
    }.items():
        with pytest.raises(UserError) as caught:
            load_plugin(module)
        assert str(caught.value) == message


def test_register_refuses_what_cannot_work(fakes):
    @config
    class Second:
        kind: Literal["sgd"] = "sgd"

    with pytest.raises(UserError, match=r"^kind 'sgd': the name is already taken by another optimizer"):
        kinds.register("optimizer", "sgd", Second)
    with pytest.raises(UserError, match=r"^optimizer kind 'plain': 'dict' must be a class made with @config"):
        kinds.register("optimizer", "plain", dict)
    with pytest.raises(UserError, match=r"^optimizer kind 'other': 'SGD' must be a class made with @config"):
        kinds.register("optimizer", "other", SGD)
    with pytest.raises(UserError, match=r"^kind 'No Good': a kind's name is lower-case letters"):
        kinds.register("optimizer", "No Good", SGD)
    assert kinds.register("optimizer", "sgd", SGD) is SGD


def test_register_names_what_a_class_lacks():
    """A schedule without a warm-up ended the first step with a traceback."""

    @config
    class Bare:
        kind: Literal["bare"] = "bare"

    with pytest.raises(UserError, match=r"^schedule kind 'bare': .*no steps and no warmup and no rate; see Sched"):
        kinds.register("schedule", "bare", Bare)


def test_entry_points_are_loaded_only_when_named(fakes, monkeypatch, tmp_path):
    (tmp_path / "fake_far.py").write_text(
        "from typing import Literal\nfrom vitrail.recipe import config\n\n"
        "@config\nclass Far:\n    kind: Literal['far'] = 'far'\n    lr: float = 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        metadata.EntryPoint("far", "fake_far:Far", "vitrail.optimizer"),
        metadata.EntryPoint("bomb", "fake_absent_bomb:X", "vitrail.optimizer"),
    ]
    asked = []

    def entry_points(*, group):
        asked.append(group)
        return [point for point in points if point.group == group]

    monkeypatch.setattr(kinds.metadata, "entry_points", entry_points)
    load("optimizer.kind=sgd")
    assert asked == []
    assert "fake_far" not in sys.modules
    assert load("optimizer.kind=far").optimizer.lr == 0.5
    assert asked == ["vitrail.optimizer"]
    assert "known: adamw, bomb, far, sgd" in refusal("optimizer.kind=adm")


# --- a recipe


def test_defaults(fakes):
    recipe = load()
    assert recipe.objective == Objective()
    assert recipe.optimizer == AdamW()
    assert recipe.schedule == Cosine()
    assert recipe.data.train == (Volume(path="data/em.volume"),)
    assert recipe.run_dir == Path("runs/trial")
    assert load("run.dir=/scratch/a").run_dir == Path("/scratch/a")
    assert {name: section for name, section in recipe.to_tree().items() if name not in ("run", "model", "data")} == {
        "objective": {"kind": "reconstruct", "target": "raw"},
        "optimizer": {"kind": "adamw", "lr": 0.001, "betas": [0.9, 0.95]},
        "schedule": {"kind": "cosine", "warmup": "5%"},
        "codec": None,
        "init": None,
        "ema": None,
        "parallel": {
            "strategy": None,
            "group": None,
            "replicate": None,
            "shard": None,
            "reshard": None,
            "tensor": 1,
            "context": 1,
            "pipeline": 1,
            "ulysses": None,
            "schedule": "1F1B",
            "stages": None,
            "split": "measured",
            "wrap": 1,
            "bucket_mib": None,
            "prefetch": {"forward": 0, "backward": 1},
            "offload": False,
            "recompute": "none",
            "chunk": {"mlp": None, "head": None},
            "compile": "auto",
            "attention": "auto",
            "replay": "auto",
        },
        "precision": {"compute": "auto", "reduce": "fp32", "float8_layers": "auto"},
        "checkpoint": {"every": "10%", "keep": 2, "best": None, "background": True},
        "eval": {"every": "10%", "samples": "auto", "tiles": None, "blend": "gaussian"},
        "log": {
            "every": 10,
            "pictures": "25%",
            "slices": 8,
            "variables": None,
            "activations": "10%",
            "to": "auto",
            "report": True,
            "profile": "off",
        },
    }
    assert recipe.to_tree()["run"] == {
        "name": "trial",
        "dir": None,
        "seed": 0,
        "steps": 100,
        "patience": None,
        "time_limit": None,
        "deterministic": False,
        "device": "auto",
        "stop_after_skips": 10,
        "hang_limit": "60s",
    }
    assert recipe.to_tree()["data"] == {
        "train": [{"kind": "volume", "path": "data/em.volume", "region": None, "weight": 1.0}],
        "valid": [],
        "crop": 32,
        "batch": 16,
        "micro_batch": None,
        "augment": {
            "orientations": False,
            "flip": False,
            "rotate": 0.0,
            "rotate_axes": [],
            "scale": None,
            "shear": 0.0,
            "elastic": None,
            "chance": 1.0,
            "resized_crop": None,
            "gamma": None,
            "contrast": None,
            "brightness": 0.0,
            "noise": 0.0,
            "blur": None,
            "sections": None,
            "jitter": None,
            "mixup": 0.0,
            "cutmix": 0.0,
            "more": [],
        },
        "tiles": None,
        "fit": None,
        "filter": None,
        "mix": "size",
        "balance": None,
        "one_variable": False,
        "normalize": "fit",
        "statistics": "shared",
        "reuse": None,
        "lanes": None,
        "block": None,
        "workers": None,
        "prefetch": 2,
        "cache_mib": 512,
        "bad": "error",
        "most_bad": 100,
        "retries": 3,
        "read_limit": "120s",
        "stage": None,
    }


def test_a_recipe_is_frozen_and_leaves_its_tree_alone(fakes):
    tree = copy.deepcopy(BASE)
    recipe = load_recipe(tree, ["run.seed=3", "data.train.0.weight=2"])
    assert tree == BASE
    with pytest.raises(ValueError, match="frozen"):
        recipe.run = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.seed = 1  # type: ignore[misc]


def test_values_are_strict_but_lists_and_whole_numbers_fit(fakes):
    recipe = load("optimizer.lr=1", "optimizer.betas=[0, 1]", "model.encoder.patch=[2, 4]", "data.crop=[8, 16]")
    assert repr(recipe.optimizer.lr) == "1.0"
    assert recipe.optimizer.betas == (0.0, 1.0)
    assert recipe.model.encoder.patch == (2, 4)
    assert recipe.data.crop == (8, 16)
    assert refusal("run.seed='4'") == "run.seed: expected a whole number, got '4'; write it without quotes"
    assert refusal("run.seed=true") == "run.seed: expected a whole number, got true"
    assert refusal("run.seed=1.0") == "run.seed: expected a whole number, got 1.0"
    assert refusal("run.seed=-1") == "run.seed: expected a number of at least 0, got -1"
    assert refusal("optimizer.lr='1e-4'") == "optimizer.lr: expected a number, got '1e-4'"
    assert refusal("optimizer.lr=.nan") == "optimizer.lr: expected a finite number, got nan"
    assert refusal("optimizer.lr=.inf") == "optimizer.lr: expected a finite number, got inf"
    assert refusal("run.deterministic=1") == "run.deterministic: expected true or false, got 1"
    assert refusal("run.deterministic=yes") == "run.deterministic: expected true or false, got 'yes'"
    assert refusal("run.dir=5") == "run.dir: expected text, got 5; put it in quotes"
    assert refusal("ema.decay=1") == "ema.decay: expected a number below 1, got 1"


def test_batches_and_switches(fakes):
    assert load("data.batch=32/rank").data.global_batch(4) == 128
    assert load().data.global_batch(4) == 16
    for wrong in ("0", "-1", "1.5", "true", "32/node", "0/rank", "/rank"):
        value = yaml.parse(wrong)
        shown = repr(value) if isinstance(value, str) else json.dumps(value)
        assert (
            refusal(f"data.batch={wrong}") == f'data.batch: expected a whole number above 0, or "N/rank", got {shown}'
        )
    assert [load(f"parallel.compile={word}").parallel.compile for word in ("auto", "true", "false")] == [
        "auto",
        True,
        False,
    ]
    assert refusal("parallel.compile=1") == "parallel.compile: expected auto, true or false, got 1"
    assert load("parallel.tensor=2", "parallel.context=-1").parallel.tensor == 2
    expected = "parallel.tensor: expected a number of ranks above 0, or -1 for all that the other axes leave"
    assert refusal("parallel.tensor=0") == f"{expected}, got 0"
    assert refusal("parallel.pipeline=true").startswith("parallel.pipeline: expected a number of ranks")


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "-x", "a b", "é", "x" * 129, "a\n"])
def test_names_that_make_no_folder(fakes, name):
    tree = {**BASE, "run": {"name": name, "steps": 1}}
    assert refusal(tree=tree).startswith(
        "run.name: expected letters, digits, . _ or -, at most 128 and not starting with"
    )


def test_keys_that_do_not_go_together(fakes):
    assert load("parallel.strategy=HYBRID_SHARD", "parallel.group=2").parallel.group == 2
    assert refusal("parallel.group=2") == (
        "parallel.group: it is only for strategy HYBRID_SHARD, got 2 with FULL_SHARD; "
        "change the strategy or remove the group"
    )
    assert load("data.normalize={mean: [1, 2], std: [3, 4]}").data.normalize.std == (3.0, 4.0)
    assert refusal("data.normalize={mean: [1, 2], std: [3]}") == (
        "data.normalize: expected as many values in mean as in std, got 2 and 1"
    )
    assert refusal("data.crop=[8, 8]", "data.block=[8, 8, 8]") == (
        "data.block: expected one number per axis of data.crop, 2, got 3"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.encoder.widht=3",
            "model.encoder.widht: unknown key; did you mean 'width'? (keys here: width, depth, heads, patch)",
        ),
        (
            "data.augment.Orientation=true",
            "data.augment.Orientation: unknown key; did you mean 'orientations'? "
            "(keys here: orientations, flip, rotate, rotate_axes, scale, shear, elastic, chance, resized_crop, gamma, "
            "contrast, brightness, noise, blur, sections, jitter, mixup, cutmix, more)",
        ),
        (
            "data.train.0.weigth=3",
            "data.train.0.weigth: unknown key; did you mean 'weight'? (keys here: kind, path, region, weight)",
        ),
        ("model.mask={kind: block, colour: 1}", "model.mask.colour: unknown key (keys here: kind, ratio, block)"),
        (
            "modle.kind=one",
            "modle: unknown key; did you mean 'model'? (keys here: run, model, objective, data, optimizer, schedule, "
            "codec, init, ema, parallel, precision, checkpoint, eval, log)",
        ),
        (
            "parallel.strategy=FULLSHARD",
            "parallel.strategy: expected 'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', 'NO_SHARD' or 'DDP', "
            "got 'FULLSHARD'; did you mean 'FULL_SHARD'?",
        ),
        ("objective.target=blue", "objective.target: expected 'raw' or 'patch', got 'blue'"),
        ("model.mask.kind=blok", "model.mask.kind: expected 'random' or 'block', got 'blok'; did you mean 'block'?"),
        ("model.mask.ratio=0.5", "model.mask.kind: missing; expected one of random, block"),
        ("model.mask={kind: random, ratio: 2}", "model.mask.ratio: expected a number below 1, got 2"),
        ("model.mask={kind: block, block: 2, ratio: x}", "model.mask.ratio: expected a number, got 'x'"),
        ("model.mask={kind: block, block: x}", "model.mask.block: expected a whole number, got 'x'"),
        ("model.mask={kind: block, block: 2, ratio: 7}", "model.mask: ratio 7.0 must lie below 1"),
        ("data.crop=[8, null]", "data.crop.1: expected a whole number, got null"),
        ("model.encoder.heads=7", "model.encoder: width 64 must be a multiple of heads 7"),
        ("model.encoder.patch=x", "model.encoder.patch: expected a whole number or a list, got 'x'"),
        ("model.encoder.patch=[4, x]", "model.encoder.patch.1: expected a whole number, got 'x'"),
        ("data.crop=[]", "data.crop: expected a whole number or at least one item, got []"),
        ("data.crop=0", "data.crop: expected a number above 0 or a list, got 0"),
        ("data.train=[]", "data.train: expected at least one item, got []"),
        ("data.train=a.volume", "data.train: expected a list, got 'a.volume'"),
        ("data.train=[a.volume]", "data.train.0: expected a mapping such as {path: ...}, got 'a.volume'"),
        ("data.train=[{weight: 1}]", "data.train.0.path: missing; expected text"),
        ("data.train=[{path: 5}]", "data.train.0.path: expected text, got 5"),
        ("data.train=[{path: a.b}]", "data.train.0.path: 'a.b' is of no known format; give its kind"),
        ("data.train=[{kind: volume}]", "data.train.0.path: missing; this key is required"),
        (
            "data.normalize=fitt",
            "data.normalize: expected 'fit' or 'none' or a mapping, got 'fitt'; did you mean 'fit'?",
        ),
        (
            "data.normalize={kind: windw, window: [0, 1]}",
            "data.normalize.kind: expected 'standard', 'none', 'given', 'percentiles', 'minmax', 'window', 'log' or "
            "'variables', got 'windw'; did you mean 'window'?",
        ),
        (
            "data.normalize={kind: window, window: [400, -1000]}",
            "data.normalize: window: [400.0, -1000.0] must rise; give the smaller number first",
        ),
        ("data.normalize={kind: log, scale: 0}", "data.normalize.scale: expected a number above 0, got 0"),
        (
            "data.normalize={kind: percentiles, percentiles: [99, 1]}",
            "data.normalize: percentiles: [99.0, 1.0] must rise from 0 or more to 100 or less",
        ),
        (
            "data.normalize={kind: variables, of: {t: {kind: given, mean: [1, 2], std: [1, 2]}}}",
            "data.normalize: t: give one mean and one std, [...] of one number each",
        ),
        ("model=one", "model: expected a mapping such as {kind: one}, got 'one'"),
        ("model.kind=3", "model.kind: expected one of one, two, got 3"),
        ("optimizer=sgd", "optimizer: expected a mapping such as {kind: adamw}, got 'sgd'"),
        ("model={kind: two}", "model.layers: missing; this key is required"),
        ("run=3", "run: expected a mapping, got 3"),
        ("run.steps=null", "run.steps: missing; this key is required"),
    ],
)
def test_each_mistake_has_its_sentence(fakes, override, message):
    assert refusal(override) == message


def test_what_must_be_there(fakes):
    assert refusal(tree={}) == "\n".join(f"{name}: missing; this key is required" for name in ("run", "model", "data"))
    assert refusal(model={}) == "model.kind: missing; expected one of one, two"


def test_several_problems_are_told_together_and_at_most_ten(fakes):
    tree = {**BASE, "model": {"kind": "on"}, "optimizer": {"kind": "adamw", "lr": "x"}}
    assert refusal("run.seed=x", tree=tree) == (
        "model.kind: 'on' is not a known model; did you mean 'one'? "
        "(known: one, two; a plugin's needs --plugin MODULE)\n"
        "run.seed: expected a whole number, got 'x'\n"
        "optimizer.lr: expected a number, got 'x'"
    )
    lines = refusal(*(f"log.key{i}=1" for i in range(12))).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "and 3 more problems"
    assert len(refusal(*(f"log.key{i}=1" for i in range(10))).splitlines()) == 10


def test_a_tree_must_be_plain(fakes):
    assert load_recipe({**BASE, "run": {"name": "x", "steps": 1, "dir": Path("a/b")}}).run.dir == "a/b"
    assert load_recipe({**BASE, "ema": {"decay": 0.5}}).ema.decay == 0.5
    assert refusal(tree={**BASE, "run": {"name": "x", "steps": {1, 2}}}) == (
        "run.steps: expected a mapping, list, text, number, boolean or null, got set"
    )
    assert refusal(tree=5) == "recipe: expected a path or a mapping, got int"


# --- files, extends


@pytest.fixture
def folder(tmp_path, fakes):
    def write(**files: str) -> Path:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    write(
        base="run: {name: base, steps: 100, seed: 3, time_limit: 2h}\n"
        "model: {kind: one, encoder: {width: 32, depth: 3}}\n"
        "data: {train: [{path: a.volume}, {path: b.volume}], crop: [8, 8], batch: 4}\n"
        "optimizer: {lr: 0.5}\n"
        "ema: {decay: 0.9}\nlog: {every: 3}\n"
    )
    return write


def test_a_child_changes_its_parent(folder):
    path = folder(
        child="extends: base.yaml\nrun: {name: child}\nmodel: {encoder: {depth: 5}}\n"
        "data: {train: [{path: c.volume}]}\n"
    )
    recipe = load_recipe(path / "child.yaml")
    assert (recipe.run.name, recipe.run.steps) == ("child", 100)
    assert recipe.model.encoder == Encoder(width=32, depth=5)
    assert [source.path for source in recipe.data.train] == ["c.volume"]
    assert recipe.optimizer == AdamW(lr=0.5)
    assert "extends" not in recipe.to_tree()


def test_null_clears_what_the_parent_says(folder):
    path = folder(
        child="extends: base.yaml\nrun: {seed: null, time_limit: null}\nema: null\nlog: null\noptimizer: null\n",
        two="extends: base.yaml\nmodel: {kind: two, layers: 1, clip: null}\n",
        steps="extends: base.yaml\nrun: {steps: null}\n",
    )
    recipe = load_recipe(path / "child.yaml")
    assert (recipe.run.seed, recipe.run.time_limit, recipe.ema, recipe.log.every) == (0, None, None, 10)
    assert recipe.optimizer == AdamW()
    # where null is a value, it is that value and not the default
    assert load_recipe(path / "two.yaml").model.clip is None
    assert refusal(tree=path / "steps.yaml") == "run.steps: missing; this key is required"
    # without a parent there is nothing to clear
    assert refusal(run={**BASE["run"], "seed": None}) == "run.seed: expected a whole number, got null"
    assert load_recipe(path / "base.yaml", ["run.seed=null", "data.valid=null", "log=null"]).run.seed == 0
    assert refusal("data.crop.0=null", tree=path / "base.yaml") == "data.crop.0: expected a whole number, got null"
    assert refusal("run.sed=null").startswith("run.sed: unknown key; did you mean 'seed'?")


def test_another_kind_drops_the_parents_keys(folder):
    path = folder(
        kind="extends: base.yaml\nmodel: {kind: two, layers: 1}\n",
        same="extends: base.yaml\nmodel: {kind: one, encoder: {depth: 1}}\n",
        default="extends: base.yaml\noptimizer: {kind: sgd}\n",
    )
    assert load_recipe(path / "kind.yaml").model == ModelTwo(layers=1)
    assert load_recipe(path / "same.yaml").model.encoder == Encoder(width=32, depth=1)
    assert load_recipe(path / "default.yaml").optimizer == SGD()  # the parent's lr was adamw's


def test_another_kind_inside_a_model_keeps_what_it_knows(fakes):
    model = {"kind": "one", "mask": {"kind": "block", "ratio": 0.9, "block": 4}}
    for override in ("model.mask.kind=random", "model.mask={kind: random}"):
        assert load(override, model=model).model.mask == RandomMask(ratio=0.9)
        assert "block: unknown key" in refusal(override, "model.mask.block=3", model=model)
    assert "model.mask.blok: unknown key" in refusal("model.mask={kind: random, blok: 2}", model=model)
    assert "model.mask.blok: unknown key" in refusal(model={"kind": "one", "mask": {"kind": "random", "blok": 2}})


def test_another_kind_drops_the_keys_of_a_short_spelling(fakes):
    for short in (
        {"mean": [1.0], "std": [2.0]},
        {"percentiles": [1, 99]},
        {"mean": None, "std": [], "percentiles": [1, 9]},
    ):
        data = {**BASE["data"], "normalize": short}
        assert load("data.normalize={kind: window, window: [0, 9]}", data=data).data.normalize == Window(
            window=(0.0, 9.0)
        )
        assert load("data.normalize.kind=minmax", data=data).data.normalize == MinMax()
        assert load("data.normalize={mean: [3], std: [4]}", data=data).data.normalize == Given(mean=(3.0,), std=(4.0,))
    data = {**BASE["data"], "normalize": {"kind": "window", "window": [0, 9]}}
    assert load("data.normalize={percentiles: [2, 98]}", data=data).data.normalize == Percentiles(
        percentiles=(2.0, 98.0)
    )


@pytest.mark.parametrize("name", ["imagenet/mae_b16_adaptive", "imagenet/vit_b16_adaptive", "ct/sap3d", "ct/unetr3d"])
def test_patches_take_the_place_of_trees(name):
    """Of a recipe whose tokens are adaptive, with all of their keys."""
    key = "model.tokens" if "vit" in name else "model.encoder.tokens"
    recipe = load_recipe(ROOT / f"configs/{name}.yaml", [f"{key}={{kind: uniform}}"])
    assert getattr(recipe.model, "encoder", recipe.model).tokens == UniformTokens()
    other = load_recipe(ROOT / f"configs/{name}.yaml", [f"{key}.score={{kind: gradient}}"])
    assert getattr(other.model, "encoder", other.model).tokens.score == GradientScore()


def test_extends_follows_files(folder):
    path = folder(
        middle="extends: ../base.yaml\nrun: {seed: 4}\n",
        ring_a="extends: ring_b.yaml\n",
        ring_b="extends: ring_a.yaml\n",
        lost="extends: nowhere.yaml\n",
        number="extends: 5\n",
        twice="extends: broken.yaml\n",
        broken="run: {name: a, name: b}\n",
        empty="# nothing\n",
        items="- a\n",
    )
    (path / "deep").mkdir()
    (path / "middle.yaml").rename(path / "deep/middle.yaml")
    (path / "deep/leaf.yaml").write_text("extends: middle.yaml\nrun: {name: leaf}\n")
    recipe = load_recipe(str(path / "deep/leaf.yaml"))
    assert (recipe.run.name, recipe.run.seed, recipe.run.steps) == ("leaf", 4, 100)
    assert load_recipe({"extends": str(path / "base.yaml"), "run": {"seed": 7}}).run.seed == 7
    a, b = path / "ring_a.yaml", path / "ring_b.yaml"
    assert refusal(tree=a) == (
        f"extends: recipes may not extend each other in a ring ({a} -> {b} -> {a}); remove one extends"
    )
    assert refusal(tree=path / "lost.yaml") == (
        f"extends: {path}/lost.yaml extends {path}/nowhere.yaml, which is not a file"
    )
    assert refusal(tree=path / "number.yaml") == "extends: expected the path of a recipe, got 5"
    assert refusal(tree=path / "twice.yaml") == (
        f"{path}/broken.yaml:1: key 'name' is given twice, first on line 1; keep one"
    )
    assert refusal(tree=path / "empty.yaml") == (
        f"{path}/empty.yaml: the file is empty; expected a recipe with run, model and data"
    )
    assert refusal(tree=path / "items.yaml") == (
        f'{path}/items.yaml: expected a mapping with run, model and data, got ["a"]'
    )
    assert refusal(tree=path / "none.yaml") == f"{path}/none.yaml: there is no such file"
    assert refusal(tree="a\0b") == "'a\\x00b': this is not the path of a file"


# --- overrides


def test_overrides(fakes):
    recipe = load(
        "optimizer.lr=1e-4",
        "run.name=NO",
        "ema.decay=0.5",
        "data.train.0.path=other.volume",
        "data.crop=[8, 8]",
        "data.crop.1=4",
        "model.encoder={depth: 7}",
        "run.seed=1",
        "run.seed=2",
    )
    assert recipe.optimizer.lr == 1e-4
    assert recipe.run.name == "NO"
    assert recipe.ema.decay == 0.5
    assert recipe.data.train[0].path == "other.volume"
    assert recipe.data.crop == (8, 4)
    assert recipe.model.encoder.depth == 7
    assert recipe.run.seed == 2
    assert load_recipe(BASE, "run.seed=5").run.seed == 5


def test_an_override_of_the_kind_comes_first(fakes):
    for words in (["optimizer.kind=sgd", "optimizer.momentum=0.5"], ["optimizer.momentum=0.5", "optimizer.kind=sgd"]):
        assert load(*words, optimizer={"lr": 0.7}).optimizer == SGD(momentum=0.5)
    assert load("optimizer={kind: sgd, lr: 3}", optimizer={"lr": 0.7}).optimizer == SGD(lr=3.0)
    assert load("optimizer.kind=adamw", optimizer={"lr": 0.7}).optimizer == AdamW(lr=0.7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed", "override 'run.seed': expected key=value, such as run.steps=100"),
        ("=3", "override '=3': expected a dotted key before the =, such as run.steps=100"),
        ("run..seed=3", "override 'run..seed=3': expected a dotted key before the =, such as run.steps=100"),
        ("--seed 3=4", "override '--seed 3=4': expected a dotted key before the =, such as run.steps=100"),
        ("run.seed=", "override 'run.seed=': expected a value after the =; write run.seed=null to clear the key"),
        ("run.seed.x=3", "override run.seed.x: run.seed is 9, which has no keys; set run.seed itself"),
        (
            "data.train.1.path=x",
            "override data.train.1.path: data.train is a list of 1 item, counted from 0, so 1 is not in it",
        ),
        (
            "data.train.first.path=x",
            "override data.train.first.path: data.train is a list of 1 item, counted from 0, so 'first' is not in it",
        ),
        ("run.seed=[1", "override 'run.seed=[1':1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        (
            "run={seed: 1, seed: 2}",
            "override 'run={seed: 1, seed: 2}':1: key 'seed' is given twice, first on line 1; keep one",
        ),
        ("extends=base.yaml", "override 'extends=base.yaml': extends belongs in a file; write it there"),
    ],
)
def test_overrides_that_are_none(fakes, override, message):
    assert refusal(override, run={**BASE["run"], "seed": 9}) == message


# --- there and back


def test_a_resolved_recipe_loads_back_to_an_equal_one(fakes, tmp_path):
    recipe = load(
        "run.time_limit=90m",
        "run.name='1e-4'",
        "optimizer.lr=1e-5",
        "data.batch=32/rank",
        "data.normalize={mean: [0.1], std: [1]}",
        "data.crop=[8, 16]",
        "data.valid=[{kind: pictures, path: NO}]",
        "data.train=[{path: a.volume, region: {x: [0, 0.8], y: [0, 512]}}, {kind: pictures, path: 'é: 010'}]",
        "model.mask={kind: block, ratio: 0.25}",
        "ema={}",
        "parallel.compile=false",
    )
    tree = recipe.to_tree()
    assert json.loads(json.dumps(tree)) == tree
    assert load_recipe(tree) == recipe
    assert load_recipe(recipe) == recipe
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert again.data.train[0].region == {"x": (0, 0.8), "y": (0, 512)}
    assert again != load("run.seed=1")
    assert "name: '1e-4'" in recipe.to_yaml()


def test_differences(fakes):
    old, new = load(), load("run.seed=1", "ema={}", "data.train.0.weight=2", "log.every=5", "data.crop=[8, 8]")
    assert diff(old.to_tree(), new.to_tree()) == [
        ("run.seed", 0, 1),
        ("data.train.0.weight", 1.0, 2.0),
        ("data.crop", 32, [8, 8]),
        ("ema", None, {"decay": 0.999}),
        ("log.every", 10, 5),
    ]
    assert [key for key, _, _ in unsafe_changes(old.to_tree(), new.to_tree())] == [
        "run.seed",
        "data.train.0.weight",
        "data.crop",
        "ema",
    ]
    assert diff({"a": 1}, {"a": True}) == [("a", 1, True)]
    assert diff({"a": [1]}, {"b": None, "a": [1, 2]}) == [("a", [1], [1, 2])]
    added = load("data.train=[{path: a.volume}, {path: b.volume}]").to_tree()
    assert [key for key, _, _ in diff(old.to_tree(), added)] == ["data.train"]


def test_only_safe_keys_may_change(fakes):
    old = load().to_tree()
    safe = load(
        *("run.steps=200", "run.name=b", "run.dir=x", "run.time_limit=1h", "run.device=cpu", "run.stop_after_skips=3"),
        *("data.workers=1", "data.prefetch=3", "data.cache_mib=9", "data.micro_batch=2", "parallel.strategy=DDP"),
        *("checkpoint.keep=5", "eval.samples=8", "log.every=1", "run.hang_limit=5m"),
    ).to_tree()
    assert len(diff(old, safe)) == 15
    assert unsafe_changes(old, safe) == []
    known = load().to_tree()
    known["objective"] |= vars(FlowConfig())
    for key in SAFE_KEYS:
        section, _, name = key.partition(".")
        assert not name or name in known[section], f"{key} is no key of a recipe"
    assert unsafe_changes({"logs": 1}, {"logs": 2}) == [("logs", 1, 2)]


# --- the real kinds

EXAMPLE = """
run: {name: demo-mae3d, seed: 0, steps: 1300}
model:
  kind: mae
  ndim: 3
  encoder: {width: 128, depth: 4, heads: 4, patch: 4, positions: rope}
  mask: {kind: random, ratio: 0.75}
  decoder: {kind: cross, width: 96, depth: 1, heads: 4, decode_ratio: 1.0}
objective: {kind: reconstruct, target: raw, on: hidden}
data:
  train: [{path: data/em.zarr, variables: [em], region: {x: [0, 0.8]}}]
  valid: [{path: data/em.zarr, variables: [em], region: {x: [0.8, 1]}}]
  crop: 32                       # one number or one per axis
  batch: 16
  augment: {orientations: true}
optimizer: {kind: adamw, lr: 2.0e-3, betas: [0.9, 0.95], weight_decay: 0.05, clip: 1.0, lr_scaling: none}
schedule: {kind: cosine, warmup: 5%, start: 0, end: 0}
ema: {decay: 0.999}
parallel: {strategy: FULL_SHARD, tensor: 1, context: 1, pipeline: 1, recompute: none, compile: auto}
precision: {compute: bf16, reduce: fp32}
checkpoint: {every: 200, keep: 2}
eval: {every: 200}
log: {every: 10, pictures: 200, tensorboard: auto, profile: off}
"""


def test_the_example_loads_with_the_real_kinds():
    recipe = load_recipe(yaml.parse(EXAMPLE))
    assert (recipe.model.kind, recipe.model.ndim, recipe.model.encoder.width) == ("mae", 3, 128)
    assert recipe.objective.kind == "reconstruct"
    assert [source.kind for source in (*recipe.data.train, *recipe.data.valid)] == ["ome_zarr", "ome_zarr"]
    assert recipe.optimizer.lr == 2e-3
    assert recipe.schedule.warmup == "5%"
    assert load_recipe(yaml.parse(recipe.to_yaml())) == recipe
    assert refusal("model.encoder.widht=3", tree=yaml.parse(EXAMPLE)).startswith(
        "model.encoder.widht: unknown key; did you mean 'width'? (keys here: "
    )


def test_loading_with_real_kinds_reads_every_slot():
    tree = yaml.parse(EXAMPLE)
    for words in (
        ["optimizer.kind=sgd"],
        *([f"schedule.kind={name}"] for name in kinds.BUILT_IN["schedule"]),
        ["model={kind: vit, size: S/16}"],
        ["data.valid=[{kind: image_folder, path: pictures}]"],
    ):
        recipe = load_recipe(tree, words)
        assert load_recipe(recipe.to_tree()) == recipe


def test_every_built_in_kind_is_there():
    for slot, row in kinds.BUILT_IN.items():
        for name in row:
            defaults = {field.name: field.default for field in dataclasses.fields(kinds.find(slot, name))}
            assert defaults["kind"] == name


def fits(value, part, schema) -> bool:
    """Whether a value fits a part of a JSON Schema: the few words of it that the recipe's schema uses."""
    if "$ref" in part:
        target = schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
        return fits(value, target, schema) and fits(value, {k: v for k, v in part.items() if k != "$ref"}, schema)
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in part:
        if not isinstance(value, types[part["type"]]):
            return False
        if isinstance(value, bool) and part["type"] != "boolean":
            return False
    if "const" in part and (type(value), value) != (type(part["const"]), part["const"]):
        return False
    if "enum" in part and (type(value), value) not in [(type(choice), choice) for choice in part["enum"]]:
        return False
    if "anyOf" in part and not any(fits(value, choice, schema) for choice in part["anyOf"]):
        return False
    if "oneOf" in part and sum(fits(value, choice, schema) for choice in part["oneOf"]) != 1:
        return False
    if isinstance(value, dict):
        known, others = part.get("properties", {}), part.get("additionalProperties", True)
        if set(part.get("required", [])) - set(value):
            return False
        if others is False and set(value) - set(known):
            return False
        inner = others if isinstance(others, dict) else {}
        return all(fits(item, known.get(name, inner), schema) for name, item in value.items())
    if isinstance(value, list):
        if not part.get("minItems", 0) <= len(value) <= part.get("maxItems", len(value)):
            return False
        first = part.get("prefixItems", [])
        return all(
            fits(item, first[i] if i < len(first) else part.get("items", {}), schema) for i, item in enumerate(value)
        )
    if isinstance(value, str):
        return re.search(part.get("pattern", ""), value) is not None
    return True


def test_the_json_schema_takes_what_the_reader_takes():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(schema)) == schema
    tree = yaml.parse(EXAMPLE)
    resolved = load_recipe(tree).to_tree()
    short = {**tree, "optimizer": {"lr": 1}, "log": {"activations": "off"}, "extends": "base.yaml"}
    for name in ("objective", "schedule", "ema"):
        del short[name]

    def changed(section, **keys):
        return {**tree, section: {**tree[section], **keys}}

    right = [tree, resolved, short, changed("data", batch="32/rank"), changed("parallel", compile=False)]
    wrong = [
        {},
        {**tree, "optimiser": {}},
        changed("model", kind="mea"),
        {**tree, "model": {name: value for name, value in tree["model"].items() if name != "kind"}},
        changed("run", steps="10%"),
        changed("run", seed="4"),
        changed("data", batch="32/node"),
        changed("data", train=[]),
        changed("data", train=[{"kind": "ome_zarr"}]),
        changed("parallel", compile="yes"),
        changed("model", encoder={"widht": 3}),
    ]
    assert [fits(case, schema, schema) for case in right] == [True] * len(right)
    assert [fits(case, schema, schema) for case in wrong] == [False] * len(wrong)
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        return
    validator = Draft202012Validator(schema)
    Draft202012Validator.check_schema(schema)
    assert [validator.is_valid(case) for case in right] == [True] * len(right)
    assert [validator.is_valid(case) for case in wrong] == [False] * len(wrong)


def test_the_json_schema_names_and_describes_the_keys():
    schema = json_schema()
    assert list(schema["properties"]) == ["extends", *load_recipe(yaml.parse(EXAMPLE)).to_tree()]
    assert schema["required"] == ["run", "model", "data"]
    assert schema["properties"]["extends"]["description"]
    assert schema["$defs"]["Run"]["properties"]["seed"]["description"] == "seed of every random draw"
    assert schema["$defs"]["Data"]["description"]
    assert set(schema["properties"]["model"]["discriminator"]["mapping"]) == set(kinds.BUILT_IN["model"])
