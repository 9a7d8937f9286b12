"""The mesh of ranks. Its axes exist at every world size: replicate (outer) and shard (inner)."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vitrail.errors import UserError


class Layout(NamedTuple):
    """What a strategy means in FSDP2's terms."""

    replicate: int
    shard: int
    reshard: bool  # free the gathered parameters of a block after its forward


def layout_of(strategy: str, group: int | None, world: int) -> Layout:
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD over groups of `group` ranks, NO_SHARD or DDP."""
    if strategy in ("NO_SHARD", "DDP"):
        return Layout(world, 1, reshard=False)
    if strategy == "HYBRID_SHARD":
        if group is None:
            raise UserError("parallel.group is missing: HYBRID_SHARD needs the number of ranks that share one copy")
        shard = group
        if world % shard:
            raise UserError(
                f"parallel.group: {shard} does not divide the {world} ranks; choose one of "
                f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
            )
        return Layout(world // shard, shard, reshard=True)
    return Layout(1, world, reshard=strategy == "FULL_SHARD")


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
