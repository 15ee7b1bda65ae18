"""Runs the calls of a program on a tensor, over a process group."""

import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.collectives.calls import START_RECEIVE, START_SEND, WAIT_SEND, Program


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
