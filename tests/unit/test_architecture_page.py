"""docs/architecture.md names the files that there are, and a way to read them that a person can go in a day."""

import json
import re
import sys
from pathlib import Path

from support import run

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/vitrail"
MOST = 20  # files from a path to the loss
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def files(text: str) -> list[Path]:
    return [SOURCE / name for name in re.findall(r"`([\w/]+\.py)`", text) if not name.startswith("tests/")]


def test_files_of_the_page_are_there() -> None:
    assert len(files(PAGE)) > 50
    assert [path for path in files(PAGE) if not path.is_file()] == []


def test_rooms_of_the_page_are_those_of_the_library() -> None:
    table = PAGE.split("## Rooms", 1)[1].split("## ", 1)[0]
    named = set(re.findall(r"`(\w+)/?`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    there = {path.stem for path in SOURCE.iterdir() if path.name[0] not in "_." and path.suffix in ("", ".py")}
    assert named == there


def test_what_to_read_is_less_than_ten_thousand_lines() -> None:
    path = files(PAGE.split("## What to read", 1)[1])
    assert len(set(path)) == len(path) >= 30
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in path) <= 10_000


def test_the_way_of_one_sample_is_the_way_that_one_goes(tmp_path: Path) -> None:
    code, output = run(sys.executable, ROOT / "tests/walking.py", tmp_path)
    assert code == 0, output
    seen = json.loads(output.splitlines()[-1])
    way = PAGE.split("## The way of one sample", 1)[1].split("\n## ", 1)[0]
    named = {path.relative_to(SOURCE).as_posix() for path in files(way)}
    beside = PAGE.split("Helpers on it:", 1)[1].split("They see", 1)[0]
    helpers = {path.relative_to(SOURCE).as_posix() for path in files(beside)}
    assert len(helpers) == 2
    assert named - {"training/setup.py"} == set(seen) - helpers, seen  # that one makes the parts, and sees none of it
    assert len(named) <= MOST
