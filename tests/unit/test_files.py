"""Files by path and URL: local, file://, memory://, zip:// and a server on the loopback."""

import http.server
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from vitrail.data.dataset import Dataset
from vitrail.data.files import paths as files
from vitrail.data.files import patterns
from vitrail.data.files.paths import read_bytes
from vitrail.data.files.patterns import fill_stars, find_matches
from vitrail.data.look.inspect import open_source
from vitrail.errors import BadData, UserError
from vitrail.foreign import trusted
from vitrail.recipe import kinds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "a b"
    (root / "sub").mkdir(parents=True)
    for name in ("10.txt", "2.txt", ".hidden", "sub/x.txt"):
        (root / name).write_bytes(name.encode())
    return root


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves tmp_path/web; and the requests that came."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(f"{self.command} {self.path}")

        def do_GET(self) -> None:
            if self.path.endswith("short.bin"):
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"only this")
                self.close_connection = True
            elif self.path.endswith("secret.bin"):
                self.send_error(403)
            else:
                super().do_GET()

    (tmp_path / "web").mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web"))) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}", asked
        made.shutdown()
        thread.join()


def test_what_is_a_url() -> None:
    assert not any(map(files.is_url, ("a/b.tif", "/a", "file.h5::raw", "file:///a/b", "C::x")))
    assert all(map(files.is_url, ("memory://a", "http://a/b", "s3://a/b", "zip://a::file:///b.zip")))
    assert files.local_path("file:///a%20b/c") == Path("/a b/c")
    assert files.join("a/", "b", "c") == "a/b/c"
    assert files.join("zip://in::http://host/x.zip", "1.png") == "zip://in/1.png::http://host/x.zip"
    assert [files.parent(p) for p in ("a/b.tar", "b.tar", "/b.tar", "memory://a/b")] == ["a", ".", "/", "memory://a"]
    assert files.base_name("https://host/x.nc?token=a/b") == "x.nc"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_local_files(folder: Path, scheme: str) -> None:
    root = scheme + (str(folder) if not scheme else folder.as_uri().removeprefix("file://"))
    assert files.list_files(root) == ["2.txt", "10.txt"]  # as a person would sort them, hidden ones left out
    assert files.list_folders(root) == ["sub"]
    assert [files.file_type(p) for p in (root, files.join(root, "2.txt"), root + "/no")] == ["folder", "file", None]
    assert files.read_bytes(files.join(root, "10.txt"), 1, 3) == b"0.t"
    with files.open_file(files.join(root, "sub", "x.txt")) as file:
        assert file.read() == b"sub/x.txt"
    assert files.local_copy(files.join(root, "2.txt")).read_bytes() == b"2.txt"


