"""Reads a recipe: a YAML file or a tree, what it extends, overrides from the command line, then the checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.recipe import yaml
from vitrail.recipe.schema import Recipe, validate
from vitrail.recipe.trees import Key, merge, plain, set_key, show, split_override

Given = str | os.PathLike[str] | Mapping[str, Any] | Recipe


def load_recipe(path_or_tree: Given, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file or a tree, with `key.sub=value` overrides applied.

    Raises UserError with one sentence a line for each problem, at most ten.
    """
    cleared: set[Key] = set()
    tree = read_tree(path_or_tree, cleared)
    return validate(override(tree, overrides, cleared), cleared)


def read_tree(given: Given, cleared: set[Key]) -> dict[str, Any]:
    """The tree with `extends` resolved, not yet checked; keys that a child sets to null are added to `cleared`."""
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
    """The tree over the recipe that it extends; that path is relative to the file that names it."""
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or not base:
        raise UserError(f"extends: expected the path of a recipe, got {show(base)}")
    folder = path.parent
    parent = _read_file(folder / base, [*children, path], cleared)
    return merge(parent, tree, cleared)


def override(tree: dict[str, Any], overrides: Sequence[str], cleared: set[Key]) -> dict[str, Any]:
    """The tree with each `key.sub=value` merged in, as a child recipe would."""
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
