"""Which cells a sweep has: every combination of the values of its axes.

- `data.batch=16/rank,32/rank` is an axis of one key; `parallel.strategy,parallel.group=DDP:null,HYBRID_SHARD:2` one of
  two keys whose values go together. Values are read as overrides are, so lists and mappings may hold commas
- `mode`, `ranks` (processes a node) and `nodes` are no keys of a recipe, but may be swept as well
- a cell is named by what differs: the last part of each key, or all of it where two keys of a folder end alike. It is
  known by its keys, their values and the mode; one that a folder knows keeps its name, and no other gets it
- everything is checked before anything runs: unknown keys, values that the recipe refuses, layouts that cannot be
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitrail.bench import check_mode
from vitrail.bench.results import identity
from vitrail.errors import UserError
from vitrail.recipe import yaml
from vitrail.recipe.find import find_recipe
from vitrail.recipe.kinds import nearest
from vitrail.recipe.trees import dotted, split_override

if TYPE_CHECKING:
    from vitrail.recipe import Recipe

OUTSIDE = ("mode", "ranks", "nodes")  # swept, but no keys of a recipe
BATCH = "data.batch"
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
    def typed(self) -> str:
        """What makes it differ, in the words of the command line."""
        outside = [f"{key}={value}" for key, value in self.keys.items() if key in ("ranks", "nodes")]
        return ",".join([*self.overrides, *outside])

    @property
    def file(self) -> str:
        """The name in letters that every file system takes; a few digits keep those apart that look the same then."""
        plain = re.sub(r"[^\w.=,+-]", "_", self.name)
        if plain == self.name and len(plain) <= 100:
            return plain
        return f"{plain[:100]}-{hashlib.blake2b(self.name.encode(), digest_size=3).hexdigest()}"


def read_axis(text: str) -> Axis:
    """An axis as it stands on the command line."""
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
    """The parts between the signs that stand in no brackets and no quotation marks."""
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
    """Every combination, the last axis running fastest; `known` are names that the folder has, by identity."""
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
    """What a cell is named by: the mode, too, where the folder has the same keys in another one."""
    keys, mode = json.loads(mine)
    same = any(json.loads(other)[0] == keys for other in known)
    return words | {"mode": mode} if same and "mode" not in words else words


def _free_name(words: Mapping[str, str], short: Mapping[str, str], mode: str, taken: set[str]) -> str:
    """The shortest name that no other cell has."""
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
    """The last part of each key, where no other key ends alike."""
    last = Counter(key.rpartition(".")[2] for key in dict.fromkeys(keys))
    return {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}


def check_cells(recipe: Any, overrides: Sequence[str], cells: Sequence[Cell]) -> dict[str, Recipe]:
    """The recipe of each cell, by its name; what is wrong with one is said before any is run."""
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
    """A word that is the end of a key, or nearly a key; the recipe itself refuses all else."""
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
    """The name of a cell that ran out of memory with a smaller batch, the same other keys and mode, if there is one."""
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


def batch_size(value: Any) -> tuple[int, str] | None:
    """The number of a batch, and of what it is."""
    found = re.fullmatch(r"\s*([0-9]+)\s*(/\s*rank)?\s*", str(value))
    return (int(found[1]), "rank" if found[2] else "all") if found else None


def _without_batch(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != BATCH}
