"""Lowers a plan to calls of send, receive and wait: long messages in pieces, each sent as soon as it can be.

A call that may wait never comes earlier than in the plan, so a program is as free of deadlock as its plan. A call that
does not wait comes as early as possible: a piece is sent right after the last receive that changes it, while the rest
of its message is still coming; receives start before their message comes. An addend is received in spare memory, of
which there is a fixed amount, and added once earlier sends of the same elements are complete. A message that overwrites
is received directly in the tensor: it holds the sum, which is complete only after all sends of its parts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.collectives.step import ADD, SEND, SET, Step

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
