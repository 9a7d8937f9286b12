"""The parts that optimizers share: updates, parameter groups, one step, and state by name for checkpoints.

A group says what decays, at which rate, and by which update; a table of them is shown at the start of a run. An update
sees the shards of this rank as plain tensors ("params"); the model's own parameters, which may be spread over different
meshes, stand beside them ("sources").
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.errors import UserError
from vitrail.foreign import read_pattern, search_all
from vitrail.models.model import Model
from vitrail.parallel.mesh import local, spread_like
from vitrail.recipe import config, must
from vitrail.training.optimizers.groups import find_layers

BASE_BATCH = 256  # the batch at which lr_scaling changes nothing

# "matrix" is a weight matrix of one of the model's repeated blocks, "other" any other parameter.
Role = Literal["matrix", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


@config
class GroupRule:
    """Treat the parameters whose full name matches apart; the first rule that matches decides."""

    match: str  # a regular expression
    lr: float = 1.0  # times the rate
    weight_decay: float | None = None  # instead of the optimizer's own
    freeze: bool = False

    def __post_init__(self) -> None:
        try:
            read_pattern(self.match)
        except ValueError as error:
            raise ValueError(f"match {self.match!r} is not a regular expression: {error}") from None
        must("not be negative", lr=self.lr, weight_decay=self.weight_decay)


@dataclass
class Shards:
    """This rank's shards of parameters that have a gradient, which an update changes, and what is kept of each."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]  # by their names
    steps: list[Tensor]  # updates so far, for those who count them
    sources: list[Tensor]  # the model's parameters: which part of each a shard is


class Update(ABC):
    """A change of parameters by their gradients. What it keeps is saved, restored and planned by these lists."""

    moments: tuple[str, ...] = ()  # names of what is kept of each parameter, each as large as the parameter
    counts: bool = False  # whether it needs the number of updates so far
    needs: Literal["shards", "matrices"] = "shards"  # whether it asks other ranks for their shards of a matrix

    @abstractmethod
    def apply(self, shards: Shards, *, rate: float, decay: float, skip: Tensor | None) -> None:
        """Change parameters, moments and steps in place; none of them where `skip`, on the device, is 1.0."""


def kept(gradients: list[Tensor], moments: list[Tensor], skip: Tensor | None) -> tuple[list[Tensor], float | Tensor]:
    """Return gradients and 1.0; in a skipped step moments and 0.0, so that means of both do not change."""
    if skip is None:
        return gradients, 1.0
    skipped = skip.bool()
    pairs = zip(moments, gradients, strict=True)
    return [torch.where(skipped, moment, gradient) for moment, gradient in pairs], 1 - skip.double()


@config
class OptimizerConfig(ABC):
    """The keys of every optimizer."""

    lr: float = 1e-3
    weight_decay: float = 0.05
    clip: float | None = 1.0  # largest norm of the gradient
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"  # with batch / 256
    layer_decay: float | None = None  # times the rate, for each layer below the head; null: one rate
    groups: tuple[GroupRule, ...] = ()

    def __post_init__(self) -> None:
        must("not be negative", lr=self.lr, weight_decay=self.weight_decay)
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay {self.layer_decay} must be above 0 and at most 1, such as 0.75")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip {self.clip} must be above 0; use null for no clipping")

    @abstractmethod
    def update(self, role: Role) -> Update:
        """Return the update for parameters of a role."""

    def base_rate(self, batch: int) -> float:
        ratio = batch / BASE_BATCH
        return self.lr * {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[self.lr_scaling]


@dataclass
class Group:
    """Parameters of one update, which decay alike and have the same rate."""

    name: str
    update: Update
    lr_multiplier: float
    weight_decay: float
    lr: float = 0.0  # of the latest step
    params: list[nn.Parameter] = field(default_factory=list)  # this rank's shards, as plain tensors
    sources: list[nn.Parameter] = field(default_factory=list)  # the model's own
    names: list[str] = field(default_factory=list)


class Optimizer:
    """Groups of parameters, each with its update, and what is kept of each of this rank's shards."""

    def __init__(self, groups: list[Group]):
        self.param_groups = groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}


