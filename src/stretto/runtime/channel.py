"""One channel between two workers: values arrive in the order in which they were sent.

Every message begins with a prefix [8] of int64: what it is, and the micro-batch. If a value has another layout
than the one before it, three messages go out instead of one: the number of the new layout's whole numbers, these, and
the value. No object is pickled.

The receiving end always has one receive posted, so that a value travels while its receiver still computes; the sending
end copies each value, so that nobody waits for a send, until too many are on their way.

Between devices that reach each other (`nccl.py`) a value travels by itself, from device to device, after its prefix.
"""

import struct
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.nn.devices import CPU, host_memory
from stretto.runtime.failure import Status, reaching
from stretto.runtime.nccl import Direct
from stretto.runtime.serialize import Form, Layout, fill, form_of, layout_of, leaves_of, size_of
from stretto.schedule import Edge, Rules, Schedule

PREFIX = 64  # bytes
HEADER = struct.Struct("=qq")  # what a message is, and the micro-batch; the rest of the prefix is zeros
VALUE, LAYOUT, MARK, END = 1, 2, 3, 4
SPARE = 2  # values of a channel that may wait besides those that have to


class Received(NamedTuple):
    """What arrived: a value, and the micro-batch it belongs to."""

    microbatch: int
    value: Any


class ChannelEnd(NamedTuple):
    """One direction between this process and another: the group, the other's rank in it, a tag, and a name for people.

    `status` is where this process says what it waits for. `direct` is its end of a channel of these two alone, through
    which values go from device to device; None if they go through the host. Of a `rare` value no memory is kept for the
    next one, whose layout is announced anew.
    """

    group: dist.ProcessGroup
    peer: int
    tag: int
    name: str
    status: Status
    direct: Direct | None = None
    rare: bool = False


class MessageBuffer:
    """The memory of a message with a value of one layout. It is filled again and again: fresh pages cost more than
    copying into them.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.buffer = host_memory(PREFIX + size_of(layout), device)
        self.buffer[:PREFIX] = 0
        self._header = self.buffer.numpy().data
        self._places = tuple(leaves_of(form_of(layout).within(self.buffer, PREFIX)))

    def fill(self, value: Any, microbatch: int) -> None:
        HEADER.pack_into(self._header, 0, VALUE, microbatch)
        fill(self._places, value)


class Sent(NamedTuple):
    """A message under way, the memory that must not change until it has been taken, and how many values it holds."""

    work: Any
    memory: MessageBuffer | Tensor
    values: int


# What outboxes that were given up had under way. gloo drops a message whose sender no longer holds it, and a send does
# not tell that it has been taken unless one waits for it: these are few, and stay as long as their group. Longer, they
# would keep its thread, which turns without end once the connections have been cut.
_given_up: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Sent]] = weakref.WeakKeyDictionary()


def _give_up(group: dist.ProcessGroup, under_way: deque[Sent]) -> None:
    if under_way:
        _given_up.setdefault(group, []).extend(under_way)


class Outbox:
    """The sending end. Fewer than `depth` values may wait there until they are taken. What it has sent arrives, even if
    it is given up. Values may come from any device; those of `device` leave by memory that it reaches faster.
    """

    def __init__(self, line: ChannelEnd, depth: int, device: torch.device = CPU) -> None:
        self._group, self._peer, self._tag, self._name, self._status, self._direct, self._rare = line
        self._depth = depth
        self._device = device
        self._layout: Layout | None = None
        self._under_way: deque[Sent] = deque()
        weakref.finalize(self, _give_up, self._group, self._under_way).atexit = False
        self._values = 0  # under way
        self._free: MessageBuffer | None = None

    def send(self, value: Any, microbatch: int = 0) -> None:
        """Send a value. Waits only if `depth` values have not been taken then."""
        layout = layout_of(value)
        if layout != self._layout or self._rare:
            self._announce(layout)
        if self._direct is not None:
            self._send_directly(self._direct, value, microbatch, size_of(layout))
        else:
            message = self._buffer(layout)
            message.fill(value, microbatch)
            self._post(message, values=1)
        while self._values >= self._depth:  # now, when the receiver has something to do
            self._wait_for_oldest()

    def settle(self) -> None:
        while self._under_way:
            self._wait_for_oldest()

    def mark(self, kind: int = MARK) -> None:
        """Send a mark for the other end's `clear`, or the last message, for its `end`; waits for nothing."""
        self._post(prefix(kind, 0))

    def _wait_for_oldest(self) -> None:
        oldest = self._under_way[0]
        with self._status.waiting(f"{self._name} to be taken", self._peer), reaching(self._peer):
            oldest.work.wait()
        self._under_way.popleft()
        self._values -= oldest.values
        if isinstance(oldest.memory, MessageBuffer) and not self._rare:
            self._free = oldest.memory

    def _buffer(self, layout: Layout) -> MessageBuffer:
        # That of a value that has been taken, if it fits.
        free, self._free = self._free, None
        return free if free is not None and free.layout == layout else MessageBuffer(layout, self._device)

    def _send_directly(self, direct: Direct, value: Any, microbatch: int, size: int) -> None:
        self._post(prefix(VALUE, microbatch), values=0 if size else 1)
        if size:
            with reaching(self._peer):
                self._under_way.append(Sent(*direct.send(value, size), values=1))
            self._values += 1

    def _announce(self, layout: Layout) -> None:
        numbers = torch.tensor(layout, dtype=torch.int64)
        self._post(prefix(LAYOUT, numbers.numel()))
        self._post(numbers.view(torch.uint8))
        self._layout = layout

    def _post(self, memory: MessageBuffer | Tensor, values: int = 0) -> None:
        buffer = memory.buffer if isinstance(memory, MessageBuffer) else memory
        with reaching(self._peer):
            work = self._group.send([buffer], self._peer, self._tag)
        self._under_way.append(Sent(work, memory, values))
        self._values += values


