"""How deep a parameter lies in a model, for rates that fall with the depth."""

import re
from collections.abc import Sequence

from vitrail.errors import UserError

BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.")


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
