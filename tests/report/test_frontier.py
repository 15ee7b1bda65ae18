from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stretto.report.metric import METRICS, TRAIN_LOSS, VALIDATION_ACCURACY
from stretto.report.panel import dominated, first_reaching
from stretto.report.record import Record

from .synthetic import point, run

numbers = st.integers(1, 8).map(float)
costs = st.lists(st.tuples(numbers, numbers), max_size=30)


def test_first_reaching_is_the_first_and_not_the_best():
    record = run([2.0, 0.9, 1.5, 0.4])
    assert first_reaching(record, TRAIN_LOSS, 1.0).step == 2
    assert first_reaching(record, TRAIN_LOSS, 0.9).step == 2, "as good as is good enough"
    assert first_reaching(record, TRAIN_LOSS, 0.5).step == 4
    assert first_reaching(record, TRAIN_LOSS, 0.3) is None


def test_first_reaching_an_accuracy_goes_up_and_skips_what_was_not_measured():
    points = [point(step=1), point(step=2, validation_accuracy=0.4), point(step=3, validation_accuracy=0.8)]
    record = Record(id="a", method="pb", seed=0, options={}, status="finished", points=tuple(points))
    assert first_reaching(record, VALIDATION_ACCURACY, 0.3).step == 2
    assert first_reaching(record, VALIDATION_ACCURACY, 0.8).step == 3
    assert first_reaching(record, VALIDATION_ACCURACY, 0.9) is None


def test_a_run_that_diverges_later_has_reached_it():
    assert first_reaching(run([2.0, 0.5], status="diverged", diverged_at=3), TRAIN_LOSS, 1.0).step == 2


def test_a_run_without_points_reaches_nothing():
    assert all(first_reaching(run(), metric, 0.5) is None for metric in METRICS)


def test_frontier_by_hand():
    #  total
    #   4 |  a   x
    #   2 |      b   x        b dominates both x to its right and above
    #   1 |          c   x
    #     +---------------> serial
    a, b, c = (1, 4), (2, 2), (3, 1)
    assert frontier([c, (2, 4), a, (3, 2), b, (4, 1)]) == [a, b, c]


def test_of_equal_points_none_dominates_the_other():
    assert dominated([(1, 1), (1, 1), (2, 1)]) == (False, False, True)
    assert dominated([(1, 1), (1, 2), (1, 1)]) == (False, True, False)


@given(costs)
def test_dominated_is_its_definition(given_costs):
    def worse(one):
        return any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in given_costs)

    assert dominated(given_costs) == tuple(worse(one) for one in given_costs)


@given(costs)
def test_frontier_rises_one_way_and_falls_the_other(given_costs):
    kept = frontier(given_costs)
    assert len(kept) >= min(1, len(given_costs))
    for left, right in pairwise(kept):
        assert left == right or (left[0] < right[0] and left[1] > right[1])


def frontier(given_costs):
    """The costs that no other dominates, by rising serial compute."""
    return sorted(cost for cost, flag in zip(given_costs, dominated(given_costs), strict=True) if not flag)
