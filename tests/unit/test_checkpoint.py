"""Checkpoints: written whole, verified before they are read, kept by age and by score, and never run."""

import collections
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damage import (
    ACCIDENTS,
    FILES,
    GETATTR,
    MALICE,
    MARKER,
    RECORDS,
    TENSORS,
    Payload,
    call,
    change_place,
    flip,
    named,
    plain,
    put_in_tensors,
    put_metadata,
    put_parts,
    reseal,
    share_bytes,
    whole,
)
from support import LONG
from torch.distributed.checkpoint import metadata as parts

from vitrail.errors import UserError
from vitrail.sums import sum_of_file, sum_of_tree
from vitrail.training import checkpoint as module
from vitrail.training.checkpoint import Checkpoints, check_space
from vitrail.weights import runs
from vitrail.weights.runs import BadCheckpoint, list_checkpoints, load_tensors, read_manifest, stored_tensors, verify
from vitrail.weights.safe_dcp import UnsafeCheckpoint, _tiles, _Unpickler

NUMBERS = {
    "samples": 0,
    "optimizer_steps": 0,
    "skipped": 0,
    "skipped_in_a_row": 0,
    "threads": 1,
    "statistics": {"mean": [0.0], "std": [1.0]},
    "recipe": {},
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_checkpoints(folder: Path, *, keep: int = 2, background: bool = False) -> Checkpoints:
    return Checkpoints(folder, keep=keep, background=background, group=None, cpu_mesh=None)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((40, 30), value), "model.bias": torch.full((7,), -value)}


def save(folder: Path, *steps: int, **options: Any) -> Checkpoints:
    checkpoints = open_checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, state(step), NUMBERS)
        outcome = checkpoints.wait()
        assert outcome is not None
        assert outcome["error"] is None
    checkpoints.tidy()
    return checkpoints


