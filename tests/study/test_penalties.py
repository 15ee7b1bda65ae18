"""Penalties from a study: known curves give known ratios, and what cannot be compared is refused by name."""

import math

import pytest

from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.plan import Candidate, Objective, Penalty
from stretto.plan.objective import mean_delay, num_losses
from stretto.report import Point, Record
from stretto.study.penalties import arrival, measure_penalties, planned_as

BATCHES, SEEDS, EVERY, STEPS = (16, 64), (0, 1, 2), 10, 400
LEAST, CRITICAL = 30.0, 40.0


def needs(factor, batch, seed):
    """Steps to a train loss of 0.5: the law of batches, times a factor that seeds share but for a few per cent."""
    return LEAST * (1 + CRITICAL / batch) * factor * (1.0, 1.1, 0.9)[seed]


def record(method, batch, seed, factor, rate=0.1, floor=0.0):
    """A straight line from 1 that comes to 0.5 when it should, unless it stays above `floor`."""
    goal = needs(factor, batch, seed)
    points = tuple(
        Point(step=step, examples=step * batch, total_flops=0, serial_flops=0, seconds=0,
              train_loss=max(floor, 1 - step / (2 * goal), 0.1), validation_loss=1)
        for step in range(EVERY, STEPS + 1, EVERY)
    )  # fmt: skip
    return Record(id=f"{method}-{rate}-{batch}-{seed}", method=method, seed=seed, status="finished", points=points,
                  options={"lr": rate, "batch_size": batch})  # fmt: skip


def study(batches=BATCHES, seeds=SEEDS, **factors):
    names = {"pb": "pb", "greedy": "greedy", "backprop": "backprop", "gpipe": "gpipe", "spiked": "pb(spike=True)"}
    return [
        record(names[name], batch, seed, factor * slower, rate)
        for name, factor in factors.items()
        for batch in batches
        for seed in seeds
        for rate, slower in ((0.1, 1.0), (0.01, 1.5))
    ]


def test_a_penalty_is_the_ratio_of_steps_and_its_error_that_of_the_seeds():
    found = measure_penalties(study(backprop=1, pb=1.25, greedy=1.5), 4, loss=0.5)
    (pb,) = found.penalties["pb"]
    assert pb.factor == pytest.approx(1.25)
    assert pb.source == "measured"
    assert pb.error == pytest.approx(0, abs=1e-9)  # seeds share their luck with backprop's
    assert (pb.losses, pb.delay) == (1, 3.0)
    assert (found.penalties["greedy"][0].losses, found.penalties["greedy"][0].delay) == (4, 0)
    assert (found.baseline, found.seeds, found.stages) == ("backprop", 3, 4)
    assert found.critical_batch == pytest.approx(CRITICAL)
    assert found.least_steps == pytest.approx(LEAST)


def test_seeds_that_differ_give_an_error():
    runs = study(backprop=1)
    factors = (1.2, 1.3, 1.44)
    runs += [record("pb", batch, seed, factors[seed]) for batch in BATCHES for seed in SEEDS]
    (pb,) = measure_penalties(runs, 4, loss=0.5).penalties["pb"]
    logs = [math.log(each) for each in factors]
    mean = sum(logs) / 3
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / 2)
    assert pb.factor == pytest.approx(math.exp(mean))
    assert pb.error == pytest.approx(pb.factor * spread / math.sqrt(3))
    single = measure_penalties(study(seeds=(0,), backprop=1, pb=1.2), 4, loss=0.5)
    assert single.penalties["pb"][0].error is None


def test_one_batch_size_says_nothing_of_the_critical_batch():
    found = measure_penalties(study(batches=(16,), backprop=1, pb=1.2), 4, loss=0.5)
    assert found.critical_batch is None
    assert found.penalties["pb"][0].factor == pytest.approx(1.2)


def test_synchronous_methods_are_the_baseline_and_have_no_penalty():
    found = measure_penalties(study(gpipe=1, pb=1.3), 4, loss=0.5)
    assert found.baseline == "gpipe"
    assert list(found.penalties) == ["pb"]


