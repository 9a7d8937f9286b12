"""Plants small bugs (mutants) one at a time and runs the nearest tests: do they notice?

- the mutants stand in the YAML files beside this one
- the work tree is never touched: each job has a copy of it, in which one text is replaced
- PyTorch and the other large packages are imported once; every job is a fork of that process, so that a mutant costs
  its tests only, and vitrail itself is imported after the fork, from the copy
- a mutant counts as killed only if the test that failed passes without it
- a result is kept under the hash of the mutant, its file and its tests: a second run does what is missing or changed,
  and asks the test first that noticed the mutant before the change
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = "src/vitrail"
ROOMS = (
    *("recipe", "layers", "models", "diffusion", "objectives", "data", "data/sources", "data/augment", "parallel"),
    *("training", "infer", "exports", "codecs", "weights", "cost", "bench", "launch", "report", "cli", "draws", "disk"),
    "contents",
)
GOAL = 0.95
MARK = "<!-- written by tests/mutants/run.py --table, from here to the end -->"
# What the tests import, except vitrail; what is not installed is left out.
PRELOAD = (
    *("pytest", "hypothesis", "numpy", "torch", "torch.distributed", "torch.distributed.tensor", "torch.nn.functional"),
    *(
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.utils.flop_counter",
        "pydantic",
        "typer",
        "rich",
    ),
    *("einops", "PIL.Image", "matplotlib.figure", "matplotlib.backends.backend_agg", "jinja2", "zarr", "tensorstore"),
    *("safetensors.torch", "tifffile", "fsspec", "h5py", "torch.distributed.pipelining", "torch.utils.checkpoint"),
)
# Folders at the top that are no part of the tree.
OUTSIDE = {"runs", "data", "build", "dist"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A small bug: `find` stands exactly once in the file and is replaced by `put`."""

    id: str
    bug: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]
    equivalent: str | None = None
    group: str = ""

    @property
    def room(self) -> str:
        """The part of the package that the file belongs to."""
        parts = Path(self.file).parts
        nested = "/".join(parts[:2])
        return nested if nested in ROOMS else parts[0].removesuffix(".py")


def read_mutants(folder: Path) -> list[Mutant]:
    """All mutants of a folder's YAML files; those of named.yaml come first."""
    files = sorted(folder.glob("*.yaml"), key=lambda file: (file.name != "named.yaml", file.name))
    mutants = []
    for file in files:
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            tests = tuple(f"tests/{test}" for test in entry.pop("tests"))
            mutants.append(Mutant(**entry, tests=tests, group=file.stem))
    return mutants


def key_of(mutant: Mutant, root: Path) -> str:
    """Changes with the mutant, with the file that it changes and with its tests."""
    content = {k: v for k, v in asdict(mutant).items() if k not in ("id", "bug", "equivalent", "group")}
    files = [f"{PACKAGE}/{mutant.file}", *sorted({test.partition("::")[0] for test in mutant.tests})]
    whole = [json.dumps(content, sort_keys=True).encode()]
    whole += [(root / file).read_bytes() if (root / file).is_file() else b"" for file in files]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in whole)).hexdigest()[:24]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result for each key; a line cut off by a kill is passed over."""
    results = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                result = json.loads(line)
                results[result["key"]] = result
    return results


def copy_tree(root: Path, slot: Path) -> None:
    """A copy of the work tree, with the shared data beside it where tests look for them."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        top = Path(folder) == root
        return {n for n in names if n == "__pycache__" or (top and (n in OUTSIDE or n.startswith(".")))}

    shutil.copytree(root, slot / "tree", ignore=left_out)
    if (root.parent / "shared").is_dir():
        (slot / "shared").symlink_to(root.parent / "shared")


@contextlib.contextmanager
def planted(tree: Path, mutant: Mutant) -> Iterator[None]:
    """The mutant stands in the tree; its byte code is removed, which may be too young to be told from another's."""
    file = tree / PACKAGE / mutant.file
    whole = file.read_text(encoding="utf-8")
    compiled = Path(importlib.util.cache_from_source(str(file)))
    try:
        file.write_text(whole.replace(mutant.find, mutant.put), encoding="utf-8")
        compiled.unlink(missing_ok=True)
        yield
    finally:
        file.write_text(whole, encoding="utf-8")
        compiled.unlink(missing_ok=True)


