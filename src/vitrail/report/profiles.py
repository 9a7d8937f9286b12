"""Profiles on the page of a run: where the time of some steps went, and the operations that took most of it.

The table is read from a file of the run, which anybody may have changed: what is not as expected is not shown."""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.report.units import MISSING, count, number_of, percent, plain

_MOST_RANKS = 4  # with columns of their own
_LONGEST = 90  # characters of a kernel's name
_PARTS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "passes": "forward and backward",
    "optimizer": "optimizer",
    "communication": "communication alone",
    "other": "other",
}

Row = tuple[str, ...]


class Profiled(NamedTuple):
    """What the page shows of a profile."""

    title: str
    heads: list[str]
    parts: list[Row]
    of: str  # what the operations are
    operations: list[tuple[str | Row, ...]]  # share, time, calls, name
    notes: list[str]


def show_profile(table: Any) -> Profiled | None:
    """Return the rows of a profile; None where there are none."""
    ranks = [rank for rank in _list(table, "ranks") if isinstance(rank, dict) and isinstance(rank.get("parts"), dict)]
    if not ranks:
        return None
    steps, shown, first = _list(table, "steps"), ranks[:_MOST_RANKS], ranks[0]
    names = [f"rank {count(rank.get('rank'))}" for rank in shown]
    heads = ["part"] + [head for name in names for head in (name if len(shown) > 1 else "time", "share")]
    parts = [
        (label, *(cell for rank in shown for cell in _time_and_share(rank["parts"].get(part), rank)))
        for part, label in _PARTS.items()
        if any(rank["parts"].get(part) is not None for rank in shown)
    ]
    parts.append(("a step", *(cell for rank in shown for cell in _time_and_share(rank.get("step_seconds"), rank))))
    rows = [row for row in _list(first, "operations") if isinstance(row, dict)]
    operations: list[tuple[str | Row, ...]] = [
        (
            *_time_and_share(row.get("seconds"), first)[::-1],
            plain(row.get("calls"), 4),
            (_short(row.get("name")), "cell"),
        )
        for row in rows
    ]
    return Profiled(
        title=f"Steps {' to '.join(count(step) for step in steps) or MISSING}, {' and '.join(names)}",
        heads=heads,
        parts=parts,
        of="operations" if first.get("idle") is None else "kernels",
        operations=operations,
        notes=_notes(first, len(ranks) - len(shown)),
    )


def _notes(rank: dict[str, Any], more: int) -> list[str]:
    """Say how to read the table, and where the traces are."""
    found = ["Times are of one profiled step, and a profiler slows down what it looks at: the shares tell more."]
    if number_of(rank.get("collectives")) > 0:
        took, share = _time_and_share(rank["collectives"], rank)
        found.append(f"Collectives were at work for {took} ({share}); what other work hides of it is not in the table.")
    if rank.get("idle") is not None:
        idle, share = _time_and_share(rank["idle"], rank)
        found.append(f"The GPU had nothing to do for {idle} ({share}).")
    if isinstance(rank.get("note"), str):
        found.append(rank["note"][:1].upper() + rank["note"][1:] + ".")
    if isinstance(rank.get("trace"), str):
        found.append(f"{rank['trace']} opens in https://ui.perfetto.dev, which sends it nowhere.")
    if isinstance(rank.get("memory"), str):
        found.append(f"{rank['memory']} opens in https://pytorch.org/memory_viz, which sends it nowhere.")
    return found + ([f"{more} more ranks are in the folder profile."] if more else [])


def _time_and_share(seconds: Any, rank: dict[str, Any]) -> Row:
    number, total = number_of(seconds), number_of(rank.get("step_seconds"))
    share = percent(number / total) if total > 0 else MISSING
    return (MISSING if number != number else f"{plain(1000 * number, 3)} ms"), share


def _short(name: Any) -> str:
    text = str(name)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _list(tree: Any, key: str) -> list[Any]:
    found = tree.get(key) if isinstance(tree, dict) else None
    return found if isinstance(found, list) else []
