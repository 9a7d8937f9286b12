"""Where am I: alone or one of several processes, and how they find each other.

One program, however it was started. What launchers write into the environment tells, and is believed in this order:

- torchrun (RANK and its company; set by hand they count as its): also within srun or mpirun, one torchrun a host
- Open MPI's mpirun (OMPI_COMM_WORLD_*): before Slurm, since its helpers on other hosts are tasks of Slurm themselves
- Slurm's srun (SLURM_STEP_ID): the shell of salloc or sbatch is not a task of it
- mpiexec of MPICH, Intel or Cray (PMI_RANK)
- none: a world of one, which takes the same path

Half a set of variables, or two that contradict each other, is an error and never a guess: processes that count wrongly
wait for each other for ever, or train the same run several times.
"""

import functools
import json
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from vitrail.errors import UserError
from vitrail.launch import mpi, slurm
from vitrail.launch.variables import Environment, Ranks, checked, first, number, port_for

Launcher = Literal["alone", "torchrun", "slurm", "mpi"]

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
MEETING = timedelta(minutes=10)  # for all processes to start: imports from a busy file system take minutes


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: Launcher = "alone"
    note: str = field(default="", compare=False)  # which launcher was found, and by what
    cores: int | None = field(default=None, compare=False)  # of this process alone, if the launcher says so

    @property
    def launched(self) -> bool:
        return self.launcher != "alone"

    @property
    def chief(self) -> bool:
        """The one process that writes logs, pictures and manifests."""
        return self.rank == 0

    def device_index(self, visible: int, environ: Environment | None = None) -> int:
        """Which of the GPUs that this process sees is its own."""
        env = os.environ if environ is None else environ
        if self.local_rank < visible:
            return self.local_rank
        # A scheduler that binds shows each process one GPU, which every one of them calls 0; torchrun shows all to all.
        if visible == 1 and self.launcher in ("slurm", "mpi") and first(env, *VISIBLE):
            return 0
        raise UserError(
            f"rank {self.rank}: {self.local_size} processes were started on this host, but {visible} GPU"
            f"{' is' if visible == 1 else 's are'} visible to them, and each needs its own: start at most {visible} a "
            "host, ask the scheduler for as many GPUs (srun --gpus-per-task=1), or set run.device=cpu"
        )


def find_world(environ: Environment | None = None) -> World:
    """Read the launchers' variables; half a set of them is an error, not a guess."""
    env: Environment = dict(os.environ) if environ is None else environ
    if first(env, "RANK", "LOCAL_RANK"):
        return _from_torchrun(env)
    if mpi.has_open_mpi(env):
        return _build("mpi", mpi.find_ranks(env), "OMPI_COMM_WORLD_RANK", env)
    if slurm.in_step(env) and not _is_mpiexec_in_slurm(env):
        return _build("slurm", slurm.find_ranks(env), "SLURM_STEP_ID", env)
    if mpi.has_pmi(env):
        return _build("mpi", mpi.find_ranks(env), "PMI_RANK", env)
    if first(env, "WORLD_SIZE") and number(env, "WORLD_SIZE") > 1:
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not: start with torchrun, srun or mpirun, or unset "
            "it to run alone"
        )
    job = env.get("SLURM_JOB_ID")
    return World(note=f"alone: in Slurm job {job}, but not started by srun" if job else "alone: no launcher was found")


def is_chief(environ: Environment | None = None) -> bool:
    """Whether this process may print: alone, or the first of several; right even where `find_world` refuses."""
    env = os.environ if environ is None else environ
    try:
        return find_world(env).chief
    except UserError:
        name = first(env, "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK")
        return name is None or env[name].strip() == "0"