def load_newest(checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """The step that is loaded, by what is in the tensors, and the notes about those that are not."""
    found, notes = state(float("nan")), []
    manifest = checkpoints.load_newest(lambda folder, manifest: load_tensors(folder, manifest, found), notes.append)
    if manifest is None:
        return None, notes
    assert torch.equal(found["model.weight"], state(manifest["step"])["model.weight"])
    assert torch.equal(found["model.bias"], state(manifest["step"])["model.bias"])
    return manifest["step"], notes


# ---------------------------------------------------------------- whole ones


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000001"]
    assert load_newest(checkpoints) == (2, [])
    manifest = read_manifest(tmp_path / "step-00000002")
    assert manifest["step"] == 2
    assert set(manifest["files"]) == {"__0_0.distcp", ".metadata"}
    shapes = stored_tensors(tmp_path / "step-00000002", manifest)
    assert shapes == {"model.weight": torch.Size([40, 30]), "model.bias": torch.Size([7])}


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files, its folder, and then the folder that it stands in."""
    synced: list[tuple[int, bool]] = []  # what, and whether the checkpoint was there by then
    fsync, final = os.fsync, tmp_path / "checkpoints" / "step-00000001"

    def watched(file: int) -> None:
        fsync(file)
        synced.append((os.fstat(file).st_ino, final.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    save(tmp_path / "checkpoints", 1)
    before = {what for what, there in synced if not there}
    for path in (final, *final.iterdir()):
        assert path.stat().st_ino in before, path
    assert (final.parent.stat().st_ino, True) in synced


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_newest(open_checkpoints(tmp_path / "none")) == (None, [])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [5, 4, 3, 2, 1][:keep]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in list_checkpoints(tmp_path))


def test_the_best_is_kept_too(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=1)
    for step, metric in ((1, 0.9), (2, 0.4), (3, 0.6), (4, None), (5, 0.5)):
        checkpoints.save(step, state(step), NUMBERS | {"metrics": metric and {"loss": metric}}, metric)
    checkpoints.wait()
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [5, 4, 2]  # nothing has shown that 5 is good
    checkpoints.tidy()
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [5, 2]
    again = open_checkpoints(tmp_path, keep=1)
    again.remember_best("loss")
    assert again.best == (0.4, 2)
    again.save(6, state(6), NUMBERS | {"metrics": {"loss": 0.3}}, 0.3)
    again.wait()
    again.tidy()
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [6]


def test_a_score_that_does_not_exist_is_null(tmp_path: Path) -> None:
    """Other readers of JSON refuse a bare NaN."""
    checkpoints = open_checkpoints(tmp_path)
    metrics = {"mean_dice": 0.5, "dice_none": float("nan"), "loss": float("inf")}
    numbers = NUMBERS | {"metrics": metrics, "recipe": {"clip": float("inf")}}
    checkpoints.save(1, state(1), numbers, 0.5)
    assert numbers["metrics"] is metrics  # the caller's own stay
    text = (tmp_path / "step-00000001/manifest.json").read_text()
    assert "NaN" not in text
    manifest = read_manifest(tmp_path / "step-00000001")
    assert manifest["metrics"] == {"mean_dice": 0.5, "dice_none": None, "loss": None}
    assert manifest["recipe"] == {"clip": float("inf")}  # a setting keeps its value
    assert load_newest(checkpoints) == (1, [])
    for name, best in (("mean_dice", (0.5, 1)), ("dice_none", None)):
        again = open_checkpoints(tmp_path)
        again.remember_best(name)
        assert again.best == best


def test_a_best_that_could_not_be_written_does_not_push_out_the_one_before(tmp_path: Path, monkeypatch) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1), NUMBERS, 0.5)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_publish", full_disk)
        checkpoints.save(2, state(2), NUMBERS, 0.1)
        checkpoints.wait()
    checkpoints.save(3, state(3), NUMBERS, 0.7)
    checkpoints.wait()
    checkpoints.tidy()
    assert checkpoints.best == (0.5, 1)
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [3, 1]


@pytest.mark.parametrize("larger", [False, True])
def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path, larger: bool) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=1)
    checkpoints.larger_is_better = larger
    for step, metric in ((1, float("nan")), (2, 0.5), (3, float("nan")), (4, float("-inf")), (5, float("inf"))):
        checkpoints.save(step, state(step), NUMBERS | {"metrics": {"loss": metric}}, metric)
        assert checkpoints.best == (None if step == 1 else (0.5, 2))
    checkpoints.wait()
    checkpoints.tidy()
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [5, 2]


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_replaces_no_good_one(tmp_path: Path, value: float) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    broken = state(2.0)
    broken["model.bias"][3] = value
    checkpoints.save(2, broken, NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"].startswith("'model.bias' has values that are not finite")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    whole_numbers = {"model.count": torch.arange(3), "model.none": torch.zeros(0)}
    checkpoints.save(3, whole_numbers, NUMBERS)
    assert checkpoints.wait()["error"] is None


def test_the_one_before_stays_until_a_step_has_shown_the_newest_to_be_good(tmp_path: Path) -> None:
    """A save is made after a finite step only, so all but the newest were followed by one."""
    checkpoints = open_checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), NUMBERS)
        assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [step, *([step - 1] if step > 1 else [])]


def test_a_folder_that_is_no_longer_the_runs_is_left_alone(tmp_path: Path) -> None:
    """Whatever lies at the path now: nothing is made, removed or published there."""
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = save(run / "checkpoints", 1, 2)
    run.rename(tmp_path / "moved")
    checkpoints.save(3, state(3), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "FileNotFoundError" in outcome["error"]
    assert not run.exists()

    def refuse() -> None:
        raise UserError("it was moved; move it back")

    shutil.copytree(tmp_path / "moved", run)
    (run / "checkpoints" / ".partial-of-another").mkdir()
    before = sorted(run.rglob("*"))
    checkpoints.check = refuse
    checkpoints.save(3, state(3), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] == "it was moved"
    assert sorted(run.rglob("*")) == before


def test_a_run_that_is_moved_during_a_save_makes_no_second_folder(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = save(run / "checkpoints", 1)
    write = module.dcp.save

    def move_and_write(*arguments: Any, **options: Any) -> Any:
        run.rename(tmp_path / "moved")
        return write(*arguments, **options)

    monkeypatch.setattr(module.dcp, "save", move_and_write)
    checkpoints.save(2, state(2), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "FileNotFoundError" in outcome["error"]
    assert not run.exists()
    assert load_newest(open_checkpoints(tmp_path / "moved" / "checkpoints")) == (1, [])


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """Without one of these a power cut may leave a checkpoint under a good name with nothing in it."""
    done: list[str] = []
    sync, publish = os.fsync, module.disk.publish

    def note_sync(handle: int) -> None:
        sync(handle)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(re.sub(r"^\.(.+)\.[0-9a-f]{16}\.part$", r"\1", re.sub(r"-[0-9a-f]{8}$", "", name)))

    def note_publish(draft: Path, target: Path) -> None:
        publish(draft, target)
        done.append(f"-> {target.name}")

    checkpoints = open_checkpoints(tmp_path / "checkpoints")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(module.disk, "publish", note_publish)
    checkpoints.save(1, state(1), NUMBERS)
    monkeypatch.undo()
    published = done.index("-> step-00000001")
    assert {"__0_0.distcp", ".metadata.tmp", "manifest.json"} <= set(done[:published])
    assert done[published - 1] == ".partial-step-00000001"
    assert done[published + 1] == "checkpoints"


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_save_keeps_the_others_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    for target in ("_publish", "sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints if target == "_publish" else module.disk, target, full_disk)
            checkpoints.save(2, state(2), NUMBERS)
            outcome = checkpoints.wait()
        assert outcome is not None
        assert "No space left on device" in outcome["error"]
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
        assert load_newest(checkpoints) == (1, [])


def test_a_failed_write_of_tensors_is_told(tmp_path: Path, monkeypatch) -> None:
    checkpoints = save(tmp_path, 1)
    monkeypatch.setattr(module.dcp, "save", full_disk)
    checkpoints.save(2, state(2), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] == "rank 0: OSError: [Errno 28] No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints = open_checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state(1), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "FileExistsError" in outcome["error"]


def test_a_save_that_loses_the_other_ranks_is_a_failed_one(tmp_path: Path, monkeypatch) -> None:
    """Silence would be taken for success at the end of a run."""

    def lost(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    checkpoints = open_checkpoints(tmp_path)
    monkeypatch.setattr(module, "gather_json", lost)
    checkpoints.save(1, state(1), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "Connection closed by peer" in outcome["error"]
    assert list_checkpoints(tmp_path) == []


def test_what_kills_have_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".partial-step-00000003"
    left.mkdir()
    (left / "__0_0.distcp").write_text("half")
    save(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_link_among_what_kills_have_left_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "__0_0.distcp").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".partial-step-00000004").symlink_to(tmp_path / "precious")
    save(tmp_path / "run", 1)
    assert (tmp_path / "run" / ".partial-step-00000004").is_symlink()
    assert (tmp_path / "precious" / "__0_0.distcp").read_text() == "mine"


def test_a_checkpoint_that_was_moved_away_and_linked_is_passed_over(tmp_path: Path) -> None:
    """Somebody needs room on the disk while the run goes on: no later save fails, and what was moved stays."""
    checkpoints = save(tmp_path / "run", 1, keep=1)
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "archive")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "archive")
    for step in (2, 3, 4):
        checkpoints.save(step, state(step), NUMBERS)
        outcome = checkpoints.wait()
        assert outcome is not None
        assert outcome["error"] is None
    checkpoints.tidy()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-00000001", "step-00000004"]
    assert (tmp_path / "run" / "step-00000001").is_symlink()
    assert len(list((tmp_path / "archive").iterdir())) == 3


def test_folders_of_other_things_are_neither_removed_nor_counted(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    (tmp_path / "step-00000001" / "why-it-is-good.txt").write_text("mine")
    for name in ("step-00000002", "step-99999999", ".partial-step-00000003", ".partial-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_notes.txt").write_text("mine")
    (tmp_path / "step-00000004" / ".metadata").mkdir(parents=True)
    for step in (5, 6, 7):
        checkpoints.save(step, state(step), NUMBERS)
        outcome = checkpoints.wait()
        assert outcome is not None
        assert outcome["error"] is None
    checkpoints.tidy()
    assert (tmp_path / "step-00000001" / "why-it-is-good.txt").read_text() == "mine"
    for name in ("step-00000002", "step-99999999", ".partial-step-00000003", ".partial-notes"):
        assert (tmp_path / name / "my_notes.txt").read_text() == "mine"
    assert (tmp_path / "step-00000004" / ".metadata").is_dir()
    assert {int(p.name[5:]) for p in list_checkpoints(tmp_path)} == {1, 2, 4, 7, 99999999}


def test_a_folder_of_other_things_is_not_published_over(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "my_notes.txt").write_text("mine")
    checkpoints.save(2, state(2), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "FileExistsError" in outcome["error"]
    assert (tmp_path / "step-00000002" / "my_notes.txt").read_text() == "mine"


def test_what_was_set_aside_before_stays_if_others_put_something_into_it(tmp_path: Path) -> None:
    for content in (None, "mine", None):
        checkpoints = save(tmp_path, 1, 2)
        checkpoints.set_aside_newer(1)
        if content:
            (tmp_path / "unusable-step-00000002" / "my_notes.txt").write_text(content)
    names = ["step-00000001", "unusable-step-00000002", "unusable-step-00000002-2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / "unusable-step-00000002" / "my_notes.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [UserError("a link; take it away"), OSError(5, "Input/output error")])
def test_a_removal_that_is_refused_fails_no_save(tmp_path: Path, monkeypatch, error: Exception) -> None:
    """Rank 0 removes, and the others wait to hear how the save went."""
    heard: list[Any] = []
    share = module.share_json

    def note(value: Any, group: Any) -> Any:
        heard.append(value)
        return share(value, group)

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    checkpoints = save(tmp_path, 1, 2, keep=1)
    monkeypatch.setattr(module, "share_json", note)
    monkeypatch.setattr(module.disk, "remove", refuse)
    for step in (3, 4):
        checkpoints.save(step, state(step), NUMBERS)
        outcome = checkpoints.wait()
        assert outcome is not None
        assert outcome["error"] is None
    assert heard[1::2] == [None, None]
    checkpoints.tidy()
    monkeypatch.setattr(module.dcp, "save", full_disk)
    checkpoints.save(5, state(5), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] == heard[-1] == "rank 0: OSError: [Errno 28] No space left on device"
    assert load_newest(checkpoints) == (4, [])


def test_what_is_published_is_not_told_as_failed(tmp_path: Path, monkeypatch) -> None:
    checkpoints, sync = open_checkpoints(tmp_path), module.disk.sync_folder

    def sync_others(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")
        sync(folder)

    monkeypatch.setattr(module.disk, "sync_folder", sync_others)
    checkpoints.save(1, state(1), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] is None
    assert load_newest(checkpoints) == (1, [])


def test_a_disk_that_does_not_answer_fails_one_save(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1)
    checkpoints.check = lambda: full_disk()
    checkpoints.save(2, state(2), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert "No space left on device" in outcome["error"]
    checkpoints.tidy()
    checkpoints.check = lambda: None
    checkpoints.save(3, state(3), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] is None


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch) -> None:
    """The copy is saved, not what training makes of it; the next save waits for this one; the last one completes."""
    gate, reached = threading.Event(), threading.Event()

    def slow_checksum(path: Path) -> int:
        reached.set()
        assert gate.wait(LONG)
        return sum_of_file(path)

    monkeypatch.setattr(module, "sum_of_file", slow_checksum)
    checkpoints = open_checkpoints(tmp_path, background=True)
    live = state(1)
    checkpoints.save(1, live, NUMBERS)  # returns although the gate is shut
    assert reached.wait(LONG)
    assert checkpoints.finished() is None
    assert list_checkpoints(tmp_path) == []
    for tensor, new in zip(live.values(), state(2).values(), strict=True):
        tensor.copy_(new)  # a step of training
    second = threading.Thread(target=lambda: checkpoints.save(2, live, NUMBERS))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save did not wait for the first"
    gate.set()
    second.join(LONG)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["step"] == 2
    assert load_newest(checkpoints) == (2, [])
    shutil.rmtree(tmp_path / "step-00000002")
    assert load_newest(checkpoints) == (1, [])


def test_a_checkpoint_needs_room(tmp_path: Path, monkeypatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 5 * 2**20))
    check_space(tmp_path / "runs" / "a", 4 * 2**20)
    with pytest.raises(UserError, match=r"5\.00 MiB free, but a checkpoint needs about 6\.00 MiB"):
        check_space(tmp_path / "runs" / "a", 6 * 2**20)


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good checkpoints of steps 1 and 2, to be copied and damaged."""
    home = tmp_path_factory.mktemp("two") / "checkpoints"
    save(home, 1, 2)
    return home


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


@pytest.mark.parametrize("name", ACCIDENTS)
def test_damage_is_named_and_passed_over(folder: Path, name: str) -> None:
    damage, words = ACCIDENTS[name]
    newest = folder / "step-00000002"
    damage(newest)
    checkpoints = open_checkpoints(folder, keep=1)
    step, notes = load_newest(checkpoints)
    assert step == 1
    assert len(notes) == 1
    assert str(newest) in notes[0]
    assert words in notes[0]
    # The bad one no longer counts among those that are kept; the good one goes when there is a newer good one.
    checkpoints.set_aside_newer(1)
    assert [p.name for p in list_checkpoints(folder)] == ["step-00000001"]
    checkpoints.save(3, state(3), NUMBERS)
    outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome["error"] is None
    checkpoints.tidy()
    assert [p.name for p in list_checkpoints(folder)] == ["step-00000003"]
    assert os.path.lexists(folder / "unusable-step-00000002")


def test_every_bit_counts(folder: Path) -> None:
    newest = folder / "step-00000002"
    for name in FILES:
        content = (newest / name).read_bytes()
        for seed in range(60):
            flip(newest, name, seed)
            with pytest.raises(BadCheckpoint):
                verify(newest, read_manifest(newest))
            (newest / name).write_bytes(content)
    assert load_newest(open_checkpoints(folder)) == (2, [])


def test_when_all_are_bad_nothing_is_loaded_or_touched(folder: Path) -> None:
    for step in (1, 2):
        flip(folder / f"step-0000000{step}", TENSORS, step)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    step, notes = load_newest(open_checkpoints(folder))
    assert step is None
    assert len(notes) == 2
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_half_written_folder_is_no_checkpoint(folder: Path) -> None:
    (folder / "step-00000002").rename(folder / ".partial-step-00000002")
    assert load_newest(open_checkpoints(folder)) == (1, [])


def test_another_model_is_named(folder: Path) -> None:
    manifest = read_manifest(folder / "step-00000002")
    with pytest.raises(BadCheckpoint, match=r"no tensor 'model\.other'"):
        load_tensors(folder / "step-00000002", manifest, {"model.other": torch.zeros(3)})
    with pytest.raises(BadCheckpoint, match=r"'model\.bias' has shape \[7\], the model wants \[8\]"):
        load_tensors(folder / "step-00000002", manifest, {"model.bias": torch.zeros(8)})


# ---------------------------------------------------------------- malice


@pytest.mark.parametrize("name", MALICE)
def test_malicious_metadata_is_refused_and_not_run(folder: Path, name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the marker would appear
    make, words = MALICE[name]
    newest = folder / "step-00000002"
    put_metadata(newest, make)
    verify(newest, read_manifest(newest))  # checksums do not help here
    with pytest.raises(UnsafeCheckpoint, match=re.escape(words)):
        stored_tensors(newest, read_manifest(newest))
    step, notes = load_newest(open_checkpoints(folder))
    assert step == 1
    assert str(newest) in notes[0]
    assert words in notes[0]
    assert not os.path.exists(MARKER)


def test_metadata_cannot_change_classes_or_functions(folder: Path) -> None:
    newest = folder / "step-00000002"
    known = pathlib.PosixPath.exists, parts.Metadata.version, torch.serialization._get_layout.cache
    for name in ("attribute of a class", "attribute of a record", "attribute of a function"):
        put_metadata(newest, MALICE[name][0])
        with pytest.raises(UnsafeCheckpoint):
            stored_tensors(newest, read_manifest(newest))
    now = pathlib.PosixPath.exists, parts.Metadata.version, torch.serialization._get_layout.cache
    assert all(a is b for a, b in zip(known, now, strict=True))


@pytest.mark.parametrize("name", ["system", "eval", "old protocol", "hidden in good metadata", "a dotted path"])
def test_the_malice_is_live(folder: Path, name: str, tmp_path: Path, monkeypatch) -> None:
    """Read without care, these run: so it is the care that stops them."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(MALICE[name][0](folder / "step-00000002"))
    assert os.path.exists(MARKER)


@pytest.mark.parametrize(
    "content", [Payload(), {"a": 1}, [torch.zeros(3)], torch.zeros(3, 3)], ids=["payload", "dict", "list", "small"]
)
def test_other_things_in_a_tensor_file_are_refused(folder: Path, content: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    newest = folder / "step-00000002"
    put_in_tensors(newest, content)
    step, notes = load_newest(open_checkpoints(folder))
    assert step == 1
    assert "its tensors cannot be read" in notes[0]
    assert not os.path.exists(MARKER)


def test_packed_tensors_are_refused(folder: Path) -> None:
    """A few bytes would become any number."""
    put_in_tensors(folder / "step-00000002", torch.zeros(40, 30), zipfile.ZIP_DEFLATED)
    step, notes = load_newest(open_checkpoints(folder))
    assert step == 1
    assert "it is packed" in notes[0]


def test_a_pickle_that_names_far_places_takes_no_memory() -> None:
    """The C unpickler keeps a list as long as the largest place."""
    tracemalloc.start()
    try:
        raw = whole(plain("x") + pickle.LONG_BINPUT + (2**25).to_bytes(4, "little"))
        assert _Unpickler(io.BytesIO(raw)).load() == "x"
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


NO_STATISTICS: list[Any] = [
    {}, {"mean": ["x"], "std": [1.0]}, {"mean": 5, "std": None}, {"mean": [[1.0]], "std": [[1.0]]},
    {"mean": [1.0, 2.0], "std": [1.0]}, {"mean": [10**400], "std": [1]}, {"mean": [float("nan")], "std": [1.0]},
    {"mean": [1.0], "std": [0.0]}, {"mean": [1.0], "std": [1.0], "entries": [1]},
    {"mean": [1.0], "std": [1.0], "entries": [[[1.0], [1.0]]], "places": 5},
]  # fmt: skip


@pytest.mark.parametrize("statistics", NO_STATISTICS)
def test_statistics_that_are_none_are_passed_over(tmp_path: Path, statistics: Any) -> None:
    """A manifest may match its own checksum and say what it wants: so does that of somebody else's run."""
    checkpoints = save(tmp_path, 1, 2)
    place = tmp_path / "step-00000002" / "manifest.json"
    manifest = json.loads(place.read_text())
    del manifest["seal"]
    manifest["statistics"] = statistics
    place.write_text(json.dumps(manifest | {"seal": sum_of_tree(manifest)}))
    with pytest.raises(BadCheckpoint, match="statistics that are no finite means and positive stds"):
        read_manifest(tmp_path / "step-00000002")
    step, (note,) = load_newest(checkpoints)
    assert step == 1
    assert "statistics" in note


def test_metadata_and_manifests_are_read_within_bounds(folder: Path, monkeypatch) -> None:
    newest = folder / "step-00000002"
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.weights.safe_dcp.largest", lambda: 100)
        with pytest.raises(UnsafeCheckpoint, match="more than the 100 that such a file can need"):
            stored_tensors(newest, read_manifest(newest))
    with open(newest / "manifest.json", "ab") as file:
        file.write(b" " * (17 << 20))
    with pytest.raises(BadCheckpoint, match="more than the 16,777,216"):
        read_manifest(newest)


def test_very_many_parts_are_compared_in_no_time() -> None:
    """Not each with each."""
    size, whole = 150, torch.Size((300, 300))
    boxes = [parts.ChunkStorageMetadata(torch.Size((2 * i, 2 * k)), torch.Size((2, 2)))
             for i in range(size) for k in range(size)]  # fmt: skip
    entry = parts.TensorStorageMetadata(parts.TensorProperties(torch.float32), whole, boxes)
    assert _tiles(entry)
    boxes[7] = parts.ChunkStorageMetadata(torch.Size((0, 13)), torch.Size((2, 2)))
    assert not _tiles(entry)
    boxes[7] = boxes[8]
    assert not _tiles(entry)


def test_both_ways_to_name_a_memory_format_are_read() -> None:
    """Python 3.12 pickles a member of an enumeration by getattr, other versions by its value."""
    encoding = parts._MEM_FORMAT_ENCODING
    for arguments in (
        call(GETATTR, named(RECORDS, "_MEM_FORMAT_ENCODING"), plain("TORCH_CHANNELS_LAST")),
        call(named(RECORDS, "_MEM_FORMAT_ENCODING"), plain(encoding.TORCH_CHANNELS_LAST.value)),
    ):
        assert _Unpickler(io.BytesIO(whole(arguments))).load() is encoding.TORCH_CHANNELS_LAST


# ---------------------------------------------------------------- parts of tensors, and formats

SHARDS = {
    "overlapping slabs": (put_parts(((0, 20), (0, 30)), ((10, 20), (0, 30))), "not covered"),
    "the same slab twice": (put_parts(((0, 20), (0, 30)), ((0, 20), (0, 30))), "not covered"),
    "overlapping tiles": (
        put_parts(((0, 20), (0, 15)), ((0, 20), (15, 15)), ((20, 20), (0, 15)), ((15, 20), (15, 15))),
        "not covered",
    ),
    "a missing slab": (put_parts(((0, 20), (0, 30))), "not covered"),
    "no slab at all": (put_parts(), "not covered"),
    "a slab that sticks out": (put_parts(((0, 20), (0, 30)), ((21, 20), (0, 30))), "not covered"),
    "a slab before the start": (put_parts(((-1, 20), (0, 30)), ((19, 20), (0, 30))), "not covered"),
    "two entries in the same bytes": (share_bytes, "overlap in"),
    "a part beyond the end": (change_place(offset=1), "reach beyond the end of"),
    "a part that is cut": (change_place(length=-1570), "is larger than what is stored"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_overlapping_and_missing_shards_are_refused(folder: Path, name: str) -> None:
    """PyTorch would leave a part of the tensor as it was, or fill it twice, without a word."""
    make, words = SHARDS[name]
    put_metadata(folder / "step-00000002", make)
    with pytest.raises(UnsafeCheckpoint, match=words):
        stored_tensors(folder / "step-00000002", read_manifest(folder / "step-00000002"))
    step, notes = load_newest(open_checkpoints(folder))
    assert step == 1
    assert words in notes[0]


def test_parts_that_fill_a_tensor_are_read(folder: Path) -> None:
    """So that those of MALICE are refused for what is wrong with them, and for nothing else."""
    newest = folder / "step-00000002"
    for boxes in (
        (((0, 20), (0, 30)), ((20, 20), (0, 30))),
        (((0, 40), (0, 10)), ((0, 40), (10, 20))),
        (((0, 20), (0, 15)), ((0, 20), (15, 15)), ((20, 20), (0, 15)), ((20, 20), (15, 15))),
    ):
        shutil.copytree(folder, folder.parent / f"parts-{len(boxes)}-{boxes[0][0][1]}")
        put_metadata(newest, put_parts(*boxes))
        assert stored_tensors(newest, read_manifest(newest))["model.weight"] == torch.Size([40, 30])
        shutil.rmtree(folder)
        shutil.copytree(folder.parent / f"parts-{len(boxes)}-{boxes[0][0][1]}", folder)


def test_a_checkpoint_of_a_newer_vitrail_is_refused_and_not_set_aside(folder: Path) -> None:
    """To go on from an older one would throw away what the newer has made."""
    reseal(folder / "step-00000002", format=runs.FORMAT + 1)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=rf"step-00000002 was written by a newer vitrail: version {runs.FORMAT + 1}"):
        load_newest(open_checkpoints(folder))
    again = open_checkpoints(folder)
    again.remember_best("loss")
    assert sorted(folder.rglob("*")) == before


def test_a_checkpoint_of_an_older_vitrail_is_read(folder: Path) -> None:
    manifest = read_manifest(folder / "step-00000002")
    reseal(folder / "step-00000002", format=1)
    assert read_manifest(folder / "step-00000002") == manifest | {"data": None}
    assert load_newest(open_checkpoints(folder)) == (2, [])
    assert set(runs.UPGRADES) == set(range(1, runs.FORMAT))
