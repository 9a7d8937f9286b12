"""Cells of a sweep, which are all combinations of the values of its axes; their folder, and jobs that measure them.

- `data.batch=16/rank,32/rank` is an axis of one key; `parallel.strategy,parallel.group=DDP:null,HYBRID_SHARD:2` one of
  two keys whose values go together. Values are read as overrides are, so lists and mappings may hold commas
- `mode`, `ranks` (processes a node) and `nodes` are no keys of a recipe, but may be swept as well
- a cell is named by what differs: the last part of each key, or all of it where two keys of a folder end alike. It is
  known by its keys, their values and the mode; one that a folder knows keeps its name, and no other gets it
- everything is checked before anything runs: unknown keys, values that the recipe refuses, layouts that cannot be
- the folder holds what was asked (sweep.json) and what was found (results.jsonl, and the same as results.csv). A result
  is one line, appended and on the disk before the next cell begins; one that was torn is left out, and told. Of several
  results of a cell (it failed, and was tried again) the newest counts
- what all cells have in common (recipe, ranks, nodes) is fixed by the first call; another one is refused
- a job script for each cell is the way to several nodes; its result lies where a later call finds it"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.bench import check_mode
from vitrail.bench.supervise import forget
from vitrail.contents import BENCH, check_layout
from vitrail.disk import appending, is_draft, sweep, write_whole
from vitrail.errors import UserError
from vitrail.foreign import read_json
from vitrail.launch import jobs
from vitrail.recipe import yaml
from vitrail.recipe.kinds import nearest
from vitrail.recipe.load import Given, diff, find_recipe
from vitrail.recipe.yaml import dotted, split_override
from vitrail.report.bench_cells import BATCH, OUTSIDE, STATUSES, SWEEP_VERSION, batch_size, read_log
from vitrail.report.facts import strict
from vitrail.sums import check_version

if TYPE_CHECKING:
    from vitrail.bench.runner import Sweep
    from vitrail.recipe import Recipe


# Of sweep.json, what must stay the same from call to call, beside the recipe.
FIXED = ("ranks", "nodes")


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
        """Return the newest result of each cell that has one, by its identity."""
        return {identity_of(result): result for result in self.results}

    def add(self, result: dict[str, Any]) -> None:
        """Put a result onto the disk, whole, before anything else happens."""
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
    """Return what makes a cell itself: the keys that are swept with their values, in whatever order, and the mode.

    A mode that is swept is the same as one that is given alone.
    """
    keys = {key: value for key, value in keys.items() if key != "mode"}
    return json.dumps([strict(keys), mode], sort_keys=True, default=str)


def identity_of(result: dict[str, Any]) -> str:
    return identity(result["keys"], result.get("mode"))


def known_cells(folder: str | Path) -> dict[str, str]:
    """Return the names of a folder's cells, by identity: those that were asked for, and those that have results."""
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
    """Return all results of a folder, oldest first."""
    return read_lines(folder)[0]


def read_lines(folder: str | Path) -> tuple[list[dict[str, Any]], int]:
    """Return the results, oldest first, and how many lines could not be read."""
    try:
        lines, torn = read_log(Path(folder) / "results.jsonl")
    except NotADirectoryError:
        return [], 0
    found = [line for line in lines if is_result(line)]
    return found, torn + len(lines) - len(found)


def is_result(found: Any) -> bool:
    """Return whether it says which cell it belongs to, and how that ended."""
    if not isinstance(found, dict):
        return False
    named = isinstance(found.get("name"), str) and isinstance(found.get("keys"), dict)
    return named and found.get("status") in STATUSES


def read_asked(folder: str | Path) -> dict[str, Any] | None:
    """Return what earlier calls have asked for, if there were any."""
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
    """Write one row a result, one column a number; what lies deeper has dots in its name."""
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


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


WHOLE = "as it is"  # the name of the only cell where nothing is swept


@dataclass(frozen=True)
class Axis:
    """Keys that change together, and the values that they take, as words."""

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Cell:
    """One recipe to be measured."""

    name: str
    keys: dict[str, Any]  # the swept ones alone, with their values
    overrides: tuple[str, ...]
    mode: str
    ranks: int
    nodes: int

    @property
    def identity(self) -> str:
        return identity(self.keys, self.mode)

    @property
    def started(self) -> tuple[int, int]:
        """Return on how many nodes it runs, and the processes of each."""
        return (1, 1) if self.mode == "compute" else (self.nodes, self.ranks)

    @property
    def typed(self) -> str:
        """Return what makes it differ, in the words of the command line."""
        outside = [f"{key}={value}" for key, value in self.keys.items() if key in ("ranks", "nodes")]
        return ",".join([*self.overrides, *outside])

    @property
    def file(self) -> str:
        """Return the name in letters that any file system takes; a few digits keep apart those that then look alike."""
        plain = re.sub(r"[^\w.=,+-]", "_", self.name)
        if plain == self.name and len(plain) <= 100:
            return plain
        return f"{plain[:100]}-{hashlib.blake2b(self.name.encode(), digest_size=3).hexdigest()}"


