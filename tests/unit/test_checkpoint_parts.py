"""Which checkpoint is the best one, which is whole, and which is read instead of one that vanishes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitrail.errors import BadData
from vitrail.sums import sealed
from vitrail.training.checkpoint import Checkpoints
from vitrail.weights import runs as run
from vitrail.weights.runs import FORMAT, KEYS, MANIFEST, BadCheckpoint, read_manifest


@pytest.mark.parametrize(
    ("larger", "best", "metric", "better"),
    [
        (False, 0.5, 0.4, True),
        (False, 0.5, 0.6, False),
        (True, 0.5, 0.6, True),
        (True, 0.5, 0.4, False),
        (True, 0.5, 0.5, False),
        (False, 0.5, 0.5, False),
        (True, None, -3.0, True),
        (True, None, float("nan"), False),
        (True, 0.5, float("inf"), False),
    ],
)
def test_losses_fall_and_scores_rise(larger: bool, best: float | None, metric: float, better: bool) -> None:
    kept: Any = SimpleNamespace(larger_is_better=larger, best=None if best is None else (best, 10))
    assert Checkpoints.is_better(kept, metric) is better


@pytest.mark.parametrize("content", [b"1234", b"123456"])
def test_a_file_of_another_size_is_seen_at_the_first_look(content: bytes, tmp_path: Path) -> None:
    """Every rank takes it, before checksums are shared out."""
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    manifest = {key: kind() for key, kind in KEYS.items()} | {"step": 3, "format": FORMAT}
    manifest["statistics"] = {"mean": [0.0], "std": [1.0]}
    manifest["files"] = {"a.distcp": {"bytes": 5, "crc32": 0}}
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))
    (folder / "a.distcp").write_bytes(b"12345")
    assert read_manifest(folder)["step"] == 3
    (folder / "a.distcp").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=f"a.distcp has {len(content)} bytes instead of 5"):
        read_manifest(folder)


def test_what_one_rank_refuses_asks_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computing: a question would wait for them for ever, and its reason with it."""
    asked: list[Any] = []

    def choose(_question: Any, group: Any) -> tuple[str, dict[str, Any]]:
        asked.append(group)
        return "nowhere/step-00000003", {}

    def refuse(_path: Path, _manifest: dict[str, Any]) -> None:
        raise BadData("image 7 is broken")

    monkeypatch.setattr(run, "on_chief", choose)
    with pytest.raises(BadData, match="image 7 is broken"):
        run.with_checkpoint("runs/a", None, refuse, "group")
    assert asked == ["group"]

    def vanish_once(_path: Path, _manifest: dict[str, Any]) -> str:
        if len(asked) == 2:
            raise run.CheckpointVanished("it has gone")
        return "read"

    assert run.with_checkpoint("runs/a", None, vanish_once, "group") == "read"
    assert asked == ["group"] * 3


@pytest.mark.parametrize("gone", [False, True])
def test_what_one_rank_cannot_read_ends_all_ranks_alike(gone: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """What another rank finds wrong keeps this one from waiting for it in PyTorch's own collectives."""
    told: list[Any] = []

    def gather(mine: Any, _group: Any) -> list[Any]:
        told.append(mine)
        return [mine, {"names": [], "problem": "no such file"} if len(told) == 1 else not gone]

    monkeypatch.setattr(run, "gather_json", gather)
    monkeypatch.setattr(run, "stored_tensors", lambda *_: {})
    monkeypatch.setattr(run, "read_tensors", lambda *_: pytest.fail("another rank does not come"))
    model: Any = SimpleNamespace(named_parameters=lambda: [])
    with pytest.raises(run.UserError, match="was not loaded: no such file") as caught:
        run.load_weights(model, tmp_path, {}, "raw", "group")
    assert isinstance(caught.value, run.CheckpointVanished) is gone
    assert told == [{"names": [], "problem": None}, True]
