"""Worlds: processes that train together, one job after the other, for as long as pytest runs.

Each has the variables that a launcher sets. For each job they meet at a port of its own, and part after it.
"""

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import random
import select
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.nursery import Forked
from stretto.runtime import job_member

TESTS = Path(__file__).resolve().parents[1]
REST = 25  # jobs after which a world is made anew: a Trainer leaves threads and sockets in its process
worlds: dict[int, "World"] = {}


class WorldError(Exception):
    """What the processes said instead of a result."""


def world(size):
    """The world of so many processes: that of the last job, unless that one failed or it has done enough."""
    if size in worlds and worlds[size].done >= REST:
        worlds.pop(size).end()
    return worlds.get(size) or worlds.setdefault(size, World(size))


def do(size, target, *args, seconds=120.0):
    """Call `target` ("module:function") in each of `size` processes; what each returned, in order of ranks.

    Raises WorldError if one fails, and the world ends.
    """
    try:
        return world(size).do(target, *args, seconds=seconds)
    except BaseException:
        worlds.pop(size).end()
        raise


def end_all():
    """No world is left."""
    for size in list(worlds):
        worlds.pop(size).end()


def reserved_port():
    """A socket that keeps its port from everybody but those who listen on it by its number, and that number."""
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper, keeper.getsockname()[1]


class World:
    """`size` processes. What one of them cannot do ends all of them."""

    def __init__(self, size):
        self.size, self.done = size, 0
        self.folder = tempfile.TemporaryDirectory()
        door = f"{self.folder.name}/door"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(size)
            listener.settimeout(120)
            self.processes, wires = [], {}
            for rank in range(size):
                environment = {
                    **os.environ, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                    "TMPDIR": self.folder.name,  # what a killed process leaves goes with its world
                }  # fmt: skip
                self.processes.append(Forked([sys.executable, __file__, door], environment, server=False))
            while len(wires) < size:
                wire = listener.accept()[0]
                wires[receive(wire)] = wire
        self.wires = [wires[rank] for rank in range(size)]
        atexit.register(self.end)

    def do(self, target, *args, seconds=60.0):
        """Call `target` ("module:function") in each process; what each returned. Raises WorldError if one fails."""
        self.done += 1
        keeper, port = reserved_port()
        with keeper:
            return self._do(port, target, args, seconds)

    def _do(self, port, target, args, seconds):
        for wire in self.wires:
            send(wire, (port, target, args))
        told, until = {}, time.monotonic() + seconds
        while len(told) < self.size:
            waiting = {wire: rank for rank, wire in enumerate(self.wires) if rank not in told}
            ready = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise WorldError(f"processes {sorted(waiting.values())} have not ended after {seconds} s; {said(told)}")
            for wire in ready:
                told[waiting[wire]] = receive(wire)
            if any(not good for good, _ in told.values()):
                until = min(until, time.monotonic() + 20)
        if not all(good for good, _ in told.values()):
            raise WorldError(said(told))
        return [told[rank][1] for rank in range(self.size)]

    def end(self):
        """No process is left."""
        atexit.unregister(self.end)
        for wire in self.wires:
            wire.close()
        for process in self.processes:
            process.kill()
            process.communicate(20)
        self.folder.cleanup()


def said(told):
    return "\n".join(f"process {rank}: {text}" for rank, (good, text) in sorted(told.items()) if not good)


def send(wire, value):
    content = pickle.dumps(value)
    wire.sendall(struct.pack("!q", len(content)) + content)


def receive(wire):
    try:
        return pickle.loads(exactly(wire, struct.unpack("!q", exactly(wire, 8))[0]))
    except EOFError:
        return False, "ended without a word"


def exactly(wire, size):
    content = b""
    while len(content) < size:
        part = wire.recv(size - len(content))
        if not part:
            raise EOFError
        content += part
    return content


def serve(wire):
    """Do what comes until nothing can come any more."""
    while True:
        try:
            port, target, args = pickle.loads(exactly(wire, struct.unpack("!q", exactly(wire, 8))[0]))
        except EOFError:
            return
        module, _, function = target.partition(":")
        try:
            with as_at_first():
                os.environ["MASTER_PORT"] = str(port)
                answer = True, getattr(importlib.import_module(module), function)(*args)
                part()
            gc.collect()  # trainers in circles: their threads and sockets
        except BaseException:  # noqa: BLE001 (told, and judged by who asked)
            answer = False, traceback.format_exc()
        send(wire, answer)


def part():
    """Leave this job's process group as a process does that ends."""
    for member in job_member._members:
        atexit.unregister(member._leave)
        member._leave()
        sys.excepthook = member._excepthook
    job_member._members.clear()
    if dist.is_initialized():  # by the job itself
        dist.destroy_process_group()


@contextlib.contextmanager
def as_at_first():
    """The state of a new process, for a job; what the job changes of its environment and its folder is undone."""
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path


if __name__ == "__main__":
    torch.set_num_threads(1)
    to_starter = socket.socket(socket.AF_UNIX)
    to_starter.connect(sys.argv[1])
    send(to_starter, int(os.environ["RANK"]))
    gc.freeze()
    serve(to_starter)
    os._exit(0)
