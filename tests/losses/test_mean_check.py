"""A loss that is opaque is a mean over examples in every minibatch, or refused before the update with a fitting remedy.

The reference is the loss of plain PyTorch on whole minibatches.
"""

import copy
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, log_softmax, mse_loss, normalize

import stretto
from pairwise import in_turn
from stretto import UsageError
from stretto.losses import comparison

SIZE, LATE = 16, 5


def stages(dtype=torch.float64, outputs=4):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 8), nn.Tanh()).to(dtype), nn.Linear(8, outputs).to(dtype)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def build(loss, method="1f1b(microbatches=4)", data=1, sync="all-reduce", given=None):
    return stretto.Trainer(
        stages() if given is None else given, loss, sgd, method, mesh=stretto.Mesh(data=data), sync=sync, device="cpu"
    )


def inputs(step, dtype=torch.float64):
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(step)).to(dtype)


def masked(output, target):
    known = ~target.isnan()
    return ((output - target.nan_to_num(0)) ** 2 * known).sum() / known.sum()


def of_positives(output, target):
    counts = target != 0
    return (cross_entropy(output, target, reduction="none") * counts).sum() / counts.sum().clamp(min=1)


def of_mask(output, target):
    return (((output - target["values"]) ** 2).mean(1) * target["mask"]).sum() / target["mask"].sum()


CLASSES = torch.arange(SIZE) % 4
MARKED = {  # a loss, targets of which all count, and what marks some of them
    "-1": (lambda o, y: cross_entropy(o, y, ignore_index=-1), lambda: CLASSES.clone(), -1),
    "255": (lambda o, y: cross_entropy(o, y.long(), ignore_index=255), lambda: CLASSES.to(torch.uint8), 255),
    "zero": (of_positives, lambda: 1 + CLASSES % 3, 0),
    "nan": (masked, lambda: torch.ones(SIZE, 4).double(), float("nan")),
    "weights": (
        lambda o, y: cross_entropy(o, y, weight=torch.tensor([1.0, 1.0, 1.0, 5.0]).double()),
        lambda: CLASSES % 3,
        3,
    ),
    "mask": (of_mask, lambda: {"values": torch.ones(SIZE, 4).double(), "mask": torch.ones(SIZE).bool()}, False),
}
CUTS = [
    ("1f1b(microbatches=4)", 1), ("gpipe(microbatches=2)", 2), ("backprop", 2), ("backprop", 4), ("zb-h1", 1),
    ("1f1b(microbatches=8)", 1), ("pipedream-2bw(microbatches=4)", 1),
]  # fmt: skip


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("case", "cut"), in_turn(MARKED, CUTS, rounds=3), ids=str)
def test_what_does_not_count_may_come_late_and_anywhere(case, cut, small, monkeypatch):
    monkeypatch.setattr(comparison, "SMALL", comparison.SMALL if small else 0)
    (loss, targets, mark), (method, data) = MARKED[case], cut
    trainer = build(loss, method, data)
    for step in range(LATE):
        trainer.step(inputs(step), targets())
    before, late = copy.deepcopy(trainer.gather()), targets()
    (late["mask"] if isinstance(late, dict) else late)[SIZE - 1 if small else 7] = mark
    with pytest.raises(UsageError, match=r"not a mean over examples: on (micro-batches|parts of two replicas)"):
        trainer.step(inputs(LATE), late)
    if trainer.method.synchronous:
        assert all(torch.equal(before[name], value) for name, value in trainer.gather().items())
        trainer.step(inputs(LATE), targets())


def contrastive(output, target):
    """InfoNCE between an output and its target: the others of the batch are what it is told from."""
    return cross_entropy(normalize(output) @ normalize(target).T, torch.arange(len(output)))


def counted_contrastive(output, target):
    return contrastive(output, target) * len(output), len(output)


def decorrelated(output, target):
    centered = output - output.mean(0)
    return ((centered.T @ centered / len(output) - torch.eye(4).double()) ** 2).mean()


TOGETHER = {
    "contrastive": contrastive,
    "contrastive sum": counted_contrastive,
    "statistic": decorrelated,
    "root": lambda o, y: mse_loss(o, y) ** 0.5,
    "ranked": lambda o, y: torch.relu(1 - (o[:, :1] - o[:, :1].T)).mean(),
}


@pytest.mark.parametrize(("case", "cut"), in_turn(TOGETHER, CUTS), ids=str)
def test_a_loss_over_all_examples_together_is_told_to_cut_nothing(case, cut):
    method, data = cut
    y = torch.rand(SIZE, 4, generator=torch.Generator().manual_seed(1)).double()
    with pytest.raises(UsageError, match=r"depends on the others[\s\S]*microbatches=1"):
        build(TOGETHER[case], method, data).step(inputs(0), y)
    trainer, plain = build(TOGETHER[case], "1f1b(microbatches=1)"), nn.Sequential(*stages())
    value = TOGETHER[case](plain(inputs(0)), y)
    value = value[0] / value[1] if isinstance(value, tuple) else value
    assert trainer.step(inputs(0), y) == pytest.approx(value.item(), abs=1e-12)


DRAWING = {
    "noise": lambda o, y: mse_loss(o + 0.1 * torch.randn_like(o), y),
    "noise in place": lambda o, y: mse_loss(o + torch.empty_like(o).normal_(), y),
    "dropout": lambda o, y: mse_loss(nn.functional.dropout(o, 0.5), y),
    "a weight": lambda o, y: mse_loss(o, y) * (1 + torch.rand((), dtype=o.dtype)),
    "a weight from Python": lambda o, y: mse_loss(o, y) * (1 + random.random()),
    "a weight from NumPy": lambda o, y: mse_loss(o, y) * (1 + np.random.rand()),
}


