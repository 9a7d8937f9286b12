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
from vitrail.layers.convolutions import ALL, CHANNELS_LAST, Planes
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
        return _beside(x, number, self.group.group_name)

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
    config: Any = model.config
    if not in_slabs(config, dist.get_world_size(group)):
        return
    put(model, SharedPlanes(group, config.grid()[0]))


def put(model: nn.Module, planes: Planes) -> None:
    """Let the parts of a model that ask for planes ask these; what others call so is left alone."""
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


# ---------------------------------------------------------------- what travels
# Single operators, which compilers trace over, and which make no copies of maps but the one that is wanted.


@torch.library.custom_op("vitrail::beside", mutates_args=())
def _beside(x: Tensor, number: int, group: str) -> Tensor:
    out = _larger(x, 2 * number)
    out[:, :, number:-number] = x
    out[:, :, :number], out[:, :, -number:] = _trade_faces(x[:, :, :number], x[:, :, -number:], group)
    return out


@torch.library.custom_op("vitrail::beside_back", mutates_args=())
def _beside_back(gradient: Tensor, number: int, group: str) -> Tensor:
    out = _larger(gradient, -2 * number)
    out[:] = gradient[:, :, number:-number]
    # What came from a rank goes back to it.
    before, after = _trade_faces(gradient[:, :, :number], gradient[:, :, -number:], group)
    out[:, :, :number] += before
    out[:, :, -number:] += after
    return out


def _larger(x: Tensor, planes: int) -> Tensor:
    """Return an empty tensor like x with so many planes more, in x's layout."""
    shape = (*x.shape[:2], x.shape[2] + planes, *x.shape[3:])
    order = CHANNELS_LAST.get(x.ndim - 2)
    last = order is not None and not x.is_contiguous() and x.is_contiguous(memory_format=order)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order if last else torch.contiguous_format)


@_beside.register_fake
def _(x: Tensor, number: int, group: str) -> Tensor:
    return _larger(x, 2 * number)


@_beside_back.register_fake
def _(gradient: Tensor, number: int, group: str) -> Tensor:
    return _larger(gradient, -2 * number)


def _keep(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    _, ctx.number, ctx.group = inputs


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _beside_back(gradient, ctx.number, ctx.group), None, None


_beside.register_autograd(_back, setup_context=_keep)


def _trade_faces(first: Tensor, last: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Send `first` to the rank before and `last` to the one after; return what these have sent here, or zeros."""
    group = group_of(name)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent, sizes = [], [0] * size
    for face, other in ((first, rank - 1), (last, rank + 1)):
        if 0 <= other < size:
            sent.append(face.flatten())
            sizes[other] = face.numel()
    got = first.new_empty(first.numel() * len(sent))
    dist.all_to_all_single(got, torch.cat(sent), output_split_sizes=sizes, input_split_sizes=sizes, group=group)
    arrived = [piece.view(first.shape) for piece in got.split(first.numel())]
    before = arrived[0] if rank > 0 else torch.zeros_like(first)
    after = arrived[-1] if rank < size - 1 else torch.zeros_like(last)
    return before, after
