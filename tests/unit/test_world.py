"""Where a process finds itself, and how the living ones agree on an attempt."""

import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from vitrail.errors import UserError
from vitrail.launch.world import World, agree_on_attempt, find_world, share_of_cores, usable_cores
from vitrail.parallel.mesh import layout_of
from vitrail.training import session

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_alone_or_launched() -> None:
    assert find_world({}) == World()
    assert find_world(LAUNCHED) == World(rank=3, size=4, local_rank=1, local_size=2, launched=True)
    with pytest.raises(UserError, match="not MASTER_PORT: start with torchrun"):
        find_world({name: value for name, value in LAUNCHED.items() if name != "MASTER_PORT"})


def test_cores_are_divided_among_the_ranks_of_a_host() -> None:
    assert share_of_cores(World()) == usable_cores()
    assert share_of_cores(World(size=64, local_size=64)) == max(1, usable_cores() // 64)


def agree(store: dist.Store, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        worlds = [World(rank=rank, size=size, launched=True) for rank in range(size)]
        return set(pool.map(lambda world: agree_on_attempt(store, world, timedelta(seconds=60)), worlds))


def test_every_attempt_has_a_name_that_all_its_ranks_share() -> None:
    """The keys of earlier attempts stay in the store, those of smaller and larger worlds too."""
    store = dist.HashStore()
    names = [agree(store, size) for size in (1, 2, 2, 4, 2)]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == 5


def test_a_rank_that_stays_away_is_an_error() -> None:
    with pytest.raises(UserError, match="waited 0 s for the 2 processes"):
        agree_on_attempt(dist.HashStore(), World(rank=0, size=2), timedelta(seconds=0.1))


def test_a_restart_finds_the_folder_that_the_first_attempt_chose(tmp_path: Path, monkeypatch) -> None:
    """`--fresh` under torchrun --max-restarts must not begin anew with every restart."""
    recipe = types.SimpleNamespace(run_dir=tmp_path / "run")
    place = types.SimpleNamespace(root_store=dist.HashStore())
    (tmp_path / "run").mkdir()

    def process() -> Path:
        monkeypatch.setattr(session, "_sittings", iter(range(10)))
        chosen = session.choose_folder(recipe, place, fresh=True)
        chosen.mkdir(exist_ok=True)
        return chosen

    assert process() == process() == tmp_path / "run-2"
    assert session.choose_folder(recipe, place, fresh=False) == tmp_path / "run"


def test_layouts() -> None:
    assert layout_of("FULL_SHARD", None, 8) == (1, 8, True)
    assert layout_of("SHARD_GRAD_OP", None, 8) == (1, 8, False)
    assert layout_of("HYBRID_SHARD", 2, 8) == (4, 2, True)
    assert layout_of("NO_SHARD", None, 8) == layout_of("DDP", None, 8) == (8, 1, False)
    with pytest.raises(UserError, match="choose one of 1, 2, 4, 8"):
        layout_of("HYBRID_SHARD", 3, 8)
    with pytest.raises(UserError, match=r"parallel\.group is missing"):
        layout_of("HYBRID_SHARD", None, 8)
