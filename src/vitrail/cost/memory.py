"""Memory of a training step on one rank: bytes by kind, at the moment when they are the most.

- masters, gradients and optimizer state are fp32 and in shards; parameters are gathered in the compute type, gradients
  reduced in the reduce type, group by group, as parallel/shard.py has FSDP2 do it
- a group that is not sharded is copied, too: the copy is in the compute type. One rank alone (parallel/shard.py) has
  copies of all groups from the beginning to the end of a pass, none in fp32, and reduces nothing
- the moments are: each block's forward, the loss, each block's backward, the reduction of its gradients, the update.
  Activations fall while gradients rise, so that any of them can be the worst
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from vitrail.cost.cluster import Device
from vitrail.cost.work import Segment, Work
from vitrail.parallel.mesh import Layout
from vitrail.recipe.sections import Parallel, Precision

BYTES = {"bf16": 2, "float8": 2, "fp32": 4}  # of a gathered parameter, or of a gradient between ranks


class Moments(NamedTuple):
    """Numbers that an optimizer keeps of each parameter: of a matrix of a block, and of any other."""

    matrix: int = 2
    other: int = 2

    @classmethod
    def of(cls, optimizer: Any) -> "Moments":
        return cls(*(len(optimizer.update(role).moments) for role in cls._fields))

    def each(self, segment: Segment) -> int:
        """Return the number for a segment; the few parameters in a block that are no matrices count as if they were."""
        return self.matrix if segment.gathered else self.other


ADAMW = Moments()


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, each kind at the moment when the sum is largest."""

    parameters: int = 0  # fp32 masters, this rank's shard
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    gathered: int = 0  # parameters in the compute type
    activations: int = 0
    temporary: int = 0
    communication: int = 0  # buffers that collectives read and write
    inputs: int = 0
    moment: str = ""  # when that is
    recorded: int = 0  # inputs of a pass that is replayed, once more: copied to where the graph reads them

    @property
    def peak(self) -> int:
        states = self.parameters + self.gradients + self.optimizer + self.average
        passing = self.gathered + self.activations + self.temporary + self.communication
        return states + passing + self.inputs + self.recorded

    def reserved(self, device: Device) -> float:
        """Return what the allocator holds, gaps included, and what libraries take beside it, in bytes."""
        return self.peak * device.fragmentation + device.reserve_gib * 2**30


def memory_of(
    work: Work,
    layout: Layout,
    parallel: Parallel,
    precision: Precision,
    *,
    micro_batches: int = 1,
    moments: Moments = ADAMW,
    ema: bool = False,
    read_ahead: int = 0,
    rank: int = 0,
    solo: bool = False,
) -> Memory:
    """Return what one rank needs; `precision` names what is computed in (not auto).

    `read_ahead` is how many batches lie on the device before their turn, `rank` the place in a pipeline.
    """
    flying = _in_flight(layout.pipeline, rank, micro_batches, parallel.schedule)
    state, offload = _State(work, layout, parallel, precision), parallel.offload
    masters = 0 if offload else 4 * state.owned
    # Batches as they were read, and what is made of one micro-batch; a pipeline prepares all of them first.
    made = (work.inputs - work.raw) * (micro_batches if layout.pipeline > 1 else 1)
    fixed = Memory(
        parameters=masters,
        # Between micro-batches gradients stay; in the first, or only, one they come block by block.
        gradients=state.all_gradients if micro_batches > 1 else 0,
        optimizer=0 if offload else sum(4 * state.own(s) * moments.each(s) for s in state.every),
        average=masters if ema else 0,
        inputs=made + work.raw * micro_batches * (1 + read_ahead),
        activations=(flying - 1) * sum(segment.saved for segment in state.every),
    )
    if solo:
        instants = state.moments_alone(fixed, accumulated=micro_batches > 1)
    else:
        instants = state.moments(fixed, accumulated=micro_batches > 1)
    return max(instants, key=lambda memory: memory.peak)


