"""PyTorch's distributed checkpoints, read without running code.

Two parts of that format can: the pickled `.metadata`, and entries that are not tensors. So tensors are all that is
saved, the metadata goes through an unpickler that knows just the names which such metadata is made of, and the load
planner refuses byte entries. Always on: checksums prove that a file is what was written, not who wrote it.
"""

import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

_ALLOWED = {
    ("builtins", "getattr"),  # how an enum's member is named; guarded below
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}


class UnsafeCheckpoint(ValueError):
    """The checkpoint holds something other than tensors and their description."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise UnsafeCheckpoint(f"its metadata asks for {module}.{name}, which no checkpoint needs")
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        return super().find_class(module, name)


def _enum_member(owner: Any, name: str) -> Any:
    import enum

    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise UnsafeCheckpoint("its metadata looks up an attribute, which no checkpoint needs")
    return owner[name]


class TensorReader(FileSystemReader):
    """Reads a checkpoint folder whose files are all listed in `files`."""

    def __init__(self, path: Path, files: set[str]):
        super().__init__(path)
        self.files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        raw = Path(self.path, ".metadata").read_bytes()
        try:
            metadata = _Unpickler(io.BytesIO(raw)).load()
        except UnsafeCheckpoint:
            raise
        except Exception as error:
            raise UnsafeCheckpoint(f"its metadata cannot be read ({type(error).__name__}: {error})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise UnsafeCheckpoint("its metadata is not that of a checkpoint")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise UnsafeCheckpoint(f"its entry {name!r} is not a tensor")
        for info in metadata.storage_data.values():
            if info.relative_path not in self.files or info.transform_descriptors:
                raise UnsafeCheckpoint(f"its metadata names a file that is not part of it: {info.relative_path!r}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


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