class Inbox:
    """The receiving end. Values go to `device`; on the CPU they are where they arrived, uncopied."""

    def __init__(self, line: ChannelEnd, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._name, self._status, self._direct, self._rare = line
        self._device = device
        self._form = Form(None, 0)
        self._posted = self._post(host_memory(PREFIX, device))

    def receive(self, what: str | None = None) -> Received:
        """The next value; waits for it. `what` is said to be waited for."""
        with self._status.waiting(what or self._name, self._peer):
            kind, number, message = self._next()
            assert kind == VALUE, f"a message of kind {kind} from rank {self._peer}, where a value should be"
            return Received(number, self._value(message))

    def clear(self) -> None:
        """Drop everything up to the next mark."""
        with self._status.waiting(f"the end of {self._name}", self._peer):
            while (taken := self._next())[0] != MARK:
                self._value(taken[2])

    def end(self) -> None:
        """Take everything up to the last message. Nothing is left under this channel's tag."""
        with self._status.waiting(f"the last of {self._name}", self._peer):
            while (taken := self._next())[0] != END:
                if taken[0] == VALUE:
                    self._value(taken[2])

    def _next(self) -> tuple[int, int, Tensor]:
        while True:
            work, buffer = self._posted
            header = buffer.numpy().data
            following = self._memory(0 if self._rare else self._form.size)  # at no cost while nothing is there
            with reaching(self._peer):
                work.wait()
            kind, number = HEADER.unpack_from(header)
            if kind != LAYOUT:
                if kind != END:
                    self._posted = self._post(following)
                return kind, number, buffer
            self._read_layout(number)

    def _value(self, message: Tensor) -> Any:
        if self._direct is None or not self._form.size:
            return self._form.within(message.to(self._device, non_blocking=True), PREFIX)
        with reaching(self._peer):
            return self._form.within(self._direct.receive(self._form.size))

    def _memory(self, size: int) -> Tensor:
        # For the next message, a value of so many bytes.
        return host_memory(PREFIX if self._direct is not None else PREFIX + size, self._device)

    def _read_layout(self, length: int) -> None:
        work, buffer = self._post(torch.empty(8 * length, dtype=torch.uint8))
        with reaching(self._peer):
            work.wait()
        self._form = form_of(tuple(buffer.view(torch.int64).tolist()))
        self._posted = self._post(self._memory(self._form.size))

    def _post(self, buffer: Tensor) -> tuple[Any, Tensor]:
        with reaching(self._peer):
            return self._group.recv([buffer], self._peer, self._tag), buffer


def prefix(kind: int, number: int) -> Tensor:
    buffer = torch.zeros(PREFIX, dtype=torch.uint8)
    HEADER.pack_into(buffer.numpy().data, 0, kind, number)
    return buffer


class Channel(NamedTuple):
    """Values of one name, made by actions of one kind on one stage, for one worker."""

    value: str
    kind: str
    stage: int
    worker: int

    @classmethod
    def of(cls, edge: Edge, worker: int) -> "Channel":
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
        for outbox in self.outboxes.values():
            outbox.mark(END)

    def end_receiving(self) -> None:
        """Drop whatever is on its way, up to the last message; nothing is left under the channels' tags."""
        for inbox in self.inboxes.values():
            inbox.end()
        self.settle()

    def settle(self) -> None:
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
        self.outboxes[channel].send(value, microbatch)

    def receive(self, channel: Channel, what: str | None = None) -> Received:
        return self.inboxes[channel].receive(what)

    def clear(self) -> None:
        """Drop whatever is on its way; every worker does it at the same time."""
        for outbox in self.outboxes.values():
            outbox.mark()
        for inbox in self.inboxes.values():
            inbox.clear()
