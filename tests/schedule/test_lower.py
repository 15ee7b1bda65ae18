"""What passes between the lanes of a schedule, and what a lane's own order takes care of."""

import stretto
from stretto.schedule import Action, Reach, Rules, Schedule
from stretto.schedule.added_actions import with_agreement
from stretto.schedule.lower import Lane, lower

BODY = tuple((Action("F", s, 0), Action("B", s, -(1 - s)), Action("U", s, -(1 - s))) for s in range(2))


def passings(lowered):
    names = [f"{action.stage}{action.kind}" for action in lowered.actions]
    return [
        (each.edge and each.edge.value, names[each.source], None if each.user is None else names[each.user], each.back)
        for each in lowered.passings
    ]


def test_messages_of_a_pipeline():
    schedule = Schedule(BODY)
    lowered = lower(schedule, Rules.of(schedule, Reach((None, 1))))
    assert lowered.lanes == (Lane(0, 0, 3), Lane(1, 3, 6))
    assert lowered.late == (0, 1, 1, 0, 0, 0)
    assert passings(lowered) == [("activation", "0F", "1F", 0), ("gradient", "1B", "0B", 0)]
    assert [each.receiver for each in lowered.passings] == [1, 0]
    assert lowered.action(1, 7) == Action("B", 0, 7)


def test_merges_beside_the_computation_keep_their_place_in_their_stage():
    schedule = with_agreement(Schedule(BODY), "M")
    rules = Rules.of(schedule, Reach((None, 1)))
    assert len(lower(schedule, rules).lanes) == 2
    lowered = lower(schedule, rules, overlap=True)
    assert lowered.lanes == (Lane(0, 0, 3), Lane(1, 3, 6), Lane(0, 6, 7), Lane(1, 7, 8))
    assert lowered.beside == {"M"}
    found = passings(lowered)
    assert (None, "0U", "0M", 0) in found
    assert (None, "0M", "0F", -2) in found  # merges of the turn before, which were of the minibatch before that
    assert (None, "1M", "1F", -1) in found


def test_sums_beside_the_computation():
    schedule = with_agreement(stretto.method("1f1b(microbatches=2)").plan(2, 2)[0], "A")
    lowered = lower(schedule, Rules.of(schedule, Reach((None, 1))), overlap=True)
    local = [each for each in passings(lowered) if each[0] in ("weight-gradient", "summed")]
    assert local == [
        ("weight-gradient", f"{s}B", f"{s}A", 0) for s in (0, 0, 1, 1)
    ] + [("summed", f"{s}A", f"{s}U", 0) for s in (0, 1)]  # fmt: skip
