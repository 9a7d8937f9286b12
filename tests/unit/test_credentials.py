"""Passwords and tokens of URLs open what they are for, and are found nowhere else."""

import base64
import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support import tiny_recipe, write_recipe, write_volume

from vitrail import credentials
from vitrail.cli import main
from vitrail.credentials import hide, hide_in, reveal, strip
from vitrail.data.files import paths as files
from vitrail.errors import BadData, UserError
from vitrail.recipe import load_recipe
from vitrail.training.failures import summary

PASSWORD, TOKEN = "hunter-2-of-many", "tok-5f3a9c"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(credentials.VARIABLE, "")


CASES = {
    "https://user:pass@host:8080/a/b.zarr": "https://host:8080/a/b.zarr",
    "https://token@host/a": "https://host/a",
    "ftp://user:p%40ss@host/a": "ftp://host/a",
    "https://user:pa/ss@host/a": "https://host/a",  # which should have been %2F
    "s3://KEY:SECRET@bucket/a": "s3://bucket/a",
    "abfs://container@account.dfs.core.windows.net/a": None,  # an address
    "ssh://user@host/a": None,
    "https://host:8080/a@b?x=1": None,
    "https://host/a?x=1&token=t0ken&y=2": "https://host/a?x=1&y=2",
    "https://host/a?X-Amz-Algorithm=A&X-Amz-Credential=C&X-Amz-Date=1&X-Amz-Signature=S": "https://host/a",
    "https://host/a?AWSAccessKeyId=A&Signature=S&Expires=1": "https://host/a",
    "https://host/a?sv=2022&sr=c&se=2030&sp=r&sig=abc%3D": "https://host/a",
    "https://host/a?api_key=abcdef": "https://host/a",
    "https://host/a?author=curie&oauth=abcdef": "https://host/a?author=curie",
    "https://host/a?GoogleAccessId=x&Signature=y": "https://host/a",
    "https://host/a?sr=c": None,
    "zip://in::https://user:pass@host/x.zip?token=abcdef": "zip://in::https://host/x.zip",
    "memory://a": None,
    "data/local.zarr": None,
    "/a:b@c": None,
    "https://user:pass@[broken": "https://[broken",
    "https://user:pa#ss@host/a": "https://host/a",  # which should have been %23
    "https://user:pa?ss@host/a": "https://host/a",
    "https://user:pa?ss@host/a?x=1#y": "https://host/a?x=1#y",
    "https://user:pa/ss@host/a?x=1#y": "https://host/a?x=1#y",
    "https://host/a#access_token=abcdef": "https://host/a",
    "https://host/a#page=2&access_token=abcdef": "https://host/a#page=2",
    "https://host/a#token": None,  # a place in a page
    "https://host/a?x=1;sig=abcdef": "https://host/a?x=1",
    "https://host/a?x=1;y=2&z": None,
    "https://host/a?sig=abc;def": "https://host/a",
    "https://host/a?%73ig=abcdef": "https://host/a",
    "https://host/a;jsessionid=abcdef": "https://host/a",
    "https://host/a;jsessionid=abcdef/b;v=1?x=1": "https://host/a/b;v=1?x=1",
    "https://host/a;v=1": None,
    "https://host/a?key=train": None,
    "https://host/a?session=3": None,
    "https://host/a?key=sample_volume_2024_07_b": None,
    "https://host/a?session_id=abcdef": "https://host/a",
    "https://host/a?key=train&sig=abcdef": "https://host/a",
    "https://host/a?key=AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY": "https://host/a",
    "https://host/a?session=550e8400-e29b-41d4-a716-446655440000": "https://host/a",
}


@pytest.mark.parametrize("url", CASES)
def test_what_is_hidden_comes_back_where_it_is_opened(url: str) -> None:
    shown = CASES[url] or url
    assert hide(url) == shown
    assert strip(url) == shown
    assert hide(shown) == shown
    assert sorted(reveal(shown)) == sorted(url)  # parameters may come in another order
    assert strip(f"({url}), then") == f"({shown}), then" or "[" in url


