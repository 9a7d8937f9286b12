"""Slurm: which task of a step this process is, and which host comes first.

- only a task of `srun` counts. The shell of salloc or sbatch has SLURM_PROCID and SLURM_NTASKS too, but no step of its
  own, or one of the two that Slurm keeps for shells
- lists of hosts are read here, so that neither scontrol nor its configuration is needed inside a container
"""

import itertools
import re

from vitrail.errors import UserError
from vitrail.launch.variables import Environment, Ranks, checked, first, number

SHELL_STEPS = range(0xFFFFFFF0, 2**32)  # numbers that Slurm keeps for the shells of sbatch and salloc, not for tasks
MOST_HOSTS = 2**20  # far above any machine: a longer list is a mistake, not worth its memory


def in_step(env: Environment) -> bool:
    """Return whether srun has started this process."""
    name = first(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return name is not None and number(env, name) not in SHELL_STEPS


def tasks(env: Environment) -> int:
    """Count the tasks of the step that this process is in; 1 outside of one."""
    name = first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return number(env, name) if name and in_step(env) else 1


def find_ranks(env: Environment) -> Ranks:
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID") if not env.get(name, "").strip()]
    if not first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        missing.append("SLURM_NTASKS")
    if missing:
        raise UserError(
            f"the environment holds SLURM_STEP_ID but not {', '.join(missing)}: start with srun, or unset it to run "
            "alone"
        )
    size, local_rank = tasks(env), number(env, "SLURM_LOCALID")
    return checked(Ranks(number(env, "SLURM_PROCID"), size, local_rank, count_local(env, size)), "srun")


def count_local(env: Environment, size: int) -> int:
    """Count the tasks of this step on this host."""
    name = first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is not None:
        counts = expand_counts(env[name])
        node = number(env, "SLURM_NODEID") if first(env, "SLURM_NODEID") else 0
        if counts and sum(counts) == size and node < len(counts):  # else they are the job's, not the step's
            return counts[node]
    name = first(env, "SLURM_NTASKS_PER_NODE")
    return min(size, number(env, name)) if name else size


def expand_counts(text: str) -> list[int]:
    """Read the tasks of each node: "2(x3),1" is [2, 2, 2, 1]; an empty list for what is not of that form."""
    counts: list[int] = []
    for part in text.strip().split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None or int(found[2] or 1) > MOST_HOSTS:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def binds_cores(env: Environment) -> bool:
    """Return whether srun has given this process cores of its own."""
    return any(word in env.get("SLURM_CPU_BIND", "") for word in ("mask_cpu:", "map_cpu:"))


def first_host(env: Environment) -> str:
    """Return the host of rank 0."""
    name = first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if name is None:
        raise UserError("srun: SLURM_STEP_NODELIST is not set, so rank 0 cannot be found; set MASTER_ADDR to its host")
    try:
        return expand_hosts(env[name])[0]
    except ValueError as error:
        raise UserError(f"{name}: {error}; set MASTER_ADDR to the host of rank 0") from None


def expand_hosts(text: str) -> list[str]:
    """Read a list of hosts as Slurm writes it: "node[01-03,07],gpu5" or "r[1-2]n[1-2]"."""
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):  # at the commas that are not in brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # names at even places, ranges at odd ones
        if any(set("[]") & set(piece) for piece in pieces) or not part:
            raise ValueError(f"{text!r} is not a list of hosts such as node[01-03,07],gpu5")
        choices = [expand_ranges(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{text!r} names more than {MOST_HOSTS} hosts")
    return hosts


def expand_ranges(text: str, whole: str) -> list[str]:
    """Read the numbers of "01-03,07", with their zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if found is None:
            raise ValueError(f"{whole!r} holds [{text}], where numbers and ranges such as [01-03,07] were expected")
        low, high = found[1], found[2] or found[1]
        if not 0 <= int(high) - int(low) < MOST_HOSTS:
            raise ValueError(f"{whole!r} holds the range {part.strip()}, which is empty or too long")
        numbers += [f"{n:0{len(low)}}" for n in range(int(low), int(high) + 1)]
    return numbers
