"""What disk.py may touch, and what it must leave: decoys, links, mounts and kills, all inside a temporary folder."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail import disk
from vitrail.errors import UserError

SRC = Path(disk.__file__).parent.parent


def look(folder: Path) -> dict[str, Any]:
    """All that lies below a folder: what it is, its content or where it leads, and when a file was written."""
    found: dict[str, Any] = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            facts = path.lstat()
            kind = stat.S_IFMT(facts.st_mode)
            content = path.read_bytes() if stat.S_ISREG(kind) else os.readlink(path) if stat.S_ISLNK(kind) else None
            found[str(path.relative_to(folder))] = (kind, content, facts.st_mtime_ns if stat.S_ISREG(kind) else 0)
    return found


def write_decoys(home: Path) -> Path:
    """What a person may have: files, folders, links of every sort, a pipe."""
    (home / "photos" / "2024").mkdir(parents=True)
    (home / "photos" / "2024" / "a.jpg").write_bytes(b"a picture")
    (home / "photos" / "notes.txt").write_text("mine")
    (home / "thesis.tex").write_text("years of work")
    (home / "empty").mkdir()
    (home / "to-file").symlink_to(home / "thesis.tex")
    (home / "to-folder").symlink_to(home / "photos")
    (home / "dangling").symlink_to(home / "nowhere")
    (home / "ring").symlink_to(home / "gnir")
    (home / "gnir").symlink_to(home / "ring")
    os.link(home / "thesis.tex", home / "hard")
    os.mkfifo(home / "pipe")
    return home


def write_sealed(path: Path, seed: int = 0, **options: Any) -> Path:
    """A folder as a verb leaves it: some files, some of them deeper, and the list of them."""
    with disk.new_folder(path, seal="s0", **options) as draft:
        (draft / "zarr.json").write_text("{}")
        (draft / "s0" / "c" / "0").mkdir(parents=True)
        for number in range(3):
            (draft / "s0" / "c" / "0" / str(number)).write_bytes(bytes([seed, number]) * 50)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with decoys, which is also the place of temporary files, and the working folder in it."""
    home = write_decoys(tmp_path / "home")
    (home / "work" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work" / "deep")
    return home


# ---------------------------------------------------------------- single files


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = disk.write_whole(tmp_path / "a", b"old")
    with pytest.raises(TypeError), disk.replacing(path) as file:
        file.writelines([b"ne", "no bytes"])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}
    assert disk.write_whole(path, "new").read_bytes() == b"new"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    with pytest.raises(FileNotFoundError):
        disk.write_whole(tmp_path / "none" / "a", b"")
    assert disk.write_whole(tmp_path / "none" / "a", b"x", parents=True).exists()
    long = tmp_path / ("ü" * 120)  # 240 bytes: a draft's name is longer than its own
    assert disk.write_whole(long, b"x").read_bytes() == b"x"


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    kinds = {True: "folder", False: "file"}
    monkeypatch.setattr(os, "fsync", lambda f: (done.append(kinds[stat.S_ISDIR(os.fstat(f).st_mode)]), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("name"), replace(a, b)))
    disk.write_whole(tmp_path / "a", b"x")
    assert done == ["file", "name", "folder"]
    done.clear()
    disk.write_whole(tmp_path / "a", b"x", durable=False)
    assert done == ["name"]


def test_names_of_drafts_cannot_be_foreseen_and_are_known_again(tmp_path: Path) -> None:
    names = {disk.draft_of(tmp_path / "a.png") for _ in range(100)}
    assert len(names) == 100
    assert all(disk.is_draft(name) and disk.meant_by(name) == tmp_path / "a.png" for name in names)
    for name in ("a.part", ".a.part", ".a.x.part", ".a.0123456789abcdef", "a.0123456789abcdef.part", "..part"):
        assert not disk.is_draft(name)


@pytest.mark.parametrize("name", ["to-file", "to-folder", "dangling", "ring", "pipe", "photos"])
def test_nothing_but_a_plain_file_is_replaced_by_one(home: Path, name: str) -> None:
    before = look(home)
    for write in (disk.write_whole, disk.write_output, disk.write_own):
        with pytest.raises(UserError, match=rf"{name} is a (link|folder|special file) and not replaced by a file"):
            write(home / name, b"x")
    with pytest.raises((UserError, IsADirectoryError)):
        disk.appending(home / name)
    assert look(home) == before


