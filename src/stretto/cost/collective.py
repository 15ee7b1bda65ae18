"""What a collective takes among processes that compute before it and after it, as training runs it.

Collectives as a library runs them that passes messages on, over links within nodes and between them. No torch here.

Among P processes, N bytes: a gather, or a scattered sum, takes base + (P - 1) step + (P - 1)/P N / bandwidth; an
all-reduce base + 2 (P - 1) step + 2 (P - 1)/P N / bandwidth. A library has several protocols, some quick to start and
others that move more bytes a second, and takes the fastest; for an all-reduce it may also pass messages along a tree. A
ring through n nodes crosses from node to node n - 1 times, and each of a node's processes has a link of its own to
other nodes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.errors import UsageError

Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A protocol of a ring or tree: seconds to begin and of each step, and the bytes/s that each process sends.

    `among` has the bytes/s among fewer processes of a node, by their number, where they share fewer of its links.
    Raises UsageError for numbers out of range.
    """

    base: float
    step: float
    bandwidth: float
    among: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for key in ("base", "step"):
            if not 0 <= getattr(self, key) < math.inf:
                raise UsageError(f"{key} = {getattr(self, key):g}: it must be 0 or more seconds")
        if not self.bandwidth > 0:
            raise UsageError(f"bandwidth = {self.bandwidth:g}: it must be more than 0 bytes/s")
        for processes, bandwidth in self.among.items():
            if processes < 2 or not bandwidth > 0:
                raise UsageError(
                    f"among.{processes} = {bandwidth:g}: give bytes/s above 0 by a number of processes from 2 on"
                )

    def bandwidth_among(self, processes: int) -> float:
        """The bytes/s that each of so many processes sends."""
        return self.among.get(processes, self.bandwidth)

    def or_slower(self, other: "Steps") -> "Steps":
        """The slower value of each field."""
        return Steps(
            base=max(self.base, other.base),
            step=max(self.step, other.step),
            bandwidth=min(self.bandwidth, other.bandwidth),
            among={
                processes: min(self.bandwidth_among(processes), other.bandwidth_among(processes))
                for processes in {**self.among, **other.among}
            },
        )

    def seconds(self, passes: int, processes: int, num_bytes: Amount) -> Amount:
        """Seconds of one pass around the ring, a gather, or of two, an all-reduce."""
        sent = passes * (processes - 1) / processes * num_bytes
        return self.base + passes * (processes - 1) * self.step + sent / self.bandwidth_among(processes)


def gather_seconds(rings: Mapping[str, Steps], processes: int, num_bytes: Amount) -> Amount:
    """Seconds of an all-gather, or of a reduce-scatter, of so many bytes in all, by the fastest protocol."""
    return least(ring.seconds(1, processes, num_bytes) for ring in rings.values())


def all_reduce_seconds(rings: Mapping[str, Steps], tree: Steps | None, processes: int, num_bytes: Amount) -> Amount:
    """Seconds of an all-reduce, by the fastest protocol of rings, or by the tree."""
    ways = [*rings.values(), *([] if tree is None else [tree])]
    return least(way.seconds(2, processes, num_bytes) for way in ways)


def least(seconds: Iterable[Amount]) -> Amount:
    """The least of several figures, element by element."""
    return reduce(np.minimum, seconds)


def slower_rings(one: Mapping[str, Steps], other: Mapping[str, Steps]) -> dict[str, Steps]:
    """The protocols that both links have, each as the slower one."""
    return {name: ring.or_slower(other[name]) for name, ring in one.items() if name in other}


def joined(within: Steps | None, between: Steps, nodes: int, per_node: int, crossings: float, inside: float) -> Steps:
    """A ring or tree over `per_node` processes on each of several nodes, its steps as long as theirs are on average.

    `crossings` of its steps are between nodes, and `inside` within.
    """
    num_steps = nodes * per_node - 1
    if within is None:
        return Steps(base=between.base, step=crossings * between.step / num_steps, bandwidth=between.bandwidth)
    return Steps(
        base=max(within.base, between.base),
        step=(inside * within.step + crossings * between.step) / num_steps,
        bandwidth=min(within.bandwidth_among(per_node), per_node * between.bandwidth),
    )


def joined_rings(
    within: Mapping[str, Steps] | None, between: Mapping[str, Steps], nodes: int, per_node: int
) -> dict[str, Steps]:
    """Rings through several nodes, by the protocols that both links have."""
    inside = nodes * per_node - nodes
    if within is None:
        return {name: joined(None, ring, nodes, per_node, nodes - 1, inside) for name, ring in between.items()}
    names = [name for name in between if name in within]
    return {name: joined(within[name], between[name], nodes, per_node, nodes - 1, inside) for name in names}


def joined_tree(within: Steps | None, between: Steps | None, nodes: int, per_node: int) -> Steps | None:
    """A tree over several nodes, a chain in each."""
    if between is None or (within is None and per_node > 1):
        return None
    return joined(within, between, nodes, per_node, math.log2(nodes), per_node - 1)


GRADIENTS = "gradients"  # replicas meet and sum their gradients: packing, messages, unpacking, waiting for each other
SHARDING = "sharding"  # beside a meeting of replicas: weights gathered once, gradients scattered once, a step
RESHARDING = "resharding"  # the same with weights gathered again for the backward
TENSOR_SUM, TENSOR_GATHER = "tensor-sum", "tensor-gather"  # of processes that share weights
TENSOR_SCATTER = "tensor-scatter"  # takes what a gather takes, and is not measured
HALO = "halo"  # rows for the neighbours of a slab, and theirs
NAMES = (GRADIENTS, SHARDING, RESHARDING, TENSOR_SUM, TENSOR_GATHER, HALO)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Seconds: calls x per_call + tensors x per_tensor + bytes x per_byte, measured among `processes`.

    Bytes are those of whole tensors. `residual` is the root mean square of the fit's relative errors. Raises UsageError
    for numbers out of range.
    """

    processes: int
    per_call: float
    per_byte: float
    per_tensor: float = 0.0
    residual: float | None = None

    def __post_init__(self) -> None:
        if self.processes < 2:
            raise UsageError(f"processes = {self.processes}: a collective takes 2 or more")
        for key in ("per_call", "per_byte", "per_tensor"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise UsageError(f"{key} = {value:g}: it must be 0 or more; measure it again with stretto calibrate")

    def seconds(
        self, processes: int, num_bytes: Amount, *, calls: Amount | float = 1.0, tensors: Amount | float = 0.0
    ) -> Amount:
        """Seconds among so many processes: a call's grow with the messages of a ring, a byte's with what each sends."""
        messages = (processes - 1) / (self.processes - 1)
        sent = (processes - 1) / processes * self.processes / (self.processes - 1)
        return messages * calls * self.per_call + tensors * self.per_tensor + sent * num_bytes * self.per_byte

    def or_slower(self, other: "Collective") -> "Collective":
        """The slower value of each field."""
        return Collective(
            processes=min(self.processes, other.processes),
            per_call=max(self.per_call, other.per_call),
            per_byte=max(self.per_byte, other.per_byte),
            per_tensor=max(self.per_tensor, other.per_tensor),
        )


def slower(one: Mapping[str, Collective], other: Mapping[str, Collective]) -> dict[str, Collective]:
    """The collectives that both links know, each as the slower one."""
    return {name: one[name].or_slower(other[name]) for name in one.keys() & other.keys()}
