"""The whole recipe: sections, and slots whose type is the config class of the kind that the recipe names.

There is one way from kinds to types, `recipe_class`: it makes the Recipe class for some kinds of each slot. Reading a
recipe makes it for the kinds named there and imports no other; the JSON Schema makes it for all built-in kinds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, ValidationError, create_model

from vitrail.credentials import clash, hide
from vitrail.errors import UserError
from vitrail.recipe import early, kinds, yaml
from vitrail.recipe.problems import at, check_across, explain
from vitrail.recipe.sections import EMA, Augment, Checkpoint, Data, Eval, Init, Log, Parallel, Precision, Run, Section
from vitrail.recipe.yaml import DEFAULT_KINDS, Key, dotted, non_finite, plain, show

S = TypeVar("S", bound=Section)

MAX_PROBLEMS = 10
_SLOTS = ("model", "objective", "optimizer", "schedule", "codec")
_OPTIONAL = ("codec",)
_LISTED = {  # slots of lists, and where these are
    "source": (("data", "train"), ("data", "valid")),
    "augmentation": (("data", "augment", "more"),),
    "logger": (("log", "to"),),
}


class Recipe(Section):
    """A run, complete: what is trained on what, how, and where it goes."""

    run: Run
    model: Any = Field(description="the model")
    objective: Any = Field(description="what the model is trained for")
    data: Data
    optimizer: Any = Field(description="the optimizer")
    schedule: Any = Field(description="the learning rate over the run")
    codec: Any = Field(default=None, description="what latents are decoded with, and data encoded")
    init: Init | None = None
    ema: EMA | None = None
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    log: Log = Log()

    @property
    def run_dir(self) -> Path:
        """The run folder: `run.dir`, or runs/<run.name>."""
        return Path(self.run.dir) if self.run.dir is not None else Path("runs", self.run.name)

    def to_tree(self) -> dict[str, Any]:
        """Return the recipe as plain values, complete with defaults; it loads back to an equal recipe."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return `to_tree` as YAML."""
        return yaml.dump(self.to_tree())


@lru_cache(maxsize=64)
def recipe_class(classes: tuple[tuple[str, tuple[type, ...]], ...]) -> type[Recipe]:
    """Make the Recipe class in which each slot takes one of these classes; a slot without any takes anything.

    The same kinds give the same class, so that equal recipes are equal.
    """
    types: dict[str, Any] = {slot: _one_of(given) for slot, given in classes}
    sources, augmentations, loggers = (tuple[types.pop(slot), ...] for slot in _LISTED)  # type: ignore[misc]
    augment = _with(Augment, more=augmentations)
    data = _with(Data, train=Annotated[sources, Field(min_length=1)], valid=sources, augment=augment)
    log = _with(Log, to=Literal["auto"] | loggers)
    slots = {slot: types[slot] | None if slot in _OPTIONAL else types[slot] for slot in _SLOTS}
    return _with(Recipe, data=data, log=log, **slots)


def _one_of(classes: tuple[type, ...]) -> Any:
    if len(classes) < 2:
        return classes[0] if classes else Any
    return Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007 (made from a tuple)


def _with(section: type[S], **types: Any) -> type[S]:
    """Give some fields of a section other types; defaults and descriptions stay."""
    changed: dict[str, Any] = {}
    for name, kind in types.items():
        field = section.model_fields[name]
        default = ... if field.is_required() else kind() if isinstance(field.default, Section) else field.default
        changed[name] = (kind, Field(default, description=field.description))
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **changed)