def _in_flight(pipeline: int, rank: int, micro_batches: int, schedule: str) -> int:
    """Count micro-batches whose activations a rank of a pipeline holds at once: the first one the most."""
    if pipeline == 1:
        return 1
    most = {"GPipe": micro_batches, "interleaved": pipeline + pipeline // 2}.get(schedule, pipeline - rank)
    return max(1, min(micro_batches, most))


@dataclass(frozen=True)
class _State:
    """The parameters of one rank, and the moments of a step. `fixed` is what a pass does not change."""

    work: Work
    layout: Layout
    parallel: Parallel
    precision: Precision

    @property
    def ranks(self) -> int:
        """Return over how many ranks parameters of blocks are sharded."""
        return self.layout.shard * self.layout.context

    @property
    def compute(self) -> int:
        """Return the bytes of a number that is computed with."""
        return BYTES[self.precision.compute]

    @property
    def reduce(self) -> int:
        return BYTES[self.precision.reduce]

    @cached_property
    def every(self) -> list[Segment]:
        return [
            replace(segment, count=1, name=_later(segment.name, place))
            for segment in self.work.segments
            for place in range(segment.count)
        ]

    def own(self, segment: Segment) -> int:
        """Count parameters of which this rank has the master."""
        return -(-segment.parameters // (self.ranks * (1 if segment.gathered else self.layout.tensor)))

    @cached_property
    def owned(self) -> int:
        return sum(self.own(segment) for segment in self.every)

    @property
    def all_gradients(self) -> int:
        return 0 if self.parallel.offload else 4 * self.owned

    def moments(self, fixed: Memory, *, accumulated: bool) -> Iterator[Memory]:
        c, every, sharded = self.parallel, self.every, self.ranks > 1
        root = sum(s.parameters for s in every if not s.gathered)
        blocks = [s.parameters if s.gathered else 0 for s in every]

        def gathered(index: int, groups: int) -> int:
            """Count the root's, and this group's with some beside it; or those of all blocks that have been run."""
            own = blocks[index] * c.wrap * groups if self.layout.reshard else sum(blocks[: index + 1])
            return self.compute * (root + own)

        forward = [gathered(index, 2 + c.prefetch.forward if sharded else 1) for index in range(len(every))]
        yield from self._forward(fixed, [*forward, gathered(len(every) - 1, 1)])
        gradients, saved = fixed.gradients, fixed.activations + sum(segment.saved for segment in every)
        waiting = 0  # gradients of the root, which are reduced last
        buffer = 0  # what the last reduction has read, kept until the next one
        for index, segment in reversed(list(enumerate(every))):
            held = replace(
                fixed,
                gradients=gradients,
                gathered=gathered(index, 1 + c.prefetch.backward if sharded else 1),
                activations=saved,
                temporary=segment.peak + waiting,
                communication=buffer,
                moment=f"backward of {segment.name}",
            )
            yield held
            saved -= segment.saved
            if not segment.gathered:
                waiting += self.compute * segment.parameters
                continue
            numbers = segment.parameters * c.wrap
            buffer = self.reduce * numbers
            output = 0 if c.offload else 4 * self.own(segment)
            gradients += 0 if accumulated else output
            yield replace(
                held,
                gradients=gradients,
                gathered=gathered(index - 1, c.prefetch.backward if sharded else 0) if index else self.compute * root,
                activations=saved,
                temporary=waiting,
                communication=self._reduction(numbers) + (output if accumulated else 0),
                moment=f"reduction after {segment.name}",
            )
        outside = 0 if accumulated or c.offload else 4 * sum(self.own(s) for s in every if not s.gathered)
        yield replace(
            fixed,
            gradients=gradients + outside,
            gathered=self.compute * root,
            temporary=waiting,
            communication=max(buffer, self._reduction(root)),
            moment="reduction of what is outside blocks",
        )
        yield replace(fixed, gradients=self.all_gradients, activations=0, moment="update")

    def moments_alone(self, fixed: Memory, *, accumulated: bool) -> Iterator[Memory]:
        """Go through the moments of a rank that has all of the model."""
        every = self.every
        copied = 0 if self.compute == 4 else self.compute  # bytes of a copied number, and of its gradient at first
        passing = replace(fixed, gathered=copied * self.owned)
        gradients, saved = fixed.gradients, fixed.activations + sum(segment.saved for segment in every)
        yield from self._forward(passing, [passing.gathered] * (len(every) + 1))
        waiting = 0
        for segment in reversed(every):
            yield replace(
                passing,
                gradients=gradients,
                activations=saved,
                temporary=segment.peak + waiting,
                moment=f"backward of {segment.name}",
            )
            saved -= segment.saved
            if copied and not segment.gathered:  # what is outside blocks is one group, and the last
                waiting += copied * segment.parameters
                continue
            new = 4 * segment.parameters
            gradients += 0 if accumulated else new
            yield replace(
                passing,
                gradients=gradients,
                activations=saved,
                temporary=waiting + copied * segment.parameters + (new if accumulated else 0),
                moment=f"gradients of {segment.name}",
            )
        yield replace(
            passing,
            gradients=self.all_gradients,
            temporary=waiting * (3 if accumulated else 1),
            moment="gradients of what is outside blocks",
        )
        yield replace(fixed, gradients=self.all_gradients, activations=0, moment="update")

    def _forward(self, fixed: Memory, gathered: list[int]) -> Iterator[Memory]:
        """Go through the forward of each segment and the loss; `gathered` has a number for each of them."""
        saved = fixed.activations
        for segment, size in zip(self.every, gathered[:-1], strict=True):
            saved += segment.saved
            own = {"activations": saved, "temporary": segment.forward_peak}
            yield replace(fixed, gathered=size, moment=f"forward of {segment.name}", **own)
        yield replace(fixed, gathered=gathered[-1], activations=saved, temporary=self.work.loss_peak, moment="loss")

    def _reduction(self, numbers: int) -> int:
        """Count what is reduced; of one rank alone it is divided once more, in memory of its own."""
        return self.reduce * numbers * (2 if self.ranks == 1 else 1)


def _later(name: str, places: int) -> str:
    """Name an equal block that comes so many places after this one: blocks.0, blocks.3."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}{dot}{int(number) + places}" if places and number.isdecimal() else name
