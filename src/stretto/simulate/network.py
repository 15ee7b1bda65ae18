"""How values travel between workers: links, the bytes of each value, when a send may begin."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stretto.errors import UsageError
from stretto.options.checks import is_among, shown
from stretto.schedule import Edge

Sizes = Callable[[Edge], float]  # the bytes of a value; its micro-batch is an offset
BUFFERED, RENDEZVOUS = "buffered", "rendezvous"


def no_bytes(edge: Edge) -> float:
    """0 bytes for every value: messages keep no lane busy."""
    return 0.0


@dataclass(frozen=True)
class Link:
    """A connection from one worker to another. A message of n bytes takes n * `seconds_per_byte` of it, and keeps it
    for so long, or for n * `gap` if that is longer (LogGP's G: what both ends do for a message delays the next one).

    It begins to arrive `latency` after it was sent, which keeps nobody busy. Pairs of workers whose links have the same
    name in `shared` share one link, and contend for it; without a name every pair, in each direction, has its own.
    Raises UsageError for a time below 0.
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


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Links, the bytes of each value, and when a send begins.

    With `sends="buffered"` a message leaves as soon as its sender's send lane is free; with "rendezvous" not before its
    receiver has come to the action that needs it. Raises UsageError for any other `sends`.
    """

    network: Network = Network()
    sizes: Sizes = no_bytes
    sends: str = BUFFERED

    def __post_init__(self) -> None:
        if not is_among(self.sends, (BUFFERED, RENDEZVOUS)):
            raise UsageError(f"sends={shown(self.sends)}: choose {BUFFERED} or {RENDEZVOUS}")
