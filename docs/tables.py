"""The tables of docs/recipe.md, and the keys that are known without PyTorch (`KEYS`), written from the code:
`python docs/tables.py`.

A table stands between `<!-- keys of CLASS -->` and `<!-- end -->`: `keys of ONE, TWO` for kinds with one table, and
`keys of CLASS beside BASE` for the keys alone that BASE lacks or has with another default. Keys, types and defaults are
the code's. The order and the last column are written by hand; a new key comes last, with its comment in the code.
"""

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitrail.data.grid import GridConfig
from vitrail.data.source import ItemsConfig
from vitrail.data.sources.image_folder import ImagesConfig
from vitrail.layers import scores
from vitrail.recipe import early, json_schema, kinds, normalize, sections
from vitrail.recipe.schema import Recipe

PAGE = Path(__file__).with_name("recipe.md")
KEYS = Path(__file__).parents[1] / "src/vitrail/recipe" / early.FILE
MARKED = re.compile(r"(<!-- keys of ([\w, ]+?)(?: beside (\w+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
}


@cache
def definitions() -> dict[str, Any]:
    """The JSON Schema of every section and kind by the name of its class, bases of sources included."""
    bases = {cls.__name__: TypeAdapter(cls).json_schema() for cls in (GridConfig, ItemsConfig, ImagesConfig)}
    return json_schema()["$defs"] | bases


def write(page: str) -> str:
    """Return a page with its tables as the code has them."""
    places = places_of(page)

    def table(found: re.Match[str]) -> str:
        start, names, base, old, end = found.groups()
        told = dict(re.findall(r"^\| `(\w+)` \|.*\| ?([^|\n]*?) ?\|$", old, re.MULTILINE))
        found_keys = keys(names.split(", "), base)
        order = [*(key for key in told if key in found_keys), *(key for key in found_keys if key not in told)]
        rows = (row(places, told.get(key), key, found_keys[key]) for key in order)
        return f"{start}{HEAD}{''.join(rows)}{end}"

    return MARKED.sub(table, page)


def places_of(page: str) -> dict[str, str]:
    """The classes that a page shows, and the heading that each stands below."""
    parts = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: heading for heading, text in parts for mark in MARKED.finditer(text) for name in mark[2].split(", ")}


def keys(names: list[str], base: str | None) -> dict[str, list[str]]:
    """The keys of a table, and the classes that have each."""
    known = definitions()[base]["properties"] if base else {}
    found: dict[str, list[str]] = {}
    for name in names:
        for key, field in definitions()[name]["properties"].items():
            if key not in known or known[key].get("default", "-") != field.get("default", "-"):
                found.setdefault(key, []).append(name)
    return found


def row(places: dict[str, str], told: str | None, key: str, owners: list[str]) -> str:
    fields = [definitions()[name]["properties"][key] for name in owners]
    required = key in definitions()[owners[0]].get("required", ()) and "default" not in fields[0]
    shown = "*required*" if required else f"`{default_of(fields[0])}`"
    meaning = comment(owners[0], key, fields[0]) if told is None else told
    kind = ", ".join(dict.fromkeys(type_of(field, places) for field in fields))
    return f"| `{key}` | {kind} | {shown} | {meaning} |\n".replace("|  |", "| |")


def default_of(field: dict[str, Any]) -> str:
    value = field.get("default", {})
    if field.get("type") == "string" and isinstance(value, int):  # a clock
        return f"{value}s"
    if isinstance(value, str) or not (isinstance(value, list) or value):
        return value if isinstance(value, str) else json.dumps(value)
    return "{}" if isinstance(value, dict) else re.sub(r"e-0?", "e-", json.dumps(value))


def type_of(field: dict[str, Any], places: dict[str, str]) -> str:
    """Say in words what a key takes."""
    return " or ".join(dict.fromkeys(filter(None, phrases(field, places))))


def phrases(part: dict[str, Any], places: dict[str, str]) -> list[str]:
    if "$ref" in part:
        heading = places.get(part["$ref"].rpartition("/")[2])
        anchor = "" if heading is None else re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower()
        return [f"[{heading}](#{anchor})" if heading else "mapping"]
    inner = [one for word in ("anyOf", "oneOf", "allOf") for one in part.get(word, ())]
    if inner:
        return [phrase for one in inner for phrase in phrases(one, places)]
    if "enum" in part or "const" in part:
        words = part.get("enum", [part.get("const")])
        return [", ".join(f"`{word if isinstance(word, str) else json.dumps(word)}`" for word in words)]
    if part.get("type") == "array":
        each = part.get("prefixItems") or [part.get("items", {})]
        said = type_of({"anyOf": each}, places)
        many = re.sub(r"\b(list|number)\b", r"\1s", said)
        return [f"list of {many}" if said else "list"]
    return [WORDS[part["type"]]] if "type" in part else []


def comment(name: str, key: str, field: dict[str, Any]) -> str:
    """What the code says of a key: its description, or the comment at the end of its line."""
    if "description" in field:
        return field["description"]
    for cls in classes()[name].__mro__[:-1]:
        if found := re.search(rf"^    {key}: [^\n#]*(?:  # ([^\n]*))?$", inspect.getsource(cls), re.MULTILINE):
            return found[1] or ""
    return ""


@cache
def classes() -> dict[str, type]:
    both = vars(scores) | vars(normalize) | vars(sections)
    found = {name: value for name, value in both.items() if isinstance(value, type)}
    found |= {cls.__name__: cls for cls in (Recipe, GridConfig, ItemsConfig, ImagesConfig)}
    for slot, names in kinds.BUILT_IN.items():
        for cls in (kinds.find(slot, name) for name in names):
            found |= {name: value for name, value in vars(inspect.getmodule(cls)).items() if isinstance(value, type)}
            found[cls.__name__] = cls
    return found


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    KEYS.write_text(early.write_keys(json_schema()), encoding="utf-8")
