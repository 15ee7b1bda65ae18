"""Replicas of a pipeline: what they come to, against one device and against loops that share no code with Stretto."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from pairwise import in_turn, slow_where, thinned
from stretto import ScheduleError, UsageError
from stretto.schedule import Action, check
from stretto.schedule.added_actions import with_agreement
from stretto.schedule.library.one_f_one_b import one_f_one_b

METHODS = [
    "backprop", "1f1b(microbatches=3)", "zb-h1", "interleaved", "greedy", "overlapping", "chunked", "pb",
    "pb-lwp-sc", "pipedream", "pipedream-2bw", "paci(every=2)", "pipemare(warmup=3)", "gpipe(recompute=True)",
]  # fmt: skip


def network():
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return [stage.double() for stage in (*hidden, nn.Linear(8, 4))]


def batches(number, size=13):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator).double(), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]


def build(method, data=1, stages=None, **options):
    return stretto.Trainer(
        stages or network(),
        nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        method,
        mesh=stretto.Mesh(data=data),
        **options,
    )


def train(method, data=1, steps=6, **options):
    trainer = build(method, data, **options)
    given = batches(steps)
    losses = [trainer.step(x, y) for x, y in given]
    return [*losses, *trainer.flush()], trainer.gather(), trainer.evaluate(given)


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)


REPEATED = ("interleaved", "chunked", "gpipe(recompute=True)", "pipemare(warmup=3)", "pipedream")


@pytest.mark.parametrize(
    ("method", "data"),
    [
        pytest.param(method, (3, 2)[i % 2], marks=[pytest.mark.slow] * (method in REPEATED))
        for i, method in enumerate(METHODS)
    ],
)
def test_replicas_that_add_up_gradients_are_one_device(method, data):
    """13 examples: neither replicas nor micro-batches are of the same size."""
    losses, weights, evaluated = train(method)
    many = train(method, data)
    assert many[0] == pytest.approx(losses, abs=1e-12)
    assert distance(many[1], weights) < 1e-12
    assert many[2] == pytest.approx(evaluated, abs=1e-12)


@pytest.mark.parametrize("method", ["1f1b", "pb"])
def test_clipping_is_of_the_sum(method):
    assert distance(train(method, 2, clip=0.05)[1], train(method, clip=0.05)[1]) < 1e-12


@pytest.mark.parametrize("method", ["1f1b", "pb"])
def test_tied_weights(method):
    def parts():
        torch.manual_seed(5)
        embedding, out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        out.weight = embedding.weight
        return [part.double() for part in (embedding, nn.Linear(8, 8), out)]

    words = torch.randint(11, (5, 13), generator=torch.Generator().manual_seed(2))
    trainers = [build(method, data, parts()) for data in (1, 3)]
    for trainer, x in itertools.product(trainers, words):
        trainer.step(x, x.roll(1))
    for trainer in trainers:
        trainer.flush()
    assert distance(*(trainer.gather() for trainer in trainers)) < 1e-12


def test_a_parameter_that_a_replica_does_not_use_counts_as_zero_there():
    """One replica sees only rows on which a branch is not taken; nobody takes the third one."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.positive, self.never = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return self.always(x) + (self.positive(x) * (x > 0) if (x > 0).any() else 0)

    x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]], dtype=torch.float64)
    torch.manual_seed(0)
    module = Branches().double()
    weights = []
    for data in (1, 2):
        trainer = stretto.Trainer(
            [copy.deepcopy(module)], nn.functional.mse_loss,
            lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5), mesh=stretto.Mesh(data=data),
        )  # fmt: skip
        trainer.step(x, x)
        weights.append(trainer.gather())
    assert distance(*weights) < 1e-15
    assert torch.equal(weights[1]["0.never.weight"], module.never.weight)  # not even decayed


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
def test_compressed_gradients_are_near(hook):
    assert 0 < distance(train("1f1b", 2, sync=f"all-reduce(hook={hook})")[1], train("1f1b")[1]) < 2e-2


# -- local updates ----------------------------------------------------------------------------------------------------


