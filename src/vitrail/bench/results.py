"""The folder of a benchmark: what was asked (sweep.json), what was found (results.jsonl, and the same as results.csv).

- a result is one line, appended and on the disk before the next cell begins; a line that a kill has torn is left out
- a cell may have several results (it failed, and was tried again): the newest counts
- a cell is known by its keys with their values, and the mode; its name belongs to it alone in this folder
- what all cells have in common (recipe, mode, ranks) is fixed by the first call; another one is refused
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.recipe.changes import diff
from vitrail.report.facts import strict
from vitrail.report.files import write_whole

# Of sweep.json, what must stay the same from call to call.
FIXED = ("mode", "ranks", "nodes")


class Results:
    """Opened by one process at a time; locked until that ends, however it ends."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            for inner in ("cells", "logs"):
                (self.folder / inner).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held until the end
            self._lines = open(self.folder / "results.jsonl", "ab")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"--out {folder}: it cannot be written ({error.strerror}); choose another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"--out {folder}: another benchmark is at work there; wait for it, or choose another"
            ) from None
        except OSError:  # some shared file systems have no locks
            pass
        self.results = read_results(self.folder)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name in ("_lines", "_lock"):
            if hasattr(self, name):
                getattr(self, name).close()

    @property
    def newest(self) -> dict[str, dict[str, Any]]:
        """The result of each cell that has one, by its identity."""
        return {identity_of(result): result for result in self.results}

    def add(self, result: dict[str, Any]) -> None:
        """Onto the disk, whole, before anything else happens."""
        line = json.dumps(result, allow_nan=False).encode() + b"\n"
        if self._lines.tell() and not _ends_with_newline(self.folder / "results.jsonl"):
            line = b"\n" + line  # after one that was torn
        try:
            self._lines.write(line)
            self._lines.flush()
            os.fsync(self._lines.fileno())
            self.results.append(result)
            write_whole(self.folder / "results.csv", to_csv(list(self.newest.values())).encode())
        except OSError as error:
            raise UserError(f"--out {self.folder}: a result cannot be written ({error.strerror}); make room") from None

    def agree(self, asked: dict[str, Any]) -> None:
        """Refuse a call that means something else by the names of the cells; note what else it asks for."""
        path = self.folder / "sweep.json"
        known = _read_json(path)
        if known is not None:
            changes = diff({name: known.get(name) for name in FIXED}, {name: asked[name] for name in FIXED})
            changes += diff(known.get("tree"), asked["tree"])
            if changes:
                shown = "; ".join(f"{key}: {old!r} became {new!r}" for key, old, new in changes[:5])
                raise UserError(
                    f"--out {self.folder}: it holds results of something else ({shown}); choose another folder, or go "
                    "back to what it was"
                )
            sweep = {key: list(values) for key, values in known.get("sweep", {}).items()}
            for key, values in asked["sweep"].items():
                have = sweep.setdefault(key, [])
                have += [value for value in values if value not in have]
            cells = list(dict.fromkeys([*known.get("cells", []), *asked["cells"]]))
            known_as = known.get("identities") or {}
            for name, mine in asked["identities"].items():
                if known_as.get(name, mine) != mine:
                    raise UserError(f"--out {self.folder}: another call has just named a cell {name}; call again")
            asked = asked | {"sweep": sweep, "cells": cells, "identities": known_as | asked["identities"]}
        write_whole(path, json.dumps(asked, indent=1).encode())


def identity(keys: Any, mode: Any) -> str:
    """What makes a cell itself: the keys that are swept with their values, in whatever order, and the mode."""
    return json.dumps([strict(keys), mode], sort_keys=True, default=str)


def identity_of(result: dict[str, Any]) -> str:
    return identity(result.get("keys") or {}, result.get("mode"))


def known_cells(folder: str | Path) -> dict[str, str]:
    """The names of the cells of a folder, by identity: those that were asked for, and those that have results."""
    told = (_read_json(Path(folder) / "sweep.json") or {}).get("identities") or {}
    names = {mine: name for name, mine in told.items()}
    taken = set(told)
    for result in read_results(folder):
        mine, name = identity_of(result), result["name"]
        if mine not in names and name not in taken:
            names[mine] = name
            taken.add(name)
    return names


def read_results(folder: str | Path) -> list[dict[str, Any]]:
    """All whole lines of results.jsonl, oldest first."""
    try:
        lines = (Path(folder) / "results.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            if isinstance(result, dict) and isinstance(result.get("name"), str) and "status" in result:
                found.append(result)
    return found


def to_csv(results: list[dict[str, Any]]) -> str:
    """One row a result, one column a number; what lies deeper has dots in its name."""
    rows = [flatten(result) for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and prefix + name != "keys":
            row |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            row |= {f"keys.{key}": _text(chosen) for key, chosen in value.items()}
        elif isinstance(value, list):
            row[prefix + name] = " ".join(map(_text, value))
        else:
            row[prefix + name] = value
    return row


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path}: it is not JSON any more; remove it, and the results stay") from None
    return found if isinstance(found, dict) else None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
