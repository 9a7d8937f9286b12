"""Float8 products: which layers pay, what is refused, and (rounded as there, multiplied here) what they compute."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.layers.init import init_rules
from vitrail.models import ViT
from vitrail.models.vit import ViTConfig
from vitrail.parallel import float8, recompute
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
    recompute.apply(models[1].blocks(), "full")
    recompute.apply(models[2].blocks(), Recompute(keep=("attention", "fc1")))
    results = [step(model)[1] for model in models]
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.equal(gradient, other[name]), name
