"""The folder of a benchmark: what was asked (sweep.json), what was found (results.jsonl, and the same as results.csv).

- a result is one line, appended and on the disk before the next cell begins; one that was torn is left out, and told
- a cell may have several results (it failed, and was tried again): the newest counts
- a cell is known by its keys with their values, and the mode; its name belongs to it alone in this folder
- what all cells have in common (recipe, ranks, nodes) is fixed by the first call; another one is refused
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from pathlib import Path
from typing import Any

from vitrail.contents import BENCH, check_layout
from vitrail.disk import appending, is_draft, sweep, write_whole
from vitrail.errors import UserError
from vitrail.foreign import parse_json, read_json
from vitrail.recipe.changes import diff
from vitrail.report.bench_cells import SWEEP_VERSION, read_log
from vitrail.report.facts import strict
from vitrail.versions import check_version

# Of sweep.json, what must stay the same from call to call, beside the recipe.
FIXED = ("ranks", "nodes")
STATUSES = ("ok", "oom", "failed", "skipped")


class Results:
    """Opened by one process at a time; locked until that ends, however it ends."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        _check_ours(self.folder)
        try:
            for inner in ("cells", "logs"):
                (self.folder / inner).mkdir(parents=True, exist_ok=True)
            self._lock = appending(self.folder / ".lock")  # held until the end
            self._lines = appending(self.folder / "results.jsonl")
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
        for place in (self.folder, self.folder / "cells", self.folder / "logs"):
            sweep(place)
        self.results, self.unread = read_lines(self.folder)

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
        known = read_asked(self.folder)
        if known is not None:
            changes = diff({name: known.get(name) for name in FIXED}, {name: asked[name] for name in FIXED})
            changes += diff(known["tree"], asked["tree"])
            if changes:
                shown = "; ".join(f"{key}: {_brief(old)} became {_brief(new)}" for key, old, new in changes[:5])
                raise UserError(
                    f"--out {self.folder}: it holds results of something else ({shown}); choose another folder, or go "
                    "back to what it was"
                )
            sweep = {key: list(values) for key, values in known["sweep"].items()}
            for key, values in asked["sweep"].items():
                have = sweep.setdefault(key, [])
                have += [value for value in values if value not in have]
            cells = list(dict.fromkeys([*known["cells"], *asked["cells"]]))
            known_as = known["identities"]
            for name, mine in asked["identities"].items():
                if known_as.get(name, mine) != mine:
                    raise UserError(f"--out {self.folder}: another call has just named a cell {name}; call again")
            asked = asked | {"sweep": sweep, "cells": cells, "identities": known_as | asked["identities"]}
        write_whole(self.folder / "sweep.json", json.dumps({"version": SWEEP_VERSION, **asked}, indent=1).encode())


def _check_ours(folder: Path) -> None:
    """Refuse a folder with other things in it, of which some might have a name that is written here, or leads away."""
    try:
        if not folder.is_dir():
            return
        strange = []
        if read_asked(folder) is None and not read_results(folder):
            own = {".lock", "cells", "logs"}  # of a call that was ended before it wrote down what was asked for
            strange = [p.name for p in folder.iterdir() if p.name not in own and not is_draft(p)]
    except OSError as error:
        raise UserError(f"--out {folder}: it cannot be read ({error.strerror}); choose another folder") from None
    if strange and (strange != ["results.jsonl"] or (folder / strange[0]).stat().st_size):
        raise UserError(f"--out {folder}: it holds other things than a benchmark ({strange[0]}); choose another folder")
    check_layout(folder, BENCH)


def identity(keys: Any, mode: Any) -> str:
    """What makes a cell itself: the keys that are swept with their values, in whatever order, and the mode.

    A mode that is swept is the same as one that is given alone.
    """
    keys = {key: value for key, value in keys.items() if key != "mode"}
    return json.dumps([strict(keys), mode], sort_keys=True, default=str)


def identity_of(result: dict[str, Any]) -> str:
    return identity(result["keys"], result.get("mode"))


def known_cells(folder: str | Path) -> dict[str, str]:
    """The names of the cells of a folder, by identity: those that were asked for, and those that have results."""
    told = (read_asked(folder) or {"identities": {}})["identities"]
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
    return read_lines(folder)[0]


def read_lines(folder: str | Path) -> tuple[list[dict[str, Any]], int]:
    """The results, oldest first, and how many lines could not be read."""
    try:
        lines = read_log(Path(folder) / "results.jsonl").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    lines = [line for line in lines if line.strip()]
    found = [result for result in map(_parse, lines) if is_result(result)]
    return found, len(lines) - len(found)


def is_result(found: Any) -> bool:
    """Whether it says which cell it belongs to, and how that ended."""
    if not isinstance(found, dict):
        return False
    named = isinstance(found.get("name"), str) and isinstance(found.get("keys"), dict)
    return named and found.get("status") in STATUSES


def read_asked(folder: str | Path) -> dict[str, Any] | None:
    """What earlier calls have asked for, if there were any."""
    path = Path(folder) / "sweep.json"
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UserError:
        raise
    except ValueError:
        raise UserError(f"{path}: it is not JSON any more; remove it, and the results stay") from None
    if isinstance(found, dict):
        check_version(found.get("version", 1), SWEEP_VERSION, str(path))
    try:
        sweep = {key: list(values) for key, values in found["sweep"].items()}
        known = {name: identity(*json.loads(mine)) for name, mine in found.get("identities", {}).items()}
        return found | {"tree": dict(found["tree"]), "sweep": sweep, "cells": list(found["cells"]), "identities": known}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: it does not say what was measured; remove it, and the results stay") from None


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


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parse(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