class Watcher:
    """Plugin of pytest: writes down which test runs, which fails first, and that pytest came to its end."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.found: dict[str, Any] = {}

    def note(self, **facts: Any) -> None:
        self.found |= facts
        self.notes.write_text(json.dumps(self.found), encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(test=self.found.get("test", nodeid) if "why" in self.found else nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.fail(report)

    def pytest_collectreport(self, report: Any) -> None:
        self.fail(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.note(code=int(exitstatus))

    def fail(self, report: Any) -> None:
        if report.failed and "why" not in self.found:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
            self.note(test=report.nodeid, why=lines[0 if crash else -1][:200])


def run_pytest(tree: Path, tests: list[str], left_out: list[str]) -> None:
    """Run pytest on the copy, in this process; what vitrail starts finds the copy, too."""
    import pytest

    slot = tree.parent
    os.chdir(tree)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(slot / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    temporary = slot / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    ours = {str(HERE), str(ROOT / "src")}
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in ours]
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(tree / "src"), *others]), "TMPDIR": str(temporary)}
    sys.path[:] = [str(tree / "src"), *(p for p in sys.path if p not in ours)]
    assert not any(name.partition(".")[0] == "vitrail" for name in sys.modules), "vitrail was imported before the fork"
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", f"--basetemp={temporary}/pytest"]
    options += [word for test in left_out for word in ("--deselect", test)]
    pytest.main([*options, *tests], plugins=[Watcher(slot / "notes")])


def end_all_below() -> None:
    """End whatever this process, or what it started, has started; orphans come to it, as it asked for them."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        below: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                state, above = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    below.setdefault(int(above), []).append(int(stat.parent.name))
        found = below.get(os.getpid(), [])
        for process in found:
            found += below.get(process, [])
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def run_tests(tree: Path, tests: list[str], left_out: list[str], limit: float) -> dict[str, Any]:
    """Outcome of one run of pytest in a process of its own: status, and the test that failed, crashed or hung."""
    notes = tree.parent / "notes"
    notes.unlink(missing_ok=True)
    began, late = time.time(), False
    try:
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                run_pytest(tree, tests, left_out)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(0)
        while not os.waitpid(child, os.WNOHANG)[0] and not late:
            with contextlib.suppress(FileNotFoundError):
                began = max(began, notes.stat().st_mtime)
            late = time.time() - began > limit
            time.sleep(0.05)
    finally:
        end_all_below()
    found = json.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    outcome = {"test": found.get("test", tests[0]), "why": found.get("why")}
    if "why" in found:
        return outcome | {"status": "killed"}
    if late or ("test" in found and "code" not in found):
        return outcome | {"status": "killed", "why": f"no end after {limit:g} s" if late else "the process died"}
    if found.get("code") == 0:
        return {"status": "survived"}
    return {"status": "error", "why": (tree.parent / "log").read_text(errors="replace").strip()[-400:]}


def judge(mutant: Mutant, tree: Path, clean: set[str], limit: float, first: str | None = None) -> dict[str, Any]:
    """Outcome for one mutant; a test that fails without it, too, proves nothing and is left out.

    `first` is a test that may well notice; where it does not, all are asked.
    """
    if (times := (tree / PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.find)) != 1:
        return {"status": "stale", "why": f"its text stands {times} times in the file"}
    if first is not None:
        with planted(tree, mutant):
            outcome = run_tests(tree, [first], [], limit)
        noticed = outcome["status"] == "killed" and outcome["test"] == first
        if noticed and (first in clean or run_tests(tree, [first], [], limit)["status"] == "survived"):
            return outcome
    left_out: list[str] = []
    while True:
        # A file that cannot even be imported is named as a whole.
        tests = [test for test in mutant.tests if test.partition("::")[0] not in left_out]
        if not tests or len(set(left_out)) < len(left_out):
            return {"status": "error", "why": "its tests fail without it", "left_out": left_out}
        with planted(tree, mutant):
            outcome = run_tests(tree, tests, left_out, limit)
        outcome |= {"left_out": left_out} if left_out else {}
        if outcome["status"] != "killed" or outcome["test"] in clean:
            return outcome
        if run_tests(tree, [outcome["test"]], [], limit)["status"] == "survived":
            return outcome
        left_out.append(outcome["test"])


