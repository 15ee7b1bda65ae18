"""An evaluation warns of a loss or metric that its weighing by examples suits not, and of no other."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, log_softmax, mse_loss, normalize

import stretto

TOKENS, CLASSES = 6, 5
LENGTHS = (6, 6, 6, 6, 2, 1, 5, 6)  # the halves of the first four examples have as many tokens
DRAWN = np.random.default_rng(0)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(CLASSES, CLASSES)

    def forward(self, x):
        return self.table(x)


def batches(size=8):
    x = torch.randint(CLASSES, (8, TOKENS), generator=torch.Generator().manual_seed(1))
    y = x.roll(-1, 1)
    for row, length in enumerate(LENGTHS):
        y[row, length:] = -100
    return [(x[start : start + size], y[start : start + size]) for start in range(0, 8, size)]


def build(loss):
    return stretto.Trainer([Lookup()], loss, lambda params: torch.optim.SGD(params, lr=0.1))


def token_mean(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def next_token_mean(output, target):
    return cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def flat_ignoring(output, target):
    return cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten(), ignore_index=0)


def perplexity(output, target):
    return token_mean(output, target).exp().item()


def token_accuracy(output, target):
    counts = target != -100
    return (output.argmax(-1) == target)[counts].float().mean()


def contrastive(output, target):
    of_example = normalize(output.mean(1))
    return cross_entropy(of_example @ of_example.T, torch.arange(len(target)))


def of_examples(output, target):
    """The mean over each example's tokens, then over examples."""
    losses = cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses.sum(1) / (target != -100).sum(1)).mean()


def example_accuracy(output, target):
    return float(((output.argmax(-1) == target) | (target < 0)).all(1).float().mean())


def counted(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (target != -100).sum()


def noisy(draw):
    return lambda output, target: token_mean(output, target) * 0 + of_examples(output, target) + draw(output)


class Seen:
    """Every batch once."""

    def reset(self):
        self.batches = 0

    def update(self, output, target):
        self.batches += 1

    def compute(self):
        return self.batches


WARNED = {
    "padding": (token_mean, r"return stretto.losses.token_cross_entropy.sum_and_count\(output, target\)"),
    "shifted": (next_token_mean, r"return stretto.losses.next_token_cross_entropy.sum_and_count"),
    "another mark": (
        flat_ignoring,
        r'return cross_entropy\(output.flatten\(0, -2\), target.flatten\(\), reduction="sum"',
    ),
    "contrastive": (contrastive, r"depends on the others \(as contrastive losses do"),
    "root": (lambda o, y: mse_loss(o.sum(2), y.float()) ** 0.5, "depends on the others"),
    "sum": (lambda o, y: l1_loss(o.sum(2), y.float(), reduction="sum"), r"return \(error \* mask\)\.sum\(\)"),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_loss_that_is_no_mean_over_examples_is_named_once(case):
    loss, remedy = WARNED[case]
    trainer = build(loss)
    declared = r"say so: loss=stretto.mean\(loss\), or @stretto.mean above the function$"
    ending = rf"[\s\S]*or, if the mean of batches is meant, {declared}"
    with pytest.warns(
        match=rf"^evaluation: the loss is no mean over examples: of a batch of 8 it is[\s\S]*{remedy}{ending}"
    ) as told:
        value = trainer.evaluate(batches())["loss"]
    assert len(told) == 1
    assert trainer.evaluate(batches())["loss"] == value, "nothing more is said"
    assert build(stretto.mean(loss)).evaluate(batches())["loss"] == value


@pytest.mark.parametrize("metric", [perplexity, token_accuracy])
def test_a_metric_that_is_none_is_named(metric):
    trainer = build(counted)
    data = batches()
    with pytest.warns(match=r"metric mine is no mean over examples.*Return \(sum, count\), as .*reset\(\)") as told:
        trainer.evaluate(data, {"mine": metric, "theirs": stretto.mean(metric)})
    assert len(told) == 1
    trainer.evaluate(data, {"mine": metric})


def test_padding_may_come_later_than_in_the_first_batch():
    with pytest.warns(match="the loss is no mean over examples: of a batch of 4 it is"):
        build(token_mean).evaluate(batches(4))
    with pytest.warns(match="the loss is no mean over examples: of a batch of 8 it is"):
        build(token_mean).fit(batches(), validation=batches(), epochs=1, quiet=True)


QUIET = {
    "of examples": of_examples,
    "counted": counted,
    "torch's": lambda o, y: mse_loss(o[..., 0], y.float()),
    "weighed": stretto.losses.token_cross_entropy,
    "logarithms": lambda o, y: -log_softmax(o, -1)[..., 0].mean(),
    "torch draws": noisy(lambda o: torch.rand(len(o)).mean()),
    "numpy draws": noisy(lambda o: float(np.random.rand(len(o)).mean())),
    "a generator draws": noisy(lambda o: float(DRAWN.random(len(o)).mean())),
    "python draws": noisy(lambda o: sum(random.random() for _ in o)),
    "whole batches only": lambda o, y: token_mean(o.view(8, TOKENS, CLASSES), y.view(8, TOKENS)),
}


@pytest.mark.parametrize("case", QUIET)
def test_of_others_nothing_is_said(case):
    metrics = {"of_examples": of_examples, "examples": example_accuracy, "counted": counted, "seen": Seen}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = build(QUIET[case]).evaluate(batches() * 2, metrics)
    assert values["seen"] == 2


def test_looking_changes_no_generator():
    trainer = build(noisy(lambda o: torch.rand(len(o)).mean()))
    values = []
    for looks in (True, False):
        torch.manual_seed(0)
        trainer.backend.means.warned = frozenset() if looks else frozenset({"loss"})
        values.append(trainer.evaluate(batches() * 2)["loss"])
    assert values[0] == values[1]
