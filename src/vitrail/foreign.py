"""Files that others made: opened only where they are plain files, and believed only within bounds.

- a FIFO, a device, a socket or a folder in place of a file is refused, never waited for; links to plain files are
  followed, because people link large data into place
- what a file says of its own sizes is compared with its bytes and with this machine's memory before anything is
  allocated
- what a file says of other files counts in its own folder alone, unless `--trust` is given; no recipe can say so

How much memory there is on the host, for this process and for one piece of data.

Regular expressions of recipes: some take for ever on one short name, and nothing in this process could end them; so
they are searched in a process of its own, to which the system gives so much time and no more.

Pickles that others made, read step by step: no few bytes of them take for ever, or all memory.

- the C unpickler keeps a list as long as the largest index that a pickle names; this one keeps what there is
- a tuple of tuples can have exponentially many parts, all of which count whenever it is hashed, compared or shown; so
  nested ones, and those that are keys, have few
- what a byte can become is known, so a pickle may be as large as memory has room for that
- what is looked at here must be what `torch.load` reads: it tells the kind of a file by its first bytes, and believes
  where an archive's end says that the list of its members begins
"""

import contextlib
import errno
import io
import json
import os
import pickle
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from vitrail.errors import BadData, UserError

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container or a job


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container or job where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(int(limit) for limit in map(_read, LIMITS) if limit.isdigit())])


@cache
def room() -> int:
    """Return the bytes that one piece of data may take: half of the memory that this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(memory_bytes(), limit if limit > 0 else 2**63) // 2


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


METADATA = 16 << 20  # bytes; no list of facts is larger
BEST_PACKED = 1032  # bytes that can come of one of gzip, zip or PNG: deflate does no better
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@contextlib.contextmanager
def trusted(trust: bool = True) -> Iterator[None]:
    """Let data opened in here read what they name anywhere, if `trust` is set: for those who said `--trust`."""
    token = _trusting.set(trust or _trusting.get())
    try:
        yield
    finally:
        _trusting.reset(token)


def is_trusting() -> bool:
    return _trusting.get()


# ------------------------------------------------------------ plain files


def check_plain(path: str | Path) -> None:
    """Refuse what is there but no plain file; whoever opens it next would wait, or read without an end."""
    with contextlib.suppress(FileNotFoundError):
        _refuse(path, os.stat(path).st_mode)


def open_plain(path: str | Path) -> BinaryIO:
    """Open a plain file for reading bytes."""
    return open(path, "rb", opener=_open)


def open_descriptor(path: str | Path) -> int:
    """Open a plain file for reading; return its descriptor."""
    return _open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_plain(path: str | Path, most: int = METADATA) -> bytes:
    """Read a plain file that may not be larger than `most`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise BadData(f"{path} has {size:,} bytes, more than the {most:,} that such a file can need; restore it")
        return file.read(most + 1)


