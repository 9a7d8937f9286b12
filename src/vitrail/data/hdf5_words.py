"""Words and lists of HDF5, which have any length: a file keeps them apart, and many may be the same one, kept once.

A file of some megabytes can so say that it holds any number of bytes. HDF5 tells their lengths by reading them alone:
they are read few at a time here, and refused once they are more than their file can hold if each is kept by itself.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.formats import library
from vitrail.errors import BadData
from vitrail.foreign import check_room, is_trusting
from vitrail.memory import room

MOST_WORDS = 64  # of an attribute, which HDF5 reads as a whole, in a file of any size
FEW_BYTES = 64 << 20  # of words that may be the same: what was never written is one word, too
AT_ONCE = 4096  # words
AT_ONCE_BYTES = 256 << 20  # that they may have, if each is as large as the file
MOST_READS = 100_000
LETTER = 4  # bytes, in an array of words that are all as long as the longest
REMEDY = "save it anew, or give --trust if you know who made the file"


def depth(dtype: np.dtype) -> int:
    """0 where values have a size, 1 for words and lists, 2 for those inside others, of which any number may come."""
    h5py = library("h5py", "hdf5")
    if not dtype.hasobject or h5py.check_ref_dtype(dtype) is not None:
        return 0
    if h5py.check_string_dtype(dtype) is not None:
        return 1
    if (inner := h5py.check_vlen_dtype(dtype)) is not None:
        return 1 + (depth(np.dtype(inner)) > 0)
    if dtype.fields is not None:
        return 2 * any(depth(field[0]) for field in dtype.fields.values())
    return 2 if dtype.subdtype is None else 2 * (depth(dtype.subdtype[0]) > 0)


class Words:
    """Counts the bytes of all words of a file; more than it has are refused, unless `--trust` is given."""

    def __init__(self, place: Path) -> None:
        self.place, self.size = place, place.stat().st_size
        self.count = 0

    def check_attributes(self, name: str, node: Any) -> None:
        """For libraries that read all of them."""
        for found in () if is_trusting() else _attributes(node):
            key = f"the attribute {found.name.decode(errors='replace')!r} of {name}"
            if found.shape is None or not self._is_variable(key, found.dtype):
                continue
            words = math.prod(found.shape)
            if words > MOST_WORDS and words * self.size > room() // 4:
                raise BadData(f"{key} has {words:,} words, which may be the same; {REMEDY}")
            self._add(key, node.attrs[found.name])

    def check_dataset(self, name: str, dataset: Any) -> None:
        """For a dataset of one axis or none that is read as a whole."""
        if is_trusting() or not self._is_variable(name, dataset.dtype):
            return
        at_once = max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, self.size)))
        if dataset.size > at_once * MOST_READS:
            raise BadData(f"{name} has {dataset.size:,} words, too many to be looked at; {REMEDY}")
        longest = 0
        for part in _parts(dataset, at_once):
            longest = max(longest, self._add(name, part))
            check_room(name, dataset.size * longest * LETTER)

    def _is_variable(self, name: str, dtype: np.dtype) -> bool:
        if (found := depth(dtype)) > 1:
            raise BadData(f"{name} has values of no size inside others ({dtype}); {REMEDY}")
        return found > 0

    def _add(self, name: str, values: Any) -> int:
        """The bytes of the longest."""
        sizes = [_size(value) for value in (values.ravel() if isinstance(values, np.ndarray) else [values])]
        self.count += sum(sizes)
        if self.count > max(FEW_BYTES, self.size):
            raise BadData(
                f"the words of {self.place} become more than {max(FEW_BYTES, self.size):,} bytes, at {name}, and it "
                f"has {self.size:,}: many of them are the same one; {REMEDY}"
            )
        return max(sizes, default=0)


def _attributes(node: Any) -> Iterator[Any]:
    """By their numbers: h5py finds their names by opening the node again, as HDF5 refuses (`_open` of hdf5_links)."""
    h5py = library("h5py", "hdf5")
    for number in range(h5py.h5a.get_num_attrs(node.id)):
        yield h5py.h5a.open(node.id, index=number, order=h5py.h5.ITER_NATIVE)


def _parts(dataset: Any, at_once: int) -> Iterator[Any]:
    if dataset.ndim == 0:
        yield dataset[()]
        return
    for start in itertools.count(0, at_once):
        if start >= len(dataset):
            return
        yield dataset[start : start + at_once]


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return value.nbytes if isinstance(value, np.ndarray) else 8  # a reference
