"""`vitrail new`: a first recipe for somebody's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vitrail.cli.options import Json, Plugins, Settings, SourceKind, Trust, check_input, load_plugins
from vitrail.cli.words import note, print_found


def add(app: typer.Typer) -> None:
    app.command(short_help="Write a first recipe for your data.")(new)


def new(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, folder or URL of data.", show_default=False)],
    task: Annotated[
        Literal["segment", "classify", "pretrain", "generate"],
        typer.Option(help="What to learn: classes of voxels, of images, the look of the data, or to draw samples."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the recipe goes.")] = Path(
        "recipe.yaml"
    ),
    kind: SourceKind = None,
    settings: Settings = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write a recipe that trains on your data as it is: complete, with comments, and checked before it is written.

    \b
    vitrail new data/em.zarr --task segment
    vitrail new images --task classify --out classify.yaml
    vitrail new scan.h5 --task pretrain --set key=raw --set labels=seg
    vitrail new volume.npy --task generate --set axes=nyxc --json

    The data are looked at as by `vitrail data inspect`. Patch, crop, batch and the model's size suit them and this
    machine, and the number of steps a first result in minutes. A part is held out, which the recipe names. What lies
    at FILE is never replaced. The path of the recipe is printed.
    """
    load_plugins(plugin)
    from vitrail.data.look.found import pair_of_folders

    pair = pair_of_folders(path)
    check_input(pair[0] if pair else path, kind)
    from vitrail.data.look.inspect import read_settings
    from vitrail.disk import write_output
    from vitrail.training.new import check_target, new_recipe

    check_target(out)  # before the work
    made = new_recipe(path, task, kind=kind, settings=read_settings(settings or ()), out=out)
    check_target(out)
    write_output(out, made["text"].encode())
    if not as_json:
        for told in made["notes"]:
            note(f"note: {told}")
        note(f"held out: {made['held_out']}")
    print_found({"recipe": str(out), **made}, out, as_json)
