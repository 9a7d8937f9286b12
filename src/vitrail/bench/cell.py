"""One cell in processes of its own, so that running out of memory, crashes and hangs touch no other.

`python -m vitrail.bench.cell ORDER` measures what the order (a small JSON file) says, alone or on each rank that a
launcher has started. Rank 0 leaves the result in a file; a rank that fails leaves a note beside it, which says why.
How a cell ended is told by these files first, then by how the process ended, and never guessed from a text on the
screen: out of memory is what an allocator said, or signal 9 where the system tells that memory had run out.
A job's first rank says when it begins (`.started`): one that the scheduler ends is not taken for one that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.bench.child import Watch, alone_environment
from vitrail.disk import write_whole
from vitrail.errors import UserError
from vitrail.foreign import read_json

STARVED = "a process was ended by signal 9, and the memory of the machine had run out"
KILLED = "ended by signal 9: by the system for want of memory, or by someone"
NO_WORDS = "it ended with {code} and left no word"
GRACE = 10.0  # seconds to end by itself


# ---------------------------------------------------------------- inside


def main(arguments: Sequence[str]) -> int:
    order = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if order["watched"]:
        from vitrail.bench.trial import end_with_parent

        end_with_parent()
    from vitrail.errors import RunFailed, is_out_of_memory
    from vitrail.launch.world import find_world
    from vitrail.recipe.kinds import load_plugin
    from vitrail.training.failures import summary

    out, note = Path(order["out"]), None
    try:
        note = note_path(out, find_world().rank)
        disk.remove(note, inside=note.parent)
        if order.get("job") and find_world().chief:
            write_whole(started_path(out), json.dumps(who()).encode())
        for module in order["plugins"]:
            load_plugin(module)
        from vitrail.bench.measure import measure

        asked = {name: order[name] for name in ("mode", "windows", "steps", "warm_up", "name", "keys")}
        result = measure(order["recipe"], order["overrides"], **asked)
        if find_world().chief:
            write_whole(out, json.dumps(result, allow_nan=False).encode())
    except Exception as error:
        full = is_out_of_memory(error)
        asked_wrongly = isinstance(error, UserError) and not isinstance(error, RunFailed) and not full
        text: dict[str, Any] = {
            "status": "oom" if full else "failed",
            "error": summary(error)[:1000],
            "lost": is_lost(error),
            "wrong_input": asked_wrongly,
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


def is_lost(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, means that another rank has gone, which then knows more."""
    from vitrail.training.failures import is_lost_connection

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_lost_connection(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def note_path(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.rank{rank}.note")


def started_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.started")


def who() -> dict[str, str]:
    """Which job this process belongs to, or which process of which host it is."""
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
    job = next((os.environ[name] for name in names if os.environ.get(name)), None)
    told = f"job {job}" if job else f"process {os.getpid()} on {socket.gethostname()}"
    return {"who": told, "date": datetime.now(UTC).isoformat(timespec="seconds")}


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
    path = order_beside(out)
    write_whole(path, json.dumps(order).encode())
    words = [*(starter or ()), sys.executable, "-m"]
    if ranks > 1 and starter is None:
        words += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    env, watch = alone_environment(), Watch.begin()
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    write_whole(log, b"", durable=False)
    with disk.appending(log) as file:
        try:
            child = subprocess.Popen(
                [*words, "vitrail.bench.cell", str(path)],
                env=env,
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends: the children then end, too
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            if starter is None:
                raise
            raise UserError(f"--start-with: {words[0]!r} cannot be started ({error.strerror}); correct it") from None
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
        # What other words than torchrun's start may run elsewhere, where nothing of this is known.
        result = judge(child.returncode, out, log, starved=starter is None and watch.starved(ranks))
    forget(out)
    if result["status"] == "ok":
        disk.remove(log, inside=log.parent)
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


def judge(code: int, out: Path, log: Path, *, starved: bool = False) -> dict[str, Any]:
    """How a cell ended whose process ended with this code, and whether memory had run out on the machine."""
    if (result := read_result(out)) is not None:
        if code:
            result["notes"] = [*result.get("notes", []), f"its processes ended with {code} after it was measured"]
        return result
    note = best(read_notes(out))
    if note is not None and note["status"] == "oom":
        return note
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    killed = code == -signal.SIGKILL or code == 128 + signal.SIGKILL or first_failure(text) == -signal.SIGKILL
    if killed and starved:
        return {"status": "oom", "error": STARVED}
    if note is not None and not (killed and note.get("lost")):
        return note
    if killed:
        return {"status": "failed", "error": KILLED}
    if code < 0:
        return {"status": "failed", "error": f"ended by signal {-code} ({signal.Signals(-code).name})"}
    said = re.findall(r"^error: (.+)$", text, re.MULTILINE)
    return {"status": "failed", "error": said[-1] if said else NO_WORDS.format(code=code)}


def first_failure(text: str) -> int | None:
    """The exit code of the rank that failed first, as torchrun tells it."""
    found = re.search(r"Root Cause.*?exitcode\s*:\s*(-?[0-9]+)", text, re.DOTALL)
    return int(found[1]) if found else None


def best(notes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The note that tells most: of memory, else of a rank's own failure, else that another rank has gone."""
    return min(notes, key=lambda note: (note["status"] != "oom", bool(note.get("lost"))), default=None)


def read_started(out: Path) -> str | None:
    """Who began a cell, and when, if a job did and has not told how it went."""
    told = read_result(started_path(out))
    return None if told is None else f"{told.get('who')} began it at {told.get('date')}"


def read_result(out: Path) -> dict[str, Any] | None:
    try:
        found = read_json(out)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_notes(out: Path) -> list[dict[str, Any]]:
    """What ranks that failed have left, the first rank's first."""
    found = []
    for path in sorted(out.parent.glob("*.note")):
        if path.name.startswith(f"{out.stem}.rank"):
            found.append(read_result(path) or {})
    return [note for note in found if "status" in note]


def order_beside(out: Path) -> Path:
    """What the processes of a cell read that is measured here."""
    return out.with_suffix(".order")


def forget(out: Path) -> None:
    """Remove what an attempt has left."""
    notes = [path for path in out.parent.glob("*.note") if path.name.startswith(f"{out.stem}.rank")]
    for path in (out, order_beside(out), started_path(out), *notes):
        disk.remove(path, inside=out.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
