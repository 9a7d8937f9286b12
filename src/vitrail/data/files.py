"""Files by path or URL: local paths, file://, memory://, http(s):// and whatever else fsspec knows, zip:// chains too.

- a plain path and file:// never go through fsspec; its libraries are imported for other URLs only
- `local_copy` downloads a remote file once into the cache folder ($VITRAIL_CACHE, else ~/.cache/vitrail); a file that
  has changed at its place is downloaded anew
- what no second try can mend (no such file, no permission) is told as BadData; other errors of reading stay OSErrors,
  so that the reader may try again
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tarfile
import threading
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from vitrail.data.bad import BadData, ShortRead
from vitrail.errors import UserError
from vitrail.recipe.kinds import nearest, remedy

T = TypeVar("T")

ARCHIVES = ("zip://", "tar://", "libarchive://")
LASTING = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_url(path: str) -> bool:
    """Whether a path is a URL that only fsspec can open; file:// is a local path."""
    return "://" in path and not path.lower().startswith(("file://", "local://"))


def local_path(path: str | Path) -> Path:
    """The path of a local file, file:// taken off."""
    text = str(path)
    if "://" in text and not is_url(text):
        return Path(unquote(urlsplit(text).path))
    return Path(text)


def split_key(path: str, key: str | None) -> tuple[str, str | None]:
    """Path and key out of `file::key`; a chain of URLs is left whole."""
    head, mark, tail = path.rpartition("::")
    inside = head.lower().startswith(ARCHIVES) and "::" not in head  # then the tail is the archive
    if not mark or inside or "://" in tail or (is_url(head) and tail.startswith("/")):
        return path, key
    if key is not None and key != tail:
        raise UserError(f"{path} names the key {tail!r} and `key` {key!r}; give one of them")
    return head, tail


def join(path: str, *names: str) -> str:
    """A path below a folder; in a chain such as zip://folder::file.zip that is in its first part."""
    first, chained, rest = path.partition("::") if is_url(path) else (path, "", "")
    head = first if first.endswith("/") or not first else first + "/"
    return head + "/".join(names) + chained + rest


def base_name(path: str) -> str:
    """The last part of a path or URL, without query."""
    first = path.partition("::")[0] if is_url(path) else path
    if first.lower().startswith(("http://", "https://")):
        first = first.partition("?")[0]
    return first.rstrip("/").rpartition("/")[2]


def parent(path: str) -> str:
    """The folder that a file lies in."""
    first, chained, rest = path.partition("::") if is_url(path) else (path, "", "")
    head = first.rstrip("/").rpartition("/")[0]
    return (head or ("/" if first.startswith("/") else ".")) + chained + rest


def open_file(path: str | Path) -> BinaryIO:
    """A file opened for reading bytes, with seek."""
    with explained(path):
        if not is_url(str(path)):
            return local_path(path).open("rb")
        system, place = _system(str(path))
        return system.open(place, "rb")


def read_bytes(path: str | Path, start: int = 0, length: int | None = None) -> bytes:
    """Some bytes of a file, or all; fewer than asked for only where the file ends."""
    with explained(path):
        if is_url(str(path)):
            system, place = _system(str(path))
            end = None if length is None else start + length
            found = system.cat_file(place, start=start or None, end=end)
            # A server that gives no parts of files sends the whole.
            return found if end is None or len(found) <= end - start else found[start:end]
        with local_path(path).open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)


def read_exactly(path: str | Path, start: int, length: int, what: str) -> bytes:
    """Some bytes of a local file that must be there; `what` they are is told where the file ends before them."""
    found = read_bytes(path, start, length)
    if len(found) == length:
        return found
    size = local_path(path).stat().st_size
    if size >= start + length:
        raise ShortRead(errno.EIO, f"{len(found)} of {length} bytes of {what} came from {path}")
    raise BadData(f"{path} is cut short: {what} ends at byte {start + length:,} of {size:,}; restore the file")


def list_files(path: str | Path) -> list[str]:
    """Names of the files of a folder, hidden ones left out, as a person would sort them."""
    return _list(path)[0]


def list_folders(path: str | Path) -> list[str]:
    """Names of the folders of a folder, hidden ones left out, as a person would sort them."""
    return _list(path)[1]


def file_type(path: str | Path) -> str | None:
    """'file', 'folder', or None where nothing is."""
    with explained(path):
        if not is_url(str(path)):
            place = local_path(path)
            return "folder" if place.is_dir() else "file" if place.exists() else None
        system, remote = _system(str(path))
        try:
            listed = str(path).lower().startswith(("http://", "https://")) and str(path).endswith("/")
            return "folder" if system.info(remote)["type"] == "directory" or listed else "file"
        except FileNotFoundError as error:
            _check_absent(str(path), error)
            return None


def file_state(place: Path) -> str:
    """What changes when a local file does."""
    facts = place.stat()
    return f"{place.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"


def cache_folder(name: str) -> Path:
    """A folder of the cache, made if need be: $VITRAIL_CACHE/NAME, else ~/.cache/vitrail/NAME."""
    given = os.environ.get("VITRAIL_CACHE")
    folder = (Path(given) if given else Path.home() / ".cache" / "vitrail") / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set VITRAIL_CACHE to a folder of yours"
        ) from error
    return folder


