"""The shared readout: read by all, trained by one, as old as is said, and nobody waits for it."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear

import stretto
from laws.networks import Attention, token_loss
from pairwise import in_turn, thinned
from stretto.errors import UsageError
from stretto.heads.solo import SharedReadout, readout
from stretto.methods import method
from stretto.simulate import period

VOCABULARY, WIDTH = 11, 8
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        return self.score(self.norm(x))


def stages(count=4):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Attention(WIDTH))
    middle = [Attention(WIDTH) for _ in range(count - 2)]
    return [each.double() for each in [first, *middle, nn.Sequential(Attention(WIDTH), Readout())]]


def batches(count):
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(VOCABULARY, (3, 5), generator=g) for _ in range(2)) for _ in range(count)]


def weights_of(stage):
    return [p.detach().clone() for p in stage[1].parameters()]


def loss_read(x, weights, y):
    """The norm, the unembedding and the cross entropy, by hand."""
    norm, bias, score = weights
    logits = linear(layer_norm(x, (WIDTH,), norm, bias), score).log_softmax(2)
    return -logits.gather(2, y[..., None]).mean()


def by_hand(network, data, every, flush_after, hops=0):
    """Greedy: the loss of stage s for minibatch m reads the version after its newest sent update up to m - (S - s).

    Versions have numbers: how many updates the readout has had. A flush makes all see what has been sent.
    """
    modules = copy.deepcopy(network)
    optimizers = [SGD(list(stage.parameters())) for stage in modules]
    versions, floor = [weights_of(modules[-1])], 0
    last = len(modules) - 1
    for m, (x, y) in enumerate(data):
        h = x
        for s, stage in enumerate(modules):
            h = stage(h.detach())
            age = (m - (last - s + 1) + 1) // every * every if s < last else m
            loss = loss_read(h, versions[max(age, floor, 0)], y) if s < last else token_loss(h, y)
            optimizers[s].zero_grad()
            loss.backward()
            optimizers[s].step()
        versions.append(weights_of(modules[-1]))
        if m == flush_after:
            floor = (m + 1) // every * every
    return modules


@pytest.mark.parametrize(("every", "workers"), in_turn([1, 3], [None, 2], rounds=2, slow=1))
def test_greedy_is_plain_pytorch(every, workers):
    network, data = stages(), batches(12)
    wanted = by_hand(network, data, every, 6)
    trainer = stretto.Trainer(
        network, token_loss, SGD, f"greedy(head=solo(every={every}))", example=data[0][0], workers=workers
    )
    for m, (x, y) in enumerate(data):
        trainer.step(x, y)
        if m == 6:
            trainer.flush()
    trainer.flush()
    for one, other in zip(wanted, trainer.stages, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    if every == 1:
        for head in trainer.heads[:-1]:
            for a, b in zip(head.parameters(), trainer.stages[-1][1].parameters(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", thinned(["overlapping", "overlapping(delay=1)", "chunked(chunks=2)"], 3))
def test_other_local_methods_learn(name):
    data = [batches(1)[0]] * 40
    trainer = stretto.Trainer(stages(), token_loss, SGD, method(name, head="solo"), example=data[0][0])
    before = trainer.evaluate(data[:1])["loss"]
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert trainer.evaluate(data[:1])["loss"] < 0.9 * before


@pytest.mark.parametrize("name", ["greedy", "overlapping(delay=1)", "chunked(chunks=2)", "chunked(chunks=4)"])
@pytest.mark.parametrize("count", [2, 5])
def test_nobody_waits(name, count):
    """A step takes as long in the steady state as with heads that every stage has for itself."""
    chosen = method(name) if count > 2 or "4" not in name else method("greedy")
    reads = [(count - 1, stage, 1) for stage in chosen.reach(count).heads[:-1]]
    found = []
    for reading in ((), reads):
        schedule, rules = chosen.plan(count, reads=reading)
        found.append(period(schedule, rules, lambda action: {"F": 1.0, "B": 2.0}.get(action.kind, 1.0)))
    assert found[0] == found[1]


def test_a_checkpoint_goes_on(tmp_path):
    data, found = batches(9), []
    for stop in (None, 5):
        trainer = made = stretto.Trainer(stages(), token_loss, SGD, "greedy(head=solo(every=2))", example=data[0][0])
        for m, (x, y) in enumerate(data):
            trainer.step(x, y)
            if m == 5:
                trainer.save(tmp_path / "checkpoint")
                if stop is not None:
                    trainer = stretto.Trainer(stages(), token_loss, SGD, str(made.method), example=x)
                    trainer.load(tmp_path / "checkpoint")
        found.append(trainer.gather())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], value) for key, value in found[1].items())


def test_what_counts_as_a_readout():
    norm, out = nn.LayerNorm(4), nn.Linear(4, 7)
    assert list(readout(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), norm, out))) == [norm, out]
    assert readout(nn.Sequential(nn.ReLU(), out)) is out
    assert readout(out) is out
    whole = Readout()
    assert readout(nn.Sequential(nn.Linear(4, 4), whole)) is whole
    assert readout(nn.Sequential(out, nn.ReLU())) is None
    assert readout(Attention(4)) is None


def test_no_optimizer_sees_a_copy():
    (x, _), *_ = batches(1)
    trainer = stretto.Trainer(stages(), token_loss, SGD, "greedy(head=solo)", example=x)
    assert all(isinstance(head, SharedReadout) for head in trainer.heads[:-1])
    assert not any(p.requires_grad for head in trainer.heads[:-1] for p in head.parameters())


@pytest.mark.parametrize(("last", "options", "said"), [
    (nn.Sequential(nn.Linear(WIDTH, VOCABULARY), nn.ReLU()), {}, "the last stage ends otherwise"),
    (nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, VOCABULARY)), {}, "the last stage ends otherwise"),
    (Readout(), {"mesh": stretto.Mesh(data=2), "sync": "local-sgd(every=2)"}, "head 'solo' reads the last stage's"),
])  # fmt: skip
def test_refusals(last, options, said):
    network = [nn.Embedding(VOCABULARY, WIDTH), last]
    with pytest.raises(UsageError, match=said):
        stretto.Trainer(
            network, token_loss, SGD, "greedy(head=solo)", example=torch.zeros(2, 3, dtype=torch.int64), **options
        )


def test_a_forward_that_is_run_again_is_refused():
    (x, _), *_ = batches(1)
    with pytest.raises(UsageError, match="would read newer weights of the last stage's readout"):
        stretto.Trainer(stages(), token_loss, SGD, "chunked(head=solo, recompute=True)", example=x)
