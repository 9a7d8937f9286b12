"""Codecs, which turn images into latents and back, and how a recipe opens one; one small file a codec.

- encode() and decode() take and give the data's own units; what a network wants instead (-1 to 1, say) is its codec's
- a codec draws nothing: the same image always gives the same latents
- facts() are stored with the latents; a run that decodes them with something else is refused
- a codec's config is a kind of the slot "codec", and has open(device, trust=..., key=..., value_range=...)
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.recipe import config
from vitrail.recipe.kinds import remedy

Range = tuple[float, float]
DECODED = 4  # samples at once; a fixed number, so that no sample depends on how many there are


class Codec(ABC):
    """A way to latents and back. Sizes are those of one sample; None where any will do."""

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
        """Turn [B, C, *S] as read, of any type, into latents [B, c, *S / factor] in float32."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Turn latents into [B, C, *S] in the data's units, float32."""

    def facts(self) -> dict[str, Any]:
        """Return what is stored beside the latents, in JSON."""
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
        if any(s % f for s, f in zip(size, self.factor, strict=False)):
            raise UserError(
                f"data.crop: {list(size)} is not a multiple of the codec's factor {list(self.factor)}; change the crop"
            )


@config
class IdentityConfig:
    kind: Literal["identity"] = "identity"

    def open(self, device: Any, **options: Any) -> Identity:
        return Identity()


class Identity(Codec):
    """No codec: latents are the voxels themselves. Encoding with it packs many small files into a few."""

    kind, ndim, factor, channels, data_channels = "identity", None, (), None, None

    def encode(self, values: Tensor) -> Tensor:
        return values.float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float()


def open_codec(
    config: Any,
    *,
    device: torch.device | str,
    trust: bool = False,
    key: str = "codec",
    value_range: Range | None = None,
) -> Codec:
    """Open the codec that a recipe names, ready on a device.

    `trust` lets it run code that comes with its files; `value_range` is that of the data, where the recipe gives none.
    """
    return config.open(torch.device(device), trust=trust, key=key, value_range=value_range)


def decoder_for(
    recipe: Any, facts: Mapping[str, Any], device: torch.device | str, trust: bool = False, *others: Mapping[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """Return what turns a recipe's samples into pixels; None where they are pixels already, as no codec is named.

    `others` are facts of more sources, which must be of the same codec.
    """
    codec = codec_for(recipe, facts, device, trust)
    if codec is None:
        return None
    for more in others:
        check_latents(codec, more)
    return partial(decode_all, codec)


def decode_all(codec: Codec, latents: Tensor) -> Tensor:
    """Decode a few at a time, whatever their number: images take far more memory than the latents they come from."""
    return torch.cat([codec.decode(some).float() for some in latents.split(DECODED)])


def codec_for(recipe: Any, facts: Mapping[str, Any], device: torch.device | str, trust: bool = False) -> Codec | None:
    """Open the codec of a recipe's samples; None where they are pixels already.

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
    place, name = facts.get("path", "the data"), codec.origin or codec.kind
    number, axes = (len(facts.get(key) or ()) for key in ("variables", "axes"))  # 0: not known
    if number and codec.channels not in (None, number):
        raise UserError(
            f"codec: {name} decodes latents of {codec.channels} channels, but {place} has {number}; name the codec "
            "that encoded them, and take all variables"
        )
    if axes and codec.ndim not in (None, axes):
        raise UserError(f"codec: {name} decodes {codec.ndim} axes, but {place} has {axes}")
    encoded, own = facts.get("codec") or {}, codec.facts()
    for key in ("kind", "factor", "range", "fingerprint"):
        if encoded.get(key) and own[key] and encoded[key] != own[key]:
            raise UserError(
                f"codec: {place} was encoded by {encoded.get('origin') or encoded.get('kind')} with {key} "
                f"{encoded[key]}, and {name} has {own[key]}; use that codec, or encode the data again"
            )


# ---------------------------------------------------------------- what codecs share


def check_range(given: Range | None) -> None:
    if given is not None and not given[0] < given[1]:
        raise ValueError(f"range {list(given)} must be two rising numbers, such as [0, 255]")


def range_of(given: Range | None, told: Range | None) -> Range:
    """Return the range that a recipe gives, else that of the data, else that of bytes."""
    return given or told or (0.0, 255.0)


def to_unit(values: Tensor, value_range: Range) -> Tensor:
    """Map the range of the data to -1..1, in float32."""
    low, high = value_range
    return (values.float() - low) * (2.0 / (high - low)) - 1.0


def from_unit(values: Tensor, value_range: Range) -> Tensor:
    low, high = value_range
    return (values.float() + 1.0) * ((high - low) / 2.0) + low


def fingerprint_of(parts: Iterable[Any]) -> str:
    """Return a short hash of tensors, or of the bytes of files."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        digest.update(part)
    return digest.hexdigest()


def check_origin(path: str | None, hub: str | None) -> None:
    if (path is None) == (hub is None):
        raise ValueError("give one of path (a folder) and hub (a repository's name, such as owner/name)")


def find_files(
    names: Sequence[str], *, path: str | None, hub: str | None, revision: str | None, key: str
) -> list[Path]:
    """Return the files of these names, downloaded where they come from the hub and are not in its cache yet."""
    if hub is not None:
        return [_fetch(hub, name, revision, key) for name in names]
    assert path is not None
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{key}.path: {path!r} is no folder; give the one that holds {' and '.join(names)}")
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{key}.path: {path} has no {name}; give a folder with {' and '.join(names)}")
    return [folder / name for name in names]


def _fetch(hub: str, name: str, revision: str | None, key: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        raise UserError(
            f"{key}.hub: {hub!r} needs huggingface_hub, which is not installed; {remedy('huggingface_hub')}"
        ) from error
    try:
        return Path(hf_hub_download(hub, name, revision=revision))
    except Exception as error:  # of a network, of names and of rights: a zoo of classes that change between versions
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{key}.hub: {name} of {hub!r} cannot be had ({said}); check the name and the network, or download its "
            f"files and set {key}.path to their folder"
        ) from error
