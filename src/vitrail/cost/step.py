"""Time of a training step: a timeline of computation and collectives on one rank.

- computation is a roofline of the traced operations: what the device's curves say of such work, but never less than its
  bytes take, nor than the least that a kernel takes. The host launches them, and they take at least as long as that
- groups of blocks are gathered ahead of their use (`prefetch`), in the backward once more where the forward freed them;
  gradients are reduced behind it. Collectives queue up on their link: that inside a node, or the network between nodes
- of hidden communication 1 - overlap is paid for all the same, as it takes memory bandwidth and compute units; of
  collectives that add up more, where the cluster says so
- collectives of tensor and context parallelism stand between the operations of a block, and nothing hides them but, of
  rings, the attention of a round
- what limits a step is what most of its time goes to

Collectives on a cluster:

- a group of ranks is known by how many they are and how many of them share a node. Ranks fill nodes in order, so the
  members of an axis stand as far apart as the axes inside it are large
- bytes are those of the whole tensor: what all-gather ends with, what reduce-scatter and all-reduce begin with, and for
  all-to-all what one rank sends
- all-gather and reduce-scatter go round a ring: a message passes every rank, so latency grows with their number. This
  is what makes sharding over many ranks slow. All-reduce takes the faster of a ring and a tree, whose latency grows
  with the logarithm alone
- members of a group on one node use their shares of the node's network together; groups that lie side by side on a node
  share it evenly. The congestion curves say what is left of a share, and of the speed of a hop, when so many nodes talk
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vitrail.cost.cluster import Cluster, Device, at
from vitrail.cost.memory import ADAMW, BYTES, Moments
from vitrail.cost.recorder import Op
from vitrail.cost.work import Segment, Work
from vitrail.parallel import float8
from vitrail.parallel.context import choose_ulysses
from vitrail.parallel.mesh import AXES, Layout
from vitrail.recipe.sections import Parallel, Precision

Way = Literal["forward", "backward"]

LIMITS = {
    "gemm": "matrix products",
    "attention": "attention",
    "convolution": "convolutions",
    "memory": "memory bandwidth",
}
INSIDE, BETWEEN = "network inside nodes", "network between nodes"
LAUNCHES, BUBBLE = "kernel launches", "pipeline bubble"
PARAMETER, MOMENT = 12, 8  # bytes an update moves, in fp32: a parameter read and written, its gradient read; a moment
SCALED = 12  # a gradient read for the norm, then read and written to be scaled
HOOKS = 30  # launches that a group of sharded parameters adds to a micro-batch: casts, copies, collectives
CASTS = 2  # launches of a group on one rank alone
HOST_GB_S = 20.0  # between host and device, where the optimizer runs on the host
NARROW = 64  # attention kernels pad narrower heads to this width


class Seconds(dict[str, float]):
    """Time by what it is spent on; 0 for all that is not named."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: "Seconds", times: float = 1.0) -> "Seconds":
        for name, seconds in other.items():
            self[name] += times * seconds
        return self

    @property
    def total(self) -> float:
        return sum(self.values())


def seconds_of(ops: Iterable[Op], device: Device, precision: Precision, way: Way) -> Seconds:
    """Return seconds of all the operations, by what limits each."""
    spent = Seconds()
    for op in ops:
        share = bandwidth_share(op, device) if op.kind == "memory" else 1.0
        moving = max(op.bytes / (1e9 * share * device.bandwidth_gb_s), 1e-6 * device.kernel_us * op.kernels)
        working = op.flops / rate(op, device, precision, way) if op.flops and op.kind != "memory" else 0.0
        if op.kind == "convolution" and device.name != "cpu":
            working += turning(op, device)
        # Products that wait for their bytes (thin ones) are the memory's doing.
        spent[LIMITS[op.kind] if working >= moving else LIMITS["memory"]] += max(working, moving)
    return spent


def bandwidth_share(op: Op, device: Device) -> float:
    """Return the share of the memory's bandwidth that such a kernel reaches."""
    curve = device.elementwise.get(op.walk)
    if curve is None or not op.bytes:
        return 1.0
    return at(curve, op.shape[0] if op.walk == "maps" else op.bytes / op.kernels)


def turning(op: Op, device: Device) -> float:
    """Return seconds in which a GPU turns maps to channels-last and back, which its convolutions compute in."""
    turned = Op("memory", 0.0, 2 * op.bytes, kernels=2, walk="strided")
    return turned.bytes / (1e9 * bandwidth_share(turned, device) * device.bandwidth_gb_s)


