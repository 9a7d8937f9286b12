"""The typed tree of a run: YAML in, a frozen `Recipe` out, every mistake named with its key and a suggestion.

Importing this package costs little: pydantic, PyYAML and the kinds come in when they are first used, torch never.

`@config`: a frozen, keyword-only dataclass whose unknown keys are refused when a recipe fills it.

    @config
    class MaskConfig:
        kind: Literal["random"] = "random"
        ratio: float = 0.75

Built by hand it is a plain dataclass; read from a recipe, pydantic checks every field, nested configs included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from vitrail.recipe.durations import Clock, Duration, seconds_of, steps_of
    from vitrail.recipe.load import SAFE_KEYS, diff, load_recipe, unsafe_changes
    from vitrail.recipe.schema import Recipe, json_schema


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that forbids unknown keys."""
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    # A plain dict is what pydantic's ConfigDict is at run time: no import of pydantic is needed here.
    made.__pydantic_config__ = {"extra": "forbid"}
    return made


_RULES: dict[str, Callable[[float], bool]] = {
    "be above 0": lambda value: value > 0,
    "be at least 0": lambda value: value >= 0,
    "be at least 0 and below 1": lambda value: 0 <= value < 1,
    "be at least 1": lambda value: value >= 1,
    "not be negative": lambda value: value >= 0,
}


def must(rule: str, **values: float | tuple[float, ...] | None) -> None:
    """Refuse values of a config, or numbers of a tuple, that do not keep a rule of the table; None is no value."""
    for name, value in values.items():
        if isinstance(value, tuple) and not all(map(_RULES[rule], value)):
            raise ValueError(f"{name} {list(value)} must each {rule}")
        if isinstance(value, float | int) and not _RULES[rule](value):
            raise ValueError(f"{name} {value} must {rule}")


_HOMES = {
    "Clock": "durations",
    "Duration": "durations",
    "Recipe": "schema",
    "SAFE_KEYS": "load",
    "diff": "load",
    "json_schema": "schema",
    "load_recipe": "load",
    "seconds_of": "durations",
    "steps_of": "durations",
    "unsafe_changes": "load",
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
