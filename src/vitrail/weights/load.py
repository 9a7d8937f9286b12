"""load_weights: weights from elsewhere into a model, or a refusal that says what does not fit.

Nothing is guessed: every parameter of the model and every tensor of the file is accounted for in the report, and a
load whose result would compute something else than the file's model is refused before any number is copied.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.errors import UserError, is_out_of_memory
from vitrail.layers.init import local_shard
from vitrail.weights.adapters import translate
from vitrail.weights.files import Weights, open_weights
from vitrail.weights.names import ADAPTERS, recognise
from vitrail.weights.pieces import Entry, Made, Piece, Report, Target, Translation

NOT_THERE, NO_PLACE = "the file does not have it", "the model has no place for it"
VELOCITY = "velocities from noise to data"
LEARNED = {"dit": "noise", "diffusers": "noise", "sit": VELOCITY, "torchditan": VELOCITY}  # what models predict
# Parts of an encoder that files of plain images cannot have, and that may start anew.
NEW = r"(encoder|decoder)\.(size_embed|rope_turns|patch_embed\.(variable|aggregate|group_aggregate))\b.*"


@torch.no_grad()
def load_weights(
    model: nn.Module,
    given: str | Path | Mapping[str, Tensor],
    *,
    adapter: str = "auto",
    only: str | Sequence[str] = (),
    head: bool | Literal["auto"] = True,
    strict: bool = True,
    names: Sequence[str] | None = None,
    whole: nn.Module | None = None,
) -> Report:
    """Copy weights from a file, a run folder or a state dict into a (plain or sharded) model.

    `adapter` names where the weights come from, "auto" finds out. `only` keeps to parts of the model, such as
    ["encoder"]. `head`: false starts the classifier anew, "auto" does so where its classes differ.
    Not `strict`: tensors without a counterpart on either side are left out; wrong shapes are still refused.
    `names` are the model's classes, label 0 first: rows of a run's classifier are then matched by name.
    `whole` is the whole model (on any device) where `model` has but some of its parameters.
    """
    if not isinstance(head, bool) and head != "auto":
        raise UserError(f"head: {head!r} is unknown; use true, false or auto")
    only = (only,) if isinstance(only, str) else tuple(only)
    try:
        weights, target = open_weights(given), Target(whole or model)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None
    adapter = _choose(weights, adapter)
    with _as_shaped(weights, adapter):
        told = translate(weights, target, adapter, None if names is None else tuple(names))
        _check_size(told, target, weights)
        entries = _plan(weights, target, told, only=only, head=head)
    if not only or "decoder" in only:
        told.problems += told.decoder
    # Beside what is wrong, gaps say nothing: tensors that do not fit would be among them.
    gaps = [] if told.wrong else _gaps(entries, told, target)
    problems = [*told.wrong, *((told.problems + gaps) if strict else [])]
    if problems:
        more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
        hint = "" if told.wrong or not strict else "; strict: false loads what fits all the same"
        if hint and any("; set " in problem for problem in problems):
            hint = "; or, where the model is meant to be another, strict: false loads what fits"
        raise UserError(
            f"{weights.path} ({adapter}) was not loaded into the {_kind(model)}: {'; '.join(problems[:6] + more)}{hint}"
        )
    filled = [entry for entry in entries if entry.action not in ("skipped", "unused")]
    for entry in filled:  # all of them, before the first number of the model is overwritten
        with _as_shaped(weights, adapter):
            finite = _make(told.pieces[entry.name], weights).value.isfinite().all()
        if not finite:
            where = ", ".join(entry.sources) or entry.name
            raise UserError(f"{weights.path}: {where} holds values that are not finite; use another file")
    here = dict(model.named_parameters())
    for entry in filled:
        if entry.name in here:
            _copy(here[entry.name], _make(told.pieces[entry.name], weights))
    notes = (*weights.notes, *told.notes, *(() if strict else told.problems))
    return Report(weights.path, adapter, tuple(entries), notes)


def load_initial(
    model: nn.Module,
    init: Any,
    names: Sequence[str] | None = None,
    whole: nn.Module | None = None,
    *,
    objective: Any = None,
) -> Report:
    """Load what the section `init` of a recipe asks for; `names` are the classes of its `objective`."""
    try:
        report = load_weights(model, init.path, names=names, whole=whole, **init.model_dump(exclude={"path"}))
    except UserError as error:
        raise UserError(f"init: {error}") from None
    learned, asked = LEARNED.get(report.adapter), _predicted(objective)
    if init.strict and learned and asked and learned != asked:
        same = "; SiT's have the same names: for such a one set init.adapter: sit and model.time_scale: 0.001"
        raise UserError(
            f"init: {init.path} ({report.adapter}): its model predicts {learned}, the objective wants {asked}"
            f"{same if report.adapter == 'dit' else ''}; strict: false starts from it all the same"
        )
    return report


def _predicted(objective: Any) -> str | None:
    """Return what an objective wants of a model that denoises; None for other objectives."""
    kind = getattr(objective, "kind", None)
    return {"flow": VELOCITY, "denoise": getattr(objective, "predict", None)}.get(str(kind))


@contextlib.contextmanager
def _as_shaped(weights: Weights, adapter: str) -> Iterator[None]:
    """Tell in a sentence what a file leads to whose tensors, names or settings no such file has."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        words = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UserError(
            f"{weights.path} ({adapter}): its tensors are not shaped as those of such a file ({words}); fetch it "
            "again, or name the adapter"
        ) from error


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
    """Refuse an encoder that is cut or stretched: all blocks or none, and of the same width."""
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
    """Plan what becomes of every tensor, from shapes alone; `told.wrong` gets what cannot be."""
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
        elif head is False and target.by_class(name):
            reason = "head: false"
        elif name in told.skipped:
            reason = told.skipped[name]
        elif piece is None:
            reason = NOT_THERE
        elif told.classes and target.by_class(name):
            reason = "; ".join(told.classes)
            if head is True and (wrong := f"{reason}; head: false starts the classifier anew") not in told.wrong:
                told.wrong.append(wrong)
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
        if found != shape and target.by_class(name) and head == "auto":
            reason = f"{found[0]} classes in the file, {shape[0]} in the model"
            entries.append(Entry("skipped", name, shape, note=reason))
            left |= dict.fromkeys(piece.sources, reason)
        elif found != shape:
            hint = "; head: false starts it anew" if target.by_class(name) else ""
            told.wrong.append(f"{name} is {_size(found)} in the file and {_size(shape)} in the model{hint}")
        else:
            entries.append(Entry(made.action, name, shape, piece.sources, made.note))
            used |= set(piece.sources)
    left |= _left_over(target, told, only)
    for source, shape in weights.shapes.items():
        if source not in used:
            entries.append(Entry("unused", source, shape, note=left.get(source, NO_PLACE)))
    return entries


