"""Seconds of messages and collectives on the links of a cluster, of one number of bytes or of many. No torch here."""

from collections.abc import Sequence

import numpy as np

from stretto.cost.cluster import Link
from stretto.cost.collective import GRADIENTS, TENSOR_GATHER, TENSOR_SUM, all_reduce_seconds, gather_seconds
from stretto.cost.layer_sums import Numbers
from stretto.cost.layer_table import Work, Works

Amounts = Numbers | float


def message(link: Link | None, num_bytes: Numbers) -> Numbers:
    """Seconds of a message that keep neither end busy, while both compute, lateness included; 0 without a link."""
    if link is None:
        return np.zeros_like(num_bytes)
    latency, per_byte = link.transit
    return latency + link.lateness + num_bytes * per_byte


def sending(link: Link | None, num_bytes: Numbers) -> Numbers:
    """Seconds that a message keeps its sender busy."""
    return np.zeros_like(num_bytes) if link is None else link.send + num_bytes * link.send_per_byte


def receiving(link: Link | None, num_bytes: Numbers) -> Numbers:
    """Seconds that a message keeps its receiver busy."""
    return np.zeros_like(num_bytes) if link is None else link.receive + num_bytes * link.receive_per_byte


def gathering(links: Sequence[Link], processes: int, num_bytes: Numbers) -> Numbers:
    """Seconds of a ring all-gather: P - 1 messages of N / P bytes on the slowest link; 0 for no bytes."""
    if processes == 1 or not links:
        return np.zeros_like(num_bytes)
    times = [gathering_on(link, processes, num_bytes) for link in links]
    return np.where(num_bytes > 0, np.maximum.reduce(times), 0.0)


def gathering_on(link: Link, processes: int, num_bytes: Numbers) -> Numbers:
    """Seconds of a ring all-gather on one link."""
    late = (processes - 1) * link.lateness
    if link.rings:
        return late + gather_seconds(link.rings, processes, num_bytes)
    return late + (processes - 1) * (link.latency + num_bytes / processes / link.bandwidth)


def scattering(links: Sequence[Link], processes: int, num_bytes: Numbers, gamma: float) -> Numbers:
    """Seconds of a ring reduce-scatter: as a gather, plus the additions, which rings of a library have in them."""
    additions = 0.0 if any(link.rings for link in links) else gamma
    return gathering(links, processes, num_bytes) + (processes - 1) / processes * num_bytes * additions


def gradient_sum(links: Sequence[Link], processes: int, num_bytes: Numbers, tensors: Numbers, gamma: float) -> Numbers:
    """Seconds in which replicas meet and sum gradients, as measured, else those of a ring; 0 for no bytes."""
    if processes == 1 or not links:
        return np.zeros_like(num_bytes)
    times = [
        link.collectives[GRADIENTS].seconds(processes, num_bytes, tensors=tensors) + waits(link, processes)
        if GRADIENTS in link.collectives
        else all_reduce([link], processes, num_bytes, gamma)
        for link in links
    ]
    return np.where(num_bytes > 0, np.maximum.reduce(times), 0.0)


def measured_seconds(
    name: str,
    links: Sequence[Link],
    processes: int,
    num_bytes: Numbers,
    *,
    calls: Amounts = 1.0,
    tensors: Amounts = 0.0,
) -> Numbers | None:
    """Seconds of a collective on the slowest of some links, 0 for no bytes; None where it was not measured on all."""
    if not links or not all(name in link.collectives for link in links):
        return None
    times = [
        link.collectives[name].seconds(processes, num_bytes, calls=calls, tensors=tensors)
        + calls * waits(link, processes)
        for link in links
    ]
    return np.where(num_bytes > 0, np.maximum.reduce(times), 0.0)


def waits(link: Link, processes: int) -> float:
    """Seconds by which late messages make a measured collective longer: those of a ring, one after the other."""
    return 2 * (processes - 1) * link.lateness


def exchange_seconds(works: Works, links: Sequence[Link], processes: int, examples: float, gamma: float) -> float:
    """Seconds of what processes that share a layer send each other in a pass."""
    return max(
        (sum(exchange_on(link, work, processes, examples, gamma) for work in works) for link in links), default=0.0
    )


def exchange_on(link: Link, work: Work, processes: int, examples: float, gamma: float) -> float:
    """Seconds of exchanges of one sort on one link: as measured, else those of rings."""
    is_sum, num_bytes = work.operator == TENSOR_SUM, work.bytes.at(examples)
    measured = link.collectives.get(TENSOR_SUM if is_sum else TENSOR_GATHER)
    if measured is not None:
        return measured.seconds(processes, num_bytes, calls=work.calls) + work.calls * waits(link, processes)
    each = np.array(num_bytes / work.calls)
    if is_sum:
        return work.calls * float(all_reduce([link], processes, each, gamma))
    if work.operator == TENSOR_GATHER:
        return work.calls * float(gathering([link], processes, each))
    return work.calls * float(scattering([link], processes, each, gamma))


def all_reduce(links: Sequence[Link], processes: int, num_bytes: Numbers, gamma: float) -> Numbers:
    """Seconds of an all-reduce: a library's own, else a gather and a scatter on a ring."""
    if processes == 1 or not links or not all(link.rings for link in links):
        return gathering(links, processes, num_bytes) + scattering(links, processes, num_bytes, gamma)
    times = [waits(link, processes) + all_reduce_seconds(link.rings, link.tree, processes, num_bytes) for link in links]
    return np.where(num_bytes > 0, np.maximum.reduce(times), 0.0)