def test_memory_and_archives(tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe({"/store/b/1.txt": b"one", "/store/2.txt": b"two"})
    assert (files.list_files("memory://store"), files.list_folders("memory://store")) == (["2.txt"], ["b"])
    assert files.file_type("memory://store") == "folder"
    assert files.read_bytes("memory://store/b/1.txt", 1) == b"ne"
    copy = files.local_copy("memory://store/2.txt")
    assert copy.read_bytes() == b"two"
    fsspec.filesystem("memory").pipe("/store/2.txt", b"three")
    assert files.local_copy("memory://store/2.txt").read_bytes() == b"three"  # a changed file is copied anew

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for number in (1, 10, 2):
            archive.writestr(f"in/{number}.txt", str(number))
    inside = f"zip://in::{tmp_path / 'x.zip'}"
    assert files.list_files(inside) == ["1.txt", "2.txt", "10.txt"]
    with ThreadPoolExecutor(4) as pool:
        paths = [files.join(inside, name) for name in files.list_files(inside)] * 5
        assert list(pool.map(files.read_bytes, paths)) == [b"1", b"2", b"10"] * 5
    (tmp_path / "broken.zip").write_bytes(b"no archive")
    with pytest.raises(BadData, match=r"broken\.zip cannot be opened"):
        files.list_files(f"zip://::{tmp_path / 'broken.zip'}")


def test_a_server(tmp_path: Path, cache: Path, server: tuple[str, list[str]]) -> None:
    url, asked = server
    (tmp_path / "web" / "sub").mkdir()
    (tmp_path / "web" / "a.bin").write_bytes(bytes(range(100)))
    assert (files.list_files(url + "/"), files.list_folders(url + "/")) == (["a.bin"], ["sub"])
    assert files.read_bytes(f"{url}/a.bin", 10, 5) == bytes(range(10, 15))  # of a server that gives whole files only
    assert [files.file_type(f"{url}/{name}") for name in ("no.bin", "a.bin", "sub/")] == [None, "file", "folder"]
    first = files.local_copy(f"{url}/a.bin")
    asked.clear()
    assert files.local_copy(f"{url}/a.bin") == first
    assert first.read_bytes() == bytes(range(100))
    assert first.is_relative_to(cache)
    assert not [request for request in asked if request.startswith("GET")]  # it was not sent again
    with zipfile.ZipFile(tmp_path / "web" / "x.zip", "w") as archive:
        archive.writestr("in/1.txt", "1")
    assert files.read_bytes(f"zip://in/1.txt::{url}/x.zip") == b"1"

    with pytest.raises(BadData, match=r"no\.bin does not exist"):
        files.open_file(f"{url}/no.bin")
    with pytest.raises(BadData, match=r"secret\.bin may not be read"):
        files.read_bytes(f"{url}/secret.bin")
    with pytest.raises(OSError, match=r"short\.bin"):  # may pass: the reader tries again
        files.local_copy(f"{url}/short.bin")
    assert not list((cache / "files").glob(".*"))  # and no part of it is left
    with pytest.raises(OSError):
        files.read_bytes("http://127.0.0.1:9/a.bin")


def test_what_cannot_come_of_an_archive_is_not_unpacked(tmp_path: Path, cache: Path) -> None:
    place = tmp_path / "x.zip"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.bin", bytes(2**22))
    size = place.stat().st_size
    with pytest.raises(BadData, match=rf"says that it has 4,194,304 bytes, which cannot come of an archive of {size}"):
        files.local_copy(f"zip://a.bin::{place}")
    assert not list((cache / "files").iterdir())


def test_what_the_disk_has_no_room_for_is_not_fetched(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", bytes(2**20))
    fsspec.filesystem("memory").pipe("/store/large.bin", bytes(2**20))
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**19))
        for url in (f"zip://a.bin::{tmp_path / 'x.zip'}", "memory://store/large.bin"):
            with pytest.raises(
                UserError, match=r"GiB, and .*files has room for .*; free some space, or set VITRAIL_CA"
            ):
                files.local_copy(url)
    assert not list((cache / "files").iterdir())
    assert files.local_copy(f"zip://a.bin::{tmp_path / 'x.zip'}").stat().st_size == 2**20


