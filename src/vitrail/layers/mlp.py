"""The two MLPs of vision transformers: GELU, and SwiGLU with gate and value as two layers (a split keeps pairs)."""

import math
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn


def swiglu_hidden(width: int, *, multiplier: float = 1.0, multiple_of: int = 256) -> int:
    """Llama's rule: two thirds of four widths, times a multiplier, rounded up."""
    hidden = int(multiplier * int(2 * (4 * width) / 3))
    return multiple_of * math.ceil(hidden / multiple_of)


class MLP(nn.Module):
    """`approximate` is GELU's: "none" for the exact one, "tanh" for the approximation that DiT was trained with."""

    token_inputs: ClassVar[int] = 1  # so many of the first arguments are tokens
    columns: ClassVar[tuple[str, ...]] = ("fc1",)  # layers whose outputs, hidden channels, can be shared out
    row: ClassVar[str] = "fc2"  # the layer whose inputs are these

    def __init__(self, *, width: int, hidden: int, bias: bool, approximate: Literal["none", "tanh"] = "none"):
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class SwiGLU(nn.Module):
    token_inputs: ClassVar[int] = 1
    columns: ClassVar[tuple[str, ...]] = ("gate", "fc1")
    row: ClassVar[str] = "fc2"

    def __init__(self, *, width: int, hidden: int, bias: bool):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.fc1(x))
