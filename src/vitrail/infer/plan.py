"""Which samples are asked for, where each goes, and what a folder of samples says of itself.

- samples are counted from 0; the classes take turns, so that any number of samples has all of them
- they are made in fixed groups: what a sample is, to the last bit, depends on its group, never on ranks or resumption
- all of them lie below `samples/`, a folder for each class, which is a dataset by itself; all else lies beside it
- `settings.json` comes first and tells another call apart; `manifest.json` comes last, when all is there
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.contents import Layout, check_layout
from vitrail.disk import write_whole
from vitrail.errors import UserError
from vitrail.foreign import check_plain, parse_json, read_json, read_plain
from vitrail.recipe.kinds import nearest
from vitrail.report.files import find_inside
from vitrail.sums import sealed, sum_of, unsealed
from vitrail.versions import check_version

VERSION = 2  # of manifests; 1 has no checksums
SETTINGS, MANIFEST = "settings.json", "manifest.json"
SAMPLES = "samples"  # the folder of all samples
LAYOUT = Layout("folder of samples", (SETTINGS, MANIFEST, "grid.png"), (SAMPLES, "condition", "truth"))
LARGEST = 256 << 20  # bytes of a manifest, about 200 for each sample


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
            return f"{folder or SAMPLES}/{counter:05d}{suffix}"
        return f"{SAMPLES}/{self.folders[label]}/{counter // len(self.classes):05d}{suffix}"

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
    taken: set[str] = set()  # by systems that tell no capitals from small letters
    for number, name in enumerate(names):
        plain = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip().lstrip(".")[:100] or f"class {number}"
        tried = (plain, *(f"{plain} {other}" for other in range(number, number + len(names) + 1)))
        found.append(next(name for name in tried if name.casefold() not in taken))
        taken.add(found[-1].casefold())
    return tuple(found)


def read_settings(out: Path) -> dict[str, Any] | None:
    """What the samples of a folder were asked for with; None where there are none yet."""
    try:
        if not out.exists() or all(map(disk.is_draft, out.iterdir())):
            return None
        stored = read_json(out / SETTINGS)
        stored["number"], stored["batch"] = int(stored["number"]), int(stored["batch"])
        return stored
    except FileNotFoundError:
        raise UserError(f"{out} holds other files than samples; choose another folder with --out") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{out} holds a {SETTINGS} that is not of samples; choose another folder with --out") from None
    except OSError as error:
        raise UserError(f"{out} cannot be read ({error.strerror}); choose another folder with --out") from None


def open_folder(out: Path, settings: dict[str, Any], plan: Plan) -> int:
    """Make the folder, or go on in one that was begun with the same settings; the number that it is to hold.

    That is the one asked for, or as many as are there already.
    """
    stored, number = read_settings(out), plan.number
    if stored is not None:
        check_layout(out, LAYOUT)
        _check_samples(out)
        before = stored.pop("number")
        settings = json.loads(_text(settings))
        changes = [f"{key}: {stored.get(key)!r} became {settings.get(key)!r}" for key in sorted({*stored, *settings})
                   if stored.get(key) != settings.get(key)]  # fmt: skip
        if changes:
            raise UserError(
                f"{out} holds samples that were asked for otherwise ({'; '.join(changes[:6])}); "
                "choose another folder with --out, or remove it"
            )
        there = (counter for counter in reversed(range(number, before)) if (out / plan.file(counter)).exists())
        number = max(number, next(there, 0) + 1)
        if number == before and all((out / plan.file(counter)).exists() for counter in range(number)):
            return number  # else the manifest would tell of files that are made anew
    try:
        out.mkdir(parents=True, exist_ok=True)
        disk.remove(out / MANIFEST, inside=out)
        write_whole(out / SETTINGS, _text(settings | {"number": number}))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another folder with --out") from None
    return number


def sweep(out: Path) -> None:
    """Take away drafts that a kill has left behind, not those of a call that is writing now."""
    for folder in (out, *out.glob("*/"), *out.glob(f"{SAMPLES}/*/")):
        disk.sweep(folder)


def close_folder(out: Path, manifest: dict[str, Any]) -> None:
    """Write what the folder holds, with a checksum of each file and one of its own."""
    names = [entry[key] for entry in manifest["files"] for key in ("path", "condition", "truth") if key in entry]
    manifest = {"version": VERSION, **manifest, "sums": {name: sum_of(out / name) for name in names}}
    write_whole(out / MANIFEST, _text(sealed(manifest)))


def read_manifest(out: Path) -> dict[str, Any]:
    """What a folder of samples holds; ValueError where that is damaged. Version 1 has no checksums."""
    found = parse_json(read_plain(out / MANIFEST, LARGEST))
    check_version(found.get("version", 1), VERSION, str(out / MANIFEST))
    manifest = unsealed(found) if "seal" in found else found
    if manifest is None:
        raise ValueError("it does not match its own checksum")
    if not isinstance(manifest.get("sums", {}), dict):
        raise ValueError("its checksums belong to no files")
    return manifest


def sample_path(out: Path, name: Any) -> Path:
    """Where a sample lies that a manifest names; refused where that is elsewhere, or can keep a reader waiting."""
    path = find_inside(out, name)
    if path is None:
        raise UserError(
            f"{out / MANIFEST} names {str(name)[:100]!r}, which does not lie in this folder; make them again with "
            "`vitrail sample`"
        )
    if not path.is_dir():
        check_plain(path)
    return path


def check_sample(out: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a sample that is not as it was made."""
    wanted = manifest.get("sums", {}).get(name)
    if wanted is not None and sum_of(sample_path(out, name)) != wanted:
        raise UserError(
            f"{out / name} does not match its checksum in {MANIFEST}: it was damaged or changed; remove it, and make "
            "it again with `vitrail sample`"
        )


def _check_samples(out: Path) -> None:
    """Of a folder that was complete once: what is damaged is not taken for good by a second call."""
    if not (out / MANIFEST).is_file():
        return
    try:
        manifest = read_manifest(out)
        for name in manifest.get("sums", {}):
            if sample_path(out, name).exists():
                check_sample(out, name, manifest)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{out / MANIFEST} cannot be read ({error}); choose another folder with --out, or remove this one"
        ) from None


def _text(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1) + "\n").encode()
