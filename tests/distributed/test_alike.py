"""Ranks that were started with different recipes, software or data refuse to train, in one sentence, on all ranks."""

import socket
import sys
from pathlib import Path

from support import end, environment, start, write_volume

from vitrail.training import alike

WORKER = Path(__file__).parent / "alike_worker.py"
RANKS = 2


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    """One start of all cases; the worker says which one failed."""
    write_volume(tmp_path / "volume.zarr")
    write_volume(tmp_path / "other.zarr", seed=1)
    write_volume(tmp_path / "smaller.zarr", size=40)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    common = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = [
        start(sys.executable, WORKER, tmp_path, env=environment(**common, **place)) for place in places
    ]  # without torchrun, which would pass on no exit codes
    try:
        ends = [(process.communicate(timeout=600)[0], process.returncode) for process in started]
    finally:
        for process in started:
            end(process)
    assert [code for _, code in ends] == [1, 0], "\n".join(output[-4000:] for output, _ in ends)
    assert "; rank 1 failed in start of step 0: image 7 is broken; mend it" in ends[0][0].replace(" ended because", ";")
    assert "".join(output for output, _ in ends).count("error: run.seed is not the same on all ranks: 0 on rank 0") == 1


def test_many_ranks_are_told_of_in_a_few_words() -> None:
    changes: list[list[list[str]]] = [[] for _ in range(10_000)]
    for rank in range(5000, 10_000):
        changes[rank] = [["optimizer.lr", "0.001", "0.002"], ["run.seed", "0", "1"]]
    expected = (
        "optimizer.lr (and run.seed) is not the same on all ranks: 0.001 on ranks 0-4999 and 0.002 on ranks 5000-9999; "
        "mend it"
    )
    assert alike.tell(changes, "mend it") == expected
    for rank in range(10_000):
        changes[rank] = [["run.seed", "0", str(rank)]] if rank else []
    assert len(alike.tell(changes, "mend it")) < 200
    changes = [[] if rank % 2 else [["run.seed", "0", "1"]] for rank in range(100)]
    assert "1 on ranks 0, 2, 4, 6, ... and 0 on ranks 1, 3, 5, 7, ...;" in alike.tell(changes, "mend it")


def test_a_difference_without_a_key_is_one_sentence() -> None:
    """JSON tells 1 from 1.0 and null from nothing; a comparison of values may not."""
    one, other = {"a": [1], "b": None}, {"a": [1.0]}
    assert alike._digest(one) != alike._digest(other)
    assert alike.diff(one, other) == []
    expected = "what ranks have is not the same, though no value of it differs (1 is not 1.0 here); mend it"
    assert alike.tell([[], []], "mend it") == expected


def test_what_may_differ_is_left_out_whatever_the_recipe_has() -> None:
    tree = {"data": {"stage": None, "workers": 2, "batch": 4}, "run": {"seed": 1}}
    assert alike._without_own(tree) == {"data": {"stage": None, "batch": 4}, "run": {"seed": 1}}
    tree = {"data": {"stage": {"dir": "/tmp/node7", "limit_gib": 3.0}}}
    assert alike._without_own(tree) == {"data": {"stage": {}}}
