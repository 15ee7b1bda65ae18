"""A pipeline's workers on a cluster: their devices, the runtime's own time there, and the links between them."""

from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import permutations
from math import inf

from stretto.cost.cluster import Cluster, Device, Link
from stretto.cost.worker_memory import SMALL
from stretto.simulate import Link as SimulatedLink
from stretto.simulate import Network


@dataclass(frozen=True)
class Workers:
    """Worker w of the pipeline runs on the cluster's workers `ranks[w]`: one for each replica and part of its stages.

    Of several devices, and of their links to another worker's devices, the slowest counts.
    """

    cluster: Cluster
    ranks: tuple[tuple[int, ...], ...]
    _links: dict[tuple[int, int], Link] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def alone(cls, cluster: Cluster, number: int) -> "Workers":
        """`number` workers without replicas on the first devices of a cluster, one each."""
        return cls(cluster, tuple((worker,) for worker in range(number)))

    @property
    def number(self) -> int:
        """The number of workers of the pipeline."""
        return len(self.ranks)

    def devices(self, worker: int) -> tuple[Device, ...]:
        """The different devices that a worker runs on."""
        kinds = dict.fromkeys(self.cluster.kinds[rank] for rank in self.ranks[worker])
        return tuple(self.cluster.devices_by_kind[kind] for kind in kinds)

    def per_action(self, worker: int) -> float:
        """The runtime's own seconds for each action."""
        devices = self.devices(worker)
        if self.is_one_process and devices[0].alone_per_action is not None:
            return devices[0].alone_per_action
        return max(device.per_action for device in devices)

    def per_step(self, worker: int) -> float:
        """The runtime's own seconds for each turn."""
        devices = self.devices(worker)
        if self.is_one_process and devices[0].alone_per_step is not None:
            return devices[0].alone_per_step
        return max(device.per_step for device in devices)

    @property
    def is_one_process(self) -> bool:
        """Whether one process trains, so that nothing is sent."""
        return self.number == 1 and len(self.ranks[0]) == 1

    def copy_seconds(self, worker: int, num_bytes: float) -> float:
        """Seconds to copy bytes in memory: a read and a write of each."""
        return 2 * num_bytes / min(device.memory_bandwidth for device in self.devices(worker))

    def link(self, a: int, b: int) -> Link:
        """The link between two workers: the slowest of those between their replicas."""
        if (a, b) not in self._links:
            between = {id(link): link for link in map(self.cluster.link, self.ranks[a], self.ranks[b])}
            self._links[a, b] = reduce(Link.or_slower, dict.fromkeys(between.values()))
        return self._links[a, b]

    def losses(self, worker: int, last: int) -> float:
        """Seconds that a turn's losses keep a worker busy.

        The worker `last`, which computes them, sends one message to each other worker; the others receive one.
        """
        if worker != last:
            return self.link(last, worker).receiving(SMALL)
        return sum(self.link(worker, to).sending(SMALL) for to in range(self.number) if to != worker)

    def network(self, unit: float = 1.0, *, seed: int = 0) -> Network:
        """The transit of messages between workers, for `simulate`; a second has `unit` units of its time.

        `seed` decides which messages are late.
        """

        def simulated(link: Link) -> SimulatedLink:
            latency, per_byte = link.transit
            return SimulatedLink(
                unit * latency, unit * per_byte, gap=unit * link.gap,
                late_share=link.late_share or 0.0, late_time=unit * (link.late_seconds or 0.0),
            )  # fmt: skip

        pairs = permutations(range(self.number), 2)
        return Network(between={pair: simulated(self.link(*pair)) for pair in pairs}, seed=seed)

    @property
    def silent(self) -> "Workers":
        """The same workers with messages that take no time and keep neither end busy."""
        free = Link(latency=0.0, bandwidth=inf)
        return Workers(replace(self.cluster, links=dict.fromkeys(self.cluster.links, free)), self.ranks)
