"""What verbs share: their common arguments, how words are read, and how results, notes and errors are told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrail.credentials import strip
from vitrail.errors import UserError, printable

FIRST_SPEAKS = 30  # seconds in which the first rank should meet the trouble of another: starts differ under load


def _trust(context: typer.Context, given: bool) -> bool:
    """Let data be opened as `--trust` says, as long as the verb lasts."""
    from vitrail.foreign import trusted

    context.with_resource(trusted(given))
    return given


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe; repeatable.", show_default=False)
]
Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="MODULE", help="Import a module that adds kinds; repeatable.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        help="Let the codec run code that comes with its files, and data files read what they name anywhere.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


def load_plugins(modules: list[str] | None) -> None:
    from vitrail.recipe.kinds import load_plugin

    for module in modules or ():
        load_plugin(module)


def refuse_options(given: dict[str, Any], why: str, of: str) -> None:
    """Options that would have no effect."""
    for option, value in given.items():
        if value not in (None, []):
            raise UserError(f"{option}: {why}, and this is for {of}; leave it out")


def read_sizes(text: str) -> tuple[int, int, int]:
    """Three numbers with commas; one number stands for a cube."""
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


def is_chief() -> bool:
    """Whether this process may print: alone, or the first of several."""
    from vitrail.launch.world import is_chief

    return is_chief()


def tell(message: str) -> None:
    """An error on standard error, a line for each problem; said once, unless it is about one rank."""
    from vitrail.training.failures import tell_launcher, was_said

    if was_said(message):
        return
    shown = message
    if not is_chief() and not message.startswith("rank "):
        _let_the_first_speak()
        shown = _signed(message)
    for line in shown.splitlines():
        note(f"error: {line}")
    tell_launcher(message)  # last: other ranks take it as a sign that all was said


def _let_the_first_speak() -> None:
    """Where the first rank has the same trouble it says so; a launcher would end it if this one were quicker.

    torchrun's ranks see in its folder of this attempt when their first has spoken; elsewhere a moment must do.
    """
    mine = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    first = mine.parent.parent / "0" / mine.name
    told = first != mine and mine.parent.name.isdigit()
    end = time.monotonic() + (FIRST_SPEAKS if told else 3)
    while time.monotonic() < end and not (told and first.exists()):
        time.sleep(0.1)


def _signed(message: str) -> str:
    """The message of a rank that is not the first; one of each host is enough."""
    from vitrail.launch.world import find_world

    try:
        world = find_world()
    except UserError:  # what launchers say is the same on all ranks
        return ""
    return "" if world.local_rank else f"rank {world.rank}: {message}"


def note(line: str) -> None:
    print(printable(strip(line)), file=sys.stderr, flush=True)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """A table with a column for each key."""
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
            return ", ".join(map(show, value)) or "none"
        return plain(value, 6) if isinstance(value, float) else "none" if value is None else str(value)

    def walk(tree: dict[str, Any], indent: str) -> None:
        for name, value in tree.items():
            if name == "histogram":  # for machines
                continue
            rows = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
            shown = "" if rows or isinstance(value, dict) else f" {show(value)}"
            print(printable(f"{indent}{name}:{shown}"))
            if isinstance(value, dict):
                walk(value, indent + "  ")
            for row in rows or ():
                print(printable(f"{indent}  {show(row)}"))

    walk(tree, "")
