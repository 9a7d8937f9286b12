"""Throughput, honestly: warm-up left out, data wait shown, FLOPs of what the model computes."""

import statistics
from dataclasses import dataclass, field

import torch

from vitrail.layers.flops import Again, Flops, peak_tflops

WARM_UP_STEPS = 5  # after a start or resume: compilation, caches, autotuning, a recording (parallel/replay.py)


@dataclass
class Meter:
    batch: int  # samples of a step, over all ranks
    tokens: int  # tokens of a sample, hidden ones included
    flops: Flops  # forward, one sample
    world: int
    recompute: bool | Again
    device: torch.device
    steps_seen: int = 0
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def add(self, seconds: float, wait: float) -> None:
        self.steps_seen += 1
        if self.steps_seen > WARM_UP_STEPS:
            self.seconds.append(seconds)
            self.waits.append(wait)

    def read(self) -> dict[str, float | None]:
        """The window since the last reading; nothing but memory while warming up."""
        out: dict[str, float | None] = {"memory_gib": memory_gib(self.device)}
        if self.seconds:
            mean = sum(self.seconds) / len(self.seconds)
            rate = self.batch / mean
            tflops = rate * self.flops.training / self.world / 1e12
            hardware = rate * self.flops.hardware(recompute=self.recompute) / self.world / 1e12
            peak = peak_tflops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
            out |= {
                "step_seconds": statistics.median(self.seconds),
                "samples_per_s": rate,
                "tokens_per_s": rate * self.tokens,
                "tflops": tflops,
                "mfu": tflops / peak if peak else None,
                "hfu": hardware / peak if peak else None,
                "data_wait": sum(self.waits) / sum(self.seconds),
            }
        self.seconds, self.waits = [], []
        return out


def memory_gib(device: torch.device) -> float:
    """Largest memory so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
