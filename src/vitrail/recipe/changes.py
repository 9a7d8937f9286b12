"""What changed between two resolved recipes, and which changes a run that continues may carry."""

from __future__ import annotations

from typing import Any

# A key here, or anything below it, may differ when a run is continued: it changes where and how fast a run goes, when
# it stops and what it shows. run.steps also moves a schedule that follows it, and run.device the type that
# precision.compute: auto stands for; a person who changes these means it.
SAFE_KEYS = (
    "checkpoint",
    "codec",
    "data.bad",
    "data.cache_mib",
    "data.micro_batch",
    "data.most_bad",
    "data.prefetch",
    "data.read_limit",
    "data.retries",
    "data.stage",
    "data.workers",
    "eval",
    "log",
    "objective.sampling",
    "parallel",
    "run.device",
    "run.dir",
    "run.hang_limit",
    "run.name",
    "run.steps",
    "run.stop_after_skips",
    "run.time_limit",
)

Change = tuple[str, Any, Any]


def diff(old: Any, new: Any, key: str = "") -> list[Change]:
    """The (key, old, new) of every value that differs; a key that one side lacks counts as null there."""
    if isinstance(old, dict) and isinstance(new, dict):
        names: list[Any] = list(dict.fromkeys((*old, *new)))
        pairs = [(name, old.get(name), new.get(name)) for name in names]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _holds_mappings(old, new):
        pairs = [(index, *both) for index, both in enumerate(zip(old, new, strict=True))]
    else:
        same = type(old) is type(new) and old == new
        return [] if same else [(key, old, new)]
    return [change for name, a, b in pairs for change in diff(a, b, f"{key}.{name}" if key else str(name))]


def unsafe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """The changes that a continued run may not carry."""
    return [change for change in diff(old, new) if not _is_safe(change[0])]


def _is_safe(key: str) -> bool:
    return any(key == safe or key.startswith(safe + ".") for safe in SAFE_KEYS)


def _holds_mappings(*lists: list[Any]) -> bool:
    return all(isinstance(item, dict) for items in lists for item in items)
