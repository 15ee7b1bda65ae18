"""Clusters to plan for: the rates of their devices, and the links between workers. No torch here.

Workers are numbered group by group, node by node. Times are in seconds, memory in bytes, rates in FLOP/s and bytes/s.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from stretto.cost.attained import Attained
from stretto.cost.collective import Collective, Steps, joined_rings, joined_tree, slower, slower_rings
from stretto.errors import UsageError, nearest
from stretto.options.checks import is_whole, of_fields, shown, whole


def check_positive(key: str, value: float | None, remedy: str) -> None:
    """Raise UsageError for a number that is not above 0."""
    if value is not None and not value > 0:
        raise UsageError(f"{key} = {value:g}: it must be more than 0; {remedy}")


def check_not_negative(key: str, value: float | None, remedy: str) -> None:
    """Raise UsageError for a number that is below 0, infinite or NaN."""
    if value is not None and not 0 <= value < math.inf:
        raise UsageError(f"{key} = {value:g}: it must be 0 or more; {remedy}")


MEASURE = "take it from a data sheet, or measure it with stretto calibrate --out FILE"
MOST_WORKERS = 1_000_000  # of a cluster: each has its place in a list


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The time of operators of one sort: seconds = calls x per_call + FLOPs x per_flop + bytes x per_byte.

    For a batch of b examples, whose FLOPs and bytes grow with b, that is `t0 + b t1`. While the node's other workers
    compute, operators take `contention` times as long. `residual` is the root mean square of the fit's relative errors.
    Raises UsageError for negative numbers.
    """

    per_call: float = 0.0
    per_flop: float = 0.0
    per_byte: float = 0.0
    contention: float = 1.0
    residual: float | None = None

    def __post_init__(self) -> None:
        of_fields("Rate: ", self)
        for key in ("per_call", "per_flop", "per_byte", "residual"):
            check_not_negative(key, getattr(self, key), "measure it again with stretto calibrate")
        if not 1 <= self.contention < math.inf:
            raise UsageError(f"contention = {self.contention:g}: it must be 1 or more; 1 means no slowdown")

    def seconds(self, calls: float, flops: float, num_bytes: float) -> float:
        """Seconds of this much work, while the other workers of the node are idle."""
        return calls * self.per_call + flops * self.per_flop + num_bytes * self.per_byte

    def at_speed(self, speed: float) -> "Rate":
        """The rate of a worker that is `speed` times as fast."""
        return replace(
            self, per_call=self.per_call / speed, per_flop=self.per_flop / speed, per_byte=self.per_byte / speed
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one worker: `memory` in bytes, `memory_bandwidth` in bytes/s.

    `peak` is FLOP/s by dtype. `rates` is by sort of operator ("linear", "convolution", ...) and pass ("forward",
    "backward"; for optimizers "update"); a sort without a rate takes what its kernels take by `attained`, and without
    that max(FLOPs / peak, bytes / memory_bandwidth), the roofline. `reduction_bandwidth` is the bytes/s of adding one
    tensor to another. `price_per_hour` is money, `watts` its power while it trains, `idle_watts` while it waits for
    other workers; without it, `watts` counts then, too. `mtbf_hours` is the mean time between two failures of one
    worker, its share of the node included.

    `per_action` and `per_step` are the runtime's own seconds for each action and each step of several processes;
    `alone_per_action` and `alone_per_step` those of training in one process, where that is known. `speed` is how fast
    layers are that were measured on another device of the cluster: 0.5 takes twice their time; the other figures are
    this device's own. A stage whose weights and activations of one micro-batch fit into `on_chip_memory` bytes reads
    and writes them at `on_chip_bandwidth`. `variation` is the standard deviation of the time that devices of one kind
    take for the same work, over its mean: a step waits for the slowest of its workers. Raises UsageError for numbers
    out of range.
    """

    memory: float
    memory_bandwidth: float
    peak: Mapping[str, float]
    reduction_bandwidth: float | None = None
    price_per_hour: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    mtbf_hours: float | None = None
    variation: float | None = None
    per_action: float = 0.0
    per_step: float = 0.0
    alone_per_action: float | None = None
    alone_per_step: float | None = None
    speed: float = 1.0
    on_chip_memory: float | None = None
    on_chip_bandwidth: float | None = None
    attained: Attained | None = None
    rates: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_fields("Device: ", self)
        on_chip = ("on_chip_memory", "on_chip_bandwidth")
        for key in ("memory", "memory_bandwidth", "reduction_bandwidth", "speed", *on_chip):
            check_positive(key, getattr(self, key), MEASURE)
        if (self.on_chip_memory is None) != (self.on_chip_bandwidth is None):
            raise UsageError(
                f"on_chip_memory = {self.on_chip_memory}, on_chip_bandwidth = {self.on_chip_bandwidth}: give both, in "
                "bytes and bytes/s, or neither"
            )
        for key in ("per_action", "per_step", "alone_per_action", "alone_per_step"):
            check_not_negative(key, getattr(self, key), MEASURE)
        check_positive("mtbf_hours", self.mtbf_hours, "leave it out if it is not known")
        for key in ("price_per_hour", "watts", "idle_watts", "variation"):
            check_not_negative(key, getattr(self, key), "leave it out if it is not known")
        if self.idle_watts is not None and (self.watts is None or self.idle_watts > self.watts):
            raise UsageError(
                f"idle_watts = {self.idle_watts:g}, watts = {self.watts}: a device that waits uses no more power than "
                "one that trains; give both, or leave idle_watts out"
            )
        if not self.peak:
            raise UsageError(f"peak is empty: give FLOP/s of at least one dtype, float32 = 1e12; {MEASURE}")
        for dtype, value in self.peak.items():
            check_positive(f"peak.{dtype}", value, MEASURE)

    def slowest_of(self, workers: int) -> float:
        """How many times as long the slowest of so many devices takes for its work as all do on average.

        The expected largest of so many normal numbers, by Blom's approximation (1958): 1 for one device.
        """
        if not self.variation or workers == 1:
            return 1.0
        return 1 + self.variation * NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))

    @property
    def waiting_watts(self) -> float | None:
        """The power while it waits for other workers; that while it trains, where no other is known."""
        return self.watts if self.idle_watts is None else self.idle_watts

    @property
    def reduction_seconds_per_byte(self) -> float:
        """gamma: measured, else the time to read two bytes and write one at the memory's bandwidth."""
        return 1 / self.reduction_bandwidth if self.reduction_bandwidth else 3 / self.memory_bandwidth

    @cached_property
    def on_chip(self) -> "Device":
        """The device for a stage that stays on its chip; the device itself where nothing does."""
        if self.on_chip_bandwidth is None:
            return self
        return replace(self, memory_bandwidth=max(self.memory_bandwidth, self.on_chip_bandwidth))

    def keeps_on_chip(self, num_bytes: float) -> bool:
        """Whether so many bytes fit into the memory on the chip."""
        return self.on_chip_memory is not None and num_bytes <= self.on_chip_memory

    def peak_of(self, dtype: str) -> float:
        """FLOP/s at a dtype. Raises UsageError if it is not known."""
        if dtype not in self.peak:
            raise UsageError(
                f"no peak for {dtype!r}: {nearest(dtype, self.peak)}, or add a peak for {dtype} to the cluster's file"
            )
        return self.peak[dtype]

    def at_speed(self, speed: float) -> "Device":
        """The device of a worker that computes `speed` times as fast, with the same memory, price and power."""
        alone_per_action, alone_per_step = self.alone_per_action, self.alone_per_step
        return replace(
            self,
            per_action=self.per_action / speed,
            per_step=self.per_step / speed,
            alone_per_action=None if alone_per_action is None else alone_per_action / speed,
            alone_per_step=None if alone_per_step is None else alone_per_step / speed,
            memory_bandwidth=self.memory_bandwidth * speed,
            reduction_bandwidth=None if self.reduction_bandwidth is None else self.reduction_bandwidth * speed,
            peak={dtype: peak * speed for dtype, peak in self.peak.items()},
            speed=self.speed * speed,
            on_chip_bandwidth=None if self.on_chip_bandwidth is None else self.on_chip_bandwidth * speed,
            attained=None if self.attained is None else self.attained.at_speed(speed),
            rates={
                operator: {direction: rate.at_speed(speed) for direction, rate in rates.items()}
                for operator, rates in self.rates.items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """The time of a message: `latency` seconds, plus its bytes at `bandwidth` bytes/s, one way.

    While both ends compute, a message takes `contention` times as long. Of that time, `send` seconds and
    `send_per_byte` seconds a byte keep the sender from computing, `receive` and `receive_per_byte` the receiver.
    `travel` and `travel_per_byte` are the rest, which keeps neither busy; without them it follows from the others.
    `collectives` are those that were measured, by the names of `stretto.cost.collective`; others are those of `rings`,
    by protocol, and `tree` (`stretto.cost.collective`), and without these follow from latency and bandwidth. A share
    `late_share` of all messages, at random, comes `late_seconds` later: 0.05 and 0.02 mean that one in twenty is late
    by 20 ms. Raises UsageError for numbers out of range.
    """

    latency: float
    bandwidth: float
    contention: float = 1.0
    send: float = 0.0
    send_per_byte: float = 0.0
    receive: float = 0.0
    receive_per_byte: float = 0.0
    travel: float | None = None
    travel_per_byte: float | None = None
    residual: float | None = None
    late_share: float | None = None
    late_seconds: float | None = None
    collectives: Mapping[str, Collective] = field(default_factory=dict, hash=False)
    rings: Mapping[str, Steps] = field(default_factory=dict, hash=False)
    tree: Steps | None = None

    def __post_init__(self) -> None:
        of_fields("Link: ", self)
        if (self.late_share is None) != (self.late_seconds is None):
            raise UsageError(
                f"late_share = {self.late_share}, late_seconds = {self.late_seconds}: give both, the share of messages "
                "that are late and by how many seconds, or neither"
            )
        if self.late_share is not None and not 0 <= self.late_share <= 1:
            raise UsageError(f"late_share = {self.late_share:g}: a share of all messages is from 0 to 1")
        check_not_negative("late_seconds", self.late_seconds, "it is how much later than usual a late message comes")
        for key in ("latency", "send", "send_per_byte", "receive", "receive_per_byte", "travel", "travel_per_byte"):
            check_not_negative(key, getattr(self, key), MEASURE)
        if (self.travel is None) != (self.travel_per_byte is None):
            raise UsageError(
                f"travel = {self.travel}, travel_per_byte = {self.travel_per_byte}: give both, in seconds and seconds "
                "a byte, or neither; they then follow from latency and bandwidth"
            )
        check_positive("bandwidth", self.bandwidth, MEASURE)
        check_not_negative("residual", self.residual, "measure it again with stretto calibrate")
        if not 1 <= self.contention < math.inf:
            raise UsageError(f"contention = {self.contention:g}: it must be 1 or more; 1 means no slowdown")

    @property
    def seconds_per_byte(self) -> float:
        """beta: seconds that a message takes for each of its bytes."""
        return 1 / self.bandwidth

    @property
    def lateness(self) -> float:
        """Seconds by which a message is late, the mean over all messages."""
        return (self.late_share or 0.0) * (self.late_seconds or 0.0)

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message between idle workers that is not late: alpha + N beta."""
        return self.latency + num_bytes / self.bandwidth

    def or_slower(self, other: "Link") -> "Link":
        """A link with the slower value of each field of two links."""
        if self == other:
            return self
        travel: dict[str, float] = {}
        if self.travel is not None or other.travel is not None:
            travel = dict(zip(("travel", "travel_per_byte"), map(max, self.transit, other.transit), strict=True))
        late = max(self, other, key=lambda link: link.lateness)
        return Link(
            **travel,
            late_share=late.late_share,
            late_seconds=late.late_seconds,
            collectives=slower(self.collectives, other.collectives),
            rings=slower_rings(self.rings, other.rings),
            tree=None if self.tree is None or other.tree is None else self.tree.or_slower(other.tree),
            latency=max(self.latency, other.latency),
            bandwidth=min(self.bandwidth, other.bandwidth),
            contention=max(self.contention, other.contention),
            send=max(self.send, other.send),
            send_per_byte=max(self.send_per_byte, other.send_per_byte),
            receive=max(self.receive, other.receive),
            receive_per_byte=max(self.receive_per_byte, other.receive_per_byte),
        )

    def sending(self, num_bytes: float) -> float:
        """Seconds that a message keeps its sender from computing."""
        return self.send + num_bytes * self.send_per_byte

    def receiving(self, num_bytes: float) -> float:
        """Seconds that a message keeps its receiver from computing."""
        return self.receive + num_bytes * self.receive_per_byte

    @property
    def transit(self) -> tuple[float, float]:
        """The part of a message that keeps neither end busy, while both compute: seconds, and seconds a byte."""
        if self.travel is not None and self.travel_per_byte is not None:
            return self.travel, self.travel_per_byte
        latency = self.latency * self.contention - self.send - self.receive
        per_byte = self.seconds_per_byte * self.contention - self.send_per_byte - self.receive_per_byte
        return max(0.0, latency), max(0.0, per_byte)

    @property
    def gap(self) -> float:
        """Seconds a byte between the starts of two messages; 0 if the ends, and not the link, set their pace."""
        per_byte = self.seconds_per_byte * self.contention
        return per_byte if per_byte > self.send_per_byte + self.receive_per_byte else 0.0


LINK = re.compile(r"(\d+(?:\.\d+)?)([kMG])bit(?:/s)?(?:,(\d+(?:\.\d+)?)(us|ms|s))?")


def read_link(text: str, known: Link | None = None) -> Link:
    """The link of a bandwidth and a latency: "100Mbit,1ms" carries 100 million bits a second, each a millisecond late.

    Without a latency it is that of the `known` link, else 0; so is what a message costs the processors at its ends.
    Raises UsageError for any other text.
    """
    found = LINK.fullmatch(text)
    if found is None or not float(found[1]):
        raise UsageError(f"link={text!r}: give a bandwidth and, if you like, a latency: 100Mbit,1ms or 1Gbit")
    bandwidth = float(found[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[found[2]] / 8
    known = known or Link(latency=0.0, bandwidth=bandwidth)
    latency = known.latency if found[3] is None else float(found[3]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[4]]
    return Link(
        latency=latency, bandwidth=bandwidth, send=known.send, send_per_byte=known.send_per_byte,
        receive=known.receive, receive_per_byte=known.receive_per_byte,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal nodes of `workers` devices each; `within` and `between` name the links in a node and between nodes.

    `speeds` has for each worker of a node how fast it computes, in figures of the device: 0.5 takes twice its time.
    Without it all are as fast as the device. Raises UsageError for numbers that do not fit.
    """

    nodes: int
    workers: int
    device: str
    speeds: tuple[float, ...] | None = None
    within: str | None = None
    between: str | None = None

    def __post_init__(self) -> None:
        of_fields("Group: ", self)
        for key in ("nodes", "workers"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key} = {getattr(self, key)}: it must be 1 or more; leave the group out instead")
        if self.workers > 1 and self.within is None:
            raise UsageError(f"within is missing: name the link between the {self.workers} workers of a node")
        if self.nodes > 1 and self.between is None:
            raise UsageError(f"between is missing: name the link between the {self.nodes} nodes")
        if self.speeds is not None and len(self.speeds) != self.workers:
            raise UsageError(
                f"speeds = {list(self.speeds)}: give one for each of the {self.workers} workers of a node, 1.0 for "
                "those as fast as the device; or leave it out"
            )
        for speed in self.speeds or ():
            if not 0 < speed < math.inf:
                raise UsageError(f"speeds lists {speed:g}: a speed is more than 0; 0.5 takes twice the device's time")


class WorkerPlace(NamedTuple):
    """The group and the node of a worker."""

    group: int
    node: int  # numbered through all groups


class WorkerKind(NamedTuple):
    """What workers that compute alike have in common: the name of the device, and their speed."""

    device: str
    speed: float = 1.0

    def __str__(self) -> str:
        return self.device if self.speed == 1 else f"{self.device} at {self.speed:.2g} of its speed"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Groups of nodes. `between` names the link between groups; `sources` gives the source of each figure by its key.

    `storage_bandwidth` are the bytes/s at which all workers together write a checkpoint, `restart_seconds` the time
    from a failure until training goes on from the last checkpoint; None if not known. `doubts` are reasons, in words,
    not to rely on the figures. Raises UsageError for devices or links that are missing.
    """

    name: str
    groups: tuple[Group, ...]
    devices: Mapping[str, Device]
    links: Mapping[str, Link] = field(default_factory=dict)
    between: str | None = None
    storage_bandwidth: float | None = None
    restart_seconds: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        of_fields("Cluster: ", self)
        check_positive("storage_bandwidth", self.storage_bandwidth, "leave it out if it is not known")
        check_not_negative("restart_seconds", self.restart_seconds, "leave it out if it is not known")
        if not self.groups:
            raise UsageError("groups is empty: give at least one, [[groups]] with nodes, workers and device")
        if self.num_workers > MOST_WORKERS:
            raise UsageError(
                f"groups has {self.num_workers:,} workers in all: {MOST_WORKERS:,} at most are planned for"
            )
        named_links = [(f"groups[{i}].{key}", getattr(g, key)) for i, g in enumerate(self.groups) for key in LINKED]
        for key, link in [*named_links, ("between", self.between)]:
            if link is not None and link not in self.links:
                raise UsageError(f"{key} = {link!r}: there is no such link: {nearest(link, self.links)}")
        for index, group in enumerate(self.groups):
            if group.device not in self.devices:
                raise UsageError(
                    f"groups[{index}].device = {group.device!r}: there is no such device: "
                    f"{nearest(group.device, self.devices)}"
                )
        if len(self.groups) > 1 and self.between is None:
            raise UsageError(f"between is missing: name the link that joins the {len(self.groups)} groups")

    def on_machines(self, machines: int, workers: int | None = None, link: str | None = None) -> "Cluster":
        """So many machines, each like a node of this cluster: of all its devices, or of an equal share of `workers`.

        `link` is what joins them, a bandwidth and a latency, "100Mbit,1ms"; without it, what joins nodes here. Raises
        UsageError where nodes differ, or have too few devices.
        """
        whole("machines", machines, 1, MOST_WORKERS)
        node, *others = self.groups
        if any(replace(other, nodes=node.nodes, between=node.between) != node for other in others):
            raise UsageError(f"machines={machines}: nodes of cluster {self.name!r} differ; leave machines out")
        each, rest = (node.workers, 0) if workers is None else divmod(workers, machines)
        if rest or not 1 <= each <= node.workers:
            raise UsageError(
                f"workers={workers} on {machines} machines: give a multiple of {machines}, at most "
                f"{machines * node.workers}, as a node of cluster {self.name!r} has {node.workers}"
            )
        former = self.between or node.between
        if former is None and link is None and machines > 1:
            raise UsageError(f"machines={machines}: nothing joins nodes of {self.name!r}: give link=100Mbit,1ms")
        links, name = dict(self.links), former
        if link is not None:
            name = f"{link} between machines"
            links[name] = read_link(link, None if (known := former or node.within) is None else links[known])
        speeds = None if node.speeds is None else node.speeds[:each]
        group = replace(node, nodes=machines, workers=each, speeds=speeds, between=name)
        return replace(self, name=f"{machines} x {self.name}", groups=(group,), links=links, between=None)

    @cached_property
    def places(self) -> tuple[WorkerPlace, ...]:
        """The place of each worker."""
        places: list[WorkerPlace] = []
        node = 0
        for index, group in enumerate(self.groups):
            for _ in range(group.nodes):
                places += [WorkerPlace(index, node)] * group.workers
                node += 1
        return tuple(places)

    @cached_property
    def num_workers(self) -> int:
        """The number of workers: one for each device of all groups."""
        return sum(group.nodes * group.workers for group in self.groups)

    def place(self, worker: int) -> WorkerPlace:
        """The group and node of a worker. Raises UsageError if the cluster has no such worker."""
        if not (type(worker) is int or is_whole(worker)) or not 0 <= worker < self.num_workers:
            raise UsageError(
                f"worker {shown(worker)} of cluster {self.name!r}, which has {self.num_workers}: use fewer, or add "
                "nodes"
            )
        return self.places[worker]

    @cached_property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """The kind of each worker."""
        kinds: list[WorkerKind] = []
        for group in self.groups:
            speeds = group.speeds or (1.0,) * group.workers
            kinds += group.nodes * [WorkerKind(group.device, speed) for speed in speeds]
        return tuple(kinds)

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some workers compute otherwise than others."""
        return len({*self.kinds}) > 1

    @cached_property
    def devices_by_kind(self) -> Mapping[WorkerKind, Device]:
        """The device of each kind of worker, at its speed."""
        return {
            kind: self.devices[kind.device] if kind.speed == 1 else self.devices[kind.device].at_speed(kind.speed)
            for kind in dict.fromkeys(self.kinds)
        }

    def device(self, worker: int) -> Device:
        """The device of a worker, at the worker's speed."""
        self.place(worker)  # raises for a worker that there is not
        return self.devices_by_kind[self.kinds[worker]]

    def link(self, a: int, b: int) -> Link:
        """The link between two workers."""
        place, other_place = self.place(a), self.place(b)
        group = self.groups[place.group]
        name = (
            self.between
            if place.group != other_place.group
            else group.within
            if place.node == other_place.node
            else group.between
        )
        assert name is not None, "checked when the cluster was made"
        return self.links[name]

    def links_among(self, workers: Iterable[int]) -> list[Link]:
        """Every different link between these workers."""
        return self._links_among(Counter(map(self.place, workers)))

    def _links_among(self, places: Counter[WorkerPlace]) -> list[Link]:
        nodes = {group: {p.node for p in places if p.group == group} for group in {p.group for p in places}}
        names = [self.between] if len(nodes) > 1 else []
        names += [self.groups[group].between for group, group_nodes in nodes.items() if len(group_nodes) > 1]
        names += [self.groups[place.group].within for place, count in places.items() if count > 1]
        return [self.links[name] for name in dict.fromkeys(names) if name is not None]

    def collective_links(self, workers: Iterable[int]) -> list[Link]:
        """Every different link between these workers; those within and between nodes as one where both have rings."""
        steps = self.steps_of(workers)
        if steps is not None and steps in self._links_by_steps:
            return list(self._links_by_steps[steps])
        links = self._links_by_nodes(Counter(map(self.place, workers)))
        if steps is not None:
            self._links_by_steps[steps] = links
        return list(links)

    def steps_of(self, workers: Iterable[int]) -> tuple[int, int, int] | None:
        """What tells the links between workers at equal distances where all nodes are alike; None for any others."""
        if len(self.groups) > 1 or not isinstance(workers, range) or not workers or workers[-1] >= self.num_workers:
            return None
        return workers.start % self.groups[0].workers, workers.step, len(workers)

    def _links_by_nodes(self, nodes: Counter[WorkerPlace]) -> list[Link]:
        shape = tuple((place.group, count) for place, count in nodes.items())  # all that tells, of many such workers
        if shape not in self._links_by_shape:
            self._links_by_shape[shape] = self._collective_links(nodes)
        return self._links_by_shape[shape]

    def _collective_links(self, nodes: Counter[WorkerPlace]) -> list[Link]:
        links = self._links_among(nodes)
        if not any(link.rings for link in links):
            return links
        per_node, most = min(nodes.values(), default=0), max(nodes.values(), default=0)
        if len(nodes) < 2 or len(links) != (1 if most == 1 else 2) or not all(link.rings for link in links):
            return links
        between, within = links[0], links[1] if most > 1 else None
        key = (id(between), id(within), len(nodes), per_node)
        if key not in self._joined_links:
            self._joined_links[key] = joined_links(within if per_node > 1 else None, between, len(nodes), per_node)
        return [self._joined_links[key]]

    @cached_property
    def _links_by_shape(self) -> dict[tuple[tuple[int, int], ...], list[Link]]:
        return {}

    @cached_property
    def _links_by_steps(self) -> dict[tuple[int, int, int], list[Link]]:
        return {}

    @cached_property
    def _joined_links(self) -> dict[tuple[int, int, int, int], Link]:
        return {}

    def crowded(self, workers: Iterable[int]) -> tuple[bool, ...]:
        """For each of these workers, whether another of them is on its node."""
        nodes = [self.place(worker).node for worker in workers]
        counts = Counter(nodes)
        return tuple(counts[node] > 1 for node in nodes)

    def price_per_hour(self, workers: Collection[int]) -> float | None:
        """The price of these workers together, an hour; None if the price of one is not known."""
        return self.sum_over(workers, lambda device: device.price_per_hour)

    def watts(self, workers: Collection[int]) -> float | None:
        """The power of these workers together while they train; None if the power of one is not known."""
        return self.sum_over(workers, lambda device: device.watts)

    def waiting_watts(self, workers: Collection[int]) -> float | None:
        """The power of these workers together while they wait for others; None if the power of one is not known."""
        return self.sum_over(workers, lambda device: device.waiting_watts)

    def failures_per_second(self, workers: Collection[int]) -> float | None:
        """How often one of these workers fails; None if that of one is not known."""
        return self.sum_over(
            workers, lambda device: None if device.mtbf_hours is None else 1 / device.mtbf_hours / 3600
        )

    def sum_over(self, workers: Collection[int], figure: Callable[[Device], float | None]) -> float | None:
        """The sum of a figure over these workers' devices; None if that of one is not known."""
        ends = workers[:: len(workers) - 1] if isinstance(workers, range) and len(workers) > 1 else workers
        if not self.is_uneven and max(ends, default=0) < self.num_workers:
            value = figure(self.device(0))
            return None if value is None else len(workers) * value
        return sum_of_known(figure(self.device(worker)) for worker in workers)


def joined_links(within: Link | None, between: Link, nodes: int, per_node: int) -> Link:
    """The link between nodes, with rings and the tree of collectives over all of them."""
    inside = None if within is None else within.rings
    rings = joined_rings(inside, between.rings, nodes, per_node)
    tree = joined_tree(None if within is None else within.tree, between.tree, nodes, per_node)
    return replace(between, rings=rings, tree=tree)


def sum_of_known(values: Iterable[float | None]) -> float | None:
    """The sum; None if one of the values is not known."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


LINKED = ("within", "between")
