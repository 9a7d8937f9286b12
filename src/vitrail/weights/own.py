"""Weights of this library: runs, whose recipe tells what the numbers mean, and files with its names."""

import math
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.layers.patches import grid_of, per_axis
from vitrail.models.inputs import encoder_of
from vitrail.weights import pieces
from vitrail.weights.files import Weights
from vitrail.weights.pieces import Made, Piece
from vitrail.weights.target import Target, Translation, is_superposed, place_patch_embed, rope_inflation


def translate_own(weights: Weights, target: Target) -> Translation:
    out = Translation()
    config = weights.config
    source = None if config is None else encoder_of(config)
    other_kind = config is not None and config.kind != target.model.config.kind
    for name in weights.shapes:
        if other_kind and not name.startswith("encoder."):
            out.ignored[name] = f"only the encoder of a {config.kind} fits into a {target.model.config.kind}"
        else:
            out.pieces[name] = Piece((name,))
    if source is None:
        out.notes.append(f"no recipe beside the file: the model's {target.encoder.heads} heads were taken")
        for name in ("encoder.pos_embed.table", "decoder.pos_embed.table"):
            if name in out.pieces and name in target.parameters and target.grid is not None:
                rows = weights.shapes[name][0]
                grid = target.grid if rows == math.prod(target.grid) else pieces.square_grid(rows, target.ndim)
                make = partial(pieces.position_table, old=grid, new=target.grid) if grid else Made
                out.pieces[name] = Piece((name,), make)
        return out
    _compare_makes(source, config.ndim, target, out)
    patch = per_axis(source.patch, config.ndim)
    for name in [n for n in out.pieces if n.startswith("encoder.patch_embed.proj.")]:
        del out.pieces[name]
        place_patch_embed(name, name, target, out, partial(pieces.as_kernel, patch=patch))
    if source.variables is not None and target.config.variables is not None:
        _match_variables(source.variables.known, target, out)
    shape = getattr(config, "shape", None)
    old = None if shape is None else grid_of(per_axis(shape, config.ndim), patch)
    for part in ("encoder", "decoder"):
        _own_table(f"{part}.pos_embed.table", source.positions, old, target, out)
    row = target.parameters.get("encoder.pos_embed.cls")
    if row is not None and source.positions == "sincos":
        out.pieces["encoder.pos_embed.cls"] = Piece((), partial(Made, torch.zeros(row.shape)))
    for name in [n for n in out.pieces if re.match(r"(decoder\.head|final\.proj)\.", n)]:
        if patch != target.patch:
            out.pieces[name] = Piece((name,), partial(pieces.voxel_rows, old=patch, new=target.patch))
    return out


def _compare_makes(source: Any, ndim: int, target: Target, out: Translation) -> None:
    """Settings that change what the same numbers compute, and cannot be seen in their shapes."""
    for key in ("heads", "kv_heads", "mlp", "norm", "residual"):
        ours, theirs = getattr(target.config, key, None), getattr(source, key, None)
        if key == "kv_heads":
            ours, theirs = ours or target.config.heads, theirs or source.heads
        if ours != theirs:
            out.wrong.append(f"the run's encoder has {key} {theirs}, the model {ours}; set it to {theirs}")
    if not math.isclose(source.eps, target.config.eps):
        out.notes.append(f"the run's norms have eps {source.eps:g}, the model's {target.config.eps:g}")
    table = {"learned", "sincos"}
    theirs, ours = source.positions, target.positions
    if theirs != ours and not (ours == "learned" and theirs in table):
        out.problems.append(f"the run's positions are {theirs}, the model's {ours}; set positions: {theirs}")
    if theirs == ours == "rope" and ndim == 2 and target.ndim == 3 and not is_superposed(target):
        out.problems.append(rope_inflation(target))
    if theirs == ours == "rope" and not math.isclose(source.theta, target.config.theta):
        out.problems.append(f"the run's theta is {source.theta:g}, the model's {target.config.theta:g}; set theta")
    if theirs == ours == "sincos" and ndim != target.ndim:
        out.problems.append(
            f"sin-cos positions of {ndim} axes are not those of {target.ndim}; set positions: learned, which then "
            "starts with the run's own, repeated over the new axis"
        )


def _own_table(ours: str, positions: str, old: tuple[int, ...] | None, target: Target, out: Translation) -> None:
    if ours not in target.parameters or target.grid is None:
        return
    new = target.grid
    if ours in out.pieces and old is not None:
        out.pieces[ours] = Piece((ours,), partial(pieces.position_table, old=old, new=new))
    elif ours not in out.pieces and positions == "sincos":
        width = target.parameters[ours].shape[-1]
        # Without a shape of its own, the run is taken to have had the model's grid: sin-cos goes on for ever.
        grid = new[-len(old) :] if old is not None else new

        def make() -> Made:
            made = pieces.position_table(pieces.sincos_rows(grid, width), old=grid, new=new)
            return Made(made.value, made.action, f"the run's computed sin-cos{', ' if made.note else ''}{made.note}")

        out.pieces[ours] = Piece((), make)


def _match_variables(theirs: tuple[str, ...], target: Target, out: Translation) -> None:
    """Rows of the variables that both know, by name; a new variable starts as the mean of the run's."""
    ours = target.config.variables.known
    if theirs == ours:
        return
    if any("group_aggregate" in name for name in (*out.pieces, *target.parameters)):
        out.wrong.append(f"groups of variables need the same ones in the same order: set known to {list(theirs)}")
    index = [theirs.index(name) if name in theirs else None for name in ours]
    new = [name for name, i in zip(ours, index, strict=True) if i is None]
    note = f"new variables {', '.join(new)} start as the mean" if new else "by the variables' names"

    def by_name(rows: Tensor) -> Tensor:
        mean = rows.mean(dim=0)
        return torch.stack([mean if i is None else rows[i] for i in index])

    def make(rows: Tensor) -> Made:
        return Made(by_name(rows), "inflated" if new else "permuted", note)

    def make_head(rows: Tensor) -> Made:  # rows are (voxel; variable)
        voxels = rows.unflatten(0, (-1, len(theirs))).transpose(0, 1)
        return Made(by_name(voxels).transpose(0, 1).flatten(0, 1), "inflated" if new else "permuted", note)

    for name in out.pieces:
        if name in ("decoder.variable", *(f"encoder.patch_embed.{part}" for part in ("weight", "bias", "variable"))):
            out.pieces[name] = Piece((name,), make)
        elif name.startswith("decoder.head."):
            out.pieces[name] = Piece((name,), make_head)
