"""Forward at one rule's weights, backward at another's: checked against the same layers written by hand."""

import copy
import weakref

import pytest
import torch
from torch import nn
from two_weights import LAYERS, assert_close, by_hand, found, make, values

from stretto.weights import (
    Correction,
    CurrentRule,
    Live,
    Predicted,
    Rule,
    Substituted,
    VelocityPrediction,
    WeightPrediction,
)
from stretto.weights.forward_backward_rules import Read


class Moved(Rule):
    """Each weight moved by noise of its own, which `values` tells."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def value(self, name, parameter):
        generator = torch.Generator().manual_seed(self.seed + len(name) + sum(map(ord, name)))
        return parameter + torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)

    def values(self, module):
        return {name: self.value(name, p).detach() for name, p in module.named_parameters()}


def disturb(weights, module, times=3):
    @torch.no_grad()
    def step():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)

    for _ in range(times):
        weights.update(step)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_backward_see_the_values_of_their_rules(name):
    module, inputs = make(name)
    ahead, behind = Moved(100), Moved(10_000)
    weights = Substituted(module, ahead, behind)
    for _ in range(2):  # the first forward is checked, the second is not
        before, own = ahead.values(module), values(module)
        output, version = weights.forward((inputs,))
        assert all(torch.equal(own[key], p) for key, p in module.named_parameters())
        cotangent = torch.randn_like(output)
        disturb(weights, module)
        output.backward(cotangent)
        weights.collect(version)
        assert not weights._backward_values
        wanted_output, wanted = by_hand(name, module, before, behind.values(module), inputs, cotangent)
        torch.testing.assert_close(output.detach(), wanted_output, rtol=1e-12, atol=1e-12)
        assert_close(found(module, inputs), wanted)
        module.zero_grad()
        inputs.grad = None


@pytest.mark.parametrize("name", LAYERS)
def test_predicted_forward_and_current_backward(name):
    """Pipelined Backpropagation with linear weight prediction."""
    module, inputs = make(name)
    ahead = Moved(100)
    weights = Substituted(module, ahead)
    before = ahead.values(module)
    output, _ = weights.forward((inputs,))
    cotangent = torch.randn_like(output)
    disturb(weights, module)
    output.backward(cotangent)
    _, wanted = by_hand(name, module, before, values(module), inputs, cotangent)
    assert_close(found(module, inputs), wanted)


@pytest.mark.parametrize("name", ["lstm", "gru", "conv2d", "attention"])
def test_in_single_precision_too(name):
    module, inputs = make(name, torch.float32)
    ahead, behind = Moved(100), Moved(10_000)
    weights = Substituted(module, ahead, behind)
    before = ahead.values(module)
    output, _ = weights.forward((inputs,))
    cotangent = torch.randn_like(output)
    disturb(weights, module)
    output.backward(cotangent)
    _, wanted = by_hand(name, module, before, behind.values(module), inputs, cotangent)
    assert_close(found(module, inputs), wanted, 2e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_current_for_both_is_live(name):
    module, inputs = make(name)
    twin, given = copy.deepcopy(module), inputs.detach().clone().requires_grad_(inputs.requires_grad)
    one, other = Substituted(module, CurrentRule(), CurrentRule()), Live(twin)
    for weights, part, x in ((one, module, inputs), (other, twin, given)):
        output, _ = weights.forward((x,))
        torch.manual_seed(3)
        cotangent = torch.randn_like(output)
        disturb(weights, part)
        output.backward(cotangent)
    for key, gradient in found(twin, given).items():
        assert torch.equal(found(module, inputs)[key], gradient), key


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "current"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stash_of_predictions(name, moved):
    """Predicted: the backward sees what its forward saw. With a rule that moves nothing it is a stash."""
    module, inputs = make(name)
    rule = Moved(100) if moved else CurrentRule()
    weights = Predicted(module, rule)
    before = rule.values(module) if moved else values(module)
    output, version = weights.forward((inputs,))
    cotangent = torch.randn_like(output)
    home = [p.data_ptr() for p in module.parameters()]
    disturb(weights, module)
    assert (home == [p.data_ptr() for p in module.parameters()]) == moved  # predictions have storage of their own
    output.backward(cotangent)
    weights.collect(version)
    _, wanted = by_hand(name, module, before, before, inputs, cotangent)
    assert_close(found(module, inputs), wanted)


def test_micro_batches_of_one_update_share_the_values():
    module, inputs = make("linear")
    calls = []

    class Counted(Moved):
        def value(self, name, parameter):
            calls.append(name)
            return super().value(name, parameter)

    weights = Substituted(module, Counted(1), Counted(2))
    outputs = [weights.forward((inputs,))[0] for _ in range(3)]
    assert calls == ["weight", "bias"]
    for output in outputs:
        output.sum().backward()
        weights.collect(None)
    assert calls == ["weight", "bias"] + 3 * ["weight"]  # the bias is never read
    weights.update(lambda: None)
    weights.forward((inputs,))
    assert calls[5:] == ["weight", "bias"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("mechanism", ["live", "substituted"])
def test_a_weight_that_is_used_twice(mechanism):
    torch.manual_seed(0)
    module, x = Tied().double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ahead, behind = Moved(1), Moved(2)
    weights = Live(module) if mechanism == "live" else Substituted(module, ahead, behind)
    w_f = (values if mechanism == "live" else ahead.values)(module)["first.weight"]
    output, _ = weights.forward((x,))
    g = torch.randn_like(output)
    disturb(weights, module)
    w_b = (values if mechanism == "live" else behind.values)(module)["first.weight"]
    output.backward(g)
    hidden = (x.detach() @ w_f.T).tanh()
    inner = (g @ w_b) * (1 - hidden**2)
    torch.testing.assert_close(x.grad, inner @ w_b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.first.weight.grad, g.T @ hidden + inner.T @ x.detach(), rtol=1e-12, atol=1e-12)


def test_graphs_in_flight_hold_no_weights():
    module, inputs = make("linear")
    weights = Substituted(module, Moved(1), Moved(2))
    output, _ = weights.forward((inputs,))
    assert output.grad_fn._raw_saved_mat2.data == Read("weight", (6, 3), (1, 6), 0)
    predicted = weakref.ref(weights._values[weights.forward_rule][0][0][1])
    disturb(weights, module, 1)
    assert predicted() is None


def test_a_failing_forward_puts_the_weights_back():
    module, inputs = make("linear")
    weights = Substituted(module, Moved(1), Moved(2))
    before = values(module)
    home = module.weight.data_ptr()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            weights.forward((inputs[:, :3],))
    assert module.weight.data_ptr() == home
    assert all(torch.equal(before[key], p) for key, p in module.named_parameters())
    weights.forward((inputs,))


def test_forget_starts_from_the_parameters():
    module, inputs = make("linear")
    rule = WeightPrediction(3)
    for weights in (Substituted(module, rule, Correction(2)), Predicted(module, rule)):
        disturb(weights, module)
        output, _ = weights.forward((inputs,))
        assert not torch.equal(output, module(inputs))
        weights.forget()
        assert torch.equal(weights.forward((inputs,))[0], module(inputs))
        assert rule.updates == 0


def train(module, weights, optimizer, inputs, delay, steps, held=()):
    """A stage alone: each forward's backward comes `delay` updates later. Returns the graphs still in flight."""
    flying = list(held)
    for _ in range(steps):
        flying.append(weights.forward((inputs,)))
        if len(flying) > delay:
            output, version = flying.pop(0)
            output.square().mean().backward()
            weights.collect(version)
            weights.update(optimizer.step)
            optimizer.zero_grad()
    return flying


