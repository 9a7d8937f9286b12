"""SIGKILL at random instants: whatever is killed goes on, or is done again, and ends as if nothing had happened.

    python benchmarks/kills.py [--kills 200] [--seed 0] [--jobs 1] [--only train/ encode/2] [--out FILE] [--page FILE]

A try is one call of a verb, killed once to four times: all its processes at once, at an instant drawn from the time
that the call takes, or soon after it has begun to write. After each kill, nothing under a final name may be half made;
then the call is repeated to its end, and what it leaves is compared with that of a call which nobody killed: the same
bits (of a training: every tensor of the last checkpoint and every loss), the same names, no draft that a later call
does not sweep, no process left behind, and what lay beside it untouched.

The modules are imported once; each call is a fork, several ranks are several forks. One line of JSON a try is appended
to FILE; tries that are there already are not repeated. The table is printed at the end, and with --page written between
the marks of a page.
"""

import argparse
import atexit
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

STEPS, EVERY = 24, 4  # of a training, and between its checkpoints
LIMIT = 900.0  # seconds that a call may take, and that processes may outlive a kill
CODEC, FLOW, VOLUME, OLD = "codec", "flow", "volume.zarr", "old.zarr"  # what all tries share
OWN_HIDDEN = (".lock", ".metadata", ".vitrail", ".vitrail-stage.lock")  # that are no drafts, nor are those of Zarr
LATER = "matplotlib.figure matplotlib.backends.backend_svg PIL.PngImagePlugin zarr tensorstore tifffile jinja2 watching"
BEGIN, END = "<!-- kills -->", "<!-- /kills -->"


def call(*words: Any) -> None:
    """The command line in this process; it must end well."""
    from vitrail import cli

    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        if end.code:
            raise


# ---------------------------------------------------------------- what is killed


@dataclass(frozen=True)
class Deed:
    """One call: how it is made, and what must hold after a kill and at the end; all in processes of their own."""

    verb: str
    layout: str = "1 rank"
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    needs: ClassVar[str | None] = None  # the trained run of the stock that it starts from

    @property
    def name(self) -> str:
        return f"{self.verb}/{self.layout}"

    def prepare(self, stock: Path, home: Path) -> None:
        """What lies there before the first call."""

    def act(self, stock: Path, home: Path) -> None:
        """The call, on each rank; the working folder is the home."""
        raise NotImplementedError

    def check_killed(self, home: Path, whole: Path) -> None:
        """After a kill: nothing under a final name is half made."""

    def check_done(self, home: Path, whole: Path) -> None:
        """At the end; names are compared by the caller."""
        assert contents(home / "out") == contents(whole / "out")


class Train(Deed):
    def prepare(self, stock: Path, home: Path) -> None:
        from support import tiny_recipe, write_recipe

        changes: dict[str, Any] = {
            "run__steps": STEPS,
            "checkpoint__every": EVERY,
            "eval": {"every": 2 * EVERY, "samples": 8},
            "ema": {"decay": 0.9},
            "log__pictures": 4 * EVERY,
            "data__crop": 8,
            "model__encoder__depth": 4 if self.options.get("pipeline") else 2,
        }
        micro = {"data__micro_batch": 4} if "pipeline" in self.options else {}
        if self.options:
            changes["parallel"] = self.options
        write_recipe(home / "recipe.yaml", tiny_recipe(stock / VOLUME, home / "out", **changes | micro))

    def act(self, stock: Path, home: Path) -> None:
        call("train", home / "recipe.yaml", "--quiet")

    def check_killed(self, home: Path, whole: Path) -> None:
        from vitrail.weights.runs import list_checkpoints, read_manifest, verify

        for folder in list_checkpoints(home / "out/checkpoints"):
            verify(folder, read_manifest(folder))

    def check_done(self, home: Path, whole: Path) -> None:
        from support import losses
        from watching import assert_same

        assert_same(home / "out", whole / "out")
        assert (losses(home / "out") == losses(whole / "out")).all()
        assert len(losses(home / "out")) == STEPS


