"""Synthetic gradients equal their definition (Jaderberg et al. 2017), written out with plain autograd.

The reference trains stage after stage, with no schedule: forward, backward from the prediction, step; then what
predicts learns. With true gradients in the predictions' place the method is backpropagation.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, assert_equal, features, labels, stepped_together
from pairwise import in_turn
from stretto import UsageError

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
}
falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
BATCHES = NETWORKS["mlp"].batches(9)


def as_tuple(values):
    return values if isinstance(values, tuple) else (values,)


def count(tensor):
    """Examples, tokens of [N, T, d], or positions of an image [N, C, H, W]."""
    if tensor.dim() == 3:
        return tensor.shape[0] * tensor.shape[1]
    return tensor[:, 0].numel()


class Definition:
    """`delay`: true gradients between a prediction and the newest one that was learned from; `rate` as the method's."""

    def __init__(self, trainer, loss, optimizer, scheduler=None, *, delay=1, rate=1.0, labelled=False):
        self.stages, self.heads = copy.deepcopy(trainer.stages), copy.deepcopy(trainer.heads)
        self.loss, self.delay, self.labelled = loss, delay, labelled
        self.waiting = []
        self.of_stages, self.of_heads = ([self.stepper(m, optimizer, scheduler, r) for m in modules]
                                         for modules, r in ((self.stages, 1.0), (self.heads, rate)))  # fmt: skip

    def stepper(self, module, optimizer, scheduler, rate):
        parameters = [] if module is None else list(module.parameters())
        if not parameters:
            return None
        built = optimizer(parameters)
        for group in built.param_groups:
            group["lr"] *= rate
        return built, None if scheduler is None else scheduler(built)

    def apply(self, steppers, stage, gradients):
        if steppers[stage] is None:
            return
        optimizer, scheduler = steppers[stage]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    def predict(self, stage, given, y):
        detached = [tensor.detach() for tensor in given]
        return as_tuple(self.heads[stage](*detached, **{"target": y} if self.labelled else {}))

    def step(self, x, y):
        given, made, values = [], [], as_tuple(x)
        for stage in self.stages:
            leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in values)
            values = as_tuple(stage(*leaves))
            given.append(leaves)
            made.append(values)
        if len(self.waiting) >= self.delay:
            self.learn(*self.waiting.pop(0))
        arrived, last = [], len(self.stages) - 1
        value = self.loss(values[0], y)
        for s, stage in enumerate(self.stages):
            if s < last:
                predicted = self.predict(s, made[s], y)
                pairs = [(t, p.detach() / count(t)) for t, p in zip(made[s], predicted, strict=True) if p is not None]
                roots, gradients = zip(*pairs, strict=True)
            else:
                roots, gradients = (value,), (None,)
            leaves, parameters = [t for t in given[s] if t.is_floating_point()], list(stage.parameters())
            found = torch.autograd.grad(roots, [*leaves, *parameters], gradients, allow_unused=True)
            self.apply(self.of_stages, s, found[len(leaves) :])
            below = iter(found[: len(leaves)])
            arrived.append([next(below) if t.is_floating_point() else None for t in given[s]])
        self.waiting.append((made, arrived, y))
        return value.item()

    def learn(self, made, arrived, y):
        for s in range(len(self.stages) - 1):
            if self.of_heads[s] is None:
                continue
            error = 0
            for tensor, predicted, true in zip(made[s], self.predict(s, made[s], y), arrived[s + 1], strict=True):
                if predicted is not None:
                    error = error + (predicted - (0 if true is None else true * count(tensor))).square().mean()
            self.apply(self.of_heads, s, torch.autograd.grad(error, list(self.heads[s].parameters())))

    def flush(self):
        while self.waiting:
            self.learn(*self.waiting.pop(0))


def compare(method, network, optimizer="sgd", *, batches=BATCHES, scheduler=None, flush_after=None, stages=3, **known):
    trainer = stretto.Trainer(
        network.stages(stages), network.loss, OPTIMIZERS[optimizer], method, scheduler=scheduler, example=batches[0][0]
    )
    assert all(p.abs().max() < 1e9 for p in trainer.heads[0].parameters())
    reference = Definition(trainer, network.loss, OPTIMIZERS[optimizer], scheduler, **known)
    losses, returned = stepped_together(reference, trainer, batches, flush_after)
    reference.flush()
    rest = trainer.flush()
    assert [value for value in (*returned, *rest) if value is not None] == pytest.approx(losses, rel=1e-10)
    assert_equal([*trainer.stages, *trainer.heads], [*reference.stages, *reference.heads], tolerance=1e-10)
    return trainer


