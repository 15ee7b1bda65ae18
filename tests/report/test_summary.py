from statistics import stdev

import pytest

from stretto.report import Record, summarize
from stretto.report.metric import VALIDATION_ACCURACY, VALIDATION_LOSS
from stretto.report.summary import judge

from .synthetic import make_records, point, run


def final(value, rate=0.1, seed=0, method="m", **values) -> Record:
    return run(
        [20.0, value], method=method, seed=seed, id=f"{method}{rate}{seed}{value}", options={"lr": rate}, **values
    )


def test_best_values_and_the_chosen_run():
    records = [final(0.5, train_loss=0.01, test_loss=0.6), final(0.4, 0.2, train_loss=0.02, test_loss=0.9)]
    (summary,) = summarize(records)
    assert summary.best_train_loss == 0.01
    assert summary.best_validation_loss == 0.4
    assert summary.best_validation_accuracy is None
    assert summary.chosen is records[1], "the worse test loss has no say"
    assert summary.test_loss == 0.9


def test_cost_is_at_the_first_evaluation_as_good_as_the_end():
    record = run([2.0, 0.4, 0.9, 0.5], costs=[(1, 10), (2, 20), (3, 30), (4, 40)])
    (summary,) = summarize([record])
    assert (summary.serial_flops, summary.total_flops) == (2, 20)


def test_near_best_counts_means_over_seeds_within_two_per_cent():
    records = [
        final(1.00, 0.1, 0), final(1.10, 0.1, 1),  # mean 1.05: the best
        final(1.07, 0.2, 0), final(1.07, 0.2, 1),  # 1.07 <= 1.02 * 1.05 = 1.071
        final(0.90, 0.3, 0), final(1.30, 0.3, 1),  # 1.10
        final(0.50, 0.4, 0), run([2.0], method="m", options={"lr": 0.4}, seed=1, status="diverged"),
    ]  # fmt: skip
    (summary,) = summarize(records)
    assert summary.configurations == 4
    assert summary.near_best == 2 / 4
    assert {record.options["lr"] for record in summary.best_configuration} == {0.1}
    assert summary.diverged == 1
    assert summary.diverged_share == 1 / 8


def test_near_best_for_accuracy_and_for_negative_losses():
    accuracies = [final(1.0, rate, validation_accuracy=value) for rate, value in ((1, 0.9), (2, 0.883), (3, 0.881))]
    (summary,) = summarize(accuracies)
    assert summary.metric is VALIDATION_ACCURACY
    assert summary.near_best == 2 / 3
    (summary,) = summarize([final(-1.0, 1), final(-0.99, 2), final(-0.9, 3)])
    assert summary.near_best == 2 / 3


def test_spread_is_the_sample_deviation_and_one_seed_has_none():
    records = [final(1.0, seed=0), final(1.2, seed=1), final(3.0, 0.2, 0), final(4.0, 0.2, 1), final(9.0, 0.3, 0)]
    (summary,) = summarize(records)
    assert summary.spread == pytest.approx(stdev([1.0, 1.2]))
    assert summary.median_spread == pytest.approx((stdev([1.0, 1.2]) + stdev([3.0, 4.0])) / 2)
    (summary,) = summarize([final(1.0)])
    assert summary.spread is None
    assert summary.median_spread is None


def test_a_method_that_only_diverged():
    (summary,) = summarize([run([2.0, 9.0], status="diverged", diverged_at=3)])
    assert summary.chosen is None
    assert summary.test_loss is None
    assert summary.serial_flops is None
    assert summary.near_best is None
    assert summary.best_configuration == ()
    assert summary.diverged_share == 1


def test_every_configuration_with_a_diverged_seed():
    records = [final(1.0), run([2.0], method="m", options={"lr": 0.1}, seed=1, status="diverged")]
    (summary,) = summarize(records)
    assert summary.chosen is records[0]
    assert summary.near_best == 0
    assert len(summary.best_configuration) == 2


def test_accuracy_judges_only_where_all_finished_runs_have_one():
    assert judge([final(1.0, validation_accuracy=0.5), run([1.0], status="diverged")]) is VALIDATION_ACCURACY
    assert judge([final(1.0, validation_accuracy=0.5), final(1.0)]) is VALIDATION_LOSS
    assert judge([]) is VALIDATION_LOSS


def test_equal_accuracies_are_decided_by_the_loss():
    records = [final(1.0, 1, validation_accuracy=0.5), final(0.9, 2, validation_accuracy=0.5)]
    assert summarize(records)[0].chosen is records[1]


def test_summaries_come_in_order_of_appearance(records):
    assert [each.method for each in summarize(records)] == ["backprop", "greedy", "overlapping", "chunked(chunks=2)"]
    assert summarize([]) == ()


def test_a_run_without_evaluations_costs_its_total():
    record = Record(
        id="a", method="m", seed=0, options={}, status="finished", validation_loss=0.5, serial_flops=3.0, points=()
    )
    assert summarize([record])[0].serial_flops == 3.0
    assert point().validation_accuracy is None
    assert summarize(make_records(seeds=(0,)))[0].spread is None
