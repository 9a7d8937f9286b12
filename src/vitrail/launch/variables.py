"""Variables that launchers set, read with care: a number that is none is an error, not a guess."""

from collections.abc import Mapping
from typing import NamedTuple

from vitrail.errors import UserError

Environment = Mapping[str, str]


class Ranks(NamedTuple):
    """The numbers that a launcher gives this process and the others."""

    rank: int
    size: int
    local_rank: int  # among the processes of this host
    local_size: int


def number(env: Environment, name: str) -> int:
    """Read a count or an index."""
    text = env[name].strip()
    if not text.isdecimal():
        raise UserError(
            f"{name}={env[name]!r}: expected a whole number; unset it, or start with torchrun, srun or mpirun"
        )
    return int(text)


def first(env: Environment, *names: str) -> str | None:
    """Return the first of these variables that is set to something."""
    return next((name for name in names if env.get(name, "").strip()), None)


def checked(ranks: Ranks, launcher: str) -> Ranks:
    """Refuse numbers that no launcher would give."""
    pairs = (("rank", ranks.rank, ranks.size), ("local rank", ranks.local_rank, ranks.local_size))
    for what, index, count in pairs:
        if not index < count:
            raise UserError(
                f"{launcher}: {what} {index} of {count} processes cannot be, they count from 0; variables of another "
                "start are left in the environment, so unset them or start from a fresh shell"
            )
    if ranks.local_size > ranks.size:
        raise UserError(
            f"{launcher}: {ranks.local_size} processes on this host are more than the {ranks.size} of the job; "
            "variables of another start are left in the environment, so unset them or start from a fresh shell"
        )
    return ranks


def mix(text: str) -> int:
    """Return the same 32 bits for the same text in every process (FNV-1a); Python's own hash differs."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 % 2**32
    return value


def port_for(job: str) -> int:
    """Return a port that all processes of a job derive alike, below those that systems give out by themselves."""
    return 20000 + mix(job) % 12000
