"""The penalties that plans take from the package's own studies, where the user has none, and how they are printed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.methods.findings import Finding, findings
from stretto.options.named import parse
from stretto.plan.objective import Objective, Penalty, assumed
from stretto.plan.planned_methods import planned, with_options
from stretto.plan.search_space import Candidate
from stretto.settings.planning import PlanSettings
from stretto.study.penalties import (
    best_of_delay,
    describe,
    found_penalties,
    is_beside,
    penalty_of,
    penalty_rows,
    with_findings,
)

ARRIVED = Finding(
    advice="async", study="made up", network="an MLP", optimizer="adamw", stages=8, any_depth=False,
    method="pipedream", losses=1, delay=3.5, ratio=1.2, low=1.1, high=1.3, error=0.02, gap=4.0, gap_low=3.0,
    gap_high=5.0, memory=6.5, seeds=3,
)  # fmt: skip
NEVER = replace(ARRIVED, method="pb", delay=7.0, ratio=None, low=1.33, high=None, error=None)
LOCAL = replace(ARRIVED, advice="local", method="chunked(chunks=2)", losses=2, delay=0.0, ratio=0.55, error=0.01)


def objective(names, optimizer, known=None):
    return Objective(goal="loss", critical_batch=100.0, measured=found_penalties(names, optimizer, known))


def on(stages, name, losses=1, microbatches=None):
    return Candidate(stages, Mesh(), 64, name, microbatches or stages, losses=losses)


def test_penalties_of_plans_come_with_their_spread_and_are_marked():
    aim = objective(("1f1b", "pipedream", "pb"), "adam", [ARRIVED])
    assert set(aim.measured) == {"pipedream"}
    there = aim.penalty(on(8, "pipedream"))
    assert (there.factor, there.source, there.error) == (1.2, "ours", ARRIVED.error)
    other = aim.penalty(on(4, "pipedream"))
    assert other.source == "extrapolated from ours"
    assert 1.0 < other.factor < 1.2


def test_methods_with_options_have_the_penalty_of_their_own():
    rotated = replace(ARRIVED, method="pipedream(rotate=True)", ratio=1.05)
    found = found_penalties(("pipedream", "pipedream(rotate=True)"), "adamw", (ARRIVED, rotated))
    assert {name: penalty.factor for name, (penalty,) in found.items()} == {
        "pipedream": 1.2, "pipedream(rotate=True)": 1.05,
    }  # fmt: skip


def test_plans_do_not_count_on_fewer_steps_than_plain_trainings():
    (penalty,) = found_penalties(("chunked",), "adamw", [LOCAL])["chunked"]
    assert (penalty.factor, penalty.found, penalty.error, penalty.bound) == (1.0, 0.55, None, "")


def test_old_gradients_that_no_study_had_are_not_assumed_to_do_better_than_those_that_one_had():
    cured = replace(ARRIVED, method="pipedream(rotate=True)", ratio=1.1)
    known = [ARRIVED, cured, NEVER]
    assert best_of_delay("adam", known) == ((3.5, 1.1), (7.0, 1.33))
    aim = Objective(goal="loss", critical_batch=100.0, best_of_delay=best_of_delay("adam", known))
    factor = {stages: aim.penalty(on(stages, "spectrain")).factor for stages in (4, 8, 15, 31)}
    mean = {stages: (stages - 1) / 2 for stages in factor}  # updates
    assert [factor[4], factor[8]] == pytest.approx([1 + 0.33 * mean[stages] / 7 for stages in (4, 8)])
    assert factor[8] > 1.1 > assumed(on(8, "spectrain")).factor
    assert (factor[15], factor[31]) == (1.33, 1.33)
    assert assumed(on(31, "spectrain")).factor < 1.33
    assert aim.penalty(on(8, "1f1b")).factor == 1.0
    assert aim.penalty(on(8, "greedy", 8)).factor == 1.5
    assert aim.penalty(on(8, "spectrain")).source == "assumed"


def test_a_bound_is_never_scaled_down_and_not_below_what_is_assumed():
    aim = objective(("pb",), "adamw", [NEVER])
    assert aim.penalty(on(8, "pb")) == Penalty(1.33, "ours", None, 1, 7.0, "at least")
    fewer = aim.penalty(on(2, "pb"))
    assert (fewer.factor, fewer.bound, fewer.source) == (1.33, "at least", "extrapolated from ours")
    assert aim.penalty(on(16, "pb")).factor == pytest.approx(1 + 0.33 * 15 / 7)
    low = objective(("pb",), "adamw", [replace(NEVER, low=1.05)])
    assert low.penalty(on(8, "pb")) == assumed(on(8, "pb"))  # 1.14
    assert assumed(on(8, "pb")).factor > 1.05


def test_where_one_seed_never_came_the_bound_is_at_least_what_those_took_that_came():
    partly = replace(NEVER, low=0.7)  # the soonest seed
    found = found_penalties(("pb", "pipedream"), "adamw", [ARRIVED, partly])
    assert found["pb"] == (Penalty(1.2, "ours", None, 1, 7.0, "at least", 0.7),)
    elsewhere = replace(ARRIVED, network="a ResNet")
    assert found_penalties(("pb",), "adamw", [elsewhere, partly])["pb"][0].factor == 1.0


def plan_name(method):
    """A method without the options that plans choose; None where plans cannot name it."""
    base, options = parse(method)
    planning = planned(base).planning
    kept = [f"{key}={value}" for key, value in options.items() if key not in (planning.cut, planning.losses)]
    name = with_options(base, kept)
    try:
        return "overlapping(delay=0)" if name == "overlapping" else planned(name) and name
    except UsageError:
        return None


def candidate_of(finding, stages):
    name, (base, options) = plan_name(finding.method), parse(finding.method)
    planning = planned(base).planning
    return on(stages, name, options.get(planning.losses, 1), options.get(planning.cut))


@pytest.mark.parametrize("known", [findings(), (ARRIVED, NEVER, replace(NEVER, low=0.7, method="pipemare"), LOCAL)])
def test_no_method_that_never_arrived_is_cheaper_than_one_that_did_in_the_same_setting(known):
    known = [each for each in known if plan_name(each.method) is not None]
    compared = 0
    for late in (each for each in known if each.ratio is None):
        for soon in (each for each in known if each.ratio is not None and is_beside(late, each)):
            there = max(late.stages, soon.stages)  # one of them counts at any depth, or both are of this one
            for stages in (there, 2 * there, there // 2):  # as studied, deeper and shallower than that
                if stages >= max(late.losses, soon.losses, 2):
                    factors = [penalty_of(each, known).at(candidate_of(each, stages)).factor for each in (late, soon)]
                    assert factors[0] >= factors[1], (late.method, soon.method, stages)
                    compared += 1
    assert compared >= 3


def test_each_word_has_the_kin_that_its_advice_has():
    known = [ARRIVED, LOCAL, replace(ARRIVED, optimizer="sgd", ratio=1.5), replace(LOCAL, optimizer="muon", ratio=1.2)]

    def factors(optimizer):
        found = found_penalties(("pipedream", "chunked"), optimizer, known)
        return {name: penalty.factor for name, (penalty,) in found.items()}

    assert factors("sgd") == {"pipedream": 1.5, "chunked": 1.0}  # no local method under SGD: AdamW's
    assert factors("muon") == {"pipedream": 1.2, "chunked": 1.2}
    assert factors("lars") == {"pipedream": 1.5, "chunked": 1.0}


def test_methods_that_do_not_work_with_plain_sgd_have_no_penalty_there():
    known = [replace(ARRIVED, method=name, optimizer="sgd") for name in ("spectrain", "pipedream")]
    assert set(found_penalties(("spectrain", "pipedream"), "sgd", known)) == {"spectrain", "pipedream"}
    assert set(found_penalties(("spectrain", "pipedream"), "plain-sgd", known)) == {"pipedream"}


def test_chunks_have_penalties_of_their_number_of_losses_and_heads_of_their_own():
    known = [
        LOCAL,
        replace(LOCAL, method="chunked(chunks=4)", losses=4, ratio=1.3),
        replace(LOCAL, method="chunked(chunks=2, head=infopro)", ratio=1.1),
        replace(LOCAL, method="chunked(chunks=2, share_top=1)", ratio=1.2),
    ]
    aim = objective(("chunked", "chunked(head=infopro)", "chunked(share_top=1)"), "adamw", known)
    assert [each.losses for each in aim.measured["chunked"]] == [2, 4]
    assert aim.penalty(on(8, "chunked", 4)).factor == 1.3
    assert aim.penalty(on(8, "chunked", 2)).found == 0.55
    assert [each.factor for each in aim.measured["chunked(head=infopro)"]] == [1.1]
    assert [each.factor for each in aim.measured["chunked(share_top=1)"]] == [1.2]


def test_an_optimizer_of_ones_own_counts_as_what_it_makes(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\ndef plain(parameters, lr=0.1):\n    return torch.optim.SGD(parameters, lr=lr)\n"
    )
    problem, aim = SimpleNamespace(names=("spectrain", "pb"), optimizer="sgd"), objective((), "sgd")
    usual = with_findings(PlanSettings(), aim, problem, None)
    own = with_findings(PlanSettings(optimizer=f"{tmp_path}/own.py:plain"), aim, problem, None)
    assert set(usual.measured) == {"spectrain", "pb"}
    assert set(own.measured) == {"pb"}


def lines_of(aim, candidate, *names):
    penalty = aim.penalty(candidate)
    remarks = {f"penalty_{name}": value for name, value in penalty.remarks.items()}
    goal = {"penalty": penalty.factor, "penalty_is": penalty.source, "steps": aim.steps(candidate), **remarks}
    goal["critical_batch"] = 100.0
    facts = penalty_rows(SimpleNamespace(names=names), aim, None)
    first, *rest = describe(goal, facts)
    return first, [[cell.strip() for cell in row if cell] for row in (rest[0] if rest else ())]


def test_what_is_printed_of_them():
    deep = replace(ARRIVED, stages=32, delay=15.5, ratio=None, low=1.5, high=None, error=None)
    known = [ARRIVED, deep, NEVER, LOCAL, replace(LOCAL, method="greedy", losses=8, ratio=None, low=0.7)]
    names = ("pipedream", "pb", "chunked", "greedy", "spectrain")
    aim = objective(names, "adamw", known)
    first, rows = lines_of(aim, on(8, "pb"), *names)
    assert first == "more than 3.408 steps to the loss: 1 x (1 + 100 / batch size) x > 1.33 (ours)"
    assert rows == [
        ["pipedream (1 loss, delay 3.5)", "1.2 ± 0.02", "ours"],
        ["pipedream (1 loss, delay 15.5)", "> 1.5", "ours"],
        ["pb", "> 1.33", "ours"],
        ["chunked", "0.55 found, counted as 1", "ours"],
        ["greedy", "> 0.7 found, counted as 1.2 or more", "ours"],
        ["spectrain", "–", "assumed"],
    ]
    assert lines_of(aim, on(16, "pb"), *names)[0].endswith(" x > 1.71 (extrapolated from ours)")
    assert lines_of(aim, on(4, "chunked", 2), *names)[0].endswith(" x 1 (ours, 0.55 found)")
    assert lines_of(aim, on(4, "pipedream"), *names)[0].endswith(" x 1.09 ± 0.0086 (extrapolated from ours)")
