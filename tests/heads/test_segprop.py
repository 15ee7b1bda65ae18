"""Shared last layers (SegProp): every block's loss trains them, in versions as old as is said, and nobody waits."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import stretto
from laws.networks import token_loss
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
    stages = [
        nn.Sequential(first, Block()), nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Sequential(unembedding))
    ]  # fmt: skip
    return [stage.double() for stage in stages]


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
        """The weight as a stage sees it for minibatch m, in its own layers or in its head; one leaf for all its uses."""
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
