"""Runs on disk, read without running code: their checkpoints, the recipes in these, and the trained model.

A checkpoint is a folder `step-00000200` of tensor files (torch.distributed.checkpoint) and a `manifest.json` that holds
everything else and the size and checksum of every file. A folder with a good manifest is whole; anything else is not a
checkpoint.
"""

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vitrail.contents import check_contents, check_name
from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import BadData, UserError
from vitrail.foreign import read_json
from vitrail.models.model import Model
from vitrail.parallel.agree import Group, gather_json, on_chief
from vitrail.recipe import Recipe, load_recipe
from vitrail.recipe.load import as_meant, diff
from vitrail.sums import check_version, sum_of_file, sum_of_tree
from vitrail.weights import exported
from vitrail.weights.safe_dcp import TensorPlanner, TensorReader, UnsafeCheckpoint

T = TypeVar("T")
ATTEMPTS = 10  # to read a checkpoint of a run that goes on and removes them
FORMAT = 2
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {  # of manifests, from each format to the next
    1: lambda manifest: manifest | {"data": None},  # which did not tell what its data were
}
MANIFEST = "manifest.json"
KEYS = {  # what a run needs to continue, and what it is made of
    "step": int,
    "samples": int,
    "optimizer_steps": int,
    "skipped": int,
    "skipped_in_a_row": int,
    "threads": int,
    "statistics": dict,
    "recipe": dict,
}


class CheckpointVanished(UserError):
    """A checkpoint was removed while it was read; told by all ranks alike, so that together they try the next."""


class BadCheckpoint(ValueError):
    """A checkpoint that must not be loaded; the message says what is wrong with it."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """List published checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest, if it is intact and every file it lists is there with the right size."""
    if folder.is_symlink() or (folder / MANIFEST).is_symlink():
        raise BadCheckpoint("it is a link, which may lead anywhere")
    try:
        if not (folder / MANIFEST).is_file():
            raise BadCheckpoint(f"{MANIFEST} is missing")
        manifest = read_json(folder / MANIFEST)
        seal = manifest.pop("seal")
        if seal != sum_of_tree(manifest):
            raise BadCheckpoint(f"{MANIFEST} does not match its own checksum")
        manifest = _upgraded(folder, manifest)
        files = {name: (int(entry["bytes"]), int(entry["crc32"])) for name, entry in manifest["files"].items()}
        present = {p.name: p for p in folder.iterdir() if p.name != MANIFEST}
    except BadData as error:
        raise BadCheckpoint(str(error)) from None
    except (BadCheckpoint, UserError):
        raise
    except Exception as error:
        raise BadCheckpoint(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    check_keys(manifest, MANIFEST)
    if folder.name != checkpoint_name(manifest["step"]):
        raise BadCheckpoint(f"{MANIFEST} is that of step {manifest['step']}")
    for name in sorted(files.keys() | present.keys()):
        if name not in present:
            raise BadCheckpoint(f"{name} is missing")
        if name not in files or present[name].is_symlink() or not present[name].is_file():
            raise BadCheckpoint(f"{name} does not belong to it")
        size = present[name].stat().st_size
        if size != files[name][0]:
            raise BadCheckpoint(f"{name} has {size} bytes instead of {files[name][0]}")
    return manifest


def check_keys(manifest: dict[str, Any], name: str) -> None:
    """Refuse a manifest, of a file with this name, that lacks what a checkpoint tells."""
    for key, kind in KEYS.items():
        if not isinstance(manifest.get(key), kind):
            raise BadCheckpoint(f"{name} has {manifest.get(key)!r} for {key!r}, which should be {kind.__name__}")
    if not _are_statistics(manifest["statistics"]):
        raise BadCheckpoint(f"{name} has statistics that are no finite means and positive stds of some variables")


def _are_statistics(found: dict[str, Any]) -> bool:
    """Tell whether these are the shared mean and std of each variable, and those of entries where they have any."""

    def is_pair(mean: Any, std: Any) -> bool:
        if not isinstance(mean, list) or not isinstance(std, list) or len(mean) != len(std):
            return False
        numbers = [*mean, *std]
        plain = all(isinstance(one, int | float) and abs(one) <= sys.float_info.max for one in numbers)
        return plain and all(one > 0 for one in std)

    entries, places = found.get("entries", []), found.get("places", [])
    if not isinstance(entries, list) or not isinstance(places, list):
        return False
    pairs = [[found.get("mean"), found.get("std")], *entries]
    return all(isinstance(pair, list) and len(pair) == 2 and is_pair(*pair) for pair in pairs)


def _upgraded(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Bring a manifest to today's format; refuse one of a newer vitrail, which must not be passed over."""
    found = manifest["format"]
    try:
        version = check_version(found, FORMAT, str(folder))
    except UserError as error:
        if isinstance(found, int) and found > FORMAT:
            raise
        raise BadCheckpoint(str(error)) from None
    for number in range(version, FORMAT):
        manifest = UPGRADES[number](manifest)
    return manifest | {"format": FORMAT}


