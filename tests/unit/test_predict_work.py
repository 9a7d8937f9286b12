"""The place where a prediction is made: whose it is, what is left in it, and ranks that wait for one."""

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from predicting import SHAPE, train_segmentation, write_em

import vitrail
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError

SMALL: dict[str, Any] = {"chunk": 8, "memory": 0.0002}  # many pillars and rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predict-work")
    write_em(place / "em.zarr")
    train_segmentation(place, place / "em.zarr")
    return place


@pytest.fixture(scope="module")
def values(place: Path) -> np.ndarray:
    return OmeZarrConfig(path=str(place / "em.zarr")).open().read(0, (slice(None),) * 3)


@pytest.mark.parametrize("ending", ["nii.gz", "tif", "npy"])
def test_the_watchdog_is_told_while_one_rank_writes_a_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    from vitrail.infer import outputs
    from vitrail.training.failures import SLOW_PHASE, Watchdog

    beats: list[tuple[str, float]] = []
    beat, copies = Watchdog.beat, []
    copying = outputs.Result._copying

    def note(self: Watchdog, step: int, phase: str, **options: Any) -> None:
        beat(self, step, phase, **options)
        beats.append((phase, self.limit))

    def watched(self: outputs.Result, item: int) -> Any:
        def copy(*tick: Any) -> None:
            before = len(beats)
            copying(self, item)(*tick)
            copies.append(len(beats) - before)

        return copy

    monkeypatch.setattr(Watchdog, "beat", note)
    monkeypatch.setattr(outputs.Result, "_copying", watched)
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / f"c.{ending}", **SMALL)
    assert copies == [SHAPE[0] // SMALL["chunk"]]  # once for each slab
    assert {limit for phase, limit in beats if phase == "predicting"} == {SLOW_PHASE}


def test_drafts_that_a_kill_left_are_not_published(
    place: Path, values: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.disk import draft_of
    from vitrail.infer import outputs

    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "in" / f"{name}.npy", values[0])
    publish = outputs.Result.publish

    def leave(self: outputs.Result) -> None:
        draft_of(self.work / "result/a.npy").write_bytes(b"half")
        publish(self)

    monkeypatch.setattr(outputs.Result, "publish", leave)
    vitrail.predict(place / "seg", tmp_path / "in", out=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.npy", "b.npy"]


def test_what_another_call_is_just_making_is_not_removed(place: Path, tmp_path: Path) -> None:
    work = tmp_path / ".c.zarr.predict"
    work.mkdir()
    (work / "result").mkdir()
    handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being predicted by another process"):
            vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr")
    finally:
        os.close(handle)
    assert (work / "result").is_dir()
    vitrail.predict(place / "seg", place / "em.zarr", out=tmp_path / "c.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["c.zarr"]


def test_no_two_items_get_one_file() -> None:
    from vitrail.infer.outputs import Frame, file_names

    names = ["a-2.png", "a.png", "a.tif", "b/a.png", "../a.png", "/etc/a.png"]
    frames = [Frame(name, (4, 4), ("y", "x"), (1.0, 1.0), None, None, None) for name in names]
    found = file_names(frames, ".png")
    assert found == ["a-2.png", "a.png", "a-2-2.png", "b/a.png", "a-4.png", "a-5.png"]
