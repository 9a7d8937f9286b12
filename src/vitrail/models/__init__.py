"""The models, one file each."""

from vitrail.models.mae import MAE, DecoderConfig, MAEConfig
from vitrail.models.vit import EncoderConfig, ViT, ViTConfig

__all__ = ["MAE", "DecoderConfig", "EncoderConfig", "MAEConfig", "ViT", "ViTConfig"]
