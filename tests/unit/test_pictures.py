"""Pictures of a run: in memory that training has, of volumes from all sides, and never the end of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from support import events, losses, merge, tiny_recipe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vitrail
from vitrail.errors import BadData
from vitrail.objectives.generate import Generate
from vitrail.objectives.reconstruct import Reconstruct
from vitrail.parallel import shard
from vitrail.report import summary as vitrail_summary
from vitrail.report.panels import pairs_panel, sample_grid, segmentation_panel
from vitrail.report.views import cuts_of, pad
from vitrail.training import pictures
from vitrail.training.journal import Journal
from vitrail.training.pictures import Pictures, Undrawn

TINY = {"run__steps": 4, "checkpoint__every": "off", "eval__every": 4, "eval__samples": 4, "data__batch": 2}


def test_a_picture_is_made_of_as_many_samples_at_once_as_a_micro_batch_has(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    example = Reconstruct.example

    def watched(self: Any, batch: Any, draws: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(len(batch))
        return example(self, batch, draws, *arguments, **options)

    monkeypatch.setattr(Reconstruct, "example", watched)
    vitrail.train(
        tiny_recipe(volume, tmp_path / "run", **TINY, log__pictures=4, data__micro_batch=1, log__slices=7), quiet=True
    )
    assert seen == [1, 1, 1] * 2
    seen.clear()
    vitrail.train(tiny_recipe(volume, tmp_path / "two", **TINY, log__pictures=4, log__slices=7), quiet=True)
    assert seen == [2, 1] * 2
    both = [(tmp_path / name / "pictures" / "reconstruct-00000004.png").read_bytes() for name in ("run", "two")]
    assert Image.open(tmp_path / "run" / "pictures" / "reconstruct-00000004.png").width > 1500
    assert len(both[0]) == pytest.approx(len(both[1]), rel=0.1)


def test_a_failing_picture_is_said_once_and_training_goes_on(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {
        "example": [torch.OutOfMemoryError("CUDA out of memory\nTried to allocate")] * 2,
        "rows": [IndexError("tuple index out of range")],
        "draw": [OSError(28, "No space left on device")],
    }

    def first_fail(name: str) -> Any:
        usual, errors = getattr(Reconstruct, name), list(failing[name])

        def made(*arguments: Any, **options: Any) -> Any:
            if errors:
                raise errors.pop()
            return usual(*arguments, **options)

        return made

    said: list[str] = []
    monkeypatch.setattr(Journal, "note", lambda self, text: said.append(text))
    for name in failing:
        monkeypatch.setattr(Reconstruct, name, first_fail(name))
    tree = tiny_recipe(volume, tmp_path / "run", **TINY, log__pictures=1, log__slices=1)
    assert vitrail.train(merge(tree, {"checkpoint.every": 4}), quiet=True).code == 0
    assert [note for note in said if note.startswith("the picture")] == [
        "the picture of step 0 could not be drawn, nor others so: the device has no memory left for it",
        "the picture of step 2 could not be drawn, nor others so: IndexError: tuple index out of range",
        "the picture of step 3 could not be drawn, nor others so: No space left on device",
    ]
    warned = events(tmp_path / "run", "warning")
    assert [(event["step"], event["text"][:11]) for event in warned] == [(step, "The picture") for step in (0, 2, 3)]
    assert len(vitrail_summary(tmp_path / "run")["warnings"]) >= 3
    assert [event["step"] for event in events(tmp_path / "run", "picture")] == [4]
    plain = {"log.pictures": "off", "run.dir": str(tmp_path / "plain"), "checkpoint.every": 4}
    vitrail.train(merge(tree, plain), quiet=True)
    assert losses(tmp_path / "run").tolist() == losses(tmp_path / "plain").tolist()


def test_ranks_give_up_a_picture_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that got through, or is at a forward, hears of one that did not; bad data are no end of a run either."""
    drawing = Pictures(SimpleNamespace(), None, kind="flow", held_out=True, slices=1)  # type: ignore[arg-type]

    def heard(*others: list[str | None]) -> None:
        monkeypatch.setattr(pictures, "gather_json", lambda mine, group: [mine, *others])

    heard(["done", None])
    assert drawing._attempt(lambda: 7) == 7
    heard(["done", "no memory"])
    for action in (lambda: 7, drawing._meet):
        with pytest.raises(Undrawn, match="no memory"):
            drawing._attempt(action)
    heard(["done", None])
    with pytest.raises(Undrawn, match="did not compute the same"):
        drawing._meet()

    def spoilt() -> None:
        raise BadData("a.zarr holds nan")

    with pytest.raises(Undrawn, match=r"a\.zarr holds nan"):
        drawing._attempt(spoilt)


