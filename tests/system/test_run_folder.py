"""A run folder that is moved, deleted or replaced under its run, or comes from somebody else with links in it."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny_recipe
from watching import call, last_line, steps_saved

from vitrail.contents import check_contents
from vitrail.errors import RunFailed, UserError
from vitrail.report.page import write_report
from vitrail.training.run import evaluate, train
from vitrail.training.runfolder import RunFolder
from vitrail.training.session import Session
from vitrail.weights.runs import load

SMALL = {"run__steps": 12, "log__pictures": 10**6, "log__activations": "off", "eval__every": 10**6}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def tree_of(folder: Path) -> dict[str, Any]:
    """Every name below a folder, with what it holds."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


# ---------------------------------------------------------------- the folder goes away


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do something to a training from the outside, when it has done so many steps."""
    tell = Session.tell

    def tell_and_act(self: Session, *arguments: Any) -> None:
        tell(self, *arguments)
        if self.trainer.done == step:
            self.note_saved(self.checkpoints.wait())
            action()

    monkeypatch.setattr(Session, "tell", tell_and_act)


def test_a_run_that_is_moved_fails_and_says_where_it_is(volume: Path, tmp_path: Path, monkeypatch) -> None:
    at_step(monkeypatch, 6, lambda: (tmp_path / "run").rename(tmp_path / "moved"))
    with pytest.raises(RunFailed, match=rf"it was moved to '{tmp_path}/moved'.*vitrail train {tmp_path}/moved"):
        train(tiny_recipe(volume, tmp_path / "run", checkpoint__every=4, **SMALL), quiet=True)
    assert not (tmp_path / "run").exists()
    assert steps_saved(tmp_path / "moved") == [4]
    end = last_line(tmp_path / "moved", "end")
    assert (end["reason"], end["step"]) == ("failed", 8)
    monkeypatch.undo()
    assert train(tmp_path / "moved", quiet=True).step == 12


def test_a_run_that_is_deleted_fails_and_makes_nothing_anew(volume: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    recipe = tiny_recipe(volume, tmp_path / "runs" / "run", checkpoint__every="off", **SMALL)
    at_step(monkeypatch, 6, lambda: shutil.rmtree(tmp_path / "runs"))
    with pytest.raises(RunFailed, match="it was deleted with all checkpoints in it"):
        train(recipe, quiet=True)
    assert not (tmp_path / "runs").exists()


def test_what_was_put_in_the_place_of_a_run_is_left_alone(volume: Path, tmp_path: Path, monkeypatch) -> None:
    """Nothing of it is pruned, overwritten or taken for a checkpoint of this run."""
    run, before = tmp_path / "run", {}

    def replace() -> None:
        run.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", run)
        (run / "checkpoints" / ".partial-of-another").mkdir()
        before.update(tree_of(run))

    at_step(monkeypatch, 6, replace)
    with pytest.raises(RunFailed, match="is no longer the folder of this run"):
        train(tiny_recipe(volume, run, checkpoint={"every": 2, "keep": 1}, **SMALL), quiet=True)
    assert tree_of(run) == before
    assert steps_saved(tmp_path / "moved")[0] == 4


def test_a_run_whose_lock_was_removed_keeps_others_away(volume: Path, tmp_path: Path, monkeypatch) -> None:
    recipe = tiny_recipe(volume, tmp_path / "run", checkpoint__every=4, **SMALL)
    refused: list[str] = []

    def try_another() -> None:
        (tmp_path / "run" / ".lock").unlink()
        with pytest.raises(UserError, match="in use by another process") as caught:
            RunFolder(tmp_path / "run")
        refused.append(str(caught.value))

    at_step(monkeypatch, 6, try_another)
    assert train(recipe, quiet=True).code == 0
    assert refused
    assert f"process {os.getpid()}" in (tmp_path / "run" / ".lock").read_text()  # written anew at the next save


def test_the_lock_follows_the_folder(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        RunFolder(tmp_path / "moved")
    assert not first.is_there()
    (tmp_path / "moved").rename(tmp_path / "run")
    first.check()
    first.close()
    RunFolder(tmp_path / "run").close()


def test_a_lock_that_another_host_has_taken_meanwhile_ends_the_run(tmp_path: Path) -> None:
    """Some shared file systems know locks of files alone: there `.lock` counts, and it may be made anew."""
    first = RunFolder(tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    with (tmp_path / "run" / ".lock").open("w") as other:
        other.write("process 7 on elsewhere")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
            first.check()
    first.close()


@pytest.mark.parametrize(("call", "number"), [("stat", errno.EIO), ("stat", errno.ESTALE), ("open", errno.EROFS)])
def test_a_disk_that_does_not_answer_fails_a_save_and_not_the_run(
    volume: Path, tmp_path: Path, monkeypatch, capfd, call: str, number: int
) -> None:
    """It is asked for the folder, or to make the lock anew, at step 4; by step 8 it answers again."""
    asked, real, run = [0], getattr(os, call), tmp_path / "run"

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == (run if call == "stat" else ".lock"):
            asked[0] += 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    def act(self: Session, *arguments: Any) -> None:
        tell(self, *arguments)
        if self.trainer.done == 3:
            if call == "open":
                (run / ".lock").unlink()
            patch.setattr(os, call, fail)
        elif self.trainer.done == 5:
            self.note_saved(self.checkpoints.wait())
            patch.undo()

    tell, patch = Session.tell, pytest.MonkeyPatch()
    monkeypatch.setattr(Session, "tell", act)
    try:
        outcome = train(tiny_recipe(volume, run, checkpoint__every=4, **SMALL))
    finally:
        patch.undo()
    told = capfd.readouterr().err
    assert (outcome.code, asked[0]) == (0, 2)  # before the save, and in it
    assert steps_saved(run) == [12, 8]
    assert "the checkpoint of step 4 could not be written (OSError: " in told
    assert os.strerror(number) in told
    assert f"process {os.getpid()}" in (run / ".lock").read_text()


def test_a_disk_that_changes_the_numbers_of_files_moves_no_run(tmp_path: Path, monkeypatch) -> None:
    """As CIFS may; what Linux says of an open folder tells whether it is the same."""
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    folder.check()
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=f"it was moved to '{tmp_path}/moved'"):
        folder.check()
    folder.close()


def test_a_run_behind_a_link_in_its_path_is_ordinary(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch" / "runs")
    recipe = tiny_recipe(volume, tmp_path / "runs" / "run", checkpoint__every=4, **SMALL)
    assert train(recipe, quiet=True).code == 0
    assert train(tmp_path / "runs" / "run", overrides=["run.steps=14"], quiet=True).step == 14
    assert write_report(tmp_path / "runs" / "run").is_file()


# ---------------------------------------------------------------- a folder from somebody else

NAMES = (
    ".lock",
    ".recipe.yaml.partial",
    "checkpoints",
    "checkpoints/.partial-step-00000003",
    "checkpoints/step-00000003",
    "checkpoints/step-00000003/.metadata",
    "data.json",
    "environment.json",
    "flight-recorder",
    "flight-recorder/gloo_rank_0",
    "metrics.jsonl",
    "mlflow",
    "mlflow/0/meta.yaml",
    "pictures",
    "pictures/reconstruct-00000000.png",
    "recipe.yaml",
    "report.html",
    "tensorboard",
    "tensorboard/events",
    "wandb",
    "wandb/latest-run",
    "wandb/run-1/files",
    "wandb/run-1/logs/debug.log",
)


def decoys(home: Path) -> Path:
    """A person's own files, which look like what a run writes."""
    mine = home / "mine"
    for name in ("step-00000001", "step-00000002", "step-00000003"):
        (mine / name).mkdir(parents=True)
        (mine / name / "work.txt").write_text("months of work")
    (mine / ".partial-notes").mkdir()
    (mine / "file").write_text("a paper")
    return mine