def validate(tree: Mapping[str, Any], cleared: Collection[Key] = ()) -> Recipe:
    """Return the recipe in a plain tree, or raise one UserError with a sentence for each problem.

    A key in `cleared` goes back to its default: one that is null where null is no value of it, and one that has a
    value where it is not known (of the kind that was there before).

    What can be told without PyTorch is told before it is imported; the rest is told when that is mended.
    """
    whole = hide_credentials(plain(tree))
    problems = non_finite(whole)
    if problems:
        raise _refusal(problems)
    for slot in _SLOTS:
        if whole.get(slot, "") is None and (slot,) in cleared:
            del whole[slot]
    if "torch" not in sys.modules and (problems := _find_early(plain(whole), cleared)):
        raise _refusal(problems)
    respelt = _spell_names(whole, cleared)
    classes, found = _name_kinds(whole)
    found = [*respelt, *found]
    made = recipe_class(tuple((slot, classes[slot]) for slot in (*_SLOTS, *_LISTED)))
    while True:
        try:
            recipe = made.model_validate_json(json.dumps(whole), strict=True)
            break
        except ValidationError as error:
            explained = explain(error, whole, made.model_json_schema())
        goes = {problem.key for problem in explained if problem.removable and problem.key in cleared}
        reset = {key for key in goes if isinstance(key[-1], str)}  # an item of a list has no default
        if not reset:
            told = [problem.sentence for problem in explained]
            raise _refusal([*found, *(sentence for sentence in told if sentence not in found)])
        for key in reset:
            at(whole, key[:-1]).pop(key[-1])
    if found := found or check_across(recipe):
        raise _refusal(found)
    return recipe


def _find_early(whole: dict[str, Any], cleared: Collection[Key]) -> list[str]:
    """Return a sentence for each problem of a tree that is found without PyTorch; the tree is changed."""
    respelt = _spell_names(whole, cleared)
    classes, found = _name_kinds(whole, without=early.HEAVY)
    made = recipe_class(tuple((slot, classes[slot]) for slot in (*_SLOTS, *_LISTED)))
    schema = early.with_stored(made.model_json_schema())
    told = list(early.unknown_keys(whole, schema))
    try:
        made.model_validate_json(json.dumps(whole), strict=True)
    except ValidationError as error:
        told = [(key, sentence) for key, sentence, _ in explain(error, whole, schema)] + told
    more = [sentence for key, sentence in told if key not in cleared]  # which may go back to its default
    return list(dict.fromkeys([*respelt, *found, *more]))


def hide_credentials(tree: Any) -> Any:
    """Return a plain tree whose URLs have no passwords and tokens: a recipe is stored, and shown."""
    urls: list[str] = []

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if not isinstance(value, str) or "://" not in value:
            return value
        urls.append(value)
        return hide(value)

    shown = walk(tree)
    if (why := clash(urls)) is not None:
        raise UserError(why)
    return shown


def _refusal(problems: list[str]) -> UserError:
    more = len(problems) - MAX_PROBLEMS
    shown = problems if more <= 0 else [*problems[: MAX_PROBLEMS - 1], f"and {more + 1} more problems"]
    return UserError("\n".join(shown))


def _name_kinds(tree: dict[str, Any], without: Collection[str] = ()) -> tuple[dict[str, tuple[type, ...]], list[str]]:
    """Write every slot's kind into the tree where it is left out, and find the classes of the kinds named.

    A slot whose kind is wrong gets no class, so that the rest of the recipe is still checked; nor does one of those
    that are to do `without`, whose kinds are looked up and not imported.
    """
    problems: list[str] = []
    classes: dict[str, tuple[type, ...]] = {}
    for slot in _SLOTS:
        if slot in DEFAULT_KINDS:
            tree.setdefault(slot, {})
        named = slot in tree and not (slot in _OPTIONAL and tree[slot] is None)
        found = _kind_class(tree[slot], slot, (slot,), problems, load=slot not in without) if named else None
        classes[slot] = (found,) if found else ()
    for slot in _LISTED:
        classes[slot] = _listed_classes(tree, slot, problems)
    return classes, problems


def _listed_classes(tree: dict[str, Any], slot: str, problems: list[str]) -> tuple[type, ...]:
    """Find the classes of all kinds in the lists of a slot."""
    named: dict[type, None] = {}
    complete = True
    for key in _LISTED[slot]:
        items = at(tree, key)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            found = _kind_class(item, slot, (*key, index), problems)
            complete = complete and found is not None
            if found:
                named[found] = None
    # In a fixed order, so that the same kinds always give the same class. With a kind unknown no union can be made.
    ordered = sorted(named, key=lambda cls: (cls.__module__, cls.__qualname__))
    return tuple(ordered) if complete else ()


