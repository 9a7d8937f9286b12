"""MPI: which process of mpirun or mpiexec this one is, and how it learns where rank 0 listens.

MPI itself is used for one thing, if mpi4py is there: telling all processes the address of rank 0. It is ended at once
when nobody else uses it, so that a failing process never waits for the others in its end.
"""

import os
import time
from typing import Any

from vitrail.errors import UserError
from vitrail.launch.variables import Environment, Ranks, checked, first, number

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
LOCAL_RANKS = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")  # MPICH and Intel MPI, Cray, PALS
LOCAL_SIZES = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE")
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID")  # what tells one start from another
LONGEST_NAME = 256


def has_open_mpi(env: Environment) -> bool:
    return first(env, *OPEN_MPI[:2]) is not None


def has_pmi(env: Environment) -> bool:
    return first(env, "PMI_RANK", "PMIX_RANK") is not None


def processes(env: Environment) -> int:
    """Return how many processes mpirun started; 1 where it did not."""
    name = first(env, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return number(env, name) if name else 1


def find_ranks(env: Environment) -> Ranks:
    if has_open_mpi(env):
        return checked(Ranks(*(number(env, name) for name in _all_of(env, OPEN_MPI))), "mpirun")
    if first(env, "PMI_RANK") is None:
        raise UserError(
            "PMIX_RANK says that this is one of several processes, but nothing says how many: start with the mpirun of "
            "Open MPI, srun or torchrun, or unset PMIX_RANK to run alone"
        )
    rank, size = (number(env, name) for name in _all_of(env, ("PMI_RANK", "PMI_SIZE")))
    local_rank, local_size = first(env, *LOCAL_RANKS), first(env, *LOCAL_SIZES)
    if size == 1:
        return checked(Ranks(rank, 1, 0, 1), "mpiexec")
    if local_rank is None or local_size is None:
        raise UserError(
            "PMI_RANK and PMI_SIZE are set but not MPI_LOCALRANKID and MPI_LOCALNRANKS, so the processes of this host "
            "are not known: set both, or start with torchrun or srun"
        )
    return checked(Ranks(rank, size, number(env, local_rank), number(env, local_size)), "mpiexec")


def _all_of(env: Environment, names: tuple[str, ...]) -> tuple[str, ...]:
    missing = [name for name in names if not env.get(name, "").strip()]
    if missing:
        there = next(name for name in names if name not in missing)
        raise UserError(
            f"the environment holds {there} but not {', '.join(missing)}: start with mpirun, or unset {there} to run "
            "alone"
        )
    return names


def job_name(env: Environment) -> str:
    """Return the same text in all processes of one start on one host, and another for the next start."""
    name = first(env, *JOBS)
    return f"{name}={env[name]}" if name else f"parent={os.getppid()}"


def binds_cores(env: Environment) -> bool:
    """Return whether mpirun has given this process cores of its own."""
    return env.get("OMPI_MCA_orte_bound_at_launch") == "1"


def load() -> Any | None:
    """Return mpi4py's MPI, or None where it is not installed or its library cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # by `tell` instead, which knows who began it
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI


def tell(mpi: Any, text: str, rank: int, size: int) -> str | None:
    """Return what rank 0 says, on every rank; None where mpi4py is of another MPI and sees each process alone."""
    ours = not mpi.Is_initialized()
    if ours:
        mpi.Init()
    try:
        if mpi.COMM_WORLD.Get_size() != size:
            return None
        buffer = bytearray(text.encode().ljust(LONGEST_NAME) if rank == 0 else bytes(LONGEST_NAME))
        # Bytes, since mpi4py would pickle a text; and not at one go, so that signals to stop are heard meanwhile.
        request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
        while not request.Test():
            time.sleep(0.01)
    finally:
        if ours:
            mpi.Finalize()
    return bytes(buffer).decode().strip()
