"""What one process does in a collective: messages to others and from them, each a stretch of the tensor's elements.

A plan is a list of steps and knows nothing of tensors. It means: go through it in order; a send is handed over and
does not wait, a receive waits for its message. So a stretch is sent as it is once all receives before the send have
come, and what is received is added once earlier sends of these elements have been taken.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stretto.schedule.even_split import bounds

SEND, ADD, SET = "send", "add", "set"  # send; receive and add; receive and overwrite


class Step(NamedTuple):
    """One message: elements [start, stop) to `peer` (send) or from it (add, set)."""

    kind: str
    peer: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many elements the message carries."""
        return self.stop - self.start

    def overlaps(self, other: "Step") -> bool:
        """Whether both are about some of the same elements."""
        return self.start < other.stop and other.start < self.stop


Plan = tuple[Step, ...]


class Stretch(NamedTuple):
    """Elements [start, stop)."""

    start: int
    stop: int

    def part(self, index: int, parts: int) -> "Stretch":
        """One of so many parts, cut as torch.tensor_split cuts: the first ones have one element more."""
        begin, end = bounds(self.stop - self.start, index, parts)
        return Stretch(self.start + begin, self.start + end)

    def parts(self, first: int, last: int, parts: int) -> "Stretch":
        """Parts [first, last) of so many, together."""
        return Stretch(self.part(first, parts).start, self.part(last - 1, parts).stop)

    def send(self, peer: int) -> Step:
        """Give it to `peer`."""
        return Step(SEND, peer, self.start, self.stop)

    def add(self, peer: int) -> Step:
        """Add what `peer` has of it."""
        return Step(ADD, peer, self.start, self.stop)

    def set(self, peer: int) -> Step:
        """Take over what `peer` has of it."""
        return Step(SET, peer, self.start, self.stop)


def whole(length: int) -> Stretch:
    """All elements of a tensor."""
    return Stretch(0, length)


def without_empty(steps: Iterable[Step]) -> Plan:
    """Without messages that would carry nothing: there are such where elements are fewer than processes."""
    return tuple(step for step in steps if step.length)
