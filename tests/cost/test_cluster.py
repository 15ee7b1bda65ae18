"""Clusters: read back as written, those that come along, and what is refused with which words."""

import subprocess
import sys
from dataclasses import replace

import pytest

from stretto import UsageError
from stretto.cost import Cluster, Device, Group, Link, Rate, find_cluster, read_cluster, write_cluster
from stretto.cost.cluster import read_link
from stretto.cost.cluster_file import cluster_of, names, parse, to_dict, to_toml

DEVICE = Device(
    memory=8e9, memory_bandwidth=1e10, peak={"float32": 1e11, "bfloat16": 2e11}, reduction_bandwidth=5e9,
    price_per_hour=0.5, watts=65.0,
    rates={"linear": {"forward": Rate(per_call=1e-5, per_flop=1e-11, contention=1.3, residual=0.04)}},
)  # fmt: skip
NEAR, FAR, SEA = (Link(latency=a, bandwidth=b) for a, b in ((1e-5, 1e10), (1e-4, 1e8), (5e-2, 1e7)))
CLUSTER = Cluster(
    name="two sites",
    groups=(
        Group(nodes=2, workers=3, device="cpu", within="near", between="far"),
        Group(nodes=1, workers=2, device="old", within="near"),
    ),
    devices={"cpu": DEVICE, "old": Device(memory=4e9, memory_bandwidth=5e9, peak={"float32": 1e10})},
    links={"near": NEAR, "far": FAR, "sea": SEA},
    between="sea",
    sources={"links.sea": "assumed"},
)


def test_read_back_as_written(tmp_path):
    file = tmp_path / "new" / "cluster.toml"
    write_cluster(CLUSTER, file)
    assert read_cluster(file) == CLUSTER == find_cluster(str(file))
    assert [each.name for each in file.parent.iterdir()] == ["cluster.toml"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "cluster.toml"
    write_cluster(CLUSTER, file)

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.cost.cluster_file.to_toml", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_cluster(CLUSTER, file)
    assert read_cluster(file) == CLUSTER
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]


