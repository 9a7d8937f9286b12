"""A watch over a run on the meta device: which operations there are, and how many bytes live at each moment.

- autograd, checkpointing and Python's own counting of references run as in training, so that tensors die when they
  would there; bytes are of whole storages, in the allocator's units
- attention is one operation without an implementation. Every fused kernel keeps queries, keys, values, output and the
  log-sum-exp of each query. Heads are padded as run() pads them, and masked keys are packed as varlen wants them, so
  that the copies are there
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from vitrail.cost.cluster import Walk
from vitrail.cost.private import TorchDispatchMode, is_view, storage_key, tensors_in
from vitrail.layers.attention import TokenSequence
from vitrail.layers.backends import MULTIPLE
from vitrail.layers.convolutions import Planes
from vitrail.layers.kernels.attention import KeyMask, pack_keys, share_heads
from vitrail.layers.patches import Part
from vitrail.parallel.planes import rows_of

UNIT = 512  # bytes that the allocator rounds up to
EXCHANGES = ("vitrail_cost.gather", "vitrail_cost.scatter")  # between tensor ranks: costs of the network

Kind = Literal["gemm", "attention", "convolution", "memory"]
PUT_TOGETHER = ("aten.cat", "aten.stack", "aten.select_backward", "aten.slice_backward")
LOOKED_UP = ("aten.index.", "aten.index_select", "aten.gather.", "aten.embedding.")  # a part of what they are given
WRITTEN = ("aten.copy_.", "aten.zero_.", "aten.fill_.")  # over their first input, which they do not read


@dataclass(frozen=True)
class Op:
    """One operation, or a fused group of them."""

    kind: Kind  # memory: bound by bandwidth
    flops: float
    bytes: float  # read and written
    # gemm (m, n, k); attention (batch, heads, queries, keys, head width); convolution (channels in, out); maps (number)
    shape: tuple[int, ...] = ()
    kernels: int = 1  # launches
    walk: Walk = "dense"
    spread: int = 1  # of attention: over so many ranks its queries are
    layer: tuple[int, ...] = ()  # of a product of a block's linear layer: the layer's rows, its two widths


def size_of(t: Tensor) -> int:
    """Return the bytes of the numbers of a tensor: expanded ones are read from where they are once."""
    numel = math.prod(s for s, stride in zip(t.shape, t.stride(), strict=True) if stride or s == 0)
    return numel * t.element_size()


def storage_size(t: Tensor) -> int:
    return -(-t.untyped_storage().nbytes() // UNIT) * UNIT


def op_of(operation: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], arguments: Any, out: Any) -> Op | None:
    """Return what an operation costs; None where it computes nothing."""
    name = str(operation)
    if name.startswith(("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "prims.device_put")):
        return None
    if is_view(operation) or not outputs or name.startswith(EXCHANGES):
        return None
    if name.startswith("aten.new_") or "_like." in name:  # given for their kind alone
        inputs = ()
    elif name.startswith(WRITTEN):
        inputs = inputs[1:]
    read, written = {id(t): t for t in inputs}.values(), sum(map(size_of, outputs))
    most = written if name.startswith(LOOKED_UP) else math.inf
    moved = float(sum(min(most, size_of(t)) for t in read) + written)
    if name.startswith("vitrail_cost.attention"):
        return attention_cost(name, inputs, arguments, moved)
    count = flop_registry.get(getattr(operation, "overloadpacket", operation))
    if count is None:
        walk = walk_of(name, inputs, outputs)
        shape = (math.prod(inputs[0].shape[:2]),) if walk == "maps" else ()
        return Op("memory", 0.0, moved, shape, kernels=2 if "norm_backward" in name else 1, walk=walk)
    positional, keywords = arguments
    flops = float(count(*positional, **keywords, out_val=out))
    if "conv" in name:
        weight = inputs[2] if "backward" in name else inputs[1]
        return Op("convolution", flops, moved, shape=tuple(weight.shape[:2]))
    return Op("gemm", flops, moved, shape=product_shape(inputs, outputs[0], flops))


def walk_of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Walk:
    """Tell how an operation goes through memory, from its name and from how its tensors lie there."""
    if "batch_norm" in name:
        return "maps"
    if "norm_backward" in name:
        return "norm_backward"
    if "_norm" in name:
        return "norm"
    if name.startswith(PUT_TOGETHER + LOOKED_UP):
        return "strided"
    whole, largest = outputs[0].numel(), max(inputs, key=Tensor.numel, default=outputs[0])
    if whole < largest.numel():  # columns are summed up where there are as many as before, else rows, in passing
        return "sum" if outputs[0].shape[-1:] == largest.shape[-1:] else "dense"
    steps = {_steps(t) for t in (*inputs, *outputs) if t.numel() == whole}
    repeated = any(1 < t.numel() < whole for t in inputs)
    return "strided" if repeated or len(steps) > 1 or not _is_dense(outputs[0]) else "dense"


def _steps(t: Tensor) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides, but for sizes of 1, whose strides mean nothing."""
    return tuple((size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1)


def _is_dense(t: Tensor) -> bool:
    """Tell whether a tensor fills its memory, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _steps(t)):
        if stride != expected:
            return False
        expected *= size
    return True


def attention_cost(name: str, inputs: Sequence[Tensor], arguments: Any, moved: float) -> Op:
    backward = "backward" in name
    q, k = inputs[1:3] if backward else inputs[:2]
    ranks = int(arguments[0][-1])
    (batch, queries, heads, width), keys = q.shape, k.shape[1] * ranks
    flops = (10.0 if backward else 4.0) * batch * heads * queries * keys * width
    shape = (batch, heads, queries, keys, width)
    return Op("attention", flops, moved, shape, kernels=3 if backward else 1, spread=ranks)


def product_shape(inputs: Sequence[Tensor], out: Tensor, flops: float) -> tuple[int, ...]:
    """Return (m, n, k); products of a batch count as more rows."""
    columns = out.shape[-1]
    rows = out.numel() // max(1, columns)
    return rows, columns, round(flops / max(1, 2 * rows * columns))


@dataclass
class Phase:
    """The operations between two moments."""

    ops: list[Op] = field(default_factory=list)
    again: list[Op] = field(default_factory=list)  # forward operations that ran in a backward
    peak: int = 0


class Recorder(TorchDispatchMode):
    """A mode in which every operation is noted, and every storage that it makes is followed to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.phase = Phase()
        self.backward = False
        self.known: dict[int, int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled code is to run inside

    def begin(self, *, backward: bool) -> Phase:
        self.phase, self.backward = Phase(peak=self.live), backward
        return self.phase

    def add(self, op: Op, *, again: bool = False) -> None:
        (self.phase.again if again else self.phase.ops).append(op)

    def note(self, bytes_more: int) -> None:
        """Count bytes that something needs for a moment."""
        self.phase.peak = max(self.phase.peak, self.live + bytes_more)

    def follow(self, t: Tensor) -> None:
        storage, key = t.untyped_storage(), storage_key(t)
        if key in self.known:
            return
        size = storage_size(t)
        self.known[key] = size
        self.live += size
        weakref.finalize(storage, self._dead, key)
        self.phase.peak = max(self.phase.peak, self.live)

    def _dead(self, key: int) -> None:
        self.live -= self.known.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        inputs = tensors_in((args, kwargs))
        if all(t.device.type == "meta" for t in outputs):
            op = op_of(func, inputs, outputs, (args, kwargs), out)
            given = {storage_key(t) for t in inputs}
            for t in outputs:
                if storage_key(t) not in given:
                    self.follow(t)
            if op is not None:
                if op.kind == "attention" and "backward" in str(func):
                    self.note(workspace(inputs[1]))
                # A backward runs without recording gradients, what checkpoints compute again with; but for an operation
                # that has a backward of its own, inside which nothing is recorded.
                name = str(func)
                forward = torch.is_grad_enabled() or (name.startswith("vitrail_cost.") and "backward" not in name)
                self.add(op, again=self.backward and forward)
        return out


def workspace(q: Tensor) -> int:
    """Return the bytes in which kernels add up the gradient of queries, in fp32."""
    return 4 * q.numel()


class Incoming(torch.autograd.Function):
    """The end of what is traced: its backward makes the gradient that would come from what follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = (x.shape, x.dtype)
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Run:
    """One part of a model, run forward and backward."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    again: tuple[Op, ...]
    saved: int
    forward_peak: int
    peak: int  # of the backward
    shape: tuple[int, ...]  # of the output
    dtype: torch.dtype


def record(run: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype, *, leaf: bool = True) -> Run:
    """Run something on an input of this shape; `leaf`: the input wants a gradient."""
    watcher = Recorder()
    start = torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=leaf and dtype.is_floating_point)
    with watcher:
        x = start.clone()  # not a leaf, which the graph would hold anyway
        forward = watcher.begin(backward=False)
        y = run(x)
        del x
        own = storage_size(y)
        loss = Incoming.apply(y)
        saved = max(0, watcher.live - own - UNIT)
        made = tuple(y.shape), y.dtype
        backward = watcher.begin(backward=True)
        if loss.requires_grad:
            loss.backward(torch.empty_like(loss))
        del y
    before, after = (max(0, phase.peak - own - saved) for phase in (forward, backward))
    return Run(tuple(forward.ops), tuple(backward.ops), tuple(backward.again), saved, before, after, *made)


def stand_in(shapes: Callable[..., Any]) -> Any:
    """Make an operation that stands for a kernel in a trace: it gives the right shapes, and computes nothing."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{shapes.__name__} stands for a kernel in a trace, and computes nothing")

    schema = torch.library.infer_schema(shapes, mutates_args=())
    operation = torch.library.custom_op(f"vitrail_cost::{shapes.__name__}", refuse, mutates_args=(), schema=schema)
    operation.register_fake(shapes)
    return operation


@stand_in
def attention(q: Tensor, k: Tensor, v: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Stand for attention to `context` times the keys that are given: other ranks have the rest."""
    batch, queries, heads, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(batch, heads, queries, dtype=torch.float32)


@stand_in
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, context: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.context = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_backward(grad, *ctx.saved_tensors, ctx.context), None


attention.register_autograd(_backward, setup_context=_keep)


def attend_with(context: int, plain: bool = False) -> Any:
    """Return an attend() for modules that are traced; `plain`: the kernel has no groups of heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: KeyMask | None = None) -> Tensor:
        width = q.shape[-1]
        if width % MULTIPLE:
            q, k, v = (F.pad(t, (0, -width % MULTIPLE)) for t in (q, k, v))
        zero = q.new_zeros(())  # where() with a plain number has no backward on the meta device
        if mask is not None or plain:
            k, v = share_heads(q, k, v)
        if mask is not None:
            packing = pack_keys(mask.valid) if mask.packing is None else mask.packing
            kept = packing.kept[:, None, None]
            k, v = (torch.where(kept, t.flatten(0, 1)[packing.order], zero).unflatten(0, t.shape[:2]) for t in (k, v))
        out = attention(q, k, v, context)[0]
        out = out[..., :width] if width % MULTIPLE else out
        return out if mask is None else torch.where(mask.filled[:, None, None, None], out, zero)

    return attend


class TracedPlanes(Planes):
    """The planes of one part of maps whose others are elsewhere; shapes are all that matters."""

    def __init__(self, parts: int):
        self.parts = parts

    def beside(self, x: Tensor, number: int) -> Tensor:
        return torch.cat([x[:, :, :number], x, x[:, :, -number:]], dim=2)

    def rows(self, number: int) -> range:
        return rows_of(number, Part(0, self.parts))


class TracedSequence(TokenSequence):
    """The tokens of one part, for a model whose other parts are elsewhere; shapes are all that matters."""

    def __init__(self, *, context: int, tensor: int):
        self.parts, self.tensor = context * tensor, tensor

    def table(self, rope: Tensor | None) -> Tensor | None:
        return rope if rope is None or self.tensor == 1 else torch.cat([rope] * self.tensor, dim=-3)

    def keys(self, valid: Tensor | None, *, prefix: int, tokens: int) -> Any:
        if valid is None:
            return None
        valid = F.pad(valid, (prefix, 0), value=True).repeat(1, self.tensor)
        return KeyMask(valid, valid.any(dim=1), packing=pack_keys(valid))

    def whole(self, x: Tensor, *, groups: int = 1, tokens: int | None = None) -> Tensor:
        if self.parts == 1:
            return x
        each = x.unflatten(1, (groups, -1))
        each = torch.cat([each] * self.parts, dim=2)
        return (each if tokens is None else each[:, :, :tokens]).flatten(1, 2)