def linear(steps=12, rows=8, features=5):
    """A linear regression: x [steps, rows, features], y [steps, rows, 1], the first weights [features, 1]."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(steps, rows, features)), rng.normal(size=(steps, rows, 1)), rng.normal(size=(features, 1))


def reference(every, replicas, outer_lr=1.0, outer_momentum=0.0, lr=0.05, momentum=0.9, start=0):
    """Algorithm 1 of DiLoCo with SGD inside, in numpy; with the defaults it is local SGD.

    The first `start` steps are made with the mean of the replicas' gradients.
    """
    xs, ys, first = linear()
    outer, outer_velocity = first.copy(), np.zeros_like(first)
    own = [first.copy() for _ in range(replicas)]
    velocity = [np.zeros_like(first) for _ in range(replicas)]
    for n, (x, y) in enumerate(zip(xs, ys, strict=True), start=1):
        parts = enumerate(zip(np.array_split(x, replicas), np.array_split(y, replicas), strict=True))
        gradients = [2 * xr.T @ (xr @ own[r] - yr) / len(xr) for r, (xr, yr) in parts]
        if n <= start:
            gradients = [sum(gradients) / replicas] * replicas
        for r, gradient in enumerate(gradients):
            velocity[r] = momentum * velocity[r] + gradient
            own[r] = own[r] - lr * velocity[r]
        if n <= start:
            outer = own[0].copy()
        elif (n - start) % every == 0 or n == len(xs):
            gradient = outer - sum(own) / replicas
            outer_velocity = outer_momentum * outer_velocity + gradient
            outer = outer - outer_lr * (gradient + outer_momentum * outer_velocity)
            own = [outer.copy() for _ in own]
    return outer


def regress(sync, replicas, momentum=0.9):
    xs, ys, start = linear()
    module = nn.Linear(len(start), 1, bias=False).double()
    module.weight.data.copy_(torch.from_numpy(start.T))
    trainer = stretto.Trainer(
        [module], nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.05, momentum=momentum),
        mesh=stretto.Mesh(data=replicas), sync=sync,
    )  # fmt: skip
    for x, y in zip(xs, ys, strict=True):
        trainer.step(torch.from_numpy(x), torch.from_numpy(y))
    trainer.flush()
    return trainer.gather()["0.weight"].numpy().T


@pytest.mark.parametrize(("every", "replicas"), in_turn([1, 3, 5], [2, 4, 1], rounds=3, slow=2))
def test_local_sgd_is_its_definition(every, replicas):
    assert regress(stretto.LocalSGD(every=every), replicas) == pytest.approx(reference(every, replicas), abs=1e-12)


@pytest.mark.parametrize(("every", "start"), [(3, 0), (3, 5), (4, 1), (2, 20)])
def test_post_local_sgd_is_its_definition(every, start):
    """It ends in the middle of a round, or (20 of 12 steps) before the first."""
    got = regress(stretto.LocalSGD(every=every, start=start), 4)
    assert got == pytest.approx(reference(every, 4, start=start), abs=1e-12)


@pytest.mark.parametrize("method", slow_where(lambda method: method != "pb", ["1f1b", "pb", "greedy"]))
def test_post_local_sgd_that_never_starts_is_all_reduce(method):
    one, other = (train(method, 2, steps=4, sync=each) for each in ("local-sgd(start=9)", "all-reduce"))
    runs = [build(method, 2, sync=each, clip=0.1) for each in ("local-sgd(start=9)", "all-reduce")]
    for trainer in runs:
        for x, y in batches(4, size=12 * trainer.schedule.per_turn):
            trainer.step(x, y)
        trainer.flush()
    assert distance(*(trainer.gather() for trainer in runs)) < 1e-12
    assert distance(one[1], other[1]) > 1e-6  # 13 examples: a mean of means


@pytest.mark.parametrize(("every", "replicas"), in_turn([2, 5], [2, 4, 1], rounds=3, slow=2))
def test_diloco_is_its_definition(every, replicas):
    got = regress(stretto.DiLoCo(every=every, outer_lr=0.7, outer_momentum=0.9), replicas)
    assert got == pytest.approx(reference(every, replicas, 0.7, 0.9), abs=1e-12)


def test_local_sgd_after_each_update_is_all_reduce():
    """Plain SGD is linear in the gradient: the mean of the weights is the step along the mean gradient."""
    one, other = (regress(sync, 4, momentum=0) for sync in ("local-sgd(every=1)", "all-reduce"))
    assert one == pytest.approx(other, abs=1e-14)


def test_diloco_whose_outer_step_is_whole_is_local_sgd():
    whole = stretto.DiLoCo(every=3, outer_lr=1, outer_momentum=0)
    assert regress(whole, 4) == pytest.approx(regress(stretto.LocalSGD(every=3), 4), abs=1e-14)


MERGING = ["local-sgd(every=2)", "diloco(every=3,outer_lr=1,outer_momentum=0)"]


@pytest.mark.parametrize(
    ("method", "sync"),
    thinned(in_turn(["pb", "pipedream", "pipedream-2bw", "pb-lwp-sc", "pipemare", "greedy"], MERGING), 3),
)
def test_merging_weights_that_are_the_same_changes_nothing(method, sync):
    """Replicas get the same examples; gradients are in flight while they merge."""
    trainers = [build(method), build(method, 2, sync=sync)]

    def twice(value):  # both halves of each micro-batch are the same
        return torch.cat([torch.cat([part, part]) for part in value.tensor_split(trainers[0].schedule.per_turn)])

    for x, y in batches(8, size=12):
        trainers[0].step(x, y)
        trainers[1].step(twice(x), twice(y))
    losses = [trainer.flush() for trainer in trainers]
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert distance(*(trainer.gather() for trainer in trainers)) < 1e-12


def test_replicas_differ_between_two_meetings_and_agree_after_a_flush():
    trainer = build("pb", 2, sync="local-sgd(every=4)")
    replicas = [[stage.module for stage in each.values()] for each in trainer._replicas]

    def same(stage):
        pairs = zip(*(modules[stage].parameters() for modules in replicas), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    seen = []
    for x, y in batches(10):
        trainer.step(x, y)
        seen.append(same(3))  # the last stage's updates are not late
    assert seen == [n % 4 == 0 for n in range(1, 11)]
    trainer.flush()
    assert all(same(stage) for stage in range(4))


# -- order and refusals -----------------------------------------------------------------------------------------------


def test_the_picture():
    """1 .0a1bAU / 0 01.a.bAU, idle time left out; merging comes after the update."""
    letters = {"F": "01", "B": "ab"}

    def rows(kind):
        body = with_agreement(one_f_one_b(2, 2, 2), kind).body
        return ["".join(letters.get(a.kind, " " + a.kind)[a.microbatch] for a in actions) for actions in body]

    assert rows("A") == ["01abAU", "0a1bAU"]
    assert rows("M") == ["01abUM", "0a1bUM"]
    assert rows("AM") == ["01abAUM", "0a1bAUM"]


def test_norms_are_told_once_gradients_are_added_up():
    schedule, rules = stretto.method("1f1b").plan(2, reduce=True, agreement="A")
    assert "".join(action.kind for action in schedule.body[0] if action.kind in "ARU") == "ARU"
    assert [edge.source for edge in rules.needs(Action("R", 0, 3))] == [Action("A", 0, 3)]


def test_a_schedule_without_its_meeting_is_refused():
    schedule, rules = stretto.method("1f1b(microbatches=1)").plan(3, agreement="M")
    body = tuple(tuple(action for action in body if action != Action("M", 2, 0)) for body in schedule.body)
    with pytest.raises(ScheduleError, match="2M0 is missing from worker 2"):
        check(type(schedule)(body), rules)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sync": "all-reduce(hook=bf17)"}, "unknown hook 'bf17': did you mean 'bf16'"),
        ({"sync": "all-reduce(algorithm=rings)"}, "unknown algorithm 'rings': did you mean 'ring'"),
        ({"sync": "all-reduce(hook=bf16,algorithm=ring)"}, "leave algorithm= out"),
        ({"sync": "allreduce"}, "unknown sync 'allreduce': did you mean 'all-reduce'"),
        ({"sync": "local-sgd(evry=2)"}, "no option 'evry': did you mean 'every'"),
        ({"sync": "fully-shard(reshard=2)"}, "fully-shard: reshard=2: choose True or False"),
        ({"sync": "fully-shard(min_block=-1)"}, "fully-shard: min_block=-1: choose a whole number of at least 0"),
        ({"sync": "local-sgd(start=-1)"}, "local-sgd: start=-1: choose a whole number of at least 0"),
        ({"sync": "local-sgd(every=0)"}, "local-sgd: every=0: choose a whole number of at least 1"),
        ({"sync": "diloco(outer_momentum=1)"}, "outer_momentum=1: choose from 0 up to"),
        ({"sync": "diloco(outer_lr=0)"}, "outer_lr=0: choose a positive number"),
        ({"sync": 3}, "sync=3: give a name"),
        ({"mesh": (2, 1)}, r"mesh=\(2, 1\): give stretto.Mesh"),
        ({"mesh": stretto.Mesh(data=2, tensor=2), "sync": "fully-shard"}, r"shared out among replicas"),
        ({"mesh": stretto.Mesh(data=2, space=(2, 1)), "sync": "parameter-server"}, r"must update together"),
        ({"mesh": stretto.Mesh(data=2), "sync": "all-reduce(hook=powersgd)"}, "not emulated: start processes"),
    ],
)
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        stretto.Trainer(
            [nn.Linear(2, 2)], nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.1), **arguments
        )


def test_too_few_examples_are_refused():
    trainer = build("1f1b(microbatches=3)", 2)
    (x, y), *_ = batches(1, size=5)
    with pytest.raises(UsageError, match="5 examples cannot be cut into 3 micro-batches for each of 2 replicas"):
        trainer.step(x, y)


def test_tied_weights_that_would_not_be_merged_are_refused():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    with pytest.raises(UsageError, match=r"stages 0 and 1 share 'weight'.*local-sgd"):
        build("1f1b", 2, [one, other], sync="local-sgd")


def test_sparse_gradients_are_refused_and_training_can_go_on():
    embedding = nn.Embedding(5, 2, sparse=True)
    trainer = stretto.Trainer(
        [embedding], lambda out, y: (out * y).mean(), lambda params: torch.optim.SGD(params, lr=0.1),
        mesh=stretto.Mesh(data=2),
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"sparse gradient \(5, 2\)"):
        trainer.step(torch.arange(4), torch.ones(4, 2))
    embedding.sparse = False
    with pytest.raises(UsageError, match="sparse"):  # the other replica is a copy
        trainer.step(torch.arange(4), torch.ones(4, 2))
