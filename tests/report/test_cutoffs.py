import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.metric import METRICS, TRAIN_LOSS, VALIDATION_ACCURACY, VALIDATION_LOSS
from stretto.report.panel import choose, first_reaching, roundest
from stretto.report.record import Record, methods

from .synthetic import make_records, point, run


def reached_by(records, metric, cutoff) -> set[str]:
    return {record.method for record in records if first_reaching(record, metric, cutoff)}


@pytest.mark.parametrize(
    ("low", "high", "target", "expected"),
    [
        (0.043, 0.058, 0.05, 0.05),
        (3.76, 3.88, 3.8, 3.8),
        (0.9, 1.6, 1.2, 1.0),
        (-0.3, 0.2, 0.1, 0.0),
        (-7.3, -4.8, -6, -5.0),
        (0.03, 0.03, 0.03, 0.03),
        (12, 19, 16, 15),
    ],
)
def test_roundest(low, high, target, expected):
    assert roundest(low, high, target) == expected


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 3))
def test_roundest_stays_inside(low, factor):
    assert low * (1 - 1e-8) <= roundest(low, low * factor, low) <= low * factor * (1 + 1e-8)


def test_cutoffs_of_a_study(records):
    assert choose(records, TRAIN_LOSS) == (0.5, 0.1, 0.01, 0.001)
    assert choose(records, VALIDATION_LOSS) == (1.0, 0.5, 0.35, 0.25)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_easy_ones_are_reached_by_all_and_the_hardest_by_the_best_only(records, metric):
    chosen = choose(records, metric)
    reached = [len(reached_by(records, metric, cutoff)) for cutoff in chosen]
    assert reached[0] == reached[1] == len(methods(records))
    assert reached[-1] == 1
    assert reached == sorted(reached, reverse=True)
    assert list(chosen) == sorted(chosen, reverse=not metric.higher)


def test_one_method_that_fails_does_not_make_the_cutoffs_easy():
    records = [run([2.3, 2.3], method="stuck"), *(run([2.3, 0.1 + i / 100], method=f"m{i}") for i in range(5))]
    assert reached_by(records, TRAIN_LOSS, choose(records, TRAIN_LOSS)[1]) >= {f"m{i}" for i in range(4)}


@pytest.mark.parametrize("losses", [[1.0, 1.0], [1.0], [1.0, 2.0]])
def test_no_progress_no_cutoffs(losses):
    assert choose([run(losses)], TRAIN_LOSS) == ()


def test_nothing_measured_no_cutoffs():
    assert choose([], TRAIN_LOSS) == ()
    assert choose([run()], TRAIN_LOSS) == ()
    assert choose([run([2.0, 1.0])], VALIDATION_ACCURACY) == ()


def test_a_loss_of_exactly_zero_and_negative_losses():
    assert choose([run([2.0, 0.0])], TRAIN_LOSS)[-1] == pytest.approx(1e-6, rel=0.7)
    negative = choose([run([2.0, 0.0, -4.0])], TRAIN_LOSS)
    assert negative[-1] == -4
    assert list(negative) == sorted(negative, reverse=True)


def test_an_accuracy_of_one_can_be_a_cutoff():
    points = [point(step=i, validation_accuracy=value) for i, value in enumerate([0.1, 0.5, 0.9, 1.0])]
    record = Record(id="a", method="pb", seed=0, options={}, status="finished", points=tuple(points))
    chosen = choose([record], VALIDATION_ACCURACY)
    assert chosen[-1] == 1
    assert list(chosen) == sorted(set(chosen))


@given(st.lists(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5), min_size=1, max_size=5))
def test_cutoffs_are_always_distinct_ordered_and_reached(histories):
    records = [run(losses, method=f"m{i}") for i, losses in enumerate(histories)]
    chosen = choose(records, TRAIN_LOSS)
    assert list(chosen) == sorted(set(chosen), reverse=True)
    best = min(min(losses) for losses in histories)
    assert all(cutoff >= best or cutoff >= 1e-6 for cutoff in chosen)


def test_language_model_losses_get_the_digits_they_need():
    records = [run([9.0, 6.0, best], method=name) for name, best in (("a", 3.78), ("b", 3.88), ("c", 4.1), ("d", 4.9))]
    chosen = choose(records, TRAIN_LOSS)
    assert chosen[-1] == 3.8
    assert len(chosen) == 4


def test_regression_has_no_accuracy_cutoffs():
    assert choose(make_records(accuracy=False, seeds=(0,)), VALIDATION_ACCURACY) == ()
