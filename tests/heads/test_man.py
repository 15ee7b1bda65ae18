"""Momentum auxiliary networks: the average is of exactly the versions that are said, and only the rest is trained."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from heads.test_solo import VOCABULARY, WIDTH, batches, stages
from laws.networks import token_loss
from pairwise import thinned
from runtime.scripts import same
from stretto.errors import UsageError
from stretto.heads import build
from stretto.heads.head import Network
from stretto.heads.man import first_layers
from stretto.methods import method
from stretto.nn.deferred import RemoteStage
from stretto.simulate import period

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def blocks_of(network):
    """What each head but the last averages: one block of the stage behind it."""
    return [*network[1:-1], network[-1][0]]


def by_hand(network, data, momentum, every, flush_after, classifiers):
    """Greedy: the head of stage s for minibatch m has the average of the versions sent up to update m - 1.

    Versions have numbers: how many updates a stage has had. A flush makes all see what has been sent.
    """
    modules = copy.deepcopy(network)
    blocks = blocks_of(modules)
    averages, biases = copy.deepcopy(blocks), copy.deepcopy(blocks)
    heads = [[bias, copy.deepcopy(read)] for bias, read in zip(biases, classifiers, strict=True)]
    optimizers = [
        SGD([p for part in (stage, *head) for p in part.parameters()])
        for stage, head in zip(modules, [*heads, []], strict=True)
    ]
    sent, taken, losses = [{0: weights(block)} for block in blocks], [0] * len(blocks), []

    def take(s, newest):
        for version in range(taken[s] + 1, newest + 1):
            if version in sent[s]:
                for p, w in zip(averages[s].parameters(), sent[s][version], strict=True):
                    p.data = momentum * p.data + (1 - momentum) * w
        taken[s] = max(taken[s], newest)

    for m, (x, y) in enumerate(data):
        h = x
        for s, stage in enumerate(modules):
            h = stage(h.detach())
            scores = h
            if s < len(blocks):
                take(s, m - 1)
                scores = heads[s][1](averages[s](h) + heads[s][0](h))
            loss = cross_entropy(scores.flatten(0, -2), y.flatten())
            optimizers[s].zero_grad()
            loss.backward()
            optimizers[s].step()
        losses.append(loss.item())
        if (m + 1) % every == 0:
            for s, block in enumerate(blocks):
                sent[s][m + 1] = weights(block)
        if m == flush_after:
            for s in range(len(blocks)):
                take(s, m + 1)
    for s in range(len(blocks)):
        take(s, len(data))
    return losses, modules, averages, heads


@pytest.mark.parametrize(
    ("momentum", "every", "workers"), thinned([(0.7, 3, 2), (0.7, 1, None), (0, 1, 3), (0.995, 2, None)], 2)
)
def test_greedy_is_plain_pytorch(momentum, every, workers):
    network, data = stages(), batches(10)
    wanted, modules, averages, heads = by_hand(network, data, momentum, every, 5, [network[-1][1]] * 3)
    chosen = f"greedy(head=man(momentum={momentum}, every={every}))"
    trainer = stretto.Trainer(network, token_loss, SGD, chosen, example=data[0][0], workers=workers)
    losses = []
    for m, (x, y) in enumerate(data):
        losses.append(trainer.step(x, y))
        if m == 5:
            losses += trainer.flush()
    losses += trainer.flush()
    assert [loss for loss in dict.fromkeys(losses) if loss is not None] == pytest.approx(wanted, rel=1e-10)
    theirs = [*modules, *averages, *(part for head in heads for part in head)]
    mine = [*trainer.stages, *(head.average for head in trainer.heads[:-1])]
    mine += [part for head in trainer.heads[:-1] for part in (head.bias, head.classifier)]
    for one, other in zip(mine, theirs, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    if momentum == 0:
        for head, block in zip(trainer.heads, blocks_of(trainer.stages), strict=False):
            assert all(map(torch.equal, head.average.parameters(), block.parameters()))


def test_images_and_vectors_get_a_classifier_of_two_layers():
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    last = nn.Sequential(nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    network = [nn.Conv2d(3, 4, 3), convolution, last]
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    trainer = stretto.Trainer(network, cross_entropy, SGD, "greedy(head=man(depth=2))", example=x)
    kinds = [[type(layer).__name__ for layer in head.average.layers] for head in trainer.heads[:-1]]
    assert kinds == [["Conv2d", "BatchNorm2d", "ReLU"], ["Conv2d", "ReLU", "AdaptiveAvgPool2d", "Flatten"]]
    before = copy.deepcopy(trainer.heads[0])
    trainer.step(x, y)
    trainer.flush()
    after, conv = trainer.heads[0], trainer.stages[1][0]
    assert torch.allclose(after.average.layers[0].weight, before.average.layers[0].weight.lerp(conv.weight, 0.005))
    assert not torch.equal(after.bias.layers[0].weight, before.bias.layers[0].weight)
    trainer.step(x, y)
    assert not torch.equal(after.average.layers[1].running_mean, trainer.stages[1][1].running_mean)


@pytest.mark.parametrize("name", thinned(["overlapping(delay=1)", "overlapping", "chunked(chunks=2)"], 3, first=2))
def test_other_local_methods_learn(name):
    data = [batches(1)[0]] * 40
    trainer = stretto.Trainer(stages(), token_loss, SGD, method(name, head="man(momentum=0.9)"), example=data[0][0])
    before = trainer.evaluate(data[:1])["loss"]
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert trainer.evaluate(data[:1])["loss"] < 0.95 * before


@pytest.mark.parametrize("name", ["greedy", "overlapping(delay=1)", "chunked(chunks=2)"])
@pytest.mark.parametrize("count", [2, 5])
def test_nobody_waits(name, count):
    chosen = method(name)
    reads = [(stage + 1, stage, 1) for stage in chosen.reach(count).heads[:-1]]
    found = []
    for reading in ((), reads):
        schedule, rules = chosen.plan(count, reads=reading)
        found.append(period(schedule, rules, lambda action: {"F": 1.0, "B": 2.0}.get(action.kind, 1.0)))
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "behind"), [("greedy", 2), ("overlapping(delay=1)", 3), ("chunked(chunks=2)", 2)])
def test_which_version_is_read(name, behind):
    """That after the update of micro-batch m - 2, or m - 3 where updates come a micro-batch later."""
    rules = method(name).plan(6, reads=[(3, 2, 1)])[1]
    assert [rules.ties[0].newest(m) for m in range(9)] == [m - behind for m in range(9)]


def tied(count=4):
    """Embedding and unembedding are one weight, which the stage between them borrows, too, if there is one."""
    network = stages(count)
    network[-1][1].score.weight = network[0][0].weight
    return network


def test_tied_embeddings_stay_tied_and_heads_train_copies():
    network, data = tied(), batches(6)
    again = copy.deepcopy(network)
    trainer = stretto.Trainer(network, token_loss, SGD, "greedy(head=man)", example=data[0][0])
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    scores = [head.classifier.score.weight for head in trainer.heads[:-1]]
    first = again[0][0].weight
    assert torch.equal(trainer.stages[-1][1].score.weight, trainer.stages[0][0].weight)
    assert not any(torch.equal(score, first) or torch.equal(score, network[0][0].weight) for score in scores)


def test_a_stage_may_read_a_tied_weight_and_an_average():
    """The stage in the middle gets messages of both kinds: of tied weights, and of layers behind it."""
    network, data = tied(), batches(5)
    network[1] = nn.Sequential(Attention(), Unembedding(network[0][0].weight))
    copied = copy.deepcopy(network)
    trainer = stretto.Trainer(network, token_loss, SGD, "greedy(head=man(momentum=0))", example=data[0][0])
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert torch.equal(trainer.stages[1][1].weight, trainer.stages[0][0].weight)
    assert all(map(torch.equal, trainer.heads[1].average.parameters(), trainer.stages[2].parameters()))
    assert not torch.equal(copied[0][0].weight, trainer.stages[0][0].weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()

    def forward(self, x):
        return self.norm(x)


class Unembedding(nn.Module):
    """Reads tokens off and embeds them again, softly."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x @ self.weight.T).softmax(-1) @ self.weight


