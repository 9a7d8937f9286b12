"""Small parts of reading and augmenting: the size of a chunk, draws of intensities, noise of channels, spacings."""

import re

import numpy as np
import pytest
import torch

from vitrail.data.augment.intensity import SPREAD, add_noise, change_intensity
from vitrail.data.chunks.layout import _unpacker
from vitrail.data.sources import netcdf
from vitrail.recipe.sections import Augment


@pytest.mark.parametrize("size", [3, 5])
def test_a_chunk_of_another_size_is_refused_with_both(size: int) -> None:
    unpack = _unpacker((2, 2), np.dtype("u1"), [], (0, 1))
    assert unpack(b"1234").tolist() == [[49, 50], [51, 52]]
    with pytest.raises(ValueError, match=re.escape(f"it holds {size} bytes instead of 4")):
        unpack(b"12345"[:size])


@pytest.mark.parametrize("key", ["gamma", "contrast"])
def test_factors_are_as_often_below_1_as_above(key: str) -> None:
    """Between 1/3 and 3 in proportion: their logarithms are even, so that none is brighter or flatter on the whole."""
    counters, shape = range(4000), (4000, 1, 1, 1)
    mean, std = torch.full((4000, 1), 7.0), torch.full((4000, 1), 2.0)
    values = torch.full(shape, 7.0 + (0.25 - 0.5) * 2 * SPREAD * 2.0)  # a quarter of the way through gamma's range
    changed = change_intensity(values, counters, Augment(**{key: (1 / 3, 3.0)}), 5, mean, std).flatten().double()
    if key == "gamma":
        factors = torch.log((changed - 7) / (2 * SPREAD * 2.0) + 0.5) / np.log(0.25)
    else:
        factors = (changed - 7) / ((0.25 - 0.5) * 2 * SPREAD * 2.0)
    logs = factors.log() / np.log(3)
    assert abs(float(logs.mean())) < 0.04
    assert abs(float(logs.square().mean()) - 1 / 3) < 0.03
    assert float(logs.min()) == pytest.approx(-1, abs=0.01)
    assert float(logs.max()) == pytest.approx(1, abs=0.01)


def test_each_channel_of_each_sample_has_noise_of_its_own() -> None:
    values = torch.zeros(2, 3, 16, 16)
    add_noise(values, [11, 12], torch.ones(2, 3))
    alike = torch.corrcoef(values.view(6, -1)) - torch.eye(6)
    assert float(alike.abs().max()) < 0.3


@pytest.mark.parametrize(
    ("places", "spacing"),
    [([0.0, 0.75, 1.5], 0.75), ([3.0, 2.0, 1.0], 1.0), ([0.0, 1.0, 1.5], None), ([2.0, 2.0], None)],
)
def test_only_even_coordinates_have_a_spacing(places: list[float], spacing: float | None) -> None:
    xarray = pytest.importorskip("xarray")
    field = xarray.DataArray(np.zeros(len(places)), dims=["lat"], coords={"lat": places})
    field["lat"].attrs["units"] = "degrees_north"
    expected = ({}, None) if spacing is None else ({"lat": spacing}, "degree")
    assert netcdf._spacing(field, ["lat"]) == expected
