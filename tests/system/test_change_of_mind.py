"""A run that goes on with changes: which may be made, how they are noted, and when it ends before its time."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import events, losses, parameters, tiny_recipe, write_volume

from vitrail.errors import UserError
from vitrail.recipe import load_recipe
from vitrail.report import write_report
from vitrail.training.continuing import FIXED, Patience, tell_rates, why_fixed
from vitrail.training.lengths import lay_out
from vitrail.training.run import train


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volume(tmp_path_factory.mktemp("data") / "em.zarr")


def small(volume: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    short = {"run__steps": 6, "checkpoint__every": 3, "eval__every": 3, "ema": None, "log__activations": "off"}
    return tiny_recipe(volume, run_dir, **short | changes)


def refused(tree: dict[str, Any], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        train(tree, quiet=True, **options)
    return str(caught.value)


def notes(run_dir: Path) -> list[str]:
    return list(events(run_dir, "start")[-1]["notes"])


def test_a_change_is_made_on_purpose_and_noted(volume: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(volume, run), quiet=True)
    changed = small(volume, run, run__steps=9, optimizer__lr=1e-4, optimizer__weight_decay=0.0)
    said = refused(changed)
    assert "optimizer.lr: 0.001 became 0.0001" in said
    assert "go on with the change by --change" in said
    outcome = train(changed, quiet=True, change=True)
    assert (outcome.step, outcome.reason) == (9, "done")
    (change,) = events(run, "change")
    assert change["step"] == 6
    assert change["changes"] == [
        {"key": "optimizer.lr", "old": 1e-3, "new": 1e-4},
        {"key": "optimizer.weight_decay", "old": 0.05, "new": 0.0},
    ]
    assert events(run, "train")[-1]["lr"] <= 1e-4
    assert any("the rate of step 6 is" in note for note in notes(run))
    # From here on it is the run's own recipe, and what was before is a change.
    assert train(run, quiet=True).step == 9
    assert "optimizer.lr: 0.0001 became 0.001" in refused(small(volume, run, optimizer__weight_decay=0.0))
    page = write_report(run).read_text(encoding="utf-8")
    assert "optimizer.lr: 0.001 became 0.0001" in page
    assert "At step 6" in page


def test_a_change_is_remembered_before_the_next_checkpoint(volume: Path, tmp_path: Path) -> None:
    """A run that was killed right after it had been changed goes on so without being told again."""
    run = tmp_path / "run"
    train(small(volume, run), quiet=True)
    changed = small(volume, run, run__steps=12, optimizer__lr=1e-4, checkpoint__every=100)
    train(changed, quiet=True, change=True)
    last = run / "checkpoints" / "step-00000012"
    assert json.loads((last / "manifest.json").read_text())["recipe"]["optimizer"]["lr"] == 1e-4
    for file in [*last.iterdir(), last]:  # as if it had never been written
        file.rmdir() if file.is_dir() else file.unlink()
    assert train(changed, quiet=True).step == 12
    assert len(events(run, "change")) == 1
    assert "optimizer.lr: 0.0001 became 0.01" in refused(changed | {"optimizer": {"kind": "adamw", "lr": 0.01}})


def test_what_may_not_change_is_told_by_key_and_reason(volume: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(volume, run), quiet=True)
    other = small(volume, run, data__batch=4, run__seed=4, optimizer__lr=1e-4, model__encoder__width=12)
    said = refused(other, change=True)
    assert "run.seed: 3 became 4, but every draw and the order of the data follow from it" in said
    assert "data.batch: 8 became 4, but the order of the data" in said
    assert "model.encoder.width: 24 became 12, but its weights are those of the checkpoint" in said
    assert "leave out run.seed, model.encoder.width, data.batch, or start beside it" in said
    assert "by --change" not in refused(other)
    assert not events(run, "change")


@pytest.mark.parametrize(
    ("key", "fixed"),
    [
        ("data.train.0.path", True),
        ("data.augment.rotate", True),
        ("data.augment.noise", False),
        ("model.mask.ratio", False),
        ("model.decoder.width", True),
        ("optimizer.betas", False),
        ("optimizer.kind", True),
        ("schedule.kind", False),
        ("ema", True),
        ("ema.decay", False),
        ("objective.target", False),
        ("precision.compute", False),
        ("init.path", True),
    ],
)
def test_reasons(key: str, fixed: bool) -> None:
    assert bool(why_fixed(key)) is fixed
    assert all(why == why.strip(" .") for why in FIXED.values())


def test_a_finished_run_says_so_and_a_longer_one_what_the_rate_does(volume: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(volume, run), quiet=True)
    train(run, quiet=True)
    assert f"this run is finished, with 6 of 6 steps; lengthen it with: vitrail train {run} run.steps=12" in notes(run)
    train(run, overrides=["run.steps=8"], quiet=True)
    (note,) = [note for note in notes(run) if "schedule" in note]
    assert note.startswith(
        "the run has 8 steps and had 6, over which the cosine schedule is laid out anew: the rate of"
    )
    assert not [line for line in notes(run) if "finished" in line]


def test_rates_are_those_of_the_schedules(volume: Path, tmp_path: Path) -> None:
    before = load_recipe(tiny_recipe(volume, tmp_path / "run"))
    longer = load_recipe(tiny_recipe(volume, tmp_path / "run", run__steps=40))
    told = tell_rates(before, longer, 20, batch=8, epoch=100)
    rate = lay_out(longer, batch=8, epoch=100).rate
    assert told is not None
    assert f"the rate of step 20 is {rate(20):.3g}" in told
    assert tell_rates(before, before, 10, batch=8, epoch=100) is None
    assert tell_rates(None, longer, 20, batch=8, epoch=100) is None
    fixed = load_recipe(tiny_recipe(volume, tmp_path / "run", run__steps=40, schedule__steps=20))
    assert tell_rates(before, fixed, 20, batch=8, epoch=100) is None


def test_patience_counts_what_is_not_the_best() -> None:
    patience = Patience(2, larger_is_better=True)
    for number, (score, waited) in enumerate([(0.5, 0), (0.4, 1), (0.6, 0), (0.6, 1), (float("nan"), 2)]):
        assert not patience.over
        patience.see(score, number)
        assert patience.waited == waited
    assert patience.over
    again = Patience(3, larger_is_better=True)
    again.restore(json.loads(json.dumps(patience.to_json())), None)
    assert (again.best, again.step, again.waited, again.over) == (0.6, 2, 2, False)
    again.restore(None, (0.7, 5))  # a checkpoint of before there was patience
    assert again.best == 0.7


def test_patience_ends_a_run_and_resumes_exactly(volume: Path, tmp_path: Path) -> None:
    still = {"run__steps": 12, "checkpoint__every": 2, "eval__every": 2, "optimizer__lr": 0.0, "run__patience": 3}
    whole = train(small(volume, tmp_path / "whole", **still), quiet=True)
    assert (whole.code, whole.reason, whole.step) == (0, "no improvement", 8)  # the first was the best, then three
    end = events(tmp_path / "whole", "end")[-1]
    assert end["reason"] == "no improvement"
    assert end["message"].startswith(
        "mse_over_variance has not improved for 3 evaluations (run.patience: 3); the best is "
    )
    page = write_report(tmp_path / "whole").read_text(encoding="utf-8")
    assert "no improvement" in page
    assert "has not improved for 3 evaluations" in page

    # Stopped between two evaluations, after two of the three.
    parts = small(volume, tmp_path / "parts", **still | {"run__steps": 7})
    train(parts | {"run": parts["run"] | {"steps": 6}}, quiet=True)
    again = train(small(volume, tmp_path / "parts", **still), quiet=True)
    assert (again.reason, again.step) == ("no improvement", 8)
    assert (losses(tmp_path / "parts")[-1], len(losses(tmp_path / "parts"))) == (losses(tmp_path / "whole")[-1], 8)
    one, other = (parameters(tmp_path / name) for name in ("whole", "parts"))
    assert all((one[name] == other[name]).all() for name in one)

    # It has ended, says so, and goes on with more patience.
    assert train(tmp_path / "whole", quiet=True).step == 8
    assert any(note.startswith("this run has ended: mse_over_variance has not") for note in notes(tmp_path / "whole"))
    assert train(tmp_path / "whole", overrides=["run.patience=4"], quiet=True).step == 10
    assert train(tmp_path / "whole", overrides=["run.patience=null"], quiet=True).reason == "done"


def test_patience_needs_a_score(volume: Path, tmp_path: Path) -> None:
    said = refused(small(volume, tmp_path / "run", run__patience=2, data__valid=[]))
    assert said == "run.patience: there is no score to wait for without held-out data; give data.valid"
    assert not (tmp_path / "run").exists()
