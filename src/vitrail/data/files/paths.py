"""Files by path or URL: local paths, file://, memory://, http(s):// and whatever else fsspec knows, zip:// chains too.

- a plain path and file:// never go through fsspec; its libraries are imported for other URLs only
- `local_copy` downloads a remote file once into the cache folder ($VITRAIL_CACHE, else ~/.cache/vitrail); a file that
  has changed at its place is downloaded anew, and so is a copy that is not as it was made, or somebody else's
- no copy becomes larger than it is said to be, than what an archive can hold or than the disk has room for; what was
  unpacked and turns out to be bad data is removed
- what no second try can mend (no such file, no permission) is told as BadData; other errors of reading stay OSErrors,
  so that the reader may try again
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from vitrail.credentials import REMEDY, reveal, strip
from vitrail.data.files.cache import cache_folder, is_as_recorded, read_own, record_of
from vitrail.data.reading.pool import ShortRead
from vitrail.disk import remove, replacing
from vitrail.errors import BadData, UserError
from vitrail.foreign import BEST_PACKED, METADATA, check_plain, is_trusting, open_plain, parse_json
from vitrail.recipe.kinds import nearest, remedy
from vitrail.sums import sealed, sum_of_file, unsealed

ARCHIVES = ("zip://", "tar://", "libarchive://")
LASTING = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_url(path: str) -> bool:
    """Tell whether a path is a URL that only fsspec can open; file:// is a local path."""
    return "://" in path and not path.lower().startswith(("file://", "local://"))


def local_path(path: str | Path) -> Path:
    """Return the path of a local file, file:// taken off."""
    text = str(path)
    if "://" in text and not is_url(text):
        return Path(unquote(urlsplit(text).path))
    return Path(text)


def split_key(path: str, key: str | None) -> tuple[str, str | None]:
    """Split `file::key` into path and key; a chain of URLs is left whole."""
    head, mark, tail = path.rpartition("::")
    inside = head.lower().startswith(ARCHIVES) and "::" not in head  # then the tail is the archive
    if not mark or inside or "://" in tail or (is_url(head) and tail.startswith("/")):
        return path, key
    if key is not None and key != tail:
        raise UserError(f"{path} names the key {tail!r} and `key` {key!r}; give one of them")
    return head, tail


def join(path: str, *names: str) -> str:
    """Return a path below a folder; in a chain such as zip://folder::file.zip that is in its first part."""
    first, chained, rest = path.partition("::") if is_url(path) else (path, "", "")
    head = first if first.endswith("/") or not first else first + "/"
    return head + "/".join(names) + chained + rest


def base_name(path: str) -> str:
    """Return the last part of a path or URL, without query."""
    first = path.partition("::")[0] if is_url(path) else path
    if first.lower().startswith(("http://", "https://")):
        first = first.partition("?")[0]
    return first.rstrip("/").rpartition("/")[2]


