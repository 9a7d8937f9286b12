"""Predictions on a GPU: those of the CPU, up to rounding, also where passes are replayed."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from predicting import plain_probabilities, train_segmentation, write_em

import vitrail
from vitrail.data.sources.zarr import OmeZarrConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device", ["cuda"])
def test_a_gpu_says_what_a_cpu_says(tmp_path: Path, device: str) -> None:
    write_em(tmp_path / "em.zarr", shape=(40, 48, 64))
    values = OmeZarrConfig(path=str(tmp_path / "em.zarr")).open().read(0, (slice(None),) * 3)
    run = train_segmentation(tmp_path, tmp_path / "em.zarr", run__device=device)
    expected = plain_probabilities(run, values)
    for compute, most in (("fp32", 2e-3), ("bf16", 5e-2)):
        out = tmp_path / f"{compute}.zarr"
        made = vitrail.predict(
            run, tmp_path / "em.zarr", out=out, write="probabilities", compute=compute, batch=4, chunk=16, memory=0.001
        )
        assert made["rows"] > 10
        found = np.asarray(zarr.open_group(str(out), mode="r")["s0"])
        assert np.abs(found - expected).max() < most
    model = vitrail.load(run).to(device)
    assert np.abs(model.predict(values, write="probabilities", compute="fp32") - expected).max() < 2e-3
