"""HDF5 files, looked into before a library reads them.

- links, external storage and virtual datasets may lead to any file, and HDF5 would follow them by itself, to FIFOs and
  to other people's files too: they are followed here first, and what leads out of the file's own folder is refused,
  unless `--trust` was given
- packed chunks may become any number of bytes; those that can be large are measured before they are read
- words and lists have any length, and many may be the same one, kept once: a file of some megabytes can say that it
  holds any number of bytes. HDF5 tells their lengths by reading them alone: they are read few at a time, and refused
  once they are more than their file can hold if each is kept by itself
"""

import contextlib
import importlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.files.handles import library
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_plain, check_room, is_trusting, named_file, room

MOST_LINKS = 16  # as many as HDF5 itself follows
OTHER = object()  # stands for what a soft or external link leads to
MOST_DEPTH = 64  # of groups in groups
MOST_PARTS = 100_000  # files of a virtual dataset
DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000  # numbers of filters
BEST = {DEFLATE: 1032, LZF: 88}  # how many bytes can come of one

MOST_WORDS = 64  # of an attribute, which HDF5 reads as a whole, in a file of any size
FEW_BYTES = 64 << 20  # of words that may be the same: what was never written is one word, too
AT_ONCE = 4096  # words
AT_ONCE_BYTES = 256 << 20  # that they may have, if each is as large as the file
MOST_READS = 100_000
LETTER = 4  # bytes, in an array of words that are all as long as the longest
REMEDY = "save it anew, or give --trust if you know who made the file"

Large = dict[tuple[int, ...], Any]  # what HDF5 tells of chunks, by their first voxels


def _h5py() -> Any:
    return library("h5py", "hdf5")


class Found(NamedTuple):
    """The place of a node, by hard links alone."""

    file: Path
    name: str


def follow(files: Any, file: Path, key: str) -> Found | None:
    """Find where a key leads, None where nothing is; links are those of the file's own folder."""
    h5py, links = _h5py(), 0
    done: list[str] = []
    todo = _names(key)
    while todo:
        group = _open(files(file), ("/" + "/".join(done)).encode())
        if not isinstance(group, h5py.Group):
            return None
        name = todo.pop()
        if not group.id.links.exists(name.encode()):
            return None
        kind = group.id.links.get_info(name.encode()).type
        if kind == h5py.h5l.TYPE_HARD:
            done.append(name)
            continue
        links += 1
        if links > MOST_LINKS:
            raise BadData(f"{file}::{key} leads through more than {MOST_LINKS} links, or in a ring; link to the data")
        target = group.id.links.get_val(name.encode())
        if kind == h5py.h5l.TYPE_EXTERNAL:
            other, target = target
            file, done = _real(named_file(file, other.decode())), []
            if not file.exists():
                raise BadData(f"{file}, which {key!r} is linked to, does not exist; restore it")
        elif target.startswith(b"/"):
            done = []
        todo += _names(target.decode())
    return Found(file, "/" + "/".join(done))


