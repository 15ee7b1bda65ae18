"""What the workers of a schedule send each other: one channel for each kind of value, its source and who gets it."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stretto.runtime.post import Inbox, Letter, Line, Outbox
from stretto.runtime.status import Status
from stretto.schedule import Edge, Rules, Schedule

SMALL = frozenset({"loss", "norm"})  # values of a few bytes: as many may wait as anyone can be behind


class Channel(NamedTuple):
    """Values of one name, made by actions of one kind on one stage, for one worker."""

    value: str
    kind: str
    stage: int
    worker: int

    @classmethod
    def of(cls, edge: Edge, worker: int) -> "Channel":
        """The channel on which an edge's value comes to a worker."""
        return cls(edge.value, edge.source.kind, edge.source.stage, worker)


def channels(schedule: Schedule, rules: Rules) -> set[Channel]:
    """Every channel between two workers that a schedule uses. The loss goes to all of them."""
    used: set[Channel] = set()
    for worker, actions in enumerate(schedule.body):
        for action in actions:
            for edge in rules.makes(action):
                used |= {Channel.of(edge, to) for to in receivers(edge, schedule) if to != worker}
    return used


def receivers(edge: Edge, schedule: Schedule) -> tuple[int, ...]:
    """The workers that a value is for: that of the stage that uses it, or all of them."""
    if edge.stage == schedule.num_stages:
        return tuple(range(schedule.num_workers))
    return (schedule.worker_of[edge.stage],)


class Mailbox:
    """One worker's ends of its channels. A worker's number is its rank in the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        used: Iterable[Channel],
        worker_of: Mapping[int, int],
        device: torch.device,
        *,
        first_tag: int,
        depth: int,
        patience: int,
        status: Status,
    ) -> None:
        # Every worker numbers the channels alike. `patience` is how many small values may wait.
        me = dist.get_rank(group)
        self._outboxes: dict[Channel, Outbox] = {}
        self._inboxes: dict[Channel, Inbox] = {}
        for tag, channel in enumerate(sorted(set(used)), start=first_tag):
            source = worker_of[channel.stage]
            name = f"{channel.value}s of stage {channel.stage}"
            if source == me:
                most = patience if channel.value in SMALL else depth
                self._outboxes[channel] = Outbox(Line(group, channel.worker, tag, name, status), most)
            elif channel.worker == me:
                self._inboxes[channel] = Inbox(Line(group, source, tag, name, status), device)

    def send(self, channel: Channel, value: Any, microbatch: int) -> int:
        """Send a value; return how many bytes."""
        return self._outboxes[channel].send(value, microbatch)

    def receive(self, channel: Channel, what: str | None = None) -> Letter:
        """The next value of a channel; waits for it. `what` is said to be waited for."""
        return self._inboxes[channel].receive(what)

    def settle(self) -> None:
        """Wait until everything that was sent has been taken."""
        for outbox in self._outboxes.values():
            outbox.settle()

    def clear(self) -> None:
        """Drop whatever is on its way; every worker does it at the same time."""
        for outbox in self._outboxes.values():
            outbox.mark()
        for inbox in self._inboxes.values():
            inbox.clear()
