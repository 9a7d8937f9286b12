"""How long a collective takes on a cluster.

- A group of ranks is known by how many they are and how many of them share a node. Ranks fill nodes in order, so the
  members of an axis stand as far apart as the axes inside it are large
- bytes are those of the whole tensor: what all-gather ends with, what reduce-scatter and all-reduce begin with, and for
  all-to-all what one rank sends
- all-gather and reduce-scatter go round a ring: a message passes every rank, so latency grows with their number. This
  is what makes sharding over many ranks slow. All-reduce takes the faster of a ring and a tree, whose latency grows
  with the logarithm alone
- members of a group on one node use their shares of the node's network together; groups that lie side by side on a node
  share it evenly. The congestion curve says what is left of a share when so many nodes talk
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.cost.cluster import Cluster, at
from vitrail.parallel.mesh import AXES, Layout


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
    """The ranks of some axes that follow one another in the mesh, as one group."""
    places = [AXES.index(axis) for axis in axes]
    ranks = math.prod(layout.sizes[place] for place in places)
    apart = math.prod(layout.sizes[max(places) + 1 :])
    return Group(ranks, max(1, min(ranks, cluster.gpus_per_node // apart)))


def all_gather(size: float, group: Group, cluster: Cluster) -> float:
    if group.ranks == 1:
        return 0.0
    return _round(group, cluster) + _passing(size, group) / _rate(group, cluster)


def reduce_scatter(size: float, group: Group, cluster: Cluster) -> float:
    return all_gather(size, group, cluster)


def all_reduce(size: float, group: Group, cluster: Cluster) -> float:
    if group.ranks == 1:
        return 0.0
    moving = 2 * _passing(size, group) / _rate(group, cluster)
    return 2 * min(_round(group, cluster), _climb(group, cluster)) + moving


def all_to_all(size: float, group: Group, cluster: Cluster) -> float:
    """Every rank sends each other one its part; those for other nodes take the network while the rest goes on."""
    if group.ranks == 1:
        return 0.0
    part = size / group.ranks
    inside = (group.inside - 1) * part / (1e9 * cluster.inside.gb_s)
    between = (group.ranks - group.inside) * part / _share(group.nodes, cluster) if group.crosses else 0.0
    return _climb(group, cluster) + max(inside, between)


def send(size: float, cluster: Cluster, *, crosses: bool, nodes: int = 2) -> float:
    """From one rank to another."""
    if not crosses:
        return 1e-6 * cluster.inside.latency_us + size / (1e9 * cluster.inside.gb_s)
    return 1e-6 * cluster.between.latency_us + size / _share(nodes, cluster)


def _passing(size: float, group: Group) -> float:
    """Bytes that every link of a ring carries."""
    return size * (group.ranks - 1) / group.ranks


def _share(nodes: int, cluster: Cluster) -> float:
    """Bytes a second of one GPU between nodes."""
    return 1e9 * cluster.between.gb_s * at(cluster.congestion, nodes)


def _rate(group: Group, cluster: Cluster) -> float:
    """Bytes a second through the narrowest place of a ring."""
    inside = 1e9 * cluster.inside.gb_s
    if not group.crosses:
        return inside
    between = group.inside * _share(group.nodes, cluster)
    return between if group.inside == 1 else min(inside, between)


def _round(group: Group, cluster: Cluster) -> float:
    """Seconds of a short message once round the ring, less one hop."""
    across = min(group.nodes, group.ranks - 1) if group.crosses else 0
    hops = group.ranks - 1 - across
    return 1e-6 * (hops * cluster.inside.latency_us + across * cluster.between.latency_us)


def _climb(group: Group, cluster: Cluster) -> float:
    """Seconds of a short message up a tree: along the ranks of a node, then between nodes."""
    inside = (group.inside - 1) * cluster.inside.latency_us
    return 1e-6 * (inside + math.ceil(math.log2(group.nodes)) * cluster.between.latency_us)