def plant(run: Path, name: str, target: Path) -> None:
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["file", "", "missing"])
def test_a_link_in_a_run_folder_is_refused(tmp_path: Path, name: str, target: str) -> None:
    mine = decoys(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("run: {name: foreign}\n")
    plant(run, name, mine / target)
    before = tree_of(tmp_path)
    for use in (RunFolder, write_report):
        with pytest.raises(UserError, match="is a link, which may lead anywhere"):
            use(run)
    assert tree_of(tmp_path) == before


def test_no_verb_follows_a_link_out_of_a_run_folder(volume: Path, tmp_path: Path, capfd) -> None:
    mine = decoys(tmp_path)
    recipe = tiny_recipe(volume, tmp_path / "run", checkpoint={"every": 4, "keep": 1}, **SMALL)
    train(recipe, quiet=True)
    for name in ("checkpoints", "metrics.jsonl", "recipe.yaml"):
        run = Path(shutil.copytree(tmp_path / "run", tmp_path / f"with-{name}"))
        target = mine / "file" if name != "checkpoints" else Path(shutil.copytree(run / name, mine / name))
        plant(run, name, target)
        before = tree_of(tmp_path)
        for words in (("train", run, "run.steps=20"), ("report", run), ("eval", run)):
            assert call(*words) == 2
            assert "is a link, which may lead anywhere" in capfd.readouterr().err
        assert tree_of(tmp_path) == before


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "recipe.yaml", "environment.json", "data.json", ".lock", "checkpoints"):
        run = tmp_path / f"pipe-{name}"
        run.mkdir()
        (run / "recipe.yaml").write_text("run: {name: foreign}\n")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        for use in (RunFolder, write_report, lambda folder: train(folder, quiet=True)):
            with pytest.raises(UserError, match="a pipe or a device"):
                use(run)