def keep(name: str, key: str, make: Callable[[], bytes], check: Callable[[bytes], T]) -> T:
    """What `check` makes of the bytes kept in a folder of the cache under a key, or of those made now and kept.

    Where several processes share a cache, one makes them and the others wait. No cache costs time, not the run.
    """
    mark = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    try:
        place = cache_folder(name) / mark
        lock = place.with_suffix(".lock").open("wb")
    except (UserError, OSError):
        return check(make())
    with lock:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, ValueError, EOFError):
            return check(place.read_bytes())
        made = make()
        draft = place.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
        with contextlib.suppress(OSError):
            draft.write_bytes(made)
            draft.replace(place)
        draft.unlink(missing_ok=True)
        return check(made)


def local_copy(path: str | Path) -> Path:
    """A local file with these contents: the file itself, or its copy in the cache."""
    if not is_url(str(path)):
        place = local_path(path)
        if not place.exists():
            raise BadData(f"{path} does not exist; check the spelling and the folder that it is relative to")
        return place
    url = str(path)
    with explained(url):
        system, remote = _system(url)
        facts = system.info(remote)
        size = facts.get("size")
        state = [str(facts.get(key)) for key in ("size", "ETag", "etag", "mtime", "LastModified", "created")]
        mark = hashlib.blake2b("\n".join([url, *state]).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^\w.-]", "_", base_name(url))[-80:]  # its suffix may tell the format
        copy = cache_folder("files") / f"{mark}-{name}"
        if not copy.exists():
            draft = copy.with_name(f".{copy.name}.{uuid.uuid4().hex[:8]}.part")  # several processes may do this at once
            try:
                system.get_file(remote, str(draft))
                if size is not None and draft.stat().st_size != size:
                    raise OSError(errno.EIO, f"{draft.stat().st_size} of {size} bytes came")
                draft.rename(copy)
            finally:
                draft.unlink(missing_ok=True)
        return copy


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Errors that last, told with the file's name and what to do; those that may pass stay OSErrors."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno == errno.ENOENT:
            _check_absent(path, error)
            raise BadData(f"{path} does not exist; check the spelling and the folder that it is relative to") from error
        if isinstance(error, PermissionError):
            raise BadData(f"{path} may not be read ({error.strerror or error}); check its permissions") from error
        if error.errno in LASTING:
            raise BadData(f"{path} cannot be opened ({error.strerror}); check the path") from error
        raise
    except Exception as error:  # each remote library has its own
        _check_rights(path, error)
        raise OSError(
            errno.EIO, f"{path} cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def _check_absent(path: str | Path, error: OSError) -> None:
    """Raise what fsspec takes for an absent file: a server that does not answer, or that refuses."""
    cause = error.__cause__
    _check_rights(path, cause)
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        raise OSError(errno.EIO, f"{path} cannot be reached: {cause}") from error


def _check_rights(path: str | Path, error: BaseException | None) -> None:
    status = getattr(error, "status", None)
    if status in (401, 403):
        raise BadData(f"{path} may not be read (HTTP {status}); check your rights to it") from error


_systems = threading.local()  # the file systems of a thread: some keep a connection or an open file


def _system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the place in it."""
    known: dict[str, Any] = _systems.__dict__
    first, chained, rest = url.partition("::")
    protocol, _, place = first.partition("://")
    name = f"{protocol}::{rest}" if chained else f"{protocol}://{urlsplit(first).netloc}"
    if name not in known:
        known[name] = _connect(url, first, rest)
    return known[name], place.strip("/") if chained else known[name]._strip_protocol(first)


def _connect(url: str, first: str, rest: str) -> Any:
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise UserError(f"{url} needs fsspec, which is not installed; {remedy('fsspec')}") from error
    protocol = first.partition("://")[0]
    if protocol not in fsspec.available_protocols():
        near = nearest(protocol, sorted(fsspec.available_protocols()))
        hint = f"did you mean {near}://?" if near else "use a local path, http(s):// or another that fsspec knows"
        raise UserError(f"{url}: {protocol}:// is not a known kind of URL; {hint}")
    if rest:
        # What lies inside a remote archive is read from a copy of it: not every server gives parts of files.
        first = f"{protocol}://::{local_copy(rest).absolute().as_uri()}"
    try:
        return fsspec.core.url_to_fs(first)[0]
    except ImportError as error:
        library = re.search(r"[Ii]nstall [\"']?([\w-]+)", str(error))
        missing = error.name or (library.group(1) if library else protocol)
        raise UserError(f"{url} needs {missing}, which is not installed; {remedy(missing)}") from error
    except (ValueError, TypeError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise BadData(f"{url} cannot be opened ({error}); check the URL, and what lies there") from error


def _list(path: str | Path) -> tuple[list[str], list[str]]:
    files: list[str] = []
    folders: list[str] = []
    with explained(path):
        if not is_url(str(path)):
            with os.scandir(local_path(path)) as entries:
                for entry in entries:
                    (folders if entry.is_dir() else files).append(entry.name)
        else:
            system, place = _system(str(path))
            for found in system.ls(place, detail=True):
                name = base_name(found["name"])
                if name:
                    (folders if found["type"] == "directory" else files).append(name)
    return _sorted(files), _sorted(folders)


def _sorted(names: list[str]) -> list[str]:
    return sorted((name for name in names if not name.startswith(".")), key=natural_key)


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key that puts image2 before image10."""
    parts = re.split(r"(\d+)", name.lower())
    # The name itself comes last, so that a2 and a02 always keep the same order.
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts], name
