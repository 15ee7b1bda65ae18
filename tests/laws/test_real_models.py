"""What real models bring along: short micro-batches, dropout, statistics, schedulers, checkpoints, skip connections."""

import copy
import traceback
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import stretto
from laws.networks import NETWORKS, Row, assert_equal, features, labels, run, train_plainly
from pairwise import each_once, in_turn, pairwise, thinned
from stretto.errors import UsageError

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)
SYNCHRONOUS = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v"]
STEPS = 5


def batches(count=STEPS, n=10, width=6):
    g = torch.Generator().manual_seed(1)
    return [(features(g, n, width), labels(g, n)) for _ in range(count)]


def train(stages, method, data, loss=cross_entropy, optimizer=SGD, **options):
    trainer = stretto.Trainer(stages, loss, optimizer, method, **options)
    losses = [trainer.step(x, y) for x, y in data]
    return trainer, [loss for loss in losses if loss is not None] + trainer.flush()


def linear(a, b, *more):
    return Row([nn.Linear(a, b), nn.Tanh(), *more]).double()


# -- micro-batches ----------------------------------------------------------------------------------------------------


CUTS = [(10, 4), (9, 2), (5, 3), (7, 1), (3, 3)]  # examples, and micro-batches


@pytest.mark.parametrize(("name", "method", "cut"), each_once(pairwise(("mlp", "tuples"), SYNCHRONOUS, CUTS)))
def test_uneven_and_few_micro_batches_give_plain_training(name, method, cut):
    """Ten examples in four pieces: two of three, two of two; and fewer pieces than the four stages."""
    examples, pieces = cut
    network, data = NETWORKS[name], batches(n=examples)
    stages = network.stages(4)
    wanted, losses = train_plainly(stages, network.loss, SGD, None, data)
    trainer, found = train(stages, f"{method}(microbatches={pieces})", data, network.loss)
    assert found == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


@pytest.mark.parametrize("method", thinned(SYNCHRONOUS, 3))
def test_the_last_batch_of_an_epoch_is_shorter(method):
    stages = [linear(6, 5), linear(5, 5), linear(5, 5), linear(5, 4)]
    data = [*batches(3, n=8), *batches(1, n=5)]
    wanted, losses = train_plainly(stages, cross_entropy, SGD, None, data)
    trainer, found = train(stages, f"{method}(microbatches=4)", data)
    assert found == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


# -- what a stage draws, and its statistics ---------------------------------------------------------------------------


def drawing():
    torch.manual_seed(0)
    return [linear(6, 6, nn.Dropout(0.4)), linear(6, 6, nn.Dropout(0.2)), linear(6, 6), linear(6, 4)]


@cache
def by_gpipe():
    """A trainer, its losses, and those with another seed."""
    runs = [train(drawing(), "gpipe(microbatches=4)", batches(), seed=seed) for seed in (0, 1)]
    return *runs[0], runs[1][1]


@pytest.mark.parametrize(("method", "workers"), in_turn(SYNCHRONOUS, [2, 4, 1], rounds=3, slow=2))
def test_dropout_is_the_same_under_every_synchronous_schedule(method, workers):
    if method == "zb-v" and workers != 2:
        pytest.skip("a V has two stages a worker")
    first, losses, others = by_gpipe()
    trainer, found = train(drawing(), f"{method}(microbatches=4)", batches(), workers=workers)
    assert found == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, first.stages, tolerance=1e-12)
    assert others != losses


def norms():
    torch.manual_seed(0)
    return [linear(6, 6, nn.BatchNorm1d(6).double()), linear(6, 6, nn.BatchNorm1d(6, momentum=None).double()),
            linear(6, 6), linear(6, 4, nn.BatchNorm1d(4).double())]  # fmt: skip


