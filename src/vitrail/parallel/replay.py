"""The kernels of a forward and backward, recorded once as a CUDA graph and then launched by one call.

A small model keeps a fast GPU waiting for Python. What a pass launches depends on the shapes of its inputs alone (draws
are inputs, shapes are fixed, models ask nothing of the device), so it need not be found out anew each time.

- passes are recorded once they have run some times as usual, which compiles and picks kernels; for each set of shapes
- a graph keeps the memory of a pass, so that what runs beside it (validation, pictures) has to find other: `auto`
  records only where that is left
- what cannot be recorded runs as usual from then on, with a warning that says why
- results are those of the usual way: the same kernels on the same numbers
"""

import dataclasses
import enum
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.parallel.private import add_all

WARM = 3  # passes of a training that run as usual
WARM_FORWARD = 10  # of those without gradients: samples are made by many, but a validation has few
MOST = 2  # sets of shapes that are recorded: each has memory of its own
MANY = 32  # sets of shapes, after which no more are expected to come back
HALF = 0.5  # of the GPU's memory: while training takes less, a usual pass has room beside a recorded one
ROOM = 0.75  # of the GPU's memory that training may take: the rest is for what runs beside recorded passes

Run = Callable[[Any, Any], Tensor]


def suits(choice: Any, device: torch.device) -> bool:
    """Say whether passes of a model that one rank has to itself are to be recorded."""
    return device.type == "cuda" and (choice is True or (choice == "auto" and torch.version.hip is None))


def is_ours(*parts: Any) -> bool:
    """Say whether parts of a recipe are this package's; a graph would not repeat what others do in Python."""
    return all(type(part).__module__.partition(".")[0] == "vitrail" for part in parts)


class Unrecordable(Exception):
    """Inputs whose values cannot be put in place of others."""


@dataclasses.dataclass
class Record:
    """A set of shapes: how often it was seen, and what was recorded of it."""

    seen: int = 0
    usual: bool = False  # it is never to be recorded
    graph: Any = None
    leaves: list[Tensor] = dataclasses.field(default_factory=list)  # read by the graph
    result: Tensor | None = None  # written by it, as are the gradients
    parameters: list[nn.Parameter] = dataclasses.field(default_factory=list)
    gradients: list[Tensor] = dataclasses.field(default_factory=list)