def supervise(mutant: Mutant, slot: Path, clean: set[str], limit: float, first: str | None) -> None:
    """In a fork: judge one mutant and write the outcome; ends with the process that forked it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    started = time.monotonic()
    try:
        outcome = judge(mutant, slot / "tree", clean, limit, first)
    except Exception as error:
        outcome = {"status": "error", "why": repr(error)}
    outcome["seconds"] = round(time.monotonic() - started, 1)
    (slot / "outcome").write_text(json.dumps(outcome), encoding="utf-8")


def take_outcome(slot: Path, root: Path) -> dict[str, Any]:
    """What the supervisor wrote; if it was killed, its copy may hold the mutant still and is made anew."""
    try:
        outcome: dict[str, Any] = json.loads((slot / "outcome").read_text(encoding="utf-8"))
    except FileNotFoundError:
        shutil.rmtree(slot)
        copy_tree(root, slot)
        return {"status": "error", "why": "its process was killed", "seconds": 0.0}
    (slot / "outcome").unlink()
    return outcome


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "pytest"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run_all(todo: list[Mutant], arguments: argparse.Namespace) -> None:
    """Judge the mutants, several at a time, and append a line to the results for each."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in filter(None, arguments.preload.split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an orderly end: copies are removed, tests ended
    facts = versions()
    noticed = {r["id"]: r["test"] for r in read_results(arguments.results).values() if r["status"] == "killed"}
    end = time.monotonic() + arguments.seconds
    clean: set[str] = set()
    waiting, running = todo[::-1], {}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, arguments.results.open("a", encoding="utf-8") as out:
        slots = [Path(folder) / str(k) for k in range(min(arguments.jobs, len(todo)))]
        for slot in slots:
            copy_tree(arguments.root, slot)
        try:
            while running or (waiting and time.monotonic() < end):
                while slots and waiting and time.monotonic() < end:
                    mutant, slot = waiting.pop(), slots.pop()
                    child = os.fork()
                    if child == 0:
                        try:
                            supervise(mutant, slot, clean, arguments.limit, noticed_by(mutant, noticed))
                        finally:
                            os._exit(0)
                    running[child] = mutant, slot
                mutant, slot = running.pop(os.wait()[0])
                slots.append(slot)
                outcome = take_outcome(slot, arguments.root)
                if outcome["status"] == "killed":
                    clean.add(outcome["test"])
                when = datetime.now(UTC).strftime("%Y-%m-%d")
                line = {"key": key_of(mutant, slot / "tree"), "id": mutant.id, **outcome, "date": when, **facts}
                out.write(json.dumps(line) + "\n")
                out.flush()
                words = outcome.get("test") or outcome.get("why") or ""
                print(f"{outcome['status']:8} {mutant.id:40} {outcome['seconds']:6.1f} s  {words}", flush=True)
        finally:
            for child in running:
                os.kill(child, signal.SIGTERM)
            for child in running:
                os.waitpid(child, 0)


def noticed_by(mutant: Mutant, noticed: dict[str, str]) -> str | None:
    """The test that noticed it once, if it is still one of the mutant's."""
    test = noticed.get(mutant.id, "")
    names = {test, test.partition("[")[0], test.partition("::")[0]}
    return test if names & set(mutant.tests) else None


def state(mutant: Mutant, found: dict[str, dict[str, Any]]) -> str:
    """The status of its result; one judged equivalent is so only if it survived."""
    status: str = found.get(mutant.id, {}).get("status", "not run")
    return "equivalent" if status == "survived" and mutant.equivalent else status


