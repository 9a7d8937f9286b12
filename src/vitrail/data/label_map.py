"""Stored values of labels as numbers of classes: `label_map: {255: 1}`."""

from collections.abc import Mapping

import numpy as np

from vitrail.errors import UserError


def check_label_map(mapping: Mapping[int, int], dtype: np.dtype, path: str) -> None:
    for value in mapping.values():
        if not fits(value, dtype):
            raise UserError(
                f"label_map = {dict(mapping)} of {path} maps to {value}, which is no {dtype}, the type of the labels; "
                "choose another number"
            )


def map_labels(values: np.ndarray, mapping: Mapping[int, int]) -> np.ndarray:
    """The labels with some values changed; other values stay as they are."""
    if not mapping:
        return values
    mapped = values.copy()
    for value, number in mapping.items():
        mapped[values == value] = number
    return mapped


def fits(value: float, dtype: np.dtype) -> bool:
    """Whether a type can hold a number."""
    if dtype.kind == "f":
        return bool(np.isfinite(value))
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(low <= value <= high and value == int(value))
