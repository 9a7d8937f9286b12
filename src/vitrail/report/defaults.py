"""What a stored recipe sets apart from the defaults: the short form of a long file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import UserError

_REQUIRED = object()  # stands for the default of a key that has none


def list_changes(run: Path) -> list[tuple[str, str, str]] | None:
    """(key, value, default) of every key that is required or differs; None where the recipe cannot be loaded.

    A recipe cannot be loaded when it needs a plugin or another version; the page then shows the file alone.
    """
    from vitrail.recipe import load_recipe
    from vitrail.recipe.trees import DEFAULT_KINDS

    try:
        recipe = load_recipe(run / "recipe.yaml")
    except (UserError, OSError, ImportError, RecursionError):
        return None
    rows = []
    for name, value, default in _fields_of(recipe):
        kind = getattr(value, "kind", None)
        if kind is not None and kind != DEFAULT_KINDS.get(name):
            rows.append((f"{name}.kind", _show(kind), _show(DEFAULT_KINDS.get(name, _REQUIRED))))
        rows += _compare(value, default, name)
    return rows


def _compare(value: Any, default: Any, key: str) -> Iterator[tuple[str, str, str]]:
    if _is_config(value):
        # Without a default of the same class, the class's own defaults are what the keys inside fall back to.
        same = type(default) is type(value)
        for name, inner, own in _fields_of(value):
            if name != "kind":
                yield from _compare(inner, getattr(default, name) if same else own, f"{key}.{name}")
    elif isinstance(value, list | tuple) and any(_is_config(item) for item in value):
        for index, item in enumerate(value):
            yield from _compare(item, _REQUIRED, f"{key}.{index}")
    elif default is _REQUIRED or value != default:
        yield key, _show(value), _show(default)


def _is_config(value: Any) -> bool:
    return hasattr(type(value), "model_fields") or (is_dataclass(value) and not isinstance(value, type))


def _fields_of(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of every field of a pydantic model or a dataclass."""
    if is_dataclass(config):
        for field in fields(config):
            default = field.default if field.default is not MISSING else _REQUIRED
            if field.default_factory is not MISSING:
                default = field.default_factory()
            yield field.name, getattr(config, field.name), default
        return
    for name, info in type(config).model_fields.items():
        default = _REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
        yield name, getattr(config, name), default


def _show(value: Any) -> str:
    if value is _REQUIRED:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "…"
