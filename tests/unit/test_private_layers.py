"""PyTorch's private names that the layers lean on still are what the code takes them for."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitrail.layers import private

QKV = "query key value"
GRADS = f"grad_out {QKV} out logsumexp"
LENGTHS = "cum_seq_q cum_seq_k max_q max_k"
# The arguments that are given, in their order; those that may follow have defaults.
ARGUMENTS = {
    "cpu_flash": f"{QKV} dropout_p is_causal attn_mask scale",
    "cpu_flash_backward": f"{GRADS} dropout_p is_causal attn_mask scale",
    "flash": f"{QKV} dropout_p is_causal return_debug_mask scale",
    "flash_backward": f"{GRADS} {LENGTHS} dropout_p is_causal philox_seed philox_offset scale",
    "cudnn": f"{QKV} attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    "cudnn_backward": f"{GRADS} philox_seed philox_offset attn_bias {LENGTHS} dropout_p is_causal scale",
    "efficient": f"{QKV} attn_bias compute_log_sumexp dropout_p is_causal scale",
    "efficient_backward": f"grad_out_ {QKV} attn_bias out logsumexp philox_seed philox_offset dropout_p "
    "grad_input_mask is_causal scale",
    "packed_flash": f"{QKV} {LENGTHS} dropout_p is_causal return_debug_mask scale",
    "packed_flash_backward": f"{GRADS} {LENGTHS} dropout_p is_causal rng_state unused scale",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_kernels_take_what_they_are_given(name: str) -> None:
    arguments = getattr(private, name).default._schema.arguments
    given = ARGUMENTS[name].split()
    assert [argument.name for argument in arguments[: len(given)]] == given
    assert all(argument.has_default_value() for argument in arguments[len(given) :])


def test_every_private_kernel_is_checked() -> None:
    kernels = {name for name, value in vars(private).items() if hasattr(value, "default")}
    assert kernels == set(ARGUMENTS)


def test_the_flash_kernel_of_the_cpu_gives_the_log_sum_exp() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    out, lse = private.cpu_flash(q, k, v, 0.0, False, attn_mask=None, scale=0.5)
    scores = 0.5 * q @ k.mT
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1))
    torch.testing.assert_close(out, scores.softmax(dim=-1) @ v)
    dq, dk, dv = private.cpu_flash_backward(torch.ones_like(out), q, k, v, out, lse, 0.0, False, scale=0.5)
    for t in (q, k, v):
        t.requires_grad_()
    expected = torch.autograd.grad(((0.5 * q @ k.mT).softmax(dim=-1) @ v).sum(), (q, k, v))
    torch.testing.assert_close((dq, dk, dv), expected)


def test_where_a_shard_begins() -> None:
    torch.distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        local, offset = private.compute_local_shape_and_global_offset((7, 3), mesh, (Shard(0), Replicate()))
        assert (tuple(local), tuple(offset)) == ((3, 3), (4, 0))
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_code_takes_a_marked_result_for_a_constant() -> None:
    calls: list[int] = []
    known = private.constant_when_compiled(lambda: calls.append(1) or len(calls))
    compiled = torch.compile(lambda x: x + known(), backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(())).item() for _ in range(2)] == [1, 1]


def test_the_compiler_stops_at_a_function_that_is_not_to_be_compiled() -> None:
    seen: list[bool] = []
    plain = private.not_compiled(lambda x: seen.append(torch.compiler.is_compiling()) or 2 * x)
    compiled = torch.compile(lambda x: plain(x) + 1, backend="eager")
    assert compiled(torch.ones(())).item() == 3
    assert seen == [False]


def test_a_start_does_not_import_the_compiler() -> None:
    """It costs each process a second."""
    code = "import sys, vitrail.training.run, vitrail.training.session; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
