"""A base for networks of your own: any module that takes images, without tokens, stages or counts of its own.

The network sees whole images, normalised, and is one block: it is sharded, compiled and computed again in one piece.
It cannot be spread over tensor, context or pipeline ranks, which cut what a model lists.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import UniformTokens
from vitrail.models.model import Model, Side, Stage
from vitrail.recipe import config


@config
class PlainConfig(ABC):
    """Write `network` in a subclass; its fields are keys of the recipe."""

    output: ClassVar[str] = "classes"  # what the network gives: [B, classes]; or "pixels": [B, classes, *S]
    wants_image: ClassVar[bool] = True
    tokens: ClassVar[UniformTokens] = UniformTokens()  # an image is one token
    positions: ClassVar[str] = "none"

    ndim: int = 2
    channels: int | None = None  # this and the next two are filled in from the data
    shape: int | tuple[int, ...] | None = None
    classes: int | None = None

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a module that takes images [B, channels, *S]."""

    def build(self) -> "Plain":
        return Plain(self)

    @property
    def patch(self) -> tuple[int, ...]:
        if self.shape is None:
            raise ValueError("shape is not known; set model.shape, the size of the input in voxels")
        return per_axis(self.shape, self.ndim)

    def count_tokens(self, size: tuple[int, ...]) -> int:
        return self.tokens.count(size, self.patch)


class Plain(Model):
    def __init__(self, c: PlainConfig):
        super().__init__()
        self.config = c
        made = c.network()
        if not isinstance(made, nn.Module):
            raise UserError(f"model: {_name(c)}.network() returned {_what(made)}, expected a torch.nn.Module")
        for name, _ in made.named_buffers():
            raise UserError(
                f"model: {_name(c)}.network() has a buffer, {name}, and buffers are not in checkpoints: take a norm "
                "that keeps no averages, such as GroupNorm for BatchNorm, and make constants in forward()"
            )
        self.body = Body(made)
        initialise_here(self)

    def stages(self) -> list[Stage]:
        return [Stage("network", self.see, ("image", "coordinates"), (self.body,))]

    def see(self, x: Tensor, side: Side) -> Tensor:
        image = side["image"]
        return self.checked(self.body(image), image)

    def checked(self, output: Any, image: Tensor) -> Tensor:
        """Return what the network gave for images, if it is what it says that it gives."""
        c, dense = self.config, self.config.output == "pixels"
        wanted = (len(image), c.classes, *(image.shape[2:] if dense else ()))
        if not isinstance(output, Tensor) or (c.output in ("classes", "pixels") and tuple(output.shape) != wanted):
            raise UserError(
                f"model: the module of {_name(c)}.network() gave {_what(output)} for images {list(image.shape)}; "
                f'expected {list(wanted)}, since its output is "{c.output}"'
            )
        return output

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def flops(self) -> Flops:
        """Forward of one image of the configured shape, as PyTorch counts it."""
        return Flops(outside=self._flops)

    @cached_property
    def _flops(self) -> float:
        try:
            return self._count("meta")
        except UserError:
            raise
        except Exception:  # it may ask for values, which nothing on this device has
            pass
        try:
            return self._count("cpu")
        except UserError:
            raise
        except Exception as error:
            c, why = self.config, " ".join(str(error).split())
            images = [2, c.channels, *c.patch]
            raise UserError(
                f"model: the module of {_name(c)}.network() fails on images {images}: "
                f"{type(error).__name__}: {why[:300]}"
            ) from error

    def _count(self, device: str) -> float:
        c = self.config
        number = 2  # a network that mixes samples up is found out by two
        with torch.device(device), FlopCounterMode(display=False) as counter, torch.no_grad():
            images = torch.zeros(number, c.channels, *c.patch)
            self.checked(c.network()(images), images)
        return float(counter.get_total_flops()) / number


class Body(nn.Module):
    """The network, fed in the type of its weights."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Any:
        weight = next(self.network.parameters(), image)
        return self.network(image.to(weight.dtype))


def _name(c: PlainConfig) -> str:
    return type(c).__name__


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"a {type(value).__name__}"