def test_parameters_that_merely_sound_like_secrets_stay_in_the_recipe(tmp_path: Path) -> None:
    tree = tiny_recipe(tmp_path, tmp_path)
    for place, key in (("train", "train"), ("valid", "test")):
        tree["data"][place] = [{"path": f"https://host/get?key={key}&session=3", "kind": "ome_zarr"}]
    recipe = load_recipe(tree)
    assert recipe.data.train[0].path == "https://host/get?key=train&session=3"
    assert recipe.data.valid[0].path == "https://host/get?key=test&session=3"
    assert not credentials.are_known()


def test_what_lies_below_has_the_credentials_of_the_longest_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        credentials.VARIABLE, "https://a:b@host/ https://c:d@host/private?token=t\nhttps://e:f@other/x%20y"
    )
    assert reveal("https://host/open/1") == "https://a:b@host/open/1"
    assert reveal("https://HOST/private/0/c") == "https://c:d@HOST/private/0/c?token=t"
    assert reveal("https://host/private?v=1") == "https://c:d@host/private?v=1&token=t"
    assert reveal("https://me:mine@host/private") == "https://me:mine@host/private?token=t"
    assert reveal("http://host/private") == "http://host/private"  # not over a line that anybody can read
    assert reveal("https://other/x y/1") == "https://e:f@other/x y/1"
    assert reveal("https://else/where") == "https://else/where"
    assert reveal("https://other/x years") == "https://other/x years"  # no part of the same place
    assert reveal("data/a.zarr") == "data/a.zarr"


def test_words_of_a_command_line() -> None:
    for before, after in {
        f"https://u:{PASSWORD}@host/a b.zarr": "https://host/a b.zarr",
        f"init.path=https://host/a?token={TOKEN}": "init.path=https://host/a",
        f"data.train=[{{path: 'https://u:{PASSWORD}@host/a?sig={TOKEN}'}}]": "data.train=[{path: 'https://host/a'}]",
        f"a=[{{path: https://u:{PASSWORD}@host/a}}, {{path: b}}]": "a=[{path: https://host/a}, {path: b}]",
        "run.steps=5": "run.steps=5",
        "--json": "--json",
    }.items():
        assert hide_in(before) == after


def test_errors_of_any_origin_are_stripped() -> None:
    told = f"https://u:{PASSWORD}@host/a?sig={TOKEN} cannot be read"
    assert str(UserError(told)) == "https://host/a cannot be read"
    assert str(BadData(told)) == "https://host/a cannot be read"
    assert summary(RuntimeError(told)) == "RuntimeError: https://host/a cannot be read"
    hide(f"https://u:{PASSWORD}@host/a?sig={TOKEN}")
    assert strip(f"Authorization of u with {PASSWORD} failed: {TOKEN}") == "Authorization of u with *** failed: ***"


def test_two_urls_that_differ_in_credentials_alone_are_refused(tmp_path: Path) -> None:
    tree = tiny_recipe(tmp_path, tmp_path)
    for place, key in (("train", "first"), ("valid", "second")):
        tree["data"][place] = [{"path": f"https://host/get?token={key}", "kind": "ome_zarr"}]
    with pytest.raises(UserError, match=r"^https://host/get: two URLs differ in their passwords or tokens alone; give"):
        load_recipe(tree)


def test_two_such_urls_on_a_command_line_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"data.{place}.0.path=https://host/get?token={key}" for place, key in (("train", "first"), ("valid", "second"))
    ]
    with pytest.raises(SystemExit) as ended:
        main(["train", "recipe.yaml", *words])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "https://host/get: two URLs differ in their passwords or tokens alone" in told
    assert "first" not in told
    assert not credentials.are_known()


# ---------------------------------------------------------------- the whole way


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves tmp_path/web to those who have the password and the token."""
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                return self.send_error(401)
            if parse_qs(urlsplit(self.path).query).get("token") != [TOKEN]:
                return self.send_error(403)
            return super().do_GET()

        do_HEAD = do_GET  # type: ignore[assignment]

    handler = functools.partial(Handler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{running.server_port}"
        running.shutdown()


def call(capfd: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    """A verb in this process; what it has printed."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    told = "".join(capfd.readouterr())
    assert (ended.value.code or 0) == code, told
    return told