class Encode(Deed):
    needs = CODEC

    def act(self, stock: Path, home: Path) -> None:
        call("data", "encode", stock / CODEC, "--out", home / "out", "--rows", 3, "--batch", 2, "--quiet")

    def check_killed(self, home: Path, whole: Path) -> None:
        for split in ("train", "valid"):
            if (home / "out" / split / "index.json").exists():  # it says that all is there
                found, expected = contents(home / "out" / split), contents(whole / "out" / split)
                assert expected.items() <= found.items()


class Sample(Deed):
    needs = FLOW

    def act(self, stock: Path, home: Path) -> None:
        call("sample", stock / FLOW, "--number", 12, "--batch", 2, "--steps", 3, "--out", home / "out", "--quiet")

    def check_killed(self, home: Path, whole: Path) -> None:
        expected = contents(whole / "out")
        for name, content in contents(home / "out").items():
            assert content == expected[name], f"{name} is half made"


class Generate(Deed):
    def prepare(self, stock: Path, home: Path) -> None:
        if "--force" in self.options:
            shutil.copytree(stock / OLD, home / "out")

    def act(self, stock: Path, home: Path) -> None:
        words = ["data", "generate", home / "out", "--shape", "24,32,40", "--chunk", 8, "--levels", 2]
        # A call that was killed right at its end has made all: only --force may do it again.
        if "--force" in self.options or not (home / "out").exists():
            call(*words, *self.options)

    def check_killed(self, home: Path, whole: Path) -> None:
        new, old = contents(whole / "out"), contents(home.parent.parent / "stock" / OLD)
        found = contents(home / "out") if (home / "out").exists() else None
        if "--force" not in self.options:
            assert found in (None, new), "it is half made"
        elif found is None:  # what it replaces is kept beside it until the new one is there
            assert any(contents(path) == old for path in home.glob("out.old-*")), "what was to be replaced is gone"
        else:
            assert found in (old, new), "it is half made"


class Report(Deed):
    needs = CODEC

    def prepare(self, stock: Path, home: Path) -> None:
        shutil.copytree(stock / CODEC, home / "out")

    def act(self, stock: Path, home: Path) -> None:
        from vitrail.report import write_report

        write_report("out", now=1.8e9)

    def check_killed(self, home: Path, whole: Path) -> None:
        places = (home / "out", home.parent.parent / "stock" / CODEC, whole / "out")
        found, before, after = ((place / "report.html").read_bytes() for place in places)
        assert found in (before, after), "it is half made"


class Bench(Deed):
    def act(self, stock: Path, home: Path) -> None:
        words = ["--sweep", "model.patch=2,4", "--mode", "syn", "--steps", 2, "--windows", 1, "--warm-up", 1]
        call("bench", ROOT / "configs/ablate/dit_toy.yaml", *words, "--out", home / "out")
        call("report", home / "out")

    def check_done(self, home: Path, whole: Path) -> None:
        from vitrail.bench.sweep import read_lines

        results, _ = read_lines(home / "out")
        newest = {result["name"]: result for result in results}
        assert [result["status"] for result in newest.values()] == ["ok", "ok"]
        assert newest.keys() == {result["name"] for result in read_lines(whole / "out")[0]}


class Stage(Deed):
    def act(self, stock: Path, home: Path) -> None:
        from vitrail.data.files.stage import stage
        from vitrail.data.sources.zarr import OmeZarrConfig

        stage([OmeZarrConfig(path=str(stock / VOLUME))], home / "out", 2**30)

    def check_killed(self, home: Path, whole: Path) -> None:
        expected, found = self.copies(whole), self.copies(home)
        assert found == {name: expected[name] for name in found}, "a file is half copied"

    def check_done(self, home: Path, whole: Path) -> None:
        assert self.copies(home) == self.copies(whole)

    def copies(self, home: Path) -> dict[str, bytes]:
        """Without the records of them, whose lines come in the order of the call and hold times."""
        from vitrail.data.files.stage import LOCK

        return {name: content for name, content in contents(home / "out").items() if name != LOCK}


