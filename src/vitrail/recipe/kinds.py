"""The kinds a recipe may name: slot -> name -> the config class, imported only when it is named.

Built-in kinds are in the table below. Others come from an installed entry point (group `vitrail.<slot>`, loaded only
when named) or from `register`, called by a module given with `--plugin` (plugins.py).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import metadata
from typing import Any

from vitrail.errors import UserError

BUILT_IN: dict[str, dict[str, str]] = {
    "model": {
        "vit": "vitrail.models.vit:ViTConfig",
        "study_vit": "vitrail.models.vit:StudyViTConfig",
        "mae": "vitrail.models.mae:MAEConfig",
        "unetr": "vitrail.models.unetr:UNETRConfig",
        "sap": "vitrail.models.sap:SAPConfig",
        "diffusion_vit": "vitrail.models.diffusion_vit:DiffusionViTConfig",
        "dit": "vitrail.models.dit:DiTConfig",
        "autoencoder": "vitrail.models.autoencoder:AutoencoderConfig",
    },
    "objective": {
        "reconstruct": "vitrail.objectives.reconstruct:ReconstructConfig",
        "classify": "vitrail.objectives.classify:ClassifyConfig",
        "segment": "vitrail.objectives.segment:SegmentConfig",
        "affinities": "vitrail.objectives.affinities:AffinitiesConfig",
        "autoencode": "vitrail.objectives.autoencode:AutoencodeConfig",
        "denoise": "vitrail.objectives.denoise:DenoiseConfig",
        "flow": "vitrail.objectives.flow:FlowConfig",
    },
    "score": {},  # what adaptive trees follow: users' own beside those of layers/scores.py
    "source": {
        "ome_zarr": "vitrail.data.sources.zarr:OmeZarrConfig",
        "zarr": "vitrail.data.sources.zarr:ZarrConfig",
        "n5": "vitrail.data.sources.zarr:N5Config",
        "nifti": "vitrail.data.sources.arrays:NiftiConfig",
        "tiff": "vitrail.data.sources.tiff:TiffConfig",
        "hdf5": "vitrail.data.sources.hdf5:Hdf5Config",
        "numpy": "vitrail.data.sources.arrays:NumpyConfig",
        "netcdf": "vitrail.data.sources.netcdf:NetcdfConfig",
        "geotiff": "vitrail.data.sources.geotiff:GeotiffConfig",
        "image_folder": "vitrail.data.sources.image_folder:ImageFolderConfig",
        "parquet": "vitrail.data.sources.shards:ParquetConfig",
        "webdataset": "vitrail.data.sources.shards:WebdatasetConfig",
        "cifar10": "vitrail.data.sources.items:Cifar10Config",
        "latents": "vitrail.data.sources.items:LatentsConfig",
        "synthetic": "vitrail.data.sources.items:SyntheticConfig",
        "dummy": "vitrail.data.sources.items:DummyConfig",
    },
    "codec": {
        "identity": "vitrail.codecs:IdentityConfig",
        "kl": "vitrail.codecs.kl:KLConfig",
        "torchscript": "vitrail.codecs.torchscript:TorchScriptConfig",
        "autoencoder": "vitrail.codecs.own:AutoencoderCodecConfig",
    },
    "optimizer": {
        "adamw": "vitrail.training.optimizers.adam:AdamWConfig",
        "adam": "vitrail.training.optimizers.adam:AdamConfig",
        "sgd": "vitrail.training.optimizers.sgd:SGDConfig",
        "lion": "vitrail.training.optimizers.lion:LionConfig",
        "muon": "vitrail.training.optimizers.muon:MuonConfig",
    },
    "schedule": {
        "cosine": "vitrail.training.schedule:CosineConfig",
        "linear": "vitrail.training.schedule:LinearConfig",
        "constant": "vitrail.training.schedule:ConstantConfig",
    },
    "augmentation": {},  # further changes of samples: users' own beside the keys of data.augment
    "sampler": {
        "ancestral": "vitrail.diffusion.samplers:AncestralConfig",
        "ddim": "vitrail.diffusion.samplers:DDIMConfig",
        "euler": "vitrail.diffusion.samplers:EulerConfig",
        "heun": "vitrail.diffusion.samplers:HeunConfig",
    },
    "logger": {
        "tensorboard": "vitrail.training.loggers.tensorboard:TensorboardConfig",
        "wandb": "vitrail.training.loggers.wandb:WandbConfig",
        "mlflow": "vitrail.training.loggers.mlflow:MlflowConfig",
    },
}

# Modules whose distribution has another name, so that the right extra is found for them.
_DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "flash_attn": "flash-attn-4",
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}

# What a class of a slot must have, since the rest of the software asks for it, and where that is inherited from.
_MEMBERS = {
    "model": (("build", "ndim", "channels", "shape"), "docs/plugins.md"),
    "objective": (("build",), "docs/plugins.md"),
    "source": (("open",), "GridConfig (vitrail.data.grid) or CONTRIBUTING.md"),
    "schedule": (("steps", "warmup", "rate"), "ScheduleConfig (vitrail.training.schedule)"),
    "optimizer": (("lr", "update"), "OptimizerConfig (vitrail.training.optimizers.optimizer)"),
    "score": (("score",), "docs/models.md"),
}

_registered: dict[str, dict[str, type]] = {slot: {} for slot in BUILT_IN}


def register(slot: str, name: str, cls: type) -> type:
    """Add a kind from a plugin, and return its class; a name that is taken by another class is refused."""
    _check_slot(slot)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"kind {name!r}: a kind's name is lower-case letters, digits and _, starting with a letter")
    _check_class(slot, name, cls)
    taken = BUILT_IN[slot].get(name) or _registered[slot].get(name)
    if taken is not None and taken is not cls and taken != f"{cls.__module__}:{cls.__qualname__}":
        raise UserError(f"kind {name!r}: the name is already taken by another {slot}; choose another name")
    if name not in BUILT_IN[slot]:
        members, origin = _MEMBERS.get(slot, ((), ""))
        there = {*dir(cls), *(field.name for field in fields(cls))}
        lacking = [member for member in members if member not in there]
        if lacking := [*lacking, *sorted(getattr(cls, "__abstractmethods__", ()))]:
            raise UserError(f"{slot} kind {name!r}: {cls.__qualname__} has no {' and no '.join(lacking)}; see {origin}")
        _registered[slot][name] = cls
    return cls


def find(slot: str, name: str, *, key: str | None = None) -> type:
    """Return the config class of a kind; `key` is where the recipe names it, for the error's sentence."""
    _check_slot(slot)
    key = key or f"{slot}.kind"
    if name in BUILT_IN[slot]:
        return _load(slot, name, BUILT_IN[slot][name], key)
    if name in _registered[slot]:
        return _registered[slot][name]
    for point in metadata.entry_points(group=f"vitrail.{slot}"):
        if point.name == name:
            return _load(slot, name, point.value, key)
    raise UserError(_unknown(slot, name, key))


