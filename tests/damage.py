"""What can happen to a checkpoint's files, by accident and on purpose."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo

from vitrail.sums import sealed, sum_of_file

TENSORS, METADATA, MANIFEST = FILES = ("__0_0.distcp", ".metadata", "manifest.json")
Damage = Callable[[Path], object]


def reseal(folder: Path, **changes: Any) -> None:
    """Make the manifest agree with the files again, as somebody would who wants them to be read."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("seal")
    for name, entry in manifest["files"].items():
        entry |= {"bytes": (folder / name).stat().st_size, "crc32": sum_of_file(folder / name)}
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest | changes), sort_keys=True))


# ---------------------------------------------------------------- accidents


def truncate(folder: Path, name: str, share: float) -> None:
    os.truncate(folder / name, int((folder / name).stat().st_size * share))


def flip(folder: Path, name: str, seed: int) -> None:
    """Turn over one bit somewhere in the file."""
    content = bytearray((folder / name).read_bytes())
    draw = random.Random(seed)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(content)


def link(path: Path) -> None:
    """Move a file or folder out of the way and put a link to it in its place."""
    outside = path.parent.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def put_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)  # reading it would wait for ever


def put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def put_other_step(folder: Path) -> None:
    other = next(p for p in sorted(folder.parent.glob("step-*")) if p != folder)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


# What is done to a checkpoint, and words of the sentence that it is refused with.
ACCIDENTS: dict[str, tuple[Damage, str]] = {
    **{
        f"{name} cut to {share:.0%}": (lambda f, name=name, share=share: truncate(f, name, share), name)
        for name in FILES
        for share in (0, 0.5, 0.99)
    },
    **{
        f"{name} bit {seed}": (lambda f, name=name, seed=seed: flip(f, name, seed), name)
        for name in FILES
        for seed in range(4)
    },
    **{f"no {name}": (lambda f, name=name: (f / name).unlink(), f"{name} is missing") for name in FILES},
    "empty folder": (lambda f: [(f / name).unlink() for name in FILES], "manifest.json is missing"),
    "extra file": (lambda f: (f / "__9_0.distcp").write_text("x"), "__9_0.distcp does not belong to it"),
    "extra folder": (lambda f: (f / "more").mkdir(), "more does not belong to it"),
    "linked tensors": (lambda f: link(f / TENSORS), f"{TENSORS} does not belong to it"),
    "linked metadata": (lambda f: link(f / METADATA), ".metadata does not belong to it"),
    "linked manifest": (lambda f: link(f / MANIFEST), "link"),
    "linked folder": (link, "link"),
    "pipe": (put_pipe, "manifest.json is missing"),
    "file instead": (put_file, "manifest.json is missing"),
    "another step": (put_other_step, "manifest.json is that of step"),
    **{
        f"format {odd!r}": (lambda f, odd=odd: reseal(f, format=odd), f"says that its version is {odd!r}")
        for odd in (0, -1, "2", 2.0, True, None, [])
    },
    "no samples": (lambda f: reseal(f, samples=None), "'samples'"),
    "words for a number": (lambda f: reseal(f, optimizer_steps="many"), "'optimizer_steps'"),
    "a list of files": (lambda f: reseal(f, files=[METADATA]), "manifest.json cannot be read"),
    "files without size": (lambda f: reseal(f, files={"x": {}}), "manifest.json cannot be read"),
    "a file outside": (lambda f: reseal(f, files={"../x": {"bytes": 1, "crc32": 1}}), "../x is missing"),
    "a list for a manifest": (lambda f: (f / MANIFEST).write_text("[1]"), "manifest.json cannot be read"),
    "a deep manifest": (lambda f: (f / MANIFEST).write_text("[" * 10**5), "manifest.json cannot be read"),
}


# ---------------------------------------------------------------- malice: pickles, assembled by hand

RECORDS = "torch.distributed.checkpoint.metadata"
MARKER = "marker"  # the file that appears in the working folder if a payload runs


def plain(value: Any) -> bytes:
    """The opcodes of a plain value, without the protocol before and the stop after."""
    return pickle.dumps(value, protocol=2)[2:-1]


def named(module: str, name: str) -> bytes:
    return plain(module) + plain(name) + pickle.STACK_GLOBAL


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def set_attribute(target: bytes, name: str, value: bytes) -> bytes:
    """Set an attribute of whatever `target` is, as for an object with slots."""
    state = pickle.NONE + pickle.EMPTY_DICT + plain(name) + value + pickle.SETITEM + pickle.TUPLE2
    return target + state + pickle.BUILD