@pytest.mark.parametrize("name", [pytest.param("greedy", marks=pytest.mark.slow), "chunked(chunks=2)"])
def test_a_checkpoint_goes_on_with_the_average(name, tmp_path):
    data, found = batches(9), []
    for stop in (None, 5):
        chosen = method(name, head="man(momentum=0.8, every=2)")
        trainer = stretto.Trainer(tied(), token_loss, SGD, chosen, example=data[0][0])
        for m, (x, y) in enumerate(data):
            trainer.step(x, y)
            if m == 5:
                trainer.save(tmp_path / "checkpoint")
                if stop is not None:
                    trainer = stretto.Trainer(tied(), token_loss, SGD, chosen, example=x)
                    trainer.load(tmp_path / "checkpoint")
        found.append(trainer.gather())
    assert any("average" in key for key in found[0])
    assert same(*found)


def test_in_front_of_a_mere_readout_is_a_classifier_alone():
    network, (x, y) = [*stages()[:3], stages()[3][1]], batches(1)[0]
    trainer = stretto.Trainer(network, token_loss, SGD, "greedy(head=man)", example=x)
    assert [type(head).__name__ for head in trainer.heads[:-1]] == ["MomentumAuxiliary"] * 2 + ["Readout"]
    assert [(tie.owner, tie.user) for tie in trainer.rules.ties] == [(1, 0), (2, 1)]
    before = weights(trainer.heads[2])
    trainer.step(x, y)
    trainer.flush()
    assert not any(map(torch.equal, before, trainer.heads[2].parameters()))


