"""Decoded chunks of stored arrays, kept and shared: crops are copied straight out of them.

- `ChunkReader` reads one chunk of a local array: its file, decoded by a bare decoder that releases the GIL
- `ChunkCache` keeps what was decoded within a number of bytes. `shared` is the one that all sources of a process use;
  set its `limit`. Blocks of sources without chunks of their own are kept in the same way (data/reading/reader.py)
- absent chunks raise MissingData, or count and read as the fill value; files of no bytes or cut short raise BadData
- `open_array` opens an array with its axes and place; where its layout is not known here, tensorstore reads it
"""

import itertools
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.chunks.layout import Index, Layout, read_layout, read_names
from vitrail.data.files.places import Place, Remote, as_folder, fetch_remote, is_longer
from vitrail.data.reading.pool import Pool, Stopped
from vitrail.data.stored import Stored, Window
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import check_plain, check_room, open_descriptor
from vitrail.launch.world import find_world, share_of_cores

DEFAULT_BYTES = 512 * 2**20
LEAST = 512  # bytes that a kept chunk counts for, however small it is: the objects around it take as many
ALONE = 64  # chunks that one thread reads by itself; other threads help with more
# A thread that decodes takes the GIL several times a chunk from the one that launches kernels: four of them decode some
# GB/s, sixteen made steps of a training take four times as long.
MOST_HELPERS = 4
ABSENT = 2**64 - 1  # in the index of a shard
REMEDY = "restore the file or leave it out with `region`"

_numbers = itertools.count()


