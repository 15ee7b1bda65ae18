"""Stashed weights: a backward sees what its forward saw, whatever the optimizer did since; copies only if needed."""

import copy

import pytest
import torch
from torch import nn

from pairwise import slow_where
from stretto.weights import WEIGHTS, Current, DoubleBuffered, Stash


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(6, 6, 3)

    def forward(self, x):
        return self.layer(x, x.sin())


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(6, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


LAYERS = {
    "linear": (lambda: nn.Linear(6, 3), (4, 6)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 2, 5, 5)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 2, 4, 4)),
    "batch-norm": (lambda: nn.BatchNorm2d(2), (3, 2, 4, 4)),
    "layer-norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 6)),
    "bilinear": (Twice, (4, 6)),
    "attention": (Attend, (2, 5, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 5, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 5, 6)),
    "prelu": (lambda: nn.PReLU(), (4, 6)),
    "tied": (Tied, (4, 6)),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), (4, 6)),
    "deep": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 2, 2)), (4, 2, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3)), None),
}


def make(name, seed=0):
    torch.manual_seed(seed)
    build, shape = LAYERS[name]
    module = build().double()
    inputs = torch.randint(7, (3, 4)) if shape is None else torch.randn(shape, dtype=torch.float64)
    return module, inputs.requires_grad_(inputs.is_floating_point())


def update(module, stash, rate=0.5):
    """What a stage does at U: a large step, in place."""

    @torch.no_grad()
    def step():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=rate)
            parameter.grad = None

    stash.update(step)


def plain_gradients(module, inputs, weights):
    """The gradients of a copy of the module, at the weights given; and that of the inputs."""
    module = copy.deepcopy(module)
    module.load_state_dict(weights)
    inputs = inputs.detach().clone().requires_grad_(inputs.requires_grad)
    module(inputs).square().sum().backward()
    return [p.grad for p in module.parameters()], inputs.grad


def backward(module, stash, output, version):
    output.square().sum().backward()
    stash.collect(version)
    gradients = [p.grad for p in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    return gradients


def assert_close(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("updates", slow_where(lambda updates: updates < 3, [0, 1, 3]))
@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_is_that_at_the_forwards_weights(name, updates):
    module, inputs = make(name)
    stash = Stash(module)
    before = copy.deepcopy(module.state_dict())
    wanted, wanted_input = plain_gradients(module, inputs, before)
    output, version = stash.forward((inputs,))
    for _ in range(updates):
        update(module, stash)
    now = copy.deepcopy(list(module.parameters()))
    assert_close(backward(module, stash, output, version), wanted)
    if inputs.requires_grad:
        assert_close([inputs.grad], [wanted_input])
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), now, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_a_pipeline_of_versions(name):
    """Forwards and updates interleave, two of one version too; every gradient is that of its own forward."""
    module, inputs = make(name)
    stash = Stash(module)
    flying, found, wanted = [], [], []
    for step in range(9):
        for _ in range(1 + step % 2):
            wanted.append(plain_gradients(module, inputs, copy.deepcopy(module.state_dict()))[0])
            flying.append(stash.forward((inputs,)))
        if step >= 3:
            found.append(backward(module, stash, *flying.pop(0)))
        if step != 5:
            update(module, stash, rate=0.05)
    while flying:
        found.append(backward(module, stash, *flying.pop(0)))
    for gradients, expected in zip(found, wanted, strict=True):
        assert_close(gradients, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_storage_is_copied_only_while_a_graph_lives(name):
    module, inputs = make(name)
    stash = Stash(module)
    parameters = list(module.parameters())

    def places():
        return [p.data_ptr() for p in parameters]

    home = places()
    for _ in range(3):  # nothing in flight: in place, for ever
        output, version = stash.forward((inputs,))
        backward(module, stash, output, version)
        update(module, stash)
        assert places() == home
    output, version = stash.forward((inputs,))
    update(module, stash)
    moved = places()
    assert all(a != b for a, b in zip(moved, home, strict=True))
    update(module, stash)  # the graph holds the old storage: this one is the parameters' own
    assert places() == moved
    backward(module, stash, output, version)
    update(module, stash)
    assert places() == moved
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


def test_two_graphs_of_one_version_share_it():
    module, inputs = make("linear")
    stash = Stash(module)
    home = module.weight.data_ptr()
    (first, one), (second, two) = stash.forward((inputs,)), stash.forward((inputs,))
    assert one is two
    assert [leaf.data_ptr() for leaf in stash.leaves(one)] == [p.data_ptr() for p in module.parameters()]
    backward(module, stash, first, one)
    update(module, stash)  # the second still holds it
    assert module.weight.data_ptr() != home
    moved = module.weight.data_ptr()
    backward(module, stash, second, two)
    update(module, stash)
    assert module.weight.data_ptr() == moved


def test_gradients_of_several_micro_batches_add_up():
    module, inputs = make("linear")
    wanted, _ = plain_gradients(module, inputs, module.state_dict())
    stash = Stash(module)
    for _ in range(3):
        output, version = stash.forward((inputs,))
        output.square().sum().backward()
        stash.collect(version)
    assert_close([p.grad for p in module.parameters()], [3 * g for g in wanted])
    assert all(leaf.grad is None for leaf in stash.leaves(version))


def test_statistics_of_norms_move_and_frozen_parameters_do_not():
    module, inputs = make("deep")
    module[0].weight.requires_grad_(False)
    stash, plain = Stash(module), copy.deepcopy(module)
    for _ in range(3):
        output, version = stash.forward((inputs,))
        assert len(stash.leaves(version)) == len(list(module.parameters())) - 1
        output.square().sum().backward()
        stash.collect(version)
        plain(inputs)
    assert module[0].weight.grad is None
    for (key, found), wanted in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, wanted), key
    assert module[1].num_batches_tracked == 3


def test_the_policies_by_name():
    assert {"current": Current, "stash": Stash, "double-buffered": DoubleBuffered} == WEIGHTS


@pytest.mark.parametrize("name", LAYERS)
def test_current_weights_are_plain_pytorch(name):
    module, inputs = make(name)
    wanted, _ = plain_gradients(module, inputs, module.state_dict())
    current = Current(module)
    home = [p.data_ptr() for p in module.parameters()]
    output, version = current.forward((inputs,))
    assert all(a is b for a, b in zip(current.leaves(version), module.parameters(), strict=True))
    assert_close(backward(module, current, output, version), wanted)
    update(module, current)
    assert [p.data_ptr() for p in module.parameters()] == home
