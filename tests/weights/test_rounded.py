"""A rule on masters answers what it would in float32, rounded once."""

import copy

import pytest
import torch
from torch import nn

from stretto.optim import Masters
from stretto.weights import Correction, CurrentRule, Predicted, Substituted, VelocityPrediction, WeightPrediction
from stretto.weights.value_rules import Rounded

RULES = {
    "current": lambda optimizer: CurrentRule(),
    "velocity": lambda optimizer: VelocityPrediction(optimizer, 4),
    "weight": lambda optimizer: WeightPrediction(4),
    "correction": lambda optimizer: Correction(4),
}


def lowered(seed=0):
    """A layer in float32, the same one in bfloat16, and the masters of that."""
    torch.manual_seed(seed)
    plain = nn.Linear(5, 3)
    low = copy.deepcopy(plain).bfloat16()
    pairs = zip(low.parameters(), plain.parameters(), strict=True)
    return plain, low, Masters({p: nn.Parameter(q.detach().clone()) for p, q in pairs})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def drive(kind, rule, count, restart=None):
    """Train both by the same gradients; after each update, the rule's value of each weight, in float32 and in bf16."""
    plain, low, masters = lowered()
    theirs, ours = sgd(plain.parameters()), sgd(masters.copies.values())
    one, other = rule(theirs), Rounded(rule(ours), masters)
    weights = [kind(plain, one), kind(low, other)]
    generator = torch.Generator().manual_seed(3)
    for step in range(count):
        for p, q in zip(plain.parameters(), low.parameters(), strict=True):
            gradient = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad, q.grad = gradient.float(), gradient
        weights[0].update(theirs.step)
        weights[1].update(lambda: masters.step(ours.step))
        for optimizer in (theirs, ours):
            optimizer.zero_grad()
        if step == restart:
            state, masters_state = copy.deepcopy(weights[1].state_dict()), copy.deepcopy(masters.state_dict())
            weights[1].forget()
            masters.load_state_dict(masters_state)
            weights[1].load_state_dict(state)
        with torch.no_grad():
            for (name, p), q in zip(plain.named_parameters(), low.parameters(), strict=True):
                yield one.value(name, p), other.value(name, q), q


@pytest.mark.parametrize("kind", [Substituted, Predicted])
@pytest.mark.parametrize("name", RULES)
def test_the_value_is_that_of_float32_rounded(name, kind):
    for wanted, found, parameter in drive(kind, RULES[name], 8):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted.bfloat16())
        assert (found is parameter) == (name == "current")


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_holds_what_the_rule_keeps_in_float32(name):
    for wanted, found, _ in drive(Substituted, RULES[name], 8, restart=3):
        assert torch.equal(found, wanted.bfloat16())


@pytest.mark.parametrize("name", ["weight", "correction"])
def test_without_masters_the_differences_drown(name):
    """Why rules work on masters: the change of a bfloat16 weight is mostly rounding, times the horizon."""

    def worst(mastered):
        plain, low, masters = lowered()
        theirs, ours = sgd(plain.parameters()), sgd(masters.copies.values())
        rule = Rounded(RULES[name](ours), masters) if mastered else RULES[name](ours)
        weights, reference = Predicted(low, rule), Predicted(plain, RULES[name](theirs))
        errors = []
        for _ in range(6):
            plain.weight.grad, masters.of(low.weight).grad = torch.ones(3, 5), torch.ones(3, 5)
            reference.update(theirs.step)
            weights.update(lambda: masters.step(ours.step))
            with torch.no_grad():
                errors.append(rule.value("weight", low.weight) - reference.rule.value("weight", plain.weight))
        return torch.stack(errors).abs().max().item()

    assert worst(mastered=True) <= 2**-10  # half a unit in the last place of weights below 0.5
    assert worst(mastered=False) > 2 * 2**-10


def test_forward_and_backward_of_a_layer_see_the_rounded_values():
    _, low, masters = lowered()
    optimizer = sgd(masters.copies.values())
    weights = Substituted(low, Rounded(VelocityPrediction(optimizer, 4), masters), Rounded(Correction(2), masters))
    x = torch.randn(4, 5).bfloat16().requires_grad_()
    for _ in range(3):
        output, version = weights.forward((x,))
        weights.update(lambda: masters.step(optimizer.step))
        output.sum().backward()
        weights.collect(version)
    output, version = weights.forward((x,))
    with torch.no_grad():
        ahead = {
            p: (m - 1e-3 * 4 * optimizer.state[m]["momentum_buffer"]).bfloat16() for p, m in masters.copies.items()
        }
        behind = weights.backward_rule.value("weight", low.weight)
    torch.testing.assert_close(output, nn.functional.linear(x, ahead[low.weight], ahead[low.bias]), rtol=0, atol=0)
    assert not torch.equal(ahead[low.weight], low.weight)
    x.grad = None
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(output) @ behind, rtol=0, atol=0)