def verify(folder: Path, manifest: dict[str, Any], *, rank: int = 0, world: int = 1) -> None:
    """Compare checksums of this rank's share of the files."""
    for name in sorted(manifest["files"])[rank::world]:
        if sum_of_file(folder / name) != manifest["files"][name]["crc32"]:
            raise BadCheckpoint(f"{name} does not match its checksum")


def stored_tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, torch.Size]:
    """Return names and shapes of the tensors in a verified checkpoint."""
    if "vitrail_export" in manifest:
        return exported.shapes_of(folder, manifest)
    metadata = _reader(folder, manifest).read_metadata()
    entries = metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _reader(folder: Path, manifest: dict[str, Any]) -> TensorReader:
    return TensorReader(folder, set(manifest["files"]), foreign=manifest.get("foreign") is True)


def load_tensors(folder: Path, manifest: dict[str, Any], state: dict[str, Tensor], group: Group = None) -> None:
    """Fill the (sharded or plain) tensors in place from a verified checkpoint."""
    check_tensors(stored_tensors(folder, manifest), state)
    read_tensors(folder, manifest, state, group)


def check_tensors(stored: dict[str, torch.Size], state: dict[str, Tensor]) -> None:
    """Refuse a checkpoint that lacks some of these tensors, or has them in another shape."""
    for name, tensor in state.items():
        if name not in stored:
            raise BadCheckpoint(f"it has no tensor {name!r}, so it was made by a different model")
        if stored[name] != tensor.shape:
            raise BadCheckpoint(f"{name!r} has shape {list(stored[name])}, the model wants {list(tensor.shape)}")


def read_tensors(folder: Path, manifest: dict[str, Any], state: dict[str, Tensor], group: Group) -> None:
    """Fill tensors that were checked; what cannot be read is a BadCheckpoint on every rank."""
    if "vitrail_export" in manifest:
        return exported.fill(folder, manifest, state)
    reader = _reader(folder, manifest)
    # Without a group PyTorch warns that it loads in a single process, which is what is asked for.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        dcp.load(state, storage_reader=reader, planner=TensorPlanner(), process_group=group, no_dist=group is None)
    except CheckpointException as error:  # raised on every rank
        raise BadCheckpoint(f"its tensors cannot be read ({reason_of(error)})") from None


