"""Shared last layers (SegProp): every block's loss trains them, in versions as old as is said, and nobody waits."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import stretto
from laws.networks import token_loss
from pairwise import thinned
from runtime.scripts import same
from stretto.errors import UsageError
from stretto.methods import method
from stretto.simulate import period

VOCABULARY, WIDTH = 11, 6
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.inner(x).tanh()


def language_model(tied):
    """Four blocks on three stages, [E b0] [b1 b2] [b3 U]: the last two blocks are of two stages."""
    torch.manual_seed(0)
    first, unembedding = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    nn.init.normal_(unembedding.weight)
    if tied:
        unembedding.weight = first.weight
    stages = [[first, Block()], [Block(), Block()], [Block(), nn.Sequential(unembedding)]]
    return [nn.Sequential(*layers).double() for layers in stages]


def batches(count, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(VOCABULARY, (3, 5), generator=g) for _ in range(2)) for _ in range(count)]


class ByHand:
    """The weights E, b0 .. b3 and U by name, and all their versions; the losses of one minibatch after the other."""

    def __init__(self, stages, layers, hops, delay, optimizer):
        modules = [stages[0][0], stages[0][1].inner, *(b.inner for b in stages[1]), stages[2][0].inner, stages[2][1][0]]
        names = ["E", "b0", "b1", "b2", "b3", "U"]
        self.tied = modules[0].weight is modules[5].weight
        self.home = {"E": 0, "b0": 0, "b1": 1, "b2": 1, "b3": 2, "U": 2}
        self.top = names[5 - layers :]
        self.hops, self.delay, self.floor = hops, delay, 0
        self.now = {n: nn.Parameter(m.weight.detach().clone()) for n, m in zip(names, modules, strict=True)}
        if self.tied:
            del self.now["E"]
        self.versions = {name: [p.detach().clone()] for name, p in self.now.items()}
        self.optimizers = [optimizer([p for n, p in self.now.items() if self.home[n] == s]) for s in range(3)]

    def layer(self, name, x, weight):
        if name == "E":
            return embedding(x, weight)
        return x @ weight.T if name == "U" else x + (x @ weight.T).tanh()

    def leaf(self, name, stage, m):
        """The weight as a stage sees it for minibatch m, in its own layers or in its head; one leaf for all uses."""
        if name == "E" and self.tied:
            name = "U"
        if (name, stage) not in self.leaves:
            home = self.home[name]
            own = max(m - self.delay, 0)
            updates = own if stage == home else max(m - self.delay - (home - stage), 0)
            updates = max(updates, min(self.floor, m))
            self.leaves[name, stage] = self.versions[name][updates].clone().requires_grad_()
        return self.leaves[name, stage]

    def step(self, m, x, y):
        self.leaves = {}
        losses = [self.loss(head, hops, m, x, y) for head, hops in enumerate(self.hops) if hops is not None]
        keys = list(self.leaves)
        gradients = torch.autograd.grad(sum(losses), [self.leaves[key] for key in keys])
        for name, parameter in self.now.items():
            parameter.grad = sum(g for (n, _), g in zip(keys, gradients, strict=True) if n == name)
        for optimizer in self.optimizers:
            optimizer.step()
        for name, parameter in self.now.items():
            self.versions[name].append(parameter.detach().clone())
        return losses[-1].item()

    def loss(self, head, hops, m, x, y):
        for stage in range(head + 1):
            if stage == head - hops and stage:
                x = x.detach()  # of stages below, this loss trains none
            for name in [name for name, home in self.home.items() if home == stage]:
                x = self.layer(name, x, self.leaf(name, stage, m))
        for name in [name for name in self.top if self.home[name] > head]:
            x = self.layer(name, x, self.leaf(name, head, m))
        return cross_entropy(x.flatten(0, 1), y.flatten())


CASES = {
    "greedy": ((0, 0, 0), 0),
    "overlapping": ((None, 1, 1), 0),
    "overlapping(delay=1)": ((None, 1, 1), 1),
    "chunked(chunks=2)": ((None, 1, 0), 0),
}


@pytest.mark.parametrize(
    ("name", "layers", "tied", "optimizer", "workers"),
    [("greedy", 1, False, "sgd", 3), ("greedy", 2, True, "adamw", 2), ("greedy", 3, False, "adamw", 1),
     ("overlapping", 2, True, "sgd", 3), ("overlapping(delay=1)", 1, True, "adamw", 2),
     ("overlapping(delay=1)", 2, False, "sgd", 3), ("chunked(chunks=2)", 2, True, "adamw", 3)],
)  # fmt: skip
def test_equals_explicit_versions(name, layers, tied, optimizer, workers):
    """From fill to drain, with a drain in between, after which all see the newest weights."""
    stages, data = language_model(tied), batches(10)
    hops, delay = CASES[name]
    wanted = ByHand(stages, layers, hops, delay, OPTIMIZERS[optimizer])
    chosen = method(name, share_top=layers)
    trainer = stretto.Trainer(
        stages, token_loss, OPTIMIZERS[optimizer], chosen, example=data[0][0], workers=workers, seed=2
    )
    for m, (x, y) in enumerate(data):
        trainer.step(x, y)
        last = wanted.step(m, x, y)
        if m == 5:
            assert trainer.flush()[-1] == pytest.approx(last, abs=1e-10)
            wanted.floor = m + 1
    assert trainer.flush()[-1] == pytest.approx(last, abs=1e-10)
    found = {"b0": stages[0][1], "b1": stages[1][0], "b2": stages[1][1], "b3": stages[2][0]}
    found = {key: block.inner.weight for key, block in found.items()}
    found |= {"E": stages[0][0].weight, "U": stages[2][1][0].weight}
    assert (found["E"] is found["U"]) == tied
    for key, parameter in wanted.now.items():
        assert (found[key] - parameter).abs().max() < 1e-10, key


@pytest.mark.parametrize("name", ["greedy", "overlapping(delay=1)", "chunked(chunks=2)"])
@pytest.mark.parametrize("count", [2, 5])
def test_nobody_waits(name, count):
    """A step takes as long in the steady state as with heads that share nothing."""
    chosen = method(name)
    pairs = [(count - 1, stage) for stage in chosen.reach(count).heads[:-1]]
    found = []
    for ties in ((), pairs):
        schedule, rules = chosen.plan(count, ties=ties)
        assert all(tie.trains and tie.shares for tie in rules.ties)
        found.append(period(schedule, rules, lambda action: {"F": 1.0, "B": 2.0}.get(action.kind, 1.0)))
    assert found[0] == found[1]


@pytest.mark.parametrize("head", thinned(["segprop(layers=2)", "solo", "man", "blocks", "infopro", "auglocal"], 3))
def test_tied_models_are_saved_and_go_on(head, tmp_path):
    """A language model whose unembedding is its embedding learns, and a checkpoint goes on to the bit."""
    data, found, chosen = batches(7), [], f"greedy(head={head})"
    for resumed in (False, True):
        trainer = stretto.Trainer(language_model(True), token_loss, OPTIMIZERS["adamw"], chosen, example=data[0][0])
        before = trainer.evaluate(data[:1])["loss"]
        for m, (x, y) in enumerate([data[0], *data]):
            trainer.step(x, y)
            if m == 3:
                trainer.save(tmp_path / "checkpoint")
                if resumed:
                    again = language_model(True)
                    trainer = stretto.Trainer(again, token_loss, OPTIMIZERS["adamw"], chosen, example=x)
                    trainer.load(tmp_path / "checkpoint")
        trainer.flush()
        assert trainer.stages[0][0].weight is trainer.stages[2][1][0].weight
        found.append(trainer.gather())
    assert same(*found)
    if "segprop" in head:
        heads = [key for key in found[0] if key.startswith("heads.0.")]
        assert torch.equal(found[0][heads[-1]], found[0]["0.0.weight"])  # the version that all have after a flush
    assert trainer.evaluate(data[:1])["loss"] < before


class Norms(nn.Module):
    """A stage of an image network, whose shape and statistics differ from the next one's."""

    def __init__(self, channels, out, stride):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, out, 3, stride, 1), nn.BatchNorm2d(out)

    def forward(self, x):
        return self.norm(self.convolution(x)).relu()