@pytest.mark.parametrize(
    ("owner", "shared", "said"),
    [
        (RemoteStage(1, 1), False, "averages layers of stage 1, but it was given as a function, and lives in another"),
        (nn.Linear(4, 4), True, "averages layers of stage 1, but several processes share its weights or images"),
        (nn.Linear(5, 4), False, "copies of stage 1's first layers .Linear., which cannot take it: "),
        (nn.ReLU(), False, "stage 1's first layers, but that stage has no parameters"),
    ],
)
def test_a_next_stage_that_is_not_here_or_does_not_fit(owner, shared, said):
    features = (torch.zeros(2, 4),)
    network = Network([nn.Linear(4, 4), owner, nn.Linear(4, 3)], [features] * 3, features, shared)
    with pytest.raises(UsageError, match=said):
        build("man", 0, features, torch.zeros(2, 3), network)


def test_which_layers_are_the_first():
    first, middle, norm, out = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 7)
    whole = nn.Sequential(first, nn.ReLU(), nn.Sequential(middle, nn.Tanh()), norm, out)
    assert len(first_layers(whole, False, depth=9)) == 6
    assert list(first_layers(whole, True, depth=1)) == [first, whole[1]]
    assert list(first_layers(whole, True, depth=9)) == [first, whole[1], *whole[2]]
    assert list(first_layers(nn.Sequential(first, out, nn.Tanh()), True, depth=3)) == [first]
    assert list(first_layers(nn.Sequential(nn.ReLU(), first), False, depth=1))[1] is first
    assert first_layers(nn.Sequential(norm, out), True, depth=1) is None
    assert first_layers(nn.ReLU(), False, depth=1) is None
    assert first_layers(first, False, depth=1)[0] is first


def no_readout():
    return [*stages()[:3], nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, VOCABULARY), nn.Tanh()).double()]


def tied_blocks():
    network = stages()
    network[3][0].mlp[0].weight = network[2].mlp[0].weight
    return network


@pytest.mark.parametrize(
    ("network", "chosen", "options", "said"),
    [
        (stages, "greedy(head=man(momentum=1))", {}, "momentum=1 must be a number from 0 to below 1"),
        (stages, "greedy(head=man(momentum=slow))", {}, "momentum='slow' must be a number"),
        (stages, "greedy(head=man(every=0))", {}, "every=0 must be a whole number"),
        (stages, "greedy(head=man(depth=0))", {}, "depth=0 must be a whole number"),
        (stages, "greedy(head=man(width=3))", {}, "has no option 'width'"),
        (no_readout, "greedy(head=man)", {}, "the last stage does not end in one of this width"),
        (tied_blocks, "greedy(head=man)", {}, "reads the next stage's first layers, but stages 3 and 2 share"),
        (stages, "greedy(head=man)", {"precision": "bf16"}, "stands still in bfloat16"),
        (stages, "chunked(head=man, recompute=True)", {}, "would read newer weights of the next stage"),
        (stages, "greedy(head=man)", {"mesh": stretto.Mesh(data=2), "sync": "local-sgd(every=2)"}, "does not keep"),
    ],
)
def test_refusals(network, chosen, options, said):
    with pytest.raises(UsageError, match=said):
        stretto.Trainer(network(), token_loss, SGD, chosen, example=batches(1)[0][0], **options)