def test_who_stands_where():
    assert CLUSTER.num_workers == 8
    assert [CLUSTER.place(w).node for w in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (CLUSTER.link(0, 2), CLUSTER.link(2, 3), CLUSTER.link(3, 7), CLUSTER.link(6, 7)) == (NEAR, FAR, SEA, NEAR)
    assert CLUSTER.device(5) == DEVICE
    assert CLUSTER.device(6).peak_of("float32") == 1e10
    assert CLUSTER.crowded([0, 3, 4]) == (False, True, True)
    assert CLUSTER.price_per_hour([0, 1, 5]) == 1.5
    assert CLUSTER.price_per_hour([0, 6]) is None
    assert CLUSTER.watts([0, 1, 5]) == 195
    assert CLUSTER.watts([0, 6]) is None


@pytest.mark.parametrize(
    ("workers", "slowest"),
    [([4], None), ([0, 1], NEAR), ([0, 1, 3], FAR), ([0, 3], FAR), ([1, 6], SEA), (range(8), SEA), ([6, 7], NEAR)],
)
def test_links_among_workers_are_those_of_their_pairs(workers, slowest):
    pairs = [CLUSTER.link(a, b) for a in workers for b in workers if a < b]
    assert slowest == max(CLUSTER.links_among(workers), key=lambda link: link.seconds(1e6), default=None)
    assert set(CLUSTER.links_among(workers)) == set(pairs)


def test_of_two_links_the_slower_one_in_every_respect():
    measured = Link(latency=1e-6, bandwidth=1e9, send=2e-6, travel=3e-4, travel_per_byte=1e-12)
    slower = measured.or_slower(FAR)
    assert slower.transit == FAR.or_slower(measured).transit == (3e-4, FAR.seconds_per_byte)
    assert (slower.latency, slower.bandwidth, slower.send) == (FAR.latency, FAR.bandwidth, 2e-6)
    assert NEAR.or_slower(FAR).transit == FAR.transit
    with pytest.raises(UsageError, match=r"travel = 0.1, travel_per_byte = None: give both"):
        Link(latency=1e-6, bandwidth=1e9, travel=0.1)
    with pytest.raises(UsageError, match=r"travel = -0.1"):
        Link(latency=1e-6, bandwidth=1e9, travel=-0.1, travel_per_byte=0.0)


def test_rates_and_defaults():
    assert DEVICE.rates["linear"]["forward"].seconds(2, 1e9, 1e6) == pytest.approx(2e-5 + 1e-2)
    assert DEVICE.reduction_seconds_per_byte == 2e-10
    assert CLUSTER.devices["old"].reduction_seconds_per_byte == 3 / 5e9
    assert FAR.seconds(1e6) == pytest.approx(1e-4 + 1e-2)
    with pytest.raises(UsageError, match=r"no peak for 'float16': did you mean 'bfloat16'"):
        DEVICE.peak_of("float16")


@pytest.mark.parametrize("name", names())
def test_clusters_that_come_along_say_where_each_figure_is_from(name):
    cluster = find_cluster(name)
    figures = [f"devices.{device}.{key}" for device, each in cluster.devices.items()
               for key in ("memory", "memory_bandwidth", "peak", "price_per_hour", "watts")
               if getattr(each, key) is not None]  # fmt: skip
    for name, link in cluster.links.items():
        keys = [key for key in ("send_per_byte", "receive_per_byte", "rings", "tree") if getattr(link, key)]
        figures += [f"links.{name}.{key}" for key in ("latency", "bandwidth", *keys)]
    for device, each in cluster.devices.items():
        attained = {} if each.attained is None else vars(each.attained)
        figures += [f"devices.{device}.attained.{key}" for key, value in attained.items() if value is not None]
    for figure in figures:
        assert figure in cluster.sources or figure.rpartition(".")[0] in cluster.sources, figure
    for source in cluster.sources:
        kind, name, *_ = source.split(".")
        assert name in getattr(cluster, kind)
    assert parse(to_toml(cluster), "here") == cluster


def test_those_for_planning_on_paper():
    shapes = {
        name: (find_cluster(name).num_workers, len({p.node for p in find_cluster(name).places})) for name in names()
    }
    assert shapes == {
        "8-nodes-of-8-h100": (64, 8), "128-nodes-of-8-h100": (1024, 128), "8-a100": (8, 1), "16-workstations": (16, 16),
        "wide-area": (16, 2), "70-nodes-of-8-a100": (560, 70), "16-nodes-of-8-a100-40gb": (128, 16), "8-v100": (8, 1),
        "8-v100-16gb": (8, 1), "1-rtx-3090": (1, 1),
    }  # fmt: skip
    assert find_cluster("wide-area").link(0, 8).latency == 0.044


TEXT = to_toml(CLUSTER)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("per_call = 1e-05", "per_call = -1e-05",
         r"c.toml: devices.cpu.rates.linear.forward.per_call = -1e-05: it must be 0 or more; measure it again"),
        ("bandwidth = 10000000000.0", "bandwidth = 0", r"bandwidth = 0: it must be more than 0; take it from a data"),
        ("latency = 0.05", "latency = -0.05", r"c.toml: links.sea.latency = -0.05: it must be 0 or more"),
        ("contention = 1.3", "contention = 0.5", r"contention = 0.5: it must be 1 or more"),
        ("memory = 8000000000.0", "memory = nan", r"devices.cpu.memory = nan: it must be more than 0"),
        ("memory = 8000000000.0", "memory = true", r"devices.cpu.memory = True: a number belongs here"),
        ("memory = 8000000000.0", "mem = 8e9", r"devices.cpu.mem is no key of a cluster: did you mean 'memory'"),
        ("memory = 8000000000.0", "", r"devices.cpu.memory is missing: add it"),
        ("watts = 65.0", "watts = -1", r"devices.cpu.watts = -1: it must be 0 or more; leave it out"),
        ("watts = 65.0", "watts = nan", r"devices.cpu.watts = nan: it must be 0 or more"),
        ("watts = 65.0", "watts = 'many'", r"devices.cpu.watts = 'many': a number belongs here"),
        ("price_per_hour = 0.5", "price_per_hour = inf", r"devices.cpu.price_per_hour = inf: it must be 0 or more"),
        ("nodes = 2", "nodes = 0", r"groups\[0\].nodes = 0: it must be 1 or more"),
        ("nodes = 2", "nodes = 1000000000", r"groups has 3,000,000,\d+ workers in all: 1,000,000 at most"),
        ("nodes = 2", "nodes = 1.5", r"groups\[0\].nodes = 1.5: a whole number belongs here"),
        ('between = "far"', 'between = "fat"', r"groups\[0\].between = 'fat': there is no such link: .* 'far'"),
        (', between = "far"', "", r"groups\[0\].between is missing: name the link between the 2 nodes"),
        (', within = "near"', "", r"groups\[0\].within is missing: name the link between the 3 workers"),
        ('between = "sea"\n', "", r"c.toml: between is missing: name the link that joins the 2 groups"),
        ('device = "old"', 'device = "gold"', r"groups\[1\].device = 'gold': there is no such device: .* 'old'"),
        ("name =", "nmae =", r"c.toml: nmae is no key of a cluster: did you mean 'name'"),
        ("float32 = 100000000000.0", "float32 = 'fast'", r"cpu.peak.float32 = 'fast': a number belongs here"),
        ("[links.near]", "[links]\nnear = 3\n[links.other]", r"links.near = 3: a table belongs here"),
        ("name =", "name", r"c.toml is no TOML file"),
    ],
)  # fmt: skip
def test_mistakes_say_file_key_value_bound_and_remedy(old, new, said, tmp_path):
    assert old in TEXT
    file = tmp_path / "c.toml"
    file.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        read_cluster(file)


