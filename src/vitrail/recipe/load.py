"""Reads a recipe: a YAML file or a tree, what it extends, overrides from the command line, then the checks.

The recipe that a command line means: a file, a mapping, or the folder of a run.

What changed between two resolved recipes, and which changes a run that continues may carry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.contents import check_contents, check_name
from vitrail.errors import UserError
from vitrail.recipe import plugins, yaml
from vitrail.recipe.problems import at
from vitrail.recipe.schema import Recipe, validate
from vitrail.recipe.yaml import Key, merge, plain, set_key, show, split_override

Given = str | os.PathLike[str] | Mapping[str, Any] | Recipe


def load_recipe(path_or_tree: Given, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe in a file or a tree, with `key.sub=value` overrides applied.

    Raises UserError with one sentence a line for each problem, at most ten.
    """
    cleared: set[Key] = set()
    tree = read_tree(path_or_tree, cleared)
    return validate(override(tree, overrides, cleared), cleared)


def read_tree(given: Given, cleared: set[Key]) -> dict[str, Any]:
    """Read a tree and resolve `extends`, unchecked; keys that a child sets to null are added to `cleared`."""
    if isinstance(given, Recipe):
        return given.to_tree()
    if isinstance(given, Mapping):
        return _extend(plain(given), Path(), [], cleared)
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"recipe: expected a path or a mapping, got {type(given).__name__}")
    return _read_file(Path(given), [], cleared)


def _read_file(path: Path, children: list[Path], cleared: set[Key]) -> dict[str, Any]:
    try:
        here = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, or a zero byte
        raise UserError(f"{str(path)!r}: this is not the path of a file") from error
    if here in [child.resolve() for child in children]:
        ring = " -> ".join(map(str, [*children, path]))
        raise UserError(f"extends: recipes may not extend each other in a ring ({ring}); remove one extends")
    try:
        tree = yaml.read(path)
    except UserError as error:
        if children and not path.is_file():
            raise UserError(f"extends: {children[-1]} extends {path}, which is not a file") from error
        raise
    if tree is None:
        raise UserError(f"{path}: the file is empty; expected a recipe with run, model and data")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping with run, model and data, got {show(tree)}")
    return _extend(tree, path, children, cleared)


def _extend(tree: dict[str, Any], path: Path, children: list[Path], cleared: set[Key]) -> dict[str, Any]:
    """Put the tree over the recipe that it extends; that path is relative to the file that names it."""
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or not base:
        raise UserError(f"extends: expected the path of a recipe, got {show(base)}")
    folder = path.parent
    parent = _read_file(folder / base, [*children, path], cleared)
    return merge(parent, tree, cleared)


def override(tree: dict[str, Any], overrides: Sequence[str], cleared: set[Key]) -> dict[str, Any]:
    """Merge each `key.sub=value` into the tree, as a child recipe would."""
    changes = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, value = split_override(text)
        if key == ("extends",):
            raise UserError(f"override {text!r}: extends belongs in a file; write it there")
        changes.append((key, yaml.parse(value, f"override {text!r}")))
    # A new kind drops the old one's keys, so it comes first: the order of the words must not matter for that.
    for key, value in sorted(changes, key=lambda change: change[0][-1] != "kind"):
        tree = set_key(tree, key, value, cleared)
    return tree


def find_recipe(given: Given, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe with its overrides; that of a run folder writes into the folder where it is found."""
    if isinstance(given, str | Path):
        check_name(Path(given), "recipe")
    if isinstance(given, str | Path) and Path(given).is_dir():
        check_contents(Path(given), reading=True)
        stored = Path(given) / "recipe.yaml"
        if not stored.is_file():
            raise UserError(f"{given}: this folder has no recipe.yaml; give a recipe file or the folder of a run")
        cleared: set[Key] = set()
        tree = as_meant(read_tree(stored, cleared))
        with plugins.asked_for(Path(given)):
            return validate(override(tree, [f"run.dir={json.dumps(str(given))}", *overrides], cleared), cleared)
    if isinstance(given, Recipe):
        return load_recipe(given.to_tree(), overrides) if overrides else given
    return load_recipe(given, overrides)


def as_meant(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe that a run stored, with what it did before keys came whose defaults do something else."""
    stored = plain(stored)
    for owner in ("model",), ("model", "encoder"):
        score = at(stored, (*owner, "tokens", "score"))
        if isinstance(score, dict) and score.get("kind") in ("canny", "gradient", "variance"):
            score.setdefault("scale", "crop")
    if at(stored, ("parallel", "attention")) == "flash3":  # which is no more
        stored["parallel"]["attention"] = "auto"
    return stored


# A key here, or anything below it, may differ when a run is continued: it changes where and how fast a run goes, when
# it stops and what it shows. run.steps also moves a schedule that follows it, and run.device the type that
# precision.compute: auto stands for; a person who changes these means it.
SAFE_KEYS = (
    "checkpoint",
    "codec",
    "data.bad",
    "data.cache_mib",
    "data.micro_batch",
    "data.most_bad",
    "data.prefetch",
    "data.read_limit",
    "data.retries",
    "data.stage",
    "data.workers",
    "eval",
    "log",
    "objective.sampling",
    "parallel",
    "run.device",
    "run.dir",
    "run.hang_limit",
    "run.name",
    "run.patience",
    "run.steps",
    "run.stop_after_skips",
    "run.time_limit",
)

Change = tuple[str, Any, Any]


def diff(old: Any, new: Any, key: str = "") -> list[Change]:
    """List the (key, old, new) of every value that differs; a key that one side lacks counts as null there."""
    if isinstance(old, dict) and isinstance(new, dict):
        names: list[Any] = list(dict.fromkeys((*old, *new)))
        pairs = [(name, old.get(name), new.get(name)) for name in names]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _holds_mappings(old, new):
        pairs = [(index, *both) for index, both in enumerate(zip(old, new, strict=True))]
    else:
        same = type(old) is type(new) and old == new
        return [] if same else [(key, old, new)]
    return [change for name, a, b in pairs for change in diff(a, b, f"{key}.{name}" if key else str(name))]


def unsafe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """List the changes that a continued run may not carry."""
    return [
        change for change in diff(old, new) if not any(f"{change[0]}.".startswith(f"{safe}.") for safe in SAFE_KEYS)
    ]


def _holds_mappings(*lists: list[Any]) -> bool:
    return all(isinstance(item, dict) for items in lists for item in items)
