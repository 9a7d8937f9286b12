"""Helpers of all verbs: common arguments, how words are read, and how results, notes and errors are told.

Standard output and error that may go away at any time: a closed pipe or terminal ends no training.

- what goes to standard error is lost from then on, and nothing else happens
- a result that nobody reads any more ends a verb quietly; a training ends with its own code
- a crash in compiled code tells where it was
- descriptors that are closed at the start are filled, so that no file of a run gets the number of standard error
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from vitrail.credentials import strip
from vitrail.errors import UserError, printable, some

INTERRUPTED = 130  # by the keyboard, twice in a training
MOST_LINES, MOST_BLOCKS = 48, 8  # of a table of values, and of one of tables, that are printed for people
FIRST_SPEAKS = 30  # seconds in which the first rank should meet the trouble of another: starts differ under load


def refuse_options(given: dict[str, Any], why: str, of: str) -> None:
    """Refuse options that would have no effect."""
    for option, value in given.items():
        if value not in (None, []):
            raise UserError(f"{option}: {why}, and this is for {of}; leave it out")


def read_sizes(text: str) -> tuple[int, int, int]:
    """Read three numbers with commas; one number stands for a cube."""
    words = text.split(",")
    words = words * 3 if len(words) == 1 else words
    if len(words) != 3 or not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--shape {text!r}: expected one whole number or three with commas, such as 128,128,192")
    z, y, x = map(int, words)
    return z, y, x


def read_pair(text: str, option: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{option} {text!r}: expected two numbers with a comma, such as 0.2,0.8") from None
    return first, second


def read_numbers(text: str, option: str) -> float | list[float]:
    """Return one number, or a list of several with commas."""
    try:
        first, *others = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{option} {text!r}: expected a number, or several with commas, such as 1,2,4") from None
    return [first, *others] if others else first


def is_chief() -> bool:
    """Return whether this process may print: alone, or the first of several."""
    from vitrail.launch.world import is_chief

    return is_chief()


def tell(message: str) -> None:
    """Print an error on standard error, a line for each problem; once, unless it is about one rank."""
    from vitrail.training.failures import tell_launcher, was_said

    if was_said(message):
        return
    shown = message
    if not is_chief() and not message.startswith("rank "):
        _let_the_first_speak()
        shown = _signed(message)
    for line in shown.splitlines():
        note(line, before="error: ")
    tell_launcher(message)  # last: other ranks take it as a sign that all was said


def _let_the_first_speak() -> None:
    """Wait for the first rank, which says the same; a launcher would end it if this one were quicker.

    torchrun's ranks see in its folder of this attempt when their first has spoken; elsewhere a moment must do.
    """
    mine = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    first = mine.parent.parent / "0" / mine.name
    told = first != mine and mine.parent.name.isdigit()
    end = time.monotonic() + (FIRST_SPEAKS if told else 3)
    while time.monotonic() < end and not (told and first.exists()):
        time.sleep(0.1)


def _signed(message: str) -> str:
    """Return the message with the number of its rank; one of each host is enough."""
    from vitrail.launch.world import find_world

    try:
        world = find_world()
    except UserError:  # what launchers say is the same on all ranks
        return ""
    return "" if world.local_rank else f"rank {world.rank}: {message}"


def note(line: str, before: str = "") -> None:
    """Print a line on standard error; what stands `before` it is red on a terminal."""
    shown = f"\x1b[1;31m{before}\x1b[0m" if before and is_colourful(sys.stderr) else before
    print(f"{shown}{printable(strip(line))}", file=sys.stderr, flush=True)


def is_colourful(stream: Any) -> bool:
    """Tell whether a stream is a terminal that shows colours, and nobody has asked for none (NO_COLOR)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def coloured(text: str) -> str:
    """Return the help of a verb with bold headings and coloured words to type, where a terminal shows it."""
    if not is_colourful(sys.stdout):
        return text
    text = re.sub(r"^(Usage:|\w+:$)", "\x1b[1m\\1\x1b[0m", text, flags=re.MULTILINE)
    return re.sub(r"^(  )(-\S.*?|[a-z\[]\S*)(?=  |$)", "\\1\x1b[36m\\2\x1b[0m", text, flags=re.MULTILINE)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print a table with a column for each key."""
    import json

    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from vitrail.report.units import compact, count

    show = {"parameters": count, "flops": compact}
    cells = [[printable(show.get(name, str)(value)) for name, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(list(rows[0]), *cells, strict=True)]
    for line in [list(rows[0]), *cells]:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def print_tree(tree: dict[str, Any], as_json: bool) -> None:
    """Print a tree a line a value; very long lists and tables of it shortened, in JSON whole."""
    from vitrail.report.units import plain

    if as_json:
        import json

        from vitrail.report.facts import strict

        print(json.dumps(strict(tree), indent=2, allow_nan=False))
        return

    def show(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{name} {show(inner)}" for name, inner in value.items())
        if isinstance(value, list):
            return some(map(show, value)) or "none"
        return plain(value, 6) if isinstance(value, float) else "none" if value is None else str(value)

    def walk(tree: dict[str, Any], indent: str) -> None:
        blocks = any(isinstance(value, dict) for value in tree.values())
        most = len(tree) if not indent else MOST_BLOCKS if blocks else MOST_LINES
        for name, value in list(tree.items())[:most]:
            if name == "histogram":  # for machines
                continue
            rows = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
            shown = "" if rows or isinstance(value, dict) else f" {show(value)}"
            print(printable(f"{indent}{name}:{shown}"))
            if isinstance(value, dict):
                walk(value, indent + "  ")
            for row in (rows or ())[:MOST_LINES]:
                print(printable(f"{indent}  {show(row)}"))
            tell_rest(indent + "  ", len(rows or ()) - MOST_LINES)
        tell_rest(indent, len(tree) - most)

    def tell_rest(indent: str, left: int) -> None:
        if left > 0:
            print(f"{indent}... and {left:,} more, which --json lists")

    walk(tree, "")


def print_found(found: dict[str, Any], line: Any, as_json: bool) -> None:
    """Print one line, or everything that was found as JSON."""
    if as_json:
        print_tree(found, as_json)
    else:
        print(line)


class Lasting:
    """A stream whose other end may be gone."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            send_nowhere(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            send_nowhere(self._stream)


def settle() -> None:
    """Make standard streams safe to write to, at the start of the process."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is taken, which is this one
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    sys.stderr = Lasting(sys.stderr)
    faulthandler.enable(2)


def leave() -> None:
    """Flush standard streams: Python would complain at its end, and end with another code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            send_nowhere(stream)
        except ValueError:  # closed, which flushed it
            pass


def end(code: int | str | None) -> NoReturn:
    """End this process in order, as sys.exit(code) at the end of a program does, but for the interpreter's own end.

    There a thread of gloo that still holds a tensor, or one of a reader or kernel that still runs, may abort a process
    whose work is done.
    """
    if isinstance(code, str):
        note(code)
    if code != INTERRUPTED:  # whoever asked twice does not wait for threads
        for last in (threading._shutdown, atexit._run_exitfuncs, _flush_libraries):  # type: ignore[attr-defined]
            with suppress(KeyboardInterrupt):  # of what is waited for there, and the work is done
                last()
    leave()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _flush_libraries() -> None:
    """Write what compiled libraries, such as NCCL, have printed and still hold."""
    import ctypes

    ctypes.CDLL(None).fflush(None)


def send_nowhere(stream: Any) -> None:
    """Drop what is left in a stream, and all that comes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
