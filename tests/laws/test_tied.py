"""Tied weights on different stages: one parameter, one update, the gradients of all its uses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear, tanh

import stretto
from laws.networks import Attention, assert_equal, run, token_loss
from pairwise import each_once, in_turn, pairwise

VOCABULARY, WIDTH = 11, 8


class Unembedding(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight

    def forward(self, x):
        return linear(self.norm(x), self.weight)


def language_model():
    """Embedding and unembedding on the first and the last of four stages share their weight."""
    torch.manual_seed(0)
    first = nn.Embedding(VOCABULARY, WIDTH)
    stages = [first, Attention(WIDTH), Attention(WIDTH), Unembedding(first.weight)]
    return [stage.double() for stage in stages]


def batches(count, seed=1, size=6):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(VOCABULARY, (size, 5), generator=g), torch.randint(VOCABULARY, (size, 5), generator=g))
        for _ in range(count)
    ]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)


def train_plainly(stages, data, clip=None):
    model = nn.ModuleList(copy.deepcopy(stages))
    assert model[0].weight is model[3].weight
    optimizer, losses = sgd(list(model.parameters())), []
    for x, y in data:
        optimizer.zero_grad()
        loss = token_loss(run(model, x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


SYNCHRONOUS = ["backprop", "gpipe", "1f1b", "1f1b(microbatches=2)", "interleaved", "looped-bfs", "zb-h1", "zb-v"]


@pytest.mark.parametrize(
    ("method", "workers", "clip"),
    each_once(pairwise([*SYNCHRONOUS, "pb(warmup=99)", "pipedream-2bw(warmup=99)"], (None, 2), (None, 0.05))),
)
def test_synchronous_methods_equal_plain_pytorch(method, workers, clip):
    stages, data = language_model(), batches(7)
    expected, losses = train_plainly(stages, data, clip)
    trainer = stretto.Trainer(stages, token_loss, sgd, method, workers=workers, clip=clip)
    found = [loss for x, y in data if (loss := trainer.step(x, y)) is not None] + trainer.flush() * (trainer.lag > 0)
    assert found == pytest.approx(losses, abs=1e-12)
    assert_equal(stages, expected, 1e-11)
    assert stages[0].weight is stages[3].weight
    assert trainer.model[0].weight is trainer.model[3].weight


class First(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return tanh(embedding(x, self.weight))


class Last(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return linear(x, self.weight)


def delayed_reference(start, data, delays, *, consistent, per_update=1):
    """Versions by number: tied E at both ends, w[1..S-2] between them; every use of E in micro-batch m sees the version
    of the owner's forward. What is in between reads in its backward the weights of its forward (`consistent`) or those
    of now: written out for three stages, E - tanh(w .) - E'.
    """
    lr, momentum = 0.1, 0.9
    (e, w), v = [[start[0]], [start[1]]], [0.0, 0.0]
    losses = []
    for t, (x, y) in enumerate(data):
        sums = [0.0, 0.0]
        loss = 0.0
        for i, (xi, yi) in enumerate(zip(x.tensor_split(per_update), y.tensor_split(per_update), strict=True)):
            m, share = t * per_update + i, len(xi) / len(x)
            ef = e[max(0, delays(0, t, m))]
            wf = w[max(0, delays(1, t, m))]
            wb = wf if consistent else w[t]
            a = tanh(embedding(xi, ef))
            b = tanh(a @ wf.T)
            logits = b @ ef.T
            p = logits.softmax(1)
            loss += share * float(cross_entropy(logits, yi))
            d = (p - nn.functional.one_hot(yi, p.shape[1])) / len(xi)
            top = d.T @ b
            d = (d @ ef) * (1 - b**2)
            sums[1] = sums[1] + share * (d.T @ a)
            d = (d @ wb) * (1 - a**2)
            bottom = torch.zeros_like(ef).index_add(0, xi, d)
            sums[0] = sums[0] + share * (top + bottom)
        losses.append(loss)
        for k, versions in enumerate((e, w)):
            v[k] = momentum * v[k] + sums[k]
            versions.append(versions[-1] - lr * v[k])
    return e[-1], w[-1], losses


S = 3
METHODS = {
    "pb": (lambda s, t, m: t - 2 * (S - 1 - s), False, 1),
    "pb(stash=True)": (lambda s, t, m: t - 2 * (S - 1 - s), True, 1),
    "pipedream": (lambda s, t, m: t - (S - 1 - s), True, 1),
    "pipedream-2bw": (lambda s, t, m: t - 1, True, 3),
    "pipedream-2bw(microbatches=4)": (lambda s, t, m: t - 1, True, 4),
    "paci(every=2)": (lambda s, t, m: (m - (S - 1 - s)) // 2, False, 2),
    "paci(every=3)": (lambda s, t, m: (m - (S - 1 - s)) // 3, False, 3),
    "spectrain(warmup=99)": (lambda s, t, m: t, True, 1),
}


@pytest.mark.parametrize(("method", "flush_at", "workers"), each_once(pairwise(METHODS, (None, 4), (None, 1, 2))))
def test_asynchronous_methods_equal_explicit_versions(method, flush_at, workers, tmp_path):
    """From fill to drain; a drain in between, a save and a load change nothing but what is in flight."""
    g = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64))
    middle = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    data = [
        (torch.randint(VOCABULARY, (12,), generator=g), torch.randint(VOCABULARY, (12,), generator=g))
        for _ in range(13)
    ]
    delays, consistent, per_update = METHODS[method]

    def seen(s, t, m):
        since = 0 if flush_at is None or t < flush_at else flush_at
        return max(since, delays(s, t - since, m - since * per_update) + since)

    start = weight.detach().clone(), middle.weight.detach().clone()
    e, w, losses = delayed_reference(start, data, seen, consistent=consistent, per_update=per_update)
    trainer = stretto.Trainer(
        [First(weight), nn.Sequential(middle, nn.Tanh()), Last(weight)], cross_entropy,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method, workers=workers,
    )  # fmt: skip
    found = []
    for t, (x, y) in enumerate(data):
        if t == flush_at:
            trainer.save(tmp_path / "run.pt")
            trainer.load(tmp_path / "run.pt")
        found.append(trainer.step(x, y))
    found = [loss for loss in found if loss is not None] + trainer.flush()
    assert found == pytest.approx(losses, abs=1e-10)
    torch.testing.assert_close(weight.detach(), e, rtol=0, atol=1e-10)
    torch.testing.assert_close(middle.weight.detach(), w, rtol=0, atol=1e-10)


def test_nothing_of_tied_weights_is_left_after_a_drain():
    stages = language_model()
    trainer = stretto.Trainer(stages, token_loss, sgd, "pb")
    for x, y in batches(9):
        trainer.step(x, y)
    trainer.flush()
    assert not trainer._interpreter.values
    assert [name for name, _ in stages[3].named_parameters()] == ["weight", "norm.weight", "norm.bias"]
    assert trainer._stages[3].optimizer.param_groups[0]["params"] == [stages[3].norm.weight, stages[3].norm.bias]


class Reading(nn.Module):
    """A stage in whose midst the embedding's weight is used."""

    def __init__(self, weight):
        super().__init__()
        self.inner, self.weight = nn.Linear(VOCABULARY, WIDTH), weight

    def forward(self, x):
        return x + self.inner(tanh(linear(x, self.weight)))


