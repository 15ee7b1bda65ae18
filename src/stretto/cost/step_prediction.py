"""Predict a step: simulate a method's schedule with the times of its stages and the runtime's own time.

An action takes the stage's time, gradient accumulation included; a copy of the weights, if an update must leave the old
ones to graphs that use them; the runtime's own time; and the time of receiving its messages before it and sending them
after it, which keeps the worker busy. The transit of a message keeps neither end busy.

A pipeline's workers on a cluster: their devices, the runtime's own time there, and the links between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import permutations
from math import inf
from typing import NamedTuple

from stretto.cost.cluster import Cluster, Device, Link
from stretto.cost.stage_prediction import StageTimes
from stretto.cost.worker_memory import SMALL
from stretto.methods import Method
from stretto.methods.cure import GradientPrediction
from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.simulate import Link as SimulatedLink
from stretto.simulate import Network, Transport, simulate, simulate_periodic
from stretto.simulate.network import LATE_DRAWS, Mean

FEWEST_LATE_TURNS, MOST_LATE_TURNS = 8, 64  # that are simulated of each draw of late messages,
LATE_ACTIONS = 8000  # about so many actions
TURNS = 1024  # the most turns to simulate before the schedule repeats
Work = tuple[str, int, int]  # kind, stage, index of the micro-batch in its turn


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
                unit * latency,
                unit * per_byte,
                gap=unit * link.gap,
                late_share=link.late_share or 0.0,
                late_time=unit * (link.late_seconds or 0.0),
            )

        pairs = permutations(range(self.number), 2)
        return Network(between={pair: simulated(self.link(*pair)) for pair in pairs}, seed=seed)

    @property
    def silent(self) -> "Workers":
        """The same workers with messages that take no time and keep neither end busy."""
        free = Link(latency=0.0, bandwidth=inf)
        return Workers(replace(self.cluster, links=dict.fromkeys(self.cluster.links, free)), self.ranks)


def silent(rules: Rules, stages: int) -> set[int]:
    """The stages that send no gradient down: stage 0, and those whose lower neighbour receives none."""
    return {s for s in range(stages) if s == 0 or not rules.reach.arriving(s - 1)}


def predictions(method: Method, rules: Rules) -> dict[int, GradientPrediction]:
    """How the stages learn that predict the gradient of their output."""
    return {} if method.prediction is None else dict.fromkeys(rules.reach.predicted, method.prediction)


def turn_seconds(pricer: "Pricer") -> float:
    """Seconds of a turn in the periodic part of a simulation; the mean over all turns if it is not periodic.

    Where messages are late at random, the mean over LATE_DRAWS simulations, the same in each call.
    """
    return mean_turn(pricer).value


def mean_turn(pricer: "Pricer") -> Mean:
    """As `turn_seconds`, with the standard error of a mean over draws."""
    network = pricer.workers.network()
    if network.is_late:
        return Mean.of([late_turn(pricer, seed) for seed in range(LATE_DRAWS)])
    transport = Transport(network=network, sizes=pricer.size)
    timeline = simulate_periodic(pricer.schedule, pricer.rules, TURNS, pricer.seconds, transport=transport)
    return Mean(timeline.makespan / TURNS if timeline.turn is None else timeline.turn)


def late_turn(pricer: "Pricer", seed: int) -> float:
    """Seconds of a turn, the mean over many once the pipeline is full, with one draw of late messages."""
    actions = sum(len(body) for body in pricer.schedule.body)
    turns = min(MOST_LATE_TURNS, max(FEWEST_LATE_TURNS, LATE_ACTIONS // actions))
    full = pricer.schedule.drain + 1
    network = pricer.workers.network(seed=seed)

    def makespan(number: int) -> float:
        return simulate(
            pricer.schedule, pricer.rules, number, pricer.seconds, network=network, sizes=pricer.size
        ).makespan

    return (makespan(full + turns) - makespan(full)) / turns


class ActionSeconds(NamedTuple):
    """Seconds of an action by part.

    `stage` is the computation, gradient accumulation included; `copy` the copy of weights at an update; `messages` the
    time of receiving and sending; `runtime` the runtime's own time.
    """

    stage: float
    copy: float
    messages: float
    runtime: float


@dataclass(frozen=True)
class Pricer:
    """The seconds of every action of a turn on its worker, and the bytes of its messages.

    `tied` are the bytes of weights that one stage sends another, by (owner, user).
    """

    method: Method
    schedule: Schedule
    rules: Rules
    workers: Workers
    stages: Sequence[StageTimes]
    tied: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, action: Action) -> float:
        """Seconds of an action, the same in every turn."""
        return self.actions[self.work(action)]

    def size(self, edge: Edge) -> float:
        """Bytes of the message of an edge."""
        if edge.value in ("tied-weight", "tied-gradient"):
            return self.shared_size(edge)
        if edge.source.stage < 0 or edge.value not in ("activation", "gradient"):
            return SMALL
        stage = self.stages[edge.source.stage]
        return stage.output if edge.value == "activation" else stage.input

    def shared_size(self, edge: Edge) -> float:
        """Bytes of a message of shared weights or of their gradients.

        What an action sends to several stages of a worker goes there at once, and counts at the first of them.
        """
        together = self.sent_together(edge)
        if edge != together[0]:
            return 0.0
        if edge.value == "tied-gradient":  # of different weights: each has one owner
            return sum(self.tied[each.stage, each.source.stage] for each in together)
        return max(self.tied[each.source.stage, each.stage] for each in together)

    def sent_together(self, edge: Edge) -> list[Edge]:
        """The edges whose values go to a worker in one message, this one included."""
        if edge.value not in ("tied-weight", "tied-gradient"):
            return [edge]
        worker_of = self.schedule.worker_of
        return [
            other
            for other in self.rules.makes(edge.source)
            if other.value == edge.value and worker_of[other.stage] == worker_of[edge.stage]
        ]

    @cached_property
    def actions(self) -> dict[Work, float]:
        """Seconds of every action of a turn."""
        return {work: sum(parts) for work, parts in self.parts.items()}

    @cached_property
    def parts(self) -> dict[Work, ActionSeconds]:
        """Seconds of every action of a turn, by part."""
        parts: dict[Work, ActionSeconds] = {}
        last_worker = self.schedule.worker_of[self.schedule.num_stages - 1]
        for worker, body in enumerate(self.schedule.body):
            accumulating, per_action = self.accumulating(worker), self.workers.per_action(worker)
            for action in body:
                stage = self.stages[action.stage]
                parts[self.work(action)] = ActionSeconds(
                    stage.seconds(action.kind) + (stage.compute.accumulate if action in accumulating else 0.0),
                    self.copy_seconds(action, worker),
                    self.message_seconds(action, worker),
                    per_action,
                )
            if body:
                first, last_work = self.work(body[0]), self.work(body[-1])
                parts[first] = parts[first]._replace(runtime=per_action + self.workers.per_step(worker))
                parts[last_work] = parts[last_work]._replace(
                    messages=parts[last_work].messages + self.workers.losses(worker, last_worker)
                )
        return parts

    def work(self, action: Action) -> Work:
        """The action without its turn: kind, stage, and index of the micro-batch in the turn."""
        return action.kind, action.stage, action.microbatch % self.schedule.per_turn

    def accumulating(self, worker: int) -> set[Action]:
        """The backwards that add to existing gradients: all but a stage's first one after its update."""
        actions: set[Action] = set()
        with_gradients: set[int] = set()
        body = self.schedule.body[worker]
        for action in (*body, *body):  # the second pass is as every later turn
            if action.kind in "BW" and action.stage in with_gradients:
                actions.add(action)
            elif action.kind in "BW":
                actions.discard(action)
                with_gradients.add(action.stage)
            elif action.kind == "U":
                with_gradients.discard(action.stage)
        return actions

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The number of versions of its weights that each stage keeps."""
        return tuple(self.method.versions(self.schedule))

    def copy_seconds(self, action: Action, worker: int) -> float:
        """Seconds of copying the weights at an update, if graphs in flight still use the old ones."""
        if action.kind != "U" or self.versions[action.stage] < 2:
            return 0.0
        return self.workers.copy_seconds(worker, self.stages[action.stage].gradients)

    def message_seconds(self, action: Action, worker: int) -> float:
        """Seconds that an action's messages keep its worker busy: receiving them before it, sending them after it.

        A weight gradient receives no message that its input gradient has received.
        """
        worker_of, seconds = self.schedule.worker_of, 0.0
        received = self.rules.needs(action._replace(kind="I")) if action.kind == "W" else ()
        for edge in self.rules.needs(action):
            sender = worker_of.get(edge.source.stage, worker)
            if sender != worker and edge not in received and edge == self.sent_together(edge)[0]:
                seconds += self.workers.link(sender, worker).receiving(self.size(edge))
        for edge in self.rules.makes(action):
            receiver = worker_of.get(edge.stage, worker)  # losses have no receiving stage
            if receiver != worker and edge == self.sent_together(edge)[0]:
                seconds += self.workers.link(worker, receiver).sending(self.size(edge))
        return seconds
