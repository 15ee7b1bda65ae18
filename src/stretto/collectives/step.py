"""One process's steps in a collective: messages to and from others, each a range of the tensor's elements.

A plan is a tuple of steps, without tensors. A process runs it in order: a send does not wait, a receive waits for its
message. A send carries the values after all receives before it. A received message is added only when earlier sends of
the same elements are complete.
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
        """Whether the two steps share elements."""
        return self.start < other.stop and other.start < self.stop


Plan = tuple[Step, ...]


class ElementRange(NamedTuple):
    """Elements [start, stop) of a flattened tensor."""

    start: int
    stop: int

    def part(self, index: int, parts: int) -> "ElementRange":
        """Part `index` of `parts`, cut as torch.tensor_split cuts: the first ones have one element more."""
        begin, end = bounds(self.stop - self.start, index, parts)
        return ElementRange(self.start + begin, self.start + end)

    def parts(self, first: int, last: int, parts: int) -> "ElementRange":
        """The parts [first, last) of `parts`, as one range."""
        return ElementRange(self.part(first, parts).start, self.part(last - 1, parts).stop)

    def send(self, peer: int) -> Step:
        """The step that sends these elements to `peer`."""
        return Step(SEND, peer, self.start, self.stop)

    def add(self, peer: int) -> Step:
        """The step that receives these elements from `peer` and adds them."""
        return Step(ADD, peer, self.start, self.stop)

    def set(self, peer: int) -> Step:
        """The step that receives these elements from `peer` and overwrites the own ones."""
        return Step(SET, peer, self.start, self.stop)


def all_elements(length: int) -> ElementRange:
    """The range of all elements of a tensor."""
    return ElementRange(0, length)


def without_empty(steps: Iterable[Step]) -> Plan:
    """The plan without empty messages, which arise where there are fewer elements than processes."""
    return tuple(step for step in steps if step.length)