def test_a_hard_link_keeps_the_old_content(home: Path) -> None:
    disk.write_whole(home / "hard", b"new")
    assert (home / "thesis.tex").read_text() == "years of work"


def test_a_log_is_added_to(tmp_path: Path) -> None:
    for word in (b"a", b"b"):
        with disk.appending(tmp_path / "log") as file:
            file.write(word)
            file.flush()
            file.seek(0)
            read = file.read()
    assert read == b"ab"


def test_a_name_that_is_taken_is_never_published_over(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for old in (False, True):  # with the system's call, and without it
        if old:
            monkeypatch.setattr(disk.ctypes, "CDLL", lambda *_, **__: object())
        draft = home / "work" / f"draft{old}"
        draft.mkdir()
        before = look(home)
        for name in ("photos", "empty", "thesis.tex", "to-folder", "dangling"):
            with pytest.raises(FileExistsError):
                disk.publish(draft, home / name)
        assert look(home) == before
        disk.publish(draft, home / f"free{old}")
        assert (home / f"free{old}").is_dir()
    with pytest.raises(FileNotFoundError):
        disk.publish(home / "nowhere", home / "free")


PNG = (  # one pixel
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)
OUTPUTS = {
    "a.png": PNG,
    "a.html": b"<!doctype html>\n<p>\n",
    "a.svg": b"<?xml version='1.0'?>\n<svg/>",
    "a.json": b'{\n "a": 1\n}\n',
    "empty.json": b"{}\n",
    "told.json": b'{"a": 1, "b": "written by vitrail 0123456789abcdef0123456789abcdef"}',
    "a.pdf": b"%PDF-1.4\n%%EOF\n",
    "a.yaml": b"a: 1\n",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_replaced_if_vitrail_wrote_it_and_nobody_changed_it(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, OUTPUTS[name]
    disk.write_output(path, content)
    first = path.read_bytes()
    assert disk.is_ours(path)
    disk.write_output(path, content)  # again
    assert path.read_bytes() == first
    for changed in (first[:-1], first + b"\n", first.replace(b"1", b"2", 1), content, b"", b"written by vitrail"):
        if changed != first:
            path.write_bytes(changed)
            with pytest.raises(UserError, match=rf"{name} exists and is not as vitrail would have written it"):
                disk.write_output(path, content)
            assert path.read_bytes() == changed
            disk.write_own(path, content)  # in a folder of vitrail's own: kept beside it
            assert path.read_bytes() == first
            (old,) = tmp_path.glob(f"{name}.old-*")
            assert old.read_bytes() == changed
            old.unlink()
    if name == "a.png":
        from PIL import Image

        path.write_bytes(first)
        with Image.open(path) as image:
            assert image.size == (1, 1)
            image.load()
            assert image.info["Comment"].startswith("written by vitrail ")
    if name.endswith(".json"):
        assert json.loads(first).get("a") == (None if name == "empty.json" else 1)


# ---------------------------------------------------------------- removing


def test_only_what_lies_in_a_folder_of_vitrails_own_is_removed(home: Path) -> None:
    own = home / "own"
    (own / "a" / "b").mkdir(parents=True)
    (own / "a" / "file").write_text("x")
    (own / "link").symlink_to(home / "photos")
    before = look(home)
    wrong = [
        home / "photos",
        own,
        own / ".." / "photos",
        own / "a" / ".." / ".." / "thesis.tex",
        home,
        Path("/"),
        own / ".",
    ]
    for path in wrong:
        with pytest.raises(UserError, match="does not lie in"):
            disk.remove(path, inside=own)
    for path in (own / "link", own / "link" / "notes.txt", own / "link" / "2024" / "a.jpg"):
        with pytest.raises(UserError, match=r"is not removed: .* is a link"):
            disk.remove(path, inside=own)
    disk.remove(own / "nothing", inside=own)
    disk.remove(own / "nothing" / "deeper", inside=own)
    assert look(home) == before
    disk.remove(own / "a", inside=own)
    assert {name: facts for name, facts in before.items() if not name.startswith("own/a")} == look(home)


def test_homes_working_folders_and_environments_are_never_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = home / "venv"
    (environment / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(environment / "bin"))
    monkeypatch.setattr(tempfile, "tempdir", str(home / "empty"))
    before = look(home.parent)
    for path in (home, home / "work", home / "work" / "deep", environment, environment / "bin", home / "empty"):
        with pytest.raises(UserError, match=r"is not removed: it is .* or holds it"):
            disk.remove(path, inside=path.parent)
    assert look(home.parent) == before


names = st.sampled_from(["a", "b", "cc", "dd", "e.part", ".x", "ü"])
leaves = st.sampled_from([b"", b"1", b"22", "to-file", "to-folder", "dangling", "ring", "hard", "pipe", "self"])
trees = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8)


def plant(path: Path, tree: Any, home: Path) -> bool:
    """Make a tree of files, folders, links and pipes; whether it is of plain files and folders alone."""
    if isinstance(tree, dict):
        path.mkdir()
        planted = [plant(path / name, inner, home) for name, inner in tree.items()]
        return all(planted)
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    elif tree == "hard":
        os.link(home / "thesis.tex", path)
    elif tree == "pipe":
        os.mkfifo(path)
    elif tree == "self":
        path.symlink_to(path)
    else:
        path.symlink_to(home / tree)
    return isinstance(tree, bytes) or tree == "hard"


@contextmanager
def some_home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vitrail-test-") as folder:
        yield write_decoys(Path(folder) / "home")


@settings(max_examples=30, deadline=None)
@given(trees)
def test_a_tree_is_removed_whole_and_alone_or_not_touched(tree: Any) -> None:
    with some_home() as home:
        (home / "own").mkdir()
        plain = plant(home / "own" / "it", tree, home)
        before = look(home)
        if plain:
            disk.remove(home / "own" / "it", inside=home / "own")
            kept = {name: facts for name, facts in before.items() if not (name + "/").startswith("own/it/")}
            assert look(home) == kept
        else:
            with pytest.raises(UserError, match="is not removed"):
                disk.remove(home / "own" / "it", inside=home / "own")
            assert look(home) == before


def test_what_lies_behind_a_link_and_back_is_not_taken_for_its_neighbour(home: Path) -> None:
    """`link/../keep` is beside what the link leads to, and not beside the link."""
    (home / "far" / "folder").mkdir(parents=True)
    (home / "far" / "keep").mkdir()
    (home / "far" / "keep" / "file").write_text("vitrail's")
    (home / "keep").mkdir()
    (home / "keep" / "file").write_text("mine")
    (home / "link").symlink_to(home / "far" / "folder")
    inside = home / "link" / ".." / "keep"
    disk.remove(inside / "file", inside=inside)
    assert (home / "keep" / "file").read_text() == "mine"
    assert not (home / "far" / "keep" / "file").exists()
    disk.remove(inside, inside=inside.parent)
    assert (home / "keep" / "file").read_text() == "mine"
    assert not (home / "far" / "keep").exists()


parts = st.sampled_from(["own", "..", ".", "it", "to-own", "to-home", "photos", "thesis.tex", "inner", "file", "home"])


@settings(max_examples=50, deadline=None)
@given(st.lists(parts, max_size=7))
def test_no_path_leads_out_of_the_folder(words: list[str]) -> None:
    with some_home() as home:
        (home / "own" / "it" / "inner").mkdir(parents=True)
        (home / "own" / "it" / "file").write_text("x")
        (home / "own" / "to-home").symlink_to(home)
        (home / "own" / "to-own").symlink_to(home / "own")
        before = look(home)
        try:
            disk.remove(Path(home, "own", *words), inside=home / "own")
        except UserError:
            assert look(home) == before
        after = look(home)
        assert {n: f for n, f in after.items() if not n.startswith("own/")} == {
            n: f for n, f in before.items() if not n.startswith("own/")
        }


def test_drafts_of_kills_are_swept_and_those_of_the_living_are_not(home: Path) -> None:
    own = home / "own"
    own.mkdir()
    young, old = own / ".a.0123456789abcdef.part", own / ".b.0123456789abcdef.part"
    link, unmarked = own / ".c.0123456789abcdef.part", own / ".d.0123456789abcdef.part"
    dead, living = own / ".e.0123456789abcdef.part", own / ".f.0123456789abcdef.part"
    other = own / ".g.part"
    bare, begun, fresh, held, mixed = (own / f".{name}.0123456789abcdef.part" for name in "hijkl")  # without a mark yet
    for path in (bare, begun, fresh, held, mixed):
        path.mkdir()
    disk.draft_of(begun / disk.MARK).write_text("{")
    disk.draft_of(mixed / disk.MARK).mkdir()
    for path in (bare, *begun.iterdir(), begun, held, mixed):
        os.utime(path, (0, 0))
    kept = os.open(held, os.O_RDONLY)
    fcntl.flock(kept, fcntl.LOCK_EX)
    for path in (young, old, other):
        path.write_text("half")
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    link.symlink_to(home / "photos")
    for path in (unmarked, dead, living):
        path.mkdir()
        (path / "inner").write_text("half")
        os.utime(path, (0, 0))
    for path in (dead, living):
        (path / disk.MARK).write_text('{"vitrail": "draft"}')
    handle = os.open(living, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    disk.sweep(own)
    disk.sweep(home / "to-folder")
    disk.sweep(home / "nowhere")
    os.close(handle)
    os.close(kept)
    assert {path.name for path in own.iterdir()} == {
        p.name for p in (young, link, unmarked, living, other, fresh, held, mixed)
    }
    assert (home / "photos" / "notes.txt").exists()


def test_drafts_of_other_machines_are_swept_when_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that several share need not tell of their locks."""
    target = tmp_path / "em.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_machine", lambda: "another")
        patch.setattr(disk, "remove", lambda *_, **__: None)  # as if that one had been killed
        with contextlib.suppress(KeyboardInterrupt), disk.new_folder(target) as draft:
            (draft / "chunk").write_text("half")
            raise KeyboardInterrupt
    (left,) = tmp_path.iterdir()
    disk.sweep(tmp_path)
    with disk.new_folder(target):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {left.name, target.name}
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))
    disk.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {target.name}


# ---------------------------------------------------------------- folders that are replaced


def test_a_sealed_folder_is_replaced_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    path = write_sealed(tmp_path / "em.zarr")
    write_sealed(path, 1, force=True, tell=told.append)
    assert (path / "s0/c/0/1").read_bytes() == bytes([1, 1]) * 50
    assert [p.name for p in tmp_path.iterdir()] == ["em.zarr"]
    assert told == [f"{path}: replaced what vitrail had written there before, 5 files of 0.00 MiB"]
    with pytest.raises(UserError, match=r"exists and is not overwritten; .*--force"):
        write_sealed(path, 2, force=False)
    with pytest.raises(UserError, match=r"move it away$"):  # a verb that has no --force does not name it
        write_sealed(path, 2)
    shutil.copytree(path, tmp_path / "copy")  # with other times
    write_sealed(tmp_path / "copy", 3, force=True)


CHANGES = {
    "a file was added": (lambda p: (p / "notes.txt").write_text("mine"), "notes.txt in it was not written by vitrail"),
    "a file was added deep": (lambda p: (p / "s0/c/x").write_text("mine"), "s0/c/x in it was not written by"),
    "a folder was added": (lambda p: (p / "mine").mkdir(), "mine in it was not written by vitrail"),
    "a file was changed": (lambda p: (p / "s0/c/0/1").write_bytes(b"x" * 100), "s0/c/0/1 in it has changed since"),
    "one bit was turned": (
        lambda p: (p / "s0/c/0/1").write_bytes(b"\0\1" * 49 + b"\0\0"),
        "s0/c/0/1 in it has changed since",
    ),
    "a file has gone": (lambda p: (p / "s0/c/0/1").unlink(), "s0/c/0/1 is missing, so it is not complete"),
    "metadata have gone": (lambda p: (p / "zarr.json").unlink(), "zarr.json is missing, so it is not complete"),
    "the mark has gone": (lambda p: (p / "s0" / disk.MARK).unlink(), "carries no mark of vitrail"),
    "the mark is torn": (lambda p: (p / "s0" / disk.MARK).write_text('{"vitrail'), "carries no mark of vitrail"),
    "the mark is a list": (lambda p: (p / "s0" / disk.MARK).write_text("[]"), "carries no mark of vitrail"),
    "the mark lists nothing": (
        lambda p: (p / "s0" / disk.MARK).write_text('{"vitrail": "folder", "files": {}}'),
        "in it was not written by vitrail",
    ),
    "a file became a link": (
        lambda p: ((p / "zarr.json").rename(p.parent / "away"), (p / "zarr.json").symlink_to(p.parent / "away")),
        "zarr.json in it is a link that was not written by vitrail",
    ),
    "a folder became a link": (
        lambda p: ((p / "s0/c").rename(p.parent / "away"), (p / "s0/c").symlink_to(p.parent / "away")),
        "s0/c in it is a link that was not written by vitrail",
    ),
    "a pipe was added": (lambda p: os.mkfifo(p / "pipe"), "pipe in it is a special file that was not written by"),
    "a file became a folder": (
        lambda p: ((p / "zarr.json").unlink(), (p / "zarr.json").mkdir()),
        "zarr.json in it was not written by vitrail",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_user_did_to_a_volume_keeps_it(home: Path, case: str) -> None:
    path = write_sealed(home / "em.zarr")
    change, words = CHANGES[case]
    change(path)
    before = look(home)
    with pytest.raises(UserError, match=words):
        write_sealed(path, 1, force=True)
    assert look(home) == before


@pytest.mark.parametrize(
    "name", ["../thesis.tex", "/{home}/thesis.tex", "s0/../../thesis.tex", "s0/c/../c/0/1", "", "."]
)
def test_a_forged_list_leads_nowhere(home: Path, name: str) -> None:
    """A volume of somebody else lists a file that lies elsewhere, with its right digest."""
    path = write_sealed(home / "em.zarr")
    mark = path / "s0" / disk.MARK
    told = json.loads(mark.read_text())
    told["files"][name.format(home=home)] = disk._digest(home / "thesis.tex")
    mark.write_text(json.dumps(told))
    before = look(home)
    with pytest.raises(UserError, match="is missing, so it is not complete"):
        write_sealed(path, 1, force=True)
    assert look(home) == before


@pytest.mark.parametrize("name", ["photos", "empty", "thesis.tex", "to-folder", "to-file", "dangling", "ring", "pipe"])
@pytest.mark.parametrize("force", [None, False, True])
def test_unrelated_things_are_never_replaced(home: Path, name: str, force: bool | None) -> None:
    before = look(home)
    with pytest.raises(UserError, match=r"not (overwritten|replaced)"):
        write_sealed(home / name, force=force)
    assert look(home) == before


def test_a_link_to_a_volume_is_not_followed(home: Path) -> None:
    write_sealed(home / "em.zarr")
    (home / "link").symlink_to(home / "em.zarr")
    before = look(home)
    with pytest.raises(UserError, match="is a link, not a volume of vitrail's, and not replaced"):
        write_sealed(home / "link", 1, force=True)
    assert look(home) == before


def test_parents_of_the_working_folder_are_not_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where they carry a mark: it might be forged, or somebody works inside a volume."""
    path = write_sealed(home / "em.zarr")
    for folder in (path, path / "s0", path / "s0/c/0"):
        monkeypatch.chdir(folder)
        before = look(home)
        with pytest.raises(UserError, match="it is the working folder or holds it"):
            write_sealed(path, 1, force=True)
        for odd in (Path("."), Path(".."), Path("../.."), Path("/"), home / ".."):
            with pytest.raises(UserError, match=r"names no folder of its own|not replaced"):
                write_sealed(odd, 1, force=True)
        assert look(home) == before
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(path / "s0"))
    with pytest.raises(UserError, match="it is your home or holds it"):
        write_sealed(path, 1, force=True)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["", "s0", "s0/c", "s0/c/0", "new"]), names, trees)
