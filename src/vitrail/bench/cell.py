"""One cell in processes of its own, so that running out of memory, crashes and hangs touch no other.

`python -m vitrail.bench.cell ORDER` measures what the order (a small JSON file) says, alone or on each rank that a
launcher has started. Rank 0 leaves the result in a file; a rank that fails leaves a note beside it, which says why.
How a cell ended is told by these files first, then by how the process ended, and never guessed from a text on the
screen: out of memory is what an allocator said, or signal 9, which the system sends when memory runs out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.report.files import write_whole

KILLED = "a process was ended by signal 9, which the system sends when the memory of the machine runs out"
NO_WORDS = "it ended with {code} and left no word; see {log}"
GRACE = 10.0  # seconds to end by itself
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")


# ---------------------------------------------------------------- inside


def main(arguments: Sequence[str]) -> int:
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if order["watched"]:
        from vitrail.bench.trial import end_with_parent

        end_with_parent()
    from vitrail.errors import RunFailed, UserError
    from vitrail.launch.world import find_world
    from vitrail.recipe.kinds import load_plugin
    from vitrail.training.failures import summary

    out, note = Path(order["out"]), None
    try:
        note = note_path(out, find_world().rank)
        note.unlink(missing_ok=True)
        for module in order["plugins"]:
            load_plugin(module)
        from vitrail.bench.measure import measure

        asked = {name: order[name] for name in ("mode", "windows", "steps", "warm_up", "name", "keys")}
        result = measure(order["recipe"], order["overrides"], **asked)
        if find_world().chief:
            write_whole(out, json.dumps(result, allow_nan=False).encode())
    except Exception as error:
        wrong = isinstance(error, UserError) and not isinstance(error, RunFailed)  # what the user asked for
        text: dict[str, Any] = {
            "status": "oom" if ran_out(error) else "failed",
            "error": summary(error)[:1000],
            "wrong_input": wrong,
        }
        with contextlib.suppress(Exception):  # a device that broke may not tell its name
            import torch

            from vitrail.bench.numbers import environment_of

            text["environment"] = environment_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        write_whole(note or note_path(out, 0), json.dumps(text).encode())
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, means that memory ran out."""
    from vitrail.bench.trial import is_out_of_memory

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_out_of_memory(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def note_path(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.rank{rank}.note")


# ---------------------------------------------------------------- outside


def run_cell(
    order: dict[str, Any],
    ranks: int,
    *,
    log: Path,
    limit: float,
    threads: int | None = None,
    starter: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Start the processes of a cell, wait for them at most so many seconds, and tell how it ended.

    Several ranks are started by torchrun, or by the words of a `starter` such as srun, which then decides how many.
    """
    out = Path(order["out"])
    forget(out)
    path = out.with_suffix(".order")
    write_whole(path, json.dumps(order).encode())
    words = [*(starter or ()), sys.executable, "-m"]
    if ranks > 1 and starter is None:
        words += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with open(log, "wb") as file:
        child = subprocess.Popen(
            [*words, "vitrail.bench.cell", str(path)],
            env=env,
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends: the children then end, too
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        try:
            child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(child)
    if late:
        found = {"status": "failed", "error": f"it took longer than the limit of {limit:.0f} s, and was ended"}
        result = read_result(out) or found
    else:
        result = judge(child.returncode, out, log)
    forget(out)
    path.unlink(missing_ok=True)
    if result["status"] == "ok":
        log.unlink(missing_ok=True)
    return result


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started; torchrun's ranks are groups of their own, but see the pipe close."""
    if child.stdin is not None:
        child.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE)
            return


def judge(code: int, out: Path, log: Path) -> dict[str, Any]:
    """How a cell ended whose process ended with this code."""
    if (result := read_result(out)) is not None:
        if code:
            result["notes"] = [*result.get("notes", []), f"its processes ended with {code} after it was measured"]
        return result
    notes = read_notes(out)
    for note in notes:
        if note["status"] == "oom":
            return note
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if code == -signal.SIGKILL or code == 128 + signal.SIGKILL or first_failure(text) == -signal.SIGKILL:
        return {"status": "oom", "error": KILLED}
    if notes:  # a rank that knows more than that another one has gone comes first
        return min(notes, key=lambda note: "ended because" in note["error"] or "lost touch" in note["error"])
    if code < 0:
        return {"status": "failed", "error": f"ended by signal {-code} ({signal.Signals(-code).name}); see {log}"}
    said = re.findall(r"^error: (.+)$", text, re.MULTILINE)
    return {"status": "failed", "error": said[-1] if said else NO_WORDS.format(code=code, log=log)}


def first_failure(text: str) -> int | None:
    """The exit code of the rank that failed first, as torchrun tells it."""
    found = re.search(r"Root Cause.*?exitcode\s*:\s*(-?[0-9]+)", text, re.DOTALL)
    return int(found[1]) if found else None


def read_result(out: Path) -> dict[str, Any] | None:
    try:
        return json.loads(out.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def read_notes(out: Path) -> list[dict[str, Any]]:
    """What ranks that failed have left, the first rank's first."""
    found = []
    for path in sorted(out.parent.glob("*.note")):
        if path.name.startswith(f"{out.stem}.rank"):
            with contextlib.suppress(ValueError, OSError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def forget(out: Path) -> None:
    """Remove what an attempt has left."""
    out.unlink(missing_ok=True)
    for path in out.parent.glob("*.note"):
        if path.name.startswith(f"{out.stem}.rank"):
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