def read_axis(text: str) -> Axis:
    """Read an axis as it stands on the command line."""
    names, equals, values = text.partition("=")
    keys = tuple(name.strip() for name in names.split(","))
    if not equals or not all(keys):
        raise UserError(f"--sweep {text!r}: expected KEY=A,B,C, such as data.batch=16/rank,32/rank")
    if len(set(keys)) < len(keys):
        raise UserError(f"--sweep {text!r}: a key stands there twice; name it once")
    rows = []
    for value in split_outside(values, ","):
        row = tuple(split_outside(value, ":")) if len(keys) > 1 else (value,)
        if len(row) != len(keys) or not all(word.strip() for word in row):
            wanted = ":".join("ABCDEFGH"[: len(keys)])
            raise UserError(
                f"--sweep {text!r}: {value.strip()!r} is not a value of {' and '.join(keys)}; expected {wanted}, "
                "with commas between one and the next"
            )
        rows.append(tuple(word.strip() for word in row))
    if len(set(rows)) < len(rows):
        raise UserError(f"--sweep {text!r}: a value stands there twice; name it once")
    return Axis(keys, tuple(rows))


def split_outside(text: str, sign: str) -> Iterator[str]:
    """Yield the parts between the signs that stand in no brackets and no quotation marks."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == sign and depth == 0:
            yield part
            part = ""
            continue
        part += letter
    yield part


def read_cells(
    sweeps: Sequence[str], *, mode: str, ranks: int, nodes: int, known: Mapping[str, str] | None = None
) -> list[Cell]:
    """Return every combination, the last axis running fastest; `known` are names that the folder has, by identity."""
    names, seen = dict(known or {}), set()
    axes = [read_axis(text) for text in sweeps]
    keys = [key for axis in axes for key in axis.keys]
    if twice := [key for key, number in Counter(keys).items() if number > 1]:
        raise UserError(f"--sweep {twice[0]}: it is swept twice; give all of its values at once")
    short = short_names([*keys, *(key for mine in names for key in json.loads(mine)[0] if key not in keys)])
    cells = []
    for rows in itertools.product(*(axis.values for axis in axes)):
        words = dict(zip(keys, itertools.chain(*rows), strict=True))
        parsed = {key: _parse(key, word) for key, word in words.items()}
        outside: dict[str, Any] = {"mode": mode, "ranks": ranks, "nodes": nodes} | {
            key: parsed[key] for key in OUTSIDE if key in parsed
        }
        mine = identity(parsed, outside["mode"])
        name = names.get(mine) or _free_name(_told(words, mine, names), short, outside["mode"], set(names.values()))
        if mine in seen:
            raise UserError(f"--sweep: {name} is there twice, in other words; name each value once")
        names[mine] = name
        seen.add(mine)
        overrides = tuple(f"{key}={word}" for key, word in words.items() if key not in OUTSIDE)
        cells.append(Cell(name, parsed, overrides, **outside))
    return cells


def _told(words: dict[str, str], mine: str, known: Iterable[str]) -> dict[str, str]:
    """Return what a cell is named by: the mode, too, where the folder has the same keys in another one."""
    keys, mode = json.loads(mine)
    same = any(json.loads(other)[0] == keys for other in known)
    return words | {"mode": mode} if same and "mode" not in words else words


def _free_name(words: Mapping[str, str], short: Mapping[str, str], mode: str, taken: set[str]) -> str:
    """Return the shortest name that no other cell has."""
    tight = {key: "".join(word.split()) for key, word in words.items()}
    ways = [
        ",".join(f"{short.get(key, key)}={word}" for key, word in tight.items()) or WHOLE,
        ",".join(f"{key}={word}" for key, word in tight.items()) or WHOLE,
        whole := ",".join(f"{key}={word}" for key, word in words.items()) or WHOLE,
        f"{whole},mode={mode}",
    ]
    for name in ways:
        if name not in taken:
            return name
    raise UserError(f"--sweep {whole}: another cell of this folder has that name; choose another folder with --out")


def _parse(key: str, word: str) -> Any:
    value = yaml.parse(word, f"--sweep {key}={word}")
    if key == "mode":
        check_mode(value)
    if key in ("ranks", "nodes") and (type(value) is not int or value < 1):
        raise UserError(f"--sweep {key}={word}: expected whole numbers above 0")
    return value


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, where no other key ends alike."""
    last = Counter(key.rpartition(".")[2] for key in dict.fromkeys(keys))
    return {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}