def test_nothing_that_was_put_into_a_volume_is_lost(where: str, name: str, tree: Any) -> None:
    with some_home() as home:
        path = write_sealed(home / "em.zarr")
        (path / where).mkdir(exist_ok=True)
        plant(path / where / name, tree, home)
        before = look(home)
        with pytest.raises(UserError, match="is not replaced"):
            write_sealed(path, 1, force=True)
        assert look(home) == before


@settings(max_examples=30, deadline=None)
@given(trees)
def test_no_tree_is_taken_for_a_volume(tree: Any) -> None:
    with some_home() as home:
        plant(home / "it", tree, home)
        before = look(home)
        with pytest.raises(UserError, match=r"is not replaced|not a volume of vitrail's"):
            write_sealed(home / "it", 1, force=True)
        assert look(home) == before


def test_a_failure_leaves_what_was_there(home: Path) -> None:
    path = write_sealed(home / "em.zarr")
    before = look(home)
    with pytest.raises(TypeError), disk.new_folder(path, force=True, seal=".") as draft:
        (draft / "half").write_text(b"not text")
    with pytest.raises(UserError, match="notes in it was not written"), disk.new_folder(path, force=True) as draft:
        (path / "notes").write_text("while it was written")
    (path / "notes").unlink()
    assert look(home) == before


