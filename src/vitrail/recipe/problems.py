"""Sentences for what is wrong with a recipe: the key, what was expected, the value given, and the nearest spelling.

Numbers that no machine could serve are refused by arithmetic, before anything is made that large.

- `absurd` knows limits of any machine that there may be: a plan for one that is not there yet stays possible
- `beyond` compares the least that a recipe needs with the memory at hand; what might just fit is tried

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrail.recipe.kinds import nearest
from vitrail.recipe.normalize import Given
from vitrail.recipe.yaml import Key, dotted, leaves, show

if TYPE_CHECKING:
    from pydantic import ValidationError

    from vitrail.recipe.schema import Recipe


LARGEST = 10**15  # of any whole number but a seed: what is counted with it still fits into 64 bits
VOXELS = 10**15  # of a sample
PARAMETERS = 10**17  # of a model
DEPTH = 2000  # blocks: each is a Python object that is built, and walked through in every step
LEAST = 64  # bytes of a sample beside its values: its counter, its place and its name for errors
GIB = 2**30


def absurd(recipe: Recipe) -> list[str]:
    """Return a sentence for each number that is too large for any machine."""
    problems = [
        f"{dotted(key)}: {_short(number)} is too large; expected at most {_short(LARGEST)}"
        for key, number in leaves(recipe.to_tree())
        if isinstance(number, int) and abs(number) > LARGEST and key != ("run", "seed")
    ]
    if problems:
        return problems
    voxels = voxels_of(recipe)
    if voxels > VOXELS:
        problems.append(
            f"data.crop: a sample of {_short(voxels)} voxels is too large; expected at most {_short(VOXELS)}"
        )
    for key, c in stacks(recipe.model):
        if c.depth > DEPTH:
            problems.append(f"{key}.depth: {c.depth} blocks are too many; expected at most {DEPTH}")
        elif least_parameters(c) > PARAMETERS:
            problems.append(
                f"{key}.width: {c.width} with depth {c.depth} makes {_short(least_parameters(c))} parameters; "
                f"expected at most {_short(PARAMETERS)}"
            )
    return problems


def beyond(recipe: Recipe, *, share: int, parts: int, ranks: int, host: int, device: int) -> str | None:
    """Say why a rank cannot have the memory for a recipe: `share` are its samples of a step, the last two bytes.

    `parts` are the ranks that share each sample, of which a rank may read its part alone. `host` is what all ranks of
    this host have together, `device` what this one computes in.
    """
    sample = max(LEAST, voxels_of(recipe) // parts)
    if sample > host:
        return f"data.crop: a sample of {_short(sample)} bytes at least is larger than {_memory(host)}; make it smaller"
    if share * sample > host:
        return (
            f"data.batch: {_short(share)} samples of {_short(sample)} bytes at least on each rank are larger than "
            f"{_memory(host)}; make it smaller, or accumulate gradients over more steps"
        )
    if recipe.data.prefetch > 2 and recipe.data.prefetch * share * sample > host:
        return (
            f"data.prefetch: {recipe.data.prefetch} batches of {_short(share * sample)} bytes at least are larger than "
            f"{_memory(host)}; make it smaller"
        )
    for key, c in stacks(recipe.model):
        if sentence := too_many(least_parameters(c), ranks, device):
            return f"{key}: width {c.width} and depth {c.depth} make {sentence}"
    return None


def too_many(parameters: int, ranks: int, memory: int) -> str | None:
    """Say what is wrong with so many parameters, if their weights alone are beyond the memory of all ranks."""
    if 4 * parameters <= ranks * memory:
        return None
    return (
        f"{_short(parameters)} parameters or more, {_short(4 * parameters // ranks)} bytes on each of {ranks} ranks, "
        f"and there are {_memory(memory)}; make the model smaller, or start more ranks"
    )


def voxels_of(recipe: Recipe) -> int:
    crop = recipe.data.crop
    return crop ** getattr(recipe.model, "ndim", 1) if isinstance(crop, int) else math.prod(crop)


def stacks(config: Any, key: str = "model") -> Iterator[tuple[str, Any]]:
    """Yield the configs of this package with a width and a depth: blocks of attention and an MLP."""
    if not dataclasses.is_dataclass(config):
        return
    ours = type(config).__module__.startswith("vitrail.")
    if ours and all(isinstance(getattr(config, name, None), int) for name in ("width", "depth")):
        yield key, config
    for field in dataclasses.fields(config):
        yield from stacks(getattr(config, field.name), f"{key}.{field.name}")


def least_parameters(stack: Any) -> int:
    """Count those of attention and the MLP; what is shared or narrow may make it less."""
    return 2 * stack.depth * stack.width**2


def _short(number: int) -> str:
    """Write a large number with few digits."""
    if number > 10**100:
        return "more than 1e100"
    digits = str(number)
    return digits if len(digits) <= 7 else f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}".replace(".00e", "e")


def _memory(size: int) -> str:
    return f"the {size / GIB:.1f} GiB of memory here"


# What a type of error says was expected. {} is filled from the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "expected": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "float_parsing": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} characters",
    "string_type": "text",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} items",
    "tuple_type": "a list",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of sections, of configs


class Problem(NamedTuple):
    """One problem: where, in words, and whether it goes away with a value that is not the recipe's own."""

    key: Key
    sentence: str
    removable: bool  # null where null is no value; or another value, at a key that is not known there


