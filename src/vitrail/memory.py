"""How much memory there is on the host, for this process and for one piece of data."""

import os
import resource
from functools import cache
from pathlib import Path

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container or a job


def memory_bytes() -> int:
    """Memory of this machine, or of the container or job where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(int(limit) for limit in map(_read, LIMITS) if limit.isdigit())])


@cache
def room() -> int:
    """Bytes that one piece of data may take: half of the memory that this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(memory_bytes(), limit if limit > 0 else 2**63) // 2


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""