def test_what_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="no cluster '8-a10': did you mean '8-a100'"):
        find_cluster("8-a10")
    with pytest.raises(UsageError, match=r"no cluster in .*gone.toml: No such file.*stretto calibrate --out"):
        find_cluster(str(tmp_path / "gone.toml"))
    with pytest.raises(UsageError, match="worker 8 of cluster 'two sites', which has 8"):
        CLUSTER.device(8)


def test_clusters_tables_and_predictions_need_no_torch():
    code = (
        "import sys; from stretto.cost import find_cluster, ModelCosts, stage_times; "
        "find_cluster('8-a100').link(0, 1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_of_a_node_may_have_speeds_of_their_own():
    slow = Group(nodes=2, workers=2, device="d", speeds=(1.0, 0.5), within="l", between="l")
    device = Device(memory=1e9, memory_bandwidth=4e9, peak={"float32": 1e9}, per_action=1e-3, rates={
        "linear": {"forward": Rate(per_call=1e-6, per_flop=1e-9, contention=1.5)}})  # fmt: skip
    cluster = Cluster(name="c", groups=(slow,), devices={"d": device}, links={"l": Link(latency=0.0, bandwidth=1e9)})
    assert cluster.device(0) == cluster.device(2) == device
    half = cluster.device(3)
    assert (half.memory, half.memory_bandwidth, half.peak["float32"], half.speed) == (1e9, 2e9, 5e8, 0.5)
    assert half.per_action == 2e-3
    assert half.rates["linear"]["forward"] == Rate(per_call=2e-6, per_flop=2e-9, contention=1.5)
    assert cluster.is_uneven
    assert parse(to_toml(cluster), "here") == cluster
    with pytest.raises(UsageError, match=r"speeds = \[1.0\]: give one for each of the 2 workers"):
        Group(nodes=1, workers=2, device="d", speeds=(1.0,), within="l")
    with pytest.raises(UsageError, match="speeds lists 0: a speed is more than 0"):
        Group(nodes=1, workers=2, device="d", speeds=(1.0, 0.0), within="l")
    with pytest.raises(UsageError, match=r"groups\[0\].speeds = 2: a list of numbers belongs here"):
        cluster_of({**to_dict(cluster), "groups": [{"nodes": 1, "workers": 1, "device": "d", "speeds": 2}]})


def test_machines_are_nodes_like_those_of_the_cluster_joined_by_a_link():
    two = find_cluster("wide-area").on_machines(2, 2, "100Mbit,1ms")
    assert (two.num_workers, two.place(1).node) == (2, 1)
    assert two.link(0, 1) == Link(latency=1e-3, bandwidth=12.5e6)
    assert two.device(1) == find_cluster("wide-area").device(0)
    four = find_cluster("wide-area").on_machines(2, 8)
    assert [four.place(worker).node for worker in (3, 4)] == [0, 1]
    assert four.link(0, 1) == find_cluster("wide-area").link(0, 1)
    assert four.link(3, 4) == find_cluster("wide-area").link(0, 15)
    assert find_cluster("8-nodes-of-8-h100").on_machines(30).num_workers == 240


def test_a_link_of_a_bandwidth_alone_keeps_what_messages_cost_their_ends():
    known = Link(latency=2e-3, bandwidth=1e9, send=3e-5, send_per_byte=1e-10, receive=7e-5, contention=1.2)
    assert read_link("2.5Gbit", known) == replace(known, bandwidth=312.5e6, contention=1.0)
    assert read_link("20kbit/s,0.5s") == Link(latency=0.5, bandwidth=2500.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, None, "fast"), "link='fast': give a bandwidth and, if you like, a latency: 100Mbit,1ms"),
        ((2, None, "0Mbit"), "link='0Mbit': give a bandwidth"),
        ((0,), "machines=0: give a whole number"),
        ((3, 4), "workers=4 on 3 machines: give a multiple of 3, at most 24"),
        ((2, 18), "workers=18 on 2 machines: give a multiple of 2, at most 16"),
    ],
)
def test_machines_that_there_cannot_be_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        find_cluster("wide-area").on_machines(*arguments)


def test_machines_of_unequal_nodes_or_without_a_link_are_refused():
    cluster = find_cluster("8-a100")
    uneven = replace(
        cluster, groups=(*cluster.groups, replace(cluster.groups[0], workers=4)), between=next(iter(cluster.links))
    )
    with pytest.raises(UsageError, match=r"machines=2: nodes of cluster .* differ"):
        uneven.on_machines(2)
    with pytest.raises(UsageError, match=r"machines=2: nothing joins nodes of .*: give link=100Mbit,1ms"):
        cluster.on_machines(2)
