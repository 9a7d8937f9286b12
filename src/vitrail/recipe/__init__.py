"""The typed tree of a run: YAML in, a frozen `Recipe` out, every mistake named with its key and a suggestion.

Importing this package costs little: pydantic, PyYAML and the kinds come in when they are first used, torch never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.recipe.config import config

if TYPE_CHECKING:
    from vitrail.recipe.changes import SAFE_KEYS, diff, unsafe_changes
    from vitrail.recipe.durations import Clock, Duration, seconds_of, steps_of
    from vitrail.recipe.load import load_recipe
    from vitrail.recipe.schema import Recipe, json_schema

_HOMES = {
    "Clock": "durations",
    "Duration": "durations",
    "Recipe": "schema",
    "SAFE_KEYS": "changes",
    "diff": "changes",
    "json_schema": "schema",
    "load_recipe": "load",
    "seconds_of": "durations",
    "steps_of": "durations",
    "unsafe_changes": "changes",
}

__all__ = [
    "SAFE_KEYS",
    "Clock",
    "Duration",
    "Recipe",
    "config",
    "diff",
    "json_schema",
    "load_recipe",
    "seconds_of",
    "steps_of",
    "unsafe_changes",
]


def __getattr__(name: str) -> Any:
    """Bring in a public name from its module when it is first asked for."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
