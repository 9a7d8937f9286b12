"""The reference, written from the code by `python docs/tables.py`: the tables of docs/recipe.md, all of
docs/commands.md and docs/api.md, and the keys that are known without PyTorch (`KEYS`).

A table of recipe.md stands between `<!-- keys of CLASS -->` and `<!-- end -->`: `keys of ONE, TWO` for kinds with one
table, and `keys of CLASS beside BASE` for the keys alone that BASE lacks or has with another default. Keys, types and
defaults are the code's. The order and the last column are written by hand; a new key comes last, with its comment in
the code.
"""

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_origin

from pydantic import TypeAdapter

from vitrail.data.grid import GridConfig
from vitrail.data.source import ItemsConfig
from vitrail.data.sources.image_folder import ImagesConfig
from vitrail.layers import scores
from vitrail.recipe import early, json_schema, kinds, normalize, sections
from vitrail.recipe.schema import Recipe

PAGE = Path(__file__).with_name("recipe.md")
COMMANDS = PAGE.with_name("commands.md")
API = PAGE.with_name("api.md")
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


COMMANDS_HEAD = """# Command line

What `vitrail VERB --help` says of every verb, written from the code (`python docs/tables.py`). Results go to standard
output, progress and errors to standard error; [exit codes](../README.md#the-verbs) are in the README. A shell completes
verbs, options and keys of recipes [once it is told how](install.md#in-the-shell).
"""


def write_commands() -> str:
    """The page of the command line: of each verb its words, its examples, its arguments and options."""
    from typer.main import get_command

    from vitrail.cli import app

    parts = [part for name, command in verbs(get_command(app), "vitrail") for part in verb(name, command)]
    return "\n".join([COMMANDS_HEAD, *parts])


