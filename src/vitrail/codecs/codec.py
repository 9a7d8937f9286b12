"""What turns images into latents and back, and how a recipe opens one.

- encode() and decode() take and give the data's own units; what a network wants instead (-1 to 1, say) is its codec's
- a codec draws nothing: the same image always gives the same latents
- facts() are stored with the latents; a run that decodes them with something else is refused
- a codec's config is a kind of the slot "codec", and has open(device, trust=..., key=..., value_range=...)
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError

Range = tuple[float, float]
DECODED = 4  # samples at once; a fixed number, so that no sample depends on how many there are


class Codec(ABC):
    """Sizes are those of one sample; None where any will do."""

    kind: str
    ndim: int | None
    factor: tuple[int, ...]  # voxels of the data to one of the latents along each axis; () for 1 along all
    channels: int | None  # of the latents
    data_channels: int | None
    value_range: Range | None = None  # of the data, which becomes -1 to 1; None where the codec needs none
    fingerprint: str = ""  # of the weights: latents of one codec are noise to another
    origin: str = ""  # where it came from, for people

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """[B, C, *S] as read, of any type -> latents [B, c, *S / factor], float32."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Latents -> [B, C, *S] in the data's units, float32."""

    def facts(self) -> dict[str, Any]:
        """What is stored beside the latents, in JSON."""
        return {
            "kind": self.kind,
            "origin": self.origin,
            "ndim": self.ndim,
            "factor": list(self.factor),
            "channels": self.channels,
            "data_channels": self.data_channels,
            "range": None if self.value_range is None else list(self.value_range),
            "fingerprint": self.fingerprint,
        }

    def check(self, shape: tuple[int, ...], *, key: str = "codec") -> None:
        """Refuse samples [C, *S] that it cannot encode."""
        channels, *size = shape
        if self.ndim not in (None, len(size)):
            raise UserError(f"{key}.kind: {self.kind!r} encodes {self.ndim} axes, but samples have {len(size)}")
        if self.data_channels not in (None, channels):
            raise UserError(
                f"{key}: {self.origin or self.kind} encodes {self.data_channels} channels, but the data have {channels}"
                " variables; choose as many with `variables`, or another codec"
            )
        wrong = [s for s, f in zip(size, self.factor, strict=False) if s % f]
        if wrong:
            raise UserError(
                f"data.crop: {list(size)} is not a multiple of the codec's factor {list(self.factor)}; change the crop"
            )


def open_codec(
    config: Any,
    *,
    device: torch.device | str,
    trust: bool = False,
    key: str = "codec",
    value_range: Range | None = None,
) -> Codec:
    """The codec that a recipe names, ready on a device.

    `trust` lets it run code that comes with its files; `value_range` is that of the data, where the recipe gives none.
    """
    return config.open(torch.device(device), trust=trust, key=key, value_range=value_range)


def decoder_for(
    recipe: Any, facts: Mapping[str, Any], device: torch.device | str, trust: bool = False, *others: Mapping[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """What turns a recipe's samples into pixels; None where they are pixels already, as no codec is named.

    `others` are facts of more sources, which must be of the same codec.
    """
    codec = codec_for(recipe, facts, device, trust)
    if codec is None:
        return None
    for more in others:
        check_latents(codec, more)
    return partial(decode_all, codec)


def decode_all(codec: Codec, latents: Tensor) -> Tensor:
    """A few at a time, whatever their number: images take far more memory than the latents that they come from."""
    return torch.cat([codec.decode(some).float() for some in latents.split(DECODED)])


def codec_for(recipe: Any, facts: Mapping[str, Any], device: torch.device | str, trust: bool = False) -> Codec | None:
    """The codec of a recipe's samples; None where they are pixels already.

    `facts` are describe() of its data. What does not fit together is refused.
    """
    config = recipe.codec
    if config is None:
        return None
    encoded = facts.get("codec")
    if facts.get("kind") != "latents" and encoded is None:
        if config.kind == "identity":
            return None
        raise UserError(
            f"codec: training is on latents that were encoded before, but {facts.get('path', 'the data')} holds "
            f"{facts.get('kind')} data; encode them with `vitrail data encode RECIPE --out DIR`, and give that folder "
            "in data.train"
        )
    known = (encoded or {}).get("range")
    codec = open_codec(config, device=device, trust=trust, value_range=None if known is None else (known[0], known[1]))
    check_latents(codec, facts)
    return codec


def check_latents(codec: Codec, facts: Mapping[str, Any]) -> None:
    """Refuse to decode latents that come from another codec."""
    place = facts.get("path", "the data")
    number, axes = (len(facts.get(name) or ()) for name in ("variables", "axes"))  # 0: not known
    if number and codec.channels not in (None, number):
        raise UserError(
            f"codec: {codec.origin or codec.kind} decodes latents of {codec.channels} channels, but {place} has "
            f"{number}; name the codec that encoded them, and take all variables"
        )
    if axes and codec.ndim not in (None, axes):
        raise UserError(f"codec: {codec.origin or codec.kind} decodes {codec.ndim} axes, but {place} has {axes}")
    encoded, own = facts.get("codec") or {}, codec.facts()
    for name in ("kind", "factor", "range", "fingerprint"):
        if encoded.get(name) and own[name] and encoded[name] != own[name]:
            raise UserError(
                f"codec: {place} was encoded by {encoded.get('origin') or encoded.get('kind')} with {name} "
                f"{encoded[name]}, and {codec.origin or codec.kind} has {own[name]}; use that codec, or encode the "
                "data again"
            )


# ---------------------------------------------------------------- what codecs share


def check_range(given: Range | None) -> None:
    if given is not None and not given[0] < given[1]:
        raise ValueError(f"range {list(given)} must be two rising numbers, such as [0, 255]")


def range_of(given: Range | None, told: Range | None) -> Range:
    """The range that a recipe gives, else that of the data, else that of bytes."""
    return given or told or (0.0, 255.0)


def to_unit(values: Tensor, value_range: Range | None) -> Tensor:
    """The range of the data to -1..1, float32."""
    assert value_range is not None
    low, high = value_range
    return (values.float() - low) * (2.0 / (high - low)) - 1.0


def from_unit(values: Tensor, value_range: Range | None) -> Tensor:
    assert value_range is not None
    low, high = value_range
    return (values.float() + 1.0) * ((high - low) / 2.0) + low


def fingerprint_of(parts: Iterable[Any]) -> str:
    """A short hash of tensors, or of the bytes of files."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        digest.update(part)
    return digest.hexdigest()