def test_a_folder_for_a_file_is_refused(tmp_path: Path) -> None:
    for name, kind in (("metrics.jsonl", "folder"), ("checkpoints", "file"), ("pictures", "file")):
        run = tmp_path / name
        run.mkdir()
        (run / name).mkdir() if kind == "folder" else (run / name).write_text("")
        with pytest.raises(UserError, match=f"{name} is a {kind}, where"):
            RunFolder(run)


def test_a_file_with_a_second_name_elsewhere_is_not_written_to(tmp_path: Path) -> None:
    mine = decoys(tmp_path)
    for name in ("metrics.jsonl", ".lock"):
        run = tmp_path / f"hard-{name}"
        run.mkdir()
        (run / name).hardlink_to(mine / "file")
        with pytest.raises(UserError, match="has another name elsewhere"):
            RunFolder(run)
    assert (mine / "file").read_text() == "a paper"


def test_a_run_that_was_backed_up_with_hard_links_is_read(volume: Path, tmp_path: Path) -> None:
    """After `cp -al` files have two names: reading does no harm, and continuing would write into the backup."""
    train(tiny_recipe(volume, tmp_path / "run", **SMALL | {"run__steps": 2}), quiet=True)
    shutil.copytree(tmp_path / "run", tmp_path / "backup", copy_function=os.link)
    before = tree_of(tmp_path / "backup")
    assert evaluate(tmp_path / "run", samples=2)["step"] == 2
    load(tmp_path / "run")
    assert write_report(tmp_path / "run").is_file()
    with pytest.raises(UserError, match="has another name elsewhere"):
        train(tmp_path / "run", overrides=["run.steps=3"], quiet=True)
    assert tree_of(tmp_path / "backup") == before
    for name in ("metrics.jsonl", ".lock"):  # as the page on resuming says
        shutil.copy(tmp_path / "run" / name, tmp_path / "copy")
        (tmp_path / "copy").rename(tmp_path / "run" / name)
    assert train(tmp_path / "run", overrides=["run.steps=3"], quiet=True).step == 3
    assert tree_of(tmp_path / "backup") == before


