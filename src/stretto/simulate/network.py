"""How values travel between workers: links, the bytes of each value, when a send may begin."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple, Self

from stretto.errors import UsageError
from stretto.options.checks import is_among, shown
from stretto.schedule import Edge

Sizes = Callable[[Edge], float]  # the bytes of a value; its micro-batch is an offset
BUFFERED, RENDEZVOUS = "buffered", "rendezvous"
LATE_DRAWS = 8  # simulations, each with another draw of late messages, that predictions average


def no_bytes(edge: Edge) -> float:
    """0 bytes for every value: messages keep no lane busy."""
    return 0.0


class Mean(NamedTuple):
    """The mean of times over draws of late messages, and its standard error; 0 where nothing is drawn."""

    value: float
    error: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float]) -> Self:
        """Of two draws or more: their sample standard deviation over the root of their number is the error."""
        return cls(fmean(times), stdev(times) / math.sqrt(len(times)))


@dataclass(frozen=True)
class Link:
    """A connection from one worker to another. A message of n bytes takes n * `seconds_per_byte`. The next one begins
    after that time, or after n * `gap` if that is longer (LogGP's G: the work of both ends for one message delays the
    next).

    A message begins to arrive `latency` after it was sent; this time occupies no lane. Pairs of workers whose links
    have the same name in `shared` share one link, and contend for it; without a name every pair, in each direction, has
    its own. A share `late_share` of the messages, drawn at random, arrives `late_time` later: this is jitter. Raises
    UsageError for a time below 0, and for a share that is none.
    """

    latency: float = 0.0
    seconds_per_byte: float = 0.0
    shared: str = ""
    gap: float = 0.0
    late_share: float = 0.0
    late_time: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency", "seconds_per_byte", "gap", "late_time"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name):g} of a link: a time is 0 or more")
        if not 0 <= self.late_share <= 1:
            raise UsageError(f"late_share={self.late_share:g} of a link: a share is from 0 to 1")


@dataclass(frozen=True)
class Network:
    """The link from each worker to each other: `between[from, to]` if there is one, otherwise `link`.

    `seed` decides which messages are late: the same seed, the same ones.
    """

    link: Link = Link()
    between: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    seed: int = 0

    def __getitem__(self, pair: tuple[int, int]) -> Link:
        return self.between.get(pair, self.link)

    @property
    def is_late(self) -> bool:
        """Whether some messages are late."""
        return any(link.late_share * link.late_time for link in (self.link, *self.between.values()))


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How messages travel: over which links, with how many bytes, and when a send begins.

    With `sends="buffered"` a message leaves as soon as its sender's send lane is free; with "rendezvous" not before
    its receiver has reached the action that needs it. Raises UsageError for any other `sends`.
    """

    network: Network = Network()
    sizes: Sizes = no_bytes
    sends: str = BUFFERED

    def __post_init__(self) -> None:
        if not is_among(self.sends, (BUFFERED, RENDEZVOUS)):
            raise UsageError(f"sends={shown(self.sends)}: choose {BUFFERED} or {RENDEZVOUS}")
