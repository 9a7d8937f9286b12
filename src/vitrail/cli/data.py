"""`vitrail data`: make a volume to try things on, look at data, measure how they load, and encode them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitrail.cli.options import (
    Given,
    Json,
    Overrides,
    Plugins,
    Quiet,
    Settings,
    SourceKind,
    Trust,
    check_recipe,
    load_plugins,
)
from vitrail.cli.words import is_chief, note, print_found, print_rows, print_tree, read_sizes
from vitrail.errors import UserError


def add(app: typer.Typer) -> None:
    app.command(short_help="Generate data to try things on.")(generate)
    app.command(short_help="Look at data before training on it.")(inspect)
    app.command(short_help="Draw what the model of a recipe will see.")(preview)
    app.command("bench", short_help="Measure how fast data load, and whether training waits for them.")(bench)
    app.command(short_help="Encode data to latents, to train on these.")(encode)
    app.command(short_help="Show how data are shared out over ranks.")(balance)


def generate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the data go, for example data/em.zarr.")],
    kind: Annotated[
        Literal["em", "slices", "digits"],
        typer.Option(help="A volume of tissue, a folder of slices of it, or the handwritten digits of scikit-learn."),
    ] = "em",
    shape: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Voxels along each axis; 128,128,192, of slices 30,256,256.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another seed grows other tissue.")] = 0,
    levels: Annotated[
        int, typer.Option(metavar="N", min=1, help="Resolution levels, each half the size of the one before.")
    ] = 3,
    ome_version: Annotated[Literal["0.4", "0.5"], typer.Option(help="Version of OME-Zarr.")] = "0.5",
    chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Voxels along each side of a chunk.")] = 64,
    cells: Annotated[bool, typer.Option("--cells", help="Also write which cell each voxel is of.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a volume at OUT that vitrail wrote.")] = False,
    as_json: Json = False,
) -> None:
    """Generate tissue that looks like volume electron microscopy, with labels, as OME-Zarr.

    \b
    vitrail data generate data/em.zarr
    vitrail data generate data/big.zarr --shape 256,512,512 --seed 1 --ome-version 0.4
    vitrail data generate data/cells.zarr --cells
    vitrail data generate tissue --kind slices
    vitrail data generate data/digits --kind digits

    The volume is written to OUT (8 nm voxels; membranes, mitochondria and vesicles under labels/structures), and its
    path is printed. With --cells, labels/cells numbers the neurites; membranes and glia are 0 there. The same shape and
    seed give the same voxels. Slices are TIFF files in images/, and labels of every sixth in labels/. Digits are an
    image folder, train/ and valid/ with a folder for each class; the other options are of volumes.
    """
    if kind == "digits":
        from vitrail.data.generate import write_digits

        if force:
            raise UserError("--force replaces volumes only; leave it out, and choose a path where nothing lies")
        written = write_digits(out)
        print_found({"path": str(written), "kind": kind}, written, as_json)
        return
    from vitrail.disk import check_free, told

    with told(out):
        check_free(out, force=force, tell=note)  # before the work
    shape = shape or ("30,256,256" if kind == "slices" else "128,128,192")
    sizes = read_sizes(shape)
    from vitrail.foreign import memory_bytes

    if math.prod(sizes) > memory_bytes():  # of image and labels, a byte each; more while they are made
        raise UserError(f"--shape {shape}: a volume so large does not fit into the memory here; make it smaller")
    from vitrail.data.generate import generate_em, write_ome_zarr, write_slices

    if kind == "slices":
        if force:
            raise UserError("--force replaces volumes only; leave it out, and choose a path where nothing lies")
        written = write_slices(out, sizes, seed)
        print_found({"path": str(written), "kind": kind, "shape": list(sizes), "seed": seed}, written, as_json)
        return
    volume = generate_em(sizes, seed, cells=cells)
    write_ome_zarr(out, volume, levels=levels, version=ome_version, chunk=chunk, name="em", force=force, tell=note)
    made = {
        "path": str(out),
        "shape": list(sizes),
        "seed": seed,
        "levels": levels,
        "version": ome_version,
        "chunk": chunk,
    }
    print_found(made, out, as_json)


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, folder or URL of data.")],
    kind: SourceKind = None,
    settings: Settings = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Also draw samples with a scale bar, labels and histograms.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Look at data before training on it: what it is, statistics of a few crops, what to beware of, what to write.

    \b
    vitrail data inspect data/em.zarr
    vitrail data inspect data/em.zarr --picture em.png --json
    vitrail data inspect scan.raw --kind numpy --set shape=[64,512,512] --set dtype=uint16

    The facts are printed, and last the `data` section of a recipe; the picture, if asked for, goes to OUT.png.
    """
    from vitrail.data.look.inspect import look, read_settings
    from vitrail.data.look.inspect import picture as draw
    from vitrail.report.figures import check_picture

    load_plugins(plugin)
    if picture is not None:
        check_picture(picture)
    source, facts = look(path, kind=kind, settings=read_settings(settings or ()))
    if picture is not None:
        facts["picture"] = str(draw(source, picture, facts=facts))
    if as_json:
        print_tree(facts, as_json)
        return
    warnings, recipe = facts.pop("warnings"), facts.pop("recipe")
    print_tree({name: value for name, value in facts.items() if value not in ([], {}, None)}, as_json)
    notes = [f"note: {warning}" for warning in warnings]
    print("\n".join(["", *notes, *[""] * bool(notes), "in a recipe:", recipe]))


