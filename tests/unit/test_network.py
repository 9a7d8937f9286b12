"""Seconds of collectives: what they grow with, where groups lie, and limits that are known by hand."""

import dataclasses

import pytest

from vitrail.cost.cluster import Cluster, Link, load_cluster
from vitrail.cost.step import Group, all_gather, all_reduce, all_to_all, group_of, reduce_scatter, send
from vitrail.parallel.mesh import Layout

GB = 1e9


def cluster(**changes: object) -> Cluster:
    links = {"inside": Link(10.0, 100.0), "between": Link(20.0, 5.0), "congestion": ((1.0, 1.0),)}
    links["hop_congestion"] = ((1.0, 1.0),)
    return dataclasses.replace(load_cluster("frontier"), gpus_per_node=8, nodes=1000, **(links | changes))


def test_groups_lie_where_ranks_do() -> None:
    layout = Layout(replicate=16, shard=4, reshard=True, tensor=2)  # 128 ranks, 16 nodes of 8
    assert group_of(layout, ("tensor",), cluster()) == Group(2, 2)
    assert group_of(layout, ("shard", "context"), cluster()) == Group(4, 4)
    assert group_of(layout, ("replicate",), cluster()) == Group(16, 1)
    assert group_of(layout, ("shard", "context", "tensor"), cluster()) == Group(8, 8)
    assert group_of(Layout(1, 64, True), ("shard", "context"), cluster()).nodes == 8
    assert group_of(Layout(64, 1, False), ("replicate",), cluster()) == Group(64, 8)
    assert not Group(8, 8).crosses
    assert Group(16, 8).crosses


def test_one_rank_talks_to_nobody() -> None:
    for collective in (all_gather, reduce_scatter, all_reduce, all_to_all):
        assert collective(GB, Group(1, 1), cluster()) == 0


def test_large_tensors_take_their_bytes() -> None:
    size = 100 * GB
    assert all_gather(size, Group(8, 8), cluster()) == pytest.approx(7 / 8, rel=1e-3)  # at 100 GB/s
    assert all_reduce(size, Group(8, 8), cluster()) == pytest.approx(2 * 7 / 8, rel=1e-3)
    # Eight GPUs of a node have 40 GB/s of network together; one that talks alone has its share.
    assert all_gather(size, Group(64, 8), cluster()) == pytest.approx(63 / 64 * 2.5, rel=1e-2)
    assert all_gather(size, Group(8, 1), cluster()) == pytest.approx(7 / 8 * 20, rel=1e-2)
    assert all_to_all(size, Group(16, 8), cluster()) == pytest.approx(8 / 16 * 20, rel=1e-2)
    assert send(size, cluster(), crosses=True) == pytest.approx(20, rel=1e-3)
    assert send(size, cluster(), crosses=False) == pytest.approx(1, rel=1e-3)


def test_short_messages_take_their_hops() -> None:
    ring = {n: all_gather(8, Group(n, 8), cluster()) for n in (64, 512)}
    assert ring[512] == pytest.approx(8 * ring[64], rel=0.05)  # a message passes every rank
    tree = {n: all_reduce(8, Group(n, 8), cluster()) for n in (64, 512)}
    assert tree[512] < 2 * tree[64]  # and climbs a tree in log2 steps
    assert tree[512] < ring[512]


def test_the_network_never_beats_the_node() -> None:
    fast = cluster(between=Link(20.0, 50.0))  # 400 GB/s a node, but 100 to each GPU
    assert all_gather(GB, Group(64, 8), fast) >= GB * 63 / 64 / (100 * GB)


def test_hops_get_slower_where_many_nodes_talk() -> None:
    """By far more than rings get longer; trees feel it, too."""
    jammed = cluster(hop_congestion=((64.0, 1.0), (128.0, 0.25)))
    for nodes, slower in ((64, 1), (128, 4)):
        group = Group(nodes, 1)
        assert all_gather(8, group, jammed) == pytest.approx(slower * all_gather(8, group, cluster()), rel=1e-3)
        assert all_reduce(8, group, jammed) == pytest.approx(slower * all_reduce(8, group, cluster()), rel=1e-3)
    assert send(8, jammed, crosses=True, nodes=128) == pytest.approx(4 * send(8, cluster(), crosses=True), rel=1e-3)


def test_congestion_takes_its_share() -> None:
    jammed = cluster(congestion=((1.0, 1.0), (8.0, 0.5)))
    assert all_gather(100 * GB, Group(64, 8), jammed) == pytest.approx(
        2 * all_gather(100 * GB, Group(64, 8), cluster()), rel=1e-2
    )
