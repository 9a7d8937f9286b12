"""The one place where anything on a disk is replaced, renamed or removed; a test finds any other.

- a file is written beside its name, under one that nobody can foresee, and renamed: it is there whole or not at all
- what a user names is replaced only where it carries vitrail's mark and is as it was written: in a file a digest of its
  content, in a volume the list of its files with theirs
- what vitrail keeps in a folder of its own is removed there and nowhere else
- never a link or what it leads to, a mount point, a root, a home, the working folder, the environment, or a parent
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import secrets
import shutil
import stat
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.errors import UserError

MARK = ".vitrail"  # in a folder that was written, the list of its files; in a draft, that it is one
OLD = 3600.0  # seconds after which a file that is being written is one that a kill has left
_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part", re.DOTALL)
_SEAL = re.compile(rb"written by vitrail ([0-9a-f]{32})")
_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\x00IEND\xaeB`\x82"
_LARGEST = 2**28  # bytes of a file that is read to find its mark
_LONGEST = 2**15  # bytes of a line of a list of files: a path has no more than 4096, of up to six each

Tell = Callable[[str], None]


def write_whole(path: str | Path, content: bytes | str, *, durable: bool = True, parents: bool = False) -> Path:
    """Write a file whole or not at all, over a plain file of that name or none."""
    with replacing(path, durable=durable, parents=parents) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
    return Path(path)


@contextlib.contextmanager
def replacing(path: str | Path, *, durable: bool = True, parents: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that takes the name of a plain file, or a free one, when the block ends well."""
    path = Path(path)
    check_plain(path)
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        check_plain(path)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    if durable:
        sync_folder(path.parent)


def appending(path: str | Path) -> BinaryIO:
    """Open a plain file, made if need be, to read and to write at its end: a log or a lock; never through a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path} is a link, which is not written through; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path} is not a plain file; remove it")
    return os.fdopen(handle, "ab+")


def publish(draft: str | Path, target: str | Path) -> None:
    """Give a finished draft, file or folder, a name that is free."""
    source, target = os.fspath(draft), os.fspath(target)
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(-100, os.fsencode(source), -100, os.fsencode(target), 1) == 0:  # AT_FDCWD, RENAME_NOREPLACE
            return
        number = ctypes.get_errno()
    except AttributeError:  # a C library without it
        number = errno.ENOSYS
    if number in (errno.ENOSYS, errno.EINVAL) and not os.path.lexists(target):  # a system without it
        os.rename(source, target)
        return
    number = errno.EEXIST if os.path.lexists(target) else number
    raise OSError(number, os.strerror(number), source, None, target)


def sync_folder(path: str | Path) -> None:
    """Make sure that names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some systems have nothing to do there
            raise
    finally:
        os.close(handle)