def test_a_name_that_is_taken_meanwhile_is_kept(home: Path) -> None:
    with pytest.raises(FileExistsError), disk.new_folder(home / "new"):
        (home / "new").mkdir()
    assert list((home / "new").iterdir()) == []
    path = write_sealed(home / "em.zarr")
    before = look(path)
    publish = disk.publish

    def late(draft: Path, target: Path) -> None:
        if target == path and draft.parent != home:  # the new one: the old one has just gone aside
            raise OSError(errno.EIO, "broken")
        publish(draft, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "publish", late)
        with pytest.raises(OSError, match="broken"):
            write_sealed(path, 1, force=True)
    assert look(path) == before
    assert not list(home.glob("*.old-*"))


def test_the_old_one_stays_if_it_cannot_be_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = write_sealed(home / "em.zarr"), []
    publish = disk.publish

    def add(draft: Path, target: Path) -> None:
        publish(draft, target)
        if ".old-" in str(target):
            (Path(target) / "notes").write_text("mine, at the last moment")

    monkeypatch.setattr(disk, "publish", add)
    write_sealed(path, 1, force=True, tell=told.append)
    assert (path / "s0/c/0/1").read_bytes() == bytes([1, 1]) * 50
    (old,) = home.glob("em.zarr.old-*")
    assert (old / "notes").read_text() == "mine, at the last moment"
    assert (old / "s0/c/0/1").exists()
    assert f"kept as {old}" in told[-1]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from vitrail import disk
    from test_disk import write_sealed
    calls, real = iter(range(100)), getattr(os if {name!r} in ("unlink", "rmdir") else disk, {name!r})
    def deadly(*words, **more):
        if next(calls) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*words, **more)
    setattr(os if {name!r} in ("unlink", "rmdir") else disk, {name!r}, deadly)
    write_sealed(Path({path!r}), 1, force=True)
