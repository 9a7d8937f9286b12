"""Pipeline parallelism: the ranks of one axis share the depth of a model.

- the steps of a model (Model.stages()) are cut into parts that follow one another; part i belongs to rank i modulo the
  ranks, so that with "interleaved" a rank has several. The cut makes the dearest part as cheap as it can be
- a rank keeps the whole model object, but of its weights only those that its parts use; the names of parameters stay
- every rank prepares the same inputs itself. Only what flows travels: `x`, and `taps` where later steps read them
- PyTorch's schedules (GPipe, 1F1B, interleaved) run micro-batches of equal shapes; others that follow are run after
  them. Shapes between parts are learned from one forward without gradients
- gradients are those of the summed losses
- to FSDP2 the model is the root whichever part runs: PyTorch's schedules see a shell without parameters, since they
  would keep all parameters gathered, and gradients whole, from the first micro-batch to the last
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.models.model import Model, Stage
from vitrail.parallel import shard
from vitrail.parallel.mesh import Mesh, layout_of
from vitrail.recipe.sections import Parallel

Inputs = dict[str, Any]
Carried = tuple[Tensor, ...]  # x, and the taps


class LossLike(Protocol):
    """A sum, and the number of values that it is over."""

    @property
    def sum(self) -> Tensor: ...

    @property
    def count(self) -> Tensor: ...


# ------------------------------------------------------------ where to cut


def stages_per_rank(c: Parallel) -> int:
    return c.stages or (2 if c.schedule == "interleaved" else 1)


def num_parts(c: Parallel, pipeline: int) -> int:
    """Count the parts of a pipeline over a number of ranks."""
    return pipeline * stages_per_rank(c) if pipeline > 1 else 1


def cut(costs: Sequence[float], parts: int) -> list[int]:
    """Choose how many steps each part gets: the dearest part is as cheap as can be, and then all as even as can be."""
    number, sums = len(costs), [0.0, *accumulate(costs)]
    if not 1 <= parts <= number:
        raise ValueError(f"{number} steps cannot be cut into {parts} parts; use 1 to {number}")

    def best(join: Callable[[float, float], float], measure: Callable[[float], float], limit: float) -> list[list[int]]:
        """Find, for each number of steps, where the last part begins, part by part."""
        least, begins = [0.0] + [float("inf")] * number, []
        for part in range(1, parts + 1):
            found = [
                min(
                    (join(least[start], measure(sums[end] - sums[start])), start)
                    if sums[end] - sums[start] <= limit
                    else (float("inf"), start)
                    for start in range(part - 1, end)
                )
                if end >= part
                else (float("inf"), 0)
                for end in range(number + 1)
            ]
            least = [cost for cost, _ in found]
            begins.append([start for _, start in found])
        return begins

    def counts(begins: list[list[int]]) -> list[int]:
        result, end = [], number
        for part in reversed(range(parts)):
            result.append(end - begins[part][end])
            end = begins[part][end]
        return result[::-1]

    dearest = _dearest(sums, counts(best(max, lambda cost: cost, float("inf"))))
    return counts(best(lambda a, b: a + b, lambda cost: cost * cost, dearest))


def _dearest(sums: Sequence[float], counts: Sequence[int]) -> float:
    ends = [0, *accumulate(counts)]
    return max(sums[end] - sums[start] for start, end in pairwise(ends))


def measure_costs(
    model: Model,
    prepare: Callable[[], Inputs],
    device: torch.device,
    *,
    compute: torch.dtype = torch.float32,
    repeats: int = 3,
) -> list[float]:
    """Measure the seconds of forward and backward of each step on this device, for the inputs of one micro-batch.

    Of a model on the meta device only the step at hand has weights, random ones. Equal steps are measured once.
    """
    stages = model.stages()
    shared = [p for _, p in shared_parameters(model, stages)]
    costs: list[float] = []
    known: dict[Any, tuple[float, Tensor]] = {}
    filling = "what its inputs are made of"
    try:
        inputs = prepare()
        x, side = inputs["x"], {name: value for name, value in inputs.items() if name != "x"}
        with _with_weights(model, shared, device, compute):
            with torch.no_grad():
                side = model.derive(side)
            for place, stage in enumerate(stages):
                filling, key = stage.name, (_make(stage), Spec.of(x), stage.needs)
                if key in known and "taps" not in stage.needs:
                    cost, x = known[key]
                else:
                    cost, x, side = _measure(model, stage, x, side, device, compute, repeats, first=place == 0)
                    known[key] = cost, x
                costs.append(cost)
    except torch.OutOfMemoryError:
        raise UserError(
            f"parallel.split: 'measured' needs one step of the model at a time on one device, and {filling} does not "
            "fit there; give the number of steps of each stage instead, or a smaller data.micro_batch"
        ) from None
    return costs


def _measure(
    model: Model,
    stage: Stage,
    x: Tensor,
    side: Inputs,
    device: torch.device,
    compute: torch.dtype,
    repeats: int,
    *,
    first: bool,
) -> tuple[float, Tensor, Inputs]:
    """Return median seconds, output, and side inputs after it."""
    taps, times = side.get("taps", ()), []
    with _with_weights(model, list(_weights(stage)), device, compute), torch.enable_grad():
        for _ in range(1 + repeats):
            inner = x.detach().requires_grad_(not first)
            carried = {"taps": [tap.detach().requires_grad_() for tap in taps]} if "taps" in side else {}
            now = side | carried
            began = _clock(device)
            output = stage.run(inner, now)
            if output.requires_grad:
                output.backward(torch.ones_like(output))
            times.append(_clock(device) - began)
    if "taps" in now:
        now["taps"] = [tap.detach() for tap in now["taps"]]
    return statistics.median(times[1:]), output.detach(), now


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _weights(stage: Stage) -> Iterator[nn.Parameter]:
    for used in stage.uses:
        if isinstance(used, nn.Parameter):
            yield used
        elif used is not None:
            yield from used.parameters()


def _make(stage: Stage) -> tuple[Any, ...]:
    """Return what is equal for steps that differ in the values of their weights alone."""
    return tuple(
        tuple(used.shape) if isinstance(used, Tensor) else shard.make_of(used)
        for used in stage.uses
        if used is not None
    )


def shared_parameters(model: Model, stages: Sequence[Stage]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that no step uses by itself: derive() reads them, for all steps."""
    used = {id(p) for stage in stages for p in _weights(stage)}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in used]


