"""Several hosts on one machine: network namespaces, joined by a bridge, with slow and narrow links."""

import os
import shutil
import subprocess

import pytest

from runtime import scripts
from runtime.processes import launch
from runtime.scripts import same

HOSTS, LATENCY, BANDWIDTH = 3, "4ms", "20mbit"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def slow(name):
    """A narrow link with latency; only narrow where the kernel cannot do more."""
    narrow = ["tbf", "rate", BANDWIDTH, "burst", "16kb", "limit", "1mb"]
    for kind in (["netem", "delay", LATENCY, "rate", BANDWIDTH], narrow):
        made = subprocess.run(
            ["tc", "-n", name, "qdisc", "add", "dev", "link0", "root", *kind], check=False, capture_output=True
        )
        if made.returncode == 0:
            return
    pytest.skip("the kernel has neither netem nor tbf")


@pytest.fixture
def hosts():
    """The names of the namespaces; host i has address 10.199.0.(i+1)."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("several hosts on one machine need root rights, ip and tc")
    mark = f"st{os.getpid() % 10000}"
    names = [f"{mark}-{i}" for i in range(HOSTS)]
    if ip("link", "add", mark, "type", "bridge", check=False).returncode:
        pytest.skip("no right to make a network bridge here")
    try:
        ip("link", "set", mark, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{mark}o{i}", "type", "veth", "peer", "name", "link0", "netns", name)
            ip("link", "set", f"{mark}o{i}", "master", mark, "up")
            ip("-n", name, "addr", "add", f"10.199.0.{i + 1}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            slow(name)
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
        ip("link", "del", mark, check=False)


@pytest.mark.parametrize(
    "methods",
    [["pb-lwp-sc"], pytest.param(["1f1b", "pb-lwp-sc", "pipedream", "greedy", "zb-h1"], marks=pytest.mark.slow)],
    ids=["one", "several"],
)
def test_hosts_with_slow_links_come_to_the_same_numbers(hosts, methods):
    runs = [(method, {}) for method in methods]
    extra = {"MASTER_ADDR": "10.199.0.1", "LOCAL_WORLD_SIZE": "1"}
    told = launch(HOSTS, "runtime.scripts:train_all", runs, extra=extra, timeout=300, within=hosts)
    for number, (method, options) in enumerate(runs):
        losses, weights, evaluated = scripts.train(method, workers=HOSTS, **options)
        assert all(each[number][0] == losses and each[number][2] == evaluated for each in told), method
        assert same(told[0][number][1], weights), method
