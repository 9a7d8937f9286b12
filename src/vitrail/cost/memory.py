"""Bytes that a training step needs on one rank, by kind, at the moment when they are the most.

- masters, gradients and optimizer state are fp32 and in shards; parameters are gathered in the compute type, gradients
  reduced in the reduce type, group by group, as parallel/shard.py has FSDP2 do it
- a group that is not sharded is copied, too: the copy is in the compute type. One rank alone (parallel/solo.py) has
  copies of all groups from the beginning to the end of a pass, none in fp32, and reduces nothing
- the moments are: each block's forward, the loss, each block's backward, the reduction of its gradients, the update.
  Activations fall while gradients rise, so that any of them can be the worst
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from vitrail.cost.work import Segment, Work

BYTES = {"bf16": 2, "float8": 2, "fp32": 4}  # of a gathered parameter, or of a gradient between ranks


class Moments(NamedTuple):
    """How many numbers an optimizer keeps of each parameter: of a matrix of a block, and of any other."""

    matrix: int = 2
    other: int = 2

    @classmethod
    def of(cls, optimizer: Any) -> "Moments":
        """Those of an optimizer's config."""
        return cls(*(len(optimizer.update(role).moments) for role in cls._fields))

    def each(self, segment: Segment) -> int:
        """Of a parameter of a segment; the few in a block that are no matrices are counted as if they were."""
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
        """Allocated at the worst moment."""
        states = self.parameters + self.gradients + self.optimizer + self.average
        passing = self.gathered + self.activations + self.temporary + self.communication
        return states + passing + self.inputs + self.recorded

    def reserved(self, device: Any) -> float:
        """What the allocator holds, gaps included, and what libraries take beside it, in bytes."""
        return self.peak * device.fragmentation + device.reserve_gib * 2**30


def memory_of(
    work: Work,
    *,
    replicate: int = 1,
    shard: int = 1,
    reshard: bool = True,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    prefetch: Any = None,
    wrap: int = 1,
    compute: str = "bf16",
    reduce: str = "fp32",
    moments: Moments = ADAMW,
    ema: bool = False,
    offload: bool = False,
    micro_batches: int = 1,
    schedule: str = "1F1B",
    read_ahead: int = 0,
    rank: int = 0,
    solo: bool = False,
) -> Memory:
    """What one rank needs; `prefetch` is the recipe's (forward, backward), by default FSDP2's own 0 and 1.

    `read_ahead` is how many batches lie on the device before their turn, `rank` the place in a pipeline.
    """
    ranks = shard * context
    ahead = (getattr(prefetch, "forward", 0), getattr(prefetch, "backward", 1))
    state = _State(work, ranks, tensor, wrap, BYTES[compute], BYTES[reduce])
    flying = _in_flight(pipeline, rank, micro_batches, schedule)
    masters = 0 if offload else 4 * state.owned
    fixed = Memory(
        parameters=masters,
        optimizer=0 if offload else sum(4 * state.own(s) * moments.each(s) for s in state.every),
        average=masters if ema else 0,
        inputs=_inputs(work, pipeline, micro_batches, read_ahead),
        activations=(flying - 1) * sum(segment.saved for segment in state.every),
    )
    if solo:
        instants = state.moments_alone(fixed, accumulated=micro_batches > 1)
    else:
        instants = state.moments(fixed, reshard, ahead, accumulated=micro_batches > 1, offload=offload)
    return max(instants, key=lambda memory: memory.peak)


def _inputs(work: Work, pipeline: int, micro_batches: int, read_ahead: int) -> int:
    """Batches as they were read, and what is made of one micro-batch; a pipeline prepares all of them first."""
    made = (work.inputs - work.raw) * (micro_batches if pipeline > 1 else 1)
    return made + work.raw * micro_batches * (1 + read_ahead)