DEEDS: tuple[Deed, ...] = (
    Train("train"),
    Train("train", "DDP, 2 ranks", 2, {"strategy": "DDP"}),
    Train("train", "FSDP, 2 ranks", 2, {"strategy": "FULL_SHARD"}),
    Train("train", "tensor, 2 ranks", 2, {"tensor": 2}),
    Train("train", "context, 2 ranks", 2, {"context": 2}),
    Train("train", "pipeline, 2 ranks", 2, {"pipeline": 2}),
    Train("train", "hybrid, 4 ranks", 4, {"strategy": "HYBRID_SHARD", "group": 2}),
    Encode("data encode"),
    Encode("data encode", "2 ranks", 2),
    Sample("sample"),
    Sample("sample", "2 ranks", 2),
    Generate("data generate"),
    Generate("data generate", "--force", options={"--force": True}),
    Report("report"),
    Bench("bench"),
    Stage("staging"),
)


# ---------------------------------------------------------------- what all tries share


def make_stock(stock: Path, needed: set[str | None]) -> None:
    """Data and trained runs that the calls start from."""
    import numpy as np
    from PIL import Image
    from support import write_recipe, write_volume

    write_volume(stock / VOLUME, size=32)
    call("data", "generate", stock / OLD, "--shape", "24,32,40", "--chunk", 8, "--levels", 2, "--seed", 1)
    draw = np.random.default_rng(0)
    for split, number in (("train", 10), ("valid", 4)):
        for label in ("across", "up"):
            (stock / "images" / split / label).mkdir(parents=True)
            for index in range(number):
                wave = np.rint(127 + 100 * np.sin(np.arange(8) * draw.uniform(0.6, 1.6) + draw.uniform(0, 6)))
                image = np.tile(wave.astype(np.uint8), (8, 1))
                image = image if label == "up" else np.ascontiguousarray(image.T)
                Image.fromarray(image).save(stock / "images" / split / label / f"{index:02d}.png")
    base: dict[str, Any] = {
        "data": {
            "train": [{"path": str(stock / "images/train"), "kind": "image_folder"}],
            "valid": [{"path": str(stock / "images/valid"), "kind": "image_folder"}],
            "crop": 8,
            "batch": 8,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "ema": {"decay": 0.5},
        "log": {"every": 1, "tensorboard": False},
    }
    models = {
        CODEC: ({"kind": "autoencoder", "factor": 2, "latent": 3, "width": 8}, {"kind": "autoencode"}),
        FLOW: (
            {"kind": "dit", "width": 32, "depth": 2, "heads": 2, "patch": 2, "label_dropout": 0.2},
            {"kind": "flow", "classes": True, "sampling": {"steps": 3}},
        ),
    }
    for name, (model, objective) in ((name, models[name]) for name in models if name in needed):
        run = {"name": name, "dir": str(stock / name), "steps": 6, "device": "cpu"}
        call(
            "train",
            write_recipe(stock / f"{name}.yaml", base | {"run": run, "model": model, "objective": objective}),
            "--quiet",
        )


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name, but hidden ones that are drafts."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(is_draft(part) for part in name.parts):
            found[str(name)] = path.read_bytes()
    return found


def is_draft(name: str) -> bool:
    return (name.startswith(".") and name not in OWN_HIDDEN and not name.startswith(".z")) or name.endswith(
        (".part", ".partial")
    )


def is_bare(draft: Path) -> bool:
    """Whether it is a folder that a kill left before it got its mark.

    It is swept when it is old, by the next call that makes a folder there: one that finds its work done makes none.
    """
    return draft.is_dir() and all(is_draft(path.name) for path in draft.iterdir())


def names(folder: Path) -> set[str]:
    """Everything below a folder but bare drafts and the insides of the cache and of what the system calls temporary."""
    found = set()
    bare = [path for path in folder.iterdir() if is_draft(path.name) and is_bare(path)]
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if name.parts[0] not in ("cache", "tmp", *(each.name for each in bare)):
            found.add(str(name))
    return found


def drafts(folder: Path) -> set[str]:
    found = set()
    for place, folders, files in os.walk(folder):
        found |= {os.path.join(place, name) for name in (*folders, *files) if is_draft(name)}
    return {path for path in found if not is_decoy(Path(path))}


DECOYS = ("out.backup", ".out.mine", "outside.txt", "link", "out-2")


def is_decoy(path: Path) -> bool:
    return path.name in DECOYS


def lay_decoys(home: Path) -> None:
    """What a user may have beside the result, and must still have afterwards."""
    for name in DECOYS[:2]:
        (home / name / "inner").mkdir(parents=True)
        (home / name / "inner/keep.txt").write_text(name)
    (home / DECOYS[2]).write_text("mine")
    (home / DECOYS[3]).symlink_to(DECOYS[0])
    (home / DECOYS[4]).mkdir()


def decoy_hash(home: Path) -> str:
    mark = hashlib.sha256()
    for name in DECOYS:
        top = home / name
        for path in (top, *(sorted(top.rglob("*")) if not top.is_symlink() else ())):
            told = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
            mark.update(repr((str(path.relative_to(home)), told.st_mode, told.st_mtime_ns, content)).encode())
    return mark.hexdigest()


# ---------------------------------------------------------------- processes


class Wrong(Exception):
    """What a try has shown to be wrong."""


def import_all() -> None:
    """Every module of vitrail and what its verbs import later, so that forks begin at once; nothing may be run here."""
    import vitrail

    for found in pkgutil.walk_packages(vitrail.__path__, "vitrail."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an optional library
                importlib.import_module(found.name)
    for name in LATER.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def adopt_orphans() -> None:
    """Have the system give what outlives its parents to this process, so that it can be waited for."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def leave(function: Callable[[], Any], log: Path) -> NoReturn:
    """In a fork: call, and end this process with what became of it."""
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        function()
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def forked(function: Callable[[], Any], log: Path, what: str) -> None:
    """Call in a process of its own and wait; raises what it says."""
    log.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        leave(function, log)
    _, status = os.waitpid(pid, 0)
    if status:
        raise Wrong(f"{what}: {tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else "no word"


def begin(deed: Deed, stock: Path, home: Path, log: Path) -> int:
    """Start a call in a group of processes of its own; gives the number of its first."""
    log.unlink(missing_ok=True)
    port = free_port() if deed.ranks > 1 else 0
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        return pid

    def act() -> None:
        os.environ |= {"VITRAIL_CACHE": str(home / "cache"), "TMPDIR": str(home / "tmp")}
        os.chdir(home)
        deed.act(stock, home)

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_PORT": str(port)}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(deed.ranks)) | {"MASTER_ADDR": "localhost"}
        act()

    def lead() -> None:
        os.setpgid(0, 0)
        end_with_parent()
        if deed.ranks == 1:
            return act()
        ranks = []
        for number in range(deed.ranks):
            ranks.append(os.fork())
            if not ranks[-1]:
                leave(lambda number=number: rank(number), log)
        codes = [os.waitpid(each, 0)[1] for each in ranks]
        if any(codes):
            raise SystemExit(1)

    leave(lead, log)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def ended(pid: int) -> int | None:
    """The exit code of a child that has ended."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def finish(deed: Deed, stock: Path, home: Path, log: Path) -> float:
    """A call to its end; gives its seconds."""
    for _ in range(3):
        began = time.monotonic()
        pid = begin(deed, stock, home, log)
        while (code := ended(pid)) is None:
            if time.monotonic() - began > LIMIT:
                os.killpg(pid, signal.SIGKILL)
                wait_for_all()
                raise Wrong(f"it did not end within {LIMIT:.0f} s: {tail(log)}")
            time.sleep(0.005)
        wait_for_all()
        if code == 0:
            return time.monotonic() - began
        if "in use" not in tail(log):  # somebody else took the port between its choice and its use
            break
    raise Wrong(f"it ended with {code}: {tail(log)}")


def wait_for_all() -> None:
    """Until nothing that was started here is left: what outlives its call is an error."""
    deadline = time.monotonic() + LIMIT
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        raise Wrong("processes are left that did not end by themselves")


def strike(
    deed: Deed, stock: Path, home: Path, log: Path, draw: random.Random, seconds: float
) -> dict[str, Any] | None:
    """Start a call and kill all its processes; None where it has ended before."""
    writes = draw.randint(1, 5) if draw.random() < 0.5 else 0  # 0: at any time, else soon after so many were begun
    at = draw.uniform(0, 0.004 if writes else seconds)
    before, seen = drafts(home), set[str]()
    began = time.monotonic()
    pid = begin(deed, stock, home, log)
    due = None if writes else began + at
    while due is None or time.monotonic() < due:
        if (code := ended(pid)) is not None:
            wait_for_all()
            if code:
                raise Wrong(f"it ended with {code}: {tail(log)}")
            return None
        if due is None:
            seen |= drafts(home) - before
            due = time.monotonic() + at if len(seen) >= writes else None
        if due is None or not writes:
            time.sleep(0.0005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    wait_for_all()
    if not os.WIFSIGNALED(status):
        return None
    return {
        "phase": f"write {writes}" if writes else "any",
        "after": round(time.monotonic() - began, 3),
        "drafts": len(drafts(home) - before),
    }


# ---------------------------------------------------------------- tries


def set_up(deed: Deed, stock: Path, home: Path, log: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    (home / "tmp").mkdir(parents=True)
    lay_decoys(home)
    forked(lambda: deed.prepare(stock, home), log, "its preparation")


def make_whole(deed: Deed, work: Path) -> None:
    """The call that nobody kills, and how long it takes."""
    home, log = work / "whole" / slug(deed.name), work / "whole" / f"{slug(deed.name)}.log"
    home.parent.mkdir(exist_ok=True)
    set_up(deed, work / "stock", home, log)
    seconds = finish(deed, work / "stock", home, log)
    (work / "whole" / f"{slug(deed.name)}.seconds").write_text(repr(seconds))


def slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def deed_of(index: int, seed: int, deeds: Sequence[Deed]) -> Deed:
    """All in turn, each time in another order."""
    turn, place = divmod(index, len(deeds))
    return random.Random(f"{seed}/turn/{turn}").sample(deeds, len(deeds))[place]


def attempt(index: int, seed: int, most: int, deeds: Sequence[Deed], work: Path) -> dict[str, Any]:
    """One try: which deed, how many kills and when follow from the seed and the number of the try."""
    deed, draw = deed_of(index, seed, deeds), random.Random(f"{seed}/{index}")
    stock, home, log = work / "stock", work / "tries" / str(index), work / "tries" / f"{index}.log"
    whole = work / "whole" / slug(deed.name)
    seconds = float((work / "whole" / f"{slug(deed.name)}.seconds").read_text())
    kills: list[dict[str, Any]] = []
    told = {"index": index, "seed": seed, "verb": deed.verb, "layout": deed.layout, "ranks": deed.ranks}
    why = ""
    try:
        home.parent.mkdir(exist_ok=True)
        set_up(deed, stock, home, log)
        lay = decoy_hash(home)
        wanted, misses = draw.randint(1, most), 0
        while len(kills) < wanted and misses < 5:
            found = strike(deed, stock, home, log, draw, seconds)
            if found is not None:
                kills.append(found)
                forked(lambda: deed.check_killed(home, whole), log, f"after kill {len(kills)}")
            elif kills:  # it has come to its end
                break
            else:
                misses += 1
                seconds *= 0.7
                set_up(deed, stock, home, log)
                lay = decoy_hash(home)
        finish(deed, stock, home, log)
        if drafts(home):  # a later call sweeps them, when they are old enough to be nobody's
            for path in drafts(home):
                os.utime(path, (0, 0), follow_symlinks=False)
            finish(deed, stock, home, log)
        if left := {path for path in drafts(home) if not is_bare(Path(path)) and not is_bare(Path(path).parent)}:
            raise Wrong(f"drafts are left: {sorted(left)}")
        # A kill while what was replaced is being removed leaves the rest; the next call names it and removes nothing.
        found = {name for name in names(home) if not name.startswith("out.old-")}
        if found != names(whole):
            raise Wrong(f"there are other names than without kills: {sorted(found ^ names(whole))}")
        if decoy_hash(home) != lay:
            raise Wrong("what lay beside it was touched")
        forked(lambda: deed.check_done(home, whole), log, "at the end")
        shutil.rmtree(home)
        log.unlink(missing_ok=True)
    except Wrong as wrong:
        why = str(wrong)
    return told | {"kills": kills, "ok": not why, "why": why}


def spread(count: int, jobs: int, do: Callable[[int], None]) -> None:
    """Numbers below `count`, shared out to so many processes."""
    pids = []
    for job in range(jobs):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                end_with_parent()
                adopt_orphans()
                for number in range(job, count, jobs):
                    do(number)
                code = 0
            except Wrong as wrong:
                print(wrong, file=sys.stderr, flush=True)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(codes):
        raise SystemExit("what the tries are compared with could not be made, or a worker has failed; see above")


# ---------------------------------------------------------------- results


def read(out: Path, seed: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [line for line in lines if line.get("seed") == seed]


def add(out: Path, line: dict[str, Any]) -> None:
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(handle, json.dumps(line).encode() + b"\n")
    os.close(handle)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Kills by verb and layout."""
    rows = ["| verb | layout | calls | kills | within a write | went wrong |", "|---|---|---|---|---|---|"]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: line["index"]):
        cells.setdefault((line["verb"], line["layout"]), []).append(line)
    order = {(deed.verb, deed.layout): place for place, deed in enumerate(DEEDS)}
    for key in sorted(cells, key=lambda key: order.get(key, len(order))):
        rows.append(f"| {key[0]} | {key[1]} | {_counts(cells[key])} |")
    return "\n".join([*rows, f"| all |  | {_counts(lines)} |"])


def _counts(lines: Sequence[dict[str, Any]]) -> str:
    kills = [kill for line in lines for kill in line["kills"]]
    wrong = sum(not line["ok"] for line in lines)
    return f"{len(lines)} | {len(kills)} | {sum(kill['drafts'] > 0 for kill in kills)} | {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--most", type=int, default=4, help="kills of a try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="tries at a time")
    parser.add_argument("--only", nargs="+", default=[""], help="deeds whose verb/layout has one of these in it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/kills.jsonl")
    parser.add_argument("--page", type=Path, help="a Markdown page whose table is written anew")
    parser.add_argument("--list", action="store_true", help="names of the deeds")
    arguments = parser.parse_args()
    deeds = [deed for deed in DEEDS if any(part in deed.name for part in arguments.only)]
    if arguments.list:
        print(*(deed.name for deed in deeds), sep="\n")
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    import_all()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        print(f"note: importing has started {threads - 1} threads, which forks do not have", file=sys.stderr)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="vitrail-kills-"))
    try:
        lines = run(deeds, arguments, work)
    finally:
        if os.environ.get("KEEP") is None:
            shutil.rmtree(work, ignore_errors=True)
    text = table(lines)
    print(text)
    if arguments.page:
        page = arguments.page.read_text()
        head, _, rest = page.partition(BEGIN)
        arguments.page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    wrong = [line for line in lines if not line["ok"]]
    for line in wrong:
        print(f"\n{line['index']} {line['verb']}/{line['layout']}: {line['why']}", file=sys.stderr)
    if wrong:
        raise SystemExit(1)


def run(deeds: Sequence[Deed], arguments: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Tries until there were enough kills; in rounds, since how many kills a try has is known at its end."""
    out, seed, jobs = arguments.out, arguments.seed, arguments.jobs
    (work / "stock").mkdir()
    os.environ["VITRAIL_CACHE"] = str(work / "cache")
    forked(lambda: make_stock(work / "stock", {deed.needs for deed in deeds}), work / "stock.log", "the stock")
    spread(len(deeds), jobs, lambda number: make_whole(deeds[number], work))
    if not out.exists():
        from vitrail.launch.machine import environment

        add(out, {key: value for key, value in environment().items() if key not in ("host", "command")})

    def do(indices: Sequence[int]) -> Callable[[int], None]:
        def one(number: int) -> None:
            found = attempt(indices[number], seed, arguments.most, deeds, work)
            add(out, found)
            state = "ok" if found["ok"] else "WRONG"
            print(
                f"{found['index']} {found['verb']}/{found['layout']}: {len(found['kills'])} kills, {state}", flush=True
            )

        return one

    while True:
        lines = read(out, seed)
        missing = arguments.kills - sum(len(line["kills"]) for line in lines)
        if missing <= 0:
            return lines
        done = {line["index"] for line in lines}
        number = max(1, round(2 * missing / (1 + arguments.most)))
        indices = [index for index in range(len(done) + number) if index not in done][:number]
        spread(len(indices), jobs, do(indices))


if __name__ == "__main__":
    main()