def train_in_pieces(stages, data, pieces):
    """Plain PyTorch, gradients added up over micro-batches, in order."""
    model = nn.ModuleList(copy.deepcopy(stages)).train()
    optimizer, losses = SGD(model.parameters()), []
    for x, y in data:
        optimizer.zero_grad()
        parts = [cross_entropy(run(model, xs), ys) * (len(xs) / len(x))
                 for xs, ys in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)]  # fmt: skip
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    return model, losses


@pytest.mark.parametrize(("method", "pieces"), in_turn(SYNCHRONOUS, [4, 2, 1], rounds=3, slow=2))
def test_batch_norm_sees_micro_batches_in_order(method, pieces):
    """Each normalises by itself, as plain training in pieces does; running statistics move once for each."""
    stages, data = norms(), batches()
    wanted, losses = train_in_pieces(stages, data, pieces)
    trainer, found = train(stages, f"{method}(microbatches={pieces})", data)
    assert found == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)
    counts = [b for name, b in trainer.model.named_buffers() if "num_batches" in name]
    assert [int(count) for count in counts] == [STEPS * pieces] * 3
    whole, _ = train_in_pieces(stages, data, 1)
    assert pieces == 1 or not torch.equal(whole[0].blocks[0].weight, wanted[0].blocks[0].weight)


# -- schedulers -------------------------------------------------------------------------------------------------------


class Noting(torch.optim.SGD):
    """Keeps the rate of each of its steps."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.rates = []

    def step(self, closure=None):
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


RATED = ["pb", "pb-lwp-sc", "spectrain", "pipemare", "pipedream", "pipedream-2bw", "paci", "greedy",
         "overlapping(delay=1)", "gpipe"]  # fmt: skip


@pytest.mark.parametrize("method", thinned(RATED, 2, first=1))
def test_the_kth_update_of_a_stage_has_the_kth_rate(method):
    """Whenever it happens: a late stage's updates come at other times than an early one's."""
    scheduler = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.1)
    stages = [linear(6, 5), linear(5, 5), linear(5, 4)]
    trainer, _ = train(stages, method, batches(8), optimizer=partial(Noting, lr=0.1, momentum=0.9),
                       scheduler=scheduler, example=batches(1)[0][0])  # fmt: skip
    for stage in trainer._stages.values():
        assert stage.optimizer.rates == pytest.approx([0.1] * 2 + [0.01] * 3 + [0.001] * 3, rel=1e-12)


# -- the user's own checkpoints ---------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes its part in the backward."""

    def __init__(self, part, reentrant):
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


def checkpointed(reentrant):
    first, second, *rest = drawing()
    return [first, Checkpointed(second, reentrant), *rest]


WHOLE = ["backprop", "gpipe", "1f1b", "interleaved", "looped-bfs"]


@pytest.mark.parametrize(("method", "reentrant"), [
    *thinned([(method, False) for method in (*WHOLE, "zb-h1", "zb-v", "greedy", "overlapping")], 2, first=1),
    *thinned([(method, True) for method in WHOLE], 2),
])  # fmt: skip
def test_a_checkpoint_inside_a_stage_changes_nothing(method, reentrant):
    """Dropout included, which it draws again.

    The reentrant kind wants whole backwards and an input with a gradient; torch refuses, and warns, where it is used
    under zb-h1 or greedy.
    """
    example = None if reentrant else batches(1)[0][0]
    plain, losses = train(drawing(), method, batches(), example=example)
    trainer, found = train(checkpointed(reentrant), method, batches(), example=example)
    assert found == losses
    for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


OTHER_WEIGHTS = ["pb", "pb-lwp", "pipemare", "paci", "pb(stash=True)", "pipedream", "pipedream-2bw"]


@pytest.mark.parametrize(("method", "reentrant"), in_turn(OTHER_WEIGHTS, [False, True], rounds=2, slow=1))
def test_a_checkpoint_is_refused_where_it_would_recompute_with_other_weights(method, reentrant):
    with pytest.raises(UsageError, match=r"recomputed in the backward.*take the checkpoint out") as error:
        train(checkpointed(reentrant), method, batches())
    assert "in action 1F0: stage 1, micro-batch 0" in error.value.__notes__
    traceback.clear_frames(error.tb)  # torch 2.11 leaves its hooks on as long as an error in a checkpoint is remembered


