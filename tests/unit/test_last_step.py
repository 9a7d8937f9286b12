"""What is due every so many steps is due at the last one, too."""

from pathlib import Path

from support import events, tiny_recipe

import vitrail


def test_the_last_step_is_measured_drawn_and_saved(volume: Path, tmp_path: Path) -> None:
    changes = {"run__steps": 5, "checkpoint__every": 3, "eval__every": 2, "log__every": 4, "log__pictures": 3}
    tree = tiny_recipe(volume, tmp_path / "run", **changes, eval__samples=2, data__batch=2)
    vitrail.train(tree, quiet=True)
    assert [event["step"] for event in events(tmp_path / "run", "eval")] == [2, 4, 5]
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [4, 5]
    assert [event["step"] for event in events(tmp_path / "run", "picture")][-1] == 5
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()
