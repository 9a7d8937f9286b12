"""The benchmark of memory runs from end to end, on small models."""

import json
import sys
from pathlib import Path

import pytest
from support import ROOT, environment, run

SCRIPT = ROOT / "benchmarks/memory.py"


def test_rows_are_written_and_replaced(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    only = ["vit/keep", "mae1/keep", "dit/float8 rowwise", "mae95/float8 auto"]
    tiny = [sys.executable, str(SCRIPT), "--tiny", "--steps", "1", "--out", str(tmp_path)]
    code, output = run(*tiny, "--only", *only, env=environment())
    assert code == 0, output[-3000:]
    rows = {row["row"]: row for row in json.loads((tmp_path / "memory_tiny.json").read_text())["rows"]}
    assert len(rows) == 8
    assert not [row for row in rows.values() if "error" in row]
    assert rows["mae1/keep attention"]["steps_measured"] == 2
    assert rows["mae1/keep attention"]["losses"] == pytest.approx(
        rows["mae1/keep attention, mlp in pieces"]["losses"], abs=1e-3
    )
    assert rows["dit/float8 rowwise"]["notes"][0].startswith("float8 in ")
    assert rows["mae95/float8 auto"]["notes"][0] == "float8 in 0 layers"  # tiny ones do not pay
    assert "tokens);" in rows["mae95/float8 auto"]["notes"][1]
    assert "HFU leaves out what pieces compute again" in rows["mae1/keep attention, mlp in pieces"]["notes"]
    assert "| vit/keep attention | - | " in output


def test_rows_are_listed() -> None:
    code, output = run(sys.executable, str(SCRIPT), "--list", "--only", "mae1", env=environment())
    assert code == 0
    assert output.split("\n")[:2] == ["mae1/full", "mae1/keep attention"]
