"""Random numbers as data: each is a pure function of (seed, purpose, counter).

Nothing in vitrail draws from a global generator. A mask, a drop-path factor or an orientation is asked for by the
purpose it serves and the counter of the sample it belongs to, so that every rank, every restart, every recomputation
and every world size sees the same number.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE = 2**20  # normal numbers made at a time: what lies between stays small
_MASK = 0xFFFFFFFF
_FEW = 14  # counters: below that, a generator for each is as fast as the rounds of all at once
_SMALL = 32  # blocks of four 64-bit numbers: a generator is faster for a counter that needs more
# Philox4x64: factors of its two products, and what its two keys grow by from round to round.
_FACTORS, _STEPS, _ROUNDS = (0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B), 10


def key(seed: int, purpose: str, *counters: int | str) -> int:
    """Hash to 63 bits: a seed for any generator."""
    text = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keys(seed: int, purpose: str, counters: Iterable[int], *more: int | str) -> np.ndarray:
    """Return key(seed, purpose, counter, *more) of many counters [B], uint64."""
    begin, digests = hashlib.blake2b(f"{seed}:{purpose}:".encode(), digest_size=8), bytearray()
    end = "".join(f":{part}" for part in more)
    for counter in counters:
        one = begin.copy()
        one.update(f"{counter}{end}".encode())
        digests += one.digest()
    return np.frombuffer(digests, "<u8") >> np.uint64(1)


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return an endless sequence for each name: Philox takes the whole key, PyTorch's CPU generator 32 bits."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *counters)))


def uniforms(
    seed: int, purpose: str, counters: Sequence[int], number: int, dtype: type = np.float64, *, few: int = _FEW
) -> np.ndarray:
    """Return the first numbers in [0, 1) of each counter's stream [B, number], as its generator would give them."""
    halves = np.dtype(dtype).itemsize // 4
    blocks = -(-number * halves // 8)
    if len(counters) < few or blocks > _SMALL:
        out: np.ndarray = np.empty((len(counters), number), dtype)
        for row, counter in zip(out, counters, strict=True):
            stream(seed, purpose, counter).random(out=row, dtype=dtype)
        return out
    bits = _philox(keys(seed, purpose, counters), blocks)
    if halves == 2:
        return (bits[:, :number] >> np.uint64(11)) * 2.0**-53
    pairs = np.stack([bits & np.uint64(_MASK), bits >> np.uint64(32)], axis=2)  # the low half comes first
    small = (pairs.reshape(len(bits), -1)[:, :number] >> np.uint64(8)).astype(np.float32)
    return small * np.float32(2.0**-24)


def between(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map numbers in [0, 1) to those that a generator's uniform(low, high) would give."""
    return low + (high - low) * numbers


def _philox(secrets: np.ndarray, blocks: int) -> np.ndarray:
    """Return the first numbers of np.random.Philox for each key, [B, 4 * blocks] uint64, all of them at once."""
    number, low, half = len(secrets), np.uint64(_MASK), np.uint64(32)
    factor = np.array(_FACTORS, np.uint64)[:, None]
    factor_low, factor_high = factor & low, factor >> half
    step = np.array(_STEPS, np.uint64)[:, None]
    # Of the four words of a counter, those that are multiplied and the others, [2, B * blocks] each.
    product, other = np.zeros((2, 2, number * blocks), np.uint64)
    product[0] = np.tile(np.arange(1, blocks + 1, dtype=np.uint64), number)
    key = np.zeros_like(product)
    key[0] = np.repeat(secrets, blocks)
    for _ in range(_ROUNDS):
        # The high word of the product, by parts of 32 bits: none of these sums is beyond 64.
        right, left = product & low, product >> half
        middle = factor_high * right + (factor_low * right >> half)
        more = factor_low * left + (middle & low)
        high = factor_high * left + (middle >> half) + (more >> half)
        product, other = high[::-1] ^ other ^ key, (product * factor)[::-1]
        key = key + step
    words = np.stack([product[0], other[0], product[1], other[1]], axis=1)
    return words.reshape(number, 4 * blocks)


def sent(table: Any, device: "torch.device | str | None") -> "Tensor":
    """Send what was drawn or looked up on the host to a device, without waiting for what the device is at."""
    import torch

    own = torch.as_tensor(table)
    # Back to the host, numbers would be looked at before they are there.
    return own.to(device, non_blocking=own.device.type == "cpu")


class Draws:
    """The random numbers of the samples with the given counters."""

    def __init__(self, seed: int, counters: Sequence[int]):
        self.seed = seed
        self.counters = list(counters)

    def uniform(self, purpose: str, *shape: int) -> "Tensor":
        """Draw numbers in [0, 1), one table a sample [B, *shape], on the CPU, so that every device gets the same."""
        import torch

        out = uniforms(self.seed, purpose, self.counters, math.prod(shape), np.float32)
        return torch.from_numpy(out.reshape(len(self.counters), *shape))

    def normal(
        self, purpose: str, *shape: int, device: "torch.device | str | None" = None, rows: range | None = None
    ) -> "Tensor":
        """Draw numbers of mean 0 and variance 1 [B, *shape], float32; with `rows`, those of the second axis alone.

        An image has too many to draw them on the host, so each hashes its own place, on the device asked for: two
        hashes of 32 bits, by Box and Muller's way. In float64 until the end, so that rounding does not depend on how
        many are made at once.
        """
        import torch

        rows = range(shape[1]) if rows is None and len(shape) > 1 else rows
        row = math.prod(shape[2:])
        if rows is None:
            size, whole, places = shape, 0, torch.arange(math.prod(shape), device=device)
        else:
            size, whole = (shape[0], len(rows), *shape[2:]), math.prod(shape[1:])
            places = torch.arange(rows.start * row, rows.stop * row, device=device)
        starts = whole * torch.arange(size[0] if whole else 1, device=device)
        places = (starts[:, None] + places).flatten()  # in the whole, whatever part of it is made
        names = [f"{purpose}/{name}" for name in ("radius", "angle")]
        both = np.stack([keys(self.seed, name, self.counters) for name in names]).astype(np.int64)
        secrets = sent(both, device)[..., None]
        out = torch.empty(len(self.counters), len(places), device=device)
        across = max(1, min(len(places), _PIECE))
        down = max(1, _PIECE // across)
        for first in range(0, len(places), across):
            some = slice(first, first + across)
            for start in range(0, len(out), down):
                part = slice(start, start + down)
                bits, more = (hash32(places[some], secret[part]) for secret in secrets)
                radius = torch.sqrt(-2 * torch.log((bits.double() + 0.5) / 2**32))
                out[part, some] = (radius * torch.cos(more.double() * (2 * math.pi / 2**32))).float()
        return out.view(len(self.counters), *size)


def hash32(place: "Tensor", secret: "Tensor") -> "Tensor":
    """Hash each place (int64) and secret to 32 well-mixed bits; products wrap, and only their low bits count."""
    bits = (place + ((place >> 32) * 0x9E3779B1) + (secret & _MASK)) & _MASK
    high = (secret >> 31) & _MASK
    for _ in range(2):
        bits = (((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK) ^ high
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)