def test_a_lock_of_another_tool_makes_no_run(tmp_path: Path) -> None:
    for lock in ("", "pid 12"):
        run = tmp_path / f"other{lock}"
        run.mkdir()
        (run / ".lock").write_text(lock)
        (run / "recipe.yaml").write_text("flour: 500 g")
        with pytest.raises(UserError, match=r"holds a (recipe\.yaml|\.lock) that no run of vitrail has written"):
            RunFolder(run)
        assert ((run / ".lock").read_text(), (run / "recipe.yaml").read_text()) == (lock, "flour: 500 g")
    for lock in ("", "process 1 on a host"):  # of a run that was killed early
        run = tmp_path / f"own{lock}"
        run.mkdir()
        (run / ".lock").write_text(lock)
        RunFolder(run).close()


def test_a_folder_that_somebody_else_made_meanwhile_is_not_taken_back(tmp_path: Path, monkeypatch: Any) -> None:
    make = Path.mkdir

    def slow(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "run" and not path.exists():
            make(path)
            (path / "notes.txt").write_text("mine")
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", slow)
    folder = RunFolder(tmp_path / "run")
    folder.discard_if_new()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_what_a_user_put_into_a_folder_that_is_taken_back_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    written = (
        *("recipe.yaml", "metrics.jsonl", "environment.json", "data.json", "pictures/reconstruct-00000000.png"),
        *("tensorboard/events.out.tfevents.1.host.2.0", "flight-recorder/gloo_rank_0"),
    )
    own = ("notes/thesis.txt", "pictures/scan-20240101.png", "checkpoints/why.txt", "samples/a.png")
    for mine in ((), own, own[:1]):
        folder = RunFolder(run)
        (run / "checkpoints").mkdir()
        for name in (*written, *mine):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text(name)
        folder.discard_if_new()
        assert {name for name, content in tree_of(tmp_path).items() if content} == {f"run/{name}" for name in mine}
        assert run.exists() is bool(mine)
        if mine:
            shutil.rmtree(run)


def test_nothing_behind_a_link_is_taken_back(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "reconstruct-00000000.png").write_text("a paper")
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run" / "pictures").symlink_to(mine)
    folder.discard_if_new()
    assert (mine / "reconstruct-00000000.png").read_text() == "a paper"
    assert (tmp_path / "run" / "pictures").is_symlink()


def test_an_ordinary_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("")
    plant(tmp_path, "wandb/run-1/logs/debug-core.log", tmp_path / "readme.txt")  # as wandb does
    check_contents(tmp_path)


@pytest.mark.parametrize("version", [2, 99, 0, -1, "1", 1.0, True, None])
def test_a_run_folder_of_another_format_is_refused(tmp_path: Path, version: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("run: {name: a}\n")
    (tmp_path / "environment.json").write_text(json.dumps({"format": version}))
    newer = "was written by a newer vitrail: version .* upgrade vitrail" if version in (2, 99) else "its version is"
    for use in (RunFolder, write_report, lambda run: train(run, quiet=True)):
        with pytest.raises(UserError, match=newer):
            use(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["environment.json", "recipe.yaml"]


def test_a_run_folder_that_tells_no_format_is_an_older_one(tmp_path: Path) -> None:
    for content in ("{}", '{"vitrail": "0.1"}', "[", "[" * 10**5, ""):
        (tmp_path / "environment.json").write_text(content)
        check_contents(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "runs/" + "ä" * 200, "\udcff\ud800"])
def test_a_name_that_no_disk_takes_is_one_sentence(volume: Path, tmp_path: Path, name: str) -> None:
    recipe = tiny_recipe(volume, tmp_path / "run", **SMALL)
    recipe["run"]["dir"] = f"{tmp_path}/{name}"
    with pytest.raises(UserError, match=r"^run\.dir: "):
        train(recipe, quiet=True)
    assert os.listdir(tmp_path) == []


def test_a_long_word_for_a_run_is_one_sentence(capfd) -> None:
    for verb in ("train", "eval", "report"):
        assert call(verb, "x" * 5000) == 2
        told = capfd.readouterr().err
        assert told.startswith("error: ")
        assert "Traceback" not in told
