"""Values that go from one device to another without passing the host: NCCL, where every process has a GPU of its own.

What a message is and whose it is still goes from host to host: it tells the receiver what to expect, so that nothing
occupies a GPU before its sender has sent. Every channel has a communicator of its own, so that no channel waits for
another, whatever the order in which their ends are used.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.nn.devices import direct_backend, own_stream, running_on, serial_number
from stretto.runtime.serialize import pack
from stretto.runtime.world import all_gather_bytes

IDENTITY = 16  # bytes
KIND = 4  # of them say which backend


class Direct:
    """One end of a channel between two devices."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._peer = 1 - dist.get_rank(group)
        self._stream = own_stream(device)

    def send(self, value: Any, size: int) -> tuple["Sending", Tensor]:
        """Send a value of `size` bytes; what to wait on, and the memory it leaves from."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        pack(value, buffer)
        work = dist.isend(buffer, group=self._group, group_dst=self._peer)
        return Sending(work, self._stream), buffer

    def receive(self, size: int) -> Tensor:
        """The bytes of a value. They may still be on their way: the current stream waits for them."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = dist.irecv(buffer, group=self._group, group_src=self._peer)
        assert work is not None, "a process group of two"
        work.wait()
        return buffer


class Sending:
    """A message that leaves a device."""

    def __init__(self, work: Any, stream: torch.Stream | None) -> None:
        self._work = work
        self._stream = stream

    def wait(self) -> None:
        """Wait in this thread until it has been taken. What the device computes meanwhile does not wait."""
        with running_on(self._stream):
            self._work.wait()
        if self._stream is not None:
            self._stream.synchronize()


def backend_between(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend by which the devices of a group reach each other; None where values go through the host.

    A collective. NCCL wants a GPU for each process.
    """
    told = all_gather_bytes(group, identity(device))
    differ = len(set(told)) == len(told) and bytes(IDENTITY) not in told
    return direct_backend(device) if differ and len({one[:KIND] for one in told}) == 1 else None


def identity(device: torch.device) -> bytes:
    """What tells a device from all others, on any machine, its backend first; zeros where it has neither."""
    backend, name = direct_backend(device), serial_number(device)
    if backend is None or name is None:
        return bytes(IDENTITY)
    parts = (backend, KIND), (name, IDENTITY - KIND)
    return b"".join(hashlib.blake2b(text.encode(), digest_size=size).digest() for text, size in parts)
