"""Activation checkpointing: what a block computes again in the backward instead of keeping it.

- none; full (a block keeps its input alone); every n-th block in full; or by role: every block is recomputed, but the
  products of the named roles are kept and not computed again
- a role is a place in the block (qkv, attention, proj, gate, fc1, fc2), not an operation: layers with and without bias,
  in any precision, and attention by any kernel are the same to it
- keeping attention keeps its output and log-sum-exp: the kernel is not run again, queries, keys and values are
- where a layer's product is summed over tensor ranks, the sum is kept, so that its collective is not run again
- a budget picks the roles: those that save the most computation for each byte come first
- blocks without roles (convolutions) are recomputed in full

Roles travel as annotations of the trace, which eager checkpointing and compiled graphs both show to the policy. Blocks
draw no random numbers (they are inputs), so none need restoring.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from vitrail.errors import UserError
from vitrail.layers.attention import CrossAttention, SelfAttention
from vitrail.layers.block import MLP, Scale, SwiGLU
from vitrail.layers.flops import Again
from vitrail.recipe.sections import Recompute

Choice = Literal["none", "full"] | Recompute
Kept = frozenset[str] | None  # roles whose products a recomputed block keeps; None: the block is not recomputed

ROLE, HEAD_WIDTH = "vitrail.role", "vitrail.head_width"  # names of the annotations; the second is attention's alone
LAYERS = {"qkv": "qkv", "q": "qkv", "kv": "qkv", "proj": "proj", "gate": "gate", "fc1": "fc1", "fc2": "fc2"}
SUMMED = "summed"  # stands for the role of a layer whose product is a part of a sum over tensor ranks
SUMS = {"attention": "proj", "mlp": "fc2"}  # in which module which role is summed
EVERYTHING: frozenset[str] = frozenset()  # full: nothing is kept


# ---------------------------------------------------------------- what is decided


@dataclass(frozen=True)
class Plan:
    """The roles that each block keeps, in order."""

    kept: tuple[Kept, ...]
    text: str  # for the log

    @property
    def again(self) -> Again:
        """Return what of a forward runs twice: for counting FLOPs."""
        recomputed = [kept for kept in self.kept if kept is not None]
        if not recomputed:
            return Again(share=0.0)
        by_role = [kept for kept in recomputed if kept] or [EVERYTHING]  # convolutions have no roles to be kept
        return Again(share=len(recomputed) / len(self.kept), kept=frozenset.intersection(*by_role))


class Unfit(UserError):
    """A choice that a model's blocks cannot follow: a sentence without advice, and a key to set instead."""

    def __init__(self, sentence: str, instead: str):
        super().__init__(f"{sentence}; set {instead}")
        self.sentence, self.instead = sentence, instead


def plan(blocks: Sequence[nn.Module], choice: Choice, *, pieces: bool = False) -> Plan:
    """Plan a choice for all blocks of a model; refuse roles that none of them has, and budgets that none meets.

    `pieces`: MLPs will be cut in pieces, if they are not yet.
    """
    if choice == "none":
        return Plan((None,) * len(blocks), "no recomputation")
    if choice == "full":
        return Plan((EVERYTHING,) * len(blocks), "every block is recomputed in full")
    assert isinstance(choice, Recompute)
    if choice.every is not None:
        kept = tuple(None if index % choice.every else EVERYTHING for index in range(len(blocks)))
        return Plan(kept, f"{kept.count(EVERYTHING)} of {len(blocks)} blocks are recomputed in full")
    if choice.budget is not None:
        return _within(choice.budget, blocks, pieces)
    assert choice.keep is not None
    known = all_roles(blocks, pieces=pieces)
    for role in choice.keep:
        if role not in known:
            rest = ",".join(other for other in choice.keep if other in known)
            raise Unfit(
                f"parallel.recompute.keep: {role!r} is no role of this model's blocks; they have "
                f"{', '.join(known) or 'none'} (MLPs in pieces have none)",
                f"parallel.recompute.keep=[{rest}]" if rest else "parallel.recompute=full",
            )
    kept = tuple(frozenset(choice.keep).intersection(roles_of(block, pieces=pieces)) for block in blocks)
    return Plan(kept, f"every block is recomputed but for {_listed(frozenset(choice.keep))}")


