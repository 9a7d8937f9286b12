"""PyTorch's distributed checkpoints, read without running code; all that is not public of them is used here alone.

Two parts of that format can: the pickled `.metadata`, and entries that are not tensors. So tensors are all that is
saved, the metadata goes through an unpickler that knows just the names which such metadata is made of, and the load
planner refuses byte entries. Always on: checksums prove that a file is what was written, not who wrote it. Parts
of metadata are seen to be plain before they are hashed, compared or shown: records may share others many times over.
"""

import contextlib
import io
import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Generator
from pathlib import Path, PosixPath
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.utils import _ReaderView
from torch.serialization import _get_layout

from vitrail.errors import BadData
from vitrail.foreign import Unpickler, check_saved, largest, read_plain


class UnsafeCheckpoint(ValueError):
    """The checkpoint holds something other than tensors and their description."""


_RECORDS: dict[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        _StorageInfo,
        parts.BytesStorageMetadata,  # known, so that the refusal below can name the entry, or pass it over
        parts.ChunkStorageMetadata,
        parts.Metadata,
        parts.MetadataIndex,
        parts.StorageMeta,
        parts.TensorProperties,
        parts.TensorStorageMetadata,
    )
}
_BYTES = parts.BytesStorageMetadata
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,  # its name in Python 3.13
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): _get_layout,
}


class _Stub:
    """Stands for something that metadata may call, and nothing else: pickle can set attributes of what it is handed."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        if not all(isinstance(one, str | int | type | PosixPath | _Stub) or _is_shape(one) for one in arguments):
            raise UnsafeCheckpoint("its metadata calls something with what no checkpoint needs")
        return self._call(*arguments)


class _MemoryFormat(_Stub):
    """The one enumeration in metadata; its members are looked up by value or, with getattr, by name."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(parts._MEM_FORMAT_ENCODING)


def _member(owner: Any, name: Any) -> Any:
    """Look up a member of the enumeration; all that is left of getattr."""
    if not isinstance(owner, _MemoryFormat) or name not in parts._MEM_FORMAT_ENCODING.__members__:
        raise UnsafeCheckpoint("its metadata looks up an attribute, which no checkpoint needs")
    return parts._MEM_FORMAT_ENCODING[name]


def _is_shape(found: Any) -> bool:
    return isinstance(found, tuple) and all(isinstance(part, int) for part in found)


def _is_index(found: Any) -> bool:
    """Tell whether this says which part of which tensor is meant."""
    if not isinstance(found, parts.MetadataIndex) or not isinstance(found.fqn, str):
        return False
    return isinstance(found.offset, torch.Size | None) and isinstance(found.index, int | None)


class _Unpickler(Unpickler):
    def check_key(self, key: Any) -> None:
        if not isinstance(key, str) and not _is_index(key):
            raise UnsafeCheckpoint("its metadata has a key that no checkpoint needs")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in _RECORDS:
            kind = _RECORDS[module, name]
            # A class of its own that makes empty records of the real one, whose own attributes stay out of reach.
            return type(name, (), {"__new__": lambda _cls, *_arguments: object.__new__(kind)})
        if (module, name) in _CALLS:
            return _Stub(_CALLS[module, name])
        if (module, name) == ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"):
            return _MemoryFormat()
        if (module, name) == ("builtins", "getattr"):
            return _Stub(_member)
        raise UnsafeCheckpoint(f"its metadata asks for {module}.{name}, which no checkpoint needs")


