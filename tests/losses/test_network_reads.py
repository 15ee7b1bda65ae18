"""A loss that reads what forwards leave on modules is refused, where that may be of another micro-batch."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto

X, Y = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8), torch.arange(8) % 3


class Expert(nn.Module):
    """Leaves a number for the loss."""

    def __init__(self):
        super().__init__()
        self.linear, self.share, self.aux = nn.Linear(8, 8), 0.1, None

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        self.note(x)
        return x

    def note(self, x):
        self.aux = x.pow(2).mean()


class Network(nn.Module):
    """Two experts and a head; a method of its own computes its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Expert(), Expert()]), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, output, target):
        return cross_entropy(output, target) + self.balance()

    def balance(self):
        return sum(block.aux for block in self.blocks)

    def plain_loss(self, output, target):
        return cross_entropy(output, target) * self.blocks[0].share


class Own:
    """A loss as an object."""

    def __init__(self, net):
        self.parts = {"experts": [net.blocks[1]]}

    def __call__(self, output, target):
        return cross_entropy(output, target) + getattr(self.parts["experts"][0], "aux").detach()  # noqa: B009


def closure(model):
    return lambda output, target: cross_entropy(output, target) + sum(block.aux.detach() for block in model.blocks)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def trained(model, loss, stages=2, method="backprop"):
    trainer = stretto.Trainer(stretto.split(model, stages, example=X), loss, sgd, method)
    trainer.step(X, Y)
    return trainer


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("loss", [closure, lambda model: model.loss, Own, lambda model: stretto.mean(closure(model))])
def test_it_is_refused_by_name(loss, stages):
    model = Network().double()
    with pytest.raises(stretto.UsageError, match=r"the loss reads Network\.blocks\.[01]\.aux, which forwards assign"):
        trained(model, loss(model), stages, "gpipe(microbatches=2)")


def test_alone_it_is_a_plain_loop():
    model, plain = Network().double(), Network().double()
    trained(model, model.loss, 1)
    plain.loss(plain(X), Y).backward()
    sgd(plain.parameters()).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_no_forward_assigns_may_be_read():
    model, plain = Network().double(), Network().double()
    trained(model, model.plain_loss, 2)
    plain.plain_loss(plain(X), Y).backward()
    sgd(plain.parameters()).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_features_that_a_hook_puts_into_a_dict():
    model, features = Network().double(), {}

    def keep(module, args, output):
        features["first"] = output

    model.blocks[0].register_forward_hook(keep)
    with pytest.raises(stretto.UsageError, match=r"what the hook .*keep of Network\.blocks\.0 puts into a container"):
        trained(model, lambda output, target: cross_entropy(output, target) + features["first"].mean().detach())
    trained(model, cross_entropy)


def test_a_weak_proxy_of_what_is_no_more_is_passed_by():
    class Owner:
        pass

    owner = Owner()
    proxy = weakref.proxy(owner)
    del owner
    trained(Network().double(), lambda output, target: cross_entropy(output, target) if proxy is not None else None)