def locally_by_hand(stages, heads, hops, data):
    """Each head's loss trains its own stage and so many below; all of a minibatch read the same weights.

    The last stage that has the shared weight steps it, with the gradients of all losses; one further down reads it as
    many updates later as there are stages between the two.
    """
    modules, heads = copy.deepcopy((nn.ModuleList(stages), heads))
    shared = modules[0].weight
    holders = [s for s, stage in enumerate(modules) if any(p is shared for p in stage.parameters())]
    owner, versions = holders[-1], [shared.detach().clone()]
    own = [[p for p in stage.parameters() if s == owner or p is not shared] for s, stage in enumerate(modules)]
    stepped = [[*parameters, *(heads[s].parameters() if heads[s] else ())] for s, parameters in enumerate(own)]
    optimizers = [sgd(parameters) for parameters in stepped if parameters]
    for t, (x, y) in enumerate(data):
        read = {s: versions[max(0, t - (owner - s))].clone().requires_grad_() for s in holders[:-1]}

        def stage(s, h, read=read):
            used = {name: read.get(s, p) if p is shared else p for name, p in modules[s].named_parameters()}
            return torch.func.functional_call(modules[s], used, (h,))

        given = [x]
        for s in range(len(modules) - 1):
            given.append(stage(s, given[-1]).detach())
        gradients = {}
        for s, reach in enumerate(hops):
            if reach is None:
                continue
            h = given[s - reach]
            for index in range(s - reach, s + 1):
                h = stage(index, h)
            head = heads[s]
            wanted = [p for index in range(s - reach, s + 1) for p in own[index]]
            wanted += list(head.parameters()) if head is not None else []
            leaves = [read[index] for index in range(s - reach, s + 1) if index in read]
            loss = token_loss(head(h) if head is not None else h, y)
            found = torch.autograd.grad(loss, [*wanted, *leaves], allow_unused=True)
            for p, gradient in zip([*wanted, *[shared] * len(leaves)], found, strict=True):
                if gradient is not None:
                    gradients[p] = gradients.get(p, 0) + gradient
        for optimizer in optimizers:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = gradients.get(p)
            optimizer.step()
        versions.append(shared.detach().clone())
    return modules


