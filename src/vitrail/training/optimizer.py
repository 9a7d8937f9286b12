"""Optimizers and their parameter groups: what decays, at which rate, shown as a table at the start of a run.

An optimizer sees the shards of this rank as plain tensors ("params"); the model's own parameters, which may be spread
over different meshes, stand beside them ("sources").
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vitrail.errors import UserError
from vitrail.models.model import Model
from vitrail.parallel.mesh import local
from vitrail.recipe import config

BASE_BATCH = 256  # the batch at which lr_scaling changes nothing


def check_not_negative(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < 0:
            raise ValueError(f"{name} {value} must not be negative")


@config
class GroupRule:
    """Treat the parameters whose full name matches apart; the first rule that matches decides."""

    match: str  # a regular expression
    lr: float = 1.0  # times the rate
    weight_decay: float | None = None  # instead of the optimizer's own
    freeze: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match {self.match!r} is not a regular expression: {error}") from None
        check_not_negative(lr=self.lr, weight_decay=self.weight_decay)


@config
class _OptimizerConfig:
    lr: float = 1e-3
    weight_decay: float = 0.05
    clip: float | None = 1.0  # largest norm of the gradient
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"  # with batch / 256
    groups: tuple[GroupRule, ...] = ()

    def __post_init__(self) -> None:
        check_not_negative(lr=self.lr, weight_decay=self.weight_decay)
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip {self.clip} must be above 0; use null for no clipping")

    def base_rate(self, batch: int) -> float:
        ratio = batch / BASE_BATCH
        return self.lr * {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[self.lr_scaling]


@config
class AdamWConfig(_OptimizerConfig):
    kind: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must each be at least 0 and below 1")

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)


@config
class SGDConfig(_OptimizerConfig):
    kind: Literal["sgd"] = "sgd"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum} must be at least 0 and below 1")

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, fused=True)


def make_groups(model: Model, c: Any, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Parameter groups with their names: weight matrices decay; biases, norms, tokens and tables do not.

    `names` are those of all parameters, where this rank has but some of them.
    """
    names = names or [name for name, _ in model.named_parameters()]
    rules = {name: next((r for r in c.groups if re.search(r.match, name)), GroupRule(match="")) for name in names}
    used = {rule.match for rule in rules.values()}
    unused = [r.match for r in c.groups if r.match not in used]
    if unused:
        raise UserError(
            f"optimizer.groups: {unused[0]!r} matches no parameter that an earlier rule leaves; "
            f"names look like {names[0]}"
        )
    if all(rule.freeze for rule in rules.values()):
        raise UserError("optimizer.groups: every parameter is frozen; leave some to train")
    spared = tuple(model.spared_from_decay())
    groups: dict[tuple, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        rule = rules[name]
        if rule.freeze:
            parameter.requires_grad_(False)
            continue
        decay = 0.0 if parameter.ndim < 2 or name.endswith(spared) else c.weight_decay
        decay = decay if rule.weight_decay is None else rule.weight_decay
        label = f"{rule.match or 'all'}, {'decay' if decay else 'no decay'}"
        group = groups.setdefault(
            (rule.match, decay),
            {"name": label, "lr_multiplier": rule.lr, "weight_decay": decay, "params": [], "sources": [], "names": []},
        )
        group["params"].append(nn.Parameter(local(parameter.detach())))
        group["sources"].append(parameter)
        group["names"].append(name)
    # A rank of a pipeline may have frozen parameters alone.
    nothing = {"name": "none", "lr_multiplier": 1.0, "weight_decay": 0.0, "params": [], "sources": [], "names": []}
    return list(groups.values()) or [nothing]


def group_table(optimizer: Optimizer, base_rate: float) -> list[dict[str, Any]]:
    """One row a group, for people to check."""
    return [
        {
            "name": group["name"],
            "parameters": sum(p.numel() for p in group["sources"]),
            "tensors": len(group["params"]),
            "lr": base_rate * group["lr_multiplier"],
            "weight_decay": group["weight_decay"],
        }
        for group in optimizer.param_groups
    ]


@torch.no_grad()  # DTensors then give their shards at once
def step(optimizer: Any, rate: float, skip: torch.Tensor | None = None) -> None:
    """Update the shards of this rank by their gradients, unless `skip` is 1.0, and drop the gradients.

    Whether to skip is decided on the device, so that nobody waits for it here.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
        for shard, source in zip(group["params"], group["sources"], strict=True):
            if isinstance(source, DTensor):  # fetched anew: sharding may have moved it since
                shard.data = local(source.detach())
            shard.grad = None if source.grad is None else local(source.grad)
            if group.get("momentum") and shard.grad is not None and not optimizer.state[shard]:
                # A first step that is skipped would leave momentum as it finds it, which is not even zero.
                optimizer.state[shard]["momentum_buffer"] = torch.zeros_like(shard)
    optimizer.found_inf = skip  # what fused optimizers obey
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def named_state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by name, `<parameter>.<moment>`, spread as their parameters are.

    Step counts are a number, see optimizer_steps().
    """
    state = {}
    for group in optimizer.param_groups:
        for name, shard, source in zip(group["names"], group["params"], group["sources"], strict=True):
            for moment, value in optimizer.state.get(shard, {}).items():
                if moment != "step" and value is not None:
                    state[f"{name}.{moment}"] = spread_like(source, value)
    return state


def spread_like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A rank's shard as a part of a tensor that is spread as a parameter is."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def restore_state(optimizer: Optimizer, moments: dict[str, list[str]], steps: int) -> dict[str, torch.Tensor]:
    """Make the state that a checkpoint has, moments by parameter name, ready to be loaded into.

    A parameter has all moments of this optimizer, or none where it was never updated; anything else is a ValueError.
    """
    for group in optimizer.param_groups:
        usual = ["exp_avg", "exp_avg_sq"] if isinstance(optimizer, torch.optim.AdamW) else ["momentum_buffer"]
        for name, parameter in zip(group["names"], group["params"], strict=True):
            found = sorted(moments.get(name, []))
            if found and found != usual:
                few = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
                raise ValueError(f"{name!r} has the moments {few} in it, this optimizer has {', '.join(usual)}")
            state = {moment: torch.zeros_like(parameter) for moment in found}
            if state and isinstance(optimizer, torch.optim.AdamW):
                # Where fused kernels want it: on the device, as fp32.
                state["step"] = torch.tensor(float(steps), device=parameter.device)
            optimizer.state[parameter] = state
    return named_state(optimizer)
