"""What a run that goes on may change: kept as it was, changed on purpose (`--change`), or refused, each with a reason.

Changes are written into the history of the run, metrics.jsonl. A run that is stopped before its next checkpoint, which
knows the new recipe, finds them there again.

Patience: a run ends where its headline score has not improved for some evaluations. The count is in checkpoints.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.foreign import open_plain
from vitrail.objectives.segment import SegmentConfig
from vitrail.recipe import Recipe, load_recipe, unsafe_changes
from vitrail.recipe import yaml as recipe_yaml
from vitrail.recipe.load import Change, as_meant
from vitrail.report.units import plain
from vitrail.training.journal import Journal
from vitrail.training.lengths import lay_out
from vitrail.training.trainer import Trainer
from vitrail.weights.runs import BadCheckpoint, list_checkpoints, read_manifest

IMPATIENT = "no improvement"  # reason of an end

# What a run keeps however it is continued, each with the reason; a key that is longer decides. All else may be changed
# on purpose: how it learns from here on, from the same samples in the same order.
FIXED = {
    "run.seed": "every draw and the order of the data follow from it",
    "data": "the order of the data, or what is seen of them, would no longer be that of one run",
    "data.augment.blur": "",
    "data.augment.brightness": "",
    "data.augment.contrast": "",
    "data.augment.gamma": "",
    "data.augment.jitter": "",
    "data.augment.noise": "",
    "ema": "checkpoints have an average, or have none, as the run began",
    "ema.decay": "",
    "init": "a run starts from weights once",
    "model": "its weights are those of the checkpoint",
    "model.drop_path": "",
    "model.encoder.drop_path": "",
    "model.head_dropout": "",
    "model.mask": "",
    "objective.background": "it decides what the instances are",
    "objective.descriptors": "the model has learned these",
    "objective.ignore": "it decides what the classes are",
    "objective.kind": "the scores before and after could not be compared",
    "objective.offsets": "the model has learned these neighbours",
    "objective.names": "the model has learned these classes",
    "optimizer.groups": "what is kept of each parameter follows from it",
    "optimizer.kind": "what is kept of each parameter is another's",
}


def newest_manifest(run_dir: Path) -> dict[str, Any] | None:
    """Read the manifest of the newest checkpoint that looks whole."""
    for folder in list_checkpoints(run_dir / "checkpoints"):
        try:
            found = read_manifest(folder)
            stored_statistics(found["statistics"])  # of a form that can be used
            return found
        except UserError:
            raise
        except (BadCheckpoint, AttributeError, KeyError, TypeError, ValueError):
            continue
    return None


def find_changes(run_dir: Path, recipe: Recipe, *, change: bool = False) -> list[Change]:
    """Return what `change` lets differ from the recipe that a run began with; refuse whatever may not differ.

    Changes that the history of the run knows need no second permission.
    """
    manifest = newest_manifest(run_dir)
    stored = (manifest or {}).get("recipe")
    if stored is None and (run_dir / "recipe.yaml").is_file():
        stored = recipe_yaml.read(run_dir / "recipe.yaml")
    if not stored:
        return []
    before = in_words_of_today(stored)  # or the differences are shown as they are
    changes = unsafe_changes(spelt_out(stored if before is None else before.to_tree()), spelt_out(recipe.to_tree()))
    if not changes:
        return []
    known = _known_changes(run_dir)
    changes = [(key, old, new) for key, old, new in changes if key not in known or known[key] != new]
    fixed = {key: why for key, _, _ in changes if (why := why_fixed(key))}
    if not changes or (change and not fixed and manifest is not None):
        return changes

    def show(key: str, old: Any, new: Any) -> str:
        return f"{key}: {old!r} became {new!r}" + (f", but {fixed[key]}" if change and key in fixed else "")

    shown = "; ".join(show(*one) for one in changes[:10])
    beside = "start beside it with --fresh or another run.name"
    if manifest is None:
        raise UserError(f"{run_dir} was begun with another recipe ({shown}); go back to it, or {beside}")
    if change:
        raise UserError(f"{run_dir} cannot go on with this change ({shown}); leave out {', '.join(fixed)}, or {beside}")
    on = "" if fixed else "go on with the change by --change, "
    raise UserError(f"{run_dir} was begun with another recipe ({shown}); go back to it, {on}or {beside}")


def why_fixed(key: str) -> str:
    """Say why a key may not change in a run that goes on; nothing where it may."""
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((FIXED[name] for name in names if name in FIXED), "")


def spelt_out(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe in which segmentation says whether class 0 counts: runs of old said no where null now says so."""
    objective = tree.get("objective")
    if not isinstance(objective, dict) or objective.get("kind") != "segment":
        return tree
    names = objective.get("names")
    try:
        said = SegmentConfig(background=objective.get("background"), names=None if names is None else tuple(names))
    except (TypeError, ValueError):  # it is no recipe of today: the differences are shown as they are
        return tree
    return tree | {"objective": objective | {"background": said.counts_first}}


