"""The vision transformer of the Frontier sharding study: the encoder with that study's choices.

- dual patch norm, one more norm before the first block, learned positions on patches only
- blocks x + LN(f(x)), QK-norm, SwiGLU with 2.6875 hidden channels for each (5B: 15360 in all)
- the class token is classified; images of 224 x 224
"""

from typing import Any, ClassVar, Literal

from vitrail.models.vit import ViTConfig
from vitrail.recipe import config


@config
class StudyViTConfig(ViTConfig):
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "Base": {"width": 768, "depth": 12, "heads": 12, "patch": 16},
        "Huge": {"width": 1280, "depth": 32, "heads": 16, "patch": 14},
        "1B": {"width": 1536, "depth": 32, "heads": 16, "patch": 14},
        "3B": {"width": 2816, "depth": 32, "heads": 32, "patch": 14},
        "5B": {"width": 1792, "depth": 56, "heads": 16, "patch": 14, "hidden": 15360},
        "15B": {"width": 5040, "depth": 48, "heads": 48, "patch": 14},
    }
    gated_ratio: ClassVar[float] = 2.6875
    origin: ClassVar[str] = "Tsaris et al. 2024 (arXiv 2404.11706), as its benchmark builds it"

    kind: Literal["study_vit"] = "study_vit"  # type: ignore[assignment]
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    qk_norm: bool = True
    patch_norm: bool = True
    input_norm: bool = True
    residual: Literal["pre", "post"] = "post"
    positions: Literal["sincos", "learned", "rope", "none"] = "learned"
    cls_token: bool = True
    cls_position: bool = False
    pool: Literal["cls", "mean", "attention", "tokens"] = "cls"
    classes: int | None = 1000
    shape: int | tuple[int, ...] | None = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is None and self.mlp_ratio is None:
            assert self.width is not None
            object.__setattr__(self, "hidden", int(self.width * self.gated_ratio))
