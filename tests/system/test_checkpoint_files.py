"""A run whose checkpoints were damaged, by accident or on purpose: what is bad is named, what is good is used."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damage import (
    MALICE,
    MANIFEST,
    MARKER,
    METADATA,
    TENSORS,
    Payload,
    flip,
    put_in_tensors,
    put_metadata,
    reseal,
    truncate,
)
from support import run, tiny_recipe, torchrun, vitrail, write_recipe
from watching import assert_same, call, last_line, saved, steps_saved

import vitrail as package
from vitrail.errors import UserError
from vitrail.training import run as run_module
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.run import evaluate, train
from vitrail.weights import runs
from vitrail.weights.runs import list_checkpoints

CHANGES = {
    "ema": {"decay": 0.9},
    "schedule": {"kind": "constant", "warmup": 0},  # so that a run may be lengthened and stay the same
    "log__pictures": 1000,
    "log__activations": "off",
    "eval__every": 1000,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def home(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: 15 steps at once. `begun`: 10 steps, with checkpoints at 5 and 10."""
    home = tmp_path_factory.mktemp("files")
    train(tiny_recipe(volume, home / "whole", run__steps=15, **CHANGES), quiet=True)
    train(tiny_recipe(volume, home / "begun", run__steps=10, checkpoint__every=5, **CHANGES), quiet=True)
    assert steps_saved(home / "begun") == [10, 5]
    return home


