"""Rows come from the ranks that have read them, and parts of slabs are those of whole samples."""

from pathlib import Path

import pytest
from support import run, torchrun

WORKER = Path(__file__).parent / "exchange_worker.py"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_fetch_rows_from_each_other(world: int) -> None:
    code, output = run(*torchrun(world, WORKER))
    assert code == 0, output[-4000:]
    assert all(f"rank {rank} fetched" in output for rank in range(world))
