"""Law 2, on one process: numbers depend on the seed and the batches, not on placement or on who else draws."""

from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, Row, assert_equal, features, labels
from pairwise import in_turn, thinned

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
METHODS = [
    "backprop", "greedy", "overlapping", "overlapping(combine=mean)", "overlapping(delay=1)", "chunked",
    "chunked(chunks=3)", "chunked(chunks=4)",
]  # fmt: skip


def drawing_stages(count=5):
    """Stages that draw in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Row([nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()]) for _ in range(count - 1)]
        return [stage.double() for stage in (*blocks, Row([nn.Dropout(0.2), nn.Linear(6, 4)]))]


def batches(count=6):
    g = torch.Generator().manual_seed(2)
    return [(features(g, 6, 6), labels(g)) for _ in range(count)]


def train(stages, method, data, loss=cross_entropy, **options):
    trainer = stretto.Trainer(stages, loss, SGD, method, example=data[0][0], **options)
    losses = [trainer.step(x, y) for x, y in data]
    return trainer, [*losses, *trainer.flush()]


def assert_same(first, second):
    assert first[1] == second[1]
    assert_equal([*first[0].stages, *first[0].heads], [*second[0].stages, *second[0].heads])


@cache
def on_one_worker(method):
    return train(drawing_stages(), method, batches(), workers=1)


OTHERS = [
    "overlapping(combine=mean)", "chunked(chunks=3)", "chunked(chunks=4)",
    "chunked(chunks=3, inside=zb-h1(microbatches=2))", "chunked(inside=pb)",
]  # fmt: skip
ONCE = [method for method in METHODS if method not in OTHERS]


@pytest.mark.parametrize(
    ("method", "workers"),
    [*in_turn(ONCE, [3, 5, 2, 4], rounds=4, slow=3), *in_turn(OTHERS, [3, 5, 2, 4], rounds=4, slow=4)],
)
def test_placement_changes_no_bit(method, workers):
    assert_same(train(drawing_stages(), method, batches(), workers=workers), on_one_worker(method))


@pytest.mark.parametrize(("method", "name"), thinned(in_turn(METHODS, ["transformer", "cnn"], rounds=2), 5, first=1))
def test_placement_changes_no_bit_of_larger_networks(name, method):
    network = NETWORKS[name]
    first, *others = (
        train(network.stages(4), method, network.batches(4), network.loss, workers=workers) for workers in (1, 2, 3, 4)
    )
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("method", thinned(METHODS, 2))
def test_the_same_seed_gives_the_same_bits_whoever_else_draws(method):
    first = train(drawing_stages(), method, batches(), seed=3)
    torch.manual_seed(99)
    assert_same(train(drawing_stages(), method, batches(), seed=3), first)
    other, losses = train(drawing_stages(), method, batches(), seed=4)
    assert losses != first[1]
    assert not any(
        torch.equal(a.weight, b.weight)
        for a, b in ((p[0], q[0]) for p, q in zip(
            [s.blocks for s in other.stages[:-1]], [s.blocks for s in first[0].stages[:-1]], strict=True))
    )  # fmt: skip


@pytest.mark.parametrize("method", thinned(METHODS, 2, first=1))
def test_the_global_generator_is_left_alone(method):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    stages = [lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), *drawing_stages()[1:]]
    stages[0] = lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    data = batches()
    trainer, _ = train(stages, method, data)
    trainer.evaluate(data)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_is_left_alone_by_a_step_that_fails():
    trainer = stretto.Trainer(drawing_stages(), cross_entropy, SGD, "backprop")
    before = torch.get_rng_state()
    with pytest.raises(stretto.UsageError, match="cannot take what it is given"):
        trainer.step(torch.zeros(6, 5, dtype=torch.float64), labels(torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


class Recorder(nn.Module):
    """Keeps what it drew."""

    def __init__(self):
        super().__init__()
        self.drawn = []
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x):
        if self.training:
            self.drawn.append(torch.rand(3))
        return self.linear(x)


@pytest.mark.parametrize("method", thinned(METHODS, 2, first=1))
def test_what_a_stage_draws_depends_on_the_stage_and_the_micro_batch_only(method):
    stages = [Recorder() for _ in range(4)]
    train(stages, method, batches(3))
    plain = [Recorder() for _ in range(4)]
    train(plain, "backprop", batches(3), workers=1)
    draws = [tuple(draw.tolist()) for stage in stages for draw in stage.drawn]
    assert draws == [tuple(draw.tolist()) for stage in plain for draw in stage.drawn]
    assert len(set(draws)) == 4 * 3


def test_stages_given_as_functions_depend_on_the_seed_and_their_place_only():
    def built(recipes, seed=0):
        return stretto.Trainer(recipes, cross_entropy, SGD, "backprop", seed=seed).stages

    linear = partial(nn.Linear, 6, 6)
    many = built([linear, linear, linear])
    assert_equal(built([nn.Identity(), linear, linear])[1:], many[1:])
    assert_equal(built([lambda: nn.Sequential(*[linear() for _ in range(5)]), linear, linear])[1:], many[1:])
    assert not torch.equal(many[0].weight, many[1].weight)
    assert not torch.equal(built([linear], seed=1)[0].weight, many[0].weight)


def test_heads_depend_on_the_seed_and_their_place_only():
    def heads(method, seed=0):
        return stretto.Trainer(drawing_stages(), cross_entropy, SGD, method, example=batches()[0][0], seed=seed).heads

    greedy, overlapping, chunked = heads("greedy"), heads("overlapping"), heads("chunked(chunks=2)")
    assert overlapping[0] is None
    assert_equal(overlapping[1:], greedy[1:])
    assert_equal([chunked[2]], [greedy[2]])
    assert not torch.equal(greedy[0].weight, greedy[1].weight)
    assert not torch.equal(heads("greedy", seed=1)[0].weight, greedy[0].weight)