def test_an_adapter_leads_to_shared_layers_of_another_shape():
    torch.manual_seed(0)
    last = nn.Sequential(Norms(4, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    stages = [Norms(1, 2, 1), Norms(2, 4, 2), last]
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1])
    trainer = stretto.Trainer(stages, cross_entropy, OPTIMIZERS["sgd"], "greedy(share_top=1)", example=x)
    first, second = trainer.heads[:2]
    assert [tuple(p.shape) for p in first.layers[0].parameters()] == [(4, 2, 1, 1)]
    assert list(second.layers[0].parameters()) == []
    shared = list(last.parameters())
    assert all(a is b for a, b in zip(second.shared, shared, strict=True))
    adapter = [p.clone() for p in first.layers[0].parameters()]
    for _ in range(4):
        trainer.step(x, y)
    trainer.flush()
    assert not torch.equal(adapter[0], next(first.layers[0].parameters()))
    statistics = [part.norm.running_mean for part in (first.layers[1], second.layers[1], last[0])]
    assert len({tuple(mean.tolist()) for mean in statistics}) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [({"share_top": -1}, "give a number of layers, or 0"), ({"share_top": True}, "give a number of layers, or 0"),
     ({"share_top": 1, "head": "solo"}, "the shared layers are the head; leave one of them out"),
     ({"head": "segprop(layers=0)"}, "must be a whole number of at least 1"),
     ({"share_top": 5}, "has 4 layers between its first layer and its output layer; share fewer")],
)  # fmt: skip
def test_mistakes_are_said(options, said):
    x = batches(1)[0][0]
    with pytest.raises(UsageError) as caught:
        stretto.Trainer(language_model(False), token_loss, OPTIMIZERS["sgd"], method("greedy", **options), example=x)
    assert said in str(caught.value)