"""
INSTANTS = [
    ("publish", 0),
    ("publish", 1),
    ("sync_folder", 1),
    ("sync_folder", 2),
    ("unlink", 0),
    ("unlink", 2),
    ("rmdir", 0),
]


@pytest.mark.parametrize(("name", "number"), INSTANTS)
def test_a_kill_while_replacing_loses_nothing(tmp_path: Path, name: str, number: int) -> None:
    path = write_sealed(tmp_path / "em.zarr")
    old = {n: f[1] for n, f in look(path).items()}
    write_sealed(tmp_path / "other", 1)
    new = {n: f[1] for n, f in look(tmp_path / "other").items()}
    here, child = str(Path(__file__).parent), os.fork()
    if not child:
        try:
            exec(textwrap.dedent(KILLED.format(here=here, name=name, number=number, path=str(path))), {})
        finally:
            os._exit(3)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    told: list[str] = []
    disk.check_free(path, force=True, tell=told.append) if path.exists() else None
    with pytest.raises(UserError, match="exists and is not overwritten"):
        write_sealed(path, 2, force=False, tell=told.append)
    found = {n: f[1] for n, f in look(path).items()}
    assert found in (old, new)
    left = list(tmp_path.glob("em.zarr.old-*"))
    if name == "publish" and number == 1:
        assert found == old
        assert any("put back from em.zarr.old-" in line for line in told)
    assert all(any(str(place) in line for line in told) for place in left)  # what is left is told of
    write_sealed(path, 2, force=True)
    assert (path / "s0/c/0/1").read_bytes() == bytes([2, 1]) * 50
    assert not [p for p in tmp_path.iterdir() if disk.is_draft(p)]  # what the kill left half done is gone


def test_the_mark_is_no_trouble_to_other_readers(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    import tensorstore
    import zarr

    from vitrail.data.generate import Volume, write_ome_zarr
    from vitrail.data.sources.zarr import OmeZarrConfig

    image = np.arange(8**3, dtype=np.uint16).reshape(8, 8, 8)
    for version, driver in (("0.4", "zarr"), ("0.5", "zarr3")):
        path = write_ome_zarr(tmp_path / version, Volume(image, image), levels=2, chunk=4, version=version)
        group = zarr.open_group(str(path), mode="r")
        assert dict(group.members()).keys() == {"s0", "s1", "labels"}
        assert np.array_equal(np.asarray(group["s0"]), image)
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/s0/"}}
        assert np.array_equal(tensorstore.open(spec, open=True, read=True).result().read().result(), image)
        source = OmeZarrConfig(path=str(path)).open()
        assert np.array_equal(source.read(0, (slice(None),) * 3)[0], image)
        assert disk.check_ours(path)
    assert not [warning for warning in recwarn if "not recognized as a component" in str(warning.message)]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail import cli
    from vitrail.data import generate
    from vitrail.data.formats import ngff as ngff_write

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ngff_write, "_write_pyramid", full)
    said: list[str] = []
    monkeypatch.setattr(cli, "tell", said.append)
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "generate", str(tmp_path / "em.zarr"), "--shape", "8,8,8"])
    assert ended.value.code == 2
    assert said == [
        f"{tmp_path / 'em.zarr'} cannot be written (No space left on device); free some space, or choose another path"
    ]
    assert list(tmp_path.iterdir()) == []
    assert generate.write_ome_zarr is ngff_write.write_ome_zarr


# ---------------------------------------------------------------- mounts

MOUNTED = """
    import os, subprocess, sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from vitrail import disk
    from vitrail.errors import UserError
    from test_disk import look, write_decoys, write_sealed

    base = Path({base!r})
    home = write_decoys(base / "home")
    own = home / "own"
    (own / "folder" / "inner").mkdir(parents=True)
    (own / "folder" / "file").write_text("x")
    volume = write_sealed(home / "em zarr")  # a space is spelled otherwise in the list of mounts
    top = home / "top.zarr"
    top.mkdir()

    def mount(*words):
        subprocess.run(["mount", *map(str, words)], check=True)

    mount("--bind", home / "photos", own / "folder" / "inner")
    mount("--bind", home / "thesis.tex", own / "folder" / "file")
    mount("-t", "tmpfs", "none", home / "empty")
    (home / "empty" / "data").write_text("on another system")
    write_sealed(base / "other")
    mount("--bind", base / "other", top)  # a volume of vitrail's, whole, but mounted
    mount("--bind", base / "other" / "s0", volume / "s0")  # the same files as it had
    before = look(base)
    refused = 0
    for call in (
        lambda: disk.remove(own / "folder", inside=own),
        lambda: disk.remove(own / "folder" / "inner", inside=own),
        lambda: disk.remove(own / "folder" / "file", inside=own),
        lambda: disk.remove(home / "empty", inside=home),
        lambda: disk.remove(own, inside=home),
        lambda: write_sealed(top, 1, force=True),
        lambda: write_sealed(volume, 1, force=True),
        lambda: write_sealed(home / "empty", 1, force=True),
    ):
        try:
            call()
        except UserError as error:
            assert "is a mount point" in str(error) or "carries no mark" in str(error), error
            refused += 1
    assert refused == 8, refused
    assert look(base) == before
    print("kept")
"""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare")
def test_mounts_are_neither_removed_nor_crossed(tmp_path: Path) -> None:
    """In a mount namespace of its own, which goes with the process."""
    script = textwrap.dedent(MOUNTED.format(here=str(Path(__file__).parent), base=str(tmp_path)))
    words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", script]
    paths = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}, timeout=600)
    if "unshare failed" in done.stderr or "must be superuser" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.stdout == "kept\n", done.stderr
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "home" / "photos" / "notes.txt").read_text() == "mine"
