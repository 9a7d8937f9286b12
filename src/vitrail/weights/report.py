"""What became of every tensor: a table for people, JSON for the log."""

import itertools
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

Action = Literal["copied", "permuted", "resized", "inflated", "skipped", "unused"]

MEANINGS: dict[str, str] = {
    "copied": "as it is in the file",
    "permuted": "the same numbers in this library's order",
    "resized": "interpolated over another grid",
    "inflated": "spread over new axes or channels",
    "skipped": "in the model, not in the file: keeps its starting values",
    "unused": "in the file, not in the model",
}


@dataclass(frozen=True)
class Entry:
    """One parameter of the model, or (unused) one tensor of the file."""

    action: Action
    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()  # names in the file
    note: str = ""


@dataclass(frozen=True)
class Report:
    path: str
    adapter: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()  # what a person should know and no file can tell

    def __getitem__(self, action: Action) -> list[Entry]:
        return [entry for entry in self.entries if entry.action == action]

    def names(self, action: Action) -> list[str]:
        return [entry.name for entry in self[action]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self[action])} {action}" for action in MEANINGS if self[action])  # type: ignore[index]
        rows = [(action, *row) for action in MEANINGS for row in _rows(self[action])]  # type: ignore[index]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        head = f"weights from {self.path} ({self.adapter}): {counts}"
        return "\n".join([head, *(f"  {line}" for line in lines), *(f"  note: {note}" for note in self.notes)])


def _rows(entries: list[Entry]) -> list[tuple[str, str, str]]:
    """(name, shape, note): in one row blocks that differ in their number alone, and what is left out for one reason."""

    def alike(entry: Entry) -> tuple[str, tuple[int, ...], str]:
        if entry.action in ("skipped", "unused"):
            return "", (), entry.note
        return re.sub(r"\.\d+\.", ".#.", entry.name), entry.shape, entry.note

    rows = []
    for (pattern, shape, note), found in itertools.groupby(sorted(entries, key=alike), key=alike):
        group = list(found)
        if not pattern:
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            rows.append((group[0].name + more, "", note))
            continue
        numbers = sorted({int(number.group(1)) for e in group if (number := re.search(r"\.(\d+)\.", e.name))})
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        rows.append((pattern.replace("#", span, 1), " x ".join(map(str, shape)) or "scalar", note))
    return rows
