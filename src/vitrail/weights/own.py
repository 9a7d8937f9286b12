"""Weights of this library: runs, whose recipe tells what the numbers mean, and files with its names."""

import math
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.layers.patches import per_axis
from vitrail.models.config import DecoderBlocks
from vitrail.models.model import encoder_of
from vitrail.weights import pieces
from vitrail.weights.files import Weights
from vitrail.weights.pieces import Made, Piece, Target, Translation, is_superposed, place_patch_embed, rope_inflation
from vitrail.weights.positions import choose_grid

TABLES = ("encoder.pos_embed.table", "decoder.pos_embed.table")


def translate_own(weights: Weights, target: Target, names: tuple[str, ...] | None = None) -> Translation:
    """Translate a run or a file of this library; `names` are the classes of the model that is filled, if known."""
    out = Translation()
    config = weights.config
    if config is not None and config.ndim > target.ndim:
        return Translation(wrong=[f"a run of {config.ndim} axes cannot fill a model of {target.ndim}"])
    source = None if config is None else encoder_of(config)
    other_kind = config is not None and config.kind != target.model.config.kind
    for name in weights.shapes:
        if other_kind and not name.startswith("encoder."):
            out.ignored[name] = f"only the encoder of a {config.kind} fits into a {target.model.config.kind}"
        else:
            out.pieces[name] = Piece((name,))
    if source is None:
        out.notes.append(_assumed(target))
        for name in TABLES:
            if name in out.pieces and name in target.parameters and target.grid is not None:
                rows = weights.shapes[name][0]
                _, grid, doubt = choose_grid(rows, (0,), target.ndim, target.grid)
                if doubt and grid == target.grid:
                    out.notes.append(f"the {rows} rows of {name} may be {doubt}; the model's own grid was taken")
                elif doubt:
                    out.wrong.append(f"the {rows} rows of {name} may be {doubt}; use the run itself, which tells")
                make = partial(pieces.position_table, old=grid, new=target.grid) if grid else Made
                out.pieces[name] = Piece((name,), make)
        return out
    _compare_makes(source, config.ndim, target, out)
    if not other_kind:
        _compare_kinds(config, target, out)
        _compare_classes(weights, names, target, out)
    patch = per_axis(source.patch, config.ndim)
    for name in [n for n in out.pieces if n.startswith("encoder.patch_embed.proj.")]:
        del out.pieces[name]
        place_patch_embed(name, name, target, out, partial(pieces.as_kernel, patch=patch))
    if source.variables is not None and target.config.variables is not None:
        _match_variables(source.variables.known, target, out)
    shape = getattr(config, "shape", None)
    old = None if shape is None else source.grid(per_axis(shape, config.ndim))
    for name in TABLES:
        _own_table(name, source.positions, old, target, out)
    row = target.parameters.get("encoder.pos_embed.cls")
    if row is not None and source.positions == "sincos":
        out.pieces["encoder.pos_embed.cls"] = Piece((), partial(Made, torch.zeros(row.shape)))
    for name in [n for n in out.pieces if re.match(r"(decoder\.head|final\.proj)\.", n)]:
        if patch != target.patch and not target.by_class(name):
            out.pieces[name] = Piece((name,), partial(pieces.voxel_rows, old=patch, new=target.patch))
    return out


def _compare_makes(source: Any, ndim: int, target: Target, out: Translation) -> None:
    """Compare settings that change what the same numbers compute, and cannot be seen in their shapes."""
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
    if theirs == ours == "rope":
        _compare_rotations(source, ndim, target, out)
    told, telling = source.tokens.told, target.config.tokens.told
    if told != telling:
        out.problems.append(f"the run's tokens are told their {told}, the model's their {telling}; set both alike")
        for name in TABLES:
            out.skipped[name] = out.ignored[name] = f"its rows are of the {told} of a token"
    if theirs == ours == "sincos" and ndim != target.ndim:
        out.problems.append(
            f"sin-cos positions of {ndim} axes are not those of {target.ndim}; set positions: learned, which then "
            "starts with the run's own, repeated over the new axis"
        )
    # Both kinds of tokens are rows of one parameter, which may fit and mean something else.
    had, has = (source.cls_token, source.registers), (target.config.cls_token, target.config.registers)
    if had != has:
        said = f"cls_token: {str(had[0]).lower()} and registers: {had[1]}"
        out.problems.append(f"the run has {said}, the model {str(has[0]).lower()} and {has[1]}; set {said}")
        for name in ("encoder.prefix_tokens", "encoder.pos_embed.cls"):
            out.skipped[name] = out.ignored[name] = "the run's tokens before the patches are others"


