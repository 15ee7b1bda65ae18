"""What a step takes: a method's schedule, simulated with the times of its stages and what the runtime adds to them.

Of each action: the stage's own time, once and again where it finds gradients; a copy of its weights where an update
must leave the old ones to graphs that hold them; the runtime's own time; and the messages that its worker takes for it
and posts after it, which keep the worker busy. What is left of a message is on its way while both compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stretto.cost.cluster import Cluster
from stretto.cost.layer_table import LayerCost, ModelCosts
from stretto.cost.predict import StageTimes, stage_times
from stretto.cost.worker_memory import SMALL, peak_bytes
from stretto.cost.workers import Workers
from stretto.methods import Method
from stretto.methods import method as find_method
from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.simulate import Transport, simulate_periodic

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
    tied = costs.tied(bounds)
    schedule, rules = chosen.plan(len(bounds) - 1, workers, ties=tuple(tied))
    places = [[schedule.worker_of[s]] for s in range(schedule.num_stages)]
    share = batch / schedule.per_turn
    stages = stage_times(
        costs,
        bounds,
        cluster,
        share,
        workers=places,
        heads=heads,
        optimizer=optimizer,
        silent=silent(rules, schedule.num_stages),
    )
    pricer = Pricer(chosen, schedule, rules, Workers.alone(cluster, schedule.num_workers), stages, tied)
    return Forecast(
        seconds=turn_seconds(pricer),
        actions=pricer.actions,
        bytes=peak_bytes(chosen, schedule, rules, costs, bounds, share, optimizer=optimizer, heads=heads),
    )


def silent(rules: Rules, stages: int) -> set[int]:
    """Stages that send no gradient down: stage 0, and those where one of a loss below ends."""
    return {s for s in range(stages) if s == 0 or not rules.reach.arriving(s - 1)}


def turn_seconds(pricer: "Pricer") -> float:
    """Seconds of a turn in the periodic part of a simulation; the mean over all turns where nothing repeats."""
    transport = Transport(network=pricer.workers.network(), sizes=pricer.size)
    timeline = simulate_periodic(pricer.schedule, pricer.rules, TURNS, pricer.seconds, transport=transport)
    return timeline.makespan / TURNS if timeline.turn is None else timeline.turn


class ActionSeconds(NamedTuple):
    """Seconds of an action: its stage's, gradients that are added up included; a copy of weights; messages' ends."""

    stage: float
    copy: float
    messages: float
    runtime: float


@dataclass(frozen=True)
class Pricer:
    """What every action of a turn takes on its worker, and what its messages take beside.

    `tied` are the bytes of the weights that a stage has of another one, by their owner and by who has them of it.
    """

    method: Method
    schedule: Schedule
    rules: Rules
    workers: Workers
    stages: Sequence[StageTimes]
    tied: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def seconds(self, action: Action) -> float:
        """Seconds of an action of any turn."""
        return self.actions[self.work(action)]

    def size(self, edge: Edge) -> float:
        """Bytes of a value that travels."""
        if edge.value == "tied-weight":
            return self.tied[edge.source.stage, edge.stage]
        if edge.value == "tied-gradient":
            return self.tied[edge.stage, edge.source.stage]
        if edge.source.stage < 0 or edge.value not in ("activation", "gradient"):
            return SMALL
        stage = self.stages[edge.source.stage]
        return stage.output if edge.value == "activation" else stage.input

    @cached_property
    def actions(self) -> dict[Work, float]:
        """Seconds of all actions."""
        return {work: sum(parts) for work, parts in self.parts.items()}

    @cached_property
    def parts(self) -> dict[Work, ActionSeconds]:
        """What they are made of."""
        found: dict[Work, ActionSeconds] = {}
        last = self.schedule.worker_of[self.schedule.num_stages - 1]
        for worker, body in enumerate(self.schedule.body):
            adding, per_action = self.adding(worker), self.workers.per_action(worker)
            for action in body:
                stage = self.stages[action.stage]
                found[self.work(action)] = ActionSeconds(
                    stage.seconds(action.kind) + (stage.compute.accumulate if action in adding else 0.0),
                    self.copying(action, worker),
                    self.talking(action, worker),
                    per_action,
                )
            if body:
                first, end = self.work(body[0]), self.work(body[-1])
                found[first] = found[first]._replace(runtime=per_action + self.workers.per_step(worker))
                found[end] = found[end]._replace(messages=found[end].messages + self.workers.losses(worker, last))
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
        return self.workers.copying(worker, self.stages[action.stage].gradients)

    def talking(self, action: Action, worker: int) -> float:
        """What the messages that an action waits for and makes keep its worker busy for.

        What an input gradient has taken is there for its weight gradient.
        """
        homes, total = self.schedule.worker_of, 0.0
        there = self.rules.needs(action._replace(kind="I")) if action.kind == "W" else ()
        for edge in self.rules.needs(action):
            source = homes.get(edge.source.stage, worker)
            if source != worker and edge not in there:
                total += self.workers.link(source, worker).receiving(self.size(edge))
        for edge in self.rules.makes(action):
            to = homes.get(edge.stage, worker)  # a loss is for no stage
            if to != worker:
                total += self.workers.link(worker, to).sending(self.size(edge))
        return total
