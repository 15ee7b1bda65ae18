"""Pairs of processes that wait for their turn, on this machine or on two hosts that a narrow wire joins."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NEWNET = 0x40000000  # setns(2)'s CLONE_NEWNET
PROBES = 8
Task = Callable[[], tuple[Any, Callable[[Any], Any]]]


class Wire(NamedTuple):
    """What joins two hosts, each a network namespace with one end: its bandwidth in both directions."""

    name: str
    megabits: int

    @property
    def hosts(self) -> tuple[str, str]:
        """The names of the namespaces, of this process's own."""
        return tuple(f"st{os.getpid()}-{self.name}-{end}" for end in "ab")  # type: ignore[return-value]


@contextlib.contextmanager
def laid(wire: Wire) -> Iterator[Wire]:
    """The wire for a while. Raises CalledProcessError without root rights."""
    first, second = wire.hosts
    try:
        for host in wire.hosts:
            command("ip", "netns", "add", host)
        command("ip", "link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
        for number, host in enumerate(wire.hosts):
            command("ip", "-n", host, "addr", "add", f"10.198.0.{number + 1}/24", "dev", "wire")
            command("ip", "-n", host, "link", "set", "wire", "mtu", "9000", "up")
            command("ip", "-n", host, "link", "set", "lo", "up")
            bucket = ("rate", f"{wire.megabits}mbit", "burst", "20kb", "latency", "400ms")
            command("tc", "-n", host, "qdisc", "add", "dev", "wire", "root", "tbf", *bucket)
        yield wire
    finally:
        for host in wire.hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Pair:
    """Two processes of one task, as torchrun would start them. They wait for the conductor's word without a core."""

    _ports = iter(range(29400, 29900))  # of a wire's first host, which has nobody else

    def __init__(self, task: Task, wire: Wire | None = None) -> None:
        self._store = None
        if wire is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = next(self._ports) if self._store is None else self._store.port
        ends = [mp.Pipe() for _ in range(2)]
        self._ends = [mine for mine, _ in ends]
        for rank, (_, theirs) in enumerate(ends):
            context = mp.get_context("forkserver")
            host = None if wire is None else wire.hosts[rank]
            context.Process(target=enter, args=(rank, port, host, task, theirs), daemon=True).start()
            theirs.close()
        self.ready = self.hear()

    def ask(self, what: Any) -> list[Any]:
        """Let both do something; what each answers."""
        for end in self._ends:
            end.send(what)
        return self.hear()

    def hear(self) -> list[Any]:
        """What both say."""
        return [end.recv() for end in self._ends]

    def end(self) -> None:
        """Let both end."""
        for each in self._ends:
            each.close()


def enter(rank: int, port: int, host: str | None, task: Task, end: Connection) -> None:
    """What a process of a pair does, until nobody is there."""
    own = {"RANK": rank, "LOCAL_RANK": 0 if host else rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1 if host else 2}
    os.environ.update({name: str(value) for name, value in {**own, "MASTER_PORT": port}.items()})
    if host is None:
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    else:
        os.environ.update(MASTER_ADDR="10.198.0.1", GLOO_SOCKET_IFNAME="wire")
        move(host)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    first, answer = task()
    end.send(first)
    while True:
        try:
            asked = end.recv()
        except EOFError:
            return
        end.send(answer(asked))


def move(host: str) -> None:
    """Move this thread, and those that it starts from here on, to another host."""
    with Path("/var/run/netns", host).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot move to network namespace {host}")


def pin(rank: int) -> None:
    """Keep this thread, and those that it starts from here on, on the core of its rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def probe() -> float:
    """Seconds of a small fixed product on this process's core just now."""
    factor = torch.ones(384, 384)
    torch.mm(factor, factor)
    begin = time.perf_counter()
    for _ in range(PROBES):
        torch.mm(factor, factor)
    return (time.perf_counter() - begin) / PROBES


def spread(values: Sequence[float]) -> float:
    """How much more than the least the most is."""
    return max(values) / min(values) - 1
