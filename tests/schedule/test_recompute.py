"""Where a forward is run again: pictures, closed forms of memory and time, and what is refused."""

import math
from dataclasses import replace

import pytest

import stretto
from pairwise import slow_where
from stretto.errors import ScheduleError, UsageError
from stretto.methods import METHODS
from stretto.schedule import Delays, added_actions, check, draw
from stretto.schedule.csv_file import to_csv
from stretto.simulate import period, simulate, unit_costs

SAME = {"pb-sc", "pb-lwp", "pb-lwpw", "pb-lwp-sc", "pipemare", "nesterov", "spectrain"}  # pb's schedule, or pipedream's
# One micro-batch at a time: nothing is kept where a worker has one stage.
LOCAL = ("backprop", "greedy", "chunked", "synthetic-gradients")
ENDLESS = ["pb", "pipedream", "pipedream-2bw", "pipedream-2bw(microbatches=11)", "paci(every=3)", "spectrain"]
PICTURES = {
    ("gpipe(microbatches=2)", True, 2, 1): """
    1 .01*aa*bb..
    0 01*...aa*bb""",
    ("pb", 2, 4, 6): """
    3 ...0aa1bb2cc3dd4ee5ff.......
    2 ..012.aa3bb4cc5dd.ee.ff.....
    1 .01234*.aa5*bb*cc*dd*ee*ff..
    0 01234*5**.aa*.bb*cc*dd.ee.ff""",
}


def method(name, **options):
    found = stretto.method(name)
    return stretto.method(found.name, **found.options, **options)


@pytest.mark.parametrize(("name", "size", "num_stages", "turns"), PICTURES)
def test_pictures(name, size, num_stages, turns):
    picture = PICTURES[name, size, num_stages, turns]
    timeline = simulate(*method(name, recompute=size).plan(num_stages), turns)
    rows = [["."] * int(timeline.makespan) for _ in range(num_stages)]
    for worker, (kind, _, m), start, end in timeline.spans:
        if kind != "U":
            rows[worker][int(start) : int(end)] = {"F": str(m), "C": "*", "B": "abcdef"[m]}[kind] * int(end - start)
    drawn = [f"    {worker} {''.join(row)}" for worker, row in enumerate(rows)]
    assert drawn[::-1] == picture.splitlines()[1:]
    assert all(line in added_actions.__doc__ for line in drawn)


def segments(num_stages, size):
    """(first, last) of each segment, by hand."""
    return [(a, min(a + size, num_stages) - 1) for a in range(0, num_stages, size)]


@pytest.mark.parametrize(("num_stages", "size"), [(S, k) for S in (2, 3, 4, 6, 9) for k in range(1, 6) if k < S])
@pytest.mark.parametrize(("name", "delay"), [("pb", 2), ("pipedream", 1)])
def test_memory_and_delay_of_segments(name, delay, num_stages, size):
    """D_s = d (S-1-s). A stage of a segment that ends at e: D_s - D_e + 1 graphs; its first stage: D_e + 1 inputs."""
    schedule, rules = method(name, recompute=size).plan(num_stages)
    timeline = simulate(schedule, rules, schedule.drain + 3)
    wait = [delay * (num_stages - 1 - s) for s in range(num_stages)]
    graphs, inputs, again = [], [], []
    for first, last in segments(num_stages, size):
        top = last == num_stages - 1
        for s in range(first, last + 1):
            graphs.append(wait[s] + 1 if top else wait[s] - wait[last] + 1)
            inputs.append(wait[last] + 1 if s == first and not top else 0)
            again.append(None if top else wait[s] - wait[last])
    assert timeline.peak_graphs == tuple(graphs)
    assert timeline.peak_inputs == tuple(inputs)
    assert Delays(schedule).recompute == tuple(again)
    assert Delays(schedule).steady == tuple(wait)
    assert rules.keep == {first for first, last in segments(num_stages, size)[:-1]}


@pytest.mark.parametrize("root", [2, 3, 4])
def test_the_pb_clock_holds_two_s_to_the_three_halves_instead_of_s_squared(root):
    """Reference, section 4: activations S^2 -> about 2 S^1.5 in segments of sqrt(S)."""
    num_stages = root**2
    plain, recomputing = (
        simulate(schedule, rules, schedule.drain + 2)
        for schedule, rules in (method("pb", recompute=each).plan(num_stages) for each in (False, True))
    )
    assert sum(plain.peak_graphs) == num_stages**2
    assert plain.peak_inputs == (0,) * num_stages
    held = sum(recomputing.peak_graphs) + sum(recomputing.peak_inputs)
    assert held == 2 * root**3 - root**2 + root - 1
    assert held == pytest.approx(2 * num_stages**1.5, rel=1 / root)


