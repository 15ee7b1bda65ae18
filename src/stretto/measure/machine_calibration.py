"""Calibration of the machine at hand: what processes measure together, and the cluster that follows from it."""

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from stretto.cost.cluster import Cluster, Device, Group, Link
from stretto.cost.collective import GRADIENTS, HALO, TENSOR_GATHER, TENSOR_SUM, Collective
from stretto.cost.records import TableReader
from stretto.errors import StrettoError
from stretto.measure.all_reduce import adding, ping_pong
from stretto.measure.collective_times import WORK, CollectiveTime, collectives_of, measure_collectives
from stretto.measure.collective_times import steps_of as steps_of_collectives
from stretto.measure.messages import Passage, measure_passages
from stretto.measure.nonnegative_fit import line
from stretto.measure.overhead import Overhead, measure_overhead
from stretto.measure.rates import MeasuredCase, measure_rates, rates_of, turns_of
from stretto.measure.worker_speeds import Rounds, SpeedRounds, in_words, mean_time, speeds_of

SIZES = tuple(1 << exponent for exponent in range(6, 25, 2))  # bytes of messages: 64 B to 16 MB
QUICK_SIZES = (1 << 8, 1 << 14, 1 << 20)
PASSED = tuple(1 << exponent for exponent in range(6, 24, 3))  # bytes of messages of the runtime: 64 B to 2 MB
QUICK_PASSED = (1 << 6, 1 << 20)

MORE_ROUNDS = 3  # of equal work, beside one after each step of a measurement
NOISY, LOADED = 0.1, 0.5  # spread of repeats, and load of other programs, from which on figures are doubtful