class _Fault(NamedTuple):
    key: Key
    type: str
    context: dict[str, Any]
    message: str


def explain(error: ValidationError, tree: Any, schema: dict[str, Any]) -> list[Problem]:
    """Return a sentence for each key that pydantic refused, in the order of the tree."""
    faults = [
        _Fault(_clean(item["loc"], item["type"], tree, schema), item["type"], item.get("ctx", {}), item["msg"])
        for item in error.errors(include_url=False, include_input=False)
    ]
    # A union reports each of its branches, and a list with a wrong item may count itself too short. What is said of the
    # inside of a value tells more than what is said of its whole.
    deep = {fault.key[:end] for fault in faults for end in range(len(fault.key))}
    grouped: dict[Key, list[_Fault]] = {}
    for fault in faults:
        if fault.key not in deep:
            grouped.setdefault(fault.key, []).append(fault)
    problems = []
    for key, group in grouped.items():
        unknown = any(fault.type in _UNKNOWN for fault in group)
        is_null = at(tree, key, missing=...) is None
        problems.append(Problem(key, _sentence(key, group, tree, schema), removable=is_null != unknown))
    return problems


def _clean(location: tuple[str | int, ...], kind: str, tree: Any, schema: dict[str, Any]) -> Key:
    """Return the key in the tree: pydantic also names the branches of unions, which are not keys."""
    key: Key = ()
    value = tree
    branch_named = False
    for position, name in enumerate(location):
        last = position == len(location) - 1
        # A branch may be called like a key inside it: mask {kind: block, block: 2}.
        if not branch_named and isinstance(value, dict) and value.get("kind") == name and _is_tagged(schema, key, tree):
            branch_named = True
            continue
        inside = isinstance(value, list) and isinstance(name, int) and name < len(value)
        if inside or (isinstance(value, dict) and name in value):
            value = value[name]
        elif not (last and kind == "missing"):
            continue
        key, branch_named = (*key, name), False
    return key


def at(tree: Any, key: Key, missing: Any = None) -> Any:
    """Return what stands at a key of a tree."""
    for name in key:
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return missing
    return tree


def _sentence(key: Key, group: list[_Fault], tree: Any, schema: dict[str, Any]) -> str:
    where = dotted(key)
    value = at(tree, key)
    # Where a kind is wrong, it is a kind that was meant, not one of the words beside it.
    group = [fault for fault in group if fault.type == "union_tag_invalid"] or group
    first = group[0]
    if any(fault.type in _UNKNOWN for fault in group):
        return unknown(key, tree, schema)
    if first.type == "missing":
        return f"{where}: missing; this key is required"
    if first.type == "union_tag_not_found":
        names = [name for place in places_at(schema, key, tree) for name in _kinds_of(place)]
        return f"{where}.kind: missing; expected one of {', '.join(names)}"
    for fault in group:
        if fault.type in ("value_error", "assertion_error"):
            words = str(fault.context.get("error", fault.message)).strip().rstrip(".")
            return words if words.startswith(where + ":") else f"{where}: {words}"
    expected = list(dict.fromkeys(_expected(fault) for fault in group))
    if all(fault.type not in _EXPECTED and fault.type != "union_tag_invalid" for fault in group):
        return f"{where}: {first.message}, got {show(value)}"
    if first.type == "union_tag_invalid":
        where, value = f"{where}.kind", first.context.get("tag")
    return f"{where}: expected {' or '.join(expected)}, got {show(value)}{_hint(group, value)}"


def _expected(fault: _Fault) -> str:
    if fault.type == "union_tag_invalid":
        return " or ".join(str(fault.context["expected_tags"]).rsplit(", ", 1))
    context = {name: f"{item:g}" if isinstance(item, float) else item for name, item in fault.context.items()}
    words = _EXPECTED.get(fault.type, fault.message).format(**context) if fault.type in _EXPECTED else fault.message
    if fault.type == "literal_error":
        words = re.sub(r"\bTrue\b", "true", re.sub(r"\bFalse\b", "false", words))
    return words.replace("at least 1 items", "at least one item")


def _hint(group: list[_Fault], value: Any) -> str:
    """Return the nearest choice for a misspelt word, or how to write a number as text."""
    if isinstance(value, str):
        listed = " ".join(
            str(fault.context.get("expected", fault.context.get("expected_tags")))
            for fault in group
            if fault.type in ("literal_error", "union_tag_invalid")
        )
        choices = re.findall(r"'([^']*)'", listed)
        if near := nearest(value, choices):
            return f"; did you mean {near!r}?"
        numeric = any(fault.type in ("int_type", "float_type", "expected") for fault in group)
        return "; write it without quotes" if numeric and re.fullmatch(r"-?[0-9.]+", value) else ""
    if isinstance(value, int | float) and any(fault.type == "string_type" for fault in group):
        return "; put it in quotes"
    return ""


