"""The recipe that a command line means: a file, a mapping, or the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.contents import check_contents, check_name
from vitrail.errors import UserError
from vitrail.recipe.load import load_recipe
from vitrail.recipe.schema import Recipe


def find_recipe(given: Any, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe with its overrides; that of a run folder writes into the folder where it is found."""
    if isinstance(given, str | Path):
        check_name(Path(given), "recipe")
    if isinstance(given, str | Path) and Path(given).is_dir():
        check_contents(Path(given), reading=True)
        stored = Path(given) / "recipe.yaml"
        if not stored.is_file():
            raise UserError(f"{given}: this folder has no recipe.yaml; give a recipe file or the folder of a run")
        return load_recipe(stored, [f"run.dir={json.dumps(str(given))}", *overrides])
    if isinstance(given, Recipe):
        return load_recipe(given.to_tree(), overrides) if overrides else given
    return load_recipe(given, overrides)
