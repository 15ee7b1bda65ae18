"""A body that makes no sense is refused where it is written, with the action's name."""

import pytest

from stretto.errors import ScheduleError
from stretto.schedule import Action, Schedule


def act(text):
    """ "0F-2" as an action."""
    return Action(text[1], int(text[0]), int(text[2:]))


def body(*workers):
    return tuple(tuple(act(text) for text in worker.split()) for worker in workers)


@pytest.mark.parametrize(("workers", "per_turn", "message"), [
    (["0F0 0B0 0U0", "1F0 1B1 1U0"], 1, r"worker 1: 1B1 is for a micro-batch that enters in a later turn.*= 0"),
    (["0F0 0F4 0B0 0U3"], 4, r"worker 0: 0F4 .*per_turn - 1 = 3"),
    (["0F0 0B0 0F0 0U0"], 1, "worker 0: 0F0 stands twice"),
    (["0F0 0X0"], 1, "worker 0: 0X0 has the unknown kind 'X'; kinds are F, C, B, I, W, A, R, U, M"),
    (["0F0 0B0 0U0", "0F-1"], 1, "stage 0 stands on worker 0 and on worker 1"),
    (["0F0 0B0", "2F0 2B0"], 1, r"without gaps; the body has \[0, 2\]"),
    (["1F0 1B0"], 1, r"without gaps; the body has \[1\]"),
    ([], 1, "without gaps"),
    (["0F0"], 0, "per_turn is 0"),
])  # fmt: skip
def test_refused_bodies(workers, per_turn, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule(body(*workers), per_turn)


def test_what_can_be_read_off():
    schedule = Schedule(body("0F0 0B-3 0U-3 2F-1 2B-1 2U-1", "1F0 1B-2 1U-2"))
    assert (schedule.num_stages, schedule.num_workers, schedule.drain) == (3, 2, 3)
    assert schedule.worker_of == {0: 0, 2: 0, 1: 1}
    assert schedule.of_stage(2) == body("2F-1 2B-1 2U-1")[0]
    assert list(schedule.turn(0, 1)) == list(body("0F1 2F0 2B0 2U0")[0])
    assert list(schedule.turn(0, 3, until=3)) == list(body("0B0 0U0 2F2 2B2 2U2")[0])
    assert list(schedule.turn(0, 3, since=1)) == list(body("0F3 2F2 2B2 2U2")[0])


@pytest.mark.parametrize(("per_turn", "offsets", "drain"), [(1, [0], 0), (1, [-1], 1), (2, [-1], 1), (2, [-2], 1),
                                                           (2, [-3, 1], 2), (4, [3, -4], 1), (4, [-5], 2)])  # fmt: skip
def test_drain_is_how_far_back_the_turn_reaches(per_turn, offsets, drain):
    actions = tuple(Action("F", 0, offset) for offset in offsets)
    assert Schedule((actions,), per_turn).drain == drain


def test_an_action_is_written_as_torch_writes_it():
    assert str(Action("F", 3, 5)) == "3F5"
