"""How long a device needs for one operation.

That is what its curves say of such work, but never less than its bytes take, nor than the least that a kernel takes.
"""

from collections.abc import Iterable
from typing import Literal

from vitrail.cost.cluster import Device, at
from vitrail.cost.trace import Compute, Op

Way = Literal["forward", "backward"]

LIMITS = {
    "gemm": "matrix products",
    "attention": "attention",
    "convolution": "convolutions",
    "memory": "memory bandwidth",
}
NARROW = 64  # attention kernels pad narrower heads to this width


class Seconds(dict[str, float]):
    """Time by what it is spent on; 0 for all that is not named."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        for name, seconds in other.items():
            self[name] += times * seconds
        return self

    @property
    def total(self) -> float:
        return sum(self.values())


def seconds_of(ops: Iterable[Op], device: Device, compute: Compute, way: Way) -> Seconds:
    """Seconds of all the operations, by what limits each."""
    spent = Seconds()
    for op in ops:
        share = at(device.elementwise, op.bytes / op.kernels) if op.kind == "memory" and op.bytes else 1.0
        moving = max(op.bytes / (1e9 * share * device.bandwidth_gb_s), 1e-6 * device.kernel_us * op.kernels)
        working = op.flops / rate(op, device, compute, way) if op.flops and op.kind != "memory" else 0.0
        # Products that wait for their bytes (thin ones) are the memory's doing.
        spent[LIMITS[op.kind] if working >= moving else LIMITS["memory"]] += max(working, moving)
    return spent


def rate(op: Op, device: Device, compute: Compute, way: Way) -> float:
    """FLOP/s that the device reaches with such an operation."""
    bf16 = device.peak("bf16")
    if op.kind == "attention":
        return _attention_rate(op, device, compute, way)
    if op.kind == "convolution":
        return at(device.convolution, op.flops) * (device.peak("fp32") if compute == "fp32" else bf16)
    if compute == "fp32":
        return at(device.gemm_fp32, op.flops) * device.peak("fp32")
    return at(device.gemm, op.flops) * device.peak(compute)


def _attention_rate(op: Op, device: Device, compute: Compute, way: Way) -> float:
    keys, width = op.shape[3:] if len(op.shape) == 5 else (1024, NARROW)
    found = at(device.attention[way], keys) * device.peak("bf16") * min(1.0, width / NARROW)
    if compute != "fp32":
        return found  # float8 is for products of linear layers alone
    return min(found / 2, device.peak("fp32"))  # twice the bytes, and no faster than the type allows
