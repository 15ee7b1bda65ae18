"""A parameter server, emulated: plain training for one replica, and the sums by hand for a given order of several."""

import random

import pytest
import torch
from torch import nn

import stretto
from pairwise import in_turn, thinned
from stretto.errors import UsageError
from stretto.replicas import Order

WIDTH = 4


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def network(stages=2, width=WIDTH):
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages - 1)]
    return [each.double() for each in (*hidden, nn.Linear(width, 3))]


def batches(number, size=12, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, width, generator=generator).double(), torch.randint(3, (size,), generator=generator))
        for _ in range(number)
    ]


def build(method="backprop", replicas=2, stages=None, *, sync=None, optimizer=sgd, **options):
    return stretto.Trainer(
        network() if stages is None else stages, nn.functional.cross_entropy, optimizer, method,
        mesh=stretto.Mesh(data=replicas), sync=stretto.ParameterServer() if sync is None else sync, **options,
    )  # fmt: skip


def states(trainer):
    return trainer.model.state_dict()


def an_order(replicas, bound, each, seed):
    """Some order of `each` updates a replica that keeps the bound: whoever must be next is, else anybody."""
    draw = random.Random(seed)
    left, taken, order = [each] * replicas, [0] * replicas, []
    while any(left):
        waiting = sorted((r for r in range(replicas) if left[r]), key=lambda r: taken[r])
        urgent = any(len(order) + place - taken[r] >= bound for place, r in enumerate(waiting))
        replica = waiting[0] if urgent else draw.choice(waiting)
        assert len(order) - taken[replica] <= bound
        left[replica] -= 1
        order.append(replica)
        taken[replica] = len(order)
    return tuple(order)


METHODS = ["backprop", "1f1b", "pb", "pipedream", "pipedream-2bw", "pb-lwpw", "greedy"]


@pytest.mark.parametrize(("method", "precision"), in_turn(METHODS, [None, "bf16"], rounds=2, slow=1))
def test_one_replica_is_plain_training(method, precision):
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
    both = []
    for sync in ("all-reduce", "parameter-server(staleness=0)"):
        stages = network() if precision is None else [each.float() for each in network()]
        trainer = build(method, 1, stages, sync=sync, scheduler=scheduler, precision=precision, clip=0.5)
        data = [(x.to(stages[0][0].weight.dtype), y) for x, y in batches(8)]
        losses = [trainer.step(x.float() if precision else x, y) for x, y in data]
        both.append((losses, trainer.flush(), states(trainer)))
    (*losses, plain), (*others, served) = both
    assert losses == others
    assert all(torch.equal(plain[key], served[key]) for key in plain)


def by_hand(orders, replicas, steps):
    """Every version of every stage is kept; each replica goes through its part of the data with what it has taken.

    SGD with momentum and weight decay written out. A synchronous pipeline of two stages: the weights with which a
    replica computes its n-th gradient are those after its own (n-1)-th updates.
    """
    stages = network(len(orders))
    versions = [[[p.detach().clone() for p in stage.parameters()]] for stage in stages]
    velocities = [[torch.zeros_like(p) for p in stage.parameters()] for stage in stages]
    made = [[0] * replicas for _ in stages]
    taken = [[0] * replicas for _ in stages]
    gradients, losses = {}, {}

    def gradient(replica, n):
        if (replica, n) not in gradients:
            own = [[p.clone().requires_grad_() for p in versions[s][taken[s][replica]]] for s in range(len(stages))]
            x, y = (part.tensor_split(replicas)[replica] for part in batches(steps)[n])
            for s, (weight, bias) in enumerate(own):
                x = x @ weight.T + bias
                x = x.tanh() if s < len(stages) - 1 else x
            loss = -x.log_softmax(1)[torch.arange(len(y)), y].mean()
            found = torch.autograd.grad(loss, [p for each in own for p in each])
            gradients[replica, n] = found
            losses[replica, n] = loss.item()
        return gradients[replica, n]

    # All stages at once: an update of stage s may need another stage's earlier ones.
    places = [0] * len(stages)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for s in reversed(range(len(stages))):
            if places[s] == len(orders[s]):
                continue
            replica = orders[s][places[s]]
            n = made[s][replica]
            if any(made[other][replica] < n for other in range(len(stages))):
                continue
            both = gradient(replica, n)
            new = []
            for i, weight in enumerate(versions[s][-1]):
                direction = both[2 * s + i] + 0.01 * weight
                first = len(versions[s]) == 1
                velocities[s][i] = direction if first else 0.9 * velocities[s][i] + direction
                new.append(weight - 0.05 * velocities[s][i])
            versions[s].append(new)
            made[s][replica], taken[s][replica] = n + 1, len(versions[s]) - 1
            places[s] += 1
    means = [sum(losses[r, n] for r in range(replicas)) / replicas for n in range(steps)]
    return means, [each[-1] for each in versions]


