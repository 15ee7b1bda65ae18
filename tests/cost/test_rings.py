"""Collectives of a library: steps counted one by one, joined over nodes, and plans whose bounds stay below them."""

import pytest

from stretto import UsageError
from stretto.cost import find_cluster
from stretto.cost.cluster_file import parse, to_toml
from stretto.cost.collective import Steps, all_reduce_seconds, gather_seconds, joined_rings
from stretto.cost.stage_prediction import gradient_seconds

CLUSTER = find_cluster("70-nodes-of-8-a100")
NEAR, FAR = CLUSTER.links["nvlink"], CLUSTER.links["infiniband"]


def walked(nodes, per_node, num_bytes, protocol, passes):
    """A ring through nodes, step by step: messages wait for the slowest link that a ring crosses in a step."""
    near, far, processes = NEAR.rings[protocol], FAR.rings[protocol], nodes * per_node
    seconds, crossings = max(near.base, far.base) if nodes > 1 else near.base, passes * (nodes - 1)
    for step in range(passes * (processes - 1)):
        seconds += far.step if step < crossings else near.step
        slowest = min(near.bandwidth, per_node * far.bandwidth) if nodes > 1 else near.bandwidth
        seconds += num_bytes / processes / slowest
    return seconds


@pytest.mark.parametrize("num_bytes", [8.0, 1e5, 4e7, 1e9])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (1, 2), (2, 8), (4, 4)])
def test_the_fastest_protocol_of_a_ring_step_by_step(nodes, per_node, num_bytes):
    ranks = [8 * node + place for node in range(nodes) for place in range(per_node)]
    (link,) = CLUSTER.collective_links(ranks)
    gather = gather_seconds(link.rings, len(ranks), num_bytes)
    assert gather == pytest.approx(min(walked(nodes, per_node, num_bytes, p, 1) for p in NEAR.rings))
    both = all_reduce_seconds(link.rings, None, len(ranks), num_bytes)
    assert both == pytest.approx(min(walked(nodes, per_node, num_bytes, p, 2) for p in NEAR.rings))
    assert all_reduce_seconds(link.rings, link.tree, len(ranks), num_bytes) <= both
    assert gradient_seconds(CLUSTER, ranks, num_bytes, tensors=1) == all_reduce_seconds(
        link.rings, link.tree, len(ranks), num_bytes
    )


def test_one_process_of_each_node_has_an_adapter_and_eight_have_eight():
    (alone,), (all_eight,) = CLUSTER.collective_links(range(0, 64, 8)), CLUSTER.collective_links(range(64))
    assert alone.rings["simple"].bandwidth == FAR.rings["simple"].bandwidth
    assert all_eight.rings["simple"].bandwidth == 8 * FAR.rings["simple"].bandwidth
    assert CLUSTER.collective_links(range(8)) == [NEAR]
    assert CLUSTER.collective_links(range(64))[0] is all_eight  # the same object for the same shape


def test_a_small_sum_among_many_goes_along_a_tree_and_a_large_one_attains_the_bandwidth():
    (link,) = CLUSTER.collective_links(range(512))
    assert all_reduce_seconds(link.rings, link.tree, 512, 1e3) < all_reduce_seconds(link.rings, None, 512, 1e3) / 5
    times = [all_reduce_seconds(link.rings, link.tree, 512, size) for size in (1, 1e3, 1e6, 1e8, 1e11)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2 * 511 / 512 * 1e11 / (8 * 24e9), rel=0.06)


def test_links_without_rings_are_as_they_were():
    old = find_cluster("16-workstations")
    assert old.collective_links(range(4)) == old.links_among(range(4))
    sea = find_cluster("wide-area")
    assert sea.collective_links(range(16)) == sea.links_among(range(16))


def test_rings_are_read_back_and_checked():
    assert parse(to_toml(CLUSTER), "here").links == CLUSTER.links
    with pytest.raises(UsageError, match="bandwidth = 0: it must be more than 0 bytes/s"):
        Steps(base=0.0, step=0.0, bandwidth=0.0)
    with pytest.raises(UsageError, match="step = -1: it must be 0 or more seconds"):
        Steps(base=0.0, step=-1.0, bandwidth=1.0)


@pytest.mark.parametrize(
    ("num_bytes", "bus"), [(1 << 20, 36.2), (1 << 23, 90.0), (1 << 25, 132.8), (1 << 26, 166.6), (1 << 28, 213.9)]
)
def test_all_reduces_as_they_were_measured_on_eight_a100s(num_bytes, bus):
    """github.com/Azure/AI-benchmarking-guide, ND_A100_v4_results.md: bus bandwidth in GB/s."""
    seconds = all_reduce_seconds(NEAR.rings, NEAR.tree, 8, float(num_bytes))
    assert 2 * 7 / 8 * num_bytes / seconds / 1e9 == pytest.approx(bus, rel=0.1)


def test_a_pair_shares_fewer_links_than_a_whole_node():
    """A DGX-1: neighbours have one link of six, four of them four; of whole nodes and of others nothing changes."""
    cluster = find_cluster("8-v100-16gb")
    rings = cluster.links["nvlink"].rings
    for processes, links in ((2, 1), (4, 4), (8, 6), (3, 6)):
        large = gather_seconds(rings, processes, 1e12)
        assert large == pytest.approx((processes - 1) / processes * 1e12 / (117e9 * links / 6), rel=0.01)
    assert parse(to_toml(cluster), "x") == cluster
    pair, four = Steps(base=0, step=0, bandwidth=6, among={2: 1}), Steps(base=0, step=0, bandwidth=5, among={4: 4})
    assert pair.or_slower(four).among == {2: 1, 4: 4}
    assert joined_rings({"a": pair}, {"a": four}, 3, 2)["a"].bandwidth == 1
    with pytest.raises(UsageError, match=r"among\.1 = 3"):
        Steps(base=0, step=0, bandwidth=6, among={1: 3})
    with pytest.raises(UsageError, match="two"):
        parse(to_toml(cluster).replace("2 = 19500000000.0", "pair = 1.0"), "x")