def table(mutants: list[Mutant], found: dict[str, dict[str, Any]]) -> str:
    """Score by room, the named mutants one by one, what survived and what is judged equivalent."""

    def row(name: str, chosen: list[Mutant]) -> str:
        states = [state(mutant, found) for mutant in chosen]
        counts = [states.count(kind) for kind in ("killed", "survived", "equivalent")]
        return f"| {name} | {len(states)} | {' | '.join(map(str, counts))} | {score(states):.0%} |"

    lines = ["| room | mutants | killed | survived | equivalent | score |", "|---|---|---|---|---|---|"]
    lines += [row(room, [m for m in mutants if m.room == room]) for room in ROOMS]
    lines += [row("all", mutants)]
    made = sorted({(r["date"], f"Python {r['python']}, torch {r.get('torch', '-')}") for r in found.values()})
    if made:
        days = " to ".join(dict.fromkeys((made[0][0], made[-1][0])))
        lines += ["", f"Run on {days} with {' and '.join(sorted({what for _, what in made}))}."]
    missing = [m.id for m in mutants if state(m, found) in ("not run", "stale", "error")]
    lines += ["", f"Without a result: {', '.join(missing)}."] if missing else []
    lines += ["", "## Named one by one", "", "| bug | in | outcome | by |", "|---|---|---|---|"]
    for m in (m for m in mutants if m.group == "named"):
        lines.append(f"| {m.bug} | `{m.file}` | {state(m, found)} | {killer(found.get(m.id, {}))} |")
    for kind, title in (("survived", "Survived"), ("equivalent", "Judged equivalent")):
        if chosen := [m for m in mutants if state(m, found) == kind]:
            lines += ["", f"## {title}", "", "| bug | in | why |", "|---|---|---|"]
            lines += [f"| {m.bug} | `{m.file}` | {m.equivalent or 'no test notices it'} |" for m in chosen]
    return "\n".join(lines) + "\n"


def killer(result: dict[str, Any]) -> str:
    """The test that noticed, without the values of its parameters, which may hold anything."""
    return f"`{result['test'].partition('[')[0]}`" if result.get("test") else "-"


def score(states: list[str]) -> float:
    """Killed, of those that are not equivalent."""
    return states.count("killed") / max(1, len(states) - states.count("equivalent"))


def main(words: list[str] | None = None) -> int:
    """Run what is missing; 0 if enough mutants are killed and none is stale or broke."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--root", type=Path, default=ROOT, help="the work tree")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--only", default="", help="of the mutants, those whose group, file or id contains this")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "mutants.jsonl", help="lines of JSON, appended to"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for one test")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further mutant after so many; 0: none")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="packages to import once")
    parser.add_argument("--again", action="store_true", help="run those that survived or broke again")
    parser.add_argument("--table", type=Path, help="then write the results into this page")
    arguments = parser.parse_args(words)
    arguments.root, arguments.results = arguments.root.resolve(), arguments.results.resolve()
    mutants = read_mutants(arguments.root / "tests" / "mutants")
    keys = {mutant.id: key_of(mutant, arguments.root) for mutant in mutants}

    def found() -> dict[str, dict[str, Any]]:
        results = read_results(arguments.results)
        return {name: results[key] for name, key in keys.items() if key in results}

    chosen = [m for m in mutants if any(arguments.only in text for text in (f"{m.group}.yaml", m.file, m.id))]
    done = {"killed"} if arguments.again else {"killed", "survived", "stale", "error"}
    todo = [m for m in chosen if found().get(m.id, {}).get("status") not in done]
    if todo and arguments.seconds > 0:
        run_all(todo, arguments)
    results = found()
    if arguments.table:
        page = arguments.table.read_text(encoding="utf-8").partition(MARK)[0]
        arguments.table.write_text(page + MARK + "\n\n" + table(mutants, results), encoding="utf-8")
    states = [state(mutant, results) for mutant in chosen]
    counts = {kind: states.count(kind) for kind in ("killed", "survived", "equivalent", "stale", "error", "not run")}
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()), f"score {score(states):.1%}", sep=", ")
    return int(counts["stale"] + counts["error"] + counts["not run"] > 0 or score(states) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
