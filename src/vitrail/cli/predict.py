"""`vitrail predict`: what a trained run says of new data, whatever their size."""

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
    check_run,
    load_plugins,
)
from vitrail.cli.words import is_chief, note, print_found


def add(app: typer.Typer) -> None:
    app.command(short_help="Write what a run says of new data: classes, probabilities, features, reconstructions.")(
        predict
    )


def predict(
    run: Run,
    path: Input,
    out: Annotated[
        Path,
        typer.Option(
            metavar="OUT", help="Ends in .ome.zarr, .nii.gz, .tif, .npy, .png or .csv; else a folder, a file an item."
        ),
    ],
    write: Annotated[
        Literal["classes", "probabilities", "embeddings", "reconstructions", "affinities", "instances"] | None,
        typer.Option(help="What of it; what the run was trained for if not given."),
    ] = None,
    checkpoint: Step = None,
    weights: Kept = None,
    overlap: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of a tile, that the next one covers too; 0.5, or 0 for classes of images."),
    ] = None,
    blend: Annotated[
        Literal["gaussian", "constant", "flat"], typer.Option(help="Weights of tiles where they overlap; flat: alike.")
    ] = "gaussian",
    flips: Annotated[
        str | None, typer.Option(metavar="AXES", help="Also look at tiles flipped along x,y (or all), and average.")
    ] = None,
    planes: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="2-D models on volumes: slices across z (if not given), or z,y,x averaged."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "uint8"] | None,
        typer.Option(help="Of probabilities, affinities and embeddings; float32. In uint8 1 becomes 255."),
    ] = None,
    batch: AtOnce = None,
    memory: Annotated[float, typer.Option(metavar="GIB", help="For sums of tiles, on each device.")] = 2.0,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=4, help="Voxels of a chunk's side in OUT; 64, of images 512.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(metavar="SHARE", help="Instances: affinity above which two voxels are held together.")
    ] = 0.5,
    smallest: Annotated[
        int, typer.Option(metavar="N", min=1, help="Instances of fewer voxels become background, 0.")
    ] = 1,
    truth: Annotated[
        str | None, typer.Option(metavar="LABELS", help="Instances: also compare them with these labels of INPUT.")
    ] = None,
    compute: Compute = None,
    kind: SourceKind = None,
    settings: Settings = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Also draw the middle of the first item, read and written."),
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write what a run's checkpoint says of a volume, an image, or a folder of them, and print the path.

    \b
    vitrail predict runs/em-unetr data/em.zarr --out em-classes.ome.zarr
    vitrail predict runs/em-unetr scan.nii.gz --out scan-classes.nii.gz --flips all --checkpoint best
    vitrail predict runs/em-unetr data/em.zarr --out p.ome.zarr --write probabilities --dtype uint8 --picture p.png
    vitrail predict runs/digits-vit data/digits/valid --out digits.csv
    vitrail predict runs/em-cells data/em.zarr --out em-cells.ome.zarr --write instances --smallest 500
    torchrun --nproc-per-node 4 -m vitrail predict runs/em-unetr data/em.zarr --out em-classes.ome.zarr

    Tiles overlap and are blended; memory does not grow with the volume, and ranks share the rows of chunks that are
    written. OUT appears when it is complete, with the voxel size and the place of the input. The same call goes on
    where it was killed, and writes the same bits on any number of ranks.
    """
    load_plugins(plugin)
    check_run(run)
    check_input(path, kind)
    from vitrail.infer.predict import predict as run_prediction

    made = run_prediction(
        run,
        path,
        out=out,
        write=write,
        checkpoint=checkpoint,
        weights=weights,
        overlap=overlap,
        blend="constant" if blend == "flat" else blend,
        flips=flips,
        planes=planes,
        dtype=dtype,
        batch=batch,
        memory=memory,
        chunk=chunk,
        threshold=threshold,
        smallest=smallest,
        truth=truth,
        compute=compute,
        kind=kind,
        settings=settings or (),
        picture=picture,
        trust=trust,
        quiet=quiet,
    )
    if not is_chief():
        return
    for line in made["notes"]:
        note(f"note: {line}")
    for name, score in made.get("scores", {}).items():
        note(f"{name} {score:.4f}")
    print_found(made, made["out"], as_json)
