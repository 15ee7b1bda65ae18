"""Hooks on parameters see what they see in a plain loop, under every method, or are refused by name."""

import copy

import pytest
import torch
from torch import nn

import stretto
from stretto import UsageError

X, Y = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8), torch.arange(8) % 3
MASK = (torch.arange(64).reshape(8, 8) % 2).double()
METHODS = ("backprop", "gpipe(microbatches=2)", "1f1b(microbatches=4)", "zb-h1(microbatches=2)", "pipedream",
           "pipedream-2bw(microbatches=4)", "pb", "pb(stash=True)", "spectrain", "pipemare", "local")  # fmt: skip


def layers():
    torch.manual_seed(0)
    return [
        nn.Linear(8, 8).double(),
        nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double(),
        nn.Linear(8, 3).double(),
    ]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def masked(gradient):
    return gradient * MASK


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_keeps_entries_where_they_are(method):
    stages = layers()
    before = stages[0].weight.detach().clone()
    stages[0].weight.register_hook(masked)
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method)
    for _ in range(6):
        trainer.step(X, Y)
    trainer.flush()
    moved = (stages[0].weight - before).detach()
    assert torch.equal(moved * (1 - MASK), torch.zeros(8, 8).double())
    assert (moved * MASK).abs().max() > 0


@pytest.mark.parametrize("method", METHODS[:4])
def test_a_synchronous_method_is_a_plain_loop(method):
    stages, plain = layers(), nn.Sequential(*layers())
    for first in (stages[0], plain[0]):
        first.weight.register_hook(masked)
        first.bias.register_hook(lambda gradient: gradient * 0.5)
    trainer, optimizer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method), sgd(plain.parameters())
    for _ in range(3):
        trainer.step(X, Y)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X), Y).backward()
        optimizer.step()
    for ours, theirs in zip(nn.Sequential(*stages).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


class Embedding(nn.Module):
    """A row of the weight for each token."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, tokens):
        return self.weight[tokens]


class Output(Embedding):
    """A logit for each row of the weight."""

    def forward(self, x):
        return x @ self.weight.T


def tied(hook):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    weight.register_hook(hook)
    return weight, [Embedding(weight), nn.Linear(8, 8).double(), Output(weight)]


def test_a_mask_on_a_tied_weight_is_that_of_a_plain_loop():
    (weight, stages), (other, plain) = tied(masked), tied(masked)
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, "1f1b(microbatches=2)")
    whole = nn.Sequential(*plain)
    optimizer, tokens = sgd(whole.parameters()), torch.arange(8)
    for _ in range(3):
        trainer.step(tokens, tokens)
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(tokens), tokens).backward()
        optimizer.step()
    torch.testing.assert_close(weight, other, rtol=1e-9, atol=1e-12)


def clamped(gradient):
    return gradient.clamp(-0.01, 0.01)


REFUSED = {
    "1f1b(microbatches=2)": "an update has several micro-batches",
    "gpipe(microbatches=2)": "an update has several micro-batches",
    "pipedream-2bw(microbatches=4)": "an update has several micro-batches",
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_is_not_linear_is_refused_where_it_would_see_parts(method):
    stages = layers()
    stages[0].weight.register_hook(clamped)
    with pytest.raises(UsageError, match=rf"the parameter weight of stage 0 has a hook, .* but {REFUSED[method]}"):
        stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method)
    stretto.Trainer(stages, nn.functional.cross_entropy, sgd, "pipedream").step(X, Y)


def test_what_is_not_linear_is_refused_on_a_tied_weight():
    with pytest.raises(UsageError, match="several stages share it"):
        stretto.Trainer(tied(clamped)[1], nn.functional.cross_entropy, sgd)


def test_replicas_refuse_hooks():
    stages = layers()
    stages[0].weight.register_hook(masked)
    with pytest.raises(UsageError, match="each replica has a part of the gradient"):
        stretto.Trainer(stages, nn.functional.cross_entropy, sgd, mesh=stretto.Mesh(data=2))


@pytest.mark.parametrize(
    ("method", "taken"), [("backprop", True), ("pb", True), ("pipedream", False), ("gpipe", False)]
)
def test_hooks_after_the_accumulation_are_called_once_a_step_or_refused(method, taken):
    stages, seen = layers(), []
    stages[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad is not None))
    if method in ("pipedream", "gpipe"):
        with pytest.raises(UsageError, match="the parameter weight of stage 0 has a hook"):
            stretto.Trainer(copy.copy(stages), nn.functional.cross_entropy, sgd, method)
        return
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, sgd, method)
    for _ in range(3):
        trainer.step(X, Y)
    trainer.flush()
    assert seen == [True] * 3
