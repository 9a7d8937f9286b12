"""A trained model by itself: a folder of one safetensors file and a config.json, opened as a run with one checkpoint.

- `model.safetensors` holds the parameters by their own names
- `config.json` is what a checkpoint's manifest is: the recipe, the statistics that values are normalised by, the step,
  and size and checksum of the weights; it carries a checksum of its own
- `recipe.yaml` is the recipe once more, for people and for verbs that begin with it
- `data.json`, where the run had one, is what its data said of themselves: names of variables, voxel size, type
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.contents import Layout, check_layout
from vitrail.errors import UserError
from vitrail.foreign import check_plain, read_json
from vitrail.layers.init import local_shard
from vitrail.sums import check_version, sealed, sum_of_file, unsealed

FORMAT = 1
CONFIG, WEIGHTS, DATA, RECIPE = "config.json", "model.safetensors", "data.json", "recipe.yaml"
LAYOUT = Layout("exported model", (CONFIG, WEIGHTS, DATA, RECIPE), ())
KEPT = ("step", "samples", "optimizer_steps", "skipped", "skipped_in_a_row", "threads", "statistics", "metrics")
PREFIX = {"ema": "ema.", "raw": "model."}  # of names in a checkpoint, by which weights these are


def is_exported(path: str | Path) -> bool:
    """Tell whether a folder holds a model that `vitrail export` has written."""
    return _read(Path(path)) is not None


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "vitrail_export" in found else None


def config_of(
    manifest: dict[str, Any], recipe: dict[str, Any], weights: str, made: Path, **more: Any
) -> dict[str, Any]:
    """Return what config.json says of the weights in a file, given the manifest of the checkpoint that they are of."""
    recipe = recipe | ({} if weights == "ema" else {"ema": None})  # whoever opens it gets what there is
    entry = {"bytes": made.stat().st_size, "crc32": sum_of_file(made)}
    kept = {key: manifest[key] for key in KEPT if key in manifest}
    told = {"vitrail_export": FORMAT, **more, "weights": weights, **kept, "recipe": recipe, "files": {WEIGHTS: entry}}
    return sealed(told)


def read_exported(folder: Path) -> dict[str, Any]:
    """Return the manifest of an exported model; refused where it is damaged."""
    check_layout(folder, LAYOUT)
    found = _read(folder) or {}
    check_version(found.get("vitrail_export"), FORMAT, str(folder))
    manifest, again = unsealed(found), "export it again"
    if manifest is None:
        raise UserError(f"{folder / CONFIG} does not match its own checksum; restore it, or {again}")
    file = folder / WEIGHTS
    try:
        entry, size = manifest["files"][WEIGHTS], file.stat().st_size
        same = (size, sum_of_file(file)) == (entry["bytes"], entry["crc32"]) and manifest["weights"] in PREFIX
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); restore it, or {again}") from None
    except (KeyError, TypeError):
        raise UserError(f"{folder / CONFIG} does not say what its weights are; restore it, or {again}") from None
    if not same:
        raise UserError(f"{file} does not match its checksum in {CONFIG}; restore it, or {again}")
    return manifest


def choose(folder: Path, manifest: dict[str, Any], checkpoint: str | int | None) -> None:
    """Refuse a checkpoint that is not the one that was exported."""
    if checkpoint not in (None, "best", "last") and str(checkpoint) != str(manifest["step"]):
        raise UserError(
            f"checkpoint: {checkpoint!r} is not in {folder}, which holds that of step {manifest['step']} alone; leave "
            "it out"
        )


def shapes_of(folder: Path, manifest: dict[str, Any]) -> dict[str, torch.Size]:
    """Return names, as in a checkpoint, and shapes of the tensors."""
    file, prefix = _open(folder / WEIGHTS), PREFIX[manifest["weights"]]
    return {prefix + name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def fill(folder: Path, manifest: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Fill plain or sharded tensors, named as in a checkpoint."""
    file, prefix = _open(folder / WEIGHTS), PREFIX[manifest["weights"]]
    for name, tensor in state.items():
        local, offset = local_shard(tensor)
        window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        if local.numel():
            local.copy_(file.get_tensor(name.removeprefix(prefix))[window])


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    check_plain(path)
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: this is not a whole safetensors file ({error}); export it again") from None
