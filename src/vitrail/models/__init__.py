"""The models, one file each."""

from vitrail.models.autoencoder import Autoencoder, AutoencoderConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViT, DiffusionViTConfig
from vitrail.models.dit import DiT, DiTConfig
from vitrail.models.mae import MAE, DecoderConfig, MAEConfig
from vitrail.models.sap import SAP, SAPConfig
from vitrail.models.unetr import UNETR, UNETRConfig
from vitrail.models.vit import StudyViTConfig, ViT, ViTConfig

__all__ = [
    "MAE",
    "SAP",
    "UNETR",
    "Autoencoder",
    "AutoencoderConfig",
    "DecoderConfig",
    "DiT",
    "DiTConfig",
    "DiffusionDecoderConfig",
    "DiffusionViT",
    "DiffusionViTConfig",
    "EncoderConfig",
    "MAEConfig",
    "SAPConfig",
    "StudyViTConfig",
    "UNETRConfig",
    "ViT",
    "ViTConfig",
]
