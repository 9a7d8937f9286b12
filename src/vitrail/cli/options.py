"""Arguments and options that several verbs have, each declared once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vitrail.cli.words import coloured
from vitrail.errors import UserError

COMPLETE = "_VITRAIL_COMPLETE"  # variable in which a shell asks for completions


class Verb(TyperCommand):
    """A verb, whose help has colours on a terminal."""

    def get_help(self, ctx: Any) -> str:
        return coloured(super().get_help(ctx))


class Verbs(typer.Typer):
    """A group of verbs; those that are added are of this file's class."""

    def command(self, *arguments: Any, **options: Any) -> Any:
        return super().command(*arguments, **{"cls": Verb} | options)


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    """List the changes to a recipe that a word on the command line may become."""
    from vitrail.recipe.early import complete
    from vitrail.recipe.load import read_tree

    tree: dict[str, Any] = {}
    with suppress(Exception):  # no recipe yet, or one that is not there
        given = Path(next(str(context.params[name]) for name in ("recipe", "run", "what") if context.params.get(name)))
        tree = read_tree(given / "recipe.yaml" if given.is_dir() else given, set())
    return complete(incomplete, tree)


def _trust(context: typer.Context, given: bool) -> bool:
    """Let data be opened as `--trust` says, as long as the verb lasts."""
    from vitrail.foreign import trusted

    context.with_resource(trusted(given))
    return given


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Changes to the recipe; repeatable.", show_default=False, autocompletion=_complete
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE_OR_FILE",
        help="Import code that adds kinds: my_lab.beamline, or beamline.py; repeatable.",
    ),
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

# Of data that a trained run looks at, and of how it does.
Input = Annotated[str, typer.Argument(metavar="INPUT", help="Data of any kind; labels are not needed.")]
SourceKind = Annotated[str | None, typer.Option(metavar="KIND", help="Kind of source; guessed if not given.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of the data's entry; repeatable.")
]
AtOnce = Annotated[int | None, typer.Option(metavar="N", min=1, help="Crops computed at once; else up to 16.")]
Compute = Annotated[
    Literal["fp32", "bf16"] | None, typer.Option(help="Type that it computes in; else that of the recipe.")
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


def load_plugins(given: list[str] | None) -> None:
    if given:
        from vitrail.recipe.plugins import load_plugin

        for plugin in given:
            load_plugin(plugin)


def check_recipe(given: Any, overrides: list[str] | None = None) -> None:
    """Refuse a recipe or a run that is not there or not as it should be, before a verb imports PyTorch."""
    from vitrail.recipe.load import find_recipe

    find_recipe(given, overrides or ())


def check_run(run: Path, overrides: list[str] | None = None) -> None:
    """Refuse what is no folder, and changes to the recipe of a run that cannot be, before a verb imports PyTorch."""
    from vitrail.contents import check_name

    check_name(run, "run")
    if not run.is_dir():
        what = "a file" if run.exists() else "not there"
        raise UserError(f"{run}: it is {what}; give the folder of a run, for example runs/<name>")
    if (run / "recipe.yaml").is_file():
        check_recipe(run, overrides)


def check_input(path: str, kind: str | None) -> None:
    """Refuse data that are not there, or of no kind that is known, before a verb imports PyTorch."""
    from vitrail.data.files.paths import is_url
    from vitrail.data.sources import guess_kind

    if kind is None and not is_url(path):
        guess_kind(path)