def preview(
    recipe: Given,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Samples, one a row.")] = 4,
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where the picture goes.")] = Path("preview.png"),
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Draw what the model will see: windows of the files, augmented, cut into tokens, and masked, a row a sample.

    \b
    vitrail data preview configs/demo/mae3d.yaml
    vitrail data preview configs/demo/mae3d.yaml data.augment.orientations=false --samples 8 --out seen.png

    These are samples of the first steps of a training with that recipe, with the draws of its seed. No others are read,
    so bad data elsewhere are not found. The path of the picture is printed; of volumes it shows the middle planes.
    Nothing else is written.
    """
    load_plugins(plugin)
    check_recipe(recipe, overrides)
    from vitrail.training.diagnose import preview as draw

    facts = draw(recipe, out, samples=samples, overrides=overrides or ())
    if not as_json:
        note(f"data are normalised: {facts['normalised']}")
    print_found(facts, facts["picture"], as_json)


def bench(
    what: Annotated[str, typer.Argument(metavar="RECIPE_OR_PATH", help="A recipe, a run folder, or data.")],
    overrides: Overrides = None,
    mode: Annotated[
        Literal["real", "syn", "io"] | None, typer.Option(help="Which to measure; all if not given.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds of each measurement.")] = 5.0,
    workers: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="Reading threads; repeatable, to compare.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Measure training on real data (real), on one batch again and again (syn), and loading alone (io).

    \b
    vitrail data bench configs/demo/mae3d.yaml
    vitrail data bench configs/demo/mae3d.yaml data.reuse=8 --mode io --workers 1 --workers 2
    vitrail data bench data/em.zarr --seconds 10   loading alone

    Shown are samples and bytes a second, voxels decoded for each that is used, where the threads' time goes, and the
    most memory; and in one sentence what limits the training. Warm-up is left out. Nothing is written.
    """
    load_plugins(plugin)
    if what.endswith((".yaml", ".yml")):  # anything else may be data
        check_recipe(what, overrides)
    from vitrail.training.diagnose import bench as measure

    modes = [mode] if mode else ()
    found = measure(what, modes=modes, seconds=seconds, workers=workers or (), overrides=overrides or ())
    if not is_chief():
        return
    if as_json:
        print_tree(found, as_json)
        return
    for result in found["results"]:
        name = f"{result.pop('mode')} (workers {result.pop('workers')})"
        print_tree({name: result}, as_json)
    print(f"\n{found['summary']}")


def encode(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe with a codec, or the run of an autoencoder.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the latents go: DIR/train and DIR/valid.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "valid"] | None, typer.Option(help="Only these data; both if not given.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples encoded at once.")] = 32,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of a shard, which is written whole.")] = 1024,
    store: Annotated[Literal["safetensors", "zarr"], typer.Option(help="Format of the latents.")] = "safetensors",
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Encode the data of a recipe with its codec, so that a model can be trained on the latents.

    \b
    vitrail data encode runs/digits-autoencoder --out data/digits-latents
    vitrail data encode RECIPE --out data/latents --batch 64 --split train
    vitrail data encode RECIPE 'codec={kind: torchscript, hub: nvidia/Cosmos-Tokenizer-CI8x8}' --out DIR --trust
    torchrun --nproc-per-node 4 -m vitrail data encode RECIPE --out data/latents

    Every item comes once, in order and unaugmented; of items that are larger than data.crop, every tile. The folders
    hold the latents, the classes, exact statistics and what encoded them. Ranks share the work; after a kill, the same
    call goes on. The facts are printed.
    """
    load_plugins(plugin)
    check_recipe(recipe, overrides)
    from vitrail.infer.encode import encode as run_encoding

    made = run_encoding(
        recipe,
        out,
        split=split,
        batch=batch,
        rows=rows,
        store=store,
        trust=trust,
        overrides=overrides or (),
        quiet=quiet,
    )
    if is_chief():
        print_tree(made, as_json)


def balance(
    recipe: Given,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Data-parallel ranks; those of data.balance, or 1.", show_default=False),
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show how the training data of a recipe are shared out over ranks, and that no sample is lost or doubled.

    \b
    vitrail data balance configs/demo/mae3d.yaml --ranks 4
    vitrail data balance configs/demo/mae3d.yaml data.tiles={} --ranks 4 --json

    Two ways are compared: ranks that read one entry each (`data.balance`), and mixing by the global counter, which is
    what training does otherwise. An epoch is gone through for all ranks. Nothing is written.
    """
    load_plugins(plugin)
    check_recipe(recipe, overrides)
    from vitrail.data.order.proof import compare, rows
    from vitrail.recipe.load import find_recipe

    found = compare(find_recipe(recipe, overrides or ()), ranks)
    if as_json:
        print_tree(found, as_json)
        return
    print_rows(rows(found), as_json)
    print()
    print_tree({name: found[name] for name in ("by_rank", "by_counter")}, as_json)