def parent(path: str) -> str:
    """Return the folder that a file lies in."""
    first, chained, rest = path.partition("::") if is_url(path) else (path, "", "")
    head = first.rstrip("/").rpartition("/")[0]
    return (head or ("/" if first.startswith("/") else ".")) + chained + rest


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading bytes, with seek."""
    with explained(path):
        if not is_url(str(path)):
            return open_plain(local_path(path))
        system, place = _system(str(path))
        return system.open(place, "rb")


def read_bytes(path: str | Path, start: int = 0, length: int | None = None) -> bytes:
    """Read some bytes of a file, or all of a small one; fewer than asked for only where the file ends."""
    with explained(path):
        if is_url(str(path)):
            system, place = _system(str(path))
            whole, end = length is None and start >= 0, None if length is None else start + length
            found = system.cat_file(place, start=start or None, end=start + METADATA + 1 if whole else end)
            if whole and len(found) > METADATA:
                raise BadData(f"{path} has more than {METADATA:,} bytes, too many for a list of facts; restore it")
            # A server that gives no parts of files sends the whole.
            return found if end is None or len(found) <= end - start else found[start:end]
        with open_plain(local_path(path)) as file:
            left = max(0, os.fstat(file.fileno()).st_size - start)  # what is asked for may come from a broken header
            if length is None and left > METADATA:
                raise BadData(f"{path} has {left:,} bytes, too many for a list of facts; restore it")
            if not left or start < 0:
                return b""
            file.seek(start)
            return file.read(left if length is None else min(length, left))


def read_json(path: str | Path) -> Any:
    """Read the value in a JSON file; ValueError for what is wrong with its text."""
    return parse_json(read_bytes(path))


def read_exactly(path: str | Path, start: int, length: int, what: str) -> bytes:
    """Read some bytes of a local file that must be there; `what` they are is told where the file ends before them."""
    found = read_bytes(path, start, length)
    if len(found) == length:
        return found
    size = local_path(path).stat().st_size
    if size >= start + length:
        raise ShortRead(errno.EIO, f"{len(found)} of {length} bytes of {what} came from {path}")
    raise BadData(f"{path} is cut short: {what} ends at byte {start + length:,} of {size:,}; restore the file")


def list_files(path: str | Path) -> list[str]:
    """List the files of a folder, hidden ones left out, as a person would sort them."""
    return _list(path)[0]


def list_folders(path: str | Path) -> list[str]:
    """List the folders of a folder, hidden ones left out, as a person would sort them."""
    return _list(path)[1]


def file_type(path: str | Path) -> str | None:
    """Return 'file', 'folder', or None where nothing is."""
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
    """Return what changes when a local file does."""
    facts = place.stat()
    return f"{place.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"


# What may change with a file at a URL: HTTP, object stores and fsspec's own systems each say it in their words.
CHANGING = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "mtime", "modified", "created")


def remote_state(url: str) -> tuple[int, str] | None:
    """Return bytes of the file at a URL and what changes when it does; None where that cannot be told."""
    try:
        system, place = _system(url)
        facts = system.info(place)
    except Exception:  # each remote library has its own; whoever reads the file meets the error
        return None
    size, marks = facts.get("size"), [str(facts[key]) for key in CHANGING if facts.get(key) is not None]
    return (size, "\n".join([url, str(size), *marks])) if isinstance(size, int) and marks else None


def local_copy(path: str | Path) -> Path:
    """Return a local plain file with these contents: the file itself, or its copy in the cache."""
    if not is_url(str(path)):
        place = local_path(path)
        with explained(path):
            if not place.exists():
                raise BadData(f"{path} does not exist; check the spelling and the folder that it is relative to")
            check_plain(place)
        return place
    url = str(path)
    with explained(url):
        system, remote = _system(url)
        facts = system.info(remote)
        size = facts.get("size")
        state = [str(facts.get(key)) for key in ("size", *CHANGING)]
        mark = hashlib.blake2b("\n".join([url, *state]).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^\w.-]", "_", base_name(url))[-80:]  # its suffix may tell the format
        copy = cache_folder("files") / f"{mark}-{name}"
        _fetch(url, copy, size, lambda draft, count: system.get_file(remote, draft, callback=count))
        return copy


_unpacked: ContextVar[list[Path] | None] = ContextVar("unpacked", default=None)


@contextlib.contextmanager
def unpacking() -> Iterator[None]:
    """Remove what is unpacked from archives in here again where it turns out to be bad data."""
    made: list[Path] = []
    token = _unpacked.set(made)
    try:
        yield
    except BadData:
        for copy in made:
            for place in (copy.with_name(f"{copy.name}.sum"), copy):
                with contextlib.suppress(OSError, UserError):
                    remove(place, inside=copy.parent)
        raise
    finally:
        _unpacked.reset(token)


def _most(url: str, copy: Path, size: Any) -> int:
    """Return the bytes that may be written for a copy: those it is said to have, if it can and the disk has room."""
    free = shutil.disk_usage(copy.parent).free
    if not isinstance(size, int):
        return free
    if (packed := _archive_size(url)) is not None and size > BEST_PACKED * packed:
        raise BadData(
            f"{url} says that it has {size:,} bytes, which cannot come of an archive of {packed:,}; restore the "
            "archive, or unpack it yourself if you know who made it"
        )
    if size > free:
        raise UserError(
            f"{url} has {size / 2**30:,.3g} GiB, and {copy.parent} has room for {free / 2**30:,.3g}; free some space, "
            "or set VITRAIL_CACHE to a folder with more"
        )
    return size


def _archive_size(url: str) -> int | None:
    """Return bytes of the archive that a file lies in, if it does."""
    first, chained, rest = url.partition("::")
    return local_copy(rest).stat().st_size if chained and first.lower().startswith(ARCHIVES) else None


def _counting(most: int) -> Any:
    """Return what ends a copy that becomes larger than it may."""
    from fsspec.callbacks import Callback

    class Count(Callback):
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > most:
                raise OSError(errno.EIO, f"more than the {most:,} bytes came that it should have")

    return Count()


def _fetch(url: str, copy: Path, size: Any, get: Callable[[str, Any], Any]) -> None:
    """See to it that a copy in the cache is what was fetched once, by this user."""
    sidecar = copy.with_name(f"{copy.name}.sum")
    with contextlib.suppress(OSError, ValueError):
        record = unsealed(json.loads(read_own(sidecar)))
        if record is not None and size in (None, record.get("size")) and is_as_recorded(copy, record):
            return
    most = _most(url, copy, size)
    if (made := _unpacked.get()) is not None and url.lower().startswith(ARCHIVES):
        made.append(copy)
    try:
        with replacing(copy, durable=False) as draft:  # several processes may do this at once
            os.fchmod(draft.fileno(), 0o600)  # before there is anything to read
            get(draft.name, _counting(most))
            came = os.stat(draft.name).st_size
            if size is not None and came != size:
                raise OSError(errno.EIO, f"{came} of {size} bytes came")
            total = sum_of_file(draft.name)
        with replacing(sidecar, durable=False) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(sealed(record_of(copy, total))).encode())
    except PermissionError as error:
        raise UserError(
            f"{url}: {error.filename or copy} cannot be written ({error.strerror}); set VITRAIL_CACHE to a folder of "
            "yours"
        ) from error


@contextlib.contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Tell errors that last with the file's name and what to do; those that may pass stay OSErrors."""
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
            errno.EIO, strip(f"{path} cannot be read: {' '.join(str(error).split()) or type(error).__name__}")
        ) from error


