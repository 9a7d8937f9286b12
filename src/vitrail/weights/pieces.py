"""How a parameter is made from tensors of a file: pure functions of tensors, which also run on the meta device.

So a load is planned, and refused, from shapes alone before any number is copied.
Shapes: D width, C channels, H heads, K head width, N tokens; kernels are [D, C, *patch] as convolutions store them.

What became of every tensor: a table for people, JSON for the log.

The model that is filled, and what a file's tensors become in it.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import grid_coordinates, sincos

Action = Literal["copied", "permuted", "resized", "inflated", "skipped", "unused"]

MEANINGS: dict[str, str] = {
    "copied": "as it is in the file",
    "permuted": "the same numbers in this library's order",
    "resized": "interpolated over another grid",
    "inflated": "spread over new axes or channels",
    "skipped": "in the model, not in the file: keeps its starting values",
    "unused": "in the file, not in the model",
}


@dataclass(frozen=True)
class Entry:
    """One parameter of the model, or (unused) one tensor of the file."""

    action: Action
    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()  # names in the file
    note: str = ""


@dataclass(frozen=True)
class Report:
    path: str
    adapter: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()  # what a person should know and no file can tell

    def __getitem__(self, action: Action) -> list[Entry]:
        return [entry for entry in self.entries if entry.action == action]

    def names(self, action: Action) -> list[str]:
        return [entry.name for entry in self[action]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self[action])} {action}" for action in MEANINGS if self[action])  # type: ignore[index]
        rows = [(action, *row) for action in MEANINGS for row in _rows(self[action])]  # type: ignore[index]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        ]
        head = f"weights from {self.path} ({self.adapter}): {counts}"
        return "\n".join([head, *(f"  {line}" for line in lines), *(f"  note: {note}" for note in self.notes)])


def _rows(entries: list[Entry]) -> list[tuple[str, str, str]]:
    """List (name, shape, note): blocks that differ in their number alone share a row, and those left out alike."""

    def alike(entry: Entry) -> tuple[str, tuple[int, ...], str]:
        if entry.action in ("skipped", "unused"):
            return "", (), entry.note
        return re.sub(r"\.\d+\.", ".#.", entry.name), entry.shape, entry.note

    rows = []
    for (pattern, shape, note), found in itertools.groupby(sorted(entries, key=alike), key=alike):
        group = list(found)
        if not pattern:
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            rows.append((group[0].name + more, "", note))
            continue
        numbers = sorted({int(number.group(1)) for e in group if (number := re.search(r"\.(\d+)\.", e.name))})
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        rows.append((pattern.replace("#", span, 1), " x ".join(map(str, shape)) or "scalar", note))
    return rows


@dataclass(frozen=True)
class Made:
    """A parameter's value and how it came about."""

    value: Tensor
    action: Action = "copied"
    note: str = ""


@dataclass(frozen=True)
class Piece:
    """`make` takes the tensors of `sources`, in order."""

    sources: tuple[str, ...]
    make: Callable[..., Made] = Made


# ---------------------------------------------------------------- attention


# Which channels of a head are turned together: (2i, 2i + 1) as here, or (i, i + K/2) as DINOv3's, or as here but with
# the last axis first, as TorchDiTan's.
Pairs = Literal["neighbours", "halves", "columns first"]


def head_major(q: Tensor, k: Tensor, v: Tensor, *, head_width: int, pairs: Pairs | None = None) -> Made:
    """Reorder rows of q, k and v, each (head; head width), to (group; q of its heads, k, v; head width)."""
    if k.shape[0] % head_width or q.shape[0] % k.shape[0] or k.shape != v.shape:
        raise ValueError(
            f"queries have {q.shape[0]} rows and keys {k.shape[0]}, the model's heads are {head_width} wide"
        )
    order = torch.arange(head_width, device=q.device)
    if pairs == "halves":
        order = order.view(2, -1).T.flatten()
    elif pairs == "columns first":
        order = order.view(2, -1).flip(0).flatten()
    q, k = (t.unflatten(0, (-1, head_width))[:, order] for t in (q, k))
    rows = [q.unflatten(0, (len(k), -1)), k.unsqueeze(1), v.unflatten(0, (-1, 1, head_width))]
    return Made(torch.cat(rows, dim=1).flatten(0, 2), "permuted", "rows to (head; q, k, v)")


def fused_head_major(qkv: Tensor, *, head_width: int, pairs: Pairs | None = None, masked_keys: bool = False) -> Made:
    """Reorder one tensor of rows (q, k, v; head; head width) in the same way."""
    if qkv.shape[0] % 3:
        raise ValueError(f"fused queries, keys and values have {qkv.shape[0]} rows, not a multiple of 3")
    q, k, v = qkv.chunk(3)
    return head_major(q, torch.zeros_like(k) if masked_keys else k, v, head_width=head_width, pairs=pairs)


def keys_and_values(kv: Tensor, *, head_width: int) -> Made:
    """Reorder rows (k, v; head; head width) to (head; k, v; head width)."""
    rows = kv.unflatten(0, (2, -1, head_width)).transpose(0, 1)
    return Made(rows.flatten(0, 2), "permuted", "rows to (head; k, v)")


