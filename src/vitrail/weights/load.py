"""load_weights: weights from elsewhere into a model, or a refusal that says what does not fit.

Nothing is guessed: every parameter of the model and every tensor of the file is accounted for in the report, and a
load whose result would compute something else than the file's model is refused before any number is copied.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers.init import local_shard
from vitrail.weights.adapters import WHOLE, translate
from vitrail.weights.files import Weights, open_weights
from vitrail.weights.names import ADAPTERS, recognise
from vitrail.weights.pieces import Made, Piece
from vitrail.weights.report import Entry, Report
from vitrail.weights.target import Target, Translation

CLASSES = ("head.", "label_embed.", "decoder.out.")  # layers whose size is the number of classes
NOT_THERE, NO_PLACE = "the file does not have it", "the model has no place for it"
# Parts of an encoder that files of plain images cannot have, and that may start anew.
NEW = r"(encoder|decoder)\.(size_embed|rope_turns|patch_embed\.(variable|aggregate|group_aggregate))\b.*"


@torch.no_grad()
def load_weights(
    model: nn.Module,
    given: str | Path | Mapping[str, Tensor],
    *,
    adapter: str = "auto",
    only: Sequence[str] = (),
    head: bool | Literal["auto"] = True,
    strict: bool = True,
) -> Report:
    """Copy weights from a file, a run folder or a state dict into a (plain or sharded) model.

    `adapter` names where the weights come from, "auto" finds out. `only` keeps to parts of the model, such as
    ["encoder"]. `head`: false starts the classifier anew, "auto" does so where the number of classes differs.
    Not `strict`: tensors without a counterpart on either side are left out; wrong shapes are still refused.
    """
    try:
        weights, target = open_weights(given), Target(model)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
    adapter = _choose(weights, adapter)
    told = translate(weights, target, adapter)
    _check_size(told, target, weights)
    entries = _plan(weights, target, told, only=tuple(only), head=head)
    if not only or "decoder" in only:
        told.problems += told.decoder
    problems = [*told.wrong, *((told.problems + _gaps(entries)) if strict else [])]
    if problems:
        more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
        hint = "" if told.wrong or not strict else "; strict: false loads what fits all the same"
        raise UserError(
            f"{weights.path} ({adapter}) was not loaded into the {_kind(model)}: {'; '.join(problems[:6] + more)}{hint}"
        )
    for entry in entries:
        if entry.action not in ("skipped", "unused"):
            _copy(target.parameters[entry.name], _make(told.pieces[entry.name], weights), entry, weights)
    notes = (*weights.notes, *told.notes, *(() if strict else told.problems))
    return Report(weights.path, adapter, tuple(entries), notes)


def load_initial(model: nn.Module, init: Any) -> Report:
    """What the section `init` of a recipe asks for."""
    try:
        return load_weights(model, init.path, adapter=init.adapter, only=init.only, head=init.head, strict=init.strict)
    except UserError as error:
        raise UserError(f"init: {error}") from None


def _choose(weights: Weights, adapter: str) -> str:
    if adapter != "auto" and adapter not in ADAPTERS:
        raise UserError(f"adapter: {adapter!r} is unknown; use one of auto, {', '.join(ADAPTERS)}")
    found = recognise(weights.shapes)
    if adapter != "auto":
        return adapter
    if len(found) == 1:
        return found[0]
    some = ", ".join(list(weights.shapes)[:3])
    what = f"it could be {' or '.join(found)}" if found else "its names are of no known kind"
    raise UserError(
        f"{weights.path}: {what} (it holds {len(weights.shapes)} tensors: {some}, ...); "
        f"name the adapter: one of {', '.join(ADAPTERS)}"
    )


def _check_size(told: Translation, target: Target, weights: Weights) -> None:
    """All blocks or none, and of the same width: an encoder that is cut or stretched is another model."""
    proj = told.pieces.get("encoder.blocks.0.attn.proj.weight")
    width = weights.shapes[proj.sources[0]][0] if proj is not None and proj.sources else target.encoder.width
    if width != target.encoder.width:  # alone: every other tensor would be wrong, too
        raise UserError(f"{weights.path}: its tokens are {width} wide, the model's {target.encoder.width}; set width")
    numbers = {int(f.group(1)) for name in told.pieces if (f := re.match(r"encoder\.blocks\.(\d+)\.", name))}
    depth = target.encoder.depth
    if told.wrong and not numbers:
        return
    if not numbers:
        told.wrong.append("it holds no blocks of an encoder")
    elif len(numbers) != depth or max(numbers) != depth - 1:
        told.wrong.append(f"its encoder has {len(numbers)} blocks, the model's {depth}; set depth: {len(numbers)}")


def _plan(
    weights: Weights, target: Target, told: Translation, *, only: tuple[str, ...], head: bool | str
) -> list[Entry]:
    """What would become of every tensor, from shapes alone; `told.wrong` gets what cannot be."""
    for part in only:
        if not any(_below(name, part) for name in target.parameters):
            raise UserError(
                f"only: the {_kind(target.model)} has no {part!r}; its parts are {', '.join(_parts(target))}"
            )
    entries: list[Entry] = []
    used: set[str] = set()
    left: dict[str, str] = dict(told.ignored)
    for name, parameter in target.parameters.items():
        shape, piece = tuple(parameter.shape), told.pieces.get(name)
        reason = ""
        if only and not any(_below(name, part) for part in only):
            reason = f"only {', '.join(only)} was asked for"
        elif head is False and name.startswith(CLASSES):
            reason = "head: false"
        elif piece is None:
            reason = NOT_THERE
        if piece is None or reason:
            entries.append(Entry("skipped", name, shape, note=reason))
            left |= {source: reason for source in (piece.sources if piece else ()) if source not in used}
            continue
        try:
            made = _make(piece, weights, meta=True)
        except (ValueError, RuntimeError) as error:
            told.wrong.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        found = tuple(made.value.shape)
        if found != shape and name.startswith(CLASSES) and head == "auto":
            reason = f"{found[0]} classes in the file, {shape[0]} in the model"
            entries.append(Entry("skipped", name, shape, note=reason))
            left |= dict.fromkeys(piece.sources, reason)
        elif found != shape:
            hint = "; head: false starts it anew" if name.startswith(CLASSES) else ""
            told.wrong.append(f"{name} is {_size(found)} in the file and {_size(shape)} in the model{hint}")
        else:
            entries.append(Entry(made.action, name, shape, piece.sources, made.note))
            used |= set(piece.sources)
    left |= _left_over(target, told, only)
    for source, shape in weights.shapes.items():
        if source not in used and told.ignored.get(source) != WHOLE:
            entries.append(Entry("unused", source, shape, note=left.get(source, NO_PLACE)))
    return entries


def _left_over(target: Target, told: Translation, only: tuple[str, ...]) -> dict[str, str]:
    """Tensors of the file that no parameter asks for, where that is no fault."""
    parts = set(_parts(target))
    shared = {name.partition(".")[0] for name in told.pieces if name in target.parameters}
    left: dict[str, str] = {}
    for name, piece in told.pieces.items():
        part, reason = name.partition(".")[0], ""
        if name in target.parameters:
            continue
        if only and not any(_below(name, wanted) for wanted in only):
            reason = f"only {', '.join(only)} was asked for"
        elif part not in parts:
            reason = f"the model has no {part}"
        elif part not in shared:
            reason = f"the model's {part} is of another kind"
        left |= dict.fromkeys(piece.sources, reason) if reason and part != "encoder" else {}
    return left


def _gaps(entries: list[Entry]) -> list[str]:
    """Parts that would be filled in part; parts that the file or the model has nothing of are no gap."""
    filled = {entry.name.partition(".")[0] for entry in entries if entry.action not in ("skipped", "unused")}
    problems = []
    missing = [
        entry.name
        for entry in entries
        if entry.action == "skipped"
        and entry.note == NOT_THERE
        and entry.name.partition(".")[0] in filled | {"encoder"}
        and not re.fullmatch(NEW, entry.name)
    ]
    if missing:
        problems.append(f"the file does not have {_some(missing)}")
    extra = [entry.name for entry in entries if entry.action == "unused" and entry.note == NO_PLACE]
    if extra:
        problems.append(f"the model has no place for {_some(extra)}")
    return problems


# ---------------------------------------------------------------- numbers


def _make(piece: Piece, weights: Weights, *, meta: bool = False) -> Made:
    if meta:
        return piece.make(*(torch.empty(weights.shapes[name], device="meta") for name in piece.sources))
    return piece.make(*(weights.read(name).float() for name in piece.sources))


def _copy(parameter: nn.Parameter, made: Made, entry: Entry, weights: Weights) -> None:
    """This rank's part of a parameter."""
    if not made.value.isfinite().all():
        raise UserError(
            f"{weights.path}: {', '.join(entry.sources)} holds values that are not finite; use another file"
        )
    local, offset = local_shard(parameter.detach())
    window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    if local.numel():
        local.copy_(made.value[window])


def _below(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def _parts(target: Target) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in target.parameters))


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "kind", type(model).__name__)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