def _from_torchrun(env: Environment) -> World:
    missing = [name for name in TORCHRUN if not env.get(name, "").strip()]
    if missing:
        raise UserError(
            f"the environment holds RANK or LOCAL_RANK but not {', '.join(missing)}: start with torchrun, "
            "or unset the variables to run alone"
        )
    rank, size, local_rank, local_size, _, _ = TORCHRUN
    ranks = Ranks(number(env, rank), number(env, size), number(env, local_rank), number(env, local_size))
    number(env, "MASTER_PORT")
    outer = max(slurm.tasks(env), mpi.processes(env))
    agents = number(env, "GROUP_WORLD_SIZE") if first(env, "GROUP_WORLD_SIZE") else None
    if outer > 1 and agents == 1:
        raise UserError(
            f"srun or mpirun started {outer} processes, and each started a torchrun that knows nothing of the others: "
            "start one torchrun a host with --nnodes, --rdzv-backend=c10d and --rdzv-endpoint, or leave torchrun out; "
            "an interactive shell needs a single task (srun --ntasks=1 --pty bash)"
        )
    if outer > 1 and agents is None and ranks.size < outer:
        raise UserError(
            f"WORLD_SIZE={ranks.size}, but srun or mpirun started {outer} processes: unset RANK, WORLD_SIZE, "
            "LOCAL_RANK and LOCAL_WORLD_SIZE, which are not needed there"
        )
    return _build("torchrun", checked(ranks, "torchrun"), "RANK", env)


def _is_mpiexec_in_slurm(env: Environment) -> bool:
    """mpiexec's helpers are tasks of Slurm, but it numbers the processes itself; srun's own PMI agrees with Slurm."""
    if not first(env, "PMI_RANK") or not first(env, "PMI_SIZE"):
        return False
    told = (number(env, "PMI_RANK"), number(env, "PMI_SIZE"))
    return told != (slurm.find_ranks(env).rank, slurm.tasks(env))


def _build(launcher: Launcher, ranks: Ranks, sign: str, env: Environment) -> World:
    if launcher != "torchrun" and first(env, "WORLD_SIZE") and number(env, "WORLD_SIZE") != ranks.size:
        raise UserError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but {launcher} started {ranks.size} processes: unset WORLD_SIZE"
        )
    name = "mpirun" if launcher == "mpi" else "srun" if launcher == "slurm" else launcher
    count = f"{ranks.size} process{'es' if ranks.size > 1 else ''}, {ranks.local_size} on this host"
    cores = None
    if launcher == "slurm" and first(env, "SLURM_CPUS_PER_TASK"):
        cores = number(env, "SLURM_CPUS_PER_TASK")
    elif (launcher == "slurm" and slurm.binds_cores(env)) or (launcher == "mpi" and mpi.binds_cores(env)):
        cores = usable_cores()
    return World(*ranks, launcher, f"{name}: {count} ({sign} is set)", cores)


