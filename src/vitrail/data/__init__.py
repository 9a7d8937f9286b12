"""Data: from a path to a batch. `vitrail.data.batches(recipe)` gives a training's batches to a loop of one's own."""

from typing import Any

__all__ = ["batches"]


def __getattr__(name: str) -> Any:
    """Bring in `batches` when it is asked for: what makes them are parts of a training, rooms above this one."""
    import importlib

    if name != "batches":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("vitrail.training.diagnose").batches