def heads_at(hops):
    torch.manual_seed(1)
    heads = [nn.Linear(WIDTH, VOCABULARY).double() if hop is not None else None for hop in hops[:-1]]
    return nn.ModuleList([*heads, None])


LOCAL = {"greedy": (0, 0, 0, 0), "overlapping": (None, 1, 1, 1), "chunked(chunks=2)": (None, 1, None, 1)}
LOCAL["chunked(microbatches=2)"] = (None, 1, None, 1)


@pytest.mark.parametrize(("method", "workers"), in_turn(LOCAL, [None, 2], rounds=2, slow=1))
def test_under_local_methods_the_networks_loss_trains_them(method, workers):
    """The last stage owns them, and the first one's losses send their gradients there."""
    stages, data, hops = language_model(), batches(7), LOCAL[method]
    heads = heads_at(hops)
    expected = locally_by_hand(stages, heads, hops, data)
    trainer = stretto.Trainer(stages, token_loss, sgd, method, heads=list(heads), workers=workers)
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert_equal(stages, expected, 1e-11)
    assert trainer.model[3].weight is stages[0].weight is stages[3].weight


def test_a_loss_that_trains_both_stages_trains_them_by_both_uses():
    """Stages of one chunk have the same losses."""
    stages, hops, data = language_model(), LOCAL["chunked(chunks=2)"], batches(7)
    stages = [stages[0], Reading(stages[0].weight).double(), stages[1], nn.Linear(WIDTH, VOCABULARY).double()]
    heads = heads_at(hops)
    expected = locally_by_hand(stages, heads, hops, data)
    trainer = stretto.Trainer(stages, token_loss, sgd, "chunked(chunks=2)", heads=list(heads))
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert_equal(stages, expected, 1e-11)


@pytest.mark.parametrize("method", ["backprop", "1f1b(microbatches=2)", "zb-h1(microbatches=2)"])
def test_heads_that_detach_nothing_train_them_as_plain_training_does(method):
    stages, data = language_model(), batches(5)
    heads = heads_at((None, 1, None, 1))
    modules, own_heads = copy.deepcopy((nn.ModuleList(stages), heads))
    written = (
        method.replace(")", ", head_at=1, head_weight=0.5)")
        if "(" in method
        else f"{method}(head_at=1, head_weight=0.5)"
    )
    trainer = stretto.Trainer(stages, token_loss, sgd, written, heads=list(heads))
    optimizer = sgd(list(dict.fromkeys([*modules.parameters(), *own_heads.parameters()])))
    for x, y in data:
        losses = [trainer.step(x, y)]
        outputs = [x]
        for stage in modules:
            outputs.append(stage(outputs[-1]))
        optimizer.zero_grad()
        output = token_loss(outputs[-1], y)
        (output + 0.5 * token_loss(own_heads[1](outputs[2]), y)).backward()
        optimizer.step()
        assert losses == pytest.approx([output.item()], rel=1e-10)
    assert_equal([*stages, heads[1]], [*modules, own_heads[1]], 1e-11)


def test_who_trains_them_under_local_methods():
    trainer = stretto.Trainer(language_model(), token_loss, sgd, "greedy", example=batches(1)[0][0])
    assert [(tie.owner, tie.user, tie.trains) for tie in trainer.rules.ties] == [(3, 0, True)]
    assert trainer._stages[3].optimizer.param_groups[0]["params"][0] is trainer.stages[3].weight


def test_versions_of_a_tied_readout_come_after_each_update():
    torch.manual_seed(0)
    first, last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    last.weight = first.weight
    stages, (x, y) = [first.double(), Attention(WIDTH).double(), last], batches(1)[0]
    with pytest.raises(stretto.UsageError, match=r"every=2: stages 2 and 0 share a weight .* use every=1"):
        stretto.Trainer(stages, token_loss, sgd, "greedy(head=solo(every=2))", example=x)
    trainer = stretto.Trainer(stages, token_loss, sgd, "greedy(head=solo(every=1))", example=x)
    trainer.step(x, y)
    trainer.flush()
    assert torch.equal(trainer.heads[0].readout.weight, first.weight)


def test_costs_and_evaluation_take_them():
    from stretto.measure import measure

    trainer = stretto.Trainer(language_model(), token_loss, sgd, "pb")
    x, y = batches(1)[0]
    assert measure(trainer, x, y).total > 0
    trainer.step(x, y)
    assert trainer.evaluate([(x, y)])["loss"] > 0
