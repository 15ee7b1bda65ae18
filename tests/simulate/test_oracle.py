"""Times of actions and messages are those of an independent simulation by simpy, to the last bit."""

import random

from hypothesis import given
from hypothesis import strategies as st

import stretto
from simulate.oracle import Oracle
from stretto.schedule import Rules
from stretto.schedule.added_actions import with_agreement, with_recompute, with_reduce
from stretto.simulate import Link, Network, simulate

SYNCHRONOUS = ("gpipe", "1f1b", "interleaved(microbatches=4)", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
ENDLESS = ("pb", "pipedream", "paci", "pipedream-2bw", "greedy", "overlapping", "overlapping(delay=1)", "chunked")


def random_plan(generator):
    """A schedule of the library, perhaps with R, A or M in it."""
    half = generator.randint(1, 3)
    name = generator.choice(SYNCHRONOUS + ENDLESS)
    workers = half if name.startswith(("zb-v", "dualpipe-v", "interleaved")) else generator.randint(1, 2 * half)
    schedule, rules = stretto.method(name).plan(2 * half, workers)
    if name in SYNCHRONOUS and generator.random() < 0.3:
        schedule = with_reduce(schedule)
    if generator.random() < 0.5:
        schedule = with_agreement(schedule, generator.choice("AM"))
    return schedule, Rules.of(schedule, rules.reach)


def random_network(generator, workers):
    """Links of several speeds, some of them shared; times are multiples of an eighth, so that sums are exact."""
    names = ["", "", "bus", "uplink"][: generator.randint(1, 4)]

    def link():
        latency, per_byte, gap = (
            generator.randint(0, 20),
            generator.choice([0, 1, 2, 3]),
            generator.choice([0, 0, 2, 5]),
        )
        return Link(latency / 8, per_byte / 8, generator.choice(names), gap / 8)

    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    return Network(link(), {pair: link() for pair in pairs if generator.random() < 0.5})


def agrees(seed):
    generator = random.Random(seed)
    schedule, rules = random_plan(generator)
    network = random_network(generator, schedule.num_workers)
    bytes_of, times_of = {}, {}
    most = generator.choice([0, 2, 30])

    def sizes(edge):
        return bytes_of.setdefault((edge.value, edge.source.stage, edge.stage), generator.randint(0, most))

    def times(action):
        return times_of.setdefault(action, generator.choice([0, generator.randint(0, 40) / 8]))

    chosen = {"sends": generator.choice(["buffered", "rendezvous"]), "overlap": generator.random() < 0.5}
    turns = generator.randint(1, 5)
    timeline = simulate(schedule, rules, turns, times, network=network, sizes=sizes, **chosen)

    def links(sender, receiver):
        link = network.between.get((sender, receiver), network.link)
        return link.latency, link.seconds_per_byte, link.shared, link.gap

    oracle = Oracle(schedule, rules, turns, times, links=links, sizes=sizes, **chosen)
    assert {span.action: span.start for span in timeline.spans} == oracle.starts
    found = {(m.value, m.source, m.stage): (m.sent, m.arrival) for m in timeline.messages}
    assert found == {tuple(edge): when for edge, when in oracle.messages.items()}


@given(seed=st.integers(0, 10**9))
def test_any_schedule_on_any_links(seed):
    agrees(seed)


def test_recomputation_too():
    generator = random.Random(7)
    schedule, rules = stretto.method("pb").plan(6, 6)
    schedule = with_recompute(schedule) if generator else schedule
    rules = Rules.of(schedule, rules.reach)
    network = Network(Link(0.5, 0.25, "bus"))
    timeline = simulate(schedule, rules, 9, network=network, sizes=lambda edge: 1)
    oracle = Oracle(
        schedule, rules, 9, lambda a: {"F": 1, "C": 1, "B": 2}.get(a.kind, 0), links=lambda a, b: (0.5, 0.25, "bus", 0),
        sizes=lambda edge: 1, sends="buffered", overlap=False,
    )  # fmt: skip
    assert {span.action: span.start for span in timeline.spans} == oracle.starts
