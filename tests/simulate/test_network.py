"""Side tables of a simulation: links, sizes, noise; and what they are refused for."""

import numpy as np
import pytest

import stretto
from stretto.errors import UsageError
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.schedule.lower import lower
from stretto.simulate import Link, Network, Noise, simulate

PAIR = Schedule(tuple((Action("F", s, 0), Action("B", s, 0), Action("U", s, 0)) for s in range(2)))
RULES = Rules.of(PAIR, Reach((None, 1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=-1), "latency=-1 of a link: a time is 0 or more"),
        (lambda: Link(seconds_per_byte=float("nan")), "seconds_per_byte=nan"),
        (lambda: Link(gap=-2), "gap=-2 of a link"),
        (lambda: Noise(jitter=-1), "jitter=-1: a standard deviation is 0 or more"),
        (lambda: Noise(straggling=2), "straggling=2: a probability is between 0 and 1"),
        (lambda: Noise(workers={1: -2}), "a factor of -2 on times: choose 0 or more"),
        (lambda: simulate(PAIR, RULES, 1, sends="eager"), "sends='eager': choose buffered or rendezvous"),
    ],
)
def test_what_cannot_be(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_message_takes_its_latency_and_its_bytes():
    timeline = simulate(PAIR, RULES, 1, network=Network(Link(0.5, 0.25)), sizes=lambda edge: 8)
    (up, down) = sorted(timeline.messages, key=lambda message: message.sent)
    assert (up.sent, up.arrival, up.hold) == (1, 3.5, 2)
    assert (down.sent, down.arrival, down.hold) == (6.5, 9, 2)
    assert timeline.makespan == 1 + 2.5 + 3 + 2.5 + 2
    assert timeline.exposed == (2.5 + 2.5 - 2.5, 2.5)  # worker 0 would have waited for worker 1, but 2.5 less
    assert timeline.utilisation == (3 / 11, 3 / 11)


def test_a_message_keeps_others_waiting_for_its_gap():
    schedule, rules = stretto.method("gpipe(microbatches=3)").plan(2, 2)
    for gap, sent in ((0.0, [1, 3, 5]), (0.25, [1, 3, 5]), (0.5, [1, 5, 9])):
        timeline = simulate(schedule, rules, 1, network=Network(Link(0.5, 0.25, gap=gap)), sizes=lambda edge: 8)
        up = [message for message in timeline.messages if message.value == "activation"]
        assert [(message.sent, message.arrival) for message in up] == [(at, at + 2.5) for at in sent]


def test_rendezvous_waits_for_the_receiver_and_not_the_sender():
    """Worker 1 is at a backward when worker 0 has made its third activation: 0F2 from 2 to 3, 1B0 from 2.5 to 4.5."""
    body = (
        (*(Action("F", 0, m) for m in range(3)), *(Action("B", 0, m) for m in range(3)), Action("U", 0, 2)),
        (*(Action(kind, 1, m) for m in range(3) for kind in "FB"), Action("U", 1, 2)),
    )
    schedule = Schedule(body, 3)
    rules = Rules.of(schedule, Reach((None, 1)))
    sent = {}
    for sends in ("buffered", "rendezvous"):
        timeline = simulate(schedule, rules, 1, latency=0.5, sends=sends)
        sent[sends] = [m.sent for m in timeline.messages if m.value == "activation"]
        assert [s.start for s in timeline.spans if s.worker == 0][:3] == [0, 1, 2]
    assert sent == {"buffered": [1, 2, 3], "rendezvous": [1, 4.5, 8]}


def test_factors_are_those_of_their_seed():
    lowered = lower(PAIR, RULES)
    noise = Noise(seed=3, jitter=0.1, straggling=0.1, slowdown=5, workers={1: 2})
    few, many = noise.factors(lowered, 50), noise.factors(lowered, 400)
    assert np.array_equal(few, many[:, :50])
    assert not np.array_equal(many, Noise(seed=4, jitter=0.1).factors(lowered, 400))
    assert np.median(many[:3]) == pytest.approx(1, abs=0.03)
    assert np.median(many[3:]) == pytest.approx(2, abs=0.06)
    assert (many[:3] > 3).mean() == pytest.approx(0.1, abs=0.03)
    assert (Noise().factors(lowered, 4) == 1).all()


def test_noise_makes_times_longer_or_shorter():
    schedule, rules = stretto.method("pb").plan(3, 3)
    plain = simulate(schedule, rules, 5)
    slow = simulate(schedule, rules, 5, noise=Noise(workers={0: 2, 1: 2, 2: 2}))
    assert slow.makespan == 2 * plain.makespan
    assert simulate(schedule, rules, 5, noise=Noise(seed=1, jitter=0.2)).makespan != plain.makespan
