"""Processes that train together, one case after the other: started once, as forks of one that has imported torch."""

import atexit
import importlib
import os
import pickle
import select
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

from runtime.nursery import Forked

TESTS = Path(__file__).resolve().parents[2]


class PoolError(Exception):
    """What the processes said instead of a result."""


class Pool:
    """`size` processes with the variables that a launcher sets. What one of them cannot do ends all of them."""

    def __init__(self, size):
        self.size, self.done = size, 0
        self.folder = tempfile.TemporaryDirectory()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        door = f"{self.folder.name}/door"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(size)
            listener.settimeout(120)
            self.processes, wires = [], {}
            for rank in range(size):
                environment = {
                    **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
                    "TMPDIR": self.folder.name,  # what a killed process leaves goes with the pool
                }  # fmt: skip
                self.processes.append(Forked([sys.executable, __file__, door], environment))
            while len(wires) < size:
                wire = listener.accept()[0]
                wires[receive(wire)] = wire
        self.wires = [wires[rank] for rank in range(size)]
        atexit.register(self.end)

    def do(self, target, *args, seconds=60.0):
        """Call `target` ("module:function") in each process; what each returned. Raises PoolError if one fails."""
        self.done += 1
        for wire in self.wires:
            send(wire, (target, args))
        told, until = {}, time.monotonic() + seconds
        while len(told) < self.size:
            waiting = {wire: rank for rank, wire in enumerate(self.wires) if rank not in told}
            ready = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                raise PoolError(f"processes {sorted(waiting.values())} have not ended after {seconds} s; {said(told)}")
            for wire in ready:
                told[waiting[wire]] = receive(wire)
            if any(not good for good, _ in told.values()):
                until = min(until, time.monotonic() + 20)
        if not all(good for good, _ in told.values()):
            raise PoolError(said(told))
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
            target, args = pickle.loads(exactly(wire, struct.unpack("!q", exactly(wire, 8))[0]))
        except EOFError:
            return
        module, _, function = target.partition(":")
        try:
            answer = True, getattr(importlib.import_module(module), function)(*args)
        except BaseException:  # noqa: BLE001 (told, and judged by who asked)
            answer = False, traceback.format_exc()
        send(wire, answer)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    to_starter = socket.socket(socket.AF_UNIX)
    to_starter.connect(sys.argv[1])
    send(to_starter, int(os.environ["RANK"]))
    serve(to_starter)
    os._exit(0)
