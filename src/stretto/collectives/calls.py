"""A plan as the calls that carry it out: long messages in pieces, each sent as soon as it can be.

Nothing that may have to wait is called earlier than the plan says, so a program is as free of deadlock as its plan.
What does not wait is called as early as possible: a piece is sent right behind the last receive that changes it, while
the rest of its message is still coming; receives are posted before their message comes. An addend is received in spare
memory, of which there is a fixed amount, and added once earlier sends of these elements have been taken. A message that
overwrites is received in its place: it is the sum, which is complete only once all sends of its parts have been taken.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.collectives.step import ADD, SEND, SET, Step

# Begin to send; wait until it has been taken; begin to receive; wait for what comes, and add it if it is an addend.
BEGIN, SETTLE, POST, TAKE = range(4)


class MessageCall(NamedTuple):
    """One call about message `number` of a program: elements [start, stop), to or from `peer`.

    `spare` is where an addend is received: its first element there; None for all other messages.
    """

    kind: int
    number: int
    peer: int
    start: int
    stop: int
    spare: int | None


class Program(NamedTuple):
    """The calls, how many messages they are about, and how many elements of spare memory they need."""

    calls: tuple[MessageCall, ...]
    num_messages: int
    spare: int


class MessagePiece(NamedTuple):
    """A message, and how many receives must have come before it is sent."""

    step: Step
    behind: int


def lower(steps: Sequence[Step], piece: int, ahead: int) -> Program:
    """The calls for a plan: messages in pieces of `piece` elements, at most `ahead` addends posted at a time."""
    lowering = Lowering(list(pieces_of(steps, piece)), ahead)
    for number in lowering.receives:
        lowering.go_on()
        lowering.take(number)
    lowering.go_on()
    lowering.settle(sorted(lowering.under_way))
    return Program(tuple(lowering.calls), len(lowering.pieces), lowering.spare)


def pieces_of(steps: Sequence[Step], piece: int) -> Iterator[MessagePiece]:
    """All pieces in the plan's order."""
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
    """A step in pieces of one size; what is left over makes the last one up to half a piece longer or shorter."""
    number = max(1, (step.length + piece // 2) // piece)
    bounds = [*(step.start + i * piece for i in range(number)), step.stop]
    return [step._replace(start=a, stop=b) for a, b in pairwise(bounds)]


class Lowering:
    """What has been called so far, and what is still to be called."""

    def __init__(self, pieces: Sequence[MessagePiece], ahead: int) -> None:
        self.pieces = pieces
        self.receives = [i for i, piece in enumerate(pieces) if piece.step.kind != SEND]
        self.calls: list[MessageCall] = []
        self.under_way: set[int] = set()  # sends
        addends = [i for i in self.receives if pieces[i].step.kind == ADD]
        longest = max((pieces[i].step.length for i in addends), default=0)
        self.spare = min(ahead, len(addends)) * longest
        self._spares = {number: i % ahead * longest for i, number in enumerate(addends)}
        self._free = ahead  # places for addends
        self._taken = 0
        self._to_post = deque(self.receives)
        self._to_send = [i for i, piece in enumerate(pieces) if piece.step.kind == SEND]

    def go_on(self) -> None:
        """Call what does not wait."""
        while self._to_post and (self._free or self.pieces[self._to_post[0]].step.kind == SET):
            self._free -= self.pieces[self._to_post[0]].step.kind == ADD
            self._call(POST, self._to_post.popleft())
        self._send()

    def take(self, number: int) -> None:
        """Wait for a receive."""
        step = self.pieces[number].step
        if step.kind == ADD:
            self.settle(sorted(i for i in self.under_way if i < number and self.pieces[i].step.overlaps(step)))
            self._free += 1
        self._call(TAKE, number)
        self._taken += 1

    def settle(self, numbers: Sequence[int]) -> None:
        """Wait until these sends have been taken."""
        for number in numbers:
            self.under_way.remove(number)
            self._call(SETTLE, number)

    def _send(self) -> None:
        held: set[int] = set()  # peers: messages to one of them stay in order
        for number in list(self._to_send):
            peer = self.pieces[number].step.peer
            if self.pieces[number].behind > self._taken or peer in held:
                held.add(peer)
                continue
            self._to_send.remove(number)
            self.under_way.add(number)
            self._call(BEGIN, number)

    def _call(self, kind: int, number: int) -> None:
        step = self.pieces[number].step
        self.calls.append(MessageCall(kind, number, step.peer, step.start, step.stop, self._spares.get(number)))
