"""Weights on disk, opened without running code: safetensors, PyTorch files read as plain tensors, and vitrail's runs.

Tensors are read one at a time, when they are asked for, so that no rank needs room for the whole model.
"""

import argparse
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.foreign import Program, check_plain, check_saved, open_plain, read_json
from vitrail.weights.exported import is_exported
from vitrail.weights.runs import (
    BadCheckpoint,
    find_checkpoint,
    load_tensors,
    stored_recipe,
    stored_tensors,
    which_weights,
)
from vitrail.weights.safe_dcp import UnsafeCheckpoint

# Where training scripts put the weights in their files; averaged ones first, as they are the better ones.
NESTED = (
    "model_ema",
    "ema",
    "state_dict_ema",
    "teacher",
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "network",
    "module",
    "weights",
)
WRAPPERS = ("module.", "_orig_mod.", "teacher.backbone.", "student.backbone.", "backbone.", "model.", "net.")
FILES = (  # in the folders of the Hugging Face hub; the last two are diffusers'
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
READ_AT_ONCE = 4 << 30  # bytes of a run's weights up to which they are read at once


@dataclass
class Weights:
    """Names, shapes and tensors of one file, and what is known of the model that they belong to."""

    path: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    config: Any = None  # of a vitrail run: the config of its model
    settings: dict[str, Any] | None = None  # config.json beside a Hugging Face file
    classes: tuple[str, ...] | None = None  # of a vitrail run that classifies: their names, in order
    notes: list[str] = field(default_factory=list)

    def renamed(self, names: Mapping[str, str]) -> "Weights":
        """Return the same tensors under other names: new name -> name in the file."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        return replace(self, shapes=shapes, read=lambda new: self.read(names[new]))


def open_weights(given: str | Path | Mapping[str, Tensor]) -> Weights:
    """Open a file, a folder (of a vitrail run or checkpoint, or as the Hugging Face hub makes them) or a state dict."""
    if not isinstance(given, str | Path):
        return unwrapped(_from_tree(given, "the state dict given"))
    path = Path(given)
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; give weights (.safetensors, .pt) or a vitrail run")
    if path.is_dir():
        if (path / "manifest.json").is_file() or (path / "checkpoints").is_dir() or is_exported(path):
            return _open_run(path)
        if (path / ".metadata").is_file():
            return unwrapped(_open_dcp(path))
        return unwrapped(_open_folder(path))
    check_plain(path)
    if path.suffix == ".safetensors":
        opened = _open_safetensors(path)
    elif path.name.endswith(".safetensors.index.json"):
        opened = _open_index(path)
    elif path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        opened = _open_torch(path)
    else:
        raise UserError(f"{path}: weights are read from .safetensors, .pt, .pth, .bin and .ckpt, or from a run folder")
    opened.settings = _settings(path.parent)
    return unwrapped(opened)


def unwrapped(weights: Weights) -> Weights:
    """Take off what wrappers put before names; other tensors keep theirs."""
    for _ in range(3):
        found = next(
            (w for w in WRAPPERS if sum(n.startswith(w) for n in weights.shapes) > len(weights.shapes) / 2), ""
        )
        if not found:
            break
        weights = weights.renamed({name.removeprefix(found): name for name in weights.shapes})
    return weights


def _settings(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------- safetensors


def _open_safetensors(path: Path) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: this is not a whole safetensors file ({error}); fetch it again") from None
    return Weights(str(path), shapes, file.get_tensor)


def _open_index(path: Path) -> Weights:
    """Open a model in several safetensors files by the list of what is where."""
    try:
        table = read_json(path)["weight_map"]
        names = sorted(set(table.values()))
        outside = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: it does not list which tensor is in which file; fetch it again") from None
    if outside:
        raise UserError(f"{path}: it names {outside[0]!r}, which does not lie beside it")
    for name in names:
        check_plain(path.parent / name)
    parts = {name: _open_safetensors(path.parent / name) for name in names}
    missing = [name for name, part in table.items() if name not in parts[part].shapes]
    if missing:
        raise UserError(f"{path}: {table[missing[0]]} does not hold {missing[0]!r}; fetch the files again")
    shapes = {name: parts[part].shapes[name] for name, part in table.items()}
    return Weights(str(path), shapes, lambda name: parts[table[name]].read(name))


def _open_folder(path: Path) -> Weights:
    for name in FILES:
        if (path / name).is_file():
            opened = open_weights(path / name)
            opened.path = str(path)
            return opened
    raise UserError(
        f"{path}: this folder holds no weights; expected a vitrail run (checkpoints/), "
        "or model.safetensors or pytorch_model.bin with its config.json"
    )


# ---------------------------------------------------------------- PyTorch's own files


def _open_torch(path: Path) -> Weights:
    def load(**options: Any) -> Any:
        # Training scripts keep their arguments beside the weights: a plain record, whose making runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, **options)

    try:
        with open_plain(path) as file:
            check_saved(file, path.stat().st_size)
        try:
            tree = load(mmap=True)
        except (RuntimeError, ValueError):  # files of old versions cannot be mapped
            tree = load()
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error):
            raise UserError(
                f"{path}: it holds Python objects besides tensors, and reading those would run code; save the tensors "
                "alone where you trust the file: safetensors.torch.save_file(state_dict, 'weights.safetensors')"
            ) from None
        raise UserError(f"{path}: this is not a file of PyTorch weights; fetch it again") from None
    except Program:
        raise UserError(
            f"{path}: it is a TorchScript program, which holds more than weights; save its state_dict where you trust "
            "it: torch.save(torch.jit.load(path).state_dict(), 'weights.pt')"
        ) from None
    except Exception as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: it cannot be read ({words}); fetch it again") from None
    opened = _from_tree(tree, str(path))
    for name in opened.shapes:
        tensor = opened.read(name)
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        # Views may repeat the same few bytes without an end.
        if not plain or tensor.numel() * tensor.itemsize > path.stat().st_size:
            raise UserError(f"{path}: its tensor {name!r} is not stored as plain numbers, each of them; save a copy")
    return opened


def _from_tree(tree: Any, path: str) -> Weights:
    """Find the tensors of a state dict, looked for where training scripts put them."""
    notes = []
    for _ in range(3):
        inside = tree if isinstance(tree, Mapping) else {}
        inner = next((key for key in NESTED if isinstance(inside.get(key), Mapping) and inside[key]), None)
        if inner is None:
            break
        tree = inside[inner]
        notes.append(f"taken from {inner!r} in the file")
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: a mapping of names to tensors was expected, not {type(tree).__name__}")
    tensors = {
        str(name): value.detach()
        for name, value in tree.items()
        if isinstance(name, str | int) and isinstance(value, Tensor)
    }
    if not tensors:
        keys = ", ".join(repr(str(key)) for key in tree if isinstance(key, str | int))[:200]
        raise UserError(
            f"{path}: no tensors were found in it (keys: {keys}); expected a state dict, or one under 'model'"
        )
    return Weights(path, {n: tuple(t.shape) for n, t in tensors.items()}, tensors.__getitem__, notes=notes)


# ---------------------------------------------------------------- vitrail's own runs


def _open_run(path: Path) -> Weights:
    """Open the newest good checkpoint of a run, or the one named; averaged weights where the run has them."""
    run, step = path, None
    if (path / "manifest.json").is_file():
        run, step = path.parent.parent, path.name.removeprefix("step-")
    folder, manifest = find_checkpoint(run, step)
    recipe = stored_recipe(manifest)
    prefix = "ema." if which_weights(None, recipe) == "ema" else "model."
    shapes, read = _tensors_of(folder, manifest, stored_tensors(folder, manifest), prefix, "checkpoint of this run")
    notes = [f"{'averaged' if prefix == 'ema.' else 'plain'} weights of step {manifest['step']}"]
    if fitted := manifest.get("statistics"):
        mean, std = (", ".join(f"{value:.4g}" for value in fitted[key]) for key in ("mean", "std"))
        notes.append(f"the run's images were normalised by mean {mean} and std {std}")
    classes = getattr(recipe.objective, "names", None)
    return Weights(str(path), shapes, read, config=recipe.model, classes=classes, notes=notes)


def _tensors_of(
    folder: Path, manifest: dict[str, Any], stored: Mapping[str, torch.Size], prefix: str, another: str
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """Return the shapes of the tensors below a prefix, without it, and what reads one; `another` is what to try else.

    A small checkpoint is read in one go, as each load reads the metadata again; a large one tensor by tensor.
    """
    shapes = {name.removeprefix(prefix): tuple(size) for name, size in stored.items() if name.startswith(prefix)}
    small = 4 * sum(math.prod(shape) for shape in shapes.values()) <= READ_AT_ONCE
    kept: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if name not in kept:
            state = {prefix + one: torch.empty(shapes[one]) for one in (shapes if small else [name])}
            try:
                load_tensors(folder, manifest, state)
            except (BadCheckpoint, UnsafeCheckpoint) as error:
                raise UserError(f"{folder}: {error}; try another {another}") from None
            found = {one.removeprefix(prefix): tensor for one, tensor in state.items()}
            if not small:
                return found[name]
            kept.update(found)
        return kept[name]

    return shapes, read


# ---------------------------------------------------------------- checkpoints of torchtitan


def _open_dcp(path: Path) -> Weights:
    """Open the folder of a distributed checkpoint: the model's tensors in it, and nothing that is not a tensor."""
    files = {p.name: None for p in path.iterdir() if p.suffix == ".distcp" and p.is_file() and not p.is_symlink()}
    folder = {"files": files, "foreign": True}
    try:
        found = stored_tensors(path, folder)
    except UnsafeCheckpoint as error:
        raise UserError(f"{path}: {error}; save the model's tensors as safetensors where you trust it") from None
    prefix = "model." if any(name.startswith("model.") for name in found) else ""
    found.pop(f"{prefix}freqs_cis", None)  # complex, and computed here
    shapes, read = _tensors_of(path, folder, found, prefix, "checkpoint")
    return Weights(str(path), shapes, read)