def first_channels(rows: Tensor, *, voxels: int) -> Made:
    """Return the first half of the channels of each voxel: what is denoised, without its variance."""
    kept = rows.unflatten(0, (voxels, 2, -1))[:, 0].flatten(0, 1)
    return Made(kept, note="without the rows of variances, which SiT does not use")


# ---------------------------------------------------------------- patches


def patch_kernel(kernel: Tensor, *, patch: tuple[int, ...], channels: int) -> Made:
    """Make the linear layer [D, P*C] of a convolution's kernel [D, C, *patch]; fewer axes and channels are inflated.

    New leading axes repeat the kernel and divide by their size; other channels share the sum over the old ones
    evenly. So an input that is constant along the new axis, or the same in all channels, gives the same tokens.
    """
    old, notes = tuple(kernel.shape[2:]), []
    new_axes = len(patch) - len(old)
    if new_axes < 0 or old != patch[new_axes:]:
        raise ValueError(f"patches of the file are {times(old)} voxels, the model's {times(patch)}")
    if new_axes:
        depth = patch[:new_axes]
        kernel = kernel.reshape(*kernel.shape[:2], *(1,) * new_axes, *old).expand(-1, -1, *patch) / math.prod(depth)
        notes.append(f"kernel {times(old)} repeated over depth {times(depth)}")
    if kernel.shape[1] != channels:
        notes.append(f"{kernel.shape[1]} channels shared by {channels}")
        kernel = kernel.sum(dim=1, keepdim=True).expand(-1, channels, *patch) / channels
    value = kernel.movedim(1, -1).flatten(1)
    return Made(value, "inflated" if notes else "copied", ", ".join(notes))


def variable_kernel(kernel: Tensor, *, patch: tuple[int, ...], variables: int) -> Made:
    """Make a kernel for each variable [V, P, D]: each is treated as a grey image."""
    one = patch_kernel(kernel, patch=patch, channels=1)
    value = one.value.T.expand(variables, -1, -1)
    return Made(value, "inflated", f"{one.note + ', ' if one.note else ''}the same for {variables} variables")


def as_kernel(weight: Tensor, *, patch: tuple[int, ...]) -> Tensor:
    """Return the linear layer [D, P*C] as a convolution's kernel [D, C, *patch]."""
    return weight.unflatten(1, (*patch, -1)).movedim(-1, 1)


def voxel_rows(rows: Tensor, *, old: tuple[int, ...], new: tuple[int, ...]) -> Made:
    """Fit rows (voxels of a patch; channels) of an output layer; new leading axes repeat them."""
    if old == new:
        return Made(rows)
    new_axes = len(new) - len(old)
    if new_axes < 0 or new[new_axes:] != old or rows.shape[0] % math.prod(old):
        raise ValueError(f"patches of the file are {times(old)} voxels, the model's {times(new)}")
    depth = math.prod(new[:new_axes])
    return Made(rows.repeat(depth, *(1,) * (rows.ndim - 1)), "inflated", f"rows repeated over depth {depth}")


# ---------------------------------------------------------------- positions


def position_table(
    table: Tensor, *, old: tuple[int, ...], new: tuple[int, ...], skip: int = 0, smooth: bool = True
) -> Made:
    """Fit rows of a table [(1,) skip + N, D] over the old grid to the new one; new axes repeat them."""
    rows = table.reshape(-1, table.shape[-1])[skip:]
    new_axes = len(new) - len(old)
    if new_axes < 0:
        raise ValueError(f"positions over {len(old)} axes cannot serve a model of {len(new)}")
    notes = []
    if old != new[new_axes:]:
        rows = resize(rows.float(), old, new[new_axes:], smooth=smooth)
        notes.append(f"grid {times(old)} to {times(new[new_axes:])}")
    if new_axes:
        depth = math.prod(new[:new_axes])
        rows = rows.repeat(depth, 1)
        notes.append(f"repeated over depth {depth}")
    action: Action = "inflated" if new_axes else "resized" if notes else "copied"
    return Made(rows, action, ", ".join(notes))


def resize(rows: Tensor, old: tuple[int, ...], new: tuple[int, ...], *, smooth: bool = True) -> Tensor:
    """Resize [N, D] over one grid to another: cubic in two dimensions, else linear.

    `smooth`: filtered where it shrinks, as timm does; PyTorch's cubic kernel is another one without.
    """
    if len(old) > 3:
        raise ValueError(f"positions over {len(old)} axes cannot be resized; keep the grid {times(old)}")
    image = rows.T.reshape(1, -1, *old)
    if len(old) == 2:
        image = F.interpolate(image, new, mode="bicubic", antialias=smooth, align_corners=False)
    else:
        image = F.interpolate(image, new, mode="linear" if len(old) == 1 else "trilinear", align_corners=False)
    return image.flatten(2)[0].T


def sincos_rows(grid: tuple[int, ...], width: int) -> Tensor:
    return sincos(grid_coordinates(grid, (1,) * len(grid)) - 0.5, width)


