"""The list of planted bugs fits the code, and the tool that plants them tells killed from survived."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tests" / "mutants" / "run.py"
LEAST = 150


@cache
def tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("mutants_run", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@cache
def mutants() -> list[Any]:
    return tool().read_mutants(ROOT / "tests" / "mutants")


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_list_is_long_enough_and_covers_every_room() -> None:
    assert len(mutants()) >= LEAST
    assert {mutant.room for mutant in mutants()} == set(tool().ROOMS)
    ids = [mutant.id for mutant in mutants()]
    assert sorted(ids) == sorted(set(ids))


def test_every_mutant_fits_the_code() -> None:
    stale = []
    for mutant in mutants():
        whole = (ROOT / tool().PACKAGE / mutant.file).read_text(encoding="utf-8")
        if whole.count(mutant.find) != 1:
            stale.append(f"{mutant.id}: {whole.count(mutant.find)} times in {mutant.file}")
            continue
        ast.parse(whole.replace(mutant.find, mutant.put))
        assert mutant.find != mutant.put, mutant.id
    assert not stale, "change or replace these in tests/mutants: " + "; ".join(stale)


def test_every_mutant_has_tests_that_exist() -> None:
    for mutant in mutants():
        assert mutant.tests, mutant.id
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), f"{mutant.id}: {file}"
            assert not name or name.partition("[")[0] in functions_of(file), f"{mutant.id}: {test}"


ADD = "def add(a, b):\n    return a + b\n"
TESTS = """
import os
import subprocess
import sys

from vitrail.add import add


def test_fails_without_a_mutant():
    assert False


def test_zero():
    assert add(0, 0) == 0


def test_of_a_child():
    code = "from vitrail.add import add; print(add(1, 2))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout == b"3\\n"
"""


def toy(root: Path, *mutants: dict[str, Any]) -> None:
    """A work tree with one function, a few tests and these mutants."""
    (root / "src" / "vitrail").mkdir(parents=True, exist_ok=True)
    (root / "tests" / "mutants").mkdir(parents=True, exist_ok=True)
    (root / "src" / "vitrail" / "__init__.py").touch()
    (root / "src" / "vitrail" / "add.py").write_text(ADD)
    (root / "tests" / "test_add.py").write_text(TESTS)
    (root / "tests" / "test_broken.py").write_text("import no_such_module\n")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: long", "gpu: other"]\n')
    entries = [
        {"bug": "a bug", "file": "add.py", "tests": ["test_broken.py", "test_add.py"]} | mutant for mutant in mutants
    ]
    (root / "tests" / "mutants" / "add.yaml").write_text(json.dumps(entries))


def run_toy(root: Path, results: Path) -> tuple[int, dict[str, dict[str, Any]], int]:
    """Exit code, results by id, and how many mutants were run."""
    before = len(results.read_text().splitlines()) if results.exists() else 0
    words = ["--root", str(root), "--results", str(results), "--preload", "pytest", "--jobs", "2"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take longer to import than all the rest
    child = subprocess.run([sys.executable, str(TOOL), *words], env=environment, timeout=600, check=False)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return child.returncode, {line["id"]: line for line in lines}, len(lines) - before


def test_killed_survived_stale_and_resumed(tmp_path: Path) -> None:
    root, results = tmp_path / "toy", tmp_path / "results.jsonl"
    of_a_child = {"id": "of a child", "find": "a + b", "put": "a * b"}
    toy(
        root,
        {"id": "of a test", "find": "a + b", "put": "a + b + 1"},
        of_a_child,
        {"id": "the same", "find": "a + b", "put": "b + a", "equivalent": "addition commutes"},
        {"id": "gone", "find": "a - b", "put": "a"},
        {"id": "untested", "find": "a + b", "put": "a", "tests": ["test_broken.py"]},
        {"id": "death", "find": "return", "put": "import os; os._exit(0); return"},
    )
    code, found, run = run_toy(root, results)
    assert {name: line["status"] for name, line in found.items()} == {
        "of a test": "killed",
        "of a child": "killed",
        "the same": "survived",
        "gone": "stale",
        "untested": "error",
        "death": "killed",
    }
    assert code == 1  # one is stale
    assert run == 6
    # The test that fails anyway kills nothing; a child of the tests meets the mutant, too.
    assert found["of a test"]["test"].endswith("::test_zero")
    assert found["of a child"]["test"].endswith("::test_of_a_child")
    assert found["death"]["why"] == "the process died"
    assert (root / "src" / "vitrail" / "add.py").read_text() == ADD

    toy(root, of_a_child, {"id": "the other", "find": "a + b", "put": "a - b"})
    code, found, run = run_toy(root, results)
    assert (code, run) == (0, 1)
    assert found["the other"]["status"] == "killed"

    # When tests have changed, the one that noticed is asked first; where it has gone, all of them.
    assert "left_out" in found["of a child"]
    (root / "tests" / "test_add.py").write_text(TESTS + "# another line\n")
    code, found, run = run_toy(root, results)
    assert (code, run, found["of a child"]["status"]) == (0, 2, "killed")
    assert "left_out" not in found["of a child"]
    (root / "tests" / "test_add.py").write_text(TESTS.replace("test_of_a_child", "test_by_a_child"))
    code, found, run = run_toy(root, results)
    assert (code, run) == (0, 2)
    assert found["of a child"]["test"].endswith("::test_by_a_child")

    page = tmp_path / "page.md"
    page.write_text("# Mutants\n\n")
    words = ["--root", str(root), "--results", str(results), "--seconds", "0", "--table", str(page)]
    assert tool().main(words) == 0
    assert "| all | 2 | 2 | 0 | 0 | 100% |" in page.read_text()
