"""Rotations of queries and keys (rope) in files, most of which do not tell of them."""

import math
import re

from vitrail.weights.files import Weights
from vitrail.weights.pieces import Pairs, Target, Translation, is_superposed, rope_inflation

# Tokens that are not turned stand where coordinates are 0. Patches among themselves see distances alone.
PREFIX_OF_DINOV3 = (
    "DINOv3's class token and registers stand at the centre of the image, the model's at its first patch, so that they "
    "see the patches turned otherwise; set rope_origin: centre"
)


def find_rotations(
    weights: Weights, found: dict[str, str], target: Target, out: Translation, adapter: str
) -> Pairs | None:
    """Return how the pairs of channels lie that a file's rotations turn; None where nothing is turned.

    Few files tell of rotations: timm and Hugging Face compute DINOv3's anew. So a file without positions is DINOv3's
    where it has what DINOv3 has, and is otherwise refused where the model would have to know.
    """
    if adapter in ("torchditan", "torchtitan-mae"):
        _compare_with_titan(target, out, adapter)
        return "columns first" if adapter == "torchditan" else "neighbours"
    name = next((n for n in weights.shapes if re.fullmatch(r"rope(?:_embed)?\.periods", n)), None)
    if name is None and "pos_embed" in found:
        if found.get("blocks.0.attn.q.bias", "").endswith("q_bias"):
            out.problems.append(
                "its queries have a bias of their own beside fused weights, as EVA's do, and some of those turn "
                "queries and keys besides their positions, which no file tells"
            )
        elif adapter == "timm" and found.get("blocks.0.ls1.gamma", "").endswith("gamma_1"):
            out.problems.append(
                "its layer scales are named gamma_1, as in facebookresearch/deit (DeiT III) and where queries and keys "
                "are turned (rope) besides its positions (timm's Eva and vit_*_rope_ape_*, naver-ai/rope-vit), which "
                "no file tells: strict: false loads the former rightly, and the latter as another model"
            )
        if "input_norm.weight" in found:
            out.notes.append("norm_pre is CLIP's; where its GELU is the quick one, the model's exact one is another")
        return None
    settings = weights.settings or {} if adapter == "hf" else {}  # others' would be another program's
    alike = {"cls_token", "registers", "blocks.0.ls1.gamma", "blocks.0.ls2.gamma"} <= set(found)
    if name is None and not alike and settings.get("model_type") != "dinov3_vit":
        if target.positions in ("rope", "none"):
            out.problems.append(
                "the file holds no positions, and does not tell whether its model turns queries and keys (rope); of "
                "such files DINOv3's are known, by their class token, registers and layer scales"
            )
        return None
    if target.positions != "rope":
        what = "the file turns" if name is not None else "the file is taken for DINOv3, which turns"
        out.problems.append(f"{what} queries and keys (rope); set positions: rope instead of {target.positions}")
        return "halves"
    if target.ndim != 2 and not (target.ndim == 3 and is_superposed(target)):
        out.problems.append(rope_inflation(target))
    told = settings.get("rope_theta")
    theta, first = float(told) if isinstance(told, int | float) else 100.0, 1.0
    head_width = target.encoder.width // target.encoder.heads
    if name is not None:
        periods = weights.read(name).double()
        if 4 * len(periods) != head_width:
            out.wrong.append(f"its heads are {4 * len(periods)} wide, the model's {head_width}; set heads to fit")
            return "halves"
        first = float(periods[0])
        if len(periods) > 1:
            theta = float(periods[-1] / periods[0]) ** (len(periods) / (len(periods) - 1))
    elif told is None:
        out.notes.append("the file does not tell its rotations: it was taken for DINOv3, whose theta is 100")
    if head_width % 4:
        out.wrong.append(f"DINOv3's heads are a multiple of 4 wide, the model's {head_width}; set heads to fit")
    _compare_with_dinov3(theta, first, target, out)
    return "halves"


def _compare_with_dinov3(theta: float, first: float, target: Target, out: Translation) -> None:
    """Compare coordinates: its go from -1 to 1 over the whole image, whatever its size; ours count patches."""
    c = target.config
    if not math.isclose(theta, c.theta, rel_tol=2e-2):
        out.problems.append(f"its rotations have theta {theta:.4g}, the model's {c.theta:g}; set theta: {theta:.4g}")
    if target.grid is None:
        out.notes.append(
            "its rotations span the whole image, the model's go by patch: equal where rope_scale is 4 pi over the "
            f"number of patches along an axis (it is {c.rope_scale:g})"
        )
        return
    plane = target.grid[-2:]
    wanted = 4 * math.pi / (plane[-1] * first)
    if len(set(plane)) > 1:
        out.problems.append(
            f"its rotations span every axis alike, the model's go by patch, and its {' x '.join(map(str, plane))} "
            "patches are no square; use a square shape"
        )
    elif not math.isclose(c.rope_scale, wanted, rel_tol=1e-3):
        out.problems.append(
            f"its rotations span the whole image, the model's go by patch: with {plane[-1]} patches along an axis they "
            f"are equal where rope_scale is {wanted:.6g}, not {c.rope_scale:g}; set rope_scale: {wanted:.6g}"
        )
    if (c.cls_token or c.registers) and c.rope_origin != "centre":
        out.problems.append(PREFIX_OF_DINOV3)


def _compare_with_titan(target: Target, out: Translation, adapter: str) -> None:
    c = target.config
    if c.positions != "rope":
        out.problems.append(f"{adapter} turns queries and keys; set positions: rope instead of {c.positions}")
    elif adapter == "torchtitan-mae":
        out.problems.append(
            "torchtitan-mae turns queries and keys by the number of a patch in the flattened volume, from a table that "
            "was never filled after a start on the meta device: what its weights were trained in, no model here "
            "computes; strict: false loads them into rotations by the patch's three coordinates"
        )
    elif not math.isclose(c.theta, 10000.0):
        out.problems.append(f"TorchDiTan's rotations have theta 10000, the model's {c.theta:g}; set theta: 10000")
    if adapter == "torchditan" and (target.ndim != 2 or c.rope != "axial" or c.rope_scale != 1):
        out.problems.append("TorchDiTan's rotations are of images, by patch: set ndim: 2, rope: axial, rope_scale: 1")
