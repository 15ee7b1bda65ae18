"""Process groups that are used again: a gloo group costs threads and descriptors, and ranks cannot free one alone.

The groups of a Trainer are a set. One that has been closed on every process, or given up on every process, leaves its
set to the next one. Nothing of it may be left in there: each channel ends with a last message, after which its
receiver posts no other receive, so that gloo knows of nothing under its tag.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import torch.distributed as dist

from stretto.runtime.group_sockets import refuse_without_room
from stretto.runtime.world import World, group_of


class Exchange(Protocol):
    """Something that sends messages by a group, and can come to its end: on all processes at the same time."""

    def end_sending(self) -> None:
        """Send what is the last; waits for nobody who does not do the same."""

    def end_receiving(self) -> None:
        """Take everything up to what is the last, and wait until what was sent has been taken."""


class GroupSet:
    """The groups that one Trainer uses at a time. All processes make and ask for the same ones, in the same order.

    `gather` waits until all processes have come there; `timeout` is in seconds.
    """

    def __init__(self, world: World, timeout: float, gather: Callable[[float], None]) -> None:
        self.timeout = timeout
        self.exchanges: list[Exchange] = []
        self._world, self._gather = world, gather
        self._made: dict[tuple[tuple[int, ...], str | None, int], dist.ProcessGroup | None] = {}
        self._asked: Counter[tuple[tuple[int, ...], str | None]] = Counter()
        self.user: weakref.ref[object] | None = None

    @property
    def in_use(self) -> bool:
        """Whether somebody in this process still uses it."""
        return self.user is not None and self.user() is not None

    def end(self) -> None:
        """Whoever used it says its last words; a collective."""
        for exchange in self.exchanges:
            exchange.end_sending()
        for exchange in self.exchanges:
            exchange.end_receiving()
        self.exchanges.clear()
        self._asked.clear()
        self.user = None

    def group(self, ranks: Iterable[int], backend: str | None = "gloo") -> dist.ProcessGroup | None:
        """A group of some processes that its user has not yet, None in the others; a collective of all processes.

        Without a backend it has those of the default group. Raises UsageError where descriptors are too few for it.
        """
        among = tuple(ranks)
        key = (among, backend, self._asked[among, backend])
        self._asked[among, backend] += 1
        if key not in self._made:
            refuse_without_room(len(among))  # before anybody connects, who would wait for this process
            self._gather(self.timeout)
            whole = backend == "gloo" and len(among) == self._world.size
            make = self._world.group if whole else lambda timeout: group_of(among, timeout, backend)
            self._made[key] = make(self.timeout)
        return self._made[key]

    def whole(self) -> dist.ProcessGroup:
        """A group of all processes, connected when it returns; a collective."""
        made = self.group(range(self._world.size))
        assert made is not None, "every process is in the group of all"
        return made
