"""What "async" and "local" stand for."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto.data import load
from stretto.errors import UsageError
from stretto.methods.advice import ENOUGH, Finding, finding_for, findings, meaning, pieces_on
from stretto.models import build
from stretto.optim.by_name import name_made_by, name_of_setting
from stretto.optim.from_function import NamedOptimizer
from stretto.optimizers import OPTIMIZERS
from stretto.settings.runs import CompareSettings
from stretto.study.prepare import with_advice

MADE_UP = Finding(
    advice="async", study="made up", network="an MLP", optimizer="adamw", stages=8, any_depth=False,
    method="pipedream", losses=1, delay=3.5, ratio=1.2, low=1.1, high=1.3, error=0.02, gap=4.0, gap_low=3.0,
    gap_high=5.0, memory=6.5, seeds=3,
)  # fmt: skip
KNOWN = (
    MADE_UP,
    replace(MADE_UP, method="pb", delay=7.0, ratio=1.1),
    replace(MADE_UP, stages=32, method="pipedream", ratio=None, low=2.0, high=None, error=None),
    replace(MADE_UP, stages=32, method="pb", ratio=None, low=2.0, high=None, error=None, gap=3.0),
    replace(MADE_UP, optimizer="sgd", method="spectrain"),
)


@pytest.mark.parametrize(
    ("optimizer", "stages", "method"),
    [
        ("adamw", 8, "pb"),  # the smaller ratio
        ("adam", 9, "pb"),  # kin, and the nearest depth
        ("adamw", 16, "pb"),  # as far from 8 as from 32: the deeper one, and there the one that ended nearest
        ("sgd", 2, "spectrain"),
        ("adagrad", 8, "pb"),  # of no study, and no kin
    ],
)
def test_the_best_at_the_nearest_depth_of_the_nearest_optimizer(optimizer, stages, method):
    assert finding_for("async", optimizer, stages, KNOWN).method == method


def test_where_nothing_arrived_the_one_that_ended_nearest_counts():
    assert finding_for("async", "adamw", 32, KNOWN).gap == 3.0


def test_where_intervals_do_not_part_the_lowest_loss_at_the_end_counts():
    few = replace(MADE_UP, method="pb", ratio=1.0, low=0.85, high=1.15)
    assert finding_for("async", "adamw", 8, [MADE_UP, few]).method == "pb"  # the same loss at the end
    lower = replace(MADE_UP, gap=2.0)
    assert finding_for("async", "adamw", 8, [lower, few]) is lower
    apart = replace(few, high=1.09)
    assert finding_for("async", "adamw", 8, [lower, apart]) is apart
    late = replace(lower, ratio=None, low=1.1, high=None)
    assert finding_for("async", "adamw", 8, [late, few]) is late
    assert finding_for("async", "adamw", 8, [late, apart]) is apart


def test_methods_that_do_not_work_with_the_optimizer_are_left_out():
    cured = replace(MADE_UP, optimizer="sgd", method="spectrain", gap=1.0)
    known = [cured, replace(cured, method="pb", gap=3.0)]
    assert finding_for("async", "sgd", 8, known).method == "spectrain"  # which reads a velocity
    assert finding_for("async", "plain-sgd", 8, known).method == "pb"
    assert finding_for("async", "plain-sgd", 8, [replace(cured, method="pb-lwpw"), *known]).method == "pb"
    assert finding_for("async", "lars", 8, known).method == "pb"
    with pytest.raises(UsageError, match="that works with plain-sgd yet"):
        finding_for("async", "plain-sgd", 8, [cured])


def test_methods_are_compared_on_the_network_on_which_most_were_tried():
    lone = replace(MADE_UP, method="pipeoptim", ratio=0.9, low=0.8, high=1.0, network="a ResNet", stages=9)
    assert finding_for("async", "adamw", 9, [lone, *KNOWN]).method == "pb"  # two methods on the MLP of 8 stages
    assert finding_for("async", "adamw", 9, [lone, MADE_UP]) is lone  # one each: the nearest depth
    assert finding_for("async", "adamw", 12, [replace(lone, stages=11), *KNOWN]).method == "pipeoptim"  # 8 is farther


def test_advice_that_no_study_gives():
    with pytest.raises(UsageError, match="no study has found a method that works with adamw yet"):
        finding_for("local", "adamw", 8, KNOWN)


def test_a_method_of_the_same_delay_at_any_depth_counts_at_every_depth_of_its_network():
    always = replace(MADE_UP, method="pipedream-2bw", stages=2, any_depth=True, delay=1.0, ratio=1.15, gap=3.5)
    known = [always, *KNOWN]
    assert finding_for("async", "adamw", 4, known) is always  # nothing else was tried at about 4 stages
    assert finding_for("async", "adamw", 32, known) is always  # there the others never arrive
    assert finding_for("async", "adamw", 9, known) is always  # with two others: the lowest loss decides
    assert finding_for("async", "adamw", 8, [replace(always, gap=4.5), *KNOWN]).method == "pb"
    elsewhere = replace(always, network="a ResNet")
    assert finding_for("async", "adamw", 8, [elsewhere, *KNOWN]).method == "pb"  # on one network two were compared


def test_findings_say_what_they_are():
    assert str(MADE_UP) == "1.20 [1.10, 1.30] times the steps of plain training (an MLP, 8 stages, adamw)"
    assert "any number of stages" in str(replace(MADE_UP, any_depth=True))
    assert str(KNOWN[2]).startswith("more than 2.00 times the steps")


def test_all_findings_can_be_trained_and_are_of_known_optimizers():
    for each in findings():
        chosen = stretto.method(each.method)
        assert str(chosen) == each.method
        assert chosen.family == {"async": "asynchronous", "local": "local"}[each.advice]
        assert each.optimizer in OPTIMIZERS
        chosen.plan(each.stages)


def pairs(count):
    torch.manual_seed(0)
    return [nn.Linear(3, 3) for _ in range(count)]


def by_name(named):
    return torch.optim.Adam([parameter for _, parameter in named])


class OwnSGD(torch.optim.SGD):
    """A user's, of another name."""


