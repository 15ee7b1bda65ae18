"""Teams of processes that wait for their turn, on this machine or on hosts that narrow links join; other programs' CPU.

What several benchmarks and studies share. A folder that imports it puts this one on sys.path and on PYTHONPATH, so that
the processes which its fork server starts find it, too.
"""

import contextlib
import ctypes
import multiprocessing
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
LAST = 10.0  # seconds that a process may take to end before it is killed
Task = Callable[[], tuple[Any, Callable[[Any], Any]]]


class Wire(NamedTuple):
    """What joins hosts, each a network namespace with one end: the bandwidth of each end in both directions.

    Two hosts have a wire between them, more of them one each to a switch.
    """

    name: str
    megabits: int
    num_hosts: int = 2

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the namespaces, of this process's own."""
        return tuple(f"st{os.getpid()}-{self.name}-{chr(ord('a') + number)}" for number in range(self.num_hosts))

    @property
    def switch(self) -> str | None:
        """The name of the namespace that has the switch, where there is one."""
        return f"st{os.getpid()}-{self.name}-switch" if self.num_hosts > 2 else None


@contextlib.contextmanager
def laid(wire: Wire) -> Iterator[Wire]:
    """The wire for a while. Raises CalledProcessError without root rights, OSError without the commands."""
    places = [*wire.hosts, *([wire.switch] if wire.switch else [])]
    try:
        for place in places:
            command("ip", "netns", "add", place)
        _join(wire)
        for number, host in enumerate(wire.hosts):
            command("ip", "-n", host, "addr", "add", f"10.198.0.{number + 1}/24", "dev", "wire")
            command("ip", "-n", host, "link", "set", "wire", "mtu", "9000", "up")
            command("ip", "-n", host, "link", "set", "lo", "up")
            bucket = ("rate", f"{wire.megabits}mbit", "burst", "20kb", "latency", "400ms")
            command("tc", "-n", host, "qdisc", "add", "dev", "wire", "root", "tbf", *bucket)
        yield wire
    finally:
        for place in places:
            subprocess.run(["ip", "netns", "del", place], check=False, capture_output=True)


def _join(wire: Wire) -> None:
    """Give each host its end, called "wire". The ends at a switch are narrow, too: what a host receives."""
    if wire.switch is None:
        one, other = wire.hosts
        command("ip", "link", "add", "wire", "netns", one, "type", "veth", "peer", "name", "wire", "netns", other)
        return
    command("ip", "-n", wire.switch, "link", "add", "name", "switch", "mtu", "9000", "type", "bridge")
    command("ip", "-n", wire.switch, "link", "set", "switch", "up")
    bucket = ("rate", f"{wire.megabits}mbit", "burst", "20kb", "latency", "400ms")
    for number, host in enumerate(wire.hosts):
        port, ends = f"port{number}", ("type", "veth", "peer", "name", "wire", "netns", host)
        command("ip", "link", "add", port, "netns", wire.switch, *ends)
        command("ip", "-n", wire.switch, "link", "set", port, "mtu", "9000", "master", "switch", "up")
        command("tc", "-n", wire.switch, "qdisc", "add", "dev", port, "root", "tbf", *bucket)


def command(*words: str) -> None:
    """Run a command. Raises CalledProcessError with what it said."""
    subprocess.run(words, check=True, capture_output=True, text=True)


class Team:
    """Processes of one task, as torchrun would start them. They wait for the conductor's word without a core.

    `task` is called in each of them once they have a process group (none for a single process); what it returns first
    is in `ready`, and its function answers what is asked. With a wire each process is on a host of its own. `pinned`
    keeps each on the core of its rank.
    """

    _ports = iter(range(29400, 29900))  # of a wire's first host, which has nobody else

    def __init__(self, task: Task, wire: Wire | None = None, *, num_processes: int = 2, pinned: bool = True) -> None:
        self._store = None
        if wire is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = next(self._ports) if self._store is None else self._store.port
        ends = [mp.Pipe() for _ in range(num_processes)]
        self._ends = [mine for mine, _ in ends]
        self._processes = []
        for rank, (_, theirs) in enumerate(ends):
            context = mp.get_context("forkserver")
            place = _Place(rank, num_processes, port, None if wire is None else wire.hosts[rank], pinned)
            self._processes.append(context.Process(target=enter, args=(place, task, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()
        try:
            self.ready = self.hear()
        except BaseException:
            self.stop()
            raise

    def ask(self, what: Any) -> list[Any]:
        """Let all do something; what each answers."""
        for end in self._ends:
            end.send(what)
        return self.hear()

    def hear(self) -> list[Any]:
        """What all say. Raises EOFError if one has ended."""
        return [end.recv() for end in self._ends]

    def end(self) -> None:
        """Let all end."""
        for each in self._ends:
            each.close()

    def stop(self) -> None:
        """End all of them, whatever they are at, and wait."""
        self.end()
        for act in (multiprocessing.Process.terminate, multiprocessing.Process.kill):
            for process in self._processes:
                act(process)
            for process in self._processes:
                process.join(LAST)


class _Place(NamedTuple):
    """Where a process of a team stands."""

    rank: int
    size: int
    port: int
    host: str | None
    pinned: bool


def enter(place: _Place, task: Task, end: Connection) -> None:
    """What a process of a team does, until nobody is there."""
    rank, size, port, host, pinned = place
    own = {"RANK": rank, "LOCAL_RANK": 0 if host else rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 1 if host else size}
    if size > 1:
        os.environ.update({name: str(value) for name, value in {**own, "MASTER_PORT": port}.items()})
    if host is None:
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    else:
        os.environ.update(MASTER_ADDR="10.198.0.1", GLOO_SOCKET_IFNAME="wire")
        move(host)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if pinned:
        pin(rank)
    torch.set_num_threads(1)
    if size > 1:
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
