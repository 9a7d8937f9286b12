"""Places of stored hierarchies: a local folder is a Path, and a URL something that answers as a Path does.

- http(s), s3 and gs go through tensorstore, which brings its own clients; every other URL through fsspec
- servers seldom list folders: what is asked for by name is found all the same
"""

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from vitrail.credentials import REMEDY, reveal, strip
from vitrail.data.files.paths import file_type, is_url, join, list_folders, local_path, read_bytes
from vitrail.errors import BadData, UserError
from vitrail.foreign import METADATA, parse_json, read_plain

MOST_FOLDERS = 10_000  # that are looked at in search of data
BY_TENSORSTORE = ("http", "https", "s3", "gs")


class Remote:
    """A folder or file at a URL."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "Remote":
        return Remote(join(self.url, name))

    def joinpath(self, *names: str) -> "Remote":
        return Remote(join(self.url, *names))

    @property
    def name(self) -> str:
        return self.url.partition("::")[0].rpartition("/")[2]

    @property
    def parent(self) -> "Remote":
        first, chained, rest = self.url.partition("::")
        scheme, _, place = first.partition("://")
        return Remote(f"{scheme}://{place.rpartition('/')[0]}{chained}{rest}") if "/" in place else self

    @property
    def parents(self) -> list["Remote"]:
        found, here = [], self
        while here.parent != here:
            here = here.parent
            found.append(here)
        return found

    @property
    def uses_tensorstore(self) -> bool:
        return "::" not in self.url and self.url.partition("://")[0].lower() in BY_TENSORSTORE

    def exists(self) -> bool:
        return True  # what is not there is found out by what is asked for in it

    def is_dir(self) -> bool:
        return True

    def is_file(self) -> bool:
        return read_remote(self) is not None

    def read_text(self, encoding: str = "utf-8") -> str:
        found = read_remote(self)
        if found is None:
            raise FileNotFoundError(self.url)
        return found.decode(encoding)

    def iterdir(self) -> list["Remote"]:
        try:
            return [self / name for name in list_folders(self.url)]
        except (UserError, OSError):
            return []

    def resolve(self) -> "Remote":
        return self

    def absolute(self) -> "Remote":
        return self

    def is_relative_to(self, other: "Remote") -> bool:
        return self.url.startswith(other.url)


Place = Path | Remote


def find_place(path: str | Place) -> Place:
    if isinstance(path, Path | Remote):
        return path
    return Remote(path) if is_url(path) else local_path(path)


def find_folders(top: Place, judge: Callable[[Place], bool | None], *, depth: int, most: int) -> list[Place]:
    """Find folders below one that are judged True, in order; those judged None are looked into.

    Each is looked at once, whatever links lead to it: of a few links to the folder above there are any number of names.
    """
    found: list[Place] = []
    seen = {top.resolve()}

    def look(folder: Place, depth: int) -> None:
        for child in sorted((child for child in folder.iterdir() if child.is_dir()), key=str):
            if len(found) >= most or len(seen) >= MOST_FOLDERS:
                return
            if (real := child.resolve()) in seen:
                continue
            seen.add(real)
            judged = judge(child)
            if judged:
                found.append(child)
            elif judged is None and depth > 1:
                look(child, depth - 1)

    look(top, depth)
    return found


def read_facts(place: Place) -> Any:
    """Read the value in a small JSON file; ValueError for what is wrong with its text."""
    if isinstance(place, Remote):
        return parse_json(place.read_text())
    return parse_json(read_plain(place))


def read_object(name: str | Place, read: Callable[[Any], Any] = read_facts) -> dict[str, Any]:
    """Read the object in a small JSON file, as `read` reads it; UserError for what is wrong with its text."""
    try:
        found = read(name)
    except UserError:
        raise
    except ValueError as error:  # broken JSON, or bytes that are not text
        raise UserError(f"{name} is not valid JSON ({error}); restore or rewrite the file") from error
    if not isinstance(found, dict):
        raise UserError(f"{name} must hold a JSON object; restore or rewrite the file")
    return found


@lru_cache(maxsize=256)
def read_remote(place: Remote) -> bytes | None:
    """Read a small file; None where there is none."""
    if not place.uses_tensorstore and file_type(place.url) != "file":
        return None
    try:
        return fetch_remote(place, most=METADATA)
    except TooLong:
        raise BadData(f"{place} has more than {METADATA:,} bytes, too many for a list of facts; restore it") from None


class TooLong(ValueError):
    """A file has more bytes than what it stands for can have."""

    def __init__(self, most: int):
        super().__init__(f"it has more than {most:,} bytes, more than a chunk can need")


def fetch_remote(place: Remote, start: int = 0, length: int | None = None, *, most: int | None = None) -> bytes | None:
    """Read bytes of a file, None where there is none; one that has more than `most` is not read, but TooLong."""
    if not place.uses_tensorstore:
        try:
            data = read_bytes(place.url, start, length if most is None else most + 1)
        except BadData as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        if most is not None and len(data) > most:
            raise TooLong(most)
        return data
    # Its clients take no range that ends beyond the file, and hold all that comes: so the server is asked first whether
    # it has more than may come, though that is a second request.
    if most is not None and is_longer(place, most):
        raise TooLong(most)
    found = _ask(place)
    if found.state != "value":
        return None
    return found.value if length is None else found.value[start : start + length]


def is_longer(place: Remote, size: int) -> bool:
    """Ask a server whether a file has more bytes, before it sends them; not so where there is no file."""
    try:
        return _ask(place, byte_range=slice(size, size + 1)).state == "value"
    except TypeError:  # an older tensorstore
        return False
    except OSError as error:
        problem = str(error.__cause__)
        if "was ignored by server" in problem:  # of a range inside the file: it has sent all, which is let go
            return True
        if problem.startswith(("OUT_OF_RANGE", "INVALID_ARGUMENT", "UNIMPLEMENTED")):  # the last two know no ranges
            return False
        raise


def _ask(place: Remote, **part: Any) -> Any:
    """Return what tensorstore finds at a place."""
    try:
        return _key_values(as_folder(str(place.parent))).read(place.name, **part).result()
    except (ValueError, OSError, NotImplementedError) as error:
        problem = " ".join(str(error).split())
        if "PERMISSION_DENIED" in problem or "UNAUTHENTICATED" in problem:
            raise BadData(f"{place} may not be read ({problem}); check your rights to it; {REMEDY}") from error
        raise OSError(strip(f"{place} cannot be read: {problem}")) from error


def as_folder(url: str) -> str:
    """Return a URL as tensorstore takes it for a folder."""
    first, mark, query = reveal(url).partition("?")
    return f"{first}/{mark}{query}"


@cache
def _key_values(url: str) -> Any:
    import tensorstore

    try:
        return tensorstore.KvStore.open(url).result()
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{url} cannot be opened ({' '.join(str(error).split())}); check the URL") from error