def _in_flight(pipeline: int, rank: int, micro_batches: int, schedule: str) -> int:
    """Micro-batches whose activations a rank of a pipeline holds at once: the first one the most."""
    if pipeline == 1:
        return 1
    most = {"GPipe": micro_batches, "interleaved": pipeline + pipeline // 2}.get(schedule, pipeline - rank)
    return max(1, min(micro_batches, most))


@dataclass(frozen=True)
class _State:
    work: Work
    ranks: int  # over which parameters of blocks are sharded
    tensor: int
    wrap: int
    compute: int  # bytes of a number
    reduce: int

    @cached_property
    def every(self) -> list[Segment]:
        return [
            replace(segment, count=1, name=_later(segment.name, place))
            for segment in self.work.segments
            for place in range(segment.count)
        ]

    def own(self, segment: Segment) -> int:
        """Parameters of which this rank has the master."""
        return -(-segment.parameters // (self.ranks * (1 if segment.gathered else self.tensor)))

    @cached_property
    def owned(self) -> int:
        return sum(self.own(segment) for segment in self.every)

    def moments(
        self, fixed: Memory, reshard: bool, ahead: tuple[int, int], *, accumulated: bool, offload: bool
    ) -> Iterator[Memory]:
        every, sharded = self.every, self.ranks > 1
        root = sum(s.parameters for s in every if not s.gathered)
        blocks = [s.parameters if s.gathered else 0 for s in every]
        all_gradients = 0 if offload else 4 * self.owned

        def gathered(index: int, groups: float) -> int:
            """The root's, and this group's with some beside it; or those of all blocks that have been run."""
            own = sum(blocks[: index + 1]) if not reshard else round(blocks[index] * self.wrap * groups)
            return self.compute * (root + own)

        saved = 0
        for index, segment in enumerate(every):
            saved += segment.saved
            yield replace(
                fixed,
                gradients=all_gradients if accumulated else 0,
                gathered=gathered(index, 1 + (1 + ahead[0] if sharded else 0)),
                activations=fixed.activations + saved,
                temporary=segment.forward_peak,
                moment=f"forward of {segment.name}",
            )
        yield replace(
            fixed,
            gradients=all_gradients if accumulated else 0,
            gathered=gathered(len(every) - 1, 1),
            activations=fixed.activations + saved,
            temporary=self.work.loss_peak,
            moment="loss",
        )
        gradients = all_gradients if accumulated else 0
        waiting = 0  # gradients of the root, which are reduced last
        buffer = 0  # what the last reduction has read, kept until the next one
        for index in range(len(every) - 1, -1, -1):
            segment = every[index]
            held = replace(
                fixed,
                gradients=gradients,
                gathered=gathered(index, 1 + (ahead[1] if sharded else 0)),
                activations=fixed.activations + saved,
                temporary=segment.peak + waiting,
                communication=buffer,
                moment=f"backward of {segment.name}",
            )
            yield held
            saved -= segment.saved
            if not segment.gathered:
                waiting += self.compute * segment.parameters
                continue
            numbers = segment.parameters * self.wrap
            buffer = self.reduce * numbers
            output = 0 if offload else 4 * self.own(segment)
            if not accumulated:
                gradients += output
            yield replace(
                held,
                gradients=gradients,
                gathered=gathered(index - 1, ahead[1] if sharded else 0) if index else self.compute * root,
                activations=fixed.activations + saved,
                temporary=waiting,
                communication=self._reduction(numbers, output if accumulated else 0),
                moment=f"reduction after {segment.name}",
            )
        yield replace(
            fixed,
            gradients=gradients
            + (0 if accumulated or offload else 4 * sum(self.own(s) for s in every if not s.gathered)),
            gathered=self.compute * root,
            temporary=waiting,
            communication=max(buffer, self._reduction(root, 0)),
            moment="reduction of what is outside blocks",
        )
        yield replace(fixed, gradients=all_gradients, activations=0, moment="update")

    def moments_alone(self, fixed: Memory, *, accumulated: bool) -> Iterator[Memory]:
        """Of a rank that has all of the model."""
        every = self.every
        copied = 0 if self.compute == 4 else self.compute  # bytes of a copied number, and of its gradient at first
        fixed = replace(fixed, gathered=copied * self.owned)
        all_gradients = 4 * self.owned
        gradients = all_gradients if accumulated else 0
        saved = waiting = 0
        for segment in every:
            saved += segment.saved
            yield replace(
                fixed,
                gradients=gradients,
                activations=fixed.activations + saved,
                temporary=segment.forward_peak,
                moment=f"forward of {segment.name}",
            )
        yield replace(
            fixed,
            gradients=gradients,
            activations=fixed.activations + saved,
            temporary=self.work.loss_peak,
            moment="loss",
        )
        for segment in reversed(every):
            yield replace(
                fixed,
                gradients=gradients,
                activations=fixed.activations + saved,
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
                fixed,
                gradients=gradients,
                activations=fixed.activations + saved,
                temporary=waiting + copied * segment.parameters + (new if accumulated else 0),
                moment=f"gradients of {segment.name}",
            )
        yield replace(
            fixed,
            gradients=all_gradients,
            activations=fixed.activations,
            temporary=waiting * (3 if accumulated else 1),
            moment="gradients of what is outside blocks",
        )
        yield replace(fixed, gradients=all_gradients, gathered=0, activations=0, moment="update")

    def _reduction(self, numbers: int, output: int) -> int:
        """What is reduced, and where it goes; of one rank alone it is divided once more, in memory of its own."""
        copies = 2 if self.ranks == 1 else 1
        return self.reduce * numbers * copies + output


def _later(name: str, places: int) -> str:
    """The name of an equal block that comes so many places after this one: blocks.0, blocks.3."""
    stem, dot, number = name.rpartition(".")
    return f"{stem}{dot}{int(number) + places}" if places and number.isdecimal() else name
