"""Decoded chunks of stored arrays, kept and shared: crops are copied straight out of them.

- `ChunkReader` reads one chunk of a local array: its file, decoded by a bare decoder that releases the GIL
- `ChunkCache` keeps what was decoded within a number of bytes; a chunk is decoded once and waited for by others, and
  those used longest ago make room. `shared` is the one that all sources of a process use; set its `limit`
- absent chunks raise MissingData, or count and read as the fill value; files of no bytes or cut short raise BadData
"""

import itertools
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from vitrail.data.chunk_layout import Index, Layout, read_layout
from vitrail.data.places import Place, Remote, fetch_remote
from vitrail.data.pool import Pool, Stopped
from vitrail.errors import BadData, MissingData
from vitrail.foreign import check_room, open_descriptor
from vitrail.launch.world import find_world, share_of_cores

DEFAULT_BYTES = 512 * 2**20
SLAB = 32 * 2**20  # memory is taken in pieces so large that the system can give it in huge pages
MOST_PLACES = 2**14  # taken at once, where chunks are tiny
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
        """One whole chunk, also where it reaches beyond the array; in `memory` (bytes) if there is any."""
        shards = self.layout.shards
        file = index if shards is None else tuple(i // n for i, n in zip(index, shards.chunks, strict=True))
        path = self._path(self.layout.name(file))
        if memory is None:
            memory = np.empty(self.chunk_bytes, np.uint8)
        values = memory.view(self.dtype).reshape(self.grid)
        try:
            data = self._fetch(path, most=self._most) if shards is None else self._read_inside(path, index)
            if data is None:
                raise FileNotFoundError
            self._unpack(data, index, memory, values)
        except FileNotFoundError:
            self._refuse_absent(path, index)
            values[...] = self.layout.fill
        except (OSError, BadData, MemoryError):
            raise  # of the system; those that may pass are tried again by the reader
        except Exception as error:  # decoders have errors of their own
            raise BadData(f"{self._place(path, index)} cannot be read: {_say(error)}; {REMEDY}") from error
        self.decoded += 1
        return values

    def _path(self, name: str) -> str:
        return str(self.array / name) if isinstance(self.array, Remote) else self._prefix + name

    def _unpack(self, data: bytes, index: Index, memory: np.ndarray, values: np.ndarray) -> None:
        if not data:
            raise ValueError("it has no bytes")
        direct = self.layout.direct
        if direct is not None and direct.size(data) == self.chunk_bytes:
            direct.decode(data, memory)
        else:
            values[...] = self.layout.unpack(data, index)

    def _read_inside(self, path: str, index: Index) -> bytes | None:
        """The bytes of a chunk in its shard, or None."""
        shards = self.layout.shards
        assert shards is not None
        table = self._index(path)
        offset, size = (int(v) for v in table[tuple(i % n for i, n in zip(index, shards.chunks, strict=True))])
        return None if offset == size == ABSENT else self._fetch(path, offset, size, most=self._most)

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
    """A reader of the chunks of an array, or None where its layout is left to tensorstore."""
    layout = read_layout(array)
    if layout is None or (layout.shards is not None and isinstance(array, Remote) and array.uses_tensorstore):
        return None  # its key-value stores give no parts of files to Python
    return ChunkReader(array.absolute(), layout, fill=fill)


def largest_file(size: int) -> int:
    """Packing makes some chunks larger, by a little; a file of more is another one, or full of holes."""
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
    """What a window takes of one chunk."""

    chunk: Index
    inside: tuple[slice, ...]  # of the chunk
    target: tuple[slice, ...]  # of the window


def parts(grid: Sequence[int], window: Sequence[slice]) -> Iterator[Part]:
    """The chunks that a window touches, with the voxels that it takes of each."""
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
    """First and last voxel of a window in each chunk along an axis, [N, 2]."""
    edges = np.arange(window.start // size, -(-window.stop // size) + 1) * size
    edges[0], edges[-1] = window.start, window.stop
    return np.stack([edges[:-1], edges[1:] - 1], axis=1) - window.start


class _Chunk:
    """A place in memory and what is decoded there, once it is."""

    __slots__ = ("error", "memory", "users", "values")

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.values: np.ndarray | None = None
        self.error: BaseException | None = None
        self.users = 1  # threads that read it; it keeps its place meanwhile


class _Shelf:
    """The chunks of one size, those used longest ago first, and free places for more."""

    def __init__(self) -> None:
        self.chunks: OrderedDict[tuple[int, Index], _Chunk] = OrderedDict()
        self.free: list[np.ndarray] = []
        self.bytes = 0


class ChunkCache:
    """Chunks of any number of arrays within a number of bytes (and one chunk more for each thread, at worst)."""

    def __init__(self, limit: int = DEFAULT_BYTES):
        self.limit = limit
        self._shelves: dict[int, _Shelf] = {}  # by bytes of a chunk
        self._lock = threading.Lock()
        self._decoded = threading.Condition(self._lock)  # told of every chunk that others may wait for

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(shelf.bytes for shelf in self._shelves.values())

    def clear(self) -> None:
        """Forget all chunks and give their memory back."""
        with self._lock:
            self._shelves.clear()

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
        held: list[tuple[_Chunk, Part]] = []
        with self._lock:
            shelf = self._shelves.setdefault(reader.chunk_bytes, _Shelf())
            for part in touched:
                chunk = shelf.chunks.get((reader.number, part.chunk))
                if chunk is None:
                    todo.append(part)
                else:
                    chunk.users += 1
                    held.append((chunk, part))
        try:
            self._decode_all(reader, shelf, out, todo)
            for chunk, part in held:
                copy_part(out[part.target], self._wait(chunk)[part.inside])
        finally:
            self._release(reader, shelf, held)

    def _decode_all(self, reader: ChunkReader, shelf: _Shelf, out: np.ndarray, todo: "deque[Part]") -> None:
        """Decode and copy parts, with the help of other threads where they are many."""
        if len(todo) <= ALONE:
            return self._decode_some(reader, shelf, out, todo)
        pool, threads = _helpers()
        jobs = [
            pool.submit(lambda: self._decode_some(reader, shelf, out, todo), lambda: str(reader.array))
            for _ in range(threads - 1)
        ]
        try:
            self._decode_some(reader, shelf, out, todo)
        finally:
            todo.clear()  # after an error, so that the helpers end; `out` is theirs until then
            for job in jobs:
                if job.began is None:  # should it begin this moment, it finds nothing to do
                    job.abandon()
            errors = [job.future.exception() for job in jobs]
        for error in errors:
            if error is not None and not isinstance(error, Stopped):
                raise error

    def _decode_some(self, reader: ChunkReader, shelf: _Shelf, out: np.ndarray, todo: "deque[Part]") -> None:
        held: list[tuple[_Chunk, Part]] = []
        waiting: list[tuple[_Chunk, Part]] = []  # for another thread that decodes them
        try:
            while True:
                try:
                    part = todo.popleft()
                except IndexError:
                    break
                chunk, mine = self._claim(reader, shelf, part.chunk)
                held.append((chunk, part))
                if mine:
                    self._decode(reader, shelf, part.chunk, chunk)
                    copy_part(out[part.target], self._wait(chunk)[part.inside])
                else:
                    waiting.append((chunk, part))
            for chunk, part in waiting:
                copy_part(out[part.target], self._wait(chunk)[part.inside])
        finally:
            self._release(reader, shelf, held)

    def _claim(self, reader: ChunkReader, shelf: _Shelf, index: Index) -> tuple[_Chunk, bool]:
        """A chunk, held, and whether it is the caller who has to decode it."""
        name = (reader.number, index)
        with self._lock:
            chunk = shelf.chunks.get(name)
            if chunk is not None:
                chunk.users += 1
                return chunk, False
            memory = self._take(reader.chunk_bytes, shelf)
            if memory is None:  # no room: it is decoded for the caller alone
                return _Chunk(np.empty(reader.chunk_bytes, np.uint8)), True
            chunk = shelf.chunks[name] = _Chunk(memory)
            return chunk, True

    def _take(self, size: int, shelf: _Shelf) -> np.ndarray | None:
        """Room for a chunk: free, new within the limit, or that of the chunk used longest ago."""
        if not shelf.free:
            room = self.limit - self.bytes
            if room < size <= self.limit and not shelf.bytes:  # chunks of other sizes have it all
                self._shelves = {size: shelf}
                room = self.limit
            count = min(max(1, SLAB // size), room // size, MOST_PLACES)
            if count > 0:
                shelf.bytes += count * size
                shelf.free.extend(np.empty((count, size), np.uint8))
        if shelf.free:
            return shelf.free.pop()
        for name, chunk in shelf.chunks.items():
            if not chunk.users:
                del shelf.chunks[name]
                return chunk.memory
        return None

    def _decode(self, reader: ChunkReader, shelf: _Shelf, index: Index, chunk: _Chunk) -> None:
        try:
            values = reader.decode(index, chunk.memory)
        except BaseException as error:
            with self._decoded:
                if shelf.chunks.get((reader.number, index)) is chunk:  # so that it can be tried again
                    del shelf.chunks[(reader.number, index)]
                    shelf.free.append(chunk.memory)
                chunk.error = error
                self._decoded.notify_all()
            raise
        with self._decoded:
            chunk.values = values
            self._decoded.notify_all()

    def _wait(self, chunk: _Chunk) -> np.ndarray:
        if chunk.values is None:
            with self._decoded:
                self._decoded.wait_for(lambda: chunk.values is not None or chunk.error is not None)
        if chunk.values is None:
            assert chunk.error is not None
            raise chunk.error
        return chunk.values

    def _release(self, reader: ChunkReader, shelf: _Shelf, held: "list[tuple[_Chunk, Part]]") -> None:
        with self._lock:
            for chunk, part in held:
                chunk.users -= 1
                name = (reader.number, part.chunk)
                if name in shelf.chunks:
                    shelf.chunks.move_to_end(name)


class LazyWindow:
    """A window of an array in memory, whose chunks are decoded when voxels of them are asked for first.

    For those who take many smaller windows out of a known one: these then lie in one piece, and are cut at once.
    """

    def __init__(self, reader: ChunkReader, out: np.ndarray, window: Sequence[slice]):
        self._reader, self._out = reader, out
        self._todo = {part.chunk: part for part in parts(reader.grid, window)}
        self._busy: set[Index] = set()  # those that some thread decodes
        self._changed = threading.Condition()

    def fill(self, window: Sequence[slice]) -> None:
        """Returns when the voxels of a smaller window are there; threads that wait for the same share the work."""
        along = [range(w.start // size, -(-w.stop // size)) for size, w in zip(self._reader.grid, window, strict=True)]
        wanted = [index for index in itertools.product(*along) if index in self._todo or index in self._busy]
        memory = None
        while (part := self._claim(wanted)) is not None:
            if memory is None:
                memory = np.empty(self._reader.chunk_bytes, np.uint8)  # stays in the cache of the processor
            try:
                copy_part(self._out[part.target], self._reader.decode(part.chunk, memory)[part.inside])
            except BaseException:
                self._todo[part.chunk] = part  # whoever waits for it meets the error itself
                raise
            finally:
                with self._changed:
                    self._busy.discard(part.chunk)
                    self._changed.notify_all()

    def _claim(self, wanted: Sequence[Index]) -> Part | None:
        """A chunk that nobody has begun; None once all are decoded."""
        with self._changed:
            while True:
                for index in wanted:
                    if index in self._todo:
                        self._busy.add(index)
                        return self._todo.pop(index)
                if self._busy.isdisjoint(wanted):
                    return None
                self._changed.wait()


def copy_part(target: np.ndarray, values: np.ndarray) -> None:
    """target[...] = values, by whole rows where types agree: numpy copies short rows slowly."""
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
