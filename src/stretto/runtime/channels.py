"""What the workers of a schedule send each other: a channel for each kind of value, its source and its receiver."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stretto.runtime.channel import END, ChannelEnd, Inbox, Outbox, Received
from stretto.runtime.nccl import Direct
from stretto.runtime.wait_report import Status
from stretto.schedule import Edge, Rules, Schedule

SPARE = 2  # values of a channel that may wait besides those that have to


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


def channels(schedule: Schedule, rules: Rules, lag: int) -> dict[Channel, int]:
    """Every channel between two workers that a schedule uses, and how many values may have to wait there.

    That is what has been sent by the end of a turn and is not needed before a later one: all workers can then end a
    turn, whichever it is, before the first of them begins the next. The loss goes to everybody, and may wait for `lag`
    turns more.
    """
    homes = schedule.worker_of
    waiting: Counter[Channel] = Counter()
    most: Counter[Channel] = Counter()
    for n in range(schedule.drain + 2 + rules.lookback):
        for worker in range(schedule.num_workers):
            for action in schedule.turn(worker, n):
                for edge in rules.makes(action):
                    waiting.update(Channel.of(edge, to) for to in receivers(edge, schedule) if to != worker)
        most |= waiting
        for worker in range(schedule.num_workers):
            for action in schedule.turn(worker, n):
                used = {Channel.of(edge, worker) for edge in rules.needs(action)}
                waiting.subtract(channel for channel in used if homes.get(channel.stage, worker) != worker)
    late = (lag + 1) * schedule.per_turn
    return {channel: late if channel.value == "loss" else count for channel, count in most.items()}


def receivers(edge: Edge, schedule: Schedule) -> tuple[int, ...]:
    """The workers that a value is for: that of the stage that uses it, or all of them."""
    if edge.stage == schedule.num_stages:
        return tuple(range(schedule.num_workers))
    return (schedule.worker_of[edge.stage],)


class Boxes:
    """Ends of channels of one process; a key is the same at both ends. They come to their end together."""

    def __init__(self) -> None:
        self.outboxes: dict[Any, Outbox] = {}
        self.inboxes: dict[Any, Inbox] = {}

    def end_sending(self) -> None:
        """Send the last message of each channel."""
        for outbox in self.outboxes.values():
            outbox.mark(END)

    def end_receiving(self) -> None:
        """Drop whatever is on its way, up to the last message; nothing is left under the channels' tags."""
        for inbox in self.inboxes.values():
            inbox.end()
        self.settle()

    def settle(self) -> None:
        """Wait until everything that was sent has been taken."""
        for outbox in self.outboxes.values():
            outbox.settle()


class Mailbox(Boxes):
    """One worker's ends of its channels. `ranks` are the workers' ranks in the group.

    Channels that are in `direct` go from device to device, the others through the host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        used: Mapping[Channel, int],
        worker_of: Mapping[int, int],
        device: torch.device,
        *,
        ranks: Sequence[int],
        first_tag: int,
        status: Status,
        direct: Mapping[Channel, Direct] = MappingProxyType({}),
    ) -> None:
        # Every worker numbers the channels alike.
        super().__init__()
        me = ranks.index(dist.get_rank(group))
        for tag, channel in enumerate(sorted(used), start=first_tag):
            source = worker_of[channel.stage]
            name = f"{channel.value}s of stage {channel.stage}"
            if source == me:
                depth = used[channel] + SPARE
                line = ChannelEnd(group, ranks[channel.worker], tag, name, status, direct.get(channel))
                self.outboxes[channel] = Outbox(line, depth, device)
            elif channel.worker == me:
                line = ChannelEnd(group, ranks[source], tag, name, status, direct.get(channel))
                self.inboxes[channel] = Inbox(line, device)

    def send(self, channel: Channel, value: Any, microbatch: int) -> None:
        """Send a value on a channel; waits only if too many are under way there."""
        self.outboxes[channel].send(value, microbatch)

    def receive(self, channel: Channel, what: str | None = None) -> Received:
        """The next value of a channel; waits for it. `what` is said to be waited for."""
        return self.inboxes[channel].receive(what)

    def clear(self) -> None:
        """Drop whatever is on its way; every worker does it at the same time."""
        for outbox in self.outboxes.values():
            outbox.mark()
        for inbox in self.inboxes.values():
            inbox.clear()
