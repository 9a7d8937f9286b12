"""The verbs of frozen features: `vitrail embed` writes them to a file, `vitrail probe` asks what they know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vitrail.cli.options import (
    AtOnce,
    Compute,
    Input,
    Json,
    Kept,
    Plugins,
    Quiet,
    Run,
    Settings,
    SourceKind,
    Step,
    Trust,
    check_input,
    check_recipe,
    check_run,
    load_plugins,
)
from vitrail.cli.words import is_chief, note, print_found, print_rows, print_tree


def add(app: typer.Typer) -> None:
    app.command(short_help="Write features of new data: a row for each item, crop or token.")(embed)
    app.command(short_help="Measure what frozen features know of classes: kNN, linear and attentive probes.")(probe)


def embed(
    run: Run,
    path: Input,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Ends in .safetensors or .zarr.")],
    per: Annotated[
        Literal["item", "crop", "token"], typer.Option(help="What a row is of: an image or volume, a crop, a patch.")
    ] = "item",
    checkpoint: Step = None,
    weights: Kept = None,
    overlap: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of a crop, that the next one covers too; 0.")
    ] = None,
    planes: Annotated[
        str | None, typer.Option(metavar="AXES", help="2-D models on volumes: slices across z (if not given), y or x.")
    ] = None,
    dtype: Annotated[Literal["float32", "float16"] | None, typer.Option(help="Of features; float32.")] = None,
    batch: AtOnce = None,
    memory: Annotated[float, typer.Option(metavar="GIB", help="For features that overlap, on the device.")] = 2.0,
    compute: Compute = None,
    kind: SourceKind = None,
    settings: Settings = None,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write frozen features of a run's encoder, with coordinates, and print the path.

    \b
    vitrail embed runs/digits-vit data/digits/valid --out digits.safetensors
    vitrail embed runs/demo-mae3d data/em.zarr --out crops.zarr --per crop --overlap 0.5
    vitrail embed runs/demo-mae3d data/em.zarr --out tokens.safetensors --per token --dtype float16

    Columns: features, the number of the item, and its place in voxels and in the item's unit. Names of items and axes
    are in the file's metadata (vitrail). Features of tokens as a volume are what `vitrail predict` gives with --write
    embeddings.
    """
    load_plugins(plugin)
    check_run(run)
    check_input(path, kind)
    from vitrail.infer.embed import embed as run_embedding

    made = run_embedding(
        run,
        path,
        out=out,
        per=per,
        checkpoint=checkpoint,
        weights=weights,
        overlap=overlap,
        planes=planes,
        dtype=dtype,
        batch=batch,
        memory=memory,
        compute=compute,
        kind=kind,
        settings=settings or (),
        trust=trust,
        quiet=quiet,
    )
    if is_chief():
        for line in made["notes"]:
            note(f"note: {line}")
        print_found(made, made["out"], as_json)


def probe(
    run: Run,
    data: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="A recipe or run whose data are taken; else the run's own.")
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="ENTRY", help="A path, or {path: ..., labels: ...}, instead of data.train; repeatable."),
    ] = None,
    valid: Annotated[
        list[str] | None, typer.Option(metavar="ENTRY", help="The same instead of data.valid; repeatable.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAME", help="`labels` of every entry: where classes of voxels are.")
    ] = None,
    checkpoint: Step = None,
    weights: Kept = None,
    neighbours: Annotated[int, typer.Option(metavar="K", min=1, help="That vote.")] = 20,
    number: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Crops or items of each part; else what memory holds.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Of the attentive probe.")] = 300,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Which crops are taken, and of the probes.")] = 0,
    memory: Annotated[float, typer.Option(metavar="GIB", help="For the features of both parts.")] = 2.0,
    batch: AtOnce = None,
    compute: Compute = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train small probes on frozen features of labelled data, and score them on held-out data.

    \b
    vitrail probe runs/digits-vit
    vitrail probe runs/demo-mae3d --labels structures
    vitrail probe runs/demo-mae3d --data configs/demo/unetr3d.yaml --checkpoint best --neighbours 10

    Classes of items are scored by accuracy, those of voxels by Dice: by nearest neighbours, a linear layer, and
    attention over the tokens. Features are kept in RUN/probe, so that a second call computes none; scores and a picture
    of the features' principal components go there, too, and to the page of the run.
    """
    load_plugins(plugin)
    if not is_chief():
        return
    check_run(run)
    if data is not None:
        check_recipe(data)
    from vitrail.infer.probe import probe as run_probe
    from vitrail.infer.probe import table

    found = run_probe(
        run,
        data=data,
        train=train or (),
        valid=valid or (),
        labels=labels,
        checkpoint=checkpoint,
        weights=weights,
        neighbours=neighbours,
        number=number,
        steps=steps,
        seed=seed,
        memory=memory,
        batch=batch,
        compute=compute,
        device=device,
        trust=trust,
        quiet=quiet or as_json,
    )
    if as_json:
        print_tree(found, as_json)
        return
    print_rows(table(found), as_json)
    for line in found["notes"]:
        note(f"note: {line}")