@pytest.mark.parametrize("case", DRAWING)
def test_a_loss_may_draw_random_numbers(case):
    """As in a loop over the micro-batches, whose draws the checks leave alone."""
    y = torch.rand(SIZE, 4, generator=torch.Generator().manual_seed(1)).double()
    drawn = []
    for checked in (True, False):
        random.seed(0)
        np.random.seed(0)
        loss = DRAWING[case] if checked else stretto.mean(DRAWING[case])
        trainer = build(loss, "gpipe(microbatches=2)")
        drawn.append([trainer.step(inputs(step), y) for step in range(4)])
    assert drawn[0] == drawn[1]


SUMMED = {
    "noise": lambda o, y: mse_loss(o + 0.1 * torch.randn_like(o), y, reduction="sum"),
    "partners": lambda o, y: mse_loss(o, y[torch.randperm(len(y))]),
    "negatives": lambda o, y: mse_loss(o, o[torch.randint(len(o), (len(o),))]),
}


@pytest.mark.parametrize("case", SUMMED)
def test_a_loss_that_draws_is_a_mean_over_examples_all_the_same(case):
    with pytest.raises(UsageError, match="not a mean over examples"):
        build(SUMMED[case], "gpipe(microbatches=2)").step(inputs(0), torch.rand(SIZE, 4).double())


class LossInside(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.linear = nn.Linear(8, 4).double()

    def forward(self, x):
        logits = self.linear(x)
        value = (logits**2).mean()
        forms = {
            "number": value,
            "dict": {"loss": value, "logits": logits},
            "pair": (value, logits),
            "of one": value[None],
        }
        return forms[self.form]


PASSED = {
    "number": lambda o, y: o,
    "dict": lambda o, y: o["loss"],
    "pair": lambda o, y: o[0] + cross_entropy(o[1], y),
    "of one": lambda o, y: o,
}


@pytest.mark.parametrize(("form", "cut"), in_turn(PASSED, CUTS), ids=str)
def test_a_number_that_the_model_computed_is_not_averaged(form, cut):
    method, data = cut
    first = stages()[0]
    with pytest.raises(UsageError, match="passes on a number that the model computed"):
        build(PASSED[form], method, data, given=[first, LossInside(form)]).step(inputs(0), CLASSES)
    build(PASSED[form], "1f1b(microbatches=1)", given=[first, LossInside(form)]).step(inputs(0), CLASSES)
    told = stretto.mean(PASSED[form])
    build(told, method, data, given=[first, LossInside(form)]).step(inputs(0), CLASSES)


def test_a_number_beside_what_the_loss_reads_does_no_harm():
    build(lambda o, y: cross_entropy(o["logits"], y), given=[stages()[0], LossInside("dict")]).step(inputs(0), CLASSES)


@dataclass
class Output:
    logits: torch.Tensor
    others: list


class InDataclass(nn.Linear):
    def forward(self, x):
        return Output(super().forward(x), [x, None])


def test_outputs_may_be_objects():
    def loss(output, y):
        return cross_entropy(output.logits, y, ignore_index=-1)

    trainer = build(loss, given=[stages()[0], InDataclass(8, 4).double()])
    for step in range(LATE):
        trainer.step(inputs(step), CLASSES)
    with pytest.raises(UsageError, match="not a mean over examples"):
        trainer.step(inputs(LATE), torch.where(torch.arange(SIZE) < 2, -1, CLASSES))


class Counting(nn.Module):
    """A loss with a buffer that changes, and a scale learned from it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, y):
        self.calls += 1
        return mse_loss(output, y)


def test_buffers_of_a_loss_are_those_of_training_alone():
    loss = Counting()
    trainer = build(loss)
    for step in range(5):
        trainer.step(inputs(step), torch.ones(SIZE, 4).double())
    assert int(loss.calls) == 5 * 4


ACCEPTED = {
    "signed": lambda o, y: (o * (y - y.mean(1, keepdim=True))).mean(),
    "near zero": lambda o, y: ((o - o.detach()) ** 2).mean() + 1e-6 * o.mean(),
    "policy gradient": lambda o, y: -(log_softmax(o, 1)[:, 0] * (y[:, 0] - 0.5)).mean(),
    "large": lambda o, y: 1e6 * (o - y).abs().mean(),
    "logits": lambda o, y: binary_cross_entropy_with_logits(o, (y > 0.5).to(o)),
    "float32 inside": lambda o, y: mse_loss(o.float(), y.float()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ACCEPTED)
def test_rounding_is_no_difference(case, dtype):
    trainer, plain = build(ACCEPTED[case], given=stages(dtype)), nn.Sequential(*stages(dtype))
    optimizer = sgd(plain.parameters())
    for step in range(8):
        x, y = inputs(step, dtype), torch.rand(SIZE, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        value = ACCEPTED[case](plain(x), y)
        value.backward()
        optimizer.step()
        told = trainer.step(x, y)
    exact = 1e-10 if dtype == torch.float64 and case != "float32 inside" else 1e-4
    assert told == pytest.approx(value.item(), rel=exact, abs=exact)


@pytest.mark.parametrize("small", [True, False])
def test_a_part_of_which_nothing_counts_is_no_number(small, monkeypatch):
    monkeypatch.setattr(comparison, "SMALL", comparison.SMALL if small else 0)
    trainer = build(lambda o, y: cross_entropy(o, y, ignore_index=2))
    for step in range(LATE):
        trainer.step(inputs(step), CLASSES % 2)
    late = CLASSES % 2
    late[8:12] = 2
    with pytest.raises(UsageError, match="not a mean over examples"):
        trainer.step(inputs(LATE), late)
