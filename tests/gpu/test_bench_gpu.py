"""A measurement on a GPU: what only a device can tell."""

import pytest
import torch
from support import ROOT

from vitrail.bench import bench
from vitrail.layers.flops import peak_tflops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOY = ROOT / "configs" / "ablate" / "dit_toy.yaml"


def test_a_gpu_tells_more(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    found = bench(TOY, ["model.width=512", "model.heads=8", "data.batch=64"], mode="syn", windows=3, steps=20)
    assert found["precision"] == "bf16"
    assert found["memory"]["reserved_gib"] >= found["memory"]["allocated_gib"] > 0
    assert found["retries"] == 0
    split = found["split"]
    parts = sum(split[part] for part in ("data", "forward", "backward", "optimizer"))
    assert parts == pytest.approx(found["step_seconds"]["median"], rel=0.5)
    assert split["forward"] < split["backward"]  # as the device has it; launches of a small model take longer
    if peak_tflops(torch.cuda.get_device_name()):
        assert 0 < found["mfu"] <= found["hfu"] < 1
    if torch.version.cuda:
        assert found["energy_j"] is None or 0 < found["energy_j"] < 100


def test_a_batch_that_does_not_fit_is_out_of_memory(monkeypatch):
    from vitrail.errors import is_out_of_memory

    monkeypatch.delenv("RANK", raising=False)
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            bench(TOY, ["model.width=2048", "model.heads=8"], mode="syn", windows=1, steps=1)
        assert is_out_of_memory(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
