"""A strict reader and writer of YAML, with the numbers and booleans of YAML 1.2.

PyYAML parses; what a plain word means is decided here by the core schema of YAML 1.2: `1e-4` is a number, `010` is 10,
`0o10` is 8, `12:30:00`, `2024-01-01`, `NO` and `off` are text, and only true and false are booleans. A key given twice,
a tag, a second document, an alias bomb or a file that is not UTF-8 is an error that names the file and the line.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from vitrail.errors import UserError
from vitrail.foreign import open_plain
from vitrail.recipe.trees import plain

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
    """The tree in a YAML file."""
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
    """The tree in a YAML text; `name` stands for the file in errors."""
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
    """Builds the tree from the parser's events, so that tags, repeated keys and aliases are all seen."""

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
    """What a plain (unquoted) word means in the core schema of YAML 1.2."""
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
    """Quotes every text that YAML 1.2 or 1.1 would take for something else, and never writes aliases."""

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
    """The tree as YAML that `parse` reads back to an equal tree; keys keep their order, short leaves share a line."""
    return yaml.dump(
        plain(tree), Dumper=_Writer, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
    )
