"""Many turns through their periodic part are what simulating all of them gives."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from pairwise import in_turn
from simulate.test_oracle import random_network, random_plan
from stretto.schedule import Action
from stretto.simulate import Link, Network, Transport, period, simulate, simulate_periodic

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0}
EVERYTHING = ("starts", "sent", "linked", "arrivals")


def costs(generator):
    times = {}
    return lambda action: times.setdefault(action[:2], generator.choice([0, generator.randint(0, 40) / 8]))


def through_latency(latency):
    return Transport(network=Network(Link(latency)))


def compare(schedule, rules, turns, durations, *, overlap=False, **chosen):
    """The periodic part against the full simulation."""
    found = simulate_periodic(schedule, rules, turns, durations, transport=Transport(**chosen), overlap=overlap)
    wanted = simulate(schedule, rules, turns, durations, overlap=overlap, **chosen)
    for name in EVERYTHING:
        assert np.array_equal(getattr(found.full.outcome, name), getattr(wanted.outcome, name)), name
    for name in ("makespan", "busy", "exposed", "utilisation"):
        assert getattr(found, name) == getattr(wanted, name) == getattr(found.full, name), name
    return found, wanted


@given(seed=st.integers(0, 10**9))
@settings(max_examples=15)
def test_any_schedule_on_any_links(seed):
    generator = random.Random(seed)
    schedule, rules = random_plan(generator)
    network = random_network(generator, schedule.num_workers)
    most = generator.choice([0, 2, 30])
    sizes = {}
    compare(
        schedule,
        rules,
        generator.randint(100, 160),
        costs(generator),
        network=network,
        sizes=lambda edge: sizes.setdefault((edge.value, edge.source.stage), generator.randint(0, most)),
        sends=generator.choice(["buffered", "rendezvous"]),
        overlap=generator.random() < 0.5,
    )


NAMES = ["pb", "pipedream", "paci(every=2)", "1f1b", "zb-h1"]
LINKS = [Link(), Link(0.5), Link(0.25, 0.5), Link(0.25, 0.125, "bus")]


@pytest.mark.parametrize(("name", "link"), in_turn(NAMES, LINKS, rounds=4, slow=3))
def test_pipelines_repeat(name, link):
    schedule, rules = stretto.method(name).plan(4, 4)
    found, wanted = compare(schedule, rules, 260, lambda a: UNIT[a.kind], network=Network(link), sizes=lambda edge: 1)
    assert found.repeat is not None
    assert found.timeline.outcome.turns <= 240
    assert sorted(found.full.spans) == sorted(wanted.spans)
    seen = {}
    for place, span in enumerate(found.full.spans):  # in an order in which things can happen
        assert all(seen[edge.source] < place for edge in rules.needs(span.action) if edge.source.stage >= 0)
        seen[span.action] = place


@given(seed=st.integers(0, 10**9), S=st.integers(1, 6), latency=st.integers(0, 9))
@settings(max_examples=12)
def test_a_turn_takes_the_period(seed, S, latency):
    durations = costs(random.Random(seed))
    for name in ("pb", "pipedream", "1f1b"):
        schedule, rules = stretto.method(name).plan(S, S)
        found = simulate_periodic(schedule, rules, 150, durations, transport=through_latency(latency))
        if found.turn is not None:
            assert found.turn == period(schedule, rules, durations, latency=latency)


def test_times_that_are_no_binary_fractions_are_rounded_a_little():
    schedule, rules = stretto.method("pb").plan(4, 4)
    times = {"F": 0.1, "B": 0.2}
    found = simulate_periodic(schedule, rules, 5000, lambda a: times.get(a.kind, 0), transport=through_latency(0.3))
    wanted = simulate(schedule, rules, 5000, lambda a: {"F": 0.1, "B": 0.2}.get(a.kind, 0), latency=0.3)
    assert found.repeat is not None
    assert found.makespan == pytest.approx(wanted.makespan, rel=1e-9)


def test_what_goes_at_different_paces_is_simulated_whole():
    schedule, rules = stretto.method("greedy").plan(3, 3)
    found = simulate_periodic(schedule, rules, 500, lambda a: float(a.stage + 1) if a.kind == "F" else 0)
    assert found.repeat is None
    assert found.turn is None
    assert found.makespan == 1 + 2 + 500 * 3
    assert found.full.spans[0].action == Action("F", 0, 0)


@pytest.mark.parametrize("S", [1, 2, 5])
def test_a_long_minibatch_is_a_stream_that_drains(S):
    """1F1B with M micro-batches takes as long as PipeDream's order when M enter and it drains: F = 1, B = 2."""
    for M in (4, 7, 64):
        schedule, rules = stretto.method(f"1f1b(microbatches={M})").plan(S, S)
        wanted = simulate(schedule, rules, 1, latency=0.5)
        found = simulate_periodic(*stretto.method("pipedream").plan(S, S), M, transport=through_latency(0.5))
        assert found.makespan == wanted.makespan
