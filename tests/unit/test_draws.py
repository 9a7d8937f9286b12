"""Random numbers of many counters at once are those of each counter's own generator, bit for bit."""

import hashlib

import numpy as np
import pytest
import torch

from vitrail.draws import Draws, between, key, keys, sent, stream, uniforms


def test_a_key_is_a_hash_of_the_words() -> None:
    text = b"7:noise/radius:123456789012:2"
    expected = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    assert key(7, "noise/radius", 123456789012, 2) == expected
    assert keys(7, "noise/radius", [123456789012], 2).tolist() == [expected]


def test_keys_of_many_counters_are_those_of_each() -> None:
    counters = [0, 1, 9, 10, 2**40, 3]
    assert keys(3, "times", counters).tolist() == [key(3, "times", c) for c in counters]
    assert keys(3, "offset", counters, 1, "again", 2).tolist() == [key(3, "offset", c, 1, "again", 2) for c in counters]
    assert keys(3, "times", []).tolist() == []


def test_tables_are_sent_as_they_are() -> None:
    table = torch.arange(6.0).view(2, 3)
    assert sent(table, table.device) is table
    assert sent(table, None) is table
    assert sent(table, "meta").device.type == "meta"
    assert sent([1, 2**63 - 1], "cpu").tolist() == [1, 2**63 - 1]
    assert sent([0.5], "cpu").dtype == torch.float32
    assert sent(np.ones(3), "cpu").dtype == torch.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8, 9, 24, 63, 64, 65, 128, 129, 256, 257])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_numbers_of_many_counters_are_those_of_their_streams(count: int, number: int, dtype: type) -> None:
    counters = [2**k + 3 * k for k in range(count)] if count < 64 else list(range(100, 164))
    expected = np.stack([stream(5, "augment.flip", c).random(number, dtype=dtype) for c in counters])
    for few in (0, 1000):  # at once, and one by one
        found = uniforms(5, "augment.flip", counters, number, dtype, few=few)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0.2, 0.7), (-0.223, 0.31)])
def test_numbers_between_two_are_those_of_their_streams(low: float, high: float) -> None:
    expected = np.stack([stream(5, "augment.blur", c).uniform(low, high, 5) for c in range(40)])
    np.testing.assert_array_equal(between(uniforms(5, "augment.blur", range(40), 5), low, high), expected)


@pytest.mark.parametrize("shape", [(), (1,), (12, 2), (3, 100)])
def test_draws_are_those_of_each_sample(shape: tuple[int, ...]) -> None:
    counters = list(range(40, 72))
    whole = Draws(1, counters).uniform("times", *shape)
    assert whole.shape == (32, *shape)
    for row, counter in zip(whole, counters, strict=True):
        expected = stream(1, "times", counter).random(shape, dtype=np.float32)
        assert torch.equal(row, torch.from_numpy(np.asarray(expected)))


def test_no_samples_have_no_numbers() -> None:
    assert Draws(0, []).uniform("times", 3).shape == (0, 3)
    assert Draws(0, []).normal("noise", 3, 4).shape == (0, 3, 4)


def test_normal_numbers_are_those_they_always_were() -> None:
    found = Draws(4, [11, 2**33]).normal("noise", 2, 3)
    alone = torch.cat([Draws(4, [counter]).normal("noise", 2, 3) for counter in (11, 2**33)])
    assert torch.equal(found, alone)
    expected = [-0.313886, -0.027682, 0.806392, -0.140156, -0.900496, 0.708701]
    assert found[0].flatten().tolist() == pytest.approx(expected, abs=1e-5)
