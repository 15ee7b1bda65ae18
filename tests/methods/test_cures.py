"""Cures as data: horizons, combinations that make no sense, optimizers that cannot carry them."""

from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError
from stretto.methods import METHODS
from stretto.methods.cure import Place
from stretto.methods.pipedream import backward_horizon, forward_horizon
from stretto.methods.pipelined_backprop import decayed
from stretto.optim.spike import spike_coefficients


def test_the_decayed_horizon():
    """A sum of what is left of a velocity: m + m^2 + ... + m^D; nothing without delay."""
    assert decayed(Place(0, 4, 0, 0.9)) == 0
    assert decayed(Place(0, 4, 3, 0.9)) == pytest.approx(0.9 + 0.81 + 0.729)
    assert decayed(Place(0, 4, 1000, 0.5)) == pytest.approx(1)


def test_bases_are_refreshed_more_often_where_delays_are_longer():
    """In inverse proportion, from half to twice the interval; every stage alike where delays are."""
    intervals = [
        [cure.interval for cure in stretto.method(name).step_cures(stretto.method(name).plan(5)[0])]
        for name in ("pipedream(rotate=True)", "pipedream-2bw(rotate=one-sided, refresh=7)")
    ]
    assert intervals == [[5, 7, 10, 20, 20], [7] * 5]


def test_spectrain_aims_both_passes_at_one_version():
    """Forward on s at tick t, backward S-1-s updates of s later: both horizons end floor(s/2) after the backward."""
    for S in range(1, 9):
        for s in range(S):
            place = Place(s, S, S - 1 - s, 0.9)
            assert forward_horizon(place) == place.delay + backward_horizon(place)


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("delay", [0, 1, 2, 7])
def test_spike_compensation_makes_up_for_the_delay(momentum, delay):
    """From its arrival on, a gradient's total contribution is what it would have been without delay."""
    a, b = spike_coefficients(momentum, delay)
    total = a + b  # in the step in which it arrives, at velocity 1
    for later in range(40):
        assert total == pytest.approx(sum(momentum**k for k in range(delay + later + 1)))
        total += a * momentum ** (later + 1)
    if delay == 0:
        assert (a, b) == (1, 0)
    if delay == 1:
        assert (a, b) == (momentum, pytest.approx(1))  # Nesterov's


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("pb(horizon=3)", "needs a prediction: add predict="),
        ("pb(predict=sideways)", "choose 'velocity', 'weight', 'step' or None"),
        ("pb-lwp(horizon=-1)", "a number of updates, 'decayed', or None"),
        ("paci(every=0)", "a whole number of at least 1"),
        ("pipemare(reschedule=0)", "a whole number of at least 1"),
        ("pb(stash=no)", "choose True or False"),
        ("pb(spike=3)", "choose True or False"),
        ("pipemare(correct=7)", "choose True or False"),
        ("pipemare(warmup=-1)", "warmup=-1: a number of minibatches"),
        ("pb(finish=2.5)", "finish=2.5: a number of minibatches"),
        ("pb(warmup=9, finish=4)", "nothing would be asynchronous"),
        ("1f1b(warmup=9)", "is synchronous: warmup is for pipelines with stale gradients"),
        ("greedy(warmup=9)", "losses of its own on its stages: warmup is for pipelines"),
        ("overlapping(delay=1, finish=9)", "losses of its own on its stages: finish is for pipelines"),
        ("pb(warmpu=9)", "did you mean 'warmup'"),
        ("1f1b(feedback=1)", "is synchronous: there is no delay to cure; feedback is for pipedream"),
        ("spectrain(rotate=True)", "does not take it; rotate is for pipedream, pipedream-2bw, pb and paci"),
        ("pb(feedback=-1)", "a number of 0 or more"),
        ("paci(feedback=nan)", "a number of 0 or more"),
        ("pb(feedback=1, spike=True)", "both make up for the same delay"),
        ("pb(feedback=delay, predict=weight)", "both make up for the same delay"),
        ("pb(rotate=True, predict=step)", "rotation is for Adam and AdamW"),
        ("pipedream(rotate=both)", "choose True, 'one-sided' or False"),
        ("pipedream(refresh=4)", "needs a basis to refresh"),
        ("pipedream-2bw(rotate=True, refresh=0)", "a whole number of updates, at least 1"),
    ],
)
def test_refused_as_methods(method, message):
    with pytest.raises(UsageError, match=message):
        stretto.method(method)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *((method, torch.optim.Adam) for method in ("pb-lwp", "spectrain", "pb(predict=velocity, spike=True)")),
        *((method, torch.optim.RMSprop) for method in ("pb-sc", "pb-lwp-sc")),
        *(
            (method, partial(torch.optim.SGD, lr=0.1, **options))
            for method in ("pb-sc", "pb-lwp", "spectrain", "pb-lwp-sc")
            for options in ({}, {"momentum": 0.9, "nesterov": True})
        ),
    ],
)
def test_refused_with_this_optimizer(method, optimizer):
    with pytest.raises(UsageError, match=r"wants torch\.optim\.SGD with 0 < momentum < 1"):
        stretto.Trainer([nn.Linear(2, 2) for _ in range(3)], nn.functional.cross_entropy, optimizer, method)