def reason_of(error: BaseException) -> str:
    """Return the first cause in one line: PyTorch wraps it in a report of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    words = str(error) if isinstance(error, UnsafeCheckpoint) else f"{type(error).__name__}: {error}"
    return words.splitlines()[0]


# ---------------------------------------------------------------- runs


def load(run: str | Path, *, checkpoint: str | int | None = None, weights: str | None = None) -> Model:
    """Return the trained model of a run, on the CPU and ready to be called; averaged weights where the run has them."""

    return with_checkpoint(run, checkpoint, lambda path, manifest: read_model(path, manifest, weights))


def read_model(path: Path, manifest: dict[str, Any], weights: str | None = None) -> Model:
    """Return the model of a verified checkpoint, on the CPU and ready to be called."""
    recipe = stored_recipe(manifest)
    with torch.device("meta"):
        model: Model = recipe.model.build()
    model.to_empty(device="cpu")
    load_weights(model, path, manifest, which_weights(weights, recipe), None)
    return model.eval()


def stored_recipe(manifest: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe inside a checkpoint; it is complete, so it may extend no other file."""
    if "extends" in manifest["recipe"]:
        raise UserError("the recipe in this checkpoint extends another file, which no checkpoint of a run does")
    stored = as_meant(manifest["recipe"])
    recipe = load_recipe(stored, overrides)
    if overrides:  # another model would take those of the weights that have the same names, and compute something else
        trees = (load_recipe(stored).to_tree()["model"], recipe.to_tree()["model"])
        for key, old, new in diff(*trees, "model"):
            if not key.startswith("model.mask"):  # what is hidden has no weights: another share may be asked for
                raise UserError(
                    f"{key}: {old!r} became {new!r}; what a checkpoint holds cannot be changed; leave it out"
                )
    return recipe


def with_checkpoint(
    run: str | Path,
    checkpoint: str | int | None,
    use: Callable[[Path, dict[str, Any]], T],
    group: Group = None,
) -> T:
    """Call `use` with a verified checkpoint and its manifest; with the next one if the run removes it meanwhile.

    Rank 0 of the group chooses, since a run that goes on saves and removes checkpoints; without one, this process is
    alone. What else one rank refuses, a broken image say, ends it at once: the others are computing, and would not
    hear a question.
    """

    def choose() -> tuple[str, dict[str, Any]]:
        path, manifest = find_checkpoint(run, checkpoint)
        return str(path), manifest

    for _ in range(ATTEMPTS):
        path, manifest = choose() if group is None else on_chief(choose, group)
        try:
            return use(Path(path), manifest)
        except CheckpointVanished:
            continue
    raise UserError(
        f"{run}: its checkpoints are removed faster than they can be read; try again when the run has ended"
    )


def list_or_refuse(run: str | Path, checkpoint: str | int | None) -> list[Path]:
    """List the checkpoints of a run that were asked for, newest first: of a step, the "last" or the "best"."""
    check_name(Path(run), "run folder")
    if exported.is_exported(run):
        return [Path(run)]
    folder = Path(run) / "checkpoints"
    found = list_checkpoints(folder)
    checkpoint = None if checkpoint == "last" else checkpoint
    if checkpoint == "best" and found:
        checkpoint = find_best(run, found)
    elif checkpoint not in (None, "best") and not str(checkpoint).isdecimal():
        raise UserError(f"checkpoint: {checkpoint!r} is not a step; give a number such as 200, or one of best and last")
    if checkpoint is not None:
        found = [p for p in found if p.name == checkpoint_name(int(checkpoint))] if checkpoint != "best" else []
    if not found:
        wanted = "checkpoint" if checkpoint in (None, "best") else f"checkpoint of step {checkpoint}"
        have = ", ".join(str(int(p.name[5:])) for p in list_checkpoints(folder)) or "none"
        raise UserError(f"{run}: no {wanted} here (there are: {have}); give the folder of a run that has saved one")
    return found


def best_step(folders: Sequence[Path]) -> tuple[int, str, float] | None:
    """Find the best of some checkpoints by what each says of held-out data: its step, the metric and its value.

    None where none was measured. The metric is the one by which the run keeps its best; of equals the first is best.
    """
    best: tuple[int, str, float] | None = None
    for folder in sorted(folders):
        try:
            manifest = read_manifest(folder)
        except BadCheckpoint:
            continue
        recipe = stored_recipe(manifest)
        objective = recipe.objective.build(recipe.model, stored_statistics(manifest["statistics"]))
        name = recipe.checkpoint.best or objective.best_metric
        value = (manifest.get("metrics") or {}).get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if best is None or (value > best[2] if name in objective.larger_is_better else value < best[2]):
            best = (manifest["step"], name, float(value))
    return best


