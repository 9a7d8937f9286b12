"""The verbs of the command line: arguments in, one call, results out. Nothing heavy is imported before it is needed.

Results go to standard output, so that they can be piped; progress, notes and errors go to standard error.
Exit codes: 0 done, 1 failed after the first step, 2 wrong input or environment, 75 stopped and ready to be continued.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import vitrail
from vitrail.cli import data, export, features, new, plan, predict, tools, train, view
from vitrail.cli import words as streams
from vitrail.cli.options import COMPLETE, Verbs
from vitrail.cli.words import coloured, tell
from vitrail.credentials import clash, hide_in
from vitrail.errors import RunFailed, UserError, is_out_of_memory


class Group(TyperGroup):
    """The verbs; what they raise becomes a sentence and an exit code, and a traceback is left for bugs alone."""

    def get_help(self, ctx: Any) -> str:
        return coloured(super().get_help(ctx))

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where a pipe that was closed can still be handled
            return result
        except (typer.Exit, typer.Abort):  # which are RuntimeErrors
            raise
        except UserError as error:
            tell(str(error))
            raise typer.Exit(1 if isinstance(error, RunFailed) else 2) from error
        except ModuleNotFoundError as error:
            tell_of_plugin(error)
            if not error.name or error.name.partition(".")[0] == "vitrail":
                raise
            from vitrail.recipe.kinds import remedy

            tell(f"{error.name} is not installed; {remedy(error.name)}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(streams.INTERRUPTED) from error
        except (MemoryError, RuntimeError) as error:  # what devices and libraries raise is a RuntimeError
            if not is_out_of_memory(error):
                tell_of_plugin(error)
                raise
            tell_out_of_memory(error)
            raise typer.Exit(1) from error
        except BrokenPipeError as error:
            streams.send_nowhere(sys.stdout)
            raise typer.Exit(1) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                tell_of_plugin(error)
                raise
            tell(f"{str(error.filename)[:40]!r}...: no disk takes a path that long; give a shorter one")
            raise typer.Exit(2) from error
        except Exception as error:
            tell_of_plugin(error)
            raise


def tell_of_plugin(error: Exception) -> None:
    """End with a sentence where an error arose in a plugin, and return where it did not."""
    plugins = sys.modules.get("vitrail.recipe.plugins")  # or none was loaded
    found = error if plugins is None else plugins.told(error)
    if found is not error:
        tell(str(found))
        raise typer.Exit(2) from error  # one that ends a training after its first step has become a RunFailed


def tell_out_of_memory(error: BaseException) -> None:
    from vitrail.launch.world import find_world
    from vitrail.training.failures import summary

    world = find_world()
    tell(
        f"{f'rank {world.rank}: ' if world.size > 1 else ''}memory ran out ({summary(error)[:300]}); make "
        "data.micro_batch, data.crop or the model smaller, set parallel.recompute=full, or let `vitrail tune RECIPE` "
        "find what fits; docs/memory.md says what each saves"
    )


_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,  # plain help: three times as fast, and its examples can be copied
    "pretty_exceptions_enable": False,
    "add_completion": False,  # its options write into the files of a shell; `vitrail completion` prints
}
app = Verbs(cls=Group, **_SETTINGS)
of_data = Verbs(**_SETTINGS)
for group in (new, train, predict, view, features, export, tools, plan):
    group.add(app)
data.add(of_data)
app.add_typer(of_data, name="data", help="Make a volume to try things on, or look at your own.")


def console() -> None:
    """Run the process."""
    streams.settle()
    try:
        main()
    except SystemExit as ended:
        streams.end(ended.code)
    finally:
        streams.leave()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb, and raise SystemExit at its end."""
    given = sys.argv[1:] if arguments is None else arguments
    if (why := clash(given)) is not None:
        tell(why)
        raise SystemExit(2)
    if COMPLETE in os.environ:
        from typer.completion import completion_init

        completion_init()
    words = [hide_in(word) for word in given]
    if arguments is None:
        sys.argv[1:] = words
    app(args=words, prog_name="vitrail")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"vitrail {vitrail.__version__}")
        raise typer.Exit


@app.callback()
def vitrail_(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train vision transformers on scientific images and volumes.

    \b
    vitrail data generate data/em.zarr            make a volume to try things on
    vitrail new data/em.zarr --task segment       write a first recipe for data
    vitrail train configs/demo/mae3d.yaml         train; prints the path of a report
    vitrail VERB --help                           what a verb does, with an example

    Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 failed after the first
    step, 2 wrong input or environment, 75 stopped by a signal or the time limit and ready to be continued.
    """
