"""Checkpoints: written whole, verified before they are read, kept by age and by score, and never run."""

import collections
import io
import os
import pathlib
import pickle
import re
import shutil
import threading
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
    flip,
    named,
    plain,
    put_in_tensors,
    put_metadata,
    whole,
)
from torch.distributed.checkpoint import metadata as parts

from vitrail.errors import UserError
from vitrail.training import checkpoint as module
from vitrail.training.checkpoint import (
    BadCheckpoint,
    Checkpoints,
    check_space,
    checksum,
    list_checkpoints,
    load_tensors,
    read_manifest,
    stored_tensors,
    verify,
)
from vitrail.training.safe_dcp import UnsafeCheckpoint, _Unpickler

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
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [5, 2]
    again = open_checkpoints(tmp_path, keep=1)
    again.remember_best("loss")
    assert again.best == (0.4, 2)
    again.save(6, state(6), NUMBERS | {"metrics": {"loss": 0.3}}, 0.3)
    again.wait()
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
    assert checkpoints.best == (0.5, 1)
    assert [int(p.name[5:]) for p in list_checkpoints(tmp_path)] == [3, 1]


# ---------------------------------------------------------------- saving


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_save_keeps_the_others_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    checkpoints = save(tmp_path, 1, keep=1)
    for target in ("_publish", "_sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints if target == "_publish" else module, target, full_disk)
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
    (tmp_path / ".partial-step-00000004").symlink_to(tmp_path.parent)
    save(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert tmp_path.parent.exists()


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch) -> None:
    """The copy is saved, not what training makes of it; the next save waits for this one; the last one completes."""
    gate, reached = threading.Event(), threading.Event()

    def slow_checksum(path: Path) -> int:
        reached.set()
        assert gate.wait(60)
        return checksum(path)

    monkeypatch.setattr(module, "checksum", slow_checksum)
    checkpoints = open_checkpoints(tmp_path, background=True)
    live = state(1)
    checkpoints.save(1, live, NUMBERS)  # returns although the gate is shut
    assert reached.wait(60)
    assert checkpoints.finished() is None
    assert list_checkpoints(tmp_path) == []
    for tensor, new in zip(live.values(), state(2).values(), strict=True):
        tensor.copy_(new)  # a step of training
    second = threading.Thread(target=lambda: checkpoints.save(2, live, NUMBERS))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save did not wait for the first"
    gate.set()
    second.join(60)
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


def test_both_ways_to_name_a_memory_format_are_read() -> None:
    """Python 3.12 pickles a member of an enumeration by getattr, other versions by its value."""
    encoding = parts._MEM_FORMAT_ENCODING
    for arguments in (
        call(GETATTR, named(RECORDS, "_MEM_FORMAT_ENCODING"), plain("TORCH_CHANNELS_LAST")),
        call(named(RECORDS, "_MEM_FORMAT_ENCODING"), plain(encoding.TORCH_CHANNELS_LAST.value)),
    ):
        assert _Unpickler(io.BytesIO(whole(arguments))).load() is encoding.TORCH_CHANNELS_LAST
