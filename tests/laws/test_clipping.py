"""Clipping by the global norm: exact where training is synchronous, within the limit where it is not."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, assert_equal, run
from pairwise import each_once, in_turn, pairwise

LIMIT = 0.05
SYNCHRONOUS = ["backprop", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "gpipe(microbatches=3)"]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_clipped(stages, loss, batches):
    """Plain PyTorch; and how often the limit was passed."""
    model = nn.ModuleList(copy.deepcopy(list(stages))).train()
    optimizer, passed = sgd(list(model.parameters())), 0
    for x, y in batches:
        optimizer.zero_grad()
        loss(run(model, x), y).backward()
        passed += bool(nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT)
        optimizer.step()
    return model, passed


@pytest.mark.parametrize(("method", "workers"), in_turn(SYNCHRONOUS, [None, 2], rounds=2, slow=1))
def test_synchronous_methods_clip_as_plain_pytorch(method, workers):
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(8)
    expected, passed = train_clipped(stages, network.loss, batches)
    assert passed == 8
    trainer = stretto.Trainer(stages, network.loss, sgd, method, clip=LIMIT, workers=workers)
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected, 0.0 if method == "backprop" else 1e-12)


class Uses(nn.Module):
    """Adds up the products with weights that belong to others, too."""

    def __init__(self, *weights, of=1.0):
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.of = of

    def forward(self, x):
        return sum(x @ weight.T for weight in self.weights) * self.of


class Sometimes(nn.Module):
    """Trains only one of two layers on a micro-batch: which one depends on its first example."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return (self.one if x.flatten()[0] > 0 else self.other)(x).tanh()


def hidden():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def tied_end():
    """The last stage has no weights of its own."""
    stages = [hidden(), hidden(), hidden()]
    return [*stages, Uses(stages[0][0].weight)]


def several_ties():
    """Two weights, one on three stages, one on two."""
    first, second = hidden(), hidden()
    third = nn.Sequential(Uses(first[0].weight, of=0.5), nn.LayerNorm(8))
    return [first, second, third, Uses(first[0].weight, second[0].weight)]


def no_weights_at_the_end():
    return [hidden(), hidden(), hidden(), nn.Tanh()]


def frozen_weights():
    stages = [hidden(), hidden(), hidden(), nn.Linear(8, 8)]
    for frozen in (stages[1][0].bias, *stages[3].parameters()):
        frozen.requires_grad_(False)
    return stages


def weights_used_now_and_then():
    return [hidden(), Sometimes(), Sometimes(), nn.Linear(8, 8)]


ENDS = [tied_end, several_ties, no_weights_at_the_end, frozen_weights, weights_used_now_and_then]


def small(kind, count=6):
    """Stages, and batches of nine, at least one of them 'now and then' on both layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stages = [stage.double() for stage in kind()]
        return stages, [(torch.randn(9, 8, dtype=torch.float64), torch.randint(8, (9,))) for _ in range(count)]


def in_parts(stages, batches, parts):
    """Plain PyTorch, the gradients of each minibatch in so many parts; each part's mean has its share of examples."""
    model = nn.ModuleList(copy.deepcopy(list(stages))).train()
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for x, y in batches:
        optimizer.zero_grad()
        for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            (cross_entropy(run(model, xs), ys) * (len(xs) / len(x))).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT
        optimizer.step()
    return model


@pytest.mark.parametrize(("method", "kind", "workers"), each_once(pairwise(SYNCHRONOUS, ENDS, (None, 2))))
def test_whatever_the_stages_hold(method, kind, workers):
    """Tied and frozen weights, stages without any, weights without a gradient in some micro-batches: in float64."""
    stages, batches = small(kind)
    trainer = stretto.Trainer(copy.deepcopy(stages), cross_entropy, sgd, method, clip=LIMIT, workers=workers)
    expected = in_parts(stages, batches, trainer.schedule.per_turn)
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected, 1e-12)


@pytest.mark.parametrize("kind", ENDS)
def test_with_replicas_too(kind):
    """Each replica has one of three micro-batches, of three examples each."""
    sync = "all-reduce" if kind in (tied_end, several_ties) else "fully-shard"
    stages, batches = small(kind)
    expected = in_parts(stages, batches, 3)
    trainer = stretto.Trainer(
        stages, cross_entropy, sgd, "1f1b(microbatches=1)", clip=LIMIT, mesh=stretto.Mesh(data=3), sync=sync
    )
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected, 1e-12)


