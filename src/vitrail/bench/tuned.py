"""The recipe that a search ends with: the one that was given, with the batch and layout that were found."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.bench.largest import Found
from vitrail.errors import UserError
from vitrail.recipe import Recipe, load_recipe, yaml
from vitrail.recipe.find import find_recipe
from vitrail.recipe.trees import Key, set_key, split_override


def tuned_tree(given: str, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """What extends the given file with all changes; the whole recipe where that would not mean the same.

    That of a run folder begins a run of its own: the old one goes on with its old batch.
    """
    whole = find_recipe(given, overrides)
    if Path(given).is_dir():
        name = f"{whole.run.name[:120]}-tuned"
        whole = whole.model_copy(update={"run": whole.run.model_copy(update={"name": name, "dir": None})})
    if Path(given).is_file():
        tree: dict[str, Any] = {"extends": os.path.relpath(Path(given).resolve(), out.resolve().parent)}
        cleared: set[Key] = set()
        try:
            for text in overrides:
                key, value = split_override(text)
                tree = set_key(tree, key, yaml.parse(value, text), cleared)
            if _load_beside(yaml.dump(tree), out) == whole:
                return tree
        except UserError:  # a change inside a list, say
            pass
    return whole.to_tree()


def _load_beside(text: str, out: Path) -> Recipe:
    """A recipe as it would be read from a file at `out`."""
    part = disk.write_whole(disk.draft_of(out), text, durable=False)
    try:
        return load_recipe(part)
    finally:
        disk.remove(part, inside=part.parent)


def write_tuned(out: Path, tree: dict[str, Any], found: Found, *, ranks: int) -> None:
    """The recipe, with what was found in its header."""
    best = found.best
    lines = [
        f"Found by `vitrail tune` on {ranks} x {best.device}: {found.proof}.",
        f"Peak of the fullest rank: {best.allocated_gib:.2f} GiB allocated, {best.reserved_gib:.2f} GiB reserved; "
        f"{best.share:.0%} of its memory was in use.",
    ]
    text = "".join(f"# {line}\n" for line in lines) + yaml.dump(tree)
    disk.publish(disk.write_whole(disk.draft_of(out), text), out)  # never over what came meanwhile


def check_out(out: Path) -> None:
    """Refuse a place that cannot be written to before anything is tried."""
    if os.path.lexists(out):
        raise UserError(f"--out: {out} exists; remove it, or give another file")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"--out: cannot write into {out.parent}; give another file")
