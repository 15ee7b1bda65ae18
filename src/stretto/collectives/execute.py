"""Runs the calls of a program on a tensor, over a process group."""

import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.collectives.calls import BEGIN, POST, SETTLE, Program


class PointToPoint(Protocol):
    """What is needed of a process group: messages that arrive, those of one tag in the order they were sent."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Begin to send; what comes back has a `wait`."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Begin to receive; what comes back has a `wait`."""


class Spare(threading.local):
    """Memory for addends, which a thread keeps for its next call: fresh pages cost more than what is done with them.

    It is a few pieces long, however long tensors are.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """So many elements, for one call."""
        size = length * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype)

    def drop(self) -> None:
        """After a failure a message may still arrive there."""
        self._memory = torch.empty(0, dtype=torch.uint8)


_spare = Spare()


def execute(program: Program, flat: Tensor, transport: PointToPoint, tag: int) -> None:
    """Run a program on `flat` [number of elements], contiguous. What the transport raises passes through."""
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
    for kind, number, peer, start, stop, place in program.calls:
        if kind == SETTLE:
            works[number].wait()
            continue
        part = flat if stop - start == length else flat[start:stop]
        if kind == BEGIN:
            works[number] = transport.send([part], peer, tag)
        elif kind == POST:
            if place is not None:
                part = addends[number] = spare[place : place + stop - start]
            works[number] = transport.recv([part], peer, tag)
        else:
            works[number].wait()
            if place is not None:
                part.add_(addends.pop(number))
