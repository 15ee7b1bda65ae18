"""Choosing among plans by measured times. Times are made up here: no process, no clock."""

import random
import statistics

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cluster_text import cluster_text
from stretto.cost.cluster_file import parse
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.mesh import Mesh
from stretto.plan import Candidate, Objective, Plan, Problem, search
from stretto.plan.trials import (
    HOPELESS,
    MORE,
    ROUNDS,
    TRIALS,
    Trial,
    TrialFailedError,
    best_tried,
    candidate_of,
    contest,
    problem_key,
    promising,
    row,
    side_by_side,
    trials_of,
)


def plan(value=1.0, method="backprop", *, batch=32, pipeline=1, data=1, size=1.0, **options):
    """A plan of a step that is predicted to take `value` seconds an example."""
    candidate = Candidate(pipeline, Mesh(data=data), batch, method, **options)
    seconds = value * batch
    return Plan(candidate=candidate, bounds=(0, 4), formula=seconds, seconds=seconds, value=value, bytes=(size,))


def drawn(seed, number=4, noise=0.1, failing=0.0):
    """Trials, and a turn for them that says what it says: true seconds and all that was measured, by trial."""
    dice = random.Random(seed)
    trials = [Trial(plan(dice.uniform(1, 2), batch=dice.choice([16, 32]))) for _ in range(number)]
    true = {trial: trial.plan.candidate.batch * dice.choice([1.0, 1.05, 1.3, 4.0]) for trial in trials}
    said = {trial: [] for trial in trials}

    def turn(trial):
        if dice.random() < failing:
            raise TrialFailedError("it has no more memory")
        said[trial].append(true[trial] * (1 + noise * dice.random()))
        return said[trial][-1]

    return trials, true, said, turn


def an_example(trial, seconds):
    return seconds / trial.plan.candidate.batch


@pytest.mark.parametrize("failing", [0.0, 0.05])
def test_no_plan_is_chosen_that_was_measured_slower_than_another(failing):
    """Recomputed from what was said: every other turn is of one set."""
    for seed in range(300):
        trials, _, said, turn = drawn(seed, failing=failing)
        found = contest(trials, turn)
        assert {*found.trials, *found.failed} == {*trials}
        first = {trial: statistics.median(said[trial][::2]) for trial in found.trials}
        assert {trial: trial.seconds for trial in found.trials} == first
        assert all(trial.reported == statistics.median(said[trial][1::2]) for trial in found.trials)
        assert an_example(found.chosen, first[found.chosen]) == min(an_example(t, first[t]) for t in found.trials)
        assert all(len(turns) <= ROUNDS + MORE for turns in said.values())


def test_the_fastest_is_chosen_where_noise_allows_it():
    for seed in range(100):
        trials, true, _, turn = drawn(seed, noise=0.02)
        found = contest(trials, turn)
        assert an_example(found.chosen, true[found.chosen]) == min(an_example(t, true[t]) for t in trials)
        assert found.noise <= 0.02


@pytest.mark.parametrize("number", [2, 5])
def test_what_is_reported_is_not_biased_by_the_choice(number):
    """Of equal plans the chosen one seems faster than it is in the rounds that chose it, not in those reported."""
    chose, reported = [], []
    for seed in range(500):
        dice = random.Random(seed)
        found = contest([Trial(plan()) for _ in range(number)], lambda _: dice.gauss(100, 10))  # noqa: B023
        chose.append(found.chosen.seconds)
        reported.append(found.chosen.reported)
    assert statistics.fmean(chose) < 97.5
    assert statistics.fmean(reported) == pytest.approx(100, abs=0.8)  # of which the standard error is 0.3


def test_close_plans_take_further_turns():
    for ratio, rounds in ((1.0, ROUNDS + MORE), (1.02, ROUNDS + MORE), (1.05, ROUNDS)):
        trials = [Trial(plan()), Trial(plan()), Trial(plan())]
        contest(trials, lambda trial: {0: 1.0, 1: ratio, 2: 1.2}[trials.index(trial)])  # noqa: B023
        assert [len(trial.choosing) + len(trial.reporting) for trial in trials] == [rounds, rounds, ROUNDS]


def test_plans_that_are_out_of_reach_take_no_further_turn():
    trials, times = [Trial(plan()) for _ in range(3)], [1.0, 1.1 * HOPELESS, 0.9 * HOPELESS]
    found = contest(trials, lambda trial: times[trials.index(trial)])
    assert [len(trial.choosing) + len(trial.reporting) for trial in trials] == [ROUNDS, 2, ROUNDS]
    assert found.chosen is trials[0]


def test_rounds_begin_with_another_plan_each():
    trials, order = [Trial(plan()) for _ in range(3)], []
    contest(trials, lambda trial: order.append(trials.index(trial)) or 1.0)
    rounds = [order[3 * k : 3 * k + 3] for k in range(ROUNDS)]
    assert rounds == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2]]