# -- skip connections -------------------------------------------------------------------------------------------------


class Down(nn.Module):
    """Adds what it made to what travels: a later stage will want it."""

    def __init__(self, a, b):
        super().__init__()
        self.linear = nn.Linear(a, b).double()

    def forward(self, x, *kept):
        h = self.linear(x).tanh()
        return h, *kept, h


class Up(nn.Module):
    """Takes the newest of what travels."""

    def __init__(self, a, b, last=False):
        super().__init__()
        self.linear, self.last = nn.Linear(a, b).double(), last

    def forward(self, x, *kept):
        h = self.linear(x + kept[-1])
        return h if self.last else (h.tanh(), *kept[:-1])


def u_net():
    torch.manual_seed(0)
    return [Down(6, 5), Down(5, 5), Down(5, 5), Up(5, 5), Up(5, 5), Up(5, 4, last=True)]


@pytest.mark.parametrize("method", ["backprop", *(thinned([f"{name}(microbatches=3)" for name in SYNCHRONOUS], 3))])
def test_skip_connections_over_several_stages(method):
    """A U: stage s hands what it made to stage 5-s, through all between."""
    stages, data = u_net(), batches()
    wanted, losses = train_plainly(stages, cross_entropy, SGD, None, data)
    trainer, found = train(stages, method, data)
    assert found == pytest.approx(losses, rel=1e-12)
    assert_equal(trainer.stages, wanted, tolerance=1e-12)


class TwoWeights(torch.autograd.Function):
    """`x w^T`, whose backward reads another weight."""

    @staticmethod
    def forward(ctx, x, w, other):
        ctx.save_for_backward(x, other)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, other = ctx.saved_tensors
        return g @ other, g.T @ x, None


LATE = [
    ("pb", lambda s: 2 * (5 - s), False), ("pb(stash=True)", lambda s: 2 * (5 - s), True),
    ("paci(every=1)", lambda s: 5 - s, False), ("pipedream", lambda s: 5 - s, True),
]  # fmt: skip


@pytest.mark.parametrize(("method", "delay", "stash"), thinned(LATE, 3))
def test_skip_connections_under_delay(method, delay, stash):
    """The same U by hand: the forward of minibatch n sees the weights after n - D updates, its backward today's."""
    stages, data = u_net(), batches(16)
    versions = [[[p.detach().clone().requires_grad_() for p in stage.parameters()]] for stage in stages]
    optimizers = [SGD([p.clone().detach().requires_grad_() for p in each[0]]) for each in versions]
    losses = []
    for n, (x, y) in enumerate(data):
        seen = [each[max(0, n - delay(s))] for s, each in enumerate(versions)]
        read = seen if stash else [each[n] for each in versions]
        kept, h = [], x
        for s in range(6):
            h = h if s < 3 else h + kept.pop()
            h = TwoWeights.apply(h, seen[s][0], read[s][0].detach()) + seen[s][1]
            h = h if s == 5 else h.tanh()
            if s < 3:
                kept.append(h)
        loss = cross_entropy(h, y)
        gradients = iter(torch.autograd.grad(loss, [w for pair in seen for w in pair]))
        for each, optimizer in zip(versions, optimizers, strict=True):
            params = optimizer.param_groups[0]["params"]
            for parameter in params:
                parameter.grad = next(gradients)
            optimizer.step()
            each.append([p.detach().clone().requires_grad_() for p in params])
        losses.append(loss.item())
    trainer, found = train(stages, method, data)
    assert found == pytest.approx(losses, rel=1e-10)
    for stage, each in zip(trainer.stages, versions, strict=True):
        for parameter, wanted in zip(stage.parameters(), each[-1], strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-10, atol=1e-12)
