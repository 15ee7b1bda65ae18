"""A pipeline's workers on a cluster: their devices, what the runtime takes there, and what lies between them."""

from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import permutations
from math import inf

from stretto.cost.cluster import Cluster, Device, Link
from stretto.cost.worker_memory import SMALL
from stretto.simulate import Link as Way
from stretto.simulate import Network


@dataclass(frozen=True)
class Workers:
    """Worker w stands on the cluster's workers `ranks[w]`: on one for each replica, and for each part of its stages.

    Of several devices, and of the links from each to its peer, the slowest count.
    """

    cluster: Cluster
    ranks: tuple[tuple[int, ...], ...]
    _links: dict[tuple[int, int], Link] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def alone(cls, cluster: Cluster, number: int) -> "Workers":
        """So many on the first devices of a cluster, one each."""
        return cls(cluster, tuple((worker,) for worker in range(number)))

    @property
    def number(self) -> int:
        """How many workers the pipeline has."""
        return len(self.ranks)

    def devices(self, worker: int) -> tuple[Device, ...]:
        """The devices that a worker stands on, each kind once."""
        names = dict.fromkeys(self.cluster.groups[self.cluster.place(rank).group].device for rank in self.ranks[worker])
        return tuple(self.cluster.devices[name] for name in names)

    def per_action(self, worker: int) -> float:
        """Seconds of the runtime for each action."""
        return max(device.per_action for device in self.devices(worker))

    def per_step(self, worker: int) -> float:
        """Seconds of the runtime for each turn."""
        return max(device.per_step for device in self.devices(worker))

    def copying(self, worker: int, num_bytes: float) -> float:
        """A copy: reads and writes."""
        return 2 * num_bytes / min(device.memory_bandwidth for device in self.devices(worker))

    def link(self, a: int, b: int) -> Link:
        """What lies between two of them."""
        if (a, b) not in self._links:
            pairs = zip(self.ranks[a], self.ranks[b], strict=True)
            self._links[a, b] = reduce(Link.or_slower, dict.fromkeys(self.cluster.link(*pair) for pair in pairs))
        return self._links[a, b]

    def losses(self, worker: int, last: int) -> float:
        """What it takes to tell the losses of a turn, one message for each other worker, or to hear them of the last.

        The last worker makes them.
        """
        if worker != last:
            return self.link(last, worker).receiving(SMALL)
        return sum(self.link(worker, to).sending(SMALL) for to in range(self.number) if to != worker)

    def network(self, unit: float = 1.0) -> Network:
        """What is left of messages between them, in units of time of which a second has so many."""

        def way(link: Link) -> Way:
            latency, per_byte = link.way
            return Way(unit * latency, unit * per_byte, gap=unit * link.gap)

        return Network(between={pair: way(self.link(*pair)) for pair in permutations(range(self.number), 2)})

    @property
    def silent(self) -> "Workers":
        """The same with messages that take no time and keep nobody busy."""
        free = Link(latency=0.0, bandwidth=inf)
        return Workers(replace(self.cluster, links=dict.fromkeys(self.cluster.links, free)), self.ranks)