def carry_out(blocks: Sequence[nn.Module], entries: Sequence[Kept]) -> None:
    """Make each block recompute by its entry of a plan, in place; names of parameters stay."""
    for block, kept in zip(blocks, entries, strict=True):
        if kept:
            _annotate(block)
        if kept is not None:
            block.forward = recomputed(block.forward, kept)


def all_roles(blocks: Sequence[nn.Module], *, pieces: bool = False) -> list[str]:
    return sorted({role for block in blocks for role in roles_of(block, pieces=pieces)})


def roles_of(block: nn.Module, *, pieces: bool = False) -> dict[str, list[nn.Module]]:
    """Return the modules of a block by their role. A chunked MLP has none: its pieces are recomputed anyway."""
    roles: dict[str, list[nn.Module]] = {}
    for module in block.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            roles.setdefault("attention", []).append(module)
        elif not isinstance(module, MLP | SwiGLU) or pieces or getattr(module, "chunked", False):
            continue
        for name, layer in module.named_children():
            if name in LAYERS:
                roles.setdefault(LAYERS[name], []).append(layer)
    return roles


def _listed(kept: frozenset[str]) -> str:
    return ", ".join(role for role in ("attention", "qkv", "proj", "gate", "fc1", "fc2") if role in kept) or "nothing"


# ---------------------------------------------------------------- how it is done