def check_cells(recipe: Given, overrides: Sequence[str], cells: Sequence[Cell]) -> dict[str, Recipe]:
    """Return the recipe of each cell, by its name; refuse what is wrong with one before any is run."""
    from vitrail.parallel.check import refuse

    base = find_recipe(recipe, overrides)
    known = list(_leaves(base.to_tree()))
    found = {}
    for key in dict.fromkeys(key for cell in cells for key in cell.keys if key not in OUTSIDE):
        _refuse_unknown(key, known)
    for cell in cells:
        try:
            found[cell.name] = find_recipe(recipe, [*overrides, *cell.overrides])
            if cell.mode != "compute":
                refuse(found[cell.name], cell.ranks * cell.nodes)
        except UserError as error:
            raise UserError(f"--sweep {cell.typed}: {error}" if cell.typed else str(error)) from None
    return found


def _refuse_unknown(key: str, known: Sequence[str]) -> None:
    """Refuse a word that is the end of a key, or nearly a key; the recipe itself refuses all else."""
    split_override(f"{key}=0")
    if "." in key or any(name == key or name.startswith(key + ".") for name in known):
        return
    ends = {name.rpartition(".")[2]: name for name in known}
    near = nearest(key, [*OUTSIDE, *ends])
    hint = f"; did you mean {ends.get(near, near)!r}?" if near else ""
    raise UserError(f"--sweep {key}: there is no such key{hint} (keys of a recipe have dots, such as data.batch)")


def _leaves(tree: Any, key: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from _leaves(inner, (*key, name))
    else:
        yield dotted(key)


# ---------------------------------------------------------------- what need not be tried


def too_large(cell: Cell, results: Iterable[dict[str, Any]]) -> str | None:
    """Name a cell that ran out of memory with a smaller batch, the same other keys and mode, if there is one."""
    size = batch_size(cell.keys.get(BATCH))
    if size is None:
        return None
    for result in results:
        theirs = result["keys"]
        other = batch_size(theirs.get(BATCH))
        if result["status"] != "oom" or other is None or other[1] != size[1] or other[0] > size[0]:
            continue
        same = identity(_without_batch(theirs), result.get("mode")) == identity(_without_batch(cell.keys), cell.mode)
        if same and theirs[BATCH] != cell.keys[BATCH]:
            return result["name"]
    return None


def _without_batch(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != BATCH}


def write_jobs(sweep: Sweep, launcher: jobs.Launcher, **settings: Any) -> list[Path]:
    """Take in what earlier jobs have found, and write the scripts of the cells that are still missing.

    `settings` are those of a job (launch/jobs.py): machine, time, account and so on. All is checked before any is
    written.
    """
    folder = sweep.folder / "jobs"
    scripts = {cell: script_of(sweep, cell, launcher, settings) for cell in sweep.cells}
    written = []
    with Results(sweep.folder) as results:
        results.agree(sweep.asked)
        sweep.collect(results)
        for cell, script in scripts.items():
            if sweep.is_open(cell, results):
                order = sweep.order(cell, watched=False) | {"job": True}
                forget(Path(order["out"]))  # of a job that was ended
                sweep.begun.pop(cell.name, None)
                write_whole(order_path(sweep, cell), json.dumps(order), parents=True)
                path = folder / f"{cell.file}.sh"
                jobs.save(script, path, replace=True)  # one of an earlier call, with other options
                written.append(path)
    return written


def script_of(sweep: Sweep, cell: Cell, launcher: jobs.Launcher, settings: dict[str, Any]) -> jobs.Script:
    """Return the script that would train the recipe of a cell, but it measures."""
    from vitrail.parallel.check import refuse

    nodes, ranks = cell.started
    job = jobs.Job(
        launcher=launcher,
        recipe=str(sweep.recipe),
        overrides=tuple(sweep.order(cell, watched=False)["overrides"]),
        plugins=sweep.options.plugins,
        nodes=nodes,
        ranks_per_node=ranks,
        words=("vitrail.bench.cell", str(order_path(sweep, cell))),
        name=re.sub(r"[^\w.-]+", "-", cell.file).strip("-"),
        requeue=False if launcher == "slurm" else None,
        max_restarts=0 if launcher == "torchrun" else None,
        **settings,
    )
    return jobs.write_script(job, refuse, verb="bench", written_by=[job.recipe, *job.overrides])


def order_path(sweep: Sweep, cell: Cell) -> Path:
    """Return the place of the order that the processes of a job read."""
    return (sweep.folder / "jobs" / f"{cell.file}.order").resolve()
