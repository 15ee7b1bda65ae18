"""All-reduce on point-to-point messages, by an algorithm of the caller's choice.

Runs the calls of a program on a tensor, over a process group.
"""

import os
import threading
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plan
from stretto.collectives.calibration import NOMINAL, Calibration, cheapest
from stretto.collectives.calls import START_RECEIVE, START_SEND, WAIT_SEND, Program, lower
from stretto.errors import StrettoError, UsageError
from stretto.options.checks import of_kind, one_of, refuse, whole

AUTO = "auto"
KNOWN = (*ALGORITHMS, AUTO)
PIECE = 1 << 20  # bytes of a piece of a long message
AHEAD = 2  # addends being received at a time
OWN_TAGS = 1 << 30  # the first tag of an all-reduce: users' messages have smaller ones


class CollectiveError(StrettoError):
    """A process of an all-reduce was lost, or called it with another size, type or algorithm."""


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    *,
    per_node: int | None = None,
    calibration: Calibration | None = None,
) -> Tensor:
    """Sum a CPU tensor over the processes of a group, in place; return it. The same on all of them, to the last bit.

    `algorithm`: single-master, parameter-server, ring, recursive-doubling, rabenseifner, double-tree, hierarchical, or
    auto. A node of hierarchical is `per_node` consecutive ranks; by default the launcher's number of processes per
    machine for a group of all processes, else the largest divisor of the group's size up to its square root. auto takes
    the algorithm that `calibration` (`Calibration.read(file)`) found fastest for this number of bytes; without a
    calibration the fastest one by the closed forms for processes on one machine.

    As with torch's all-reduce, all processes must call it with the same number of elements of the same type, and the
    same algorithm. Where they do not, messages do not match: nothing wrong is added, and a process that waits raises
    CollectiveError, with its own arguments, after the group's timeout. Calls in one group come one after the other;
    calls in several groups may overlap.

    Raises UsageError for anything but a dense CPU tensor of numbers, and for an unknown algorithm.
    """
    group = joined_group(group)
    check(tensor)
    one_of("algorithm", algorithm, KNOWN)
    if per_node is not None:
        whole("per_node", per_node, 1)
    if calibration is not None:
        of_kind("calibration", calibration, Calibration, "Calibration.read(file), or None")
    rank, size, length, dtype = group.rank(), group.size(), tensor.numel(), tensor.dtype
    if algorithm == AUTO:
        algorithm = algorithm_for(calibration, size, length * dtype.itemsize)
        per_node = per_node if algorithm == NESTED else None
    if algorithm == NESTED and per_node is None:
        per_node = node_size_for(group, calibration)
    program, tag = program_of(algorithm, rank, size, length, dtype, per_node)
    flat = tensor.detach().contiguous().view(-1)
    try:
        execute(program, flat, group, tag)
    except RuntimeError as error:
        raise CollectiveError(
            f"all_reduce of {length} elements of {dtype} by {algorithm} failed on rank {rank} of {size}: {error}. "
            "Either a process is gone, or they do not all reduce as many elements of one type by one algorithm"
        ) from error
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def joined_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or for None that of all processes. Raises UsageError if this process is not in it."""
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group, under torchrun")
    joined = dist.group.WORLD if group is None else group
    if not isinstance(joined, dist.ProcessGroup):
        raise UsageError(f"rank {dist.get_rank()} is not in the group: let only its members call all_reduce")
    return joined


def check(tensor: Tensor) -> None:
    """Raise UsageError for a tensor that is not on the CPU, not dense, or not of numbers."""
    if not isinstance(tensor, Tensor):
        refuse("tensor", tensor, "a tensor; it is summed in place")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UsageError(f"a {tensor.layout} tensor on {tensor.device}: only dense ones on the CPU travel over gloo")
    if tensor.dtype == torch.bool:
        raise UsageError("a tensor of torch.bool has no sum: convert it to a type of numbers")


def algorithm_for(calibration: Calibration | None, size: int, num_bytes: int) -> str:
    """The algorithm that `auto` takes among `size` processes for `num_bytes` bytes."""
    return cheapest(NOMINAL, size, num_bytes) if calibration is None else calibration.fastest(size, num_bytes)


def node_size_for(group: dist.ProcessGroup, calibration: Calibration | None) -> int | None:
    """How many ranks are a node: by the calibration, else by the launcher; None if neither fits the group."""
    if calibration is not None and calibration.workers == group.size():
        return calibration.per_node
    return launched_per_node(group.size()) if group is dist.group.WORLD else None


@lru_cache(maxsize=8)
def launched_per_node(size: int) -> int | None:
    """How many processes the launcher has started on each machine; None if unknown, or no divisor of `size`."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(text) if text.isdigit() else 0
    return count if 0 < count <= size and size % count == 0 else None


@lru_cache(maxsize=256)
def program_of(
    algorithm: str, rank: int, size: int, length: int, dtype: torch.dtype, per_node: int | None
) -> tuple[Program, int]:
    """The program of one process, and the tag of its messages, which differs between different reductions."""
    program = lower(plan(algorithm, rank, size, length, per_node=per_node), max(1, PIECE // dtype.itemsize), AHEAD)
    return program, OWN_TAGS | crc32(f"{algorithm} {per_node} {length} {dtype}".encode()) % OWN_TAGS


class PointToPoint(Protocol):
    """The methods of a process group that `execute` needs. Messages with one tag arrive in the order they were sent."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Start a send; returns a work object with a method `wait`."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Start a receive; returns a work object with a method `wait`."""


class Spare(threading.local):
    """Spare memory for addends, kept by a thread for its next call: allocating pages costs more than the additions.

    It is a few pieces long, whatever the size of the tensors.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor [length] in the spare memory, for one call."""
        size = length * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype)

    def drop(self) -> None:
        """Release the memory after a failure: a late message may still be written into it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


_spare = Spare()


def execute(program: Program, flat: Tensor, transport: PointToPoint, tag: int) -> None:
    """Run a program on the contiguous tensor `flat` [elements], in place. Errors of the transport pass through."""
    spare = _spare.take(program.spare, flat.dtype) if program.spare else flat
    try:
        _run(program, flat, spare, transport, tag)
    except BaseException:
        _spare.drop()
        raise


def _run(program: Program, flat: Tensor, spare: Tensor, transport: PointToPoint, tag: int) -> None:
    length = flat.numel()
    works: list[Any] = [None] * program.num_messages
    addends: dict[int, Tensor] = {}
    for kind, number, peer, start, stop, offset in program.calls:
        if kind == WAIT_SEND:
            works[number].wait()
            continue
        part = flat if stop - start == length else flat[start:stop]
        if kind == START_SEND:
            works[number] = transport.send([part], peer, tag)
        elif kind == START_RECEIVE:
            if offset is not None:
                part = addends[number] = spare[offset : offset + stop - start]
            works[number] = transport.recv([part], peer, tag)
        else:
            works[number].wait()
            if offset is not None:
                part.add_(addends.pop(number))
