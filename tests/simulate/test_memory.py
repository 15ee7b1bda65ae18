"""The ledger against a walk written by hand, and against what the timeline counts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stretto
from simulate.test_oracle import random_network, random_plan
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.simulate import Link, Network, ledgers, simulate

BYTES = {"activation": 2, "gradient": 3, "graph": 10, "weight-gradient": 5}


def test_two_stages_and_one_micro_batch_by_hand():
    """F = 1, B = 2; a byte takes half a unit on its way, and a quarter more passes between.

    1        F BB           0F0 from 0 to 1, its activation leaves from 1 to 2 and comes from 1.25 to 2.25;
    0 F          BB         1F0 to 3.25, 1B0 to 5.25; the gradient leaves to 6.75, comes from 5.5 to 7; 0B0 to 9
    """
    schedule = Schedule(tuple((Action("F", s, 0), Action("B", s, 0), Action("U", s, 0)) for s in range(2)))
    rules = Rules.of(schedule, Reach((None, 1)))
    timeline = simulate(schedule, rules, 1, network=Network(Link(0.25, 0.5)), sizes=lambda edge: BYTES[edge.value])
    first, second = ledgers(timeline, lambda edge: BYTES.get(edge.value, 0), [100, 200])
    assert changes(first) == [
        (0, 100), (0, 112), (2, 110), (5.5, 113), (7, 118), (9, 108), (9, 105), (9, 100),
    ]  # fmt: skip
    assert changes(second) == [
        (0, 200), (1.25, 202), (2.25, 212), (3.25, 210), (3.25, 218), (5.25, 208), (5.25, 203), (6.75, 200),
    ]  # fmt: skip
    assert (first.peak, first.peak_time, first.peak_action) == (118, 7, Action("B", 0, 0))
    assert (second.peak, second.peak_time, second.peak_action) == (218, 3.25, Action("B", 1, 0))


def changes(ledger):
    return list(zip(ledger.times.tolist(), ledger.held.tolist(), strict=True))


@given(seed=st.integers(0, 10**9))
def test_a_walk_through_all_that_happens(seed):
    """Edges come and go one by one; nothing is left at the end but what nobody takes."""
    generator = random.Random(seed)
    schedule, rules = random_plan(generator)
    bytes_of, times_of = {}, {}

    def sizes(edge):
        return bytes_of.setdefault((edge.value, edge.source.stage, edge.stage), generator.randint(0, 30))

    def times(action):
        return times_of.setdefault(action, generator.randint(0, 40) / 8)

    chosen = {"sends": generator.choice(["buffered", "rendezvous"]), "overlap": generator.random() < 0.5}
    network = random_network(generator, schedule.num_workers)
    timeline = simulate(schedule, rules, generator.randint(1, 4), times, network=network, sizes=sizes, **chosen)
    wanted = walk(schedule, rules, timeline, sizes)
    for worker, ledger in enumerate(ledgers(timeline, sizes)):
        at = {0: 0} | dict(zip(ledger.times.tolist(), ledger.held.tolist(), strict=True))
        assert {time: at[max(t for t in at if t <= time)] for time in wanted[worker]} == wanted[worker]
        assert ledger.peak >= max(wanted[worker].values())
        started = [span for span in timeline.spans if span.worker == worker and span.start <= ledger.peak_time]
        assert ledger.peak_action in ({span.action for span in started} or {None})


def walk(schedule, rules, timeline, sizes):
    """What each worker holds after all that happens at each time."""
    happens = [[] for _ in range(schedule.num_workers)]
    for worker, action, start, end in timeline.spans:
        for edge in rules.makes(action):
            if edge.stage in schedule.worker_of:
                happens[worker].append((start, sizes(edge)))
        for edge in rules.frees(action):
            if edge.source.stage >= 0:
                happens[worker].append((end, -sizes(edge)))
    for value, source, stage, sender, receiver, sent, arrival, hold in timeline.messages:
        size = sizes(stretto.schedule.Edge(value, source, stage))
        happens[sender].append((sent + hold, -size))
        happens[receiver].append((arrival - hold, size))
    return [{time: sum(size for when, size in own if when <= time) for time, _ in [(0, 0), *own]} for own in happens]


@pytest.mark.parametrize("name", ["pb", "gpipe", "1f1b", "zb-h1"])
def test_graphs_are_those_the_timeline_counts(name):
    schedule, rules = stretto.method(name).plan(4, 4)
    timeline = simulate(schedule, rules, 6)
    found = ledgers(timeline, lambda edge: float(edge.value == "graph"))
    assert tuple(ledger.peak for ledger in found) == timeline.peak_activations
