"""Where the files of a codec lie: a folder, or a repository of the Hugging Face hub (or what is cached of it)."""

from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import UserError
from vitrail.recipe.kinds import remedy


def check_origin(path: str | None, hub: str | None) -> None:
    if (path is None) == (hub is None):
        raise ValueError("give one of path (a folder) and hub (a repository's name, such as owner/name)")


def find_files(
    names: Sequence[str], *, path: str | None, hub: str | None, revision: str | None, key: str
) -> list[Path]:
    """The files of these names, downloaded where they come from the hub and are not in its cache yet."""
    if hub is not None:
        return [_fetch(hub, name, revision, key) for name in names]
    assert path is not None
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{key}.path: {path!r} is no folder; give the one that holds {' and '.join(names)}")
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{key}.path: {path} has no {name}; give a folder with {' and '.join(names)}")
    return [folder / name for name in names]


def _fetch(hub: str, name: str, revision: str | None, key: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        raise UserError(
            f"{key}.hub: {hub!r} needs huggingface_hub, which is not installed; {remedy('huggingface_hub')}"
        ) from error
    try:
        return Path(hf_hub_download(hub, name, revision=revision))
    except Exception as error:  # of a network, of names and of rights: a zoo of classes that change between versions
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key}.hub: {name} of {hub!r} cannot be had ({said}); check the name and the network, or download its "
            f"files and set {key}.path to their folder"
        ) from error
