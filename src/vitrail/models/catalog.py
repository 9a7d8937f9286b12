"""Every model with its published sizes: what `vitrail models` lists.

Parameters are counted on the meta device and FLOPs by the model itself (forward, one sample, multiply-add = 2).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vitrail.errors import UserError
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViTConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, RandomMask
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import StudyViTConfig, ViTConfig
from vitrail.recipe.kinds import nearest


@dataclass(frozen=True)
class Entry:
    """A named size of a model, as its authors publish it."""

    size: str  # as a recipe names it
    config: Any
    origin: str

    @property
    def model(self) -> str:
        return self.config.kind


def entries() -> list[Entry]:
    """List all named sizes, in the order of the models' age and size."""
    return [*_vits(), *_maes(), *_segmenters(), *_denoisers()]


def _vits() -> Iterator[Entry]:
    touvron, zhai = "Touvron et al. 2021", "Zhai et al. 2022"
    origins = {"Ti/16": touvron, "S/16": touvron, "g/14": zhai, "G/14": zhai}
    for size in ("Ti/16", "S/16", "B/16", "L/16", "H/14", "g/14", "G/14"):
        origin = origins.get(size, "Dosovitskiy et al. 2020 (timm's names and weights)")
        yield Entry(size, _classifier(size, shape=224), origin)
    yield Entry("UCF-B/16", _classifier("UCF-B/16", shape=256), "UCF-VIT's VIT on 256 x 256")
    for size in StudyViTConfig.sizes:
        yield Entry(size, StudyViTConfig(size=size, channels=3), StudyViTConfig.origin)


def _classifier(size: str, *, shape: int) -> ViTConfig:
    return ViTConfig(size=size, shape=shape, channels=3, classes=1000, cls_token=True, pool="cls", positions="learned")


def _maes() -> Iterator[Entry]:
    for size in ("B/16", "L/16", "H/14"):
        encoder = EncoderConfig(size=size, cls_token=True)
        yield Entry(size, MAEConfig(encoder=encoder, channels=3, shape=224), "He et al. 2022 (facebookresearch/mae)")
    yield Entry(
        "UCF-B/16",
        MAEConfig(encoder=EncoderConfig(size="UCF-B/16"), channels=3, shape=256),
        "UCF-VIT's MAE on 256 x 256",
    )
    decoder, mask = DecoderConfig(width=512, depth=4, heads=32, hidden=1536), RandomMask(ratio=0.95)
    for size in ("2B", "8B"):
        encoder = EncoderConfig(size=size)
        config = MAEConfig(encoder=encoder, decoder=decoder, mask=mask, ndim=3, channels=1, shape=512)
        yield Entry(size, config, "torchtitan-mae on 512^3, 95 % hidden")


def _segmenters() -> Iterator[Entry]:
    config = UNETRConfig(
        encoder=EncoderConfig(size="B/16", positions="learned"), ndim=3, channels=1, classes=14, shape=96
    )
    yield Entry("B/16", config, "Hatamizadeh et al. 2022 (MONAI) on 96^3")
    config = UNETRConfig(encoder=EncoderConfig(size="UCF-B/16"), channels=3, classes=4, shape=256)
    yield Entry("UCF-B/16", config, "UCF-VIT's UNETR on 256 x 256")
    for size, ndim, length, shape, channels in (("UCF-B/16", 2, 64, 256, 3), ("UCF-B/4", 3, 512, 64, 1)):
        encoder = EncoderConfig(size=size, tokens=AdaptiveTokens(length=length))
        leaves = SAPConfig(encoder=encoder, ndim=ndim, channels=channels, classes=4, shape=shape)
        yield Entry(size, leaves, f"UCF-VIT's SAP, {length} leaves of {' x '.join([str(shape)] * ndim)}")


def _denoisers() -> Iterator[Entry]:
    plain = DiffusionViTConfig(encoder=EncoderConfig(size="UCF-B/16"), channels=3, shape=256)
    yield Entry("UCF-B/16", plain, "UCF-VIT's DiffusionVIT on 256 x 256")
    linear = dataclasses.replace(plain, decoder=DiffusionDecoderConfig(kind="linear"))
    yield Entry("UCF-B/16", linear, "the same with its linear decoder")
    for size in ("S/2", "B/2", "L/2", "XL/2"):
        config = DiTConfig(size=size, channels=4, shape=32, classes=1000, learn_sigma=True)
        yield Entry(size, config, "Peebles & Xie 2023 (facebookresearch/DiT), latents of 32 x 32 x 4")
    for size in ("0.5B", "1B", "7B"):
        config = DiTConfig(size=f"{size}/2", channels=16, shape=32, classes=1000)
        yield Entry(size, config, "TorchDiTan, latents of 32 x 32 x 16")


def measure(entry: Entry) -> dict[str, Any]:
    """Measure what the list shows of one size."""
    with torch.device("meta"):
        model = entry.config.build()
    return {
        "model": entry.model,
        "size": entry.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": round(model.flops().forward),
        "input": " x ".join(map(str, (*entry.config.extent, entry.config.channels))),
        "origin": entry.origin,
    }


def find(name: str) -> list[Entry]:
    """The sizes of a model ("vit"), or one of them ("vit:B/16")."""
    model, _, size = name.partition(":")
    found = [e for e in entries() if e.model == model]
    if not found:
        known = list(dict.fromkeys(e.model for e in entries()))
        near = nearest(model, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"{name!r} is not a model; {hint}(models: {', '.join(known)})")
    if size:
        sizes = [e.size for e in found]
        found = [e for e in found if e.size == size]
        if not found:
            raise UserError(f"{size!r} is not a size of {model}; there are {', '.join(sizes)}")
    return found


def describe(name: str) -> dict[str, Any]:
    """One model in detail: what it is, its sizes, and its keys with their defaults, or with the values of a size."""
    import inspect

    found = find(name)
    config = found[0].config
    about = inspect.getdoc(inspect.getmodule(type(config))) or ""
    keys = values_of(config) if ":" in name else keys_of(type(config))
    return {"model": config.kind, "about": about, "sizes": [measure(e) for e in found], "keys": keys}


def values_of(config: Any) -> dict[str, Any]:
    """The keys of a config with their values; those of a config inside it under its name and a stop."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = values_of(value) if dataclasses.is_dataclass(value) else None
        keys |= {field.name: value} if inner is None else {f"{field.name}.{name}": one for name, one in inner.items()}
    return keys


def keys_of(cls: Any) -> dict[str, Any]:
    """The keys of a config class with their defaults; those of a config inside it under its name and a stop."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            keys |= {f"{field.name}.{name}": value for name, value in keys_of(field.type).items()}
        else:
            value = "required" if field.default is dataclasses.MISSING else field.default
            value = getattr(cls, "make", {}).get(field.name) if value is None else value
            keys[field.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return keys