def first_rows(*tensors: Tensor, counts: tuple[int, ...], added: int = 0) -> Made:
    """Stack the tokens that stand before the patches; the last tensor is a table whose first rows are added.

    A class token whose file adds a position to it starts as their sum.
    """
    tokens = [t.reshape(-1, t.shape[-1])[:n] for t, n in zip(tensors, counts, strict=False)]
    value = torch.cat(tokens)
    if not added:
        return Made(value)
    table = tensors[len(counts)]
    rows = table.reshape(-1, table.shape[-1])[:added]
    return Made(value + F.pad(rows, (0, 0, 0, len(value) - added)), note="with its row of the position table")


def class_row(table: Tensor, *, there: bool) -> Made:
    """Return the class token's own position: the first row of a table that has one, or nothing."""
    row = table.reshape(-1, table.shape[-1])[:1]
    return Made(row) if there else Made(torch.zeros_like(row), note="0: the file's class token has no position")


def axes_turned(weight: Tensor) -> Made:
    """Return a layer of a size and a place [D, 1 + axes] for places whose first axis is the slowest: theirs is x."""
    return Made(torch.cat([weight[:, :1], weight[:, 1:].flip(1)], dim=1), "permuted")


def part(tensor: Tensor, *, index: int, of: int) -> Made:
    """Return one of several layers that a file keeps in one tensor."""
    return Made(tensor.chunk(of)[index], note=f"part {index + 1} of {of}")


def zeros(*shape: int) -> Callable[..., Made]:
    """Make a bias that the file's layer does not have."""

    def make(weight: Tensor) -> Made:
        return Made(torch.zeros(shape, device=weight.device), note="0: the file's layer has no bias")

    return make


def times(sizes: tuple[Any, ...]) -> str:
    """Write sizes as people do: 4 x 4."""
    return " x ".join(map(str, sizes))


CLASSES = ("head.", "label_embed.", "decoder.out.")  # layers whose size is the number of classes


class Target:
    """The parts of a model that matter here: its parameters, and the make of its encoder."""

    def __init__(self, model: nn.Module):
        self.model: Any = model
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.encoder: Any = getattr(model, "encoder", None)
        if self.encoder is None or not hasattr(self.encoder, "patch_embed"):
            raise ValueError(f"{type(model).__name__} has no encoder that weights could be loaded into")
        self.config = self.encoder.config
        self.patch: tuple[int, ...] = self.encoder.patch
        self.ndim = len(self.patch)
        config: Any = model.config
        self.channels: int = getattr(config, "channels_in", None) or config.channels
        shape = getattr(config, "shape", None)
        self.grid = None if shape is None else self.config.grid(per_axis(shape, self.ndim))
        self.positions: str = self.config.positions

    def by_class(self, name: str) -> bool:
        """Return whether a parameter has a row for each class."""
        return name.startswith(CLASSES) or (name.startswith("decoder.head.") and hasattr(self.model.config, "classes"))

    def head_width(self, name: str) -> int:
        """Return the head width of the attention that a parameter belongs to."""
        return self.model.get_submodule(name.rpartition(".attn.")[0] + ".attn").head_width


@dataclass
class Translation:
    """Pieces by the name of the parameter that each becomes; reasons for what is left out; what is wrong."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # refused unless strict is off
    wrong: list[str] = field(default_factory=list)  # refused always
    decoder: list[str] = field(default_factory=list)  # problems that matter only where a decoder is filled, too
    classes: list[str] = field(default_factory=list)  # why the classifier cannot be the file's
    skipped: dict[str, str] = field(default_factory=dict)  # parameters that start anew, and why
    notes: list[str] = field(default_factory=list)


def place_patch_embed(
    name: str, ours: str, target: Target, out: Translation, prepare: Callable[[Tensor], Tensor] = lambda kernel: kernel
) -> None:
    """Place a kernel and its bias, for all channels together or for each variable by itself."""
    known = target.config.variables
    if ours.endswith("bias"):
        each = None if known is None else partial(_for_each, number=len(known.known))
        out.pieces[ours if each is None else "encoder.patch_embed.bias"] = Piece((name,), each or Made)
        return

    def make(kernel: Tensor) -> Made:
        if known is None:
            return patch_kernel(prepare(kernel), patch=target.patch, channels=target.channels)
        return variable_kernel(prepare(kernel), patch=target.patch, variables=len(known.known))

    out.pieces[ours if known is None else "encoder.patch_embed.weight"] = Piece((name,), make)


def _for_each(bias: Tensor, *, number: int) -> Made:
    return Made(bias.expand(number, -1), "inflated", f"the same for {number} variables")


def rope_inflation(target: Target) -> str:
    """Say why two axes share out a head's channels otherwise than three do."""
    start = "the file's rotations are of two axes, and those of three turn other channels"
    if hasattr(target.config, "rope"):
        return f"{start}; set rope: superposed, which starts as the two-dimensional model"
    return f"{start}; use weights with learned positions"


def is_superposed(target: Target) -> bool:
    return getattr(target.config, "rope", "axial") == "superposed"