def _check_absent(path: str | Path, error: OSError) -> None:
    """Raise what fsspec takes for an absent file: a server that does not answer, or that refuses."""
    cause = error.__cause__
    _check_rights(path, cause)
    if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
        raise OSError(errno.EIO, strip(f"{path} cannot be reached: {cause}")) from error


def _check_rights(path: str | Path, error: BaseException | None) -> None:
    status = getattr(error, "status", None)
    if status in (401, 403):
        raise BadData(f"{path} may not be read (HTTP {status}); check your rights to it; {REMEDY}") from error


_systems = threading.local()  # the file systems of a thread: some keep a connection or an open file
_granted: set[str] = set()  # file systems that were opened with --trust, which threads that read do not know of


def _system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the place in it."""
    known: dict[str, Any] = _systems.__dict__
    url = reveal(url)
    first, chained, rest = url.partition("::")
    protocol, _, place = first.partition("://")
    name = f"{protocol}::{rest}" if chained else f"{protocol}://{urlsplit(first).netloc}"
    if name not in known:
        _check_granted(name, url)
        known[name] = _connect(url, first, rest)
    return known[name], place.strip("/") if chained else known[name]._strip_protocol(first)


def _check_granted(name: str, url: str) -> None:
    """Refuse a list of places, which may lie anywhere, unless --trust was given when it was opened first."""
    if name.startswith("reference:") and name not in _granted:
        if not is_trusting():
            raise UserError(f"{url} reads whatever files and addresses its list names; give --trust if you know it")
        _granted.add(name)


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
                    (folders if _is_folder(entry) else files).append(entry.name)
        else:
            system, place = _system(str(path))
            for found in system.ls(place, detail=True):
                name = base_name(found["name"])
                if name:
                    (folders if found["type"] == "directory" else files).append(name)
    return _sorted(files), _sorted(folders)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a folder may be behind it, which would be missed without a word
            raise
        return False  # a link to itself: whoever opens it is told so


def _sorted(names: list[str]) -> list[str]:
    return sorted((name for name in names if not name.startswith(".")), key=natural_key)


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key that puts image2 before image10."""
    parts = re.split(r"(\d+)", name.lower())
    # Of numbers without zeros in front the longer is the larger, and no name has too many digits for that. The name
    # itself comes last, so that a2 and a02 always keep the same order.
    return [(0, len(n := p.lstrip("0")), n) if p.isdecimal() else (1, 0, p) for p in parts], name