def _open(path: str | Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # else the open of a FIFO waits for its writer
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            _refuse(path, os.stat(path).st_mode)
        raise
    try:
        _refuse(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _refuse(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise BadData(f"{path} is {kind}, not a plain file; restore it, or leave it out")


# ------------------------------------------------------------ what files say


def parse_json(content: bytes | str) -> Any:
    """Read the value of a JSON text; ValueError for whatever is wrong with it, keys that are given twice too."""
    try:
        return json.loads(content, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def read_json(path: str | Path) -> Any:
    """Read the value in a small plain file of JSON; ValueError for what is wrong with its text."""
    return parse_json(read_plain(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # programs differ in which of them counts
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def check_room(name: str, size: int) -> None:
    """Refuse a piece that must lie in memory at once and says that it is larger than half of it."""
    if size > room():
        raise BadData(
            f"{name} says that it takes {size / 2**30:,.3g} GiB at once, more than half of this machine's memory "
            f"({room() / 2**30:,.3g} GiB); restore it, save it in smaller pieces, or leave it out"
        )


def named_file(file: str | Path, name: str) -> Path:
    """Return the file that another one names, in that one's folder or below it; elsewhere with `--trust` alone."""
    folder, given = Path(os.path.abspath(file)).parent, PurePosixPath(name)
    place = folder / given
    if not is_trusting() and (".." in given.parts or not place.is_relative_to(folder) or "://" in name):
        raise BadData(
            f"{file} names the file {name!r}, which does not lie in its own folder; copy it there, or give --trust if "
            "you know who made the file"
        )
    check_plain(place)
    return place


# ------------------------------------------------------------ regular expressions

SECONDS = 30  # of the processor, for a search; and one more for so many texts
TEXTS_A_SECOND = 10_000
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SEARCH = """
import json, re, resource, sys
seconds, pattern, group, texts = json.load(sys.stdin)
most = resource.getrlimit(resource.RLIMIT_CPU)[1]
seconds = seconds if most == resource.RLIM_INFINITY else min(seconds, most)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
search = re.compile(pattern).search
json.dump([found[group] if (found := search(text)) else None for text in texts], sys.stdout)
"""


def read_pattern(pattern: str) -> re.Pattern[str]:
    """Read a regular expression; ValueError for whatever is wrong with it."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or "it is too large") from None


def search_all(pattern: str, texts: Sequence[str], group: int | str = 0, *, where: str) -> list[str | None]:
    """Return what a group of a regular expression finds in each text, or None; refuse one that takes for ever.

    `where` names it in the error.
    """
    search = read_pattern(pattern).search
    order = json.dumps([SECONDS + len(texts) // TEXTS_A_SECOND, pattern, group, list(texts)])
    words = [sys.executable or "python3", "-I", "-S", "-c", _SEARCH]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "encoding": "ascii"}
    try:
        done = subprocess.run(words, input=order, **options)
        while -done.returncode in _STOPS:  # sent to all processes of a job, of which this one decides when to stop
            done = subprocess.run(words, input=order, **options)
    except OSError:  # where no process may be started
        return [found[group] if (found := search(text)) else None for text in texts]
    if done.returncode:
        raise UserError(
            f"{where} takes for ever, or all memory, on some of {len(texts):,} names; write it without repeats inside "
            "repeats, such as (a+)+, and with few of .*"
        )
    found_all: list[str | None] = json.loads(done.stdout)
    return found_all


GROWTH = 128  # bytes of memory that one byte of a pickle takes at most
MOST_PARTS = 1000  # of a tuple that holds tuples, or is a key

_STEPS = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BINPERSID", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET"),
    "LONG_BINGET",
)


class BadPickle(ValueError):
    """A pickle that is not gone through to its end; the message says what is wrong with it."""


class UnknownStep(pickle.UnpicklingError):
    """A step that pickles of other things than metadata and weights are written with."""


class Program(BadPickle):
    """An archive of TorchScript."""


def largest() -> int:
    """Return the bytes of a pickle for which there is room in memory, whatever it becomes."""
    return room() // GROWTH


class Unpickler(pickle._Unpickler):
    """An unpickler of the steps that metadata and weights are written with; `find_class` is for those who inherit."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    proto: int

    def __init__(self, file: IO[bytes]):
        super().__init__(file, encoding="bytes")
        self.nested: dict[int, tuple[int, tuple[Any, ...]]] = {}  # parts of tuples that hold tuples, by their identity

    def find_class(self, module: str, name: str) -> Any:
        raise BadPickle(f"it asks for {module}.{name}")

    def check_key(self, key: Any) -> None:
        """Refuse what must not become a key of a dictionary, before it is hashed."""
        if isinstance(key, tuple) and self.count(key) > MOST_PARTS:
            raise BadPickle("a key in it has too many parts")

    def count(self, found: tuple[Any, ...]) -> int:
        """Count the parts of a tuple, and of those that it holds."""
        inner = [self.nested[id(part)][0] if id(part) in self.nested else len(part) for part in _tuples(found)]
        return len(found) + sum(inner)

    def keep_tuple(self) -> None:
        found = self.stack[-1]
        if any(_tuples(found)):
            count = self.count(found)
            if count > MOST_PARTS:
                raise BadPickle("a tuple in it has too many parts")
            self.nested[id(found)] = (count, found)  # kept, so that none else can have this identity

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise BadPickle("it sets items of something that has none")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            self.stack[-1][key] = value

    def refuse(self) -> None:
        # Most rubbish does not begin as a pickle does.
        raise UnknownStep("Unsupported step") if self.proto else BadPickle("it does not begin as a pickle does")

    def set_item(self) -> None:
        self.set_items([self.stack.pop(-2), self.stack.pop()])


def _tuples(found: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [part for part in found if isinstance(part, tuple)]


def _kept(step: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(self: Unpickler) -> None:
        step(self)
        self.keep_tuple()

    return run


_known = pickle._Unpickler.dispatch
Unpickler.dispatch = (
    dict.fromkeys(_known, Unpickler.refuse)
    | {code: _known[code] for code in (getattr(pickle, name)[0] for name in _STEPS)}
    | {code: _kept(_known[code]) for (code,) in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)}
    | {pickle.SETITEM[0]: Unpickler.set_item}
    | {pickle.SETITEMS[0]: lambda self: self.set_items(self.pop_mark())}
)


class _Rehearsal(Unpickler):
    """An unpickler that goes through the steps of a pickle and makes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        return None

    def persistent_load(self, pid: Any) -> Any:
        return None

    def set_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            self.check_key(key)

    def drop(self) -> None:
        self.stack[-2:] = [None]  # what was called, made or changed, with what it was given

    def drop_items(self) -> None:
        self.pop_mark()


_Rehearsal.dispatch = Unpickler.dispatch | {
    **{code: _Rehearsal.drop for (code,) in (pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD)},
    pickle.APPEND[0]: lambda self: self.stack.pop(),
    pickle.APPENDS[0]: _Rehearsal.drop_items,
}


def check_saved(file: IO[bytes], size: int) -> None:
    """Refuse what `torch.save` would not have written and `torch.load` would choke on, of so many bytes."""
    try:
        _check_saved(file, size)
    except (BadPickle, UnknownStep, OSError):
        raise
    except Exception:  # whatever rubbish leads to
        raise pickle.UnpicklingError("it is not what torch.save writes") from None


class _Beginning:
    """The beginning of a file, up to the bytes for which there is room in memory."""

    def __init__(self, file: IO[bytes]):
        self.file, self.most = file, largest()
        self.left = self.most

    def read(self, size: int) -> bytes:
        if size > self.left:
            raise BadPickle(f"its pickles have more than {self.most:,} bytes, too many for memory")
        self.left -= size
        return self.file.read(size)

    def readline(self) -> bytes:
        line = self.file.readline(self.left + 1)
        if len(line) > self.left:
            raise BadPickle(f"its pickles have more than {self.most:,} bytes, too many for memory")
        self.left -= len(line)
        return line


def _check_saved(file: IO[bytes], size: int) -> None:
    file.seek(0)
    if file.read(4) != b"PK\3\4":  # an old one is several pickles in a row, and then numbers
        file.seek(0)
        beginning: Any = _Beginning(file)
        for _ in range(5):
            _Rehearsal(beginning).load()
        file.seek(max(0, size - _END.size))
        if file.read(4) == b"PK\5\6":
            raise BadPickle("it ends as an archive, and does not begin as one")
        return
    _check_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        names = [member.filename.lower() for member in members]  # PyTorch finds them in any mixture of cases
        if any(name.partition("/")[2].startswith(("code/", "constants.pkl")) for name in names):
            raise Program("it is a program of TorchScript")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise BadPickle("it is packed, which PyTorch's files are not")
        if sum(member.file_size for member in members) > size:
            raise BadPickle("its parts say that they are larger than all of it")
        for member, name in zip(members, names, strict=True):
            if name.endswith("data.pkl"):
                if member.file_size > largest():
                    raise BadPickle(f"its pickle has {member.file_size:,} bytes, too many for memory")
                _Rehearsal(io.BytesIO(archive.read(member))).load()  # a stream of the archive gives a byte slowly


# The last records of an archive: where the list of its members is, for large ones that and where the record lies.
_END = struct.Struct("<4s4H2LH")
_WIDE = struct.Struct("<4sQ2H2L4Q")
_PLACE = struct.Struct("<4sLQL")


def _check_directory(file: IO[bytes], size: int) -> None:
    """Refuse an archive whose list of members does not end where its last records begin: programs differ in those."""
    tail = _WIDE.size + _PLACE.size + _END.size
    file.seek(max(0, size - tail))
    last = file.read(tail)
    if len(last) < _END.size:
        raise BadPickle("it is cut short")
    mark, *_, length, start, comment = _END.unpack(last[-_END.size :])
    if mark != b"PK\5\6" or comment:
        raise BadPickle("it does not end as an archive does")
    end, plain = size - _END.size, True
    if last[-_END.size - _PLACE.size :].startswith(b"PK\6\7") and len(last) == tail:
        end = size - tail
        wide, own, *_, length, start = _WIDE.unpack(last[: _WIDE.size])
        _, _, place, _ = _PLACE.unpack(last[_WIDE.size : -_END.size])
        plain = wide == b"PK\6\6" and own == _WIDE.size - 12 and place == end
    if not plain or start + length != end:
        raise BadPickle("its list of members does not lie where its end says")