def whole(opcodes: bytes) -> bytes:
    return pickle.PROTO + b"\x04" + opcodes + pickle.STOP


GETATTR = named("builtins", "getattr")
TOUCH = plain(f"touch {MARKER}")
MARKER_PATH = call(named("pathlib", "PosixPath"), plain(MARKER))


def good_metadata(folder: Path) -> parts.Metadata:
    return pickle.loads((folder / METADATA).read_bytes())


def hide_payload(folder: Path) -> bytes:
    """A call where good metadata has its planner's data."""
    metadata = good_metadata(folder)
    metadata.planner_data = "payload"
    return pickle.dumps(metadata, protocol=2).replace(plain("payload")[:-2], call(named("os", "system"), TOUCH), 1)


def add_bytes_entry(folder: Path) -> bytes:
    """PyTorch's own planner would unpickle this entry."""
    metadata = good_metadata(folder)
    metadata.state_dict_metadata["extra"] = parts.BytesStorageMetadata()
    metadata.storage_data[parts.MetadataIndex("extra")] = _StorageInfo(TENSORS, 0, 10)
    return pickle.dumps(metadata)


def move_tensors(path: Any) -> Callable[[Path], bytes]:
    def make(folder: Path) -> bytes:
        metadata = good_metadata(folder)
        for info in metadata.storage_data.values():
            info.relative_path = path
        return pickle.dumps(metadata)

    return make


def add_transforms(folder: Path) -> bytes:
    metadata = good_metadata(folder)
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("zip",)
    return pickle.dumps(metadata)


def put_parts(*boxes: tuple[tuple[int, int], ...]) -> Callable[[Path], bytes]:
    """Metadata with the weights [40, 30] in these parts: (start, size) along each axis."""

    def make(folder: Path) -> bytes:
        metadata = good_metadata(folder)
        entry: Any = metadata.state_dict_metadata["model.weight"]
        info = metadata.storage_data.pop(parts.MetadataIndex("model.weight", entry.chunks[0].offsets, 0))
        entry.chunks = [
            parts.ChunkStorageMetadata(torch.Size(s for s, _ in box), torch.Size(n for _, n in box)) for box in boxes
        ]
        start = info.offset
        for number, chunk in enumerate(entry.chunks):
            place = _StorageInfo(TENSORS, start, 8 * chunk.sizes.numel())
            start += place.length
            metadata.storage_data[parts.MetadataIndex("model.weight", chunk.offsets, number)] = place
        return pickle.dumps(metadata)

    return make


def share_bytes(folder: Path) -> bytes:
    """Two entries in the same place of the file."""
    metadata = good_metadata(folder)
    first, second = metadata.storage_data.values()
    second.offset, second.length = first.offset, first.length
    return pickle.dumps(metadata)


def change_place(**changes: int) -> Callable[[Path], bytes]:
    """Metadata where the place of the last part is another."""

    def make(folder: Path) -> bytes:
        metadata = good_metadata(folder)
        info = max(metadata.storage_data.values(), key=lambda info: info.offset)
        for name, change in changes.items():
            setattr(info, name, getattr(info, name) + change)
        return pickle.dumps(metadata)

    return make


def pairs(opcodes: bytes, wrap: Callable[[bytes], bytes] = bytes) -> bytes:
    """A pair of twice the same pair, and so on: 2 ** 60 parts, all of which a hash would visit."""
    for number in range(60):
        there = bytes([number])
        opcodes = wrap(opcodes + pickle.BINPUT + there + pickle.BINGET + there + pickle.TUPLE2)
    return opcodes