def rate(op: Op, device: Device, precision: Precision, way: Way) -> float:
    """Return FLOP/s that the device reaches with such an operation."""
    wide = precision.compute == "fp32"
    if op.kind == "attention":
        return _attention_rate(op, device, wide, way)
    if op.kind == "convolution":
        channels = math.sqrt(math.prod(op.shape))
        return at(device.convolution, channels) * device.peak("fp32" if wide else "bf16")
    if wide:
        return at(device.gemm_fp32, op.flops) * device.peak("fp32")
    gain = _float8_gain(op, precision) if precision.compute == "float8" else 1.0
    odd = any(width % 2 for width in op.layer[1:])  # then rows begin between words
    return at(device.gemm, op.flops) * device.peak("bf16") * gain * (device.gemm_odd if odd else 1.0)


def _float8_gain(op: Op, precision: Precision) -> float:
    """Return what a block's linear layer gains in float8, as a run judges the layer before it starts."""
    if not op.layer:
        return 1.0
    rows, smaller, larger = op.layer
    if smaller % float8.MULTIPLE or larger % float8.MULTIPLE:
        return 1.0
    gain = float8.speedup(rows, smaller, larger)
    return gain if gain >= float8.PAYS or precision.float8_layers == "all" else 1.0


def _filled(tokens: int, device: Device) -> float:
    """Return the share of tiles that tokens fill; partly empty ones take as long as full ones."""
    return tokens / (device.attention_tile * math.ceil(tokens / device.attention_tile))