def recomputed(forward: Callable[..., Tensor], kept: frozenset[str] = EVERYTHING) -> Callable[..., Tensor]:
    """Return a block's forward that keeps its inputs and the products of some roles."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kept:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))

    # A function of this module, not a partial: compilers skip one whose code is PyTorch's own.
    def again(*arguments: Any, **keywords: Any) -> Tensor:
        return checkpoint(forward, *arguments, **options, **keywords)

    return again


def _annotate(block: nn.Module) -> None:
    for role, modules in roles_of(block).items():
        for module in modules:
            weight = getattr(module, "weight", None)
            summed = isinstance(weight, DTensor) and any(placement.is_shard(1) for placement in weight.placements)
            head_width = getattr(module, "head_width", 0)
            module.forward = _in_role(module.forward, SUMMED if summed else role, head_width)
    for mlp in block.modules():
        if isinstance(mlp, MLP | SwiGLU):
            mlp.forward = _in_role(mlp.forward, "mlp")  # type: ignore[method-assign]


def _in_role(forward: Callable[..., Any], role: str, head_width: int = 0) -> Callable[..., Any]:
    def annotated(*arguments: Any, **keywords: Any) -> Any:
        with traceback.annotate({ROLE: role, HEAD_WIDTH: head_width}):
            return forward(*arguments, **keywords)

    return annotated


def _policy(kept: frozenset[str], context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    told = traceback.current_meta.get("custom") or {}
    role: str = told.get(ROLE, "")
    if str(operation).startswith("_c10d_functional.reduce_scatter_tensor."):
        wanted = SUMS.get(role, "") in kept
    else:
        scores = _is_matrix_of_scores(operation, arguments, told.get(HEAD_WIDTH, 0))
        wanted = role in kept and _is_product(operation) and not scores
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


_KERNELS = ("attention", "attn", "flash", "fmha", "vitrail.ring")  # in the names of kernels that no table lists


def _is_product(operation: Any) -> bool:
    """Say whether an operation multiplies matrices: linear layers in any precision, and attention as one kernel."""
    packet = getattr(operation, "overloadpacket", operation)
    name = str(operation)
    return packet in flop_registry or any(part in name for part in _KERNELS)


def _is_matrix_of_scores(operation: Any, arguments: tuple[Any, ...], head_width: int) -> bool:
    """Plain attention multiplies twice; its first product, queries by keys, is what no one wants to keep.

    It is the one that sums over the head width. With as many keys as that, both are alike, and as large: both are kept.
    """
    if not head_width or not str(operation).startswith("aten.bmm"):
        return False
    return arguments[0].shape[-1] == head_width != arguments[1].shape[-1]


# ---------------------------------------------------------------- a budget


@dataclass(frozen=True)
class Sizes:
    """Numbers that a block holds for each token: its input, all without recomputation, and the product of each role."""

    entry: int
    all: int
    roles: Mapping[str, int]
    worth: Mapping[str, float]  # FLOPs for each number of a role that are saved by keeping it


def sizes_of(block: nn.Module, *, pieces: bool = False) -> Sizes | None:
    """Return a block's sizes; None without roles. Queries and memory of cross-attention count as equally many."""
    roles = roles_of(block, pieces=pieces)
    if "attention" not in roles:
        return None
    attention: Any = roles["attention"][0]
    width = attention.proj.in_features
    layers: dict[str, list[Any]] = {role: list(modules) for role, modules in roles.items() if role != "attention"}
    sizes: dict[str, int] = {role: sum(layer.out_features for layer in found) for role, found in layers.items()}
    sizes["attention"] = width + 2 * (width // attention.head_width)  # log-sum-exp: fp32, so two numbers a head
    worth: dict[str, float] = {role: 2.0 * found[0].in_features for role, found in layers.items()}
    worth["attention"] = float("inf")  # it grows with the sequence, and its kernels are the slowest
    # Where a branch is scaled before it is added, the backward reads what came out of it.
    scaled = (
        hasattr(block, "modulation") or getattr(block, "post", False) or isinstance(getattr(block, "ls1", None), Scale)
    )
    if not scaled:
        worth["fc2"] = 0.0  # nothing after it asks for it
    hidden = sizes.get("fc1", 0)
    activations = hidden * (2 if "gate" in sizes else 1)
    inputs = 2 * width * (2 if hasattr(block, "modulation") else 1)  # of qkv and fc1
    branches = 2 * width if scaled else 0
    held = sum(size for role, size in sizes.items() if role not in ("proj", "fc2"))
    everything = 2 * width + inputs + held + activations + branches  # the input of both branches, and the rest
    return Sizes(width, everything, sizes, worth)


def _within(budget: float, blocks: Sequence[nn.Module], pieces: bool) -> Plan:
    """Plan each block within the budget by itself, so that all are, however many tokens each kind of block sees."""
    if budget == 1:
        return Plan((None,) * len(blocks), "budget 1: no recomputation")
    every = [sizes_of(block, pieces=pieces) for block in blocks]
    least = max((sizes.entry / sizes.all for sizes in every if sizes is not None), default=0.0)
    if budget < least:
        raise Unfit(
            f"parallel.recompute.budget: {budget:g} is less than the {least:.2g} that remains when everything is "
            "recomputed",
            f"parallel.recompute.budget={math.ceil(100 * least) / 100:g}",
        )
    kept: list[Kept] = []
    shares: dict[str, str] = {}
    for block, sizes in zip(blocks, every, strict=True):
        if sizes is None:
            kept.append(EVERYTHING)
            continue
        used = sizes.entry
        chosen: set[str] = set()
        for role in sorted(sizes.roles, key=lambda role: (-sizes.worth[role], sizes.roles[role])):
            if sizes.worth[role] and used + sizes.roles[role] <= budget * sizes.all:
                chosen.add(role)
                used += sizes.roles[role]
        kept.append(frozenset(chosen))
        shares[f"{_listed(frozenset(chosen))} ({used / sizes.all:.2f} of what it would hold)"] = type(block).__name__
    what = "; ".join(f"each {name} keeps {share}" for share, name in shares.items()) or "every block in full"
    return Plan(tuple(kept), f"budget {budget:g}: {what}")
