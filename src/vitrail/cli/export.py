"""`vitrail export`: the model of a run as files for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vitrail.cli.options import Json, Kept, Plugins, Run, Step, check_run, load_plugins
from vitrail.cli.words import note, print_found


def add(app: typer.Typer) -> None:
    app.command(
        short_help="Write the model of a run for others: one file of weights, timm, Hugging Face, MONAI, ONNX."
    )(export)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="OUT", help="A new folder; a file .pt2 for torch, .onnx for onnx.")],
    to: Annotated[
        Literal["vitrail", "timm", "huggingface", "monai", "torch", "onnx"], typer.Option(help="Who reads it.")
    ] = "vitrail",
    checkpoint: Step = None,
    weights: Kept = None,
    only: Annotated[Literal["encoder"] | None, typer.Option(help="Leave out the rest of the model.")] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write the model of a run as others read it, checked against the model, and print the path.

    \b
    vitrail export runs/em-unetr --out em-unetr                        then vitrail.load("em-unetr")
    vitrail export runs/digits-vit --out digits-timm --to timm --checkpoint best
    vitrail export runs/my-mae --out my-vit --to huggingface --only encoder
    vitrail export runs/em-unetr --out em-unetr.onnx --to onnx

    vitrail: weights and config, which open without the run. timm, huggingface and monai: their names and settings.
    torch (torch.export) and onnx: a program that takes values as they are read, of any number of samples. What a
    layout cannot say is refused by the recipe's key.
    """
    load_plugins(plugin)
    check_run(run)
    from vitrail.exports.export import export as run_export

    made = run_export(run, out=out, to=to, checkpoint=checkpoint, weights=weights, only=only)
    for line in made["notes"]:
        note(f"note: {line}")
    note(f"largest difference from the model's outputs: {made['difference']:.3g}; open it with {made['opens']}")
    print_found(made, made["out"], as_json)
