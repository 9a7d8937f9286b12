"""Recomputation with tensor parallelism and sharding on two ranks: gradients, and what runs again."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from support import recomputed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.cli.words import end
from vitrail.layers.block import Block, BlockConfig
from vitrail.parallel import tensor
from vitrail.parallel.mesh import Layout, Mesh
from vitrail.recipe.sections import Recompute

CONFIG = BlockConfig(
    width=32, heads=4, kv_heads=4, hidden=80, mlp="gelu", norm="layer", eps=1e-6, bias=True, qk_norm=False,
    layer_scale=0.5,
)  # fmt: skip


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = str(operation)
        for part in ("reduce_scatter_tensor", "all_gather_into_tensor", "mm"):
            self.found[part] += f".{part}" in name or f".add{part}" in name
        return operation(*arguments, **(keywords or {}))


def make() -> Block:
    torch.manual_seed(0)
    block = Block(CONFIG)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def gradients(block: Block, x: Tensor) -> tuple[list[Tensor], Counter[str]]:
    loss = block(x).square().sum()
    with Count() as count:
        loss.backward()
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in block.parameters()], count.found  # type: ignore[misc, union-attr]


def tensor_parallel() -> None:
    mesh = Mesh.make(Layout(1, 1, True, tensor=2), "cpu")
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = {}
    for name, choice in {
        "none": "none",
        "full": "full",
        "attention": Recompute(keep=("attention",)),
        "rows": Recompute(keep=("proj", "fc2")),
        "all": Recompute(keep=("attention", "qkv", "proj", "fc1", "fc2")),
    }.items():
        block = make()
        tensor.apply([block], mesh["tensor"])
        recomputed([block], choice)  # type: ignore[arg-type]
        results[name] = gradients(block, x)
    expected, base = results["none"]
    for name, (found, count) in results.items():
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
        extra = {what: count[what] - base[what] for what in base}
        # Inputs of the first layers are gathered again in every case: their weights' gradients need them. LayerScale
        # reads both sums, which are made again unless they are kept.
        sums = 0 if name in ("none", "rows", "all") else 2
        gathers = 0 if name == "none" else 2
        assert extra["reduce_scatter_tensor"] == sums, (name, extra)
        assert extra["all_gather_into_tensor"] == gathers, (name, extra)


def sharded() -> None:
    mesh = Mesh.make(Layout(1, 2, True), "cpu")
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for choice in ("none", "full", Recompute(keep=("attention", "fc1"))):
        block = make()
        recomputed([block], choice)  # type: ignore[arg-type]
        fully_shard(block, mesh=mesh.blocks)
        results.append(gradients(block, x)[0])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def compiled() -> None:
    mesh = Mesh.make(Layout(1, 1, True, tensor=2), "cpu")
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for choice in ("none", Recompute(keep=("attention", "proj"))):
        block = make()
        tensor.apply([block], mesh["tensor"])
        recomputed([block], choice)  # type: ignore[arg-type]
        if choice != "none":
            block.compile(backend="aot_eager_decomp_partition")
        results.append(gradients(block, x)[0] if choice == "none" else _plain(block, x))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _plain(block: Block, x: Tensor) -> list[Tensor]:
    block(x).square().sum().backward()
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in block.parameters()]  # type: ignore[misc, union-attr]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    tensor_parallel()
    sharded()
    compiled()
    dist.destroy_process_group()
    print("fine")
    end(0)
