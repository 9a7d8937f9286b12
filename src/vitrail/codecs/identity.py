"""No codec: latents are the voxels themselves, in float32. Encoding with it packs many small files into a few."""

from typing import Any, Literal

from torch import Tensor

from vitrail.codecs.codec import Codec
from vitrail.recipe import config


@config
class IdentityConfig:
    kind: Literal["identity"] = "identity"

    def open(self, device: Any, **options: Any) -> "Identity":
        return Identity()


class Identity(Codec):
    kind, ndim, factor, channels, data_channels = "identity", None, (), None, None

    def encode(self, values: Tensor) -> Tensor:
        return values.float()

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float()
