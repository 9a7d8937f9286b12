"""Float8 products: which layers pay, what is refused, and (rounded as there, multiplied here) what they compute."""

from typing import Any

import pytest
import torch
from support import recomputed
from torch import Tensor, nn

from vitrail.data.batch import Statistics
from vitrail.errors import UserError
from vitrail.layers.init import init_rules
from vitrail.models import DecoderConfig, EncoderConfig, MAEConfig, ViT
from vitrail.models.vit import ViTConfig
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.parallel import float8
from vitrail.parallel.mesh import Layout
from vitrail.recipe.sections import Recompute

CPU = torch.device("cpu")


def small(**changes: Any) -> ViT:
    standard: dict[str, Any] = {"width": 64, "depth": 2, "heads": 4, "patch": 4, "channels": 1, "classes": 3}
    return ViT(ViTConfig(**(standard | changes)))


def step(model: ViT) -> tuple[Tensor, dict[str, Tensor]]:
    images = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    out = model(**model.inputs(images))
    out.square().sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def near(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# ---------------------------------------------------------------- break-even


def test_large_layers_pay_and_small_ones_do_not() -> None:
    assert float8.speedup(8192, 4096, 14336, "tensorwise") > 1.2
    assert float8.speedup(8192, 4096, 14336, "rowwise") > 1.1
    assert float8.speedup(8192, 768, 768, "rowwise") < 0.9
    for recipe in ("tensorwise", "rowwise", "rowwise_gw"):
        assert float8.speedup(8192, 8192, 8192, recipe) > float8.speedup(512, 8192, 8192, recipe)


def test_break_even_is_the_first_number_of_rows_that_pays() -> None:
    rows = float8.break_even(3072, 11264)
    assert rows is not None
    assert float8.speedup(rows, 3072, 11264) >= float8.PAYS > float8.speedup(rows - 1, 3072, 11264)
    assert float8.break_even(256, 256) is None


def test_the_check_says_when_it_will_not_pay() -> None:
    with torch.device("meta"):
        wide = small(width=4096, heads=32, hidden=16384)
        narrow = small()
        odd = small(width=40, heads=4)
    judged = float8.check(wide, rows=16384)
    assert len(judged.taken) == 8
    assert str(judged).startswith("float8 in 8 of 8 linear layers, about 1.")
    judged = float8.check(wide, rows=64)
    assert not judged.taken
    assert "will not pay: none of 8 linear layers" in str(judged)
    assert "tokens on, and there are 64" in str(judged)
    assert "pays at no number of tokens); use bf16" in str(float8.check(narrow, rows=10**6))
    assert "40 x 160 are not multiples of 16" in str(float8.check(odd, rows=10**6))
    forced = str(float8.check(narrow, rows=64, force=True))
    assert forced.startswith("float8 in 8 of 8 linear layers, about 0.")  # what is lost is said
    assert "stay" not in forced
    assert not float8.check(odd, rows=10**6, force=True).taken


def test_rows_are_those_that_a_layer_of_a_block_sees() -> None:
    """A masked autoencoder's encoder never sees hidden tokens; a piece, a part or a gathered group decide the rest."""
    counts = {"visible": 16, "predicted": 24}  # of 64 tokens, 75 % hidden, half of which are predicted

    def tokens(kind: str, on: str = "hidden") -> dict[str, int]:
        config = MAEConfig(
            encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4),
            decoder=DecoderConfig(kind=kind, width=16, depth=1, heads=2, decode_ratio=0.5),  # type: ignore[arg-type]
            channels=1,
            shape=32,
        )
        objective = ReconstructConfig(on=on).build(config, Statistics((0.0,), (1.0,)))  # type: ignore[arg-type]
        with torch.device("meta"):
            names = [layer.name for layer in float8.linears(config.build())]
        return {name: objective.tokens_at(name) for name in names}

    crossed = tokens("cross")
    assert crossed["encoder.blocks.0.mlp.fc1"] == counts["visible"]
    assert crossed["decoder.blocks.0.attn.q"] == crossed["decoder.blocks.0.mlp.fc2"] == counts["predicted"]
    assert crossed["decoder.blocks.0.attn.kv"] == counts["visible"]
    assert tokens("cross", "all")["decoder.blocks.0.attn.q"] == sum(counts.values())
    assert tokens("self")["decoder.blocks.0.attn.qkv"] == sum(counts.values())

    alone, layout = Layout(1, 1, True), Layout(1, 1, True, context=2, tensor=4)
    assert float8.rows_of("blocks.0.mlp.fc1", samples=3, tokens=64, layout=alone) == 3 * 64
    assert float8.rows_of("blocks.0.attn.qkv", samples=3, tokens=64, layout=layout) == 3 * 32
    assert float8.rows_of("blocks.0.mlp.gate", samples=3, tokens=64, layout=layout, piece=5) == 3 * 5 * 4
    assert float8.rows_of("blocks.0.attn.qkv", samples=3, tokens=64, layout=layout, piece=5) == 3 * 32


def test_layers_of_one_model_are_judged_by_rows_of_their_own() -> None:
    with torch.device("meta"):
        wide = small(width=4096, heads=32, hidden=16384)
    judged = float8.check(wide, lambda name: 16384 if name.startswith("encoder.blocks.0.") else 64)
    assert len(judged.taken) == len(judged.left) == 4
    assert all(name.startswith("encoder.blocks.0.") for name in judged.taken)
    assert "(by an H200's speeds); 4 stay in bf16" in str(judged)


def test_devices_without_float8_are_refused() -> None:
    with pytest.raises(UserError, match=r"precision\.compute: float8 cannot be used, since a CPU has no"):
        float8.apply(small(), device=CPU, rows=100)


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability 8.0 has no float8 products" in (float8.refusal(torch.device("cuda")) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert float8.refusal(torch.device("cuda")) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, able in (("gfx942:sramecc+", True), ("gfx90a", False)):
        properties = type("Properties", (), {"gcnArchName": name})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert (float8.refusal(torch.device("cuda")) is None) == able


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"float8 needs torchao .*; pip install"):
        float8.apply(small(), device=CPU, rows=100, emulate=True)


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_gw"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_near_those_without(recipe: Any, bias: bool) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain, model = small(bias=bias), small(bias=bias)
    names, rules = list(plain.state_dict()), init_rules(plain)
    judged = float8.apply(model, device=CPU, rows=27, recipe=recipe, force=True, emulate=True)
    assert len(judged.taken) == 8
    assert list(model.state_dict()) == names
    assert init_rules(model) == rules
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))
    out, expected = step(plain)
    found_out, found = step(model)
    assert 0 < near(found_out, out) < 0.1
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert near(gradient, expected[name]) < 0.25, name


def test_layers_that_do_not_pay_stay_as_they_are() -> None:
    pytest.importorskip("torchao")
    plain, model = small(), small()
    judged = float8.apply(model, device=CPU, rows=27, emulate=True)
    assert not judged.taken
    assert torch.equal(step(plain)[0], step(model)[0])


def test_recomputation_by_role_knows_float8_products() -> None:
    pytest.importorskip("torchao")
    models = [small() for _ in range(3)]
    for model in models:
        float8.apply(model, device=CPU, rows=27, force=True, emulate=True)
    recomputed(models[1].blocks(), "full")
    recomputed(models[2].blocks(), Recompute(keep=("attention", "fc1")))
    results = [step(model)[1] for model in models]
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(gradient, other[name]), name
