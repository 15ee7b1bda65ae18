"""All-reduce on point-to-point messages, by an algorithm of the caller's choice.

A plan is lowered to a program, calls of send, receive and wait, long messages in pieces. The calls run on a tensor,
over a process group.

A call that may wait never comes earlier than in the plan, so a program is as free of deadlock as its plan. A call that
does not wait comes as early as possible: a piece is sent right after the last receive that changes it, while the rest
of its message is still coming; receives start before their message comes. An addend is received in spare memory, of
which there is a fixed amount, and added once earlier sends of the same elements are complete. A message that overwrites
is received directly in the tensor: it holds the sum, which is complete only after all sends of its parts.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plan
from stretto.collectives.calibration import NOMINAL, Calibration, cheapest
from stretto.collectives.step import ADD, SEND, SET, Step
from stretto.errors import StrettoError, UsageError
from stretto.options.checks import of_kind, one_of, refuse, whole

# A wait for a receive also adds the message, if it is an addend.
START_SEND, WAIT_SEND, START_RECEIVE, WAIT_RECEIVE = range(4)


class MessageCall(NamedTuple):
    """One call about message `number` of a program: elements [start, stop), to or from `peer`.

    `spare` is the first element of the spare memory into which an addend is received; None for all other messages.
    """

    kind: int
    number: int
    peer: int
    start: int
    stop: int
    spare: int | None


class Program(NamedTuple):
    """The calls of one process, its number of messages, and the elements of spare memory that it needs."""

    calls: tuple[MessageCall, ...]
    num_messages: int
    spare: int


class MessagePiece(NamedTuple):
    """A piece of a step's message, and how many receives must be complete before it is sent."""

    step: Step
    num_receives: int


def lower(steps: Sequence[Step], piece: int, ahead: int) -> Program:
    """The program of a plan: messages in pieces of `piece` elements, at most `ahead` addends received at a time."""
    lowering = Lowering(list(pieces_of(steps, piece)), ahead)
    for number in lowering.receives:
        lowering.start_all()
        lowering.wait_receive(number)
    lowering.start_all()
    lowering.wait_sends(sorted(lowering.under_way))
    return Program(tuple(lowering.calls), len(lowering.pieces), lowering.spare)


def pieces_of(steps: Sequence[Step], piece: int) -> Iterator[MessagePiece]:
    """The pieces of all messages, in the plan's order."""
    received: list[Step] = []
    for step in steps:
        for part in cut(step, piece):
            if step.kind == SEND:
                last = next((i for i in range(len(received) - 1, -1, -1) if received[i].overlaps(part)), -1)
                yield MessagePiece(part, last + 1)
            else:
                received.append(part)
                yield MessagePiece(part, 0)


def cut(step: Step, piece: int) -> list[Step]:
    """A step in parts of `piece` elements; the last one is up to half a piece longer or shorter."""
    num_parts = max(1, (step.length + piece // 2) // piece)
    bounds = [*(step.start + i * piece for i in range(num_parts)), step.stop]
    return [step._replace(start=start, stop=stop) for start, stop in pairwise(bounds)]


class Lowering:
    """The calls so far, and the messages that have not been started."""

    def __init__(self, pieces: Sequence[MessagePiece], ahead: int) -> None:
        self.pieces = pieces
        self.receives = [i for i, piece in enumerate(pieces) if piece.step.kind != SEND]
        self.calls: list[MessageCall] = []
        self.under_way: set[int] = set()  # sends that have been started and not waited for
        addends = [i for i in self.receives if pieces[i].step.kind == ADD]
        longest = max((pieces[i].step.length for i in addends), default=0)
        self.spare = min(ahead, len(addends)) * longest
        self._spares = {number: i % ahead * longest for i, number in enumerate(addends)}
        self._free = ahead  # spare slots, one for each addend being received
        self._num_received = 0
        self._to_receive = deque(self.receives)
        self._to_send = [i for i, piece in enumerate(pieces) if piece.step.kind == SEND]

    def start_all(self) -> None:
        """Start all sends and receives that can be started now."""
        while self._to_receive and (self._free or self.pieces[self._to_receive[0]].step.kind == SET):
            self._free -= self.pieces[self._to_receive[0]].step.kind == ADD
            self._call(START_RECEIVE, self._to_receive.popleft())
        self._start_sends()

    def wait_receive(self, number: int) -> None:
        """Wait for a receive; before an addend is added, wait for earlier sends of its elements."""
        step = self.pieces[number].step
        if step.kind == ADD:
            self.wait_sends(sorted(i for i in self.under_way if i < number and self.pieces[i].step.overlaps(step)))
            self._free += 1
        self._call(WAIT_RECEIVE, number)
        self._num_received += 1

    def wait_sends(self, numbers: Sequence[int]) -> None:
        """Wait until these sends are complete."""
        for number in numbers:
            self.under_way.remove(number)
            self._call(WAIT_SEND, number)

    def _start_sends(self) -> None:
        blocked: set[int] = set()  # peers to which an earlier message has to wait: messages to a peer keep their order
        for number in list(self._to_send):
            peer = self.pieces[number].step.peer
            if self.pieces[number].num_receives > self._num_received or peer in blocked:
                blocked.add(peer)
                continue
            self._to_send.remove(number)
            self.under_way.add(number)
            self._call(START_SEND, number)

    def _call(self, kind: int, number: int) -> None:
        step = self.pieces[number].step
        self.calls.append(MessageCall(kind, number, step.peer, step.start, step.stop, self._spares.get(number)))


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
