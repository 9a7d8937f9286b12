"""Recomputation beside tensor parallelism and sharding."""

from support import ROOT, environment, run, torchrun


def test_recomputation_on_two_ranks() -> None:
    code, output = run(*torchrun(2, ROOT / "tests/distributed/recompute_worker.py"), env=environment())
    assert code == 0, output[-3000:]
    assert output.count("fine") == 2
