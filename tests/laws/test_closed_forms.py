"""Laws 3 and 4: simulated period, makespan, bubble, memory and work equal the closed forms.

Pictures of the local methods with F = I = W = 1 and B = 2, as the simulator must draw them (updates take no time):

    backprop        greedy             chunked         overlapping        overlapping(delay=1)
    2 ..FBB....     3 ...FBBFBBFBB     3 ...FBB...FBB  2 ..FIW.FIW.FIW    2 ..FIFIWFIWW
    1 .F...BB..     2 ..FBBFBBFBB.     2 ..F...BBF...  1 .FI.WFI.WFI.W    1 .FIFIWFIWW.
    0 F......BB     1 .FBBFBBFBB..     1 .FBB...FBB..  0 FI.WFI.WFI.W.    0 FIFIWFIWW..
                    0 FBBFBBFBB...     0 F...BBF...BB

    synthetic gradients, L = 1, which only the stages below the last have
    2 ..FBBFBB.FBB.
    1 .FBBFLBBFLBBL
    0 FBBFLBBFLBB.L
"""

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from laws.pipelines import async_1f1b, gpipe, one_f_one_b, pb_clock
from stretto.schedule import Reach, Rules, Schedule
from stretto.simulate import period, simulate, unit_costs

PICTURES = {
    ("backprop", 3, 1): "2 ..FBB....\n1 .F...BB..\n0 F......BB",
    ("greedy", 4, 3): "3 ...FBBFBBFBB\n2 ..FBBFBBFBB.\n1 .FBBFBBFBB..\n0 FBBFBBFBB...",
    ("chunked", 4, 2): "3 ...FBB...FBB..\n2 ..F...BBF...BB\n1 .FBB...FBB....\n0 F...BBF...BB..",
    ("overlapping", 3, 3): "2 ..FIW.FIW.FIW\n1 .FI.WFI.WFI.W\n0 FI.WFI.WFI.W.",
    ("overlapping(delay=1)", 3, 3): "2 ..FIFIWFIWW\n1 .FIFIWFIWW.\n0 FIFIWFIWW..",
    ("synthetic-gradients", 3, 3): "2 ..FBBFBB.FBB.\n1 .FBBFLBBFLBBL\n0 FBBFLBBFLBB.L",
}
KINDS = "FBIWUL"


def plan(name, num_stages, workers=None):
    return stretto.method(name).plan(num_stages, workers)


def table(draw_cost, num_stages):
    costs = {(kind, s): draw_cost() for kind in KINDS for s in range(num_stages)}
    return costs, lambda action: costs[action.kind, action.stage]


def draw(timeline):
    rows = [["."] * int(timeline.makespan) for _ in range(timeline.schedule.num_workers)]
    for worker, action, start, end in timeline.spans:
        rows[worker][int(start) : int(end)] = action.kind * int(end - start)
    return "\n".join(f"{worker} {''.join(row)}" for worker, row in reversed(list(enumerate(rows))))


@pytest.mark.parametrize(("name", "stages", "turns"), PICTURES)
def test_pictures(name, stages, turns):
    assert draw(simulate(*plan(name, stages), turns)) == PICTURES[name, stages, turns]


# -- periods --------------------------------------------------------------------------------------------------------


def chunk_period(costs, stages):
    """Backprop inside a chunk: up and down through the stages from s on, then s's update."""
    through = accumulate(costs["F", s] + costs["B", s] for s in reversed(stages))
    return max(time + costs["U", s] for time, s in zip(through, reversed(stages), strict=True))


def cut(num_stages, chunks):
    size, longer = divmod(num_stages, chunks)
    ends = [0, *accumulate(size + (c < longer) for c in range(chunks))]
    return [range(a, b) for a, b in pairwise(ends)]


@given(data=st.data(), num_stages=st.integers(1, 6))
def test_period_is_the_closed_form(data, num_stages):
    costs, durations = table(lambda: data.draw(st.integers(0, 9)), num_stages)
    chunks = data.draw(st.integers(1, num_stages))
    stages = range(num_stages)
    own = [sum(costs[kind, s] for kind in "FIWU") for s in stages]
    hop = [sum(costs[kind, s] for kind in "FWU") + costs["F", s + 1] + costs["I", s + 1] for s in range(num_stages - 1)]
    forms = {
        "backprop": chunk_period(costs, stages),
        "greedy": max(costs["F", s] + costs["B", s] + costs["U", s] for s in stages),
        f"chunked(chunks={chunks})": max(chunk_period(costs, chunk) for chunk in cut(num_stages, chunks)),
        "overlapping": max(own + hop),
        "overlapping(delay=1)": max(own),
    }
    for name, expected in forms.items():
        assert period(*plan(name, num_stages), durations) == expected, name


