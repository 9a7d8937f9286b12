"""`@config`: a frozen, keyword-only dataclass whose unknown keys are refused when a recipe fills it.

    @config
    class MaskConfig:
        kind: Literal["random"] = "random"
        ratio: float = 0.75

Built by hand it is a plain dataclass; read from a recipe, pydantic checks every field, nested configs included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that forbids unknown keys."""
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    # A plain dict is what pydantic's ConfigDict is at run time: no import of pydantic is needed here.
    made.__pydantic_config__ = {"extra": "forbid"}
    return made
