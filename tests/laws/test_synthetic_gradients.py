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
from laws.networks import NETWORKS, assert_equal, features, labels
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
    losses, returned = [], []
    for n, (x, y) in enumerate(batches):
        losses.append(reference.step(x, y))
        returned.append(trainer.step(x, y))
        if n == flush_after:
            reference.flush()
            trainer.flush()
    reference.flush()
    rest = trainer.flush()
    assert [value for value in (*returned, *rest) if value is not None] == pytest.approx(losses, rel=1e-10)
    assert_equal([*trainer.stages, *trainer.heads], [*reference.stages, *reference.heads], tolerance=1e-10)
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("method", "known"),
    [
        ("synthetic-gradients", {}),
        ("synthetic-gradients(head=linear, labels=True, rate=3)", {"labelled": True, "rate": 3.0}),
        ("synthetic-gradients(head=mlp(hidden=2, width=5), delay=3)", {"delay": 3}),
    ],
)
def test_the_method_is_its_definition(method, known, optimizer):
    compare(method, NETWORKS["mlp"], optimizer, scheduler=falling, **known)


@pytest.mark.parametrize(
    ("method", "name"),
    [("synthetic-gradients", "cnn"), ("synthetic-gradients(labels=True)", "transformer"),
     ("synthetic-gradients(delay=2)", "tuples"), ("synthetic-gradients(head=linear, labels=True)", "cnn")],
)  # fmt: skip
def test_for_images_tokens_and_several_tensors(method, name):
    network = NETWORKS[name]
    known = {"labelled": "labels" in method, "delay": 2 if "delay" in method else 1}
    compare(method, network, "adamw", batches=network.batches(5), stages=4, **known)