@given(data=st.data(), num_stages=st.integers(1, 5))
def test_one_worker_does_everything_in_turn(data, num_stages):
    costs, durations = table(lambda: data.draw(st.integers(0, 9)), num_stages)
    for name, kinds in {
        "backprop": "FBU",
        "greedy": "FBU",
        "overlapping": "FIWU",
        "overlapping(delay=1)": "FIWU",
    }.items():
        work = sum(costs[kind, s] for kind in kinds for s in range(num_stages))
        assert period(*plan(name, num_stages, 1), durations) == work
        timeline = simulate(*plan(name, num_stages, 1), 7, durations)
        assert (timeline.makespan, timeline.bubble) == (7 * work, pytest.approx(0))


@given(data=st.data(), num_stages=st.integers(2, 6), delay=st.integers(1, 3))
def test_nobody_waits_for_a_gradient_to_learn_from(data, num_stages, delay):
    """The period is the slowest stage's work, whatever the costs; also on any number of workers with the same total."""
    costs, durations = table(lambda: data.draw(st.integers(0, 9)), num_stages)
    name = f"synthetic-gradients(delay={delay})"
    work = [sum(costs[kind, s] for kind in ("FBUL" if s < num_stages - 1 else "FBU")) for s in range(num_stages)]
    assert period(*plan(name, num_stages), durations) == max(work)
    assert period(*plan(name, num_stages, 1), durations) == sum(work)
    timeline = simulate(*plan(name, num_stages, 1), 5, durations)
    assert (timeline.makespan, timeline.bubble) == (5 * sum(work), pytest.approx(0))


@pytest.mark.parametrize("num_stages", range(2, 7))
def test_unit_costs(num_stages):
    """F = I = W = L = 1, B = 2: work 3 a stage, or 4. Only overlapping's delay=0 waits, one hop."""
    expected = {"backprop": 3 * num_stages, "greedy": 3, "chunked": 3 * -(-num_stages // 2), "overlapping": 4,
                "overlapping(delay=1)": 3, "synthetic-gradients": 4}  # fmt: skip
    assert {name: period(*plan(name, num_stages), unit_costs) for name in expected} == expected


@given(data=st.data(), num_stages=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_period_is_what_the_simulation_settles_to(data, num_stages, seed):
    """(makespan(2T) - makespan(T)) / T for any method, placement and cost. T is a multiple of every cycle's turns."""
    generator = random.Random(seed)
    name = data.draw(
        st.sampled_from(["backprop", "greedy", "overlapping", "overlapping(delay=1)"])
        | st.integers(1, num_stages).map("chunked(chunks={})".format)
    )
    workers = data.draw(st.integers(1, num_stages))
    _, durations = table(lambda: generator.randint(0, 20), num_stages)
    found = plan(name, num_stages, workers)
    T = 120
    grown = simulate(*found, 2 * T, durations).makespan - simulate(*found, T, durations).makespan
    assert period(*found, durations) == pytest.approx(grown / T, rel=1e-12)


@given(seed=st.integers(0, 10**6), S=st.integers(1, 4), M=st.integers(1, 5))
@settings(max_examples=12)
def test_period_of_pipelines_is_what_the_simulation_settles_to(seed, S, M):
    generator = random.Random(seed)
    _, durations = table(lambda: generator.randint(0, 20), S)
    for schedule in (pb_clock(S), async_1f1b(S), gpipe(S, M), one_f_one_b(S, M)):
        found = schedule, Rules.of(schedule, Reach((*[None] * (S - 1), S - 1)))
        T = 120
        grown = simulate(*found, 2 * T, durations).makespan - simulate(*found, T, durations).makespan
        assert period(*found, durations) == pytest.approx(grown / T, rel=1e-12)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-9, 1.0, 1e15]))
def test_period_ends_and_scales_for_any_unit(seed, scale):
    """Seconds or FLOPs: real numbers of any size."""
    generator = random.Random(seed)
    costs, durations = table(generator.random, 4)
    for name in ("backprop", "greedy", "overlapping", "overlapping(delay=1)", "chunked"):
        plain = period(*plan(name, 4), durations)
        assert period(*plan(name, 4), lambda action: scale * costs[action.kind, action.stage]) == pytest.approx(
            scale * plain, rel=1e-9
        )


