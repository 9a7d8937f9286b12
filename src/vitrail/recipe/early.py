"""What is wrong with a recipe as far as it can be told without PyTorch, whose import takes seconds.

Configs of models, objectives, optimizers and codecs stand in files that need it. Which keys they have is kept in
keys.json, the JSON Schema of recipes without all that is no key; `python docs/tables.py` writes it from the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from vitrail.recipe import kinds
from vitrail.recipe.problems import at, keys_at, places_at, unknown
from vitrail.recipe.yaml import Key, dotted

HEAVY = ("model", "objective", "optimizer", "codec")  # slots whose configs need torch
FILE = "keys.json"
_KEPT = ("$ref", "const", "enum", "discriminator")


@cache
def stored_keys() -> dict[str, Any]:
    """Return the stored schema: which keys there are, which words they take, and nothing more."""
    found: dict[str, Any] = json.loads(resources.files("vitrail.recipe").joinpath(FILE).read_text(encoding="utf-8"))
    return found


def write_keys(schema: dict[str, Any]) -> str:
    """Return the text of keys.json, a class a line."""
    bare = _strip(schema)
    lines = [f"  {json.dumps(name)}: {json.dumps(bare['$defs'][name])}" for name in sorted(bare["$defs"])]
    defs = ",\n".join(lines)
    return f'{{"properties": {json.dumps(bare["properties"])},\n "$defs": {{\n{defs}\n}}}}\n'


def _strip(part: dict[str, Any]) -> dict[str, Any]:
    bare = {word: part[word] for word in _KEPT if word in part}
    if "discriminator" in bare:
        bare["discriminator"] = {}
    for word in ("properties", "$defs"):
        if word in part:
            bare[word] = {name: _strip(inner) for name, inner in part[word].items()}
    for word in ("anyOf", "oneOf", "allOf"):
        if word in part:
            bare[word] = [_strip(inner) for inner in part[word]]
    for word in ("items", "additionalProperties"):
        if isinstance(part.get(word), dict):
            bare[word] = _strip(part[word])
    return bare


def with_stored(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a recipe whose heavy slots take anything, with the stored keys there."""
    stored = stored_keys()
    properties = {slot: stored["properties"][slot] for slot in HEAVY}
    return schema | {
        "properties": schema["properties"] | properties,
        "$defs": stored["$defs"] | schema.get("$defs", {}),
    }


def unknown_keys(tree: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield each key of the heavy slots that their kinds do not have, with a sentence; kinds of others pass."""
    for slot in HEAVY:
        given = tree.get(slot)
        if isinstance(given, dict) and _is_ours(slot, given.get("kind")):
            yield from _walk((slot,), tree, schema)


def _is_ours(slot: str, kind: Any) -> bool:
    """Tell whether the stored keys are of the class that a kind stands for."""
    target = kinds.BUILT_IN[slot].get(kind) if isinstance(kind, str) else None
    return target is not None and target.startswith("vitrail.") and target.partition(":")[2] in stored_keys()["$defs"]


def _walk(key: Key, tree: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    value = at(tree, key)
    if isinstance(value, list):
        for index in range(len(value)):
            yield from _walk((*key, index), tree, schema)
    if not isinstance(value, dict):
        return
    places = [place for place in places_at(schema, key, tree) if "properties" in place]
    if not places or any("additionalProperties" in place for place in places):
        return  # any keys, or a kind that is not known here
    known = keys_at(schema, key, tree)
    for name in value:
        if name in known:
            yield from _walk((*key, name), tree, schema)
        else:
            yield (*key, name), unknown((*key, name), tree, schema)


def complete(start: str, tree: Any, deep: int = 4) -> list[str]:
    """List the changes `key.sub=value` of a recipe's tree that begin so: whole keys, and words that a key takes."""
    schema = stored_keys()
    name, equals, _ = start.partition("=")
    if equals:
        key: Key = tuple(name.split("."))
        slot = key[0] if len(key) == 2 and key[1] == "kind" and key[0] in kinds.BUILT_IN else None
        found = [f"{name}={word}" for word in (_words(key, tree, schema) if slot is None else kinds.known(str(slot)))]
    else:
        found = []
        keys: list[Key] = [()]
        for _ in range(deep):
            keys = [(*key, inner) for key in keys for inner in keys_at(schema, key, tree)]
            keys = [key for key in keys if dotted(key).startswith(name) or name.startswith(dotted(key) + ".")]
            found += [dotted(key) + "=" for key in keys if not keys_at(schema, key, tree)]
    return [one for one in dict.fromkeys(found) if one.startswith(start)]


def _words(key: Key, tree: Any, schema: dict[str, Any]) -> list[str]:
    places = places_at(schema, key, tree)
    words = [word for place in places for word in place.get("enum", [place["const"]] if "const" in place else [])]
    return [word if isinstance(word, str) else json.dumps(word) for word in words]
