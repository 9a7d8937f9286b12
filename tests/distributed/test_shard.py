"""Sharded steps are those of one rank, whatever the strategy, the groups and the prefetching."""

from pathlib import Path

from support import run, torchrun

WORKER = Path(__file__).parent / "shard_worker.py"


def test_sharded_gradients_are_those_of_one_rank() -> None:
    """One launch of all cases; the worker says which one failed."""
    code, output = run(*torchrun(4, WORKER))
    assert code == 0, output[-6000:]
