"""Runs the calls of a program on a tensor, over a process group."""

from typing import Any, Protocol

from torch import Tensor

from stretto.collectives.program import BEGIN, POST, SETTLE, Program


class Transport(Protocol):
    """What is needed of a process group: messages that arrive, those of one tag in the order they were sent."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Begin to send; what comes back has a `wait`."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Any:
        """Begin to receive; what comes back has a `wait`."""


def execute(program: Program, flat: Tensor, transport: Transport, tag: int) -> None:
    """Run a program on `flat` [number of elements], contiguous. What the transport raises passes through."""
    length, size = flat.numel(), program.spare
    spare = flat.new_empty(size) if size else flat
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
