"""docs/reliability.md lists faults by name; each must have a test that exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
LEAST = 120
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^`]*)\])?`")


def rows() -> list[list[str]]:
    """Cells of the rows of all tables of faults, without their heads."""
    text = re.sub("<!-- kills -->.*<!-- /kills -->", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)  # counts
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("|---")]
    return [row for row in cells if row != ["fault", "what happens", "test"]]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_test_that_exists() -> None:
    for row in rows():
        assert len(row) == 3, row
        named = TEST.findall(row[2])
        assert named, f"no test: {row}"
        for file, name, case in named:
            assert (ROOT / file).is_file(), f"{file} is missing: {row}"
            assert name in names_in(file), f"{file} has no {name}: {row}"
            assert not case or case in (ROOT / file).read_text(encoding="utf-8"), f"{name} has no case {case!r}: {row}"


def test_no_fault_is_listed_twice() -> None:
    faults = [row[0] for row in rows()]
    assert sorted(set(faults)) == sorted(faults)


# Seconds that a test waits for something before it gives up, and durations that it compares.
LIMIT = re.compile(r"(?:timeout=|\.join\(|\.wait\(|(?:monotonic|perf_counter)\(\) \+ |within\()(\d+)(?![\d.])")
JUDGED = re.compile(r"assert .*(?:monotonic|perf_counter|process_time|time\.time)\(\) - .*<")


def test_no_test_is_judged_by_the_clock() -> None:
    """A busy machine is ten times slower, now and then: limits are for what hangs, and nothing has to be fast."""
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name == "slurm.py" or "gpu" in path.parts:  # how long daemons may take to end, before they are killed
            continue
        text = path.read_text(encoding="utf-8")
        short = [found.group() for found in LIMIT.finditer(text) if 0 < int(found.group(1)) < 600]
        assert not short, f"{path}: {short[0]}; give it 600 s or more"
        assert not (found := JUDGED.search(text)), f"{path}: {found.group()}; count something instead"