class TensorReader(FileSystemReader):
    """Reads a checkpoint folder whose files are all listed in `files`.

    `foreign`: entries that are not tensors, which other programs save besides, are passed over and never read.
    """

    def __init__(self, path: Path, files: set[str], *, foreign: bool = False):
        super().__init__(path)
        self.files, self.foreign = files, foreign

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            raw = read_plain(Path(self.path, ".metadata"), largest())
        except BadData as error:
            raise UnsafeCheckpoint(str(error)) from None
        members = {member: dict(vars(member)) for member in parts._MEM_FORMAT_ENCODING}
        try:
            metadata = _Unpickler(io.BytesIO(raw)).load()
            if any(vars(member) != kept for member, kept in members.items()):
                raise UnsafeCheckpoint("its metadata changes a constant of PyTorch")
            self._check(metadata)
        except UnsafeCheckpoint:
            raise
        except Exception as error:
            raise UnsafeCheckpoint(f"its metadata cannot be read ({type(error).__name__}: {error})") from None
        finally:
            for member, kept in members.items():  # pickle sets attributes of what it is handed, and these are shared
                vars(member).clear()
                vars(member).update(kept)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _check(self, metadata: Any) -> None:
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_meta, StorageMeta | None):
            raise UnsafeCheckpoint("its metadata is not that of a checkpoint")
        for index, info in metadata.storage_data.items():
            plain = _is_index(index) and isinstance(info, _StorageInfo) and isinstance(info.relative_path, str)
            if not plain or not _is_shape((info.offset, info.length)):
                raise UnsafeCheckpoint("its metadata does not say where its parts are")
        if self.foreign:
            bytes_of = {n for n, entry in metadata.state_dict_metadata.items() if type(entry) is _BYTES}
            for name in bytes_of:
                del metadata.state_dict_metadata[name]
            for index in [index for index in metadata.storage_data if index.fqn in bytes_of]:
                del metadata.storage_data[index]
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
                shown = repr(name) if isinstance(name, str) else "without a name"
                raise UnsafeCheckpoint(f"its entry {shown} is not a tensor")
            shapes = [entry.size, *(shape for chunk in entry.chunks for shape in (chunk.offsets, chunk.sizes))]
            if not all(isinstance(shape, torch.Size) for shape in shapes):
                raise UnsafeCheckpoint(f"its entry {name!r} has no shape")
            if not _tiles(entry):  # PyTorch would leave the rest of the tensor as it was, without a word
                raise UnsafeCheckpoint(f"its entry {name!r} is not covered by what is stored of it")
            for chunk in entry.chunks:
                found = metadata.storage_data.get(parts.MetadataIndex(name, chunk.offsets))
                if found is None:
                    raise UnsafeCheckpoint(f"its entry {name!r} has a part that no file holds")
                if chunk.sizes.numel() * entry.properties.dtype.itemsize > found.length:
                    raise UnsafeCheckpoint(f"its entry {name!r} is larger than what is stored of it")
        for info in metadata.storage_data.values():
            if info.relative_path not in self.files or info.transform_descriptors:
                raise UnsafeCheckpoint(f"its metadata names a file that is not part of it: {info.relative_path!r}")
        sizes = {file: Path(self.path, file).stat().st_size for file in self.files}
        # Two parts that lie in the same bytes: one of them would silently be read as the other.
        places = sorted((info.relative_path, info.offset, info.length) for info in metadata.storage_data.values())
        for (file, start, length), (other, begin, _) in itertools.pairwise(places):
            if start < 0 or length < 0 or (file == other and start + length > begin):
                raise UnsafeCheckpoint(f"its parts overlap in {file}")
        for file, start, length in places:
            if start + length > sizes[file]:
                raise UnsafeCheckpoint(f"its parts reach beyond the end of {file}")

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        """Give PyTorch the part that it is about to load, once that is seen to be plain."""
        part = cast(IO[bytes], _Part(file, sinfo.offset, sinfo.length))
        check_saved(part, sinfo.length)
        part.seek(0)
        return part


class _Part(_ReaderView):
    """A part of a file that counts from its end as files do; PyTorch's own counts beyond it."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence)


def _tiles(entry: TensorStorageMetadata) -> bool:
    """Tell whether the stored parts of a tensor fill it: inside, without overlap, and of its volume together."""
    boxes = [tuple(zip(c.offsets, c.sizes, strict=True)) for c in entry.chunks]
    inside = all(o >= 0 and o + s <= whole for box in boxes for (o, s), whole in zip(box, entry.size, strict=True))
    filled = sum(math.prod(s for _, s in box) for box in boxes) == entry.size.numel()
    apart = inside and filled and _apart(boxes)
    return inside and filled and (apart or entry.size.numel() == 0)


def _apart(boxes: list[tuple[tuple[int, int], ...]]) -> bool:
    """Tell whether no two meet: cut where no box lies across, again and again. There may be too many for pairs.

    Whatever is sharded can be cut so; boxes around a hole that turns like a pinwheel cannot, and count as not apart.
    """
    if len(boxes) < 2:
        return True
    for axis in range(len(boxes[0])):
        groups: list[list[Any]] = []
        reach = 0
        for box in sorted(boxes, key=lambda box: box[axis]):
            start, size = box[axis]
            if not groups or start >= reach:
                groups.append([])
            groups[-1].append(box)
            reach = max(reach, start + size)
        if len(groups) > 1:
            return all(map(_apart, groups))
    return False


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors into tensors of the same shape; refuses anything else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if any(item.type == LoadItemType.BYTE_IO for item in new_plan.items):
            raise UnsafeCheckpoint("it holds an entry that is not a tensor")
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnsafeCheckpoint(f"its entry {read_item.dest_index.fqn!r} is not a tensor")


class TensorWriter(FileSystemWriter):
    """Writes into a folder that is there, and flushes each file."""

    def __init__(self, path: Path):
        super().__init__(path, sync_files=True, thread_count=1)
        self.fs = _Folder()


class _Folder(FileSystem):
    """Makes no folder: PyTorch would make all that lead to it again where a run was moved away during a save."""

    def mkdir(self, path: Any) -> None:
        pass

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        """Raise what the disk said: PyTorch's archives count what they have written and say "unexpected pos"."""
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