def scratch(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in the system's place for such, gone after the `with` block."""
    return tempfile.TemporaryDirectory(prefix=prefix)


def _open_old(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # nor does a pipe keep it waiting


def draft_of(path: Path) -> Path:
    """Return a name beside a path, which nobody can foresee."""
    name = os.fsdecode(os.fsencode(path.name)[:200])  # of a name's 255 bytes
    return path.with_name(f".{name}.{secrets.token_hex(8)}.part")


def meant_by(draft: str | Path) -> Path | None:
    """Return the path that a draft was to get; None for what has not the name of one."""
    found = _DRAFT.fullmatch(Path(draft).name)
    return found and Path(draft).with_name(found[1])


def is_draft(path: str | Path) -> bool:
    """Tell whether a name is that of a draft."""
    return meant_by(path) is not None


def _kind(path: str | Path) -> str | None:
    """Name what lies at a path, in a word; None where nothing does. Links are not followed."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "special file")


def check_plain(path: str | Path) -> None:
    """Refuse a name under which anything but a plain file lies; a free one is fine."""
    kind = _kind(path)
    if kind not in (None, "file"):
        raise UserError(f"{path} is a {kind} and not replaced by a file; remove it, or choose another path")


def remove(path: str | Path, *, inside: str | Path) -> None:
    """Remove a file or a folder of vitrail's own, if it is there, from a folder that is vitrail's own.

    Refused, and nothing is touched, where it is or holds a link, a special file or a mount point.
    """
    path, inside = Path(path).absolute(), Path(inside).absolute()  # `..` stays: behind a link it leads elsewhere
    if inside not in path.parents or ".." in path.relative_to(inside).parts:
        raise UserError(f"{path} is not removed: it does not lie in {inside}, which is all that may be tidied")
    with contextlib.ExitStack() as stack:
        try:
            parent = stack.enter_context(_folder_below(inside, path.relative_to(inside).parts[:-1]))
            mode = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        except NotADirectoryError as error:  # a link, too
            raise UserError(f"{path} is not removed: {error.filename} on the way is a link or a file") from None
        _check_place(path, "removed")
        for found in (path, *(_walk(path) if stat.S_ISDIR(mode) else ())):
            if (kind := _kind(found)) not in (None, "file", "folder"):
                raise UserError(f"{path} is not removed: {found} is a {kind}, which vitrail never writes; take it away")
        with contextlib.suppress(FileNotFoundError):  # another process tidies, too
            if stat.S_ISDIR(mode):
                shutil.rmtree(path.name, dir_fd=parent)
            else:
                os.unlink(path.name, dir_fd=parent)


@contextlib.contextmanager
def _folder_below(root: Path, folders: Sequence[str]) -> Iterator[int]:
    """Open a folder below a root, with no link on the way to it."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            deeper = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = deeper
        yield here
    finally:
        os.close(here)


def remove_empty(folder: str | Path) -> None:
    """Remove a folder of vitrail's own in which nothing is left; any other stays, and so does a link."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def sweep(folder: str | Path) -> None:
    """Remove drafts that kills have left in a folder of vitrail's own, not those of a process that is writing now."""
    folder = Path(folder)
    if _kind(folder) == "folder":
        for draft in filter(is_draft, folder.iterdir()):
            with contextlib.suppress(OSError, UserError):  # by now it has its name; or it is none of ours
                left = _kind(draft) == "file" and time.time() - draft.lstat().st_mtime > OLD
                if left or _is_left_draft(draft):
                    remove(draft, inside=folder)


def _walk(folder: Path) -> Iterator[Path]:
    """List all that lies below a folder, in order, links not followed."""
    for found in sorted(folder.iterdir()):
        yield found
        if _kind(found) == "folder":
            yield from _walk(found)


def _check_place(path: Path, done: str) -> None:
    """Refuse places that nobody means to lose, and mount points, here or below."""
    real = Path(os.path.realpath(path.parent), path.name)
    if real == Path(real.anchor) or path.name in ("", ".", ".."):
        raise UserError(f"{path} is not {done}: name the thing itself, such as data/em.zarr")
    for what, place in _protected():
        if real == place or real in place.parents:
            raise UserError(f"{path} is not {done}: it is {what} or holds it ({place}); choose another path")
    for mount in _mounts(real):
        if mount == real or real in mount.parents:
            raise UserError(f"{path} is not {done}: {mount} is a mount point; unmount it, or choose another path")


def _protected() -> Iterator[tuple[str, Path]]:
    with contextlib.suppress(OSError):
        yield "the working folder", Path(os.path.realpath(os.getcwd()))
    with contextlib.suppress(RuntimeError, KeyError):
        for home in {str(Path.home()), pwd.getpwuid(os.getuid()).pw_dir}:
            yield "your home", Path(os.path.realpath(home))
    for place in {sys.prefix, sys.base_prefix, sys.executable, __file__}:
        yield "what runs vitrail", Path(os.path.realpath(place))
    yield "the system's place for temporary files", Path(os.path.realpath(tempfile.gettempdir()))


def _mounts(path: Path) -> list[Path]:
    """List the mount points of this process; without /proc, at least the path itself if it is one."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            fields = [line.split(b" ")[4] for line in file]
    except (OSError, IndexError):
        return [path] if os.path.ismount(path) else []
    spelled = (re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), field) for field in fields)
    return [Path(os.fsdecode(place)) for place in spelled]


@contextlib.contextmanager
def new_folder(
    target: str | Path, *, force: bool | None = None, seal: str | None = None, tell: Tell = lambda line: None
) -> Iterator[Path]:
    """Make a draft of a folder, which gets its name when the block ends well and is removed if not.

    `seal` names the folder in it that gets the list of all files, "." for itself: without it, nothing can be replaced.
    With `force`, a sealed folder that lies there is kept beside it as NAME.old-TIME until the new one is in its place.
    """
    target = Path(target)
    check_free(target, force=force, tell=tell)
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep_beside(target)
    place = draft_of(target)  # with the draft in it, and a mark that the draft need not carry
    os.mkdir(place)
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a system without locks: what a kill leaves stays there
            fcntl.flock(lock, fcntl.LOCK_EX)
        write_whole(place / MARK, json.dumps({"vitrail": "draft", "machine": _machine()}), durable=False)
        draft = place / target.name
        os.mkdir(draft)
        yield draft
        if seal is not None:
            files = {str(path.relative_to(draft)): _digest(path) for path in _walk(draft) if _kind(path) == "file"}
            write_whole(draft / seal / MARK, json.dumps({"vitrail": "folder", "files": files}, indent=0))
        if force and _kind(target) is not None:
            _swap(draft, target, tell)
        else:
            publish(draft, target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError, UserError):
            remove(place, inside=place.parent)
        os.close(lock)


@contextlib.contextmanager
def told(target: str | Path) -> Iterator[None]:
    """Tell what the system refuses while a thing is written, in a sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "free some space, or choose another path" if full else "choose another path"
        raise UserError(f"{target} cannot be written ({error.strerror or error}); {what}") from error


def check_free(target: str | Path, *, force: bool | None = None, tell: Tell = lambda line: None) -> None:
    """Refuse a path where something lies; with `force`, which some verbs do not have, what vitrail did not write."""
    target = Path(target)
    if target.name in ("", ".", ".."):
        raise UserError(f"{target} names no folder of its own; give one, such as data/em.zarr")
    _recover(target, tell)
    kind = _kind(target)
    if kind is None:
        return
    if not force:
        more = "" if force is None else "; a volume that vitrail wrote is replaced with --force"
        raise UserError(f"{target} exists and is not overwritten; choose another path, or move it away{more}")
    if kind != "folder":
        raise UserError(f"{target} is a {kind}, not a volume of vitrail's, and not replaced; choose another path")
    check_ours(target)


def check_ours(folder: str | Path) -> list[Path]:
    """Return the files of a sealed folder that holds just what vitrail wrote, unchanged; refuse any other."""
    folder = Path(folder)
    _check_place(folder, "replaced")
    mark = _find_mark(folder)
    if mark is None:
        raise UserError(
            f"{folder} is not replaced: it carries no mark of vitrail ({MARK}), so it may be anything; "
            "move it away, or choose another path"
        )
    place, known = mark
    expected = {**known, str(place.relative_to(folder)): None}
    folders = {str(parent) for name in expected for parent in Path(name).parents}
    files = []  # those that lie here: names of a list may lead anywhere
    for found in _walk(folder):
        name, kind = str(found.relative_to(folder)), _kind(found)
        wrong = None
        if kind == "folder":
            wrong = None if name in folders else "was not written by vitrail"
        elif kind != "file" or name not in expected:
            wrong = f"{'is a ' + kind + ' that ' if kind and kind != 'file' else ''}was not written by vitrail"
        elif found != place and not _is_as_listed(found, expected[name]):
            wrong = "has changed since vitrail wrote it"
        if wrong:
            raise UserError(f"{folder} is not replaced: {name} in it {wrong}; move it away, or choose another path")
        if kind == "file":
            files.append(found)
            del expected[name]
    for name in sorted(expected):
        raise UserError(
            f"{folder} is not replaced: {name} is missing, so it is not complete; move it away, or choose another path"
        )
    return files


def _find_mark(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Find the list of files of a sealed folder: in it, or right below, where a volume's readers do not look."""
    places = [folder / MARK, *(below / MARK for below in sorted(folder.iterdir()) if _kind(below) == "folder")]
    for place in places:
        found = _read_mark(place) if _kind(place) == "file" else {}
        if found.get("vitrail") == "folder" and isinstance(found.get("files"), dict):
            return place, found["files"]
    return None


def first_changed(
    place: Path, root: Path, files: Sequence[str], wanted: Callable[[str], bool], *, most: int
) -> str | None:
    """Find the first wanted file below a root that is not as the mark at a place says it was written.

    `files` are their names without folders. The list may be anybody's: links below the root are not followed, and no
    more than `most` bytes are read of all files.
    """
    for name, listed in _listed(place, files):
        if ".." in Path(name).parts or Path(name).is_absolute() or not wanted(name):
            continue
        # What is missing, or has a name that no file can have, is missed by whoever needs it.
        with contextlib.suppress(OSError, ValueError), _open_below(root, name) as file:
            size = os.fstat(file.fileno()).st_size
            if [size] != listed[:1]:
                return name
            most -= size
            if most >= 0 and _digest_of(file) != listed:
                return name
    return None


def _listed(place: Path, files: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """List the files of some names in the mark at a place, each with its size and digest.

    The list of a large volume is large: it is read line by line, and what vitrail would write otherwise is passed over.
    """
    ends = tuple(f'{name}": [\n'.encode() for name in files)
    with contextlib.suppress(OSError), open(place, "rb", opener=_open_old) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            return
        lines = iter(lambda: file.readline(_LONGEST), b"")
        for line in lines:
            if line.endswith(ends):
                with contextlib.suppress(ValueError, RecursionError):
                    yield str(json.loads(line[:-4])), json.loads(b"[%b%b]" % (next(lines, b""), next(lines, b"")))


def _open_below(root: Path, name: str) -> BinaryIO:
    """Open a plain file below a root for reading, with no link on the way to it."""
    *folders, last = Path(name).parts
    with _folder_below(root, folders) as here:
        handle = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
    return os.fdopen(handle, "rb")


def _read_mark(place: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError), open(place, "rb", opener=_open_old) as file:
        found = json.loads(file.read(_LARGEST))
        return found if isinstance(found, dict) else {}
    return {}


def _digest(path: Path) -> list[Any]:
    with open(path, "rb", opener=_open_old) as file:
        return _digest_of(file)


def _digest_of(file: BinaryIO) -> list[Any]:
    found = hashlib.blake2b(digest_size=16)
    while piece := file.read(1 << 20):
        found.update(piece)
    return [file.tell(), found.hexdigest()]


def _is_as_listed(path: Path, listed: Any) -> bool:
    """Tell whether a file has the size and the digest of a list; one of another size is not read."""
    return isinstance(listed, list) and [path.lstat().st_size] == listed[:1] and _digest(path) == listed


def _swap(draft: Path, target: Path, tell: Tell) -> None:
    """Put a draft in the place of a sealed folder, and remove that: what is listed, nothing else."""
    check_ours(target)  # again: it took a while to write the new one
    old = _old_of(target)
    publish(target, old)
    try:
        publish(draft, target)
    except BaseException:
        publish(old, target)
        raise
    sync_folder(target.parent)
    try:
        files = check_ours(old)
        size = sum(file.lstat().st_size for file in files)
        for file in files:
            os.unlink(file)
        for place in sorted(_walk(old), key=lambda path: -len(path.parts)):
            os.rmdir(place)  # which fails where anything is left
        os.rmdir(old)
    except (OSError, UserError) as error:
        tell(f"{target} was replaced; what lay there before is kept as {old} ({error})")
    else:
        tell(f"{target}: replaced what vitrail had written there before, {len(files)} files of {size / 2**20:.2f} MiB")


def _old_of(target: Path) -> Path:
    name = f"{target.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name, *(f"{name}-{n}" for n in range(2, 100)))
    return next(place for place in map(target.with_name, names) if _kind(place) is None)


def _recover(target: Path, tell: Tell) -> None:
    """Put back what a kill between two renames has left without its name, and tell of what else such have left."""
    pattern = re.compile(re.escape(target.name) + r"\.old-\d{8}-\d{6}(-\d+)?")
    try:
        found = sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name) and _kind(p) == "folder")
    except OSError:  # of a folder that is not there, or that must not be read
        return
    for place in reversed(found):
        with contextlib.suppress(UserError, OSError):
            if _kind(target) is None and check_ours(place):
                publish(place, target)
                tell(f"{target}: put back from {place.name}, left there by a call that was ended while replacing it")
                continue
        tell(f"{place}: left by a call that was ended while replacing {target.name}; remove it if you do not need it")


def _sweep_beside(target: Path) -> None:
    """Remove drafts of a folder that a kill has left beside it."""
    with contextlib.suppress(OSError, UserError):
        for draft in target.parent.iterdir():
            if meant_by(draft) == target and _is_left_draft(draft):
                remove(draft, inside=draft.parent)


def _is_left_draft(draft: Path) -> bool:
    """Tell whether it is a folder that vitrail began and no process is writing: the lock goes with the process.

    A kill may come before the mark: then there is nothing in it, or half of the mark, and it must be old. So must that
    of another machine, whose locks a shared disk need not tell of.
    """
    if _kind(draft) != "folder":
        return False
    handle = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if all(meant_by(found) == draft / MARK and _kind(found) == "file" for found in draft.iterdir()):
            return _is_old(draft)
        found = _read_mark(draft / MARK)
        here = found.get("machine", _machine()) == _machine()  # early versions did not say
        return found.get("vitrail") == "draft" and (here or _is_old(draft))
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_old(draft: Path) -> bool:
    """Tell whether nothing in a draft was touched for long."""
    return time.time() - max(os.lstat(found).st_mtime for found in (draft, *_walk(draft))) > OLD


@cache
def _machine() -> str:
    """Return what tells this machine from others, since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def write_output(path: str | Path, content: bytes, *, parents: bool = False) -> Path:
    """Write a file under a name that a user gave, with vitrail's mark in it: over one that has it, or none."""
    check_output(path)
    return write_whole(path, mark(content), durable=False, parents=parents)


def write_own(path: str | Path, content: bytes, *, parents: bool = False) -> Path:
    """Write a file of a folder of vitrail's own, with its mark.

    One that a user changed, or that an early version wrote without a mark, is kept beside it as NAME.old-TIME.
    """
    path = Path(path)
    check_plain(path)
    if _kind(path) == "file" and not is_ours(path):
        publish(path, _old_of(path))
    return write_whole(path, mark(content), durable=False, parents=parents)


def check_output(path: str | Path) -> None:
    """Refuse a name under which something lies that vitrail did not write, or that was changed since."""
    path = Path(path)
    check_plain(path)
    if _kind(path) == "file" and not is_ours(path):
        raise UserError(
            f"{path} exists and is not as vitrail would have written it, so it is not replaced; "
            "move it away, or choose another path"
        )


def is_ours(path: str | Path) -> bool:
    """Tell whether a file carries the mark and is as it was written."""
    if _kind(path) != "file" or os.lstat(path).st_size > _LARGEST:
        return False
    with open(path, "rb", opener=_open_old) as file:
        content = file.read()
    found = list(_SEAL.finditer(content))
    found = found[:1] + found[-1:]  # of JSON it comes first, else last; what lies between is text
    return any(_seal(content[: m.start(1)], content[m.end(1) + 4 * content.startswith(_PNG) :]) == m[1] for m in found)


def mark(content: bytes) -> bytes:
    """Add vitrail's mark, a digest of all else in it, to a PNG, page, JSON object or text."""
    words = b"written by vitrail "
    if content.startswith(_PNG) and content.endswith(_PNG_END):
        body = b"tEXtComment\x00" + words  # a chunk: length, type, text and a CRC
        head = content.removesuffix(_PNG_END) + struct.pack(">I", len(body) - 4 + 32) + body
        seal = _seal(head, _PNG_END)
        return head + seal + struct.pack(">I", zlib.crc32(body + seal)) + _PNG_END
    start = content.lstrip()[:1]
    if start == b"{":
        place = content.index(b"{") + 1
        more = b"" if content[place:].lstrip().startswith(b"}") else b","
        before, after = content[:place] + b'"$comment": "' + words, b'"' + more + content[place:]
    else:
        left, right = {b"<": (b"<!-- ", b" -->\n"), b"%": (b"% ", b"\n")}.get(start, (b"# ", b"\n"))
        before, after = content.rstrip(b"\n") + b"\n" + left + words, right
    return before + _seal(before, after) + after


def _seal(before: bytes, after: bytes) -> bytes:
    return hashlib.blake2b(before + after, digest_size=16).hexdigest().encode()
