"""What the samples of a run are, which is what its data were: their type, axes, variables and voxel size.

All of it is known without the data, from the run's recipe and from `data.json`, what its source said of itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import UserError
from vitrail.foreign import read_json

SUFFIXES = {"png": ".png", "tiff": ".tif", "ome-zarr": ".ome.zarr", "npy": ".npy"}
FORMATS = ("auto", *SUFFIXES)
DATA = "data.json"  # of a run: what its data said of themselves


@dataclass(frozen=True)
class Kind:
    """A sample is [C, *axes], a channel for each variable."""

    dtype: np.dtype
    axes: tuple[str, ...]
    variables: tuple[str, ...]
    spacing: tuple[float, ...]
    unit: str | None
    format: str  # how they are written

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.format]

    @property
    def value_range(self) -> tuple[float, float] | None:
        """That a type of few values has; the range of others is where their values lie."""
        if self.dtype not in (np.uint8, np.int8):
            return None
        limits = np.iinfo(self.dtype)
        return float(limits.min), float(limits.max)

    def describe(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "dtype": str(self.dtype),
            "axes": list(self.axes),
            "variables": list(self.variables),
            "spacing": list(self.spacing),
            "unit": self.unit,
        }


def read_facts(run: Path) -> dict[str, Any]:
    """What the training data of a run said of themselves; nothing, where that was not kept."""
    try:
        facts = read_json(run / DATA)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def of_samples(facts: Mapping[str, Any], entry: Any) -> dict[str, Any]:
    """Facts of a source as they are of its samples: an entry of a recipe may ask for slices, or for another spacing."""
    axes, spacing = list(facts.get("axes") or ()), list(facts.get("spacing") or ())
    wanted, across = getattr(entry, "spacing", None), getattr(entry, "slices", None)
    if wanted and len(wanted) == len(axes):
        spacing = list(wanted)
    if across in axes and len(spacing) == len(axes):
        del spacing[axes.index(across)]
        axes.remove(across)
    return {**facts, "axes": axes, "spacing": spacing}


def kind_of(facts: Mapping[str, Any], ndim: int, variables: Sequence[str], wanted: str) -> Kind:
    """Of samples with the data's own variables."""
    dtype, known = stored_type(facts.get("dtype", "float32")), len(facts.get("axes", ())) == ndim
    axes = tuple(facts["axes"]) if known else ("z", "y", "x")[-ndim:]
    spacing = tuple(facts.get("spacing") or ()) if known else ()
    unit = facts.get("unit") if spacing else None
    return Kind(
        dtype,
        axes,
        tuple(variables),
        spacing or (1.0,) * ndim,
        unit,
        choose_format(wanted, dtype, axes, len(variables)),
    )


def decoded_kind(facts: Mapping[str, Any], ndim: int, channels: int, wanted: str) -> Kind:
    """Of samples that a codec has decoded: as the data were before they became latents, where that was kept."""
    encoded = facts.get("codec") or {}
    told = encoded.get("data") or {}
    whole = {(0.0, 255.0): "uint8", (0.0, 65535.0): "uint16"}
    dtype = told.get("dtype") or whole.get(tuple(encoded.get("range") or ()), "float32")
    names = told.get("variables") or ()
    if len(names) != channels:
        names = ("red", "green", "blue") if channels == 3 else tuple(f"channel {c}" for c in range(channels))
    return kind_of({**told, "dtype": dtype}, ndim, names, wanted)


def stored_type(dtype: np.dtype | str) -> np.dtype:
    """The type of samples of data of some type: 32 bits at most, which is more than a model computes with."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "iu":
        return np.dtype(np.float32)
    return np.dtype(f"{dtype.kind}{min(dtype.itemsize, 4)}")


def choose_format(wanted: str, dtype: np.dtype, axes: Sequence[str], channels: int) -> str:
    """The format that was asked for, or the usual one of such samples; refused where it cannot hold them."""
    if wanted not in FORMATS:
        raise UserError(f"format: {wanted!r} is not known; choose one of {', '.join(FORMATS)}")
    flat, volume = len(axes) == 2, len(axes) == 3
    pixels = (dtype == np.uint8 and channels in (1, 3)) or (dtype == np.uint16 and channels == 1)
    if wanted == "auto":
        return "png" if flat and pixels else "ome-zarr" if volume and channels == 1 else "tiff"
    what = f"samples of {dtype} with {channels} channel{'s' * (channels > 1)} and axes {', '.join(axes)}"
    if wanted == "png" and not (flat and pixels):
        raise UserError(
            f"format: PNG holds images of uint8 with 1 or 3 channels or of uint16 with 1, not {what}; "
            "choose tiff or npy, or leave it out"
        )
    if wanted == "ome-zarr" and not (volume and channels == 1):
        raise UserError(
            f"format: OME-Zarr is written of volumes with 1 channel, not of {what}; choose tiff or npy, or leave it out"
        )
    return wanted