@given(seed=st.integers(0, 10**6), S=st.integers(1, 4))
def test_counting_a_workers_turns_from_later_on_changes_no_period(seed, S):
    """The same lists, worker w's turn n now called n+k: only labels change, and a turn may wait for a later one."""
    generator = random.Random(seed)
    _, durations = table(lambda: generator.randint(0, 20), S)
    plans = [plan(name, S) for name in ("backprop", "greedy", "overlapping(delay=1)")]
    plans.append((pb_clock(S), Rules.of(pb_clock(S), Reach((*[None] * (S - 1), S - 1)))))
    for schedule, rules in plans:
        later = tuple(
            tuple(action._replace(microbatch=action.microbatch - k) for action in body)
            for body, k in ((body, generator.randint(0, 3)) for body in schedule.body)
        )
        named, renamed = (schedule, rules), (Schedule(later), rules)
        assert period(*renamed, durations) == period(*named, durations)
        assert simulate(*renamed, 9, durations).makespan == simulate(*named, 9, durations).makespan


# -- the table of costs: total and serial ---------------------------------------------------------------------------


@given(data=st.data(), L=st.integers(1, 6), T=st.integers(1, 5))
def test_total_and_serial_cost_of_a_run(data, L, T):
    """reference.md, section 1: a block costs f, its head a, a backward twice its forward; everything over 3."""
    f = [data.draw(st.integers(1, 30)) for _ in range(L)]
    a = [data.draw(st.integers(1, 30)) for _ in range(L)]
    chunks = data.draw(st.integers(1, L))
    cuts = cut(L, chunks)
    top = range(1, L) if L > 1 else range(1)
    forms = {
        "backprop": (sum(f) + a[-1], sum(f) + a[-1]),
        "greedy": (sum(f) + sum(a), max(f[s] + a[s] for s in range(L))),
        f"chunked(chunks={chunks})": (
            sum(f) + sum(a[c[-1]] for c in cuts),
            max(sum(f[s] for s in c) + a[c[-1]] for c in cuts),
        ),
        "overlapping(delay=1)": (sum(f) + sum(a[s] for s in top), max(f[s] + a[s] * (s in top) for s in range(L))),
    }
    for name, (total, serial) in forms.items():
        schedule, rules = plan(name, L)
        block = [f[s] + a[s] * (rules.reach.hops[s] is not None) for s in range(L)]

        def durations(action, block=block):
            kind, s, _ = action
            # the input gradient holds the head's whole backward, the weight gradient the rest
            return {"F": block[s], "B": 2 * block[s], "I": 2 * block[s] - f[s], "W": f[s], "U": 0}[kind]

        assert sum(simulate(schedule, rules, T, durations).busy) == 3 * T * total, name
        assert period(schedule, rules, durations) == 3 * serial, name


@pytest.mark.parametrize("num_stages", range(2, 6))
def test_waiting_one_hop_costs_a_third_more(num_stages):
    waiting, delayed = (period(*plan(f"overlapping(delay={d})", num_stages), unit_costs) for d in (0, 1))
    assert waiting / delayed == pytest.approx(4 / 3)


# -- memory and bubbles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(("name", "held"), [
    ("backprop", 1), ("greedy", 1), ("chunked", 1), ("overlapping", 1), ("overlapping(delay=1)", 2),
])  # fmt: skip
def test_activations_held(name, held, workers):
    assert simulate(*plan(name, 4, workers), 9).peak_graphs == (held,) * 4


@given(num_stages=st.integers(1, 6), turns=st.integers(1, 8), forward=st.integers(1, 5), backward=st.integers(1, 5))
def test_makespan_and_bubble(num_stages, turns, forward, backward):
    def durations(action):
        return {"F": forward, "B": backward, "U": 0}[action.kind]

    work = forward + backward
    timeline = simulate(*plan("backprop", num_stages), turns, durations)
    assert timeline.makespan == turns * num_stages * work
    assert timeline.bubble == pytest.approx(1 - 1 / num_stages)
    timeline = simulate(*plan("greedy", num_stages), turns, durations)
    assert timeline.makespan == (num_stages - 1) * forward + turns * work
    assert timeline.busy == (turns * work,) * num_stages
    assert timeline.bubble == pytest.approx(1 - turns * work / timeline.makespan)


def test_nothing_happens_in_no_time():
    timeline = simulate(*plan("greedy", 3), 0)
    assert (timeline.makespan, timeline.bubble, timeline.spans) == (0, 0, ())
