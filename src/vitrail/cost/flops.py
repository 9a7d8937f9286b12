"""How floating-point operations are counted: one multiply-add is 2.

Tokens that a masked autoencoder hides are charged to nobody; padding of adaptive tokens is, since its length is fixed.

MFU divides what the model needs (training = 3 x forward) by the peak; HFU also counts what the hardware does besides:
the recomputed forward of checkpointed blocks, and the flash backward, which does 2.5 times its forward.
"""

import re
from dataclasses import dataclass

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
class Flops:
    """Forward FLOPs of one sample by kind: linear layers and attention inside blocks, and all that is outside them."""

    linear: float = 0.0
    attention: float = 0.0
    outside: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.linear + other.linear, self.attention + other.attention, self.outside + other.outside)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.linear * factor, self.attention * factor, self.outside * factor)

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.outside

    @property
    def training(self) -> float:
        """Model FLOPs of a training step: what MFU counts."""
        return 3 * self.forward

    def hardware(self, *, recompute: bool) -> float:
        """What the device really computes in a training step: what HFU counts."""
        again = self.linear + self.attention if recompute else 0.0
        return 3 * (self.linear + self.outside) + 3.5 * self.attention + again


def self_block_flops(*, tokens: int, width: int, kv_width: int, hidden: int, gated: bool) -> Flops:
    projections = 2 * width * width + 2 * width * kv_width
    return Flops(
        linear=2.0 * tokens * (projections + (3 if gated else 2) * width * hidden),
        attention=4.0 * width * tokens * tokens,
    )


def cross_block_flops(*, queries: int, memory: int, width: int, hidden: int, gated: bool) -> Flops:
    per_query = 2 * width * width + (3 if gated else 2) * width * hidden
    return Flops(
        linear=2.0 * (queries * per_query + memory * 2 * width * width),
        attention=4.0 * width * queries * memory,
    )