class Replay:
    """Runs passes, each of which returns a tensor and may add to the gradients of the model's parameters.

    Where they add to gradients that there are (of an earlier micro-batch), these are copied first: the graph writes to
    the same place each time.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        always: bool = False,
        warm: int = WARM,
        anew: bool = False,  # whether to go on where one shape has made way for another, as at the end of a validation
    ):
        self.model, self.device, self.always, self.warm, self.anew = model, device, always, warm, anew
        self.records: dict[Hashable, Record] = {}
        self.off = False

    def __call__(self, run: Run, inputs: Any, targets: Any) -> Tensor:
        if self.off:
            return run(inputs, targets)
        leaves: list[Tensor] = []
        try:
            record = self.records.setdefault(take_apart((inputs, targets), leaves, self.device.type), Record())
            if len(self.records) > MANY:
                raise Unrecordable(f"its inputs had {len(self.records)} different shapes")
        except Unrecordable as error:
            self._give_up(str(error))
            return run(inputs, targets)
        if record.graph is None and not self._ready(record):
            if not self.always and self._has_graphs() and self.held() > HALF:
                self._give_up_turns()
            return run(inputs, targets)
        if record.graph is None:
            kept = [(p, p.grad) for p in self.model.parameters()]
            try:
                self._record(record, run, (inputs, targets), leaves)
            except Exception as error:  # whatever a model does that cannot be recorded
                record.graph = None
                record.usual = True
                self._warn(str(error.__context__ or error))  # the context, since what ends a recording raises, too
            for parameter, gradient in kept:
                parameter.grad = gradient
            if record.graph is None:
                return run(inputs, targets)
        return self._replayed(record, leaves)

    def forget(self) -> None:
        """Drop the graphs: what they read is there no more, or the memory that they keep is needed."""
        has_graphs = self._has_graphs()
        if has_graphs:
            self._wait()  # one may be running
        self.records.clear()
        if has_graphs:
            self._give_back()

    def make_way(self) -> None:
        """Drop graphs before a usual pass that needs the memory which they keep."""
        if self._has_graphs() and self.held() > HALF:
            self.forget()

    def _has_graphs(self) -> bool:
        return any(record.graph is not None for record in self.records.values())

    def _wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _give_back(self) -> None:
        """Free the memory of graphs that are gone: usual passes could not use it, but it would count as held."""
        torch.cuda.empty_cache()

    def _ready(self, record: Record) -> bool:
        """Say whether a pass is to be recorded now."""
        record.seen += 1
        if record.usual or record.seen <= self.warm:
            return False
        recorded = sum(other.graph is not None for other in self.records.values())
        record.usual = recorded == MOST or not (self.always or self.has_room())
        return not record.usual

    def has_room(self) -> bool:
        """Say whether enough is left: passes give their memory back for a recording, which takes as much."""
        return self.held() <= ROOM

    def held(self) -> float:
        """Return what the allocator holds, as a share of the GPU's memory."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        return torch.cuda.memory_reserved(self.device) / total

    def _record(self, record: Record, run: Run, given: tuple[Any, Any], leaves: list[Tensor]) -> None:
        record.leaves = [leaf.clone() for leaf in leaves]
        inputs, targets = put_together(given, iter(record.leaves))
        for parameter in self.model.parameters():
            parameter.grad = None
        graph, result = self._captured(lambda: run(inputs, targets))
        if not isinstance(result, Tensor):
            raise Unrecordable(f"a pass returns a {type(result).__name__}")
        found = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        record.parameters, record.gradients = [p for p, _ in found], [gradient for _, gradient in found]
        record.result, record.graph = result, graph

    def _captured(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        return capture(work, self.device)

    def _replayed(self, record: Record, leaves: list[Tensor]) -> Tensor:
        for own, leaf in zip(record.leaves, leaves, strict=True):
            own.copy_(leaf)
        own_gradients = {id(gradient) for gradient in record.gradients}
        before = [p.grad.clone() if id(p.grad) in own_gradients else p.grad for p in record.parameters]  # type: ignore[union-attr]
        record.graph.replay()
        added = [(b, g) for b, g in zip(before, record.gradients, strict=True) if b is not None]
        if added:
            add_all([b for b, _ in added], [g for _, g in added])
        for parameter, sum_before, gradient in zip(record.parameters, before, record.gradients, strict=True):
            parameter.grad = gradient if sum_before is None else sum_before
        assert record.result is not None
        return record.result.clone()

    def _give_up_turns(self) -> None:
        """Drop the graphs of shapes that take turns, where there is no room for each of them."""
        self.forget()
        if not self.anew:
            self._give_up("batches have several shapes, and the GPU has no room for a graph of each")

    def _give_up(self, why: str) -> None:
        self.off = True
        self.records.clear()
        self._warn(why)

    def _warn(self, why: str) -> None:
        warnings.warn(
            f"parallel.replay: passes of this model cannot be recorded ({' '.join(why.split())[:300]}); they run as "
            "usual, more slowly if the model is small (parallel.replay=false says nothing of it)",
            stacklevel=4,
        )


def capture(work: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    """Record a graph of what `work` launches; return it with what `work` returned, which the graph writes later.

    What a failure leaves behind is put back: the stream, and the generator's way of drawing.
    """
    graph, index = torch.cuda.CUDAGraph(), torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    state = generator.clone_state()
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            # Other threads load data meanwhile, and may ask the driver for memory.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = work()
        except Exception:
            torch.cuda.synchronize(device)
            generator.graphsafe_set_state(state)
            raise
    return graph, result


# ---------------------------------------------------------------- trees of tensors


CONSTANTS = (bool, int, float, str, bytes, range, torch.dtype, torch.device, torch.Size, enum.Enum, type(None))


def take_apart(tree: Any, leaves: list[Tensor], device: str) -> Hashable:
    """Append the tensors of a tree to `leaves`; what else there is to it, equal for trees that differ in values alone.

    Refuses what might hide a tensor, or a number that changes from batch to batch unseen.
    """
    if isinstance(tree, Tensor):
        if tree.device.type != device:
            raise Unrecordable(f"a tensor of its inputs is on the {tree.device.type}")
        if tree.requires_grad:
            raise Unrecordable("a tensor of its inputs asks for a gradient")
        leaves.append(tree)
        return Tensor, tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, CONSTANTS):
        return type(tree), tree
    if isinstance(tree, dict):
        return dict, tuple((name, take_apart(value, leaves, device)) for name, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree), tuple(take_apart(value, leaves, device) for value in tree)
    if dataclasses.is_dataclass(tree):
        fields = [field.name for field in dataclasses.fields(tree)]
        return type(tree), tuple(take_apart(getattr(tree, name), leaves, device) for name in fields)
    raise Unrecordable(f"its inputs hold a {type(tree).__name__}")


def put_together(tree: Any, leaves: Iterator[Tensor]) -> Any:
    """Return the same tree with these tensors."""
    return map_tensors(lambda _: next(leaves), tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same tree with every tensor changed, in the order of take_apart()."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_tensors(function, value) for name, value in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, CONSTANTS):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, type) or not dataclasses.is_dataclass(tree):
        return tree
    # Fields alone: anything that was computed from the old tensors and kept must be computed again.
    new = object.__new__(type(tree))
    for field in dataclasses.fields(tree):
        object.__setattr__(new, field.name, map_tensors(function, getattr(tree, field.name)))
    return new
