"""The model that is filled, and what a file's tensors become in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from vitrail.layers.patches import grid_of, per_axis
from vitrail.weights import pieces
from vitrail.weights.pieces import Made, Piece

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
        self.grid = None if shape is None else grid_of(per_axis(shape, self.ndim), self.patch)
        self.positions: str = self.config.positions

    def by_class(self, name: str) -> bool:
        """Whether a parameter has a row for each class."""
        return name.startswith(CLASSES) or (name.startswith("decoder.head.") and hasattr(self.model.config, "classes"))

    def head_width(self, name: str) -> int:
        """Of the attention that a parameter belongs to."""
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
    """A kernel and its bias, for all channels together or for each variable by itself."""
    known = target.config.variables
    if ours.endswith("bias"):
        each = None if known is None else partial(_for_each, number=len(known.known))
        out.pieces[ours if each is None else "encoder.patch_embed.bias"] = Piece((name,), each or Made)
        return

    def make(kernel: Tensor) -> Made:
        if known is None:
            return pieces.patch_kernel(prepare(kernel), patch=target.patch, channels=target.channels)
        return pieces.variable_kernel(prepare(kernel), patch=target.patch, variables=len(known.known))

    out.pieces[ours if known is None else "encoder.patch_embed.weight"] = Piece((name,), make)


def _for_each(bias: Tensor, *, number: int) -> Made:
    return Made(bias.expand(number, -1), "inflated", f"the same for {number} variables")


def rope_inflation(target: Target) -> str:
    """Two axes share out a head's channels otherwise than three do."""
    start = "the file's rotations are of two axes, and those of three turn other channels"
    if hasattr(target.config, "rope"):
        return f"{start}; set rope: superposed, which starts as the two-dimensional model"
    return f"{start}; use weights with learned positions"


def is_superposed(target: Target) -> bool:
    return getattr(target.config, "rope", "axial") == "superposed"
