"""Ulysses, rings and their product over gloo: output and gradients are those of full attention."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import run, torchrun

WORKER = Path(__file__).parent / "context_worker.py"
PLAIN: dict[str, Any] = {
    "ulysses": 1,
    "heads": 4,
    "groups": 4,
    "queries": 5,
    "keys": 5,
    "keep": None,
    "valid": False,
    "dtype": "float32",
    "backend": "auto",
    "mode": "plain",
}
VARIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "double": {"dtype": "float64"},
    "bf16": {"dtype": "bfloat16"},
    "reference": {"dtype": "float64", "backend": "reference", "valid": True, "groups": 2},
    "grouped": {"dtype": "float64", "groups": 2},
    "one-group": {"dtype": "float64", "groups": 1, "valid": True},
    "cross": {"dtype": "float64", "keys": 3},
    "masked": {"valid": True},
    "prefix": {"dtype": "float64", "keep": "prefix"},
    "few": {"dtype": "float64", "keep": "few", "valid": True, "queries": 2},
    "mixed": {"dtype": "float64", "keep": "mixed", "valid": True, "groups": 2, "keys": 7},
    "recomputed": {"dtype": "float64", "mode": "recomputed", "valid": True},
    "kept": {"dtype": "float64", "mode": "kept", "keep": "prefix"},
    "compiled": {"dtype": "float64", "mode": "compiled", "keep": "prefix", "valid": True},
    "compiled-plain": {"dtype": "float64", "mode": "compiled", "groups": 2},
}
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # context ranks, and how many of them trade heads
QUICK = [(layout, name) for layout in LAYOUTS for name, change in VARIED.items() if change.get("mode") != "compiled"]
COMPILED = [((2, 1), "compiled"), ((2, 2), "compiled"), ((2, 2), "compiled-plain")]
ROUNDING = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 2e-2}
Case = tuple[tuple[int, int], str]
Found = dict[str, dict[str, float]]


def launch(world: int, cases: list[Case], home: Path) -> Found:
    """All cases in one launch; with fewer context ranks than ranks there are several groups of them, side by side."""
    trees = {
        f"{ranks}-{ulysses}-{name}": PLAIN | VARIED[name] | {"ranks": ranks, "ulysses": ulysses}
        for (ranks, ulysses), name in cases
    }
    path = home / "cases.json"
    path.write_text(json.dumps(trees))
    code, output = run(*torchrun(world, WORKER, path))
    assert code == 0, output[-4000:]
    return json.loads(path.with_suffix(".found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(4, QUICK, tmp_path_factory.mktemp("context"))


def check(errors: dict[str, float], dtype: str) -> None:
    for key in ("out", "q", "k", "v"):
        assert errors[key] <= ROUNDING[dtype], (key, errors)
    assert errors["blank"] == 0  # a sample without keys gives 0 and takes no gradient


@pytest.mark.parametrize(("layout", "name"), QUICK)
def test_equals_full_attention(found: Found, layout: tuple[int, int], name: str) -> None:
    check(found[f"{layout[0]}-{layout[1]}-{name}"], (PLAIN | VARIED[name])["dtype"])


def test_recomputation_travels_again_unless_the_output_is_kept(found: Found) -> None:
    calls = {name: found[f"4-2-{name}"]["calls"] for name in ("plain", "recomputed", "kept")}
    assert calls == {"plain": 1, "recomputed": 2, "kept": 1}


def test_memory_of_a_ring_is_that_of_its_own_tokens(found: Found) -> None:
    """Kept for the backward are q, k, v, the output and the log-sum-exp of this rank, at every number of ranks."""
    expected = 3 * PLAIN["queries"] * PLAIN["heads"] * (4 * 6 + 1)  # heads are 6 wide
    assert [found[f"{ranks}-1-plain"]["saved"] for ranks in (2, 4)] == [expected, expected]


@pytest.mark.slow
def test_compiled_without_a_break(tmp_path: Path) -> None:
    for key, errors in launch(2, COMPILED, tmp_path).items():
        check(errors, (PLAIN | VARIED[key.split("-", 2)[2]])["dtype"])
