"""Pictures of several variables and of colours: each in its own range, with its name, its unit and its place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import merge, tiny_recipe

import vitrail
from vitrail.errors import UserError
from vitrail.report import blocks, panels
from vitrail.report.blocks import About, colour_places, draw_blocks, take
from vitrail.report.figures import Sheet
from vitrail.training.shown import write_unit

TINY = {"run__steps": 1, "checkpoint__every": "off", "eval__every": 1, "eval__samples": 2, "data__batch": 2}
NINE = tuple("abcdefghi")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written into pictures."""
    said: list[str] = []
    usual = Sheet.text

    def watched(self: Sheet, x: float, y: float, words: str, **style: Any) -> None:
        said.append(words)
        usual(self, x, y, words, **style)

    monkeypatch.setattr(Sheet, "text", watched)
    return said


def nine(shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([10.0**k * rng.random(shape) for k in range(-4, 5)]).astype(np.float32)


def test_each_variable_has_a_panel_in_its_own_range(tmp_path: Path, words: list[str]) -> None:
    """With one range for all, nine variables of other sizes were black squares."""
    for shape in ((16, 16), (8, 16, 16)):
        values = nine(shape)
        about = About("july", "from z 0", (2.0,) * len(shape), "meter", NINE, {"c": "m s⁻¹"}, None)
        row = {"target": values, "prediction": values, "hidden": np.zeros((1, *shape), bool), "about": about}
        words.clear()
        path = panels.reconstruction_panel(tmp_path / "p.png", [row] * 3, title="t")
        assert [word for word in words if word in NINE] == list(NINE)
        assert sum(word.startswith("july   from z 0") for word in words) == 1  # of many variables, one sample
        assert "m s⁻¹" in words
        assert "5 m" in words
        assert any(word.endswith("z = 4") for word in words) == (len(shape) == 3)
        picture = np.asarray(Image.open(path).convert("L"))
        left = picture[:, 60:300]  # targets
        rows = [part for part in np.array_split(left, 9) if part.size]
        assert all(part.std() > 40 for part in rows)
        assert all(40 < np.median(part) < 230 for part in rows)


def test_colours_are_one_picture_and_other_triples_are_not() -> None:
    rgb = ("red", "green", "blue")
    assert [g.channels for g in About(variables=rgb, colours=colour_places(rgb)).groups(3)] == [[0, 1, 2]]
    mixed = ("infrared", "blue", "green", "red")
    groups = About(variables=mixed, colours=colour_places(mixed)).groups(4)
    assert [(g.name, g.channels) for g in groups] == [("", [3, 2, 1]), ("infrared", [0])]
    wind = ("u", "v", "w")
    assert [g.name for g in About(variables=wind, colours=colour_places(wind)).groups(3)] == ["u", "v", "w"]
    chosen = About(variables=NINE, colours=None, shown=("h", "b")).groups(9)
    assert [(g.name, g.channels) for g in chosen] == [("h", [7]), ("b", [1])]
    assert len(About(colours=None).groups(500)) == blocks.MOST_VARIABLES


def test_voxels_are_as_long_as_in_space() -> None:
    volume = np.arange(4 * 6 * 8).reshape(1, 4, 6, 8)
    spacing = (50.0, 4.0, 8.0)
    assert take(volume, (..., 1, slice(None), slice(None)), spacing).shape == (1, 6, 16)
    assert take(volume, (..., slice(None), 1, slice(None)), spacing).shape == (1, 25, 8)
    assert take(volume, (..., slice(None), slice(None), 1), spacing).shape == (1, 32, 6)  # stretched 8 times at most
    assert take(volume, (..., 1, slice(None), slice(None)), ()).shape == (1, 6, 8)


def test_a_run_says_what_it_shows(tmp_path: Path, words: list[str]) -> None:
    np.save(tmp_path / "a.npy", nine((32, 32)))
    entry = {"path": str(tmp_path / "a.npy"), "axes": "cyx", "voxel_size": [4, 4]}
    tree = tiny_recipe(tmp_path / "a.npy", tmp_path / "run", **TINY, log__pictures=1, model__ndim=2)
    tree["data"] |= {"train": [entry], "valid": [entry]}
    vitrail.train(tree, quiet=True)
    assert sum(word.startswith("channel") for word in words) == 2 * 9
    assert any(word.startswith("a.npy   from y ") for word in words)
    words.clear()
    some = {"log.variables": ["channel7", "channel2"], "run.dir": str(tmp_path / "some")}
    vitrail.train(merge(tree, some), quiet=True)
    assert [word for word in words if word.startswith("channel")][:2] == ["channel7", "channel2"]
    with pytest.raises(UserError, match=r"log.variables: 'chanel7' is not a variable .* did you mean 'channel7'\?"):
        vitrail.train(merge(tree, {"log.variables": ["chanel7"], "run.dir": str(tmp_path / "no")}), quiet=True)


@pytest.mark.parametrize("variables", [None, {"aggregate": "query"}, {"aggregate": "groups"}, {"aggregate": "none"}])
def test_two_channels_of_volumes_are_drawn(tmp_path: Path, variables: dict[str, Any] | None) -> None:
    np.save(tmp_path / "a.npy", nine((20, 20, 20))[:2])
    entry = {"path": str(tmp_path / "a.npy"), "axes": "czyx"}
    tree = tiny_recipe(tmp_path / "a.npy", tmp_path / "run", **TINY, log__pictures=1)
    tree["data"] |= {"train": [entry], "valid": [entry]}
    if variables:
        tree["model"]["encoder"]["variables"] = variables | {"known": ["channel0", "channel1"]}
    vitrail.train(tree, quiet=True)
    assert len(list((tmp_path / "run" / "pictures").iterdir())) == 2


def test_units_are_written_as_people_do() -> None:
    assert write_unit("m s**-1") == "m s⁻¹"
    assert write_unit("m**2 s**-2") == "m² s⁻²"
    assert write_unit("K") == "K"


def test_a_sheet_needs_no_words(tmp_path: Path) -> None:
    block = blocks.Block("", [blocks.Row("", [np.zeros((4, 4, 3))])])
    assert draw_blocks([block], [], "", "").put(tmp_path / "a.png").is_file()