@contextmanager
def _with_weights(
    model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Random values on the device in place of these parameters."""
    wanted, generator = {id(p) for p in parameters}, torch.Generator(device).manual_seed(0)
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if id(p) in wanted
    ]
    for module, name, p in places:
        values = torch.randn(p.shape, device=device, dtype=dtype, generator=generator)
        setattr(module, name, nn.Parameter(values.mul_(0.02)))
    try:
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)


# ------------------------------------------------------------ what travels


class Spec(NamedTuple):
    """The facts of a tensor that a rank needs to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False  # how convolutions like it; it travels packed, and is put into this order again

    @classmethod
    def of(cls, x: Tensor) -> "Spec":
        order = _FORMATS.get(x.ndim)
        last = order is not None and not x.is_contiguous() and x.is_contiguous(memory_format=order)
        return cls(tuple(x.shape), x.dtype, last)

    def empty(self, device: torch.device | str) -> Tensor:
        """Make a leaf to receive into; gradients flow back through all that travels."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=True)

    def unpack(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=_FORMATS[x.ndim]) if self.channels_last else x


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS, _MOST_TENSORS = 8, 16


def pack(x: Tensor) -> Tensor:
    """Return a tensor with the strides that an empty one would have, also where a size is 1."""
    return x.contiguous().view(-1).view(x.shape)


def to_header(specs: Sequence[Spec], device: torch.device) -> Tensor:
    """Make a tensor of fixed size that tells what comes next."""
    assert len(specs) <= _MOST_TENSORS
    rows = torch.zeros(_MOST_TENSORS, 3 + _MOST_DIMS, dtype=torch.int64)
    for row, spec in zip(rows, specs, strict=False):
        numbers = [1 + _DTYPES.index(spec.dtype), int(spec.channels_last), len(spec.shape), *spec.shape]
        row[: len(numbers)] = torch.tensor(numbers)
    return rows.to(device)


def from_header(header: Tensor) -> list[Spec]:
    rows = [row for row in header.tolist() if row[0]]
    return [Spec(tuple(shape[:ndim]), _DTYPES[dtype - 1], bool(last)) for dtype, last, ndim, *shape in rows]


class _Enter(torch.autograd.Function):
    """Tensors as they were received. One that the part does not use has a gradient of 0: the sender waits for it."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Carried:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Carried:
        return gradients


@contextmanager
def _quiet_schedules() -> Iterator[None]:
    """Silence schedules inside, which would print all of themselves with an error."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# ------------------------------------------------------------ the pipeline


class Elsewhere(nn.Module):
    """A stand-in for a module whose weights another rank of the pipeline has."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this module is on another rank of the pipeline")