def _compare_kinds(config: Any, target: Target, out: Translation) -> None:
    """Compare settings of the rest of a model of the same kind, as _compare_makes() does those of its encoder."""
    model = target.model.config
    had, has = getattr(config, "time_scale", 1.0), getattr(model, "time_scale", 1.0)
    if not math.isclose(had, has):
        out.problems.append(f"the run multiplies times by {had:g}, the model by {has:g}; set time_scale: {had:g}")
    theirs, ours = getattr(config, "decoder", None), getattr(model, "decoder", None)
    if not (isinstance(theirs, DecoderBlocks) and isinstance(ours, DecoderBlocks)):
        return
    for key in ("heads", "kv_heads", "theta"):
        had, has = getattr(theirs, key), getattr(ours, key)
        if key == "kv_heads":
            had, has = had or theirs.heads, has or ours.heads
        elif key == "theta":
            had, has = (d.theta or c.encoder.theta for d, c in ((theirs, config), (ours, model)))
        if had != has and (key != "theta" or target.positions == "rope"):
            out.decoder.append(f"the run's decoder has {key} {had:g}, the model's {has:g}; set decoder.{key}: {had:g}")


def _compare_rotations(source: Any, ndim: int, target: Target, out: Translation) -> None:
    c = target.config
    inflated = target.ndim == ndim + 1 and is_superposed(target) and source.rope == "axial"
    if target.ndim != ndim and not inflated:
        out.problems.append(
            rope_inflation(target)
            if source.rope == "axial"
            else f"superposed rotations of {ndim} axes are not those of {target.ndim}"
        )
    elif source.rope != c.rope and not inflated:
        out.problems.append(f"the run's rotations are {source.rope}, the model's {c.rope}; set rope: {source.rope}")
    if source.rope_origin != c.rope_origin and (c.cls_token or c.registers):
        out.problems.append(
            f"the run's rope_origin is {source.rope_origin}, the model's {c.rope_origin}; "
            f"set rope_origin: {source.rope_origin}"
        )
    for key in ("theta", "rope_scale"):
        had, has = getattr(source, key), getattr(c, key)
        if not math.isclose(had, has):
            out.problems.append(f"the run's {key} is {had:g}, the model's {has:g}; set {key}: {had:.10g}")


def _assumed(target: Target) -> str:
    """Say what a file with this library's names, and no recipe, does not tell."""
    c = target.config
    positions = c.positions
    if positions == "rope":
        positions = f"rope ({c.rope}, theta {c.theta:g}, rope_scale {c.rope_scale:g})"
    taken = {
        "heads": target.encoder.heads,
        "patch": " x ".join(map(str, target.patch)),
        "positions": positions,
        "residual": c.residual,
        "eps": f"{c.eps:g}",
        "tokens": c.tokens.kind,
        "cls_token": str(c.cls_token).lower(),
        "registers": c.registers,
        **({"pool": target.model.config.pool} if hasattr(target.model.config, "pool") else {}),
        **({"variables": ", ".join(c.variables.known)} if c.variables is not None else {}),
    }
    said = ", ".join(f"{key} {value}" for key, value in taken.items())
    classes = ", and the order of its classes" if any(map(target.by_class, target.parameters)) else ""
    return f"no recipe beside the file: the model's own settings were taken ({said}){classes}"


def _compare_classes(weights: Weights, names: tuple[str, ...] | None, target: Target, out: Translation) -> None:
    """Match rows of the classifier by the classes' names; as many classes need not be the same ones."""
    pools = [getattr(config, "pool", None) for config in (weights.config, target.model.config)]
    if pools[0] != pools[1]:
        out.classes.append(f"the run's classifier saw pool: {pools[0]}, the model's sees {pools[1]}")
    theirs, ours = weights.classes, names
    rows = [name for name in out.pieces if target.by_class(name) and name in target.parameters]
    if theirs == ours or not rows:
        return
    if theirs is None or ours is None:
        known = f"the run's are {_list(theirs)}" if theirs is not None else f"the model's are {_list(ours or ())}"
        out.notes.append(f"classes were matched by number, as the names of one side are not known; {known}")
    elif sorted(theirs) != sorted(ours):
        out.classes.append(f"the run's classes are {_list(theirs)}, the model's {_list(ours)}")
    else:
        order = [theirs.index(name) for name in ours]
        for name in rows:
            null = [len(order)] if name.startswith("label_embed.") else []  # the row of no class, which is the last
            out.pieces[name] = Piece((name,), partial(_picked, order=order + null))


def _picked(rows: Tensor, *, order: list[int]) -> Made:
    if len(rows) != len(order):
        raise ValueError(f"it has {len(rows)} rows for {len(order)} classes")
    return Made(rows[torch.tensor(order, device=rows.device)], "permuted", "rows by the classes' names")


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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
    """Match rows of the variables that both know, by name; a new variable starts as the mean of the run's."""
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
