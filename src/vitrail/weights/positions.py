"""Where the tokens of a file stand: the grid of its position table, and the tokens before the patches.

A table is so many rows, and does not say which grid they are of, nor whether the first are other tokens'. A config.json
beside it says so; else the model's own grid decides, or the only grid that the rows fit. More than one is refused.
"""

import math
import re
from functools import partial

import torch

from vitrail.layers.patches import per_axis
from vitrail.weights import pieces
from vitrail.weights.files import Weights
from vitrail.weights.pieces import Piece, Target, Translation, times

Grid = tuple[int, ...]
FIRST = ("cls_token", "registers")  # tokens that stand before the patches, by their names in the vocabulary


def place_positions(
    weights: Weights, found: dict[str, str], target: Target, out: Translation, *, adapter: str, silent: bool
) -> None:
    """Place position tables, class token and registers, by their names in the vocabulary; `silent`: it needs none."""
    table, skip, grid = found.get("pos_embed"), 0, None
    if table is not None and adapter == "ucf" and "patch_embed.norm_in.weight" in found:
        _numbers(weights, found, target, out)
        return
    if table is not None:
        if target.config.tokens.told == "number":
            out.problems.append("the file's positions are of places; set tokens.told: place")
        skip, grid = _find_grid(weights, found, target, out, adapter)
    _first_tokens(weights, found, skip, target, out)
    smooth = adapter != "hf" or "registers" in found
    if grid is not None and table is not None:
        _table(weights, table, grid, skip, "encoder", target, out, smooth=smooth)
    elif table is None and target.positions in ("sincos", "learned") and not silent:
        out.problems.append(f"the file holds no positions, but the model adds {target.positions} ones; set positions")
    decoder = found.get("decoder.pos_embed")
    if decoder is None or grid is None:
        return
    with_places = "decoder.pos_embed.table" in target.parameters
    if not with_places and not hasattr(getattr(target.model, "decoder", None), "mask_token"):
        out.ignored[decoder] = "the model has no such decoder"
        return
    _table(weights, decoder, grid, skip, "decoder", target, out, smooth=smooth)
    if skip and float(weights.read(decoder).reshape(-1, weights.shapes[decoder][-1])[:skip].abs().max()) > 1e-6:
        out.decoder.append("the decoder's class token has a position in the file, and none here")


def _numbers(weights: Weights, found: dict[str, str], target: Target, out: Translation) -> None:
    """Place tables with a row for each leaf of a tree, after one for the class token if there is one more than leaves.

    As UCF-VIT does it, they are interpolated along the sequence for trees of another length.
    """
    name, length = found["pos_embed"], target.config.tokens.length
    rows = math.prod(weights.shapes[name][:-1])
    skip = int("cls_token" in found and rows % (2**target.ndim - 1) != 1)
    for part, key in (("encoder", "pos_embed"), ("decoder", "decoder.pos_embed")):
        if key not in found:
            continue
        ours = f"{part}.pos_embed.table"
        if ours in target.parameters:
            make = partial(pieces.position_table, old=(rows - skip,), new=(length,), skip=skip)
            out.pieces[ours] = Piece((found[key],), make)
        else:
            out.ignored[found[key]] = "the model has no such table"
    _first_tokens(weights, found, skip, target, out)


def _find_grid(
    weights: Weights, found: dict[str, str], target: Target, out: Translation, adapter: str
) -> tuple[int, Grid | None]:
    """Return how many rows of the table are not patches', and the grid of the rest; say what cannot be known."""
    cls, registers = (found.get(name) for name in FIRST)
    skips: tuple[int, ...] = (int(cls is not None),)  # how many of its rows may be other tokens'
    if adapter == "monai":
        skips = (0,)
    elif adapter == "timm" and not re.fullmatch(r"(register|storage)_tokens", registers or ""):
        skips = (*skips, sum(_first_counts(weights, found)), 0)
    kernel = weights.shapes.get(found.get("patch_embed.proj.weight", ""), ())
    axes = len(kernel) - 2 if len(kernel) > 2 else target.ndim  # it tells, unless it is a linear layer
    shape = weights.shapes[found["pos_embed"]]
    rows = math.prod(shape[:-1])
    known = tuple(shape[1:-1]) if len(shape) == axes + 2 and axes > 1 else None  # a table that is an image
    known = known or _grid_by_settings(weights, kernel[2:])
    fits = [(skip, known) for skip in skips if known is not None and rows - skip == math.prod(known)]
    if fits:
        return fits[0]
    if known is not None and adapter == "hf":
        out.wrong.append(f"config.json says {times(known)} patches, but the file holds {rows} positions")
        return 0, None
    own = None if target.grid is None or len(target.grid) < axes else target.grid[-axes:]
    skip, grid, doubt = choose_grid(rows, skips, axes, own)
    if grid is None:
        equal = "are no square grid, with or without a class token" if axes == 2 else "are no grid of equal sides"
        out.wrong.append(f"its {rows} positions {equal}, nor one shaped as the model's")
    elif adapter == "timm" and cls is not None and registers is None and not skip and not doubt:
        # timm's published models with registers have no rows for any token before the patches.
        doubt = f"{times(grid)}, or another grid and a row for the class token"
    if doubt and own is not None and grid == own:
        out.notes.append(f"its {rows} positions may be {doubt}; the model's own grid was taken, {times(own)}")
    elif doubt:
        out.problems.append(
            f"its {rows} positions may be {doubt}, and nothing tells; put its config.json beside it, or give the model "
            "the shape that the file was made for"
        )
    return skip, grid


