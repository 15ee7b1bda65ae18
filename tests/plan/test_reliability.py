"""Failures of a plan: which workers count, what a checkpoint holds, and when it is written."""

import math
from dataclasses import replace

import pytest
from test_scale import problem

from stretto.cost.cluster_file import find_cluster, names
from stretto.errors import UsageError
from stretto.plan import search
from stretto.plan.reliability import Reliability, checkpoint_bytes, goodput_of, steps_between
from stretto.plan.scaling_study import scaling

KNOWN = Reliability(mtbf_hours=100.0, checkpoint_seconds=1.0, restart_seconds=30.0)


def test_the_workers_that_a_plan_uses_fail():
    whole = problem(all_workers=True)
    two = goodput_of(search(whole).best, whole, KNOWN)
    assert two.mtbf_seconds == pytest.approx(100 * 3600 / 2)
    one = goodput_of(search(whole.but(workers=1)).best, whole, KNOWN)
    assert one.mtbf_seconds == pytest.approx(100 * 3600)
    assert one.share > two.share


def test_a_given_interval_is_no_better_than_the_best():
    best, known = search(problem(all_workers=True)).best, replace(KNOWN, mtbf_hours=1e5, checkpoint_seconds=100.0)
    left = goodput_of(best, problem(), known)
    for seconds in (left.interval_seconds / 3, left.interval_seconds * 3):
        assert goodput_of(best, problem(), replace(known, checkpoint_interval=seconds)).share < left.share


def test_a_checkpoint_holds_weights_and_state_once():
    assert checkpoint_bytes(problem()) == 4 * (32 + 32)  # four layers of 8 floats, and sgd's momentum
    best = search(problem()).best
    known = Reliability(mtbf_hours=100.0, storage_bandwidth=64.0, restart_seconds=0.0)
    assert goodput_of(best, problem(), known).checkpoint_seconds == 4.0


def test_checkpoints_are_written_after_whole_steps():
    assert steps_between(10.0, 3600.0, 1.0, 34.0) == 3
    assert steps_between(10.0, 3600.0, 1.0, 1.0) == 1
    assert steps_between(1000.0, 3600.0, 1.0, None) == 1
    assert steps_between(1.0, math.inf, 1.0, None) is None


def test_more_workers_are_not_better_where_all_of_them_fail():
    """So many workers fail so often that fewer get more done, and the plan for them uses fewer."""
    often = Reliability(mtbf_hours=1.0, checkpoint_seconds=20.0, restart_seconds=600.0)
    plain = problem(methods=("backprop",))
    rows = [row for row in scaling(plain, [4, 16, 64], known=often) if row.way == "data parallel"]
    assert rows[-1].plan.candidate.workers < 64
    useful = [row.useful_per_second for row in rows]
    assert useful == sorted(useful)
    sure = [row for row in scaling(plain, [64]) if row.way == "data parallel"]
    assert sure[-1].plan.candidate.workers == 64
    assert sure[-1].useful_per_second == sure[-1].examples_per_second


def test_the_file_of_a_cluster_says_what_is_not_given():
    cluster = find_cluster("8-a100")
    assert Reliability().on(cluster).missing(cluster) == ["checkpoint_seconds", "restart_seconds"]
    given = Reliability(storage_bandwidth=1e9, restart_seconds=0.0)
    assert given.on(cluster).missing(cluster) == []
    rate = cluster.failures_per_second(range(8))
    assert 1 / rate / 3600 == pytest.approx(29500 / 8)
    with pytest.raises(UsageError, match="give one of them"):
        Reliability(checkpoint_seconds=1.0, storage_bandwidth=1.0)


@pytest.mark.parametrize("name", names())
def test_every_figure_of_money_energy_and_failures_has_a_source(name):
    cluster = find_cluster(name)
    for device, figures in cluster.devices.items():
        for key in ("price_per_hour", "watts", "idle_watts", "mtbf_hours"):
            if getattr(figures, key) is not None:
                assert {f"devices.{device}.{key}", f"devices.{device}"} & {*cluster.sources}
