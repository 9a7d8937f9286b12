"""Names of tensors in other projects' files, and what they are called here.

Names are brought to one vocabulary, close to timm's, by tables of regular expressions. A file is recognised by names
that only its kind has.
"""

import itertools
import re
from collections.abc import Callable, Iterable

Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]

_BLOCK: list[tuple[str, str]] = [  # of timm-like blocks, after "blocks.N."
    (r"gamma_([12])", r"ls\1.gamma"),
    (r"attn\.([qkv])_bias", r"attn.\1.bias"),  # beside fused weights, where keys have no bias
    (r"attn\.q_norm\.", "attn.norm_qk.q."),
    (r"attn\.k_norm\.", "attn.norm_qk.k."),
    (r"mlp\.w12\.", "mlp.packed."),
    (r"mlp\.w3\.", "mlp.fc2."),
    (r"mlp\.w1\.", "mlp.gate."),
    (r"mlp\.w2\.", "mlp.fc1."),
    (r"mlp\.fc1_g\.", "mlp.gate."),
    (r"mlp\.fc1_x\.", "mlp.fc1."),
]
TIMM: Rules = [
    (r"(cls_token|pos_embed|norm\..*|head\..*)", r"\1"),
    (r"(?:reg_token|register_tokens|storage_tokens)", "registers"),
    (r"norm_pre\.(.*)", r"input_norm.\1"),
    (r"patch_embed\.proj\.(.*)", r"patch_embed.proj.\1"),
    (r"blocks\.\d+\.(\d+\..*)", r"blocks.\1"),  # in chunks, as DINOv2 is trained
    (r"(blocks\.\d+\..*)", r"\1"),
]
_DECODER: list[tuple[str, str]] = [  # beside its blocks
    (r"mask_token", "decoder.mask_token"),
    (r"decoder_pos_embed", "decoder.pos_embed"),
    (r"decoder_embed\.(.*)", r"decoder.embed.\1"),
    (r"decoder_norm\.(.*)", r"decoder.norm.\1"),
    (r"decoder_pred\.(.*)", r"decoder.head.\1"),
]
MAE: Rules = [*TIMM, *_DECODER, (r"decoder_blocks\.(.*)", r"decoder.blocks.\1")]
_HF_LAYER: list[tuple[str, str]] = [
    (r"(?:attention\.)?attention\.(?:query|q_proj)\.", "attn.q."),
    (r"(?:attention\.)?attention\.(?:key|k_proj)\.", "attn.k."),
    (r"(?:attention\.)?attention\.(?:value|v_proj)\.", "attn.v."),
    (r"attention\.(?:output\.dense|o_proj)\.", "attn.proj."),
    (r"intermediate\.dense\.", "mlp.fc1."),
    (r"output\.dense\.", "mlp.fc2."),
    (r"mlp\.weights_in\.", "mlp.packed."),
    (r"mlp\.weights_out\.", "mlp.fc2."),
    (r"mlp\.gate_proj\.", "mlp.gate."),
    (r"mlp\.up_proj\.", "mlp.fc1."),
    (r"mlp\.down_proj\.", "mlp.fc2."),
    (r"layernorm_before\.", "norm1."),
    (r"layernorm_after\.", "norm2."),
    (r"layer_scale([12])\.lambda1", r"ls\1.gamma"),
]
_HF = r"(?:vit\.|dinov2\.|dinov2_with_registers\.)?"
_HF_BLOCKS = _HF + r"(?:encoder\.layer|layers|layer|model\.layer)"  # the last two are DINOv3's
HF: Rules = [
    (_HF + r"embeddings\.cls_token", "cls_token"),
    (_HF + r"embeddings\.position_embeddings", "pos_embed"),
    (_HF + r"embeddings\.register_tokens", "registers"),
    (_HF + r"embeddings\.patch_embeddings\.projection\.(.*)", r"patch_embed.proj.\1"),
    (_HF + r"embeddings\.patch_embeddings\.(weight|bias)", r"patch_embed.proj.\1"),
    (_HF_BLOCKS + r"\.(\d+\..*)", r"blocks.\1"),
    (_HF + r"(?:layernorm|norm)\.(.*)", r"norm.\1"),
    (r"classifier\.(.*)", r"head.\1"),
    (r"decoder\.decoder_(?:layers|encoder\.layer)\.(\d+\..*)", r"decoder.blocks.\1"),
    *((r"decoder\." + pattern, to) for pattern, to in _DECODER),
]
DIT: Rules = [
    (r"pos_embed", "pos_embed"),
    (r"x_embedder\.proj\.(.*)", r"patch_embed.proj.\1"),
    (r"t_embedder\.mlp\.0\.(.*)", r"time_embed.fc1.\1"),
    (r"t_embedder\.mlp\.2\.(.*)", r"time_embed.fc2.\1"),
    (r"y_embedder\.embedding_table\.weight", "label_embed.table"),
    (r"(blocks\.\d+)\.adaLN_modulation\.1\.(.*)", r"\1.modulation.\2"),
    (r"(blocks\.\d+\..*)", r"\1"),
    (r"final_layer\.adaLN_modulation\.1\.(.*)", r"final.modulation.\1"),
    (r"final_layer\.linear\.(.*)", r"final.proj.\1"),
]
_TITAN_LAYER: list[tuple[str, str]] = [  # of torchtitan's Llama blocks
    (r"attention\.w([qkv])\.", r"attn.\1."),
    (r"attention\.wo\.", "attn.proj."),
    (r"feed_forward\.w1\.", "mlp.gate."),
    (r"feed_forward\.w2\.", "mlp.fc2."),
    (r"feed_forward\.w3\.", "mlp.fc1."),
    (r"attention_norm\.", "norm1."),
    (r"ffn_norm\.", "norm2."),
    (r"adaLN_modulation\.1\.", "modulation."),
]
TORCHDITAN: Rules = [
    *(rule for rule in DIT if rule[0].startswith(("x_", "t_", "y_"))),
    (r"layers\.(\d+\..*)", r"blocks.\1"),
    (r"norm\.(.*)", r"final.norm.\1"),
    (r"output\.(.*)", r"final.proj.\1"),
]
TORCHTITAN_MAE: Rules = [
    (r"encoder\.patch_embedding\.(?:proj\.)?(weight|bias)", r"patch_embed.proj.\1"),
    (r"encoder\.layers\.(\d+\..*)", r"blocks.\1"),
    (r"encoder\.norm\.(.*)", r"norm.\1"),
    (r"(?:encoder\.|decoder\.)?mask_token", "decoder.mask_token"),
    (r"decoder\.embedding\.(.*)", r"decoder.embed.\1"),
    (r"decoder\.layers\.(\d+\..*)", r"decoder.blocks.\1"),
    (r"decoder\.norm\.(.*)", r"decoder.norm.\1"),
    (r"decoder\.output\.(.*)", r"decoder.head.\1"),
]
_DIFFUSERS_LAYER: list[tuple[str, str]] = [
    (r"norm1\.linear\.", "modulation."),
    (r"attn1\.to_([qkv])\.", r"attn.\1."),
    (r"attn1\.to_out\.0\.", "attn.proj."),
    (r"ff\.net\.0\.proj\.", "mlp.fc1."),
    (r"ff\.net\.2\.", "mlp.fc2."),
]
DIFFUSERS: Rules = [
    (r"pos_embed\.proj\.(.*)", r"patch_embed.proj.\1"),
    (r"transformer_blocks\.0\.norm1\.emb\.timestep_embedder\.linear_([12])\.(.*)", r"time_embed.fc\1.\2"),
    (r"transformer_blocks\.0\.norm1\.emb\.class_embedder\.embedding_table\.weight", "label_embed.table"),
    (r"transformer_blocks\.(\d+\.(?!norm1\.emb\.).*)", r"blocks.\1"),
    (r"proj_out_1\.(.*)", r"final.modulation.\1"),
    (r"proj_out_2\.(.*)", r"final.proj.\1"),
]
_END = r"(?:\.conv)*\.(weight|bias)"
_UNETR: Rules = [  # of MONAI's decoder
    (r"encoder1\.layer\.((?:conv|norm)[123])" + _END, r"decoder.image.\1.\2"),
    (r"encoder([234])\.transp_conv_init" + _END, lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.0.{m[2]}"),
    (
        r"encoder([234])\.blocks\.(\d)\.0" + _END,
        lambda m: f"decoder.skips.{int(m[1]) - 2}.ups.{int(m[2]) + 1}.{m[3]}",
    ),
    (
        r"encoder([234])\.blocks\.(\d)\.1\.((?:conv|norm)[123])" + _END,
        lambda m: f"decoder.skips.{int(m[1]) - 2}.blocks.{m[2]}.{m[3]}.{m[4]}",
    ),
    (r"decoder([2345])\.transp_conv" + _END, lambda m: f"decoder.ups.{5 - int(m[1])}.up.{m[2]}"),
    (
        r"decoder([2345])\.conv_block\.((?:conv|norm)[123])" + _END,
        lambda m: f"decoder.ups.{5 - int(m[1])}.block.{m[2]}.{m[3]}",
    ),
    (r"out" + _END, r"decoder.out.\1"),
]
MONAI: Rules = [
    (r"(?:vit\.)?patch_embedding\.position_embeddings", "pos_embed"),
    (r"(?:vit\.)?patch_embedding\.patch_embeddings(?:\.1)?" + _END, r"patch_embed.proj.\1"),
    (r"(?:vit\.)?(blocks\.\d+)\.(norm1|norm2|attn\.qkv)" + _END, r"\1.\2.\3"),
    (r"(?:vit\.)?(blocks\.\d+)\.attn\.out_proj" + _END, r"\1.attn.proj.\2"),
    (r"(?:vit\.)?(blocks\.\d+)\.mlp\.linear(1|2)" + _END, r"\1.mlp.fc\2.\3"),
    (r"(?:vit\.)?norm" + _END, r"norm.\1"),
    (r"cls_token", "cls_token"),
    (r"classification_head(?:\.0)?\.(weight|bias)", r"head.\1"),
    *_UNETR,
]
UCF: Rules = [
    *MAE,
    *_UNETR,
    (
        r"token_embeds\.(\d)\.(weight|bias)",
        lambda m: f"patch_embed.{('norm_in', 'proj', 'norm_out')[int(m[1])]}.{m[2]}",
    ),
    (r"adaptive_pos_dep_emb\.0\.(weight|bias)", r"size_embed.\1"),
    (r"decoder_adaptive_pos_dep_emb\.0\.(weight|bias)", r"decoder.size_embed.\1"),
    (r"var_embed", "patch_embed.variable"),
    (r"var_query", "patch_embed.aggregate.query"),
    (r"var_agg\.(.*)", r"patch_embed.aggregate.\1"),
    (r"timeEmbeddingMap\.linear([12])\.(.*)", r"time_embed.fc\1.\2"),
]

# Tensors that say nothing about what a model computes; and those that say nothing where no rule above takes them.
NEVER = [(r".*bias_mask", "it only marks that keys have no bias"), (r".*num_batches_tracked", "a counter")]
IGNORED = [
    *NEVER,
    (r"(?:.*embeddings\.)?mask_token", "it stands in for hidden patches in pre-training"),
    (r"rope(?:_embed)?\.periods", "rotations are computed here"),
    (r"(?:.*\.)?pooler\..*", "a layer on the class token that this library does not have"),
    (r"(?:dino_head|ibot_head).*", "a head of pre-training"),
    (r"(?:vit\.)?blocks\.\d+\.(?:norm_cross_attn|cross_attn)\..*", "cross-attention that MONAI stores and never uses"),
    (r"vit\.patch_embedding\.cls_token", "a token that MONAI stores and never uses"),
    (r"freqs_cis", "rotations are computed here"),
    (r"temporalEmbeddings\..*", "waves of the time are computed here"),
]

# Tensors of models that compute something else with the same names beside them: refused with these words.
OTHERS = [
    (r"fc_norm\..*", "a norm after pooling (fc_norm), where the model's norms tokens before"),
    (r"attn_pool\..*", "a pooling by attention"),
    (r"(?:dist_token|head_dist\..*|.*distillation_token)", "a token of distillation (DeiT), which attention sees"),
    (r".*(?:rel_pos|relative_position|shared_rel).*", "attention that adds biases by distance"),
    (r"rope\.freqs", "rotations whose frequencies were learned (rope-mixed)"),
    (r"feat_rope\..*", "rotations beside its positions"),
    (r"blocks\.\d+\.attn\.norm\..*", "a norm of what attention gives (EVA-02, NormFormer)"),
    (r"blocks\.\d+\.mlp\.norm\..*", "a norm inside its MLPs (EVA-02, NormFormer)"),
    (r"blocks\.\d+\.attn\.(?:lambda_\w+|sub_norm\..*)", "differential attention"),
    (r"blocks\.\d+\.attn\.(?:proj_[lw]\..*|temperature|rescale.*)", "attention whose heads are mixed or rescaled"),
    (r"(?:.*\.)?patch_embed(?:dings)?\.(?:backbone|norm|conv|stem)\w*\..*", "patches that other layers make first"),
    (r"token_embeds\.\d+\.\d\..*", "adaptive tokens of several variables (UCF-VIT)"),
    (r"pos_embed_win|.*temp_embed", "further tables of positions"),
]

SIGNATURES: dict[str, tuple[list[str], list[str]]] = {  # names that a file of this kind has, and has not
    "vitrail": ([r"encoder\.blocks\.0\.attn\.qkv\.weight"], []),
    "timm": (
        [r"blocks\.(?:0\.)?0\.attn\.qkv\.weight", r"patch_embed\.proj\.weight"],
        [r"decoder_blocks\..*", r"blocks\.0\.mlp\.linear1\.weight", r"token_embeds\..*"],
    ),
    "mae": ([r"blocks\.0\.attn\.qkv\.weight", r"decoder_blocks\.0\.attn\.qkv\.weight"], [r"token_embeds\..*"]),
    "hf": ([_HF_BLOCKS + r"\.0\.attention\.(?:attention\.query|q_proj)\.weight"], []),
    "dit": ([r"x_embedder\.proj\.weight", r"blocks\.0\.adaLN_modulation\.1\.weight"], []),
    "diffusers": ([r"transformer_blocks\.0\.norm1\.linear\.weight", r"proj_out_2\.weight"], []),
    "monai": ([r"(?:vit\.)?blocks\.0\.mlp\.linear1\.weight"], [r"decoder_blocks\..*"]),
    "ucf": ([r"blocks\.0\.attn\.qkv\.weight", r"token_embeds\..*"], []),
    "torchditan": ([r"x_embedder\.proj\.weight", r"layers\.0\.adaLN_modulation\.1\.weight"], []),
    "torchtitan-mae": ([r"encoder\.layers\.0\.attention\.wq\.weight", r"decoder\.layers\.0\..*"], []),
}
TABLES: dict[str, Rules] = {
    "timm": TIMM,
    "mae": MAE,
    "hf": HF,
    "dit": DIT,
    "sit": DIT,
    "diffusers": DIFFUSERS,
    "monai": MONAI,
    "ucf": UCF,
    "torchditan": TORCHDITAN,
    "torchtitan-mae": TORCHTITAN_MAE,
}
ADAPTERS = ("vitrail", *TABLES)
# What blocks call their parts; those of all projects together, as no two of them mean different things by one name.
INSIDE: dict[str, list[tuple[str, str]]] = {
    "hf": _HF_LAYER,
    "torchtitan-mae": _TITAN_LAYER,
    "diffusers": _DIFFUSERS_LAYER,
    "timm": _BLOCK,
}


def recognise(names: Iterable[str]) -> list[str]:
    """List the adapters whose names these are."""
    given = list(names)

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in given)

    return [name for name, (there, absent) in SIGNATURES.items() if all(map(has, there)) and not any(map(has, absent))]


def rename(name: str, rules: Rules) -> str | None:
    """Return the name in the vocabulary; None where no rule takes it."""
    for pattern, to in rules:
        if found := re.fullmatch(pattern, name):
            new = to(found) if callable(to) else found.expand(to)
            if inner := re.fullmatch(r"((?:decoder\.)?blocks\.\d+\.)(.*)", new):
                return inner.group(1) + _rename_inside(inner.group(2))
            return new
    return None


def _rename_inside(name: str) -> str:
    for pattern, to in itertools.chain(*INSIDE.values()):
        if re.match(pattern, name):
            return re.sub("^" + pattern, to, name)
    return name
