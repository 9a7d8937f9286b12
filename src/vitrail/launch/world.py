"""The place of this process: alone or one of several, and how they find each other.

One program, however it was started. What launchers write into the environment tells, and is believed in this order:

- torchrun (RANK and its company; set by hand they count as its): also within srun or mpirun, one torchrun a host
- Open MPI's mpirun (OMPI_COMM_WORLD_*): before Slurm, since its helpers on other hosts are tasks of Slurm themselves
- Slurm's srun (SLURM_STEP_ID): the shell of salloc or sbatch is not a task of it
- mpiexec of MPICH, Intel or Cray (PMI_RANK)
- none: a world of one, which takes the same path

Half a set of variables, or two that contradict each other, is an error and never a guess: processes that count wrongly
wait for each other for ever, or train the same run several times.
"""

import contextlib
import errno
import functools
import hashlib
import ipaddress
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from vitrail.errors import RunFailed, UserError
from vitrail.launch import mpi, slurm
from vitrail.launch.variables import Environment, Ranks, checked, first, mix, number, port_for

Launcher = Literal["alone", "torchrun", "slurm", "mpi"]

STOPPED = 75  # exit code of a training that was stopped and can be continued

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
LOCAL_ADDRESS, LOOPBACK = "127.0.0.1", "lo"  # reached from this host alone
INTERFACE = "GLOO_SOCKET_IFNAME"
SECRET = "VITRAIL_SECRET"  # variable: what launchers tell the processes of one job, and nobody else
BACKLOG = 2048  # connections that wait to be taken: thousands of processes come at once
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
MEETING = timedelta(minutes=10)  # for all processes to start: imports from a busy file system take minutes
SHORTEST, LONGEST = 0.01, 0.25  # seconds between two looks at the store


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
    def chief(self) -> bool:
        """The one process that writes logs, pictures and manifests."""
        return self.rank == 0

    def device_index(self, visible: int, environ: Environment | None = None) -> int:
        """Return which of the GPUs that this process sees is its own."""
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
    """Return whether this process may print: alone, or the first; right even where `find_world` refuses."""
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
    """Tell mpiexec's helpers, which are tasks of Slurm but numbered by it, from srun, whose PMI agrees with Slurm."""
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
    """Return the threads for this process: its cores, divided among the processes of this host that use the same.

    How many these are is known once the processes have met; before that, what the launcher says is believed.
    """
    if world.size > 1 and _alike:
        share = usable_cores() // _alike[-1]
        return max(1, share if world.cores is None else min(world.cores, share))
    if world.cores is not None:
        return max(1, min(world.cores, usable_cores()))
    return max(1, usable_cores() // world.local_size)


_alike: list[int] = []  # processes with the same host and cores as this one, itself among them: a number a meeting


def _name_cores() -> str:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return f"cores/{socket.gethostname()}/{mix(str(cores))}"


def usable_cores() -> int:
    """Count the cores that this process may use; a job or a container may have made them fewer."""
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
        root = _meet(world, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        root.set_timeout(timeout)
        agree = agree_on_attempt if _shares_store() else count_attempt
        store = dist.PrefixStore(agree(root, world, timeout), root)
    store.add(_name_cores(), 1)
    _choose_interface(world)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    _alike.append(store.add(_name_cores(), 0))  # all have been counted: none gets here before the last has come
    return store, root


def _shares_store() -> bool:
    """Return whether torchrun's agent holds the store, which then outlives the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# ---------------------------------------------------------------- attempts that are in vain


def end_for_good(code: int) -> None:
    """Have torchrun's next attempts end at once: a training that was stopped, or that cannot begin, is not repeated.

    torchrun starts all processes again whatever one of them ends with. What is wrong at the start of a later attempt
    may be the trace of what made it necessary, so only the first attempt speaks.
    """
    if _shares_store() and (code == STOPPED or os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"):
        with contextlib.suppress(Exception):  # without it the next attempt finds out by itself
            _agents_store().set("ended", str(code))


@contextlib.contextmanager
def tried_once() -> Iterator[None]:
    """End for good where the block refuses its input (exit code 2): another attempt would be refused, too."""
    leave_if_ended()
    try:
        yield
    except (UserError, ModuleNotFoundError) as error:
        if not isinstance(error, RunFailed):
            end_for_good(2)
        raise


def leave_if_ended() -> None:
    """End an attempt of torchrun at its start like the one before, if that was for good."""
    if _shares_store() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        code = 0
        with contextlib.suppress(Exception):
            store = _agents_store()
            code = int(store.get("ended")) if store.check(["ended"]) else 0
        if code:
            raise SystemExit(code)


def _agents_store() -> Any:
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    tcp = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
    return _keep_apart(tcp)


# ---------------------------------------------------------------- where rank 0 listens


@functools.cache  # rank 0 listens as long as it lives: a second run in the same processes meets in the same place
def _meet(world: World, _host: str | None, _port: str | None) -> Any:
    """Return the store that all processes share: torchrun's, or one that rank 0 opens; with this job's keys alone."""
    env = dict(os.environ)
    master = find_master(world, env)
    if master is None and (interface := mpi.load()) is not None:
        local = world.local_size == world.size
        listening = _open_store(LOCAL_ADDRESS if local else "", 0, world) if world.rank == 0 else None
        here = LOCAL_ADDRESS if local else socket.gethostname()
        told = "" if listening is None else f"{here} {listening.port} {secrets.token_hex(16)}"
        answer = mpi.tell(interface, told, world.rank, world.size)
        if answer is not None:
            host, port, secret = answer.split()
            return _keep_apart(listening or _open_store(host, int(port), world), secret)
    master = master or find_local_master(world, env)
    return _keep_apart(_open_store(*master, world, shared=_shares_store()))


def _keep_apart(tcp: Any, told: str = "") -> Any:
    """Put the store under a name made of what only the processes of this job were told, by MPI or the environment.

    Who reaches the port and guesses at keys finds none of them, and neither does a job that came to the wrong port.
    torchrun --standalone draws its TORCHELASTIC_RUN_ID by lot; where a user names it, it is no secret and no harm.
    """
    import torch.distributed as dist

    words = (os.environ.get(SECRET, ""), os.environ.get("TORCHELASTIC_RUN_ID", ""), told)
    mark = hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()
    return dist.PrefixStore(f"vitrail/{mark}", tcp)


def _choose_interface(world: World) -> None:
    """Have gloo listen where no other host reaches it, if no other host has a part in this."""
    if world.local_size < world.size:
        if os.environ.get(INTERFACE) == LOOPBACK:  # of a process that began this one and was alone
            del os.environ[INTERFACE]
        return
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/sys/class/net", LOOPBACK, "flags").read_text(), 16) & 1:  # it is up
            os.environ.setdefault(INTERFACE, LOOPBACK)


def find_master(world: World, env: Environment) -> tuple[str, int] | None:
    """Return where rank 0 listens, or None where only MPI can tell."""
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
    """Return where rank 0 listens on this host, without MPI's help."""
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
    host = LOCAL_ADDRESS if host == "localhost" and not shared else host
    options: dict[str, Any] = {"timeout": MEETING, "wait_for_workers": False}
    try:
        if not listens:
            _resolve(host, port)
            _wait_for_listener(host, port)
        elif (own := _listen(host, port)) is not None:
            port = own.getsockname()[1]
            options["master_listen_fd"] = own.detach()
        return dist.TCPStore(host or "localhost", port, world.size, is_master=listens, **options)
    except (RuntimeError, TimeoutError, OSError) as error:
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


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen on the one address that was named by its number; None where PyTorch listens on all of this host's.

    A name may stand for another address here than on the other hosts, so that names are not enough.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    own = socket.socket(family)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(BACKLOG)
    except OSError as error:
        own.close()
        if error.errno == errno.EADDRNOTAVAIL:  # of a gateway in front of this host
            return None
        raise
    return own


def _wait_for_listener(host: str, port: int) -> None:
    """Wait until somebody listens there; PyTorch would wait, too, but without an ear for signals to stop."""
    for _ in _looks(MEETING):
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=5).close()
            return
    raise TimeoutError


def _looks(patience: timedelta) -> Iterator[None]:
    """Yield for each look until it takes too long, ever more slowly: thousands of processes may ask the same store."""
    deadline, pause = time.monotonic() + patience.total_seconds(), SHORTEST
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(LONGEST, 1.3 * pause)


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


_meetings = itertools.count()


def count_attempt(store: Any, world: World, timeout: timedelta) -> str:
    """Name a meeting in a store that began with these processes: they count alike. Waits for all of them."""
    name, own = f"meeting-{next(_meetings)}", 1
    for _ in _looks(timeout):
        if store.add(name, own) >= world.size:
            return name
        own = 0
    raise _missing(world, timeout)


def agree_on_attempt(store: Any, world: World, timeout: timedelta) -> str:
    """Agree on a name that exactly the living processes share.

    torchrun keeps its store across in-place restarts, so the keys of dead processes are still in it, and PyTorch's
    own start-up reads them (pytorch/pytorch#135712). Each process therefore says hello with a fresh token; rank 0
    names the attempt after the tokens it sees, and again whenever one changes, until every process has found its own
    token in the name. Restart counters would not do: each host counts for itself. A look costs each process a few
    requests, however many there are: hellos and acknowledgements are counted, and tokens read when a count changes.
    """
    token = uuid4().hex
    hellos = [f"hello/{rank}" for rank in range(world.size)]
    store.set(hellos[world.rank], token)
    store.add("hellos", 1)
    counted, known, acknowledged = 0, "", False
    seen: list[str] = []
    for _ in _looks(timeout):
        if world.rank == 0 and (count := store.add("hellos", 0)) != counted and store.check(hellos):
            several = store.multi_get(hellos) if store.has_extended_api() else map(store.get, hellos)
            counted, tokens = count, [bytes(value).decode() for value in several]
            if tokens != seen:  # a late count of a token that is in the name must not change the name
                seen, name = tokens, uuid4().hex
                store.set(f"tokens/{name}", json.dumps(tokens))
                store.set("attempt", name)
        if store.check(["attempt"]):
            name = store.get("attempt").decode()
            if name != known:
                tokens = json.loads(store.get(f"tokens/{name}"))
                known, acknowledged = name, len(tokens) == world.size and tokens[world.rank] == token
                if acknowledged:
                    store.add(f"ack/{name}", 1)
            if acknowledged and store.add(f"ack/{name}", 0) == world.size:
                return name
    raise _missing(world, timeout)


def _missing(world: World, timeout: timedelta) -> UserError:
    return UserError(
        f"rank {world.rank} waited {timeout.total_seconds():.0f} s for the {world.size} processes of this job; "
        f"look for one that failed to start, or that has another {SECRET}"
    )
