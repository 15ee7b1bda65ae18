"""Predict a step: simulate a method's schedule with the times of its stages and the runtime's own time.

An action takes the stage's time, gradient accumulation included; a copy of the weights, if an update must leave the old
ones to graphs that use them; the runtime's own time; and the time of receiving its messages before it and sending them
after it, which keeps the worker busy. The transit of a message keeps neither end busy.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stretto.cost.stage_prediction import StageTimes
from stretto.cost.worker_memory import SMALL
from stretto.cost.worker_places import Workers
from stretto.methods import Method
from stretto.schedule import Action, Edge, Rules, Schedule
from stretto.simulate import Transport, simulate, simulate_periodic
from stretto.simulate.network import LATE_DRAWS

FEWEST_LATE_TURNS, MOST_LATE_TURNS = 8, 64  # that are simulated of each draw of late messages,
LATE_ACTIONS = 8000  # about so many actions
TURNS = 1024  # the most turns to simulate before the schedule repeats
Work = tuple[str, int, int]  # kind, stage, index of the micro-batch in its turn


def silent(rules: Rules, stages: int) -> set[int]:
    """The stages that send no gradient down: stage 0, and those whose lower neighbour receives none."""
    return {s for s in range(stages) if s == 0 or not rules.reach.arriving(s - 1)}


def turn_seconds(pricer: "Pricer") -> float:
    """Seconds of a turn in the periodic part of a simulation; the mean over all turns if it is not periodic.

    Where messages are late at random, the mean over LATE_DRAWS simulations, the same in each call.
    """
    network = pricer.workers.network()
    if network.is_late:
        return statistics.fmean(late_turn(pricer, seed) for seed in range(LATE_DRAWS))
    transport = Transport(network=network, sizes=pricer.size)
    timeline = simulate_periodic(pricer.schedule, pricer.rules, TURNS, pricer.seconds, transport=transport)
    return timeline.makespan / TURNS if timeline.turn is None else timeline.turn


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
