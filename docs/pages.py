"""Which files are pages of the site, a hook of `mkdocs.yml`.

Pages have the addresses that they have in the repository, so that a link leads to the same page in both. README.md is
the front page. What a page links to beside other pages comes along: recipes and code as pages of their own, folders as
a list, pictures and numbers as files. A page that `nav` does not name is found under "More".
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
WRITTEN = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "benchmarks/*.md")
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
STYLE = ("docs/site/site.css", "docs/site/iframe-worker.js")
CODE = {".yaml": "yaml", ".py": "python", ".sh": "sh"}  # shown as a page
SHOWN = ".md"  # what the page of such a file, or index.md of such a folder, is called beside it


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    named = set(leaves(config.nav))
    if more := [name for name in written() if name not in named]:
        config.nav = [*config.nav, {"More": more}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the files of the repository, and of the theme those that there were."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    pages = written()
    ours = (File(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in (*pages, *STYLE))
    found = Files([*kept, *ours])
    wanted = [target for name in pages for target in linked(name)]
    while wanted:
        path = wanted.pop()
        name = address(path)
        if name in found.src_uris:
            continue
        aside = {"inclusion": InclusionLevel.NOT_IN_NAV}
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.name[0] not in "._")
            wanted += inside
            lines = [f"- [{each.name}]({os.path.relpath(ROOT / address(each), path)})" for each in inside]
            text = "\n".join([f"# {path.relative_to(ROOT)}", "", *lines, ""])
            found.append(File.generated(config, name, content=text, **aside))
        elif path.suffix in CODE:
            code = f"````{CODE[path.suffix]}\n{path.read_text(encoding='utf-8')}````"
            text = f"---\nhide: [toc]\n---\n\n# {path.relative_to(ROOT)}\n\n{code}\n"
            found.append(File.generated(config, name, content=text, **aside))
        else:
            found.append(File.generated(config, name, abs_src_path=str(path)))
    return found


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead to the pages of recipes, code and folders."""

    def shown(found: re.Match[str]) -> str:
        path = (ROOT / page.file.src_uri).parent / found[1]
        return found[1] if not path.exists() else os.path.relpath(ROOT / address(path), ROOT / page.file.src_uri / "..")

    return LINK.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show a bar in a cell as what it is: tables of the repository need a backslash before it."""
    return re.sub(r"<code>[^<]*\\\|[^<]*</code>", lambda found: found[0].replace("\\|", "|"), html)


def written() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for name in WRITTEN for path in ROOT.glob(name))


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def linked(name: str) -> list[Path]:
    """What a page links to that is in the repository and no page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = (Path(os.path.normpath(ROOT / name / ".." / target)) for target in LINK.findall(text))
    return [path for path in targets if path.suffix != ".md" and path.exists() and path.is_relative_to(ROOT)]


def address(path: Path) -> str:
    """Where the site has a file of the repository."""
    name = Path(os.path.normpath(path)).relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{name}/index{SHOWN}"
    return f"{name}{SHOWN}" if path.suffix in CODE else name
