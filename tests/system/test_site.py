"""The documentation as a site: built without a warning, without a dead link, and without a word to another host."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support import LONG, ROOT, environment

pytest.importorskip("material", reason='the theme of the site is not installed (pip install -e ".[docs]")')
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}


class Wishes(HTMLParser):
    """What a page fetches by itself, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag in FETCHED and FETCHED[tag] in given:
            self.fetched.append(given[FETCHED[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    told = environment(NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(words, cwd=ROOT, env=told, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Wishes]:
    return {path: Wishes(path) for path in site.rglob("*.html")}


def test_every_page_is_there_and_found_by_the_search(site: Path) -> None:
    wanted = {path.relative_to(ROOT) for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.md")}
    missing = [name for name in wanted if name.name != "README.md" and not (site / name.with_suffix(".html")).is_file()]
    assert not missing
    assert (site / "index.html").is_file()
    assert "docs/recipe.html" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_no_page_asks_anything_of_another_host(site: Path, pages: dict[Path, Wishes]) -> None:
    assert sum(len(page.fetched) for page in pages.values()) > 100
    outside = {name for page in pages.values() for name in page.fetched if urlsplit(name).netloc or "://" in name}
    assert not outside
    for path in site.rglob("*.css"):
        style = path.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style), path.name


def test_links_of_the_site_lead_somewhere(site: Path, pages: dict[Path, Wishes]) -> None:
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links count from the root of a host
            continue
        for name in (*page.links, *page.fetched):
            parts = urlsplit(name)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            anchor = unquote(parts.fragment)
            if not place.is_file() or (anchor and place in pages and anchor not in pages[place].names):
                dead.append(f"{path.relative_to(site)}: {name}")
    assert not dead
