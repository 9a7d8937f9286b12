"""The clock of one rank: computation, and collectives that run beside it.

Groups of blocks are gathered ahead of their use, and gradients reduced behind it. Collectives queue up on their link:
that inside a node, or the network between nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vitrail.cost.network import Group
from vitrail.cost.roofline import Seconds

INSIDE, BETWEEN = "network inside nodes", "network between nodes"


def link_of(group: Group) -> str:
    return BETWEEN if group.crosses else INSIDE


@dataclass(frozen=True)
class Talk:
    """A collective: how long, on which link, and what share of it slows the computation that hides it."""

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
        """Pieces in the order of the forward; `exchange`: replicas add up their gradients too."""
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
        """When a collective that may begin at `ready` is over."""
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
    """All-gathers that are asked for when so many pieces before their own one begin."""

    def __init__(self, timeline: Timeline, pieces: Sequence[Piece], ahead: int) -> None:
        self.timeline, self.pieces, self.ahead = timeline, pieces, ahead
        self.ends: list[float] = []
        self._ask(ahead)

    def _ask(self, until: int) -> None:
        for piece in self.pieces[len(self.ends) : until]:
            self.ends.append(self.timeline.talk(piece.gather, self.timeline.now))

    def wait(self, place: int) -> None:
        """Until a piece is there; those ahead of it are asked for then."""
        if self.pieces:
            self._ask(place + 1)
            self.timeline.wait(self.ends[place], self.pieces[place].gather.link)
            self._ask(place + 1 + self.ahead)