def make_groups(model: Model, c: OptimizerConfig, names: Sequence[str] = ()) -> list[Group]:
    """Make parameter groups with their names: weight matrices decay; biases, norms, tokens and tables do not.

    `names` are those of all parameters, where this rank has but some of them. With layer_decay a layer has groups of
    its own.
    """
    names = names or [name for name, _ in model.named_parameters()]
    rules = dict.fromkeys(names, GroupRule(match=""))
    for rule in reversed(c.groups):
        found = search_all(rule.match, names, where=f"optimizer.groups: match {rule.match!r}")
        rules |= {name: rule for name, each in zip(names, found, strict=True) if each is not None}
    used = {rule.match for rule in rules.values()}
    unused = [r.match for r in c.groups if r.match not in used]
    if unused:
        raise UserError(
            f"optimizer.groups: {unused[0]!r} matches no parameter that an earlier rule leaves; "
            f"names look like {names[0]}"
        )
    if all(rule.freeze for rule in rules.values()):
        raise UserError("optimizer.groups: every parameter is frozen; leave some to train")
    layers = {} if c.layer_decay is None else find_layers(names)
    top = max(layers.values(), default=0)
    spared = tuple(model.spared_from_decay())
    of_blocks = {id(parameter) for block in model.blocks() for parameter in block.parameters()}
    updates = {role: c.update(role) for role in ROLES}
    differ = type(updates["matrix"]) is not type(updates["other"])
    groups: dict[tuple[Any, ...], Group] = {}
    for name, parameter in model.named_parameters():
        rule = rules[name]
        if rule.freeze:
            parameter.requires_grad_(False)
            continue
        is_weight = parameter.ndim >= 2 and not name.endswith(spared)
        decay = (c.weight_decay if is_weight else 0.0) if rule.weight_decay is None else rule.weight_decay
        role: Role = "matrix" if is_weight and parameter.ndim == 2 and id(parameter) in of_blocks else "other"
        label = f"{rule.match or 'all'}, {'decay' if decay else 'no decay'}"
        if differ:
            label += f", {type(updates[role]).__name__}"
        layer, multiplier = None, rule.lr
        if c.layer_decay is not None:
            layer = layers[name]
            label += f", layer {layer}"
            multiplier *= c.layer_decay ** (top - layer)
        key = (rule.match, decay, role if differ else None, layer)
        if key not in groups:
            groups[key] = Group(label, updates[role], multiplier, decay)
        group = groups[key]
        group.params.append(nn.Parameter(local(parameter.detach())))
        group.sources.append(parameter)
        group.names.append(name)
    # A rank of a pipeline may have frozen parameters alone.
    made = list(groups.values()) or [Group("none", updates["other"], 1.0, 0.0)]
    return sorted(made, key=lambda group: group.lr_multiplier) if layers else made


@torch.no_grad()  # DTensors then give their shards at once
def step(optimizer: Optimizer, rate: float, skip: Tensor | None = None) -> None:
    """Update the shards of this rank by their gradients, unless `skip` is 1.0.

    Whether to skip is decided on the device, so that nobody waits for it here.
    """
    for group in optimizer.param_groups:
        group.lr = rate * group.lr_multiplier
        update = group.update
        shards = Shards([], [], {moment: [] for moment in update.moments}, [], [])
        for place, source in enumerate(group.sources):
            if source.grad is None:
                continue
            if isinstance(source, DTensor):  # fetched anew: sharding may have moved it since
                group.params[place].data = local(source.detach())
            shard = group.params[place]
            if shard not in optimizer.state:
                optimizer.state[shard] = _fresh(update, shard, list(update.moments), 0)
            state = optimizer.state[shard]
            shards.parameters.append(shard)
            shards.gradients.append(local(source.grad))
            shards.sources.append(source)
            for moment in update.moments:
                shards.moments[moment].append(state[moment])
            if update.counts:
                shards.steps.append(state["step"])
        if shards.parameters:
            update.apply(shards, rate=group.lr, decay=group.weight_decay, skip=skip)


def _fresh(update: Update, shard: Tensor, moments: Sequence[str], steps: int) -> dict[str, Tensor]:
    """Make the state after so many updates, with moments that are zero."""
    state = {moment: torch.zeros_like(shard, requires_grad=False) for moment in moments}
    if update.counts and moments:
        # Where fused kernels want it: on the device, as fp32.
        state["step"] = torch.tensor(float(steps), device=shard.device)
    return state


def named_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name, `<parameter>.<moment>`, spread as their parameters are.

    Updates are not among them: all parameters have had as many, which the trainer counts.
    """
    state = {}
    for group in optimizer.param_groups:
        for name, shard, source in zip(group.names, group.params, group.sources, strict=True):
            for moment, value in optimizer.state.get(shard, {}).items():
                if moment != "step":
                    state[f"{name}.{moment}"] = spread_like(source, value)
    return state


def restore_state(optimizer: Optimizer, moments: dict[str, list[str]], steps: int) -> dict[str, Tensor]:
    """Make the state that a checkpoint has, moments by parameter name, ready to be loaded into.

    A parameter has all moments of this optimizer, or none where it was never updated; anything else is a ValueError.
    """
    for group in optimizer.param_groups:
        update = group.update
        usual = sorted(update.moments)
        for name, parameter in zip(group.names, group.params, strict=True):
            found = sorted(moments.get(name, []))
            if found and found != usual:
                few = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
                raise ValueError(
                    f"{name!r} has the moments {few} in it, this optimizer has {', '.join(usual) or 'none'}"
                )
            if found:
                optimizer.state[parameter] = _fresh(update, parameter, found, steps)
            else:
                optimizer.state.pop(parameter, None)
    return named_state(optimizer)
