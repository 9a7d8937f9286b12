"""Plain trees (mappings, lists, text, numbers, booleans, null): copied, merged, changed by `key.sub=value`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from vitrail.errors import UserError

Key = tuple[str | int, ...]

# The kind that a slot has when the recipe names none.
DEFAULT_KINDS = {"objective": "reconstruct", "optimizer": "adamw", "schedule": "cosine"}


def dotted(key: Key) -> str:
    return ".".join(map(str, key)) or "the recipe"


def show(value: Any) -> str:
    """A value for a sentence: short, and spelt as in a recipe."""
    if isinstance(value, str):
        text = repr(value)
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(value: Any, key: Key = ()) -> Any:
    """A deep copy with nothing but plain values in it; tuples become lists and paths text."""
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


def non_finite(value: Any, key: Key = ()) -> list[str]:
    """A sentence for every number that is infinite or not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{dotted(key)}: expected a finite number, got {value}"]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [sentence for name, item in items for sentence in non_finite(item, (*key, name))]


def merge(parent: Any, child: Any, cleared: set[Key], key: Key = ()) -> Any:
    """`child` over `parent`: mappings merge key by key, all else replaces.

    A child that names another `kind` of model, objective, source, optimizer, schedule or logger starts that mapping
    afresh; the kinds further in (of a mask or a decoder, say) share most keys, so theirs stay and unknown ones are
    named. The keys that the child sets to null are added to `cleared`: they go back to their default where null is no
    value of theirs.
    """
    if child is None:
        cleared.add(key)
    if not isinstance(child, dict):
        return child
    base = parent if isinstance(parent, dict) else {}
    if "kind" in child and base and (len(key) == 1 or key[:1] in (("data",), ("log",))):
        default = DEFAULT_KINDS.get(str(key[0])) if len(key) == 1 else None
        if base.get("kind", default) not in (None, child["kind"]):
            base = {}
    merged = dict(base)
    for name, value in child.items():
        merged[name] = merge(base.get(name), value, cleared, (*key, name))
    return merged


def split_override(text: str) -> tuple[Key, str]:
    """`data.train.0.path=x` -> (("data", "train", 0, "path"), "x")."""
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
    """`tree` with `value` merged in at `key`; missing mappings on the way are made."""
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
