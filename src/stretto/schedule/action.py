"""One thing one worker does: a kind, a stage, a micro-batch."""

from typing import NamedTuple

KINDS = {
    "F": "forward",
    "C": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "A": "add up over replicas",
    "R": "reduce",
    "U": "update",
    "M": "merge replicas",
    "L": "learn the gradient",
}


class Action(NamedTuple):
    """`kind` is one of KINDS; `microbatch` is an offset inside a schedule's body and absolute once issued.

    B is the whole backward in one sweep; I and W are its two halves, where a schedule keeps them apart. C is a second
    forward, for the backward, where the first one keeps no graph. Replicas of a pipeline add up their gradients (A)
    before an update, or merge their weights (M) after it. L is for a stage whose B took a predicted gradient: what
    predicts it learns from the one that the stage above has sent.
    Written as torch.distributed.pipelining writes it: stage, kind, micro-batch, "3F5".
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Span(NamedTuple):
    """`worker` is busy with `action` from `start` to `end`, in any unit of time."""

    worker: int
    action: Action
    start: float
    end: float