def _spell_names(tree: dict[str, Any], cleared: Collection[Key]) -> list[str]:
    """Write loggers and augmentations that are given by their names as mappings, and `log.tensorboard` as `log.to`."""
    log = tree.get("log")
    problems = [] if not isinstance(log, dict) else _spell_tensorboard(log, ("log", "tensorboard") in cleared)
    for *section, key in (*_LISTED["logger"], *_LISTED["augmentation"]):
        holder = at(tree, tuple(section))
        if isinstance(holder, dict) and isinstance(holder.get(key), list):
            holder[key] = [{"kind": item} if isinstance(item, str) else item for item in holder[key]]
    return problems


def _spell_tensorboard(log: dict[str, Any], cleared: bool) -> list[str]:
    """Write the key of older recipes in today's words."""
    old = log.pop("tensorboard", "auto")
    if old == "auto" or (old is None and cleared):
        return []
    if not isinstance(old, bool):
        return [f"log.tensorboard: expected auto, true or false, got {show(old)}"]
    if log.get("to", "auto") not in ("auto", None):
        return [
            f"log.tensorboard: it is the older spelling of log.to, and both are given ({show(old)} and "
            f"{show(log['to'])}); remove log.tensorboard, or set it to auto"
        ]
    log["to"] = ["tensorboard"] if old else []
    return []


def _kind_class(item: Any, slot: str, key: Key, problems: list[str], *, load: bool = True) -> type | None:
    where = dotted(key)
    if not isinstance(item, dict):
        name = DEFAULT_KINDS.get(slot) or next(iter(kinds.known(slot)), "NAME")
        example = "{path: ...}" if slot == "source" else f"{{kind: {name}}}"
        problems.append(f"{where}: expected a mapping such as {example}, got {show(item)}")
        return None
    try:
        if "kind" not in item:
            item["kind"] = _guess(item, slot, where)
        if not isinstance(item["kind"], str):
            names = ", ".join(kinds.known(slot))
            raise UserError(f"{where}.kind: expected one of {names}, got {show(item['kind'])}")
        if not load:
            kinds.check_known(slot, item["kind"], f"{where}.kind")
            return None
        return kinds.find(slot, item["kind"], key=f"{where}.kind")
    except UserError as error:
        problems.append(str(error))
        return None


def _guess(item: dict[str, Any], slot: str, where: str) -> str:
    if slot in DEFAULT_KINDS:
        return DEFAULT_KINDS[slot]
    if slot != "source":
        raise UserError(f"{where}.kind: missing; expected one of {', '.join(kinds.known(slot))}")
    if not isinstance(item.get("path"), str):
        problem = f"expected text, got {show(item['path'])}" if "path" in item else "missing; expected text"
        raise UserError(f"{where}.path: {problem}")
    try:
        return kinds.guess_source(item["path"])
    except UserError as error:
        raise UserError(f"{where}.path: {error}") from error


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) with every built-in kind; importing those imports torch."""
    slots = (*_SLOTS, *_LISTED)
    classes = {slot: tuple(kinds.find(slot, name) for name in kinds.BUILT_IN[slot]) for slot in slots}
    schema = recipe_class(tuple(classes.items())).model_json_schema()
    definitions = schema["$defs"]
    for slot in slots:
        for name, cls in zip(kinds.BUILT_IN[slot], classes[slot], strict=True):
            # The kind may be left out of a slot's default and of sources; elsewhere it tells the branches apart.
            if slot != "source" and DEFAULT_KINDS.get(slot) != name:
                required = definitions[cls.__name__].setdefault("required", [])
                required.extend([] if "kind" in required else ["kind"])
    for _, group in _LISTED["source"]:
        items = definitions["Data"]["properties"][group]["items"]
        items["anyOf"] = items.pop("oneOf")
    log = definitions["Log"]["properties"]
    (loggers,) = (branch for branch in log["to"]["anyOf"] if "items" in branch)
    loggers["items"] = {"anyOf": [{"type": "string"}, loggers["items"]]}
    log["tensorboard"] = {
        "enum": ["auto", True, False],
        "default": "auto",
        "deprecated": True,
        "description": "older spelling of to: true is [tensorboard], false is []",
    }
    schema["required"] = [name for name in schema["required"] if name not in DEFAULT_KINDS]
    extends = {"type": "string", "description": "a recipe, relative to this file, whose keys this one changes"}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "vitrail recipe"}
