"""What a result says of the recipe that was measured, whether or not the measurement came to an end."""

from __future__ import annotations

from typing import Any

from vitrail.errors import UserError
from vitrail.parallel.mesh import AXES, layout_of
from vitrail.recipe import Recipe

SCHEMA = 1


def describe(recipe: Recipe, *, gpus: int, nodes: int, on_gpu: bool) -> dict[str, Any]:
    """The facts of a recipe on so many ranks; what `auto` stands for is written out."""
    parallel, layout = recipe.parallel, layout_of(recipe.parallel, gpus)
    batch = recipe.data.global_batch(layout.data)
    compute = recipe.precision.compute
    explicit = any(getattr(parallel, key) is not None for key in ("replicate", "shard", "reshard"))
    return {
        "recipe": recipe.run.name,
        "model": recipe.model.kind,
        "size": named_size(recipe.to_tree()["model"]),
        "gpus": gpus,
        "nodes": nodes,
        "strategy": None if explicit else parallel.strategy or "FULL_SHARD",
        "group": parallel.group,
        "layout": {axis: getattr(layout, axis) for axis in AXES},
        "precision": ("bf16" if on_gpu else "fp32") if compute == "auto" else compute,
        "recompute": name_recompute(parallel.recompute),
        "compile": on_gpu if parallel.compile == "auto" else parallel.compile,
        "batch": batch,
        "batch_per_rank": batch // layout.data,
    }


def named_size(model: dict[str, Any]) -> str | None:
    """The name of a model's size, or of its encoder's, such as B/16."""
    encoder = model.get("encoder")
    return model.get("size") or (encoder.get("size") if isinstance(encoder, dict) else None)


def name_recompute(value: Any) -> str:
    """none, full, every=2, keep=qkv+fc1 or budget=0.5."""
    if isinstance(value, str):
        return value
    key, chosen = next((key, chosen) for key, chosen in value.model_dump().items() if chosen is not None)
    return f"{key}={'+'.join(chosen) if isinstance(chosen, tuple) else chosen}"


def alone(recipe: Recipe, ranks: int) -> list[str]:
    """Overrides that give one process the work of one of so many ranks, with nobody to talk to."""
    layout = layout_of(recipe.parallel, ranks)
    if layout.parts * layout.pipeline > 1:
        raise UserError(
            f"mode compute: a rank of {layout} computes a part of a sample, which one rank alone cannot; leave the "
            "mode out, or set parallel.tensor=1 parallel.context=1 parallel.pipeline=1"
        )
    batch = recipe.data.global_batch(layout.data) // layout.data
    cleared = [f"parallel.{key}=null" for key in ("group", "replicate", "shard", "reshard")]
    return ["parallel.strategy=NO_SHARD", *cleared, f"data.batch={batch}"]
