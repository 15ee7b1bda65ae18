"""What messages travel on, and how many bytes they have: side tables of a simulation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.errors import UsageError
from stretto.schedule import Edge

Sizes = Callable[[Edge], float]  # the bytes of a value; its micro-batch is an offset


@dataclass(frozen=True)
class Link:
    """A way from one worker to another. A message of n bytes takes n * `seconds_per_byte` of it, and keeps it for so
    long, or for n * `gap` if that is longer (LogGP's G: what its ends do with it beside keeps others waiting, too).

    It begins to arrive `latency` after it was sent, which keeps nobody busy. Pairs of workers whose links have the same
    name in `shared` share one link, and contend for it; without a name every pair, in each direction, has its own.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    shared: str = ""
    gap: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("seconds_per_byte", self.seconds_per_byte), ("gap", self.gap)):
            if not 0 <= value < math.inf:
                raise UsageError(f"{name}={value:g} of a link: a time is 0 or more")


@dataclass(frozen=True)
class Network:
    """The link from each worker to each other one: `link`, but for those pairs (from, to) that `between` names."""

    link: Link = Link()
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __getitem__(self, pair: tuple[int, int]) -> Link:
        return self.between.get(pair, self.link)