Times = tuple[tuple[int, float], ...]  # (bytes, seconds)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was measured: times, and of what; `load` is that of others when it began.

    Passages are messages of the runtime.
    """

    workers: int
    per_node: int
    points: tuple[MeasuredCase, ...]
    within: Times
    between: Times
    within_passages: tuple[Passage, ...]
    between_passages: tuple[Passage, ...]
    additions: Times
    overhead: Overhead
    load: float
    alone: Overhead | None = None  # overhead of training in one process
    collectives: tuple[CollectiveTime, ...] = ()
    speed_rounds: Rounds = ()  # seconds of equal work on each worker

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Findings":
        """Findings from what `to_dict` gave, also through JSON."""
        return TableReader("calibration").record(cls, "", content)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @property
    def noise(self) -> float:
        """The median over cases of how far their repeats lie apart, as a share."""
        return statistics.median(point.noise for point in self.points)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """The speed of each worker in that of the first; None if all are as fast."""
        return speeds_of(self.speed_rounds)


def measure_machine(*, per_node: int, quick: bool, load: float, tell: Callable[[], object]) -> Findings:
    """Measure among all processes of the job, of which each node has `per_node`; the same result on all of them.

    Messages go between the first two processes of the first node, and between the first ones of the first two nodes.
    """
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup), "whoever calls this has started several processes"
    sizes, passed = (QUICK_SIZES, QUICK_PASSED) if quick else (SIZES, PASSED)
    speeds = SpeedRounds(world, quick=quick)

    def tell_after_round() -> None:
        speeds.measure()
        tell()

    points = measure_rates(world, quick=quick, tell=tell_after_round)
    within = messages(0, 1, sizes) if per_node > 1 else ()
    within_passages = passages(0, 1, passed) if per_node > 1 else ()
    tell()
    between = messages(0, per_node, sizes) if world.size() > per_node else ()
    between_passages = passages(0, per_node, passed) if world.size() > per_node else ()
    tell()
    overhead = measure_overhead(world, (within_passages or between_passages)[0])
    tell()
    additions = tuple((size, adding(world, size)) for size in sizes)
    tell()
    collectives = measure_collectives(world, quick=quick, tell=tell_after_round)
    for _ in range(MORE_ROUNDS):
        speeds.measure()
    return Findings(
        workers=world.size(), per_node=per_node, points=tuple(points), within=within, between=between,
        within_passages=within_passages, between_passages=between_passages, additions=additions, overhead=overhead,
        collectives=collectives, load=load, speed_rounds=speeds.times,
    )  # fmt: skip


def steps_of(quick: bool) -> int:
    """How often `measure_machine` tells that it has come further."""
    return turns_of(quick) + 4 + steps_of_collectives()


def messages(one: int, other: int, sizes: Sequence[int]) -> Times:
    """Seconds of messages between two processes, one way; all processes must come here."""
    pair = dist.new_group([one, other])
    times = torch.zeros(len(sizes), dtype=torch.float64)
    if dist.get_rank() in (one, other):
        assert isinstance(pair, dist.ProcessGroup)
        times = torch.tensor([ping_pong(pair, size) for size in sizes], dtype=torch.float64)
    dist.broadcast(times, one)
    return tuple(zip(sizes, times.tolist(), strict=True))


def passages(one: int, other: int, sizes: Sequence[int]) -> tuple[Passage, ...]:
    """The same of messages of the runtime, while both compute."""
    pair = dist.new_group([one, other])
    found = torch.zeros(len(sizes), len(Passage._fields), dtype=torch.float64)
    if dist.get_rank() in (one, other):
        assert isinstance(pair, dist.ProcessGroup)
        found = torch.tensor(measure_passages(pair, sizes), dtype=torch.float64)
    dist.broadcast(found, one)
    return tuple(Passage(int(size), *seconds) for size, *seconds in found.tolist())


def link_of(times: Times, passed: Sequence[Passage] = ()) -> Link:
    """alpha and beta from times of messages, and what its ends have to do with one while they compute."""
    found = line(times)
    latency, per_byte = found.rates
    if per_byte <= 0:
        raise StrettoError(
            f"messages of {times[-1][0]} bytes took no longer than those of {times[0][0]}: other work has kept these "
            "processes waiting; calibrate while the machine has nothing else to do"
        )
    if not passed:
        return Link(latency=latency, bandwidth=1 / per_byte, residual=found.residual)
    send, receive, whole = (
        line([(each.bytes, max(seconds, 1e-9)) for each, seconds in zip(passed, column, strict=True)]).rates
        for column in (
            [each.send for each in passed],
            [each.receive for each in passed],
            [each.send + each.travel + each.receive for each in passed],
        )
    )
    way = max(whole[1], per_byte) - send[1] - receive[1]  # no byte is faster because its ends compute
    return Link(
        latency=latency,
        bandwidth=1 / per_byte,
        send=send[0],
        send_per_byte=send[1],
        receive=receive[0],
        receive_per_byte=receive[1],
        travel=max(0.0, whole[0] - send[0] - receive[0]),
        travel_per_byte=max(0.0, way),
        residual=found.residual,
    )


def cluster_of(findings: Findings) -> Cluster:
    """The machine as a cluster, with residuals: what `stretto plan` takes."""
    links = {}
    if findings.within:
        links["within"] = link_of(findings.within, findings.within_passages)
    if findings.between:
        links["between"] = link_of(findings.between, findings.between_passages)
    slowest = "between" if findings.between else "within"  # all processes took part
    collectives = collectives_of(findings.collectives, findings.workers)
    if findings.speeds is not None:
        collectives = without_waits(collectives, findings.speeds)
    links[slowest] = replace(links[slowest], collectives=collectives)
    name = platform.node() or "this machine"
    how = (
        f"measured by stretto calibrate: {findings.workers} processes of one thread, medians of interleaved repeats, "
        f"which lie {100 * findings.noise:.0f} % apart; load of others when it began: {findings.load:.1f}"
    )
    groups = groups_of(findings)
    speeds = {"groups.speeds": in_words(findings.speed_rounds)} if len(findings.speed_rounds) > 1 else {}
    return Cluster(
        name=name,
        groups=groups,
        devices={"cpu": device_of(findings)},
        links=links,
        between="between" if len(groups) > 1 else None,
        sources={"devices.cpu": how, **speeds},
        doubts=doubts_of(findings),
    )


def groups_of(findings: Findings) -> tuple[Group, ...]:
    """One group of equal nodes; where workers differ and nodes do too, a group for each node."""
    size, speeds = findings.per_node, findings.speeds
    nodes: list[tuple[float, ...] | None] = [
        None if speeds is None else speeds[first : first + size] for first in range(0, findings.workers, size)
    ]
    group = Group(
        nodes=1,
        workers=size,
        device="cpu",
        speeds=nodes[0],
        within="within" if findings.within else None,
        between="between" if findings.between else None,
    )
    if len({*nodes}) == 1:
        return (replace(group, nodes=len(nodes)),)
    return tuple(replace(group, speeds=node) for node in nodes)


def without_waits(collectives: Mapping[str, Collective], speeds: Sequence[float]) -> dict[str, Collective]:
    """The collectives without the time that fast workers wait for slow ones in a round: work has a price of its own."""
    waits = WORK * (max(1 / speed for speed in speeds) / mean_time(speeds) - 1)
    beside_work = (GRADIENTS, TENSOR_SUM, TENSOR_GATHER, HALO)
    return {
        name: replace(each, per_call=max(0.0, each.per_call - waits)) if name in beside_work else each
        for name, each in collectives.items()
    }


def doubts_of(findings: Findings) -> tuple[str, ...]:
    """Why the figures may be wrong: other programs that computed at the same time, or before."""
    doubts = []
    if findings.noise > NOISY:
        doubts.append(f"repeats of the calibration lie {100 * findings.noise:.0f} % apart")
    if findings.load > LOADED:
        doubts.append(f"other programs kept {findings.load:.1f} cores busy when the calibration began")
    return tuple(doubts)


def device_of(findings: Findings) -> Device:
    """What the first process computes with. Peaks are the fastest that was seen, memory is shared by those of a node.

    Where workers differ, what all measured together is that of the slowest, or a mean.
    """
    speeds = findings.speeds or (1.0,)
    slowest, mean = max(1 / speed for speed in speeds), mean_time(speeds)
    rates = {
        operator: {
            direction: replace(rate, contention=max(1.0, rate.contention / slowest))
            for direction, rate in passes.items()
        }
        for operator, passes in rates_of(findings.points).items()
    }
    peak = max(point.amounts[1] / point.alone for point in findings.points)
    copies = [point for point in findings.points if point.operator == "copy"]
    largest = max(copies, key=lambda point: point.amounts[2])
    gamma = line(findings.additions).rates[1] / slowest
    return Device(
        memory=memory() / findings.per_node,
        memory_bandwidth=largest.amounts[2] / largest.alone,
        peak={"float32": peak},
        reduction_bandwidth=1 / gamma if gamma else None,
        per_action=findings.overhead.per_action / mean,
        per_step=findings.overhead.per_step / mean,
        alone_per_action=None if findings.alone is None else findings.alone.per_action,
        alone_per_step=None if findings.alone is None else findings.alone.per_step,
        rates=rates,
    )


def memory() -> float:
    """Bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