def choose_grid(rows: int, skips: tuple[int, ...], axes: int, own: Grid | None) -> tuple[int, Grid | None, str]:
    """Return how many rows are other tokens', the grid of the rest, and, where there are more readings, all of them.

    Readings are grids in the proportions of the model's own, and grids of equal sides. The own grid comes first.
    """
    readings: list[tuple[int, Grid]] = []
    for skip in dict.fromkeys(skips):
        for sides in (own, (1,) * axes):
            grid = None if sides is None else _in_proportion(rows - skip, sides)
            if grid is not None and (skip, grid) not in readings:
                readings.append((skip, grid))
    readings.sort(key=lambda reading: reading[1] != own)
    if not readings:
        return 0, None, ""
    after = [f"{times(grid)}" + (f" after {skip} of other tokens" if skip else "") for skip, grid in readings]
    return *readings[0], " or ".join(after) if len(readings) > 1 else ""


def _in_proportion(count: int, sides: Grid) -> Grid | None:
    """Return the grid of so many patches whose sides are in the proportions of these."""
    if count < 1:
        return None
    factor = (count / math.prod(sides)) ** (1 / len(sides))
    grid = tuple(round(side * factor) for side in sides)
    alike = all(g * sides[0] == grid[0] * side for g, side in zip(grid, sides, strict=True))
    return grid if alike and math.prod(grid) == count else None


def _grid_by_settings(weights: Weights, patch: tuple[int, ...]) -> Grid | None:
    """Return the grid that config.json tells: of Hugging Face's models, or of timm's."""
    settings = weights.settings or {}
    timm = settings.get("pretrained_cfg")
    try:
        if isinstance(timm, dict):
            size = tuple(timm["input_size"][1:])
        else:
            size, patch = (per_axis(settings[key], 2) for key in ("image_size", "patch_size"))
        return tuple(s // p for s, p in zip(size, patch, strict=True))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _first_counts(weights: Weights, found: dict[str, str]) -> tuple[int, int]:
    """Count the file's class tokens and registers."""
    names = (found.get(name) for name in FIRST)
    cls, registers = (0 if name is None else math.prod(weights.shapes[name][:-1]) for name in names)
    return cls, registers


def _first_tokens(weights: Weights, found: dict[str, str], skip: int, target: Target, out: Translation) -> None:
    """Place the tokens before the patches, to which the first `skip` rows of the table belong."""
    c, have = target.config, _first_counts(weights, found)
    names = [found[name] for name in FIRST if name in found]
    wanted = (int(c.cls_token), c.registers)
    if have != wanted:
        said = [f"{n} {what}" for n, what in zip(have, ("class token", "registers"), strict=True)]
        out.problems.append(
            f"the file has {' and '.join(said)}, the model {wanted[0]} and {wanted[1]}; "
            f"set cls_token: {'true' if have[0] else 'false'} and registers: {have[1]}"
        )
    elif names:
        own_row = "encoder.pos_embed.cls" in target.parameters  # the class token's position is a parameter of its own
        counts = tuple(count for count, name in zip(have, FIRST, strict=True) if name in found)
        table = [found["pos_embed"]] if skip else []
        make = partial(pieces.first_rows, counts=counts, added=0 if own_row and skip < 2 else skip)
        out.pieces["encoder.prefix_tokens"] = Piece((*names, *table), make)
        if own_row:
            row = partial(pieces.class_row, there=skip == 1)
            out.pieces["encoder.pos_embed.cls"] = Piece((*table, *names)[:1], row)


def _table(
    weights: Weights, name: str, grid: Grid, skip: int, part: str, target: Target, out: Translation, *, smooth: bool
) -> None:
    """Turn a table into a learned one; or, where positions are computed, look whether they are the same."""
    positions = target.positions
    ours = f"{part}.pos_embed.table"
    if positions == "learned" and ours in target.parameters:
        assert target.grid is not None
        make = partial(pieces.position_table, old=grid, new=target.grid, skip=skip, smooth=smooth)
        out.pieces[ours] = Piece((name,), make)
        return
    if positions == "sincos" and target.ndim == 2:
        rows = weights.read(name).float().reshape(-1, weights.shapes[name][-1])[skip:]
        if torch.allclose(rows, pieces.sincos_rows(grid, rows.shape[-1]), atol=1e-4):
            out.ignored[name] = "the same sin-cos positions are computed here"
            return
    out.ignored[name] = f"the model's positions are {positions}"
    (out.problems if part == "encoder" else out.decoder).append(
        f"{name}: the model's positions ({positions}) are not those of the file; set positions: learned"
    )