def walk(group: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """List names and nodes below a group, by hard links; `OTHER` for another link, which is not followed.

    Each group is looked into once, by the first name that leads to it: of some groups that hold each other twice there
    are more names than any file has bytes. Not by HDF5's own visit, which has been seen to go on for ever.
    """
    h5py = _h5py()
    seen = {h5py.h5o.get_info(group.id).addr} if seen is None else seen
    if name.count("/") >= MOST_DEPTH:
        raise BadData(
            f"{group.file.filename} has groups in groups, more than {MOST_DEPTH} deep; copy the data out of it"
        )
    links: list[tuple[bytes, int]] = []
    group.id.links.iterate(lambda found, info: links.append((found, info.type)), info=True)
    for link, kind in sorted(links):
        below = f"{name}/{link.decode(errors='replace')}".lstrip("/")
        if kind != h5py.h5l.TYPE_HARD:
            yield below, OTHER
            continue
        node = _open(group, link)
        yield below, node
        place = h5py.h5o.get_info(group.id, link).addr
        if isinstance(node, h5py.Group) and place not in seen:
            seen.add(place)
            yield from walk(node, below, seen)


def open_here(files: Any, found: Found) -> Any:
    """Return the dataset at a place, or None."""
    node = _open(files(found.file), found.name.encode())
    return node if isinstance(node, _h5py().Dataset) else None


def virtual_parts(node: Any, file: Path) -> Iterator[tuple[Path | None, str, Any]]:
    """List (file, name, selection) of the parts of a virtual dataset; None for its own file."""
    for source in node.virtual_sources() if node.is_virtual else ():
        _check_pattern(file, source)
        if source.file_name == ".":
            yield None, _named(source.dset_name), source.vspace
            continue
        if "%b" not in source.file_name:
            yield _beside(file, _named(source.file_name)), _named(source.dset_name), source.vspace
            continue
        for number in count():  # a pattern of files, as many as there are
            part = _beside(file, _named(source.file_name, number))
            if not part.exists():
                break
            if number >= MOST_PARTS:
                raise BadData(f"{file} has parts in more than {MOST_PARTS:,} files; save the data in fewer")
            yield part, _named(source.dset_name, number), None


def _check_pattern(file: Path, source: Any) -> None:
    """Refuse names that HDF5 takes for others: of `%%` it makes `%`, of `%b` numbers; no other `%` can be written."""
    inner = source.dset_name if "%b" not in source.file_name else source.dset_name.replace("%b", "")
    for name in (source.file_name.replace("%b", ""), inner):
        if "%" in name and not is_trusting():
            raise BadData(
                f"{file} has a part in {source.file_name!r}, dataset {source.dset_name!r}: of names with % HDF5 makes "
                "others, and `%b` in the name of the file is the only one that is followed; name files and datasets "
                "without it, or give --trust if you know who made the file"
            )


def _named(name: str, number: int | None = None) -> str:
    """Return the name that HDF5 makes of one in a virtual dataset; of a name without a number, `%b` stays."""
    return re.sub("%[%b]", lambda found: "%" if found[0] == "%%" else "%b" if number is None else str(number), name)


def external_files(node: Any, file: Path) -> list[tuple[Path, int, int]]:
    """List (file, offset, size) of the storage of a dataset that lies outside its file."""
    return [(_beside(file, name), offset, size) for name, offset, size in node.external or ()]


def check_parts(files: Any, node: Any, file: Path, links: int = 0, known: dict[Found, int] | None = None) -> int:
    """Refuse a dataset that is read from files in other folders, or from bombs, however many datasets lie between.

    Each dataset is looked into once, however many parts it is; `known` tells how many lie behind it, as is returned.
    """
    known, most = {} if known is None else known, 0
    external_files(node, file)
    for part, name, _ in virtual_parts(node, file):
        if part is not None and not part.exists():
            continue
        found = follow(files, _real(part or file), name)
        if found is None:
            continue
        if found not in known and links < MOST_LINKS:
            if (inner := open_here(files, found)) is None:
                continue
            own = f"{found.file}::{found.name}"
            check_dataset(own, inner)
            check_known(own, inner)
            if not is_trusting():  # now, as HDF5 reads it by itself later
                check_chunks(own, inner, large_chunks(inner))
            known[found] = MOST_LINKS  # a ring, where it is met again behind itself
            known[found] = check_parts(files, inner, found.file, links + 1, known)
        most = max(most, 1 + known.get(found, 0))
        if links + most > MOST_LINKS:
            raise BadData(f"{file} has virtual datasets in a ring, or too many of each other; save the data themselves")
    return most


def check_whole(opened: Any, file: Path) -> None:
    """Refuse a file with any link, storage or part elsewhere: for libraries that would follow them by themselves."""
    if is_trusting():
        return
    h5py = _h5py()
    remedy = "copy the data into one file, or give --trust if you know who made it"
    for name, node in walk(opened):
        if node is OTHER:
            raise BadData(f"{file} has a link at {name!r}, which may lead to another file; {remedy}")
        if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
            raise BadData(f"{file} keeps the values of {name!r} in other files; {remedy}")


def check_dataset(name: str, dataset: Any) -> None:
    """Refuse chunks too large for memory, and filters of which any number of bytes may come (not with `--trust`)."""
    if dataset.chunks is None:
        return
    check_room(f"a chunk of {name}", _chunk_bytes(dataset))
    filters = [number for number in _filters(dataset) if number != FLETCHER32]
    if not is_trusting() and not (set(filters[:-1]) <= {SHUFFLE} and set(filters[-1:]) <= {SHUFFLE, *BEST}):
        raise BadData(
            f"{name} is packed by the HDF5 filters {_filter_names(dataset)}, of which any number of bytes may come; "
            "save it with gzip or lzf, once, or give --trust if you know who made the file, and install hdf5plugin "
            "if it needs that"
        )


def check_known(name: str, dataset: Any) -> None:
    """Refuse a dataset with filters that are not installed, of which HDF5 would say that a folder is missing."""
    known = _h5py().h5z.filter_avail
    if not all(map(known, _filters(dataset))):
        with contextlib.suppress(ImportError):
            importlib.import_module("hdf5plugin")  # adds its filters to those of h5py
    if not all(map(known, _filters(dataset))):
        raise UserError(
            f"{name} is packed by the HDF5 filters {_filter_names(dataset)}, which h5py does not have; install "
            "hdf5plugin, or save it with gzip or lzf"
        )


def large_chunks(dataset: Any) -> Large:
    """Find the packed chunks that may become more than fits in memory, by their size alone.

    For once, at opening: HDF5 finds what one chunk is stored as by a search of all of them.
    """
    large: Large = {}
    best = max((BEST.get(number, 0) for number in _filters(dataset)), default=0) if dataset.chunks else 0

    def note(chunk: Any) -> None:
        if chunk.size * best > room():  # HDF5 itself refuses others that are more than they say, once they are unpacked
            large[tuple(chunk.chunk_offset)] = chunk

    if best:
        dataset.id.chunk_iter(note)
    return large


def check_chunks(name: str, dataset: Any, large: Large, window: Sequence[slice] | None = None) -> None:
    """Refuse large chunks of a window that are more than they say: HDF5 unpacks them to their end."""
    if not large:
        return
    filters, size = _filters(dataset), _chunk_bytes(dataset)
    number, packing = next((n, f) for n, f in enumerate(filters) if f in BEST)
    touched: Iterable[tuple[int, ...]] = large
    if window is not None:
        touched = product(*(range(w.start // c * c, w.stop, c) for w, c in zip(window, dataset.chunks, strict=True)))
    for corner in touched:
        stored = large.get(corner)
        if stored is None:
            continue
        check_room(f"a packed chunk of {name}", stored.size)
        if stored.filter_mask >> number & 1 or set(filters[number + 1 :]) - {FLETCHER32}:
            continue
        # A checksum may lie in what is packed; one behind it is no part of the stream.
        if packing == LZF or len(_inflate(dataset.id.read_direct_chunk(corner)[1], size + 5)) > size + 4:
            raise BadData(f"{name}: the chunk at voxel {list(corner)} holds more than {size:,} bytes; restore the file")


def _inflate(data: bytes, most: int) -> bytes:
    return zlib.decompressobj().decompress(data, most)


def _chunk_bytes(dataset: Any) -> int:
    return math.prod(dataset.chunks) * dataset.dtype.itemsize


def _filters(dataset: Any) -> list[int]:
    """Return the numbers of a dataset's filters, in the order in which they are applied when it is written."""
    plist = dataset.id.get_create_plist()
    return [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]


def _filter_names(dataset: Any) -> str:
    """Return the names of the filters, as the file tells them, with their numbers."""
    plist = dataset.id.get_create_plist()
    told = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return ", ".join(f"{name.decode(errors='replace')[:60]!r} ({number})" for number, _, _, name in told)


def _open(group: Any, name: bytes) -> Any:
    """Open a dataset or group below a group, else None; files that it names are beside its own, not where we work.

    Datasets are opened in this way alone: HDF5 refuses one that is open already with another prefix.
    """
    h5py = _h5py()
    kind = h5py.h5o.get_info(group.id, name).type
    if kind == h5py.h5o.TYPE_GROUP:
        return h5py.Group(h5py.h5g.open(group.id, name))
    if kind != h5py.h5o.TYPE_DATASET:
        return None
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(b"${ORIGIN}")
    access.set_virtual_prefix(b"${ORIGIN}")
    return h5py.Dataset(h5py.h5d.open(group.id, name, access))


def _beside(file: Path, name: str) -> Path:
    place = named_file(file, name)
    # HDF5 looks there, too, where the file is not beside.
    if not place.exists() and Path(name).exists() and not is_trusting():
        raise BadData(f"{file} names the file {name!r}, which does not lie in its own folder; copy it there")
    return place


def _real(file: Path) -> Path:
    check_plain(file)
    return file.resolve()


def _names(path: str) -> list[str]:
    """Return the names of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def depth(dtype: np.dtype) -> int:
    """Return 0 where values have a size, 1 for words and lists, 2 for those inside others, which may be any number."""
    h5py = _h5py()
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
    """A count of the bytes of all words of a file; more than it has are refused, unless `--trust` is given."""

    def __init__(self, place: Path) -> None:
        self.place, self.size = place, place.stat().st_size
        self.count = 0

    def check_attributes(self, name: str, node: Any) -> None:
        """Look at the attributes of a node, for libraries that read all of them."""
        h5py = _h5py()
        for number in range(0 if is_trusting() else h5py.h5a.get_num_attrs(node.id)):
            # By numbers: h5py finds names by opening the node again, which HDF5 refuses (see `_open`).
            found = h5py.h5a.open(node.id, index=number, order=h5py.h5.ITER_NATIVE)
            key = f"the attribute {found.name.decode(errors='replace')!r} of {name}"
            if found.shape is None or not self._is_variable(key, found.dtype):
                continue
            words = math.prod(found.shape)
            if words > MOST_WORDS and words * self.size > room() // 4:
                raise BadData(f"{key} has {words:,} words, which may be the same; {REMEDY}")
            self._add(key, node.attrs[found.name])

    def check_dataset(self, name: str, dataset: Any) -> None:
        """Look at a dataset of one axis or none that is read as a whole."""
        if is_trusting() or not self._is_variable(name, dataset.dtype):
            return
        at_once = max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, self.size)))
        if dataset.size > at_once * MOST_READS:
            raise BadData(f"{name} has {dataset.size:,} words, too many to be looked at; {REMEDY}")
        longest, parts = 0, list[Any]([()])
        if dataset.ndim:
            parts = [slice(start, start + at_once) for start in range(0, len(dataset), at_once)]
        for part in parts:
            longest = max(longest, self._add(name, dataset[part]))
            check_room(name, dataset.size * longest * LETTER)

    def _is_variable(self, name: str, dtype: np.dtype) -> bool:
        if (found := depth(dtype)) > 1:
            raise BadData(f"{name} has values of no size inside others ({dtype}); {REMEDY}")
        return found > 0

    def _add(self, name: str, values: Any) -> int:
        """Count some words; return the bytes of the longest."""
        sizes = [_size(value) for value in (values.ravel() if isinstance(values, np.ndarray) else [values])]
        self.count += sum(sizes)
        if self.count > max(FEW_BYTES, self.size):
            raise BadData(
                f"the words of {self.place} become more than {max(FEW_BYTES, self.size):,} bytes, at {name}, and it "
                f"has {self.size:,}: many of them are the same one; {REMEDY}"
            )
        return max(sizes, default=0)


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    return value.nbytes if isinstance(value, np.ndarray) else 8  # a reference
