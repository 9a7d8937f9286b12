"""Rooms of the library know those below them and nothing of those above, so that each can be read without the rest."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src/vitrail"

# From the ground up: a room may import those of the lines above its own, and its own.
ORDER = (
    ("credentials", "draws"),
    ("errors",),
    ("disk", "foreign"),
    ("sums",),
    ("contents",),
    ("recipe",),
    ("layers", "diffusion", "launch", "convert"),
    ("models", "report"),
    ("data",),
    ("parallel", "view"),
    ("objectives",),
    ("cost",),
    ("weights",),
    ("codecs",),
    ("training",),
    ("infer", "bench"),
    ("exports",),
    ("cli",),
)
HEIGHT = {room: height for height, rooms in enumerate(ORDER) for room in rooms}


def imports(tree: ast.AST) -> Iterator[str]:
    """List the modules that a file imports anywhere, also inside functions and for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "vitrail":
            yield from (f"vitrail.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        else:
            yield from imports(node)


def test_rooms_import_those_below_them() -> None:
    upwards: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        room = name.parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        for module in imports(ast.parse(path.read_text())):
            parts = module.split(".")
            if parts[0] != "vitrail" or len(parts) < 2 or parts[1].startswith("_"):
                continue
            if parts[1] != room and HEIGHT[parts[1]] >= HEIGHT[room]:
                upwards.setdefault(str(name), set()).add(parts[1])
    assert not upwards
