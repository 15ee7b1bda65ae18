"""Stages that share weights: the periodic part is what a full simulation settles to, ties included.

What a tie has a stage wait for comes no later than the activation that it waits for anyway: the owner is the first
stage of all, and its update came before its forward. So ties change no period; but a list of dependences has them.
"""

import random
from functools import cache

import pytest

import stretto
from pairwise import in_turn
from stretto.schedule.lower import lower
from stretto.schedule.pace import dependences
from stretto.simulate import Link, Network, Transport, period, simulate, simulate_periodic

ASYNCHRONOUS = ["pb", "pipedream", "pipedream-2bw", "paci(every=3)", "pipemare(recompute=2)"]
SYNCHRONOUS = ["1f1b", "zb-h1"]


def settled(schedule, rules, durations, latency, turns=240, over=120):
    """The mean of the last turns of a full simulation: so many are a multiple of every pattern's length here."""
    timeline = simulate(schedule, rules, turns, durations, latency=latency)
    kind, stage, offset = schedule.body[0][0]
    per_turn = schedule.per_turn
    starts = {s.action.microbatch // per_turn: s.start for s in timeline.spans if s.action[:2] == (kind, stage)
              and s.action.microbatch % per_turn == offset % per_turn}  # fmt: skip
    last = turns - 1 - schedule.drain
    return (starts[last] - starts[last - over]) / over


def costs(seed):
    drawn = cache(lambda kind, stage: random.Random(f"{seed} {kind} {stage}").randint(1, 40) / 8)
    return lambda action: drawn(action.kind, action.stage)


@pytest.mark.parametrize(("name", "seed"), in_turn([*ASYNCHRONOUS, *SYNCHRONOUS], range(3), rounds=3, slow=2))
def test_the_period_of_a_tied_model_is_that_of_the_full_simulation(name, seed):
    schedule, rules = stretto.method(name).plan(4, 4, ties=((0, 3), (1, 2)))
    latency = seed * 0.75
    found = period(schedule, rules, costs(seed), latency=latency)
    assert found == pytest.approx(settled(schedule, rules, costs(seed), latency), rel=1e-12)
    transport = Transport(network=Network(Link(latency)))
    assert found == simulate_periodic(schedule, rules, 500, costs(seed), transport=transport).turn


@pytest.mark.parametrize("name", ["pb", "pipedream", "pipedream-2bw"])
def test_every_borrowed_version_is_a_dependence(name):
    schedule, rules = stretto.method(name).plan(4, 4, ties=((0, 3),))
    lowered = lower(schedule, rules)
    pairs = {(lowered.actions[e.before][:2], lowered.actions[e.after][:2]) for e in dependences(lowered)}
    assert (("U", 0), ("F", 3)) in pairs
    assert (("B", 3), ("U", 0)) in pairs