def as_index(name: bytes) -> bytes:
    """A MetadataIndex with this name."""
    state = pickle.MARK + plain("fqn") + name + plain("offset") + pickle.NONE + plain("index") + pickle.NONE
    state = pickle.EMPTY_DICT + state + pickle.SETITEMS
    return named(RECORDS, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD


def as_key(opcodes: bytes) -> bytes:
    return pickle.EMPTY_DICT + opcodes + pickle.NONE + pickle.SETITEM


def fixed(opcodes: bytes) -> Callable[[Path], bytes]:
    return lambda _: whole(opcodes)


# What the metadata is replaced with, and words of the refusal.
MALICE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "system": (fixed(call(named("os", "system"), TOUCH)), "asks for os.system"),
    "eval": (fixed(call(named("builtins", "eval"), plain(f"open({MARKER!r}, 'w')"))), "asks for builtins.eval"),
    "old protocol": (lambda _: f"cposix\nsystem\n(S'touch {MARKER}'\ntR.".encode(), "asks for posix.system"),
    "hidden in good metadata": (hide_payload, "asks for os.system"),
    "getattr of a module": (fixed(call(GETATTR, named("torch", "os"), plain("system"))), "asks for torch.os"),
    "getattr of a record": (
        fixed(call(GETATTR, named(RECORDS, "Metadata"), plain("__init__"))),
        "looks up an attribute",
    ),
    "getattr of an enumeration": (
        fixed(call(GETATTR, named(RECORDS, "_MEM_FORMAT_ENCODING"), plain("__class__"))),
        "looks up an attribute",
    ),
    "getattr of a path": (fixed(call(call(GETATTR, MARKER_PATH, plain("touch")))), "looks up an attribute"),
    "a dotted path": (
        fixed(call(named("pathlib", "PosixPath.touch"), MARKER_PATH)),
        "asks for pathlib.PosixPath.touch",
    ),
    "a dotted module": (fixed(call(named("torch", "os.system"), TOUCH)), "asks for torch.os.system"),
    "torch.load": (fixed(call(named("torch", "load"), plain("x"))), "asks for torch.load"),
    "attribute of a class": (
        fixed(set_attribute(named("pathlib", "PosixPath"), "exists", named("collections", "OrderedDict"))),
        "metadata",
    ),
    "attribute of a record": (
        fixed(set_attribute(named(RECORDS, "Metadata"), "version", plain("evil"))),
        "metadata",
    ),
    "attribute of a function": (
        fixed(set_attribute(named("torch.serialization", "_get_layout"), "cache", plain({"evil": 1}))),
        "metadata",
    ),
    "bytes entry": (add_bytes_entry, "'extra' is not a tensor"),
    "path up": (move_tensors("../../secret"), "not part of it: '../../secret'"),
    "absolute path": (move_tensors("/etc/passwd"), "not part of it: '/etc/passwd'"),
    "manifest as tensors": (move_tensors(MANIFEST), "not part of it"),
    "transforms": (add_transforms, "not part of it"),
    "not metadata": (fixed(plain([1, 2])), "not that of a checkpoint"),
    "an empty record": (fixed(call(named(RECORDS, "Metadata"))), "cannot be read"),
    "not a pickle": (lambda _: b"junk", "cannot be read"),
    "nothing": (lambda _: b"", "cannot be read"),
    "pairs of pairs as a key": (fixed(as_key(pairs(plain("x")))), "has too many parts"),
    "pairs of records as a key": (fixed(as_key(as_index(pairs(plain("x"), as_index)))), "a key that no checkpoint"),
    "pairs of records in a call": (
        fixed(call(named(RECORDS, "_MEM_FORMAT_ENCODING"), pairs(plain("x"), as_index))),
        "calls something with",
    ),
    "a file that is pairs of records": (
        move_tensors(parts.MetadataIndex("x")),
        "does not say where its parts are",
    ),
    "deep": (fixed(pickle.EMPTY_LIST * 10**5 + pickle.APPEND * (10**5 - 1)), "not that of a checkpoint"),
}


def put_metadata(folder: Path, make: Callable[[Path], bytes]) -> None:
    (folder / METADATA).write_bytes(make(folder))
    reseal(folder)


class Payload:
    """Touches the marker when it is unpickled without care."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARKER}",)


def put_in_tensors(folder: Path, content: Any, packed: int = zipfile.ZIP_STORED) -> None:
    """Replace the tensor file with something else that torch.save has written, once for each entry."""
    stream = io.BytesIO()
    torch.save(content, stream)
    with zipfile.ZipFile(stream, "a") as archive:  # as large as what is told
        archive.writestr("archive/more", random.Random(0).randbytes(16000), compress_type=packed)
    metadata, length = good_metadata(folder), len(stream.getvalue())
    (folder / TENSORS).write_bytes(stream.getvalue() * len(metadata.storage_data))
    for number, info in enumerate(metadata.storage_data.values()):
        info.offset, info.length = number * length, length
    put_metadata(folder, lambda _: pickle.dumps(metadata))