@pytest.mark.parametrize(
    ("replicas", "bound", "stages"), thinned([(2, 4, 1), (3, 2, 1), (3, 5, 1), (2, 1, 2), (2, 3, 2)], 2)
)
def test_a_given_order_is_what_it_says(replicas, bound, stages):
    steps = 8
    orders = [an_order(replicas, bound, steps, seed) for seed in range(stages)]
    if stages == 2:
        orders[1] = orders[0]  # any two would not go together
    sync = stretto.ParameterServer(staleness=bound, order=Order(dict(enumerate(orders)), {}))
    trainer = build("backprop", replicas, network(stages), sync=sync)
    losses = [trainer.step(x, y) for x, y in batches(steps)]
    assert losses[:bound] == [None] * bound
    losses = losses[bound:] + trainer.flush()
    wanted, weights = by_hand(orders, replicas, steps)
    assert losses == pytest.approx(wanted, abs=1e-12)
    for stage, own in zip(trainer.stages, weights, strict=True):
        for parameter, value in zip(stage.parameters(), own, strict=True):
            assert torch.allclose(parameter, value, rtol=0, atol=1e-12)
    order = trainer.order()
    assert [order.of(s) for s in range(stages)] == orders
    for s in range(stages):
        assert max(order.staleness[s]) <= bound


def test_without_an_order_replicas_take_turns():
    trainer = build("pb", 3)
    for x, y in batches(6):
        trainer.step(x, y)
    order = trainer.order()
    assert order.replicas == dict.fromkeys((0, 1), (0, 1, 2) * 6)
    assert order.staleness == dict.fromkeys((0, 1), (0, 1, *[2] * 16))


def test_after_a_flush_all_replicas_have_the_newest_weights():
    trainer = build("pb", 3)
    data = batches(8)
    for x, y in data[:4]:
        trainer.step(x, y)
    trainer.flush()
    first, *others = ([p.detach() for p in stage.module.parameters()] for stage in copies(trainer, 0))
    assert all(torch.equal(mine, other) for each in others for mine, other in zip(first, each, strict=True))
    for x, y in data[4:]:
        trainer.step(x, y)
    assert trainer.order().staleness[0] == (0, 1, *[2] * 10, 0, 1, *[2] * 10)


def copies(trainer, index):
    return [each[index] for each in trainer._replicas]


class Bag(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Embedding(900, 8, sparse=sparse)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.table(x).mean(1))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad's own
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_train_as_dense_ones(kind):
    """Where the optimizer leaves rows without a gradient alone, both are the same training."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randint(900, (6, 4), generator=generator), torch.randint(3, (6,), generator=generator))
            for _ in range(10)]  # fmt: skip
    both = []
    for sparse in (False, True):
        torch.manual_seed(0)
        stages = [Bag(sparse).double()]
        sync = stretto.ParameterServer(order=Order({0: an_order(2, 4, 10, 5)}, {}))
        trainer = build("backprop", 2, stages, sync=sync, optimizer=lambda params: kind(params, lr=0.1))
        losses = [trainer.step(x, y) for x, y in data]
        both.append([*losses[4:], *trainer.flush(), states(trainer)])
    (*losses, dense), (*others, sparse) = both
    assert losses == pytest.approx(others, abs=1e-12)
    assert all(torch.allclose(dense[key], sparse[key], rtol=0, atol=1e-12) for key in dense)


def test_a_checkpoint_goes_on(tmp_path):
    data, trainer = batches(8), build("pb", 2)
    for x, y in data[:4]:
        trainer.step(x, y)
    trainer.save(tmp_path / "here")
    losses = [trainer.step(x, y) for x, y in data[4:]] + trainer.flush()
    other = build("pb", 2)
    other.load(tmp_path / "here")
    assert [other.step(x, y) for x, y in data[4:]] + other.flush() == losses
    assert all(torch.equal(states(trainer)[key], value) for key, value in states(other).items())
    with pytest.raises(UsageError, match=r"by 2 replicas.*this trainer has 3: go on with mesh=Mesh\(data=2\)"):
        build("pb", 3).load(tmp_path / "here")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": "parameter-server(staleness=1)", "replicas": 3}, "staleness=1 with 3 replicas.*choose staleness=2"),
        ({"sync": "parameter-server(staleness=-1)"}, "staleness=-1: choose a whole number"),
        ({"sync": "parameter-server(stale=1)"}, "no option 'stale': did you mean 'staleness'"),
        ({"method": "pb-sc"}, "spike compensation needs the optimizer, which is at the servers"),
        ({"method": "pb-lwp"}, "a prediction along its velocity or step needs the optimizer"),
        ({"method": "spectrain"}, "a prediction along its velocity or step needs the optimizer"),
        ({"method": "pipemare(reschedule=5)"}, "T1, which divides its rate, needs the optimizer"),
        (
            {"sync": stretto.ParameterServer(order=None), "optimizer": "outside"},
            "steps parameters that it was not given",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    stages = network()
    if options.get("optimizer") == "outside":
        options = {**options, "optimizer": lambda _: torch.optim.SGD(stages[0].parameters(), lr=0.1)}
    with pytest.raises(UsageError, match=words):
        build(**{"stages": stages, **options})


def test_an_order_of_another_run_is_refused():
    order = Order({0: (0,) * 9 + (1,) * 9, 1: (1,) * 9 + (0,) * 9}, {})
    trainer = build("backprop", 2, sync=stretto.ParameterServer(staleness=20, order=order))
    for x, y in batches(9):
        trainer.step(x, y)
    with pytest.raises(
        UsageError, match="the given order of updates does not fit this run: 1U0 of replica 0, 0U0 of replica 1 wait"
    ):
        trainer.flush()


def test_a_recording_counts_staleness():
    trainer = build("pb", 2)
    recordings = trainer.record()
    for x, y in batches(4):
        trainer.step(x, y)
    trainer.flush()
    counts = {count.name for recording in recordings for count in recording.counts}
    assert {"staleness of stage 0", "staleness of stage 1"} <= counts