@pytest.mark.parametrize("method", ["pipeoptim", "pb(predict=step)"])
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            torch.optim.RMSprop,
            "takes Adam, AdamW, .*Lion, muon and SOAP.*SGD.*this optimizer is RMSprop.*predict='weight'",
        ),
        (lambda p: torch.optim.SGD(p, 0.1), "momentum=0.*predict='weight'"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True), "nesterov=True.*predict='weight'"),
    ],
    ids=["rmsprop", "no-momentum", "nesterov"],
)
def test_a_step_that_is_not_known_is_refused(method, optimizer, message):
    with pytest.raises(UsageError, match=message):
        stretto.Trainer([nn.Linear(2, 2) for _ in range(3)], nn.functional.cross_entropy, optimizer, method)


SGD_CURES = ["pb", "pb-sc", "pb-lwp", "pb-lwpw", "spectrain", "pipemare(reschedule=9)"]
STEP_CURES = ["pb(predict=step, spike=True)", "pb(predict=step, horizon=decayed, stash=True)", "pipeoptim", "pb-lwp-sc"]


@pytest.mark.parametrize(
    ("method", "adam"), [(each, False) for each in SGD_CURES + STEP_CURES] + [(each, True) for each in STEP_CURES]
)
def test_every_cure_at_delay_0_is_the_plain_optimizer(method, adam):
    """Law 5: one stage has no delay, and equals plain training bit for bit; with a scheduler, too."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain.load_state_dict(stage.state_dict())

    def optimizer(params):
        if adam:
            return torch.optim.AdamW(params, lr=0.1)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)

    def scheduler(made):
        return torch.optim.lr_scheduler.CosineAnnealingLR(made, 9)

    trainer = stretto.Trainer([stage], nn.functional.cross_entropy, optimizer, method, scheduler=scheduler)
    made = optimizer(plain.parameters())
    rates = scheduler(made)
    for seed in range(9):
        torch.manual_seed(seed)
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
        trainer.step(x, y)
        made.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        made.step()
        rates.step()
    trainer.flush()
    assert all(torch.equal(a, b) for a, b in zip(stage.parameters(), plain.parameters(), strict=True))


def test_nesterov_is_pipedream_with_nadam():
    def run(method):
        torch.manual_seed(0)
        stages = [nn.Linear(4, 4).double() for _ in range(3)]
        trainer = stretto.Trainer(
            stages, nn.functional.cross_entropy, lambda p: torch.optim.NAdam(p, lr=0.01, betas=(0.99, 0.999)), method
        )
        for _ in range(9):
            trainer.step(torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,)))
        trainer.flush()
        return [p for stage in stages for p in stage.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("nesterov"), run("pipedream"), strict=True))
    with pytest.raises(UsageError, match=r"built on torch\.optim\.NAdam; this optimizer is Adam"):
        stretto.Trainer([nn.Linear(2, 2)] * 1, nn.functional.cross_entropy, torch.optim.Adam, "nesterov")


def test_versions_of_the_weights():
    """Stash S-s (PipeDream), two (2BW), one where nothing is kept; PB with a stash one more than its delay."""
    versions = {
        "pipedream": (4, 3, 2, 1),
        "pipedream-2bw": (2, 2, 2, 2),
        "pb": (1, 1, 1, 1),
        "pb(stash=True)": (7, 5, 3, 1),
        "1f1b": (1, 1, 1, 1),
        "greedy": (1, 1, 1, 1),
    }
    for name, expected in versions.items():
        method = stretto.method(name)
        assert method.versions(method.plan(4)[0]) == expected, name


def test_words_for_true_and_false():
    assert stretto.method("pb(stash=false, spike=TRUE)").cure.spike
    assert stretto.method("pb(stash=false)").weights == "live"
    assert stretto.method("pb(predict=none)").cure.forward is None


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"nesterov"}))
def test_any_method_with_one_stage_is_plain_training(name):
    """Law 1, up to the order in which micro-batches are summed."""
    torch.manual_seed(0)
    stage, plain = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    plain.load_state_dict(stage.state_dict())

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    trainer, made = stretto.Trainer([stage], nn.functional.cross_entropy, sgd, name), sgd(plain.parameters())
    for _ in range(8):
        x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
        trainer.step(x, y)
        made.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        made.step()
    trainer.flush()
    torch.testing.assert_close(stage.weight, plain.weight, rtol=0, atol=1e-12)


def test_a_v_wants_an_even_number_of_stages():
    with pytest.raises(UsageError, match="not 3: use 2 or 4 stages"):
        stretto.method("zb-v").plan(3)


def test_momentum_of_one_is_no_division_by_zero():
    stages = [nn.Linear(2, 2) for _ in range(3)]
    for name in ("pb-lwpw", "pb-lwpw(horizon=decayed)"):
        stretto.Trainer(stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.1, 1.0), name)