METHODS = {
    "live": lambda module, optimizer, d: Live(module),
    "velocity": lambda module, optimizer, d: Substituted(module, VelocityPrediction(optimizer, d)),
    "weight": lambda module, optimizer, d: Substituted(module, WeightPrediction(d)),
    "spectrain": lambda module, optimizer, d: Substituted(
        module, VelocityPrediction(optimizer, d), VelocityPrediction(optimizer, 0)
    ),
    "pipemare": lambda module, optimizer, d: Substituted(module, CurrentRule(), Correction(d)),
    "stash": lambda module, optimizer, d: Predicted(module, WeightPrediction(d)),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_mitigation_without_delay_is_the_plain_optimizer(method):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    plain, inputs = copy.deepcopy(module), torch.randn(4, 6, dtype=torch.float64)
    one, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, plain))
    train(module, METHODS[method](module, one, 0), one, inputs, 0, 6)
    for _ in range(6):
        plain(inputs).square().mean().backward()
        other.step()
        other.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("method", ["velocity", "weight", "spectrain", "pipemare"])
def test_training_goes_on_from_a_state_dict(method):
    """After a drain: rules, optimizer and module are saved, and the rest is as if nothing had happened."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 6, dtype=torch.float64)

    def fresh(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return module, optimizer, METHODS[method](module, optimizer, 2)

    def drain(module, optimizer, weights, flying):
        for output, version in flying:
            output.square().mean().backward()
            weights.collect(version)
            weights.update(optimizer.step)
            optimizer.zero_grad()

    module, optimizer, weights = fresh(1)
    drain(module, optimizer, weights, train(module, weights, optimizer, inputs, 2, 5))
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), weights.state_dict()))
    again = fresh(2)
    train(*(again[i] for i in (0, 2, 1)), inputs, 2, 4)
    again[0].load_state_dict(saved[0])
    again[1].load_state_dict(saved[1])
    again[2].forget()
    again[2].load_state_dict(saved[2])
    for one in ((module, optimizer, weights), again):
        one[1].zero_grad()
        train(one[0], one[2], one[1], inputs, 2, 5)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again[0].parameters(), strict=True))
