"""The emulator runs what is listed as soon as it can, keeps only what is needed, and trusts nobody about delays."""

from typing import Any

import pytest

import stretto
from laws.pipelines import async_1f1b, one_f_one_b, pb_clock
from stretto.emulate import Emulator
from stretto.errors import ScheduleError
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.simulate import simulate


class Graph:
    def __init__(self, updates):
        self.updates = updates


class Log:
    """A stage without tensors: writes down what it was told to do, and with what."""

    def __init__(self, log, index, rules):
        self.log, self.index, self.rules, self.updates = log, index, rules, 0

    def run(self, kind, microbatch, operands, version=None) -> dict[str, Any]:
        action = Action(kind, self.index, microbatch)
        self.log.append(action)
        given = operands.keys() - {"version"}  # which is told to forwards, not made by any action
        assert given == {edge.value for edge in self.rules.needs(action)}
        self.updates += kind == "U"
        return {edge.value: Graph(self.updates) if edge.value == "graph" else edge for edge in self.rules.makes(action)}


def make(schedule, rules):
    log = []
    return Emulator(schedule, rules, {s: Log(log, s, rules) for s in range(schedule.num_stages)}), log


def loads(schedule):
    return [{"activation": (), "target": ()}] * schedule.per_turn


def backprop(schedule):
    S = schedule.num_stages
    return schedule, Rules.of(schedule, Reach((*[None] * (S - 1), S - 1)))


PLANS = {
    **{f"{name} on {w}": stretto.method(name).plan(4, w) for w in (1, 2, 4)
       for name in ("backprop", "greedy", "chunked", "overlapping", "overlapping(delay=1)")},
    "pb": backprop(pb_clock(4)), "async-1f1b": backprop(async_1f1b(4)), "1f1b": backprop(one_f_one_b(4, 6)),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_each_worker_does_its_list_and_nothing_is_left(plan):
    schedule, rules = PLANS[plan]
    emulator, log = make(schedule, rules)
    sizes = []
    for n in range(12):
        emulator.step(n, loads(schedule))
        for m in range(n * schedule.per_turn, (n + 1) * schedule.per_turn):
            emulator.values.pop(rules.loss(m), None)
        sizes.append(len(emulator.values))
    emulator.drain(12)
    for worker in range(schedule.num_workers):
        assert [a for a in log if schedule.worker_of[a.stage] == worker] == schedule.unroll(worker, 12)
    left = {edge.value for edge in emulator.values}
    assert left <= {"loss"}
    assert max(sizes[8:]) <= max(sizes[:8])
    assert not emulator._waiting
    assert not any(emulator.queues)


@pytest.mark.parametrize("plan", PLANS)
def test_as_much_is_done_in_a_turn_as_can_be(plan):
    """After turn n nothing in the queues could run: each one's first action waits for something."""
    schedule, rules = PLANS[plan]
    emulator, _ = make(schedule, rules)
    for n in range(9):
        emulator.step(n, loads(schedule))
        for queue in emulator.queues:
            assert not queue or not set(rules.needs(queue[0])) <= emulator.values.keys()
    if schedule.drain == 0 and plan.startswith(("backprop", "1f1b")):
        assert not any(emulator.queues)


@pytest.mark.parametrize("plan", PLANS)
def test_drains_may_stand_anywhere(plan):
    schedule, rules = PLANS[plan]
    emulator, log = make(schedule, rules)
    for n in range(10):
        emulator.step(n, loads(schedule))
        if n in (0, 1, 5):
            emulator.drain(n + 1)
            assert {edge.value for edge in emulator.values} <= {"loss"}
    emulator.drain(10)
    wanted = [action for worker in range(schedule.num_workers) for action in schedule.unroll(worker, 10)]
    assert sorted(log) == sorted(wanted)


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_held_is_what_the_simulator_says(plan):
    """Two interpreters, one set of rules: the same number of graphs at once."""
    schedule, rules = PLANS[plan]
    emulator, _ = make(schedule, rules)
    held, peak = [0] * 4, [0] * 4
    for stage in emulator.stages.values():

        def run(kind, microbatch, operands, version=None, stage=stage, plain=stage.run):
            held[stage.index] += kind == "F"
            peak[stage.index] = max(peak[stage.index], held[stage.index])
            held[stage.index] -= kind in "BW"
            return plain(kind, microbatch, operands)

        stage.run = run
    for n in range(12):
        emulator.step(n, loads(schedule))
    emulator.drain(12)
    assert tuple(peak) == simulate(schedule, rules, 12).peak_graphs


def test_the_order_of_workers_is_free():
    schedule, rules = stretto.method("overlapping(delay=1)").plan(4)
    turned = Schedule(schedule.body[::-1])
    logs = []
    for body in (schedule, turned):
        emulator, log = make(body, rules)
        for n in range(6):
            emulator.step(n, loads(body))
        emulator.drain(6)
        logs.append([[a for a in log if a.stage == s] for s in range(4)])
    assert logs[0] == logs[1]


def test_a_delay_that_is_not_the_promised_one_is_caught():
    schedule, rules = stretto.method("overlapping(delay=1)").plan(3)
    emulator, _ = make(schedule, rules)
    emulator.step(0, loads(schedule))
    emulator.step(1, loads(schedule))
    emulator.stages[2].updates += 1
    with pytest.raises(AssertionError, match=r"2W1: .*2 updates.*, the schedule promises 1"):
        emulator.step(2, loads(schedule))


def test_a_deadlock_is_reported_at_the_drain():
    schedule = Schedule(((Action("F", 0, 0), Action("U", 0, 0), Action("B", 0, 0)),))
    emulator, _ = make(schedule, Rules.of(schedule, Reach((0,))))
    emulator.step(0, loads(schedule))
    with pytest.raises(ScheduleError, match="deadlock: worker 0 waits for 0B0's weight-gradient before 0U0"):
        emulator.drain(1)