def test_replicas_that_differ_cannot_share():
    x = batches(1)[0][0]
    with pytest.raises(UsageError, match=r"the weights of stage 2, which local-sgd.* use sync='all-reduce'"):
        stretto.Trainer(
            language_model(True), token_loss, OPTIMIZERS["sgd"], "greedy(share_top=1)", example=x,
            mesh=stretto.Mesh(data=2), sync=stretto.LocalSGD(every=2),
        )  # fmt: skip


@pytest.mark.parametrize("same_as", [{"recompute": True}, {"replicas": 2}])
def test_recomputation_and_replicas_change_nothing(same_as):
    found, data = [], batches(6)
    for changes in ({}, same_as):
        chosen = method("greedy(share_top=2)", recompute=changes.get("recompute", False))
        mesh = stretto.Mesh(data=changes.get("replicas", 1))
        trainer = stretto.Trainer(
            language_model(True), token_loss, OPTIMIZERS["sgd"], chosen, example=data[0][0], mesh=mesh, workers=1
        )
        for x, y in data:
            trainer.step(torch.cat([x, x]), torch.cat([y, y]))
        trainer.flush()
        found.append(trainer.gather())
    assert all((found[0][key] - value).abs().max() < 1e-12 for key, value in found[1].items())
    assert "recompute" not in same_as or same(*found)


def test_nothing_shared_is_the_plain_method():
    assert str(method("chunked(chunks=3, share_top=0)").head) == "auto"
    assert method("greedy(share_top=2)").head == "segprop(layers=2)"
    assert method(str(method("overlapping(delay=1, share_top=2)"))).head == "segprop(layers=2)"
