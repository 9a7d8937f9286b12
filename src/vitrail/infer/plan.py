"""Which samples are asked for, where each goes, and what a folder of samples says of itself.

- samples are counted from 0; the classes take turns, so that any number of samples has all of them
- they are made in fixed groups: what a sample is, to the last bit, depends on its group, never on ranks or resumption
- `settings.json` comes first and tells another call apart; `manifest.json` comes last, when all is there
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.recipe.kinds import nearest
from vitrail.report.files import write_whole

SETTINGS, MANIFEST = "settings.json", "manifest.json"
UNNAMED = "samples"  # folder of samples that have no class of their own


@dataclass(frozen=True)
class Plan:
    number: int
    batch: int  # samples of a group
    classes: tuple[int, ...]  # that take turns; none: samples have no class, or that of the data that they follow
    folders: tuple[str, ...]  # of all classes
    suffix: str

    @property
    def groups(self) -> int:
        return -(-self.number // self.batch)

    def counters(self, group: int) -> range:
        """Of a whole group: the last one goes beyond the number asked for, and what is beyond is not kept."""
        return range(group * self.batch, (group + 1) * self.batch)

    def label(self, counter: int) -> int | None:
        return self.classes[counter % len(self.classes)] if self.classes else None

    def file(self, counter: int, folder: str | None = None, suffix: str | None = None) -> str:
        """Where a sample goes, below the folder of all; or what lies in another `folder` beside it."""
        label, suffix = self.label(counter), suffix or self.suffix
        if folder is not None or label is None or not self.folders:
            return f"{folder or UNNAMED}/{counter:05d}{suffix}"
        return f"{self.folders[label]}/{counter // len(self.classes):05d}{suffix}"

    def missing(self, out: Path, beside: Mapping[str, str]) -> list[int]:
        """Groups of which a file is not there yet; `beside` are folders that have one for each, too: name, suffix."""

        def lacks(counter: int) -> bool:
            files = [self.file(counter), *(self.file(counter, *other) for other in beside.items())]
            return any(not (out / file).exists() for file in files)

        kept = (range(c.start, min(c.stop, self.number)) for c in map(self.counters, range(self.groups)))
        return [group for group, counters in enumerate(kept) if any(map(lacks, counters))]


def choose_classes(given: str | Sequence[str | int] | None, names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of classes by their names or numbers; all of them where none are given."""
    words = [str(w).strip() for w in (given.split(",") if isinstance(given, str) else given or ())]
    if not words or words == ["all"]:
        return tuple(range(len(names)))
    if not names:
        raise UserError(f"classes: {', '.join(words)}, but the model of this run knows no classes; leave them out")
    found = []
    for word in words:
        if word in names:
            found.append(list(names).index(word))
        elif word.isdecimal() and int(word) < len(names):
            found.append(int(word))
        else:
            near = nearest(word, list(names))
            hint = f"did you mean {near!r}?" if near else f"there are {_shown(names)}"
            raise UserError(
                f"classes: {word!r} is not a class of this run; {hint} (or numbers from 0 to {len(names) - 1})"
            )
    twice = next((number for number in found if found.count(number) > 1), None)
    if twice is not None:
        raise UserError(f"classes: {names[twice]!r} is given twice; name each class once")
    return tuple(found)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def folder_names(names: Sequence[str]) -> tuple[str, ...]:
    """A folder for each class: its name, without what a file system or a reader of folders would take otherwise."""
    found: list[str] = []
    for number, name in enumerate(names):
        plain = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip().lstrip(".")[:100] or f"class {number}"
        taken = {other.casefold() for other in found}
        found.append(plain if plain.casefold() not in taken else f"{plain} {number}")
    return tuple(found)


def open_folder(out: Path, settings: dict[str, Any], number: int) -> None:
    """Make the folder, or go on in one that was begun with the same settings; a larger number goes on, too."""
    try:
        if not out.exists() or not any(out.iterdir()):
            write_whole(out / SETTINGS, _text(settings | {"number": number}))
            return
        stored = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
        before = int(stored.pop("number"))
    except FileNotFoundError:
        raise UserError(f"{out} holds other files than samples; choose another folder with --out") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{out / SETTINGS} cannot be read; remove the folder, or choose another with --out") from None
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another folder with --out") from None
    settings = json.loads(_text(settings))
    changes = [f"{key}: {stored.get(key)!r} became {settings.get(key)!r}" for key in sorted({*stored, *settings})
               if stored.get(key) != settings.get(key)]  # fmt: skip
    if number < before:
        changes.append(f"number: {before} became {number}")
    if changes:
        raise UserError(
            f"{out} holds samples that were asked for otherwise ({'; '.join(changes[:6])}); "
            "choose another folder with --out, or remove it"
        )
    for draft in out.glob("*/.*.part"):  # left behind by a kill
        remove(draft)
    if number > before:
        (out / MANIFEST).unlink(missing_ok=True)
        write_whole(out / SETTINGS, _text(settings | {"number": number}))


def close_folder(out: Path, manifest: dict[str, Any]) -> None:
    write_whole(out / MANIFEST, _text(manifest))


def remove(path: Path) -> None:
    import shutil

    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _text(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1) + "\n").encode()
