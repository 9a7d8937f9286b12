"""How long a training step takes: a timeline of computation and collectives on one rank.

- Computation is a roofline of the traced operations. The host launches them, and they take at least as long as that
- groups of blocks are gathered ahead of their use (`prefetch`), in the backward once more where the forward freed them
- of hidden communication 1 - overlap is paid for all the same, as it takes memory bandwidth and compute units; of
  collectives that add up more, where the cluster says so
- collectives of tensor and context parallelism stand between the operations of a block, and nothing hides them but, of
  rings, the attention of a round
- what limits a step is what most of its time goes to
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vitrail.cost.cluster import Cluster
from vitrail.cost.memory import ADAMW, BYTES, Moments
from vitrail.cost.network import Group, all_gather, all_reduce, all_to_all, group_of, reduce_scatter, send
from vitrail.cost.roofline import LIMITS, Seconds, Way, seconds_of
from vitrail.cost.timeline import BETWEEN, INSIDE, Piece, Talk, Timeline, link_of
from vitrail.cost.trace import Op, Segment, Work
from vitrail.parallel.context import choose_ulysses
from vitrail.parallel.mesh import Layout
from vitrail.recipe.sections import Parallel, Precision

LAUNCHES, BUBBLE = "kernel launches", "pipeline bubble"
PARAMETER, MOMENT = 12, 8  # bytes an update moves, in fp32: a parameter read and written, its gradient read; a moment
SCALED = 12  # a gradient read for the norm, then read and written to be scaled
HOOKS = 30  # launches that a group of sharded parameters adds to a micro-batch: casts, copies, collectives
CASTS = 2  # launches of a group on one rank alone
HOST_GB_S = 20.0  # between host and device, where the optimizer runs on the host


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step on one rank."""

    seconds: float
    compute: float  # forward, backward and what is computed again
    communication: float  # all of it, less what rings hide
    exposed: float  # of it, what the step waits for
    optimizer: float
    bubble: float
    host: float  # launches of the forward and backward, which never take less
    limited_by: str
    parts: Mapping[str, float] = field(default_factory=dict)  # the same seconds, by what they are spent on


def step_time(
    work: Work,
    cluster: Cluster,
    *,
    gpus: int,
    layout: Layout,
    parallel: Parallel,
    precision: Precision,
    micro_batches: int = 1,
    moments: Moments = ADAMW,
    solo: bool = False,
    replayed: bool = False,
) -> StepTime:
    """Of one optimizer step with so many micro-batches, of which `work` is one.

    `precision` names what is computed in (not auto). `solo` and `replayed` are those of one rank alone, as in
    parallel/solo.py and parallel/replay.py.

    A layout of fewer ranks than GPUs stands for copies that do not talk to each other.
    """
    assert gpus >= layout.data * layout.parts * layout.pipeline, (gpus, layout)
    rank = _Rank(work, cluster, layout, parallel, precision, solo, replayed)
    spent, busy = rank.micro_batches(micro_batches)
    running, waiting = spent.total, spent[INSIDE] + spent[BETWEEN]
    updating = rank.update(moments)
    chunks = parallel.stages or (2 if parallel.schedule == "interleaved" else 1)
    bubble = running / micro_batches * (layout.pipeline - 1) / chunks
    spent[LIMITS["memory"]] += updating
    spent[BUBBLE] += bubble
    return StepTime(
        seconds=spent.total,
        compute=running - waiting,
        communication=busy.total,
        exposed=waiting,
        optimizer=updating,
        bubble=bubble,
        host=rank.host() * micro_batches,
        limited_by=max(spent, key=lambda name: spent[name]),
        parts={name: seconds for name, seconds in spent.items() if seconds > 0},
    )


