"""Counts of floating-point operations: one multiply-add is 2.

Tokens that a masked autoencoder hides are charged to nobody; padding of adaptive tokens is, since its length is fixed.

MFU divides what the model needs (training = 3 x forward) by the peak; HFU also counts what the hardware does besides:
what checkpointed blocks compute again, and the flash backward, which does 2.5 times its forward. A block's last linear
layer is not computed again where nothing reads its output, whatever is recomputed. What MLPs in pieces compute again is
in neither.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# Dense bf16 peaks in TFLOP/s; the first name found in the device's own name decides, so variants stand before families.
# Whole words only: an RTX A1000 is no A100.
PEAKS_BF16 = {
    "B200": 2250.0,
    "GH200": 990.0,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "MI250X": 191.5,
}


def peak_tflops(device_name: str) -> float | None:
    """Peak of a known device; None for others, for which MFU is left out rather than guessed."""
    found = (peak for name, peak in PEAKS_BF16.items() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE))
    return next(found, None)


@dataclass(frozen=True)
class Again:
    """The part of the blocks' forward that runs a second time: in which share of them, and which roles are kept."""

    share: float = 1.0
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one sample by kind: linear layers and attention inside blocks, and all that is outside them."""

    linear: float = 0.0
    attention: float = 0.0
    outside: float = 0.0
    roles: Mapping[str, float] = field(default_factory=dict)  # of linear, the part of each role
    last: float = 0.0  # of linear, layers that end a block, whose output its backward does not need

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.linear + other.linear,
            self.attention + other.attention,
            self.outside + other.outside,
            {r: self.roles.get(r, 0.0) + other.roles.get(r, 0.0) for r in (*self.roles, *other.roles)},
            self.last + other.last,
        )

    def __mul__(self, factor: float) -> "Flops":
        roles = {role: part * factor for role, part in self.roles.items()}
        return Flops(self.linear * factor, self.attention * factor, self.outside * factor, roles, self.last * factor)

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.outside

    @property
    def training(self) -> float:
        """Model FLOPs of a training step, for MFU."""
        return 3 * self.forward

    def hardware(self, *, recompute: bool | Again) -> float:
        """Count what the device really computes in a training step, for HFU."""
        again = Again(share=float(recompute)) if isinstance(recompute, bool) else recompute
        kept = sum(self.roles.get(role, 0.0) for role in again.kept)
        if "fc2" in again.kept:  # not counted twice
            kept -= self.last
        attention = 0.0 if "attention" in again.kept else self.attention
        extra = again.share * (self.linear - self.last - kept + attention)
        return 3 * (self.linear + self.outside) + 3.5 * self.attention + extra
