"""Triton kernels of gradients that are summed over all tokens on the way: one pass where there were two or three.

The torch code in layers/fused.py is the reference. A program goes through some rows, and leaves its sum of each column
in fp32; the sums of all programs are added up by PyTorch. Rows are tokens, columns are channels.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gate_back", "gelu_back", "norm_back", "pack_back", "probe"]

# Programs for each multiprocessor: whole waves of those that fit on one, and few enough that their sums are cheap.
_BUSY, _WIDE, _WIDEST = 12, 4, 2


def probe(device: torch.device) -> bool:
    """Build and run the smallest kernel: False where it gives the wrong answer; raises where it cannot be built."""
    grad = torch.ones(1, 16, device=device)
    out, total = gelu_back(grad, torch.zeros_like(grad), False)
    return bool(out[0, 0] == 0.5) and bool(total[0] == 0.5)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shares(rows: int, blocks: int, step: int, most: int) -> tuple[int, int]:
    """Return into how many shares rows are cut, for at most so many programs with all blocks; and a share's rows."""
    number = max(1, min(triton.cdiv(rows, step), most // blocks))
    each = triton.cdiv(triton.cdiv(rows, number), step) * step
    return triton.cdiv(rows, each), each


def warps_for(numbers: int) -> int:
    """Return the warps of a program that holds so many numbers of each tensor: 8 numbers a thread."""
    return min(16, max(1, numbers // 256))


def gelu_back(grad: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of GELU's output and its input, [..., C] -> gradient of its input, and the sum of that over rows [C]."""
    grad, x = grad.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows, out = x.numel() // columns, torch.empty_like(x)
    blocks = triton.cdiv(columns, 128)
    number, each = shares(rows, blocks, 32, _BUSY * processors(x.device))
    sums = torch.empty(number, columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _gelu_back[(blocks, number)](grad, x, out, sums, rows, columns, each, tanh, BR=32, BC=128, num_warps=8)
    return out, sums.sum(dim=0).to(x.dtype)


def pack_back(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Three gradients [B, N, H, K] -> one of (head; query, key, value; K) [B, N, 3 * H * K], and its sum."""
    batch, tokens, heads, width = q.shape
    rows, columns = batch * tokens, heads * width
    out = torch.empty(batch, tokens, 3 * columns, dtype=q.dtype, device=q.device)
    blocks = triton.cdiv(columns, 128)
    number, each = shares(rows, 3 * blocks, 32, _BUSY * processors(q.device))
    sums = torch.empty(number, 3 * columns, dtype=torch.float32, device=q.device)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    strides = [step for t in (q, k, v) for step in t.stride()[:3]]
    with torch.cuda.device_of(q):
        grid = (blocks, number, 3)
        _pack_back[grid](q, k, v, out, sums, rows, tokens, columns, each, *strides, width, BR=32, BC=128, num_warps=8)
    return out, sums.sum(dim=0).to(q.dtype)


def norm_back(
    grad: Tensor, x: Tensor, past: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a layer norm's output and of what goes past it, its input and weight -> gradient of its input.

    Beside it those of its weight and bias, and the sum of the gradient of its input over rows [C].
    """
    grad, x, past = grad.contiguous(), x.contiguous(), past.contiguous()
    columns = x.shape[-1]
    rows, out = x.numel() // columns, torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    step = max(1, 1024 // block)
    number, each = shares(rows, 1, step, _WIDE * processors(x.device))
    sums = torch.empty(number, 3, columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        sizes, warps = (rows, columns, each, eps), warps_for(step * block)
        _norm_back[(number,)](grad, x, past, weight, out, sums, *sizes, BR=step, BC=block, num_warps=warps)
    # One by one: what an operator gives back must not share memory.
    of_weight, of_bias, of_input = (sums[:, i].sum(dim=0).to(weight.dtype) for i in range(3))
    return out, of_weight, of_bias, of_input


def gate_back(
    past: Tensor, branch: Tensor, gate: Tensor, normed: tuple[Tensor, Tensor, Tensor, float] | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of x + gate * branch [B, N, C] -> that of x, that of the branch, and sums over tokens [B, C] in fp32.

    `normed`: its layer norm without weights, times 1 + scale [B, C], was given on, too; this is the gradient of that,
    the sum x + gate * branch, the scale, and eps. `past` is then the gradient of what went past it. The sums are those
    of the gradient of x, and of that times the branch; then of the gradient of the norm, and of that times the norm.
    """
    batch, tokens, columns = branch.shape
    grad, x, scale, eps = (past, past, gate, 0.0) if normed is None else normed
    past, grad, x, branch = (t if t.stride()[1:] == (columns, 1) else t.contiguous() for t in (past, grad, x, branch))
    block = triton.next_power_of_2(columns)
    step = max(1, 1024 // block)
    number, each = shares(tokens, batch, step, _WIDEST * processors(x.device))
    out = past if normed is None else torch.empty_like(branch, memory_format=torch.contiguous_format)
    of_branch = torch.empty_like(branch, memory_format=torch.contiguous_format)
    kinds = 2 if normed is None else 4
    sums = torch.empty(batch, number, kinds, columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(branch):
        _gate_back[(batch, number)](
            past, branch, gate.contiguous(), grad, x, scale.contiguous(), out, of_branch, sums, tokens, columns, each,
            past.stride(0), branch.stride(0), grad.stride(0), x.stride(0), eps, normed is not None, BR=step, BC=block,
            num_warps=warps_for(step * block),
        )  # fmt: skip
    return out, of_branch, [sums[:, :, i].sum(dim=1) for i in range(kinds)]


@triton.jit
def _slope(x, TANH: tl.constexpr):
    """The slope of GELU: see layers/gelu.py, whose numbers these are."""
    if TANH:
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        slope = share + x * share * (1.0 - share) * (1.5957691216057308 + 0.21406444881780076 * x * x)
    else:
        bell = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(x))
        tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        tail = tail * t * bell
        slope = tl.where(x >= 0, 1.0 - tail, tail) + x * bell * 0.3989422804014327
    return slope


@triton.jit
def _gelu_back(grad, x, out, sums, rows, columns, each, TANH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    share = tl.program_id(1)
    inside = column < columns
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, each, BR):
        row = share * each + start + tl.arange(0, BR)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + place, mask=mask, other=0).to(tl.float32)
        change = tl.load(grad + place, mask=mask, other=0).to(tl.float32) * _slope(value, TANH)
        tl.store(out + place, change, mask=mask)
        total += change
    tl.store(sums + share * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _pack_back(
    q, k, v, out, sums, rows, tokens, columns, each, qb, qn, qh, kb, kn, kh, vb, vn, vh, WIDTH: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    share = tl.program_id(1)
    which = tl.program_id(2)
    source, of_sample, of_token, of_head = q, qb, qn, qh
    if which == 1:
        source, of_sample, of_token, of_head = k, kb, kn, kh
    if which == 2:
        source, of_sample, of_token, of_head = v, vb, vn, vh
    inside = column < columns
    head = column // WIDTH
    there = column % WIDTH
    target = head * 3 * WIDTH + which * WIDTH + there
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, each, BR):
        row = share * each + start + tl.arange(0, BR)
        mask = (row < rows)[:, None] & inside[None, :]
        place = (row // tokens).to(tl.int64) * of_sample + (row % tokens).to(tl.int64) * of_token
        value = tl.load(source + place[:, None] + (head * of_head + there)[None, :], mask=mask, other=0)
        tl.store(out + row.to(tl.int64)[:, None] * (3 * columns) + target[None, :], value, mask=mask)
        total += value.to(tl.float32)
    tl.store(sums + share * 3 * columns + target, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _norm_back(
    grad, x, past, weight, out, sums, rows, columns, each, eps, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BC)
    share = tl.program_id(0)
    inside = column < columns
    factor = tl.load(weight + column, mask=inside, other=0).to(tl.float32)[None, :]
    of_weight = tl.zeros([BR, BC], tl.float32)
    of_bias = tl.zeros([BR, BC], tl.float32)
    of_input = tl.zeros([BR, BC], tl.float32)
    for start in tl.range(0, each, BR, num_stages=3):
        row = share * each + start + tl.arange(0, BR)
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + place, mask=mask, other=0).to(tl.float32)
        change = tl.load(grad + place, mask=mask, other=0).to(tl.float32)
        beside = tl.load(past + place, mask=mask, other=0).to(tl.float32)
        mean = tl.sum(value, axis=1) / columns
        value = tl.where(mask, value - mean[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / columns + eps)
        value = value * scale[:, None]
        weighted = change * factor
        along = tl.sum(weighted * value, axis=1) / columns
        level = tl.sum(weighted, axis=1) / columns
        result = (weighted - value * along[:, None] - level[:, None]) * scale[:, None] + beside
        result = tl.where(mask, result, 0.0)
        tl.store(out + place, result, mask=mask)
        of_weight += change * value
        of_bias += change
        of_input += result
    sums += share * 3 * columns + column
    tl.store(sums, tl.sum(of_weight, axis=0), mask=inside)
    tl.store(sums + columns, tl.sum(of_bias, axis=0), mask=inside)
    tl.store(sums + 2 * columns, tl.sum(of_input, axis=0), mask=inside)


@triton.jit
def _gate_back(
    past, branch, gate, grad, x, scale, out, of_branch, sums, tokens, columns, each, past_step, branch_step, grad_step,
    x_step, eps, NORMED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    column = tl.arange(0, BC)
    inside = column < columns
    opened = tl.load(gate + sample * columns + column, mask=inside, other=0).to(tl.float32)[None, :]
    factor = 1.0 + tl.load(scale + sample * columns + column, mask=inside, other=0).to(tl.float32)[None, :]
    of_x = tl.zeros([BR, BC], tl.float32)
    of_gate = tl.zeros([BR, BC], tl.float32)
    of_shift = tl.zeros([BR, BC], tl.float32)
    of_scale = tl.zeros([BR, BC], tl.float32)
    for start in tl.range(0, each, BR, num_stages=3):
        row = share * each + start + tl.arange(0, BR)
        mask = (row < tokens)[:, None] & inside[None, :]
        place = row[:, None] * columns + column[None, :]
        change = tl.load(past + sample * past_step + place, mask=mask, other=0).to(tl.float32)
        added = tl.load(branch + sample * branch_step + place, mask=mask, other=0).to(tl.float32)
        if NORMED:
            value = tl.load(x + sample * x_step + place, mask=mask, other=0).to(tl.float32)
            given = tl.load(grad + sample * grad_step + place, mask=mask, other=0).to(tl.float32)
            mean = tl.sum(value, axis=1) / columns
            value = tl.where(mask, value - mean[:, None], 0.0)
            steep = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / columns + eps)
            value = value * steep[:, None]
            weighted = given * factor
            along = tl.sum(weighted * value, axis=1) / columns
            level = tl.sum(weighted, axis=1) / columns
            change += tl.where(mask, (weighted - value * along[:, None] - level[:, None]) * steep[:, None], 0.0)
            tl.store(out + (sample * tokens) * columns + place, change, mask=mask)
            of_shift += given
            of_scale += given * value
        tl.store(of_branch + (sample * tokens) * columns + place, change * opened, mask=mask)
        of_x += change
        of_gate += change * added
    if NORMED:
        sums += (sample * tl.num_programs(1) + share) * 4 * columns + column
        tl.store(sums + 2 * columns, tl.sum(of_shift, axis=0), mask=inside)
        tl.store(sums + 3 * columns, tl.sum(of_scale, axis=0), mask=inside)
    else:
        sums += (sample * tl.num_programs(1) + share) * 2 * columns + column
    tl.store(sums, tl.sum(of_x, axis=0), mask=inside)
    tl.store(sums + columns, tl.sum(of_gate, axis=0), mask=inside)
