"""Where the seconds of computing go: to FLOPs at the peak, below it, to memory and to starting kernels.

Each part is what computing takes longer on devices that have one limit more, as a share of the whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf

from stretto.cost.attained import Attained
from stretto.cost.cluster import Device
from stretto.plan.branch_and_bound import Plan
from stretto.plan.candidate_costs import Prices

PARTS = ("computing", "below peak", "memory traffic", "launches")


def at_peak(device: Device) -> Device:
    """The device with FLOPs at its peak and nothing else."""
    limits = replace(device, attained=None, memory_bandwidth=inf, on_chip_bandwidth=None, on_chip_memory=None)
    return replace(limits, variation=None)


def below_peak(device: Device) -> Device:
    """The device with the FLOPs that kernels attain."""
    return without_starts(replace(device, memory_bandwidth=inf, on_chip_bandwidth=None, on_chip_memory=None))


def without_starts(device: Device) -> Device:
    """The device whose kernels take no time to start."""
    attained = device.attained or Attained()
    return replace(device, attained=replace(attained.without_host(), per_kernel=0.0))


LIMITS: tuple[Callable[[Device], Device], ...] = (at_peak, below_peak, without_starts, lambda device: device)


def split_computing(terms: Mapping[str, float], plan: Plan, prices: Prices) -> dict[str, float]:
    """The terms of a plan with those of computing in PARTS, where devices say what they attain."""
    cluster = prices.problem.cluster
    if all(device.attained is None for device in cluster.devices.values()):
        return dict(terms)
    seconds = []
    for limited in LIMITS:
        devices = {name: limited(device) for name, device in cluster.devices.items()}
        variant = Prices(prices.problem.but(cluster=replace(cluster, devices=devices)))
        seconds.append(computing_seconds(plan, variant))
    if not seconds[-1]:
        return dict(terms)
    scale = terms["computing"] / seconds[-1]
    steps = [seconds[0], *(after - before for before, after in pairwise(seconds))]
    return {**terms, **{name: scale * step for name, step in zip(PARTS, steps, strict=True)}}


def computing_seconds(plan: Plan, prices: Prices) -> float:
    """Seconds of all stages' forwards and backwards of a micro-batch."""
    c, total = plan.candidate, 0.0
    for s, (start, end) in enumerate(pairwise(plan.bounds)):
        times = prices.slowest(c, c.worker_of(s))
        total += float(times.forward[start, end] + times.backward[start, end])
    return total