def test_no_written_byte_holds_a_password_or_a_token(
    tmp_path: Path, server: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, given = tmp_path / "home", tmp_path / "given"
    home.mkdir()
    given.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("VITRAIL_CACHE", str(home / "cache"))
    write_volume(tmp_path / "web" / "em.zarr")
    open_, shown = f"http://me:{PASSWORD}@{server}/em.zarr?token={TOKEN}", f"http://{server}/em.zarr"
    changes = {"run__steps": 2, "checkpoint__every": 2, "eval__every": 2, "log__pictures": 2, "log__report": True}
    tree = tiny_recipe(Path("unused"), home / "run", **changes)
    for part in ("train", "valid"):
        tree["data"][part][0]["path"] = open_
    recipe = write_recipe(given / "recipe.yaml", tree)  # what a person wrote is that person's
    monkeypatch.setattr("sys.argv", ["vitrail", "train", str(recipe), f"data.train=[{{path: '{open_}'}}]"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = ["".join(capfd.readouterr())]
    assert not ended.value.code, said
    latents = ["codec={kind: identity}", "--out", home / "latents", "--split", "valid"]
    launch = ["launch", "slurm", recipe, f"data.train=[{{path: '{open_}'}}]"]
    said += [
        call(capfd, "eval", home / "run", "--samples", "4", "--json"),
        call(capfd, "report", home / "run", "--json"),
        call(capfd, "data", "inspect", open_, "--json"),
        call(capfd, "data", "encode", recipe, *latents),
        call(capfd, "data", "bench", recipe, "--mode", "io", "--seconds", "0.1"),
        call(capfd, *launch, "--output", home / "job.sh"),
        call(capfd, "train", recipe, f"data.train=[{{path: '{open_}', levle: 1}}]", code=2),
        call(capfd, "train", recipe, f"data.train=[{{path: '{open_}'", code=2),
        call(capfd, "data", "inspect", open_.replace("em.zarr", "nowhere.zarr"), code=2),
    ]
    secrets = (PASSWORD, TOKEN, base64.b64encode(f"me:{PASSWORD}".encode()).decode())
    for text in said:
        assert not [secret for secret in secrets if secret in text], text
    written = [path for path in home.rglob("*") if path.is_file()]
    assert {"recipe.yaml", "data.json", "environment.json", "report.html", "manifest.json", "job.sh", "index.json"} <= {
        path.name for path in written
    }
    for path in written:
        held = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in held], path
    assert shown in (home / "run" / "recipe.yaml").read_text()
    assert json.loads((home / "run" / "data.json").read_text())["path"] == shown
    assert "VITRAIL_CREDENTIALS" in (home / "job.sh").read_text()

    # Runs of old have it all the same, and their pages must not.
    stored = {home / "run" / name: (home / "run" / name).read_text() for name in ("recipe.yaml", "data.json")}
    for place, text in stored.items():
        place.write_text(text.replace(shown, open_))
    call(capfd, "report", home / "run")
    assert not [secret for secret in secrets if secret in (home / "run" / "report.html").read_text()]
    for place, text in stored.items():
        place.write_text(text)

    # What is not stored must be there again when the run goes on.
    monkeypatch.setenv(credentials.VARIABLE, "")
    files._systems.__dict__.clear()
    told = call(capfd, "train", home / "run", "run.steps=3", code=2)
    assert "passwords and tokens are not stored: set VITRAIL_CREDENTIALS to the URL with them" in told
    monkeypatch.setenv(credentials.VARIABLE, open_)
    call(capfd, "train", home / "run", "run.steps=3")


def test_a_file_by_fsspec(tmp_path: Path, server: str) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.bin").write_bytes(b"0123456789")
    shown = hide(f"http://me:{PASSWORD}@{server}/a.bin?token={TOKEN}")
    assert shown == f"http://{server}/a.bin"
    assert files.read_bytes(shown, 2, 3) == b"234"
    assert files.file_type(shown) == "file"
    with pytest.raises(BadData, match=r"a\.bin may not be read \(HTTP 401\); .*; passwords and tokens are not stored"):
        files.read_bytes(shown.replace("127.0.0.1", "localhost"))
