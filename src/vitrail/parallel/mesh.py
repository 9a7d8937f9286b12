"""The mesh of ranks. All axes exist at every world size, outer to inner: pipeline, replicate, shard, context, tensor.

Ranks of the tensor and context axes share the samples of a batch, and each holds a part of their tokens; ranks of the
replicate and shard axes have samples of their own. Parameters of blocks are sharded over shard x context (tensor ranks
hold different slices of them already), all others over shard x context x tensor.

Collectives that gradients pass through. What each computes is a function of all ranks' inputs, and its backward is
the adjoint with respect to the SUM of the losses of all ranks; so a gradient never needs a factor.

The functions of PyTorch that these are made of can be traced by its compiler. Their own gradients are not relied on:
in 2.13 waiting for a gathered tensor whose first size is 1 loses them, silently.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from vitrail.errors import UserError
from vitrail.parallel.agree import Group
from vitrail.parallel.private import all_gathered, flatten, sum_scattered, summed
from vitrail.recipe.sections import Parallel

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
FLAT = {"fsdp": ("shard", "context"), "fsdp_tensor": ("shard", "context", "tensor"), "sequence": ("context", "tensor")}


class Layout(NamedTuple):
    """The number of ranks of each axis, and what sharding does after a forward."""

    replicate: int
    shard: int
    reshard: bool  # free the gathered parameters of a block after its forward
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Ranks that have samples of their own."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Ranks that share the tokens of a sample."""
        return self.context * self.tensor

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1) or "1 rank"


def layout_of(parallel: Parallel, world: int) -> Layout:
    """Return the layout of the `parallel` section of a recipe; refuse sizes that do not make `world` ranks."""
    model_axes = {axis: getattr(parallel, axis) for axis in ("pipeline", "context", "tensor")}
    explicit = [key for key in ("replicate", "shard", "reshard") if getattr(parallel, key) is not None]
    if explicit and parallel.strategy is not None:
        raise UserError(
            f"parallel.strategy: {parallel.strategy!r} stands for replicate, shard and reshard, but parallel."
            f"{explicit[0]} is given too; leave one of them out"
        )
    if parallel.group is not None and parallel.strategy != "HYBRID_SHARD":
        raise UserError(
            "parallel.group: only HYBRID_SHARD has groups; leave it out, or set parallel.strategy=HYBRID_SHARD"
        )
    if explicit:
        sizes = model_axes | {"replicate": parallel.replicate or 1, "shard": parallel.shard or -1}
        if parallel.shard is None and -1 in (*model_axes.values(), parallel.replicate):
            sizes["shard"] = 1  # another axis takes the rest
        return Layout(reshard=parallel.reshard is not False, **_fill(sizes, world))
    rest = _fill(model_axes | {"data": 1 if -1 in model_axes.values() else -1}, world)
    ranks = rest.pop("data")
    strategy = parallel.strategy or "FULL_SHARD"
    if strategy in ("NO_SHARD", "DDP"):
        return Layout(ranks, 1, reshard=False, **rest)
    if strategy != "HYBRID_SHARD":
        return Layout(1, ranks, reshard=strategy == "FULL_SHARD", **rest)
    if parallel.group is None:
        raise UserError(
            "parallel.group is missing: HYBRID_SHARD needs the number of ranks that share one copy; set it to one of "
            f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )
    if ranks % parallel.group:
        what = f"{ranks} ranks" if ranks == world else f"{ranks} ranks that the other axes leave of {world}"
        raise UserError(
            f"parallel.group: {parallel.group} does not divide the {what}; choose one of "
            f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
        )
    return Layout(ranks // parallel.group, parallel.group, reshard=True, **rest)


def _fill(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Put what the others leave in the place of -1; refuse what does not multiply to the world."""
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
    if len(open_axes) > 1:
        raise UserError(
            f"parallel: {' and '.join(open_axes)} are both -1; only one axis can take what the others leave"
        )
    if open_axes and world % known == 0:
        return sizes | {open_axes[0]: world // known}
    if known == world:
        return sizes
    axis, size = max(((a, s) for a, s in sizes.items() if s != -1), key=lambda pair: pair[1])
    others = known // size
    advice = f"start {known} ranks" if known > 1 else "start 1 rank"
    if world % others == 0 and not open_axes:
        advice += f", or set parallel.{axis}={world // others}"
    elif world % others == 0:
        fitting = [n for n in range(1, world // others + 1) if (world // others) % n == 0]
        near = min(fitting, key=lambda n: abs(n - size))
        advice = f"start a multiple of {known} ranks, or set parallel.{axis}={near}"
    raise UserError(f"parallel: {shown} does not {'divide' if open_axes else 'make'} the {world} ranks; {advice}")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a layout on one kind of device, and the groups that are made of them."""

    root: DeviceMesh
    flat: dict[str, DeviceMesh]  # several axes as one

    @classmethod
    def make(cls, layout: Layout, device_type: str) -> "Mesh":
        root = init_device_mesh(device_type, layout.sizes, mesh_dim_names=AXES)
        return cls(root, {name: flatten(root[axes], name) for name, axes in FLAT.items()})

    @cached_property
    def blocks(self) -> DeviceMesh:
        """Over which parameters of blocks are sharded: replicate x (shard and context)."""
        return self._hybrid("fsdp")

    @cached_property
    def others(self) -> DeviceMesh:
        """Over which all other parameters are sharded: replicate x (shard, context and tensor)."""
        return self._hybrid("fsdp_tensor")

    def _hybrid(self, name: str) -> DeviceMesh:
        return self._slice("replicate", name) if self.root["replicate"].size() > 1 else self.flat[name]

    def _slice(self, *names: str) -> DeviceMesh:
        # PyTorch means to replace such slices by something that is not there in all versions yet.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return self.root[names]

    def __getitem__(self, axis: str) -> DeviceMesh:
        return self.flat.get(axis) or self.root[axis]

    def like(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the ranks of a mesh of another device as a mesh of this one's."""
        if mesh.device_type == self.root.device_type:
            return mesh
        names = mesh.mesh_dim_names
        assert names is not None
        return self[names[0]] if len(names) == 1 else self._slice(*names)

    def rank(self, axis: str) -> int:
        return self[axis].get_local_rank()

    @property
    def data_rank(self) -> int:
        """Return which of the data-parallel ranks this one belongs to."""
        return self.rank("replicate") * self.root["shard"].size() + self.rank("shard")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(parameter: Tensor, shard: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """Make a rank's shard a part of a tensor that is spread as a parameter is, or so over another mesh."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, shape, stride = mesh or parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return every rank's x, one after another along dim, on every rank; backward: sums, scattered."""
    return x if dist.get_world_size(group) == 1 else _Gather.apply(x, dim % x.ndim, group)


def scatter_sum(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along dim of the sum over ranks; backward: gathered."""
    return x if dist.get_world_size(group) == 1 else _ScatterSum.apply(x, dim % x.ndim, group)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks, on every rank; backward: the same."""
    return x if dist.get_world_size(group) == 1 else _Total.apply(x, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return sum_scattered(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return sum_scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_gathered(gradients[0], ctx.dim, ctx.group), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.group), None
