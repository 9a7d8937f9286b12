"""Facts of groups of parameters: how deep each parameter lies, and the table at the start of a run."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitrail.errors import UserError

if TYPE_CHECKING:
    from vitrail.training.optimizers.optimizer import Optimizer

BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.")
FROZEN = "frozen"  # the row of a table for what is not trained


def find_layers(names: Sequence[str]) -> dict[str, int]:
    """Return the layer of each parameter: 0 what embeds patches, block i of the encoder i + 1, and above all others.

    As BEiT and MAE count them: the last norm, heads and decoders are one layer above the last block.
    """
    blocks = {name: int(found[1]) for name in names if (found := BLOCK.match(name))}
    if not blocks:
        raise UserError("optimizer.layer_decay: this model has no encoder with blocks to count; leave it out")
    top = max(blocks.values()) + 2

    def layer(name: str) -> int:
        if name in blocks:
            return blocks[name] + 1
        return 0 if name.startswith("encoder.") and not name.startswith("encoder.norm.") else top

    return {name: layer(name) for name in names}


def group_table(optimizer: "Optimizer", base_rate: float, frozen: Sequence[Tensor] = ()) -> list[dict[str, Any]]:
    """Return one row a group, for people to check, and one for what is frozen."""
    rows = [
        {
            "name": group.name,
            "parameters": sum(p.numel() for p in group.sources),
            "tensors": len(group.params),
            "lr": base_rate * group.lr_multiplier,
            "weight_decay": group.weight_decay,
        }
        for group in optimizer.param_groups
    ]
    if not frozen:
        return rows
    size = sum(p.numel() for p in frozen)
    return [*rows, {"name": FROZEN, "parameters": size, "tensors": len(frozen), "lr": 0.0, "weight_decay": 0.0}]
