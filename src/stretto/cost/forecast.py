"""What a step takes: a method's schedule, simulated with the times of its stages and what the runtime adds to them.

Of each action: the stage's own time, once and again where it finds gradients; a copy of its weights where an update
must leave the old ones to graphs that hold them; the runtime's own time; and the messages that its worker takes for it
and posts after it, which keep the worker busy. What is left of a message is on its way while both compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from stretto.cost.cluster import Cluster
from stretto.cost.memory import SMALL, peak_bytes
from stretto.cost.predict import StageTimes, stage_times
from stretto.cost.table import LayerCost, ModelCosts
from stretto.methods import Method
from stretto.methods import method as find_method
from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.simulate import Link, Network, endless

TURNS = 1024  # simulated at most, to find what repeats
Work = tuple[str, int, int]  # kind, stage, place of the micro-batch in its turn


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of a step in the long run, what each action takes, and the most bytes of tensors on each worker."""

    seconds: float
    actions: Mapping[Work, float]
    bytes: tuple[float, ...]


def forecast(
    costs: ModelCosts,
    bounds: Sequence[int],
    cluster: Cluster,
    method: str | Method,
    batch: float,
    *,
    workers: int | None = None,
    heads: Sequence[LayerCost | None] | None = None,
    optimizer: str = "sgd",
) -> Forecast:
    """What training by a method takes on the first workers of a cluster, for minibatches of so many examples.

    Stage s holds the layers from bounds[s] up to bounds[s + 1]; `heads` are what the method puts behind stages. The
    rest is as in `stage_times`.
    """
    chosen = find_method(method)
    schedule, rules = chosen.plan(len(bounds) - 1, workers)
    places = [[schedule.worker_of[s]] for s in range(schedule.num_stages)]
    share = batch / schedule.per_turn
    stages = stage_times(
        costs, bounds, cluster, share, workers=places, heads=heads, optimizer=optimizer, silent=silent(schedule, rules)
    )
    pricer = Pricer(chosen, schedule, rules, cluster, stages)
    return Forecast(
        seconds=turn_seconds(pricer),
        actions=pricer.actions,
        bytes=peak_bytes(chosen, schedule, rules, costs, bounds, share, optimizer=optimizer, heads=heads),
    )


def silent(schedule: Schedule, rules: Rules) -> set[int]:
    """Stages that send no gradient: stage 0, and those above which a loss of its own ends."""
    telling = {
        action.stage
        for body in schedule.body
        for action in body
        if any(edge.value == "gradient" for edge in rules.makes(action))
    }
    return set(range(schedule.num_stages)) - telling


def turn_seconds(pricer: "Pricer") -> float:
    """The time of a turn after many; what repeats is found by simulation."""
    found = endless(pricer.schedule, pricer.rules, TURNS, pricer.seconds, network=pricer.network(), sizes=pricer.size)
    return found.makespan / TURNS if found.turn is None else found.turn


@dataclass(frozen=True)
class Pricer:
    """What every action of a turn takes on its worker, and what its messages take beside.

    `tied` are the bytes of the weights that other stages read of their owner.
    """

    method: Method
    schedule: Schedule
    rules: Rules
    cluster: Cluster
    stages: Sequence[StageTimes]
    tied: float = SMALL

    def seconds(self, action: Action) -> float:
        """Seconds of an action of any turn."""
        return self.actions[self.work(action)]

    def size(self, edge: Edge) -> float:
        """Bytes of a value that travels."""
        if edge.value == "tied-weight":
            return self.tied
        if edge.source.stage < 0 or edge.value not in ("activation", "gradient"):
            return SMALL
        stage = self.stages[edge.source.stage]
        return stage.output if edge.value == "activation" else stage.input

    def network(self, unit: float = 1.0) -> Network:
        """What is left of messages between workers, in units of time of which a second has so many."""
        pairs = permutations(range(self.schedule.num_workers), 2)
        ways = {pair: self.cluster.link(*pair).way for pair in pairs}
        return Network(between={pair: Link(unit * latency, unit * each) for pair, (latency, each) in ways.items()})

    @cached_property
    def actions(self) -> dict[Work, float]:
        """Seconds of all actions."""
        found: dict[Work, float] = {}
        for worker, body in enumerate(self.schedule.body):
            device = self.cluster.device(worker)
            adding = self.adding(worker)
            for action in body:
                found[self.work(action)] = (
                    self.stages[action.stage].seconds(action.kind)
                    + (self.stages[action.stage].compute.accumulate if action in adding else 0.0)
                    + self.copying(action, worker)
                    + self.talking(action, worker)
                    + device.per_action
                )
            if body:
                found[self.work(body[0])] += device.per_step
                found[self.work(body[-1])] += self.telling(worker) + self.hearing(worker)
        return found

    def work(self, action: Action) -> Work:
        """The same for all turns."""
        return action.kind, action.stage, action.microbatch % self.schedule.per_turn

    def adding(self, worker: int) -> set[Action]:
        """Backwards that find gradients of their stage: all but the first after its update."""
        found: set[Action] = set()
        begun: set[int] = set()
        for action in (*self.schedule.body[worker], *self.schedule.body[worker]):  # the second time as ever after
            if action.kind in "BW" and action.stage in begun:
                found.add(action)
            elif action.kind in "BW":
                found.discard(action)
                begun.add(action.stage)
            elif action.kind == "U":
                begun.discard(action.stage)
        return found

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Versions of its weights that each stage keeps."""
        return tuple(self.method.versions(self.schedule))

    def copying(self, action: Action, worker: int) -> float:
        """What an update takes that leaves the weights to graphs in flight."""
        if action.kind != "U" or self.versions[action.stage] < 2:
            return 0.0
        return 2 * self.stages[action.stage].gradients / self.cluster.device(worker).memory_bandwidth

    def talking(self, action: Action, worker: int) -> float:
        """What the messages that an action waits for and makes keep its worker busy for."""
        homes, total = self.schedule.worker_of, 0.0
        for edge in self.rules.needs(action):
            source = homes.get(edge.source.stage, worker)
            if source != worker:
                total += self.cluster.link(source, worker).receiving(self.size(edge))
        for edge in self.rules.makes(action):
            to = homes.get(edge.stage, worker)  # a loss is for no stage
            if to != worker:
                total += self.cluster.link(worker, to).sending(self.size(edge))
        return total

    @property
    def last(self) -> int:
        """The worker that makes the losses."""
        return self.schedule.worker_of[self.schedule.num_stages - 1]

    def telling(self, worker: int) -> float:
        """What it takes to tell the losses of a turn, where they are made: one message for each of the others."""
        others = [other for other in range(self.schedule.num_workers) if other != worker]
        return sum(self.cluster.link(worker, to).sending(SMALL) for to in others) if self.last == worker else 0.0

    def hearing(self, worker: int) -> float:
        """What it takes to hear the losses of a turn, where they are made elsewhere."""
        return 0.0 if self.last == worker else self.cluster.link(self.last, worker).receiving(SMALL)