def _attention_rate(op: Op, device: Device, wide: bool, way: Way) -> float:
    queries, keys, width = op.shape[2:] if len(op.shape) == 5 else (1024, 1024, NARROW)
    # Ranks that share tokens trade them for heads, so that each computes with all queries. (A ring would not.)
    found = _filled(queries * op.spread, device) * _filled(keys, device)
    found *= at(device.attention[way], keys) * device.peak("bf16") * min(1.0, width / NARROW)
    if not wide:
        return found  # float8 is for products of linear layers alone
    return min(found / 2, device.peak("fp32"))  # twice the bytes, and no faster than the type allows


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other."""

    ranks: int
    inside: int  # of them, on one node

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.inside)

    @property
    def crosses(self) -> bool:
        return self.nodes > 1


def group_of(layout: Layout, axes: Sequence[str], cluster: Cluster) -> Group:
    """Return the ranks of some axes that follow one another in the mesh, as one group."""
    places = [AXES.index(axis) for axis in axes]
    ranks = math.prod(layout.sizes[place] for place in places)
    apart = math.prod(layout.sizes[max(places) + 1 :])
    return Group(ranks, max(1, min(ranks, cluster.gpus_per_node // apart)))


def all_gather(size: float, group: Group, cluster: Cluster) -> float:
    if group.ranks == 1:
        return 0.0
    return _round(group, cluster) + _passing(size, group) / _rate(group, cluster)


reduce_scatter = all_gather  # the same ring


def all_reduce(size: float, group: Group, cluster: Cluster) -> float:
    if group.ranks == 1:
        return 0.0
    moving = 2 * _passing(size, group) / _rate(group, cluster)
    return 2 * min(_round(group, cluster), _climb(group, cluster)) + moving


def all_to_all(size: float, group: Group, cluster: Cluster) -> float:
    """Time a trade of parts between all ranks; those for other nodes take the network while the rest goes on."""
    if group.ranks == 1:
        return 0.0
    part = size / group.ranks
    inside = (group.inside - 1) * part / (1e9 * cluster.inside.gb_s)
    between = (group.ranks - group.inside) * part / _share(group.nodes, cluster) if group.crosses else 0.0
    return _climb(group, cluster) + max(inside, between)


def send(size: float, cluster: Cluster, *, crosses: bool, nodes: int = 2) -> float:
    if not crosses:
        return 1e-6 * cluster.inside.latency_us + size / (1e9 * cluster.inside.gb_s)
    return 1e-6 * _hop_us(nodes, cluster) + size / _share(nodes, cluster)


def _passing(size: float, group: Group) -> float:
    """Return bytes that every link of a ring carries."""
    return size * (group.ranks - 1) / group.ranks


def _share(nodes: int, cluster: Cluster) -> float:
    """Return bytes a second of one GPU between nodes."""
    return 1e9 * cluster.between.gb_s * at(cluster.congestion, nodes)


def _rate(group: Group, cluster: Cluster) -> float:
    """Return bytes a second through the narrowest place of a ring."""
    inside = 1e9 * cluster.inside.gb_s
    if not group.crosses:
        return inside
    between = group.inside * _share(group.nodes, cluster)
    return between if group.inside == 1 else min(inside, between)


def _round(group: Group, cluster: Cluster) -> float:
    """Return seconds of a short message once round the ring, less one hop."""
    across = min(group.nodes, group.ranks - 1) if group.crosses else 0
    hops = group.ranks - 1 - across
    return 1e-6 * (hops * cluster.inside.latency_us + across * _hop_us(group.nodes, cluster))


def _hop_us(nodes: int, cluster: Cluster) -> float:
    """Return microseconds from node to node, where so many talk."""
    return cluster.between.latency_us / at(cluster.hop_congestion, nodes)


def _climb(group: Group, cluster: Cluster) -> float:
    """Return seconds of a short message up a tree: along the ranks of a node, then between nodes."""
    inside = (group.inside - 1) * cluster.inside.latency_us
    return 1e-6 * (inside + math.ceil(math.log2(group.nodes)) * _hop_us(group.nodes, cluster))


def link_of(group: Group) -> str:
    return BETWEEN if group.crosses else INSIDE


@dataclass(frozen=True)
class Talk:
    """One collective: how long, on which link, and what share of it slows the computation that hides it."""

    seconds: float = 0.0
    link: str = INSIDE
    slows: float = 0.0


@dataclass(frozen=True)
class Piece:
    """Blocks that are gathered and reduced together, or what lies outside blocks."""

    forward: Seconds = field(default_factory=Seconds)  # waits inside the blocks included
    backward: Seconds = field(default_factory=Seconds)
    gather: Talk = Talk()
    scatter: Talk = Talk()
    reduce: Talk = Talk()


@dataclass
class Timeline:
    """The device's clock, and when each link is free."""

    now: float = 0.0
    free: Seconds = field(default_factory=Seconds)
    busy: Seconds = field(default_factory=Seconds)  # of each link
    waited: Seconds = field(default_factory=Seconds)  # of it, inside blocks, where nothing hides it
    slowing: Seconds = field(default_factory=Seconds)  # what the rest would cost if all of it were hidden
    spent: Seconds = field(default_factory=Seconds)

    def forward(self, pieces: Sequence[Piece], *, gather: bool, ahead: int) -> None:
        gathers = _Gathers(self, pieces if gather else (), ahead)
        for place, piece in enumerate(pieces):
            gathers.wait(place)
            self.compute(piece.forward)

    def backward(self, pieces: Sequence[Piece], *, gather: bool, ahead: int, exchange: bool) -> None:
        """Go through pieces, given in the order of the forward; `exchange`: replicas add up their gradients too."""
        pieces = pieces[::-1]
        gathers = _Gathers(self, pieces if gather else (), ahead)
        for place, piece in enumerate(pieces):
            gathers.wait(place)
            self.compute(piece.backward)
            self.reduce(piece, exchange=exchange)

    def reduce(self, piece: Piece, *, exchange: bool) -> None:
        end = self.talk(piece.scatter, self.now)
        if exchange:
            self.talk(piece.reduce, end)

    def talk(self, talk: Talk, ready: float) -> float:
        """Return when a collective that may begin at `ready` is over."""
        if not talk.seconds:
            return ready
        self.hide(talk)
        self.free[talk.link] = max(ready, self.free[talk.link]) + talk.seconds
        return self.free[talk.link]

    def hide(self, talk: Talk) -> None:
        """Count a collective that runs beside the computation."""
        self.busy[talk.link] += talk.seconds
        self.slowing[talk.link] += talk.seconds * talk.slows

    def wait(self, end: float, link: str) -> None:
        if end > self.now:
            self.spent[link] += end - self.now
            self.now = end

    def compute(self, seconds: Seconds) -> None:
        self.spent.add(seconds)
        self.now += seconds.total
        for link in (INSIDE, BETWEEN):  # collectives inside blocks, which the device waits for
            if link in seconds:
                self.busy[link] += seconds[link]
                self.waited[link] += seconds[link]

    def finish(self) -> None:
        """Wait for what is under way. Of what was hidden, each kind of collective is taken to have had its share."""
        for link in sorted(self.free, key=lambda link: self.free[link]):
            self.wait(self.free[link], link)
        for link, cost in self.slowing.items():
            if cost:
                hidden = max(0.0, self.busy[link] - self.spent[link])
                self.spent[link] += cost * hidden / (self.busy[link] - self.waited[link])