@pytest.mark.parametrize("kind", [tied_end, several_ties])
def test_masters_add_up_the_gradients_of_ties(kind):
    """bfloat16 gradients of each use and micro-batch are added up in float32 and clipped there: one step, to 1e-6."""
    stages, ((x, y),) = small(kind, 1)
    parameters, parts, masters = list(nn.ModuleList(stages).parameters()), 7, []

    def optimizer(given):
        masters.extend(given)  # of one stage after the other
        return torch.optim.SGD(given, lr=1.0)

    trainer = stretto.Trainer(
        [stage.float() for stage in copy.deepcopy(stages)], cross_entropy, optimizer, f"gpipe(microbatches={parts})",
        clip=LIMIT, precision="bf16",
    )  # fmt: skip
    low = [copy.deepcopy(stage).bfloat16() for stage in stages]  # one after the other: each use has its own gradient
    uses = [
        [
            use
            for stage, apart in zip(stages, low, strict=True)
            for own, use in zip(stage.parameters(), apart.parameters(), strict=True)
            if own is parameter
        ]
        for parameter in parameters
    ]
    sums = [torch.zeros(parameter.shape) for parameter in parameters]
    for xs, ys in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        gradients = [use.grad for each in uses for use in each]
        assert gradients == [None] * len(gradients)
        (cross_entropy(run(low, xs.bfloat16()).float(), ys) * (len(xs) / len(x))).backward()
        for total, each in zip(sums, uses, strict=True):
            for use in each:
                total += use.grad.float()
                use.grad = None
    norm = math.sqrt(sum(float(total.double().square().sum()) for total in sums))
    assert norm > LIMIT
    trainer.step(x.float(), y)
    for master, start, total in zip(masters, parameters, sums, strict=True):
        torch.testing.assert_close(master.detach(), start.float() - total * (LIMIT / norm), rtol=0, atol=1e-6)


def test_a_head_that_uses_its_stages_own_weights_counts_them_once():
    """And shrinks them once: a first update moves each stage by LIMIT / sqrt(S), all of it used."""
    stages, (batch,) = small(lambda: [hidden(), hidden(), nn.Linear(8, 8)], 1)
    heads = [nn.Sequential(nn.Linear(8, 8), Uses(stages[0][0].weight)).double(), Uses(stages[1][0].weight), None]
    parts = [
        [*stage.parameters(), *(head.parameters() if head else ())] for stage, head in zip(stages, heads, strict=True)
    ]
    before = [[p.detach().clone() for p in dict.fromkeys(part)] for part in parts]
    trainer = stretto.Trainer(
        stages, cross_entropy, partial(torch.optim.SGD, lr=1.0), "greedy", heads=heads, clip=LIMIT
    )
    trainer.step(*batch)
    trainer.flush()
    for part, old in zip(parts, before, strict=True):
        squares = [(p - q).detach().square().sum() for p, q in zip(dict.fromkeys(part), old, strict=True)]
        assert math.sqrt(sum(squares)) == pytest.approx(LIMIT / math.sqrt(3), rel=1e-4)


def test_the_phases_of_an_asynchronous_method_clip_as_plain_pytorch():
    network = NETWORKS["mlp"]
    stages, batches = network.stages(4), network.batches(8)
    expected, _ = train_clipped(stages, network.loss, batches)
    trainer = stretto.Trainer(stages, network.loss, sgd, "pb(warmup=8)", clip=LIMIT)
    for x, y in batches:
        trainer.step(x, y)
    assert_equal(trainer.stages, expected)


@pytest.mark.parametrize("method", ["pb", "pipedream", "paci(every=2)", "greedy"])
def test_elsewhere_every_stage_keeps_to_its_share(method):
    """A first update moves a stage by its gradient: at most LIMIT / sqrt(S), reached when clipped."""
    network = NETWORKS["mlp"]
    stages, (batch,) = network.stages(4), network.batches(1)
    before = copy.deepcopy(stages)
    trainer = stretto.Trainer(
        stages, network.loss, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), method, clip=LIMIT, example=batch[0]
    )
    trainer.step(*batch)
    trainer.flush()
    for stage, old in zip(stages, before, strict=True):
        moved = math.sqrt(
            sum(
                float((p - q).detach().square().sum())
                for p, q in zip(stage.parameters(), old.parameters(), strict=True)
            )
        )
        assert moved <= LIMIT / 2 * (1 + 1e-6)
        assert method == "greedy" or moved == pytest.approx(LIMIT / 2, rel=1e-4)


def test_a_stage_without_weights_has_nothing_to_tell():
    network = NETWORKS["mlp"]
    stages = [*network.stages(2), nn.Identity()]
    trainer = stretto.Trainer([stages[0], nn.Tanh(), stages[1]], network.loss, sgd, "1f1b(microbatches=2)", clip=LIMIT)
    (batch,) = network.batches(1)
    assert trainer.step(*batch) is not None


@pytest.mark.parametrize("clip", [0, -1.0, True, "1", math.nan])
def test_no_limit_at_all_is_none(clip):
    with pytest.raises(stretto.UsageError, match="clip="):
        stretto.Trainer([nn.Linear(2, 2)], cross_entropy, sgd, clip=clip)