OPTIONS = {
    "synthetic-gradients": {},
    "synthetic-gradients(head=mlp, labels=True, rate=3)": {"labelled": True, "rate": 3.0},
    "synthetic-gradients(head=mlp(hidden=2, width=5), delay=3)": {"delay": 3},
}


@pytest.mark.parametrize(("method", "optimizer"), in_turn(OPTIONS, list(OPTIMIZERS), rounds=2, slow=1))
def test_the_method_is_its_definition(method, optimizer):
    compare(method, NETWORKS["mlp"], optimizer, scheduler=falling, **OPTIONS[method])


@pytest.mark.parametrize(
    ("method", "name"),
    [("synthetic-gradients", "cnn"), ("synthetic-gradients(head=conv(hidden=0, kernel=1), labels=True)", "cnn"),
     ("synthetic-gradients(labels=True)", "transformer"), ("synthetic-gradients(head=mlp(hidden=2))", "transformer"),
     ("synthetic-gradients(delay=2)", "tuples")],
)  # fmt: skip
def test_for_images_tokens_and_several_tensors(method, name):
    network = NETWORKS[name]
    known = {"labelled": "labels" in method, "delay": 2 if "delay" in method else 1}
    compare(method, network, "adamw", batches=network.batches(5), stages=4, **known)


def test_a_flush_finishes_what_waits_to_be_learned():
    for method, delay in (("synthetic-gradients", 1), ("synthetic-gradients(delay=2)", 2)):
        compare(method, NETWORKS["mlp"], flush_after=3, delay=delay)


def trained(method, batches=BATCHES, name="mlp", **options):
    network = NETWORKS[name]
    trainer = stretto.Trainer(
        network.stages(4), network.loss, OPTIMIZERS["adamw"], method, example=batches[0][0], **options
    )
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    return trainer


def test_workers_and_recomputation_change_no_number():
    few = BATCHES[:5]
    plain = trained("synthetic-gradients(labels=True)", few)
    for method, workers in (("synthetic-gradients(labels=True)", 1), ("synthetic-gradients(labels=True)", 3),
                            ("synthetic-gradients(labels=True, recompute=True)", 2)):  # fmt: skip
        other = trained(method, few, workers=workers)
        assert_equal([*other.stages, *other.heads], [*plain.stages, *plain.heads])
    with pytest.raises(UsageError, match="nothing to recompute"):
        trained("synthetic-gradients(recompute=True)")


