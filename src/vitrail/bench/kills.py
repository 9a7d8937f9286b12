"""Whether the kernel ended a process because memory had run out: it counts that, where a control group says so."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """How often the kernel has done so in this process's control group; None where nothing tells."""
    for place in _places(root, own):
        try:
            lines = [line.split() for line in place.read_text().splitlines()]
        except OSError:
            continue
        for words in lines:
            if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
                return int(words[1])
    return None


def _places(root: Path, own: Path) -> list[Path]:
    """The files of version 2 and 1; in a container the group lies at the root, whatever its name outside."""
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, group = rest.partition(":")
        inside = group.strip("/")
        if not kinds:
            found += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in kinds.split(","):
            found += [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return found
