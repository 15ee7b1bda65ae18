"""What "async" and "local" stand for."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto.data import load
from stretto.errors import UsageError
from stretto.methods.advice import ENOUGH, equal_stages, meaning, pieces_on, soonest, ways
from stretto.methods.findings import Finding, findings
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
    replace(MADE_UP, method="pb", delay=7.0, ratio=1.1, low=1.0, high=1.2),
    replace(MADE_UP, stages=32, method="pipedream", ratio=None, low=2.0, high=None, error=None),
    replace(MADE_UP, stages=32, method="pb", ratio=None, low=1.8, high=None, error=None, gap=9.0),
    replace(MADE_UP, optimizer="sgd", method="spectrain"),
)


def tried(word, optimizer, stages, known=KNOWN, **options):
    return [each.finding.method for each in ways(word, optimizer, stages, among=known, **options)]


@pytest.mark.parametrize(
    ("optimizer", "stages", "methods"),
    [
        ("adamw", 8, ["pb", "pipedream"]),  # the fewest steps first
        ("adam", 9, ["pb", "pipedream"]),  # kin, and the nearest depth
        ("adamw", 32, ["pipedream", "pb"]),  # where none arrived, the one that ended lower
        ("sgd", 2, ["spectrain"]),
        ("adagrad", 8, ["pb", "pipedream"]),  # of no study, and no kin
    ],
)
def test_those_at_the_nearest_depth_of_the_nearest_optimizer(optimizer, stages, methods):
    assert tried("async", optimizer, stages) == methods


@pytest.mark.parametrize("stages", [2, 3, 8, 16])
def test_time_is_steps_times_the_turn_over_that_of_1f1b(stages):
    """Closed forms: M micro-batches on S stages take 3 (M + S - 1) / M under 1f1b, 3 where nobody waits."""
    cut = max(4, stages)
    plain = 3 * (cut + stages - 1) / cut
    (found,) = ways("async", "adamw", stages, among=[MADE_UP])
    assert found.turn == pytest.approx(3 / plain)
    assert (found.time, found.low, found.high) == pytest.approx((1.2 * 3 / plain, 1.1 * 3 / plain, 1.3 * 3 / plain))
    chunks = replace(MADE_UP, advice="local", method="chunked(chunks=2)", compute=1.1)
    (found,) = ways("local", "adamw", stages, among=[chunks])
    cut = 1 if stages == 2 else cut
    assert found.turn == pytest.approx(1.1 * 3 * (cut + -(-stages // 2) - 1) / cut / plain)
    (whole,) = ways("local", "adamw", stages, among=[chunks], whole=True)
    assert whole.turn == pytest.approx(1.1 * -(-stages // 2) / stages)  # beside backprop, where all take turns


def test_times_may_be_given():
    told = {"1f1b": 4.0, "pipedream": 1.0, "pb": 8.0}
    found = ways("async", "adamw", 8, among=KNOWN, seconds=lambda chosen: told[chosen.name])
    assert [(each.method.name, each.turn) for each in found] == [("pipedream", 0.25), ("pb", 2.0)]
    slow = stretto.advised("local", "adamw", 8, seconds=lambda chosen: 1 if chosen.name == "1f1b" else 100)
    assert slow.name == "1f1b"
    assert "times the time" in meaning(slow)


def test_many_stages_and_micro_batches_count_as_sixteen():
    few, many = equal_stages(16), equal_stages(64)
    for name in ("1f1b", "chunked(chunks=2, microbatches=64)"):
        chosen = stretto.method(name)
        assert many(chosen) == few(stretto.method(name.replace("64", "16")))
    fixed = stretto.method("1f1b(microbatches=4)")
    assert many(fixed) == pytest.approx(3 * (4 + 63) / 4)  # which are few micro-batches, as they are


def test_of_those_told_from_plain_training_the_first_and_of_ties_the_cheapest():
    dear = replace(MADE_UP, ratio=0.8, low=0.75, high=0.85)
    late = replace(dear, method="pb", ratio=0.84, low=0.8, high=0.9, memory=3.0)
    apart = replace(late, low=0.86, ratio=0.88)

    def best(*known):
        return soonest(ways("async", "adamw", 8, among=known)).finding

    assert best(dear, late) is late  # the intervals meet: fewer numbers a parameter
    assert best(dear, replace(late, memory=6.0)) is dear  # about as many: the sooner one
    assert best(dear, apart) is dear
    assert best(dear, replace(late, compute=1.2)) is dear  # compute comes before memory
    assert soonest(ways("async", "adamw", 2, among=[replace(MADE_UP, high=1.26)])) is None  # 1.26 times 0.8 is above 1
    assert soonest(ways("async", "adamw", 2, among=[replace(MADE_UP, high=1.24)])) is not None
    assert soonest(ways("async", "adamw", 32, among=KNOWN)) is None  # nobody knows when they arrive
    assert soonest(ways("async", "adamw", 32, among=KNOWN), told=False).method.name == "pb"


def test_methods_that_do_not_work_with_the_optimizer_are_left_out():
    cured = replace(MADE_UP, optimizer="sgd", method="spectrain")
    known = [cured, replace(cured, method="pb", ratio=1.3, low=1.2, high=1.4)]
    assert tried("async", "sgd", 8, known) == ["spectrain", "pb"]  # the first one reads a velocity
    assert tried("async", "plain-sgd", 8, known) == ["pb"]
    assert tried("async", "plain-sgd", 8, [replace(cured, method="pb-lwpw"), *known]) == ["pb"]
    assert tried("async", "lars", 8, known) == ["pb"]
    assert tried("async", "plain-sgd", 8, [cured]) == []


def test_methods_are_compared_on_the_network_on_which_most_were_tried():
    lone = replace(MADE_UP, method="pipeoptim", ratio=0.9, low=0.8, high=1.0, network="a ResNet", stages=9)
    assert tried("async", "adamw", 9, [lone, *KNOWN])[0] == "pb"  # two methods on the MLP of 8 stages
    assert tried("async", "adamw", 9, [lone, MADE_UP]) == ["pipeoptim"]  # one each: the nearest depth
    assert tried("async", "adamw", 12, [replace(lone, stages=11), *KNOWN]) == ["pipeoptim"]  # 8 is farther


def test_options_are_looked_for_among_what_was_tried_and_then_given():
    heads = replace(MADE_UP, advice="local", method="greedy(head=blocks)", ratio=0.9)
    plain = replace(heads, method="greedy", ratio=0.5)
    assert tried("local", "adamw", 8, [heads, plain], options={"head": "blocks"}) == ["greedy(head=blocks)"]
    (given,) = ways("local", "adamw", 8, among=[plain], options={"head": "blocks"})
    assert (given.finding, str(given.method)) == (plain, "greedy(head=blocks)")
    assert stretto.advised("async(warmup=9)", "adamw", 8).options["warmup"] == 9  # which plain training has not
    assert stretto.advised("async(microbatches=2)", "adamw", 8).name == "1f1b"
    assert str(stretto.advised("local(head=linear)", "sgd", 8)) == "1f1b"  # which has heads, too, and detaches none
    assert stretto.advised("local(head=linear)", "adamw", 8).options["head"] == "linear"


def test_a_method_of_the_same_delay_at_any_depth_counts_at_every_depth_of_its_network():
    always = replace(MADE_UP, method="pipedream-2bw", stages=2, any_depth=True, delay=1.0, ratio=1.15)
    known = [always, *KNOWN]
    assert tried("async", "adamw", 4, known) == ["pipedream-2bw"]  # nothing else was tried at about 4 stages
    assert tried("async", "adamw", 32, known)[0] == "pipedream-2bw"  # there the others never arrive
    assert tried("async", "adamw", 9, known) == ["pb", "pipedream-2bw", "pipedream"]
    elsewhere = replace(always, network="a ResNet")
    assert tried("async", "adamw", 8, [elsewhere, *KNOWN]) == ["pb", "pipedream"]  # on one network two were compared


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
    halves = replace(MADE_UP, method="paci(every=8)", ratio=1.0)
    known = [halves, MADE_UP]
    assert tried("async", "adamw", 8, known) == ["paci(every=8)", "pipedream"]
    assert tried("async", "adamw", 8, known, whole=True) == ["pipedream"]
    for optimizer in (*OPTIMIZERS, "plain-sgd", "rmsprop"):
        for stages in (2, 4, 8, 16, 32):
            whole = stretto.advised("async", optimizer, stages, whole=True)
            assert whole.plan(stages)[0].per_turn == 1
    normalised = [nn.Sequential(nn.Linear(3, 3), norm) for norm in (nn.BatchNorm1d(3), *map(nn.LayerNorm, (3, 3, 3)))]
    with pytest.warns(UserWarning, match=r"stands for backprop, whose stages take turns: workers idle 75% of"):
        trainer = stretto.Trainer(normalised, nn.functional.mse_loss, torch.optim.AdamW, "async", device="cpu")
    assert str(trainer.method) == str(stretto.advised("async", "adamw", 4, whole=True)) == "backprop"
    assert "as batch norms want whole minibatches" in meaning(trainer.method)
    assert str(stretto.advised("async", "adamw", 4)) == "1f1b"
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
        (("async(foo=1)", "adamw", 4), r"method 'async' stands for .* here: method 'pipedream-2bw' .*'foo'"),
    ],
)
def test_what_is_no_question(given, message):
    with pytest.raises(UsageError, match=message):
        stretto.advised(*given)


def test_names_of_optimizers_are_those_of_their_classes_too():
    assert stretto.advised("async", "SGD", 32).advice == stretto.advised("async", "sgd", 32).advice


def test_it_says_what_decided_and_what_was_not_tried_is_not_quoted_as_if_it_were():
    best = soonest(ways("local", "adamw", 8))
    told = meaning(stretto.advised("local", "adamw", 8))
    assert f"here: at a loss in {best.spread} times the time of 1f1b, simulated: " in told
    tried_as = "" if best.finding.method == str(best.method) else f"of {best.finding.method}, which was tried, "
    assert f"simulated: {tried_as}{best.finding}, each {best.turn:.2f} times as long" in told
    nearest, *_ = ways("async", "adamw", 8)
    told = meaning(stretto.advised("async", "adamw", 8))
    assert told.startswith("async stands for 1f1b here: no method with stale gradients is told to be sooner at a loss")
    assert f"The nearest, {nearest.method}, takes {nearest.spread} times the time: " in told
    assert meaning(stretto.advised("async", "adamw", 1)) == "async stands for 1f1b here: there is one stage"


def test_the_muon_of_one_update_of_delay_is_worth_it_where_the_bubble_is_large():
    """From our studies; neighbouring depths differ where the table of times has the reason."""
    for stages in (2, 3, 4, 8, 16):
        found = ways("async", "muon", stages)
        best = soonest(found)
        assert stretto.advised("async", "muon", stages).name == ("1f1b" if best is None else best.method.name)
        assert (best is None) == all(each.high >= 1 for each in found)


def test_a_setting_names_a_function_that_wants_large_parameters(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef large(parameters):\n"
        "    return torch.optim.SGD([p for p in parameters if p.numel() > 8], lr=0.1, momentum=0.9)\n"
    )
    name = f"{tmp_path}/own.py:large"
    assert name_of_setting(name, stages=[nn.Linear(9, 9)]) == "sgd"
    with pytest.raises(UsageError, match=r"own\.py:large failed with ValueError"):
        name_of_setting(name)
