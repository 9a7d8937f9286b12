"""A strict reader and writer of YAML, with the numbers and booleans of YAML 1.2.

PyYAML parses; what a plain word means is decided here by the core schema of YAML 1.2: `1e-4` is a number, `010` is 10,
`0o10` is 8, `12:30:00`, `2024-01-01`, `NO` and `off` are text, and only true and false are booleans. A key given twice,
a tag, a second document, an alias bomb or a file that is not UTF-8 is an error that names the file and the line.

Plain trees (mappings, lists, text, numbers, booleans, null): copied, merged, changed by `key.sub=value`.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vitrail.errors import UserError
from vitrail.foreign import open_plain

Key = tuple[str | int, ...]

# The kind that a slot has when the recipe names none.
DEFAULT_KINDS = {"objective": "reconstruct", "optimizer": "adamw", "schedule": "cosine"}


def dotted(key: Key) -> str:
    return ".".join(map(str, key)) or "the recipe"


def show(value: Any) -> str:
    """Write a value for a sentence: short, and spelt as in a recipe."""
    if isinstance(value, str):
        text = repr(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(value: Any, key: Key = ()) -> Any:
    """Copy a value with nothing but plain values in it; tuples become lists and paths text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # numpy's numbers are of these two kinds too
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{dotted(key)}: the text {value!a} is not valid Unicode; correct it") from error
        return str(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise UserError(f"{dotted(key)}: expected text as keys, got {name!r}")
        return {plain(name): plain(item, (*key, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, (*key, index)) for index, item in enumerate(value)]
    raise UserError(
        f"{dotted(key)}: expected a mapping, list, text, number, boolean or null, got {type(value).__name__}"
    )


def leaves(tree: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield what is no mapping and no list, or an empty one, with its key."""
    if not tree or not isinstance(tree, dict | list):
        yield key, tree
        return
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from leaves(value, (*key, name))


def non_finite(tree: Any) -> list[str]:
    """Return a sentence for every number that is infinite or not a number."""
    found = ((key, value) for key, value in leaves(tree) if isinstance(value, float) and not math.isfinite(value))
    return [f"{dotted(key)}: expected a finite number, got {value}" for key, value in found]


def merge(parent: Any, child: Any, cleared: set[Key], key: Key = ()) -> Any:
    """Put `child` over `parent`: mappings merge key by key, all else replaces.

    A child that names another `kind` of model, objective, source, optimizer, schedule, sampler or logger starts that
    mapping afresh. The kinds further in (of a mask or a decoder, say) share most keys: theirs stay where the new kind
    knows them. Those are added to `cleared`, and so are the keys that the child sets to null: they go back to their
    default where null is no value of theirs.
    """
    cleared.discard(key) if child is not None else cleared.add(key)
    if not isinstance(child, dict):
        return child
    base = parent if isinstance(parent, dict) else {}
    if key == ("data", "normalize"):
        base, child = name_kind(base), name_kind(child)
    default = DEFAULT_KINDS.get(str(key[0])) if len(key) == 1 else None
    if "kind" in child and base.get("kind", default) not in (None, child["kind"]):
        afresh = len(key) == 1 or key[:1] in (("data",), ("log",)) or key[-1:] == ("sampler",)
        base = {} if afresh else {name: value for name, value in base.items() if value is not None}
        cleared |= {(*key, name) for name in base}
    merged = dict(base)
    for name, value in child.items():
        merged[name] = merge(base.get(name), value, cleared, (*key, name))
    return merged


def name_kind(normalize: dict[str, Any]) -> dict[str, Any]:
    """Return `data.normalize` with the kind that its short spellings leave out."""
    said = {name: value for name, value in normalize.items() if value not in (None, [], ())}
    kind = {"mean": "given", "std": "given", "percentiles": "percentiles"}.get(next(iter(said), ""))
    return normalize if kind is None or "kind" in normalize else {"kind": kind, **said}


def split_override(text: str) -> tuple[Key, str]:
    """Split `data.train.0.path=x` into (("data", "train", 0, "path"), "x")."""
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals:
        raise UserError(f"override {text!r}: expected key=value, such as run.steps=100")
    if not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise UserError(f"override {text!r}: expected a dotted key before the =, such as run.steps=100")
    if not value.strip():
        raise UserError(f"override {text!r}: expected a value after the =; write {name.strip()}=null to clear the key")
    return tuple(int(part) if part.isdecimal() and part.isascii() else part for part in parts), value


def set_key(tree: Any, key: Key, value: Any, cleared: set[Key], at: Key = ()) -> Any:
    """Return `tree` with `value` merged in at `key`; missing mappings on the way are made."""
    if not key:
        return merge(tree, value, cleared, at)
    name, rest = key[0], key[1:]
    whole = dotted((*at, *key))
    if isinstance(tree, list):
        if not isinstance(name, int) or name >= len(tree):
            held = f"{len(tree)} item{'' if len(tree) == 1 else 's'}"
            raise UserError(
                f"override {whole}: {dotted(at)} is a list of {held}, counted from 0, so {name!r} is not in it"
            )
        changed = set_key(tree[name], rest, value, cleared, (*at, name))
        return [*tree[:name], changed, *tree[name + 1 :]]
    if isinstance(tree, dict) or tree is None:
        made = dict(tree or {})
        name = str(name)
        changed = set_key(made.get(name), rest, value, cleared, (*at, name))
        # A new kind must drop the old one's keys, as a child recipe's would.
        return merge(made, {name: changed}, cleared, at) if name == "kind" and not rest else {**made, name: changed}
    raise UserError(f"override {whole}: {dotted(at)} is {show(tree)}, which has no keys; set {dotted(at)} itself")


MAX_BYTES = 1 << 20
MAX_VALUES = 100_000  # counted after aliases are written out, so that an alias bomb is refused before it grows
MAX_DEPTH = 64
MAX_DIGITS = 100

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_NOT_TEXT = (_NULL, _BOOL, _INT, _OCTAL, _HEX, _FLOAT, _INFINITY, _NAN)


def read(path: str | Path) -> Any:
    """Read the tree in a YAML file."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError
        with open_plain(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise UserError(f"{path}: expected a YAML file, but it is a folder") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(path)!r}: the file cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    return parse(content, str(path))


def parse(text: str | bytes, name: str = "recipe") -> Any:
    """Read the tree in a YAML text; `name` stands for the file in errors."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if len(content) > MAX_BYTES:
        raise UserError(f"{name}: the file is larger than {MAX_BYTES // 1024} KiB, more than a recipe can need")
    try:
        decoded = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: the file is not UTF-8 text; save it as UTF-8") from error
    try:
        return _Reader(decoded, name).read()
    except yaml.reader.ReaderError as error:
        line = decoded.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise UserError(f"{name}:{line}: the character U+{code:04X} is not allowed in YAML; remove it") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = " ".join((error.problem or "it cannot be read").split())
        if "'\\t'" in problem:
            problem = "a tab cannot indent; use spaces"
        raise UserError(f"{name}:{line}: not valid YAML: {problem}") from error


class _Reader:
    """A builder of trees from the parser's events, which sees tags, repeated keys and aliases."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.anchors: dict[str, tuple[Any, int] | None] = {}  # name -> the value and its count; None while being read
        self.count = 0

    def read(self) -> Any:
        next(self.events)  # the stream starts
        start = next(self.events)
        if isinstance(start, yaml.StreamEndEvent):
            return None
        if isinstance(start, yaml.DocumentStartEvent) and (start.tags or start.version not in (None, (1, 2))):
            self.refuse(start, "only YAML 1.2 without %TAG lines is read; remove the % lines")
        value = self.value(next(self.events), 0)
        next(self.events)  # the document ends
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            self.refuse(after, "a second document starts here (---); a file holds one")
        return value

    def value(self, event: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.refuse(event, f"values are nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        if event.tag is not None:
            self.refuse(event, f"tags are not allowed, but {_tag(event.tag)} is given; remove it")
        self.grow(event, 1)
        before = self.count
        if event.anchor:
            self.anchors[event.anchor] = None
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                value.append(self.value(item, depth + 1))
        else:
            value = self.mapping(depth)
        if event.anchor:
            self.anchors[event.anchor] = (value, self.count - before + 1)
        return value

    def mapping(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.key(event, depth)
            if key in lines:
                self.refuse(event, f"key {key!r} is given twice, first on line {lines[key]}; keep one")
            lines[key] = event.start_mark.line + 1
            value[key] = self.value(next(self.events), depth + 1)
        return value

    def key(self, event: Any, depth: int) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self.refuse(event, "a key must be a word, not a list, a mapping or an alias")
        key = self.value(event, depth + 1)
        if type(key) is int:  # a table such as {255: 1} maps numbers, and keys are text everywhere
            return str(key)
        if not isinstance(key, str):
            self.refuse(event, f"key {event.value!r} is not text; put it in quotes")
        if key == "<<" and event.style is None:
            self.refuse(event, "merge keys (<<) are not part of YAML 1.2; write the keys out or use extends")
        return key

    def alias(self, event: Any) -> Any:
        if event.anchor not in self.anchors:
            self.refuse(event, f"alias *{event.anchor} has no anchor &{event.anchor} before it")
        target = self.anchors[event.anchor]
        if target is None:
            self.refuse(event, f"alias *{event.anchor} stands inside the value that it names")
        value, size = target
        self.grow(event, size)
        return copy.deepcopy(value)

    def scalar(self, event: Any) -> Any:
        try:
            event.value.encode()
        except UnicodeEncodeError:
            self.refuse(event, "the text holds half of a surrogate pair; write the whole character")
        if event.style is not None:
            return event.value
        try:
            return resolve(event.value)
        except UserError as error:
            self.refuse(event, str(error).rstrip("."))

    def grow(self, event: Any, size: int) -> None:
        self.count += size
        if self.count > MAX_VALUES:
            self.refuse(event, f"the file holds more than {MAX_VALUES} values once its aliases are written out")

    def refuse(self, event: Any, problem: str) -> NoReturn:
        raise UserError(f"{self.name}:{event.start_mark.line + 1}: {problem}")


def resolve(word: str) -> Any:
    """Return what a plain (unquoted) word means in the core schema of YAML 1.2."""
    if _NULL.fullmatch(word):
        return None
    if _BOOL.fullmatch(word):
        return word[0] in "tT"
    if _NAN.fullmatch(word):
        return math.nan
    if _INFINITY.fullmatch(word):
        return -math.inf if word[0] == "-" else math.inf
    base = 10 if _INT.fullmatch(word) else 8 if _OCTAL.fullmatch(word) else 16 if _HEX.fullmatch(word) else None
    if base is None and not _FLOAT.fullmatch(word):
        return word
    if len(word) > MAX_DIGITS:
        raise UserError(f"the number {word[:20]}... has more than {MAX_DIGITS} digits")
    if base is not None:
        return int(word, base) if base == 10 else int(word[2:], base)
    number = float(word)
    if math.isinf(number):
        raise UserError(f"the number {word} is too large")
    return number


def _tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


class _Writer(yaml.SafeDumper):
    """A writer that quotes every text that YAML 1.2 or 1.1 would take for something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _pattern in _NOT_TEXT:
    # The tag only has to differ from that of text: then the text is quoted. Added after PyYAML's own, it leaves numbers
    # as they are.
    _Writer.add_implicit_resolver("not-text", re.compile(f"(?:{_pattern.pattern})\\Z"), None)


def _write_text(writer: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML loses some line breaks (U+0085, for one) between single quotes; between double quotes they are escaped.
    style = '"' if re.search("[\n\r\x85\u2028\u2029]", text) else None
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _write_text)


def dump(tree: Any) -> str:
    """Write the tree as YAML that `parse` reads back to an equal tree; keys keep their order."""
    return yaml.dump(
        plain(tree), Dumper=_Writer, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
    )
