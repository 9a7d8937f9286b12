"""Nothing in src/ opens files that others may have made by itself: foreign.py does, which waits for no pipe."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitrail

SRC = Path(vitrail.__file__).parent
READERS = {"read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt"}

# Modules that read what this process or the system has made, or that look at what they open themselves.
ALLOWED = {
    "bench/cell.py": "orders",
    "bench/sweep.py": "in a folder that was looked at",
    "bench/supervise.py": "logs in a folder of its own, or one that was looked at",
    "codecs/kl.py": "weights that were opened before",
    "codecs/torchscript.py": "files that were opened before",
    "contents.py": "in a folder that was looked at",
    "data/files/cache.py": "opens so that no pipe keeps it waiting",
    "data/files/paths.py": "looks at the path first",
    "data/formats/ngff.py": "of a draft",
    "data/files/places.py": "of a store, by files.py",
    "disk.py": "opens so that no pipe keeps it waiting",
    "foreign.py": "is the way to open files",
    "infer/outputs.py": "a folder that it has looked at, to lock it",
    "launch/jobs.py": "looks at the path first; and templates of vitrail's own",
    "launch/machine.py": "of the system",
    "launch/world.py": "of the system",
    "memory.py": "of the system",
    "recipe/early.py": "a table of vitrail's own",
    "report/charts.py": "a script of vitrail's own",
    "report/page.py": "templates of vitrail's own",
    "training/alike.py": "of Python modules",
    "training/failures.py": "of the system",
    "training/profiling.py": "what this process has just written",
    "training/runfolder.py": "in a folder that was looked at",
    "training/timeline.py": "a trace that this process has just written",
    "cli/plan.py": "logs in a folder that was looked at",
    "cli/words.py": "nothing: the null device",
}


def find(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and words of what opens a file by its path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            of_path = name.endswith(".open") and any(set(mode) <= set("rbt+") for mode in modes)
            if name in ("open", "os.open", "io.open") or (name.split(".")[-1] in READERS and "." in name) or of_path:
                yield node.lineno, name


def test_no_other_module_opens_files_by_itself() -> None:
    found = []
    for path in sorted(SRC.rglob("*.py")):
        name = str(path.relative_to(SRC))
        if name not in ALLOWED:
            found += [f"{name}:{line}: {words}" for line, words in find(ast.parse(path.read_text()))]
    assert not found, "use vitrail.foreign instead of:\n" + "\n".join(found)


@pytest.mark.parametrize("text", ["open(p)", "p.read_text()", "(a / b).read_bytes()", "p.open('rb')", "os.open(p, 0)"])
def test_every_spelling_is_found(text: str) -> None:
    assert list(find(ast.parse(text)))


@pytest.mark.parametrize("text", ["open_plain(p)", "config.open()", "read_bytes(p, 0, 8)", "Image.open(file)"])
def test_what_looks_alike_is_not(text: str) -> None:
    assert not list(find(ast.parse(text)))
