"""Measuring: how fast a recipe trains here, what limits it, and what changes when its keys do.

    import vitrail.bench
    vitrail.bench.bench("configs/demo/mae3d.yaml", ["data.batch=32"], mode="syn")

- measure: one recipe, in this process and its fellow ranks; the steps that are timed are those of a training
- sweep: which cells a grid of keys has; runner: every cell in processes of its own, one after the other
- results: the folder of a benchmark, which survives a kill at any moment
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_mode(mode: str) -> None:
    from vitrail.errors import UserError
    from vitrail.recipe.kinds import nearest
    from vitrail.report.modes import MODES

    if mode not in MODES:
        near = nearest(str(mode), list(MODES))
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"mode: {mode!r} is unknown{hint} (known: {', '.join(MODES)})")


def bench(
    recipe: Any,
    overrides: Sequence[str] = (),
    *,
    mode: str = "real",
    windows: int = 5,
    steps: int | None = None,
    warm_up: int | None = None,
) -> dict[str, Any]:
    """Measure a recipe in this process, or in all of those that a launcher has started; the same result on each."""
    from vitrail.bench.measure import measure

    return measure(recipe, overrides, mode=mode, windows=windows, steps=steps, warm_up=warm_up)
