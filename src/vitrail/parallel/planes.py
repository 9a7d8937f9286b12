"""Maps whose planes several ranks share: each rank has a slab of them, in the order of ranks.

- slabs are whole planes of patches, and as equal as these allow. Where they are equal, a rank's tokens are its slab;
  else tokens are gathered before they become maps
- a convolution needs some planes of the ranks beside it: before each one the outer planes of slabs are exchanged, and
  in the backward their gradients go back. What lies outside of the whole map is zero, as a convolution pads it
- a norm needs means over all ranks
- models ask this in the place of layers.convolutions.ALL, and know of no ranks

Shapes: B batch, C channels, S spatial sizes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers.convolutions import ALL, Planes
from vitrail.layers.patches import Part
from vitrail.parallel.private import group_of, summed


class SharedPlanes(Planes):
    def __init__(self, group: dist.ProcessGroup, number: int):
        """`number` planes of patches are shared."""
        self.group, self.part = group, Part(dist.get_rank(group), dist.get_world_size(group))
        self.parts, self.share = self.part.count, len(rows_of(number, self.part)) / number

    def beside(self, x: Tensor, number: int) -> Tensor:
        if x.shape[2] < number:
            raise UserError(
                f"parallel.context: a rank has {x.shape[2]} planes of the maps, and a convolution needs {number} of "
                "the rank beside it; use fewer context and tensor ranks, or a larger crop"
            )
        before, after = _trade_faces(x[:, :, :number], x[:, :, -number:], self.group.group_name)
        return torch.cat([before, x, after], dim=2)

    def mean(self, x: Tensor) -> Tensor:
        return summed(x * self.share, self.group)

    def rows(self, number: int) -> range:
        return rows_of(number, self.part)


def rows_of(number: int, part: Part) -> range:
    """Return a part's planes of so many: the first parts have one more where they do not divide."""
    each, more = divmod(number, part.count)
    start = part.index * each + min(part.index, more)
    return range(start, start + each + (part.index < more))


def share(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the maps of a model lie in slabs on the ranks of a group, where they can."""
    if not in_slabs(model.config, dist.get_world_size(group)):
        return
    planes = SharedPlanes(group, model.config.grid()[0])
    for module in model.modules():
        if getattr(module, "planes", None) is ALL:
            module.planes = planes  # type: ignore[assignment]


def in_slabs(model: Any, parts: int) -> bool:
    """Tell whether ranks share the planes of a model's maps; `model` is its config."""
    return parts > 1 and hasattr(model, "in_slabs") and model.in_slabs(parts)


class Maps:
    """The slabs of maps that parts have, where in_slabs(); `model` is the model's config."""

    def __init__(self, model: Any, count: int):
        self.number, self.patch, self.count = model.grid()[0], model.patch[0], count

    def rows(self, index: int) -> range:
        """Return the voxels of a part along the first axis."""
        rows = rows_of(self.number, Part(index, self.count))
        return range(rows.start * self.patch, rows.stop * self.patch)

    def cut(self, image: Tensor, index: int) -> Tensor:
        """Return a part's planes of images [B, C, *S]; they may be these already."""
        rows = self.rows(index)
        return image if image.shape[2] == len(rows) else image[:, :, rows.start : rows.stop]

    def pad(self, x: Tensor) -> Tensor:
        """Make a part's slab as large as the largest."""
        missing = len(self.rows(0)) - x.shape[2]
        return x if not missing else F.pad(x, (*[0] * 2 * (x.ndim - 3), 0, missing))

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return whole maps of the padded slabs of all parts."""
        return torch.cat([x[:, :, : len(self.rows(index))] for index, x in enumerate(outputs)], dim=2)


@torch.library.custom_op("vitrail::trade_faces", mutates_args=())
def _trade_faces(first: Tensor, last: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Send `first` to the rank before and `last` to the one after; return what these have sent here, or zeros."""
    ranks = group_of(group)
    size, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    number, sizes = first.numel(), [0] * size
    sent = []
    if rank > 0:
        sizes[rank - 1] = number
        sent.append(first.flatten())
    if rank < size - 1:
        sizes[rank + 1] = number
        sent.append(last.flatten())
    flat = first.new_empty(number * len(sent))
    dist.all_to_all_single(flat, torch.cat(sent), output_split_sizes=sizes, input_split_sizes=sizes, group=ranks)
    arrived = [piece.view(first.shape) for piece in flat.split(number)]
    before = arrived[0] if rank > 0 else first.new_zeros(first.shape)
    after = arrived[-1] if rank < size - 1 else first.new_zeros(first.shape)
    return before.clone(), after.clone()  # an operator's outputs share no memory


@_trade_faces.register_fake
def _(first: Tensor, last: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return first.new_empty(first.shape), last.new_empty(last.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.group = inputs[2]


def _back(ctx: Any, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_trade_faces(before, after, ctx.group), None  # what came from a rank goes back to it


_trade_faces.register_autograd(_back, setup_context=_keep)
