"""Channels are variables: each has a name, a tokenizer and an embedding of its own.

- a model declares the variables that it knows; a batch says which of them it carries, in which order
- "query": the variables of one position are gathered into one token by a learned query (cross-attention)
- "groups": the same in two steps, groups of variables first, then the groups (D-CHAG), for hundreds of channels
- "none": every variable keeps its own tokens; the sequence is variables x positions, variable by variable
Shapes: B batch, N positions, V variables of the batch, P voxels of a patch, D width, H heads, K head width.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.layers.init import Constant, Normal, Table, indices, mark
from vitrail.layers.tokens import sincos
from vitrail.recipe import config

Ids = tuple[int, ...]


@config
class VariablesConfig:
    """The variables that a model knows, and how those of one place become tokens."""

    known: tuple[str, ...]
    aggregate: Literal["query", "groups", "none"] = "query"
    group: int = 16  # variables of a group, with aggregate: groups

    def __post_init__(self) -> None:
        if isinstance(self.known, str):
            raise ValueError(f"known {self.known!r} is one text; give a list of names")
        if not self.known:
            raise ValueError("known must name at least one variable")
        twice = sorted({name for name in self.known if self.known.count(name) > 1})
        if twice:
            raise ValueError(f"known names {', '.join(map(repr, twice))} more than once; each variable has one place")
        if self.group < 2:
            raise ValueError(f"group {self.group} must hold at least 2 variables")

    def ids(self, names: Sequence[str]) -> Ids:
        """Return the places of a batch's variables among the known ones."""
        unknown = [name for name in names if name not in self.known]
        if unknown:
            raise ValueError(
                f"variables {unknown} are not known to the model; it knows {list(self.known)}: choose among these"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"variables {list(names)} name one more than once")
        if not names:
            raise ValueError(f"a batch must carry at least one variable; the model knows {list(self.known)}")
        return tuple(self.known.index(name) for name in names)


def pick(table: Tensor, ids: Ids | None, dim: int = 0) -> Tensor:
    """The rows of these variables; all of them in the known order cost nothing."""
    if ids is None or ids == tuple(range(table.shape[dim])):
        return table
    return table.index_select(dim, indices(ids, table))