def in_words_of_today(stored: dict[str, Any]) -> Recipe | None:
    """Return a stored recipe with later keys at what was meant before they came; None if it names what is no more."""
    try:
        return load_recipe(as_meant(stored))
    except UserError:
        return None


def _known_changes(run_dir: Path) -> dict[str, Any]:
    """Return the latest value of each key that the history of a run says was changed."""
    found: dict[str, Any] = {}
    try:
        with open_plain(run_dir / "metrics.jsonl") as file:
            for line in file:
                if b'"event": "change"' not in line[:40]:
                    continue
                for one in json.loads(line)["changes"]:
                    found[str(one["key"])] = one["new"]
    except (
        OSError,
        UserError,
        ValueError,
        KeyError,
        TypeError,
    ):  # none yet, or cut short: to be said again
        pass
    return found


def tell_rates(before: Recipe | None, now: Recipe, step: int, *, batch: int, epoch: int) -> str | None:
    """Say what becomes of the learning rate where a run goes on with another length or another rate."""
    if before is None:
        return None
    old, new = (lay_out(recipe, batch=batch, epoch=epoch) for recipe in (before, now))
    was, last, then = old.rate(max(step - 1, 0)), old.rate(step), new.rate(step)
    if math.isclose(last, then, rel_tol=1e-9) or step >= new.total:
        return None
    lengths = f"the run has {new.total} steps and had {old.total}, " if old.total != new.total else ""
    kind = now.schedule.kind
    laid = f"over which the {kind} schedule is laid out anew: " if lengths and now.schedule.steps is None else ""
    return (
        f"{lengths}{laid}the rate of step {step} is {plain(then, 3)}, after {plain(was, 3)} in the step before, and "
        f"ends at {plain(new.rate(new.total - 1), 3)}; for other rates set optimizer.lr or schedule.kind, with --change"
    )


def tell_changes(journal: Journal, changes: list[Change], step: int) -> None:
    """Write changes that were made on purpose into the history of a run."""
    if changes:
        named = [{"key": key, "old": old, "new": new} for key, old, new in changes]
        journal.log("change", step=step, changes=named)
    for key, old, new in changes:
        journal.note(f"changed at step {step}: {key}: {old!r} became {new!r}")


def tell_lengths(
    manifest: dict[str, Any], trainer: Trainer, run_dir: Path, patience: "Patience", metric: str
) -> list[str]:
    """Note that there is nothing left to do, or what another length or rate does to the learning rate."""
    if trainer.done >= trainer.total:
        return [
            f"this run is finished, with {trainer.done} of {trainer.total} steps; lengthen it with: "
            f"vitrail train {run_dir} run.steps={2 * trainer.done}"
        ]
    if patience.over:
        more = f"vitrail train {run_dir} run.patience=null, or a larger number"
        return [f"this run has ended: {patience.describe(metric)}; go on with: {more}"]
    before, batch = in_words_of_today(manifest["recipe"]), trainer.data.batch
    told = tell_rates(before, trainer.recipe, trainer.done, batch=batch, epoch=trainer.epoch)
    return [] if told is None else [told]


@dataclass
class Patience:
    """Counts evaluations whose score was not the best so far."""

    limit: int | None
    larger_is_better: bool
    best: float | None = None
    step: int = 0  # of the best
    waited: int = 0

    def see(self, score: float, step: int) -> None:
        better = self.best is None or (score > self.best if self.larger_is_better else score < self.best)
        if math.isfinite(score) and better:
            self.best, self.step, self.waited = score, step, 0
        else:
            self.waited += 1

    @property
    def over(self) -> bool:
        return self.limit is not None and self.waited >= self.limit

    def to_json(self) -> dict[str, Any]:
        return {"best": self.best, "step": self.step, "waited": self.waited}

    def restore(self, stored: Any, best: tuple[float, int] | None) -> None:
        """Go on from a checkpoint's count, or from its best score where it is older than the count."""
        if isinstance(stored, dict) and isinstance(stored.get("waited"), int):
            self.best, self.step, self.waited = stored.get("best"), stored["step"], stored["waited"]
        elif best is not None:
            self.best, self.step = best

    def describe(self, metric: str) -> str:
        best = "" if self.best is None else f"the best is {plain(self.best, 4)}, of step {self.step}"
        score = best or "it never had a value"
        return f"{metric} has not improved for {self.waited} evaluations (run.patience: {self.limit}); {score}"
