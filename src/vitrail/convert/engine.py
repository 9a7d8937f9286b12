"""Turns a configuration of another system into a recipe, key by key, and says what became of each key.

A system is a table of lines, one for each key that it has. A line makes keys of a recipe of the key's value, or says
why there are none. Lines in brackets stand for what the other system has in its code, not in its files; lines with a
default count where a file does not give the key. What no line names is listed as not understood.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vitrail.credentials import REMEDY, strip
from vitrail.errors import UserError, printable
from vitrail.recipe import load_recipe
from vitrail.recipe.yaml import dump, parse, show

MAPPED, CHANGED, DROPPED, UNKNOWN = "mapped", "changed", "dropped", "not understood"
SECTIONS = (
    *("run", "model", "objective", "codec", "data", "optimizer", "schedule", "init", "ema", "parallel", "precision"),
    *("checkpoint", "eval", "log"),
)
WIDTH = 118  # of a comment

_NOTHING: Any = object()


class NotHonoured(ValueError):
    """A value that no recipe can mean; the message says why."""


class Given:
    """A configuration of another system; keys are dotted, and the system's defaults stand where a key is missing."""

    def __init__(self, tree: Mapping[str, Any], table: Table, task: str, name: str):
        self.task, self.name = task, name
        self.defaults = {line.old: line.default for line in table.lines if line.default is not _NOTHING}
        self.values: dict[str, Any] = {}  # by the names that the table has for the keys
        self.unknown: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # as they are written in the file
        known = {line.old for line in table.lines}
        for key, value in _walk(tree, known | set(table.aliases)):
            old = table.aliases.get(key, key)
            if old not in known or old in self.values:
                self.unknown[key] = value
            else:
                self.values[old], self.names[old] = value, key

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a key: the file's, or else the system's default."""
        return self.values.get(key, self.defaults.get(key, default))

    def __contains__(self, key: str) -> bool:
        return key in self.values


Keys = dict[str, Any]
Made = tuple[Keys, str] | None  # keys of a recipe, and why they say something else, or why there are none; or no row
Make = Callable[[Any, Given], Made]


@dataclass(frozen=True)
class Line:
    """What becomes of one key; `many` where its value is a list or a mapping."""

    old: str
    make: Make
    default: Any = _NOTHING
    many: bool = False


@dataclass(frozen=True)
class Table:
    """What a system's keys become; `aliases` are other names of keys."""

    system: str
    lines: tuple[Line, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    old: str
    value: str
    status: str
    new: str
    why: str

    def line(self) -> str:
        """Return the row for people."""
        arrow = f" -> {self.new}" if self.new else ""
        value = f" = {self.value}" if self.value else ""
        return f"{self.status:14}  {self.old}{value}{arrow}" + (f"\n{'':16}{self.why}" if self.why else "")


@dataclass(frozen=True)
class Converted:
    """A recipe as a tree and as text with comments, and a row for each key that it comes from."""

    system: str
    task: str
    tree: dict[str, Any]
    text: str
    rows: list[Row]

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)


# ------------------------------------------------------------ what lines are made of


def to(new: str, why: str = "", **words: Any) -> Make:
    """Return a rule: the same value under another name; with `words`, what the recipe calls each of the values."""

    def make(value: Any, given: Given) -> Made:
        if not words:
            return {new: value}, why
        if str(value) not in words:
            raise NotHonoured(f"a recipe knows {', '.join(words)} here")
        return {new: words[str(value)]}, why

    return make


def drop(why: str) -> Make:
    """Return a rule: no key of a recipe, and why."""
    return lambda value, given: ({}, why)


def unless(harmless: Any, why: str, otherwise: str) -> Make:
    """Return a rule: dropped because of `why` where the value is `harmless`; any other cannot be honoured."""

    def make(value: Any, given: Given) -> Made:
        if value != harmless:
            raise NotHonoured(otherwise)
        return {}, why

    return make


def has(new: str, value: Any, why: str = "") -> Make:
    """Return a rule for what is in the other system's code: this key of a recipe."""
    return lambda _, given: ({new: value}, why)


def code(what: str, make: Make, value: Any = "in the code") -> Line:
    """Return a line for something that no file says, in brackets."""
    return Line(f"({what})", make, value)


# ------------------------------------------------------------ the engine


def convert_tree(tree: Mapping[str, Any], table: Table, task: str, name: str, told: Sequence[Row] = ()) -> Converted:
    """Turn the configuration in a tree into a recipe; `name` is for the run and for comments, `told` more rows."""
    plain = _without_secrets(tree)
    given = Given(plain, table, task, name)
    flat: Keys = {}
    sources: dict[str, list[Row]] = {}
    told = [replace(row, value=strip(row.value)) for row in told]
    rows = [*told, *(row for line in table.lines for row in _apply(line, given, flat, sources))]
    if plain != tree:
        rows.append(Row("(passwords and tokens in URLs)", "", DROPPED, "", REMEDY))
    for key, value in given.unknown.items():
        why = "given under two names" if table.aliases.get(key) in given.values else f"no key of {table.system}"
        rows.append(Row(key, show(value), UNKNOWN, "", f"{why}: nothing of it is in the recipe"))
    made = _unflatten(flat)
    made = {section: made[section] for section in SECTIONS if section in made}
    text = _write(made, sources, rows, f"{table.system}{f' ({task})' if task else ''}, from {_word(name)}")
    try:
        load_recipe(parse(text))
    except UserError as error:
        causes = [f"{_word(row.old)} = {row.value}: {row.why}" for row in rows if row.status == UNKNOWN]
        lines = "\n".join([*causes[:10], str(error)])
        raise UserError(f"{name}: the recipe that comes of it is refused; mend the original\n{lines}") from error
    return Converted(table.system, task, made, text, rows)


