"""R before U: the picture, and which schedules can."""

import pytest

from stretto import ScheduleError, method
from stretto.schedule import check
from stretto.schedule.added_actions import with_reduce
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.library.pipedream import pipedream


def test_the_picture():
    """2 ..0aa1bbRU / 1 .01.aa.bbRU / 0 01..aa..bbRU, idle time left out."""
    letters = {"F": "01", "B": "ab", "R": " R", "U": " U"}
    rows = [
        "".join(letters[a.kind][a.microbatch] for a in actions) for actions in with_reduce(one_f_one_b(3, 3, 2)).body
    ]
    assert rows == ["01abRU", "01abRU", "0a1bRU"]


def test_updates_wait_until_every_stage_of_the_worker_has_told():
    (actions,) = with_reduce(one_f_one_b(2, 1, 1)).body
    assert [str(a) for a in actions] == ["0F0", "1F0", "1B0", "0B0", "1R0", "0R0", "1U0", "0U0"]


@pytest.mark.parametrize("name", ["backprop", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v"])
def test_every_synchronous_method_can(name):
    for stages in (1, 2, 4, 6):
        for workers in {1, 2, stages} & set(range(1, stages + 1)):
            schedule, rules = method(name).plan(stages, workers if name != "zb-v" else None, reduce=True)
            check(schedule, rules)
            assert rules.reduces


def test_an_asynchronous_one_cannot():
    with pytest.raises(ScheduleError, match=r"worker 0: 0B-2 is of an earlier minibatch"):
        with_reduce(pipedream(3, 3))
