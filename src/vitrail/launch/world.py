"""Where am I: alone or one of several processes, and how they find each other.

Started by torchrun, the launcher's variables say so; otherwise this is a world of one, which takes the same path.
"""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from vitrail.errors import UserError


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False  # by torchrun

    @property
    def chief(self) -> bool:
        """The one process that writes logs, pictures and manifests."""
        return self.rank == 0


def find_world(environ: dict[str, str] | None = None) -> World:
    """Read the launcher's variables; half a set of them is an error, not a guess."""
    env = dict(os.environ) if environ is None else environ
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in env and "LOCAL_RANK" not in env:
        return World()
    missing = [name for name in names if name not in env]
    if missing:
        raise UserError(
            f"the environment holds RANK or LOCAL_RANK but not {', '.join(missing)}: start with torchrun, "
            "or unset the variables to run alone"
        )
    rank, size, local_rank, local_size = (int(env[name]) for name in names[:4])
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launched=True)


def share_of_cores(world: World) -> int:
    """Threads for this process: the cores it may use, divided among the processes of this host."""
    return max(1, usable_cores() // world.local_size)


def usable_cores() -> int:
    """Cores that this process may use, which a job or a container may have made fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def connect(world: World, device_type: str, *, timeout: timedelta) -> tuple[Any, Any]:
    """Start the process group; returns its store, fresh for this attempt, and the one that outlives restarts."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if not world.launched:
        store: Any = dist.HashStore()
        root: Any = store
    else:
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        tcp = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world.size,
            is_master=world.rank == 0 and not shared,
            timeout=timeout,
            wait_for_workers=False,
        )
        root = dist.PrefixStore("vitrail", tcp)
        store = dist.PrefixStore(agree_on_attempt(root, world, timeout), root)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return store, root


def agree_on_attempt(store: Any, world: World, timeout: timedelta) -> str:
    """A name that exactly the living processes share.

    torchrun keeps its store across in-place restarts, so the keys of dead processes are still in it, and PyTorch's
    own start-up reads them (pytorch/pytorch#135712). Each process therefore says hello with a fresh token; rank 0
    names the attempt after the tokens it sees, and again whenever one changes, until every process has found its own
    token in the name. Restart counters would not do: each host counts for itself.
    """
    token = uuid4().hex
    store.set(f"hello/{world.rank}", token)
    deadline = time.monotonic() + timeout.total_seconds()
    seen: list[str] | None = None
    attempt = ""
    while time.monotonic() < deadline:
        if world.rank == 0 and store.check([f"hello/{rank}" for rank in range(world.size)]):
            tokens = [store.get(f"hello/{rank}").decode() for rank in range(world.size)]
            if tokens != seen:
                seen, attempt = tokens, uuid4().hex
                store.set("attempt", json.dumps([attempt, tokens]))
        if store.check(["attempt"]):
            name, tokens = json.loads(store.get("attempt"))
            if len(tokens) == world.size and tokens[world.rank] == token:
                store.set(f"ack/{name}/{world.rank}", "1")
                if store.check([f"ack/{name}/{rank}" for rank in range(world.size)]):
                    return name
        time.sleep(0.01)
    raise UserError(
        f"rank {world.rank} waited {timeout.total_seconds():.0f} s for the {world.size} processes of this job; "
        "look for one that failed to start"
    )