def _without_secrets(value: Any) -> Any:
    """Return a tree without the passwords and tokens of the URLs in it."""
    if isinstance(value, Mapping):
        return {strip(name): _without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return strip(value) if isinstance(value, str) else value


def _walk(tree: Mapping[str, Any], known: set[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key and its value; a mapping is a value where a line is for it, and else leads to more keys."""
    for name, value in tree.items():
        key = above + name
        if isinstance(value, dict) and value and key not in known and "." not in name:
            yield from _walk(value, known, key + ".")
        else:
            yield key, value


def _apply(line: Line, given: Given, flat: Keys, sources: dict[str, list[Row]]) -> Iterator[Row]:
    value = given(line.old, _NOTHING)
    if value is _NOTHING:
        return
    name = given.names.get(line.old, line.old)
    shown = show(value) if line.old in given else "" if value == "in the code" else f"{show(value)} (default)"
    keys: Keys = {}
    try:
        if isinstance(value, dict | list) and not line.many:
            raise NotHonoured("expected one value, not several")
        found = line.make(value, given)
        if found is None:
            return
        keys, why = found
        status = DROPPED if not keys else CHANGED if why else MAPPED
    except NotHonoured as error:
        status, why = UNKNOWN, str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        status, why = UNKNOWN, f"this is not a value of {name}"
    if clash := [key for key, made in keys.items() if flat.get(key, made) != made]:
        keys, status, why = {}, UNKNOWN, f"{', '.join(clash)} is said otherwise by another key"
    row = Row(name, shown, status, ", ".join(f"{key} = {show(made)}" for key, made in keys.items()), why)
    for key, made in keys.items():
        flat[key] = made
        sources.setdefault(key, []).append(row)
    yield row


class _Node(dict[str, Any]):
    """A mapping that dotted keys make, other than one that is a value."""


def _unflatten(flat: Keys) -> dict[str, Any]:
    """Make `a.0.b` keys a tree; what has numbers for keys becomes a list."""
    tree = _Node()
    for key, value in flat.items():
        *above, last = key.split(".")
        place = tree
        for name in above:
            place = place.setdefault(name, _Node())
        place[last] = value

    def settle(node: Any) -> Any:
        if not isinstance(node, _Node):
            return node
        if all(name.isdecimal() for name in node):
            return [settle(node[name]) for name in sorted(node, key=int)]
        first = ["kind"] if "kind" in node else []
        return {name: settle(node[name]) for name in [*first, *(name for name in node if name != "kind")]}

    settled: dict[str, Any] = settle(tree)
    return settled


# ------------------------------------------------------------ the recipe as text


def _write(tree: dict[str, Any], sources: dict[str, list[Row]], rows: list[Row], origin: str) -> str:
    """Write the recipe as YAML; comments say where each key comes from, and at the end what is not in it."""
    lines = [f"# Written by `vitrail convert`: {origin}.", "# Names after # are the keys there.", ""]
    for section, value in tree.items():
        lines += _entry(section, value, section, "", sources)
    for status, title in ((DROPPED, "Not needed, or not to be had, here:"), (UNKNOWN, "Not understood:")):
        left = [row for row in rows if row.status == status]
        lines += ["", f"# {title}"] * bool(left)
        for row in left:
            lines += _comment(f"{_word(row.old)}{f' = {row.value}' if row.value else ''}: {row.why}", "#   ")
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any, key: str, indent: str, sources: dict[str, list[Row]]) -> list[str]:
    if isinstance(value, dict) and value and key not in sources:
        inner = [_entry(n, v, f"{key}.{n}", indent + "  ", sources) for n, v in value.items()]
        return [f"{indent}{name}:", *(line for lines in inner for line in lines)]
    if isinstance(value, list) and value and isinstance(value[0], dict) and key not in sources:
        lines = [f"{indent}{name}:"]
        for number, item in enumerate(value):
            inner = [_entry(n, v, f"{key}.{number}.{n}", indent + "    ", sources) for n, v in item.items()]
            flat = [line for part in inner for line in part]
            first = next(i for i, line in enumerate(flat) if not line.lstrip().startswith("#"))
            flat[first] = f"{indent}  - {flat[first].lstrip()}"
            lines += flat
        return lines
    text = dump({name: value}).rstrip("\n")
    written = text.removeprefix("{").removesuffix("}" * text.startswith("{")).split("\n")  # a lone key comes in braces
    found = sources.get(key, [])
    above = []
    for row in found:
        if row.why and row.new.startswith(f"{key} = "):  # once, at the first of its keys
            above += _comment(f"{_word(row.old)}: {row.why}", f"{indent}# ")
    after = ", ".join(_word(row.old) for row in found if not row.why)
    if after and len(written) > 1:
        above += _comment(after, f"{indent}# ")
    elif after:
        written[0] += f"  # {after}"
    return [*above, *(indent + line for line in written)]


def _comment(text: str, prefix: str) -> list[str]:
    words = " ".join(printable(text).split())  # on one line, whatever Unicode calls a break
    return textwrap.wrap(words, WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False)


def _word(name: str) -> str:
    """Write a name of a file for a comment, on one line."""
    return name if re.fullmatch(r"[\w .,()/#:=+~-]+", name) else show(name)