def test_a_plan_outside_the_limits_is_measured_and_never_chosen():
    trials = [Trial(plan(), allowed=False), Trial(plan())]
    found = contest(trials, lambda trial: 1.0 if trial is trials[0] else 1.4)
    assert found.chosen is trials[1]
    assert trials[0].seconds == 1.0


def test_the_others_go_on_when_one_fails():
    trials = [Trial(plan()), Trial(plan()), Trial(plan())]
    trials[2].failure = "it did not start"

    def turn(trial):
        assert trial is not trials[2]
        if trial is trials[0] and trial.choosing:
            raise TrialFailedError("worker 1 was ended by SIGKILL")
        return 1.0

    found = contest(trials, turn)
    assert found.chosen is trials[1]
    assert [trial.failure for trial in found.failed] == ["worker 1 was ended by SIGKILL", "it did not start"]
    with pytest.raises(UsageError, match=r"no plan could be tried: backprop: .*SIGKILL.*: it did not start"):
        contest(found.failed, turn)


def test_twins_count_as_slower_once_one_of_them_is_taken():
    plans = [plan(1 + k / 100, "gpipe", pipeline=2, microbatches=2**k) for k in range(4)]
    plans += [plan(1.2, "1f1b", pipeline=2, microbatches=2), plan(1.3, data=2), plan(9.0, data=2, shard="fully-shard")]
    assert promising(plans, 3) == [plans[0], plans[5], plans[4]]
    assert promising(plans[:4], 3) == plans[:3], "twins are taken where there is nothing else"
    assert len(promising(plans, 99)) == len(plans)


def test_all_methods_are_twins_on_a_single_stage():
    """There they are plain training, of replicas too: the pipeline is tried before a second accumulates gradients."""
    plans = [plan(1, data=2), plan(1.1, "1f1b", data=2, microbatches=2), plan(1.4, "1f1b", pipeline=2, microbatches=2)]
    assert promising(plans, 2) == [plans[0], plans[2]]


@pytest.fixture(scope="module")
def problem():
    layers, x = [nn.Linear(64, 64) for _ in range(4)], torch.zeros(2, 64)
    costs = layer_costs(layers, x, loss=mse_loss, target=x)
    cluster = parse(cluster_text(memory="1e9"), "two")
    methods = ("backprop", "gpipe", "1f1b", "zb-h1", "pipedream", "pb")
    return Problem(costs=costs, cluster=cluster, workers=2, batch_sizes=(64,), methods=methods)


def test_the_single_worker_is_always_among_the_trials(problem):
    for limited, allowed in ((problem, True), (problem.but(all_workers=True), False)):
        trials = trials_of(limited, Objective(), search(limited).prices, 3)
        assert (str(trials[0].plan.candidate), trials[0].plan.candidate.workers) == ("backprop", 1)
        assert [trial.allowed for trial in trials] == [allowed, True, True, True]
        assert len({trial.plan.candidate for trial in trials}) == 4


def test_plans_that_do_not_fit_beside_the_others_are_left_out(problem):
    trials = [Trial(plan(size=size)) for size in (5e8, 6e8, 4e8)]
    side_by_side(trials, search(problem).prices)
    assert [bool(trial.failure) for trial in trials] == [False, True, False]
    assert "0.6 GB" in trials[1].failure


def test_what_was_tried_is_found_again(problem, tmp_path):
    file, prices = tmp_path / "cluster.tried.json", search(problem).prices
    assert TRIALS.read(file) == {}
    trials = trials_of(problem, Objective(), prices, 3)
    tried = [
        row(t.plan) | {"measured_seconds": 4.0 - k, "reported_seconds": 4.0, "allowed": True}
        for k, t in enumerate(trials)
    ]
    key = problem_key(problem, "step", {"model": "mlp"}, {})
    TRIALS.write(file, key, {"tried": tried})
    TRIALS.write(file, "another", {"tried": []})
    kept = TRIALS.read(file)[key]["tried"]
    assert [candidate_of(each) for each in kept] == [trial.plan.candidate for trial in trials]
    assert key != problem_key(problem.but(stages=(2,)), "step", {"model": "mlp"}, {})
    assert key != problem_key(problem, "step", {"model": "mlp"}, {"model": "edited since"})
    assert best_tried(kept, problem, Objective(), prices) == (trials[-1].plan, kept[-1])
    kept[-1]["bounds"] = [0, 3]  # cut elsewhere since
    assert best_tried(kept, problem, Objective(), prices) == (trials[-2].plan, kept[-2])
    single = problem.but(workers=1, methods=("backprop",))
    best, measured = best_tried(kept, single, Objective(), search(single).prices)
    assert (best.candidate, measured) == (trials[0].plan.candidate, kept[0])
    assert best_tried([], problem, Objective(), prices) is None


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"problems": {"a": {"tried": [{"method": "backprop"}]}}}'])
def test_a_damaged_file_of_trials_is_refused(tmp_path, content):
    file = tmp_path / "cluster.tried.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="holds no trials that stretto plan --try wrote: delete it"):
        TRIALS.read(file)