def made_here(parameters):
    return torch.optim.RMSprop(parameters)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.optim.SGD, "plain-sgd"),
        (partial(torch.optim.SGD, momentum=0.9, nesterov=True), "plain-sgd"),
        (partial(torch.optim.SGD, momentum=0.9), "sgd"),
        (partial(OwnSGD, momentum=0.9), "sgd"),
        (OwnSGD, "plain-sgd"),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), "adamw"),
        (stretto.optim.muon, "muon"),
        (NamedOptimizer(by_name), "adam"),
        (made_here, "rmsprop"),
    ],
)
def test_the_kind_of_an_optimizer_function(function, name):
    assert name_made_by(function, [nn.ReLU(), *pairs(1)]) == name
    assert name_made_by(function, [lambda: pairs(1)[0]]) == name


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (torch.optim.SGD, "plain-sgd"),
        (partial(torch.optim.SGD, momentum=0.9), "sgd"),
        (torch.optim.AdamW, "adamw"),
        (torch.optim.RMSprop, "rmsprop"),
    ],
)
def test_a_trainer_settles_it_once_and_saves_what_it_stands_for(optimizer, name, tmp_path):
    def trainer(method):
        return stretto.Trainer(pairs(4), nn.functional.mse_loss, optimizer, method, device="cpu")

    first = trainer("async(warmup=3)")
    expected = stretto.advised("async(warmup=3)", name, 4)
    assert str(first.method) == str(expected)
    assert "warmup=3" in str(first.method)
    first.step(torch.ones(8, 3), torch.ones(8, 3))
    first.flush()
    first.save(tmp_path / "saved")
    trainer(str(expected)).load(tmp_path / "saved")  # outlives other advice
    with pytest.raises(UsageError, match=r"give method='"):
        trainer("1f1b").load(tmp_path / "saved")


def test_elsewhere_it_is_told_what_to_name():
    with pytest.raises(UsageError, match=r"stretto.advised\('async', 'adamw', 8\) tells"):
        stretto.method("async")


def test_asking_for_the_kind_draws_no_random_numbers():
    before = torch.get_rng_state()
    name_made_by(partial(torch.optim.SGD, momentum=0.9), [])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_kind_of_an_optimizer_that_a_setting_names(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\ndef plain(parameters, lr=0.1):\n    return torch.optim.SGD(parameters, lr=lr)\n"
    )
    assert name_of_setting("sgd") == name_of_setting("sgd", 0.5) == "sgd"
    assert name_of_setting("sgd", 0.0) == name_of_setting(f"{tmp_path}/own.py:plain") == "plain-sgd"
    for name in (*OPTIMIZERS, "rmsprop", "adagrad"):
        assert name_of_setting(name) == name
    plain = CompareSettings(methods=("async",), optimizer=f"{tmp_path}/own.py:plain")
    expected = (str(stretto.advised("async", "plain-sgd", 4)),)
    assert with_advice(plain, 4, build("mlp", load("digits"))).methods == expected