@pytest.mark.parametrize("told", [100, None])
def test_a_copy_ends_where_it_should(cache: Path, monkeypatch: pytest.MonkeyPatch, told: int | None) -> None:
    """Whatever comes beyond that is not written to the disk."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/store/longer.bin", bytes(2**20))
    written = []
    facts = memory.info("/store/longer.bin")
    monkeypatch.setattr(type(memory), "info", lambda self, *_, **__: facts | {"size": told})
    monkeypatch.setattr(type(memory), "blocksize", 1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    counting = files._counting
    monkeypatch.setattr(files, "_counting", lambda most: (written.append(counting(most)), written[0])[1])
    with pytest.raises(OSError, match="more than the 100 bytes came"):
        files.local_copy("memory://store/longer.bin")
    assert written[0].value == 1000  # and not all of it
    assert not list((cache / "files").iterdir())


def test_what_was_unpacked_and_is_bad_data_is_removed(tmp_path: Path, cache: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["raw"] = np.ones((4, 4, 4), np.uint8)
    for name, content in (("good", (tmp_path / "good.h5").read_bytes()), ("bad", b"rubbish" + bytes(2**16))):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("v.h5", content)
    assert open_source(f"zip://v.h5::{tmp_path / 'good.zip'}", kind="hdf5", settings=None)
    kept = sorted((cache / "files").iterdir())
    assert len(kept) == 2  # the copy and its checksum
    entries = [kinds.find("source", "hdf5")(path=f"zip://v.h5::{tmp_path / name}") for name in ("good.zip", "bad.zip")]
    for call in (
        lambda: open_source(entries[1].path, kind="hdf5", settings=None),
        lambda: Dataset(entries, (2, 2, 2), where="data.train"),
    ):
        with pytest.raises(BadData, match=r"bad\.zip"):
            call()
        assert sorted((cache / "files").iterdir()) == kept


def test_a_list_of_places_is_followed_with_trust_alone(tmp_path: Path) -> None:
    """It names any file or address; threads that read later need not be told again."""
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "list.json").write_text(
        json.dumps({"version": 1, "refs": {n: [str(tmp_path / "secret")] for n in "ab"}})
    )
    url = f"reference://a::{tmp_path}/data/list.json"
    for _ in range(2):
        with pytest.raises(UserError, match=r"reads whatever files and addresses its list names; give --trust"):
            files.read_bytes(url)
    with trusted():
        assert files.read_bytes(url) == b"a key"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(files.read_bytes, url.replace("//a", "//b")).result() == b"a key"


def test_what_cannot_be_opened_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (files.open_file, files.read_bytes, files.list_files, files.local_copy):
        for path in (str(tmp_path / "no.txt"), "memory://nowhere/no.txt"):
            with pytest.raises(BadData, match="does not exist; check the spelling"):
                call(path)
    with pytest.raises(UserError, match=r"htp:// is not a known kind of URL; did you mean http://"):
        files.open_file("htp://host/a")
    with pytest.raises(UserError, match="needs s3fs, which is not installed; pip install"):
        files.open_file("s3://bucket/a")

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BadData, match=r"may not be read \(Permission denied\); check its permissions"):
        files.open_file(tmp_path / "x")
    monkeypatch.setenv("VITRAIL_CACHE", "/proc/nothing/here")
    with pytest.raises(UserError, match="set VITRAIL_CACHE to a folder of yours"):
        files.cache_folder("files")


# Paths with stars ------------------------------------------------------------------------------------------------


def test_stars_stand_for_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "a/s0/.zarray", "a/s0/1/s0/x", "a/b/s0/x", "a/b10.npy", "a/b9.npy", "a/.b8.npy", ".c/s0/x", "a[1]/s0/x",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a" / "b" / "again").symlink_to(tmp_path)  # a ring
    (tmp_path / "a" / "twice").symlink_to(tmp_path / "a" / "b")
    found = find_matches(f"{tmp_path}/**/s0")
    assert [(match.name, match.stars) for match in found] == [  # none below an array, none twice, none hidden
        ("a/s0", ("a",)),
        ("a/b/s0", ("a/b",)),
        ("a[1]/s0", ("a[1]",)),
    ]
    assert all(match.is_folder and match.path == f"{tmp_path}/{match.name}" for match in found)
    monkeypatch.chdir(tmp_path)
    assert [(m.path, m.stars) for m in find_matches("*/b*.npy")] == [
        ("a/b9.npy", ("a", "9")),
        ("a/b10.npy", ("a", "10")),
    ]
    assert [m.path for m in find_matches("a[1]/*")] == ["a[1]/s0"]
    system = fsspec.filesystem("memory")
    system.pipe({"/stars/x1.npy": b"1", "/stars/x2.npy": b"2", "/stars/deep/x3.npy": b"3"})
    assert [m.name for m in find_matches("memory://stars/**/x*.npy")] == ["x1.npy", "x2.npy", "deep/x3.npy"]
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("in/x1.npy", b"1")
    (match,) = find_matches(f"zip://in/*.npy::{tmp_path}/z.zip")
    assert read_bytes(match.path) == b"1"
    for wrong in ("b/*", "a/*.tif", "memory://stars/*.tif"):
        with pytest.raises(UserError, match="stands for no file or folder"):
            find_matches(wrong)
    assert fill_stars("l/**/y*", ("", "3", "4"), where="labels") == "l/y3"
    monkeypatch.setattr(patterns, "MOST_FOLDERS", 2)
    with pytest.raises(UserError, match="more than 2 folders are looked into"):
        find_matches("**/x")
