"""Sequences in pieces: the same values and gradients, and less memory."""

from typing import Any

import pytest
import torch
from support import recomputed
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViTConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig
from vitrail.models.model import Model
from vitrail.models.sap import SAPConfig
from vitrail.models.vit import ViTConfig
from vitrail.parallel import chunk
from vitrail.recipe.sections import Chunk, Recompute


def encoder(**changes: Any) -> EncoderConfig:
    return EncoderConfig(**({"width": 24, "depth": 2, "heads": 2, "patch": 4} | changes))


NAMED = VariablesConfig(known=("a", "b", "c"))
SEPARATE = VariablesConfig(known=("a", "b", "c"), aggregate="none")
DECODER = DecoderConfig(kind="cross", width=16, depth=1, heads=2)
MODELS: dict[str, Any] = {
    "mae": MAEConfig(encoder=encoder(mlp="swiglu", bias=False), decoder=DECODER, channels=1, shape=16),
    "mae variables": MAEConfig(encoder=encoder(variables=NAMED, cls_token=True), decoder=DECODER, shape=16),
    "mae separate": MAEConfig(encoder=encoder(variables=SEPARATE), decoder=DECODER, shape=16),
    "mae linear": MAEConfig(encoder=encoder(), decoder=DecoderConfig(kind="linear"), channels=1, shape=16),
    "diffusion vit": DiffusionViTConfig(
        encoder=encoder(), decoder=DiffusionDecoderConfig(width=16, depth=1, heads=2), channels=1, shape=16
    ),
    "dit": DiTConfig(width=24, depth=2, heads=2, patch=4, channels=1, shape=16),
    "dit plain": DiTConfig(width=24, depth=2, heads=2, patch=4, channels=1, shape=16, final="plain"),
    "sap": SAPConfig(
        encoder=encoder(tokens=AdaptiveTokens(length=16), registers=2), classes=3, features=8, channels=1, shape=16
    ),
}


def build(config: Any) -> Model:
    model = config.build()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def step(model: Model, config: Any, names: tuple[str, ...] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    channels = len(names) if names else config.channels
    inputs = model.inputs(torch.randn(2, channels, 16, 16, generator=generator), names)
    if config.kind in ("dit", "diffusion_vit"):
        inputs["times"] = torch.tensor([3.0, 500.0])
    out = model(**inputs)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_pieces_give_the_same_values_and_gradients(name: str) -> None:
    config = MODELS[name]
    some = ("c", "a") if "variables" in name or "separate" in name else None
    out, expected = step(build(config), config, some)
    for choice in ("none", "full", Recompute(keep=("attention",))):
        model = build(config)
        names = list(model.state_dict())
        chunk.apply(model, Chunk(mlp=5, head=3))
        recomputed(model.blocks(), choice)  # type: ignore[arg-type]
        found_out, found = step(model, config, some)
        assert list(model.state_dict()) == names
        torch.testing.assert_close(found_out, out, rtol=1e-5, atol=1e-6)
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-5 * expected[key].abs().max().item())


def held(model: Model, config: Any) -> int:
    """Numbers that a forward holds for the backward, weights aside."""
    sizes: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return t

    inputs = model.inputs(torch.randn(2, config.channels, 16, 16))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = model(**inputs)
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    del out
    return sum(sizes.values())


def test_hidden_channels_of_the_whole_sequence_are_not_held() -> None:
    config = MODELS["sap"]
    tokens, hidden, voxels = 2 * (16 + 2), 96, 16
    plain, mlp, head = (build(config) for _ in range(3))
    chunk.apply(mlp, Chunk(mlp=4))
    chunk.apply(head, Chunk(head=4))
    all_of_it = held(plain, config)
    assert all_of_it - held(mlp, config) >= 2 * 2 * tokens * hidden * 0.9  # two blocks: before and after GELU
    assert all_of_it - held(head, config) >= 2 * 2 * 16 * voxels * 8 * 0.9  # features a voxel, before and after GELU


def test_a_piece_never_has_more_tokens_than_asked_for() -> None:
    config = MODELS["mae"]
    model = build(config)
    chunk.apply(model, Chunk(mlp=5, head=3))
    seen: list[int] = []
    for block in model.blocks():
        block.mlp.fc1.register_forward_hook(lambda _, x, y: seen.append(y.shape[1]))
    step(model, config)
    assert max(seen) == 5
    sizes = [x.shape[1] for x in torch.zeros(1, 16, 1).split(5, 1)]
    assert seen[: len(sizes)] == sizes


def test_models_without_voxel_heads_are_refused() -> None:
    model = ViTConfig(width=24, depth=1, heads=2, patch=4, channels=1).build()
    with pytest.raises(UserError, match=r"chunk\.head: ViT has no head that predicts voxels from tokens; leave it out"):
        chunk.apply(model, Chunk(head=4))
    chunk.apply(model, Chunk())  # nothing asked for
    elsewhere = build(MODELS["dit"])
    elsewhere.final = nn.Identity()  # as on a rank of a pipeline that has not the last part
    chunk.apply(elsewhere, Chunk(head=4))


@pytest.mark.parametrize("choice", ["none", pytest.param("full", marks=pytest.mark.slow), "keep"])
def test_compiled_blocks_run_in_pieces(choice: Any) -> None:
    torch._dynamo.reset()
    config = MODELS["mae"]
    _, expected = step(build(config), config)
    model = build(config)
    chunk.apply(model, Chunk(mlp=7))
    recomputed(model.blocks(), Recompute(keep=("attention",)) if choice == "keep" else choice)
    for block in model.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    _, found = step(model, config)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5 * expected[key].abs().max().item())
    torch._dynamo.reset()
