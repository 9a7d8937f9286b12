"""Samples that ranks of the context and tensor axes share: what each reads of them, and its part of inputs and targets.

Objectives prepare whole samples and know of no ranks; models take whatever tokens they are given. What lies between is
here, by the token axes that an objective declares (layers/tokens.py, TokenAxes):

- each list of tokens is cut into equal parts, a part for each rank. Where a list does not divide, the last rows are
  copies, marked as invalid. A list of several variables, one after the other, is cut within each of them
- targets with rows like the output's are cut as it is. Where targets are whole, the outputs of all ranks are joined
- where tokens lie on a grid whose planes divide, a rank reads just its slab of each crop, so that the rest is neither
  read, nor copied to the device, nor kept. The lists of tokens are of the whole crop even then: they are a few numbers
  a token. Values, which are nearly all of the memory, stay unmade (Rows) until the lists are cut; then those of this
  rank's rows alone are made, of what it has read and what other ranks send
- that is for an objective whose prepare() says that it can (by_slabs). Another one is given whole crops, and what it
  prepares is cut
- maps of a model whose planes ranks share (planes.py) are slabs too: so is the image beside the tokens, and outputs are
  joined for the loss
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.draws import Draws
from vitrail.layers.patches import WHOLE, Part, Slab, cut, join, mark_copies, part_size, per_axis, real_rows
from vitrail.layers.tokens import Rows, TokenAxes, Tokens, UniformTokens, gather_tokens
from vitrail.models.model import encoder_of
from vitrail.parallel.agree import Group
from vitrail.parallel.mesh import Layout, gather
from vitrail.parallel.planes import Maps, in_slabs

Inputs = dict[str, Any]


class Preparing(Protocol):
    """An objective, as far as samples are cut by it; what is more of it is in rooms above this one."""

    axes: TokenAxes

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[Inputs, Any]: ...


@dataclass(frozen=True)
class Lists:
    """The lists of tokens that an output has rows of, one after another."""

    lengths: tuple[int, ...]  # of whole samples
    groups: int  # variables that have tokens of their own

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return the rows of each list that a part of `count` has."""
        return tuple(self.groups * part_size(number // self.groups, count) for number in self.lengths)

    def cut(self, x: Tensor, part: Part) -> Tensor:
        """Return the part's rows of each list, of [B, m, ...]."""
        return joined([cut(rows, part, groups=self.groups) for rows in x.split(self.lengths, dim=1)])

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the rows of whole lists: the inverse of cut()."""
        pieces = zip(*(output.split(self.sizes(len(outputs)), dim=1) for output in outputs), strict=True)
        return joined([join(p, n, groups=self.groups) for p, n in zip(pieces, self.lengths, strict=True)])

    def real(self, part: Part, device: torch.device) -> Tensor | None:
        """Return which rows of a part are no copies; None where no part has any."""
        marks = [real_rows(number, part, groups=self.groups, device=device) for number in self.lengths]
        if all(mark is None for mark in marks):
            return None
        pairs = zip(marks, self.sizes(part.count), strict=True)
        return torch.cat([torch.ones(n, dtype=torch.bool, device=device) if m is None else m for m, n in pairs])


@dataclass(frozen=True)
class Whole:
    """Targets of whole samples, and the lists or maps of the outputs that are joined for them."""

    targets: Any
    lists: Lists | Maps


class Split:
    """The part of a rank in the samples that it shares with others; a rank alone has them to itself."""

    def __init__(self, model: Any = None, part: Part = WHOLE, group: Group = None):
        """`model` is the model's config; the ranks of the process group have one part each, in their order."""
        self.model, self.part, self.group = model, part, group
        self.maps = Maps(model, part.count) if in_slabs(model, part.count) else None

    @property
    def alone(self) -> bool:
        return self.part.count == 1

    def slab(self, objective: Preparing, crop: tuple[int, ...]) -> Slab | None:
        """Return what this rank must read of each crop; None: all of it."""
        if self.alone or not _by_slabs(objective):
            return None
        if getattr(self.model, "wants_image", False) and self.maps is None:
            return None
        encoder, slab = encoder_of(self.model), Slab(self.part, crop)
        planes = crop[0] // per_axis(encoder.patch, len(crop))[0]
        if not isinstance(encoder.tokens, UniformTokens) or planes % self.part.count:
            return None
        return None if len(slab.rows) % objective.axes.planes else slab

    def prepare(
        self, objective: Preparing, batch: Batch, draws: Draws, *, evaluating: bool = False
    ) -> tuple[Inputs, Any]:
        """Prepare this rank's part of a batch: inputs of the model, and targets for judge()."""
        if self.alone:
            return objective.prepare(batch, draws, evaluating=evaluating)
        if batch.slab is None and _by_slabs(objective):
            batch = replace(batch, slab=Slab(WHOLE, tuple(batch.values.shape[2:])))
        inputs, targets = objective.prepare(batch, draws, evaluating=evaluating)
        made = _Making(self)
        mine, lists = self._inputs(objective.axes, inputs, made)
        if not objective.axes.output:
            return mine, targets if self.maps is None else Whole(targets, self.maps)
        if not objective.axes.targets:
            return mine, Whole(targets, lists)
        return mine, self._targets(objective.axes, targets, lists, made)

    def judge(self, judge: Callable[[Tensor, Any], Any], output: Tensor, targets: Any) -> Any:
        """Return `judge(output, targets)`, which is the objective's loss, measure or logits, of this part.

        `targets` are what prepare() has given, `output` is the model's.
        """
        if isinstance(targets, Whole):
            output, targets = targets.lists.join(self._outputs(output)), targets.targets
        return judge(output, targets)

    def run(self, axes: TokenAxes, model: Callable[..., Tensor], inputs: Inputs) -> Tensor:
        """Return the output for inputs of whole samples, each rank computing its part."""
        if self.alone:
            return model(**inputs)
        mine, lists = self._inputs(axes, inputs, _Making(self))
        output = model(**mine)
        joined_by = lists if axes.output else self.maps
        return output if joined_by is None else joined_by.join(self._outputs(output))

    def fetch(self, values: Tensor, index_by_part: Sequence[Tensor]) -> Tensor:
        """Return the rows that this rank asks for, of those that all ranks have."""
        return fetch_rows(values, index_by_part, self.group)

    def _outputs(self, output: Tensor) -> list[Tensor]:
        """Return the outputs of all parts; slabs of maps are padded to equal sizes."""
        output = output if self.maps is None else self.maps.pad(output)
        return list(gather(output.unsqueeze(0), 0, self.group).unbind(0))

    def _inputs(self, axes: TokenAxes, inputs: Inputs, made: "_Making") -> tuple[Inputs, Lists]:
        """Return this rank's part of inputs, and the lists of the output."""
        groups = len(inputs["variables"]) if getattr(encoder_of(self.model), "separate", False) else 1
        mine, lengths = dict(inputs), {}
        for tokens in axes.inputs:
            if tokens.rows[0] not in inputs:
                continue
            first: Tensor = inputs[tokens.rows[0]]
            lengths[tokens] = first.shape[1]
            lists = Lists((first.shape[1],), groups)
            for name in (*tokens.rows, tokens.valid):
                if inputs.get(name) is not None:
                    mine[name] = made.part_of(inputs[name], lists)
            valid = mark_copies(mine.get(tokens.valid), lists.real(self.part, first.device), len(first))
            if valid is not None:
                mine[tokens.valid] = valid
        if self.maps is not None and "image" in mine:
            mine["image"] = self.maps.cut(mine["image"], self.part.index)
        return mine, Lists(tuple(lengths[tokens] for tokens in axes.output), groups)

    def _targets(self, axes: TokenAxes, targets: Any, lists: Lists, made: "_Making") -> Any:
        """Return this rank's part of targets with rows like the output's. A table of features [P*C] has none."""
        changed: dict[str, Any] = {}
        for name in axes.targets:
            value = getattr(targets, name)
            if isinstance(value, Rows) or (value is not None and value.ndim > 1):
                changed[name] = made.part_of(value, lists)
        if not changed:
            return Whole(targets, lists)
        rows = next(iter(changed.values()))
        real = lists.real(self.part, rows.device)
        if real is not None:
            changed["valid"] = mark_copies(changed.get("valid"), real, len(rows))
        if hasattr(targets, "lengths"):
            changed["lengths"] = lists.sizes(self.part.count)
        return replace(targets, **changed)


@dataclass(frozen=True)
class Alone:
    """A rank without a model, as loaders see a parallel one: it has all samples, whole."""

    layout: Layout
    data_rank: int = 0
    split: Split = field(default_factory=Split)


class _Making:
    """One preparation, in which each list of tokens is fetched once, and in the same order on every rank."""

    def __init__(self, split: Split):
        self.split, self.part = split, split.part
        self.fetched: dict[int, Tensor] = {}

    def part_of(self, value: Tensor | Rows, lists: Lists) -> Tensor:
        if isinstance(value, Tensor):
            return lists.cut(value, self.part)
        tokens = value.tokens
        assert tokens.slab is not None
        if not value.lists:
            return tokens.values if tokens.slab.part == self.part else lists.cut(tokens.values, self.part)
        for index in value.lists:
            if id(index) not in self.fetched:
                self.fetched[id(index)] = self._fetch(tokens, tokens.slab, index, value.strata)
        values = joined([self.fetched[id(index)] for index in value.lists])
        return value.then(values, lists.cut(joined(value.lists), self.part))

    def _fetch(self, tokens: Tokens, slab: Slab, index: Tensor, strata: int) -> Tensor:
        """Return the values of this rank's part of a list of tokens."""
        groups = tokens.separate
        if slab.part.count == 1:
            return gather_tokens(tokens.values, cut(index, self.part, groups=groups))
        assert slab.part == self.part
        places, rows = tokens.number // groups, tokens.values.shape[1]
        each = rows // groups  # places of a slab, row-major: whole planes of the grid
        variable, place = index // places, index % places
        row = place // each * rows + variable * each + place % each
        if strata % self.part.count == 0:  # all at home, so that nothing need be counted, which waits for the device
            return gather_tokens(tokens.values, cut(row, self.part, groups=groups) - self.part.index * rows)
        parts = [Part(number, self.part.count) for number in range(self.part.count)]
        return self.split.fetch(tokens.values, [cut(row, part, groups=groups) for part in parts])


def joined(lists: Sequence[Tensor]) -> Tensor:
    """Return lists of tokens one after another, without a copy of a single one."""
    return lists[0] if len(lists) == 1 else torch.cat(tuple(lists), dim=1)


def _by_slabs(objective: Preparing) -> bool:
    return getattr(objective.prepare, "by_slabs", False)


# ---------------------------------------------------------------- rows from the ranks that have read them
# Every rank knows what every other asks for, since all draw the same masks: no index travels, only rows, as bytes (so
# that uint8 stays uint8, and types that a backend cannot send need no care). Where each rank asks for rows of its own
# alone, nothing travels at all.


@torch.no_grad()
def fetch_rows(values: Tensor, index_by_part: Sequence[Tensor], group: Group) -> Tensor:
    """Return the rows that this rank asks for, of the rows [B, R*n, F] of R ranks; it has the values [B, n, F].

    `index_by_part` holds what each rank asks for, [B, s] of 0 to R*n - 1, the same on every rank; row j*n is the first
    of rank j. No gradient flows: values are data.
    """
    rank, rows = dist.get_rank(group), values.shape[1]
    assert len(index_by_part) == dist.get_world_size(group)
    mine = index_by_part[rank]
    counts = count_owners(index_by_part, rows)  # waits for the device, once
    if not any(number for i, row in enumerate(counts) for j, number in enumerate(row) if i != j):
        return gather_tokens(values, mine - rank * rows)
    # What goes to each rank, one after the other, sample by sample, in the order in which it was asked for.
    asked = torch.cat([index.flatten() for index in index_by_part])
    sample = torch.cat([_samples(index) for index in index_by_part])
    given = [row[rank] for row in counts]
    order = (asked // rows != rank).int().argsort(stable=True)[: sum(given)]  # sizes are known by now
    sent = values[sample[order], asked[order] - rank * rows].contiguous().view(torch.uint8)
    got = sent.new_empty(mine.numel(), sent.shape[1])
    dist.all_to_all_single(got, sent, output_split_sizes=counts[rank], input_split_sizes=given, group=group)
    out = torch.empty_like(got)
    out[(mine.flatten() // rows).argsort(stable=True)] = got  # it came owner by owner
    return out.view(values.dtype).unflatten(0, mine.shape)


def count_owners(index_by_part: Sequence[Tensor], rows: int) -> list[list[int]]:
    """Count the rows that part i asks for and part j has: those from j*rows to (j+1)*rows - 1.

    The host waits for these numbers, since it must know how much to send.
    """
    count = len(index_by_part)
    owners = [torch.bincount(index.flatten() // rows, minlength=count) for index in index_by_part]
    return torch.stack(owners).tolist()


def _samples(index: Tensor) -> Tensor:
    """Return the sample that each element of [B, s] belongs to, flat."""
    return torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