def test_methods_that_never_came_there_and_options_that_are_not_planned():
    runs = [*study(backprop=1, spiked=1.1), *[record("greedy", b, s, 1, floor=0.6) for b in BATCHES for s in SEEDS]]
    found = measure_penalties(runs, 4, loss=0.5)
    assert found.never == {"greedy": "greedy"}
    assert found.unplanned == ("pb(spike=True)",)
    assert found.penalties == {}


def test_the_loss_is_chosen_so_that_most_methods_reach_it():
    runs = [*study(backprop=1, pb=1.2), *[record("greedy", b, s, 1, floor=0.6) for b in BATCHES for s in SEEDS]]
    found = measure_penalties(runs, 4)
    assert found.loss >= 0.6
    assert set(found.penalties) == {"pb", "greedy"}


@pytest.mark.parametrize(
    ("make", "loss", "told"),
    [
        (lambda: study(pb=1), None, "no backprop to compare steps with"),
        (list, None, "has no runs"),
        (lambda: study(backprop=1, pb=1), 0.01, "its least was 0.1: choose a larger --target-loss"),
        (lambda: study(backprop=1, pb=1), 0.97, "at its first evaluation, after 10 steps"),
        (lambda: [record("backprop", 16, 0, 1, floor=1.0)], None, "never got better than it began"),
    ],
)
def test_what_cannot_be_compared(make, loss, told):
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        measure_penalties(make(), 4, loss=loss)


def test_a_run_arrives_between_two_evaluations():
    run = record("backprop", 16, 0, 1.0)
    assert arrival(run, 0.5) == pytest.approx(needs(1, 16, 0))
    assert arrival(run, 0.05) is None
    assert arrival(run, 0.999) == EVERY


@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("pb", ("pb", 4, 1)), ("pb-lwp-sc", ("pb-lwp-sc", 4, 1)), ("paci(every=4)", ("paci", 4, 4)),
        ("overlapping(delay=1)", ("overlapping", 4, 1)), ("greedy(head=linear)", ("greedy", 4, 1)),
        ("pipedream-2bw", ("pipedream-2bw", 4, 4)), ("chunked(chunks=3,head=infopro)", ("chunked", 4, 1)),
    ],
)  # fmt: skip
def test_methods_of_studies_as_they_are_planned(name, planned):
    c = planned_as(name, 4, None)
    assert c is not None
    assert (c.method, c.stages, c.microbatches) == planned


@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_of_studies_are_planned_with_their_number_of_losses(chunks):
    c = planned_as(f"chunked(chunks={chunks})", 4, None)
    assert num_losses(c) == chunks
    runs = [*study(backprop=1), *[record(f"chunked(chunks={chunks})", b, s, 1.2) for b in BATCHES for s in SEEDS]]
    assert [each.losses for each in measure_penalties(runs, 4, loss=0.5).penalties["chunked"]] == [chunks]


def test_what_is_not_planned():
    assert planned_as("pb(stash=True)", 4, None) is None
    assert planned_as("pb(warmup=5)", 4, None) is None
    assert planned_as("pb", 4, 2) is None


def test_at_other_delays_what_was_measured_is_extrapolated():
    pb = Candidate(4, Mesh(), 64, "pb")
    aim = Objective(goal="loss", critical_batch=1, measured={"pb": (Penalty(1.3, "measured", 0.1, 1, 3.0),)})
    assert aim.penalty(pb) == Penalty(1.3, "measured", 0.1, 1, 3.0)
    longer = aim.penalty(pb._replace(pipeline=8))
    assert (longer.source, longer.factor) == ("extrapolated from measured", pytest.approx(1 + 0.3 * 7 / 3))
    assert longer.error == pytest.approx(0.1 * 7 / 3)
    assert aim.penalty(pb._replace(pipeline=1)).source == "law"
    assert aim.penalty(pb._replace(method="pipemare")).source == "assumed"
    assert aim.penalty(pb._replace(method="1f1b", microbatches=4)).source == "law"


def test_the_nearest_measurement_counts():
    twice = (Penalty(1.1, "measured", None, 1, 0.25), Penalty(1.2, "measured", None, 1, 0.375))
    aim = Objective(goal="loss", critical_batch=1, measured={"paci": twice})
    c = Candidate(4, Mesh(), 64, "paci", 4)
    assert mean_delay(c) == 0.375
    assert aim.penalty(c).factor == 1.2
