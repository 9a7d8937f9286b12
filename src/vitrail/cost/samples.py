"""Inputs and targets of a micro-batch on the meta device, by the objective's own prepare()."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.draws import Draws
from vitrail.layers.parts import WHOLE, Part
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.inputs import encoder_of


class Raw(NamedTuple):
    """Bytes of a batch as it was read, and those of them that are slabs, or could be for two ranks."""

    whole: int
    slabs: int


class Shapes(Draws):
    """Draws of which the shape alone matters."""

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        return torch.zeros(len(self.counters), *shape)

    def normal(
        self, purpose: str, *shape: int, device: torch.device | str | None = None, rows: range | None = None
    ) -> Tensor:
        return torch.empty(len(self.counters), *shape, device=device)


def build_objective(objective: Any, model: Any) -> Any:
    """The objective of a recipe, for data whose statistics do not matter."""
    from vitrail.data.batch import Statistics

    return objective.build(model, Statistics(*((value,) * _channels(objective, model) for value in (0.0, 1.0))))


def prepare(objective: Any, built: Any, model: Any, samples: int, parts: int) -> tuple[dict[str, Any], Any, Raw]:
    """Inputs and targets of one rank, and the bytes of the batch itself."""
    from vitrail.data.batch import Batch
    from vitrail.objectives.objective import drop_path_table, labels_of

    adaptive = isinstance(getattr(encoder_of(model), "tokens", None), AdaptiveTokens)
    # Trees grow on values: they are made for one sample, on the host, and stand for all.
    number, device = (1, "cpu") if adaptive else (samples, "meta")
    size = per_axis(model.shape, model.ndim)
    of = labels_of(objective, model)
    wanted = of == "voxel" or (of == "item" and getattr(model, "classes", None))
    labels = torch.zeros(number, *(size if of == "voxel" else ()), dtype=torch.long, device=device) if wanted else None
    known = getattr(encoder_of(model), "variables", None)
    batch = Batch(
        counters=list(range(number)),
        values=torch.zeros(number, _channels(objective, model), *size, device=device),
        labels=labels,
        variables=known.known if known is not None else tuple(getattr(objective, "variables", None) or ()),
    )
    draws = Shapes(0, batch.counters)
    inputs, targets = built.prepare(batch, draws, part=WHOLE if parts == 1 else Part(0, parts))
    with torch.device("meta"):
        rates = model.build().drop_path_rates()
    table = drop_path_table(draws, rates)
    if table is not None:
        inputs["drop_path"] = table.to("meta")
    values, own = samples * batch.values[0].numel() * 4, 0 if labels is None else samples * labels[0].numel() * 8
    # As the loader does it: a rank reads its slab of the values, where the objective can do with one; labels are whole.
    slabs = 0 if built.slab(size, Part(0, max(2, parts))) is None else values // parts
    if adaptive:
        inputs, targets = (_on_meta(one, samples) for one in (inputs, targets))
    return inputs, targets, Raw((slabs or values) + own, slabs)


def _channels(objective: Any, model: Any) -> int:
    """Of the data: those that condition come from there, too."""
    if getattr(objective, "variables", None):
        return len(objective.variables)
    return model.channels


def _on_meta(value: Any, samples: int) -> Any:
    """What was made for one sample, for many."""

    def made(t: Tensor) -> Tensor:
        shape = (samples, *t.shape[1:]) if t.ndim and t.shape[0] == 1 else tuple(t.shape)
        return torch.empty(shape, dtype=t.dtype, device="meta")

    return map_tensors(made, value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_tensors(function, one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, one) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_tensors(function, getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **changed)
    return value


def bytes_of(*values: Any) -> int:
    """Of all tensors together, each storage once."""
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        return t

    map_tensors(note, values)
    return sum(found.values())
