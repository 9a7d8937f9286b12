"""What a process that starts others gives them of its environment, and whether the system ended them for memory."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

from vitrail.bench.kills import oom_kills

# What torchrun sets for its ranks; a user's own variables may begin alike.
LAUNCHER = frozenset(
    f"{prefix}{name}" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
ALMOST_ALL = 0.8  # of the memory: a process that is killed above it most likely was for that


def alone_environment() -> dict[str, str]:
    """This environment, without what a launcher says of its ranks."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith("TORCHELASTIC_")
    }


@dataclass(frozen=True)
class Watch:
    """What the system tells of memory before children are started; asked again when they have ended."""

    kills: int  # 0 where nothing counts them
    peak: int  # bytes of the largest child so far

    @classmethod
    def begin(cls) -> Watch:
        return cls(oom_kills() or 0, largest_child())

    def starved(self, processes: int) -> bool:
        """Whether the system ended something for want of memory since, or children that large needed nearly all."""
        from vitrail.memory import memory_bytes

        if (oom_kills() or 0) > self.kills:
            return True
        peak = largest_child()  # of all children ever: that of the latest ones only where it has risen
        return peak > self.peak and peak * processes > ALMOST_ALL * memory_bytes()


def largest_child() -> int:
    """Bytes, of the largest process that this one has started and that has ended."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * scale
