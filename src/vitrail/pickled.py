"""Pickles that others made, read step by step: no few bytes of them take for ever, or all memory.

- the C unpickler keeps a list as long as the largest index that a pickle names; this one keeps what there is
- a tuple of tuples can have exponentially many parts, all of which count whenever it is hashed, compared or shown; so
  nested ones, and those that are keys, have few
- what a byte can become is known, so a pickle may be as large as memory has room for that
- what is looked at here must be what `torch.load` reads: it tells the kind of a file by its first bytes, and believes
  where an archive's end says that the list of its members begins
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any

from vitrail.foreign import room

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
