"""CIFAR-10 in its binary version: data_batch_1.bin to data_batch_5.bin, test_batch.bin and batches.meta.txt.

A record is one byte of class and 3 x 32 x 32 bytes of red, green and blue. The version for Python is a pickle, and
opening a pickle can run code: it is refused.
"""

import re
from typing import Any, Literal

import numpy as np

from vitrail.data.files.handles import decoding
from vitrail.data.files.paths import (
    base_name,
    file_type,
    join,
    list_files,
    list_folders,
    local_copy,
    parent,
    read_bytes,
)
from vitrail.data.source import (
    ItemsConfig,
    ItemSource,
    LazySequence,
    choose_channels,
    normalize_window,
    whole_item,
)
from vitrail.errors import BadData, UserError
from vitrail.recipe import config

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes
FILES = {"train": r"data_batch_\d+\.bin", "test": r"test_batch\.bin", "all": r"(data_batch_\d+|test_batch)\.bin"}


@config
class Cifar10Config(ItemsConfig):
    """The folder of the binary version, or one of its files."""

    kind: Literal["cifar10"] = "cifar10"
    part: Literal["train", "test", "all"] = "train"  # of a folder

    def open(self) -> "Cifar10Source":
        """Check the sizes of the files and read the classes."""
        return Cifar10Source(self)


class Cifar10Source(ItemSource):
    """Images of 32 x 32 pixels in ten classes."""

    axes = ("y", "x")
    dtype = np.dtype("uint8")

    def __init__(self, settings: Cifar10Config) -> None:
        files = self._list_files(settings)
        self.records = [self._map(path) for path in files]
        self.alike = whole_item("", SHAPE[1:], None)
        self.shape, self._files = SHAPE[1:], [base_name(path) for path in files]
        self._firsts = np.cumsum([0, *(len(records) for records in self.records)])
        self.class_names = self._read_names(parent(files[0]))
        self.variables, self._channels = choose_channels(settings.variables, ("red", "green", "blue"), settings.path)
        self._classes = np.concatenate([records[:, 0] for records in self.records])
        wrong = np.flatnonzero(self._classes >= len(self.class_names))
        if len(wrong):
            raise BadData(
                f"{settings.path}: {self._name(int(wrong[0]))} has the class {self._classes[wrong[0]]}, but there are "
                f"{len(self.class_names)}; fetch the binary version of CIFAR-10 again"
            )
        super().__init__(settings, LazySequence(len(self._classes), self._name), self._classes)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, y, x]."""
        (top, bottom), (left, right) = normalize_window(SHAPE[1:], region)
        file, row = self._place(self.kept[item])
        pixels = self.records[file][row, 1:].reshape(SHAPE)
        return np.ascontiguousarray(pixels[self._channels, top:bottom, left:right])

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """Read whole images [B, C, y, x]."""
        numbers = self.kept[items]
        files = np.searchsorted(self._firsts, numbers, side="right") - 1
        records = np.empty((len(items), RECORD), np.uint8)
        for file in np.unique(files).tolist():
            here = np.flatnonzero(files == file)
            records[here] = np.take(np.asarray(self.records[file]), numbers[here] - self._firsts[file], axis=0)
        pixels = records[:, 1:].reshape(-1, *SHAPE)
        return pixels if self._channels == [0, 1, 2] else pixels[:, self._channels]

    def labels_of(self, items: np.ndarray) -> np.ndarray:
        """Return the classes of images [B]."""
        return self._classes[self.kept[items]]

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"files": self._files}

    def _place(self, number: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return file, int(number - self._firsts[file])

    def _name(self, number: int) -> str:
        file, row = self._place(number)
        return f"{self._files[file]}:{row}"

    def _list_files(self, settings: Cifar10Config) -> list[str]:
        path = settings.path
        if file_type(path) == "file":
            if not path.endswith(".bin"):
                raise UserError(self._refuse(path))
            return [path]
        if file_type(path) is None:
            raise UserError(f"data path {path!r} does not exist; check the spelling")
        for folder in ("cifar-10-batches-bin", "cifar-10-batches-py"):
            if folder in list_folders(path):
                path = join(path, folder)
                break
        names = list_files(path)
        found = [name for name in names if re.fullmatch(FILES[settings.part], name)]
        if not found and any(re.fullmatch(r"(data_batch_\d+|test_batch|batches\.meta)", name) for name in names):
            raise UserError(self._refuse(path))
        if not found:
            raise UserError(f"{path} holds no {settings.part} files of CIFAR-10 (data_batch_1.bin, ...); fetch them")
        numbers = [int(n) for name in found for n in re.findall(r"\d+", name)]
        missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
        if missing:
            raise UserError(f"{path} lacks data_batch_{missing[0]}.bin; fetch it")
        return [join(path, name) for name in found]

    def _refuse(self, path: str) -> str:
        return (
            f"{path} holds the version of CIFAR-10 for Python, a pickle, which can run code when it is opened and is "
            "never read here; fetch the binary version (cifar-10-binary.tar.gz) or parquet files"
        )

    def _map(self, path: str) -> np.ndarray:
        with decoding(path):
            place = local_copy(path)
            size = place.stat().st_size
            if not size or size % RECORD:
                raise BadData(
                    f"{path} has {size:,} bytes, which are not whole records of {RECORD:,}: it is cut short or no file "
                    "of CIFAR-10; fetch it again"
                )
            return np.memmap(place, np.uint8, "r").reshape(-1, RECORD)

    def _read_names(self, folder: str) -> tuple[str, ...]:
        if file_type(join(folder, "batches.meta.txt")) != "file":
            return CLASSES
        lines = read_bytes(join(folder, "batches.meta.txt")).decode("utf-8", "replace").split()
        return tuple(lines) or CLASSES