def test_a_study_names_what_it_stands_for_and_one_method_once():
    named = str(stretto.advised("async", "adamw", 4))
    settings = CompareSettings(methods=("backprop", "async", named), optimizer="adamw")
    assert with_advice(settings, 4, build("mlp", load("digits"))).methods == ("backprop", named)


def test_batch_norms_keep_minibatches_whole():
    halves = replace(MADE_UP, method="paci(every=8)", gap=1.0)
    known = [halves, MADE_UP]
    assert finding_for("async", "adamw", 8, known) is halves
    assert finding_for("async", "adamw", 8, known, whole=True) is MADE_UP
    for optimizer in (*OPTIMIZERS, "plain-sgd", "rmsprop"):
        for stages in (2, 4, 8, 16, 32):
            whole = stretto.advised("async", optimizer, stages, whole=True)
            assert whole.plan(stages)[0].per_turn == 1
    normalised = [nn.Sequential(nn.Linear(3, 3), norm) for norm in (nn.BatchNorm1d(3), *map(nn.LayerNorm, (3, 3, 3)))]
    trainer = stretto.Trainer(normalised, nn.functional.mse_loss, torch.optim.AdamW, "async", device="cpu")
    assert str(trainer.method) == str(stretto.advised("async", "adamw", 4, whole=True))
    assert "as batch norms want whole minibatches" in meaning(trainer.method)
    assert str(stretto.advised("async", "adamw", 4)) != str(trainer.method)
    settings = CompareSettings(methods=("async",), optimizer="adamw", model="cnn", data="digits")
    (named,) = with_advice(settings, 4, build("cnn", load("digits"))).methods
    assert named == str(trainer.method)


@pytest.mark.parametrize("word", ["async", "local"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("counts", [(1, 2, 3, 6), pytest.param((4, 7, 8, 12, 32), marks=pytest.mark.slow)], ids=str)
def test_whatever_it_stands_for_can_be_had_on_so_many_stages(word, whole, counts):
    for optimizer in ("adamw", "muon", "nadam", "sgd", "plain-sgd", "lamb"):
        for stages in counts:
            pieces = stretto.advised(word, optimizer, stages, whole=whole).plan(stages)[0].per_turn
            assert pieces == 1 or not whole


def test_what_holds_on_eight_stages_holds_on_more():
    for name in {finding.method for finding in findings()}:
        few, many = pieces_on(name, ENOUGH), pieces_on(name, 32)
        assert few is not None
        assert many is not None
        assert (few > 1) == (many > 1), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("async", 3, 4), "optimizer=3"),
        (("async", "adamw", 0), "stages=0"),
        (("async", "adamw", "8"), "stages='8'"),
        (("async(foo=1)", "adamw", 4), r"method 'async\(foo=1\)' stands for pipedream-2bw \(adamw, 4 .*'foo'"),
    ],
)
def test_what_is_no_question(given, message):
    with pytest.raises(UsageError, match=message):
        stretto.advised(*given)


def test_names_of_optimizers_are_those_of_their_classes_too():
    assert stretto.advised("async", "SGD", 32) == stretto.advised("async", "sgd", 32)


def test_what_was_not_tried_is_not_quoted_as_if_it_were():
    plain, other = (stretto.advised(name, "adamw", 8) for name in ("local", "local(head=blocks)"))
    assert "(chunks=2, microbatches=8) here: of chunked(chunks=2), which was tried, 0.55 [0.51, 0.60]" in meaning(plain)
    whole = stretto.advised("local", "adamw", 8, whole=True)
    assert "minibatches: 0.55 [0.51, 0.60] times the steps" in meaning(whole)
    assert "here: of chunked(chunks=2), which was tried, 0.55 [0.51, 0.60] times" in meaning(other)
    assert meaning(stretto.advised("async", "adamw", 1)).endswith("here: plain training, as there is one stage")


def test_a_setting_names_a_function_that_wants_large_parameters(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef large(parameters):\n"
        "    return torch.optim.SGD([p for p in parameters if p.numel() > 8], lr=0.1, momentum=0.9)\n"
    )
    name = f"{tmp_path}/own.py:large"
    assert name_of_setting(name, stages=[nn.Linear(9, 9)]) == "sgd"
    with pytest.raises(UsageError, match=r"own\.py:large failed with ValueError"):
        name_of_setting(name)
