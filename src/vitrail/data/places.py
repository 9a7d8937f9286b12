"""Where stored hierarchies lie: a local folder is a Path, and a URL something that answers as a Path does.

- http(s), s3 and gs go through tensorstore, which brings its own clients; every other URL through fsspec
- servers seldom list folders: what is asked for by name is found all the same
"""

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from vitrail.data.bad import BadData
from vitrail.data.files import file_type, is_url, join, list_folders, local_path, read_bytes
from vitrail.errors import UserError

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


@lru_cache(maxsize=256)
def read_remote(place: Remote) -> bytes | None:
    """A small file, or None where there is none."""
    return fetch_remote(place)


def fetch_remote(place: Remote, start: int = 0, length: int | None = None) -> bytes | None:
    """Bytes of a file, or None where there is none."""
    if not place.uses_tensorstore:
        if not start and length is None and file_type(place.url) != "file":
            return None
        try:
            return read_bytes(place.url, start, length)
        except BadData as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
    try:
        found = _key_values(str(place.parent)).read(place.name).result()
    except (ValueError, OSError, NotImplementedError) as error:
        problem = " ".join(str(error).split())
        if "PERMISSION_DENIED" in problem or "UNAUTHENTICATED" in problem:
            raise BadData(f"{place} may not be read ({problem}); check your rights to it") from error
        raise OSError(f"{place} cannot be read: {problem}") from error
    if found.state != "value":
        return None
    return found.value if length is None else found.value[start : start + length]


@cache
def _key_values(url: str) -> Any:
    import tensorstore

    try:
        return tensorstore.KvStore.open(f"{url}/").result()
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{url} cannot be opened ({' '.join(str(error).split())}); check the URL") from error