@dataclass(frozen=True)
class _Rank:
    """One rank's share of a step."""

    work: Work
    cluster: Cluster
    layout: Layout
    parallel: Parallel
    precision: Precision
    solo: bool
    replayed: bool

    def micro_batches(self, number: int) -> tuple[Seconds, Seconds]:
        """Seconds by limit, and of each link, of all of them.

        What the forward does not free stays gathered until the last one; replicas exchange gradients in the last alone.
        """
        spent, busy = Seconds(), Seconds()
        pieces, root = self._pieces()
        pieces = self._launched(pieces)
        kinds = [(True, True, 1)] if number == 1 else [(True, False, 1), (False, False, number - 2), (False, True, 1)]
        for first, last, times in kinds:
            clock = self._micro_batch(pieces, root, gather=first or self.layout.reshard, last=last)
            spent.add(clock.spent, times)
            busy.add(clock.busy, times)
        return spent, busy

    def _micro_batch(self, pieces: list[Piece], root: Piece, *, gather: bool, last: bool) -> Timeline:
        ahead = self.parallel.prefetch
        clock = Timeline()
        if gather:
            clock.wait(clock.talk(root.gather, 0.0), root.gather.link)
        clock.forward(pieces, gather=gather, ahead=max(1, ahead.forward))
        clock.compute(self._seconds(self.work.loss, "forward"))
        clock.backward(pieces, gather=self.layout.reshard, ahead=ahead.backward, exchange=last)
        clock.reduce(root, exchange=last)
        if self.layout.pipeline > 1:
            self._send(clock)
        clock.finish()
        return clock

    def _launched(self, pieces: list[Piece]) -> list[Piece]:
        """Slowed down to what the host can launch; it runs ahead, so the whole counts and not each piece."""
        device = sum(piece.forward.total + piece.backward.total for piece in pieces)
        late = self.host() / device - 1 if device else 0.0
        if late <= 0:
            return pieces

        def slowed(seconds: Seconds) -> Seconds:
            return Seconds(seconds).add(Seconds({LAUNCHES: late * seconds.total}))

        return [replace(piece, forward=slowed(piece.forward), backward=slowed(piece.backward)) for piece in pieces]

    def _send(self, clock: Timeline) -> None:
        """To the next stage of a pipeline and back, hidden behind other micro-batches."""
        size = max((_stream(segment, BYTES[self.precision.compute]) for segment in self.work.segments), default=0.0)
        crosses = self.layout.data * self.layout.parts >= self.cluster.gpus_per_node
        talk = send(size / self.layout.tensor, self.cluster, crosses=crosses)
        clock.hide(Talk(2 * talk, BETWEEN if crosses else INSIDE, 1 - self.cluster.overlap))

    def _pieces(self) -> tuple[list[Piece], Piece]:
        """In the order of the forward, and what the root gathers before and reduces after all of them."""
        pieces = []
        outside = 0
        for segment in self.work.segments:
            size = self._together(segment)
            pieces += [self._piece(segment, size)] * (segment.count // size)
            if rest := segment.count % size:
                pieces.append(self._piece(segment, rest))
            if not segment.gathered:
                outside += segment.parameters * segment.count
        return pieces, Piece(Seconds(), Seconds(), *self._talks(outside, ("shard", "context", "tensor")))

    def _together(self, segment: Segment) -> int:
        """Blocks of a group: `wrap` of them, or as few as reach a bucket."""
        if not segment.gathered:
            return 1
        size = self.parallel.wrap
        if self.parallel.bucket_mib is not None:
            size = -(-self.parallel.bucket_mib * 2**20 // max(1, segment.parameters * BYTES[self.precision.reduce]))
        return min(max(1, size), segment.count)

    def _piece(self, segment: Segment, size: int) -> Piece:
        forward = self._seconds(segment.forward, "forward")
        backward = self._seconds(segment.backward, "backward").add(self._seconds(segment.again, "forward"))
        parameters = segment.parameters if segment.gathered else 0
        if parameters and self.layout.parts > 1:
            waits = self._inside_block(segment, "forward")
            forward.add(waits)
            backward.add(self._inside_block(segment, "backward")).add(waits, 1 if segment.again else 0)
        item = BYTES[self.precision.compute]
        if self.solo:  # parameters are cast before, and gradients after
            casting = self._moving(segment.parameters * (4 + item)) if item < 4 else Seconds()
            forward.add(casting)
            backward.add(casting)
        else:  # parameters are cast and copied with each gather, gradients once
            copying = self._moving(parameters * 2 * item)
            forward.add(copying)
            backward.add(copying, 2)
        talks = self._talks(parameters * size, ("shard", "context"))
        return Piece(Seconds().add(forward, size), Seconds().add(backward, size), *talks)

    def _talks(self, parameters: int, axes: tuple[str, ...]) -> tuple[Talk, Talk, Talk]:
        """Gather, scatter and exchange between replicas of so many parameters."""
        if not parameters:
            return Talk(), Talk(), Talk()
        shards, copies = group_of(self.layout, axes, self.cluster), group_of(self.layout, ("replicate",), self.cluster)
        gathered, reduced = parameters * BYTES[self.precision.compute], parameters * BYTES[self.precision.reduce]
        copying, adding = 1 - self.cluster.overlap, 1 - self.cluster.overlap_of_sums
        return (
            Talk(all_gather(gathered, shards, self.cluster), link_of(shards), copying),
            Talk(reduce_scatter(reduced, shards, self.cluster), link_of(shards), adding),
            Talk(all_reduce(reduced / shards.ranks, copies, self.cluster), link_of(copies), adding),
        )

    def _inside_block(self, segment: Segment, way: Way) -> Seconds:
        """Waits of one pass through a block whose tokens or heads are spread over ranks."""
        waits = Seconds()
        item = BYTES[self.precision.compute]
        if self.layout.tensor > 1:  # attention and MLP: tokens are gathered before, partial sums scattered after
            group = group_of(self.layout, ("tensor",), self.cluster)
            tokens = _stream(segment, item)
            talk = all_gather(tokens, group, self.cluster) + reduce_scatter(tokens, group, self.cluster)
            waits[link_of(group)] += 2 * talk
        if self.layout.context > 1:
            group = group_of(self.layout, ("context",), self.cluster)
            for op in segment.forward if way == "forward" else segment.backward:
                if op.kind == "attention" and len(op.shape) == 5:
                    waits[link_of(group)] += self._exchange(op, group, item, way)
        return waits

    def _exchange(self, op: Op, group: Group, item: int, way: Way) -> float:
        """Of queries, keys, values and outputs: heads are traded for tokens, or keys and values go round a ring.

        In the backward their gradients go round with them, in fp32.
        """
        batch, heads, queries, keys, width = op.shape  # a rank's own queries, the keys of all
        asking, asked = (2 * batch * heads * tokens * width * item for tokens in (queries, keys / group.ranks))
        trading = min(self.parallel.ulysses or choose_ulysses(heads, heads, group.ranks), group.ranks)
        rounds = group.ranks // trading
        talk = 0.0
        if trading > 1:
            traders = Group(trading, min(trading, group.inside))
            talk += all_to_all(asking + asked, traders, self.cluster)
        if rounds > 1:  # each hides behind the attention of what is there already, as far as that lasts
            moved = asked * (1 + 4 / item) if way == "backward" else asked
            passing = send(moved, self.cluster, crosses=group.crosses, nodes=group.nodes)
            hidden = min(passing, self._seconds((op,), way).total / rounds)
            talk += (rounds - 1) * (passing - self.cluster.overlap * hidden)
        return talk

    def _seconds(self, ops: tuple[Op, ...], way: Way) -> Seconds:
        return seconds_of(ops, self.cluster.device, self.precision, way)

    def _moving(self, size: float) -> Seconds:
        """To read and write so many bytes."""
        return self._seconds((Op("memory", 0.0, size),) if size else (), "forward")

    def update(self, moments: Moments) -> float:
        """The optimizer reads and writes the state of this rank's shards."""
        shards = self.layout.shard * self.layout.context
        owned = moved = 0.0
        for segment in self.work.segments:
            ranks = shards if segment.gathered else shards * self.layout.tensor
            mine = segment.parameters * segment.count / ranks
            owned, moved = owned + mine, moved + mine * (PARAMETER + MOMENT * moments.each(segment))
        return moved / (1e9 * HOST_GB_S) if self.parallel.offload else self._moving(moved + SCALED * owned).total

    @property
    def _hooks(self) -> int:
        """Launches that a group of parameters adds."""
        return HOOKS if not self.solo else CASTS if BYTES[self.precision.compute] < 4 else 0

    def host(self) -> float:
        """Seconds to launch one micro-batch; a recorded one is launched at once."""
        if self.replayed:
            return 0.0
        device = self.cluster.device
        total = device.launch_us * (sum(op.kernels for op in self.work.loss) + (self._hooks if self.solo else 0))
        for segment in self.work.segments:
            kernels = sum(op.kernels for op in (*segment.forward, *segment.backward, *segment.again))
            hooks = self._hooks / self._together(segment) if segment.gathered else 0
            each = device.compiled_us if segment.gathered and self.parallel.compile is True else device.launch_us
            total += segment.count * (each * kernels + device.launch_us * hooks)
        return 1e-6 * total


def _stream(segment: Segment, item: int) -> float:
    """Bytes of what flows from block to block: what the first product of all tokens reads."""
    shapes = [op.shape for op in segment.forward if op.kind == "gemm" and op.shape]
    rows, _, width = max(shapes, key=lambda shape: shape[0], default=(0, 0, 0))
    return rows * width * item
