"""Files that go into a page: never from outside the run folder; and places of pictures."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from vitrail.disk import check_output, mark, write_whole
from vitrail.errors import BadData, UserError
from vitrail.foreign import read_plain

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_LARGEST = 8 * 2**20  # bytes of one picture that goes into the page


def check_picture(path: str | Path) -> Path:
    """The path of a picture to be drawn; refused before the work where no PNG can be written there."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it, such as {path / 'picture.png'}")
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: pictures are written as PNG; use a name that ends so, such as {path.stem}.png")
    folder = path.parent.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):  # rights alone do not tell of full disks and systems without files
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({folder}: {error.strerror}); choose another place") from None
    check_output(path)
    return path


def write_picture(path: str | Path, picture: bytes) -> Path:
    """Write a PNG with vitrail's mark, so that a later call may replace it."""
    return write_whole(path, mark(picture), durable=False, parents=True)


def embed_image(content: bytes, kind: str) -> str:
    """An image as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def find_inside(run: Path, name: Any) -> Path | None:
    """The path of a name that a metadata file gives, None where it leads out of the run folder, also by a link."""
    if not isinstance(name, str) or not name or "\x00" in name:
        return None
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        return None
    path = run / inner
    try:
        return path if path.resolve().is_relative_to(run.resolve()) else None
    except (OSError, RuntimeError, ValueError):  # a ring of links, a name that the system refuses
        return None


def is_there(path: Path | None) -> bool:
    """Whether a path exists; a name that the system refuses does not."""
    try:
        return path is not None and path.exists()
    except (OSError, ValueError):
        return False


def read_picture(run: Path, name: Any) -> tuple[str | None, str | None]:
    """A picture named in the metrics, as a data URI; otherwise a sentence why it is not shown."""
    shown = repr(name)[:120]
    path = find_inside(run, name)
    if path is None:
        return None, f"The picture {shown} was left out: its path does not lead into the run folder."
    if not is_there(path):
        return None, f"The picture {shown} is missing."
    try:
        if path.stat().st_size > _LARGEST:
            return None, f"The picture {shown} was left out: it is larger than {_LARGEST // 2**20} MiB."
        content = read_plain(path, _LARGEST)
    except BadData:
        return None, f"The picture {shown} was left out: it is not a plain file."
    except OSError as error:
        return None, f"The picture {shown} cannot be read: {error.strerror}."
    for signature, kind in _SIGNATURES.items():
        if content.startswith(signature):
            return embed_image(content, kind), None
    return None, f"The picture {shown} was left out: it is neither PNG nor JPEG."