def test_no_samples_are_made_where_pictures_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the codec opened that would decode them."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 255, (32, 32), dtype=np.uint8))
    tree = tiny_recipe(tmp_path / "a.npy", tmp_path / "run", **TINY, log__pictures="off", model__ndim=2)
    tree["data"]["valid"] = tree["data"]["train"] = [{"path": str(tmp_path / "a.npy")}]
    tree["model"] = {"kind": "dit", "ndim": 2, "width": 24, "depth": 1, "heads": 2, "patch": 4}
    tree |= {"objective": {"kind": "flow"}, "codec": {"kind": "kl", "path": str(tmp_path / "none")}}
    monkeypatch.setattr(Generate, "generate", lambda *a, **k: pytest.fail("a sample was made"))
    assert vitrail.train(tree, quiet=True).code == 0
    assert not events(tmp_path / "run", "picture")


def test_a_forward_that_fails_is_no_part_of_the_next() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wanted = model(torch.ones(2, 4)).detach()
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        shard.forget_failed(model)  # what fails before the first forward leaves nothing to forget
        model(torch.ones(2, 4))
        with pytest.raises(RuntimeError):  # of the second layer
            model[0].register_forward_hook(lambda *_: torch.ones(2, 3)) and model(torch.ones(2, 4))
        model[0]._forward_hooks.popitem()
        root: Any = model._get_fsdp_state()
        assert root._state_ctx.iter_forward_root is not None
        shard.forget_failed(model)
        shard.forget_gathered([model])
        assert root._state_ctx.iter_forward_root is None
        assert torch.equal(model(torch.ones(2, 4)), wanted)
    finally:
        dist.destroy_process_group()


def test_volumes_are_shown_from_three_sides_and_in_slices(tmp_path: Path) -> None:
    cuts = cuts_of((16, 20, 24), 4)
    assert [name for name, _ in cuts] == ["z = 8", "y = 10", "x = 12", "z = 2", "z = 6", "z = 10", "z = 14"]
    volume = np.arange(2 * 16 * 20 * 24).reshape(2, 16, 20, 24)
    views = [volume[at] for _, at in cuts]
    assert np.array_equal(views[0], volume[:, 8])
    assert np.array_equal(views[1], volume[:, :, 10])
    assert np.array_equal(views[2], volume[..., 12])
    assert np.array_equal(views[6], volume[:, 14])
    assert len(cuts_of((2, 4, 4), 8)) == 3 + 2
    assert {view.shape for view in pad([np.zeros((4, 2, 3)), np.zeros((1, 6, 3))])} == {(4, 6, 3)}
    with pytest.raises(ValueError, match="only images and volumes"):
        cuts_of((4,), 8)

    labels = np.zeros((8, 8, 8), int)
    labels[2:6] = 1
    rows = [{"image": np.ones((1, 8, 8, 8)), "truth": labels, "prediction": labels}]
    widths = []
    for slices in (1, 8):
        paths = [
            segmentation_panel(tmp_path / "s.png", rows, names=("a", "b"), slices=slices),
            pairs_panel(tmp_path / "p.png", [(np.ones((1, 8, 8, 8)), np.zeros((1, 8, 8, 8)))], slices=slices),
            sample_grid(tmp_path / "g.png", np.ones((2, 1, 8, 8, 8)), np.ones((2, 1, 8, 8, 8)), slices=slices),
        ]
        widths.append([Image.open(path).width for path in paths])
    assert all(many > few + 7 * 100 for few, many in zip(*widths, strict=True))


def test_words_of_a_scale_bar_fit_into_a_narrow_panel() -> None:
    from vitrail.report.figures import Sheet

    sheet = Sheet(4.0, 2.0)
    sheet.tile(np.zeros((8, 4, 3)), 1.0, 0.2, 0.6, 1.6, smooth=False)
    for room in (2.0, 0.6):
        sheet.bar(1.0, 1.8, 0.1, "200 µm wide", room)
        text = sheet.figure.texts[-1]
        found = text.get_window_extent(sheet.figure.canvas.get_renderer())  # type: ignore[attr-defined]
        assert found.x1 / sheet.figure.dpi < 1.0 + room
    large, small = (float(text.get_fontsize()) for text in sheet.figure.texts)
    assert large > small
