"""Live weights: the backward reads the weights as they stand; checked against the same layers written by hand."""

import copy

import pytest
import torch
from torch import nn
from two_weights import LAYERS, assert_close, by_hand, found, make, values

from pairwise import in_turn
from stretto.errors import UsageError
from stretto.weights import CurrentRule, Live, Predicted, Stash, Substituted, saved_tensor_check


def disturb(weights, module, times=3):
    """Several updates in place, as an optimizer makes them."""

    @torch.no_grad()
    def step():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)

    for _ in range(times):
        weights.update(step)


@pytest.mark.parametrize("private", [True, False], ids=["unnoticed", "by-name"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_reads_the_current_weights(name, private, monkeypatch):
    monkeypatch.setattr(saved_tensor_check, "can_hide_changes", lambda: private)
    module, inputs = make(name)
    live = Live(module)
    for _ in range(2):  # the first forward is checked, the second is not
        before = values(module)
        output, version = live.forward((inputs,))
        cotangent = torch.randn_like(output)
        disturb(live, module)
        assert all(a is b for a, b in zip(live.leaves(version), module.parameters(), strict=True))
        output.backward(cotangent)
        live.collect(version)
        wanted_output, wanted = by_hand(name, module, before, values(module), inputs, cotangent)
        torch.testing.assert_close(output.detach(), wanted_output, rtol=1e-12, atol=1e-12)
        assert_close(found(module, inputs), wanted)
        module.zero_grad()
        inputs.grad = None


@pytest.mark.parametrize("name", ["lstm", "gru", "conv2d", "attention"])
def test_in_single_precision_too(name):
    """float32 takes other kernels: oneDNN's LSTM and convolutions, which might keep packed weights."""
    module, inputs = make(name, torch.float32)
    live = Live(module)
    before = values(module)
    output, _ = live.forward((inputs,))
    cotangent = torch.randn_like(output)
    disturb(live, module)
    output.backward(cotangent)
    _, wanted = by_hand(name, module, before, values(module), inputs, cotangent)
    assert_close(found(module, inputs), wanted, 2e-4)


MECHANISMS = {
    "live": Live,
    "stash": Stash,
    "substituted": lambda module: Substituted(module, CurrentRule(), CurrentRule()),
    "predicted": lambda module: Predicted(module, CurrentRule()),
}


@pytest.mark.parametrize(("name", "mechanism"), in_turn(LAYERS, list(MECHANISMS), rounds=4, slow=3))
def test_without_delay_it_is_plain_pytorch_bit_for_bit(name, mechanism):
    module, inputs = make(name)
    plain, given = copy.deepcopy(module), inputs.detach().clone().requires_grad_(inputs.requires_grad)
    weights = MECHANISMS[mechanism](module)
    one, other = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (module, plain))
    for _ in range(3):
        output, version = weights.forward((inputs,))
        cotangent = torch.randn_like(output)
        output.backward(cotangent)
        weights.collect(version)
        plain(given).backward(cotangent)
        for key, gradient in found(plain, given).items():
            assert torch.equal(found(module, inputs)[key], gradient), key
        weights.update(one.step)
        other.step()
        one.zero_grad()
        other.zero_grad()
    for (key, a), b in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_many_graphs_in_flight_cost_no_copies():
    module, inputs = make("linear")
    live = Live(module)
    home = [p.data_ptr() for p in module.parameters()]
    outputs = []
    for _ in range(4):
        outputs.append(live.forward((inputs,))[0])
        disturb(live, module, 1)
    assert [p.data_ptr() for p in module.parameters()] == home
    for output in outputs:
        inputs.grad = None
        output.sum().backward()
        torch.testing.assert_close(inputs.grad[0], module.weight.detach().sum(0))


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_torch_optimizers_change_weights_in_place(kind, settings):
    module, inputs = make("linear")
    live = Live(module)
    optimizer = kind(module.parameters(), lr=0.1, **settings)
    output, _ = live.forward((inputs,))
    later, _ = live.forward((inputs,))
    output.sum().backward()
    before = module.weight.detach().clone()
    live.update(optimizer.step)
    inputs.grad = None
    later.sum().backward()
    torch.testing.assert_close(inputs.grad[0], module.weight.detach().sum(0))
    assert not torch.equal(before, module.weight)


def test_an_optimizer_that_replaces_the_weights_is_refused():
    module, inputs = make("linear")
    live = Live(module)
    live.forward((inputs,))

    def step():
        module.weight.data = module.weight.data + 1

    with pytest.raises(UsageError, match="in place"):
        live.update(step)


def test_frozen_parameters_stay_out_of_it():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    module[0].weight.requires_grad_(False)
    for weights in (Live(module), Substituted(module, CurrentRule())):
        output, version = weights.forward((torch.randn(4, 3, dtype=torch.float64),))
        assert len(weights.leaves(version)) == 3
        output.sum().backward()
        assert module[0].weight.grad is None
