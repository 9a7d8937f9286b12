"""The benchmark of adaptive patches at equal quality: its cells, its tables, and how it goes on."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

from vitrail.recipe import load_recipe


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("adaptive_quality")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("adaptive_quality_tables")


def found(data: str, patch: int, tokens: int, adaptive: bool, seed: int, dice: list[float], ms: float) -> Any:
    return {
        "data": data,
        "patch": patch,
        "tokens": tokens,
        "adaptive": adaptive,
        "seed": seed,
        "date": "2026-11-19",
        "status": "ok",
        "dice": {str(10 * (n + 1)): value for n, value in enumerate(dice)},
        "step_seconds": {"median": ms / 1e3, "low": 0.9 * ms / 1e3, "high": 1.1 * ms / 1e3, "steps": 15},
        "images_per_s": 4e3 / ms,
        "data_wait": 0.01,
        "memory_gib": 1.5,
    }


def stored(*cells: dict[str, Any]) -> dict[str, Any]:
    machine = {"device": "a GPU", "torch": "2.11", "python": "3.12"}
    settings = {"steps": 30, "longer": 2, "batch": 4, "crop": 512, "crop3d": 64, "depth": 6, "width": 256, "rate": 1e-3}
    return {"cells": {str(n): cell for n, cell in enumerate(cells)}, "machine": machine, "settings": settings}


def test_cells_are_recipes_that_differ_in_their_tokens_alone(script: ModuleType, tmp_path: Path) -> None:
    cells = script.cells(list(script.DATA), script.FULL, 3)
    assert len({cell.name for cell in cells}) == len(cells) == 3 * 4 * 6
    assert [cell.seed for cell in cells] == [*[0] * 18, *[1] * 18, *[2] * 18, *[0] * 6, *[1] * 6, *[2] * 6]
    entry = {"path": "a.npy", "kind": "numpy", "axes": "zyx"}
    trees: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        tree = script.recipe(cell, (dict(entry), dict(entry), ["background", "membrane"]), script.FULL, tmp_path, "cpu")
        tokens = load_recipe(tree).model.encoder.tokens
        size = (tree["data"]["crop"],) * tree["model"]["ndim"]
        patch = (cell.variant.patch,) * len(size)
        if cell.variant.adaptive:
            tokens.check(size, patch)
        assert tokens.count(size, patch) == cell.variant.tokens
        smallest = (cell.variant.patch, cell.variant.adaptive) == (4, False)
        assert tree["run"].pop("steps") == script.FULL.steps * (1 if smallest else script.FULL.longer)
        assert script.FULL.steps % tree["eval"]["every"] == 0
        del tree["model"]["encoder"]["patch"]
        tree["model"]["encoder"].pop("tokens", None)
        trees.setdefault(f"{cell.data} {cell.seed}", []).append(tree)
    assert all(tree == same[0] for same in trees.values() for tree in same)


def test_tables_say_what_is_faster_at_equal_quality(judge: ModuleType) -> None:
    cells = []
    for seed, worse in ((0, 0.0), (1, 0.02)):
        cells += [
            found("tissue", 4, 4096, True, seed, [0.5, 0.7 - worse, 0.8, 0.82], 20.0),
            found("tissue", 8, 4096, False, seed, [0.4, 0.6, 0.65 + worse], 25.0),
            found("tissue", 4, 16384, False, seed, [0.3, 0.5, 0.7 - worse], 80.0),
            found("isbi", 4, 16384, False, seed, [0.3, 0.5, 0.9 - worse], 80.0),
            found("isbi", 4, 1024, True, seed, [0.3, 0.5, 0.86, 0.87 + worse], 20.0),
        ]
    cells.append(found("isbi", 4, 2047, True, 0, [], 20.0) | {"status": "oom", "error": "no memory"})
    told = judge.tables(stored(*cells))
    # 0.68 is what the seeds of uniform 4 have after 29 and 30 steps of 80 ms; adaptive ones after 19 and 20 of 20 ms.
    assert (
        "| tissue | uniform 4, 16,384 tokens | 2 | 0.680 | 2.36 | adaptive 4, 4,096 tokens | 0.39 | 6.05 | "
        "none (at most 0.660) | - | - |" in told
    )
    assert (
        "| tissue | uniform 8, 4,096 tokens | 2 | 0.650 | 0.71 | adaptive 4, 4,096 tokens | 0.36 | 1.99 | "
        "uniform 4, 16,384 tokens | 2.23 | 0.32 |" in told
    )
    assert "- tissue: at the Dice of uniform 4, 16,384 tokens, adaptive 4, 4,096 tokens are 6.1 times as fast" in told
    # One seed of two does not come to 0.88.
    assert "| 0.880 | 2.38 | none (at most 0.880) | - | - | not measured | - | - |" in told
    assert (
        "- isbi: no adaptive tokens come to the Dice of uniform 4, 16,384 tokens; larger uniform patches are not "
        in told
    )
    dice = "0.690 (0.680 to 0.700)"
    assert f"| uniform 4, 16,384 tokens | 2 | {dice} | {dice} | 30 | 80.0 (72.0 to 88.0) | 50 | 1.0% | 1.50 |" in told
    assert "| adaptive 4, 4,096 tokens | 2 | 0.800 (0.800 to 0.800) | 0.820 (0.820 to 0.820) | 40 | 20.0 " in told
    assert "- 10: oom, no memory" in told
    assert told.index("uniform 4, 16,384") < told.index("uniform 8, 4,096") < told.index("adaptive 4, 4,096")


def test_what_is_not_measured_yet_has_lost_nothing(judge: ModuleType) -> None:
    """A call that was cut off has made the cells of uniform patches first."""
    uniform = [found("isbi", patch, 64, False, 0, [0.5, 0.6, 0.7], ms) for patch, ms in ((4, 80.0), (8, 20.0))]
    told = judge.tables(stored(*uniform))
    assert "| 0.700 | 2.40 | not measured | - | - | uniform 8, 64 tokens | 0.60 | 4.00 |" in told
    assert (
        "- isbi: adaptive tokens are not measured yet against the Dice of uniform 4, 64 tokens; uniform 8, 64 tokens "
        "are 4.0 times as fast." in told
    )


def test_seeds_that_one_variant_lacks_are_left_out_of_all(judge: ModuleType) -> None:
    base, rival, third = judge.Variant(4, 64, False), judge.Variant(8, 16, True), judge.Variant(8, 16, False)
    table = {
        base: {seed: found("isbi", 4, 64, False, seed, [0.5, dice], 80.0) for seed, dice in enumerate((0.8, 0.6))},
        rival: {0: found("isbi", 8, 16, True, 0, [0.7, 0.9], 20.0)},
        third: {seed: found("isbi", 8, 16, False, seed, [0.5, 0.7], 40.0) for seed in (0, 1)},
    }
    race, other = judge.races(table, base, 20)
    assert (race.rival, race.seeds, race.target, race.seconds) == (rival, 1, 0.8, pytest.approx(1.6))
    assert race.rival_seconds == pytest.approx(0.3)  # half way between two evaluations
    assert (other.seeds, other.target, other.rival_seconds) == (1, 0.8, None)
    assert judge.races(table | {rival: {2: table[rival][0]}}, base, 20) == []


def test_the_page_says_that_numbers_are_missing(judge: ModuleType) -> None:
    row = {"data": "isbi", "variant": "adaptive 4, 64 tokens", "dice": 0.9, "leaves": {"4": 0.25, "8": 0.75}}
    trees = {"machine": {"device": "a CPU", "torch": "2.13", "python": "3.11"}, "date": "2026-11-19", "rows": [row]}
    told = judge.page(None, trees)
    assert "Numbers of a GPU are still missing." in told
    assert "a CPU, PyTorch 2.13, Python 3.11, 2026-11-19; any machine makes the same." in told
    assert "| isbi | adaptive 4, 64 tokens | 0.900 | 25% 4, 75% 8 |" in told
    told = judge.page(stored(found("isbi", 4, 64, False, 0, [0.5, 0.6, 0.7], 10.0)), None)
    assert (
        "a GPU, PyTorch 2.11, Python 3.12, 2026-11-19. 30 steps, or 2 times as many, of 4 crops of 512^2 pixels" in told
    )
    assert "Nothing to compare yet." in told


def test_the_page_says_what_the_trees_left(script: ModuleType, judge: ModuleType) -> None:
    text, results = script.PAGE.read_text(), ROOT / "benchmarks/results"
    cells = results / "adaptive_quality.json"
    trees = json.loads((results / "adaptive_quality_trees.json").read_text())
    kept = json.loads(cells.read_text()) if cells.exists() else None
    written, told = text.split(script.MARK)[::-1]
    assert written == "\n" + judge.page(kept, trees)
    dice = {(row["data"], row["variant"]): f"{row['dice']:.2f}" for row in trees["rows"]}
    for variant, words in (
        ("adaptive 4, 4,096 tokens", "{tissue} (tissue) and {isbi} (ISBI-2012) are left of the labels"),
        ("adaptive 8, 2,047 tokens", "keeps more than that ({tissue} and {isbi})"),
        ("adaptive 4, 2,047 tokens", "an eighth of the tokens keeps nearly all: {resin}, and"),
        ("adaptive 8, 2,047 tokens", "and {resin} with tokens of 8 voxels"),
    ):
        said = words.format(**{data: dice[data, variant] for data in ("tissue", "isbi", "resin")})
        assert said in " ".join(told.split()), said


def test_every_cell_is_kept_and_the_next_call_goes_on(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def train(cell: Any, home: Any, device: str) -> dict[str, Any]:
        calls.append(cell.name)
        if len(calls) == 2:
            raise RuntimeError("something broke")
        made = found(cell.data, 4, 64, cell.variant.adaptive, cell.seed, [0.5, 0.6], 10.0) | {"dice": {"60": 0.6}}
        return {key: made[key] for key in ("dice", "step_seconds", "images_per_s", "data_wait", "memory_gib")}

    monkeypatch.setattr(script, "train", train)
    words = ["--quick", "--seeds", "1", "--only", "tissue", "isbi", "--out", str(tmp_path)]
    assert script.main([*words, "--seconds", "0"]) == script.STOPPED
    assert calls == []
    told = capsys.readouterr().err
    assert "6 cells are left: run this again" in told
    assert "isbi is left out: --isbi FOLDER" in told
    assert script.main(words) == 1
    kept = json.loads((tmp_path / "adaptive_quality_quick.json").read_text())["cells"]
    assert [cell["status"] for cell in kept.values()] == ["ok", "failed", *["ok"] * 4]
    assert kept[calls[1]]["error"] == "RuntimeError: something broke"
    assert script.main(words) == 0
    assert calls[6:] == [calls[1]]
    monkeypatch.setattr(script, "QUICK", script.FULL)
    with pytest.raises(SystemExit, match="made with other settings"):
        script.main(words)


def test_a_run_that_is_stopped_ends_the_call(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(cell: Any, home: Any, device: str) -> dict[str, Any]:
        raise script.Stopped

    monkeypatch.setattr(script, "train", train)
    assert script.main(["--quick", "--only", "tissue", "--out", str(tmp_path)]) == script.STOPPED
    assert not (tmp_path / "adaptive_quality_quick.json").exists()


def test_discs_hold_a_fifth_of_each_crop(script: ModuleType) -> None:
    image, labels = (values.copy() for values in script.grown((8, 64, 64), 0))
    labels[:] = 1
    embedded, left = script.embed(image, labels, 32, 0)
    assert left[:, 5:37, 11:43].mean() == pytest.approx(3.1416 / 16, abs=0.02)
    assert (embedded[left == 1] == image[left == 1]).all()
    assert embedded[left == 0].mean() == pytest.approx(script.RESIN, abs=1)