class _Gathers:
    """All-gathers, each asked for when a piece begins that is a given number of pieces ahead of its own."""

    def __init__(self, timeline: Timeline, pieces: Sequence[Piece], ahead: int) -> None:
        self.timeline, self.pieces, self.ahead = timeline, pieces, ahead
        self.ends: list[float] = []
        self._ask(ahead)

    def _ask(self, until: int) -> None:
        for piece in self.pieces[len(self.ends) : until]:
            self.ends.append(self.timeline.talk(piece.gather, self.timeline.now))

    def wait(self, place: int) -> None:
        """Wait until a piece is there; those ahead of it are asked for then."""
        if self.pieces:
            self._ask(place + 1)
            self.timeline.wait(self.ends[place], self.pieces[place].gather.link)
            self._ask(place + 1 + self.ahead)


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
    layout: Layout,
    parallel: Parallel,
    precision: Precision,
    micro_batches: int = 1,
    moments: Moments = ADAMW,
    solo: bool = False,
    replayed: bool = False,
) -> StepTime:
    """Time one optimizer step with so many micro-batches, of which `work` is one.

    `precision` names what is computed in (not auto). `solo` and `replayed` are those of one rank alone, as in
    parallel/shard.py and parallel/replay.py.
    """
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
    """The share of one rank in a step."""

    work: Work
    cluster: Cluster
    layout: Layout
    parallel: Parallel
    precision: Precision
    solo: bool
    replayed: bool

    def micro_batches(self, number: int) -> tuple[Seconds, Seconds]:
        """Return the seconds of all of them by limit, and those of each link.

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
        """Slow pieces down to what the host can launch; it runs ahead, so the whole counts and not each piece."""
        device = sum(piece.forward.total + piece.backward.total for piece in pieces)
        late = self.host() / device - 1 if device else 0.0
        if late <= 0:
            return pieces

        def slowed(seconds: Seconds) -> Seconds:
            return Seconds(seconds).add(Seconds({LAUNCHES: late * seconds.total}))

        return [replace(piece, forward=slowed(piece.forward), backward=slowed(piece.backward)) for piece in pieces]

    def _send(self, clock: Timeline) -> None:
        """Send to the next stage of a pipeline and back, hidden behind other micro-batches."""
        size = max((_stream(segment, BYTES[self.precision.compute]) for segment in self.work.segments), default=0.0)
        crosses = self.layout.data * self.layout.parts >= self.cluster.gpus_per_node
        talk = send(size / self.layout.tensor, self.cluster, crosses=crosses)
        clock.hide(Talk(2 * talk, BETWEEN if crosses else INSIDE, 1 - self.cluster.overlap))

    def _pieces(self) -> tuple[list[Piece], Piece]:
        """Return pieces in the order of the forward, and what the root gathers before and reduces after all of them."""
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
        """Count the blocks of a group: `wrap` of them, or as few as reach a bucket."""
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
        """Return gather, scatter and exchange between replicas of so many parameters."""
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
        """Return waits of one pass through a block whose tokens or heads are spread over ranks."""
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
        """Time the exchange of attention: heads are traded for tokens, or keys and values go round a ring.

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
        return self._seconds((Op("memory", 0.0, size),) if size else (), "forward")

    def update(self, moments: Moments) -> float:
        """Return seconds in which the optimizer reads and writes the state of this rank's shards."""
        shards = self.layout.shard * self.layout.context
        owned = moved = 0.0
        for segment in self.work.segments:
            ranks = shards if segment.gathered else shards * self.layout.tensor
            mine = segment.parameters * segment.count / ranks
            owned, moved = owned + mine, moved + mine * (PARAMETER + MOMENT * moments.each(segment))
        return moved / (1e9 * HOST_GB_S) if self.parallel.offload else self._moving(moved + SCALED * owned).total

    @property
    def _hooks(self) -> int:
        return HOOKS if not self.solo else CASTS if BYTES[self.precision.compute] < 4 else 0

    def host(self) -> float:
        """Return seconds to launch one micro-batch; a recorded one is launched at once."""
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
    """Return bytes of what flows from block to block: what the first product of all tokens reads."""
    shapes = [op.shape for op in segment.forward if op.kind == "gemm" and op.shape]
    rows, _, width = max(shapes, key=lambda shape: shape[0], default=(0, 0, 0))
    return rows * width * item