def share_of_cores(world: World) -> int:
    """Threads for this process: the cores it may use, divided among the processes of this host."""
    if world.cores is not None:
        return max(1, min(world.cores, usable_cores()))
    return max(1, usable_cores() // world.local_size)


def usable_cores() -> int:
    """Cores that this process may use, which a job or a container may have made fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


# ---------------------------------------------------------------- finding each other


def connect(world: World, device_type: str, *, timeout: timedelta) -> tuple[Any, Any]:
    """Start the process group; returns its store, fresh for this attempt, and the one that outlives restarts."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if world.size == 1 and world.launcher != "torchrun":
        store: Any = dist.HashStore()
        root: Any = store
    else:
        tcp = _meet(world, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        tcp.set_timeout(timeout)
        root = dist.PrefixStore("vitrail", tcp)
        store = dist.PrefixStore(agree_on_attempt(root, world, timeout), root)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return store, root


@functools.cache  # rank 0 listens as long as it lives: a second run in the same processes meets in the same place
def _meet(world: World, _host: str | None, _port: str | None) -> Any:
    """The store that all processes share: torchrun's, or one that rank 0 opens."""
    env = dict(os.environ)
    master = find_master(world, env)
    if master is None and (interface := mpi.load()) is not None:
        listening = _open_store("", 0, world) if world.rank == 0 else None
        told = f"{socket.gethostname()} {listening.port}" if listening is not None else ""
        answer = mpi.tell(interface, told, world.rank, world.size)
        if answer is not None and listening is not None:
            return listening
        if answer is not None:
            host, port = answer.split()
            return _open_store(host, int(port), world)
    master = master or find_local_master(world, env)
    return _open_store(*master, world, shared=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def find_master(world: World, env: Environment) -> tuple[str, int] | None:
    """Where rank 0 listens, or None where only MPI can tell."""
    host = env.get("MASTER_ADDR", "").strip() or None
    port = number(env, "MASTER_PORT") if first(env, "MASTER_PORT") else None
    if port is not None and not 0 < port < 2**16:
        raise UserError(f"MASTER_PORT={port}: expected a port from 1 to 65535")
    if world.launcher in ("slurm", "mpi") and host in LOCAL_NAMES and world.local_size < world.size:
        raise UserError(
            f"MASTER_ADDR={host}, but the {world.size} processes run on several hosts: unset it, or set it to the "
            "host of rank 0"
        )
    if world.launcher == "slurm":
        job = first(env, "SLURM_JOB_ID", "SLURM_JOBID")
        step = first(env, "SLURM_STEP_ID", "SLURM_STEPID")
        local = "localhost" if world.local_size == world.size else None
        return (
            host or local or slurm.first_host(env),
            port or port_for(f"{env[job] if job else ''}.{env[step] if step else ''}"),
        )
    return (host, port) if host and port else None


def find_local_master(world: World, env: Environment) -> tuple[str, int]:
    """Without MPI's help, processes of one host still find each other."""
    if world.local_size < world.size:
        raise UserError(
            f"mpirun started {world.size} processes on several hosts, and nothing says where rank 0 listens: install "
            "mpi4py (pip install 'vitrail[mpi]'), or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
            "port and forward both (mpirun -x MASTER_ADDR -x MASTER_PORT)"
        )
    port = number(env, "MASTER_PORT") if first(env, "MASTER_PORT") else port_for(mpi.job_name(env))
    return "localhost", port


def _open_store(host: str, port: int, world: World, *, shared: bool = False) -> Any:
    """Listen on rank 0, reach it from the others; `shared` is the store of torchrun's agent, which listens already."""
    import torch.distributed as dist

    listens = world.rank == 0 and not shared
    if not listens:
        _resolve(host, port)
    try:
        return dist.TCPStore(
            host or "localhost", port, world.size, is_master=listens, timeout=MEETING, wait_for_workers=False
        )
    except RuntimeError as error:
        text = str(error)
        if listens and ("EADDRINUSE" in text or "already in use" in text.lower()):
            raise UserError(
                f"port {port} of {socket.gethostname()} is in use by another program, so the other processes cannot "
                "find rank 0: end that program, or set MASTER_PORT to a free port on every rank"
            ) from None
        if listens:
            raise UserError(
                f"rank 0 cannot listen on port {port}: {text.splitlines()[0]}; set another MASTER_PORT"
            ) from None
        raise UserError(
            f"rank {world.rank} could not reach rank 0 at {host}:{port} within {MEETING.total_seconds():.0f} s: see "
            "whether it failed to start, or whether a firewall is between the hosts; MASTER_ADDR and MASTER_PORT "
            "choose another address"
        ) from None


def _resolve(host: str, port: int, *, patience: float = 30.0) -> None:
    """Wait a little for a name server that is overrun by a large start, and name the host that nobody knows."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except (socket.gaierror, UnicodeError):
            if time.monotonic() > deadline:
                break
            time.sleep(1.0)
    raise UserError(
        f"the host of rank 0, {host!r}, has no address here: set MASTER_ADDR to a name or number that has one"
    )


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
