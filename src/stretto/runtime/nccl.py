"""Values that go from one device to another without passing the host: NCCL, where every process has a GPU of its own.

What a message is and whose it is still goes from host to host: it tells the receiver what to expect, so that nothing
occupies a GPU before its sender has sent. Every channel has a communicator of its own, so that no channel waits for
another, whatever the order in which their ends are used.
"""

import hashlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.runtime.serialize import pack
from stretto.runtime.world import told_by_all

IDENTITY = 16  # bytes


class Direct:
    """One end of a channel between two devices."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._peer = 1 - dist.get_rank(group)
        # torch declares no types here.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, value: Any, size: int) -> tuple["Sending", Tensor]:
        """Send a value of `size` bytes; what to wait on, and the memory it leaves from."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        pack(value, buffer)
        work = dist.isend(buffer, group=self._group, group_dst=self._peer)
        return Sending(work, self._stream), buffer

    def receive(self, size: int) -> Tensor:
        """The bytes of a value. On CUDA they may still be on their way: the current stream waits for them."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = dist.irecv(buffer, group=self._group, group_src=self._peer)
        assert work is not None, "a process group of two"
        work.wait()
        return buffer


class Sending:
    """A message that leaves a device."""

    def __init__(self, work: Any, stream: torch.cuda.Stream | None) -> None:
        self._work = work
        self._stream = stream

    def wait(self) -> None:
        """Wait in this thread until it has been taken. What the device computes meanwhile does not wait."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._work.wait()
        if self._stream is not None:
            self._stream.synchronize()


def backend_between(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend by which the devices of a group reach each other; None where values go through the host.

    A collective. NCCL wants a GPU for each process.
    """
    told = told_by_all(group, identity(device))
    return "nccl" if len(set(told)) == len(told) and bytes(IDENTITY) not in told else None


def identity(device: torch.device) -> bytes:
    """What tells a GPU that NCCL can use from all others, on any machine; zeros for any other device."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return bytes(IDENTITY)
    name = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.blake2b(name.encode(), digest_size=IDENTITY).digest()
