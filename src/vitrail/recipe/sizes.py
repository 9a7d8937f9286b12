"""Numbers that no machine could serve are refused by arithmetic, before anything is made that large.

- `absurd` knows limits of any machine that there may be: a plan for one that is not there yet stays possible
- `beyond` compares the least that a recipe needs with the memory at hand; what might just fit is tried

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.recipe.schema import Recipe

LARGEST = 10**15  # of any whole number but a seed: what is counted with it still fits into 64 bits
VOXELS = 10**15  # of a sample
PARAMETERS = 10**17  # of a model
DEPTH = 2000  # blocks: each is a Python object that is built, and walked through in every step
LEAST = 64  # bytes of a sample beside its values: its counter, its place and its name for errors
GIB = 2**30


def absurd(recipe: Recipe) -> list[str]:
    """A sentence for each number that is too large for any machine."""
    problems = [
        f"{key}: {_short(number)} is too large; expected at most {_short(LARGEST)}"
        for key, number in _numbers(recipe.to_tree(), "")
        if abs(number) > LARGEST and key != "run.seed"
    ]
    if problems:
        return problems
    voxels = voxels_of(recipe)
    if voxels > VOXELS:
        problems.append(
            f"data.crop: a sample of {_short(voxels)} voxels is too large; expected at most {_short(VOXELS)}"
        )
    for key, c in stacks(recipe.model):
        if c.depth > DEPTH:
            problems.append(f"{key}.depth: {c.depth} blocks are too many; expected at most {DEPTH}")
        elif least_parameters(c) > PARAMETERS:
            problems.append(
                f"{key}.width: {c.width} with depth {c.depth} makes {_short(least_parameters(c))} parameters; "
                f"expected at most {_short(PARAMETERS)}"
            )
    return problems


def beyond(recipe: Recipe, *, share: int, parts: int, ranks: int, host: int, device: int) -> str | None:
    """Why a rank cannot have the memory for a recipe: `share` are its samples of a step, the last two bytes.

    `parts` are the ranks that share each sample, of which a rank may read its part alone. `host` is what all ranks of
    this host have together, `device` what this one computes in.
    """
    sample = max(LEAST, voxels_of(recipe) // parts)
    if sample > host:
        return f"data.crop: a sample of {_short(sample)} bytes at least is larger than {_memory(host)}; make it smaller"
    if share * sample > host:
        return (
            f"data.batch: {_short(share)} samples of {_short(sample)} bytes at least on each rank are larger than "
            f"{_memory(host)}; make it smaller, or accumulate gradients over more steps"
        )
    if recipe.data.prefetch > 2 and recipe.data.prefetch * share * sample > host:
        return (
            f"data.prefetch: {recipe.data.prefetch} batches of {_short(share * sample)} bytes at least are larger than "
            f"{_memory(host)}; make it smaller"
        )
    for key, c in stacks(recipe.model):
        if sentence := too_many(least_parameters(c), ranks, device):
            return f"{key}: width {c.width} and depth {c.depth} make {sentence}"
    return None


def too_many(parameters: int, ranks: int, memory: int) -> str | None:
    """What is wrong with so many parameters, if their weights alone are beyond the memory of all ranks."""
    if 4 * parameters <= ranks * memory:
        return None
    return (
        f"{_short(parameters)} parameters or more, {_short(4 * parameters // ranks)} bytes on each of {ranks} ranks, "
        f"and there are {_memory(memory)}; make the model smaller, or start more ranks"
    )


def voxels_of(recipe: Recipe) -> int:
    crop = recipe.data.crop
    return crop ** getattr(recipe.model, "ndim", 1) if isinstance(crop, int) else math.prod(crop)


def stacks(config: Any, key: str = "model") -> Iterator[tuple[str, Any]]:
    """Configs of this package with a width and a depth: blocks of attention and an MLP."""
    if not dataclasses.is_dataclass(config):
        return
    ours = type(config).__module__.startswith("vitrail.")
    if ours and all(isinstance(getattr(config, name, None), int) for name in ("width", "depth")):
        yield key, config
    for field in dataclasses.fields(config):
        yield from stacks(getattr(config, field.name), f"{key}.{field.name}")


def least_parameters(stack: Any) -> int:
    """Of the queries, keys, values and outputs of attention and the MLP; what is shared or narrow may make it less."""
    return 2 * stack.depth * stack.width**2


def _numbers(tree: Any, key: str) -> Iterator[tuple[str, int]]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in items:
            yield from _numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, int):
        yield key, tree


def _short(number: int) -> str:
    """A large number with few digits."""
    if number > 10**100:
        return "more than 1e100"
    digits = str(number)
    return digits if len(digits) <= 7 else f"{digits[0]}.{digits[1:3]}e{len(digits) - 1}".replace(".00e", "e")


def _memory(size: int) -> str:
    return f"the {size / GIB:.1f} GiB of memory here"