@pytest.fixture
def begun(home: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of the run to be damaged; a payload that ran would leave its mark in the working folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(home / "begun", tmp_path / "run"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half of the tensors": lambda f: truncate(f, TENSORS, 0.5),
    "a bit of the manifest": lambda f: flip(f, MANIFEST, 1),
    "no metadata": lambda f: (f / METADATA).unlink(),
    "a call in the metadata": lambda f: put_metadata(f, MALICE["hidden in good metadata"][0]),
    "an entry of bytes": lambda f: put_metadata(f, MALICE["bytes entry"][0]),
    "a call in the tensors": lambda f: put_in_tensors(f, Payload()),
}
MORE: dict[str, Callable[[Path], object]] = {
    "nothing left of the tensors": lambda f: truncate(f, TENSORS, 0),
    "99 % of the manifest": lambda f: truncate(f, MANIFEST, 0.99),
    "a bit of the tensors": lambda f: flip(f, TENSORS, 1),
    "a bit of the metadata": lambda f: flip(f, METADATA, 1),
    "no manifest": lambda f: (f / MANIFEST).unlink(),
    "an extra file": lambda f: (f / "more").write_text("x"),
    "a path that leads out": lambda f: put_metadata(f, MALICE["path up"][0]),
}


@pytest.mark.parametrize("name", [*DAMAGES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_the_one_before_is_used_and_the_end_is_the_same(begun: Path, home: Path, name: str, capfd) -> None:
    newest = begun / "checkpoints" / "step-00000010"
    (DAMAGES | MORE)[name](newest)
    outcome = train(begun, overrides=["run.steps=15"])
    assert outcome.code == 0
    assert f"checkpoint {newest} is passed over" in capfd.readouterr().err
    start = last_line(begun, "start")
    assert (start["step"], start["resumed"]) == (5, True)
    assert str(newest) in start["notes"][0]
    assert (begun / "checkpoints" / "unusable-step-00000010").exists()
    assert not Path(MARKER).exists()
    assert_same(begun, home / "whole")


def test_a_half_written_one_is_no_checkpoint(begun: Path, home: Path) -> None:
    folder = begun / "checkpoints"
    (folder / "step-00000010").rename(folder / ".partial-step-00000010")
    train(begun, overrides=["run.steps=15"], quiet=True)
    assert last_line(begun, "start")["step"] == 5
    assert_same(begun, home / "whole")
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_the_good_one_stays_until_there_is_a_newer_good_one(begun: Path, monkeypatch) -> None:
    flip(begun / "checkpoints" / "step-00000010", TENSORS, 0)
    before: list[list[int]] = []
    publish = Checkpoints._publish

    def note_and_publish(self: Checkpoints, *arguments) -> None:
        before.append([int(p.name[5:]) for p in list_checkpoints(self.folder)])
        publish(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_publish", note_and_publish)
    train(begun, overrides=["run.steps=15", "checkpoint.keep=1", "checkpoint.every=5"], quiet=True)
    assert before == [[5], [10]]
    assert steps_saved(begun) == [15]


def test_when_all_are_bad_the_run_stops_and_nothing_is_touched(begun: Path) -> None:
    flip(begun / "checkpoints" / "step-00000010", TENSORS, 0)
    put_metadata(begun / "checkpoints" / "step-00000005", MALICE["system"][0])
    files = {p: p.read_bytes() for p in begun.rglob("*") if p.is_file() and p.name != ".lock"}
    code, output = vitrail("train", begun, "run.steps=15", cwd=begun.parent)
    assert code == 2, output
    assert "no checkpoint in" in output
    assert f"step-00000010 is passed over: {TENSORS} does not match its checksum" in output
    assert "step-00000005 is passed over: its metadata asks for os.system" in output
    assert "--fresh" in output
    assert "Traceback" not in output
    assert {p: p.read_bytes() for p in begun.rglob("*") if p.is_file() and p.name != ".lock"} == files
    assert not Path(MARKER).exists()


def test_the_lock_is_given_back_when_all_are_bad(begun: Path) -> None:
    for folder in list_checkpoints(begun / "checkpoints"):
        (folder / MANIFEST).unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint in .* is usable"):
            train(begun, overrides=["run.steps=15"], quiet=True)


def test_statistics_of_a_bad_checkpoint_are_not_mixed_with_a_good_one(begun: Path) -> None:
    newest = begun / "checkpoints" / "step-00000010"
    reseal(newest, statistics={"mean": [3.0], "std": [7.0]})
    put_metadata(newest, MALICE["system"][0])
    with pytest.raises(UserError, match="normalised in another way"):
        train(begun, overrides=["run.steps=15"], quiet=True)


def test_load_takes_the_newest_good_one(begun: Path, home: Path) -> None:
    put_metadata(begun / "checkpoints" / "step-00000010", MALICE["system"][0])
    model = package.load(begun, weights="raw")
    expected = saved(home / "begun", 5)
    assert all((p.detach() == expected[f"model.{name}"]).all() for name, p in model.named_parameters())
    with pytest.raises(UserError, match=r"step-00000010: its metadata asks for os\.system"):
        package.load(begun, checkpoint=10)
    put_in_tensors(begun / "checkpoints" / "step-00000005", Payload())
    with pytest.raises(UserError, match="its tensors cannot be read"):
        package.load(begun)
    assert call("eval", begun) == 2
    assert not Path(MARKER).exists()


def test_a_checkpoint_that_vanishes_is_replaced_by_the_next(begun: Path, home: Path, monkeypatch) -> None:
    """A run that goes on removes checkpoints while others read them."""
    load_weights = run_module.load_weights

    def vanish_and_load(model, path: Path, *arguments) -> None:
        if path.name == "step-00000010":
            shutil.rmtree(path)
        load_weights(model, path, *arguments)

    for module in (run_module, runs):  # of evaluate(), and of load()
        monkeypatch.setattr(module, "load_weights", vanish_and_load)
    assert evaluate(begun, samples=2)["step"] == 5
    shutil.copytree(home / "begun" / "checkpoints", begun / "checkpoints", dirs_exist_ok=True)
    model = package.load(begun, weights="raw")
    expected = saved(home / "begun", 5)
    assert all((p.detach() == expected[f"model.{name}"]).all() for name, p in model.named_parameters())
    shutil.copytree(home / "begun" / "checkpoints", begun / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"no checkpoint of step 10 here \(there are: 5\)"):
        package.load(begun, checkpoint=10)


def test_when_all_have_vanished_there_is_one_sentence(begun: Path, home: Path, monkeypatch) -> None:
    verify_one = runs.verify

    def vanish(path: Path, manifest) -> None:
        shutil.rmtree(path)
        verify_one(path, manifest)

    monkeypatch.setattr(runs, "verify", vanish)
    with pytest.raises(UserError, match="no checkpoint here"):
        package.load(begun)

    def vanish_and_come(path: Path, manifest) -> None:
        number = int(path.name[5:])
        path.rename(path.with_name(f"step-{number + 1:08d}"))  # a run that saves and removes ever faster
        verify_one(path, manifest)

    shutil.copytree(home / "begun" / "checkpoints", begun / "checkpoints", dirs_exist_ok=True)
    monkeypatch.setattr(runs, "verify", vanish_and_come)
    with pytest.raises(UserError, match="no usable checkpoint"):
        package.load(begun)


@pytest.mark.slow
def test_two_ranks_agree_on_what_is_bad(volume: Path, tmp_path: Path) -> None:
    """Each rank verifies a share of the files; what one finds counts for both."""
    for name, steps in (("whole", 15), ("begun", 10)):
        recipe = tiny_recipe(volume, tmp_path / name, run__steps=steps, checkpoint__every=5, **CHANGES)
        code, output = run(*torchrun(2, "-m", "vitrail", "train", write_recipe(tmp_path / f"{name}.yaml", recipe)))
        assert code == 0, output
    files = sorted(p.name for p in (tmp_path / "begun" / "checkpoints" / "step-00000010").iterdir())
    assert files == [METADATA, TENSORS, "__1_0.distcp", MANIFEST]
    for name in files:
        copy = Path(shutil.copytree(tmp_path / "begun", tmp_path / f"damaged{name}"))
        flip(copy / "checkpoints" / "step-00000010", name, 5)
        code, output = run(*torchrun(2, "-m", "vitrail", "train", copy, "run.steps=15"))
        assert code == 0, output
        assert "step-00000010 is passed over" in output
        assert name in output
        assert_same(copy, tmp_path / "whole")
