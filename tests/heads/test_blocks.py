"""Heads of a language model with layers of their own: blocks and a copy of the readout; tokens are reconstructed."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from heads.test_solo import VOCABULARY, WIDTH, batches, stages
from laws.networks import token_loss
from runtime.scripts import same
from stretto.errors import UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def plain_loss(scores, y):
    return cross_entropy(scores.flatten(0, 1), y.flatten())


def by_hand(network, heads, data):
    """Greedy: every stage and its head on its own loss, of a detached input."""
    modules = copy.deepcopy(network)
    pairs = [*zip(modules, [*map(copy.deepcopy, heads), nn.Identity()], strict=True)]
    optimizers = [SGD([*stage.parameters(), *head.parameters()]) for stage, head in pairs]
    losses = []
    for x, y in data:
        for (stage, head), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            x = stage(x.detach())
            loss = plain_loss(head(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, modules


@pytest.mark.parametrize("depth", [1, 2])
def test_each_stage_trains_blocks_and_a_readout_of_its_own(depth):
    network, data = stages(), batches(6)
    copies = [nn.Sequential(*[network[3][0]] if depth == 1 else [network[2], network[3][0]], network[3][1])] * 3
    wanted, modules = by_hand(network, copies, data)
    trainer = stretto.Trainer(network, token_loss, SGD, f"greedy(head=blocks(depth={depth}))", example=data[0][0])
    losses = [trainer.step(x, y) for x, y in data] + trainer.flush()
    assert [loss for loss in losses if loss is not None] == pytest.approx(wanted, rel=1e-10)
    for mine, theirs in zip(trainer.stages, modules, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_readout_that_shares_the_embeddings_weight_is_copied():
    network = stages()
    network[3][1].score.weight = network[0][0].weight
    trainer = stretto.Trainer(network, token_loss, SGD, "greedy(head=blocks)", example=batches(1)[0][0])
    before = network[0][0].weight.detach().clone()
    heads = trainer.heads
    assert all(head.layers[-1].score.weight is not network[0][0].weight for head in heads[:-1])
    trainer.step(*batches(1)[0])
    assert not torch.equal(before, network[0][0].weight)
    assert not same(heads[0].state_dict(), heads[1].state_dict())


def test_tokens_are_reconstructed_beside_the_task():
    """Weight 2 behind the first stage, 0.5 behind the last but one, by hand on the first step."""
    network, (x, y) = stages(), batches(1)[0]
    trainer = stretto.Trainer(network, token_loss, SGD, "greedy(head=infopro(first=2.0, last=0.5))", example=x)
    features = network[0](x).detach()
    head = copy.deepcopy(trainer.heads[0])
    wanted = copy.deepcopy(head)
    (plain_loss(wanted.classifier(features), y) + 2.0 * plain_loss(wanted.decoder(features), x)).backward()
    trainer.step(x, y)
    for before, grad, after in zip(head.parameters(), wanted.parameters(), trainer.heads[0].parameters(), strict=True):
        assert torch.allclose(before - 0.1 * grad.grad, after, rtol=0, atol=1e-12)


def flat():
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, VOCABULARY)]


@pytest.mark.parametrize(
    ("network", "head", "said"),
    [
        (stages, "blocks(depth=9)", "last 9 blocks and of its readout"),
        (stages, "blocks(depth=0)", "depth=0"),
        (stages, "blocks(depth=5)", "do not lead from one to the other"),
        (flat, "blocks", r"head 'blocks' goes \[N, T, d\] -> \[N, T, V\]"),
    ],
)
def test_what_does_not_fit_is_told(network, head, said):
    x = batches(1)[0][0] if network is stages else torch.randn(3, WIDTH)
    with pytest.raises(UsageError, match=said):
        stretto.Trainer(network(), token_loss, SGD, f"greedy(head={head})", example=x)