class ChunkReader:
    """The chunks of one array, local or remote. Any thread may decode; nothing is kept but the indices of shards."""

    def __init__(self, array: Place, layout: Layout, *, fill: bool = False):
        self.array, self.layout, self.fill = array, layout, fill
        self.number = next(_numbers)  # names the array in a cache
        self.shape, self.grid, self.dtype = layout.shape, layout.grid, layout.dtype
        self.chunk_bytes = math.prod(self.grid) * self.dtype.itemsize
        check_room(f"a chunk of {array}", self.chunk_bytes)
        if layout.shards is not None:
            check_room(f"the index of a shard of {array}", layout.shards.index_bytes)
        self.filled = 0  # chunks that were absent and read as the fill value
        self.decoded = 0  # chunks, for those who measure
        self._prefix = f"{array}/"
        self._fetch = _fetch_remote if isinstance(array, Remote) else _read_file
        self._most = largest_file(self.chunk_bytes) if layout.most is None else layout.most
        self._index = lru_cache(maxsize=1024)(self._read_index)

    def decode(self, index: Index, memory: np.ndarray | None = None) -> np.ndarray:
        """Decode one whole chunk, also where it reaches beyond the array; into `memory` (bytes) if there is any."""
        path = self._path(index)
        if memory is None:
            memory = np.empty(self.chunk_bytes, np.uint8)
        values = memory.view(self.dtype).reshape(self.grid)
        try:
            self._unpack(self._read_stored(path, index), index, memory, values)
        except FileNotFoundError:
            self._refuse_absent(path, index)
            values[...] = self.layout.fill
        except (OSError, BadData, MemoryError):
            raise  # of the system; those that may pass are tried again by the reader
        except Exception as error:  # decoders have errors of their own
            raise BadData(f"{self._place(path, index)} cannot be read: {_say(error)}; {REMEDY}") from error
        self.decoded += 1
        return values

    def read_stored(self, index: Index) -> bytes:
        """Read the bytes of a chunk as they are stored; FileNotFoundError where it is absent."""
        return self._read_stored(self._path(index), index)

    def _path(self, index: Index) -> str:
        shards = self.layout.shards
        file = index if shards is None else tuple(i // n for i, n in zip(index, shards.chunks, strict=True))
        name = self.layout.name(file)
        return str(self.array / name) if isinstance(self.array, Remote) else self._prefix + name

    def _unpack(self, data: bytes, index: Index, memory: np.ndarray, values: np.ndarray) -> None:
        if not data:
            raise ValueError("it has no bytes")
        direct = self.layout.direct
        if direct is not None and direct.size(data) == self.chunk_bytes:
            direct.decode(data, memory)
        else:
            values[...] = self.layout.unpack(data, index)

    def _read_stored(self, path: str, index: Index) -> bytes:
        shards = self.layout.shards
        if shards is None:
            return self._fetch(path, most=self._most)
        table = self._index(path)
        offset, size = (int(v) for v in table[tuple(i % n for i, n in zip(index, shards.chunks, strict=True))])
        if offset == size == ABSENT:
            raise FileNotFoundError
        return self._fetch(path, offset, size, most=self._most)

    def _read_index(self, path: str) -> np.ndarray:
        shards = self.layout.shards
        assert shards is not None
        wanted = shards.index_bytes
        if isinstance(self.array, Remote):
            data = _fetch_remote(path, -wanted) if shards.at_end else _fetch_remote(path, 0, wanted)
            size = len(data)
        else:
            size = os.stat(path).st_size
            data = _read_file(path, max(0, size - wanted) if shards.at_end else 0, min(size, wanted))
        if len(data) < wanted:
            raise ValueError(f"the shard has {size} bytes, its index alone needs {wanted}")
        return shards.decode_index(data)

    def _refuse_absent(self, path: str, index: Index) -> None:
        if not self.fill:
            raise MissingData(
                f"{self._place(path, index)} is missing: restore the file, leave it out with `region`, "
                "or set `missing: fill` if the writer left out chunks that hold only the fill value"
            ) from None
        self.filled += 1

    def _place(self, path: str, index: Index) -> str:
        return f"chunk {{{', '.join(map(str, index))}}} in {path}"


def open_chunks(array: Place, *, fill: bool = False) -> ChunkReader | None:
    """Return a reader of the chunks of an array, or None where its layout is left to tensorstore."""
    layout = read_layout(array)
    if layout is None or (layout.shards is not None and isinstance(array, Remote) and array.uses_tensorstore):
        return None  # its key-value stores give no parts of files to Python
    return ChunkReader(array.absolute(), layout, fill=fill)


def largest_file(size: int) -> int:
    """Return how many bytes a chunk's file may have: packing makes some larger, a little; others are full of holes."""
    return 2 * size + 2**20


def _read_file(path: str, start: int = 0, size: int | None = None, *, most: int | None = None) -> bytes:
    handle = open_descriptor(path)
    try:
        whole = os.fstat(handle).st_size
        wanted = whole if size is None else size
        if start + wanted > whole:
            raise ValueError(f"the file ends {start + wanted - whole} bytes too early")
        _check_most(wanted, most)
        data = os.pread(handle, wanted, start)
        while len(data) < wanted:  # a signal, or 2 GiB and more
            more = os.pread(handle, wanted - len(data), start + len(data))
            if not more:
                raise ValueError(f"the file ends {wanted - len(data)} bytes too early")
            data += more
        return data
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from error
    finally:
        os.close(handle)


def _check_most(size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise ValueError(f"it has {size:,} bytes, more than a chunk can need")


def _fetch_remote(url: str, start: int = 0, size: int | None = None, *, most: int | None = None) -> bytes:
    if size is not None:
        _check_most(size, most)
    data = fetch_remote(Remote(url), start, size, most=most if size is None else None)
    if data is None:
        raise FileNotFoundError(url)
    if size is not None and len(data) < size:
        raise ValueError(f"the file ends {size - len(data)} bytes too early")
    return data


def _say(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Part(NamedTuple):
    """The part of one chunk that a window takes."""

    chunk: Index
    inside: tuple[slice, ...]  # of the chunk
    target: tuple[slice, ...]  # of the window


def parts(grid: Sequence[int], window: Sequence[slice]) -> Iterator[Part]:
    """Yield the chunks that a window touches, with the voxels that it takes of each."""
    numbers, insides, targets = [], [], []
    for size, w in zip(grid, window, strict=True):
        along = range(w.start // size, -(-w.stop // size))
        bounds = [(max(w.start, n * size), min(w.stop, n * size + size)) for n in along]
        numbers.append(along)
        insides.append([slice(lo - n * size, hi - n * size) for n, (lo, hi) in zip(along, bounds, strict=True)])
        targets.append([slice(lo - w.start, hi - w.start) for lo, hi in bounds])
    each = (itertools.product(*along) for along in (numbers, insides, targets))
    return map(Part._make, zip(*each, strict=True))


def spans_of(size: int, window: slice) -> np.ndarray:
    """Return the first and last voxel of a window in each chunk along an axis, [N, 2]."""
    edges = np.arange(window.start // size, -(-window.stop // size) + 1) * size
    edges[0], edges[-1] = window.start, window.stop
    return np.stack([edges[:-1], edges[1:] - 1], axis=1) - window.start


class _Held:
    """A piece that is kept, once it is made; it keeps its place while threads use it."""

    __slots__ = ("error", "memory", "size", "users", "values")

    def __init__(self, size: int, memory: np.ndarray | None) -> None:
        self.size, self.memory = size, memory
        self.values: Any = None
        self.error: BaseException | None = None
        self.users = 1


_Use = tuple[Any, _Held, "Part"]  # the name of a chunk, the chunk, and what is taken of it


def _decode_into(held: "_Held", reader: "ChunkReader", chunk: tuple[int, ...]) -> np.ndarray:
    """Decode a chunk into the memory of a piece, which is taken anew where that of an earlier one does not fit."""
    if held.memory is None or len(held.memory) != reader.chunk_bytes:
        held.memory = np.empty(reader.chunk_bytes, np.uint8)
    return reader.decode(chunk, held.memory)


class ChunkCache:
    """Pieces of data within a number of bytes: chunks of any arrays, or blocks of sources that are read as a whole.

    Each is made once and waited for by others who want it; those used longest ago make room. What finds no room is
    not kept: a chunk is decoded for the one who asks, and of a block nothing is made.
    """

    def __init__(self, limit: int = DEFAULT_BYTES):
        self.limit = limit
        self.bytes = 0  # of all that is kept
        self._kept: OrderedDict[Any, _Held] = OrderedDict()  # by name, those used longest ago first
        self._lock = threading.Lock()
        self._made = threading.Condition(self._lock)  # told of every piece that others may wait for

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all pieces and give their memory back."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def get(self, name: Any, size: int, make: Callable[[], Any]) -> Any:
        """Return what `make` gives for a name, made now or before; None where there is no room for `size` bytes."""
        held, mine = self._claim(name, size)
        if held is None:
            return None
        try:
            return self._make(name, held, make) if mine else self._wait(held)
        finally:
            self._release([(name, held)])

    def read(self, reader: ChunkReader, window: Sequence[slice]) -> np.ndarray:
        out = np.empty([w.stop - w.start for w in window], reader.dtype)
        self.read_into(reader, out, window)
        return out

    def read_into(
        self, reader: ChunkReader, out: np.ndarray, window: Sequence[slice], chosen: np.ndarray | None = None
    ) -> None:
        """Copy a window (one slice an axis, inside the array) into `out`, which has its shape and any strides.

        Of the chunks around it only the `chosen`, if there are: whether each is, along axes (1: all of them alike).
        """
        touched = parts(reader.grid, window)
        if chosen is not None:
            number = [(w.stop - 1) // size - w.start // size + 1 for size, w in zip(reader.grid, window, strict=True)]
            touched = itertools.compress(touched, np.broadcast_to(chosen, number).ravel().tolist())
        todo: deque[Part] = deque()
        uses: list[_Use] = []
        with self._lock:
            for part in touched:
                name = (reader.number, part.chunk)
                held = self._kept.get(name)
                if held is None:
                    todo.append(part)
                else:
                    held.users += 1
                    uses.append((name, held, part))
        try:
            self._decode_all(reader, out, todo)
            self._copy(uses, out)
        finally:
            self._release(uses)

    def _decode_all(self, reader: ChunkReader, out: np.ndarray, todo: "deque[Part]") -> None:
        """Decode and copy parts, with the help of other threads where they are many."""
        if len(todo) <= ALONE:
            return self._decode_some(reader, out, todo)
        pool, threads = _helpers()
        jobs = [
            pool.submit(lambda: self._decode_some(reader, out, todo), lambda: str(reader.array))
            for _ in range(threads - 1)
        ]
        try:
            self._decode_some(reader, out, todo)
        finally:
            todo.clear()  # after an error, so that the helpers end; `out` is theirs until then
            for job in jobs:
                if job.began is None:  # should it begin this moment, it finds nothing to do
                    job.abandon()
            errors = [job.future.exception() for job in jobs]
        for error in errors:
            if error is not None and not isinstance(error, Stopped):
                raise error

    def _decode_some(self, reader: ChunkReader, out: np.ndarray, todo: "deque[Part]") -> None:
        uses: list[_Use] = []
        waiting: list[_Use] = []  # for another thread that decodes them
        try:
            while True:
                try:
                    part = todo.popleft()
                except IndexError:
                    break
                name = (reader.number, part.chunk)
                held, mine = self._claim(name, max(LEAST, reader.chunk_bytes))
                if held is None:
                    copy_part(out[part.target], reader.decode(part.chunk)[part.inside])
                    continue
                use = (name, held, part)
                uses.append(use)
                if not mine:
                    waiting.append(use)
                    continue
                self._make(name, held, partial(_decode_into, held, reader, part.chunk))
                self._copy([use], out)
            self._copy(waiting, out)
        finally:
            self._release(uses)

    def _copy(self, uses: Sequence[_Use], out: np.ndarray) -> None:
        for _, held, part in uses:
            copy_part(out[part.target], self._wait(held)[part.inside])

    def _claim(self, name: Any, size: int) -> tuple[_Held | None, bool]:
        """Return a piece, in use until it is released (None: no room), and whether the caller has to make it."""
        with self._lock:
            held = self._kept.get(name)
            if held is not None:
                held.users += 1
                return held, False
            if size > self.limit:
                return None, True
            memory = None
            while self.bytes + size > self.limit:
                idle = next((other for other, known in self._kept.items() if not known.users), None)
                if idle is None:
                    return None, True
                gone = self._kept.pop(idle)
                self.bytes -= gone.size
                memory = gone.memory if gone.size == size else None
            held = self._kept[name] = _Held(size, memory)
            self.bytes += size
            return held, True

    def _make(self, name: Any, held: _Held, call: Callable[[], Any]) -> Any:
        try:
            values = call()
        except BaseException as error:
            with self._made:
                if self._kept.get(name) is held:  # so that it can be tried again
                    del self._kept[name]
                    self.bytes -= held.size
                held.error = error
                self._made.notify_all()
            raise
        with self._made:
            held.values = values
            self._made.notify_all()
        return values

    def _wait(self, held: _Held) -> Any:
        if held.values is None:
            with self._made:
                self._made.wait_for(lambda: held.values is not None or held.error is not None)
        if held.values is None:
            assert held.error is not None
            raise held.error
        return held.values

    def _release(self, uses: Sequence[Any]) -> None:
        with self._lock:
            for name, held, *_ in uses:
                held.users -= 1
                if name in self._kept:
                    self._kept.move_to_end(name)


def copy_part(target: np.ndarray, values: np.ndarray) -> None:
    """Copy values to a target of their shape, by whole rows where types agree: numpy copies short rows slowly."""
    size = target.itemsize
    if target.dtype == values.dtype and target.ndim > 1 and target.strides[-1] == values.strides[-1] == size:
        row = _row(size * target.shape[-1])
        target, values = target.view(row), values.view(row)
    target[...] = values


@cache
def _row(size: int) -> np.dtype:
    return np.dtype((np.void, size))


@cache
def _helpers() -> tuple[Pool, int]:
    threads = max(1, min(MOST_HELPERS, share_of_cores(find_world())))
    return Pool(threads, "vitrail-decoder"), threads  # for as long as the process lives


shared = ChunkCache()


# ------------------------------------------------------------ arrays as they are opened

USUAL_AXES = {2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
READ_ERRORS = (ValueError, NotImplementedError, OSError)  # what tensorstore raises for wrong or unreadable data


def open_array(place: Place, axes: Sequence[str] | None = None, *, fill: bool, **known: Any) -> Stored:
    """Open an array, with what is `known` of it already (spacing, unit, origin, channels, names)."""
    reader = open_chunks(place, fill=fill)
    if reader is not None:
        shape, chunk, dtype = reader.shape, reader.grid, reader.dtype

        def read(window: Window) -> np.ndarray:
            return shared.read(reader, window)
    else:
        store = _open_store(place, fill)
        shape, dtype = tuple(int(n) for n in store.shape), np.dtype(store.dtype.numpy_dtype)
        sizes = store.chunk_layout.read_chunk.shape or shape
        chunk = tuple(int(n or whole) for n, whole in zip(sizes, shape, strict=True))
        check = _chunk_checker(place, store, shape, dtype)

        def read(window: Window) -> np.ndarray:
            check(window)
            try:
                return np.asarray(store[window].read().result())
            except READ_ERRORS as error:
                raise _explain(place, str(error)) from error

    names = tuple(axes or USUAL_AXES.get(len(shape)) or [f"axis{i}" for i in range(len(shape))])
    if len(names) != len(shape):
        raise UserError(
            f"{place} has {len(shape)} dimensions but its metadata names {len(names)} axes; mend the metadata"
        )
    # Chunks are often larger than a small array.
    chunk = tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
    return Stored(str(place), shape, names, dtype, chunk, read, chunk_reader=reader, **known)


def lost_array(place: Place, axes: Sequence[str], problem: UserError, **known: Any) -> Stored:
    """Return a stand-in for a level that is not there: copies of pyramids are often partial, and others may be read."""

    def read(window: Window) -> np.ndarray:
        raise problem

    empty = (0,) * len(axes)
    return Stored(str(place), empty, tuple(axes), np.dtype(np.uint8), empty, read, **known)


def _open_store(place: Place, fill: bool) -> Any:
    import tensorstore

    if isinstance(place, Remote) and not place.uses_tensorstore:
        raise UserError(
            f"{place} has a codec that can be read from local folders, http(s), s3 and gs alone; copy it to one of them"
        )
    driver = "zarr3" if (place / "zarr.json").is_file() else "zarr" if (place / ".zarray").is_file() else "n5"
    if isinstance(place, Path):
        check_plain(place / "attributes.json")
    threads = share_of_cores(find_world())
    local = {"driver": "file", "path": f"{place.resolve()}/"}
    spec = {
        "driver": driver,
        "kvstore": as_folder(str(place)) if isinstance(place, Remote) else local,
        "fill_missing_data_reads": fill,
        "recheck_cached_data": "open",
        "context": {
            "cache_pool": {"total_bytes_limit": 64 * 2**20},
            # This process's share of the host, not all of it for every rank.
            "data_copy_concurrency": {"limit": threads},
            "file_io_concurrency": {"limit": max(4, threads)},
        },
    }
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
        return store.T if driver == "n5" else store  # in C order
    except READ_ERRORS as error:
        raise UserError(
            f"{place} cannot be opened as {driver.rstrip('3')} ({_first_line(error)}); restore or rewrite it"
        ) from error


def _chunk_checker(place: Place, store: Any, shape: Sequence[int], dtype: np.dtype) -> Callable[[Window], None]:
    """Return a call that refuses files that tensorstore would wait for, or that are too large for memory."""
    sizes = store.chunk_layout.write_chunk.shape or shape
    grid = tuple(int(n or whole) for n, whole in zip(sizes, shape, strict=True))
    size = math.prod(grid) * dtype.itemsize
    check_room(f"a chunk of {place}", size)
    name = read_names(place)
    asked: set[str] = set()  # of a server, once each

    def check(window: Window) -> None:
        if name is None or len(window) < len(grid):  # of an empty array nothing is read
            return
        for part in parts(grid, window):
            file = name(part.chunk)
            if isinstance(place, Path):
                check_file(f"{place}/{file}", size)
            elif file not in asked and is_longer(place.joinpath(*file.split("/")), largest_file(size)):
                raise BadData(f"{place}/{file} has more bytes than a chunk can need; {REMEDY}")
            asked.add(file)

    return check


def check_file(file: str, size: int) -> bool:
    """Return whether the file of a chunk of so many bytes is there; refuse one that is no plain file, or too large."""
    check_plain(file)
    if not os.path.exists(file):
        return False
    if os.path.getsize(file) > largest_file(size):
        raise BadData(f"{file} has {os.path.getsize(file):,} bytes, more than a chunk can need; {REMEDY}")
    return True


def _explain(place: Place, problem: str) -> BadData:
    if "is missing" in problem and "NOT_FOUND" in problem:
        lost = problem.partition("NOT_FOUND: ")[2].partition(" [")[0]
        return MissingData(
            f"{lost}: restore the file, leave it out with `region`, "
            "or set `missing: fill` if the writer left out chunks that hold only the fill value"
        )
    return BadData(f"{place} cannot be read ({_first_line(problem)}); {REMEDY}")


def _first_line(problem: object) -> str:
    return str(problem).partition(" [tensorstore_spec=")[0].splitlines()[0]
