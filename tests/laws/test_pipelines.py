"""The core carries pipelines: custom methods against references that keep every version of the weights."""

import copy
from functools import partial

import pytest
import torch
from torch.func import functional_call

import stretto
from laws.networks import NETWORKS, assert_equal, stepped_together, train_plainly
from laws.pipelines import async_1f1b, gpipe, one_f_one_b, pb_clock
from pairwise import in_turn, pairwise, thinned
from stretto.schedule import Reach

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
STEPS = 9


def pipeline(schedule, **options):
    options = {"weights": "current", "synchronous": False, **options}
    return stretto.Method(
        name="pipeline", summary="", reach=lambda S: Reach((*[None] * (S - 1), S - 1)),
        schedule=lambda S, workers: schedule(S), **options,
    )  # fmt: skip


class Versions:
    """Backprop where stage s sees its weights of `delays[s]` updates ago, or of the last flush."""

    def __init__(self, stages, loss, delays):
        self.stages, self.loss, self.delays = copy.deepcopy(list(stages)), loss, delays
        self.optimizers = [SGD(list(stage.parameters())) for stage in self.stages]
        self.history = [[self.weights(stage)] for stage in self.stages]
        self.entered = self.since = 0

    def weights(self, stage):
        return {name: p.detach().clone().requires_grad_() for name, p in stage.named_parameters()}

    def step(self, x, y):
        values, used = (x,), []
        for stage, delay, versions in zip(self.stages, self.delays, self.history, strict=True):
            used.append(versions[max(self.entered - delay, self.since)])
            values = functional_call(stage, used[-1], values)
            values = values if isinstance(values, tuple) else (values,)
        value = self.loss(values[0], y)
        gradients = iter(torch.autograd.grad(value, [leaf for version in used for leaf in version.values()]))
        for stage, optimizer, versions in zip(self.stages, self.optimizers, self.history, strict=True):
            for parameter in stage.parameters():
                parameter.grad = next(gradients)
            optimizer.step()
            versions.append(self.weights(stage))
        self.entered += 1
        return value.item()

    def flush(self):
        self.since = self.entered


CLOCKS = {"pb": (pb_clock, lambda S, s: 2 * (S - 1 - s)), "async-1f1b": (async_1f1b, lambda S, s: S - 1 - s)}


CASES = [(*case, clock) for case in pairwise(NETWORKS, (4, 2, 1), (4, None, 0)) for clock in CLOCKS]


@pytest.mark.parametrize(("name", "num_stages", "flush_after", "clock"), thinned(CASES, 5, first=2))
def test_asynchronous_pipelines_with_a_stash(name, num_stages, flush_after, clock):
    schedule, delay = CLOCKS[clock]
    network = NETWORKS[name]
    batches = network.batches(STEPS)
    trainer = stretto.Trainer(network.stages(num_stages), network.loss, SGD, pipeline(schedule, weights="stash"))
    reference = Versions(trainer.stages, network.loss, [delay(num_stages, s) for s in range(num_stages)])
    losses, returned = stepped_together(reference, trainer, batches, flush_after)
    rest = trainer.flush()
    assert_equal(trainer.stages, reference.stages, tolerance=1e-12)
    assert [v for v in returned if v is not None] + rest == pytest.approx(losses, rel=1e-12)


def test_without_a_stash_a_delayed_backward_is_refused_not_wrong():
    network = NETWORKS["mlp"]
    trainer = stretto.Trainer(network.stages(3), network.loss, SGD, pipeline(pb_clock))
    first, second, third, fourth = network.batches(4)
    for x, y in (first, second, third):
        trainer.step(x, y)
    with pytest.raises(stretto.UsageError, match="modified by an inplace operation") as error:
        trainer.step(*fourth)
    assert "in action 1B1: stage 1, micro-batch 1" in error.value.__notes__


PIECES = [(name, microbatches, schedule) for name in ("mlp", "tuples") for microbatches in (4, 1, 3, 5)
          for schedule in (gpipe, one_f_one_b)]  # fmt: skip


@pytest.mark.parametrize(("name", "microbatches", "schedule"), thinned(PIECES, 5))
def test_a_minibatch_in_pieces_gives_the_gradient_of_the_whole(name, microbatches, schedule):
    """Six examples in four pieces: two of two, two of one."""
    network = NETWORKS[name]
    stages, batches = network.stages(3), network.batches(STEPS)
    wanted, losses = train_plainly(stages, network.loss, SGD, None, batches)
    method = pipeline(lambda S: schedule(S, microbatches), synchronous=True)
    trainer = stretto.Trainer(stages, network.loss, SGD, method)
    assert [trainer.step(x, y) for x, y in batches] == pytest.approx(losses, rel=1e-12)
    assert trainer.flush() == []
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


@pytest.mark.parametrize(("ahead", "workers"), in_turn([1, 2, 9], [4, 2], rounds=2, slow=1))
def test_forwards_that_run_ahead_change_no_bit_of_1f1b(workers, ahead):
    """Each stage runs its backwards in the same order, so that gradients are summed in it."""
    network = NETWORKS["mlp"]
    trainers = [
        stretto.Trainer(network.stages(4), network.loss, SGD, f"1f1b(microbatches=4{more})", workers=workers)
        for more in ("", f", ahead={ahead}")
    ]
    batches = network.batches(STEPS)
    plain, running_ahead = ([trainer.step(x, y) for x, y in batches] for trainer in trainers)
    assert plain == running_ahead
    assert_equal(trainers[0].stages, trainers[1].stages)
    wanted, losses = train_plainly(network.stages(4), network.loss, SGD, None, batches)
    assert plain == pytest.approx(losses, rel=1e-12)
    assert_equal(trainers[1].stages, wanted, tolerance=1e-12)


def test_fewer_examples_than_micro_batches_are_refused():
    network = NETWORKS["mlp"]
    trainer = stretto.Trainer(network.stages(2), network.loss, SGD, pipeline(lambda S: gpipe(S, 7), synchronous=True))
    with pytest.raises(stretto.UsageError, match="6 examples cannot be cut into 7 micro-batches"):
        trainer.step(*network.batches(1)[0])