def verbs(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if inner := getattr(command, "commands", None):
        for word, one in inner.items():
            yield from verbs(one, f"{name} {word}")
    elif not command.hidden:
        yield name, command


def verb(name: str, command: Any) -> Iterator[str]:
    first, *rest = inspect.cleandoc(command.help).split("\n\n")
    context = command.context_class(command, info_name=name)
    words = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
    yield f"## {name}\n\n{prose(first)}\n\n```text\n{name} {words}\n```\n"
    for part in rest:
        example = part.startswith("\b\n")
        yield f"```text\n{part[2:]}\n```\n" if example else f"{prose(part)}\n"
    yield "| argument or option | meaning |\n|---|---|"
    for parameter in command.params:
        if record := parameter.get_help_record(context):
            shown = re.sub(r" <[^|>]*>$", "", record[0])  # a type: what an argument is, its name says
            yield f"| `{cell(shown)}` | {cell(prose(record[1]))} |"
    yield ""


def prose(text: str) -> str:
    """Text of the code in one line, where nothing but what stands between backticks means anything to Markdown."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else part.replace("*", r"\*").replace("<", "&lt;") for part in parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


API_HEAD = """# Python API

What can be called from Python, written from the code (`python docs/tables.py`). `import vitrail` is cheap: PyTorch
comes in with the first call. A function that is called like a verb does the same, and its options mean what
[the command line](commands.md) says of them. What is wrong and can be mended is a `vitrail.errors.UserError` with one
sentence.
"""
MODELS_HEAD = """## vitrail.models

Plain modules, made of their configs: `ViTConfig(size="S/16", ...).build()`, with the keys of [recipes](recipe.md).
Examples: [models.md](models.md).

| model | how it is called |
|---|---|"""
CONTRACTS_HEAD = """
## What plugins fill in

The members of each contract; [plugins.md](plugins.md) has a whole example of each.
"""
MADE = ("vitrail.models.model", "Model", ("predict", "embed", "inputs"))  # what vitrail.load() gives
MEASURED = (("vitrail.cost.plan", "plan"), ("vitrail.bench", "bench"))
CONTRACTS = (  # what plugins subclass or fill in
    ("vitrail.data.source", "Source"),
    ("vitrail.models.model", "Model"),
    ("vitrail.objectives.objective", "Objective"),
    ("vitrail.training.optimizers.optimizer", "Update"),
    ("vitrail.codecs", "Codec"),
)


def write_api() -> str:
    """The page of the public names: signatures and what their docstrings say."""
    import vitrail
    import vitrail.data
    import vitrail.models
    import vitrail.recipe

    parts = [API_HEAD, "## vitrail\n"]
    parts += [described(getattr(vitrail, name), f"vitrail.{name}") for name in vitrail.__all__]
    home, name, methods = MADE
    cls = getattr(importlib.import_module(home), name)
    parts += ["## A loaded model\n\n`vitrail.load` gives a `torch.nn.Module` that takes raw data, too.\n"]
    parts += [described(getattr(cls, method), f"model.{method}") for method in methods]
    parts += ["## vitrail.data\n"]
    parts += [described(getattr(vitrail.data, name), f"vitrail.data.{name}") for name in vitrail.data.__all__]
    parts += ["## vitrail.recipe\n"]
    parts += [
        described(value, f"vitrail.recipe.{name}")
        for name in vitrail.recipe.__all__
        if inspect.isfunction(value := getattr(vitrail.recipe, name))
    ]
    parts += ["## Measuring and planning\n"]
    parts += [described(getattr(importlib.import_module(home), name), f"{home}.{name}") for home, name in MEASURED]
    parts.append(MODELS_HEAD)
    for name in vitrail.models.__all__:
        if not name.endswith("Config"):
            parts.append(f"| `{name}` | {cell(prose(getattr(vitrail.models, name).__doc__))} |")
    parts.append(CONTRACTS_HEAD)
    parts += [contract(getattr(importlib.import_module(home), name), f"{home}.{name}") for home, name in CONTRACTS]
    return "\n".join(parts)


def described(value: Any, name: str) -> str:
    told = "\n\n".join(prose(part) for part in inspect.cleandoc(value.__doc__).split("\n\n"))
    return f"### {name}\n\n```python\ndef {signature(value, name.rpartition('.')[2])}: ...\n```\n\n{told}\n"


def contract(cls: type, name: str) -> str:
    """A class that others write: what it says of itself, and its members with theirs."""
    lines = [f"### {name}\n"]
    if told := vars(cls).get("__doc__"):
        lines.append(f"{prose(told)}\n")
    lines.append("| member | |\n|---|---|")
    for member, value in vars(cls).items():
        made = value.fget if isinstance(value, property) else value
        if inspect.isfunction(made) and not member.startswith("_"):
            shown = member if made is not value else signature(made, member, width=1000)
            lines.append(f"| `{cell(shown)}` | {cell(prose((made.__doc__ or '').partition(chr(10) * 2)[0]))} |")
    return "\n".join([*lines, ""]).replace("|  |", "| |")


def signature(value: Any, name: str, width: int = 80) -> str:
    """How a function is called, with types as its code has them; one argument a line where it is long."""
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(made, ast.FunctionDef)
    words = [plain(word, value.__globals__) for word in arguments(made.args)]
    gives = f" -> {ast.unparse(made.returns)}" if made.returns else ""
    text = f"{name}({', '.join(words)}){gives}"
    return text if len(text) <= width else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){gives}"


def plain(word: str, names: dict[str, Any]) -> str:
    """An argument with what short names of types stand for."""
    for alias in set(re.findall(r"\b[A-Z]\w+", word)) - {"Literal"}:
        meant = names.get(alias)
        if get_origin(meant) in (Literal, Union, UnionType):
            word = re.sub(rf"\b{alias}\b", re.sub(r"\b\w+\.", "", str(meant)), word)
    return word.replace("'", '"')


def arguments(given: ast.arguments) -> Iterator[str]:
    """The arguments of a function one by one, `*` among them."""
    ends = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    for each, default in zip(given.args, ends, strict=True):
        if each.arg not in ("self", "cls") or each.annotation:
            yield spelt(each, default)
    if given.vararg or given.kwonlyargs:
        yield f"*{ast.unparse(given.vararg) if given.vararg else ''}"
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield spelt(each, default)
    if given.kwarg:
        yield f"**{ast.unparse(given.kwarg)}"


def spelt(each: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(each) + (f" = {ast.unparse(default)}" if default else "")


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    COMMANDS.write_text(write_commands(), encoding="utf-8")
    API.write_text(write_api(), encoding="utf-8")
    KEYS.write_text(early.write_keys(json_schema()), encoding="utf-8")
