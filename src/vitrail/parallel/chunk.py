"""Very long sequences piece by piece: what acts on each token alone need not see all tokens at once.

- each piece is computed again in the backward, so the hidden channels of the whole sequence never exist
- MLPs of blocks; and heads that predict voxels, with the norm before them
- pieces are of tokens, the same for all samples of a batch; a sequence that fits one piece is left as it is
- inside a block that is recomputed too, the MLP's forward runs three times: at first, for the block, for the piece
- HFU does not count what pieces compute again (how many there are follows from the tokens of each pass)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.layers.block import MLP, SwiGLU, join_condition, split_condition
from vitrail.layers.variables import VariableHead
from vitrail.models.dit import DiT, Final
from vitrail.models.encoder import TokenDecoder
from vitrail.models.model import Model, Side
from vitrail.models.sap import SAP
from vitrail.recipe.sections import Chunk


def apply(model: Model, c: Chunk) -> None:
    """Cut what the recipe names into pieces, in place; refuses a model without heads for voxels."""
    if c.mlp is not None:
        for block in model.blocks():
            for module in block.modules():
                if isinstance(module, MLP | SwiGLU):
                    in_pieces_of(module, c.mlp)
    if c.head is None:
        return
    if not has_head(model):
        raise UserError(f"parallel.chunk.head: {no_head(model)}; leave it out")
    for module in model.modules():  # of a pipeline this rank may have none of them
        if isinstance(module, TokenDecoder) and isinstance(module.head, nn.Linear):
            _decoder(module, c.head)
        elif isinstance(module, Final):
            _final(module, c.head)
        elif isinstance(module, SAP):
            _sap(module, c.head)


def has_head(model: Model) -> bool:
    return isinstance(model, SAP | DiT) or any(isinstance(module, TokenDecoder) for module in model.modules())


def no_head(model: Model) -> str:
    return f"{type(model).__name__} has no head that predicts voxels from tokens"


def in_pieces(function: Callable[[Tensor], Tensor], x: Tensor, size: int, dim: int = 1) -> Tensor:
    """function(x) for a function that acts on each token alone, `size` tokens at a time."""
    if x.shape[dim] <= size:
        return function(x)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(function, piece, **options) for piece in x.split(size, dim)], dim)


def in_pieces_of(module: nn.Module, size: int) -> None:
    """Make a module of tokens [B, N, D] see `size` of them at a time."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        return in_pieces(inner, x, size)

    module.forward = forward
    module.chunked = True  # type: ignore[assignment]  # recomputation by role leaves it alone


def _decoder(decoder: TokenDecoder, size: int) -> None:
    """Norm and head as one: a linear layer alone holds nothing but its input."""
    norm, head = decoder.norm, decoder.head
    normed = (lambda x: x) if norm is None else norm.forward
    last: Callable[..., Tensor] = head.forward
    if norm is not None:
        norm.forward = lambda x: x

    def inner(x: Tensor, *ids: Any) -> Tensor:
        return last(normed(x), *ids)

    def forward(x: Tensor, ids: Any = None) -> Tensor:
        if not isinstance(head, VariableHead):
            return in_pieces(inner, x, size)
        if not head.separate:
            return in_pieces(lambda piece: inner(piece, ids), x, size)
        number = head.variables if ids is None else len(ids)  # tokens are variable by variable: cut each alike

        def voxels(piece: Tensor) -> Tensor:
            return inner(piece.flatten(1, 2), ids).unflatten(1, (number, -1))

        return in_pieces(voxels, x.unflatten(1, (number, -1)), size, dim=2).flatten(1, 2)

    head.forward = forward  # type: ignore[method-assign, assignment]


def _final(final: Final, size: int) -> None:
    inner = final.forward

    def forward(x: Tensor) -> Tensor:
        condition, tokens = split_condition(x)
        return in_pieces(lambda piece: inner(join_condition(condition, piece)), tokens, size)

    final.forward = forward  # type: ignore[method-assign]


def _sap(model: SAP, size: int) -> None:
    inner, prefix = model.name_voxels, model.encoder.prefix

    def name_voxels(x: Tensor, side: Side) -> Tensor:
        # The tokens before the patches are cut off by the head itself: each piece gets some to cut.
        return in_pieces(lambda piece: inner(F.pad(piece, (0, 0, prefix, 0)), side), x[:, prefix:], size)

    model.name_voxels = name_voxels  # type: ignore[method-assign]
