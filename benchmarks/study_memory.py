"""What the software of the Frontier sharding study keeps on a GPU: its program, measured on one GPU of another make.

    python benchmarks/study_memory.py [--holds]

- The study trained with PyTorch's first FSDP, and with DDP. Both run here with a process group that only pretends (its
  collectives move nothing), so that one GPU shows what a rank of 8 or of 1,024 allocates
- the model is the study's, in plain PyTorch, with the unfused attention that PyTorch had on AMD then; every block is
  recomputed, the loss is read after each step
- the host launches ahead of the GPU, and what FSDP frees while a stream may still read it stays active until that
  stream is done. The study's GPUs were slow; here blocks and collectives begin with a sleep, so that the host gets as
  far ahead. `--holds` measures some cells with sleeps of other lengths
- Base is measured with patches of 16, as the study's tables say, and of 14 ("base14"): see planner_studies.md

Each cell has a process of its own, and no more memory than a GCD. What is measured goes to results/study_memory.json,
that of other holds to study_memory_holds.json.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitrail.cost.cluster import load_cluster

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
PER_NODE, BATCH, CLASSES, SIDE, STEPS = 8, 32, 1000, 224, 4
CYCLES = 1.9e6  # of the GPU in a millisecond, about
BLOCK_MS = 10
TALK_MS = {1: 3, 128: 20}  # of a collective, by nodes
RATIO = 2.6875  # hidden numbers of an MLP for each of the width
SIZES = {  # width, depth, heads, side of a patch
    "base": (768, 12, 12, 16),
    "base14": (768, 12, 12, 14),
    "huge": (1280, 32, 16, 14),
    "1b": (1536, 32, 16, 14),
    "3b": (2816, 32, 32, 14),
}
CELLS = [
    (mode, model, nodes)
    for model in ("base14", "1b", "huge", "base", "3b")
    for mode, nodes in (("DDP", 1), ("NO_SHARD", 1), ("HYBRID_2", 1), ("FULL_SHARD", 1), ("FULL_SHARD", 128))
]
HOLDS = [  # cells, and how many times as long they are held
    ((mode, model, 1), hold)
    for hold in (0.0, 0.5, 2.0)
    for model in ("base14", "1b")
    for mode in ("NO_SHARD", "HYBRID_2", "FULL_SHARD")
]


SHOWN = ("mode", "model", "nodes", "hold", "allocated", "active", "reserved", "retries", "out_of_memory")


class Block(nn.Module):
    """Attention and a gated MLP, each normalized before it is added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = int(width * RATIO)
        self.heads, self.held_ms = heads, 0.0
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads, 1e-6) for _ in range(2))
        self.up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, 1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.held_ms)
        x = x + self.norm1(self._attention(x))
        gate, value = self.up(x).chunk(2, dim=-1)
        return x + self.norm2(self.down(F.silu(gate) * value))

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class StudyViT(nn.Module):
    """Classifies images by a token of its own; patches are normalized before and after they are embedded."""

    def __init__(self, width: int, depth: int, heads: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        numbers = 3 * patch**2
        self.embed = nn.Sequential(
            nn.LayerNorm(numbers, 1e-6), nn.Linear(numbers, width, bias=False), nn.LayerNorm(width, 1e-6)
        )
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // patch) ** 2, width))
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.norm_pre, self.norm = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        batch, side = images.shape[0], SIDE // self.patch
        patches = images.reshape(batch, 3, side, self.patch, side, self.patch).permute(0, 2, 4, 3, 5, 1)
        x = self.embed(patches.reshape(batch, side**2, -1)) + self.positions
        x = self.norm_pre(torch.cat((self.cls.expand(batch, -1, -1), x), dim=1))
        return self.head(self.norm(self.blocks(x))[:, 0])


def sleep(milliseconds: float) -> None:
    """The current stream of the GPU does."""
    if milliseconds:
        torch.cuda._sleep(int(milliseconds * CYCLES))


def slowed(call: Callable[..., Any], milliseconds: float) -> Callable[..., Any]:
    def slow(*arguments: Any, **keywords: Any) -> Any:
        sleep(milliseconds)
        return call(*arguments, **keywords)

    return slow


def wrapped(model: nn.Module, mode: str, ranks: int) -> nn.Module:
    """As the study did it."""
    if mode == "DDP":
        replica = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0], bucket_cap_mb=25)
        replica.register_comm_hook(None, _nothing_to_add)
        return replica
    group: Any = None
    strategy = ShardingStrategy.HYBRID_SHARD
    if mode.startswith("HYBRID"):
        shards = int(mode.removeprefix("HYBRID_"))
        mesh = dist.init_device_mesh("cuda", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
        group = (mesh.get_group("shard"), mesh.get_group("replicate"))
    else:
        strategy = ShardingStrategy[mode]
    return FullyShardedDataParallel(
        model,
        process_group=group,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=0,
        use_orig_params=True,
        limit_all_gathers=True,
    )


def _nothing_to_add(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure(mode: str, name: str, nodes: int, hold: float) -> dict[str, Any]:
    """GiB of one rank at most over some steps."""
    limit = load_cluster("frontier").device.memory_gib * GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    for call in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, call, slowed(getattr(dist, call), hold * TALK_MS[nodes]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PER_NODE * nodes)
    nn.Linear.reset_parameters = lambda self: None  # what the numbers are does not matter
    model = StudyViT(*SIZES[name])
    for block in model.blocks:
        block.held_ms = hold * BLOCK_MS
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = wrapped(model, mode, PER_NODE * nodes)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, Block),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=2e-3, fused=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    failed = False
    try:
        for _ in range(STEPS):
            images, labels = torch.randn(BATCH, 3, SIDE, SIDE).cuda(), torch.randint(CLASSES, (BATCH,)).cuda()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()
    except torch.cuda.OutOfMemoryError:
        failed = True
    stats = torch.cuda.memory_stats()
    return {
        "mode": mode,
        "model": name,
        "nodes": nodes,
        "hold": hold,
        "parameters": parameters,
        "allocated": round(stats["allocated_bytes.all.peak"] / GIB, 4),
        "active": round(stats["active_bytes.all.peak"] / GIB, 4),
        "reserved": round(stats["reserved_bytes.all.peak"] / GIB, 4),
        "retries": stats["num_alloc_retries"],
        "out_of_memory": failed,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _tell(end: Connection, cell: tuple[str, str, int], hold: float) -> None:
    end.send(measure(*cell, hold))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--holds", action="store_true", help="some cells, with sleeps of other lengths")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    os.environ["CUDA_SCALE_LAUNCH_QUEUES"] = "4x"  # so that the host does not wait for the GPU to take its launches
    rows = []
    forks = multiprocessing.get_context("fork")  # what is imported need not be again
    for cell, hold in HOLDS if arguments.holds else [(cell, 1.0) for cell in CELLS]:
        end, other = forks.Pipe(duplex=False)
        process = forks.Process(target=_tell, args=(other, cell, hold))
        process.start()
        other.close()
        try:
            rows.append(end.recv())
        except EOFError:
            raise SystemExit(f"{cell}: ended before it told anything") from None
        process.join()
        print({key: rows[-1][key] for key in SHOWN})
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "study_memory_holds.json" if arguments.holds else "study_memory.json"
    (arguments.out / name).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
