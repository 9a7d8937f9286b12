"""Symmetric adaptive patching: segmentation on the leaves of a tree.

- the encoder works on adaptive tokens; every token predicts the classes of its own voxels
- a token's voxels are those of its leaf resampled, so predictions go back to pixels through the tree, exactly
- the head is a linear layer to `features` channels a voxel (a transposed convolution of stride patch, seen from one
  token), GELU, and a linear layer to classes. The original has no GELU, which leaves one linear map
"""

from typing import ClassVar, Literal

from torch import Tensor, nn

from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.patches import num_voxels
from vitrail.models.config import EncoderConfig, ModelConfig
from vitrail.models.encoder import EncodedModel
from vitrail.models.model import Side, Stage
from vitrail.recipe import config, must


@config
class SAPConfig(ModelConfig):
    output: ClassVar[str] = "tokens"
    origin: ClassVar[str] = "Zhang et al. 2024 (SC24); UCF-VIT"

    kind: Literal["sap"] = "sap"
    encoder: EncoderConfig
    classes: int | None = None  # default: as many as objective.names or the data name
    features: int = 256  # channels of a voxel before the classes
    ndim: int = 2
    channels: int | None = None  # default: as many as the data have variables
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop

    def __post_init__(self) -> None:
        must("be at least 1", classes=self.classes, features=self.features)
        self.settle()

    def build(self) -> "SAP":
        return SAP(self)


class SAP(EncodedModel):
    """forward(tokens [B, N, P*C], coordinates, sizes, valid) -> [B, N, P*classes], to be painted by the tree.

    Variables with tokens of their own vote: Tokens.paint(..., merge=True) averages them.
    """

    needed = ("channels", "classes")

    def __init__(self, c: SAPConfig):
        super().__init__(c)
        assert c.classes is not None
        self.voxels = num_voxels(self.encoder.patch)
        self.expand = nn.Linear(self.encoder.width, self.voxels * c.features, bias=False)
        self.head = nn.Linear(c.features, c.classes)
        initialise_here(self)

    def stages(self) -> list[Stage]:
        return [*self.encoder_stages(), Stage("head", self.name_voxels, uses=(self.expand, self.head))]

    def name_voxels(self, x: Tensor, side: Side) -> Tensor:
        x = self.expand(x[:, self.encoder.prefix :]).unflatten(-1, (self.voxels, -1))  # B N P F
        return self.head(nn.functional.gelu(x)).flatten(-2)

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape."""
        tokens, features = self.count_tokens(), self.head.in_features
        head = 2.0 * tokens * self.voxels * features * (self.encoder.width + self.head.out_features)
        return self.encoder.flops(tokens) + Flops(outside=head)
