"""How long a device needs for one operation.

That is what its curves say of such work, but never less than its bytes take, nor than the least that a kernel takes.
"""

import math
from collections.abc import Iterable
from typing import Literal

from vitrail.cost.cluster import Device, at
from vitrail.cost.trace import Op
from vitrail.parallel import float8
from vitrail.recipe.sections import Precision

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


def seconds_of(ops: Iterable[Op], device: Device, precision: Precision, way: Way) -> Seconds:
    """Seconds of all the operations, by what limits each."""
    spent = Seconds()
    for op in ops:
        share = bandwidth_share(op, device) if op.kind == "memory" else 1.0
        moving = max(op.bytes / (1e9 * share * device.bandwidth_gb_s), 1e-6 * device.kernel_us * op.kernels)
        working = op.flops / rate(op, device, precision, way) if op.flops and op.kind != "memory" else 0.0
        if op.kind == "convolution" and device.name != "cpu":
            working += turning(op, device)
        # Products that wait for their bytes (thin ones) are the memory's doing.
        spent[LIMITS[op.kind] if working >= moving else LIMITS["memory"]] += max(working, moving)
    return spent


def bandwidth_share(op: Op, device: Device) -> float:
    """Of the memory's bandwidth, what a kernel reaches that goes through it like this one."""
    curve = device.elementwise.get(op.walk)
    if curve is None or not op.bytes:
        return 1.0
    return at(curve, op.shape[0] if op.walk == "maps" else op.bytes / op.kernels)


def turning(op: Op, device: Device) -> float:
    """Seconds in which a GPU turns maps to channels-last and back, which is what its convolutions compute in."""
    turned = Op("memory", 0.0, 2 * op.bytes, kernels=2, walk="strided")
    return turned.bytes / (1e9 * bandwidth_share(turned, device) * device.bandwidth_gb_s)


def rate(op: Op, device: Device, precision: Precision, way: Way) -> float:
    """FLOP/s that the device reaches with such an operation."""
    wide = precision.compute == "fp32"
    if op.kind == "attention":
        return _attention_rate(op, device, wide, way)
    if op.kind == "convolution":
        channels = math.sqrt(math.prod(op.shape))
        return at(device.convolution, channels) * device.peak("fp32" if wide else "bf16")
    if wide:
        return at(device.gemm_fp32, op.flops) * device.peak("fp32")
    gain = _float8_gain(op, precision) if precision.compute == "float8" else 1.0
    return at(device.gemm, op.flops) * device.peak("bf16") * gain


def _float8_gain(op: Op, precision: Precision) -> float:
    """How much faster a product of a block's linear layer is in float8, as a run judges the layer before it starts."""
    if not op.layer:
        return 1.0
    rows, smaller, larger = op.layer
    if smaller % float8.MULTIPLE or larger % float8.MULTIPLE:
        return 1.0
    gain = float8.speedup(rows, smaller, larger)
    return gain if gain >= float8.PAYS or precision.float8_layers == "all" else 1.0


def _filled(tokens: int, device: Device) -> float:
    """The share of tiles that tokens fill; partly empty ones take as long as full ones."""
    return tokens / (device.attention_tile * math.ceil(tokens / device.attention_tile))


def _attention_rate(op: Op, device: Device, wide: bool, way: Way) -> float:
    queries, keys, width = op.shape[2:] if len(op.shape) == 5 else (1024, 1024, NARROW)
    # Ranks that share tokens trade them for heads, so that each computes with all queries. (A ring would not.)
    found = _filled(queries * op.spread, device) * _filled(keys, device)
    found *= at(device.attention[way], keys) * device.peak("bf16") * min(1.0, width / NARROW)
    if not wide:
        return found  # float8 is for products of linear layers alone
    return min(found / 2, device.peak("fp32"))  # twice the bytes, and no faster than the type allows
