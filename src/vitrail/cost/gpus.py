"""How many GPUs a plan is for: a number or a range, in whole nodes. Without torch: what is wrong is told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vitrail.cost.cluster import Cluster
from vitrail.errors import UserError


def check_gpus(cluster: Cluster, gpus: int) -> None:
    """A number of GPUs that the cluster can give, in whole nodes."""
    per_node = cluster.gpus_per_node
    if not 1 <= gpus <= cluster.gpus:
        raise UserError(
            f"--gpus {gpus}: cluster {cluster.name} has "
            + (
                f"{cluster.gpus:,} GPUs ({cluster.nodes:,} nodes of {per_node}); choose 1 to {cluster.gpus}"
                if cluster.gpus > 1
                else "one GPU; choose 1"
            )
        )
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        raise UserError(
            f"--gpus {gpus}: nodes of cluster {cluster.name} have {per_node} GPUs each; choose {below} or "
            f"{min(below + per_node, cluster.gpus)}"
        )


def read_gpus(text: str, cluster: Cluster) -> list[int]:
    """A number, or the powers of two times a node's GPUs between two numbers and these themselves."""
    found = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text.strip())
    if not found or (found[2] and int(found[2]) < int(found[1])):
        raise UserError(f"--gpus {text}: expected a number such as 64, or a range from less to more such as 8..512")
    first, last = int(found[1]), int(found[2] or found[1])
    for number in (first, last):
        check_gpus(cluster, number)
    sizes = (cluster.gpus_per_node * 2**power for power in range(-10, 31))
    between = {int(size) for size in sizes if size == int(size) and first < size < last}
    return sorted({first, last} | between)


def more_gpus(cluster: Cluster, gpus: int) -> Iterator[int]:
    """This number and larger ones: powers of two in a node, then of whole nodes, in the end all that there are."""
    yield gpus
    inside = (2**power for power in range(cluster.gpus_per_node.bit_length()))
    nodes = (cluster.gpus_per_node * 2**power for power in range(cluster.nodes.bit_length()))
    for number in sorted({*inside, *nodes, cluster.gpus}):
        if number > gpus:
            yield number