class Dropping(nn.Module):
    """A prediction with random draws and running statistics."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, width)).double()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("delay", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(delay, tmp_path):
    network = NETWORKS["mlp"]

    def build():
        torch.manual_seed(0)
        heads = [Dropping(7), Dropping(5), None, None]
        return stretto.Trainer(
            network.stages(4), network.loss, OPTIMIZERS["adamw"], f"synthetic-gradients(delay={delay})", heads=heads,
            scheduler=falling, example=BATCHES[0][0],
        )  # fmt: skip

    whole, half = build(), build()
    for trainer in (whole, half):
        for x, y in BATCHES[:5]:
            trainer.step(x, y)
        trainer.flush()
    half.save(tmp_path / "half")
    rest = build()
    rest.load(tmp_path / "half")
    for trainer in (whole, rest):
        for x, y in BATCHES[5:]:
            trainer.step(x, y)
        trainer.flush()
    assert_equal([*rest.stages, *rest.heads], [*whole.stages, *whole.heads])
    assert not torch.equal(rest.heads[0].layers[2].weight, half.heads[0].layers[2].weight)


class TrueGradient(nn.Module):
    """Runs a copy of the stages above on the target, and returns the gradient of their loss."""

    def __init__(self, above):
        super().__init__()
        self.above = copy.deepcopy(above).requires_grad_(False)

    def forward(self, x, target):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(cross_entropy(self.above(leaf), target), leaf)[0] * count(x)


def test_with_true_gradients_it_is_backpropagation():
    """Exactly where the stages above the prediction do not change: nothing is late, so no delay is to be named."""
    stages = NETWORKS["mlp"].stages(4)
    for frozen in stages[1:]:
        frozen.requires_grad_(False)
    plain = nn.Sequential(*copy.deepcopy(stages))
    heads = [TrueGradient(nn.Sequential(*stages[s + 1 :])) for s in range(3)]
    sgd = OPTIMIZERS["sgd"]
    trainer = stretto.Trainer(stages, cross_entropy, sgd, "synthetic-gradients(labels=True)", heads=[*heads, None])
    optimizer = sgd(plain[0].parameters())
    for x, y in BATCHES:
        trainer.step(x, y)
        optimizer.zero_grad()
        cross_entropy(plain(x), y).backward()
        optimizer.step()
    trainer.flush()
    assert_equal(trainer.stages, list(plain), tolerance=1e-12)


class Replay(nn.Module):
    """Returns gradients that it was given, one a call, and learns what is to be added."""

    def __init__(self, gradients):
        super().__init__()
        self.gradients = list(gradients)
        self.missing = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.gradients.pop(0) * count(x) + self.missing


def test_true_gradients_of_a_moving_network_are_its_backpropagation():
    """That at the weights before the minibatch's updates, in all stages; and it is what arrives to be learned from."""
    network, sgd = NETWORKS["mlp"], OPTIMIZERS["sgd"]
    plain = network.stages(3)
    optimizers = [sgd(stage.parameters()) for stage in plain]
    seen = [[], []]
    for x, y in BATCHES:
        made = [x]
        for stage in plain:
            made.append(stage(made[-1]))
            made[-1].retain_grad()
        cross_entropy(made[-1], y).backward()
        for s in (0, 1):
            seen[s].append(made[s + 1].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    heads = [Replay(seen[0]), Replay(seen[1]), None]
    trainer = stretto.Trainer(network.stages(3), cross_entropy, sgd, "synthetic-gradients", heads=heads)
    for x, y in BATCHES:
        trainer.step(x, y)
    trainer.flush()
    assert_equal(trainer.stages, plain, tolerance=1e-12)
    assert all(abs(head.missing.item()) < 1e-12 for head in heads[:2])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("synthetic-gradients(delay=0)", {}, r"delay=0\): a whole number of micro-batches from 1"),
        ("synthetic-gradients(rate=-1)", {}, r"rate=-1\): a number of at least 0"),
        ("synthetic-gradients(labels=2)", {}, r"labels=2\): choose True or False"),
        ("synthetic-gradients(head=conv)", {}, r"head 'conv' goes \[N, C, H, W\]"),
        ("synthetic-gradients(head=mlpp)", {}, "did you mean 'mlp'"),
        ("synthetic-gradients(head=mlp(hidden=0))", {}, "hidden=0 must be a whole number of at least 1"),
        ("synthetic-gradients", {"mesh": stretto.Mesh(data=2)}, "learns in one process"),
        ("synthetic-gradients", {"heads": [None, None, nn.Linear(8, 8)]}, "the last stage's output is the model's"),
    ],
)
def test_mistakes_are_named(method, options, message):
    with pytest.raises(UsageError, match=message):
        stretto.Trainer(
            NETWORKS["mlp"].stages(3), cross_entropy, OPTIMIZERS["sgd"], method, example=BATCHES[0][0], **options
        )


def test_mistakes_that_a_step_finds_are_named():
    """Targets that are no class numbers, and a prediction of another shape."""
    network = NETWORKS["mlp"]
    x, y = features(torch.Generator(), 6, 6), labels(torch.Generator())
    soft = nn.functional.one_hot(y, 4).double()
    for method, heads, target, message in (
        ("synthetic-gradients(labels=True)", None, soft, "it is for class numbers"),
        ("synthetic-gradients", [nn.Linear(5, 4).double(), None, None], y, r"returned \[6, 4\]: return a tensor of"),
    ):
        trainer = stretto.Trainer(network.stages(3), cross_entropy, OPTIMIZERS["sgd"], method, example=x, heads=heads)
        with pytest.raises(UsageError, match=message) as raised:
            trainer.step(x, target)
        assert "0B0" in "".join(raised.value.__notes__)