@dataclass(frozen=True)
class PipelinePart:
    """Steps of a model that run on one rank without a break."""

    index: int
    steps: slice
    first: bool
    last: bool
    carries: bool  # later parts read taps


class Pipeline:
    """This rank's parts of a model (on the meta device, not parallelised yet) and how micro-batches go through all."""

    def __init__(self, model: Model, c: Parallel, mesh: Mesh, counts: Sequence[int], device: torch.device):
        """`counts` says how many steps each part has, in order: as many parts as num_parts()."""
        stages = model.stages()
        self.model, self.device, self.schedule = model, device, c.schedule
        self.group = mesh["pipeline"].get_group()
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.number = len(counts)
        if self.number != num_parts(c, self.ranks) or sum(counts) != len(stages) or min(counts) < 1:
            raise ValueError(f"{list(counts)} does not cut {len(stages)} steps into {num_parts(c, self.ranks)} parts")
        self.reshard = layout_of(c, mesh.root.size()).reshard
        self.known = {name for stage in stages for name in stage.needs}
        ends = [0, *accumulate(counts)]
        parts = [
            PipelinePart(
                index,
                slice(ends[index], ends[index + 1]),
                first=index == 0,
                last=index == self.number - 1,
                carries=any("taps" in stage.needs for stage in stages[ends[index + 1] :]),
            )
            for index in range(self.number)
        ]
        self.parts = parts[self.rank :: self.ranks]
        self.shared: tuple[str, ...] = tuple(name for name, _ in shared_parameters(model, stages))
        for rank in range(self.ranks):
            steps = [stage for part in parts[rank :: self.ranks] for stage in stages[part.steps]]
            if not self.shared and not any(True for stage in steps for _ in _weights(stage)):
                raise UserError(
                    f"parallel.split: {list(counts)} gives rank {rank} of the pipeline {steps[0].name}, which has "
                    "no weights; set parallel.split such that every rank has some, or a smaller parallel.pipeline"
                )
        self._leave_out(stages)
        self._shapes: dict[Any, list[tuple[list[Spec], list[Spec]]]] = {}  # in and out of each part here
        self._schedules: dict[Any, Any] = {}
        self._call: Callable[..., Any] | None = None
        self._micro: Sequence[tuple[Inputs, Any]] = ()
        self._loss: Callable[[Tensor, Any], LossLike] | None = None
        self._total = torch.zeros(2, dtype=torch.float64, device=device)
        self._more_follow = False

    def _leave_out(self, stages: Sequence[Stage]) -> None:
        """Keep the weights of the parts here, under their names, and those that all parts share."""
        model: Any = self.model
        kept = {id(p) for part in self.parts for stage in stages[part.steps] for p in _weights(stage)}
        kept |= {id(p) for _, p in shared_parameters(self.model, stages)}
        # Only what steps name is taken out. What holds it (an encoder, say) stays: derive() and the steps are its own.
        units = {id(used) for stage in stages for used in stage.uses if isinstance(used, nn.Module)}
        self._blocks: list[list[nn.Module]] = []  # of each part here
        for part in self.parts:
            used = {id(p) for stage in stages[part.steps] for p in _weights(stage)}
            self._blocks.append([b for b in model.blocks() if not used.isdisjoint(id(p) for p in b.parameters())])
        blocks = [block for several in self._blocks for block in several]
        rates, build = model.drop_path_rates(), model.config.build

        def flops(**options: Any) -> Flops:
            with torch.device("meta"):
                whole = build()
            return whole.flops(**options)

        def visit(module: nn.Module) -> None:
            for name, p in list(module.named_parameters(recurse=False)):
                if id(p) not in kept:
                    setattr(module, name, None)
            for name, child in list(module.named_children()):
                own = {id(p) for p in child.parameters()}
                if id(child) in units and own and kept.isdisjoint(own):
                    setattr(module, name, Elsewhere())
                else:
                    visit(child)

        visit(model)
        model.blocks, model.drop_path_rates, model.flops = (lambda: blocks), (lambda: rates), flops
        model.forward = self._forward

    def roots(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Return the model with the blocks of each part here: the root is one, but groups must not span parts."""
        return [(self.model, blocks) for blocks in self._blocks]

    # -------------------------------------------------------- training

    def forward_backward(
        self, micro: Sequence[tuple[Inputs, Any]], loss: Callable[[Tensor, Any], LossLike]
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of the summed losses of micro-batches, which are the same on all ranks of the pipeline.

        Returns the sum and the count of the losses, which are 0 on ranks that do not have the last part.
        """
        self._loss = loss
        self._total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for inputs, _ in micro:
            self._refuse_unknown(inputs)
        groups = [(key, list(group)) for key, group in groupby(micro, key=lambda one: signature(one[0]))]
        for place, (key, group) in enumerate(groups):
            self._micro, self._more_follow = group, place < len(groups) - 1
            if key not in self._shapes:
                self._enter(partial(self._pass, group[0][0], answer=False))
            if (key, len(group)) not in self._schedules:
                self._schedules[key, len(group)] = self._make_schedule(self._shapes[key], len(group))
            try:
                # The shells know the micro-batches; the target is there to be split into as many.
                with _quiet_schedules():
                    self._schedules[key, len(group)].step(target=torch.zeros(len(group)), return_outputs=False)
            except RuntimeError as error:
                raise (error.__cause__ or error) from None  # it wraps what went wrong in a dump of tensors
        self._micro, self._loss = (), None
        # A prefetch may have gathered what no part used any more: it would hide the coming update.
        shard.forget_gathered([self.model])
        for name in self.shared:  # to be added up over the ranks, some of which do not use it
            p = self.model.get_parameter(name)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return self._total[0], self._total[1]

    def _make_schedule(self, shapes: list[tuple[list[Spec], list[Spec]]], micro_batches: int) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

        from vitrail.parallel.station import Shell, Station

        stations = [
            Station(
                Shell(partial(self._train, part, incoming, outgoing)),
                part.index,
                self.number,
                self.device,
                self.group,
                incoming,
                [Spec((), torch.float32)] if part.last else outgoing,
                self._begin_backward,
            )
            for part, (incoming, outgoing) in zip(self.parts, shapes, strict=True)
        ]
        options: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        if len(stations) > 1:
            rounds = max(1, micro_batches // self.ranks)
            kind: Any = ScheduleLoopedBFS if micro_batches % rounds else ScheduleInterleaved1F1B
            return kind(stations, micro_batches, **options)
        simple = self.schedule == "GPipe" or micro_batches < self.number
        return (ScheduleGPipe if simple else Schedule1F1B)(stations[0], micro_batches, **options)

    def _train(
        self, part: PipelinePart, incoming: Sequence[Spec], outgoing: Sequence[Spec], number: int, *carried: Tensor
    ) -> Tensor | Carried:
        """Run one part of a micro-batch with its graph; the last part returns the loss."""
        inputs, targets = self._micro[number]

        def run(*carried: Tensor) -> Tensor | Carried:
            if carried:
                carried = _Enter.apply(*carried)
            result = self._run(part, inputs, tuple(s.unpack(x) for s, x in zip(incoming, carried, strict=True)))
            found = [Spec.of(x) for x in result]
            if [spec[:2] for spec in found] != [spec[:2] for spec in outgoing]:
                name = self.model.stages()[part.steps][-1].name
                raise UserError(
                    f"parallel.pipeline: {name} gives {_show(found)}, but gave {_show(outgoing)} for inputs of the "
                    "same shapes; use parallel.pipeline=1 for a model whose shapes depend on its data"
                )
            if not part.last:
                return tuple(pack(x) for x in result)
            assert self._loss is not None
            loss = self._loss(result[0], targets)
            self._total += torch.stack([loss.sum.detach().double(), loss.count.double()])
            return loss.sum.float()

        return self._enter(run, *carried)

    def _begin_backward(self, last: bool) -> None:
        """Let replicas exchange gradients with the last micro-batch alone."""
        if not isinstance(self.model, FSDPModule):
            return
        shard.last_micro_batch([self.model], last and not self._more_follow, reshard=self.reshard)
        if len(self.parts) > 1:
            # What is in no block is one group, of which each part has gradients of its own: partial sums of different
            # parameters cannot wait for one another.
            self.model.set_requires_all_reduce(True, recurse=False)

    # -------------------------------------------------------- forward

    def __call__(self, **inputs: Any) -> Tensor:
        """Return the output on every rank of the pipeline, without gradients; inputs are the same on all of them."""
        return self.model(**inputs)

    def _forward(self, *tensors: Tensor, **inputs: Any) -> Any:
        """Stand for the model's forward, so that FSDP2 gathers and frees what the parts here use."""
        call, self._call = self._call, None
        if call is not None:
            return call(*tensors)
        inputs = inputs | ({"x": tensors[0]} if tensors else {})
        self._refuse_unknown(inputs)
        return self._pass(inputs, answer=True)

    def _enter(self, call: Callable[..., Any], *tensors: Tensor) -> Any:
        """Run `call(*tensors)` as the model's forward."""
        self._call = call
        return self.model(*tensors)

    def _refuse_unknown(self, inputs: Inputs) -> None:
        self.model._refuse_unknown({name: value for name, value in inputs.items() if name != "x"}, self.known)

    def _run(self, part: PipelinePart, inputs: Inputs, carried: Carried) -> Carried:
        """Run the steps of one part."""
        side = {name: value for name, value in inputs.items() if name != "x"}
        x, *taps = carried or (inputs["x"],)
        if taps:
            side["taps"] = taps
        side = self.model.derive(side)
        for stage in self.model.stages()[part.steps]:  # asked for anew, since modules may have changed in place
            x = stage.run(x, side)
            if self.model.watching is not None:
                self.model.watching[stage.name] = x.detach().float().square().mean().sqrt()
        return (x, *side.get("taps", ())) if part.carries else (x,)

    @torch.no_grad()
    def _pass(self, inputs: Inputs, *, answer: bool) -> Tensor | None:
        """Go through all parts, one after another: for the output on every rank, or else to learn the shapes.

        Shapes that training meets are learned for training alone: ranks with other samples must do so with this one.
        """
        shapes, output = [], None
        for part in self.parts:
            incoming, carried = ([], ()) if part.first else self._receive(part.index - 1)
            result = self._run(part, inputs, carried)
            outgoing = [Spec.of(x) for x in result]
            shapes.append((incoming, outgoing))
            if part.last:
                output = result[0]
            else:
                self._send(result, outgoing, part.index + 1)
        if answer:
            return self._tell_all(output)
        self._shapes[signature(inputs)] = shapes
        return None

    def _owner(self, part: int) -> int:
        return dist.get_global_rank(self.group, part % self.ranks)

    def _send(self, tensors: Carried, specs: Sequence[Spec], to: int) -> None:
        for x in (to_header(specs, self.device), *map(pack, tensors)):
            dist.send(x, self._owner(to), group=self.group)

    def _receive(self, sender: int) -> tuple[list[Spec], Carried]:
        header = to_header([], self.device)
        dist.recv(header, self._owner(sender), group=self.group)
        specs = from_header(header)
        tensors = [spec.empty(self.device).detach() for spec in specs]
        for x in tensors:
            dist.recv(x, self._owner(sender), group=self.group)
        return specs, tuple(spec.unpack(x) for spec, x in zip(specs, tensors, strict=True))

    def _tell_all(self, output: Tensor | None) -> Tensor:
        header = to_header([] if output is None else [Spec.of(output)], self.device)
        source = self._owner(self.number - 1)
        dist.broadcast(header, source, group=self.group)
        (spec,) = from_header(header)
        told = spec.empty(self.device).detach() if output is None else pack(output)
        dist.broadcast(told, source, group=self.group)
        return spec.unpack(told)


def signature(inputs: Inputs) -> tuple[Any, ...]:
    """Return what is equal for inputs that give equal shapes everywhere."""

    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape), value.dtype
        plain = value is None or isinstance(value, bool | int | float | str | tuple)
        return repr(value) if plain else type(value).__name__

    return tuple((name, kind(value)) for name, value in sorted(inputs.items()))


def _show(specs: Sequence[Spec]) -> str:
    return " and ".join(f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in specs)
