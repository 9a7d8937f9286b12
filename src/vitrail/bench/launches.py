"""How long the host needs to launch a kernel of a training: blocks so small that a device waits for nothing else.

Kernels are counted as the planner counts them, in the same model on the meta device, so that what Python, autograd and
views cost beside them is in the number. Compiled blocks have fewer kernels, and less Python between them.
"""

from typing import Any

import torch

from vitrail.bench.probe import Probe
from vitrail.cost.trace import trace_model
from vitrail.models.vit import ViTConfig
from vitrail.parallel.solo import Solo

SMALL = ViTConfig(channels=1, shape=(8, 8), patch=4, width=64, depth=8, heads=1, classes=4)


def launch_seconds(probe: Probe, *, compiled: bool) -> float:
    """Of one kernel, forward and backward, as one rank alone runs them."""
    device, low = probe.device, torch.bfloat16 if probe.on_gpu else torch.float32
    with torch.device("meta"):
        example: dict[str, Any] = SMALL.build().inputs(torch.empty(1, 1, 8, 8))
    compute = "bf16" if probe.on_gpu else "fp32"
    work = trace_model(SMALL, example, _loss, samples=1, compute=compute, compiled=compiled)
    ops = [op for s in work.segments for _ in range(s.count) for op in (*s.forward, *s.backward)]
    kernels = sum(op.kernels for op in (*ops, *work.loss))
    model = SMALL.build().to(device)
    solo = Solo(model, model.blocks(), low)
    if compiled:
        for block in model.blocks():
            block.compile()
    inputs = model.inputs(torch.zeros(1, 1, 8, 8, device=device))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with solo.computing():
            _loss(model(**inputs)).backward()

    step()  # compiles
    return probe.seconds(step, on_device=False) / kernels


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().sum()