class VariableEmbed(nn.Module):
    """Tokens of each variable by its own linear layer, plus its embedding, then aggregated."""

    def __init__(self, c: VariablesConfig, *, voxels: int, width: int, heads: int, bias: bool):
        super().__init__()
        number = len(c.known)
        self.config, self.voxels = c, voxels
        xavier = Normal(math.sqrt(2 / (voxels + width)))
        self.weight = mark(nn.Parameter(torch.empty(number, voxels, width)), xavier)
        self.bias = mark(nn.Parameter(torch.empty(number, width)), Constant(0.0)) if bias else None
        names = Table(lambda: sincos(torch.arange(float(number))[:, None], width))
        self.variable = mark(nn.Parameter(torch.empty(number, width)), names)
        groups = math.ceil(number / c.group) if c.aggregate == "groups" else 0
        self.group_aggregate = Aggregate(width, heads, queries=groups) if groups else None
        self.aggregate = None if c.aggregate == "none" else Aggregate(width, heads)

    def forward(self, x: Tensor, ids: Ids | None = None) -> Tensor:
        """[B, N, P*V] -> [B, N, D]; without aggregation [B, V*N, P] -> [B, V*N, D]. Ids: default all known."""
        weight, name = pick(self.weight, ids), pick(self.variable, ids)
        if self.bias is not None:
            name = name + pick(self.bias, ids)
        x = x.to(weight.dtype)
        if self.aggregate is None:
            x = x.unflatten(1, (len(weight), -1))  # B V N P
            return (torch.einsum("bvnp,vpd->bvnd", x, weight) + name[:, None]).flatten(1, 2)
        x = x.unflatten(-1, (self.voxels, len(weight)))  # B N P V
        if self.group_aggregate is None:
            return self.aggregate(torch.einsum("bnpv,vpd->bnvd", x, weight) + name)
        members: dict[int, list[int]] = {}
        for place, variable in enumerate(range(len(weight)) if ids is None else ids):
            members.setdefault(variable // self.config.group, []).append(place)
        # Group by group: the tokens of all variables at once would be the largest tensor of the model.
        gathered = []
        for group, places in sorted(members.items()):
            index = indices(tuple(places), x)
            some, own = x.index_select(-1, index), weight.index_select(0, index)
            tokens = torch.einsum("bnpv,vpd->bnvd", some, own) + name.index_select(0, index)
            gathered.append(self.group_aggregate(tokens, group))
        return self.aggregate(torch.stack(gathered, dim=2))

    def flops(self, positions: int) -> float:
        """Forward with all known variables at so many positions."""
        number, width = len(self.weight), self.weight.shape[-1]
        total = 2.0 * positions * number * self.voxels * width
        if self.aggregate is None:
            return total
        groups = [number]
        if self.group_aggregate is not None:
            sizes = [min(self.config.group, number - i) for i in range(0, number, self.config.group)]
            total += sum(self.group_aggregate.flops(positions, size) for size in sizes)
            groups = [len(sizes)]
        return total + self.aggregate.flops(positions, groups[0])


class Aggregate(nn.Module):
    """One token from the variables of a position: a learned query attends over them.

    The query is the same everywhere, so keys need not be made: (W_k x) q = x (W_k' q), and values are projected after
    the weighted sum. That is cross-attention exactly, at H / D of its cost.
    """

    def __init__(self, width: int, heads: int, queries: int = 1):
        super().__init__()
        self.head_width = width // heads
        self.query = mark(nn.Parameter(torch.empty(queries, width)), Constant(0.0))  # starts as the mean
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)  # rows (head; key, value; head width)
        self.proj = nn.Linear(width, width, bias=True)

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        """[B, N, V, D] -> [B, N, D]."""
        query = self.q(self.query[which]).unflatten(-1, (-1, self.head_width))  # H K
        key, value = self.kv.weight.unflatten(0, (-1, 2, self.head_width)).unbind(1)  # H K D
        asked = torch.einsum("hk,hkd->dh", query, key) / math.sqrt(self.head_width)
        weights = (x @ asked).softmax(dim=-2)  # B N V H
        mixed = torch.einsum("bnvh,bnvd->bnhd", weights, x)
        return self.proj(torch.einsum("bnhd,hkd->bnhk", mixed, value).flatten(-2))

    def flops(self, positions: int, variables: int) -> float:
        width, heads = self.proj.in_features, self.proj.in_features // self.head_width
        once = 2.0 * width * width * 2  # the query, and the keys that it is turned through
        return once + positions * (4.0 * variables * width * heads + 4.0 * width * width)


class VariableHead(nn.Linear):
    """Voxels of each variable: a linear layer whose rows are (voxel; variable), of which a batch uses its own."""

    def __init__(self, width: int, voxels: int, variables: int, *, bias: bool, separate: bool):
        super().__init__(width, voxels * variables, bias=bias)
        self.voxels, self.variables = voxels, variables
        self.separate = separate  # each variable has tokens of its own

    def forward(self, x: Tensor, ids: Ids | None = None) -> Tensor:
        """[B, N, D] -> [B, N, P*V], channels last; with separate tokens [B, V*N, D] -> [B, V*N, P]."""
        if not self.separate and (ids is None or ids == tuple(range(self.variables))):
            return super().forward(x)
        rows = (self.voxels, self.variables)
        weight = pick(self.weight.unflatten(0, rows), ids, dim=1)  # P V D
        bias = None if self.bias is None else pick(self.bias.unflatten(0, rows), ids, dim=1)  # P V
        if self.separate:
            out = torch.einsum("bvnd,pvd->bvnp", x.unflatten(1, (weight.shape[1], -1)), weight)
            return (out if bias is None else out + bias.T[:, None]).flatten(1, 2)
        return nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
