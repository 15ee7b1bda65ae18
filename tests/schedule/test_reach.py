"""Where gradients go, against a count by hand of every head's way down."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from stretto.errors import ScheduleError
from stretto.schedule import Action, Delays, Reach, Rules, Schedule
from stretto.schedule.library import backprop_and_local


@st.composite
def reaches(draw):
    """Any reach that trains every stage."""
    size = draw(st.integers(1, 6))
    hops = [draw(st.none() | st.integers(0, s)) for s in range(size - 1)] + [draw(st.integers(0, size - 1))]
    for stage in range(size):
        if not any(h is not None and s - h <= stage <= s for s, h in enumerate(hops)):
            hops[stage] = 0
    return Reach(tuple(hops))


@given(reaches())
def test_every_way_down_is_counted_where_it_passes(reach):
    ways = [(head, head - hops) for head, hops in enumerate(reach.hops) if hops is not None]
    for stage in range(reach.num_stages):
        crossing = {stop for head, stop in ways if stop < stage <= head}
        assert reach.carried(stage) == tuple(sorted(crossing))
        assert set(reach.losses(stage)) == {head for head, stop in ways if stop <= stage <= head}
        above = {stop for head, stop in ways if stop <= stage < head}
        assert set(reach.arriving(stage)) == above
        assert set(reach.passing(stage)) == {stop for head, stop in ways if stop < stage < head}
        # one sweep: the root gradients of the input gradient are those of the weight gradient, or there is none
        trains = {(head, stop) for head, stop in ways if stop <= stage <= head}
        down = [{(head, s) for head, s in ways if s == stop and head >= stage} for stop in crossing]
        assert reach.one_sweep(stage) == (not down or (len(down) == 1 and down[0] == trains))


def test_the_table_of_the_papers_methods():
    assert [Reach((0, 0, 0)).carried(s) for s in range(3)] == [(), (), ()]
    assert [Reach((None, 1, 1)).carried(s) for s in range(3)] == [(), (0,), (1,)]
    assert [Reach((None, None, 2)).carried(s) for s in range(3)] == [(), (0,), (0,)]
    assert [Reach((None, 1, None, 1)).carried(s) for s in range(4)] == [(), (0,), (), (2,)]
    assert [Reach((None, 1, 1)).one_sweep(s) for s in range(3)] == [True, False, True]


def test_predicted_gradients():
    """Each begins at its stage and ends at the one above the next predicted stage, which learns from it."""
    reach = Reach((None, None, None, None, 1), frozenset({0, 2}), labelled=True)
    assert [reach.carried(s) for s in range(5)] == [(), (1,), (1,), (3,), (3,)]
    assert [reach.arriving(s) for s in range(5)] == [(1,), (1,), (3,), (3,), ()]
    assert [reach.losses(s) for s in range(5)] == [(0,), (2,), (2,), (4,), (4,)]
    assert all(reach.one_sweep(s) for s in range(5))
    assert reach.reading == (0, 2, 4)
    assert not reach.trains_all_of(0, 4)


@pytest.mark.parametrize(("hops", "predicted", "message"), [
    ((None, 0), frozenset({1}), "give a frozenset of stages from 0 to 0; the last stage has the loss itself"),
    ((None, 0), {0}, "give a frozenset"),
    ((None, None, 2), frozenset({0}), "the gradient of the head of stage 2 would pass stage 0"),
    ((0, 0), frozenset({0}), "the gradient of the head of stage 0 would pass stage 0"),
    ((None, None, 0), frozenset({0}), "no head's gradient reaches stage 1"),
])  # fmt: skip
def test_refused_predictions(hops, predicted, message):
    with pytest.raises(ScheduleError, match=message):
        Reach(hops, predicted)


def test_a_predicted_stage_goes_backward_in_one_sweep():
    reach = Reach((None, 0), frozenset({0}))
    body = tuple(Action(kind, stage, 0) for stage in (0, 1) for kind in ("FIWU" if stage == 0 else "FBU"))
    with pytest.raises(ScheduleError, match="stage 0 has a predicted gradient: its backward is B, not I and W"):
        Rules.of(Schedule((body,)), reach)


@pytest.mark.parametrize(("hops", "message"), [
    ((), "the last stage must have a head"),
    ((0, None), "the last stage must have a head"),
    ((0, 2), "the head of stage 1 reaches 2 stages down; between 0 and 1 exist"),
    ((0, -1), "the head of stage 1 reaches -1 stages down"),
    ((None, 0), "no head's gradient reaches stage 0"),
    ((0, None, 0), "no head's gradient reaches stage 1"),
])  # fmt: skip
def test_refused(hops, message):
    with pytest.raises(ScheduleError, match=message):
        Reach(hops)


@given(reaches())
def test_rules_make_what_they_need_and_free_what_they_make(reach):
    """Over one micro-batch every value that is needed is made or loaded, and is gone in the end but for the loss."""
    split = frozenset(range(reach.num_stages))
    rules = Rules(reach, split)
    there = set(rules.loads(0))
    order = [Action("F", s, 0) for s in range(reach.num_stages)]
    for kind in "IW":
        order += [Action(kind, s, 0) for s in reversed(range(reach.num_stages))]
    order += [Action("U", s, 0) for s in range(reach.num_stages)]
    for action in order:
        assert there.issuperset(rules.needs(action)), action
        there -= set(rules.frees(action))
        assert there.isdisjoint(rules.makes(action)), action
        there |= set(rules.makes(action))
    assert there == {rules.loss(0)}


@given(stages=st.integers(1, 20), workers=st.integers(1, 20))
def test_stages_are_cut_as_tensor_split_cuts(stages, workers):
    if workers > stages:
        with pytest.raises(ScheduleError, match=f"{workers} workers for {stages} stages"):
            backprop_and_local.assign(stages, workers)
    else:
        cut = torch.arange(stages).tensor_split(workers)
        assert [list(part) for part in backprop_and_local.assign(stages, workers)] == [part.tolist() for part in cut]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_delays_of_the_local_methods(workers):
    for name in ("backprop", "greedy", "chunked", "chunked(chunks=3)", "overlapping", "overlapping(combine=mean)"):
        schedule, _ = stretto.method(name).plan(4, workers)
        assert Delays(schedule).steady == (0, 0, 0, 0), name
    schedule, _ = stretto.method("overlapping(delay=1)").plan(4, workers)
    assert Delays(schedule).steady == (1, 1, 1, 1)
    assert [Delays(schedule).at(2, m) for m in range(4)] == [0, 1, 1, 1]
    assert Delays(stretto.method("overlapping(delay=1)").plan(1)[0]).steady == (0,)