def keys_at(schema: dict[str, Any], key: Key, tree: Any) -> list[str]:
    """List the keys that the JSON Schema of a recipe knows in the mapping at `key` of this tree."""
    return list(dict.fromkeys(name for place in places_at(schema, key, tree) for name in place.get("properties", {})))


def unknown(key: Key, tree: Any, schema: dict[str, Any]) -> str:
    """Say that a key is not known, what it may have meant, and which keys there are."""
    keys = keys_at(schema, key[:-1], tree)
    near = nearest(str(key[-1]), keys)
    meant = elsewhere(str(key[-1]), tree, schema) or ([] if near is None else [near])
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
    return f"{dotted(key)}: unknown key{hint}" + (f" (keys here: {', '.join(keys)})" if keys else "")


def elsewhere(name: str, tree: Any, schema: dict[str, Any], deep: int = 3) -> list[str]:
    """List the dotted keys of that name in the mappings of a recipe, those that are the least deep."""
    keys: list[Key] = [()]
    for _ in range(deep):
        keys = [(*key, inner) for key in keys for inner in keys_at(schema, key, tree)]
        if found := [dotted(key) for key in keys if key[-1] == name]:
            return found[:3]
    return []


def places_at(schema: dict[str, Any], key: Key, tree: Any) -> list[dict[str, Any]]:
    """List the parts of the schema that may describe the value at `key`, each with its own keys."""
    return [place for part in _parts(schema, key, tree) for place in _branches(part, schema, at(tree, key))]


def _parts(schema: dict[str, Any], key: Key, tree: Any) -> list[dict[str, Any]]:
    """List the parts of the schema at `key`, references and unions still whole."""
    parts = [schema]
    for name in key:
        parts = [inner for part in parts for place in _branches(part, schema, tree) for inner in _inside(place, name)]
        tree = at(tree, (name,))
    return parts


def _is_tagged(schema: dict[str, Any], key: Key, tree: Any) -> bool:
    """Return whether a union that is told apart by its kind stands at `key`."""
    parts = _parts(schema, key, tree)
    return any("discriminator" in inner for part in parts for inner in (part, *part.get("anyOf", [])))


def _inside(place: dict[str, Any], name: str | int) -> Iterator[dict[str, Any]]:
    if isinstance(name, int):
        items = place.get("items")
        yield from [items] if isinstance(items, dict) else []
    elif name in place.get("properties", {}):
        yield place["properties"][name]
    elif isinstance(place.get("additionalProperties"), dict):
        yield place["additionalProperties"]


def _branches(part: dict[str, Any], schema: dict[str, Any], tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a part may stand for; a tree that names its kind chooses among them."""
    if "$ref" in part:
        yield from _branches(schema["$defs"][part["$ref"].rpartition("/")[2]], schema, tree)
        return
    choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in part.get(word, [])]
    if choices:
        for choice in choices:
            yield from _branches(choice, schema, tree)
        return
    allowed = _kinds_of(part)
    if not (allowed and isinstance(tree, dict) and "kind" in tree and tree["kind"] not in allowed):
        yield part


def _kinds_of(place: dict[str, Any]) -> list[str]:
    named = place.get("properties", {}).get("kind", {})
    return named.get("enum") or ([named["const"]] if "const" in named else [])


def check_across(recipe: Recipe) -> list[str]:
    """Refuse keys that are right alone but not together, and what is too large for any machine."""
    problems = absurd(recipe)
    parallel, normalize = recipe.parallel, recipe.data.normalize
    strategy = parallel.strategy or "FULL_SHARD"
    if parallel.group is not None and strategy != "HYBRID_SHARD":
        problems.append(
            f"parallel.group: it is only for strategy HYBRID_SHARD, got {parallel.group} with {strategy}; "
            "change the strategy or remove the group"
        )
    if isinstance(normalize, Given) and len(normalize.mean) != len(normalize.std):
        problems.append(
            "data.normalize: expected as many values in mean as in std, "
            f"got {len(normalize.mean)} and {len(normalize.std)}"
        )
    named = [] if recipe.log.to == "auto" else [logger.kind for logger in recipe.log.to]
    if twice := {kind for kind in named if named.count(kind) > 1}:
        problems.append(f"log.to: {', '.join(sorted(twice))} is there twice; name each logger once")
    crop, block = recipe.data.crop, recipe.data.block
    if not isinstance(crop, int) and not isinstance(block, int | None) and len(crop) != len(block):
        problems.append(f"data.block: expected one number per axis of data.crop, {len(crop)}, got {len(block)}")
    return problems