def find_best(run: str | Path, folders: Sequence[Path]) -> int:
    """Return the step of the best of some checkpoints of a run."""
    best = best_step(folders)
    if best is None:
        raise UserError(
            f"{run}: none of its checkpoints was measured on held-out data, so none is best; give a step, or leave "
            "it out for the newest (data.valid and eval.every make a run measure)"
        )
    return best[0]


def find_checkpoint(run: str | Path, checkpoint: str | int | None) -> tuple[Path, dict[str, Any]]:
    """Return a verified checkpoint of a run: of a step, the best one, or the newest good one.

    An exported model is one, too.
    """
    if exported.is_exported(run):
        manifest = exported.read_exported(Path(run))
        try:
            check_keys(manifest, exported.CONFIG)
        except BadCheckpoint as error:
            raise UserError(f"{run}: {error}; export it again") from None
        exported.choose(Path(run), manifest, checkpoint)
        return Path(run), manifest
    for _ in range(ATTEMPTS):
        problems, listed = [], list_or_refuse(run, checkpoint)
        check_contents(Path(run), reading=True)
        for path in listed:
            try:
                manifest = read_manifest(path)
                verify(path, manifest)
                stored_tensors(path, manifest)
                return path, manifest
            except (BadCheckpoint, UnsafeCheckpoint, OSError) as error:
                problems.append(f"{path.name}: {error}")
        if list_or_refuse(run, checkpoint) == listed:  # otherwise the run has saved and removed some meanwhile
            break
    raise UserError(f"{run}: no usable checkpoint ({'; '.join(problems)})")


def which_weights(weights: str | None, recipe: Recipe) -> str:
    if weights not in (None, "ema", "raw"):
        raise UserError(f"weights: {weights!r} is unknown; ask for 'ema' or 'raw'")
    if weights == "ema" and recipe.ema is None:
        raise UserError("weights: this run has no moving average; ask for 'raw'")
    return weights or ("ema" if recipe.ema else "raw")


def load_weights(model: Model, path: Path, manifest: dict[str, Any], weights: str, group: Group) -> None:
    """Fill a model, of which each rank of the group may have a part; all that is stored must have a place in it.

    Without a group this process has all of it. Ends alike on all ranks, whichever of them finds what is wrong.
    """
    if manifest.get("weights", weights) != weights:  # of an exported model, which has but one kind
        raise UserError(f"weights: {path} holds the averaged ones alone; ask for 'ema', or leave it out")
    prefix = "ema" if weights == "ema" else "model"
    state = {f"{prefix}.{name}": p.detach() for name, p in model.named_parameters()}
    told: dict[str, Any] = {"names": list(state), "problem": None}
    stored: list[str] = []
    try:
        known = stored_tensors(path, manifest)
        stored = [name for name in known if name.startswith(f"{prefix}.")]
        check_tensors(known, state)
    except (BadCheckpoint, UnsafeCheckpoint, OSError) as error:
        told["problem"] = str(error)
    ranks = [told] if group is None else gather_json(told, group)
    problem = next((rank["problem"] for rank in ranks if rank["problem"]), None)
    taken = {name for rank in ranks for name in rank["names"]}
    unused = next((name for name in stored if name not in taken), None)
    if problem is None and unused is not None:
        problem = f"it has a tensor {unused!r} that the model lacks, so it was made by a different model"
    try:
        if problem is not None:
            raise BadCheckpoint(problem)
        read_tensors(path, manifest, state, group)
    except BadCheckpoint as error:
        there = os.path.exists(path)
        gone = not all([there] if group is None else gather_json(there, group))
        kind = CheckpointVanished if gone else UserError
        raise kind(f"checkpoint {path} was not loaded: {error}; try another one of this run") from None
