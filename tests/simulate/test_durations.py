"""Times of actions from a few numbers a stage."""

import pytest

from stretto.errors import UsageError
from stretto.schedule import Action
from stretto.simulate import action_durations


def table(*kinds, stages=2, **given):
    times = action_durations(stages, **given)
    return [[times(Action(kind, stage, 7)) for stage in range(stages)] for kind in kinds]


def test_what_is_not_given():
    assert table(*"FBIWUC") == [[1, 1], [2, 2], [1, 1], [1, 1], [0, 0], [1, 1]]
    assert table("F", "B", "C", "R", forward=[3, 5]) == [[3, 5], [6, 10], [3, 5], [0, 0]]
    assert table("I", "W", backward=[3]) == [[1.5, 1.5], [1.5, 1.5]]


def test_the_other_half_is_the_rest():
    assert table(*"BIW", backward=[3], input_gradient=[1]) == [[3, 3], [1, 1], [2, 2]]
    assert table(*"BIW", backward=[3], weight_gradient=[0, 3]) == [[3, 3], [3, 0], [0, 3]]
    assert table(*"BIW", input_gradient=[1], weight_gradient=[4, 5]) == [[5, 6], [1, 1], [4, 5]]
    assert table(*"BIW", backward=[3], input_gradient=[2], weight_gradient=[2]) == [[3, 3], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward has 3 times for 2 stages: give one for all, or 2"),
        ({"update": []}, "update has 0 times"),
        ({"backward": [1, -1]}, "backward=-1: a time is 0 or more"),
        ({"backward": [float("nan")]}, "backward=nan"),
        ({"forward": [float("inf")]}, "forward=inf"),
        ({"backward": [2], "input_gradient": [1, 3]}, "input-gradient=3 is more than the whole backward of stage 1, 2"),
        ({"weight_gradient": [3]}, "weight-gradient=3 is more than the whole backward of stage 0, 2"),
    ],
)
def test_what_cannot_be(given, message):
    with pytest.raises(UsageError, match=message):
        action_durations(2, **given)
