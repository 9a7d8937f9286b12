"""Arguments and options that several verbs have, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


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
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Given = Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder.")]
ToContinue = Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder to continue.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


def _read_step(word: str) -> int | str:
    """Return a step as a number, and a word as it is."""
    return int(word) if word.isdecimal() else word


Step = Annotated[
    Any,
    typer.Option(
        metavar="STEP",
        parser=_read_step,
        help="best, last, or the step of a checkpoint; the newest good one if not given.",
    ),
]
Kept = Annotated[
    Literal["ema", "raw"] | None, typer.Option(help="Averaged or raw weights; averaged where there are any.")
]

# Of jobs.
MachineName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_FILE", help="Of a job: generic (if not given), dgx, frontier, gh200, or a YAML file."
    ),
]
TimeLimit = Annotated[str | None, typer.Option(metavar="CLOCK", help="Time limit of a job: 02:00:00, 90m or 1d12h.")]
Account = Annotated[str | None, typer.Option(help="Account that pays for a job.")]
Partition = Annotated[str | None, typer.Option(help="Partition of the cluster, for a job.")]
CpusPerRank = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Cores of a process of a job; else those of the machine.")
]


def load_plugins(modules: list[str] | None) -> None:
    from vitrail.recipe.kinds import load_plugin

    for module in modules or ():
        load_plugin(module)