@pytest.mark.parametrize("num_stages", slow_where(lambda num_stages: num_stages > 5, [1, 2, 3, 5, 7]))
@pytest.mark.parametrize("name", ENDLESS)
def test_recomputing_adds_its_work_and_no_bubble(name, num_stages):
    """In the steady state the busiest worker never waits, for several numbers of workers and lengths of segments."""
    for workers in {1, num_stages // 2 or 1, num_stages}:
        for size in (True, 1, 2, 3):
            if size is True or size < num_stages:
                schedule, rules = method(name, recompute=size).plan(num_stages, workers)  # checked: both kinds of sends
                busiest = max(sum(unit_costs(action) for action in body) for body in schedule.body)
                assert period(schedule, rules, unit_costs) == busiest
                added = sum(action.kind == "C" for body in schedule.body for action in body)
                top = segments(num_stages, round(math.sqrt(num_stages)) if size is True else size)[-1]
                assert added == top[0] * schedule.per_turn


@pytest.mark.parametrize(("num_stages", "M"), [(2, 2), (3, 4), (5, 3), (4, 8)])
def test_time_and_memory_where_every_minibatch_drains(num_stages, M):
    """All of C but one a stage lies between backwards in GPipe; in 1F1B the first two hide in the wait."""
    for name, added, inputs in (("gpipe", M, [M] * num_stages), ("1f1b", M - 2, None)):
        timeline = simulate(*method(name, recompute=True, microbatches=M).plan(num_stages), 1)
        assert timeline.makespan == 3 * (M + num_stages - 1) + added
        assert timeline.peak_graphs == (1,) * num_stages
        assert list(timeline.peak_inputs) == (
            inputs or [min(M, num_stages - s) if s < num_stages - 1 else 0 for s in range(num_stages)]
        )


@pytest.mark.parametrize("num_stages", slow_where(lambda num_stages: num_stages > 5, range(1, 10)))
@pytest.mark.parametrize("name", sorted(set(METHODS) - SAME))
def test_every_schedule_with_recomputes_is_complete_and_free_of_deadlock(name, num_stages):
    for workers in {1, num_stages // 2 or 1, num_stages}:
        rounds = name in ("interleaved", "looped-bfs") and num_stages % workers
        if rounds or (name in ("zb-v", "dualpipe-v") and 1 < num_stages != 2 * workers):
            continue  # these want as many stages on each worker
        found = method(name, recompute=True)
        if num_stages > 1 and (name == "overlapping" or (name in LOCAL and workers == num_stages)):
            with pytest.raises(UsageError, match="nothing to recompute"):
                found.plan(num_stages, workers)
        else:
            _, rules = found.plan(num_stages, workers)  # checked there
            assert bool(rules.recompute) == (num_stages > 1 or name in ("gpipe", "looped-bfs"))


@pytest.mark.parametrize("name", sorted(SAME))
def test_the_other_methods_have_the_same_schedules(name):
    plan = method(name, recompute=True).plan(5)
    assert plan in [method(other, recompute=True).plan(5) for other in ("pb", "pipedream")]


def test_a_stage_whose_backward_follows_at_once_does_not_recompute():
    assert method("1f1b", recompute=True).plan(4)[1].recompute == {0, 1, 2}
    assert method("gpipe", recompute=True).plan(4)[1].recompute == {0, 1, 2, 3}
    assert method("backprop", recompute=True).plan(4, 1)[1].recompute == {0, 1, 2}
    assert method("zb-h1", recompute=True).plan(4)[1].recompute == {0, 1, 2}
    assert method("chunked", recompute=True, chunks=2).plan(4, 2)[1].recompute == {0, 2}


@pytest.mark.parametrize(
    ("name", "options", "num_stages", "message"),
    [
        ("gpipe", {"recompute": 2}, 4, "recompute=2: in a pipeline that drains .* wait for each other"),
        ("overlapping", {"recompute": True}, 4, "nothing to recompute"),
        ("overlapping", {"recompute": True, "delay": 1}, 4, "nothing to recompute"),
        ("greedy", {"recompute": True}, 4, "on 4 stages and 4 workers: nothing to recompute"),
        ("pb", {"recompute": 4}, 4, "nothing to recompute.*use shorter segments"),
        ("pb", {"recompute": 0}, 4, "recompute=0"),
        ("pb", {"recompute": "yes"}, 4, "recompute='yes'"),
        ("pb", {"recompute": 1.5}, 4, "recompute=1.5"),
        ("pb-lwp", {"recompute": True, "horizon": 3}, 4, "its horizon has to follow from the delay"),
    ],
)
def test_refused(name, options, num_stages, message):
    with pytest.raises(UsageError, match=message):
        method(name, **options).plan(num_stages)


def test_no_recompute_is_the_method_as_it_was():
    for name in ("pb", "gpipe"):
        for no in (None, False):
            assert method(name, recompute=no).plan(4) == method(name).plan(4)


def test_a_recompute_that_is_missing_is_found():
    schedule, rules = method("pb", recompute=2).plan(4)
    body = tuple(tuple(a for a in actions if (a.kind, a.stage) != ("C", 1)) for actions in schedule.body)
    with pytest.raises(ScheduleError, match="1C0 is missing from worker 1"):
        check(replace(schedule, body=body), rules)


def test_a_recompute_after_its_backward_deadlocks():
    schedule, rules = method("pb", recompute=1).plan(2)
    swapped = [a for a in schedule.body[0] if a.kind != "C"]
    swapped.insert(2, next(a for a in schedule.body[0] if a.kind == "C"))
    with pytest.raises(ScheduleError, match="waits for 0C0's graph before 0B0"):
        check(replace(schedule, body=(tuple(swapped), schedule.body[1])), rules)


def test_torch_reads_no_recompute():
    with pytest.raises(UsageError, match="0C0 of worker 0 is a recompute"):
        to_csv(method("gpipe", recompute=True).plan(2)[0])


def test_it_is_drawn():
    timeline = simulate(*method("pb", recompute=True).plan(4), 3)
    assert "0C0" in draw.text(timeline.spans)
    assert "C recompute" in draw.svg(timeline.spans)
    assert draw.COLORS["C"] in draw.svg(timeline.spans)