def _left_over(target: Target, told: Translation, only: tuple[str, ...]) -> dict[str, str]:
    """List tensors of the file that no parameter asks for, where that is no fault."""
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


# Keys of the encoder that parameters belong to, and their value in a model without them.
KEYS = (
    (r".*\.mlp\.(?:gate|packed)\..*", "mlp: swiglu", "mlp: gelu"),
    (r".*\.attn\.norm_qk\..*", "qk_norm: true", "qk_norm: false"),
    (r".*\.ls[12]\.gamma", "layer_scale: 1.0", "layer_scale: null"),
    (r".*\.input_norm\..*", "input_norm: true", "input_norm: false"),
    (r".*\.patch_embed\.norm_\w+\..*", "patch_norm: true", "patch_norm: false"),
    (r".*\bnorm[12]?\.bias", "norm: layer", "norm: rms"),
    (r".*\.(?:attn|mlp|patch_embed)\..*bias", "bias: true", "bias: false"),
)


def _keys(names: Iterable[str], *, there: bool) -> str:
    """Name the keys that would give the model such parameters, or not."""
    names = set(names)
    # A norm without its weight, too, is no RMSNorm.
    names = sorted(n for n in names if not (n.endswith(".bias") and n.removesuffix("bias") + "weight" in names))
    found = dict.fromkeys(
        with_it if there else without
        for name in names
        for pattern, with_it, without in [next((k for k in KEYS if re.fullmatch(k[0], name)), ("", "", ""))]
        if pattern
    )
    return f"; set {', '.join(found)}" if found else ""


def _gaps(entries: list[Entry], told: Translation, target: Target) -> list[str]:
    """Find parts that would be filled in part; parts that the file or the model has nothing of are no gap."""
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
        problems.append(f"the file does not have {_some(missing)}{_keys(missing, there=False)}")
    extra = [entry.name for entry in entries if entry.action == "unused" and entry.note == NO_PLACE]
    if extra:
        ours = [n for n, piece in told.pieces.items() if n not in target.parameters and {*piece.sources} & {*extra}]
        problems.append(f"the model has no place for {_some(extra)}{_keys(ours, there=True)}")
    return problems


# ---------------------------------------------------------------- numbers


def _make(piece: Piece, weights: Weights, *, meta: bool = False) -> Made:
    if meta:
        return piece.make(*(torch.empty(weights.shapes[name], device="meta") for name in piece.sources))
    return piece.make(*(_as_float(weights, name) for name in piece.sources))


def _as_float(weights: Weights, name: str) -> Tensor:
    value = weights.read(name)
    if value.is_complex():  # half of which would be lost
        raise UserError(f"{weights.path}: {name} holds complex numbers, and no model here does; use another file")
    return value.float()


def _copy(parameter: nn.Parameter, made: Made) -> None:
    """Copy this rank's part of a parameter."""
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
