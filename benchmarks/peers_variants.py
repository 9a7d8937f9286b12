"""What benchmarks/peers.py changes in our step, one thing at a time, and where the step's time goes, kernel by kernel.

A variant is a name, with changes of the recipe, settings of PyTorch's compiler and ways of vitrail/layers/fast.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from vitrail.layers.fast import NAMES as WAYS
from vitrail.layers.fast import use_fast


@dataclass(frozen=True)
class Variant:
    overrides: tuple[str, ...] = ()  # of the recipe
    compiling: dict[str, Any] = field(default_factory=dict)  # arguments of torch.compile
    inductor: dict[str, Any] = field(default_factory=dict)  # settings of the compiler, by their dotted names
    fast: tuple[str, ...] | None = None  # ways of layers/fast.py, and no others; None: those that are on
    cudnn_benchmark: bool = False
    whole: bool = False  # the model is compiled as one, not block by block
    rows: tuple[str, ...] = ()  # that it is for; none: all
    batch: int | None = None

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.compiling:
                stack.enter_context(compiled_with(self.compiling))
            if self.inductor:
                import torch._inductor.config as config

                stack.enter_context(config.patch(self.inductor))
            if self.whole:
                stack.enter_context(compiled_whole())
            if self.fast is not None:
                stack.enter_context(use_fast(*self.fast))
            before = torch.backends.cudnn.benchmark
            stack.callback(setattr, torch.backends.cudnn, "benchmark", before)
            torch.backends.cudnn.benchmark = self.cudnn_benchmark or before
            yield


BLOCKS = ("gelu", "bias", "norm")
TRANSFORMERS, CONVOLUTIONS = ("vit_l", "vit_b", "mae_l", "dit"), ("unetr",)
TUNED = {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True}
VARIANTS: dict[str, Variant] = {
    "as it is": Variant(),
    # Of all models: how it is compiled and launched.
    "not replayed": Variant(("parallel.replay=false",)),
    "replayed": Variant(("parallel.replay=true",)),
    "coordinate descent": Variant(inductor=TUNED),
    "fast exponentials": Variant(inductor={"use_fast_math": True}),
    "kernels put together": Variant(inductor={"combo_kernels": True, "benchmark_combo_kernel": True}),
    "max autotune": Variant(compiling={"mode": "max-autotune-no-cudagraphs"}),
    "whole model": Variant(("parallel.compile=false",), whole=True),
    "no fast way": Variant(fast=()),
    # Of transformers.
    "gelu": Variant(fast=("gelu",), rows=TRANSFORMERS),
    "gelu, bias": Variant(fast=("gelu", "bias"), rows=TRANSFORMERS),
    "norm": Variant(fast=("norm",), rows=TRANSFORMERS),
    "gelu, bias, norm": Variant(fast=BLOCKS, rows=TRANSFORMERS),
    "gelu, bias, norm, whole model": Variant(("parallel.compile=false",), fast=BLOCKS, whole=True, rows=TRANSFORMERS),
    "float8": Variant(("precision.compute=float8",), rows=TRANSFORMERS),
    "float8, gelu, bias, norm": Variant(("precision.compute=float8",), fast=BLOCKS, rows=TRANSFORMERS),
    # Of convolutions.
    "cudnn.benchmark": Variant(cudnn_benchmark=True, rows=CONVOLUTIONS),
    "maps": Variant(fast=("maps",), rows=CONVOLUTIONS),
    "maps, cudnn.benchmark": Variant(fast=("maps",), cudnn_benchmark=True, rows=CONVOLUTIONS),
    "maps, conv": Variant(fast=("maps", "conv"), rows=CONVOLUTIONS),
    "maps, conv, cudnn.benchmark": Variant(fast=("maps", "conv"), cudnn_benchmark=True, rows=CONVOLUTIONS),
    "maps, conv, gelu, bias, norm, cudnn.benchmark": Variant(
        fast=("maps", "conv", *BLOCKS), cudnn_benchmark=True, rows=CONVOLUTIONS
    ),
}
assert set().union(*(variant.fast or () for variant in VARIANTS.values())) <= set(WAYS)


@contextmanager
def compiled_with(options: dict[str, Any]) -> Iterator[None]:
    """Have modules that are compiled inside be compiled with more arguments."""
    plain = nn.Module.compile

    def compile_more(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **(kwargs | options))

    nn.Module.compile = compile_more  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.compile = plain  # type: ignore[method-assign]


@contextmanager
def compiled_whole() -> Iterator[None]:
    """Have models that are laid out inside be compiled as one; the recipe must not ask for blocks as well."""
    from vitrail.parallel.flow import Flow

    plain = Flow.__init__

    def made(self: Flow, model: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, model, *args, **kwargs)
        model.compile(dynamic=False)

    Flow.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Flow.__init__ = plain  # type: ignore[method-assign]


# ---------------------------------------------------------------- where the time goes

# The first that is found in a kernel's name says its kind; names of compiled kernels list the operations in them.
KINDS: tuple[tuple[str, str], ...] = (
    ("optimizer", r"adam|lerp|FusedOptimizer|foreach_(norm|mul|lerp)|LpNorm"),
    ("copies and casts", r"multi_tensor_apply|Mem(cpy|set)|CatArray|direct_copy|_to_copy_?\d*$|aten::(copy_|cat)"),
    ("attention", r"fmha|flash|sdpa|attention|mha_"),
    ("layout conversions", r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|transpose_readWrite|tensorTransformGeneric"),
    ("convolutions", r"conv|^_weigh|implicit_gemm|fprop|dgrad|wgrad|winograd"),
    ("products", r"gemm|nvjet|cutlass|cublas|matmul|split_?k|aten::(mm|bmm|addmm|linear)"),
    ("GELU", r"gelu|_erf|tanh"),
    ("norms", r"norm|^_gate_back|batch_norm|welford|var_mean|standard"),
    ("bias gradients", r"triton_(red|per)_fused_((_unsafe_)?view_|t_|transpose_)*sum(_view)*_?\d*$|reduce_k|::sum"),
    ("queries, keys, values", r"^_pack_back"),
    ("loss", r"softmax|nll|cross_entropy|dice"),
)  # fmt: skip


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "others")


def profile_of(tree: dict[str, Any], overrides: Sequence[str], *, steps: int = 3, warm: int = 8) -> dict[str, Any]:
    """Return the seconds of each kernel in a step of ours (on a CPU, of each operation), heaviest first."""
    from torch.profiler import ProfilerActivity, profile

    from vitrail.bench.measure import _Work
    from vitrail.recipe.load import find_recipe
    from vitrail.training.diagnose import ENDLESS, opened_as_is

    on_gpu = torch.cuda.is_available()
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    with opened_as_is(find_recipe(tree, [*overrides, *ENDLESS])) as (parts, watchdog):
        beat: Callable[[int], None] = partial(watchdog.beat, phase="measuring")
        work = _Work(parts, "syn")
        try:
            for number in range(warm if on_gpu else 1):
                beat(number)
                work.act(next(work.batches))
            activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
            with profile(activities=[activity]) as profiler:
                for number in range(steps):
                    beat(number)
                    work.act(next(work.batches))
                if on_gpu:
                    torch.cuda.synchronize()
        finally:
            work.close()
    for event in profiler.events():
        if on_gpu != (event.device_type == torch.autograd.DeviceType.CUDA):
            continue
        spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        seconds[event.name] += 1e-6 * spent / steps
        calls[event.name] += 1
    rows = [
        {"kernel": name, "kind": kind_of(name), "seconds": spent, "calls": calls[name] / steps}
        for name, spent in seconds.most_common()
        if spent > 0
    ]
    return {"steps": steps, "busy": sum(seconds.values()), "kernels": rows[:200]}


def kernel_table(found: dict[str, Any], *, most: int = 15) -> list[str]:
    """Return the lines of two tables: kinds of kernels, and the heaviest kernels."""
    busy, kinds = found["busy"], Counter[str]()
    for row in found["kernels"]:
        kinds[row["kind"]] += row["seconds"]
    lines = [f"{1e3 * busy:.2f} ms of kernels in a step.", "", "| kind | ms | share |", "|---|---|---|"]
    lines += [f"| {kind} | {1e3 * spent:.3f} | {spent / busy:.1%} |" for kind, spent in kinds.most_common()]
    lines += ["", "| kernel | kind | calls | ms | share |", "|---|---|---|---|---|"]
    for row in found["kernels"][:most]:
        name = row["kernel"].replace("|", "/")[:90]
        share = row["seconds"] / busy
        lines.append(f"| `{name}` | {row['kind']} | {row['calls']:g} | {1e3 * row['seconds']:.3f} | {share:.1%} |")
    return lines
