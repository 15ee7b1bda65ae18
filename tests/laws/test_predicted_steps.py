"""Prediction along the step of every optimizer: every version of the weights kept, each equation written out again."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import stretto
from optim.test_muon import newton_schulz
from stretto.optim import SOAP, Lion, SpikeCompensation
from stretto.optim.direction import keep_updates

LR, WARM, STEPS, STAGES = 0.02, 5, 11, 3
MUON = {"lr": LR, "momentum": 0.9, "weight_decay": 0.1}


def stages():
    torch.manual_seed(2)
    made = [nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)]
    return [stage.double() for stage in made]


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(7, 5, generator=generator).double(), torch.randint(3, (7,), generator=generator))
        for _ in range(STEPS)
    ]


def rate(update):
    return LR * min(update + 1, WARM) / WARM


def adam(p, state, group, _):
    m, v, t = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    b1, b2 = group["betas"]
    return m / (1 - b1**t) / (torch.sqrt(v / (1 - b2**t)) + group["eps"]) + group["weight_decay"] * p


def nadam(p, state, group, _):
    m, v, t = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    b1, b2 = group["betas"]
    mu = [b1 * (1 - 0.5 * 0.96 ** (k * group["momentum_decay"])) for k in range(1, int(t) + 2)]
    now, product = mu[-2], float(state["mu_product"])  # torch's, which is of float32 beside float64 weights
    assert product == pytest.approx(math.prod(mu[:-1]), rel=1e-6)
    longer = product * mu[-1]
    step = (1 - now) / (1 - product) * m / (1 - b1**t) + mu[-1] / (1 - longer) * m
    return step / (torch.sqrt(v / (1 - b2**t)) + group["eps"]) + group["weight_decay"] * p


def lion(p, state, group, _):
    return torch.sign(state["exp_avg"]) + group["weight_decay"] * p


def soap(p, state, group, _):
    if state["step"] == 0:
        return torch.zeros_like(p)
    if p.dim() == 1:
        return adam(p, state, group, _)
    left, right = state["left_basis"], state["right_basis"]
    t, (b1, b2) = state["step"], group["betas"]
    inside = left.T @ (state["exp_avg"] / (1 - b1**t)) @ right
    inside = inside / (torch.sqrt(state["exp_avg_sq"] / (1 - b2**t)) + group["eps"])
    return left @ inside @ right.T + group["weight_decay"] * p


def muon(p, state, group, last):
    if group["rule"] == "AdamW":
        return adam(p, state, group, last)
    gradient, late = last  # of the last step
    kept = 0.9 ** (late + 1)
    ahead = (1 - kept) * gradient + kept * state["momentum_buffer"]
    return 0.2 * math.sqrt(max(p.shape)) * newton_schulz(ahead).double() + group["weight_decay"] * p


def labelled(params, number):
    """As the Trainer labels the network: the last layer is the output."""
    output = "output" if number == STAGES - 1 else "hidden"
    params = list(params)
    labels = [stretto.optim.Label("", "Linear", output, p.dim()) for p in params]
    return stretto.optim.muon(params, labels=labels, **MUON)


CASES = {
    "adamw": (partial(torch.optim.AdamW, lr=LR, weight_decay=0.1), adam),
    "nadam": (partial(torch.optim.NAdam, lr=LR, weight_decay=0.1, decoupled_weight_decay=True), nadam),
    "lion": (partial(Lion, lr=LR, weight_decay=0.1), lion),
    "soap": (partial(SOAP, lr=LR, weight_decay=0.1, every=2), soap),
    "muon": (partial(stretto.optim.muon, **MUON), muon),
}


class Versions:
    """One stage: all versions of its weights, and where its step would carry each."""

    def __init__(self, number, module, make, step, *, spiked):
        self.module, self.delay, self.step_of = module, 2 * (STAGES - 1 - number), step
        parameters = list(module.parameters())
        self.optimizer = labelled(parameters, number) if step is muon else make(parameters)
        self.late = self.delay if spiked else 0
        self.step = SpikeCompensation(self.optimizer, self.late).step
        self.predicted = [self.predict(0)]

    def predict(self, update):
        groups = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        steps = {}
        for p, group in groups:
            state = self.optimizer.state.get(p)
            steps[p] = self.step_of(p.detach(), state, group, (p.grad, self.late)) if state else torch.zeros_like(p)
        distance = sum(rate(update + k) for k in range(self.delay))
        return {name: (p.detach() - distance * steps[p]).clone() for name, p in self.module.named_parameters()}

    def seen_by(self, minibatch):
        leaves = self.predicted[max(0, minibatch - self.delay)]
        return {name: value.clone().requires_grad_() for name, value in leaves.items()}

    def update(self, minibatch, gradients):
        for name, p in self.module.named_parameters():
            p.grad = gradients[name]
        for group in self.optimizer.param_groups:
            group["lr"] = rate(minibatch)
        self.step()
        self.predicted.append(self.predict(minibatch + 1))


def reference(make, step, *, spiked):
    """Each forward and its backward see weights predicted over the delay, from the version that was newest then."""
    parts = [Versions(number, module, make, step, spiked=spiked) for number, module in enumerate(stages())]
    for n, (x, y) in enumerate(batches()):
        leaves, value = [part.seen_by(n) for part in parts], x
        for part, own in zip(parts, leaves, strict=True):
            value = functional_call(part.module, own, (value,))
        cross_entropy(value, y).backward()
        for part, own in zip(parts, leaves, strict=True):
            part.update(n, {name: leaf.grad for name, leaf in own.items()})
    return [copy.deepcopy(part.module.state_dict()) for part in parts]


@pytest.mark.parametrize(
    ("name", "spiked"),
    [
        *((name, False) for name in CASES),
        *(pytest.param(name, True, marks=() if name == "muon" else pytest.mark.slow) for name in CASES),
    ],
)
def test_every_optimizer(name, spiked):
    """Under spike compensation, which test_spiked_steps.py checks, Muon's last update is a compensated one."""
    make, step = CASES[name]
    expected = reference(make, step, spiked=spiked)
    method = f"pb(predict=step, stash=True, spike={spiked})"
    trainer = stretto.Trainer(stages(), cross_entropy, make, method, scheduler=stretto.optim.warmup(WARM))
    for x, y in batches():
        trainer.step(x, y)
    trainer.flush()
    for module, wanted in zip(trainer.stages, expected, strict=True):
        for key, value in module.state_dict().items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-10)


def test_muon_that_keeps_its_updates_takes_the_same_steps():
    results = []
    for keeps in (True, False):
        module = stages()[0]
        optimizer = labelled(module.parameters(), 0)
        if keeps:
            keep_updates(optimizer)
        for x, _ in batches():
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_torchs_muon_alone_is_refused():
    net = [nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)]
    with pytest.raises(stretto.UsageError, match=r"torch.optim.Muon does not keep: use stretto.optim.muon"):
        stretto.Trainer(net, nn.functional.mse_loss, torch.optim.Muon, "pb(predict=step)")


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_it_goes_on_from_a_checkpoint(tmp_path, name):
    make, _ = CASES[name]
    through, half, rest = (stretto.Trainer(stages(), cross_entropy, make, "pipeoptim") for _ in range(3))
    data = batches()
    for trainer, part in ((through, data[:5]), (half, data[:5])):
        for x, y in part:
            trainer.step(x, y)
    through.flush()
    half.save(tmp_path / "half")
    rest.load(tmp_path / "half")
    for trainer in (through, rest):
        for x, y in data[5:]:
            trainer.step(x, y)
        trainer.flush()
    wanted, found = through.gather(), rest.gather()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