def check_known(slot: str, name: str, key: str) -> None:
    """Refuse a name that no kind has; nothing is imported for it."""
    if name not in known(slot):
        raise UserError(_unknown(slot, name, key))


def make(slot: str, given: Mapping[str, Any], *, key: str) -> Any:
    """Make a kind from its mapping in a recipe, checked key by key."""
    from pydantic import TypeAdapter, ValidationError

    cls = find(slot, str(given.get("kind")), key=f"{key}.kind")
    try:
        return TypeAdapter(cls).validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, (key, *first["loc"])))
        raise UserError(f"{where}: {first['msg']}") from None


def guess_source(path: str) -> str:
    """Return the kind of source that data at a path look like."""
    guess: Callable[[str], str] = importlib.import_module("vitrail.data.sources").guess_kind
    return guess(path)


def known(slot: str) -> list[str]:
    """List every name of a slot, sorted; nothing is imported for it."""
    _check_slot(slot)
    installed = (point.name for point in metadata.entry_points(group=f"vitrail.{slot}"))
    return sorted({*BUILT_IN[slot], *_registered[slot], *installed})


def registered() -> list[type]:
    """List the config classes that plugins have added."""
    return [cls for classes in _registered.values() for cls in classes.values()]


def nearest(word: str, choices: list[str]) -> str | None:
    """Return the choice spelt most like `word`, if one is near."""
    folded = {choice.casefold(): choice for choice in choices}
    found = get_close_matches(word.casefold(), list(folded), n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def _check_slot(slot: str) -> None:
    if slot not in BUILT_IN:
        raise UserError(f"slot {slot!r}: there is no such slot of kinds; the slots are {', '.join(BUILT_IN)}")


def _check_class(slot: str, name: str, cls: Any) -> None:
    """Refuse a class that is no config whose field `kind` has the kind's name as its default."""
    defaults = {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else {}
    if not isinstance(cls, type) or "__pydantic_config__" not in vars(cls) or defaults.get("kind") != name:
        raise UserError(
            f"{slot} kind {name!r}: {getattr(cls, '__qualname__', cls)!r} must be a class made with @config "
            f'that has the field kind: Literal["{name}"] = "{name}".'
        )


def _load(slot: str, name: str, target: str, key: str) -> type:
    """Import "module:Class", and say which extra to install when a library is missing."""
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        raise UserError(f"{key}: {name!r} needs {missing}, which is not installed; {remedy(missing)}") from error
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}: {name!r} cannot be imported from {target}: {_words(error)}") from error
    _check_class(slot, name, cls)
    return cls


def remedy(module: str) -> str:
    """Say what to install for a missing module: the extra that holds its distribution, or the distribution itself."""
    top = module.partition(".")[0]
    distribution = _plain(_DISTRIBUTIONS.get(top, top))
    try:
        requirements = metadata.requires("vitrail") or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        wanted = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", requirement)
        if wanted and extra and _plain(wanted.group()) == distribution:
            return f'pip install "vitrail[{extra.group(1)}]"'
    return f"pip install {distribution}"


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _unknown(slot: str, name: str, key: str) -> str:
    names = known(slot)
    near = nearest(name, names)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"{key}: {name!r} is not a known {slot}{hint} (known: {', '.join(names)}; a plugin's needs --plugin MODULE)"


def _words(error: BaseException) -> str:
    """Return an error's message on one line, without its final stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
